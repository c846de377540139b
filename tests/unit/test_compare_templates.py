"""tools/compare_templates.py: which kernels it compares, and what it prints of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kgen.build import Cubin
from kgen.config import GemmConfig
from kgen.problem import GemmProblem
from kgen.render import render
from kgen.search.gpu_worker import Measured
from tools import compare_templates
from tools.compare_templates import RESULTS, Pair, candidates, main, report

PROBLEM = GemmProblem("dense", 64, 576, 7168)
TEMPLATES = Path(compare_templates.__file__).parent.parent / "kgen" / "templates"


def cubin(key: str) -> Cubin:
    return Cubin(key, b"", "kgen_gemm", GemmConfig(), PROBLEM, 168, 0, False, "", "")


def measured(median_us: float) -> Measured:
    return Measured("cold", 1e-3, median_us, median_us - 1, median_us + 1, (median_us,))


def test_winners_of_the_result_file_are_compared() -> None:
    jobs = candidates(RESULTS, [])
    assert len(jobs) == 42
    assert candidates(RESULTS, [str(PROBLEM)]) == [job for job in jobs if job[0] == PROBLEM]
    assert candidates(RESULTS, ["dense m=3 n=576 k=7168"]) == []


def test_a_line_gives_both_times_and_their_ratio() -> None:
    line, ratio = report(
        Pair(PROBLEM, GemmConfig(), cubin("old"), cubin("new")), [measured(10.0), measured(9.0)]
    )
    assert ratio == pytest.approx(0.9)
    assert line.split()[:4] == ["10.00", "9.00", "0.900", "8.00-10.00"]
    assert line.endswith(f"{PROBLEM}  {GemmConfig()}")


def test_equal_code_is_no_pair_to_time() -> None:
    assert Pair(PROBLEM, GemmConfig(), cubin("one"), cubin("one")).same


def test_templates_of_another_folder(tmp_path: Path) -> None:
    folder = tmp_path / "templates"
    shutil.copytree(TEMPLATES, folder)
    assert render(PROBLEM, GemmConfig(), folder) == render(PROBLEM, GemmConfig())
    scheduler = folder / "include" / "scheduler.cuh"
    scheduler.write_text(scheduler.read_text() + "// changed\n")
    assert "// changed" in render(PROBLEM, GemmConfig(), folder).text


def test_a_folder_without_templates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path)])
    assert stop.value.code == 2
