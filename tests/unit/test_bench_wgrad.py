"""Who is timed on weight gradients: packages by their calls, torch's mark, the floor."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from kgen.bench import run as bench_run
from kgen.bench.against import Against
from kgen.bench.floor import floor_of
from kgen.bench.run import case_of, family_of
from kgen.bench.wgrad_providers import TorchVector, WgradKgen, wgrad_against, wgrad_peer
from kgen.cases import Case
from kgen.errors import LaunchError, WrongResult
from kgen.problem import GemmProblem
from kgen.runtime.dispatch import Plan
from kgen.wgrad_cases import KGroupedCase
from kgen.wgrad_reference import k_grouped_reference_into, wgrad_reference_into

ONE = GemmProblem.of("wgrad", 24, 16, 256)
GROUPS = GemmProblem.of("k_grouped", 24, 16, 256, groups=3)


def own_case(problem: GemmProblem) -> Case | KGroupedCase:
    case = case_of(problem, "cpu")
    assert isinstance(case, Case | KGroupedCase)
    return case


def package(**calls: Any) -> ModuleType:
    module = ModuleType("deep_gemm")
    module.__file__ = "deep_gemm/__init__.py"
    vars(module).update(calls)
    return module


def one(lhs: Any, rhs: Any, out: torch.Tensor) -> None:
    assert lhs[1].stride(0) == rhs[1].stride(0) == 1, "would be converted first"
    assert out.is_contiguous()
    wgrad_reference_into(out, *lhs, *rhs, recipe="vector", adds=True)


def new_one(lhs: Any, rhs: Any, out: torch.Tensor, **options: Any) -> None:
    assert options.pop("c") is out
    assert options == {"recipe": (1, 1, 128), "disable_ue8m0_cast": True}
    one(lhs, rhs, out)


def groups(lhs: Any, rhs: Any, out: torch.Tensor, ks: Any) -> None:
    assert lhs[0].dim() == rhs[0].dim() == 1
    assert lhs[1].shape == (6, 24)
    assert type(ks) is list
    scales = lhs[1].t(), rhs[1].t()
    k_grouped_reference_into(out, lhs[0], scales[0], rhs[0], scales[1], ks, adds=True)


def new_groups(lhs: Any, rhs: Any, out: torch.Tensor, ks: Any, on_device: Any, *, c: Any) -> None:
    assert c is out
    assert on_device.tolist() == ks
    groups(lhs, rhs, out, ks)


OLD = {
    "wgrad_gemm_fp8_fp8_fp32_nt": one,
    "k_grouped_wgrad_gemm_fp8_fp8_fp32_nt": groups,
}
NEW = {"fp8_gemm_nt": new_one, "k_grouped_fp8_gemm_nt_contiguous": new_groups}


@pytest.mark.parametrize("calls", [OLD, NEW])
def test_both_generations_are_known(calls: dict[str, Any]) -> None:
    peer = wgrad_peer("dg", package(**calls, __version__="2.1"))
    for problem in (ONE, GROUPS):
        ready = peer.ready(own_case(problem))
        assert 0 <= ready.verified.max_tile_error < 1e-6
        ready.call()
        assert ready.details[f"call_{problem.kind}"] in calls
        assert ready.details["version"] == "2.1"


def test_a_peer_that_does_not_add_is_wrong() -> None:
    def writes(lhs: Any, rhs: Any, out: torch.Tensor) -> None:
        wgrad_reference_into(out, *lhs, *rhs, recipe="vector", adds=False)

    def nothing(*arguments: Any) -> None:
        """Leaves D as it is."""

    with pytest.raises(WrongResult):
        wgrad_peer("dg", package(wgrad_gemm_fp8_fp8_fp32_nt=writes)).ready(Case(ONE, "cpu"))
    peer = wgrad_peer("dg", package(k_grouped_wgrad_gemm_fp8_fp8_fp32_nt=nothing))
    with pytest.raises(WrongResult):
        peer.ready(KGroupedCase(GROUPS, "cpu"))


def test_what_a_package_does_not_serve_is_told() -> None:
    peer = wgrad_peer("dg", package(wgrad_gemm_fp8_fp8_fp32_nt=one))
    for problem, words in (
        (GROUPS, "no call for kind k_grouped"),
        (replace(ONE, accumulate=False), "adds to D"),
        (replace(ONE, recipe="block"), "scales by vector"),
        (replace(ONE, a_dtype="e5m2"), "E4M3"),
    ):
        with pytest.raises(ValueError, match=words):
            peer.ready(own_case(problem))
    with pytest.raises(LookupError, match="k_grouped_fp8_gemm_nt_contiguous"):
        wgrad_peer("dg", package())

    def fails(*arguments: Any) -> None:
        raise TypeError("no such layout")

    with pytest.raises(RuntimeError, match="TypeError: no such layout"):
        wgrad_peer("dg", package(wgrad_gemm_fp8_fp8_fp32_nt=fails)).ready(Case(ONE, "cpu"))


def test_torch_is_a_mark_in_the_best_type_that_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(a: Any, b: Any, *, scale_a: Any, scale_b: Any, out_dtype: Any) -> torch.Tensor:
        assert (scale_a.stride(), scale_b.stride()) == ((1, 24), (16, 1))
        if out_dtype != torch.bfloat16:
            raise RuntimeError("only bf16")
        out = torch.zeros(24, 16)
        wgrad_reference_into(out, a, scale_a, b.t(), scale_b.t(), recipe="vector", adds=False)
        return out.to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    ready = TorchVector().ready(Case(ONE, "cpu"))
    assert TorchVector.reference_only
    assert ready.details["d_dtype"] == "bfloat16"
    assert 0 < ready.verified.max_tile_error < 4e-3
    for problem in (GROUPS, replace(ONE, recipe="block")):
        with pytest.raises(ValueError, match="by vector"):
            TorchVector().ready(own_case(problem))


def test_who_can_be_had() -> None:
    found, missing = wgrad_against([Against("torch"), Against("triton")])
    assert [provider.name for provider in found] == ["torch vector"]
    assert missing == {"triton": "has no kernel for weight gradients"}


def test_kgen_is_not_timed_where_the_reference_would_answer() -> None:
    class NoKernel:
        ordinal = 0

        def plan(self, problem: GemmProblem) -> Plan:
            return Plan(None, None, "no compiler")

    for problem in (ONE, GROUPS):
        with pytest.raises(LaunchError, match="because no compiler"):
            WgradKgen(NoKernel()).ready(own_case(problem))  # type: ignore[arg-type]


def test_each_family_has_its_cases_and_providers() -> None:
    dense, masked = GemmProblem("dense", 8, 16, 32), GemmProblem("masked", 8, 16, 32, groups=2)
    assert [family_of(p) for p in (dense, masked, ONE, GROUPS)] == [
        *("dense", "grouped"),
        *("wgrad", "wgrad"),
    ]
    assert isinstance(case_of(ONE, "cpu"), Case)
    assert isinstance(case_of(GROUPS, "cpu"), KGroupedCase)
    providers, missing = bench_run._wgrad_providers(None, [])  # type: ignore[arg-type]
    assert [provider.name for provider in providers] == ["kgen"]
    assert missing == {}


def test_the_floor_counts_what_is_read_and_written_again() -> None:
    wide = GemmProblem.of("wgrad", 16384, 16384, 128)
    adds, writes = (
        floor_of(replace(wide, accumulate=accumulate), 1.0, 1e4, 0) for accumulate in (True, False)
    )
    assert adds.us - 1.0 == pytest.approx(2 * (writes.us - 1.0))
