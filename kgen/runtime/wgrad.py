"""Weight gradients: D += A · Bᵀ in FP32, of one product and of groups along K in one launch.

Takes tensors as `kgen.runtime.gemm` does, which offers these calls under its own name.
Must not import search, verify, measure or optuna.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from kgen.runtime import calls, wgrad_ops
from kgen.runtime.calls import Policy, Ready, run_ready
from kgen.runtime.counting import count_problem
from kgen.runtime.dispatch import is_capturing
from kgen.runtime.guard import layout_of, same_as
from kgen.runtime.ops import any_stands_for_another, dispatch_modes, refuse_gradient
from kgen.runtime.wgrad_kernel import KGroupedKernel, WgradKernel
from kgen.runtime.wgrad_operands import WgradInputs, check, check_values, unpack
from kgen.wgrad_reference import k_grouped_reference_into, wgrad_reference_into

Pair = tuple[torch.Tensor, torch.Tensor]

_prepared: dict[tuple[Any, ...], Ready] = {}


def register() -> None:
    """Define the operators, once a process."""
    wgrad_ops.register(wgrad_gemm_fp8_fp8_fp32_nt, k_grouped_wgrad_gemm_fp8_fp8_fp32_nt)


def forget() -> None:
    """Forget every launch and setting, as `kgen.runtime.gemm.reload` does, and in a new process."""
    _prepared.clear()
    calls.wants_checks.cache_clear()


def wgrad_gemm_fp8_fp8_fp32_nt(
    lhs: Pair, rhs: Pair, out: torch.Tensor, *, accumulate: bool = True
) -> None:
    """Add A · Bᵀ to `out` in FP32, for (a, a_scales) and (b, b_scales).

    a [M, K], b [N, K]         E4M3 or E5M2 each; K is what is summed over, the tokens: both come
                               from `cast_to_fp8(x, "token", direction="transposed")`
    a_scales [M, ceil(K/128)]  FP32, one for each row and 128 columns
    b_scales                   [N, ceil(K/128)] alike (recipe "vector"), or [ceil(N/128),
                               ceil(K/128)], one for each 128x128 block (recipe "block")
    out [M, N]                 FP32, not sharing memory with an input
    accumulate                 False: write the product, whatever `out` holds

    N must be a multiple of 8, K of 16; columns contiguous, addresses and pitches multiples of 16
    bytes. Scales are read in place where their rows lie side by side, as casts leave them, else
    through their strides, which is slower. Each element of `out` is added to once: the bits do not
    depend on any order. Subnormal results of the addition become zero. Runs on the current stream
    and does not wait. Has no gradient. Raises UnsupportedInput for anything else, also for
    operands that were not transposed, naming what was given and what is needed; other errors as
    `gemm_fp8_nt` does.
    """
    _call(lhs, rhs, out, accumulate, None)


def k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(
    lhs: Pair,
    rhs: Pair,
    out: torch.Tensor,
    ks: Sequence[int] | torch.Tensor,
    *,
    accumulate: bool = True,
) -> None:
    """Add A_g · B_gᵀ to out[g] for groups of columns, all in one launch.

    a [M, K], b [N, K]         E4M3 or E5M2 each: the first ks[0] columns are the first group's,
                               the next ks[1] the second's, and so on
    a_scales, b_scales         FP32 [M, K/128] and [N, K/128]
    out [G, M, N]              FP32, not sharing memory with an input
    ks                         G multiples of 128, 0 included: numbers that add up to K, or an int32
                               tensor [G] on the same device, read by the kernel alone, so that
                               nothing waits and a captured graph follows its values
    accumulate                 False: write the products; out[g] of a group without columns becomes
                               zero, where it otherwise stays as it is

    With ks as numbers a and b may have one dimension, each group's [M, ks[g]] and [N, ks[g]] one
    after another (DeepGEMM's first layout), with scales as above or transposed, [K/128, M] and
    [K/128, N]; the first such call copies tensor maps to the device, which a CUDA graph that is
    being captured can not. With KGEN_CHECK=1 a tensor of ks is looked at first, which waits.
    Otherwise as `wgrad_gemm_fp8_fp8_fp32_nt`.
    """
    _call(lhs, rhs, out, accumulate, ks)


# ------------------------------------------------------------------------------ the path


def _call(lhs: Any, rhs: Any, out: Any, accumulate: Any, ks: Any) -> None:
    if is_dynamo_compiling() or dispatch_modes():
        wgrad_ops.call(unpack(lhs, rhs, out, accumulate, ks))
        return
    try:
        (a, sfa), (b, sfb) = lhs, rhs
        tensors: tuple[Any, ...] = (a, sfa, b, sfb, out)
        columns: Any = ks
        if isinstance(ks, torch.Tensor):
            tensors, columns = (*tensors, ks), ()
        elif ks is not None:
            columns = tuple(ks)
        addresses = [t.data_ptr() for t in tensors]
        key = (*addresses, out.shape, accumulate, columns, Policy.num_sms)
        ready = _prepared.get(key)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        _without_memory(unpack(lhs, rhs, out, accumulate, ks))
        return
    if ready is not None and ready.same(*tensors):
        run_ready(ready, out)
    else:
        _first_call(unpack(lhs, rhs, out, accumulate, ks), key, ready)


def _without_memory(x: WgradInputs) -> None:
    """Tensors with no address to give: a tracer's, or such as no path serves."""
    if not any_stands_for_another(*x.tensors()):
        check(x)
    wgrad_ops.call(x)


def _first_call(x: WgradInputs, key: tuple[Any, ...], ready: Any) -> None:
    """A call with tensors not seen before, or that are never served from `prepared`."""
    tensors = x.tensors()
    if any_stands_for_another(*tensors):
        wgrad_ops.call(x)
        return
    refuse_gradient(wgrad_ops.NAMES[x.kind], tensors)
    if ready is not None and layout_of(tensors) == ready.layout:
        calls.remember(_prepared, key, replace(ready, same=same_as(tensors)))
        run_ready(ready, x.out)
        return
    check(x)
    x = x.as_matrices()
    ordinal = calls.ordinal_of(x.a.device)
    if calls.wants_checks() and not (ordinal is not None and is_capturing(ordinal)):
        check_values(x)
    if not x.out.numel() or not x.columns:
        if not x.accumulate:
            with torch.no_grad():
                x.out.zero_()
        calls.set_path("empty")
        return
    plan, num_sms = (None, 0) if ordinal is None else calls.plan_of(ordinal, x.problem)
    kernel = plan.kernel if plan else None
    operands = (x.a, x.sfa, x.b, x.sfb, x.out)
    if isinstance(kernel, WgradKernel):
        launch = kernel.prepare(*operands, num_sms=num_sms)
    elif isinstance(kernel, KGroupedKernel) and x.ks is not None:
        launch = kernel.prepare_k_grouped(operands, x.ks, num_sms=num_sms, flat=x.flat)
    else:
        _refer(x, plan.reason if plan else "")
        return
    assert ordinal is not None, "there is a plan"
    made = calls.ready_for(tensors, ordinal, launch)
    if not (calls.wants_checks() and isinstance(x.ks, torch.Tensor)):
        calls.remember(_prepared, key, made)
    run_ready(made, x.out)


def _refer(x: WgradInputs, reason: str) -> None:
    """The reference answers: by design without a `reason`, else because no kernel could."""
    if reason:
        calls.fall_back(x.a.device, reason)
    count_problem(x.problem(Policy.num_sms))
    operands = (x.out, x.a, x.sfa, x.b, x.sfb)
    with torch.no_grad():
        if x.ks is None:
            wgrad_reference_into(*operands, recipe=x.recipe, adds=x.accumulate)
        else:
            k_grouped_reference_into(*operands, x.ks, adds=x.accumulate)
    calls.set_path("reference")
