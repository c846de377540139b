"""Winners are checked again: by a GPU that is simulated, with what it says recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kgen.cache.db import TuningDatabase
from kgen.cache.records import TrialRecord
from kgen.config import GemmConfig
from kgen.errors import GpuMissing
from kgen.problem import GemmProblem
from kgen.search.events import TuneOptions
from kgen.search.recheck import Checked, recheck
from kgen.settings import Settings
from tests.unit.conftest import MakeTrial
from tests.unit.fake_search import BUILDER, DEVICE, GPU, NO_GPU, FakeBuilder, time_us

PROBLEM = GemmProblem("dense", 64, 2112, 7168)
OTHER = replace(PROBLEM, m=128)
CONFIG = GemmConfig(block_n=96)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path, jobs=1, trial_timeout_s=10.0)


def options(backend: str = GPU, **fake_gpu: Any) -> TuneOptions:
    return TuneOptions(backend=backend, backend_options=fake_gpu, builder=BUILDER)


def winner(make_trial: MakeTrial, problem: GemmProblem, key: str = "") -> TrialRecord:
    key = key or FakeBuilder().key(problem, CONFIG)
    return make_trial(900.0, problem=problem, config=CONFIG, cubin_key=key)


def test_winners_are_timed_again(settings: Settings, make_trial: MakeTrial) -> None:
    with TuningDatabase.open(settings.db_url) as db:
        db.record(winner(make_trial, PROBLEM))
        db.record(winner(make_trial, OTHER, "0" * 64))
        db.record(replace(winner(make_trial, OTHER), device_name="NVIDIA H20", num_sms=78))
    told: list[Checked] = []
    first, second = recheck(settings, None, told.append, options())
    assert [first, second] == told
    assert (first.status, first.stale, first.now_us) == ("ok", False, time_us(PROBLEM, CONFIG))
    assert (second.row.problem, second.status, second.stale) == (OTHER, "ok", True)
    with TuningDatabase.open(settings.db_url) as db:
        best = db.best(PROBLEM, DEVICE.name, DEVICE.num_sms)
        assert best is not None
        assert best.num_rows == 2
        (run,) = db.runs()
        assert (run.command, run.state) == ("verify", "finished")
    assert [c.row.problem for c in recheck(settings, {OTHER}, options=options())] == [OTHER]


@pytest.mark.parametrize(("behaviour", "status"), [("wrong", "wrong"), ("fault", "faulted")])
def test_a_winner_that_fails_is_no_winner_any_more(
    settings: Settings, make_trial: MakeTrial, behaviour: str, status: str
) -> None:
    with TuningDatabase.open(settings.db_url) as db:
        db.record(winner(make_trial, PROBLEM))
    (checked,) = recheck(settings, options=options(behaviours={str(CONFIG): behaviour}))
    assert (checked.status, checked.now_us) == (status, None)
    assert checked.reason
    with TuningDatabase.open(settings.db_url) as db:
        assert db.best(PROBLEM, DEVICE.name, DEVICE.num_sms) is None


def test_a_problem_that_can_not_be_set_up_is_told(
    settings: Settings, make_trial: MakeTrial
) -> None:
    with TuningDatabase.open(settings.db_url) as db:
        db.record(winner(make_trial, PROBLEM))
    (checked,) = recheck(settings, options=options(untunable=(str(PROBLEM),)))
    assert checked.status == "untunable"
    with TuningDatabase.open(settings.db_url) as db:
        assert len(db.trials()) == 1


def test_without_a_gpu_nothing_is_checked(settings: Settings, make_trial: MakeTrial) -> None:
    with TuningDatabase.open(settings.db_url) as db:
        db.record(winner(make_trial, PROBLEM))
    with pytest.raises(GpuMissing, match="there is none here: no CUDA driver"):
        recheck(settings, options=options(NO_GPU))
    with TuningDatabase.open(settings.db_url) as db:
        assert db.runs() == []
