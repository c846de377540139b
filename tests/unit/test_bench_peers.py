"""Peers beside torch: which are asked for, which call a package has, what is missing and why."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kgen.bench.against import Against, parse_against
from kgen.bench.peers import FunctionPeer, package_peer, providers_against
from kgen.cases import Case
from kgen.errors import UsageError, WrongResult
from kgen.problem import GemmProblem
from tests.unit.simulated import Simulated

PROBLEM = GemmProblem("dense", m=5, n=16, k=256)

#: Two generations of one library: its call changed, its name did not.
OLD = """
from .log import calls

def gemm_fp8_fp8_bf16_nt(lhs, rhs, out):
    (a, sfa), (b, sfb) = lhs, rhs
    assert out.is_contiguous()
    assert sfa.stride() == (1, -(-sfa.shape[0] // 4) * 4), "would be converted first"
    calls.append("old")
    kernel(a, sfa, b, sfb, out)
"""
NEW = """
from deep_gemm.log import calls
__version__ = "2.6.1"
pdl = True

def set_pdl(enabled):
    global pdl
    pdl = enabled

def fp8_gemm_nt(a, b, d, c=None, disable_ue8m0_cast=False):
    assert disable_ue8m0_cast and not pdl
    calls.append("new")
    kernel(*a, *b, d)

def gemm_fp8_fp8_bf16_nt(*rest):
    raise AssertionError("the newer call is the one to take")
"""


def package(folder: Path, text: str) -> Path:
    made = folder / "deep_gemm"
    made.mkdir(parents=True)
    (made / "__init__.py").write_text(f"from tests.unit.test_bench_peers import kernel\n{text}")
    (made / "log.py").write_text("calls = []\n")
    return made


def kernel(*tensors: torch.Tensor) -> None:
    """What every package here computes with."""
    Simulated()(*tensors)


@pytest.fixture(autouse=True)
def _no_trace() -> Iterator[None]:
    finders = [*sys.meta_path]
    yield
    for name in [name for name in sys.modules if name.startswith(("kgen_peer_", "triton"))]:
        del sys.modules[name]
    sys.meta_path[:] = finders


# ---- words of the command line


def test_words_are_peers_each_once() -> None:
    """Commas and repetition mean the same; order is kept."""
    asked = parse_against(["torch,dg-v1=/a/b", "triton", "torch", "dg-v1=/a/b"])
    assert asked == (Against("torch"), Against("dg-v1", Path("/a/b")), Against("triton"))
    assert asked[1].alias == "kgen_peer_dg_v1"
    assert parse_against(["a=~/x"])[0].folder == Path.home() / "x"
    assert parse_against([]) == ()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["torhc"], "'torhc': expected torch, triton, or NAME=DIR"),
        (["torch,"], "'': expected"),
        (["dg="], "'dg=': expected"),
        (["=x"], "can not be a name"),
        (["kgen=x"], "none of kgen, torch, triton"),
        (["torch=x"], "none of kgen, torch, triton"),
        (["a b=x"], "can not be a name"),
        (["a=x", "a=y"], "a stands for two folders"),
    ],
)
def test_other_words_are_usage_errors(words: list[str], reason: str) -> None:
    """What was given, and what was expected."""
    with pytest.raises(UsageError, match=reason):
        parse_against(words)


# ---- packages


def test_two_generations_stand_side_by_side(tmp_path: Path) -> None:
    """Each found by its own call, each verified, each with the scales it need not convert."""
    folders = {"v1": package(tmp_path / "1", OLD), "v2": package(tmp_path / "2", NEW).parent}
    asked = [Against(name, folder) for name, folder in folders.items()]
    found, missing = providers_against(asked)
    assert missing == {}
    assert [provider.name for provider in found] == ["v1", "v2"]
    case = Case(PROBLEM, "cpu")
    ready = [provider.ready(case) for provider in found]
    assert all(0 < one.verified.max_tile_error < 4e-3 for one in ready)
    assert [one.details["call"] for one in ready] == ["gemm_fp8_fp8_bf16_nt", "fp8_gemm_nt"]
    assert [one.details["version"] for one in ready] == ["unknown", "2.6.1"]
    for one in ready:
        one.call()
    logs = [sys.modules[f"{one.alias}.log"].calls for one in asked]
    assert logs == [["old"] * 2, ["new"] * 2]


def test_what_can_not_be_had_is_named_with_the_reason(tmp_path: Path) -> None:
    """No folder, an import that fails, a package of another kind; the others stay."""
    (tmp_path / "other" / "deep_gemm").mkdir(parents=True)
    (tmp_path / "other" / "deep_gemm" / "__init__.py").write_text("gemm = 1\n")
    asked = [
        Against("gone", tmp_path / "gone"),
        Against("broken", package(tmp_path / "broken", "raise SystemExit('no CUDA_HOME')")),
        Against("other", tmp_path / "other"),
        Against("good", package(tmp_path / "good", OLD)),
    ]
    found, missing = providers_against(asked)
    assert [provider.name for provider in found] == ["good"]
    assert "gone: no such folder" in missing["gone"]
    assert missing["broken"] == "SystemExit: no CUDA_HOME"
    assert "has none of fp8_gemm_nt, gemm_fp8_fp8_bf16_nt" in missing["other"]


def test_torch_is_two_providers_and_triton_may_be_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton is imported only when asked for."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "kgen.bench.triton_gemm", raising=False)
    found, missing = providers_against(parse_against(["torch"]))
    assert [provider.name for provider in found] == ["torch blockwise", "torch tensorwise"]
    assert [provider.reference_only for provider in found] == [False, True]
    assert missing == {}
    found, missing = providers_against(parse_against(["triton"]))
    assert found == []
    assert "triton" in missing["triton"]
    assert missing["triton"].startswith("ModuleNotFoundError")


def test_triton_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the module can be imported, its function is the peer."""
    module = ModuleType("kgen.bench.triton_gemm")
    module.gemm = kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kgen.bench.triton_gemm", module)
    (provider,), missing = providers_against(parse_against(["triton"]))
    assert missing == {}
    assert provider.name == "triton"
    assert not provider.reference_only
    assert provider.ready(Case(PROBLEM, "cpu")).verified.max_tile_error < 4e-3


# ---- row-major scales


def test_row_major_scales_are_converted_in_every_call(tmp_path: Path) -> None:
    """Each that takes scales comes twice; the second time a stale conversion would show."""
    asked = [Against("v1", package(tmp_path, OLD)), Against("torch")]
    found, _ = providers_against(asked, row_major=True)
    names = ["v1", "v1 row-major", "torch blockwise", "torch blockwise row-major"]
    assert [provider.name for provider in found] == [*names, "torch tensorwise"]
    seen: list[torch.Tensor] = []

    def keep(*tensors: torch.Tensor) -> None:
        seen.append(tensors[1])
        kernel(*tensors)

    case = Case(PROBLEM, "cpu")
    ready = FunctionPeer("x", keep).from_row_major().ready(case)
    ready.call()
    seen[-1].zero_()
    ready.call()
    assert seen[-1].stride() == (1, 8)
    assert torch.equal(seen[-1], case.sfa[:5])


# ---- one function


def test_a_wrong_peer_is_not_ready() -> None:
    """Verified first, as everybody."""
    wrong = FunctionPeer("x", Simulated(scale_a=lambda scales, block: scales * 1.5))
    with pytest.raises(WrongResult):
        wrong.ready(Case(PROBLEM, "cpu"))


def test_a_peer_finds_no_result_of_another_in_its_output() -> None:
    """New memory may hold one: a peer that writes nothing would pass."""

    def looks(*tensors: torch.Tensor) -> None:
        assert tensors[4].isnan().all()
        kernel(*tensors)

    FunctionPeer("x", looks).ready(Case(PROBLEM, "cpu"))


def test_a_peers_own_errors_are_named() -> None:
    """An assertion without words still says what it was."""

    def refuses(*tensors: torch.Tensor) -> None:
        raise AssertionError

    with pytest.raises(RuntimeError, match=r"^AssertionError$"):
        FunctionPeer("x", refuses).ready(Case(PROBLEM, "cpu"))


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (GemmProblem("dense", 5, 16, 128, d_dtype="fp32"), "no fp32 output; it has bf16"),
        (GemmProblem("dense", 5, 16, 128, num_sms=64), "a budget of SMs is not passed on"),
    ],
)
def test_what_a_peer_does_not_take(problem: GemmProblem, reason: str) -> None:
    """It is noted in the row, not timed on something else."""
    with pytest.raises(ValueError, match=reason):
        FunctionPeer("x", Simulated()).ready(Case(problem, "cpu"))


def test_a_package_needs_one_of_the_known_calls() -> None:
    """By name, and it must be callable."""
    module = ModuleType("deep_gemm")
    module.__file__ = "/x/__init__.py"
    module.fp8_gemm_nt = None  # type: ignore[attr-defined]
    with pytest.raises(LookupError, match=r"the package in /x/__init__\.py has none of"):
        package_peer("x", module)
