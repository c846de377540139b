"""What a call costs the thread that makes it, against a plain operation of torch timed beside it,
and the bench that measures it. Ratios are loose: they catch work that came back, not noise."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kgen.bench import gpu, host
from kgen.bench.host import HostCost, HostReport, make_calls, time_calls
from kgen.errors import DriverError, GpuMissing, LaunchError
from kgen.problem import GemmProblem
from kgen.runtime import calls, driver, gemm
from tests.unit.test_dispatch import K, N, World, call, run
from tests.unit.test_dispatch import world as world  # noqa: PLC0414, a fixture

#: Times the cost of two empty tensors. Measured 1.4 to 1.6; with layouts compared in Python 3.3.
MOST = 2.5


def best_of(work: Callable[[], object], calls: int, rounds: int = 15) -> float:
    """Microseconds of one of the `calls` that `work` makes: the least of the rounds."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        work()
        found.append(time.perf_counter_ns() - start)
    return min(found) / calls / 1e3


def yardstick() -> float:
    """Cost of a plain operation, now, in this process."""

    def work() -> None:
        for _ in range(500):
            torch.empty(2, 3)
            torch.empty(2, 3)

    return best_of(work, 500)


@pytest.fixture
def quick_launch(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A launch that costs what the call into C does, and nothing collected meanwhile."""
    pointer = ctypes.cast(ctypes.CDLL(None).pthread_equal, ctypes.c_void_p).value
    assert pointer
    arguments = [ctypes.c_void_p] * 4
    launch = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(pointer)
    with monkeypatch.context() as patch:
        patch.setattr(driver, "launch", lambda: launch)
        patch.setattr(calls, "current_device", int)
        gc.disable()
        yield world
        gc.enable()


def cost(sets: list[dict[str, Any]], rounds: int) -> float:
    """Cost of a call, going through these tensors in turn."""
    calls = [((t["a"], t["sfa"]), (t["b"], t["sfb"]), t["out"]) for t in sets]

    def work() -> None:
        for _ in range(rounds):
            for lhs, rhs, out in calls:
                gemm.gemm_fp8_nt(lhs, rhs, out)

    return best_of(work, rounds * len(calls))


def assert_cheap(measure: Callable[[], float]) -> None:
    """Within MOST of the yardstick; a busy machine gets three tries."""
    ratios: list[float] = []
    while len(ratios) < 3 and (not ratios or min(ratios) > MOST):
        ratios.append(measure() / yardstick())
    assert min(ratios) <= MOST, ratios


def test_a_known_call_is_cheap(quick_launch: World) -> None:
    t = call(64)
    assert_cheap(lambda: cost([t], 500))
    assert gemm.stats()["prepared"] == 1


def test_rotating_over_64_sets_is_cheap(quick_launch: World) -> None:
    sets = [call(16, n=64, k=128) for _ in range(64)]
    assert_cheap(lambda: cost(sets, 8))
    assert gemm.stats()["prepared"] == 64


def test_no_grad_and_inference_are_as_cheap(quick_launch: World) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            t = call(64)
            assert_cheap(lambda t=t: cost([t], 500))  # type: ignore[misc]


def test_a_known_call_takes_no_lock_and_makes_no_memory(
    quick_launch: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = call(64)
    before = dict(gemm._prepared)
    with monkeypatch.context() as patch:
        patch.setattr(calls, "lock", None)
        patch.setattr(quick_launch.stats, "_lock", None)
        for name in ("empty", "zeros", "empty_strided"):
            patch.setattr(torch, name, None)
        for _ in range(10):
            run(t)
    assert gemm._prepared == before


# ------------------------------------------------------------------------ kgen bench --host


def test_calls_are_timed_alone_and_in_turn() -> None:
    made: list[str] = []
    waits: list[int] = []

    def one(name: str, seconds: float) -> Callable[[], None]:
        def work() -> None:
            made.append(name)
            time.sleep(seconds)

        return work

    calls = {"slow": [one("s0", 2e-3), one("s1", 0.0)], "quick": [one("q0", 0.0)]}
    costs = time_calls(calls, lambda: waits.append(len(made)), burst=4, rounds=3)
    assert made[:16] == ["s0"] * 4 + ["s0", "s1"] * 2 + ["q0"] * 8
    assert len(made) == 16 * 4
    assert waits == list(range(0, 64, 4))
    assert costs["slow"].one_us >= 2000 > costs["quick"].one_us
    assert 1000 <= costs["slow"].rotating_us < costs["slow"].one_us


def test_every_call_of_the_bench_runs() -> None:
    problem = GemmProblem("dense", 16, 64, 128, d_dtype="fp16")
    calls = make_calls(problem, "cpu", 2)
    assert [len(own) for own in calls.values()] == [2, 2, 2, 2]
    for name, own in calls.items():
        if name != "torch._scaled_mm":
            own[1]()
            assert gemm.last_path() == "reference"


def test_the_bench_reports_and_refuses(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = GemmProblem("dense", 16, N, K)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(GpuMissing, match="a Hopper GPU that torch"):
        host.run_host_bench(problem)
    monkeypatch.setattr(host, "hopper_device", lambda *_: driver.device_facts(0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    on_cpu = make_calls(problem, "cpu", 2)
    del on_cpu["torch._scaled_mm"]
    monkeypatch.setattr(host, "make_calls", lambda *_: on_cpu)
    report = host.run_host_bench(problem, 2)
    assert isinstance(report, HostReport)
    assert list(report.costs) == list(on_cpu)
    assert all(min(c.one_us, c.rotating_us) > 0 for c in report.costs.values())
    plain = report.to_dict()
    assert plain["problem"] == "dense m=16 n=576 k=512"
    assert set(plain["costs"][host.KGEN]) == set(HostCost.__annotations__)
    world.builder.all_bad = True
    gemm.reload()
    with pytest.warns(RuntimeWarning), pytest.raises(LaunchError, match="answered by: reference"):
        host.run_host_bench(problem, 2)


def test_no_driver_is_no_gpu(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(ordinal: int) -> Any:
        raise DriverError("no CUDA driver on this machine")

    monkeypatch.setattr(gpu, "device_facts", missing)
    with pytest.raises(GpuMissing, match="no CUDA driver"):
        host.run_host_bench()
