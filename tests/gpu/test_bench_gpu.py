"""The bench from end to end on a real device: peers, floor, both layouts of A's scales."""

from __future__ import annotations

import importlib.util

import pytest

from kgen.bench.run import Row, run_bench
from kgen.problem import GemmProblem
from kgen.settings import Settings

#: Enough work that everybody is well above the floor; K's last block is partial in the second.
PROBLEMS = [GemmProblem("dense", 64, 2112, 7168), GemmProblem("dense", 37, 1536, 2064)]


def test_peers_floor_and_layouts() -> None:
    """Everybody timed or noted, nobody below the floor, the best peer named."""
    rows: list[Row] = []
    report = run_bench(
        PROBLEMS,
        Settings.from_env(),
        against=["torch"],
        floor=True,
        row_major=True,
        on_row=rows.append,
    )
    assert not report.failed, [row.notes for row in rows]
    first = report.to_dict()["rows"][0]
    assert {"kgen", "kgen row-major", "torch blockwise"} <= set(rows[0].timings), rows[0].notes
    assert first["best_peer"]["name"] == "torch blockwise"
    assert first["best_peer"]["interval"]["coverage"] > 0.95
    for row in rows:
        assert row.floor is not None
        assert all(timing.median_us > 0.95 * row.floor.us for timing in row.timings.values())


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_triton_kernel_is_right() -> None:
    """Verified as a peer, with a partial tile along M and a partial K block; also one row."""
    problems = [*PROBLEMS, GemmProblem("dense", 1, 576, 512), GemmProblem("dense", 300, 136, 256)]
    report = run_bench(problems, Settings.from_env(), against=["triton"])
    assert report.missing == {}
    assert {name: row.notes for row in report.rows for name in row.notes} == {}
    assert all("triton" in row.timings for row in report.rows)
