"""Who wins when times can not be told apart: ties, the control kernel, twins, what is stored."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import kgen.search.session
from kgen.build import Cubin
from kgen.cache.db import TuningDatabase
from kgen.config import GemmConfig
from kgen.problem import GemmProblem
from kgen.search.control import DRIFT, LAST, Control
from kgen.search.events import Notice, ProblemReport, TuneEvent, TuneOptions, TuneReport
from kgen.search.gpu_worker import Measured
from kgen.search.ties import decide
from kgen.search.tune import tune
from kgen.settings import Settings
from kgen.shapes import ShapeLine
from tests.unit.fake_search import BUILDER, DEVICE, FakeBuilder, FakeGpu

PROBLEM = GemmProblem("dense", 16, 576, 7168)
NEAR = GemmProblem("dense", 32, 576, 7168)
A, B, C, D = (GemmConfig(16, 64, stages, 1) for stages in (4, 5, 6, 7))
SPACE = (A, B, C, D)
ROUNDS = 16


def samples(us: float, noise: float, seed: int) -> tuple[float, ...]:
    rng = random.Random(seed)
    return tuple(us * (1 + rng.uniform(-noise, noise)) for _ in range(ROUNDS))


# -- deciding ------------------------------------------------------------------------------------


def test_of_a_tie_the_preferred_one_wins_and_beyond_the_noise_the_fastest() -> None:
    times = {A: samples(10.0, 0.01, 1), B: samples(10.02, 0.01, 2), C: samples(10.5, 0.01, 3)}
    fastest = min(times, key=lambda config: median(times[config]))
    winner, *others = decide(times, [C, B])
    assert winner.config == B
    assert winner.tied
    tied = {s.config for s in (winner, *others) if s.tied}
    assert fastest in tied
    assert C not in tied, "5 % is more than a noise of 1 %, whoever is preferred"
    assert decide(times, [])[0].config == fastest
    assert [s.config for s in decide(times, [C])][-1] == C


def test_ratios_and_intervals_are_of_paired_rounds() -> None:
    """Both drift together by 30 %, which pairs do not see."""
    drift = [1 + 0.02 * i for i in range(ROUNDS)]
    times = {A: [10 * d for d in drift], B: [10.3 * d for d in drift]}
    first, second = decide(times, [B])
    assert (first.config, first.ratio) == (A, 1.0)
    assert second.ratio == pytest.approx(1.03)
    assert second.low == pytest.approx(1.03)
    assert not second.tied


def test_too_few_rounds_tie_nothing_but_equals() -> None:
    times = {A: [10.0, 10.1], B: [10.05, 10.12], C: [10.0, 10.1]}
    standings = {s.config: s for s in decide(times, [C])}
    assert standings[C].tied
    assert standings[A].tied
    assert not standings[B].tied
    assert standings[B].low == standings[B].high == standings[B].ratio
    assert decide(times, [B, C])[0].config == C


def test_the_order_of_arrival_decides_nothing() -> None:
    times = {c: samples(10.0, 0.02, i) for i, c in enumerate(SPACE)}
    backwards = dict(reversed(times.items()))
    assert decide(times, [B]) == decide(backwards, [B])
    assert decide(times, []) == decide(backwards, [])


def test_a_control_tells_each_move_once() -> None:
    control = Control(10.0)
    told = [control.add(us) for us in [10.1, 9.9, 10.0, 10.2, 10.0] + [11.0] * 4 + [11.1] * 6]
    assert [text for text in told if text] == [
        "the control kernel takes 11.00 us, +10% against 10.00: clocks moved, or other work runs "
        "on the GPU"
    ]
    assert not any(Control(10.0).add(us) for us in (10.0, 20.0, 10.0)), "one outlier is none"
    assert LAST >= 3
    assert 0.02 < DRIFT < 0.1


# -- in a run ------------------------------------------------------------------------------------

#: What each configuration takes; tests set it in `times` of the GPU's options.
Times = dict[str, str]


class NoisyGpu(FakeGpu):
    """Times by `behaviours`, microseconds as text, with 1 % of noise that is always the same."""

    def time(
        self,
        keys: tuple[str, ...],
        policy: str,
        best_us: float | None = None,
        control: str = "",
    ) -> list[Measured]:
        self._note(f"limit {best_us} control {self.verified[control] if control else ''}")
        return super().time(keys, policy, best_us, control)

    def _misbehave(self, how: str) -> None:
        pass

    def _us(self, config: GemmConfig) -> float:
        return float(self.behaviours.get(str(config), "1000"))

    def _time(self, config: GemmConfig) -> Measured:
        us = self._us(config)
        self._note(f"time {config}")
        found = sorted(samples(us, 0.01, config.num_stages))
        mixed = samples(us, 0.01, config.num_stages)
        return Measured("cold", 1e-3, median(found), found[1], found[-2], mixed, {})


class SlowingGpu(NoisyGpu):
    """Its clock goes down for good after six measurements."""

    count = 0

    def _us(self, config: GemmConfig) -> float:
        SlowingGpu.count += 1
        return super()._us(config) * (1.2 if SlowingGpu.count > 6 else 1.0)


class TwinBuilder(FakeBuilder):
    """Orders over the grid come out as the same code."""

    def build(self, problem: GemmProblem, config: GemmConfig) -> Cubin:
        made = super().build(problem, config)
        return replace(made, data=str(replace(config, raster_group=8)).encode())


class Desk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[TuneEvent] = []

    def tune(
        self, times: Times, *problems: GemmProblem, gpu: str = "NoisyGpu", **options: Any
    ) -> TuneReport:
        values: dict[str, Any] = {"sampler": "exhaustive", "builder": BUILDER, **options}
        chosen = TuneOptions(
            backend=f"{__name__}:{gpu}",
            backend_options={"behaviours": times, "journal": str(self.folder / "journal")},
            **values,
        )
        lines = [ShapeLine(problem) for problem in problems or (PROBLEM,)]
        return tune(lines, Settings(self.folder, jobs=1), chosen, self.events.append)

    @property
    def journal(self) -> list[str]:
        return (self.folder / "journal").read_text().splitlines()

    def best(self, problem: GemmProblem = PROBLEM) -> GemmConfig:
        with TuningDatabase.open(Settings(self.folder).db_url) as db:
            row = db.best(problem, DEVICE.name, DEVICE.num_sms)
        assert row is not None
        return row.config


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Desk(tmp_path)


@pytest.fixture
def use_space(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(configs: tuple[GemmConfig, ...] = SPACE) -> None:
        session = kgen.search.session
        monkeypatch.setattr(session, "valid_configs", lambda p, d, s=(): configs)
        monkeypatch.setattr(session, "count_invalid", lambda p, d, s=(): Counter(smem_bytes=9))
        monkeypatch.setattr(session, "seeds", lambda p, d, count: list(configs[:count]))
        monkeypatch.setattr(session, "default_config", lambda p, d: configs[0])

    return use


def tuned(report: TuneReport) -> ProblemReport:
    return report.problems[0]


def test_a_challenger_within_the_noise_does_not_unseat_the_default(
    desk: Desk, use_space: Any
) -> None:
    use_space()
    times = {str(A): "10.01", str(B): "10.0", str(C): "10.6", str(D): "11"}
    report = tuned(desk.tune(times))
    assert report.config == A
    assert report.num_tied == 2
    assert desk.best() == A, "the database says what the run said"
    with TuningDatabase.open(Settings(desk.folder).db_url) as db:
        (outcome,) = db.outcomes(PROBLEM)
        finals = outcome.details["finals"]
        rows = [t for t in db.trials(PROBLEM) if t.provenance["stage"] == "final"]
    assert [f["tied"] for f in finals] == [True, True, False, False]
    assert [GemmConfig(**f["config"]) for f in finals[:2]] == [A, B]
    assert all(f["low"] <= f["ratio"] <= f["high"] for f in finals)
    for row in rows:
        assert row.provenance["final"]["chosen"] == str(A)
        assert row.provenance["final"]["tied"] == [str(A), str(B)]
        assert set(row.provenance["seconds"]) == {"compile", "verify", "time"}


def test_one_beyond_the_noise_does(desk: Desk, use_space: Any) -> None:
    use_space()
    report = tuned(desk.tune({str(A): "10.5", str(B): "10.0", str(C): "10.6", str(D): "11"}))
    assert report.config == desk.best() == B
    assert report.num_tied == 1


def test_an_earlier_winner_keeps_its_place_in_a_tie(desk: Desk, use_space: Any) -> None:
    use_space((A, C, D))
    slow = {str(A): "12", str(C): "10.0", str(D): "11"}
    assert tuned(desk.tune(slow)).config == C
    use_space((A, C, D, B))
    assert tuned(desk.tune({**slow, str(B): "9.99"})).config == desk.best() == C
    faster = replace(B, raster_group=16)
    use_space((A, C, D, B, faster))
    assert tuned(desk.tune({**slow, str(B): "9.99", str(faster): "9"})).config == faster


def test_the_nearest_winner_races_next(desk: Desk, use_space: Any) -> None:
    use_space()
    times = {str(A): "12", str(B): "12.5", str(C): "11", str(D): "10"}
    assert tuned(desk.tune(times)).config == D
    before = len(desk.journal)
    report = desk.tune(times, NEAR, trials=2, sampler="tpe")
    timed = [line for line in desk.journal[before:] if line.startswith("time")]
    assert timed[:2] == [f"time {A}", f"time {D}"]
    assert tuned(report).config == D


def test_slow_candidates_are_told_from_fast_ones_by_the_best(desk: Desk, use_space: Any) -> None:
    use_space()
    desk.tune({str(A): "12", str(B): "10", str(C): "11", str(D): "40"}, trials=4)
    limits = [line.split() for line in desk.journal if line.startswith("limit")]
    assert limits[0][1] == "inf"
    assert limits[0][3:] == []
    best = [float(words[1]) for words in limits[1:4]]
    assert best == sorted(best, reverse=True)
    assert best[0] == pytest.approx(12, rel=0.01)
    assert all(" ".join(words[3:]) == str(A) for words in limits[1:4]), "the default is the control"
    assert all(words[1] == "None" for words in limits[4:]), "in finals all are timed alike"


def test_a_clock_that_moves_is_told(desk: Desk, use_space: Any) -> None:
    space = tuple(replace(A, num_stages=n) for n in range(4, 16))
    use_space(space)
    SlowingGpu.count = 0
    desk.tune({str(c): "10" for c in space}, gpu="SlowingGpu")
    told = [e.text for e in desk.events if isinstance(e, Notice) and "control kernel" in e.text]
    assert len(told) == 1
    assert "+21%" in told[0]
    with TuningDatabase.open(Settings(desk.folder).db_url) as db:
        control = [t.provenance["control_us"] for t in db.trials(PROBLEM)]
    assert control[0] is None
    assert control[1] == pytest.approx(10.0)
    assert control[8] == pytest.approx(12.0)


def test_the_same_code_is_timed_once(desk: Desk, use_space: Any) -> None:
    twins = tuple(replace(c, raster_group=g) for c in (A, B) for g in (4, 8, 16))
    use_space(twins)
    report = tuned(desk.tune({str(c): "10" for c in twins}, builder=f"{__name__}:TwinBuilder"))
    with TuningDatabase.open(Settings(desk.folder).db_url) as db:
        tried = {t.config for t in db.trials(PROBLEM)}
    assert tried == {twins[0], twins[3]}
    assert report.num_trials == 2
    assert report.outcome == "tuned"


def test_a_later_problem_learns_from_an_earlier_one_of_the_run(desk: Desk, use_space: Any) -> None:
    """With no database to begin with: the second problem tries the first one's winner early."""
    use_space()
    times = {str(A): "12", str(B): "12.5", str(C): "11", str(D): "10"}
    desk.tune(times, PROBLEM, *[NEAR.with_m(m) for m in (48, 64, 80, 96)], sampler="tpe")
    opened = [i for i, line in enumerate(desk.journal) if line.startswith("open")]
    last = [line for line in desk.journal[opened[-1] :] if line.startswith("time")]
    assert last[1] == f"time {D}"
