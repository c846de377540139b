"""What `kgen tune` shows on stderr while it runs: figures on a terminal, plain lines otherwise.

Takes the events of `kgen.search.events`, gives the function that receives them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from kgen.cli.board import Board
from kgen.cli.output import console, count, microseconds, note
from kgen.search.events import (
    Notice,
    OnEvent,
    ProblemFinished,
    ProblemReport,
    RunStarted,
    TrialFinished,
    TuneEvent,
    TuneOptions,
    WorkerReplaced,
)

#: Problems that the display on a terminal shows, those worked on last.
SHOWN: Final = 8
#: Seconds between two lines about the whole run where stderr is no terminal.
STATUS_EVERY_S: Final = 60.0


@contextmanager
def progress(options: TuneOptions) -> Iterator[OnEvent]:
    """The receiver of a run's events, for as long as the run lasts."""
    board = Board(options)
    if not sys.stderr.isatty():
        yield PlainLines(board)
        return
    from rich.live import Live

    with Live(console=console(sys.stderr), refresh_per_second=4, transient=True) as live:
        display = Display(live, board)
        live.update(display)
        yield display


class PlainLines:
    """One line per problem, and one a minute about the run, for logs."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._next_s = STATUS_EVERY_S

    def __call__(self, event: TuneEvent) -> None:
        """Print what the event says, if it says anything that a log should hold."""
        self._board(event)
        match event:
            case RunStarted():
                note(run_line(event))
            case TrialFinished() if self._board.elapsed_s >= self._next_s:
                self._next_s = self._board.elapsed_s + STATUS_EVERY_S
                note(status_line(self._board))
            case ProblemFinished():
                counter = f"[{self._board.num_finished}/{self._board.num_problems}]"
                note(f"{counter} {event.report.problem}: {outcome_of(event.report)}")
            case WorkerReplaced():
                note(worker_line(event))
            case Notice():
                note(event.text)


class Display:
    """On a terminal: the problems worked on last with their best, and the run in one line."""

    def __init__(self, live: Any, board: Board) -> None:
        self._live = live
        self._board = board

    def __call__(self, event: TuneEvent) -> None:
        """Renew the figures, or print a line above them."""
        self._board(event)
        match event:
            case RunStarted():
                self._say(run_line(event))
            case ProblemFinished():
                self._say(f"{event.report.problem}: {outcome_of(event.report)}")
            case WorkerReplaced():
                self._say(worker_line(event))
            case Notice():
                self._say(event.text)

    def _say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def __rich__(self) -> Any:
        """What is drawn, with the figures of this moment."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        best = "best µs" if self._board.measured else "predicted µs"
        grid = Table("problem", "trials", best, box=None, pad_edge=False, show_edge=False)
        for column in grid.columns[1:]:
            column.justify = "right"
        open_ones = [one for one in self._board.standings.values() if not one.is_finished]
        for one in open_ones[-SHOWN:]:
            cells = (str(one.problem), str(one.num_trials), microseconds(one.best_us))
            grid.add_row(*map(Text, cells))
        status = Text(status_line(self._board))
        return Group(grid, status) if open_ones else status


def status_line(board: Board) -> str:
    """The whole run: problems and trials so far, trials a second, GPU idle share, time left."""
    parts = [
        f"{board.num_finished} of {count(board.num_problems, 'problem')}",
        count(board.num_trials, "trial"),
    ]
    if board.trials_per_s is not None:
        parts.append(f"{board.trials_per_s:.1f} a second")
    if board.gpu_idle is not None:
        parts.append(f"GPU idle {board.gpu_idle:.0%}")
    parts.append(f"{duration(board.elapsed_s)} gone")
    parts.append("time left unknown" if board.left_s is None else f"{duration(board.left_s)} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Minutes and seconds, hours where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


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
