"""Input gradients of grouped products by name, and the check that all input gradients share.

Where a layer computes Y = X · Wᵀ with W [N, K], its input's gradient is dX [M, K] = dY [M, N] · W.
As an NT product that reads W transposed: Wᵀ [K, N], cast in that direction or turned after the cast
(`kgen.runtime.casts.transpose_block_cast`). `kgen.runtime.gemm` offers these calls, and the dense
ones, under its own name. Must not import search, verify, measure or optuna.
"""

from __future__ import annotations

from typing import Any

import torch

from kgen.errors import UnsupportedInput
from kgen.runtime.grouped import (
    m_grouped_gemm_fp8_fp8_bf16_nt_contiguous,
    m_grouped_gemm_fp8_fp8_bf16_nt_masked,
    m_grouped_gemm_fp8_nt_contiguous,
    m_grouped_gemm_fp8_nt_masked,
)

Pair = tuple[torch.Tensor, torch.Tensor]


def m_grouped_dgrad_gemm_fp8_nt_contiguous(
    grad: Pair,
    weight_t: Pair,
    out: torch.Tensor,
    m_indices: torch.Tensor | None = None,
    *,
    m_offsets: torch.Tensor | None = None,
) -> None:
    """Write dX_g = dY_g · W_g into `out` for groups of rows, by their weights transposed.

    grad            (dY [M, N] E4M3, scales [M, ceil(N/128)]), the rows of all groups
    weight_t        (Wᵀ [G, K, N] E4M3, scales [G, ceil(K/128), ceil(N/128)])
    out [M, K]      BF16, FP16 or FP32

    `m_indices` and `m_offsets`, what else tensors have to be, and errors as in
    `m_grouped_gemm_fp8_nt_contiguous`, whose a is dY here and whose b is Wᵀ. Operands that are not
    transposed as this says raise UnsupportedInput, which names the cast; only with N = K, or M = N,
    can nobody see it.
    """
    check_directions(grad, weight_t, out)
    m_grouped_gemm_fp8_nt_contiguous(grad, weight_t, out, m_indices, m_offsets=m_offsets)


def m_grouped_dgrad_gemm_fp8_nt_masked(
    grad: Pair, weight_t: Pair, out: torch.Tensor, masked_m: torch.Tensor, expected_m: int
) -> None:
    """Write dX_g = dY_g · W_g into `out` for the first masked_m[g] rows of each group g.

    grad                  (dY [G, max M, N] E4M3, scales [G, max M, ceil(N/128)])
    weight_t              (Wᵀ [G, K, N] E4M3, scales [G, ceil(K/128), ceil(N/128)])
    out [G, max M, K]     BF16, FP16 or FP32

    The rest as in `m_grouped_gemm_fp8_nt_masked`, errors as in
    `m_grouped_dgrad_gemm_fp8_nt_contiguous`.
    """
    check_directions(grad, weight_t, out)
    m_grouped_gemm_fp8_nt_masked(grad, weight_t, out, masked_m, expected_m)


def m_grouped_dgrad_gemm_fp8_fp8_bf16_nt_contiguous(
    grad: Pair,
    weight_t: Pair,
    out: torch.Tensor,
    m_indices: torch.Tensor | None = None,
    *,
    m_offsets: torch.Tensor | None = None,
) -> None:
    """`m_grouped_dgrad_gemm_fp8_nt_contiguous` with a BF16 output alone."""
    check_directions(grad, weight_t, out)
    m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(grad, weight_t, out, m_indices, m_offsets=m_offsets)


def m_grouped_dgrad_gemm_fp8_fp8_bf16_nt_masked(
    grad: Pair, weight_t: Pair, out: torch.Tensor, masked_m: torch.Tensor, expected_m: int
) -> None:
    """`m_grouped_dgrad_gemm_fp8_nt_masked` with a BF16 output alone."""
    check_directions(grad, weight_t, out)
    m_grouped_gemm_fp8_fp8_bf16_nt_masked(grad, weight_t, out, masked_m, expected_m)


def check_directions(grad: Any, weight_t: Any, out: Any) -> None:
    """Raises UnsupportedInput where an operand is not transposed as input gradients need it.

    Whatever else is wrong is left to the product to say.
    """
    try:
        dy, wt = grad[0], weight_t[0]
        (k, n), m = wt.shape[-2:], out.shape[-2]
        dy_rows, dy_columns = dy.shape[-2:]
        is_dense = _has_adjacent_columns(dy), _has_adjacent_columns(wt)
    except (AttributeError, IndexError, TypeError, ValueError):
        return
    if dy_columns == n and all(is_dense):
        return
    if dy_columns == k != n or not is_dense[1]:
        raise UnsupportedInput(
            f"weight_t is {_describe(wt)}: expected W transposed, [K, N] row by row, with the N = "
            f"{dy_columns} columns of grad; cast W with per_block_cast_to_fp8(w, transposed=True), "
            "or turn what is cast already with transpose_block_cast((values, scales))"
        )
    if (dy_rows == n and dy_columns == m != n) or not is_dense[0]:
        raise UnsupportedInput(
            f"grad is {_describe(dy)}: expected dY [M, N] row by row, with the N = {n} columns of "
            "weight_t; cast dY with per_token_cast_to_fp8(dy). What is cast with transposed=True "
            "is for the weight's gradient"
        )


def _has_adjacent_columns(x: torch.Tensor) -> bool:
    return x.shape[-1] <= 1 or x.stride(-1) == 1


def _describe(x: torch.Tensor) -> str:
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{dtype}{list(x.shape)} with strides {tuple(x.stride())}"
