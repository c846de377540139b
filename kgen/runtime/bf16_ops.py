"""GEMMs with BF16 operands as PyTorch operators, for torch.compile, export and fx.

    bf16_gemm_nt(a, b, Tensor(a!) out, *, bias) -> ()
    m_grouped_bf16_gemm_nt_contiguous(a, b, Tensor(a!) out, Tensor? m_indices,
                                      Tensor? m_offsets) -> ()
    m_grouped_bf16_gemm_nt_masked(a, b, Tensor(a!) out, masked_m, SymInt expected_m) -> ()

Shapes and types as in the functions of the same names in `kgen.runtime.bf16`. Takes the functions
that run them; gives the operators, with stand-ins in which every size may be symbolic. Imports
torch and ops; touches no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from kgen.reference import D_DTYPE_NAMES
from kgen.runtime.ops import check, check_bias, define

Tensor = torch.Tensor

_OPERANDS: Final = "Tensor a, Tensor b, Tensor(a!) out"
_SCHEMAS: Final = {
    "bf16_gemm_nt": f"({_OPERANDS}, *, Tensor? bias=None) -> ()",
    "m_grouped_bf16_gemm_nt_contiguous": (
        f"({_OPERANDS}, Tensor? m_indices, Tensor? m_offsets) -> ()"
    ),
    "m_grouped_bf16_gemm_nt_masked": f"({_OPERANDS}, Tensor masked_m, SymInt expected_m) -> ()",
}


def register(
    dense: Callable[..., None], contiguous: Callable[..., None], masked: Callable[..., None]
) -> None:
    """Define the operators, once a process, by the functions that run them."""
    kernels: dict[str, Callable[..., None]] = {
        "bf16_gemm_nt": dense,
        "m_grouped_bf16_gemm_nt_contiguous": lambda a, b, out, indices, offsets: contiguous(
            a, b, out, indices, m_offsets=offsets
        ),
        "m_grouped_bf16_gemm_nt_masked": masked,
    }
    define(_SCHEMAS, kernels, _FAKES)


def _fake_dense(a: Tensor, b: Tensor, out: Tensor, *, bias: Tensor | None = None) -> None:
    for name, tensor in (("a", a), ("b", b)):
        _check_operand(name, tensor, 2, "[rows, K]")
    check(b.shape[1] == a.shape[1], "b", b, f"[N, {a.shape[1]}], as a is {list(a.shape)}")
    check_bias(bias, b, out.dtype)
    _check_out(out, 2, "[M, N]")
    fits = out.shape[0] == a.shape[0] and out.shape[1] == b.shape[0]
    check(fits, "out", out, f"[{a.shape[0]}, {b.shape[0]}]")


def _fake_contiguous(
    a: Tensor, b: Tensor, out: Tensor, indices: Tensor | None, offsets: Tensor | None
) -> None:
    _check_grouped(a, b, out, 2)
    for name, layout in (("m_indices", indices), ("m_offsets", offsets)):
        if layout is not None:
            good = layout.dim() == 1 and layout.dtype == torch.int32
            check(good, name, layout, "int32 [rows]")


def _fake_masked(a: Tensor, b: Tensor, out: Tensor, counts: Tensor, expected_m: int) -> None:
    _check_grouped(a, b, out, 3)
    good = counts.dim() == 1 and counts.dtype == torch.int32
    check(good, "masked_m", counts, "int32 [G]")


def _check_grouped(a: Tensor, b: Tensor, out: Tensor, dims: int) -> None:
    outer = "G, max M" if dims == 3 else "M"
    _check_operand("a", a, dims, f"[{outer}, K]")
    _check_operand("b", b, 3, "[G, N, K]")
    check(b.shape[2] == a.shape[-1], "b", b, f"[G, N, {a.shape[-1]}]")
    _check_out(out, dims, f"[{outer}, N]")
    fits = out.shape[-2] == a.shape[-2] and out.shape[-1] == b.shape[1]
    check(fits, "out", out, f"{a.shape[-2]} rows and {b.shape[1]} columns")


def _check_operand(name: str, tensor: Tensor, dims: int, shape: str) -> None:
    good = tensor.dim() == dims and tensor.dtype == torch.bfloat16
    check(good, name, tensor, f"bfloat16 {shape}")


def _check_out(out: Tensor, dims: int, shape: str) -> None:
    good = out.dim() == dims and out.dtype in D_DTYPE_NAMES
    check(good, "out", out, f"BF16, FP16 or FP32 {shape}")


_FAKES: Final[dict[str, Callable[..., Any]]] = {
    "bf16_gemm_nt": _fake_dense,
    "m_grouped_bf16_gemm_nt_contiguous": _fake_contiguous,
    "m_grouped_bf16_gemm_nt_masked": _fake_masked,
}
