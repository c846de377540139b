"""kgen.cover against all subsets, one by one."""

from __future__ import annotations

import random
from itertools import combinations
from math import log

import pytest

import kgen.cover
from kgen.config import GemmConfig
from kgen.cover import cover
from kgen.errors import UsageError

A, B, C, D = (GemmConfig(block_n=n) for n in (64, 72, 80, 88))


def serves(
    times: dict[int, dict[GemmConfig, float]], m: int, config: GemmConfig, bound: float
) -> bool:
    return config in times[m] and times[m][config] <= min(times[m].values()) * (1 + bound)


def all_covers(times: dict[int, dict[GemmConfig, float]], bound: float) -> tuple[int, float]:
    """The least number of configurations, and the least sum of logarithms with as many."""
    configs = sorted({config for found in times.values() for config in found})
    for size in range(1, len(configs) + 1):
        totals = [
            sum(
                min(
                    log(times[m][c] / min(times[m].values()))
                    for c in chosen
                    if serves(times, m, c, bound)
                )
                for m in times
            )
            for chosen in combinations(configs, size)
            if all(any(serves(times, m, c, bound) for c in chosen) for m in times)
        ]
        if totals:
            return size, min(totals)
    raise AssertionError("every point has its own best")


@pytest.mark.parametrize("seed", range(30))
def test_no_smaller_and_no_faster_set_exists(seed: int) -> None:
    rng = random.Random(seed)
    configs = [GemmConfig(block_n=8 * n) for n in range(2, 2 + rng.randint(2, 8))]
    times = {
        m: {c: rng.uniform(1.0, 1.1) for c in configs if rng.random() < 0.7} or {configs[0]: 1.0}
        for m in sorted(rng.sample(range(1, 5000), rng.randint(1, 9)))
    }
    bound = rng.choice([0.0, 0.01, 0.03, 0.06])
    found = cover(times, bound)
    size, total = all_covers(times, bound)
    assert found.is_smallest
    assert len(found.configs) == size
    assert all(serves(times, m, config, bound) for m, config in found.choices.items())
    assert list(found.choices) == sorted(times)
    own = sum(log(times[m][c] / min(times[m].values())) for m, c in found.choices.items())
    assert own == pytest.approx(total)
    worst = max(times[m][c] / min(times[m].values()) - 1 for m, c in found.choices.items())
    assert found.worst == pytest.approx(worst)


def test_what_was_not_timed_serves_nothing() -> None:
    times = {1: {A: 1.0}, 64: {B: 1.0, A: 5.0}, 128: {C: 1.0}}
    assert cover(times, 0.03).choices == {1: A, 64: B, 128: C}


def test_one_kernel_within_the_bound_does() -> None:
    times = {m: {A: 1.0 + m / 1e4, B: 1.0, C: 1.02} for m in (1, 16, 250)}
    assert cover(times, 0.03).configs == (B,)
    assert cover({1: {A: 1.0, B: 1.02}, 2: {A: 1.02, B: 1.0}}, 0.03).choices == {1: A, 2: A}
    assert len(cover({1: {A: 1.0, B: 1.04}, 2: {A: 1.04, B: 1.0}}, 0.03).configs) == 2


def test_a_search_that_takes_too_long_ends_with_a_cover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kgen.cover, "MAX_STEPS", 3)
    rng = random.Random(1)
    configs = [GemmConfig(block_n=8 * n) for n in range(2, 20)]
    times = {
        m: {c: 1.0 if rng.random() < 0.2 else 2.0 for c in configs} | {configs[m % 18]: 1.0}
        for m in range(1, 30)
    }
    found = cover(times, 0.03)
    assert not found.is_smallest
    assert all(serves(times, m, c, 0.03) for m, c in found.choices.items())


@pytest.mark.parametrize("bound", [-0.1, 1.0, float("nan")])
def test_bad_bounds(bound: float) -> None:
    with pytest.raises(UsageError, match="expected a share from 0"):
        cover({1: {A: 1.0}}, bound)


def test_no_times() -> None:
    empty: list[dict[int, dict[GemmConfig, float]]] = [{}, {1: {}}]
    for times in empty:
        with pytest.raises(UsageError, match="tune the problem at several M first"):
            cover(times, 0.03)
