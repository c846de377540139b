"""Strategies over real valid sets with made-up objectives: nothing here needs a GPU."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest

from kgen.config import GemmConfig
from kgen.device import H200
from kgen.errors import UsageError
from kgen.problem import GemmProblem
from kgen.search.optuna_strategy import TpeStrategy
from kgen.search.strategies import SAMPLERS, SMALL_SPACE, Guide, make_strategy
from kgen.search.strategy import Strategy
from kgen.space import distance, valid_configs

ROOT = Path(__file__).parent.parent.parent
PROBLEM = GemmProblem("dense", 128, 4096, 7168)
VALID = valid_configs(PROBLEM, H200)
Objective = Callable[[GemmConfig], float | None]


def made(sampler: str, *args: Any, **named: Any) -> Strategy:
    """Any strategy, with what the model-guided one goes by."""
    return make_strategy(sampler, *args, **named, guide=Guide(PROBLEM, H200))


def landscape(c: GemmConfig) -> float:
    """A smooth one: every axis has a best value and a price for being away from it."""
    away = 0.2 * abs(math.log2(c.block_m / 128)) + abs(c.block_n - 152) / 200
    away += 0.04 * abs(c.num_stages - 5) + 0.02 * abs(math.log2(c.raster_group / 8))
    away += 0.05 * (c.cluster_n != 2) + 0.03 * (c.raster_along != "n")
    away += 0.03 * (c.b_eviction != "evict_first")
    return 10.0 * (1 + away + 0.02 * (c.baked_dims != "nk"))


def search(
    strategy: Strategy, objective: Objective, trials: int, ahead: int = 1
) -> list[tuple[GemmConfig, float | None]]:
    """What was measured, in order, with up to `ahead` configurations on their way."""
    done: list[tuple[GemmConfig, float | None]] = []
    pending: list[GemmConfig] = []
    while len(done) < trials:
        pending += strategy.ask_many(min(ahead, trials - len(done)) - len(pending))
        if not pending:
            break
        config = pending.pop(0)
        done.append((config, objective(config)))
        strategy.tell(*done[-1])
    return done


def best_us(done: list[tuple[GemmConfig, float | None]]) -> float:
    return min(us for _, us in done if us is not None)


def study_of(strategy: Strategy) -> Any:
    assert isinstance(strategy, TpeStrategy)
    return strategy._study


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_four_configurations_and_a_hundred_trials_are_four_measurements(sampler: str) -> None:
    valid = VALID[:4]
    strategy = made(sampler, valid)
    done = search(strategy, landscape, 100)
    assert sorted(config for config, _ in done) == sorted(valid)
    assert strategy.ask() is None
    assert strategy.ask_many(5) == []
    assert (strategy.num_open, strategy.num_pending) == (0, 0)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("ahead", [1, 8])
def test_no_configuration_is_asked_for_twice_until_all_were(sampler: str, ahead: int) -> None:
    valid = VALID[:: len(VALID) // 40]
    done = search(made(sampler, valid, seed=3), landscape, 1000, ahead)
    assert len(done) == len(valid) > SMALL_SPACE
    assert {config for config, _ in done} == set(valid)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_many_can_be_on_their_way(sampler: str) -> None:
    strategy = made(sampler, VALID, VALID[:3], seed=1)
    for config in strategy.ask_many(12):
        strategy.tell(config, landscape(config))
    asked = strategy.ask_many(20)
    assert len(set(asked)) == 20
    assert strategy.num_pending == 20
    assert strategy.num_open == len(VALID) - 32
    for config in reversed(asked[:5]):
        strategy.tell(config, landscape(config))
    assert strategy.num_pending == 15
    assert not set(strategy.ask_many(15)) & set(asked)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_an_empty_set_has_nothing_to_ask_for(sampler: str) -> None:
    assert made(sampler, ()).ask() is None


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_same_seed_gives_the_same_search(sampler: str) -> None:
    first, again = (search(made(sampler, VALID, seed=5), landscape, 18) for _ in "ab")
    assert first == again
    if sampler not in ("exhaustive", "model"):  # nothing is left to chance
        other = search(made(sampler, VALID, seed=6), landscape, 18)
        assert first != other


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("seed", [-1, 2**32, 10**30])
def test_any_whole_number_is_a_seed(sampler: str, seed: int) -> None:
    strategy = made(sampler, VALID, seed=seed)
    assert len(set(strategy.ask_many(14))) == 14


def test_seeds_come_first_in_their_order() -> None:
    seeds = [VALID[70], GemmConfig(block_n=16, num_stages=16), VALID[5], VALID[70], VALID[900]]
    assert seeds[1] not in VALID
    expected = [VALID[70], VALID[5], VALID[900]]
    for sampler in ("model", "tpe", "genetic", "exhaustive"):
        assert made(sampler, VALID, seeds).ask_many(3) == expected
    assert make_strategy("exhaustive", VALID, seeds).ask_many(5)[3:] == list(VALID[:2])
    assert make_strategy("random", VALID, seeds).ask() == expected[0]
    assert make_strategy("random", VALID, seeds).ask_many(3) != expected


@pytest.mark.parametrize(("ahead", "num_seeds"), [(1, 6), (8, 4)])
def test_tpe_beats_random_on_a_smooth_landscape(ahead: int, num_seeds: int) -> None:
    """By what 64 measurements find, on average; random takes no time and is averaged widely."""

    def mean(sampler: str, seeds: int) -> float:
        strategies = (made(sampler, VALID, seed=seed) for seed in range(seeds))
        return sum(best_us(search(s, landscape, 64, ahead)) for s in strategies) / seeds

    least = min(map(landscape, VALID))
    tpe, by_chance = mean("tpe", num_seeds) - least, mean("random", 50) - least
    assert tpe < by_chance * 0.7


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_what_is_no_time_is_a_failure(bad: float | None) -> None:
    strategy = make_strategy("tpe", VALID, VALID[:2])
    for config in strategy.ask_many(2):
        strategy.tell(config, bad)
    trials = study_of(strategy).get_trials()
    assert [trial.state for trial in trials] == [optuna.trial.TrialState.PRUNED] * 2
    assert [trial.value for trial in trials] == [None] * 2
    assert strategy.ask() not in VALID[:2]


def wide_fails(config: GemmConfig) -> float | None:
    return None if config.block_n > 64 else landscape(config)


def test_tpe_turns_away_from_where_all_fails() -> None:
    """More than half of the space fails, and times get better towards its edge. A study that was
    not told of failures asks for nine of ten there; one that was, for a quarter.
    """
    share = sum(wide_fails(config) is None for config in VALID) / len(VALID)
    done = search(make_strategy("tpe", VALID, seed=2), wide_fails, 50)
    failures = sum(us is None for _, us in done[25:]) / 25
    assert share > 0.5
    assert failures < 0.75 * share


def test_a_search_where_everything_fails_goes_on() -> None:
    done = search(make_strategy("tpe", VALID, seed=2), lambda _: None, 40)
    assert len({config for config, _ in done}) == 40


def test_the_study_holds_results_and_nothing_that_runs() -> None:
    strategy = make_strategy("tpe", VALID, seed=4)
    done = search(strategy, wide_fails, 30, ahead=4)
    strategy.ask_many(3)
    state = optuna.trial.TrialState
    trials = study_of(strategy).get_trials()
    assert not [trial for trial in trials if trial.state == state.RUNNING]
    kept = [trial for trial in trials if trial.state in (state.COMPLETE, state.PRUNED)]
    assert [trial.value for trial in kept] == [us for _, us in done]


def test_the_study_learns_of_what_was_tried_not_of_the_hint() -> None:
    strategy = make_strategy("tpe", VALID, seed=4)
    assert isinstance(strategy, TpeStrategy)
    done = search(strategy, landscape, 20)
    results = [trial for trial in study_of(strategy).get_trials() if trial.value is not None]
    for trial, (config, us) in zip(results, done, strict=True):
        assert config in VALID
        assert trial.value == us
        for name, values in strategy._axes.items():
            place = trial.params[name]
            value = values[place] if isinstance(values[0], int) else place
            assert value == getattr(config, name)


def test_a_hint_becomes_the_nearest_open_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = make_strategy("tpe", VALID)
    hint = GemmConfig(block_m=128, block_n=256, num_stages=16)
    assert hint not in VALID
    monkeypatch.setattr(strategy, "_hint", lambda trial: hint)
    first, second = strategy.ask_many(2)
    apart = sorted(distance(hint, config) for config in VALID)
    assert [distance(hint, first), distance(hint, second)] == apart[:2]
    assert first != second


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_known_results_are_not_asked_for_again(sampler: str) -> None:
    known: dict[GemmConfig, float | None] = {c: landscape(c) for c in VALID[:100]}
    known |= dict.fromkeys(VALID[100:120])
    seeds = [VALID[0], VALID[110], VALID[700]]
    strategy = made(sampler, VALID, seeds, known)
    assert strategy.num_open == len(VALID) - 120
    asked = strategy.ask_many(15)
    assert not set(asked) & set(known)
    assert sampler == "random" or asked[0] == VALID[700]


def test_a_resumed_search_goes_on_from_what_is_known() -> None:
    """With the first half of a search known, the rest is as good as one that was not cut."""
    half = search(make_strategy("tpe", VALID, seed=7), landscape, 40)
    rest = search(make_strategy("tpe", VALID, known=dict(half), seed=8), landscape, 24)
    assert not {config for config, _ in half} & {config for config, _ in rest}
    uncut = search(make_strategy("tpe", VALID, seed=7), landscape, 64)
    assert min(best_us(half), best_us(rest)) < best_us(uncut) * 1.05
    later = [us for _, us in rest if us is not None]
    first = [us for _, us in half[:10] if us is not None]
    assert sum(later) / len(later) < 0.9 * sum(first) / len(first)


def test_results_of_another_space_are_taken_without_harm() -> None:
    foreign = GemmConfig(block_n=16, num_stages=2, num_math_warpgroups=1, split_k=8)
    assert foreign not in VALID
    strategy = make_strategy("tpe", VALID, known={foreign: 1.0, VALID[3]: 20.0})
    assert strategy.num_open == len(VALID) - 1
    assert strategy.ask() in VALID


def test_only_the_first_word_counts() -> None:
    strategy = make_strategy("tpe", VALID, VALID[:1])
    config = strategy.ask()
    assert config is not None
    strategy.tell(config, 5.0)
    strategy.tell(config, None)
    assert [trial.value for trial in study_of(strategy).get_trials()] == [5.0]


def test_an_unknown_sampler_is_refused() -> None:
    with pytest.raises(UsageError, match="model, tpe, genetic, random, exhaustive"):
        make_strategy("cmaes", VALID)


def test_generations_breed_from_what_was_fast() -> None:
    """The genetic one beats chance, and goes on with results that it did not ask for."""
    known = dict(search(make_strategy("random", VALID, seed=1), landscape, 12))
    found = {
        sampler: [
            best_us(search(make_strategy(sampler, VALID, (), known, seed), landscape, 80))
            for seed in range(3)
        ]
        for sampler in ("genetic", "random")
    }
    assert sum(found["genetic"]) < sum(found["random"])


def test_optuna_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search(make_strategy("tpe", VALID), landscape, 15)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_optuna_is_imported_only_by_who_needs_it() -> None:
    code = (
        "import sys; from kgen.search.strategies import make_strategy\n"
        "make_strategy('random', ()); make_strategy('exhaustive', ())\n"
        "print('optuna' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "False"
