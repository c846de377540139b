"""KGEN_RECORD and KGEN_MISSES: what is counted where, kept whole, shared by processes; and that
nothing changes where neither is set."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kgen.problem import GemmProblem
from kgen.runtime import calls, counting, gemm, record
from kgen.runtime.counting import CountedLaunch, counted
from kgen.runtime.kernel import Launch
from kgen.runtime.record import Recorder, add_to, files_of, path_of, sorted_by_weight
from kgen.runtime.stats import KgenWarning
from kgen.settings import Settings, recordings
from kgen.shapes import ShapeLine, load_shapes
from tests.unit.test_dispatch import K, N, World, call, run, world

__all__ = ["world"]  # the fixture

ROOT = Path(__file__).parents[2]
P64 = GemmProblem("dense", 64, N, K)
P32 = GemmProblem("dense", 32, N, K)


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Everything is recorded, in all.txt and misses.txt of the test's folder."""
    monkeypatch.setenv("KGEN_RECORD", str(tmp_path / "all.txt"))
    monkeypatch.setenv("KGEN_MISSES", str(tmp_path / "misses.txt"))
    yield from _fresh(monkeypatch)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Nothing is recorded."""
    monkeypatch.delenv("KGEN_RECORD", raising=False)
    monkeypatch.delenv("KGEN_MISSES", raising=False)
    yield from _fresh(monkeypatch)


def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    made = Recorder()
    for module in (record, counting, gemm):
        monkeypatch.setattr(module, "RECORDER", made)
    yield made
    made.reopen()


def kept(path: Path) -> dict[str, int]:
    """The problems of a file with their calls."""
    return {str(line.problem): int(line.weight) for line in load_shapes(path).lines}


def prepared() -> Any:
    """The one launch that the public call keeps ready."""
    (ready,) = gemm._prepared.values()
    entry: Any = ready
    return entry[1] if isinstance(entry, tuple) else entry.launch


# ---- through the public call


def test_calls_are_counted_by_problem(world: World, recorder: Recorder, tmp_path: Path) -> None:
    world.tune(64)
    t = call(64)
    for _ in range(4):
        run(t)
    call(64)
    gemm.set_num_sms(100)
    call(32)
    recorder.save()
    assert kept(tmp_path / "all.txt") == {
        f"dense m=64 n={N} k={K}": 6,
        f"dense m=32 n={N} k={K} num_sms=100": 1,
    }
    assert kept(tmp_path / "misses.txt") == {f"dense m=32 n={N} k={K} num_sms=100": 1}
    assert len(world.fake.launches) == 7


@pytest.mark.filterwarnings("ignore:kgen copies")
def test_calls_with_copies_and_by_the_reference_count_too(
    world: World, recorder: Recorder, tmp_path: Path
) -> None:
    for _ in range(3):
        call(5, n=44, k=100, out=torch.zeros(5, 44, dtype=torch.float32))
    assert gemm.last_path() == "kernel with copies"
    world.builder.all_bad = True
    with pytest.warns(KgenWarning, match="slow reference"):
        call(7, n=24)
    call(7, n=24)
    assert gemm.last_path() == "reference"
    recorder.save()
    padded = "dense m=5 n=48 k=112 d_dtype=fp32"
    assert kept(tmp_path / "all.txt") == {padded: 3, f"dense m=7 n=24 k={K}": 2}
    # The reference is no guess: there is nothing that tuning could change.
    assert kept(tmp_path / "misses.txt") == {padded: 3}


def test_calls_without_a_gpu_are_recorded(recorder: Recorder, tmp_path: Path) -> None:
    a, sfa = gemm.per_token_cast_to_fp8(torch.ones(3, 256))
    b, sfb = gemm.per_block_cast_to_fp8(torch.ones(16, 256))
    for rows in (3, 3, 0):
        out = torch.empty(rows, 16, dtype=torch.bfloat16)
        gemm.gemm_fp8_nt((a[:rows], sfa[:rows]), (b, sfb), out)
    recorder.save()
    assert kept(tmp_path / "all.txt") == {"dense m=3 n=16 k=256": 2}
    assert not (tmp_path / "misses.txt").exists()


def test_plans_and_warm_ups_are_no_calls(world: World, recorder: Recorder, tmp_path: Path) -> None:
    gemm.warm_up([64, 32], N, K)
    recorder.save()
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_is_recorded_nothing_changes(world: World, idle: Recorder) -> None:
    call(64)
    assert type(prepared()) is Launch
    assert idle._cells == {}
    assert not idle._started
    plan = gemm.plan_for(64, N, K)
    assert plan is not None
    assert plan.kernel is not None
    assert counted(plan.kernel, P64, guessed=True) is plan.kernel


def test_a_counted_launch_is_the_launch_it_counts(world: World, recorder: Recorder) -> None:
    plan = gemm.plan_for(64, N, K)
    assert plan is not None
    assert plan.kernel is not None
    call(64)
    launch = prepared()
    assert type(launch) is CountedLaunch
    assert launch.grid == world.fake.launches[0].grid[0]
    assert len(launch.args) == 640
    assert plan.kernel.config == calls.dispatchers[0]._kernels.popitem()[1].config  # type: ignore[union-attr]


def test_reload_reads_the_environment_again(
    world: World, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(64)
    monkeypatch.setenv("KGEN_RECORD", str(tmp_path / "later.txt"))
    gemm.reload()  # keeps what was counted so far
    assert kept(tmp_path / "all.txt") == {str(P64): 1}
    call(32)
    recorder.save()
    assert kept(tmp_path / "later.txt") == {str(P32): 1}
    assert kept(tmp_path / "all.txt") == {str(P64): 1}


# ---- the recorder


def count(recorder: Recorder, problem: GemmProblem, calls: int = 1, guessed: bool = False) -> None:
    cell = recorder.cell(problem, guessed)
    assert cell is not None
    cell[0] += calls


def test_only_what_is_new_is_added(recorder: Recorder, tmp_path: Path) -> None:
    count(recorder, P64, 5)
    recorder.save()
    recorder.save()
    assert kept(tmp_path / "all.txt") == {str(P64): 5}
    count(recorder, P64, 2)
    count(recorder, P32, 9, guessed=True)
    recorder.save()
    assert kept(tmp_path / "all.txt") == {str(P32): 9, str(P64): 7}
    assert kept(tmp_path / "misses.txt") == {str(P32): 9}


def test_the_file_is_one_that_kgen_tune_reads(recorder: Recorder, tmp_path: Path) -> None:
    count(recorder, P64, 5)
    count(recorder, P32, 7)
    recorder.save()
    lines = (tmp_path / "all.txt").read_text().splitlines()
    assert lines[0].startswith("# Calls that kgen served")
    assert lines[1:] == [f"{P32} weight=7", f"{P64} weight=5"]  # most calls first


@pytest.mark.parametrize("name", ["counts.csv", "counts.jsonl"])
def test_other_forms_by_the_name(name: str, tmp_path: Path) -> None:
    add_to(tmp_path / name, {P64: 3})
    add_to(tmp_path / name, {P64: 4, P32: 1})
    assert kept(tmp_path / name) == {str(P64): 7, str(P32): 1}


def test_every_so_often_it_saves_by_itself(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "SAVE_EVERY_S", 0.02)
    saved = threading.Event()
    save = recorder.save

    def noted() -> None:
        save()
        saved.set()

    monkeypatch.setattr(recorder, "save", noted)
    count(recorder, P64)
    assert saved.wait(10)
    count(recorder, P64)
    for _ in range(500):
        saved.clear()
        assert saved.wait(10)
        if kept(tmp_path / "all.txt") == {str(P64): 2}:
            break
    assert kept(tmp_path / "all.txt") == {str(P64): 2}


def test_a_file_that_holds_something_else_is_left_alone(recorder: Recorder, tmp_path: Path) -> None:
    (tmp_path / "all.txt").write_text("my notes\n")
    count(recorder, P64)
    with pytest.warns(KgenWarning, match=r"KGEN_RECORD=.*all.txt can not be kept: .*field=value"):
        recorder.save()
    recorder.save()  # said once
    assert (tmp_path / "all.txt").read_text() == "my notes\n"
    (tmp_path / "all.txt").write_text("")
    recorder.save()  # and nothing was lost
    assert kept(tmp_path / "all.txt") == {str(P64): 1}


def test_a_folder_that_others_hold_is_tried_again_later(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "LOCK_WAIT_S", 0.0)
    count(recorder, P64)
    with record._only_one(tmp_path), pytest.warns(KgenWarning, match="others have been writing"):
        recorder.save()
    assert not (tmp_path / "all.txt").exists()
    recorder.save()
    assert kept(tmp_path / "all.txt") == {str(P64): 1}


def test_problems_beyond_the_limit_are_said_and_not_counted(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "MAX_COUNTED", 1)
    count(recorder, P64)
    with pytest.warns(KgenWarning, match="1 problems and no more"):
        assert recorder.cell(P32, guessed=True) is None
    count(recorder, P64, guessed=True)
    recorder.save()
    assert kept(tmp_path / "all.txt") == kept(tmp_path / "misses.txt") == {str(P64): 2}


def test_a_name_that_is_no_path_is_said_and_nothing_recorded(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KGEN_RECORD", "~nobody-of-that-name/all.txt")
    monkeypatch.delenv("KGEN_MISSES")
    with pytest.warns(KgenWarning, match="KGEN_RECORD"):
        assert not recorder.is_on
    assert recorder.cell(P64, guessed=True) is None


def test_the_folder_is_made_and_a_relative_name_stays_where_it_was(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KGEN_RECORD", "new/all.txt")
    count(recorder, P64)
    monkeypatch.chdir("/")
    recorder.save()
    assert kept(tmp_path / "new" / "all.txt") == {str(P64): 1}


def _run_often(launch: Launch) -> None:
    for _ in range(20000):
        launch.run(0)


def test_threads_lose_no_calls(recorder: Recorder, tmp_path: Path) -> None:
    class Nothing(Launch):
        __slots__ = ()

        def __init__(self) -> None:
            for name in Launch.__slots__:
                setattr(self, name, None)
            self._grid = 0  # a run starts nothing

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        cell = recorder.cell(P64, guessed=False)
        assert cell is not None
        launch = CountedLaunch(Nothing(), cell)
        threads = [threading.Thread(target=_run_often, args=(launch,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    recorder.save()
    assert kept(tmp_path / "all.txt") == {str(P64): 80000}


# ---- processes


def test_the_process_in_the_name(tmp_path: Path) -> None:
    pattern = tmp_path / "calls-{pid}.txt"
    assert path_of(pattern) == tmp_path / f"calls-{os.getpid()}.txt"
    assert path_of(tmp_path / "calls.txt") == tmp_path / "calls.txt"
    for name in ("calls-12.txt", "calls-3.txt", "calls-x.txt", "calls-.txt", "other-4.txt"):
        (tmp_path / name).touch()
    assert [file.name for file in files_of(pattern)] == ["calls-12.txt", "calls-3.txt"]
    assert files_of(tmp_path / "calls-3.txt") == [tmp_path / "calls-3.txt"]
    assert files_of(tmp_path / "none.txt") == []


PROGRAM = """
import os, sys, torch
import kgen.runtime.gemm as g
def call(m, times):
    a, sfa = g.per_token_cast_to_fp8(torch.ones(m, 16))
    b, sfb = g.per_block_cast_to_fp8(torch.ones(8, 16))
    out = torch.empty(m, 8, dtype=torch.bfloat16)
    for _ in range(times):
        g.gemm_fp8_nt((a, sfa), (b, sfb), out)
call(1, 3)
child = os.fork()
call(2 if child else 4, 2)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize(("name", "files"), [("all.txt", 1), ("all-{pid}.txt", 2)])
def test_a_program_and_its_forked_child(tmp_path: Path, name: str, files: int) -> None:
    env = dict(os.environ, KGEN_RECORD=str(tmp_path / name), OMP_NUM_THREADS="1")
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = files_of(tmp_path / name)
    assert len(found) == files == len(list(tmp_path.iterdir()))
    total: dict[str, int] = {}
    for file in found:
        for line, number in kept(file).items():
            total[line] = total.get(line, 0) + number
    assert {line.split()[1]: number for line, number in total.items()} == {
        "m=1": 3,
        "m=2": 2,
        "m=4": 2,
    }


def _add(path: Path, times: int) -> None:
    for _ in range(times):
        add_to(path, {P64: 1})


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    path = tmp_path / "all.txt"
    children = [context.Process(target=_add, args=(path, 20)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert kept(path) == {str(P64): 60}


def _child_of_multiprocessing(recorder: Recorder) -> None:
    recorder.after_fork()  # as the process's own recorder is told
    count(recorder, P32, 2)


def test_a_child_of_multiprocessing_saves_when_it_ends(recorder: Recorder, tmp_path: Path) -> None:
    count(recorder, P64, 1)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_child_of_multiprocessing, args=(recorder,))
    child.start()
    child.join()
    assert kept(tmp_path / "all.txt") == {str(P32): 2}


# ---- settings and order


def test_the_variables() -> None:
    env = {"KGEN_RECORD": "/a/{pid}.txt", "KGEN_MISSES": "~/m.txt", "KGEN_JOBS": "none"}
    assert recordings(env) == ("/a/{pid}.txt", "~/m.txt")  # minds no other variable
    settings = Settings.from_env({"HOME": "/h", "KGEN_MISSES": "m.txt"})
    assert (settings.record, settings.misses) == ("", "m.txt")


def test_sorted_by_weight() -> None:
    lines = [ShapeLine(P64, 1.0), ShapeLine(P32, 1.0), ShapeLine(P64.with_m(1), 5.0)]
    assert [line.problem.m for line in sorted_by_weight(lines)] == [1, 32, 64]
