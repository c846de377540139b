"""`kgen bench --casts` without a GPU: cases are compared before they are timed; the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kgen.bench import casts as bench
from kgen.bench.casts import RECIPES, Case, CastsReport, Row, cases, check, run_casts_bench
from kgen.cli import cast_speed
from kgen.cli.main import main
from kgen.device import H200
from kgen.errors import GpuMissing, LaunchError, WrongResult
from kgen.measure import Timing


def timing(us: float) -> Timing:
    return Timing("cold", us, us * 0.9, us * 1.1, (us,))


def row(us: float, copy_us: float = 25.0) -> Row:
    return Row("token", 4096, 7168, 88_997_888, timing(us), timing(copy_us))


def test_every_case_passes_its_own_check_and_counts_its_bytes() -> None:
    made = {case.name: case for case in cases(128, 256, "cpu")}
    assert set(RECIPES) < set(made)
    assert len(made) == len(RECIPES) + 8
    for case in made.values():
        check(case)
    x, q, scales = 128 * 256 * 2, 128 * 256, 128 * 2 * 4
    assert made["token"].bytes == x + q + scales
    assert made["token, both"].bytes == x + 2 * q + 2 * scales
    assert made["tensor"].bytes == 2 * x + q + 4


@pytest.mark.parametrize("exact", [True, False])
def test_a_wrong_result_is_not_timed(exact: bool) -> None:
    good = torch.arange(256, dtype=torch.uint8)
    scales = torch.ones(4)
    near = good.clone()
    near[7] += 1
    one_step = Case("one step", lambda: (near, scales), lambda: (good, scales), 1, exact)
    if exact:
        with pytest.raises(WrongResult, match="one step: 1 of 256 elements of result 0 differ"):
            check(one_step)
    else:
        check(one_step)
        with pytest.raises(WrongResult, match="1 of 4 elements of result 1"):
            check(replace(one_step, call=lambda: (good, torch.tensor([1.0, 1.1, 1.0, 1.0]))))


def test_the_bench_runs_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Callable[..., Any] = cases
    monkeypatch.setattr(bench, "hopper_device", lambda needs: H200)
    monkeypatch.setattr(bench, "cases", lambda m, k, where: plain(m, k, "cpu"))
    monkeypatch.setattr(bench, "time_case", lambda case, policy, device: (timing(50), timing(40)))
    seen: list[str] = []
    report = run_casts_bench([(64, 128)], on_row=lambda row: seen.append(row.name))
    assert len(report.rows) == len(seen) == len(RECIPES) + 8
    values = report.to_dict()
    assert values["rows"][0]["share"] == 0.8
    assert values["provenance"]["policy"] == "cold"


def test_a_reference_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "KERNELS", SimpleNamespace(failures=["no compiler"]))
    case = Case("token", lambda: (), lambda: (), 1)
    with pytest.raises(LaunchError, match="token: the reference answers: no compiler"):
        bench.time_case(case, Any, H200)  # type: ignore[arg-type]


def test_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(needs: str) -> None:
        raise GpuMissing(f"{needs} a Hopper GPU: none")

    monkeypatch.setattr(bench, "hopper_device", absent)
    with pytest.raises(GpuMissing, match="casts are timed on a Hopper GPU"):
        run_casts_bench()
    assert main(["bench", "--casts"]) == 1


@pytest.mark.parametrize(("us", "code"), [(26.0, 0), (40.0, 1)])
def test_the_table(
    us: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = CastsReport({}, (row(us),))

    def run(policy: str, on_row: Callable[[Row], None]) -> CastsReport:
        on_row(report.rows[0])
        return report

    monkeypatch.setattr(bench, "run_casts_bench", run)
    args = SimpleNamespace(policy="cold", json=False)
    assert cast_speed.run_casts(args) == code  # type: ignore[arg-type]
    out, err = capsys.readouterr()
    assert f"{25 / us:.0%}" in out
    assert "token, 4096x7168" in err
    assert ("below 80% of copy speed" in err) == bool(code)
    args.json = True
    assert cast_speed.run_casts(args) == code  # type: ignore[arg-type]
    assert '"share"' in capsys.readouterr().out
