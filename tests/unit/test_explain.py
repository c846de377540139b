"""kgen.explain and its command: counts that add up, ties by interval, differences, origins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kgen.cache.db import TuningDatabase
from kgen.cache.records import ProblemOutcome
from kgen.cli.main import main
from kgen.config import GemmConfig
from kgen.device import H200
from kgen.errors import RenderError
from kgen.explain import Explanation, compare, explain
from kgen.heuristic import default_config, predict_us
from kgen.problem import GemmProblem
from kgen.render import render
from kgen.runtime.lookup import default_for
from tests.unit.conftest import MakeTrial

#: Small N and K keep the space, and so the tests, small.
PROBLEM = GemmProblem("dense", 64, 576, 512)
DEFAULT = default_config(PROBLEM, H200)
FAST = GemmConfig(block_m=64, block_n=48, num_stages=4, num_math_warpgroups=1)
CLOSE = replace(FAST, block_n=56)
SLOW = replace(FAST, block_n=64)


def key_of(config: GemmConfig) -> str:
    return f"key of {config}"


@pytest.fixture
def db(tmp_path: Path) -> Iterator[TuningDatabase]:
    with TuningDatabase.open(tmp_path / "tuning.db") as made:
        yield made


def timed(
    db: TuningDatabase, make_trial: MakeTrial, config: GemmConfig, us: float, key: str = ""
) -> int:
    samples = tuple(us + i / 64 for i in range(-8, 9))
    return db.record(
        make_trial(
            us,
            problem=PROBLEM,
            config=config,
            cubin_key=key or key_of(config),
            samples_us=samples,
            p10_us=us - 0.1,
            p90_us=us + 0.1,
        )
    )


@pytest.fixture
def found(db: TuningDatabase, make_trial: MakeTrial) -> Explanation:
    """A tuned problem: a winner, a tie, the default, and what failed."""
    for config, us in ((SLOW, 8.0), (FAST, 5.0), (CLOSE, 5.03), (DEFAULT, 6.0)):
        timed(db, make_trial, config, us)
    db.record(make_trial(status="wrong", problem=PROBLEM, config=replace(FAST, block_n=72)))
    db.record(make_trial(status="timeout", problem=PROBLEM, config=replace(FAST, block_n=80)))
    db.record(make_trial(1.0, problem=PROBLEM, config=FAST, cubin_key="f" * 64, source="foreign"))
    db.record(make_trial(0.5, problem=PROBLEM, config=SLOW, num_sms=114))  # elsewhere
    outcome = ProblemOutcome(
        problem=PROBLEM, device_name=H200.name, num_sms=132, outcome="tuned", num_trials=6
    )
    db.record_outcome(outcome)
    return explain(PROBLEM, H200, db, key_of)


def test_counts_add_up(found: Explanation) -> None:
    assert found.num_valid + sum(found.invalid_by_rule.values()) == found.num_points
    assert found.by_status == {"ok": 4, "wrong": 1, "timeout": 1, "foreign": 1}
    assert (found.num_rows, found.num_configs) == (7, 6)
    points = list(found.invalid_by_rule.values())
    assert points == sorted(points, reverse=True)


def test_ties_are_what_intervals_do_not_tell_apart(found: Explanation) -> None:
    """17 samples around each time, a 64th apart: 5 and 5.03 meet, 5 and 6 do not."""
    assert [kernel.config for kernel in found.kernels] == [FAST, CLOSE, DEFAULT, SLOW]
    assert [kernel.config for kernel in found.ties] == [FAST, CLOSE]
    winner = found.winner
    assert winner is not None
    assert winner.interval is not None
    assert winner.interval.low < 5.0 < winner.interval.high
    assert winner.num_samples == 17
    assert winner.predicted_us == predict_us(PROBLEM, FAST, H200)
    assert found.runner_up == found.kernels[1]
    assert (found.default, found.default_us) == (DEFAULT, 6.0)


def test_samples_of_all_rows_of_a_cubin_count(
    db: TuningDatabase, make_trial: MakeTrial, found: Explanation
) -> None:
    newest = timed(db, make_trial, FAST, 5.01)
    again = explain(PROBLEM, H200, db, key_of)
    assert (again.kernels[0].num_samples, again.kernels[0].trial) == (34, newest)


def test_too_few_samples_tie_with_nobody(db: TuningDatabase, make_trial: MakeTrial) -> None:
    for config, us in ((FAST, 5.0), (CLOSE, 5.001)):
        db.record(make_trial(us, problem=PROBLEM, config=config, cubin_key=key_of(config)))
    found = explain(PROBLEM, H200, db, key_of)
    assert [kernel.is_tied for kernel in found.kernels] == [True, False]
    assert found.kernels[0].interval is None


def test_the_answer_is_exact_nearest_or_the_models(
    db: TuningDatabase, make_trial: MakeTrial, found: Explanation
) -> None:
    assert (found.choice.origin, found.choice.config) == ("tuned", FAST)
    timed(db, make_trial, default_for(PROBLEM.with_m(63), H200), 1.0)
    near = explain(PROBLEM.with_m(63), H200, db, key_of)
    assert (near.choice.origin, near.choice.tuned_m) == ("neighbour", 64)
    assert (near.kernels, near.winner, near.runner_up) == ((), None, None)
    other = explain(replace(PROBLEM, n=1024), H200, db, key_of)
    assert other.choice.origin == "default"
    without = explain(PROBLEM, H200, None)
    assert (without.choice.origin, without.num_rows) == ("default", 0)


def test_stale_kernels_are_marked(db: TuningDatabase, make_trial: MakeTrial) -> None:
    timed(db, make_trial, FAST, 5.0, key="old")
    timed(db, make_trial, CLOSE, 6.0)
    found = explain(PROBLEM, H200, db, key_of)
    assert [kernel.is_stale for kernel in found.kernels] == [True, False]
    assert (found.choice.config, found.choice.origin) == (CLOSE, "tuned")
    nobody = explain(PROBLEM, H200, db)
    assert [kernel.is_stale for kernel in nobody.kernels] == [None, None]

    def refuses(config: GemmConfig) -> str:
        raise RenderError("the template refuses")

    refused = explain(PROBLEM, H200, db, refuses)
    assert [kernel.is_stale for kernel in refused.kernels] == [True, True]


def test_difference_of_configuration_and_source() -> None:
    """Applied to the other's source, the lines give the own one."""
    found = compare(PROBLEM, FAST, CLOSE)
    assert found.axes == {"block_n": (48, 56)}
    added = [line[1:] for line in found.diff.splitlines()[2:] if line.startswith("+")]
    taken = [line[1:] for line in found.diff.splitlines()[2:] if line.startswith("-")]
    assert len(added) + len(taken) == found.num_lines
    own, other = (render(PROBLEM, config).text.splitlines() for config in (FAST, CLOSE))
    assert "// block_n = 48" in added
    assert set(added) <= set(own)
    assert set(taken) <= set(other)
    assert set(other) - set(own) <= set(taken)
    assert compare(PROBLEM, FAST, FAST).diff == ""


def run(db: TuningDatabase, *words: str) -> int:
    assert db.file is not None
    return main(["explain", str(PROBLEM), "--db", str(db.file.path), *words])


def test_command(
    db: TuningDatabase, found: Explanation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(db) == 0
    out = capsys.readouterr().out
    assert f"space   {found.num_valid} of {found.num_points} points" in out
    assert "tie set 2 kernels of 4 that passed, policy cold" in out
    assert "foreign 1, ok 4, timeout 1, wrong 1 (7 rows of 6 configurations)" in out
    assert f"default {DEFAULT}: 6.00 µs, 1.200x the winner's time" in out
    assert f"next    {CLOSE}: 5.03 µs, 1.006x the winner's time, not told apart" in out
    assert "the winner has block_n 48, not 56" in out
    line = next(line for line in out.splitlines() if "winner, stale" in line)
    assert str(found.kernels[0].trial) in line.split()


def test_command_json_and_diff(
    db: TuningDatabase, found: Explanation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(db, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["by_status"] == found.by_status
    assert [kernel["is_tied"] for kernel in told["kernels"]] == [True, True, False, False]
    assert set(told["differences"]) == {"default", "runner_up"}
    assert told["outcome"]["outcome"] == "tuned"
    assert run(db, "--diff", "runner-up") == 0
    out = capsys.readouterr().out
    assert out.strip() == compare(PROBLEM, FAST, CLOSE).diff.strip()


def test_command_without_a_database(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["explain", str(PROBLEM), "--db", str(tmp_path / "none.db")]
    assert main(words) == 0
    done = capsys.readouterr()
    assert "trials  none on this device: kgen tune" in done.out
    assert "heuristic: the analytic model's choice" in done.out
    assert "none.db" in done.err
    assert main([*words, "--diff", "default"]) == 0
    assert "there is no other default" in capsys.readouterr().err
