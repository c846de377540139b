"""The child that owns the GPU, and a whole run: kernels that hang, fault and lie are real here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kgen.build import Cubin
from kgen.cache.db import TuningDatabase
from kgen.compiler import compile_source
from kgen.device import Device
from kgen.errors import DriverError, Untunable, WorkerTimeout, WrongResult
from kgen.heuristic import default_config, predict_us, rank
from kgen.measure import FAR_ROUNDS, POLICIES, floor_us
from kgen.problem import GemmProblem
from kgen.runtime import driver
from kgen.search.builder import create
from kgen.search.events import GPU_BACKEND, TuneOptions
from kgen.search.gpu_worker import GpuWorker
from kgen.search.recorder import Recorded, RecordOptions, record_tables
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


def test_a_screen_tells_what_a_measurement_tells(
    worker: GpuWorker, settings: Settings, device: Device, good: Cubin, raw: Callable[[str], Cubin]
) -> None:
    """Of many kernels at once; one that is wrong is named, the times of the others hold."""
    problem = GemmProblem("dense", 256, 4096, 2048)
    builder = create(settings, driver.driver_version())
    ranked = rank(problem, device)
    configs = list(dict.fromkeys([*ranked[:12], *ranked[:: len(ranked) // 12]]))
    cubins = [builder.build(problem, config) for config in configs]
    wrong = replace(raw("lie"), config=cubins[0].config)
    found = worker.screen(problem, [*cubins, wrong], "screen", float("inf"))
    assert [one.status for one in found] == ["ok"] * len(cubins) + ["wrong"]
    rounds = POLICIES["screen"].rounds
    times = [one.measured for one in found if one.measured]
    assert {len(one.samples_us) for one in times} <= {rounds, FAR_ROUNDS}
    measured = worker.measure(problem, cubins[:8], "cold")
    for quick, careful in zip(times, measured, strict=False):
        assert quick.median_us == pytest.approx(careful.median_us, rel=0.1)
        assert quick.error == pytest.approx(careful.error, rel=0.05)


def test_a_batch_that_faults_leaves_a_child_that_works(
    worker: GpuWorker, good: Cubin, raw: Callable[[str], Cubin]
) -> None:
    with pytest.raises(DriverError):
        worker.screen(PROBLEM, [good, raw("fault")], "screen", float("inf"))
    (one,) = worker.screen(PROBLEM, [good], "screen", float("inf"))
    assert one.status == "ok"


def test_a_control_is_timed_beside(worker: GpuWorker, good: Cubin, settings: Settings) -> None:
    other = create(settings, driver.driver_version()).build(
        PROBLEM, replace(good.config, num_stages=good.config.num_stages - 1)
    )
    (alone,) = worker.measure(PROBLEM, [good], "cold")
    (measured,) = worker.measure(PROBLEM, [other], "cold", float("inf"), good)
    assert measured.control_us == pytest.approx(alone.median_us, rel=0.15)


def test_policies_as_models_run_the_kernel(
    worker: GpuWorker, settings: Settings, device: Device
) -> None:
    """Weights of 14.7 MB: hot they come from L2, rotating and in a graph from memory."""
    problem = GemmProblem("dense", 1, 7168, 2048)
    builder = create(settings, driver.driver_version())
    cubin = builder.build(problem, default_config(problem, device))
    us = {
        policy: worker.measure(problem, [cubin], policy)[0].median_us
        for policy in ("cold", "hot", "rotating", "graph")
    }
    assert us["hot"] < 0.9 * us["cold"]
    assert us["hot"] < us["rotating"] < 1.5 * us["cold"]
    # Launches of a graph overlap ends and starts; what they read can not come faster.
    assert floor_us(problem, device) < us["graph"] < 1.5 * us["cold"]


def test_a_table_is_recorded(settings: Settings, tmp_path: Path) -> None:
    lines = [ShapeLine(problem) for problem in (PROBLEM, PROBLEM.with_m(256))]
    recorded: list[Recorded] = []
    options = RecordOptions(count=60, batch=20, fastest=6, sample=4)
    record_tables(lines, replace(settings, cache_dir=tmp_path), options, recorded.append)
    for one in recorded:
        assert one.table is not None
        assert [row.status for row in one.table.rows] == ["ok"] * 60
        assert sum(row.verified for row in one.table.rows) == 10
        times = one.table.times()[one.problem]
        assert 1 < min(times.values()) < max(times.values()) < 10_000
        model = [predict_us(one.problem, config, one.table.device) for config in times]
        assert np.corrcoef(np.log(model), np.log(list(times.values())))[0, 1] > 0.5
