"""Trials repeated and sources by hand raced on the GPU: one that is right, and one that lies."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import pytest
import torch

import kgen.runtime.gemm as g
from kgen.cache.db import TuningDatabase
from kgen.cache.records import TrialRecord
from kgen.device import Device
from kgen.errors import KgenError
from kgen.foreign import read_foreign
from kgen.heuristic import default_config, seeds
from kgen.problem import GemmProblem
from kgen.render import entry_name, render
from kgen.runtime import driver, nvtx
from kgen.search.builder import create
from kgen.search.dispatch_table import derive_table, measure_across
from kgen.search.events import TuneOptions
from kgen.search.gpu_run import gpu_run
from kgen.search.profile import find_ncu, leading_stalls, profile
from kgen.search.race import Race, race
from kgen.search.refresh import refresh
from kgen.search.rerun import rerun
from kgen.search.tune import tune
from kgen.settings import Settings
from kgen.shapes import ShapeLine

PROBLEM = GemmProblem("dense", 64, 576, 1152)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A folder in which the problem was tuned."""
    made = Settings(tmp_path_factory.mktemp("inspect"), jobs=4)
    report = tune([ShapeLine(PROBLEM, 1.0, "test")], made, TuneOptions(trials=6, finalists=3))
    assert report.exit_code == 0, report.reason
    return made


def raced(settings: Settings, device: Device, path: Path, old: str = "", new: str = "") -> Race:
    config = seeds(PROBLEM, device, 2)[1]
    text = render(PROBLEM, config).text
    if old:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return race(settings, PROBLEM, read_foreign(path, PROBLEM, device), 2)


def test_a_stored_trial_is_repeated(settings: Settings, device: Device) -> None:
    with TuningDatabase.open(settings.db_url) as db:
        row = db.best(PROBLEM, device.name, device.num_sms)
    assert row is not None
    found = rerun(settings, row.id)
    assert (found.checked.status, found.checked.stale, found.elsewhere) == ("ok", False, False)
    assert found.checked.now is not None
    assert 0 < found.checked.now.error < 4e-3
    assert row.median_us is not None
    assert found.checked.now.median_us == pytest.approx(row.median_us, rel=0.3)


def test_winners_of_other_templates_are_refreshed(
    settings: Settings, device: Device, tmp_path: Path
) -> None:
    """A copy of the database whose times are said to be of an older compiler."""
    old = replace(settings, db=str(tmp_path / "old.db"))
    with TuningDatabase.open(settings.db_url) as db, TuningDatabase.open(old.db_url) as copy:
        for row in db.ranking(PROBLEM, device.name, device.num_sms):
            values = {f.name: getattr(row, f.name) for f in fields(TrialRecord)}
            values["provenance"] = {**row.provenance, "compiler": "nvrtc-1.0"}
            copy.record(TrialRecord(**values))
    _, (found,), _ = refresh(old, [PROBLEM], TuneOptions(finalists=2))
    assert found.outcome == "refreshed", found.reason
    assert list(found.changes) == ["compiler"]
    assert not found.failures
    assert found.ratio == pytest.approx(1.0, rel=0.3)
    _, (again,), _ = refresh(old, [PROBLEM], TuneOptions(finalists=2))
    assert again.outcome == "current"


def test_an_unedited_source_ties_with_its_own_kernel(
    settings: Settings, device: Device, tmp_path: Path
) -> None:
    found = raced(settings, device, tmp_path / "same.cu")
    assert found.foreign.status == "ok", found.foreign.reason
    assert found.foreign.error is not None
    assert 0 < found.foreign.error < 4e-3
    assert {one.status for one in found.contestants} == {"ok"}
    assert all(found.ratio(one) for one in found.contestants[1:])


def test_a_source_that_mixes_up_scales_is_wrong(
    settings: Settings, device: Device, tmp_path: Path
) -> None:
    """Half of the rows get the scale of a row 8 above: the reference tells, nothing is timed."""
    edit = ("lower[i] = a_lower * b;", "lower[i] = a_upper * b;")
    found = raced(settings, device, tmp_path / "lie.cu", *edit)
    assert found.foreign.status == "wrong"
    assert found.foreign.median_us is None
    assert {one.status for one in found.contestants[1:]} == {"ok"}
    with TuningDatabase.open(settings.db_url) as db:
        row = db.trials(PROBLEM, statuses=("wrong",))[-1]
    assert row.is_foreign


def test_few_kernels_serve_every_m(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of three tuned M answers M between them in the runtime, and the results are right."""
    made = Settings(tmp_path, jobs=4)
    lines = [ShapeLine(PROBLEM.with_m(m), 1.0, "test") for m in (16, 64, 256)]
    assert tune(lines, made, TuneOptions(trials=6, finalists=3)).exit_code == 0
    with gpu_run(made, "dispatch-table") as gpu:
        measure_across(gpu, PROBLEM, 2, 1)
        key = partial(gpu.run.key, PROBLEM)
        found = derive_table(gpu.run.db, PROBLEM, device, key, policy="cold", bound=0.03)
        gpu.run.db.record_table(found.table, gpu.run.run_id)
    assert found.is_smallest
    assert found.table.points == (16, 32, 64, 128, 256)
    assert found.table.worst <= 0.03
    assert 1 <= found.table.num_kernels <= 5
    monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("KGEN_DB", raising=False)
    g.reload()
    g.reset_stats()
    b = torch.randn(PROBLEM.n, PROBLEM.k, device="cuda")
    b_cast = g.per_block_cast_to_fp8(b)
    for m in (1, 16, 33, 100, 200, 256):
        a_cast = g.per_token_cast_to_fp8(torch.randn(m, PROBLEM.k, device="cuda"))
        out = torch.empty(m, PROBLEM.n, device="cuda", dtype=torch.bfloat16)
        g.gemm_fp8_fp8_bf16_nt(a_cast, b_cast, out)
        a_wide = a_cast[0].float() * a_cast[1].repeat_interleave(128, 1)[:, : PROBLEM.k]
        b_scales = b_cast[1].repeat_interleave(128, 0)[: PROBLEM.n]
        b_wide = b_cast[0].float() * b_scales.repeat_interleave(128, 1)[:, : PROBLEM.k]
        expected = a_wide @ b_wide.T
        assert (out.float() - expected).norm() / expected.norm() < 4e-3, f"m={m}"
    stats = g.stats()
    assert (stats["tables"], stats["database_misses"]) == (6, 0)
    assert stats["loads"] == found.table.num_kernels
    g.reload()


def test_the_counters_of_a_kernel(settings: Settings, device: Device) -> None:
    """Where Nsight Compute is there and permitted; the kernel's name is in its report."""
    try:
        ncu = find_ncu(cuda_home=Settings.from_env().cuda_home)
    except KgenError as error:
        pytest.skip(str(error))
    config = default_config(PROBLEM, device)
    cubin = create(settings, driver.driver_version()).build(PROBLEM, config)
    try:
        found = profile(PROBLEM, cubin, ncu)
    except KgenError as error:
        if "ERR_NVGPUCTRPERM" not in str(error):
            raise
        pytest.skip(str(error))
    assert found.kernel.startswith(entry_name(PROBLEM, config))
    assert any(metric.is_dram and metric.value is not None for metric in found.metrics)
    assert any(metric.is_tensor and metric.value is not None for metric in found.metrics)
    assert leading_stalls(found.metrics, 3)


def test_calls_stand_in_ranges(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own NVTX is used, and results stay the same."""
    monkeypatch.setenv("KGEN_CACHE_DIR", str(settings.cache_dir))
    monkeypatch.delenv("KGEN_DB", raising=False)
    marks: list[str] = []
    real = nvtx.push

    def push(text: str) -> None:
        marks.append(text)
        real(text)

    monkeypatch.setattr(nvtx, "push", push)
    a = g.per_token_cast_to_fp8(torch.randn(PROBLEM.m, PROBLEM.k, device="cuda"))
    b = g.per_block_cast_to_fp8(torch.randn(PROBLEM.n, PROBLEM.k, device="cuda"))
    outs = []
    for value in ("0", "1"):
        monkeypatch.setenv("KGEN_NVTX", value)
        g.reload()
        outs.append(g.mm_fp8_nt(a, b))
    assert torch.equal(*outs)
    assert marks == [f"kgen {PROBLEM}"]
    monkeypatch.delenv("KGEN_NVTX")
    g.reload()
