"""What callers of grouped products hand over: which tensors make one, and which are refused.

Takes the tensors of `kgen.runtime.grouped`, gives their problem. `check_layout` alone reads
elements, and waits for the device to do so. Must not import cache, build or search.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kgen.errors import UnsupportedInput
from kgen.problem import (
    GROUP_ALIGNMENT,
    MAX_EXTENT,
    SCALE_BLOCK,
    TMA_ALIGN_BYTES,
    GemmProblem,
    ceil_div,
    implied,
    round_up,
)
from kgen.quant import E4M3
from kgen.reference import D_DTYPE_NAMES
from kgen.runtime.operands import check_devices

#: By layout: what the tensor's values have to be.
LAYOUTS = ("m_indices", "m_offsets", "masked_m")


@dataclass(frozen=True)
class GroupedInputs:
    """A grouped call: the operands as kernels take them, and the tensor that tells the groups.

    `layout_name` is its name among the caller's arguments (LAYOUTS); `expected_m` the rows of a
    group that a kernel is chosen for, 0 for the average. `recipe` is "block", or "none" with BF16
    operands, whose scales are empty, [0, 0].
    """

    a: torch.Tensor
    sfa: torch.Tensor
    b: torch.Tensor
    sfb: torch.Tensor
    out: torch.Tensor
    layout: torch.Tensor
    layout_name: str
    expected_m: int = 0
    recipe: str = "block"

    @property
    def has_scales(self) -> bool:
        """Whether operands are FP8; else BF16."""
        return self.recipe != "none"

    @property
    def operand_dtype(self) -> torch.dtype:
        """The type that A and B must have."""
        return E4M3 if self.has_scales else torch.bfloat16

    @property
    def is_masked(self) -> bool:
        """Whether the problem's kind is masked, else contiguous."""
        return self.layout_name == "masked_m"

    @property
    def by_index(self) -> bool:
        """Whether the layout tells the group of each row."""
        return self.layout_name == "m_indices"

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The caller's tensors, in the kernel's order."""
        if not self.has_scales:
            return self.a, self.b, self.out, self.layout
        return self.a, self.sfa, self.b, self.sfb, self.out, self.layout

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """The callers' names and the tensors."""
        scales = ("a_scales", "b_scales") if self.has_scales else ()
        names = ("a", *scales[:1], "b", *scales[1:], "out", self.layout_name)
        return list(zip(names, self.tensors(), strict=True))

    def problem(self, num_sms: int) -> GemmProblem:
        """The problem that a kernel solves for this call; no extent is 0."""
        (groups, n, k), rows = self.b.shape, self.a.shape[-2]
        m = min(max(self.expected_m, 1), rows) if self.is_masked else ceil_div(rows, groups)
        kind = "masked" if self.is_masked else "contiguous"
        fields = implied({"recipe": self.recipe, "d_dtype": D_DTYPE_NAMES[self.out.dtype]})
        return GemmProblem(kind, m, n, k, groups=groups, num_sms=num_sms, **fields)


def unpack(  # noqa: PLR0917, what a call gives, in that order
    lhs: Any,
    rhs: Any,
    out: Any,
    layout: tuple[str, Any],
    expected_m: Any = 0,
    recipe: str = "block",
) -> GroupedInputs:
    """GroupedInputs of (a, a_scales), (b, b_scales), out; UnsupportedInput for anything else."""
    for name, pair in (("a", lhs), ("b", rhs)):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            given = _describe(pair) if isinstance(pair, torch.Tensor) else type(pair).__name__
            raise UnsupportedInput(f"expected the pair ({name}, {name}_scales), got {given}")
    tensors = (lhs[0], lhs[1], rhs[0], rhs[1], out, layout[1])
    x = GroupedInputs(*tensors, layout[0], expected_m, recipe)
    for name, tensor in x.named():
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedInput(f"{name} is a {type(tensor).__name__}: expected a torch.Tensor")
    if isinstance(expected_m, bool) or not isinstance(expected_m, int) or expected_m < 0:
        raise UnsupportedInput(f"expected_m={expected_m!r}: expected a whole number of rows")
    return x


def check(x: GroupedInputs) -> None:
    """Raises UnsupportedInput, naming the tensor, what was given and what is needed.

    For a wrong rank, type, shape, device or stride, and for an output that shares memory with
    another tensor.
    """
    for name, tensor in x.named():
        rank = _rank_of(name, x)
        if tensor.layout != torch.strided or tensor.is_neg():
            kind = "a negated view" if tensor.is_neg() else str(tensor.layout)
            raise UnsupportedInput(f"{name} is {kind}: expected plain memory (torch.strided)")
        if tensor.dim() != rank:
            raise UnsupportedInput(f"{name} is {_describe(tensor)}: expected {_shape_of(name, x)}")
        wanted = _dtypes_of(name, x)
        if tensor.dtype not in wanted:
            expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in wanted)
            raise UnsupportedInput(f"{name} is {_describe(tensor)}: expected {expected}")
    _check_shapes(x)
    check_devices(x.named())
    _check_strides(x)


def _describe(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} with strides {tuple(tensor.stride())}"


def _shape_of(name: str, x: GroupedInputs) -> str:
    outer = "G, max M" if x.is_masked else "M"
    return {
        "a": f"[{outer}, K]",
        "a_scales": f"[{outer}, ceil(K/128)]",
        "b": "[G, N, K]",
        "b_scales": "[G, ceil(N/128), ceil(K/128)]",
        "out": f"[{outer}, N]",
        "m_indices": "[M]",
        "m_offsets": "[G+1]",
        "masked_m": "[G]",
    }[name]


def _rank_of(name: str, x: GroupedInputs) -> int:
    if name.startswith("b"):
        return 3
    return 1 if name == x.layout_name else 3 if x.is_masked else 2


def _dtypes_of(name: str, x: GroupedInputs) -> tuple[torch.dtype, ...]:
    if name in ("a", "b"):
        return (x.operand_dtype,)
    if name == "out":
        return tuple(D_DTYPE_NAMES)
    return (torch.float32,) if name.endswith("_scales") else (torch.int32,)


def _check_shapes(x: GroupedInputs) -> None:
    (groups, n, k), m = x.b.shape, x.a.shape[-2]
    outer = [groups, m] if x.is_masked else [m]
    blocks = ceil_div(k, SCALE_BLOCK)
    layout = {"m_indices": m, "m_offsets": groups + 1, "masked_m": groups}[x.layout_name]
    expected = {
        "a": [*outer, k],
        "a_scales": [*outer, blocks],
        "b": [groups, n, k],
        "b_scales": [groups, ceil_div(n, SCALE_BLOCK), blocks],
        "out": [*outer, n],
        x.layout_name: [layout],
    }
    for name, tensor in x.named():
        shape = expected[name]
        if list(tensor.shape) != shape:
            sizes = f"{_shape_of(name, x)} = {shape}, as b is {list(x.b.shape)}"
            raise UnsupportedInput(f"{name} is {_describe(tensor)}: expected {sizes}")
    if max(groups, m, n, k * x.a.element_size()) > MAX_EXTENT:
        raise UnsupportedInput(
            f"groups={groups} m={m} n={n} k={k}: each, and the bytes of K, at most {MAX_EXTENT}"
        )
    if n % 8:
        raise UnsupportedInput(f"N={n}: expected a multiple of 8; pad B to {round_up(n, 8)} rows")
    step = TMA_ALIGN_BYTES // x.a.element_size()
    if k % step:
        raise UnsupportedInput(
            f"K={k}: expected a multiple of {step}; pad A and B to {round_up(k, step)} columns"
        )


def _check_strides(x: GroupedInputs) -> None:
    for name, tensor in x.named():
        if not tensor.numel():
            continue
        sizes = list(zip(tensor.shape, tensor.stride(), strict=True))
        if any(size > 1 and stride == 0 for size, stride in sizes):
            raise UnsupportedInput(
                f"{name} is {_describe(tensor)}, expanded over one value: pass {name}.contiguous()"
            )
        if not name.endswith("_scales") and (reason := _why_unfit(tensor)):
            wanted = (
                "allocate it as torch.empty does"
                if name == "out"
                else f"pass memory of its own, as from {name}.contiguous()"
            )
            raise UnsupportedInput(f"{name} is {_describe(tensor)}: {reason}; {wanted}")
        if name != "out" and _cross(tensor, x.out):
            raise UnsupportedInput(f"out shares memory with {name}: expected an output of its own")


def _why_unfit(tensor: torch.Tensor) -> str:
    """Why the kernel can not use a matrix, groups of them, or a layout in place."""
    size = tensor.element_size()
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        return f"columns {tensor.stride(-1)} elements apart"
    if tensor.dim() == 1:
        return ""
    if tensor.data_ptr() % TMA_ALIGN_BYTES:
        return f"an address that is not a multiple of {TMA_ALIGN_BYTES} bytes"
    least = tensor.shape[-1]
    for extent, stride in zip(tensor.shape[-2::-1], tensor.stride()[-2::-1], strict=True):
        if extent > 1 and stride * size % TMA_ALIGN_BYTES:
            return f"a pitch of {stride * size} bytes, not a multiple of {TMA_ALIGN_BYTES}"
        if extent > 1 and stride < least:
            return f"rows or groups that overlap (a pitch of {stride} elements)"
        least = stride * extent if extent > 1 else least
    return ""


def _cross(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the memory from first to last element of both has bytes in common."""
    (x0, x1), (y0, y1) = _span(x), _span(y)
    return x0 < y1 and y0 < x1


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    if not tensor.numel():
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def check_layout(x: GroupedInputs) -> None:
    """Raises UnsupportedInput where indices, offsets or counts make no sense, with the first place.

    Reads them: waits for the device.
    """
    values, groups, m = x.layout.tolist(), x.b.shape[0], x.a.shape[-2]
    {"m_indices": _check_indices, "m_offsets": _check_offsets, "masked_m": _check_counts}[
        x.layout_name
    ](values, groups, m)


def _check_indices(values: list[int], groups: int, m: int) -> None:
    for row, group in enumerate(values):
        if not -1 <= group < groups:
            raise UnsupportedInput(
                f"m_indices[{row}] is {group}: expected a group from 0 to {groups - 1}, or -1 for "
                "a row to skip"
            )
    for first in range(0, m, GROUP_ALIGNMENT):
        found = sorted({group for group in values[first : first + GROUP_ALIGNMENT] if group >= 0})
        if len(found) > 1:
            raise UnsupportedInput(
                f"m_indices[{first}:{first + GROUP_ALIGNMENT}] has rows of the groups {found[0]} "
                f"and {found[1]}: groups have to start at multiples of {GROUP_ALIGNMENT} rows "
                "(get_m_alignment_for_contiguous_layout()); m_offsets asks for no alignment"
            )


def _check_offsets(values: list[int], groups: int, m: int) -> None:
    if values[0] != 0:
        raise UnsupportedInput(f"m_offsets[0] is {values[0]}: expected 0, the first group's start")
    for group in range(groups):
        if values[group + 1] < values[group]:
            raise UnsupportedInput(
                f"m_offsets[{group + 1}] is {values[group + 1]}, below m_offsets[{group}] = "
                f"{values[group]}: expected offsets that do not fall"
            )
    if values[-1] > m:
        raise UnsupportedInput(
            f"m_offsets[{groups}] is {values[-1]}: expected at most the {m} rows of a"
        )


def _check_counts(values: list[int], groups: int, m: int) -> None:
    for group, count in enumerate(values):
        if not 0 <= count <= m:
            raise UnsupportedInput(
                f"masked_m[{group}] is {count}: expected 0 to {m}, the rows that a has for a group"
            )
