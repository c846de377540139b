"""From shapes lines to verified winners in the database: `tune`.

Takes shapes lines, settings and options; gives a `TuneReport` and tells of every step on the way.
With a GPU the work is `campaign`'s, without one `offline`'s; here they get what they need, and
are ended in order. Must not import torch, CUDA or optuna.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol

from kgen.cache.db import TuningDatabase
from kgen.cache.records import RunRecord
from kgen.device import H200
from kgen.errors import GpuMissing, Interrupted
from kgen.search.campaign import Campaign
from kgen.search.child import load
from kgen.search.compile_pool import Builder, CompilePool
from kgen.search.events import (
    Notice,
    OnEvent,
    ProblemReport,
    RunStarted,
    TuneOptions,
    TuneReport,
    WorkerReplaced,
)
from kgen.search.gpu_worker import GpuWorker, Hello
from kgen.search.offline import Forecast
from kgen.search.plan import Plan
from kgen.search.run import Run
from kgen.search.stop import StopFlag, stopped_by_signals
from kgen.settings import Settings
from kgen.shapes import ShapeLine

#: A compiler that runs out of time says so itself, with its log, before its process is killed.
COMPILE_GRACE_S: Final = 10.0
#: What is left at least of a budget that killed runs of the same command have used up.
LEAST_BUDGET: Final = 0.25


class Work(Protocol):
    """What a run does, on a GPU or without one."""

    def work(self) -> None:
        """Do all that the limits allow; raises Interrupted when told to stop."""

    def reports(self) -> list[ProblemReport]:
        """Where every problem stands."""


@dataclass(frozen=True)
class Machine:
    """What the run found: a GPU that answers, or the reason why there is none."""

    gpu: GpuWorker | None
    hello: Hello | None
    reason: str = ""


def tune(
    lines: Sequence[ShapeLine],
    settings: Settings,
    options: TuneOptions,
    on_event: OnEvent = lambda event: None,
    stop: StopFlag | None = None,
) -> TuneReport:
    """Tune every problem within the limits of `options` and report, in the order of `lines`.

    Every trial is in the database when it is told of; Ctrl-C, SIGTERM or `stop` end the run in
    seconds, with a report of what was finished. Raises Interrupted when that comes before the
    work began, and KgenError for what concerns the whole run: a database that can not be used, no
    compiler, a GPU that does not come back.
    """
    start = time.monotonic()
    stop = stop or StopFlag()
    with ExitStack() as stack:
        stack.enter_context(stopped_by_signals(stop))
        db = TuningDatabase.open(settings.db_url)
        stack.callback(db.close)
        for stale in db.close_stale_runs():
            on_event(Notice(f"run {stale.id} of {stale.started} was killed: its trials are kept"))
        kept = _kept(options, lines)
        spent_s = spent_before(db.runs(), kept)
        run_id = db.begin_run("tune", kept).id
        state = "failed"
        try:
            opening = Opening(settings, options, on_event, stop, stack)
            machine = opening.find_gpu()
            run = opening.make_run(db, run_id, machine)
            _tell_start(run, machine, len(lines))
            work = _choose_work(run, machine, lines, start - spent_s)
            is_complete = _do(work)
            state = "finished" if is_complete else "interrupted"
        except Interrupted:  # before there was anything to report
            state = "interrupted"
            raise
        finally:
            db.end_run(run_id, state)
        return _report(run, machine, work, time.monotonic() - start, not is_complete)


def spent_before(runs: Sequence[RunRecord], kept: Mapping[str, Any]) -> float:
    """Seconds that killed and interrupted runs of the same command, the latest ones, have used."""
    seconds = 0.0
    for run in reversed(runs):
        if dict(run.options) != dict(kept) or run.state not in ("killed", "interrupted"):
            break
        begun, last = (datetime.fromisoformat(date) for date in (run.started, run.heartbeat))
        seconds += (last - begun).total_seconds()
    return seconds


def _kept(options: TuneOptions, lines: Sequence[ShapeLine]) -> dict[str, Any]:
    """What tells one command from another, as the database keeps it with the run."""
    names = ("trials", "budget_s", "budget_per_problem_s", "sampler", "policy", "gpu", "seed")
    values = {name: getattr(options, name) for name in names}
    return {**values, "problems": [f"{line.problem} weight={line.weight:g}" for line in lines]}


@dataclass(frozen=True)
class Opening:
    """What a run is made of, before it runs; `stack` closes what is opened here."""

    settings: Settings
    options: TuneOptions
    on_event: OnEvent
    stop: StopFlag
    stack: ExitStack

    def find_gpu(self) -> Machine:
        """Start the child that owns the GPU, if there is one and it is wanted."""
        options, tell = self.options, self.on_event
        if not options.gpu:
            return Machine(None, None, "the GPU was left out on request")
        gpu = GpuWorker(
            options.backend,
            options.backend_options,
            self.settings.trial_timeout_s,
            self.stop,
            on_replaced=lambda reason: tell(WorkerReplaced("gpu", reason)),
            on_wait=lambda: tell(Notice("another run tunes on this GPU: taking turns")),
        )
        self.stack.callback(gpu.close)
        try:
            return Machine(gpu, gpu.hello())
        except GpuMissing as error:
            return Machine(None, None, str(error))

    def make_run(self, db: TuningDatabase, run_id: int, machine: Machine) -> Run:
        """The run, with its compile pool."""
        options, hello = self.options, machine.hello
        builder, pool = self.make_pool(machine)
        return Run(
            options=options,
            db=db,
            run_id=run_id,
            device=hello.device if hello else options.device or H200,
            hello=hello,
            builder=builder,
            pool=pool,
            on_event=self.on_event,
            stop=self.stop,
        )

    def make_pool(self, machine: Machine) -> tuple[Builder, CompilePool]:
        """A builder of cubins that the GPU's driver can load, and processes that run its like."""
        options, hello = self.options, machine.hello
        builder_options = {
            "settings": self.settings,
            "driver_cuda": hello.cuda if hello else None,
            **options.builder_options,
        }
        builder: Builder = load(options.builder)(**builder_options)
        timeout_s = self.settings.compile_timeout_s + COMPILE_GRACE_S
        pool = CompilePool(options.builder, builder.replica(), self.settings.jobs, timeout_s)
        self.stack.callback(pool.close)
        return builder, pool


def _choose_work(run: Run, machine: Machine, lines: Sequence[ShapeLine], start: float) -> Work:
    if machine.gpu is None:
        return Forecast(run, lines)
    options = run.options
    budget_s = options.budget_s
    if budget_s is not None:
        used_s = time.monotonic() - start
        start += max(0.0, used_s - (1 - LEAST_BUDGET) * budget_s)
    plan = Plan(budget_s, options.trial_limit, options.budget_per_problem_s, start)
    return Campaign(run, machine.gpu, plan, lines)


def _tell_start(run: Run, machine: Machine, num_problems: int) -> None:
    measured = machine.gpu is not None
    run.on_event(RunStarted(run.device, measured, machine.reason, num_problems, run.pool.jobs))


def _do(work: Work) -> bool:
    """Do it; False when it was stopped before its end."""
    try:
        work.work()
    except Interrupted:
        return False
    return True


def _report(
    run: Run, machine: Machine, work: Work, seconds: float, interrupted: bool
) -> TuneReport:
    num_compiles, num_cache_hits = run.pool.counts()
    return TuneReport(
        device=run.device,
        measured=machine.gpu is not None,
        reason=machine.reason,
        run_id=run.run_id,
        problems=tuple(work.reports()),
        seconds=seconds,
        interrupted=interrupted,
        num_compiles=num_compiles,
        num_cache_hits=num_cache_hits,
    )
