"""Trials repeated and sources by hand raced on the GPU: one that is right, and one that lies."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from kgen.cache.db import TuningDatabase
from kgen.cache.records import TrialRecord
from kgen.device import Device
from kgen.foreign import read_foreign
from kgen.heuristic import seeds
from kgen.problem import GemmProblem
from kgen.render import render
from kgen.search.events import TuneOptions
from kgen.search.race import Race, race
from kgen.search.refresh import refresh
from kgen.search.rerun import rerun
from kgen.search.tune import tune
from kgen.settings import Settings
from kgen.shapes import ShapeLine

PROBLEM = GemmProblem("dense", 64, 576, 1152)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A folder in which the problem was tuned."""
    made = Settings(tmp_path_factory.mktemp("inspect"), jobs=4)
    report = tune([ShapeLine(PROBLEM, 1.0, "test")], made, TuneOptions(trials=6, finalists=3))
    assert report.exit_code == 0, report.reason
    return made


def raced(settings: Settings, device: Device, path: Path, old: str = "", new: str = "") -> Race:
    config = seeds(PROBLEM, device, 2)[1]
    text = render(PROBLEM, config).text
    if old:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return race(settings, PROBLEM, read_foreign(path, PROBLEM, device), 2)


def test_a_stored_trial_is_repeated(settings: Settings, device: Device) -> None:
    with TuningDatabase.open(settings.db_url) as db:
        row = db.best(PROBLEM, device.name, device.num_sms)
    assert row is not None
    found = rerun(settings, row.id)
    assert (found.checked.status, found.checked.stale, found.elsewhere) == ("ok", False, False)
    assert found.checked.now is not None
    assert 0 < found.checked.now.error < 4e-3
    assert row.median_us is not None
    assert found.checked.now.median_us == pytest.approx(row.median_us, rel=0.3)


def test_winners_of_other_templates_are_refreshed(
    settings: Settings, device: Device, tmp_path: Path
) -> None:
    """A copy of the database whose times are said to be of an older compiler."""
    old = replace(settings, db=str(tmp_path / "old.db"))
    with TuningDatabase.open(settings.db_url) as db, TuningDatabase.open(old.db_url) as copy:
        for row in db.ranking(PROBLEM, device.name, device.num_sms):
            values = {f.name: getattr(row, f.name) for f in fields(TrialRecord)}
            values["provenance"] = {**row.provenance, "compiler": "nvrtc-1.0"}
            copy.record(TrialRecord(**values))
    _, (found,), _ = refresh(old, [PROBLEM], TuneOptions(finalists=2))
    assert found.outcome == "refreshed", found.reason
    assert list(found.changes) == ["compiler"]
    assert not found.failures
    assert found.ratio == pytest.approx(1.0, rel=0.3)
    _, (again,), _ = refresh(old, [PROBLEM], TuneOptions(finalists=2))
    assert again.outcome == "current"


def test_an_unedited_source_ties_with_its_own_kernel(
    settings: Settings, device: Device, tmp_path: Path
) -> None:
    found = raced(settings, device, tmp_path / "same.cu")
    assert found.foreign.status == "ok", found.foreign.reason
    assert found.foreign.error is not None
    assert 0 < found.foreign.error < 4e-3
    assert {one.status for one in found.contestants} == {"ok"}
    assert all(found.ratio(one) for one in found.contestants[1:])


def test_a_source_that_mixes_up_scales_is_wrong(
    settings: Settings, device: Device, tmp_path: Path
) -> None:
    """Half of the rows get the scale of a row 8 above: the reference tells, nothing is timed."""
    edit = ("lower[i] = a_lower * b;", "lower[i] = a_upper * b;")
    found = raced(settings, device, tmp_path / "lie.cu", *edit)
    assert found.foreign.status == "wrong"
    assert found.foreign.median_us is None
    assert {one.status for one in found.contestants[1:]} == {"ok"}
    with TuningDatabase.open(settings.db_url) as db:
        row = db.trials(PROBLEM, statuses=("wrong",))[-1]
    assert row.is_foreign
