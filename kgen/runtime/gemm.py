"""FP8 GEMM for PyTorch: the public operations, their helpers, and what they report.

D[M, N] = A[M, K] · B[N, K]ᵀ (+ bias[N]) with FP8 operands and FP32 scales by block, row or tensor,
on the tensors' device and its current stream. On a Hopper GPU the best verified kernel answers; on
a CPU or another GPU a reference in PyTorch does, so that the same code runs anywhere. Importing
this module touches no GPU, reads no file and no environment variable.
Must not import search, verify, measure or optuna.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.compiler import is_dynamo_compiling

from kgen.device import Device
from kgen.errors import KgenError, UnsupportedInput, UsageError
from kgen.problem import DENSE_RECIPES, GemmProblem
from kgen.quant import E4M3
from kgen.reference import D_DTYPE_NAMES, OPERAND_DTYPE_NAMES, gemm_reference_into
from kgen.runtime import grouped, ops, wgrad
from kgen.runtime.casts import (
    per_block_cast_to_fp8,
    per_row_cast_to_fp8,
    per_tensor_cast_to_fp8,
    per_token_cast_to_fp8,
)
from kgen.runtime.copies import copy_reasons, is_worth_turning, run_with_copies
from kgen.runtime.counting import count_reference
from kgen.runtime.dispatch import (
    Dispatcher,
    Plan,
    StoredBuilder,
    hopper_ordinal,
    raise_if_final,
)
from kgen.runtime.grouped import (
    get_m_alignment_for_contiguous_layout,
    m_grouped_gemm_fp8_fp8_bf16_nt_contiguous,
    m_grouped_gemm_fp8_fp8_bf16_nt_masked,
    m_grouped_gemm_fp8_nt_contiguous,
    m_grouped_gemm_fp8_nt_masked,
)
from kgen.runtime.guard import Same, count_write, layout_of, same_as
from kgen.runtime.kernel import Launch, current_device, current_stream
from kgen.runtime.operands import Inputs, Sizes, as_matrices, check, unpack
from kgen.runtime.ops import dispatch_modes, get_col_major_tma_aligned_tensor
from kgen.runtime.record import RECORDER
from kgen.runtime.stats import KgenWarning, Stats
from kgen.runtime.wgrad import (
    k_grouped_wgrad_gemm_fp8_fp8_fp32_nt,
    wgrad_gemm_fp8_fp8_fp32_nt,
)
from kgen.settings import Settings, batch_invariant_by_default

__all__ = [
    "KgenWarning",
    "gemm_fp8_fp8_bf16_nt",
    "gemm_fp8_nt",
    "get_col_major_tma_aligned_tensor",
    "get_m_alignment_for_contiguous_layout",
    "get_num_sms",
    "is_batch_invariant",
    "k_grouped_wgrad_gemm_fp8_fp8_fp32_nt",
    "last_path",
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
    "warm_up",
    "wgrad_gemm_fp8_fp8_fp32_nt",
]

#: Launches kept ready, by their tensors' addresses and the output's shape; about 2 KB each.
_MAX_PREPARED: Final = 8192


@dataclass(frozen=True, slots=True)
class _Ready:
    """A launch for tensors at known addresses, right as long as `same` or `layout` holds."""

    same: Same
    layout: tuple[Any, ...]
    ordinal: int
    launch: Launch


_stats = Stats()
_prepared: dict[tuple[Any, ...], _Ready] = {}
#: By device; for one that kernels can not be had for, the reason.
_dispatchers: dict[int, Dispatcher | str] = {}
_lock = threading.Lock()


class _State(threading.local):
    path = ""


class _Policy:
    """What holds for every call of the process; `key` changes with any of it."""

    num_sms = 0
    #: None until a call or `is_batch_invariant` asks: then KGEN_BATCH_INVARIANT is read.
    batch_invariant: bool | None = None
    key: tuple[int, bool | None] = (0, None)


_state = _State()


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
        key: tuple[Any, ...] = addresses, out.shape, recipe, fast_accum, _Policy.key
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
        _run(ready, out)
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


def set_num_sms(num_sms: int) -> None:
    """Run on at most this many SMs from now on, leaving the rest to others; 0: all of them.

    The budget is part of the problem: other kernels may be the best for it. Raises UsageError
    for a number below 0, or above what the current device has once CUDA is in use.
    """
    if isinstance(num_sms, bool) or not isinstance(num_sms, int) or num_sms < 0:
        raise UsageError(f"num_sms={num_sms!r}: expected a whole number, 0 for all SMs")
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    most = _device_sms() if initialized else 0
    if most and num_sms > most:
        raise UsageError(f"num_sms={num_sms}: the current device has {most}")
    _Policy.num_sms = num_sms
    _Policy.key = num_sms, _Policy.batch_invariant


def get_num_sms() -> int:
    """The budget set, or the current device's SM count; 0 where neither is known."""
    return _Policy.num_sms or _device_sms()


def set_batch_invariant(enabled: bool) -> None:
    """From now on, whether the bits of a row of the result must not depend on how many rows M is.

    One order of summing then serves every M of an N and K; the SM budget and the GPU do not change
    it either. It is part of the problem: tune with batch_invariant=true in the shapes. Until this
    is called KGEN_BATCH_INVARIANT says it. Where the reference answers nothing is promised.
    Raises UsageError for anything but a bool.
    """
    if not isinstance(enabled, bool):
        raise UsageError(f"batch_invariant={enabled!r}: expected True or False")
    _Policy.batch_invariant = enabled
    _Policy.key = _Policy.num_sms, enabled


def is_batch_invariant() -> bool:
    """What `set_batch_invariant` or KGEN_BATCH_INVARIANT says; raises UsageError for the latter."""
    if _Policy.batch_invariant is None:
        set_batch_invariant(batch_invariant_by_default())
    return bool(_Policy.batch_invariant)


def warm_up(
    m: int | Iterable[int],
    n: int,
    k: int,
    out_dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | int = "cuda",
    **options: Any,
) -> None:
    """Build and load what `gemm_fp8_nt` needs for these sizes, before it is timed or captured.

    `options` as in `plan_for`. Launches nothing. Does nothing where the reference would answer.
    """
    _check_out_dtype(out_dtype)
    for rows in [m] if isinstance(m, int) else m:
        plan_for(rows, n, k, out_dtype, device, **options)


# ------------------------------------------------------------------------------- reports


def last_path() -> str:
    """What answered this thread's last call.

    "kernel" · "kernel with copies" · "reference" · "empty": nothing to compute · "": no call yet.
    """
    return _state.path


def stats() -> dict[str, Any]:
    """Counters of this process: see `kgen.runtime.stats.Stats`."""
    return _stats.snapshot()


def reset_stats() -> None:
    """Start counting anew."""
    _stats.reset()


def missed_shapes() -> list[str]:
    """The problems called that were not tuned, as lines for a file for `kgen tune --shapes`."""
    return _stats.missed_shapes()


def plan_for(
    m: int,
    n: int,
    k: int,
    out_dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | int = "cuda",
    *,
    recipe: str = "block",
    a_dtype: torch.dtype = E4M3,
    b_dtype: torch.dtype = E4M3,
    bias: bool = False,
    fast_accum: bool = False,
) -> Plan | None:
    """How a call with these sizes is answered; None where the reference answers by design.

    `recipe` is that of its scales, `a_dtype` and `b_dtype` are the types of its operands, `bias` is
    whether it gives one. Builds and loads the kernel as the call would.
    """
    _check_out_dtype(out_dtype)
    for name, dtype in (("a_dtype", a_dtype), ("b_dtype", b_dtype)):
        if dtype not in OPERAND_DTYPE_NAMES:
            raise UnsupportedInput(f"{name}={dtype}: expected float8_e4m3fn or float8_e5m2")
    if recipe not in DENSE_RECIPES or (fast_accum and recipe == "block"):
        raise UnsupportedInput(
            f"recipe={recipe!r} with fast_accum={fast_accum}: expected one of "
            f"{', '.join(DENSE_RECIPES)}, and fast_accum for row and tensor only"
        )
    torch_device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    ordinal = hopper_ordinal(torch_device)
    if ordinal is None or min(m, n, k) < 1:
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
    with _lock:
        _dispatchers.clear()
        _prepared.clear()
        grouped.forget()
        wgrad.forget()
    RECORDER.reopen()


# ------------------------------------------------------------------------------ the path


def _run(ready: _Ready, out: torch.Tensor) -> None:
    ordinal = ready.ordinal
    if current_device() == ordinal:
        ready.launch.run(current_stream(ordinal))
    else:
        with torch.cuda.device(ordinal):
            ready.launch.run(current_stream(ordinal))
    count_write((out,))
    _state.path = "kernel"


def _without_memory(x: Inputs) -> None:
    """Tensors with no address to give: a tracer's, or such as no path serves."""
    if not ops.stand_for_others(x):
        check(x)
    ops.call_gemm(x)


def _first_call(x: Inputs, key: tuple[Any, ...], ready: _Ready | None) -> None:
    """A call with tensors not seen before, or that are never served from `_prepared`.

    `ready`: what is prepared for these addresses, and may fit after all.
    """
    tensors = x.tensors()
    if ops.stand_for_others(x):
        ops.call_gemm(x)
        return
    if _Policy.batch_invariant is None:  # the first call of all: its key says nothing yet
        is_batch_invariant()
        key = tuple(_Policy.key if part == (_Policy.num_sms, None) else part for part in key)
    ops.refuse_gradient("gemm_fp8_nt", tensors)
    if ready is not None and layout_of(tensors) == ready.layout:
        _remember(key, replace(ready, same=same_as(tensors)))
        _run(ready, x.out)
        return
    sizes = check(x)
    if min(sizes.m, sizes.n) == 0:
        _state.path = "empty"
        return
    if sizes.k == 0:
        with torch.no_grad():
            x.out.zero_() if x.bias is None else x.out.copy_(x.bias.expand_as(x.out))
        _state.path = "empty"
        return
    x = as_matrices(x, sizes.recipe)
    ordinal = hopper_ordinal(x.a.device)
    plan = None if ordinal is None else _plan(ordinal, sizes)
    if ordinal is None or plan is None or plan.kernel is None:
        count_reference(sizes, _Policy.num_sms, is_batch_invariant())
        _refer(x, sizes, plan.reason if plan else "")
        return
    num_sms = _budget(plan.kernel.device)
    reasons = copy_reasons(x, sizes)
    if reasons or is_worth_turning(x.sfa):
        run_with_copies(x, sizes, reasons, plan.kernel, num_sms=num_sms, stats=_stats)
        count_write((x.out,))
        _state.path = "kernel with copies" if reasons else "kernel"
        return
    launch = plan.kernel.prepare(*x.tensors(), num_sms=num_sms)
    ready = _ready(tensors, ordinal, launch)
    _remember(key, ready)
    _run(ready, x.out)


def _plan(ordinal: int, sizes: Sizes) -> Plan:
    return _plan_of(ordinal, lambda num_sms: sizes.problem(num_sms, is_batch_invariant()))[0]


def _plan_of(ordinal: int, problem: Callable[[int], GemmProblem]) -> tuple[Plan, int]:
    """How the problem that there is under a budget of SMs is answered, and that budget."""
    dispatcher = _dispatchers.get(ordinal) or _make_dispatcher(ordinal)
    if isinstance(dispatcher, str):
        return Plan(None, None, dispatcher), 0
    num_sms = _budget(dispatcher.device)
    return dispatcher.plan(problem(num_sms)), num_sms


def _make_dispatcher(ordinal: int) -> Dispatcher | str:
    with _lock:
        if ordinal not in _dispatchers:
            settings = Settings.from_env()
            try:
                builder = StoredBuilder(settings)
                made = Dispatcher(ordinal, builder, settings.db_url, _stats)
            except KgenError as error:
                raise_if_final(error)
                _dispatchers[ordinal] = str(error)
            else:
                _dispatchers[ordinal] = made
        return _dispatchers[ordinal]


def _refer(x: Inputs, sizes: Sizes, reason: str) -> None:
    """The reference answers: by design without a `reason`, else because no kernel could."""
    if reason:
        _fall_back(x.a.device, reason)
    with torch.no_grad():
        gemm_reference_into(x.out, x.a, x.sfa, x.b, x.sfb, bias=x.bias, recipe=sizes.recipe)
    _state.path = "reference"


def _fall_back(device: torch.device, reason: str) -> None:
    _stats.add_reason("fallbacks", reason)
    _stats.warn_once(
        f"fallback {reason}", f"kgen answers with the slow reference on {device}, because {reason}"
    )


def _budget(device: Device) -> int:
    return _Policy.num_sms if _Policy.num_sms < device.num_sms else 0


def _remember(key: tuple[Any, ...], ready: _Ready) -> None:
    with _lock:
        while len(_prepared) >= _MAX_PREPARED and key not in _prepared:
            _prepared.pop(next(iter(_prepared)))
        _prepared[key] = ready


# ------------------------------------------------------------------------------- devices


def _device_sms() -> int:
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties().multi_processor_count)


def _after_fork() -> None:
    # Handles of the parent mean nothing here, and its lock may have been held.
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _stats.after_fork()
    _dispatchers.clear()
    _prepared.clear()
    grouped.forget()
    wgrad.forget()


def _ready(tensors: tuple[torch.Tensor, ...], ordinal: int, launch: Launch) -> _Ready:
    _stats.add("prepared")
    return _Ready(same_as(tensors), layout_of(tensors), ordinal, launch)


def _set_path(path: str) -> None:
    _state.path = path


os.register_at_fork(after_in_child=_after_fork)
ops.register(gemm_fp8_nt)
_HOST: Final = grouped.Host(
    hopper_ordinal=lambda device: hopper_ordinal(device),  # noqa: PLW0108, tests replace it
    plan=_plan_of,
    budget=lambda: _Policy.num_sms,
    ready=_ready,
    run=_run,
    count_turned=lambda: _stats.add_reason("copies", "a_scales: row-major"),
    fall_back=_fall_back,
    set_path=_set_path,
)
grouped.attach(_HOST)
wgrad.attach(_HOST)
