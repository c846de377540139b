"""Timing tables: drawn, recorded with a GPU that misbehaves, written and read again. No GPU."""

from __future__ import annotations

import gzip
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kgen.config import GemmConfig
from kgen.device import H200
from kgen.errors import GpuMissing, Interrupted, UsageError
from kgen.problem import GemmProblem
from kgen.search import gpu_worker
from kgen.search.events import TuneOptions
from kgen.search.recorder import Recorded, RecordOptions, draw, record_tables
from kgen.search.tables import TableRow, TimingTable, read, write
from kgen.settings import Settings
from kgen.shapes import ShapeLine
from kgen.space import valid_configs
from tests.unit.fake_search import BUILDER, DEVICE, GPU, NO_GPU, time_us
from tools import record_table

SMALL = GemmProblem("dense", 16, 576, 7168)
OTHER = GemmProblem("dense", 16, 4096, 7168)
COUNT = 40
DRAWN = draw(valid_configs(SMALL, DEVICE), COUNT, 0)


class Desk:
    """Records into memory, with the fake GPU and compiler."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recorded: list[Recorded] = []
        self.notices: list[str] = []

    @property
    def journal(self) -> list[str]:
        path = self.folder / "journal"
        return path.read_text().splitlines() if path.exists() else []

    def tune(
        self, fake_gpu: dict[str, Any], fake_builder: dict[str, Any], **more: Any
    ) -> TuneOptions:
        journal = str(self.folder / "journal")
        return TuneOptions(
            **{"backend": GPU, **more},
            backend_options={"journal": journal, **fake_gpu},
            builder=BUILDER,
            builder_options={"journal": journal, **fake_builder},
        )

    def record(
        self,
        *problems: GemmProblem,
        gpu: dict[str, Any] | None = None,
        builder: dict[str, Any] | None = None,
        tune: dict[str, Any] | None = None,
        trial_timeout_s: float = 20.0,
        **options: Any,
    ) -> list[TimingTable]:
        lines = [ShapeLine(problem, 1.0, "test") for problem in problems]
        settings = Settings(self.folder, jobs=2, trial_timeout_s=trial_timeout_s)
        chosen = RecordOptions(
            **{"count": COUNT, "batch": 16, "fastest": 5, "sample": 4, **options},
            tune=self.tune(gpu or {}, builder or {}, **(tune or {})),
        )
        record_tables(lines, settings, chosen, self.recorded.append, self.notices.append)
        return [r.table for r in self.recorded if r.table is not None]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where GPU locks lie
    monkeypatch.setattr(gpu_worker, "SCREEN_S", 0.01)
    return Desk(tmp_path)


# -- the draw ------------------------------------------------------------------------------------


def test_a_draw_is_fair_and_two_problems_share_what_can_be_shared() -> None:
    ours, theirs = valid_configs(SMALL, H200), valid_configs(OTHER, H200)
    for seed in (0, 1):
        a, b = set(draw(ours, 500, seed)), set(draw(theirs, 500, seed))
        common = set(ours) & set(theirs)
        assert len(a) == len(b) == 500
        shared = len(a & b) / len(a & common)
        assert shared > 0.9  # independent draws of 500 out of 1872 would share 0.27
        tall = sum(c.block_m == 64 for c in a) / 500
        expected = sum(c.block_m == 64 for c in ours) / len(ours)
        assert abs(tall - expected) < 0.1
    assert draw(ours, 500, 0) != draw(ours, 500, 1)
    assert draw(ours[:7], 500, 0) == sorted(ours[:7], key=draw(ours, 10**6, 0).index)


# -- recording -----------------------------------------------------------------------------------


def test_every_drawn_configuration_gets_a_row(desk: Desk) -> None:
    first, second = desk.record(SMALL, OTHER)
    for problem, table in ((SMALL, first), (OTHER, second)):
        drawn = draw(valid_configs(problem, DEVICE), COUNT, 0)
        assert [row.config for row in table.rows] == drawn
        assert {row.status for row in table.rows} == {"ok"}
        times = table.times()[problem]
        assert times == {c: pytest.approx(time_us(problem, c)) for c in drawn}
        verified = {row.config for row in table.rows if row.verified}
        assert len(verified) == 9
        assert set(sorted(drawn, key=lambda c: time_us(problem, c))[:5]) <= verified
        again = [row for row in table.rows if row.num_rows == 2]
        assert {row.config for row in again} == verified
        assert all(row.verify_s is not None and row.check_s is not None for row in again)
        assert table.header["num_valid"] == len(valid_configs(problem, DEVICE))
        assert table.header["drawn"] == "at random, seed 0"
        assert set(table.header["seconds"]) == {
            "waiting for compilers",
            "screen",
            "verify and measure again",
        }
    builds = Counter(line for line in desk.journal if line.startswith("build"))
    assert set(builds.values()) == {1}, "a kernel that serves both is built once"
    assert len(builds) == len({r.config for t in (first, second) for r in t.rows})
    # The fastest so far is told, so that slow kernels cost little.
    limits = [line.split()[2] for line in desk.journal if line.startswith("screen")]
    assert limits[0] == limits[3] == "inf"
    assert float(limits[1]) == pytest.approx(min(time_us(SMALL, c) for c in DRAWN[:16]), abs=0.1)


@pytest.mark.parametrize(
    ("behaviour", "status"),
    [
        ("fault", "faulted"),
        ("segv", "faulted"),
        ("hang", "timeout"),
        ("late fault", "faulted"),
        ("late hang", "timeout"),
        ("refused", "launch_failed"),
        ("wrong", "wrong"),
        ("too fast", "wrong"),
    ],
)
def test_one_bad_kernel_costs_no_other_its_time(desk: Desk, behaviour: str, status: str) -> None:
    bad = DRAWN[5]
    (table,) = desk.record(
        SMALL, gpu={"behaviours": {str(bad): behaviour}}, trial_timeout_s=1.5, fastest=0, sample=0
    )
    by_status = Counter(row.status for row in table.rows)
    assert by_status == {"ok": COUNT - 1, status: 1}
    (row,) = [row for row in table.rows if row.status != "ok"]
    assert (row.config, row.median_us, row.verified) == (bad, None, False)
    breaks = behaviour.removeprefix("late ") in ("fault", "segv", "hang")
    restarts = {True: 5, False: 1}[behaviour.startswith("late ")]  # 16 are halved four times
    assert len(desk.notices) == breaks * restarts


def test_configurations_that_share_a_cubin_share_its_time(desk: Desk) -> None:
    (table,) = desk.record(SMALL, builder={"shared": (str(DRAWN[0]), str(DRAWN[1]))})
    first, second = table.rows[:2]
    assert (first.status, second.status) == ("ok", "ok")
    assert first.median_us == second.median_us == pytest.approx(time_us(SMALL, DRAWN[0]))
    assert Counter(row.status for row in table.rows) == {"ok": COUNT}


def test_one_that_is_found_wrong_later_loses_its_time(desk: Desk) -> None:
    """Of those measured together only the culprit is out."""
    bad = DRAWN[2]
    (table,) = desk.record(SMALL, gpu={"fast": (str(bad),), "flaky": str(bad)}, sample=0)
    rows = {row.config: row for row in table.rows}
    assert rows[bad].status == "faulted"
    assert rows[bad].median_us is None
    others = sorted((c for c in DRAWN if c != bad), key=lambda c: time_us(SMALL, c))
    assert all(rows[c].verified for c in others[:4])
    assert Counter(row.status for row in table.rows) == {"ok": COUNT - 1, "faulted": 1}


def test_builds_that_fail_are_rows_too(desk: Desk) -> None:
    builder = {"behaviours": {str(DRAWN[0]): "fail", str(DRAWN[1]): "abort"}}
    (table,) = desk.record(SMALL, builder=builder)
    assert [row.status for row in table.rows[:3]] == ["compile_failed", "compile_failed", "ok"]


def test_a_problem_that_can_not_be_opened_is_left(desk: Desk) -> None:
    (table,) = desk.record(SMALL, OTHER, gpu={"untunable": (str(SMALL),)})
    assert table.rows[0].problem == OTHER
    assert "needs 900 GiB" in desk.recorded[0].reason
    assert desk.recorded[0].table is None


def test_when_the_time_is_up_each_problem_has_had_its_share(desk: Desk) -> None:
    builder = {"build_s": 0.2}
    start = time.monotonic()
    desk.record(SMALL, OTHER, builder=builder, budget_s=3.0, batch=4)
    assert time.monotonic() - start < 12
    assert [bool(r.num_left) for r in desk.recorded] == [True, True]
    first = desk.recorded[0]
    assert first.table is not None
    assert len(first.table.rows) == COUNT - first.num_left
    assert any(row.verified for row in first.table.rows)


def test_what_was_recorded_when_it_was_stopped_is_kept(desk: Desk) -> None:
    def stop_soon() -> None:
        while not any(line.startswith("screen") for line in desk.journal):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=stop_soon)
    thread.start()
    with pytest.raises(Interrupted):
        desk.record(SMALL, OTHER, builder={"build_s": 0.1}, batch=4)
    thread.join()
    (recorded,) = desk.recorded
    assert recorded.table is not None
    assert 0 < len(recorded.table.rows) < COUNT


def test_without_a_gpu_all_is_built_and_nothing_timed(desk: Desk) -> None:
    with pytest.raises(GpuMissing, match="tables are timed on a GPU"):
        desk.record(SMALL, tune={"backend": NO_GPU})
    assert desk.record(SMALL, OTHER, tune={"gpu": False, "device": DEVICE}) == []
    built = {line for line in desk.journal if line.startswith("build")}
    assert len(built) == len({*DRAWN, *draw(valid_configs(OTHER, DEVICE), COUNT, 0)})
    assert [r.num_left for r in desk.recorded] == [0, 0]


# -- files ---------------------------------------------------------------------------------------


def test_the_tool_writes_one_file_a_problem_and_goes_on(
    desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tables"
    asked = [str(SMALL), "--count", str(COUNT), "--commit", "abc", "--out", str(out), "--jobs", "2"]
    asked += ["--cache", str(tmp_path)]
    assert record_table.main(asked, desk.tune({}, {})) == 0
    path = record_table.table_path(out, SMALL)
    assert path.name == "dense_m16_n576_k7168.csv.gz"
    table = read(path)
    assert len(table.rows) == COUNT
    assert table.header["commit"] == "abc"
    assert table.device == DEVICE
    assert "best" in capsys.readouterr().err
    before = path.read_bytes()
    assert record_table.main([str(OTHER), *asked], desk.tune({}, {})) == 0
    assert path.read_bytes() == before
    assert "1 tables are there already" in capsys.readouterr().err
    assert read(record_table.table_path(out, OTHER)).rows[0].problem == OTHER
    assert record_table.main(["--commit", "abc"]) == 2
    assert record_table.main([*asked[1:], str(SMALL.with_m(1))], desk.tune({}, {}, backend=NO_GPU))


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    row = TableRow(SMALL, GemmConfig(), "ok", 2, 12.345, 12.0, 13.25, 16, True, 0.3, 0.01, 0.5, 1.5)
    failed = TableRow(SMALL, GemmConfig(64), "timeout", 0, None, compile_s=0.25)
    facts = {**vars(H200), "clusters_by_size": [[2, 66]]}
    device = replace(H200, clusters_by_size=((2, 66),))
    table = TimingTable({"policy": "cold", "device": facts}, device, (row, failed))
    path = tmp_path / "t.csv.gz"
    write(table, path)
    assert read(path) == table
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv.gz"]
    assert table.times() == {SMALL: {GemmConfig(): 12.345}}


@pytest.mark.parametrize(
    "data", [b"", b"no gzip", gzip.compress(b"# device: {}\nstatus\nok\n", mtime=0)]
)
def test_another_file_is_refused_with_its_name(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.csv.gz"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"timing table .*bad\.csv\.gz"):
        read(path)
    with pytest.raises(UsageError, match="No such file"):
        read(tmp_path / "none.csv.gz")
