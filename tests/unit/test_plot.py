"""kgen plot: the numbers behind each plot, and that a plot shows them."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kgen.bench.tuning_plots import plot_importance, plot_progress
from kgen.cache.db import TuningDatabase
from kgen.cache.records import TrialRow
from kgen.cli.main import main
from kgen.config import GemmConfig
from kgen.device import H200, Device
from kgen.errors import UsageError
from kgen.problem import GemmProblem
from kgen.search.history import Point, best_so_far
from kgen.search.importance import LEAST_TIMED, axis_importance
from kgen.search.plan import floor_us
from tests.unit.conftest import MakeTrial

PROBLEM = GemmProblem("dense", 64, 2112, 7168)
OTHER = GemmProblem("dense", 128, 4096, 7168)
MakeRow = Callable[..., TrialRow]


@pytest.fixture
def make_row(make_trial: MakeTrial) -> MakeRow:
    def make(second: int, us: float = 10.0, run: int | None = 1, **changes: Any) -> TrialRow:
        record = make_trial(us, **changes)
        date = f"2026-12-01T00:{second // 60:02}:{second % 60:02}.000+00:00"
        return TrialRow(**vars(record), id=second + 1, run_id=run, date=date)

    return make


# ---- best so far


def test_best_so_far_is_the_tuners(make_row: MakeRow) -> None:
    """Failures take time, a final corrects a lucky time, and a pause between runs is no tuning."""
    a, b = GemmConfig(block_n=96), GemmConfig(block_n=104)
    rows = [
        make_row(0, status="wrong", config=GemmConfig(block_n=112)),
        make_row(2, 12.0, config=a),
        make_row(3, status="compiled", config=b, source="predicted", predicted_us=1.0),
        make_row(5, 8.0, config=b),
        make_row(6, 1.0, config=b, cubin_key="f" * 64, source="foreign"),
        make_row(7, 1.0, config=a, policy="hot"),
        make_row(8, 11.0, config=b),  # its median is 9.5 now
        make_row(58, 9.0, 2, config=a),  # another run; its median is 10.5
        make_row(59, 9.0, 2, config=a),
    ]
    assert best_so_far(rows, "cold") == [
        Point(2.0, 2, 12.0),
        Point(5.0, 3, 8.0),
        Point(8.0, 4, 9.5),
        Point(8.0, 5, 9.5),
        Point(9.0, 6, 9.0),
    ]
    assert best_so_far([], "cold") == []


# ---- importance


def times(cost: Callable[[GemmConfig], float]) -> dict[GemmConfig, float]:
    rng = random.Random(0)
    configs = [
        GemmConfig(block_n=n, num_stages=s, raster_along=along)
        for n, s, along in product(range(64, 256, 8), (3, 4, 5), ("m", "n"))
    ]
    return {config: cost(config) * rng.uniform(0.99, 1.01) for config in configs}


@pytest.mark.parametrize(
    ("axis", "cost"),
    [
        ("block_n", lambda c: 10 + abs(c.block_n - 128) / 16),
        ("num_stages", lambda c: 10 + 5 * (c.num_stages != 4)),
        ("raster_along", lambda c: 10 + 5 * (c.raster_along == "m")),
    ],
)
def test_the_axis_that_decides_is_the_important_one(
    axis: str, cost: Callable[[GemmConfig], float]
) -> None:
    found = axis_importance(times(cost))
    assert next(iter(found)) == axis
    assert found[axis] > 0.6
    assert sum(found.values()) == pytest.approx(1.0)
    assert set(found) == {"block_n", "num_stages", "raster_along"}, "axes of one value are left out"


def test_too_little_tells_nothing() -> None:
    few = dict(list(times(lambda c: 10.0 + c.block_n).items())[: LEAST_TIMED - 1])
    assert axis_importance(few) == {}
    assert axis_importance({}) == {}


# ---- the command


@pytest.fixture
def database(tmp_path: Path, make_trial: MakeTrial) -> Path:
    """A problem with enough trials for everything, one with a single one, one of another device."""
    path = tmp_path / "tuning.db"
    with TuningDatabase.open(path) as db:
        run = db.begin_run("tune")
        for config, us in list(times(lambda c: 10 + abs(c.block_n - 128) / 16).items())[::3]:
            key = f"{hash(config) & 2**64 - 1:064x}"
            db.record(make_trial(us, problem=PROBLEM, config=config, cubin_key=key), run.id)
        db.record(make_trial(30.0, problem=OTHER), run.id)
        db.record(make_trial(5.0, problem=PROBLEM, device_name="NVIDIA H100", num_sms=114), run.id)
    return path


def plot(database: Path, *words: str) -> int:
    return main(["plot", *words, "--db", str(database)])


def test_numbers_of_progress(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot(database, "progress", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {str(PROBLEM), str(OTHER)}
    points = told[str(PROBLEM)]
    assert len(points) == 48
    assert points[-1]["num_trials"] == 48
    bests = [point["best_us"] for point in points]
    assert bests == sorted(bests, reverse=True)
    with TuningDatabase.open(database) as db:
        best = db.best(PROBLEM, H200.name, 132)
    assert best is not None
    assert bests[-1] == best.median_us


def test_numbers_of_the_floor(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot(database, "floor", str(OTHER), "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["providers"]["kgen"]["median_us"] == 30.0
    assert row["floor"]["us"] == pytest.approx(floor_us(OTHER, H200))
    # 4096 x 7168 bytes of B and what little A, D and scales add, at 4 TB/s
    assert row["floor"]["us"] == pytest.approx(4096 * 7168 / 4e6, rel=0.1)


def test_numbers_of_importance(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot(database, "importance", "--json") == 0
    done = capsys.readouterr()
    told = json.loads(done.out)
    assert set(told) == {str(PROBLEM)}
    assert next(iter(told[str(PROBLEM)])) == "block_n"
    assert f"{OTHER}: 1 timed configurations tell nothing" in done.err


@pytest.mark.parametrize("what", ["progress", "floor", "importance"])
def test_plots_are_drawn(
    what: str, database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert plot(database, what, "-o", str(tmp_path / "out.png")) == 0
    assert "out.svg" in capsys.readouterr().err
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "out.svg").read_text()
    shown = {
        "progress": (str(PROBLEM), str(OTHER), "seconds of tuning"),
        "floor": ("kgen", "time / floor", "2112"),
        "importance": ("block_n", "num_stages", "share of importance"),
    }
    assert all(f"<!-- {text}" in svg for text in (*shown[what], H200.name))


def test_many_problems_have_no_legend(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curves = {
        f"problem {i}": [{"seconds": 0.0, "num_trials": 1, "best_us": 9.0 + i}] for i in range(40)
    }
    files = plot_progress(curves, "a GPU", tmp_path / "x")
    svg = files[1].read_text()
    assert "a GPU, 40 problems" in svg
    assert "problem 7" not in svg


def test_a_bench_result_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    row = {
        "shape": str(PROBLEM),
        "problem": {"m": 64, "n": 2112, "k": 7168},
        "providers": {"kgen": {"median_us": 8.0}, "triton": {"median_us": 30.0}},
        "floor": {"us": 6.0},
    }
    report: dict[str, Any] = {"rows": [row], "providers": ["kgen", "triton"], "reference_only": []}
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(report))
    words = ["plot", "floor", "--report", str(file), "-o", str(tmp_path / "x")]
    assert main(words) == 0
    assert "<!-- triton" in (tmp_path / "x.svg").read_text()
    del row["floor"]
    file.write_text(json.dumps(report))
    assert main(words) == 2
    assert "run kgen bench with --floor" in capsys.readouterr().err


def test_nothing_to_draw(database: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(UsageError, match="no problem asked for has a timed trial"):
        plot_progress({}, "a GPU", tmp_path / "x")
    with pytest.raises(UsageError, match="enough timed configurations"):
        plot_importance({}, "a GPU", tmp_path / "x")
    assert list(tmp_path.glob("x*")) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("progress", "--report", "x.json"), "--report goes with floor"),
        (("floor", "--report", "none.json"), "can not be read: No such file"),
        (("floor", "--report", __file__), "is no JSON"),
        (("progress", "-o", "/no/such/folder/x"), "in a folder that is there"),
    ],
)
def test_wrong_usage(
    words: tuple[str, ...],
    message: str,
    database: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(database.parent)
    assert plot(database, *words) == 2
    assert message in capsys.readouterr().err


def test_a_problem_without_trials_is_named(
    database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = replace(PROBLEM, m=7)
    assert plot(database, "progress", str(missing), "--json") == 0
    done = capsys.readouterr()
    assert json.loads(done.out) == {}
    assert f"{missing}: no trial on {H200.name}" in done.err


def test_without_matplotlib_the_numbers_are_left(
    database: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot(database, "progress") == 1
    assert "pip install 'kgen[plot]'" in capsys.readouterr().err
    assert plot(database, "progress", "--json") == 0


def test_a_device_comes_back_from_a_trial(make_trial: MakeTrial) -> None:
    kept = make_trial().provenance["device"]
    assert Device.from_dict(kept) == H200
    with pytest.raises(ValueError, match="no facts of a device"):
        Device.from_dict({"name": "x"})
