"""Values that several unit tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kgen.cache.records import TrialRecord, provenance
from kgen.config import GemmConfig
from kgen.device import H200
from kgen.problem import GemmProblem

MakeTrial = Callable[..., TrialRecord]


@pytest.fixture
def make_trial() -> MakeTrial:
    """A verified, timed trial; keyword arguments change it, `us` its time.

    With another status than ok it is an untimed one.
    """

    def make(us: float = 10.0, status: str = "ok", **changes: Any) -> TrialRecord:
        base: dict[str, Any] = {
            "problem": GemmProblem("dense", 64, 2112, 7168),
            "config": GemmConfig(block_n=152),
            "device_name": "NVIDIA H200",
            "num_sms": 132,
            "cubin_key": "c" * 64,
            "status": status,
        }
        timed: dict[str, Any] = {
            "verified": True,
            "error": 1.7e-3,
            "median_us": us,
            "p10_us": us * 0.98,
            "p90_us": us * 1.05,
            "samples_us": (us * 0.98, us, us * 1.05),
            "policy": "cold",
            "registers": 168,
            "provenance": provenance(
                H200,
                driver="580.95",
                cuda="13.0",
                compiler="nvrtc-13.0.88",
                template_hash="ab" * 32,
                generator="kgen 0.1.0",
                clocks={"sm_mhz": 1755.0, "mem_mhz": 3201.0},
            ),
        }
        return TrialRecord(**{**base, **(timed if status == "ok" else {}), **changes})

    return make
