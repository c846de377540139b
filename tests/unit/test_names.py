"""Names of kernels and ranges of calls: what a profiler shows."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from kgen.config import GemmConfig
from kgen.device import H200
from kgen.errors import RenderError
from kgen.heuristic import seeds
from kgen.problem import GemmProblem
from kgen.render import declared_entry, entry_name, render
from kgen.runtime import gemm, nvtx
from kgen.runtime.counting import MarkedLaunch, counted
from tests.unit.test_dispatch import World, call, world  # noqa: F401

PROBLEM = GemmProblem("dense", 64, 2112, 7168)
CONFIG = GemmConfig(block_m=64, block_n=88, num_stages=10, num_math_warpgroups=1, split_k=4)


def test_a_name_says_problem_and_tile() -> None:
    assert entry_name(PROBLEM, CONFIG) == "kgen_dense_block_to_bf16_64x88_s10_w1_split4"
    row = replace(PROBLEM, recipe="row", b_dtype="e5m2", bias=True, d_dtype="fp32")
    wide = GemmConfig(cluster_m=2, num_accumulators=2, baked_dims="nk")
    assert entry_name(row, wide) == (
        "kgen_dense_row_b_e5m2_to_fp32_bias_128x128_s4_w2_acc2_cluster2x1_n2112_k7168"
    )


@pytest.mark.parametrize("kind", ["dense", "masked", "contiguous"])
def test_the_source_declares_it_whatever_m(kind: str) -> None:
    problem = GemmProblem(kind, 64, 512, 512, groups=1 if kind == "dense" else 4)
    for config in seeds(problem, H200, 8):
        source = render(problem, config)
        assert source.entry == entry_name(problem, config) == declared_entry(source.text)
        assert re.fullmatch(r"kgen_[a-z0-9_]+", source.entry)
        assert render(problem.with_m(99), config).text == source.text


def test_what_changes_no_source_changes_no_name() -> None:
    """Else kernels that are the same would be compiled and timed twice."""
    other = replace(CONFIG, sass_pass="interleave")
    assert render(PROBLEM, other).body_hash == render(PROBLEM, CONFIG).body_hash


def test_a_source_with_no_kernel_or_two() -> None:
    with pytest.raises(RenderError, match="0 kernels: none"):
        declared_entry("int x;")
    with pytest.raises(RenderError, match="2 kernels: a, b"):
        declared_entry("a(const __grid_constant__ A x) b(const __grid_constant__ A x)")


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was pushed and popped."""
    found: list[str] = []
    monkeypatch.setattr(nvtx, "can_mark", lambda: True)
    monkeypatch.setattr(nvtx, "push", found.append)
    monkeypatch.setattr(nvtx, "pop", lambda: found.append("pop"))
    return found


def test_calls_are_marked_only_where_asked_for(
    world: World,  # noqa: F811
    marks: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call(64)
    assert marks == []
    monkeypatch.setenv("KGEN_NVTX", "1")
    gemm.reload()
    call(64)
    call(64)
    assert marks == ["kgen dense m=64 n=576 k=512", "pop"] * 2
    assert len(world.fake.launches) == 3


def test_a_launch_that_fails_closes_its_range(marks: list[str]) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            return None

        def run(self, stream: int) -> None:
            raise RuntimeError("lost")

    marked = MarkedLaunch(Broken(), "kgen x")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="lost"):
        marked.run(0)
    assert marks == ["kgen x", "pop"]


def test_without_cuda_nothing_is_marked() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert not nvtx.can_mark()
    with nvtx.nvtx_range("kgen"):
        pass
    kernel: Any = object()
    assert counted(kernel, PROBLEM, guessed=False, marked=True) is kernel
