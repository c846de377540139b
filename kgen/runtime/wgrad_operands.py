"""What callers of weight gradients hand over: which tensors make one, and which are refused.

Takes the arguments of `kgen.runtime.wgrad`, gives their problem. `check_values` alone reads
elements, and waits for the device to do so. Must not import cache, build or search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from kgen.errors import UnsupportedInput
from kgen.problem import (
    MAX_EXTENT,
    SCALE_BLOCK,
    TMA_ALIGN_BYTES,
    GemmProblem,
    ceil_div,
    round_up,
)
from kgen.reference import FP8_DTYPES, OPERAND_DTYPE_NAMES
from kgen.runtime.operands import check_devices, share_memory

#: What makes operands that are summed over their rows, such as tokens.
_CAST: Final = 'kgen.runtime.casts.cast_to_fp8(x, "token", direction="transposed")'


@dataclass(frozen=True)
class WgradInputs:
    """A call: the tensors as the caller gives them, and whether D is added to.

    `ks` is None of one product; else numbers, or an int32 tensor. `flat`: a and b have one
    dimension, each group's matrix one after another.
    """

    a: torch.Tensor
    sfa: torch.Tensor
    b: torch.Tensor
    sfb: torch.Tensor
    out: torch.Tensor
    accumulate: bool
    ks: tuple[int, ...] | torch.Tensor | None = None

    @property
    def kind(self) -> str:
        """The problem's kind."""
        return "wgrad" if self.ks is None else "k_grouped"

    @property
    def flat(self) -> bool:
        """Whether each group's operands are matrices of their own."""
        return self.ks is not None and self.a.dim() == 1

    @property
    def columns(self) -> int:
        """K of one product; of groups all their columns."""
        return self.a.numel() // max(self.out.shape[-2], 1) if self.flat else self.a.shape[-1]

    @property
    def recipe(self) -> str:
        """What the scales of B belong to, by their shape."""
        blocks = ceil_div(self.out.shape[-1], SCALE_BLOCK)
        is_block = self.ks is None and self.sfb.shape[0] == blocks != self.out.shape[-1]
        return "block" if is_block else "vector"

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors in the kernel's order; ks last, if it is one."""
        five = self.a, self.sfa, self.b, self.sfb, self.out
        return (*five, self.ks) if isinstance(self.ks, torch.Tensor) else five

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """The callers' names and the tensors."""
        names = ("a", "a_scales", "b", "b_scales", "out", "ks")
        return list(zip(names, self.tensors(), strict=False))

    def as_matrices(self) -> WgradInputs:
        """The same with scales [M, K/128] and [N, K/128], views: flat ones may be turned."""
        if not self.flat:
            return self
        blocks = self.columns // SCALE_BLOCK
        sfa, sfb = (
            s.t() if tuple(s.shape) == (blocks, rows) else s
            for s, rows in zip((self.sfa, self.sfb), self.out.shape[-2:], strict=True)
        )
        return replace(self, sfa=sfa, sfb=sfb)

    def problem(self, num_sms: int) -> GemmProblem:
        """The problem that a kernel solves for this call; no extent is 0."""
        m, n = self.out.shape[-2:]
        groups = self.out.shape[0] if self.ks is not None else 1
        k = self.columns
        if self.ks is not None:  # the average
            k = round_up(max(ceil_div(k, groups), 1), SCALE_BLOCK)
        return GemmProblem.of(
            self.kind,
            m,
            n,
            k,
            groups=groups,
            recipe=self.recipe,
            a_dtype=OPERAND_DTYPE_NAMES[self.a.dtype],
            b_dtype=OPERAND_DTYPE_NAMES[self.b.dtype],
            accumulate=self.accumulate,
            num_sms=num_sms,
        )


def unpack(lhs: Any, rhs: Any, out: Any, accumulate: Any, ks: Any = None) -> WgradInputs:
    """WgradInputs of (a, a_scales), (b, b_scales), out, ks; UnsupportedInput for anything else."""
    for name, pair in (("a", lhs), ("b", rhs)):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            given = _describe(pair) if isinstance(pair, torch.Tensor) else type(pair).__name__
            raise UnsupportedInput(f"expected the pair ({name}, {name}_scales), got {given}")
    if not isinstance(accumulate, bool):
        raise UnsupportedInput(f"accumulate={accumulate!r}: expected True or False")
    if ks is not None and not isinstance(ks, torch.Tensor):
        if not isinstance(ks, Sequence) or not all(type(k) is int for k in ks):
            raise UnsupportedInput(f"ks={ks!r}: expected whole numbers, or an int32 tensor")
        ks = tuple(ks)
    x = WgradInputs(lhs[0], lhs[1], rhs[0], rhs[1], out, accumulate, ks)
    for name, tensor in x.named():
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedInput(f"{name} is a {type(tensor).__name__}: expected a torch.Tensor")
    return x


def check(x: WgradInputs) -> None:
    """Raises UnsupportedInput, naming the tensor, what was given and what is needed.

    For a wrong rank, type, shape, device or stride, for columns of groups that are no multiples of
    128, and for an output that shares memory with another tensor.
    """
    for name, tensor in x.named():
        if tensor.layout != torch.strided or tensor.is_neg():
            kind = "a negated view" if tensor.is_neg() else str(tensor.layout)
            raise UnsupportedInput(f"{name} is {kind}: expected plain memory (torch.strided)")
    _check_types(x)
    _check_shapes(x)
    check_devices(x.named())
    _check_strides(x)


def check_values(x: WgradInputs) -> None:
    """Raises UnsupportedInput where ks on the device makes no sense. Reads it: waits for it."""
    if isinstance(x.ks, torch.Tensor):
        _check_ks(x.ks.tolist(), x.columns, exact=False)


def _describe(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} with strides {tuple(tensor.stride())}"


def _check_types(x: WgradInputs) -> None:
    for name, tensor in (("a", x.a), ("b", x.b)):
        if tensor.dtype not in FP8_DTYPES:
            raise UnsupportedInput(
                f"{name} is {_describe(tensor)}: expected float8_e4m3fn or float8_e5m2, "
                f"from {_CAST}"
            )
    wanted = [("a_scales", x.sfa), ("b_scales", x.sfb), ("out", x.out)]
    for name, tensor in wanted:
        if tensor.dtype != torch.float32:
            raise UnsupportedInput(f"{name} is {_describe(tensor)}: expected float32")
    if isinstance(x.ks, torch.Tensor) and (x.ks.dtype != torch.int32 or x.ks.dim() != 1):
        raise UnsupportedInput(f"ks is {_describe(x.ks)}: expected int32[G]")


def _check_shapes(x: WgradInputs) -> None:
    grouped = x.ks is not None
    if x.out.dim() != 2 + grouped:
        wanted = "[G, M, N]" if grouped else "[M, N]"
        raise UnsupportedInput(f"out is {_describe(x.out)}: expected {wanted}")
    ranks = (1, 2) if grouped else (2,)
    if x.a.dim() not in ranks or x.b.dim() != x.a.dim():
        words = " or both with one dimension" if grouped else ""
        raise UnsupportedInput(
            f"a is {_describe(x.a)} and b is {_describe(x.b)}: expected [M, K] and [N, K]{words}"
        )
    m, n = x.out.shape[-2:]
    k = x.columns
    if not x.flat and _looks_untransposed(x):
        raise UnsupportedInput(
            f"a is {_describe(x.a)} and b is {_describe(x.b)}, for out{list(x.out.shape)}: "
            f"expected [M, K] and [N, K]; they look untransposed: a gradient sums over rows, so "
            f"cast each by {_CAST}"
        )
    for name, tensor, rows in (("a", x.a, m), ("b", x.b, n)):
        shape = [rows * k] if x.flat else [rows, k]
        if list(tensor.shape) != shape:
            raise UnsupportedInput(
                f"{name} is {_describe(tensor)}: expected {shape}, as out is {list(x.out.shape)} "
                f"and a is {list(x.a.shape)}"
            )
    if max(m, n, k) > MAX_EXTENT:
        raise UnsupportedInput(f"m={m} n={n} k={k}: each at most {MAX_EXTENT}")
    if n % 8:
        raise UnsupportedInput(
            f"N={n}: expected a multiple of 8; pad B and out to {round_up(n, 8)}"
        )
    step = SCALE_BLOCK if grouped else TMA_ALIGN_BYTES
    if k % step:
        raise UnsupportedInput(
            f"K={k}: expected a multiple of {step}; pad what is summed over with zeros to "
            f"{round_up(k, step)}"
        )
    _check_scales(x.as_matrices(), m, n, ceil_div(k, SCALE_BLOCK))
    if grouped:
        _check_groups(x, k)


def _looks_untransposed(x: WgradInputs) -> bool:
    """Whether both have K rows: what is summed over comes first."""
    m, n = x.out.shape[-2:]
    as_expected = x.a.shape[0] == m and x.b.shape[0] == n and x.a.shape[1] == x.b.shape[1]
    turned = x.a.shape[0] == x.b.shape[0] and (x.a.shape[1], x.b.shape[1]) == (m, n)
    return turned and not as_expected


def _check_scales(x: WgradInputs, m: int, n: int, blocks: int) -> None:
    of_b = [(n, blocks)] if x.ks is not None else [(n, blocks), (ceil_div(n, SCALE_BLOCK), blocks)]
    for name, scales, shapes in (("a", x.sfa, [(m, blocks)]), ("b", x.sfb, of_b)):
        if tuple(scales.shape) not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            hint = f"; those of {_CAST} fit"
            if tuple(scales.shape) == (blocks, shapes[0][0]):
                hint = f"; they look transposed: pass {name}_scales.t(), which needs no copy"
            raise UnsupportedInput(f"{name}_scales is {_describe(scales)}: expected {wanted}{hint}")


def _check_groups(x: WgradInputs, k: int) -> None:
    groups = x.out.shape[0]
    assert x.ks is not None, "of groups"
    if len(x.ks) != groups:
        raise UnsupportedInput(f"{len(x.ks)} ks, out is {list(x.out.shape)}: expected {groups} ks")
    if isinstance(x.ks, torch.Tensor):
        if x.flat:
            raise UnsupportedInput(
                "a has one dimension and ks is a tensor: where each group's matrix begins the host "
                "has to know; give ks as numbers, or a as [M, K] and b as [N, K]"
            )
        if groups > 1 and x.ks.stride(0) != 1:
            raise UnsupportedInput(f"ks is {_describe(x.ks)}: expected it contiguous")
    else:
        _check_ks(x.ks, k, exact=True)


def _check_ks(ks: Sequence[int], columns: int, *, exact: bool) -> None:
    for group, k in enumerate(ks):
        if k < 0 or k % SCALE_BLOCK:
            raise UnsupportedInput(
                f"ks[{group}] is {k}: expected a multiple of {SCALE_BLOCK}, since a scale belongs "
                f"to {SCALE_BLOCK} columns of one group; pad the group with zeros"
            )
    total = sum(ks)
    if total > columns or (exact and total < columns):
        wanted = "as many" if exact else "no more"
        raise UnsupportedInput(f"ks add up to {total}, a has {columns} columns: expected {wanted}")


def _check_strides(x: WgradInputs) -> None:
    for name, tensor in x.named():
        if not tensor.numel():
            continue
        sizes = list(zip(tensor.shape, tensor.stride(), strict=True))
        if any(size > 1 and stride == 0 for size, stride in sizes):
            raise UnsupportedInput(
                f"{name} is {_describe(tensor)}, expanded over one value: pass {name}.contiguous()"
            )
        if name in ("a", "b", "out") and (reason := _why_unfit(tensor)):
            wanted = "allocate it as torch.zeros does" if name == "out" else f"cast it by {_CAST}"
            raise UnsupportedInput(f"{name} is {_describe(tensor)}: {reason}; {wanted}")
        if name != "out" and share_memory(x.out, tensor):
            raise UnsupportedInput(f"out shares memory with {name}: expected an output of its own")


def _why_unfit(tensor: torch.Tensor) -> str:
    """Why the kernel can not use a matrix, or groups of them, in place."""
    size = tensor.element_size()
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        return f"columns {tensor.stride(-1)} elements apart"
    if tensor.data_ptr() % TMA_ALIGN_BYTES:
        return f"an address that is not a multiple of {TMA_ALIGN_BYTES} bytes"
    least = tensor.shape[-1]
    for extent, stride in zip(tensor.shape[-2::-1], tensor.stride()[-2::-1], strict=True):
        if tensor.dim() == 1 or extent == 1:
            continue
        if stride * size % TMA_ALIGN_BYTES:
            return f"a pitch of {stride * size} bytes, not a multiple of {TMA_ALIGN_BYTES}"
        if stride < least:
            return f"rows or groups that overlap (a pitch of {stride} elements)"
        least = stride * extent
    return ""
