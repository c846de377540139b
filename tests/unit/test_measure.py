"""Timing: what is taken from the profiler's events, and which times are refused. No GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kgen import measure, nvml
from kgen.device import H200
from kgen.errors import ImplausibleTime, MeasureError, UsageError
from kgen.measure import (
    CONTROL_ROUNDS,
    DEFAULT_POLICY,
    FAR_MULTIPLE,
    FAR_ROUNDS,
    POLICIES,
    Call,
    Range,
    Step,
    device_ranges,
    floor_us,
    measure_many,
    percentile,
    policy_named,
    schedule,
    spans_us,
    summarise,
)
from kgen.problem import GemmProblem
from kgen.verify import Verified

PROBLEM = GemmProblem("dense", m=64, n=7168, k=2048)
COLD = POLICIES["cold"]


@dataclass
class Event:
    """A raw event as the profiler gives it."""

    label: str
    device: str
    start: int
    duration: int

    def name(self) -> str:
        return self.label

    def device_type(self) -> Any:
        return SimpleNamespace(name=self.device)

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.duration


def test_only_ranges_on_the_device_count() -> None:
    """Not the same range on the CPU, not the flush's kernel, not the call's own kernels."""
    events = [
        Event("kgen.measure/0", "CPU", 0, 90_000),
        Event("aten::fill_", "CPU", 1, 5),
        Event("fill_kernel", "CUDA", 10, 150_000),
        Event("kgen.measure/0", "CUDA", 200_000, 7_000),
        Event("Memset (Device)", "CUDA", 200_000, 1_000),
        Event("kgen_gemm", "CUDA", 202_000, 5_000),
        Event("someone else's range", "CUDA", 300_000, 9_000),
    ]
    assert device_ranges(events) == [Range("kgen.measure/0", 200_000, 207_000)]


def test_span_runs_from_first_start_to_last_end_over_streams() -> None:
    """A call on two streams has a range on each; gaps inside a call are its own."""
    ranges = [
        Range("a", 1_000, 3_000),
        Range("b", 10_000, 11_500),
        Range("a", 2_500, 6_000),
        Range("a", 500, 700),
    ]
    assert spans_us(ranges, ["a", "b"]) == {"a": 5.5, "b": 1.5}


def test_call_without_device_activity_is_an_error() -> None:
    """Silence is not a time of zero."""
    with pytest.raises(MeasureError, match="1 of 2 timed calls did nothing"):
        spans_us([Range("a", 0, 10)], ["a", "b"])


def test_every_call_once_a_round_and_each_first_in_turn() -> None:
    """Labels are unique; no call always follows the same one."""
    steps = schedule({"x": int, "y": int, "z": int}, rounds=3)
    assert "".join(step.name for step in steps) == "xyzyzxzxy"
    assert len({step.label for step in steps}) == 9
    steps = schedule({"x": int, "y": int, "z": int}, rounds=3, fewer={"y": 1})
    assert "".join(step.name for step in steps) == "xyzzxxz"


@pytest.mark.parametrize(
    ("share", "value"), [(0.0, 1.0), (0.5, 2.5), (1.0, 4.0), (0.1, 1.3), (0.9, 3.7)]
)
def test_percentile_interpolates(share: float, value: float) -> None:
    """Four values, five places."""
    assert percentile([1.0, 2.0, 3.0, 4.0], share) == pytest.approx(value)
    assert percentile([7.0], share) == 7.0


def test_floor_counts_operands_and_what_of_d_can_not_stay_in_l2() -> None:
    """14.8 MB of operands need 3 us and a bit at 4 TB/s with the margin; D of 268 MB counts too."""
    operands = 64 * 2048 + 7168 * 2048 + 4 * (64 + 56) * 16
    assert floor_us(PROBLEM, H200) == pytest.approx(0.8 * operands / 4e6)
    large = GemmProblem("dense", m=4096, n=32768, k=512)
    d_bytes = 2 * 4096 * 32768
    operands = large.min_bytes - d_bytes
    expected = 0.8 * (operands + d_bytes - H200.l2_bytes) / 4e6
    assert floor_us(large, H200) == pytest.approx(expected)


def test_published_times_stand_above_the_floor() -> None:
    """The best times of baselines/h200.md must not be refused."""
    best = {(64, 7168, 2048): 7.9, (1, 7168, 16384): 38.5, (4096, 32768, 512): 128.2}
    for (m, n, k), microseconds in best.items():
        assert floor_us(GemmProblem("dense", m=m, n=n, k=k), H200) < 0.75 * microseconds


def test_a_time_below_the_floor_is_an_error() -> None:
    """One sample is enough, and NaN is below everything."""
    for samples in ([9.0, 9.0, 2.9], [9.0, float("nan")], []):
        with pytest.raises(ImplausibleTime, match="bytes alone need 3"):
            summarise("x", samples, 3.0, COLD, {})
    with pytest.raises(MeasureError):
        summarise("x", [0.0, 1.0], 0.0, COLD, {})
    timing = summarise("x", [9.0, 3.1, 5.0], 3.0, COLD, {"sm_mhz": 1980})
    assert timing.median_us == 5.0
    assert timing.samples_us == (9.0, 3.1, 5.0)
    assert timing.spread_us == pytest.approx(timing.p90_us - timing.p10_us)
    assert timing.policy == "cold"


def test_policies_by_name() -> None:
    """The default is cold: flushed, by the profiler, in several rounds."""
    assert policy_named(DEFAULT_POLICY) is POLICIES[DEFAULT_POLICY] is COLD
    assert COLD.flush_l2
    assert COLD.timer == "profiler"
    assert COLD.rounds >= 8
    assert policy_named("hot").flush_l2 is False
    for unknown in ("warm", "default"):  # records are compared by name: no second one
        with pytest.raises(UsageError, match="expected one of cold, hot"):
            policy_named(unknown)


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A device that is a list of what was asked of it; each call takes as long as it returns."""
    log: list[str] = []

    def timer(steps: Sequence[Step], flush: Call) -> tuple[dict[str, float], dict[str, Any]]:
        times = {}
        for step in steps:
            flush()
            log.append(step.name)
            times[step.label] = float(str(step.call()))
        return times, {"sm_mhz": 1755}

    def flush_for(device: object) -> Call:
        return lambda: log.append("flush")

    monkeypatch.setattr(measure, "_TIMERS", {"profiler": timer, "events": timer})
    monkeypatch.setattr(measure, "_flush_for", flush_for)

    def warm_up(calls: dict[str, Call], flush: Call, ms: float) -> dict[str, float]:
        log.append("warm")
        return {name: float(str(call())) + 2 for name, call in calls.items()}

    monkeypatch.setattr(measure, "_warm_up", warm_up)
    monkeypatch.setattr(measure, "_reset_persisting_l2", lambda: log.append("reset"))
    return log


def test_measuring_alternates_flushes_and_keeps_samples_apart(faked: list[str]) -> None:
    """Warm-up and reset first, a flush before each call, each name its own samples."""
    verified = Verified(PROBLEM, 2e-3, 2e-3)
    calls = {"fast": (verified, lambda: 8.0), "slow": (verified, lambda: 16.0)}
    timings = measure_many(calls, COLD, H200)
    assert timings["fast"].median_us == 8.0
    assert timings["slow"].samples_us == (16.0,) * COLD.rounds
    assert timings["slow"].clocks == {"sm_mhz": 1755}
    assert faked[:6] == ["warm", "reset", "flush", "fast", "flush", "slow"]
    assert faked.count("flush") == 2 * COLD.rounds


def test_what_is_far_behind_is_timed_less(faked: list[str]) -> None:
    """By the best that is known or among them; without one, and in finals, all alike."""
    verified = Verified(PROBLEM, 2e-3, 2e-3)
    times = {"fast": 8.0, "near": 15.0, "slow": 30.0}
    calls = {name: (verified, lambda us=us: us) for name, us in times.items()}

    def counts(**more: Any) -> list[int]:
        return [len(t.samples_us) for t in measure_many(calls, COLD, H200, **more).values()]

    assert counts() == [COLD.rounds] * 3
    assert counts(best_us=float("inf")) == [COLD.rounds, COLD.rounds, FAR_ROUNDS]
    assert counts(best_us=5.5) == [COLD.rounds, FAR_ROUNDS, FAR_ROUNDS]
    assert (
        counts(best_us=4.0)
        == [COLD.rounds * (FAR_MULTIPLE * 4 > 10) or FAR_ROUNDS] + [FAR_ROUNDS] * 2
    )
    assert counts(control="near") == [COLD.rounds, CONTROL_ROUNDS, COLD.rounds]
    assert counts(best_us=4.0, control="slow")[2] == CONTROL_ROUNDS


def test_a_graph_s_time_is_shared_by_its_calls(
    faked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = POLICIES["graph"]
    captured: list[int] = []

    def capture(call: Call, count: int) -> Call:
        captured.append(count)
        return lambda: count * float(str(call()))

    monkeypatch.setattr(measure, "_captured", capture)
    calls = {"call": (Verified(PROBLEM, 2e-3, 2e-3), lambda: 7.0)}
    assert measure_many(calls, policy, H200)["call"].median_us == pytest.approx(7.0)
    assert captured == [policy.graph_calls]
    assert policy.graph_calls > 1
    assert policy.rotates
    assert not POLICIES["hot"].rotates
    assert "flush" not in faked


def test_floor_is_asked_of_cold_times_only(faked: list[str]) -> None:
    """From a hot L2 a call may be faster than memory, and nothing is flushed."""
    calls = {"call": (Verified(PROBLEM, 2e-3, 2e-3), lambda: 1.0)}
    with pytest.raises(MeasureError, match=r"call: 1\.000 us under policy cold"):
        measure_many(calls, COLD, H200)
    faked.clear()
    assert measure_many(calls, POLICIES["hot"], H200)["call"].median_us == 1.0
    assert "flush" not in faked


class FakeNvml:
    """NVML that knows one GPU."""

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        return 0 if name == b"GPU-0af1" else 6

    def nvmlDeviceGetClockInfo(self, handle: Any, clock: int, mhz: Any) -> int:
        ctypes.cast(mhz, ctypes.POINTER(ctypes.c_uint))[0] = {1: 1980, 2: 3201}[clock]
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, reasons: Any) -> int:
        return 3  # not supported

    def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
        text.value = b"580.159.04"
        return 0


def test_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What NVML tells is kept, what it does not is unknown."""
    nvml._handle.cache_clear()
    monkeypatch.setattr(nvml, "_library", FakeNvml)
    unknown = dict.fromkeys(("sm_mhz", "memory_mhz", "throttle_reasons"))
    assert nvml.read_clocks("0af1") == {**unknown, "sm_mhz": 1980, "memory_mhz": 3201}
    assert nvml.read_clocks("another") == unknown
    assert nvml.driver_release() == "580.159.04"
    monkeypatch.setattr(nvml, "_library", lambda: None)
    assert nvml.read_clocks("0af1") == unknown
    assert nvml.driver_release() == ""
    nvml._handle.cache_clear()
