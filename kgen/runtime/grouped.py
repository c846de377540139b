"""Grouped FP8 GEMMs for mixtures of experts: one launch for all groups, their sizes on the device.

Takes tensors as `kgen.runtime.gemm` does, which offers these calls under its own name.
Must not import search, verify, measure or optuna.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from kgen.errors import UnsupportedInput
from kgen.grouped_reference import contiguous_reference_into, index_of, masked_reference_into
from kgen.problem import GROUP_ALIGNMENT
from kgen.quant import get_col_major_tma_aligned_tensor
from kgen.runtime import calls, grouped_ops
from kgen.runtime.calls import Policy, Ready, run_ready
from kgen.runtime.copies import MAX_DIRECT_M
from kgen.runtime.counting import count_problem
from kgen.runtime.dispatch import is_capturing
from kgen.runtime.grouped_kernel import GroupedKernel
from kgen.runtime.grouped_operands import GroupedInputs, check, check_layout, unpack
from kgen.runtime.guard import layout_of, same_as
from kgen.runtime.ops import dispatch_modes, refuse_gradient

Pair = tuple[torch.Tensor, torch.Tensor]

_prepared: dict[tuple[Any, ...], Ready] = {}


def register() -> None:
    """Define the operators, once a process."""
    grouped_ops.register(m_grouped_gemm_fp8_nt_contiguous, m_grouped_gemm_fp8_nt_masked)


def forget() -> None:
    """Forget every launch and setting, as `kgen.runtime.gemm.reload` does, and in a new process."""
    _prepared.clear()
    calls.wants_checks.cache_clear()


def get_m_alignment_for_contiguous_layout() -> int:
    """Rows on whose multiples groups start that `m_indices` tells: 128. m_offsets needs none."""
    return GROUP_ALIGNMENT


def m_grouped_gemm_fp8_nt_contiguous(
    lhs: Pair,
    rhs: Pair,
    out: torch.Tensor,
    m_indices: torch.Tensor | None = None,
    *,
    m_offsets: torch.Tensor | None = None,
) -> None:
    """Write A_g · B_gᵀ into `out` for groups of rows, for (a, a_scales) and (b, b_scales).

    a [M, K]                   E4M3, the rows of all groups
    a_scales [M, ceil(K/128)]  FP32, one for each row and 128 columns, row-major or column-major;
                               row-major ones of more than 128 rows are turned first
    b [G, N, K]                E4M3, a matrix for each group
    b_scales [G, ceil(N/128), ceil(K/128)]   FP32, one for each 128x128 block
    out [M, N]                 BF16, FP16 or FP32, not sharing memory with an input

    Exactly one of two tensors, int32 on the same device, tells the groups:

    m_indices [M]    the group of each row; rows with -1 are skipped: `out` keeps what it holds
                     there, wherever they stand. Each block of 128 rows
                     (`get_m_alignment_for_contiguous_layout`) may have rows of one group alone.
    m_offsets [G+1]  group g has the rows from m_offsets[g] up to m_offsets[g + 1]: first 0, never
                     falling, the last at most M. Groups may have any size, 0 included, and start
                     anywhere. Rows behind the last group stay as they are.

    What ignored rows of `a` and `a_scales` hold has no influence. N must be a multiple of 8, K of
    16; columns contiguous, addresses and pitches multiples of 16 bytes. One launch on the current
    stream, which reads the tensor there: nothing waits, and a captured graph follows its values.
    They are not looked at by the host unless KGEN_CHECK=1, which costs a wait and raises
    UnsupportedInput where they make no sense; without it such rows hold anything, though nothing
    outside `out` is written. Has no gradient. Raises as `gemm_fp8_nt` does.
    """
    call_grouped(lhs, rhs, out, layout_given(m_indices, m_offsets), 0)


def m_grouped_gemm_fp8_nt_masked(
    lhs: Pair, rhs: Pair, out: torch.Tensor, masked_m: torch.Tensor, expected_m: int
) -> None:
    """Write A_g · B_gᵀ into `out` for the first masked_m[g] rows of each group g.

    a [G, max M, K]            E4M3
    a_scales [G, max M, ceil(K/128)]   FP32, row-major or column-major in each group; row-major ones
                               of more than 128 rows are turned first
    b [G, N, K]                E4M3
    b_scales [G, ceil(N/128), ceil(K/128)]   FP32
    out [G, max M, N]          BF16, FP16 or FP32, not sharing memory with an input
    masked_m [G]               int32 on the same device: rows that count, 0 to max M
    expected_m                 rows of a group to choose the kernel for; any are right

    Rows from masked_m[g] on are neither read for a result nor written: `out` keeps what it holds.
    The counts are read on the device: nothing waits, and a captured graph follows them. Sizes,
    pitches, KGEN_CHECK and errors as in `m_grouped_gemm_fp8_nt_contiguous`.
    """
    call_grouped(lhs, rhs, out, ("masked_m", masked_m), expected_m)


def m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(
    lhs: Pair,
    rhs: Pair,
    out: torch.Tensor,
    m_indices: torch.Tensor | None = None,
    *,
    m_offsets: torch.Tensor | None = None,
) -> None:
    """`m_grouped_gemm_fp8_nt_contiguous` with a BF16 output, under the name that DeepGEMM gave."""
    _check_bf16("m_grouped_gemm_fp8_fp8_bf16_nt_contiguous", out)
    m_grouped_gemm_fp8_nt_contiguous(lhs, rhs, out, m_indices, m_offsets=m_offsets)


def m_grouped_gemm_fp8_fp8_bf16_nt_masked(
    lhs: Pair, rhs: Pair, out: torch.Tensor, masked_m: torch.Tensor, expected_m: int
) -> None:
    """`m_grouped_gemm_fp8_nt_masked` with a BF16 output, under the name that DeepGEMM gave it."""
    _check_bf16("m_grouped_gemm_fp8_fp8_bf16_nt_masked", out)
    m_grouped_gemm_fp8_nt_masked(lhs, rhs, out, masked_m, expected_m)


def layout_given(m_indices: Any, m_offsets: Any) -> tuple[str, Any]:
    """Name and tensor of the one that is given; UnsupportedInput for none and for both."""
    pairs = (("m_indices", m_indices), ("m_offsets", m_offsets))
    given = [pair for pair in pairs if pair[1] is not None]
    if len(given) != 1:
        names = " and ".join(name for name, _ in given) or "neither"
        raise UnsupportedInput(f"given {names}: expected exactly one of m_indices and m_offsets")
    return given[0]


def _check_bf16(name: str, out: Any) -> None:
    if isinstance(out, torch.Tensor) and out.dtype != torch.bfloat16:
        other = name.replace("fp8_fp8_bf16", "fp8")
        raise UnsupportedInput(
            f"out is {out.dtype}: {name} writes torch.bfloat16; {other} takes other outputs"
        )


# ------------------------------------------------------------------------------ the path


def call_grouped(  # noqa: PLR0917, what a call gives, in that order
    lhs: Any,
    rhs: Any,
    out: Any,
    layout: tuple[str, Any],
    expected_m: Any,
    recipe: str = "block",
) -> None:
    """A call of any kind and recipe; `layout` as `layout_given` gives it, or ("masked_m", ...)."""
    if is_dynamo_compiling() or dispatch_modes():
        grouped_ops.call(unpack(lhs, rhs, out, layout, expected_m, recipe))
        return
    try:
        (a, sfa), (b, sfb) = lhs, rhs
        scales = (sfa, sfb) if recipe == "block" else ()
        tensors = (a, *scales[:1], b, *scales[1:], out, layout[1])
        addresses = [t.data_ptr() for t in tensors]
        key = (*addresses, out.shape, layout[0], expected_m, Policy.num_sms)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        _without_memory(unpack(lhs, rhs, out, layout, expected_m, recipe))
        return
    ready = _prepared.get(key)
    if ready is not None and ready.same(*tensors):
        run_ready(ready, out)
    else:
        _first_call(unpack(lhs, rhs, out, layout, expected_m, recipe), key, ready)


def _without_memory(x: GroupedInputs) -> None:
    """Tensors with no address to give: a tracer's, or such as no path serves."""
    if not grouped_ops.stand_for_others(x):
        check(x)
    grouped_ops.call(x)


def _first_call(x: GroupedInputs, key: tuple[Any, ...], ready: Any) -> None:
    """A call with tensors not seen before, or that are never served from `prepared`."""
    tensors = x.tensors()
    if grouped_ops.stand_for_others(x):
        grouped_ops.call(x)
        return
    name = "m_grouped_gemm_fp8_nt" if x.has_scales else "m_grouped_bf16_gemm_nt"
    refuse_gradient(f"{name}_{'masked' if x.is_masked else 'contiguous'}", tensors)
    if ready is not None and layout_of(tensors) == ready.layout:
        calls.remember(_prepared, key, replace(ready, same=same_as(tensors)))
        run_ready(ready, x.out)
        return
    check(x)
    ordinal = calls.ordinal_of(x.a.device)
    if calls.wants_checks() and not (ordinal is not None and is_capturing(ordinal)):
        check_layout(x)
    if x.out.numel() == 0 or not x.b.shape[0]:
        calls.set_path("empty")
        return
    plan, num_sms = (None, 0)
    if ordinal is not None and x.a.shape[-1]:
        plan, num_sms = calls.plan_of(ordinal, x.problem)
    if ordinal is None or plan is None or not isinstance(plan.kernel, GroupedKernel):
        _refer(x, plan.reason if plan else "")
        return
    sfa, turned = x.sfa, _is_worth_turning(x.sfa)
    if turned:
        sfa = get_col_major_tma_aligned_tensor(sfa)
    operands = (x.a, sfa, x.b, x.sfb, x.out, x.layout)
    launch = plan.kernel.prepare_grouped(operands, by_index=x.by_index, num_sms=num_sms)
    made = calls.ready_for(tensors, ordinal, launch)
    if turned:
        calls.STATS.add_reason("copies", "a_scales: row-major")
    elif not calls.wants_checks():
        calls.remember(_prepared, key, made)
    run_ready(made, x.out)


def _refer(x: GroupedInputs, reason: str) -> None:
    """The reference answers: by design without a `reason`, else because no kernel could."""
    if reason:
        calls.fall_back(x.a.device, reason)
    if x.a.shape[-1]:
        count_problem(x.problem(Policy.num_sms))
    with torch.no_grad():
        operands = (x.out, x.a, x.sfa, x.b, x.sfb)
        if x.is_masked:
            masked_reference_into(*operands, x.layout, recipe=x.recipe)
        else:
            index = x.layout if x.by_index else index_of(x.layout, x.a.shape[0])
            contiguous_reference_into(*operands, index, recipe=x.recipe)
    calls.set_path("reference")


def _is_worth_turning(sfa: torch.Tensor) -> bool:
    """As in the dense call, by the rows of all groups together."""
    return sfa.shape[-1] > 1 and sfa.shape[:-1].numel() > MAX_DIRECT_M and sfa.stride(-2) != 1
