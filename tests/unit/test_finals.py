"""kgen.search.campaign: finals that can not be taken cost nothing that the search has found."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from kgen.cache.db import TuningDatabase
from kgen.errors import Untunable
from kgen.problem import GemmProblem
from kgen.search.events import Notice, TuneEvent, TuneOptions, TuneReport
from kgen.search.gpu_worker import Measured
from kgen.search.tune import tune
from kgen.settings import Settings
from kgen.shapes import ShapeLine
from tests.unit.fake_search import BUILDER, GPU, FakeGpu

PROBLEMS = (GemmProblem("dense", 64, 2112, 7168), GemmProblem("dense", 16, 576, 7168))


class CrowdedGpu(FakeGpu):
    """Its memory holds one candidate at a time."""

    def time(
        self,
        keys: tuple[str, ...],
        policy: str,
        best_us: float | None = None,
        control: str = "",
    ) -> list[Measured]:
        if len(keys) > 1:
            raise Untunable("timing: out of GPU memory, 0.1 of 139.0 GiB free")
        return super().time(keys, policy, best_us, control)


@pytest.fixture(autouse=True)
def own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def run(folder: Path, events: list[TuneEvent], options: TuneOptions) -> TuneReport:
    lines = [ShapeLine(problem) for problem in PROBLEMS]
    options = replace(options, builder=BUILDER, sampler="exhaustive")
    return tune(lines, Settings(folder, jobs=1), options, events.append)


def notices(events: list[TuneEvent]) -> list[str]:
    return [event.text for event in events if isinstance(event, Notice)]


def test_no_memory_for_the_finals_keeps_the_winner_and_the_run(tmp_path: Path) -> None:
    events: list[TuneEvent] = []
    crowded = f"{__name__}:CrowdedGpu"
    report = run(tmp_path, events, TuneOptions(trials=3, backend=crowded))
    assert [p.outcome for p in report.problems] == ["tuned", "tuned"]
    assert report.exit_code == 0
    assert len([text for text in notices(events) if "no finals" in text]) == len(PROBLEMS)


def test_a_winner_that_can_not_be_built_again_keeps_its_time(tmp_path: Path) -> None:
    first = run(tmp_path, [], TuneOptions(trials=3, backend=GPU))
    best = first.problems[0].config
    events: list[TuneEvent] = []
    more = TuneOptions(trials=4, backend=GPU, builder_options={"behaviours": {str(best): "fail"}})
    report = run(tmp_path, events, more)
    assert [p.outcome for p in report.problems] == ["tuned", "tuned"]
    assert any("not in the finals" in text and str(best) in text for text in notices(events))
    with TuningDatabase.open(tmp_path / "tuning.db") as db:
        assert {trial.status for trial in db.trials(PROBLEMS[0])} == {"ok"}
