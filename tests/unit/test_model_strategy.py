"""The model-guided strategy: its process against plain linear algebra, and what it asks for."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from kgen.config import GemmConfig
from kgen.device import H200
from kgen.errors import UsageError
from kgen.heuristic import predict_us, rank
from kgen.problem import GemmProblem
from kgen.search import model_strategy
from kgen.search.model_strategy import (
    NOISE,
    OFFSET_SPREAD,
    SPREAD,
    Lesson,
    ModelStrategy,
    expected_improvement,
)
from kgen.search.strategies import Guide, make_strategy
from kgen.space import coordinates, distance, valid_configs

PROBLEM = GemmProblem("dense", 128, 4096, 7168)
OTHER = GemmProblem("dense", 128, 7168, 2048)
VALID = valid_configs(PROBLEM, H200)
RANKED = rank(PROBLEM, H200)


def covariance(a: list[GemmConfig], b: list[GemmConfig]) -> np.ndarray:
    """Of the errors of one problem's configurations, from the module's description alone."""
    alike = [[math.exp(-distance(x, y) / model_strategy.CONFIG_DISTANCE) for y in b] for x in a]
    return SPREAD**2 * np.array(alike) + OFFSET_SPREAD**2


def test_the_process_is_the_textbook_s() -> None:
    """Mean and deviation against one solve of the whole system."""
    places = list(VALID[::97])
    seen = places[3:9]
    values = [0.1, -0.05, 0.2, 0.0, 0.03, -0.1]
    strategy = ModelStrategy(PROBLEM, H200, places, [])
    for config, value in zip(seen, values, strict=True):
        strategy.tell(config, predict_us(PROBLEM, config, H200) * math.exp(value))
    mean, deviation = strategy._process.predict(strategy._errors)
    system = covariance(seen, seen) + NOISE**2 * np.eye(len(seen))
    cross = covariance(seen, places)
    assert mean == pytest.approx(cross.T @ np.linalg.solve(system, values), abs=1e-5)
    variance = SPREAD**2 + OFFSET_SPREAD**2 - (cross * np.linalg.solve(system, cross)).sum(0)
    assert deviation == pytest.approx(np.sqrt(variance), abs=1e-3)


def test_what_is_on_its_way_changes_no_mean_but_the_deviation() -> None:
    places = list(VALID[::97])
    strategy = ModelStrategy(PROBLEM, H200, places, [])
    strategy.tell(places[0], predict_us(PROBLEM, places[0], H200) * 1.1)
    before, wide = strategy._process.predict(strategy._errors)
    asked = strategy.ask()
    assert asked is not None
    after, narrow = strategy._process.predict(strategy._errors)
    assert after == pytest.approx(before, abs=1e-6)
    index = places.index(asked)
    assert narrow[index] < 0.5 * wide[index]
    assert (narrow <= wide + 1e-7).all()


def test_lessons_are_learned_by_the_likeness_of_problems() -> None:
    """A kernel that is slow elsewhere is expected to be slow here, less so far away."""
    slow, alike = VALID[0], VALID[1]
    assert distance(slow, alike) < 0.5
    quick = max(VALID, key=lambda config: distance(config, slow))

    def expected(problem: GemmProblem) -> float:
        lessons = [
            Lesson(problem, slow, predict_us(problem, slow, H200) * 1.3),
            Lesson(problem, quick, predict_us(problem, quick, H200)),
        ]
        strategy = ModelStrategy(PROBLEM, H200, VALID, [], lessons)
        mean, _ = strategy._process.predict(strategy._errors)
        return float(mean[1] - mean[VALID.index(quick)])

    near, far = expected(OTHER), expected(GemmProblem("dense", 128, 65536, 512))
    assert near > 2 * far > 0
    same = GemmProblem("dense", 128, 4096, 7168)
    assert expected(same) == 0.0, "what is known of the problem itself is told, not taught"


def test_a_problem_that_is_slow_as_a_whole_teaches_nothing() -> None:
    lessons = [Lesson(OTHER, c, predict_us(OTHER, c, H200) * 1.5) for c in VALID[:200:20]]
    strategy = ModelStrategy(PROBLEM, H200, VALID, [], lessons)
    mean, _ = strategy._process.predict(strategy._errors)
    assert np.abs(mean).max() < 0.06


def test_expected_improvement_against_numbers_drawn() -> None:
    rng = np.random.default_rng(0)
    for expected, deviation, best in ((1.0, 0.2, 1.1), (1.0, 0.2, 0.7), (0.0, 1.0, -2.0)):
        drawn = rng.normal(expected, deviation, 400_000)
        found = expected_improvement(np.array([expected]), np.array([deviation]), best)[0]
        assert found == pytest.approx(np.maximum(0, best - drawn).mean(), abs=2e-3 * deviation)


def test_it_finds_what_the_model_does_not_know() -> None:
    """Where 24 columns and their like are 40 % faster than predicted, it goes there."""

    def truth(config: GemmConfig) -> float:
        bonus = 0.5 * math.exp(-abs(config.block_n - 24) / 16) * (config.block_m == 64)
        return predict_us(PROBLEM, config, H200) * math.exp(-bonus)

    best = min(map(truth, VALID))
    strategy = make_strategy("model", VALID, RANKED[:16], guide=Guide(PROBLEM, H200))
    found = math.inf
    for _ in range(40):
        config = strategy.ask()
        assert config is not None
        found = min(found, truth(config))
        strategy.tell(config, truth(config))
    assert found <= 1.02 * best


def test_failures_keep_it_away_from_their_like() -> None:
    strategy = make_strategy("model", VALID, RANKED[:1], guide=Guide(PROBLEM, H200))
    first = strategy.ask()
    assert first == RANKED[0]
    strategy.tell(first, predict_us(PROBLEM, first, H200))
    tall = [config for config in VALID if config.block_m == 128]
    for config in tall[:60]:
        strategy.tell(config, None)
    asked = strategy.ask_many(6)
    assert all(min(distance(c, bad) for bad in tall[:60]) > 0.2 for c in asked)


def test_it_says_what_it_still_expects_to_gain() -> None:
    """Less, the more was tried where the model is right; nothing when all was."""
    few = RANKED[:40]
    strategy = make_strategy("model", few, few[:1], guide=Guide(PROBLEM, H200))
    assert strategy.expected_gain() is None
    gains = []
    while (config := strategy.ask()) is not None:
        strategy.tell(config, predict_us(PROBLEM, config, H200))
        gains.append(strategy.expected_gain())
    assert len(gains) == 40
    assert gains[-1] == 0.0
    early, late = gains[0], gains[30]
    assert early is not None
    assert late is not None
    assert 0 < late < early / 3
    assert make_strategy("random", few).expected_gain() is None


def test_seeds_hints_and_what_is_known() -> None:
    hints = [VALID[5], VALID[6]]
    guide = Guide(PROBLEM, H200, num_hints=2)
    strategy = make_strategy("model", VALID, [*hints, *RANKED[:16]], guide=guide)
    first = strategy.ask_many(10)
    assert first[:2] == hints
    assert set(first[2:]) == set(RANKED[:8])
    strategy = make_strategy("model", VALID, RANKED[:16], {RANKED[0]: 12.0}, guide=guide)
    assert RANKED[0] not in strategy.ask_many(30)
    with pytest.raises(UsageError, match="expected a guide"):
        make_strategy("model", VALID)


def test_thousands_of_results_are_no_burden(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest are learned from; none of all is asked for again."""
    monkeypatch.setattr(model_strategy, "MAX_ROWS", 20)
    known: dict[GemmConfig, float | None] = {
        config: predict_us(PROBLEM, config, H200) for config in reversed(RANKED[:300])
    }
    known |= dict.fromkeys(RANKED[300:400])
    strategy = make_strategy("model", VALID, RANKED[:8], known, guide=Guide(PROBLEM, H200))
    assert isinstance(strategy, ModelStrategy)
    assert set(strategy._row_of) == set(RANKED[:20])
    asked = strategy.ask_many(30)
    assert len(set(asked)) == 30
    assert not set(asked) & set(known)
    strategy.tell(asked[0], 5.0)


def test_results_of_a_space_that_is_gone_are_passed_over() -> None:
    strategy = make_strategy("model", VALID, RANKED[:2], guide=Guide(PROBLEM, H200))
    strategy.tell(replace(GemmConfig(), num_stages=16, block_n=8), 3.0)
    assert strategy.ask() == RANKED[0]


def test_a_point_is_a_configuration_s_place() -> None:
    a, b = VALID[0], VALID[-1]
    apart = sum(abs(x - y) for x, y in zip(coordinates(a), coordinates(b), strict=True))
    assert distance(a, b) == pytest.approx(apart)
