"""What is known of a run while it lasts: `Board`, the figures that its display shows.

Takes the events of `kgen.search.events` and a clock, gives numbers. Prints nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kgen.problem import GemmProblem
from kgen.search.events import (
    ProblemFinished,
    ProblemStarted,
    RunStarted,
    TrialFinished,
    TuneEvent,
    TuneOptions,
)

#: The rate is taken over so many of the last trials: a run's first ones wait for compilers.
RATE_TRIALS: Final = 64


@dataclass
class Standing:
    """One problem: trials so far, its best in microseconds (predicted where nothing is timed)."""

    problem: GemmProblem
    num_trials: int = 0
    num_valid: int = 0
    best_us: float | None = None
    is_finished: bool = False


class Board:
    """The figures of one run. `clock` gives seconds."""

    def __init__(self, options: TuneOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._start = clock()
        self._gpu_busy_s = 0.0
        self._times: deque[float] = deque(maxlen=RATE_TRIALS)
        #: By problem, the one worked on last at the end.
        self.standings: dict[GemmProblem, Standing] = {}
        self.measured = False
        self.num_problems = 0
        self.num_finished = 0
        self.num_trials = 0

    def __call__(self, event: TuneEvent) -> None:
        """Take note of an event."""
        match event:
            case RunStarted():
                self.measured, self.num_problems = event.measured, event.num_problems
            case ProblemStarted():
                standing = self._touch(event.problem)
                standing.num_trials, standing.num_valid = event.num_known, event.num_valid
            case TrialFinished():
                standing = self._touch(event.problem)
                standing.num_trials = event.num_trials
                standing.best_us = self._best(standing, event)
                self._gpu_busy_s = event.gpu_busy_s
                self.num_trials += 1
                self._times.append(self._clock())
            case ProblemFinished():
                standing = self._touch(event.report.problem)
                standing.is_finished = True
                standing.num_trials = event.report.num_trials
                standing.best_us = event.report.median_us or event.report.predicted_us
                self.num_finished += 1

    def _touch(self, problem: GemmProblem) -> Standing:
        standing = self.standings.pop(problem, None) or Standing(problem)
        self.standings[problem] = standing
        return standing

    def _best(self, standing: Standing, event: TrialFinished) -> float | None:
        if self.measured or event.status != "compiled" or event.predicted_us is None:
            return event.best_us
        return min(event.predicted_us, standing.best_us or event.predicted_us)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the board was made."""
        return self._clock() - self._start

    @property
    def trials_per_s(self) -> float | None:
        """Over the last trials; None before the second."""
        if len(self._times) < 2:
            return None
        seconds = self._clock() - self._times[0]
        return (len(self._times) - 1) / seconds if seconds > 0 else None

    @property
    def gpu_idle(self) -> float | None:
        """Share of the time in which the GPU's worker had nothing to do; None without a GPU.

        Known as of the last trial, so it counts a trial on its way as idle until it ends.
        """
        if not self.measured or not self._times:
            return None
        seconds = self._times[-1] - self._start
        return min(1.0, max(0.0, 1 - self._gpu_busy_s / seconds)) if seconds > 0 else None

    @property
    def left_s(self) -> float | None:
        """Seconds that the run may still take: what is left of the budget, or of the trials at the
        present rate, whichever is less; None where nothing tells."""
        limits = [seconds for seconds in (self._budget_left_s(), self._trials_left_s()) if seconds]
        return min(limits, default=None)

    def _budget_left_s(self) -> float | None:
        budget_s = self._options.budget_s
        return None if budget_s is None else max(0.0, budget_s - self.elapsed_s)

    def _trials_left_s(self) -> float | None:
        limit = self._options.trial_limit if self.measured else self._options.leading
        rate = self.trials_per_s
        if limit is None or not rate:
            return None
        open_ones = [one for one in self.standings.values() if not one.is_finished]
        unseen = self.num_problems - len(self.standings)
        left = sum(max(0, min(limit, one.num_valid or limit) - one.num_trials) for one in open_ones)
        return (left + unseen * limit) / rate
