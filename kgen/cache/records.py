"""What the tuning database holds, as values: trials, outcomes of problems, runs.

Takes plain values and refuses what could never be true; gives frozen dataclasses that cross
processes and turn into JSON. Must not import anything but the standard library and kgen's
problem, config, device and errors.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kgen.config import GemmConfig
from kgen.device import Device
from kgen.errors import DatabaseError
from kgen.problem import GemmProblem

#: ok: verified and timed. compiled: built, not run. The rest: why there is no time.
STATUSES: Final = (
    "ok",
    "compiled",
    "compile_failed",
    "launch_failed",
    "faulted",
    "timeout",
    "wrong",
)
FAILED: Final = frozenset(STATUSES) - {"ok", "compiled"}
#: Statuses that a candidate can have without ever having run.
UNVERIFIED: Final = frozenset({"compiled", "compile_failed", "wrong"})
SOURCES: Final = ("tuned", "predicted", "foreign")
#: Sources whose trials may carry a time.
TIMED_SOURCES: Final = ("tuned", "foreign")
OUTCOMES: Final = ("tuned", "untunable", "predicted")
RUN_STATES: Final = ("running", "finished", "interrupted", "failed", "killed")
#: Outside these a time is not a time: a nanosecond, and an hour, in microseconds.
MIN_US: Final = 1e-3
MAX_US: Final = 3.6e9
#: A verified kernel's largest relative tile error is far below this.
MAX_ERROR: Final = 1.0
#: What a timed trial says about where its number comes from; see `provenance`.
PROVENANCE_KEYS: Final = (
    "device",
    "driver",
    "cuda",
    "compiler",
    "template_hash",
    "generator",
    "clocks",
)


def provenance(
    device: Device,
    *,
    driver: str,
    cuda: str,
    compiler: str,
    template_hash: str,
    generator: str,
    clocks: Mapping[str, Any],
    **more: Any,
) -> dict[str, Any]:
    """Where a trial comes from, complete: the device's facts, and who made and ran the cubin.

    `driver` and `cuda` are versions, `compiler` is Compiler.id, `template_hash` and `generator`
    name what rendered the source (the latter with kgen's version), `clocks` are the SM and memory
    clocks in MHz seen while timing. `more` is kept too. The database adds the date.
    """
    values: dict[str, Any] = {
        "device": asdict(device),
        "driver": driver,
        "cuda": cuda,
        "compiler": compiler,
        "template_hash": template_hash,
        "generator": generator,
        "clocks": dict(clocks),
        **more,
    }
    plain: dict[str, Any] = json.loads(json.dumps(values))  # as the database will give it back
    return plain


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """One candidate, once: what was tried for which problem, and what came of it.

    device_name, num_sms   the device's model and SM count; with cubin_key they bound a timing
    cubin_key              of the artifact; empty only where nothing was built
    status, reason         one of STATUSES; the reason of a failure
    source                 "tuned": this trial ran or was to run; "predicted": only modelled;
                           "foreign": as tuned, of a source by hand, which is only used if asked for
    verified               the output was compared with the reference and passed
    error                  largest relative Frobenius error of a 128x128 tile
    median_us, p10_us, p90_us   of samples_us, in microseconds: the medians of each round
    predicted_us           the analytic model's figure
    policy                 name of the measuring policy
    registers              per thread, as ptxas reports them
    provenance             JSON-able; a timed trial has every key of PROVENANCE_KEYS

    Raises DatabaseError for a record that contradicts itself: a time without a passed
    verification, a status that does not exist, a time that is not a number.
    """

    problem: GemmProblem
    config: GemmConfig
    device_name: str
    num_sms: int
    cubin_key: str
    status: str
    reason: str = ""
    source: str = "tuned"
    verified: bool = False
    error: float | None = None
    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    samples_us: Sequence[float] = ()
    predicted_us: float | None = None
    policy: str = ""
    registers: int | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _one_of("status", self.status, STATUSES)
        _one_of("source", self.source, SOURCES)
        if not self.device_name or self.num_sms < 1:
            raise DatabaseError(
                f"trial on device {self.device_name!r} with {self.num_sms} SMs: "
                "a trial needs the device's name and SM count"
            )
        if self.verified and self.status in UNVERIFIED:
            raise DatabaseError(f"a {self.status} trial can not be verified")
        _check_number("error", self.error, 0.0, MAX_ERROR if self.verified else sys.float_info.max)
        for name in ("median_us", "p10_us", "p90_us"):
            _check_number(name, getattr(self, name), MIN_US, MAX_US)
        # The model may well say that a problem takes years.
        _check_number("predicted_us", self.predicted_us, MIN_US, sys.float_info.max)
        for sample in self.samples_us:
            _check_number("samples_us", sample, MIN_US, MAX_US)
        _check_timed(self)

    @property
    def spread_us(self) -> float | None:
        """90th minus 10th percentile of the samples, in microseconds."""
        if self.p10_us is None or self.p90_us is None:
            return None
        return self.p90_us - self.p10_us

    @property
    def is_foreign(self) -> bool:
        """Whether it is about a source by hand, not about what the templates give."""
        return self.source == "foreign"

    @property
    def failed(self) -> bool:
        """Whether the trial ended in a failure that is not worth another try."""
        return self.status in FAILED

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: problem as a shapes line and as fields, config as fields."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values |= {
            "problem": asdict(self.problem),
            "shape": str(self.problem),
            "config": self.config.to_dict(),
            "spread_us": self.spread_us,
            "samples_us": list(self.samples_us),
            "provenance": dict(self.provenance),
        }
        return values


@dataclass(frozen=True, kw_only=True)
class TrialRow(TrialRecord):
    """A trial as it stands in the database.

    id, run_id, date    of the row (date: UTC, ISO 8601)
    num_rows            rows of this cubin that `median_us` is the median of; 1 for a single row
    """

    id: int
    run_id: int | None
    date: str
    num_rows: int = 1

    def valid_for(self, cubin_key: str, device_name: str, num_sms: int) -> bool:
        """Whether this row's time holds for that cubin on that device; else it is a hint."""
        timed = self.status == "ok" and self.median_us is not None
        here = (self.cubin_key, self.device_name, self.num_sms)
        return timed and here == (cubin_key, device_name, num_sms)


@dataclass(frozen=True)
class Suggestion:
    """A configuration worth trying here first, and why it is no more than that.

    It has to be built, verified and timed on this device before it is used as a result;
    `origin` is the words to show beside it until then.
    """

    config: GemmConfig
    origin: str
    row: TrialRow


@dataclass(frozen=True, kw_only=True)
class ProblemOutcome:
    """How a problem ended in one run on one device.

    `invalid_by_rule` counts the configurations that validity left out; `details` is whatever
    the run wants to know again when it goes on (trials asked for, sampler, seed): JSON-able.
    """

    problem: GemmProblem
    device_name: str
    num_sms: int
    outcome: str
    reason: str = ""
    num_trials: int = 0
    invalid_by_rule: Mapping[str, int] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    run_id: int | None = None
    date: str = ""

    def __post_init__(self) -> None:
        _one_of("outcome", self.outcome, OUTCOMES)
        if self.outcome == "untunable" and not self.reason:
            raise DatabaseError(f"untunable: {self.problem} needs a reason")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"shape": str(self.problem)}


@dataclass(frozen=True)
class DispatchEntry:
    """The kernel of every M above the entry before, up to `up_to`."""

    up_to: int
    config: GemmConfig
    cubin_key: str


@dataclass(frozen=True, kw_only=True)
class DispatchTable:
    """Few kernels for a whole range of M: those of `problem`, whose own M says nothing.

    points    every M at which kernels were timed; there, `bound` holds: a share of the best time
    worst     the largest share by which an entry's kernel is slower than the best at a point
    entries   by growing `up_to`; the first serves from M = 1, the last ends the table

    Raises DatabaseError for entries out of order, none, or a bound that none can be.
    """

    problem: GemmProblem
    device_name: str
    num_sms: int
    policy: str
    bound: float
    worst: float
    points: tuple[int, ...]
    entries: tuple[DispatchEntry, ...]
    run_id: int | None = None
    date: str = ""

    def __post_init__(self) -> None:
        _check_number("bound", self.bound, 0.0, 1.0)
        _check_number("worst", self.worst, 0.0, self.bound)
        for name, found in (
            ("points", list(self.points)),
            ("entries", [entry.up_to for entry in self.entries]),
        ):
            if not found or found != sorted(set(found)) or found[0] < 1:
                raise DatabaseError(f"{name} at M = {found}: expected at least one, ascending")
        if self.entries[-1].up_to != self.points[-1]:
            raise DatabaseError(
                f"the table ends at M = {self.entries[-1].up_to}: expected the last point, "
                f"{self.points[-1]}"
            )

    @property
    def num_kernels(self) -> int:
        """Different cubins in it."""
        return len({entry.cubin_key for entry in self.entries})

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        entries = [asdict(e) | {"config": e.config.to_dict()} for e in self.entries]
        return asdict(self) | {"entries": entries, "points": list(self.points)}


@dataclass(frozen=True)
class RunRecord:
    """One `kgen tune`: who ran it, from when to when, and how it ended.

    Dates are UTC, ISO 8601; `heartbeat` is the last time the run wrote. `ended` is None while
    it runs. `host` and `process` tell a living writer from a dead one (see `cache.liveness`).
    """

    id: int
    command: str
    kgen_version: str
    options: Mapping[str, Any]
    host: str
    pid: int
    process: str
    started: str
    heartbeat: str
    ended: str | None
    state: str


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise DatabaseError(f"{name}={value!r}: expected one of {', '.join(allowed)}")


def _check_number(name: str, value: float | None, low: float, high: float) -> None:
    """NaN fails every comparison, so it is refused like a number out of range."""
    if value is not None and not low <= value <= high:
        raise DatabaseError(f"{name}={value!r}: expected a number from {low:g} to {high:g}")


def _check_timed(trial: TrialRecord) -> None:
    """A time and status ok come together, with verification, error, spread and provenance."""
    times = (trial.p10_us, trial.median_us, trial.p90_us)
    if trial.status != "ok":
        if any(t is not None for t in times) or trial.samples_us:
            raise DatabaseError(f"a {trial.status} trial can not carry a time")
        return
    if not trial.verified or trial.error is None:
        raise DatabaseError("a timed trial needs a passed verification and its error")
    if trial.source not in TIMED_SOURCES:
        raise DatabaseError(f"a timed trial can not be {trial.source}")
    known = [t for t in times if t is not None]
    if len(known) < len(times) or not trial.samples_us:
        raise DatabaseError("an ok trial needs median_us, p10_us, p90_us and samples_us")
    if known != sorted(known):
        raise DatabaseError(f"p10_us, median_us, p90_us = {times}: expected ascending order")
    if not trial.cubin_key or not trial.policy:
        raise DatabaseError("a timed trial needs its cubin_key and the policy it was timed under")
    missing = [key for key in PROVENANCE_KEYS if key not in trial.provenance]
    if missing:
        raise DatabaseError(f"a timed trial's provenance lacks {', '.join(missing)}")
