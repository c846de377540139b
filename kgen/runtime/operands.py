"""What callers hand over: which tensors make one GEMM, which are refused, which must be copied.

Takes the tensors of `gemm.gemm_fp8_nt`, gives their `Sizes` and the reasons why the kernel can not
read some of them in place. Touches no data. Must not import cache, build or search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
from kgen.quant import E4M3
from kgen.reference import D_DTYPE_NAMES


@dataclass(frozen=True)
class Sizes:
    """M, N, K and the output type of one call."""

    m: int
    n: int
    k: int
    d_dtype: str

    def problem(self, num_sms: int) -> GemmProblem:
        """The problem that a kernel solves for these sizes, N and K filled up to what it takes."""
        n, k = round_up(self.n, 8), round_up(self.k, 16)
        return GemmProblem("dense", self.m, n, k, d_dtype=self.d_dtype, num_sms=num_sms)


@dataclass(frozen=True)
class Inputs:
    """The five tensors of a call, in the order kernels take them."""

    a: torch.Tensor
    sfa: torch.Tensor
    b: torch.Tensor
    sfb: torch.Tensor
    out: torch.Tensor

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The callers' names and the tensors."""
        names = ("a", "a_scales", "b", "b_scales", "out")
        return zip(names, self.tensors(), strict=True)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors, in order."""
        return self.a, self.sfa, self.b, self.sfb, self.out


def unpack(lhs: Any, rhs: Any, out: Any) -> Inputs:
    """The tensors in (a, a_scales), (b, b_scales), out; UnsupportedInput for anything else."""
    for name, pair in (("a", lhs), ("b", rhs)):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            given = _describe(pair) if isinstance(pair, torch.Tensor) else type(pair).__name__
            raise UnsupportedInput(f"expected the pair ({name}, {name}_scales), got {given}")
    inputs = Inputs(lhs[0], lhs[1], rhs[0], rhs[1], out)
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
        if tensor.dim() != 2:
            raise UnsupportedInput(f"{name} is {_describe(tensor)}: expected two dimensions")
    _check_dtypes(x)
    sizes = _check_shapes(x)
    _check_devices(x)
    _check_strides(x)
    for name, tensor in x.named():
        if name != "out" and _overlap(tensor, x.out):
            raise UnsupportedInput(f"out shares memory with {name}: expected an output of its own")
    return sizes


def unfit_matrices(x: Inputs) -> dict[str, str]:
    """Name of each matrix that the kernel can not use in place, with the reason.

    Scales are never among them: the kernel reads those through their strides.
    """
    found = {}
    for name, tensor in x.named():
        if not name.endswith("_scales") and (reason := _why_copy(tensor)):
            found[name] = reason
    return found


def _describe(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} with strides {tuple(tensor.stride())}"


def _check_dtypes(x: Inputs) -> None:
    casts = (("a", x.a, "per_token_cast_to_fp8"), ("b", x.b, "per_block_cast_to_fp8"))
    for name, tensor, cast in casts:
        if tensor.dtype != E4M3:
            hint = (
                f"; ({name}, {name}_scales) = {cast}({name})"
                if tensor.dtype in D_DTYPE_NAMES
                else ""
            )
            raise UnsupportedInput(f"{name} is {_describe(tensor)}: expected float8_e4m3fn{hint}")
    for name, tensor in (("a_scales", x.sfa), ("b_scales", x.sfb)):
        if tensor.dtype != torch.float32:
            raise UnsupportedInput(f"{name} is {_describe(tensor)}: expected float32")
    if x.out.dtype not in D_DTYPE_NAMES:
        raise UnsupportedInput(f"out is {_describe(x.out)}: expected bfloat16, float16 or float32")


def _check_shapes(x: Inputs) -> Sizes:
    (m, k), (n, k_b) = x.a.shape, x.b.shape
    if k_b != k:
        hint = "; it looks like [K, N]: pass b.t().contiguous()" if n == k else ""
        if m == k_b:
            hint = "; a looks like [K, M]: pass a.t().contiguous()"
        raise UnsupportedInput(
            f"a is {_describe(x.a)} and b is {_describe(x.b)}: expected [M, K] and [N, K]{hint}"
        )
    if max(m, n, k) > MAX_EXTENT:
        raise UnsupportedInput(f"m={m} n={n} k={k}: expected each at most {MAX_EXTENT}")
    if x.out.shape != (m, n):
        hint = "; it looks transposed: pass out[M, N]" if x.out.shape == (n, m) else ""
        raise UnsupportedInput(f"out is {_describe(x.out)}: expected [{m}, {n}]{hint}")
    blocks = ceil_div(k, SCALE_BLOCK)
    _check_scales("a", x.sfa, (m, blocks), (ceil_div(m, SCALE_BLOCK), blocks))
    _check_scales("b", x.sfb, (ceil_div(n, SCALE_BLOCK), blocks), (n, blocks))
    return Sizes(m, n, k, D_DTYPE_NAMES[x.out.dtype])


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
    raise UnsupportedInput(
        f"{name}_scales is {_describe(scales)}: expected {list(expected)}, row-major with strides "
        f"({expected[1]}, 1) or column-major with strides (1, pitch >= {expected[0]}){hint}"
    )


def _check_devices(x: Inputs) -> None:
    devices = {name: tensor.device for name, tensor in x.named()}
    if len(set(devices.values())) > 1:
        given = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise UnsupportedInput(f"{given}: expected all tensors on one device")
    if x.a.device.type not in ("cpu", "cuda"):
        raise UnsupportedInput(f"tensors on {x.a.device}: expected a CPU or CUDA device")


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


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two matrices share memory; unequal pitches count as sharing where spans cross."""
    (x0, x1), (y0, y1) = _span(x), _span(y)
    if x1 <= y0 or y1 <= x0:
        return False
    pitches = {t.stride(0) * t.element_size() for t in (x, y) if t.shape[0] > 1}
    if len(pitches) != 1 or any(t.stride(1) != 1 and t.shape[1] > 1 for t in (x, y)):
        return True
    # Column windows of one pitched buffer: apart unless they meet within a row or wrap around.
    pitch = pitches.pop()
    widths = [t.shape[1] * t.element_size() for t in (x, y)]
    offset = (y0 - x0) % pitch
    return offset < widths[0] or offset + widths[1] > pitch
