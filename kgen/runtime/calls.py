"""What all public calls share: the process's policy, its counters, plans, and launches kept ready.

Takes problems and prepared launches from `kgen.runtime.gemm` and `kgen.runtime.grouped`; gives
plans, runs launches, and says what answered. Importing this module touches no GPU, reads no file
and no environment variable. Must not import search, verify, measure or optuna.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from kgen import settings
from kgen.device import Device
from kgen.errors import KgenError, UsageError
from kgen.problem import GemmProblem
from kgen.runtime.dispatch import (
    Dispatcher,
    Plan,
    StoredBuilder,
    hopper_ordinal,
    raise_if_final,
)
from kgen.runtime.guard import Same, count_write, layout_of, same_as
from kgen.runtime.kernel import Launch, current_device, current_stream
from kgen.runtime.stats import Stats
from kgen.settings import Settings, batch_invariant_by_default

#: Launches that each kind of call keeps ready, by their tensors' addresses and the output's shape;
#: about 2 KB each.
MAX_PREPARED: Final = 8192


@dataclass(frozen=True, slots=True)
class Ready:
    """A launch for tensors at known addresses, right as long as `same` or `layout` holds."""

    same: Same
    layout: tuple[Any, ...]
    ordinal: int
    launch: Launch


class Policy:
    """What holds for every call of the process; `key` changes with any of it."""

    num_sms = 0
    #: None until a call or `is_batch_invariant` asks: then KGEN_BATCH_INVARIANT is read.
    batch_invariant: bool | None = None
    key: tuple[int, bool | None] = (0, None)


class _State(threading.local):
    path = ""


STATS = Stats()
#: By device; for one that kernels can not be had for, the reason.
dispatchers: dict[int, Dispatcher | str] = {}
lock = threading.Lock()
_state = _State()


# ------------------------------------------------------------------------------- policy


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
    Policy.num_sms = num_sms
    Policy.key = num_sms, Policy.batch_invariant


def get_num_sms() -> int:
    """The budget set, or the current device's SM count; 0 where neither is known."""
    return Policy.num_sms or _device_sms()


def set_batch_invariant(enabled: bool) -> None:
    """From now on, whether the bits of a row of the result must not depend on how many rows M is.

    One order of summing then serves every M of an N and K; the SM budget and the GPU do not change
    it either. It is part of the problem: tune with batch_invariant=true in the shapes. Until this
    is called KGEN_BATCH_INVARIANT says it. Where the reference answers nothing is promised.
    Raises UsageError for anything but a bool.
    """
    if not isinstance(enabled, bool):
        raise UsageError(f"batch_invariant={enabled!r}: expected True or False")
    Policy.batch_invariant = enabled
    Policy.key = Policy.num_sms, enabled


def is_batch_invariant() -> bool:
    """What `set_batch_invariant` or KGEN_BATCH_INVARIANT says; raises UsageError for the latter."""
    if Policy.batch_invariant is None:
        set_batch_invariant(batch_invariant_by_default())
    return bool(Policy.batch_invariant)


@cache
def wants_checks() -> bool:
    """`kgen.settings.wants_checks`, asked once; `wants_checks.cache_clear()` has it asked anew."""
    return settings.wants_checks()


# ------------------------------------------------------------------------------- reports


def last_path() -> str:
    """What answered this thread's last call.

    "kernel" · "kernel with copies" · "reference" · "empty": nothing to compute · "": no call yet.
    """
    return _state.path


def set_path(path: str) -> None:
    """What `last_path` says from now on."""
    _state.path = path


def stats() -> dict[str, Any]:
    """Counters of this process: see `kgen.runtime.stats.Stats`."""
    return STATS.snapshot()


def reset_stats() -> None:
    """Start counting anew."""
    STATS.reset()


def missed_shapes() -> list[str]:
    """The problems called that were not tuned, as lines for a file for `kgen tune --shapes`."""
    return STATS.missed_shapes()


def fall_back(device: torch.device, reason: str) -> None:
    """Count, and warn once, that the reference answers on a device for a reason."""
    STATS.add_reason("fallbacks", reason)
    STATS.warn_once(
        f"fallback {reason}", f"kgen answers with the slow reference on {device}, because {reason}"
    )


# --------------------------------------------------------------------------------- plans


def plan_of(ordinal: int, problem: Callable[[int], GemmProblem]) -> tuple[Plan, int]:
    """How the problem that there is under a budget of SMs is answered, and that budget."""
    dispatcher = dispatchers.get(ordinal) or _make_dispatcher(ordinal)
    if isinstance(dispatcher, str):
        return Plan(None, None, dispatcher), 0
    num_sms = budget(dispatcher.device)
    return dispatcher.plan(problem(num_sms)), num_sms


def budget(device: Device) -> int:
    """SMs set by the user; 0 where the device has no more."""
    return Policy.num_sms if Policy.num_sms < device.num_sms else 0


def ordinal_of(device: torch.device) -> int | None:
    """`kgen.runtime.dispatch.hopper_ordinal`; tests make a GPU up here, for every call."""
    return hopper_ordinal(device)


def _make_dispatcher(ordinal: int) -> Dispatcher | str:
    with lock:
        if ordinal not in dispatchers:
            chosen = Settings.from_env()
            try:
                builder = StoredBuilder(chosen)
                made = Dispatcher(
                    ordinal,
                    builder,
                    chosen.db_url,
                    STATS,
                    foreign=chosen.foreign,
                    nvtx=chosen.nvtx,
                )
            except KgenError as error:
                raise_if_final(error)
                dispatchers[ordinal] = str(error)
            else:
                dispatchers[ordinal] = made
        return dispatchers[ordinal]


# ------------------------------------------------------------------------------ launches


def ready_for(tensors: tuple[torch.Tensor, ...], ordinal: int, launch: Launch) -> Ready:
    """A launch that can be kept for these tensors."""
    STATS.add("prepared")
    return Ready(same_as(tensors), layout_of(tensors), ordinal, launch)


def run_ready(ready: Ready, out: torch.Tensor) -> None:
    """Launch on the current stream of the launch's device; `out` counts as written."""
    ordinal = ready.ordinal
    if current_device() == ordinal:
        ready.launch.run(current_stream(ordinal))
    else:
        with torch.cuda.device(ordinal):
            ready.launch.run(current_stream(ordinal))
    count_write((out,))
    _state.path = "kernel"


def remember(prepared: dict[tuple[Any, ...], Ready], key: tuple[Any, ...], ready: Ready) -> None:
    """Keep a launch, in place of the oldest where there are MAX_PREPARED."""
    with lock:
        while len(prepared) >= MAX_PREPARED and key not in prepared:
            prepared.pop(next(iter(prepared)), None)
        prepared[key] = ready


def forget() -> None:
    """Forget every choice, so that the next calls see what was tuned since."""
    with lock:
        dispatchers.clear()


def after_fork() -> None:
    """In a child: handles of the parent mean nothing, and its lock may have been held."""
    global lock  # noqa: PLW0603
    lock = threading.Lock()
    STATS.after_fork()
    dispatchers.clear()


def _device_sms() -> int:
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties().multi_processor_count)
