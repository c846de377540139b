"""Which problem gets the next trials, and when the time is up: `Progress`, `Plan`.

Takes what is known of each problem, gives decisions; touches no process, database or clock but
the one it is given. Must not import torch, CUDA or anything of kgen but `problem` and `device`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kgen.device import Device
from kgen.problem import GemmProblem

#: Trials that every problem gets before any gets more: the default and some of the model's best.
FIRST_TRIALS: Final = 4
#: Trials between two decisions; opening a problem costs about as much as one or two of them.
SLICE_TRIALS: Final = 6
#: Share of the distance to the physical limit that a problem's next slice is hoped to gain.
HOPE: Final = 0.25
#: A problem none of whose first candidates survives this long has nothing to offer.
GIVE_UP_TRIALS: Final = 16
#: Final measurements take at most this share of a budget.
FINALS_SHARE: Final = 0.3
#: A problem of which so many candidates can not be built is left.
MAX_UNBUILT: Final = 200
_MANY: Final = 10**9
_FIRST_TRIAL_S: Final = 0.5
_FIRST_FINAL_S: Final = 1.5


def floor_us(problem: GemmProblem, device: Device) -> float:
    """Microseconds below which no kernel can be: memory traffic, or tensor core work."""
    streaming = problem.min_bytes / (device.dram_gbps * 1e3)
    tflops = device.fp8_tflops / problem.operand_bytes
    return max(streaming, problem.flops / (tflops * 1e6))


@dataclass
class Progress:
    """Where one problem stands.

    num_trials    candidates that reached the GPU, those of earlier runs included
    num_unbuilt   candidates that could not be built
    gain          the part of its time that the next slice may save
    spent_s, num_timed   of this run: seconds, and the attempts that took them
    """

    weight: float
    floor_us: float
    num_trials: int = 0
    num_unbuilt: int = 0
    best_us: float | None = None
    gain: float = 1.0
    spent_s: float = 0.0
    num_timed: int = 0

    @property
    def num_attempts(self) -> int:
        """Candidates that were tried, whatever came of them."""
        return self.num_trials + self.num_unbuilt

    def add_attempt(self, on_gpu: bool, seconds: float) -> None:
        """Count a candidate that was timed or failed, and the seconds that it took."""
        self.num_trials += on_gpu
        self.num_unbuilt += not on_gpu
        self.num_timed += 1
        self.spent_s += seconds

    def end_slice(self, best_before_us: float | None, expected_gain: float | None = None) -> None:
        """Learn from a slice how much the next one may gain.

        That is what the strategy expects of it, if it expects anything; else a fruitless slice
        halves the hope.
        """
        if self.best_us is None:
            return
        if expected_gain is not None:
            self.gain = expected_gain
            return
        headroom = max(0.0, 1 - self.floor_us / self.best_us)
        if best_before_us is None:
            self.gain = HOPE * headroom
        else:
            self.gain = min(headroom, (self.gain + 1 - self.best_us / best_before_us) / 2)

    @property
    def hopeless(self) -> bool:
        """Whether so many candidates failed, and none passed, that more would be waste."""
        return self.best_us is None and self.num_attempts >= GIVE_UP_TRIALS

    @property
    def worth(self) -> float:
        """Expected gain a second, in parts of the user's time; without a winner, boundless."""
        if self.best_us is None:
            return math.inf
        seconds = self.spent_s / self.num_timed if self.num_timed else _FIRST_TRIAL_S
        return self.weight * self.gain / max(seconds, 1e-3)


class Plan:
    """The budget of a run, in seconds of wall clock (None: unlimited), and who is next.

    Without a budget, problems are finished one after the other. With one, each gets its first
    trials, then slices go where they are expected to save the most, and time is kept back to
    measure every problem's finalists again.
    """

    def __init__(
        self,
        budget_s: float | None,
        trial_limit: int | None,
        per_problem_s: float | None,
        start: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._budget_s = math.inf if budget_s is None else budget_s
        self._trial_limit = trial_limit or math.inf
        self._per_problem_s = math.inf if per_problem_s is None else per_problem_s
        self._clock = clock
        self._start = start
        self._trial_s = _FIRST_TRIAL_S
        self._final_s = _FIRST_FINAL_S

    @property
    def deadline(self) -> float:
        """When the budget is used up, on the plan's clock; infinite without a budget."""
        return self._start + self._budget_s

    @property
    def remaining_s(self) -> float:
        """Seconds of budget left; infinite without one."""
        return self.deadline - self._clock()

    def note_trial(self, seconds: float) -> None:
        """Learn how long a trial takes."""
        self._trial_s += (seconds - self._trial_s) / 8

    def note_final(self, seconds: float) -> None:
        """Learn how long a final measurement takes."""
        self._final_s += (seconds - self._final_s) / 4

    def room_for_trial(self, num_finals: int) -> bool:
        """Whether another trial fits before the finals of `num_finals` problems must begin."""
        reserve = min(num_finals * self._final_s, FINALS_SHARE * self._budget_s)
        if self._budget_s == math.inf:
            return True
        return self.remaining_s - reserve > self._trial_s

    def room_for_final(self) -> bool:
        """Whether another problem's finalists can be measured."""
        return self.remaining_s > self._final_s

    def is_full(self, progress: Progress) -> bool:
        """Whether the problem has had all that it may have."""
        return (
            progress.num_trials >= self._trial_limit
            or progress.spent_s >= self._per_problem_s
            or progress.num_unbuilt >= MAX_UNBUILT
            or progress.hopeless
        )

    def trials_left(self, progress: Progress) -> int:
        """Trials that the problem may still have."""
        return int(min(self._trial_limit - progress.num_trials, _MANY))

    def slice_trials(self, progress: Progress) -> int:
        """How many trials the problem gets in its next slice."""
        left = self.trials_left(progress)
        if self._budget_s == math.inf:
            return left
        first = FIRST_TRIALS - progress.num_attempts
        return min(left, first if first > 0 else SLICE_TRIALS)

    def order(self, standings: Sequence[Progress]) -> list[int]:
        """Indices of the problems in the order in which they should be worked on."""
        indices = list(range(len(standings)))
        if self._budget_s == math.inf:
            return indices

        def urgency(index: int) -> tuple[bool, float, int]:
            progress = standings[index]
            is_first = progress.num_attempts < FIRST_TRIALS
            return (not is_first, 0.0 if is_first else -progress.worth, index)

        return sorted(indices, key=urgency)
