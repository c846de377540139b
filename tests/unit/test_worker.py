"""kgen.search.child, compile_pool, gpu_worker, gpu_lock: children that fault, hang and die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kgen.config import GemmConfig
from kgen.errors import (
    CompileError,
    DriverError,
    GpuMissing,
    Interrupted,
    KgenError,
    LaunchError,
    Untunable,
    WorkerDied,
    WorkerTimeout,
    WrongResult,
)
from kgen.problem import GemmProblem
from kgen.search import gpu_worker
from kgen.search.child import Child
from kgen.search.compile_pool import CompilePool
from kgen.search.gpu_lock import GpuLock
from kgen.search.gpu_worker import GpuWorker
from kgen.search.stop import StopFlag, stopped_by_signals
from tests.unit.fake_search import BUILDER, GPU, NO_GPU, FakeBuilder, time_us

PROBLEM = GemmProblem("dense", 64, 2112, 7168)
OTHER = GemmProblem("dense", 64, 4096, 7168)
CONFIGS = [replace(GemmConfig(), block_n=n) for n in range(64, 224, 8)]


def cubin(config: GemmConfig) -> Any:
    return FakeBuilder().build(PROBLEM, config)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that is dead but not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Any, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


class Workers:
    """Makes GPU workers with fake backends and closes them."""

    def __init__(self) -> None:
        self.made: list[GpuWorker] = []
        self.replaced: list[str] = []

    def __call__(self, limit_s: float = 20.0, backend: str = GPU, **options: Any) -> GpuWorker:
        worker = GpuWorker(backend, options, limit_s, StopFlag(), on_replaced=self.replaced.append)
        self.made.append(worker)
        return worker


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    for worker in made.made:
        worker.close()


def test_a_good_candidate_is_timed(workers: Workers, tmp_path: Path) -> None:
    worker = workers(journal=str(tmp_path / "journal"))
    assert worker.hello().device.name == "NVIDIA H200"
    (one,) = worker.measure(PROBLEM, [cubin(CONFIGS[0])], "default")
    assert one.median_us == time_us(PROBLEM, CONFIGS[0])
    assert 0 < one.error < 4e-3
    two = worker.measure(PROBLEM, [cubin(c) for c in CONFIGS[:2]], "default")
    assert [m.median_us for m in two] == [time_us(PROBLEM, c) for c in CONFIGS[:2]]
    # Inputs are made once a problem, and a candidate is verified once before it is timed.
    journal = (tmp_path / "journal").read_text().splitlines()
    assert journal.count(f"open {PROBLEM}") == 1
    assert journal.count(f"verify {CONFIGS[0]}") == 1
    assert journal.index(f"verify {CONFIGS[0]}") < journal.index(f"time {CONFIGS[0]}")
    assert workers.replaced == []


@pytest.mark.parametrize(
    ("behaviour", "error", "is_replaced"),
    [
        ("abort", WorkerDied, True),
        ("segv", WorkerDied, True),
        ("fault", DriverError, True),
        ("wrong", WrongResult, False),
        ("refused", LaunchError, False),
    ],
)
def test_a_bad_candidate_costs_only_itself(
    workers: Workers, behaviour: str, error: type[KgenError], is_replaced: bool
) -> None:
    bad, good = CONFIGS[:2]
    worker = workers(behaviours={str(bad): behaviour})
    worker.hello()
    with pytest.raises(error):
        worker.measure(PROBLEM, [cubin(bad)], "default")
    assert len(workers.replaced) == is_replaced
    (measured,) = worker.measure(PROBLEM, [cubin(good)], "default")
    assert measured.median_us == time_us(PROBLEM, good)


def test_a_hang_is_killed_in_time(workers: Workers) -> None:
    bad, good = CONFIGS[:2]
    worker = workers(limit_s=0.5, behaviours={str(bad): "hang"})
    worker.hello()
    pid = worker.pid
    start = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"0\.5 s"):
        worker.measure(PROBLEM, [cubin(bad)], "default")
    assert time.monotonic() - start < 5
    assert not is_alive(pid)
    assert worker.measure(PROBLEM, [cubin(good)], "default")


def test_the_reason_holds_what_the_child_wrote_last(workers: Workers) -> None:
    worker = workers(behaviours={str(CONFIGS[0]): "segv"})
    worker.hello()
    with pytest.raises(WorkerDied, match=r"SIGSEGV(.|\n)*in _misbehave"):
        worker.measure(PROBLEM, [cubin(CONFIGS[0])], "default")


def test_a_bug_in_the_backend_is_not_taken_for_a_bad_candidate(workers: Workers) -> None:
    worker = workers(behaviours={str(CONFIGS[0]): "bug"})
    worker.hello()
    with pytest.raises(RuntimeError, match="ZeroDivisionError: a bug in the backend"):
        worker.measure(PROBLEM, [cubin(CONFIGS[0])], "default")


def test_a_problem_too_big_is_untunable_and_the_next_one_is_not(workers: Workers) -> None:
    worker = workers(untunable=(str(OTHER),))
    worker.hello()
    with pytest.raises(Untunable, match="needs 900 GiB"):
        worker.measure(OTHER, [cubin(CONFIGS[0])], "default")
    assert worker.measure(PROBLEM, [cubin(CONFIGS[0])], "default")
    assert workers.replaced == []


def test_a_problem_that_kills_its_child_twice_is_untunable(workers: Workers) -> None:
    worker = workers(open_behaviour="abort")
    worker.hello()
    with pytest.raises(Untunable, match="SIGABRT"):
        worker.measure(PROBLEM, [cubin(CONFIGS[0])], "default")
    assert len(workers.replaced) == 2


@pytest.mark.parametrize("behaviour", ["abort", "fault"])
def test_a_policy_that_breaks_its_child_is_no_candidates_fault(
    workers: Workers, behaviour: str, tmp_path: Path
) -> None:
    """Else a good cubin would be on record as faulted, and never be chosen again."""
    journal = tmp_path / "journal"
    worker = workers(policy_behaviour=behaviour, journal=str(journal))
    worker.hello()
    with pytest.raises(GpuMissing, match="policy cold can not be tried"):
        worker.measure(PROBLEM, [cubin(CONFIGS[0])], "cold")
    assert len(workers.replaced) == 2
    assert journal.read_text().splitlines() == ["check cold"] * 2


def test_a_gpu_that_does_not_come_back_is_no_candidates_fault(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_worker, "START_PAUSE_S", 0.01)
    bad, good = CONFIGS[:2]
    worker = workers(behaviours={str(bad): "segv"}, starts=str(tmp_path / "started"))
    worker.hello()
    with pytest.raises(WorkerDied):
        worker.measure(PROBLEM, [cubin(bad)], "cold")
    with pytest.raises(GpuMissing, match=r"did not start 3 times.*SIGABRT"):
        worker.measure(PROBLEM, [cubin(good)], "cold")


def test_no_gpu_is_said_by_the_child(workers: Workers) -> None:
    with pytest.raises(GpuMissing, match="no CUDA driver"):
        workers(backend=NO_GPU).hello()


def test_a_child_ends_with_its_parent_even_while_it_spins() -> None:
    script = (
        "import os, sys, time\n"
        "from tests.unit.test_worker import *\n"
        "worker = GpuWorker(GPU, {'behaviours': {str(CONFIGS[0]): 'hang'}}, 60, StopFlag())\n"
        "worker.hello()\n"
        "print(worker.pid, flush=True)\n"
        "worker.measure(PROBLEM, [cubin(CONFIGS[0])], 'default')\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
    assert wait_for(lambda: not is_alive(child))


def test_stop_ends_a_call_at_once() -> None:
    stop = StopFlag()
    worker = GpuWorker(GPU, {"behaviours": {str(CONFIGS[0]): "hang"}}, 60, stop)
    worker.hello()
    pid = worker.pid
    threading.Timer(0.3, stop.set).start()
    start = time.monotonic()
    with pytest.raises(Interrupted):
        worker.measure(PROBLEM, [cubin(CONFIGS[0])], "default")
    assert time.monotonic() - start < 3
    worker.close()
    assert not is_alive(pid)


def test_signals_set_the_flag_and_a_second_one_interrupts() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = StopFlag()
    with stopped_by_signals(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_for(stop.is_set)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def pools() -> Iterator[Any]:
    made: list[CompilePool] = []

    def make(jobs: int = 2, timeout_s: float = 20.0, **options: Any) -> CompilePool:
        made.append(CompilePool(BUILDER, options, jobs, timeout_s))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def test_the_pool_builds_each_source_once(pools: Any, tmp_path: Path) -> None:
    pool = pools(journal=str(tmp_path / "journal"))
    futures = [pool.submit(p, c) for p in (PROBLEM, OTHER) for c in CONFIGS[:3]]
    assert [f.result().config for f in futures] == CONFIGS[:3] * 2
    baked = replace(CONFIGS[0], baked_dims="nk")
    assert pool.submit(PROBLEM, baked).result() != pool.submit(OTHER, baked).result()
    assert len((tmp_path / "journal").read_text().splitlines()) == 5
    assert pool.num_waiting == 0


def test_a_crashed_and_a_hung_compiler_cost_one_candidate_each(pools: Any) -> None:
    behaviours = {str(CONFIGS[0]): "abort", str(CONFIGS[1]): "hang", str(CONFIGS[2]): "fail"}
    pool = pools(timeout_s=1.0, behaviours=behaviours)
    futures = [pool.submit(PROBLEM, c) for c in CONFIGS[:6]]
    for future, reason in zip(
        futures, ("SIGABRT", "took longer than 1 s", "spilled"), strict=False
    ):
        with pytest.raises(CompileError, match=reason):
            future.result()
    assert [f.result().config for f in futures[3:]] == CONFIGS[3:6]
    assert pool.replaced.qsize() == 2


def test_the_pool_can_be_closed_while_it_works(pools: Any) -> None:
    pool = pools(behaviours={str(c): "hang" for c in CONFIGS})
    futures = [pool.submit(PROBLEM, c) for c in CONFIGS[:4]]
    assert wait_for(futures[0].running)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 5
    assert all(f.cancelled() or isinstance(f.exception(), Interrupted) for f in futures)


def test_a_kill_takes_the_compilers_that_a_child_started(tmp_path: Path) -> None:
    child = Child("tests.unit.fake_search:Starter", {}, 20, StopFlag())
    grandchild = child.call("start_sleep", timeout_s=20)
    assert is_alive(grandchild)
    child.kill()
    assert wait_for(lambda: not is_alive(grandchild))


def test_the_gpu_lock_lets_one_in_and_is_fair(tmp_path: Path) -> None:
    waits: list[str] = []
    order: list[str] = []

    def work(name: str, until: int) -> None:
        lock = GpuLock("u", StopFlag(), lambda: waits.append(name), str(tmp_path))
        for _ in range(until):
            with lock.held():
                order.append(name)
                time.sleep(0.02)
                order.append(name)

    threads = [threading.Thread(target=work, args=(name, 8)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pairs = [tuple(order[i : i + 2]) for i in range(0, len(order), 2)]
    assert set(pairs) == {("a", "a"), ("b", "b")}  # nobody came between
    assert pairs[:3] != [("a", "a")] * 3  # nobody starved


def test_a_wait_for_the_gpu_is_told_and_can_be_stopped(tmp_path: Path) -> None:
    stop = StopFlag()
    waits: list[int] = []
    holder = GpuLock("u", StopFlag(), lambda: None, str(tmp_path))
    waiter = GpuLock("u", stop, lambda: waits.append(1), str(tmp_path))
    with holder.held():
        threading.Timer(1.3, stop.set).start()
        with pytest.raises(Interrupted), waiter.held():
            pass
    assert waits == [1]
    with holder.held():
        pass


def test_the_gpu_lock_is_for_every_user_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with GpuLock("u", StopFlag(), lambda: None, str(tmp_path)).held():
            modes = {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes == {0o666}


def test_a_gpu_lock_that_can_not_be_made_ends_the_run(tmp_path: Path) -> None:
    lock = GpuLock("u", StopFlag(), lambda: None, str(tmp_path / "gone"))
    what = "No such file or directory; delete it, or set TMPDIR"
    with pytest.raises(GpuMissing, match=what), lock.held():
        pass
