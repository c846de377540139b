"""FP8 GEMM for PyTorch: the public operations, their helpers, and what they report.

D[M, N] = A[M, K] · B[N, K]ᵀ (+ bias[N]) with FP8 operands and FP32 scales by block, row or tensor,
or with BF16 operands (`kgen.runtime.bf16`),
on the tensors' device and its current stream. On a Hopper GPU the best verified kernel answers; on
a CPU or another GPU a reference in PyTorch does, so that the same code runs anywhere. Importing
this module touches no GPU, reads no file and no environment variable.
Must not import search, verify, measure or optuna.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from kgen.errors import UnsupportedInput
from kgen.problem import DENSE_RECIPES, GemmProblem
from kgen.reference import (
    D_DTYPE_NAMES,
    FP8_DTYPES,
    OPERAND_DTYPE_NAMES,
    gemm_reference_into,
)
from kgen.runtime import bf16, calls, grouped, ops, wgrad
from kgen.runtime.bf16 import (
    bf16_gemm_nt,
    m_grouped_bf16_gemm_nt_contiguous,
    m_grouped_bf16_gemm_nt_masked,
)
from kgen.runtime.calls import (
    Policy,
    Ready,
    get_num_sms,
    is_batch_invariant,
    last_path,
    missed_shapes,
    reset_stats,
    run_ready,
    set_batch_invariant,
    set_num_sms,
    set_path,
    stats,
)
from kgen.runtime.casts import (
    per_block_cast_to_fp8,
    per_row_cast_to_fp8,
    per_tensor_cast_to_fp8,
    per_token_cast_to_fp8,
    transpose_block_cast,
)
from kgen.runtime.copies import copy_reasons, is_worth_turning, run_with_copies
from kgen.runtime.counting import count_reference
from kgen.runtime.dgrad import (
    check_directions,
    m_grouped_dgrad_gemm_fp8_fp8_bf16_nt_contiguous,
    m_grouped_dgrad_gemm_fp8_fp8_bf16_nt_masked,
    m_grouped_dgrad_gemm_fp8_nt_contiguous,
    m_grouped_dgrad_gemm_fp8_nt_masked,
)
from kgen.runtime.dispatch import Plan
from kgen.runtime.grouped import (
    get_m_alignment_for_contiguous_layout,
    m_grouped_gemm_fp8_fp8_bf16_nt_contiguous,
    m_grouped_gemm_fp8_fp8_bf16_nt_masked,
    m_grouped_gemm_fp8_nt_contiguous,
    m_grouped_gemm_fp8_nt_masked,
)
from kgen.runtime.guard import count_write, layout_of, same_as
from kgen.runtime.operands import Inputs, Sizes, as_matrices, check, unpack
from kgen.runtime.ops import dispatch_modes, get_col_major_tma_aligned_tensor
from kgen.runtime.record import RECORDER
from kgen.runtime.stats import KgenWarning
from kgen.runtime.wgrad import (
    k_grouped_wgrad_gemm_fp8_fp8_fp32_nt,
    wgrad_gemm_fp8_fp8_fp32_nt,
)

__all__ = [
    "KgenWarning",
    "bf16_gemm_nt",
    "dgrad_gemm_fp8_fp8_bf16_nt",
    "dgrad_gemm_fp8_nt",
    "gemm_fp8_fp8_bf16_nt",
    "gemm_fp8_nt",
    "get_col_major_tma_aligned_tensor",
    "get_m_alignment_for_contiguous_layout",
    "get_num_sms",
    "is_batch_invariant",
    "k_grouped_wgrad_gemm_fp8_fp8_fp32_nt",
    "last_path",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "m_grouped_dgrad_gemm_fp8_fp8_bf16_nt_contiguous",
    "m_grouped_dgrad_gemm_fp8_fp8_bf16_nt_masked",
    "m_grouped_dgrad_gemm_fp8_nt_contiguous",
    "m_grouped_dgrad_gemm_fp8_nt_masked",
    "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous",
    "m_grouped_gemm_fp8_fp8_bf16_nt_masked",
    "m_grouped_gemm_fp8_nt_contiguous",
    "m_grouped_gemm_fp8_nt_masked",
    "missed_shapes",
    "mm_fp8_nt",
    "per_block_cast_to_fp8",
    "per_row_cast_to_fp8",
    "per_tensor_cast_to_fp8",
    "per_token_cast_to_fp8",
    "plan_for",
    "reload",
    "reset_stats",
    "set_batch_invariant",
    "set_num_sms",
    "stats",
    "transpose_block_cast",
    "warm_up",
    "wgrad_gemm_fp8_fp8_fp32_nt",
]

_prepared: dict[tuple[Any, ...], Ready] = {}


# ---------------------------------------------------------------------------- operations


def gemm_fp8_nt(
    lhs: tuple[torch.Tensor, torch.Tensor],
    rhs: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    recipe: str | None = None,
    fast_accum: bool = False,
) -> None:
    """Write A · Bᵀ (+ bias) into `out`, for lhs = (a, a_scales) and rhs = (b, b_scales).

    a [M, K] and b [N, K]      E4M3 or E5M2 each, any row pitch; addresses and pitches that are not
                               multiples of 16 bytes, and other strides, cost a copy
    a_scales, b_scales         FP32. recipe "block": [M, ceil(K/128)], row-major or column-major,
                               and [ceil(N/128), ceil(K/128)]; "row": [M] or [M, 1], and [N],
                               [N, 1] or [1, N]; "tensor": one value each, on the tensors' device
    out [M, N]                 BF16, FP16 or FP32, any row pitch; not sharing memory with an input
    bias [N]                   of out's type, added in FP32 before the result is rounded
    recipe                     None: the one that the scales' shapes fit, in the order above; where
                               several fit they mean the same numbers
    fast_accum                 for "row" and "tensor": sum all of K inside the tensor cores, which
                               keep 13 fraction bits; otherwise each 128 columns are added in FP32

    Runs on the current stream of the tensors' device and does not wait. Any M, N and K; M = 0
    launches nothing. Has no gradient. Under torch.compile, export and fx it is the operator
    kgen::gemm_fp8_nt. Raises UnsupportedInput for anything else, also for a tensor that requires
    a gradient while autograd records, naming what was given and what is needed; LaunchError when
    a kernel would have to be loaded while a CUDA graph is captured (see `warm_up`); DriverError
    when an earlier fault has cost the process its GPU.
    """
    if is_dynamo_compiling() or dispatch_modes():
        ops.call_gemm(unpack(lhs, rhs, out, bias, recipe, fast_accum))
        return
    try:
        (a, sfa), (b, sfb) = lhs, rhs
        addresses = a.data_ptr(), sfa.data_ptr(), b.data_ptr(), sfb.data_ptr(), out.data_ptr()
        key: tuple[Any, ...] = addresses, out.shape, recipe, fast_accum, Policy.key
        if bias is not None:
            key = *key, bias.data_ptr()
        ready = _prepared.get(key)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        _without_memory(unpack(lhs, rhs, out, bias, recipe, fast_accum))
        return
    same = ready is not None and (
        ready.same(a, sfa, b, sfb, out) if bias is None else ready.same(a, sfa, b, sfb, out, bias)
    )
    if ready is not None and same:
        run_ready(ready, out)
    else:
        _first_call(unpack(lhs, rhs, out, bias, recipe, fast_accum), key, ready)


def mm_fp8_nt(
    lhs: tuple[torch.Tensor, torch.Tensor],
    rhs: tuple[torch.Tensor, torch.Tensor],
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    bias: torch.Tensor | None = None,
    recipe: str | None = None,
    fast_accum: bool = False,
) -> torch.Tensor:
    """`gemm_fp8_nt` into new memory: gives A · Bᵀ (+ bias) as a row-major [M, N] of `out_dtype`."""
    _check_out_dtype(out_dtype)
    try:
        shape = (lhs[0].shape[0], rhs[0].shape[0])
        out = lhs[0].new_empty(shape, dtype=out_dtype)
    except (AttributeError, TypeError, IndexError):
        unpack(lhs, rhs, None)
        raise
    gemm_fp8_nt(lhs, rhs, out, bias=bias, recipe=recipe, fast_accum=fast_accum)
    return out


def gemm_fp8_fp8_bf16_nt(
    lhs: tuple[torch.Tensor, torch.Tensor],
    rhs: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
) -> None:
    """`gemm_fp8_nt` with a BF16 output, under the name that DeepGEMM gave it."""
    if isinstance(out, torch.Tensor) and out.dtype != torch.bfloat16:
        raise UnsupportedInput(
            f"out is {out.dtype}: gemm_fp8_fp8_bf16_nt writes torch.bfloat16; gemm_fp8_nt takes "
            "other outputs"
        )
    gemm_fp8_nt(lhs, rhs, out)


def dgrad_gemm_fp8_nt(
    grad: tuple[torch.Tensor, torch.Tensor],
    weight_t: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    *,
    recipe: str | None = None,
    fast_accum: bool = False,
) -> None:
    """Write dX = dY · W, the input's gradient of Y = X · Wᵀ, into `out`, by W transposed.

    grad            (dY [M, N], its scales), cast as A of `gemm_fp8_nt` is
    weight_t        (Wᵀ [K, N], its scales), cast as B is: `per_block_cast_to_fp8(w,
                    transposed=True)`, or `kgen.runtime.casts.transpose_block_cast` of a cast W
    out [M, K]      BF16, FP16 or FP32

    It is `gemm_fp8_nt` of these, with its other choices and errors; a there is dY here, b is Wᵀ.
    Operands that are not transposed as this says raise UnsupportedInput, which names the cast; only
    with N = K, or M = N, can nobody see it.
    """
    check_directions(grad, weight_t, out)
    gemm_fp8_nt(grad, weight_t, out, recipe=recipe, fast_accum=fast_accum)


def dgrad_gemm_fp8_fp8_bf16_nt(
    grad: tuple[torch.Tensor, torch.Tensor],
    weight_t: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
) -> None:
    """`dgrad_gemm_fp8_nt` with a BF16 output."""
    check_directions(grad, weight_t, out)
    gemm_fp8_fp8_bf16_nt(grad, weight_t, out)


def warm_up(
    m: int | Iterable[int],
    n: int,
    k: int,
    out_dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | int = "cuda",
    **options: Any,
) -> None:
    """Build and load what a call needs for these sizes, before it is timed or captured.

    `options` as in `plan_for`. Launches nothing. Does nothing where the reference would answer.
    """
    _check_out_dtype(out_dtype)
    for rows in [m] if isinstance(m, int) else m:
        plan_for(rows, n, k, out_dtype, device, **options)


def plan_for(
    m: int,
    n: int,
    k: int,
    out_dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | int = "cuda",
    *,
    kind: str = "dense",
    groups: int = 1,
    recipe: str | None = None,
    a_dtype: torch.dtype | None = None,
    b_dtype: torch.dtype | None = None,
    bias: bool = False,
    fast_accum: bool = False,
    accumulate: bool | None = None,
) -> Plan | None:
    """How a call with these sizes is answered; None where the reference answers by design.

    `kind` and `groups` are those of a grouped call, "contiguous" or "masked"; m then is the rows of
    a group that its kernel is chosen for, as in a shapes line: ceil(M / groups), or `expected_m`
    within 1 and max M. Of weight gradients, "wgrad" and "k_grouped", `accumulate` is the call's; k
    is what each group sums over. `recipe` is that of its scales, or "none": BF16 operands (None:
    that of a shapes line which leaves it out). `a_dtype` and `b_dtype` are the types of its
    operands (None: E4M3, or BF16 under "none"), `bias` is whether it gives one. Builds and loads
    the kernel as the call would. Raises UnsupportedInput, and UsageError for a kind, sizes or types
    that no kernel takes.
    """
    _check_out_dtype(out_dtype)
    is_dense = (kind, groups) == ("dense", 1)
    if is_dense and recipe is None:
        recipe = "block"
    dtypes = (torch.bfloat16,) if recipe == "none" else FP8_DTYPES
    a_dtype, b_dtype = a_dtype or dtypes[0], b_dtype or dtypes[0]
    for name, dtype in (("a_dtype", a_dtype), ("b_dtype", b_dtype)):
        if dtype not in dtypes:
            expected = " or ".join(str(one).removeprefix("torch.") for one in dtypes)
            raise UnsupportedInput(f"{name}={dtype}: expected {expected} for recipe={recipe!r}")
    if (is_dense and recipe not in DENSE_RECIPES) or (fast_accum and recipe in ("block", "none")):
        raise UnsupportedInput(
            f"recipe={recipe!r} with fast_accum={fast_accum}: expected one of "
            f"{', '.join(DENSE_RECIPES)}, and fast_accum for row and tensor only"
        )
    torch_device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    ordinal = calls.ordinal_of(torch_device)
    if min(m, n, k, groups) < 1:
        return None
    if not is_dense or recipe is None:
        given = {"recipe": recipe, "accumulate": accumulate}
        problem = GemmProblem.of(
            kind,
            m,
            n,
            k,
            groups=groups,
            a_dtype=OPERAND_DTYPE_NAMES[a_dtype],
            b_dtype=OPERAND_DTYPE_NAMES[b_dtype],
            d_dtype=D_DTYPE_NAMES[out_dtype],
            bias=bias,
            fast_accum=fast_accum,
            **{name: value for name, value in given.items() if value is not None},
        )
        return None if ordinal is None else calls.plan_of(ordinal, problem.with_num_sms)[0]
    if ordinal is None:
        return None
    sizes = Sizes(
        m,
        n,
        k,
        d_dtype=D_DTYPE_NAMES[out_dtype],
        recipe=recipe,
        a_dtype=OPERAND_DTYPE_NAMES[a_dtype],
        b_dtype=OPERAND_DTYPE_NAMES[b_dtype],
        bias=bias,
        fast_accum=fast_accum,
    )
    return _plan(ordinal, sizes)


def _check_out_dtype(out_dtype: torch.dtype) -> None:
    if out_dtype not in D_DTYPE_NAMES:
        raise UnsupportedInput(f"out_dtype={out_dtype}: expected bfloat16, float16 or float32")


def reload() -> None:
    """Forget every choice, so that the next calls see what was tuned since, and the settings."""
    calls.forget()
    _prepared.clear()
    grouped.forget()
    wgrad.forget()
    RECORDER.reopen()


# ------------------------------------------------------------------------------ the path


def _without_memory(x: Inputs) -> None:
    """Tensors with no address to give: a tracer's, or such as no path serves."""
    if not ops.stand_for_others(x):
        check(x)
    ops.call_gemm(x)


def _first_call(x: Inputs, key: tuple[Any, ...], ready: Ready | None) -> None:
    """A call with tensors not seen before, or that are never served from `_prepared`.

    `ready`: what is prepared for these addresses, and may fit after all.
    """
    tensors = x.tensors()
    if ops.stand_for_others(x):
        ops.call_gemm(x)
        return
    if Policy.batch_invariant is None:  # the first call of all: its key says nothing yet
        is_batch_invariant()
        key = tuple(Policy.key if part == (Policy.num_sms, None) else part for part in key)
    ops.refuse_gradient("gemm_fp8_nt" if x.has_scales else "bf16_gemm_nt", tensors)
    if ready is not None and layout_of(tensors) == ready.layout:
        calls.remember(_prepared, key, replace(ready, same=same_as(tensors)))
        run_ready(ready, x.out)
        return
    sizes = check(x)
    if min(sizes.m, sizes.n) == 0:
        set_path("empty")
        return
    if sizes.k == 0:
        with torch.no_grad():
            x.out.zero_() if x.bias is None else x.out.copy_(x.bias.expand_as(x.out))
        set_path("empty")
        return
    x = as_matrices(x, sizes.recipe)
    ordinal = calls.ordinal_of(x.a.device)
    plan = None if ordinal is None else _plan(ordinal, sizes)
    if ordinal is None or plan is None or plan.kernel is None:
        count_reference(sizes, Policy.num_sms, is_batch_invariant())
        _refer(x, sizes, plan.reason if plan else "")
        return
    num_sms = calls.budget(plan.kernel.device)
    reasons = copy_reasons(x, sizes)
    if reasons or is_worth_turning(x.sfa):
        run_with_copies(x, sizes, reasons, plan.kernel, num_sms=num_sms, stats=calls.STATS)
        count_write((x.out,))
        set_path("kernel with copies" if reasons else "kernel")
        return
    launch = plan.kernel.prepare(*x.operands(), num_sms=num_sms)
    ready = calls.ready_for(tensors, ordinal, launch)
    calls.remember(_prepared, key, ready)
    run_ready(ready, x.out)


def _plan(ordinal: int, sizes: Sizes) -> Plan:
    return calls.plan_of(ordinal, lambda num_sms: sizes.problem(num_sms, is_batch_invariant()))[0]


def _refer(x: Inputs, sizes: Sizes, reason: str) -> None:
    """The reference answers: by design without a `reason`, else because no kernel could."""
    if reason:
        calls.fall_back(x.a.device, reason)
    with torch.no_grad():
        gemm_reference_into(x.out, x.a, x.sfa, x.b, x.sfb, bias=x.bias, recipe=sizes.recipe)
    set_path("reference")


# ------------------------------------------------------------------------------- devices


def _after_fork() -> None:
    calls.after_fork()
    _prepared.clear()
    grouped.forget()
    wgrad.forget()


os.register_at_fork(after_in_child=_after_fork)
ops.register(gemm_fp8_nt)
bf16.attach(bf16.Host(prepared=_prepared, first_call=_first_call, without_memory=_without_memory))
grouped.register()
wgrad.register()
