"""The one process that owns the CUDA context: `GpuWorker`, and what its backend must do.

Takes a problem and its cubins, gives `Measured` values. A fault, a hang or a crash of a candidate
ends the child only; the next call works in a new one. Must not import torch or CUDA; the backend
in the child does.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from kgen.device import Device
from kgen.errors import (
    DriverError,
    GpuMissing,
    Interrupted,
    KgenError,
    LaunchError,
    Untunable,
    WorkerDied,
    WorkerTimeout,
    WrongResult,
)
from kgen.problem import GemmProblem
from kgen.search.child import Child
from kgen.search.gpu_lock import GpuLock
from kgen.search.stop import StopFlag

if TYPE_CHECKING:
    from kgen.build import Cubin

#: Loading torch and making a context, on a busy machine with a cold disk.
START_TIMEOUT_S: Final = 180.0
#: Inputs and reference of a problem; the largest take seconds.
OPEN_TIMEOUT_S: Final = 120.0
#: A GPU may need a moment after a killed process before a new context can be made.
START_ATTEMPTS: Final = 3
START_PAUSE_S: Final = 2.0
#: What each candidate of a screen may add to the limit of one trial.
SCREEN_S: Final = 0.25


@dataclass(frozen=True)
class Hello:
    """What the child found: the device, its UUID (names the lock) and the software under it.

    `driver` is the driver's version, `cuda` the newest CUDA that it serves (major, minor).
    """

    device: Device
    uuid: str
    driver: str = ""
    cuda: tuple[int, int] | None = None


@dataclass(frozen=True)
class Measured:
    """One verified candidate's time, in microseconds, by the policy of that name.

    `error` is its largest relative tile error; `verify_s` the seconds of its verification, `time_s`
    its share of those of timing, as the tuning process sees them. `control_us`: what the control
    kernel took at the same time, if there was one.
    """

    policy: str
    error: float
    median_us: float
    p10_us: float
    p90_us: float
    samples_us: tuple[float, ...]
    clocks: dict[str, Any] = field(default_factory=dict)
    verify_s: float = 0.0
    time_s: float = 0.0
    control_us: float | None = None


@dataclass(frozen=True)
class Screened:
    """What came of one candidate of a `screen`.

    `status` is ok, wrong or launch_failed, with a `reason` where there is no time; `error` is the
    largest tile error of the one launch that was compared with the reference. `check_s` and
    `time_s` are the candidate's seconds of loading and checking, and its share of the timing.
    """

    status: str
    reason: str = ""
    measured: Measured | None = None
    check_s: float = 0.0
    time_s: float = 0.0


class Backend(Protocol):
    """What runs in the child. One problem is open at a time, with its inputs and references."""

    def hello(self) -> Hello:
        """The device at hand; raises GpuMissing."""

    def open(self, problem: GemmProblem) -> None:
        """Make inputs and references, freeing the last problem's; raises Untunable."""

    def check_policy(self, policy: str) -> None:
        """Time something trivial, once: the first use of the profiler takes seconds.

        Raises GpuMissing when the policy can not be used on this machine.
        """

    def verify(self, cubin: Cubin) -> float:
        """Load and check one candidate and keep it for `time`; gives its largest tile error.

        Raises LaunchError, WrongResult, or DriverError with `fatal` when the context is lost.
        """

    def hold(self, cubin: Cubin) -> float:
        """Keep one for `time` that was verified before, in another child: one launch is checked."""

    def time(
        self, keys: tuple[str, ...], policy: str, best_us: float | None, control: str
    ) -> list[Measured]:
        """Time verified candidates of the open problem, alternating when there are several.

        `best_us` as in `measure_many`; `control` is the key of one that is timed beside them.
        """

    def screen(
        self, cubins: Sequence[Cubin], policy: str, best_us: float, diary: str
    ) -> list[Screened]:
        """Check each candidate by one launch, time those that passed together, let go of all.

        For a timing table: what passes here is not verified. `best_us` as in `measure_many`. The
        file `diary` holds the index of the one whose launch is checked, and nothing afterwards.
        """


class GpuWorker:
    """Verifies and times candidates in a child that is replaced when one of them breaks it.

    `on_replaced` gets the reason each time, `on_wait` a call when another run holds the GPU.
    """

    def __init__(
        self,
        target: str,
        options: dict[str, Any],
        trial_timeout_s: float,
        stop: StopFlag,
        *,
        on_replaced: Callable[[str], None] = lambda reason: None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._start = (target, options)
        self._limit_s = trial_timeout_s
        self._stop = stop
        self._on_replaced = on_replaced
        self._on_wait = on_wait
        self._lock: GpuLock | None = None
        self._is_closed = False
        self._child = self._spawn()
        self._problem: GemmProblem | None = None
        self._errors: dict[str, float] = {}
        self._policies: set[str] = set()
        #: Who was being checked when the last screen failed; None: it was later, or is not known.
        self.culprit: Cubin | None = None

    @property
    def pid(self) -> int:
        """The present child's process id."""
        return self._child.pid

    def hello(self) -> Hello:
        """What the child found; raises GpuMissing when there is no GPU to time on."""
        hello: Hello = self._child.call("hello", timeout_s=START_TIMEOUT_S)
        self._lock = GpuLock(hello.uuid, self._stop, self._on_wait)
        return hello

    def measure(
        self,
        problem: GemmProblem,
        cubins: Sequence[Cubin],
        policy: str,
        best_us: float | None = None,
        control: Cubin | None = None,
    ) -> list[Measured]:
        """Verify every cubin, then time them, alternating; each step under its own limit.

        `best_us` as in `measure_many`. `control`, verified before, is timed beside them, and left
        out where it can not be.

        Raises Untunable when the problem can not be set up, GpuMissing when the GPU does not come
        back, and what a candidate's failure is:
        WrongResult, LaunchError, DriverError, MeasureError, WorkerTimeout, WorkerDied.
        """
        if control is not None and not self._hold(problem, control, policy):
            control = None
        with self._ready(problem, policy):
            verify_s = {cubin.key: self._verify(cubin) for cubin in cubins}
            keys = tuple(verify_s)  # configurations may share a cubin
            # A child that was replaced since does not hold it.
            beside = control.key if control and control.key in self._errors else ""
            start = time.monotonic()
            timed: list[Measured] = self._call(
                "time", keys, policy, best_us, beside, times=len(keys) + bool(beside)
            )
            time_s = (time.monotonic() - start) / max(1, len(keys))
        found = {
            key: replace(one, verify_s=verify_s[key], time_s=time_s)
            for key, one in zip(keys, timed, strict=True)
        }
        return [found[cubin.key] for cubin in cubins]

    def _hold(self, problem: GemmProblem, control: Cubin, policy: str) -> bool:
        """Whether the child holds the control; what goes wrong with it is no candidate's fault."""
        if self._problem == problem and control.key in self._errors:
            return True
        try:
            with self._ready(problem, policy):
                self._errors[control.key] = self._call("hold", control)
        except (WrongResult, LaunchError, DriverError, WorkerDied, WorkerTimeout):
            return False
        return True

    def _verify(self, cubin: Cubin) -> float:
        """Have a cubin verified that was not yet; the seconds it took."""
        start = time.monotonic()
        if cubin.key not in self._errors:
            self._errors[cubin.key] = self._call("verify", cubin)
        return time.monotonic() - start

    def screen(
        self, problem: GemmProblem, cubins: Sequence[Cubin], policy: str, best_us: float
    ) -> list[Screened]:
        """Check every cubin by one launch and time all that pass; none is verified.

        All share one trial's limit and some of a second each. Raises as `measure` does: one that
        breaks the child takes the others' results with it, and `culprit` may say which it was.
        """
        self.culprit = None
        unique = list({cubin.key: cubin for cubin in cubins}.values())
        with self._ready(problem, policy), tempfile.NamedTemporaryFile(prefix="kgen-") as diary:
            for cubin in unique:
                self._errors.pop(cubin.key, None)  # it is let go of
            limit_s = self._limit_s + SCREEN_S * len(unique)
            try:
                found: list[Screened] = self._child.call(
                    "screen", unique, policy, best_us, diary.name, timeout_s=limit_s
                )
            except KgenError:
                index = Path(diary.name).read_text()
                self.culprit = unique[int(index)] if index else None
                raise
        by_key = {cubin.key: one for cubin, one in zip(unique, found, strict=True)}
        return [by_key[cubin.key] for cubin in cubins]

    @contextmanager
    def _ready(self, problem: GemmProblem, policy: str) -> Iterator[None]:
        """The GPU to oneself, the problem open; what a candidate breaks is replaced."""
        assert self._lock is not None, "hello comes first"
        self._await_start()
        with self._lock.held():
            self._open(problem, policy)
            try:
                yield
            except KgenError as error:
                self._replace_if_broken(error)
                raise

    def close(self) -> None:
        """End the child; there will be no other."""
        if self._is_closed:
            return
        self._is_closed = True
        self._child.kill()

    def _call(self, method: str, *args: Any, times: int = 1) -> Any:
        return self._child.call(method, *args, timeout_s=self._limit_s * times)

    def _open(self, problem: GemmProblem, policy: str) -> None:
        """Have the policy tried and the problem open in a living child: no candidate is in it yet.

        Once is an accident. Raises GpuMissing when trying the policy breaks the child twice, and
        Untunable when the problem does.
        """
        for attempt in (1, 2):
            try:
                return self._set_up(problem, policy)
            except KgenError as error:
                is_tried = policy in self._policies
                if not self._replace_if_broken(error):
                    raise
                if attempt == 2 and is_tried:
                    raise Untunable(f"inputs and references can not be made: {error}") from error
                if attempt == 2:
                    raise GpuMissing(f"policy {policy} can not be tried here: {error}") from error
                self._await_start()

    def _set_up(self, problem: GemmProblem, policy: str) -> None:
        if policy not in self._policies:
            self._child.call("check_policy", policy, timeout_s=START_TIMEOUT_S)
            self._policies.add(policy)
        if self._problem != problem:
            self._problem, self._errors = None, {}
            self._child.call("open", problem, timeout_s=OPEN_TIMEOUT_S)
            self._problem = problem

    def _await_start(self) -> None:
        """Wait for a child that was just replaced; a candidate's fault is not its fault."""
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                return self._child.wait_ready()
            except (WorkerDied, WorkerTimeout) as error:
                if attempt == START_ATTEMPTS:
                    raise GpuMissing(
                        f"the process that owns the GPU did not start {attempt} times: {error}"
                    ) from error
                time.sleep(START_PAUSE_S)
                self._child = self._spawn()

    def _replace_if_broken(self, error: KgenError) -> bool:
        """Whether the error took the child with it; if so a new one is on its way."""
        lost_context = isinstance(error, DriverError) and error.fatal
        if (
            self._is_closed
            or isinstance(error, Interrupted)
            or (self._child.alive and not lost_context)
        ):
            return False
        if lost_context:
            self._child.kill()
        self._problem, self._errors, self._policies = None, {}, set()
        self._child = self._spawn()
        self._on_replaced(str(error))
        return True

    def _spawn(self) -> Child:
        target, options = self._start
        return Child(target, options, START_TIMEOUT_S, self._stop)
