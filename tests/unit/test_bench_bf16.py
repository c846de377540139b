"""Who is timed on BF16 operands: torch's calls, packages by theirs, and the floor's two rates."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest
import torch

from kgen.bench.against import Against
from kgen.bench.floor import Floor, expected_sum, rate_source, weights_of
from kgen.bench.grouped_providers import TorchBmm, TorchGroupedMm, grouped_against, grouped_peer
from kgen.bench.peers import package_peer, providers_against
from kgen.bench.providers import TorchBlockwise, TorchMatmul
from kgen.cases import Case
from kgen.errors import WrongResult
from kgen.grouped_cases import GroupedCase
from kgen.grouped_reference import contiguous_reference_into, masked_reference_into
from kgen.measure import Timing
from kgen.problem import BF16_FIELDS, GemmProblem

DENSE = GemmProblem("dense", 5, 16, 136, **BF16_FIELDS)
CONTIGUOUS = GemmProblem("contiguous", 128, 16, 136, groups=2, **BF16_FIELDS)
MASKED = GemmProblem("masked", 5, 16, 136, groups=2, **BF16_FIELDS)
NONE = torch.empty(0, 0)


def package(**calls: Any) -> ModuleType:
    module = ModuleType("deep_gemm")
    module.__file__ = "deep_gemm/__init__.py"
    vars(module).update(calls)
    return module


def dense(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
    d.copy_(a.float() @ b.float().T)


def contiguous(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, index: torch.Tensor) -> None:
    contiguous_reference_into(d, a, NONE, b, NONE, index, recipe="none")


def masked(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, counts: torch.Tensor, expected_m: int
) -> None:
    assert expected_m == MASKED.m
    masked_reference_into(d, a, NONE, b, NONE, counts, recipe="none")


CALLS = {
    "bf16_gemm_nt": dense,
    "m_grouped_bf16_gemm_nt_contiguous": contiguous,
    "m_grouped_bf16_gemm_nt_masked": masked,
}


@pytest.mark.parametrize("bias", [False, True])
def test_torch_matmul_is_verified_and_called(bias: bool) -> None:
    case = Case(GemmProblem("dense", 5, 16, 136, bias=bias, **BF16_FIELDS), "cpu")
    ready = TorchMatmul().ready(case)
    assert 0 < ready.verified.max_tile_error < 4e-3
    found = ready.call()
    assert isinstance(found, torch.Tensor)
    assert float(case.errors(found)[0].amax()) < 4e-3


def test_each_is_for_its_own_operands() -> None:
    fp8 = Case(GemmProblem("dense", 5, 16, 256), "cpu")
    with pytest.raises(ValueError, match="takes BF16 operands without scales, not scales by block"):
        TorchMatmul().ready(fp8)
    with pytest.raises(ValueError, match="takes scales by block, not BF16 operands"):
        TorchBlockwise().ready(Case(DENSE, "cpu"))
    wide = GemmProblem("dense", 5, 16, 136, d_dtype="fp32", **BF16_FIELDS)
    with pytest.raises(ValueError, match="writes bf16, not fp32"):
        TorchMatmul().ready(Case(wide, "cpu"))
    with pytest.raises(ValueError, match="masked groups of BF16"):
        TorchBmm().ready(GroupedCase(CONTIGUOUS, "cpu"))
    with pytest.raises(ValueError, match="contiguous groups of BF16"):
        TorchGroupedMm().ready(GroupedCase(MASKED, "cpu"))


def test_torch_bmm_is_verified() -> None:
    ready = TorchBmm().ready(GroupedCase(MASKED, "cpu"))
    assert 0 < ready.verified.max_tile_error < 4e-3
    ready.call()


def test_grouped_mm_is_told_the_ends_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of the call that PyTorch documents: one matrix of rows, [G, K, N], ends."""

    def grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        starts = [0, *offs.tolist()]
        return torch.cat([a[starts[i] : starts[i + 1]] @ b[i] for i in range(len(b))])

    monkeypatch.setattr(torch, "_grouped_mm", grouped_mm, raising=False)
    ready = TorchGroupedMm().ready(GroupedCase(CONTIGUOUS, "cpu"))
    assert 0 < ready.verified.max_tile_error < 4e-3
    monkeypatch.setattr(torch, "_grouped_mm", None)
    with pytest.raises(RuntimeError, match="has no _grouped_mm"):
        TorchGroupedMm().ready(GroupedCase(CONTIGUOUS, "cpu"))


def test_packages_are_known_by_their_calls() -> None:
    peer = package_peer("dg", package(**CALLS))
    assert 0 < peer.ready(Case(DENSE, "cpu")).verified.max_tile_error < 4e-3
    assert peer.details["call_bf16"] == "bf16_gemm_nt"
    with pytest.raises(ValueError, match="BF16 operands only"):
        peer.ready(Case(GemmProblem("dense", 5, 16, 256), "cpu"))
    with pytest.raises(ValueError, match="BF16 operands have no scales"):
        peer.from_row_major().ready(Case(DENSE, "cpu"))
    older = package_peer("dg", package(fp8_gemm_nt=print))
    with pytest.raises(ValueError, match="no BF16 operands"):
        older.ready(Case(DENSE, "cpu"))
    grouped = grouped_peer("dg", package(**CALLS))
    for problem in (CONTIGUOUS, MASKED):
        ready = grouped.ready(GroupedCase(problem, "cpu"))
        assert 0 < ready.verified.max_tile_error < 4e-3
        assert ready.details[f"call_bf16_{problem.kind}"] in CALLS
    with pytest.raises(ValueError, match=r"no call for kind masked$"):
        grouped.ready(GroupedCase(GemmProblem("masked", 5, 16, 256, groups=2), "cpu"))
    wrong = package_peer("dg", package(bf16_gemm_nt=lambda a, b, d: None))
    with pytest.raises(WrongResult):
        wrong.ready(Case(DENSE, "cpu"))


def test_torchs_peers_are_those_of_the_recipes() -> None:
    asked = [Against("torch")]
    assert [p.name for p in providers_against(asked, recipes=("none",))[0]] == ["torch matmul"]
    assert "torch matmul" not in [p.name for p in providers_against(asked)[0]]
    names = [provider.name for provider in grouped_against(asked, ("block", "none"))[0]]
    assert names == ["torch loop", "torch grouped_mm", "torch bmm"]


def test_the_floor_has_a_rate_for_each_type() -> None:
    """Two bytes an element: as many to stream, and half the operations in the same iterations."""

    def timing(us: float) -> Timing:
        return Timing("cold", us, us, us, (us,) * 4)

    weights = weights_of(DENSE)
    assert weights == (16, 272)
    streams, cuts = {weights: timing(3.0)}, {weights: (16384, 12)}
    plain = Floor(streams, cuts, timing(13_015.0), 132)
    assert "bf16_tflops" not in plain.to_dict()
    with pytest.raises(ValueError, match="not measured"):
        plain.of(DENSE)
    floor = Floor(streams, cuts, timing(13_015.0), 132, timing(14_000.0))
    assert floor.bf16_tflops == pytest.approx(floor.tflops / 2 * 13_015 / 14_000)
    assert json.loads(json.dumps(floor.to_dict()))["bf16_rate"]["median_us"] == 14_000.0
    assert floor.of(DENSE).us == pytest.approx(3.0 + (5 * 272 + 5 * 32) / 4e6)
    large = GemmProblem("dense", 1 << 16, 16, 136, **BF16_FIELDS)
    assert floor.of(large).us > 3.0


def test_the_rate_kernel_of_bf16() -> None:
    text = rate_source("bf16")
    assert "m64n256k16.f32.bf16.bf16" in text
    assert "%128, %129, 1, 1, 1, 0, 0;" in text
    assert "m64n256k32.f32.e4m3.e4m3" in rate_source()
    assert "TYPES" not in text.split('extern "C"', 1)[1]
    assert expected_sum(3, 2) == 128 * 4 * 16 * 3 == expected_sum(3) / 2
