"""kgen.search.plan: who gets the next trials, and when the time is up."""

from __future__ import annotations

import math

import pytest

from kgen.device import H200
from kgen.problem import GemmProblem
from kgen.search.plan import FIRST_TRIALS, GIVE_UP_TRIALS, Plan, Progress, floor_us


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def progress(weight: float = 1.0, trials: int = 8, best: float | None = 20.0) -> Progress:
    made = Progress(weight, floor_us=10.0, num_trials=trials, best_us=best)
    made.end_slice(None)
    return made


def test_floors_are_memory_for_few_rows_and_arithmetic_for_many() -> None:
    assert floor_us(GemmProblem("dense", 1, 7168, 16384), H200) == pytest.approx(29.4, abs=0.5)
    assert floor_us(GemmProblem("dense", 4096, 7168, 16384), H200) == pytest.approx(565, abs=5)


def test_without_a_budget_problems_are_finished_in_their_order() -> None:
    clock = Clock()
    plan = Plan(None, 40, None, clock.now, clock)
    assert plan.order([progress(trials=3), progress(trials=0), progress(weight=9)]) == [0, 1, 2]
    assert plan.slice_trials(progress(trials=3)) == 37
    clock.now += 1e6
    assert plan.room_for_trial(1000)
    assert plan.room_for_final()


def test_with_a_budget_everyone_gets_first_trials_then_the_most_promising() -> None:
    clock = Clock()
    plan = Plan(100.0, None, None, clock.now, clock)
    near, far = progress(best=10.5), progress(best=40.0)
    heavy, fresh = progress(weight=5.0, best=40.0), progress(trials=1, best=10.1)
    assert plan.order([near, far, heavy, fresh]) == [3, 2, 1, 0]
    assert plan.slice_trials(fresh) == FIRST_TRIALS - 1
    nothing_yet = progress(best=None)
    assert plan.order([heavy, nothing_yet]) == [1, 0]


def test_slices_without_gain_lower_the_hope() -> None:
    stuck, moving = progress(), progress()
    for _ in range(4):
        stuck.end_slice(20.0)
        before, moving.best_us = moving.best_us, (moving.best_us or 0) * 0.9
        moving.end_slice(before)
    assert stuck.gain < 0.01 < moving.gain
    at_floor = progress(best=10.0)
    assert at_floor.gain == 0


def test_what_the_strategy_expects_is_the_gain() -> None:
    """Time goes where expected gain times weight, by the second, is the largest."""
    clock = Clock()
    plan = Plan(100.0, None, None, clock.now, clock)
    small, large, heavy = progress(), progress(), progress(weight=10.0)
    for each, gain in ((small, 0.001), (large, 0.02), (heavy, 0.004)):
        each.end_slice(20.0, gain)
        assert each.gain == gain
    assert plan.order([small, large, heavy]) == [2, 1, 0]
    done = progress()
    done.end_slice(20.0, 0.0)
    assert done.worth == 0


def test_worth_is_by_the_second() -> None:
    cheap, dear = progress(), progress()
    cheap.add_attempt(on_gpu=True, seconds=0.1)
    dear.add_attempt(on_gpu=True, seconds=2.0)
    assert cheap.worth == pytest.approx(20 * dear.worth)


def test_time_for_the_finals_is_kept_back_but_not_all_of_it() -> None:
    clock = Clock()
    plan = Plan(100.0, None, None, clock.now, clock)
    assert plan.room_for_trial(10)
    clock.now += 85
    assert not plan.room_for_trial(10)  # ten finals of 1.5 s
    assert plan.room_for_final()
    clock.now += 14
    assert not plan.room_for_final()
    # Many problems: at most a share of the budget is kept, or no trial would ever begin.
    assert Plan(20.0, None, None, clock.now, clock).room_for_trial(1000)


def test_what_trials_and_finals_took_is_learned() -> None:
    clock = Clock()
    plan = Plan(10.0, None, None, clock.now, clock)
    for _ in range(40):
        plan.note_trial(9.0)
        plan.note_final(9.9)
    clock.now += 0.2
    assert not plan.room_for_trial(0) or plan.remaining_s > 9.0
    assert not plan.room_for_final()


def test_limits_end_a_problem() -> None:
    plan = Plan(None, 10, 5.0, 0.0)
    assert not plan.is_full(progress(trials=9))
    assert plan.is_full(progress(trials=10))
    slow = progress(trials=1)
    slow.add_attempt(on_gpu=True, seconds=5.1)
    assert plan.is_full(slow)
    hopeless = progress(trials=0, best=None)
    for _ in range(GIVE_UP_TRIALS):
        assert not Plan(None, None, None, 0.0).is_full(hopeless)
        hopeless.add_attempt(on_gpu=False, seconds=0.0)
    assert Plan(None, None, None, 0.0).is_full(hopeless)
    assert hopeless.num_trials == 0


def test_a_deadline_exists_with_a_budget_only() -> None:
    assert Plan(None, None, None, 5.0).deadline == math.inf
    assert Plan(10.0, None, None, 5.0).deadline == 15.0
