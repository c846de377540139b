"""A set-up that is not the baseline's is seen: another floor, a slower peer."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tools.compare_baseline import compare, main

BASELINE: dict[str, Any] = {
    "limits": {
        "fp8_mma_tflops_random": 1702,
        "stream_us": [{"n": 576, "k": 7168, "us": 3.34}, {"n": 8, "k": 128, "us": 1.0}],
    },
    "dense": [
        {"m": 16, "n": 576, "k": 7168, "deepgemm_us": 10.2, "cublaslt_block_us": 14.6},
        {"m": 1, "n": 576, "k": 7168, "deepgemm_us": 10.1, "cublaslt_block_us": None},
    ],
}


def results() -> dict[str, Any]:
    """Everything 2 % slower than the baseline."""
    times = {16: {"deepgemm": 10.4, "torch blockwise": 14.9}, 1: {"deepgemm": 10.3}, 3: {}}
    return {
        "providers": ["kgen", "deepgemm", "torch blockwise", "mine"],
        "floor": {"tflops": 1690.0, "streams": [{"n": 576, "k": 7168, "median_us": 3.4}]},
        "rows": [
            {
                "shape": f"m={m}",
                "problem": {"m": m, "n": 576, "k": 7168},
                "providers": {name: {"median_us": us} for name, us in found.items()},
            }
            for m, found in times.items()
        ],
    }


def test_the_same_set_up_is_good() -> None:
    """Within 3 % for limits and 5 % for peers; what has no row in common is said."""
    lines, good = compare(results(), BASELINE)
    assert good
    assert lines == [
        "tensor-core rate: 0.993 times",
        "streaming N=576 K=7168: 1.018 times",
        "deepgemm: 2 rows, 1.020 times in geometric mean",
        "torch blockwise: 1 rows, 1.021 times in geometric mean",
        "mine: no row in common",
    ]


@pytest.mark.parametrize(("tflops", "good"), [(1655.0, True), (1640.0, False), (1760.0, False)])
def test_another_floor_is_not(tflops: float, good: bool) -> None:
    """Either way."""
    found = results()
    found["floor"]["tflops"] = tflops
    lines, same = compare(found, BASELINE)
    assert same is good
    assert ("DIFFERS" in lines[0]) is not good


def test_a_slower_peer_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is named by its row; a faster one is welcome."""
    slow = copy.deepcopy(results())
    slow["rows"][1]["providers"]["deepgemm"]["median_us"] = 10.7
    slow["rows"][0]["providers"]["deepgemm"]["median_us"] = 5.0
    for name, value in (("r", slow), ("b", BASELINE)):
        (tmp_path / name).write_text(json.dumps(value))
    assert main([str(tmp_path / "r"), str(tmp_path / "b")]) == 1
    out = capsys.readouterr().out
    assert "  m=1: 1.059 times, SLOWER" in out
    assert "m=16" not in out


def test_without_a_floor_nothing_is_known() -> None:
    """An older file does not pass by having nothing to compare."""
    found = results()
    del found["floor"]
    lines, good = compare(found, BASELINE)
    assert not good
    assert lines[0] == "no floor in common"
