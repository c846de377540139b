"""kgen.runtime.lookup: which configuration a problem gets, and how few kernels many M need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kgen.config import GemmConfig
from kgen.device import H200
from kgen.errors import DatabaseError
from kgen.heuristic import default_config, predict_us
from kgen.problem import GemmProblem
from kgen.runtime import lookup
from kgen.runtime.lookup import Winner, buckets_around, choose, default_for, read_winners
from kgen.validity import why_invalid

#: Small N and K keep the space, and so the tests, small.
PROBLEM = GemmProblem("dense", 64, 576, 512)
DECODE = GemmConfig(block_m=16, block_n=16, num_stages=4, num_math_warpgroups=1)
PREFILL = GemmConfig(block_m=128, block_n=96, num_stages=4)


def winner(m: int, config: GemmConfig, key: str = "k") -> Winner:
    return Winner(m, config, key)


def test_a_tuned_problem_gets_its_winner_whatever_the_model_says() -> None:
    slow = replace(PREFILL, num_stages=2)
    choice = choose(PROBLEM, H200, [winner(1, DECODE), winner(64, slow), winner(128, PREFILL)])
    assert (choice.config, choice.origin, choice.tuned_m) == (slow, "tuned", 64)


def test_nothing_tuned_gives_the_default() -> None:
    choice = choose(PROBLEM, H200, [])
    assert (choice.origin, choice.tuned_m) == ("default", None)
    assert choice.config == default_for(PROBLEM, H200)


@pytest.mark.parametrize("m", [100, 300, 2048, 4096])
def test_large_m_does_not_run_on_a_decode_configuration(m: int) -> None:
    tuned = [winner(1, DECODE), winner(2, DECODE), winner(8, DECODE)]
    choice = choose(PROBLEM.with_m(m), H200, tuned)
    assert choice.origin == "default"
    assert choice.config != DECODE


@pytest.mark.parametrize("m", [65, 100, 1000, 4225])
def test_a_neighbour_is_never_predicted_slower_than_the_default(m: int) -> None:
    problem = PROBLEM.with_m(m)
    tuned = [winner(64, default_for(PROBLEM, H200)), winner(8192, PREFILL)]
    choice = choose(problem, H200, tuned)
    default_us = predict_us(problem, default_for(problem, H200), H200)
    assert predict_us(problem, choice.config, H200) <= default_us
    assert why_invalid(problem, choice.config, H200) is None


def test_a_good_neighbour_is_used_and_named() -> None:
    problem = PROBLEM.with_m(120)
    best = default_for(problem, H200)
    choice = choose(problem, H200, [winner(16, DECODE), winner(128, best)])
    assert (choice.config, choice.origin, choice.tuned_m) == (best, "neighbour", 128)


def test_the_nearest_usable_neighbours_are_asked() -> None:
    problem = PROBLEM.with_m(120)
    best = default_for(problem, H200)
    invalid = replace(best, num_stages=16, block_n=256, block_m=256)
    choice = choose(problem, H200, [winner(100, best), winner(112, invalid), winner(119, invalid)])
    assert (choice.config, choice.tuned_m, choice.stale) == (best, 100, 0)


def test_a_winner_of_another_cubin_is_a_suggestion_only() -> None:
    tuned = [winner(64, PREFILL, "old"), winner(128, default_for(PROBLEM, H200), "new")]
    choice = choose(PROBLEM, H200, tuned, lambda config: "new")
    assert (choice.origin, choice.tuned_m, choice.stale) == ("neighbour", 128, 1)
    choice = choose(PROBLEM, H200, tuned, lambda config: "newer")
    assert (choice.origin, choice.stale) == ("default", 2)


def test_of_one_m_the_fastest_of_todays_cubins_is_taken() -> None:
    """A stale winner is passed over for the next one of its M, which counts as tuned."""
    tuned = [winner(64, DECODE, "old"), winner(64, PREFILL, "new"), winner(64, DECODE, "new")]
    choice = choose(PROBLEM, H200, tuned, lambda config: "new")
    assert (choice.config, choice.origin, choice.stale) == (PREFILL, "tuned", 0)
    choice = choose(PROBLEM.with_m(60), H200, tuned, lambda config: "new")
    assert choice.config in (PREFILL, default_for(PROBLEM.with_m(60), H200))
    assert choice.stale == 1


def test_a_source_by_hand_serves_its_own_m() -> None:
    odd = replace(PREFILL, block_n=104)
    tuned = [Winner(64, odd, "f" * 64, foreign=True), winner(64, PREFILL)]
    choice = choose(PROBLEM, H200, tuned, lambda config: "k")
    assert (choice.config, choice.origin, choice.foreign_key) == (odd, "foreign", "f" * 64)
    choice = choose(PROBLEM.with_m(63), H200, tuned, lambda config: "k")
    assert choice.foreign_key == ""


def test_buckets_enclose_m() -> None:
    for m in [*range(1, 3000), 2**31 - 1, 2**30 + 1]:
        around = buckets_around(m)
        assert min(around) <= max(m, 16) <= max(around) < 2**31
        assert len(around) <= 2
        assert max(around) <= 2 * max(m, 16)
    assert buckets_around(7) == (16,)
    assert buckets_around(17) == (16, 32)
    assert buckets_around(40) == (32, 48)
    assert buckets_around(4096) == (4096,)
    assert buckets_around(4225) == (4096, 6144)


def test_kernels_grow_with_the_logarithm_of_m(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[int] = set()

    def counted(problem: GemmProblem, device: object) -> GemmConfig:
        asked.add(problem.m)
        return default_config(problem, H200)

    monkeypatch.setattr(lookup, "default_config", counted)
    configs = {default_for(PROBLEM.with_m(m), H200) for m in range(1, 4097)}
    assert asked == {b for m in range(1, 4097) for b in buckets_around(m)}
    assert len(configs) <= len(asked) == 16


@pytest.mark.parametrize("m", [5, 33, 129, 1100, 3000])
def test_a_bucket_costs_little_of_the_models_best(m: int) -> None:
    problem = PROBLEM.with_m(m)
    config = default_for(problem, H200)
    assert why_invalid(problem, config, H200) is None
    best_us = predict_us(problem, default_config(problem, H200), H200)
    assert predict_us(problem, config, H200) <= 1.15 * best_us


def test_winners_come_from_the_database(tmp_path: Path) -> None:
    db = pytest.importorskip("kgen.cache.db")
    from kgen.cache.records import PROVENANCE_KEYS, TrialRecord

    url = f"sqlite:///{tmp_path / 'tuning.db'}"
    with pytest.raises(DatabaseError):
        read_winners(PROBLEM, H200, url)
    assert not (tmp_path / "tuning.db").exists()
    database = db.TuningDatabase.open(url)
    for m, us, config in ((64, 9.0, PREFILL), (64, 7.0, DECODE), (16, 5.0, PREFILL)):
        record = TrialRecord(
            problem=PROBLEM.with_m(m),
            config=config,
            device_name=H200.name,
            num_sms=132,
            cubin_key=f"key {config}",
            status="ok",
            verified=True,
            error=1e-3,
            median_us=us,
            p10_us=us,
            p90_us=us,
            samples_us=(us,),
            policy="p",
            provenance=dict.fromkeys(PROVENANCE_KEYS, "x"),
        )
        database.record(record)
    database.close()
    found = read_winners(PROBLEM.with_m(1000), H200, url)
    assert found == (
        Winner(16, PREFILL, f"key {PREFILL}"),
        Winner(64, DECODE, f"key {DECODE}"),
        Winner(64, PREFILL, f"key {PREFILL}"),
    )
    assert read_winners(replace(PROBLEM, num_sms=20), H200, url) == ()
    assert read_winners(PROBLEM, replace(H200, name="NVIDIA H20", num_sms=78), url) == ()
