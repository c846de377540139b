"""Grouped kernels and calls with BF16 operands: adversarial groupings, guards, graphs, checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kgen.runtime.gemm as g
from kgen.config import GemmConfig
from kgen.device import Device
from kgen.errors import UnsupportedInput
from kgen.grouped_cases import GroupedCase
from kgen.grouped_verify import check_runs, verify_grouped
from kgen.heuristic import default_config
from kgen.problem import BF16_FIELDS, GemmProblem
from kgen.runtime import grouped
from kgen.validity import why_invalid
from tests.gpu.bed import Kernels
from tests.gpu.test_grouped_gpu import groupings, launch_of, made

KINDS = ("contiguous", "masked")
#: K ends in half a WGMMA.
N, K, GROUPS = 576, 584, 12
#: As for scaled operands, with tiles as wide as registers allow where nothing is promoted.
CONFIGS = (
    GemmConfig(),
    GemmConfig(block_m=16, block_n=88, num_math_warpgroups=1, num_stages=8),
    GemmConfig(block_m=32, block_n=64, num_math_warpgroups=1, num_stages=8, cluster_n=2),
    GemmConfig(block_m=64, block_n=56, num_math_warpgroups=1, num_stages=6, raster_along="n"),
    GemmConfig(block_n=152, cluster_n=2, raster_group=4, b_eviction="evict_first"),
    GemmConfig(block_n=256, num_stages=3, raster_along="n", raster_group=4),
    GemmConfig(block_n=208, cluster_n=2),
    GemmConfig(block_m=192, block_n=168, num_math_warpgroups=3, num_stages=3),
    GemmConfig(block_m=256, num_stages=3, cluster_n=2),
)


def problem(kind: str, m: int = 200, groups: int = GROUPS, d_dtype: str = "bf16") -> GemmProblem:
    return GemmProblem(kind, m, N, K, groups=groups, d_dtype=d_dtype, **BF16_FIELDS)


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    """The reference must not have answered in any of these tests."""
    g.reset_stats()
    yield
    assert g.stats()["fallbacks"] == {}


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest) -> GroupedCase:
    """Groups of unlike sizes and their references."""
    return GroupedCase(problem(request.param))


def public(tensors: Any, by_index: bool) -> None:
    """The public call that a grouping asks for, answered by a kernel."""
    a, _, b, _, d, layout = tensors
    if d.dim() == 3:
        g.m_grouped_bf16_gemm_nt_masked(a, b, d, layout, 64)
    else:
        name = "m_indices" if by_index else "m_offsets"
        g.m_grouped_bf16_gemm_nt_contiguous(a, b, d, **{name: layout})
    assert g.last_path() == "kernel"


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_configurations_are_verified(
    config: GemmConfig, case: GroupedCase, kernels: Kernels, device: Device
) -> None:
    """Full, uneven, lonely and empty groups by offsets, indices with holes, counts; exact case."""
    if why_invalid(case.problem, config, device):
        pytest.skip("not for this kind")
    kernels.prefetch((problem(kind), c) for kind in KINDS for c in CONFIGS)
    verified = verify_grouped(launch_of(kernels.get(case.problem, config)), case)
    assert verified.exact_passes == 2


@pytest.mark.parametrize("d_dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_outputs(kind: str, d_dtype: str, kernels: Kernels, device: Device) -> None:
    p = problem(kind, d_dtype=d_dtype)
    kernel = kernels.get(p, default_config(p, device))
    verify_grouped(launch_of(kernel), GroupedCase(p))


def test_public_calls(case: GroupedCase) -> None:
    """Twice each, the second as prepared; guards around D, NaN in what is ignored."""
    check_runs(public, case, [(run, False) for run in case.runs for _ in range(2)])


@pytest.mark.parametrize("kind", KINDS)
def test_many_groups(kind: str) -> None:
    """128 of them, of none, one, 64 and 257 rows, all in one, by the public call."""
    case = GroupedCase(GemmProblem(kind, 16, 136, 136, groups=128, **BF16_FIELDS))
    many = [made(case, f"no. {i}", sizes) for i, sizes in enumerate(groupings(kind))]
    case.runs += [run for runs in many for run in runs]  # guards large enough for all
    check_runs(public, case, [(run, False) for run in case.runs])


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_tiles_than_sms_over_and_over(kind: str) -> None:
    """128 groups of which few have rows, 50 launches: the same bits each time, and right ones."""
    case = GroupedCase(GemmProblem(kind, 16, 136, 584, groups=128, **BF16_FIELDS))
    case.runs = made(case, "few", [3 if i % 7 == 0 else 0 for i in range(128)])
    for run in case.runs:
        tensors = (*case.inputs(run), case.empty(run), run.grouping.layout)
        results = []
        for _ in range(50):
            tensors[4].fill_(7.0)
            public(tensors, run.grouping.by_index)
            results.append(tensors[4].clone())
        assert all(torch.equal(result, results[0]) for result in results)
        check_runs(public, case, [(run, False)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_call_follows_the_device(kind: str) -> None:
    """A replay reads the sizes anew; a call does not wait for the device."""
    case = GroupedCase(GemmProblem(kind, 70, 136, 136, groups=4, **BF16_FIELDS))
    run = case.by_offset
    d, layout = case.empty(run), run.grouping.layout.clone()
    tensors = (*case.inputs(run), d, layout)
    public(tensors, by_index=False)
    right = d.clone()
    previous = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        public(tensors, by_index=False)
    finally:
        torch.cuda.set_sync_debug_mode(previous)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        public(tensors, by_index=False)
    d.fill_(7.0)
    few = [0, 70, 0, 5] if kind == "masked" else [0, 70, 140, 210, 215]
    layout.copy_(torch.tensor(few))
    graph.replay()
    if kind == "masked":
        for i, count in enumerate(few):
            assert torch.equal(d[i, :count], right[i, :count])
            assert bool((d[i, count:] == 7).all())
    else:
        assert torch.equal(d[:215], right[:215])
        assert bool((d[215:] == 7).all())


def test_values_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    case = GroupedCase(GemmProblem("contiguous", 128, 136, 136, groups=2, **BF16_FIELDS))
    monkeypatch.setenv("KGEN_CHECK", "1")
    grouped.forget()
    try:
        tensors = [*case.inputs(case.full), case.empty(case.full), case.by_offset.grouping.layout]
        public(tensors, by_index=False)
        tensors[5] = torch.tensor([0, 300, 256], dtype=torch.int32, device="cuda")
        with pytest.raises(UnsupportedInput, match=r"m_offsets\[2\] is 256, below"):
            public(tensors, by_index=False)
    finally:
        monkeypatch.undo()
        grouped.forget()


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_whole(kind: str) -> None:
    case = GroupedCase(GemmProblem(kind, 70, 136, 136, groups=4, **BF16_FIELDS))
    run = case.by_offset
    a, _, b, _ = case.inputs(run)

    def step(a: Any, b: Any, d: Any, layout: Any) -> torch.Tensor:
        if kind == "masked":
            g.m_grouped_bf16_gemm_nt_masked(a, b, d, layout, 64)
        else:
            g.m_grouped_bf16_gemm_nt_contiguous(a, b, d, m_offsets=layout)
        twice: torch.Tensor = d * 2
        return twice

    compiled = torch.compile(step, fullgraph=True)
    found: torch.Tensor = compiled(a, b, case.empty(run), run.grouping.layout)
    assert float(run.errors(found / 2)[0].amax()) < 4e-3
