"""Grouped GEMMs as PyTorch operators, `torch.ops.kgen.m_grouped_*`, for torch.compile and export.

    m_grouped_gemm_fp8_nt_contiguous(a, a_scales, b, b_scales, Tensor(a!) out,
                                     Tensor? m_indices, Tensor? m_offsets) -> ()
    m_grouped_gemm_fp8_nt_masked(a, a_scales, b, b_scales, Tensor(a!) out, masked_m,
                                 SymInt expected_m) -> ()

Shapes and types as in the functions of the same names in `kgen.runtime.grouped`. Takes the
functions that run them; gives the operators, with stand-ins in which every size may be symbolic.
Imports torch and operands; touches no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from kgen.quant import E4M3
from kgen.reference import D_DTYPE_NAMES
from kgen.runtime.grouped_operands import GroupedInputs
from kgen.runtime.ops import check, define, stands_for_another

Tensor = torch.Tensor

_OPERANDS: Final = "Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, Tensor(a!) out"
_CONTIGUOUS: Final = "m_grouped_gemm_fp8_nt_contiguous"
_MASKED: Final = "m_grouped_gemm_fp8_nt_masked"
_SCHEMAS: Final = {
    _CONTIGUOUS: f"({_OPERANDS}, Tensor? m_indices, Tensor? m_offsets) -> ()",
    _MASKED: f"({_OPERANDS}, Tensor masked_m, SymInt expected_m) -> ()",
}


def register(contiguous: Callable[..., None], masked: Callable[..., None]) -> None:
    """Define the operators, once a process, by the functions that run them."""
    kernels: dict[str, Callable[..., None]] = {
        _CONTIGUOUS: lambda a, sfa, b, sfb, out, indices, offsets: contiguous(
            (a, sfa), (b, sfb), out, indices, m_offsets=offsets
        ),
        _MASKED: lambda a, sfa, b, sfb, out, counts, expected_m: masked(
            (a, sfa), (b, sfb), out, counts, expected_m
        ),
    }
    fakes: dict[str, Callable[..., Any]] = {_CONTIGUOUS: _fake_contiguous, _MASKED: _fake_masked}
    define(_SCHEMAS, kernels, fakes)


def call(x: GroupedInputs) -> None:
    """The call through its operator, for tensors that stand for others."""
    kgen, operands = torch.ops.kgen, x.tensors()[:-1]
    if x.is_masked:
        masked = (
            kgen.m_grouped_gemm_fp8_nt_masked
            if x.has_scales
            else kgen.m_grouped_bf16_gemm_nt_masked
        )
        masked(*operands, x.layout, x.expected_m)
        return
    contiguous = (
        kgen.m_grouped_gemm_fp8_nt_contiguous
        if x.has_scales
        else kgen.m_grouped_bf16_gemm_nt_contiguous
    )
    layouts = (x.layout, None) if x.by_index else (None, x.layout)
    contiguous(*operands, *layouts)


def stand_for_others(x: GroupedInputs) -> bool:
    """Whether PyTorch must see the call: a tracer's tensors, or subclasses that wrap tensors."""
    return any(stands_for_another(tensor) for tensor in x.tensors())


def _fake_contiguous(  # noqa: PLR0917, the operator's arguments
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    out: Tensor,
    indices: Tensor | None,
    offsets: Tensor | None,
) -> None:
    _check_operands(a, sfa, b, sfb, out)
    check(a.dim() == 2, "a", a, "[M, K]")
    check(out.shape[0] == a.shape[0], "out", out, f"[{a.shape[0]}, {b.shape[1]}]")
    for name, layout in (("m_indices", indices), ("m_offsets", offsets)):
        if layout is not None:
            check(layout.dim() == 1 and layout.dtype == torch.int32, name, layout, "int32 [rows]")


def _fake_masked(  # noqa: PLR0917, the operator's arguments
    a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, out: Tensor, counts: Tensor, expected_m: int
) -> None:
    _check_operands(a, sfa, b, sfb, out)
    check(a.dim() == 3, "a", a, "[G, max M, K]")
    check(out.dim() == 3 and out.shape[1] == a.shape[1], "out", out, "[G, max M, N]")
    good = counts.dim() == 1 and counts.dtype == torch.int32
    check(good, "masked_m", counts, "int32 [G]")


def _check_operands(a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, out: Tensor) -> None:
    for name, tensor in (("a", a), ("b", b)):
        check(tensor.dtype == E4M3, name, tensor, "float8_e4m3fn")
    check(b.dim() == 3 and b.shape[2] == a.shape[-1], "b", b, f"[G, N, {a.shape[-1]}]")
    for name, scales, matrix in (("a_scales", sfa, a), ("b_scales", sfb, b)):
        good = scales.dim() == matrix.dim() and scales.dtype == torch.float32
        check(good, name, scales, f"float32 with {matrix.dim()} dimensions")
    good = out.dtype in D_DTYPE_NAMES and out.shape[-1] == b.shape[1]
    check(good, "out", out, f"BF16, FP16 or FP32 with {b.shape[1]} columns")
