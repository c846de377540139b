"""The child that owns the GPU, and a whole run: kernels that hang, fault and lie are real here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kgen.build import Cubin
from kgen.cache.db import TuningDatabase
from kgen.compiler import compile_source
from kgen.device import Device
from kgen.errors import DriverError, Untunable, WorkerTimeout, WrongResult
from kgen.heuristic import default_config, rank
from kgen.problem import GemmProblem
from kgen.runtime import driver
from kgen.search.builder import create
from kgen.search.events import GPU_BACKEND, TuneOptions
from kgen.search.gpu_worker import GpuWorker
from kgen.search.stop import StopFlag
from kgen.search.tune import tune
from kgen.settings import Settings
from kgen.shapes import ShapeLine
from kgen.toolchain import default_compiler

PROBLEM = GemmProblem("dense", 64, 576, 1152)
HUGE = GemmProblem("dense", 4_000_000, 32768, 128)
#: Seconds that a candidate of these tests may take.
LIMIT_S = 5.0
RAW = """
struct alignas(64) Args { unsigned char bytes[576]; };
extern "C" __global__ void kgen_gemm(const __grid_constant__ Args args) { BODY }
"""
BODIES = {
    "hang": 'for (;;) asm volatile("nanosleep.u32 1000;");',
    "fault": "*reinterpret_cast<volatile int*>(16) = 1;",
    "lie": "",
}
EXPECTED: dict[str, tuple[type[Exception], bool]] = {
    "hang": (WorkerTimeout, True),
    "fault": (DriverError, True),
    "lie": (WrongResult, False),
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(tmp_path_factory.mktemp("search"), jobs=4)


@pytest.fixture(scope="module")
def good(settings: Settings, device: Device) -> Cubin:
    return create(settings, driver.driver_version()).build(PROBLEM, default_config(PROBLEM, device))


@pytest.fixture(scope="module")
def replaced() -> list[str]:
    return []


@pytest.fixture(scope="module")
def worker(replaced: list[str]) -> Iterator[GpuWorker]:
    made = GpuWorker(GPU_BACKEND, {}, LIMIT_S, StopFlag(), on_replaced=replaced.append)
    made.hello()
    yield made
    made.close()


@pytest.fixture(scope="module")
def raw(settings: Settings, good: Cubin) -> Callable[[str], Cubin]:
    """Makes the cubin of a kernel that misbehaves as its name says."""
    compiler = default_compiler(settings, driver.driver_version())

    def make(what: str) -> Cubin:
        compiled = compile_source(RAW.replace("BODY", BODIES[what]), compiler)
        return replace(good, key=what, data=compiled.cubin, entry="kgen_gemm")

    return make


def test_the_child_tells_what_it_runs_on(worker: GpuWorker, device: Device) -> None:
    hello = worker.hello()
    assert hello.device == device
    assert hello.uuid
    assert hello.cuda == driver.driver_version()


def test_a_good_candidate_is_verified_and_timed(worker: GpuWorker, good: Cubin) -> None:
    (measured,) = worker.measure(PROBLEM, [good], "cold")
    assert 0 < measured.error < 4e-3
    assert 1 < measured.p10_us <= measured.median_us <= measured.p90_us < 200
    assert measured.policy == "cold"
    assert measured.clocks


@pytest.mark.parametrize("what", BODIES)
def test_a_bad_candidate_costs_only_itself(
    worker: GpuWorker, good: Cubin, raw: Callable[[str], Cubin], replaced: list[str], what: str
) -> None:
    error, is_replaced = EXPECTED[what]
    before = len(replaced)
    start = time.monotonic()
    with pytest.raises(error):
        worker.measure(PROBLEM, [raw(what)], "cold")
    assert time.monotonic() - start < LIMIT_S + 10
    assert len(replaced) - before == is_replaced
    assert worker.measure(PROBLEM, [good], "cold")[0].median_us > 1
    assert torch.ones(8, device="cuda").sum().item() == 8  # this process never noticed


def test_a_problem_too_big_gives_its_memory_back(worker: GpuWorker, good: Cubin) -> None:
    worker.measure(PROBLEM, [good], "cold")
    free_before, _ = torch.cuda.mem_get_info()
    with pytest.raises(Untunable, match="out of GPU memory"):
        worker.measure(HUGE, [good], "cold")
    worker.measure(PROBLEM, [good], "cold")
    free_after, _ = torch.cuda.mem_get_info()
    assert free_before - free_after < 1 << 30


def test_a_whole_run_leaves_verified_winners(settings: Settings, tmp_path: Path) -> None:
    problems = [PROBLEM, GemmProblem("dense", 512, 576, 1152)]
    lines = [ShapeLine(problem, 1.0, "test") for problem in problems]
    mine = replace(settings, cache_dir=tmp_path)
    report = tune(lines, mine, TuneOptions(trials=6, finalists=3))
    assert report.measured, report.reason
    assert report.exit_code == 0
    db = TuningDatabase.open(mine.db_url)
    for problem, told in zip(problems, report.problems, strict=True):
        best = db.best(problem, report.device.name, report.device.num_sms)
        assert best is not None
        assert best.verified
        assert (best.config, best.median_us) == (told.config, told.median_us)
        assert told.default_us is not None
        assert told.median_us is not None
        assert told.median_us <= told.default_us
        assert told.num_trials == 6
    again = tune(lines, mine, TuneOptions(trials=6, finalists=3))
    assert all(problem.skipped for problem in again.problems)


def test_the_heuristic_s_leaders_are_all_right_for_a_ragged_problem(
    worker: GpuWorker, settings: Settings, device: Device
) -> None:
    ragged = GemmProblem("dense", 77, 136, 1168)
    builder = create(settings, driver.driver_version())
    cubins = [builder.build(ragged, config) for config in rank(ragged, device)[:3]]
    measured = worker.measure(ragged, cubins, "cold")
    assert all(one.error < 4e-3 for one in measured)
