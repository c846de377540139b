"""Records refuse what could never be true, and turn into JSON."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import pytest

from kgen.cache.records import (
    FAILED,
    PROVENANCE_KEYS,
    STATUSES,
    ProblemOutcome,
    TrialRecord,
    TrialRow,
    provenance,
)
from kgen.config import GemmConfig
from kgen.device import H200
from kgen.errors import DatabaseError
from kgen.problem import GemmProblem

PROBLEM = GemmProblem("dense", 64, 2112, 7168)
PROVENANCE = provenance(
    H200,
    driver="580.95",
    cuda="13.0",
    compiler="nvrtc-13.0.88",
    template_hash="ab" * 32,
    generator="kgen 0.1.0",
    clocks={"sm_mhz": 1755.0, "mem_mhz": 3201.0},
)
TIMED: dict[str, Any] = {
    "problem": PROBLEM,
    "config": GemmConfig(block_n=152),
    "device_name": "NVIDIA H200",
    "num_sms": 132,
    "cubin_key": "c" * 64,
    "status": "ok",
    "verified": True,
    "error": 1.7e-3,
    "median_us": 10.5,
    "p10_us": 10.1,
    "p90_us": 11.0,
    "samples_us": (10.1, 10.5, 11.0),
    "policy": "cold",
    "provenance": PROVENANCE,
}
UNTIMED: dict[str, Any] = {
    name: TIMED[name] for name in ("problem", "config", "device_name", "num_sms", "cubin_key")
}


def test_timed_record_is_accepted_and_knows_its_spread() -> None:
    trial = TrialRecord(**TIMED)
    assert trial.spread_us == pytest.approx(0.9)
    assert not trial.failed
    assert TrialRecord(**UNTIMED, status="wrong", reason="tile 3").spread_us is None


def test_the_model_may_predict_years() -> None:
    trial = TrialRecord(**UNTIMED, status="compiled", source="predicted", predicted_us=1.2e19)
    assert trial.predicted_us == 1.2e19


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"verified": False}, "verification"),
        ({"error": None}, "verification"),
        ({"status": "wrong"}, "verified"),
        ({"status": "faulted"}, "time"),
        ({"status": "fine"}, "status"),
        ({"source": "predicted"}, "predicted"),
        ({"source": "guessed"}, "source"),
        ({"median_us": math.nan}, "median_us"),
        ({"median_us": math.inf}, "median_us"),
        ({"median_us": 0.0}, "median_us"),
        ({"median_us": -1.0}, "median_us"),
        ({"median_us": None}, "median_us"),
        ({"p90_us": None}, "p90_us"),
        ({"p10_us": 10.7}, "ascending"),
        ({"samples_us": ()}, "samples_us"),
        ({"samples_us": (10.0, math.nan)}, "samples_us"),
        ({"error": math.nan}, "error"),
        ({"error": 1.5}, "error"),
        ({"cubin_key": ""}, "cubin_key"),
        ({"policy": ""}, "policy"),
        ({"device_name": ""}, "device"),
        ({"num_sms": 0}, "SM"),
        ({"predicted_us": math.inf}, "predicted_us"),
    ],
)
def test_contradictions_are_refused(change: dict[str, Any], word: str) -> None:
    with pytest.raises(DatabaseError, match=word):
        TrialRecord(**{**TIMED, **change})


@pytest.mark.parametrize("key", PROVENANCE_KEYS)
def test_timed_record_needs_full_provenance(key: str) -> None:
    partial = {name: value for name, value in PROVENANCE.items() if name != key}
    with pytest.raises(DatabaseError, match=key):
        TrialRecord(**{**TIMED, "provenance": partial})
    TrialRecord(**UNTIMED, status="faulted", reason="700", provenance=partial)


def test_only_a_verified_run_can_fail_after_verification() -> None:
    for status in STATUSES:
        if status == "ok":
            continue
        if status in ("compiled", "compile_failed", "wrong"):
            with pytest.raises(DatabaseError, match="verified"):
                TrialRecord(**UNTIMED, status=status, verified=True)
        else:
            assert TrialRecord(**UNTIMED, status=status, verified=True).failed
    assert {"compile_failed", "launch_failed", "faulted", "timeout", "wrong"} == FAILED


def test_records_become_json_and_cross_processes() -> None:
    trial = TrialRecord(**TIMED)
    values = json.loads(json.dumps(trial.to_dict(), allow_nan=False))
    assert values["shape"] == "dense m=64 n=2112 k=7168"
    assert values["config"]["block_n"] == 152
    assert values["problem"]["n"] == 2112
    assert values["provenance"]["device"]["num_sms"] == 132
    assert values["samples_us"] == [10.1, 10.5, 11.0]
    assert pickle.loads(pickle.dumps(trial)) == trial


def test_a_time_holds_only_for_its_cubin_and_device() -> None:
    row = TrialRow(**TIMED, id=1, run_id=None, date="2026-12-01T00:00:00+00:00")
    assert row.valid_for("c" * 64, "NVIDIA H200", 132)
    assert not row.valid_for("d" * 64, "NVIDIA H200", 132)
    assert not row.valid_for("c" * 64, "NVIDIA H100 80GB HBM3", 132)
    assert not row.valid_for("c" * 64, "NVIDIA H200", 114)
    untimed = TrialRow(**UNTIMED, status="compiled", id=2, run_id=None, date="")
    assert not untimed.valid_for("c" * 64, "NVIDIA H200", 132)


def test_untunable_needs_a_reason() -> None:
    where: dict[str, Any] = {"problem": PROBLEM, "device_name": "NVIDIA H200", "num_sms": 132}
    with pytest.raises(DatabaseError, match="reason"):
        ProblemOutcome(**where, outcome="untunable")
    with pytest.raises(DatabaseError, match="outcome"):
        ProblemOutcome(**where, outcome="done")
    outcome = ProblemOutcome(
        **where, outcome="untunable", reason="no valid", invalid_by_rule={"smem_bytes": 3}
    )
    assert json.loads(json.dumps(outcome.to_dict()))["invalid_by_rule"] == {"smem_bytes": 3}
