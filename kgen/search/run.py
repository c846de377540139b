"""What all parts of one tuning run share: `Run`, and how errors become statuses.

Takes the pieces that `search.tune` opened, gives records and waits. Must not import torch, CUDA
or optuna.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kgen.cache.db import TuningDatabase
from kgen.cache.keys import or_nothing
from kgen.cache.lessons import lessons
from kgen.cache.records import ProblemOutcome, TrialRecord, TrialRow, provenance
from kgen.config import GemmConfig
from kgen.device import Device
from kgen.errors import (
    CompileError,
    DriverError,
    ImplausibleTime,
    Interrupted,
    InvalidConfig,
    KgenError,
    LaunchError,
    MeasureError,
    RenderError,
    SassError,
    WorkerDied,
    WorkerTimeout,
    WrongResult,
)
from kgen.problem import GemmProblem
from kgen.search.compile_pool import Builder, CompilePool
from kgen.search.events import OnEvent, TuneOptions, WorkerReplaced
from kgen.search.gpu_worker import Hello, Measured
from kgen.search.stop import StopFlag
from kgen.validity import why_invalid

if TYPE_CHECKING:
    from kgen.build import Cubin

_POLL_S: Final = 0.1
#: Reasons are for people; a compiler's whole log is in the artifact store.
_MAX_REASON: Final = 2000


def status_of(error: KgenError) -> str:
    """The status of a candidate that failed like this; what is no candidate's fault is raised."""
    match error:
        case CompileError() | RenderError() | SassError() | InvalidConfig():
            return "compile_failed"
        case WrongResult() | ImplausibleTime():
            return "wrong"
        case WorkerTimeout():
            return "timeout"
        case WorkerDied() | DriverError(fatal=True):
            return "faulted"
        case LaunchError() | DriverError() | MeasureError():
            # Two measurements that failed, by lost events say, prove nothing against the cubin.
            return "launch_failed"
    raise error


def why_no_valid(invalid_by_rule: Mapping[str, int]) -> str:
    """What to say of a problem whose every configuration some rule forbids."""
    rules = ", ".join(f"{rule} {n}" for rule, n in sorted(invalid_by_rule.items()))
    return f"no valid configuration; ruled out by: {rules}"


def is_current(
    row: TrialRow, device: Device, key_of: Callable[[GemmProblem, GemmConfig], str]
) -> bool:
    """Whether a trial of `device` is about the cubin that its configuration gives today.

    `key_of` gives that cubin's key, or raises RenderError.
    """
    if why_invalid(row.problem, row.config, device):
        return False
    return row.cubin_key == or_nothing(key_of)(row.problem, row.config)


@dataclass
class Run:
    """One run: where it records, what it runs on, who works for it, when it must end."""

    options: TuneOptions
    db: TuningDatabase
    run_id: int
    device: Device
    hello: Hello | None
    builder: Builder
    pool: CompilePool
    on_event: OnEvent
    stop: StopFlag
    facts: Mapping[str, str] = field(init=False)
    #: What came of each configuration of each problem, medians in microseconds, None for failures.
    lessons: dict[GemmProblem, dict[GemmConfig, float | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.facts = self.builder.facts()

    def load_lessons(self) -> None:
        """Begin with what the database has of this device and policy."""
        device = self.device
        known = lessons(self.db, device.name, device.num_sms, self.options.policy)
        self.lessons.update(known)

    def key(self, problem: GemmProblem, config: GemmConfig) -> str:
        """The key that the configuration's cubin has today."""
        return self.builder.key(problem, config)

    def is_current(self, row: TrialRow) -> bool:
        """Whether a trial of this device is about the cubin that its configuration gives today."""
        return is_current(row, self.device, self.key)

    def check_stop(self) -> None:
        """Raise Interrupted when the run was told to end."""
        if self.stop.is_set():
            raise Interrupted("the run was stopped")

    def wait_any(self, futures: Iterable[Future[Any]], until: float) -> bool:
        """Wait until one is done; False when `until` (time.monotonic) came first."""
        waiting = list(futures)
        while waiting:
            if wait(waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED).done:
                return True
            self.check_stop()
            self.tell_of_lost_compilers()
            if time.monotonic() > until:
                return False
        return False

    def tell_of_lost_compilers(self) -> None:
        """Report compile processes that were replaced since the last call."""
        while not self.pool.replaced.empty():
            self.on_event(WorkerReplaced("compile", self.pool.replaced.get()))

    def record_ok(
        self,
        problem: GemmProblem,
        cubin: Cubin,
        measured: Measured,
        predicted_us: float,
        stage: str,
        *,
        source: str = "tuned",
        **more: Any,
    ) -> None:
        """Append a verified time; `more` joins its provenance."""
        self._record(
            problem,
            cubin.config,
            cubin.key,
            status="ok",
            source=source,
            verified=True,
            error=measured.error,
            median_us=measured.median_us,
            p10_us=measured.p10_us,
            p90_us=measured.p90_us,
            samples_us=measured.samples_us,
            predicted_us=predicted_us,
            policy=measured.policy,
            registers=cubin.registers,
            provenance=self.provenance(
                measured.clocks,
                stage=stage,
                control_us=measured.control_us,
                seconds={
                    "compile": cubin.compile_s,
                    "verify": round(measured.verify_s, 4),
                    "time": round(measured.time_s, 4),
                },
                **more,
            ),
        )

    def record_failure(
        self,
        problem: GemmProblem,
        config: GemmConfig,
        status: str,
        reason: str,
        *,
        cubin_key: str | None = None,
        source: str = "tuned",
    ) -> None:
        """Append a candidate that did not get as far as a time.

        `cubin_key` is the key of a cubin that is not the one this configuration gives today.
        """
        self._record(
            problem,
            config,
            or_nothing(self.key)(problem, config) if cubin_key is None else cubin_key,
            status=status,
            source=source,
            reason=reason[:_MAX_REASON],
            provenance=self.provenance({}),
        )

    def record_compiled(self, problem: GemmProblem, cubin: Cubin, predicted_us: float) -> None:
        """Append a candidate that was built and ranked by the model, and never ran."""
        self._record(
            problem,
            cubin.config,
            cubin.key,
            status="compiled",
            source="predicted",
            predicted_us=predicted_us,
            registers=cubin.registers,
            provenance=self.provenance({}),
        )

    def record_outcome(self, problem: GemmProblem, outcome: str, **values: Any) -> None:
        """Append how the problem ended on this device."""
        record = ProblemOutcome(
            problem=problem,
            device_name=self.device.name,
            num_sms=self.device.num_sms,
            outcome=outcome,
            **values,
        )
        self.db.record_outcome(record, self.run_id)

    def _record(
        self, problem: GemmProblem, config: GemmConfig, cubin_key: str, **values: Any
    ) -> None:
        trial = TrialRecord(
            problem=problem,
            config=config,
            device_name=self.device.name,
            num_sms=self.device.num_sms,
            cubin_key=cubin_key,
            **values,
        )
        self.db.record(trial, self.run_id)

    def provenance(self, clocks: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """Where a trial of this run comes from; see `kgen.cache.records`."""
        hello, facts = self.hello, dict(self.facts)
        return provenance(
            self.device,
            driver=hello.driver if hello else "",
            cuda="{}.{}".format(*hello.cuda) if hello and hello.cuda else "",
            compiler=facts.pop("compiler"),
            template_hash=facts.pop("template_hash"),
            generator=facts.pop("generator"),
            clocks=clocks,
            sampler=self.options.sampler,
            **facts,
            **more,
        )
