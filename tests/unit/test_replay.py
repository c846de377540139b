"""Strategies on recorded timing tables: what the simulator does, and how well each one searches.

`tests/data/trials_h200_dense.csv.gz` holds what a tuning run tried, some 64 configurations of each
of 42 problems, chosen by TPE: a small space of fast kernels. Every table below tests/data/tables,
of thousands at random, joins it.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from kgen.cli.main import main
from kgen.config import GemmConfig
from kgen.device import H200
from kgen.errors import UsageError
from kgen.problem import GemmProblem
from kgen.search.replay import (
    BLIND,
    SEARCHES,
    TAUGHT,
    Costs,
    RecordedProblem,
    Trace,
    compare,
    quantile,
    recorded_problems,
)
from kgen.search.strategies import MAX_PENDING, NUM_SEEDS, SAMPLERS
from kgen.search.tables import TableRow, TimingTable, read, write

DATA = Path(__file__).parents[1] / "data"
FILES = [DATA / "trials_h200_dense.csv.gz", *sorted((DATA / "tables").glob("*.csv.gz"))]
PROBLEM = GemmProblem("dense", 64, 2112, 7168)
CONFIGS = [GemmConfig(64, n, 4, 1) for n in range(16, 256, 8)]
TIMES = {config: 10.0 + abs(config.block_n - 96) / 8 for config in CONFIGS}


@cache
def problems() -> list[RecordedProblem]:
    return recorded_problems(map(read, FILES), Costs())


@cache
def traces() -> dict[str, list[Trace]]:
    cheap = [name for name in SEARCHES if name not in ("tpe", "genetic")]
    return compare(problems(), cheap, 64, 3)


def rows(**changes: Any) -> list[TableRow]:
    return [TableRow(PROBLEM, c, "ok", 1, TIMES[c], **changes) for c in CONFIGS]


def recorded(some: list[TableRow], **costs: Any) -> RecordedProblem:
    return RecordedProblem(PROBLEM, H200, some, Costs(**costs))


# -- how well they search ------------------------------------------------------------------------


def median_regret(name: str, evaluations: int) -> float:
    return quantile([trace.after(evaluations) for trace in traces()[name]], 0.5)


def test_the_model_guided_search_is_within_two_per_cent_after_64_evaluations() -> None:
    for name in ("model", TAUGHT):
        assert median_regret(name, 64) <= 0.02
        assert median_regret(name, 16) <= 0.02


def mean_regret(name: str, evaluations: int) -> float:
    return fmean(trace.after(evaluations) for trace in traces()[name])


def test_it_is_better_than_random_at_every_budget() -> None:
    for evaluations in (1, 2, 4, 8, 16, 32):
        assert mean_regret("model", evaluations) < mean_regret(BLIND, evaluations)
        assert mean_regret(TAUGHT, evaluations) < mean_regret(BLIND, evaluations)
    for seconds in (1.0, 2.0, 3.0):

        def at(name: str, seconds: float = seconds) -> float:
            return quantile([trace.at(seconds) for trace in traces()[name]], 0.9)

        assert at("model") < at(BLIND)


def test_lessons_of_other_problems_help() -> None:
    assert mean_regret(TAUGHT, 4) < 0.8 * mean_regret("model", 4)


@pytest.mark.parametrize("name", ["tpe", "genetic"])
def test_optuna_s_samplers_are_not_forgotten(name: str) -> None:
    found = compare(problems()[::6], [name, BLIND], 32, 1)
    regret = {each: fmean(t.after(16) for t in own) for each, own in found.items()}
    assert regret[name] < regret[BLIND]


# -- the simulator -------------------------------------------------------------------------------


def test_a_replay_is_what_the_table_says() -> None:
    each = recorded(rows())
    trace = each.replay(each.strategy(BLIND, 0), 100)
    assert sorted(trace.asked) == sorted(CONFIGS)
    best = math.inf
    for config, so_far in zip(trace.asked, trace.best_so_far_us, strict=True):
        best = min(best, TIMES[config])
        assert so_far == best
    assert trace.after(100) == trace.after(len(CONFIGS)) == 0
    assert trace.after(1) == TIMES[trace.asked[0]] / 10.0 - 1
    assert trace.after(0) == math.inf
    assert each.median_us > each.best_us == 10.0


def test_seeds_change_what_is_random_and_nothing_else() -> None:
    each = recorded(rows())
    for name in sorted({*SEARCHES} - {"tpe", "genetic"}):  # a dozen evaluations are all seeds
        first, again, other = (each.replay(each.strategy(name, s), 12).asked for s in (0, 0, 1))
        assert first == again
        assert (first == other) == (name in ("model", TAUGHT))


def test_the_clock_of_one_gpu_and_many_compilers() -> None:
    """Builds take 1 s each, 2 at a time; the GPU 0.25 s a kernel, and waits."""
    each = recorded(rows(), compile_s=1.0, verify_s=0.15, time_s=0.1, jobs=2)
    trace = each.replay(each.strategy(BLIND, 0), 4)
    assert trace.seconds == pytest.approx((1.25, 1.5, 2.25, 2.5))
    slow_gpu = recorded(rows(), compile_s=0.1, verify_s=1.0, time_s=1.0, jobs=2)
    trace = slow_gpu.replay(slow_gpu.strategy(BLIND, 0), 4)
    assert trace.seconds == pytest.approx((2.1, 4.1, 6.1, 8.1))
    assert trace.at(5.0) == trace.after(2)
    assert trace.at(2.0) == math.inf


def test_seconds_that_the_table_tells_count() -> None:
    own = rows(compile_s=0.5, verify_s=0.3, time_s=0.2)
    each = recorded(own, compile_s=9.0, verify_s=9.0, time_s=9.0, jobs=1)
    trace = each.replay(each.strategy(BLIND, 0), 2)
    assert trace.seconds == pytest.approx((1.0, 1.5))


def test_failures_cost_what_they_cost_and_are_no_times() -> None:
    order = recorded(rows()).strategy(BLIND, 0).ask_many(4)
    statuses = dict(zip(order, ("compile_failed", "timeout", "wrong", "ok"), strict=True))
    some = [
        replace(row, status=statuses.get(row.config, "ok"), median_us=None)
        if statuses.get(row.config, "ok") != "ok"
        else row
        for row in rows()
    ]
    each = recorded(some, compile_s=0.0, verify_s=1.0, time_s=1.0, timeout_s=20.0)
    trace = each.replay(each.strategy(BLIND, 0), 4)
    assert trace.asked == tuple(order)
    assert trace.best_so_far_us[:3] == (math.inf,) * 3
    assert trace.best_so_far_us[3] == TIMES[order[3]]
    assert trace.seconds == pytest.approx((0.0, 20.0, 21.0, 23.0))
    with pytest.raises(UsageError, match="no time of it"):
        recorded([replace(row, status="wrong", median_us=None) for row in rows()])


def test_never_more_on_the_way_than_the_tuner_has() -> None:
    class Counting:
        most = open = 0

        def __init__(self) -> None:
            self.waiting = list(CONFIGS)

        def ask(self) -> GemmConfig | None:
            self.open += 1
            self.most = max(self.most, self.open)
            return self.waiting.pop() if self.waiting else None

        def tell(self, config: GemmConfig, median_us: float | None) -> None:
            self.open -= 1

    strategy = Counting()
    recorded(rows()).replay(strategy, 20)  # type: ignore[arg-type]
    assert strategy.most == MAX_PENDING
    assert NUM_SEEDS >= MAX_PENDING


def test_lessons_are_of_other_products_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[GemmProblem, set[GemmProblem]] = {}
    original = RecordedProblem.strategy

    def spy(self: RecordedProblem, name: str, seed: int, lessons: Any = ()) -> Any:
        if name == TAUGHT:
            seen[self.problem] = {lesson.problem for lesson in lessons}
        return original(self, name, seed, lessons)

    monkeypatch.setattr(RecordedProblem, "strategy", spy)
    some = problems()[:8]
    compare(some, [TAUGHT], 4, 1)
    for problem, others in seen.items():
        assert others == {
            p.problem for p in some if (p.problem.n, p.problem.k) != (problem.n, problem.k)
        }


def test_names() -> None:
    assert set(SAMPLERS) - {"exhaustive"} <= set(SEARCHES)
    with pytest.raises(UsageError, match="sampler 'annealing'"):
        compare([], ["annealing"], 1, 1)


@pytest.mark.parametrize(("share", "value"), [(0.5, 2.0), (0.9, math.inf), (0.25, 1.0)])
def test_quantiles(share: float, value: float) -> None:
    assert quantile([3.0, 1.0, 2.0, math.inf], share) == value


# -- the command ---------------------------------------------------------------------------------


def test_the_command_prints_regrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {**vars(H200), "clusters_by_size": [[2, 66]]}
    write(
        TimingTable({"policy": "cold", "device": facts}, H200, tuple(rows())), tmp_path / "a.csv.gz"
    )
    asked = ["replay", str(tmp_path), "--sampler", "model", "--sampler", "blind"]
    assert main([*asked, "--evaluations", "10"]) == 0
    out = capsys.readouterr().out
    assert str(PROBLEM) in out
    assert "model" in out
    assert "tpe" not in out
    assert main([*asked, "--evaluations", "10", "--json", "--repeats", "3"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [len(values["searches"][name]) for name in ("model", "blind")] == [1, 3]
    regret = values["searches"]["model"][0]["regret"]
    assert len(regret) == 10
    assert regret == sorted(regret, reverse=True)
    assert values["problems"][0]["best_us"] == 10.0


def test_the_command_refuses_what_is_no_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tmp_path)]) == 2
    assert "a folder without tables" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none.csv.gz")]) == 2
    assert "none.csv.gz: No such file" in capsys.readouterr().err
