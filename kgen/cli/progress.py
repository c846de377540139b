"""What `kgen tune` shows on stderr while it runs: bars on a terminal, plain lines otherwise.

Takes the events of `kgen.search.events`, gives the function that receives them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kgen.cli.output import console, count, microseconds, note
from kgen.search.events import (
    Notice,
    OnEvent,
    ProblemFinished,
    ProblemReport,
    ProblemStarted,
    RunStarted,
    TrialFinished,
    TuneEvent,
    WorkerReplaced,
)


@contextmanager
def progress() -> Iterator[OnEvent]:
    """The receiver of a run's events, for as long as the run lasts."""
    if not sys.stderr.isatty():
        yield PlainLines()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}", markup=False),
    )
    with Progress(*columns, console=console(sys.stderr)) as bars:
        yield Bars(bars)


class PlainLines:
    """One line per problem, for logs."""

    def __init__(self) -> None:
        self._num_problems = 0
        self._num_finished = 0

    def __call__(self, event: TuneEvent) -> None:
        """Print what the event says, if it says anything that a log should hold."""
        match event:
            case RunStarted():
                self._num_problems = event.num_problems
                note(run_line(event))
            case ProblemFinished():
                self._num_finished += 1
                counter = f"[{self._num_finished}/{self._num_problems}]"
                note(f"{counter} {event.report.problem}: {outcome_of(event.report)}")
            case WorkerReplaced():
                note(worker_line(event))
            case Notice():
                note(event.text)


class Bars:
    """One bar for the problems, with the problem at work and its best time beside it."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._task = bars.add_task("problems", total=None, now="", visible=False)

    def __call__(self, event: TuneEvent) -> None:
        """Move the bar, or print a line above it."""
        match event:
            case RunStarted():
                self._bars.update(self._task, total=event.num_problems, visible=True)
                self._say(run_line(event))
            case ProblemStarted():
                self._now(str(event.problem))
            case TrialFinished():
                best = "" if event.best_us is None else f", best {microseconds(event.best_us)} µs"
                self._now(f"{event.problem}: trial {event.num_trials}{best}")
            case ProblemFinished():
                self._bars.advance(self._task)
                self._say(f"{event.report.problem}: {outcome_of(event.report)}")
            case WorkerReplaced():
                self._say(worker_line(event))
            case Notice():
                self._say(event.text)

    def _now(self, text: str) -> None:
        self._bars.update(self._task, now=text)

    def _say(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False)


def run_line(event: RunStarted) -> str:
    """What a run is about to do, and on what."""
    what = f"{count(event.num_problems, 'problem')}, {count(event.num_jobs, 'compile worker')}"
    if event.measured:
        return f"tuning on {event.device.name}: {what}"
    return (
        f"no measurement: {event.reason}. Kernels are compiled and ranked by the analytic model "
        f"for {event.device.name}; times are predicted. {what}"
    )


def worker_line(event: WorkerReplaced) -> str:
    """That a child process was replaced, and why."""
    return f"{event.worker} worker replaced: {event.reason}"


def outcome_of(report: ProblemReport) -> str:
    """One problem's result in a line."""
    if not report.ok:
        return f"{report.outcome}: {report.reason}"
    measured = report.median_us is not None
    time = microseconds(report.median_us if measured else report.predicted_us)
    known = " (known before)" if report.skipped else ""
    return f"{report.outcome} {time} µs with {report.config}{known}"
