"""kgen tune --log: one line a trial, the same as the database has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kgen.cli.main import main
from kgen.cli.trial_log import TrialLog, logged
from kgen.config import GemmConfig
from kgen.device import H200
from kgen.errors import UsageError
from kgen.problem import GemmProblem
from kgen.search.events import Notice, RunStarted, TrialFinished, TuneEvent

PROBLEM = GemmProblem("dense", 64, 2112, 7168)
CONFIG = GemmConfig(block_n=96)
OK = TrialFinished(
    PROBLEM, CONFIG, "ok", "", 12.5, 11.0, 12.5, 1, "final", 12.25, 13.0, 1.5e-3, 0.75
)
WRONG = TrialFinished(PROBLEM, CONFIG, "wrong", "strip 3\nof tile 2", None, 11.0, 12.5, 2)


def test_a_line_a_trial_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    seen: list[TuneEvent] = []
    for _ in range(2):  # a second run appends
        with logged(str(path), seen.append) as on_event:
            for event in (RunStarted(H200, True, "", 1, 4), OK, Notice("wait"), WRONG):
                on_event(event)
            assert len(path.read_text().splitlines()) % 2 == 0, "written at once"
    assert len(seen) == 8
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 4
    first, second = lines[:2]
    assert GemmConfig.from_dict(first["config"]) == CONFIG
    expected = {
        "device": H200.name,
        "problem": str(PROBLEM),
        "stage": "final",
        "status": "ok",
        "median_us": 12.5,
        "p10_us": 12.25,
        "p90_us": 13.0,
        "error": 1.5e-3,
        "predicted_us": 11.0,
        "best_us": 12.5,
        "num_trials": 1,
        "gpu_busy_s": 0.75,
    }
    assert {name: first[name] for name in expected} == expected
    assert 0 <= first["elapsed_s"] <= second["elapsed_s"] < 60
    assert (second["status"], second["median_us"]) == ("wrong", None)
    assert second["reason"] == "strip 3\nof tile 2"


def test_a_full_disk_costs_the_log_only(capsys: pytest.CaptureFixture[str]) -> None:
    file = Path("/dev/full").open("a")  # noqa: SIM115, closing it fails as well
    log = TrialLog(file)
    log(OK)
    log(OK)
    with pytest.raises(OSError, match="No space left"):
        file.close()
    told = capsys.readouterr().err
    assert told.count("/dev/full takes no more lines (No space left on device)") == 1


def test_a_file_that_can_not_be_written_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none" / "log.jsonl"
    with (
        pytest.raises(UsageError, match="can not be written: No such file"),
        logged(str(path), print),
    ):
        pass
    assert main(["tune", str(PROBLEM), "--log", str(path), "--cache", str(tmp_path / "c")]) == 2
    assert "--log" in capsys.readouterr().err


def test_without_a_file_nothing_stands_between() -> None:
    with logged(None, print) as on_event:
        assert on_event is print
