"""One stored trial is repeated by a simulated GPU, and printed beside what was stored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kgen.search.rerun
from kgen.cache.db import TuningDatabase
from kgen.cli.main import main
from kgen.cli.run_trial import told
from kgen.config import GemmConfig
from kgen.errors import DatabaseError, GpuMissing
from kgen.problem import GemmProblem
from kgen.search.events import TuneOptions
from kgen.search.rerun import rerun
from kgen.settings import Settings
from tests.unit.conftest import MakeTrial
from tests.unit.fake_search import BUILDER, DEVICE, GPU, NO_GPU, FakeBuilder, time_us

PROBLEM = GemmProblem("dense", 64, 2112, 7168)
CONFIG = GemmConfig(block_n=96)
US = time_us(PROBLEM, CONFIG)
KEY = FakeBuilder().key(PROBLEM, CONFIG)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path, jobs=1, trial_timeout_s=10.0)


def options(backend: str = GPU, **fake_gpu: Any) -> TuneOptions:
    return TuneOptions(backend=backend, backend_options=fake_gpu, builder=BUILDER)


def store(settings: Settings, make_trial: MakeTrial, us: float = US, **changes: Any) -> int:
    values = {"problem": PROBLEM, "config": CONFIG, "cubin_key": KEY, **changes}
    with TuningDatabase.open(settings.db_url) as db:
        return db.record(make_trial(us, **values))


def test_a_trial_is_repeated_alone(
    settings: Settings, make_trial: MakeTrial, tmp_path: Path
) -> None:
    """Only its own configuration is built, verified and timed, and the time is one more row."""
    store(settings, make_trial, config=GemmConfig(block_n=104), cubin_key="d" * 64)
    number = store(settings, make_trial, 900.0)
    journal = tmp_path / "journal"
    found = rerun(settings, number, options=options(journal=str(journal)))
    assert (found.checked.status, found.checked.now_us) == ("ok", US)
    assert not found.checked.stale
    assert not found.elsewhere
    assert journal.read_text().splitlines() == [
        "check cold",
        f"open {PROBLEM}",
        f"verify {CONFIG}",
        f"time {CONFIG}",
    ]
    with TuningDatabase.open(settings.db_url) as db:
        rows = db.trials(PROBLEM)
        assert [row.median_us for row in rows] == [US, 900.0, US]
        assert rows[2].provenance["stage"] == "run-trial"
        assert [(run.command, run.state) for run in db.runs()] == [("run-trial", "finished")]


@pytest.mark.parametrize(("stored", "agrees"), [(US, True), (2 * US, False)])
def test_intervals_are_compared(
    settings: Settings, make_trial: MakeTrial, stored: float, agrees: bool
) -> None:
    samples = tuple(stored + i / 8 for i in range(-4, 5))
    number = store(settings, make_trial, stored, samples_us=samples)
    found = rerun(settings, number, options=options())
    assert found.agrees is None  # the simulated GPU gives three samples: no interval
    assert found.checked.now is not None
    now = replace(found.checked.now, samples_us=tuple(US + i / 8 for i in range(-4, 5)))
    better = replace(found, checked=replace(found.checked, now=now))
    assert better.agrees is agrees
    assert f"intervals {'overlap' if agrees else 'do not'}" in " ".join(told(better))
    assert replace(better, policy="hot").agrees is None


def test_a_failure_is_repeated_too(settings: Settings, make_trial: MakeTrial) -> None:
    """A trial that hung and is right now; one that was right and is wrong now."""
    hung = store(settings, make_trial, status="timeout", reason="no answer after 20 s")
    found = rerun(settings, hung, options=options())
    assert (found.checked.status, found.policy) == ("ok", "cold")
    assert "stored reason: no answer after 20 s" in told(found)
    found = rerun(settings, hung, options=options(behaviours={str(CONFIG): "wrong"}))
    assert found.checked.status == "wrong"
    assert any(text.startswith("wrong now: tile (3, 1)") for text in told(found))
    with TuningDatabase.open(settings.db_url) as db:
        assert [row.status for row in db.trials(PROBLEM)] == ["timeout", "ok", "wrong"]
        assert db.best(PROBLEM, DEVICE.name, DEVICE.num_sms) is None


def test_what_differs_is_told(settings: Settings, make_trial: MakeTrial) -> None:
    number = store(settings, make_trial, cubin_key="0" * 64, device_name="NVIDIA H100", num_sms=114)
    found = rerun(settings, number, "hot", options())
    assert (found.checked.stale, found.elsewhere, found.policy) == (True, True, "hot")
    texts = " ".join(told(found))
    assert "another cubin" in texts
    assert "another GPU" in texts
    assert "times the stored" not in texts


def test_what_can_not_be_built_is_told(settings: Settings, make_trial: MakeTrial) -> None:
    narrow = replace(CONFIG, num_stages=99)
    number = store(settings, make_trial, config=narrow)
    found = rerun(settings, number, options=options())
    assert found.checked.status == "invalid"
    assert "num_stages=99: expected 2 to 16" in found.checked.reason
    spills = replace(options(), builder_options={"behaviours": {str(CONFIG): "fail"}})
    found = rerun(settings, store(settings, make_trial), options=spills)
    assert (found.checked.status, found.checked.reason) == (
        "compile_failed",
        "ptxas spilled 16 bytes",
    )


def test_a_number_that_is_not_there_costs_no_gpu(
    settings: Settings, make_trial: MakeTrial, tmp_path: Path
) -> None:
    with pytest.raises(DatabaseError, match="tuning"):
        rerun(settings, 1, options=options(journal=str(tmp_path / "journal")))
    store(settings, make_trial)
    with pytest.raises(DatabaseError, match="has no trial 7: `kgen explain"):
        rerun(settings, 7, options=options(journal=str(tmp_path / "journal")))
    assert not (tmp_path / "journal").exists()


def test_without_a_gpu(settings: Settings, make_trial: MakeTrial) -> None:
    number = store(settings, make_trial)
    with pytest.raises(GpuMissing, match="run-trial needs a GPU, and there is none here"):
        rerun(settings, number, options=options(NO_GPU))


def test_command(
    settings: Settings,
    make_trial: MakeTrial,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    number = store(settings, make_trial, 900.0)
    real = rerun
    monkeypatch.setattr(
        kgen.search.rerun, "rerun", lambda s, n, policy: real(s, n, policy, options())
    )
    db = ("--db", settings.db_url, "--cache", str(settings.cache_dir))
    assert main(["run-trial", str(number), *db]) == 0
    done = capsys.readouterr()
    assert done.out.splitlines()[0] == f"trial {number}: {PROBLEM}: {CONFIG}"
    assert "stored  ok       900.0" in done.out
    assert f"{US / 900:.3f} times the stored time; no intervals" in done.err
    assert main(["run-trial", str(number), "--json", *db]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["stored"]["median_us"], told["now"]["median_us"]) == (900.0, US)
    assert main(["run-trial", "99", *db]) == 1
    assert "no trial 99" in capsys.readouterr().err
