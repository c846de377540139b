"""A source by hand against the tuned kernel and the default: `race`.

Takes a problem and a `ForeignSource`, gives a `Race` of interleaved times; each measurement is a
row of the database, that of the source by hand as foreign, which no search and no dispatch uses
unless asked. Must not import torch, CUDA or optuna.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Final

from kgen.config import GemmConfig
from kgen.device import Device
from kgen.errors import GpuMissing, Interrupted, KgenError, Untunable
from kgen.foreign import ForeignSource
from kgen.heuristic import default_config
from kgen.intervals import Interval, ratio_interval
from kgen.problem import GemmProblem
from kgen.search.events import TuneOptions
from kgen.search.gpu_run import GpuRun, gpu_run
from kgen.search.run import status_of
from kgen.settings import Settings

if TYPE_CHECKING:
    from kgen.build import Cubin

FOREIGN: Final = "foreign"
TUNED: Final = "tuned"
DEFAULT: Final = "default"


@dataclass
class Contestant:
    """One kernel of a race. `samples_us` of all rounds, in the order taken; empty where it failed.

    name      foreign, tuned or default; "tuned, default" where both are the same configuration
    status    "ok", or one of records.STATUSES, for `reason`
    error     largest relative tile error
    """

    name: str
    config: GemmConfig
    status: str = "ok"
    reason: str = ""
    error: float | None = None
    registers: int | None = None
    samples_us: list[float] = field(default_factory=list)

    @property
    def median_us(self) -> float | None:
        """Of all samples, in microseconds; None where it failed."""
        return median(self.samples_us) if self.samples_us else None


@dataclass(frozen=True)
class Race:
    """What came of a race; the source by hand is the first of `contestants`."""

    problem: GemmProblem
    device: Device
    policy: str
    contestants: tuple[Contestant, ...]
    notes: tuple[str, ...] = ()

    @property
    def foreign(self) -> Contestant:
        """The source by hand."""
        return self.contestants[0]

    def ratio(self, other: Contestant) -> tuple[float, Interval | None] | None:
        """The foreign time over another's, and the interval of the median of paired rounds."""
        mine, yours = self.foreign.median_us, other.median_us
        if mine is None or yours is None:
            return None
        return mine / yours, ratio_interval(self.foreign.samples_us, other.samples_us)


def verdict(ratio: tuple[float, Interval | None] | None) -> str:
    """faster or slower, where the whole interval says so; else that they can not be told apart."""
    if ratio is None:
        return "not compared"
    interval = ratio[1]
    if interval is None:
        return "too few rounds to tell"
    if interval.high < 1:
        return "faster"
    return "slower" if interval.low > 1 else "no difference beyond the noise"


def race(
    settings: Settings,
    problem: GemmProblem,
    source: ForeignSource,
    rounds: int = 3,
    options: TuneOptions | None = None,
) -> Race:
    """Verify and time a source by hand beside the tuned kernel and the default.

    Each kernel is first taken alone, so that a failure has a name; then all that passed are timed
    together, alternating, `rounds` times. Raises GpuMissing and DatabaseError.
    """
    options = options or TuneOptions()
    with gpu_run(settings, "race", options, {"problem": str(problem)}) as gpu:
        notes: list[str] = []
        entrants = _entrants(gpu, problem, source, notes)
        ready: list[tuple[Contestant, Cubin]] = []
        for contestant, build in entrants:
            cubin = _qualified(gpu, problem, contestant, build, options.policy)
            if cubin:
                ready.append((contestant, cubin))
        if len(ready) > 1 and ready[0][0] is entrants[0][0]:
            _time_together(gpu, problem, ready, options.policy, rounds)
        contestants = tuple(contestant for contestant, _ in entrants)
        return Race(problem, gpu.device, options.policy, contestants, tuple(notes))


def _entrants(
    gpu: GpuRun, problem: GemmProblem, source: ForeignSource, notes: list[str]
) -> list[tuple[Contestant, Callable[[], Cubin]]]:
    """Who races, and how each is built."""
    run, device = gpu.run, gpu.device
    entrants: list[tuple[Contestant, Callable[[], Cubin]]] = [
        (Contestant(FOREIGN, source.config), partial(run.builder.build_foreign, source, problem))
    ]
    default = default_config(problem, device)
    policy = run.options.policy
    ranked = run.db.ranking(problem, device.name, device.num_sms, policy)
    winner = next((row.config for row in ranked if run.is_current(row)), None)
    if winner is None:
        notes.append(
            f"{problem} has no tuned kernel of today's compiler and templates for policy {policy}: "
            "the default alone stands beside the source"
        )
    names = {TUNED: winner, DEFAULT: default}
    if winner == default:
        names = {f"{TUNED}, {DEFAULT}": default}
    for name, config in names.items():
        if config is not None:
            entrants.append((Contestant(name, config), partial(run.builder.build, problem, config)))
    return entrants


def _qualified(
    gpu: GpuRun,
    problem: GemmProblem,
    contestant: Contestant,
    build: Callable[[], Cubin],
    policy: str,
) -> Cubin | None:
    """The contestant's cubin, verified; None where it failed, which is recorded."""
    source = _source_of(contestant)
    try:
        cubin = build()
    except KgenError as error:
        contestant.status, contestant.reason = status_of(error), str(error)
        gpu.run.record_failure(
            problem,
            contestant.config,
            contestant.status,
            contestant.reason,
            cubin_key="" if source == FOREIGN else None,
            source=source,
        )
        return None
    contestant.registers = cubin.registers
    try:
        (measured,) = gpu.check(problem, [cubin], policy, [source])
    except (GpuMissing, Interrupted, Untunable):
        raise
    except KgenError as error:
        contestant.status, contestant.reason = status_of(error), str(error)
        return None
    contestant.error = measured.error
    contestant.samples_us += measured.samples_us
    return cubin


def _time_together(
    gpu: GpuRun,
    problem: GemmProblem,
    ready: list[tuple[Contestant, Cubin]],
    policy: str,
    rounds: int,
) -> None:
    """Times that can be compared in pairs take the place of those that each had alone."""
    contestants = [contestant for contestant, _ in ready]
    cubins = [cubin for _, cubin in ready]
    sources = [_source_of(contestant) for contestant in contestants]
    for contestant in contestants:
        contestant.samples_us.clear()
    for _ in range(rounds):
        found = gpu.check(problem, cubins, policy, sources)
        for contestant, measured in zip(contestants, found, strict=True):
            contestant.samples_us += measured.samples_us


def _source_of(contestant: Contestant) -> str:
    return FOREIGN if contestant.name == FOREIGN else "tuned"
