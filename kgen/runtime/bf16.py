"""GEMMs with BF16 operands, which have no scales: dense, and grouped for mixtures of experts.

Takes tensors as `kgen.runtime.gemm` does, which offers these calls under its own name; takes from
it, by `attach`, what all dense calls share. The grouped calls are those of `kgen.runtime.grouped`
without scales. Must not import search, verify, measure or optuna.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from kgen.runtime import bf16_ops
from kgen.runtime.calls import Policy, Ready, run_ready
from kgen.runtime.grouped import call_grouped, layout_given
from kgen.runtime.operands import NO_SCALES, Inputs, unpack_bf16
from kgen.runtime.ops import dispatch_modes


@dataclass(frozen=True)
class Host:
    """What dense calls share; `kgen.runtime.gemm` hands it over.

    prepared         launches kept ready, by their tensors' addresses
    first_call       a call with tensors not seen before
    without_memory   a call with tensors that have no address
    """

    prepared: dict[tuple[Any, ...], Ready]
    first_call: Callable[[Inputs, tuple[Any, ...], Any], None]
    without_memory: Callable[[Inputs], None]


class _Calls:
    host: Host


def attach(host: Host) -> None:
    """Take over what dense calls share."""
    _Calls.host = host
    bf16_ops.register(
        bf16_gemm_nt, m_grouped_bf16_gemm_nt_contiguous, m_grouped_bf16_gemm_nt_masked
    )


def bf16_gemm_nt(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, bias: torch.Tensor | None = None
) -> None:
    """Write A · Bᵀ (+ bias) into `out`, summed in FP32, under the name that DeepGEMM gave it.

    a [M, K] and b [N, K]   BF16, any row pitch; addresses and pitches that are not multiples of 16
                            bytes, and other strides, cost a copy
    out [M, N]              BF16, FP16 or FP32, any row pitch; not sharing memory with an input
    bias [N]                of out's type, added in FP32 before the result is rounded

    Runs on the current stream of the tensors' device and does not wait. Any M, N and K; M = 0
    launches nothing. Has no gradient. Under torch.compile, export and fx it is the operator
    kgen::bf16_gemm_nt. Raises as `kgen.runtime.gemm.gemm_fp8_nt` does.
    """
    if is_dynamo_compiling() or dispatch_modes():
        torch.ops.kgen.bf16_gemm_nt(a, b, out, bias=bias)
        return
    host = _Calls.host
    try:
        key: tuple[Any, ...] = a.data_ptr(), b.data_ptr(), out.data_ptr(), out.shape, Policy.key
        if bias is not None:
            key = *key, bias.data_ptr()
        ready = host.prepared.get(key)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        host.without_memory(unpack_bf16(a, b, out, bias))
        return
    same = ready is not None and (
        ready.same(a, b, out) if bias is None else ready.same(a, b, out, bias)
    )
    if ready is not None and same:
        run_ready(ready, out)
    else:
        host.first_call(unpack_bf16(a, b, out, bias), key, ready)


def m_grouped_bf16_gemm_nt_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    m_indices: torch.Tensor | None = None,
    *,
    m_offsets: torch.Tensor | None = None,
) -> None:
    """Write A_g · B_gᵀ into `out` for groups of rows, under the name that DeepGEMM gave it.

    a [M, K]      BF16, the rows of all groups
    b [G, N, K]   BF16, a matrix for each group
    out [M, N]    BF16, FP16 or FP32, not sharing memory with an input

    `m_indices` or `m_offsets` tells the groups, as in
    `kgen.runtime.gemm.m_grouped_gemm_fp8_nt_contiguous`, and rows are left alone, values checked
    and errors raised as there. N and K must be multiples of 8.
    """
    if is_dynamo_compiling() or dispatch_modes():
        torch.ops.kgen.m_grouped_bf16_gemm_nt_contiguous(a, b, out, m_indices, m_offsets)
        return
    layout = layout_given(m_indices, m_offsets)
    call_grouped((a, NO_SCALES), (b, NO_SCALES), out, layout, 0, "none")


def m_grouped_bf16_gemm_nt_masked(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, masked_m: torch.Tensor, expected_m: int
) -> None:
    """Write A_g · B_gᵀ into `out` for the first masked_m[g] rows of each group g.

    a [G, max M, K]     BF16
    b [G, N, K]         BF16
    out [G, max M, N]   BF16, FP16 or FP32, not sharing memory with an input

    The name is DeepGEMM's. `masked_m`, `expected_m`, what is left alone and errors as in
    `kgen.runtime.gemm.m_grouped_gemm_fp8_nt_masked`. N and K must be multiples of 8.
    """
    if is_dynamo_compiling() or dispatch_modes():
        torch.ops.kgen.m_grouped_bf16_gemm_nt_masked(a, b, out, masked_m, expected_m)
        return
    layout = ("masked_m", masked_m)
    call_grouped((a, NO_SCALES), (b, NO_SCALES), out, layout, expected_m, "none")
