"""Who is timed on grouped problems: packages by their calls, torch's loop, the floor of weights."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kgen.bench import run as bench_run
from kgen.bench.against import Against
from kgen.bench.floor import floor_of, weights_of
from kgen.bench.grouped_providers import GroupedKgen, TorchLoop, grouped_against, grouped_peer
from kgen.bench.providers import Provider
from kgen.device import H200
from kgen.errors import LaunchError, WrongResult
from kgen.grouped_cases import GroupedCase
from kgen.grouped_reference import contiguous_reference_into, masked_reference_into
from kgen.measure import DEFAULT_POLICY, Timing, policy_named
from kgen.problem import GemmProblem
from kgen.runtime.dispatch import Plan

CONTIGUOUS = GemmProblem("contiguous", 128, 16, 256, groups=2)
MASKED = GemmProblem("masked", 5, 16, 256, groups=2)


def package(**calls: Any) -> ModuleType:
    module = ModuleType("deep_gemm")
    module.__file__ = "deep_gemm/__init__.py"
    vars(module).update(calls)
    return module


def contiguous(lhs: Any, rhs: Any, out: torch.Tensor, index: torch.Tensor) -> None:
    assert lhs[1].stride(0) == 1, "would be converted first"
    contiguous_reference_into(out, lhs[0], lhs[1], rhs[0], rhs[1], index)


def masked(lhs: Any, rhs: Any, out: torch.Tensor, counts: torch.Tensor, expected_m: int) -> None:
    assert expected_m == MASKED.m
    masked_reference_into(out, lhs[0], lhs[1], rhs[0], rhs[1], counts)


def newer(function: Any) -> Any:
    def call(*arguments: Any, disable_ue8m0_cast: bool = False) -> None:
        assert disable_ue8m0_cast
        function(*arguments)

    return call


OLD = {
    "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous": contiguous,
    "m_grouped_gemm_fp8_fp8_bf16_nt_masked": masked,
}
NEW = {
    "m_grouped_fp8_gemm_nt_contiguous": newer(contiguous),
    "m_grouped_fp8_gemm_nt_masked": newer(masked),
    "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous": None,
    "__version__": "2.6.1",
}


@pytest.mark.parametrize("calls", [OLD, NEW, {"fp8_m_grouped_gemm_nt_masked": newer(masked)}])
def test_both_generations_are_known(calls: dict[str, Any]) -> None:
    peer = grouped_peer("dg", package(**calls))
    for problem in (CONTIGUOUS, MASKED):
        case = GroupedCase(problem, "cpu")
        if problem.kind not in peer.functions:
            with pytest.raises(ValueError, match="no call for kind contiguous"):
                peer.ready(case)
            continue
        ready = peer.ready(case)
        assert 0 < ready.verified.max_tile_error < 4e-3
        ready.call()
        assert ready.details[f"call_{problem.kind}"] in calls


def test_a_peer_finds_no_result_of_another_in_its_output() -> None:
    """New memory may hold one: a peer that writes nothing would pass."""

    def looks(lhs: Any, rhs: Any, out: torch.Tensor, counts: torch.Tensor, rows: int) -> None:
        assert out.isnan().all()
        masked(lhs, rhs, out, counts, rows)

    peer = grouped_peer("dg", package(m_grouped_gemm_fp8_fp8_bf16_nt_masked=looks))
    peer.ready(GroupedCase(MASKED, "cpu"))


def test_masked_groups_have_room_for_whole_tiles() -> None:
    """A package that writes 128 rows from a group's start is right, with room for them."""

    def whole_tiles(lhs: Any, rhs: Any, out: torch.Tensor, counts: torch.Tensor, rows: int) -> None:
        groups, room = out.shape[:2]
        assert rows == MASKED.m
        assert lhs[0].shape[:2] == lhs[1].shape[:2] == (groups, room)
        assert room % 128 == lhs[1].stride(2) % 128 == 0
        masked(lhs, rhs, out, torch.full_like(counts, room), rows)

    peer = grouped_peer("dg", package(m_grouped_gemm_fp8_fp8_bf16_nt_masked=whole_tiles))
    ready = peer.ready(GroupedCase(MASKED, "cpu"))
    assert ready.details["rows_a_group"] == 128
    assert 0 < ready.verified.max_tile_error < 4e-3


def test_what_a_package_can_not_do() -> None:
    with pytest.raises(LookupError, match="has none of m_grouped_fp8_gemm_nt_contiguous"):
        grouped_peer("dg", package())
    peer = grouped_peer("dg", package(**OLD))
    with pytest.raises(ValueError, match="whole 128 rows"):
        peer.ready(GroupedCase(CONTIGUOUS.with_m(100), "cpu"))
    wrong = grouped_peer("dg", package(**OLD | {"m_grouped_gemm_fp8_fp8_bf16_nt_masked": print}))
    with pytest.raises(WrongResult):
        wrong.ready(GroupedCase(MASKED, "cpu"))


def test_asked_for(tmp_path: Path) -> None:
    asked = [Against("torch"), Against("triton"), Against("dg", tmp_path)]
    found, missing = grouped_against(asked)
    assert [provider.name for provider in found] == ["torch loop"]
    assert missing["triton"] == "has no kernel for grouped problems"
    assert "expected a package" in missing["dg"]


def test_kgen_says_why_the_fallback_would_answer() -> None:
    class NoKernel:
        ordinal = 0

        def plan(self, problem: GemmProblem) -> Plan:
            return Plan(None, None, "no compiler")

    case = GroupedCase(MASKED, "cpu")
    with pytest.raises(LaunchError, match="because no compiler"):
        GroupedKgen(NoKernel()).ready(case)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no offsets"):
        GroupedKgen(NoKernel(), by_offset=True).ready(case)  # type: ignore[arg-type]


def test_a_row_of_a_grouped_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop refuses on a CPU, which is noted; the package is timed."""

    def timed(calls: dict[str, Any], *_: Any) -> dict[str, Timing]:
        return {name: Timing("cold", 1.0, 1.0, 1.0, (1.0,)) for name in calls}

    monkeypatch.setattr(bench_run, "measure_many", timed)
    providers: list[Provider] = [TorchLoop(), grouped_peer("dg", package(**OLD))]
    policy = policy_named(DEFAULT_POLICY)
    row = bench_run.bench_problem(MASKED, providers, policy, H200, where="cpu")
    assert "dg" in row.timings
    assert set(row.timings) | set(row.notes) == {"torch loop", "dg"}


def test_the_floor_counts_every_groups_weights() -> None:
    assert weights_of(GemmProblem("masked", 16, 4096, 7168, groups=32)) == (32 * 4096, 7168)
    assert weights_of(GemmProblem("dense", 16, 4096, 7168)) == (4096, 7168)
    one = floor_of(CONTIGUOUS, 1.0, 1e9, 0).us
    many = floor_of(GemmProblem("contiguous", 128, 16, 256, groups=20), 1.0, 1e9, 0).us
    assert many - 1.0 == pytest.approx(10 * (one - 1.0))
