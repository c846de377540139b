"""What callers hand over: which tensors make one GEMM, which are refused, which must be copied.

Takes the arguments of `gemm.gemm_fp8_nt`, or of `bf16.bf16_gemm_nt`, gives their `Sizes` and the
reasons why the kernel can not read some of them in place. Touches no data. Must not import cache,
build or search.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    k_step,
    round_up,
    scale_shapes,
)
from kgen.reference import D_DTYPE_NAMES, FP8_DTYPES, OPERAND_DTYPE_NAMES

#: What scales of FP8 operands may belong to, in the order that their shapes are tried.
FP8_RECIPES: Final = ("block", "row", "tensor")
#: Stands for the scales of operands that have none, wherever those lie.
NO_SCALES: Final = torch.empty(0, 0)


@dataclass(frozen=True)
class Sizes:
    """M, N, K of one call, and the fields of its problem that its tensors decide."""

    m: int
    n: int
    k: int
    d_dtype: str
    recipe: str = "block"
    a_dtype: str = "e4m3"
    b_dtype: str = "e4m3"
    bias: bool = False
    fast_accum: bool = False

    def problem(self, num_sms: int, batch_invariant: bool = False) -> GemmProblem:
        """The problem that a kernel solves for these sizes, N and K filled up to what it takes."""
        return GemmProblem(
            "dense",
            self.m,
            round_up(self.n, 8),
            round_up(self.k, k_step(self.a_dtype)),
            recipe=self.recipe,
            a_dtype=self.a_dtype,
            b_dtype=self.b_dtype,
            d_dtype=self.d_dtype,
            bias=self.bias,
            fast_accum=self.fast_accum,
            batch_invariant=batch_invariant,
            num_sms=num_sms,
        )


@dataclass(frozen=True)
class Inputs:
    """The tensors of a call, in the order kernels take them, and its options."""

    a: torch.Tensor
    sfa: torch.Tensor
    b: torch.Tensor
    sfb: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor | None = None
    recipe: str | None = None
    fast_accum: bool = False

    @property
    def has_scales(self) -> bool:
        """Whether operands are FP8; else BF16."""
        return self.recipe != "none"

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The callers' names and the tensors."""
        scales = ("a_scales", "b_scales") if self.has_scales else ()
        names = ("a", *scales[:1], "b", *scales[1:], "out", "bias")
        return zip(names, self.tensors(), strict=False)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The caller's tensors, in order; the bias last, if there is one."""
        given = self.operands()
        return given if self.has_scales else (self.a, self.b, *given[4:])

    def operands(self) -> tuple[torch.Tensor, ...]:
        """The tensors as kernels take them, scales that are none among them."""
        five = self.a, self.sfa, self.b, self.sfb, self.out
        return five if self.bias is None else (*five, self.bias)


def unpack(  # noqa: PLR0917, what a call gives, in that order
    lhs: Any,
    rhs: Any,
    out: Any,
    bias: Any = None,
    recipe: str | None = None,
    fast_accum: bool = False,
) -> Inputs:
    """The tensors in (a, a_scales), (b, b_scales), out, bias; else raises UnsupportedInput."""
    for name, pair in (("a", lhs), ("b", rhs)):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            given = _describe(pair) if isinstance(pair, torch.Tensor) else type(pair).__name__
            raise UnsupportedInput(f"expected the pair ({name}, {name}_scales), got {given}")
    if recipe is not None and recipe not in FP8_RECIPES:
        hint = "; scales of token and block casts are 'block'" if recipe == "token" else ""
        raise UnsupportedInput(f"recipe={recipe!r}: expected one of {', '.join(FP8_RECIPES)}{hint}")
    if not isinstance(fast_accum, bool):
        raise UnsupportedInput(f"fast_accum={fast_accum!r}: expected True or False")
    return _all_tensors(Inputs(lhs[0], lhs[1], rhs[0], rhs[1], out, bias, recipe, fast_accum))


def unpack_bf16(a: Any, b: Any, out: Any, bias: Any = None) -> Inputs:
    """The tensors of a call with BF16 operands; UnsupportedInput for anything else."""
    return _all_tensors(Inputs(a, NO_SCALES, b, NO_SCALES, out, bias, "none"))


def _all_tensors(inputs: Inputs) -> Inputs:
    for name, tensor in inputs.named():
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedInput(f"{name} is a {type(tensor).__name__}: expected a torch.Tensor")
    return inputs


def check(x: Inputs) -> Sizes:
    """The sizes of a call that can be served, by a kernel or otherwise.

    Raises UnsupportedInput, naming the tensor, what was given and what is needed, for a wrong
    rank, type, shape, device or stride, and for an output that shares memory with an input.
    """
    for name, tensor in x.named():
        if tensor.layout != torch.strided or tensor.is_neg():
            kind = "a negated view" if tensor.is_neg() else str(tensor.layout)
            raise UnsupportedInput(f"{name} is {kind}: expected plain memory (torch.strided)")
        if tensor.dim() != 2 and name in ("a", "b", "out"):
            raise UnsupportedInput(f"{name} is {_describe(tensor)}: expected two dimensions")
    _check_dtypes(x)
    sizes = _check_shapes(x)
    check_devices(x.named())
    _check_strides(x)
    for name, tensor in x.named():
        if name != "out" and share_memory(tensor, x.out):
            raise UnsupportedInput(f"out shares memory with {name}: expected an output of its own")
    return sizes


def as_matrices(x: Inputs, recipe: str) -> Inputs:
    """The same call with scales of two dimensions, as `scale_shapes` says; views, no copies."""
    if recipe in ("block", "none"):
        return x
    if recipe == "tensor":
        return replace(x, sfa=x.sfa.view(1, 1), sfb=x.sfb.view(1, 1))
    return replace(x, sfa=_as_column(x.sfa), sfb=_as_column(x.sfb))


def _as_column(scales: torch.Tensor) -> torch.Tensor:
    if scales.dim() == 1:
        return scales.unsqueeze(1)
    return scales if scales.shape[1] == 1 else scales.t()


def unfit_matrices(x: Inputs) -> dict[str, str]:
    """Name of each matrix, or bias, that the kernel can not use in place, with the reason.

    Scales are never among them: the kernel reads those through their strides.
    """
    matrices = (("a", x.a), ("b", x.b), ("out", x.out))
    found = {name: reason for name, tensor in matrices if (reason := _why_copy(tensor))}
    if x.bias is not None and (x.bias.stride(0) != 1 or x.bias.data_ptr() % 4):
        found["bias"] = "elements apart, or an address that is not a multiple of 4 bytes"
    return found


def _describe(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} with strides {tuple(tensor.stride())}"


def _check_dtypes(x: Inputs) -> None:
    casts = (("a", x.a, "per_token_cast_to_fp8"), ("b", x.b, "per_block_cast_to_fp8"))
    for name, tensor, cast in casts:
        if not x.has_scales:
            if tensor.dtype != torch.bfloat16:
                hint = "; gemm_fp8_nt takes FP8" if tensor.dtype in FP8_DTYPES else ""
                raise UnsupportedInput(f"{name} is {_describe(tensor)}: expected bfloat16{hint}")
        elif tensor.dtype not in FP8_DTYPES:
            hint = (
                f"; ({name}, {name}_scales) = {cast}({name})"
                if tensor.dtype in D_DTYPE_NAMES
                else ""
            )
            raise UnsupportedInput(
                f"{name} is {_describe(tensor)}: expected float8_e4m3fn or float8_e5m2{hint}"
            )
    for name, tensor in (("a_scales", x.sfa), ("b_scales", x.sfb)):
        if tensor.dtype != torch.float32:
            raise UnsupportedInput(f"{name} is {_describe(tensor)}: expected float32")
    if x.out.dtype not in D_DTYPE_NAMES:
        raise UnsupportedInput(f"out is {_describe(x.out)}: expected bfloat16, float16 or float32")
    if x.bias is not None and x.bias.dtype != x.out.dtype:
        given, wanted = _describe(x.bias), str(x.out.dtype).removeprefix("torch.")
        raise UnsupportedInput(f"bias is {given}: expected out's type, {wanted}")


def _check_shapes(x: Inputs) -> Sizes:
    (m, k), (n, k_b) = x.a.shape, x.b.shape
    if k_b != k:
        hint = "; it looks like [K, N]: pass b.t().contiguous()" if n == k else ""
        if m == k_b:
            hint = "; a looks like [K, M]: pass a.t().contiguous()"
        raise UnsupportedInput(
            f"a is {_describe(x.a)} and b is {_describe(x.b)}: expected [M, K] and [N, K]{hint}"
        )
    if max(m, n, k * x.a.element_size()) > MAX_EXTENT:
        raise UnsupportedInput(
            f"m={m} n={n} k={k}: expected each, and the bytes of K, at most {MAX_EXTENT}"
        )
    if x.out.shape != (m, n):
        hint = "; it looks transposed: pass out[M, N]" if x.out.shape == (n, m) else ""
        raise UnsupportedInput(f"out is {_describe(x.out)}: expected [{m}, {n}]{hint}")
    if x.bias is not None and x.bias.shape != (n,):
        raise UnsupportedInput(f"bias is {_describe(x.bias)}: expected [{n}]")
    return Sizes(
        m,
        n,
        k,
        d_dtype=D_DTYPE_NAMES[x.out.dtype],
        recipe=_recipe_of(x, m, n, k),
        a_dtype=OPERAND_DTYPE_NAMES[x.a.dtype],
        b_dtype=OPERAND_DTYPE_NAMES[x.b.dtype],
        bias=x.bias is not None,
        fast_accum=x.fast_accum,
    )


def _recipe_of(x: Inputs, m: int, n: int, k: int) -> str:
    """The recipe that the scales' shapes say. Where several fit they mean the same numbers."""
    if not x.has_scales:
        return "none"
    if x.fast_accum and x.recipe == "block":
        raise UnsupportedInput(
            "fast_accum=True with recipe='block': each 128 columns have scales of their own; "
            "leave it out"
        )
    asked = FP8_RECIPES if x.recipe is None else (x.recipe,)
    for recipe in asked:
        if _fits(recipe, x, m, n, k) and not (x.fast_accum and recipe == "block"):
            return recipe
    if asked != FP8_RECIPES and x.recipe != "block":
        of_a, of_b = ("[]", "[]") if x.recipe == "tensor" else (f"[{m}]", f"[{n}]")
        raise UnsupportedInput(
            f"a_scales is {_describe(x.sfa)} and b_scales is {_describe(x.sfb)}: expected {of_a} "
            f"and {of_b} for recipe={x.recipe!r}"
        )
    if x.fast_accum:
        raise UnsupportedInput(
            f"a_scales is {_describe(x.sfa)} and b_scales is {_describe(x.sfb)}: fast_accum=True "
            f"is for one scale a row, [{m}] and [{n}], or one scale each"
        )
    blocks = ceil_div(k, SCALE_BLOCK)
    _check_scales("a", x.sfa, (m, blocks), (ceil_div(m, SCALE_BLOCK), blocks))
    _check_scales("b", x.sfb, (ceil_div(n, SCALE_BLOCK), blocks), (n, blocks))
    raise AssertionError("one of the scales fits no recipe")


def _fits(recipe: str, x: Inputs, m: int, n: int, k: int) -> bool:
    if recipe == "block":
        return (tuple(x.sfa.shape), tuple(x.sfb.shape)) == scale_shapes(recipe, m, n, k)
    if recipe == "tensor":
        return x.sfa.numel() == 1 == x.sfb.numel()
    return tuple(x.sfa.shape) in ((m,), (m, 1)) and tuple(x.sfb.shape) in ((n,), (n, 1), (1, n))


def _check_scales(
    name: str, scales: torch.Tensor, expected: tuple[int, int], of_the_other_cast: tuple[int, int]
) -> None:
    if scales.shape == expected:
        return
    casts = ("per_token_cast_to_fp8", "per_block_cast_to_fp8")
    right, other = casts if name == "a" else casts[::-1]
    hint = ""
    if scales.shape == expected[::-1]:
        hint = f"; they look transposed: pass {name}_scales.t(), which needs no copy"
    elif scales.shape == of_the_other_cast:
        hint = f"; they look like those of {other}: cast {name} with {right}"
    rows = "M" if name == "a" else "N"
    raise UnsupportedInput(
        f"{name}_scales is {_describe(scales)}: expected {list(expected)}, row-major with strides "
        f"({expected[1]}, 1) or column-major with strides (1, pitch >= {expected[0]}){hint}; or "
        f"both scales by rows ({name}_scales [{rows}]), or both single values"
    )


def check_devices(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises UnsupportedInput unless all tensors are on one device, a CPU or CUDA."""
    devices = {name: tensor.device for name, tensor in named}
    if len(set(devices.values())) > 1:
        given = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise UnsupportedInput(f"{given}: expected all tensors on one device")
    for device in devices.values():
        if device.type not in ("cpu", "cuda"):
            raise UnsupportedInput(f"tensors on {device}: expected a CPU or CUDA device")


def _check_strides(x: Inputs) -> None:
    for name, tensor in x.named():
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            if stride == 0 and size > 1:
                raise UnsupportedInput(
                    f"{name} is {_describe(tensor)}, expanded over one value: pass "
                    f"{name}.contiguous()"
                )
    (rows, cols), (row_stride, col_stride) = x.out.shape, x.out.stride()
    apart = row_stride >= (cols - 1) * col_stride + 1 or col_stride >= (rows - 1) * row_stride + 1
    if min(rows, cols) > 1 and not apart:
        raise UnsupportedInput(f"out is {_describe(x.out)}: its elements share memory")


def _why_copy(tensor: torch.Tensor) -> str:
    (rows, cols), (pitch, step) = tensor.shape, tensor.stride()
    if cols > 1 and step != 1:
        return f"columns {step} elements apart"
    if tensor.data_ptr() % TMA_ALIGN_BYTES:
        return f"an address that is not a multiple of {TMA_ALIGN_BYTES} bytes"
    pitch_bytes = (pitch if rows > 1 else cols) * tensor.element_size()
    if pitch_bytes % TMA_ALIGN_BYTES:
        return f"a row pitch of {pitch_bytes} bytes, not a multiple of {TMA_ALIGN_BYTES}"
    if rows > 1 and pitch < cols:
        return f"rows that overlap (pitch {pitch} of {cols} columns)"
    return ""


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and byte after the last."""
    if not tensor.numel():
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def share_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two matrices share memory; unequal pitches count as sharing where spans cross."""
    (x0, x1), (y0, y1) = _span(x), _span(y)
    if x1 <= y0 or y1 <= x0:
        return False
    if x.dim() != 2:
        return True
    pitches = {t.stride(0) * t.element_size() for t in (x, y) if t.shape[0] > 1}
    if len(pitches) != 1 or any(t.stride(1) != 1 and t.shape[1] > 1 for t in (x, y)):
        return True
    # Column windows of one pitched buffer: apart unless they meet within a row or wrap around.
    pitch = pitches.pop()
    widths = [t.shape[1] * t.element_size() for t in (x, y)]
    offset = (y0 - x0) % pitch
    return offset < widths[0] or offset + widths[1] > pitch
