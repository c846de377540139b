"""Timing tables from a GPU, for replays: `record_tables` times thousands of configurations fast.

Takes shapes lines, settings and options; gives one `TimingTable` a problem as it is finished. Every
kernel is built once for all problems that share its source, compared with the reference by one
launch, and timed in batches under the policy "screen"; the fastest and a sample are then verified
and measured again as the tuner does it. Nothing of this enters the database. Of a batch that hangs
or faults the kernel that was being checked is out; where it is not known the batch is halved until
the culprit is alone. Must not import torch, CUDA or optuna.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from kgen.config import GemmConfig
from kgen.device import H200
from kgen.errors import GpuMissing, Interrupted, KgenError, Untunable
from kgen.problem import GemmProblem
from kgen.search.compile_pool import Builder, CompilePool
from kgen.search.events import TuneOptions, WorkerReplaced
from kgen.search.gpu_worker import GpuWorker, Hello, Measured, Screened
from kgen.search.run import status_of
from kgen.search.stop import StopFlag, stopped_by_signals
from kgen.search.tables import TableRow, TimingTable
from kgen.search.tune import Machine, Opening
from kgen.settings import Settings
from kgen.shapes import ShapeLine
from kgen.space import valid_configs

if TYPE_CHECKING:
    from kgen.build import Cubin

SCREEN: Final = "screen"
#: Configurations that are measured together again.
GROUP: Final = 8
#: What one problem may take of the time left, in even shares: later ones find kernels built.
SHARES: Final = 1.5
#: The part of that which is kept back to verify and measure the fastest again.
AGAIN_SHARE: Final = 0.2
_POLL_S: Final = 0.02


@dataclass(frozen=True)
class RecordOptions:
    """What is recorded.

    count              configurations drawn for each problem; all where there are not more
    seed               of the draw: the same for all problems, so that they share kernels
    batch              kernels that are checked and timed together
    fastest, sample    of each problem, verified and measured again: the best, and drawn ones
    budget_s           wall clock of the whole; None: no limit
    policy             of what is measured again
    commit             said in the tables
    tune               backend, builder and device; gpu=False: compile only
    """

    count: int = 2000
    seed: int = 0
    batch: int = 48
    fastest: int = 24
    sample: int = 16
    budget_s: float | None = None
    policy: str = "cold"
    commit: str = ""
    tune: TuneOptions = field(default_factory=TuneOptions)


@dataclass(frozen=True)
class Recorded:
    """A problem is done, or was left: `table` is None where nothing was timed, for `reason`.

    Of `num_valid` configurations `num_drawn` were to be timed, and `num_left` were not when the
    time was up; `seconds` are by step.
    """

    problem: GemmProblem
    num_drawn: int
    num_left: int
    num_valid: int
    table: TimingTable | None
    seconds: dict[str, float]
    reason: str = ""


def draw(valid: Iterable[GemmConfig], count: int, seed: int) -> list[GemmConfig]:
    """`count` configurations, each set of them as likely as another, in the order drawn.

    Each configuration has one place in line, whatever set it is drawn from, so that the draws of
    two problems share as many as can be.
    """

    def place(config: GemmConfig) -> bytes:
        return hashlib.sha256(f"{seed} {config.to_dict()}".encode()).digest()

    return sorted(valid, key=place)[:count]


def record_tables(
    lines: Sequence[ShapeLine],
    settings: Settings,
    options: RecordOptions,
    on_recorded: Callable[[Recorded], None],
    on_notice: Callable[[str], None] = lambda text: None,
) -> None:
    """Record each problem in turn; `on_recorded` gets each at once, and what an end left of one.

    Raises GpuMissing where there is no GPU (unless `options.tune.gpu` is False: then all that would
    be timed is compiled into the artifact store), Interrupted when told to stop, and KgenError for
    what concerns all problems.
    """
    stop = StopFlag()
    deadline = time.monotonic() + (options.budget_s or math.inf)

    def on_event(event: object) -> None:
        if isinstance(event, WorkerReplaced):
            on_notice(f"{event.worker} process replaced: {event.reason}")

    with ExitStack() as stack:
        stack.enter_context(stopped_by_signals(stop))
        opening = Opening(settings, options.tune, on_event, stop, stack)
        machine = opening.find_gpu()
        if machine.gpu is None and options.tune.gpu:
            raise GpuMissing(f"tables are timed on a GPU, and there is none here: {machine.reason}")
        builder, pool = opening.make_pool(machine)
        recorder = _Recorder(
            options, machine, builder, pool, stop=stop, deadline=deadline, on_recorded=on_recorded
        )
        recorder.record_all([line.problem for line in lines])


class _Recorder:
    """All problems of one call."""

    def __init__(
        self,
        options: RecordOptions,
        machine: Machine,
        builder: Builder,
        pool: CompilePool,
        *,
        stop: StopFlag,
        deadline: float,
        on_recorded: Callable[[Recorded], None],
    ) -> None:
        self._options = options
        self._gpu = machine.gpu
        self._hello = machine.hello
        self._device = machine.hello.device if machine.hello else options.tune.device or H200
        self._builder = builder
        self._pool = pool
        self._stop = stop
        self._deadline = deadline
        self._on_recorded = on_recorded

    def record_all(self, problems: Sequence[GemmProblem]) -> None:
        """Draw for all and have that built in their order, then record one after the other."""
        works = [self._draw(problem) for problem in dict.fromkeys(problems)]
        for index, work in enumerate(works):
            now = time.monotonic()
            share = min(1.0, SHARES / (len(works) - index)) * (self._deadline - now)
            self._record(work, now + (1 - AGAIN_SHARE) * share)
            works[index] = _Work(work.problem, 0, {})  # thousands of cubins

    def _draw(self, problem: GemmProblem) -> _Work:
        valid = valid_configs(problem, self._device, self._builder.sass_passes)
        drawn = draw(valid, self._options.count, self._options.seed)
        futures = {config: self._pool.submit(problem, config) for config in drawn}
        return _Work(problem, len(valid), futures)

    def _record(self, work: _Work, until: float) -> None:
        work.until = until
        reason = ""
        try:
            if self._gpu is None:
                self._compile(work)
            else:
                self._screen_all(work, self._gpu)
                self._measure_again(work, self._gpu)
        except Untunable as error:
            reason = str(error)
        finally:
            self._on_recorded(self._recorded(work, reason))

    def _recorded(self, work: _Work, reason: str) -> Recorded:
        timed = any(row.status == "ok" for row in work.rows.values())
        table = self._table(work, self._hello) if timed and self._hello else None
        num_drawn, num_left = len(work.drawn), len(work.waiting)
        return Recorded(
            work.problem, num_drawn, num_left, work.num_valid, table, work.seconds, reason
        )

    # -- building ------------------------------------------------------------------------------

    def _compile(self, work: _Work) -> None:
        while work.waiting:
            if not self._take(work, len(work.waiting)):
                return

    def _take(self, work: _Work, most: int) -> list[Cubin]:
        """Up to `most` cubins, all that are left if fewer; nothing when the time is up."""
        cubins: list[Cubin] = []
        with work.counted("waiting for compilers"):
            while sum(f.done() for f in work.waiting.values()) < min(most, len(work.waiting)):
                if self._stop.is_set():
                    raise Interrupted("the recording was stopped")
                if time.monotonic() > work.until:
                    return []
                time.sleep(_POLL_S)
        for config, future in list(work.waiting.items()):
            if len(cubins) == most:
                break
            if future.done():
                del work.waiting[config]
                cubins += self._built(work, config, future)
        return cubins

    @staticmethod
    def _built(work: _Work, config: GemmConfig, future: Future[Cubin]) -> list[Cubin]:
        """The cubin in a list; none of a build that failed, which gets its row."""
        try:
            return [future.result()]
        except KgenError as error:
            work.fail(config, status_of(error))
            return []

    # -- the GPU -------------------------------------------------------------------------------

    def _screen_all(self, work: _Work, gpu: GpuWorker) -> None:
        while work.waiting:
            cubins = self._take(work, self._options.batch)
            if not cubins and time.monotonic() > work.until:
                return
            with work.counted("screen"):
                self._screen(work, gpu, cubins)

    def _screen(self, work: _Work, gpu: GpuWorker, cubins: list[Cubin]) -> None:
        """Screen a batch; what breaks it is found, by halving if need be, and gets its row."""
        if not cubins:
            return
        try:
            found = gpu.screen(work.problem, cubins, SCREEN, work.best_us)
        except (Interrupted, Untunable, GpuMissing):
            raise
        except KgenError as error:
            status = status_of(error)
            key = cubins[0].key if len(cubins) == 1 else gpu.culprit and gpu.culprit.key
            for cubin in cubins:
                if cubin.key == key:
                    work.fail(cubin.config, status, cubin.compile_s)
            if key:
                self._screen(work, gpu, [cubin for cubin in cubins if cubin.key != key])
                return
            half = len(cubins) // 2
            self._screen(work, gpu, cubins[:half])
            self._screen(work, gpu, cubins[half:])
            return
        for cubin, one in zip(cubins, found, strict=True):
            work.add_screened(cubin, one)

    def _measure_again(self, work: _Work, gpu: GpuWorker) -> None:
        """Verify and measure the fastest and a sample, in groups that alternate."""
        ok = [c for c in work.drawn if c in work.rows and work.rows[c].status == "ok"]
        fastest = sorted(ok, key=work.time_of)[: self._options.fastest]
        others = [config for config in ok if config not in set(fastest)]
        chosen = [*fastest, *others[: self._options.sample]]
        with work.counted("verify and measure again"):
            for start in range(0, len(chosen), GROUP):
                if time.monotonic() > self._deadline:
                    return
                group = [work.cubins[config] for config in chosen[start : start + GROUP]]
                self._measure_group(work, gpu, group)

    def _measure_group(self, work: _Work, gpu: GpuWorker, cubins: list[Cubin]) -> None:
        try:
            measured = gpu.measure(work.problem, cubins, self._options.policy)
        except (Interrupted, Untunable, GpuMissing):
            raise
        except KgenError as error:
            status = status_of(error)
            if len(cubins) == 1:
                work.fail(cubins[0].config, status, cubins[0].compile_s)
                return
            for cubin in cubins:
                self._measure_group(work, gpu, [cubin])
            return
        for cubin, one in zip(cubins, measured, strict=True):
            work.add_verified(cubin.config, one)

    # -- the table -----------------------------------------------------------------------------

    def _table(self, work: _Work, hello: Hello) -> TimingTable:
        rows = tuple(work.rows[config] for config in work.drawn if config in work.rows)
        num_valid = work.num_valid
        facts = self._builder.facts()
        header = {
            "problem": str(work.problem),
            "commit": self._options.commit,
            "driver": hello.driver,
            "cuda": "{}.{}".format(*hello.cuda) if hello.cuda else "",
            **facts,
            "policy": SCREEN,
            "policy_again": self._options.policy,
            "dates": [datetime.now(UTC).date().isoformat()],
            "drawn": "all" if len(rows) == num_valid else f"at random, seed {self._options.seed}",
            "num_valid": num_valid,
            "num_rows": len(rows),
            "jobs": self._pool.jobs,
            "seconds": {name: round(value, 2) for name, value in work.seconds.items()},
            "device": asdict(hello.device),
        }
        return TimingTable(header, hello.device, rows)


class _Work:
    """One problem: what waits to be timed, and what came of the rest."""

    def __init__(
        self, problem: GemmProblem, num_valid: int, waiting: dict[GemmConfig, Future[Cubin]]
    ) -> None:
        self.problem = problem
        self.num_valid = num_valid
        self.drawn = list(waiting)
        self.waiting = waiting
        self.until = math.inf
        self.rows: dict[GemmConfig, TableRow] = {}
        self.cubins: dict[GemmConfig, Cubin] = {}
        self.best_us = math.inf
        self.seconds: dict[str, float] = {}

    @contextmanager
    def counted(self, step: str) -> Iterator[None]:
        """Add the seconds of a block to those of a step."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[step] = self.seconds.get(step, 0.0) + time.monotonic() - start

    def time_of(self, config: GemmConfig) -> float:
        """The configuration's time in microseconds, inf without one."""
        us = self.rows[config].median_us
        return math.inf if us is None else us

    def fail(self, config: GemmConfig, status: str, compile_s: float | None = None) -> None:
        """The configuration has no time, whatever it had before."""
        self.rows[config] = TableRow(self.problem, config, status, 0, None, compile_s=compile_s)

    def add_screened(self, cubin: Cubin, one: Screened) -> None:
        """The result of a screen."""
        config = cubin.config
        if one.measured is None:
            self.fail(config, one.status, cubin.compile_s)
            self.rows[config] = replace(self.rows[config], check_s=one.check_s)
            return
        self.cubins[config] = cubin
        self.rows[config] = TableRow(
            self.problem,
            config,
            "ok",
            1,
            **_times(one.measured),
            compile_s=cubin.compile_s,
            check_s=one.check_s,
            time_s=one.time_s,
        )
        self.best_us = min(self.best_us, one.measured.median_us)

    def add_verified(self, config: GemmConfig, measured: Measured) -> None:
        """A measurement of what passed every check takes the screen's place."""
        self.rows[config] = replace(
            self.rows[config],
            **_times(measured),
            num_rows=2,
            verified=True,
            verify_s=measured.verify_s,
            time_s=measured.time_s,
        )


def _times(measured: Measured) -> dict[str, Any]:
    return {
        "median_us": measured.median_us,
        "p10_us": measured.p10_us,
        "p90_us": measured.p90_us,
        "rounds": len(measured.samples_us),
    }
