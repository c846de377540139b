"""Grouped kernels and calls: adversarial groupings, guards, graphs, repeated runs, large memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import kgen.runtime.gemm as g
from kgen.bench.run import run_bench
from kgen.config import GemmConfig
from kgen.device import Device
from kgen.errors import UnsupportedInput
from kgen.grouped_cases import GroupedCase, GroupedRun, indexed, masked, offset
from kgen.grouped_verify import check_runs, verify_grouped
from kgen.heuristic import default_config
from kgen.problem import GemmProblem
from kgen.runtime import driver, grouped
from kgen.runtime.grouped_kernel import GroupedKernel
from kgen.search.builder import create
from kgen.search.gpu_body import GpuBody
from kgen.settings import Settings
from kgen.validity import why_invalid
from tests.gpu.bed import Kernels

KINDS = ("contiguous", "masked")
N, K, GROUPS = 576, 1168, 12
#: Each branch of scheduler, loads and stores: rows of a tile, scale blocks, swizzles, multicast,
#: two accumulators, a second wave, three warpgroups, walks along either dimension.
CONFIGS = (
    GemmConfig(),
    GemmConfig(block_m=16, block_n=88, num_math_warpgroups=1, num_stages=8),
    GemmConfig(block_m=32, block_n=64, num_math_warpgroups=1, num_stages=8, cluster_n=2),
    GemmConfig(block_m=64, block_n=56, num_math_warpgroups=1, num_stages=6, raster_along="n"),
    GemmConfig(block_m=64, block_n=128, num_math_warpgroups=1, num_accumulators=2, num_stages=6),
    GemmConfig(block_n=152, cluster_n=2, raster_group=4, b_eviction="evict_first"),
    GemmConfig(block_n=192, raster_along="n", raster_group=4),
    GemmConfig(num_accumulators=2, cluster_n=2),
    GemmConfig(block_m=192, num_math_warpgroups=3, num_stages=3),
    GemmConfig(block_m=256, num_stages=3, cluster_n=2),
)


def problem(kind: str, m: int = 200, groups: int = GROUPS, d_dtype: str = "bf16") -> GemmProblem:
    return GemmProblem(kind, m, N, K, groups=groups, d_dtype=d_dtype)


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


def launch_of(kernel: Any) -> Any:
    assert isinstance(kernel, GroupedKernel)

    def launch(tensors: Any, by_index: bool) -> None:
        kernel.run_grouped(tensors, by_index=by_index)

    return launch


def public(tensors: Any, by_index: bool) -> None:
    """The public call that a grouping asks for, answered by a kernel."""
    a, sfa, b, sfb, d, layout = tensors
    if d.dim() == 3:
        g.m_grouped_gemm_fp8_nt_masked((a, sfa), (b, sfb), d, layout, 64)
    else:
        name = "m_indices" if by_index else "m_offsets"
        g.m_grouped_gemm_fp8_nt_contiguous((a, sfa), (b, sfb), d, **{name: layout})
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
    """Both layouts of scales, guards around D, NaN in what is ignored."""
    check_runs(public, case, [(run, row_major) for run in case.runs for row_major in (False, True)])


def groupings(kind: str) -> Iterator[Sequence[int]]:
    """Rows of 128 groups."""
    yield [0] * 127 + [1]
    yield [1] + [0] * 127
    yield [1] * 128
    yield [0, 257] * 64
    yield [64 * (i % 2) for i in range(128)]
    yield [i % 64 + 1 for i in range(128)]
    if kind == "contiguous":
        yield [0] * 64 + [3000] + [0] * 63


@pytest.mark.parametrize("kind", KINDS)
def test_many_groups(kind: str) -> None:
    """128 of them, by the public call."""
    case = GroupedCase(GemmProblem(kind, 16, 136, 272, groups=128))
    many = [made(case, f"no. {i}", sizes) for i, sizes in enumerate(groupings(kind))]
    case.runs += [run for runs in many for run in runs]  # guards large enough for all
    check_runs(public, case, [(run, False) for run in case.runs])


def made(case: GroupedCase, name: str, sizes: Sequence[int]) -> list[GroupedRun]:
    """Runs of these sizes in every form of the kind."""
    if case.problem.kind == "masked":
        return [case._run(masked(name, sizes, max(sizes) + 3, case.device))]
    forms = offset(name, sizes, 19, case.device), indexed(name, sizes, case.device)
    return [case._run(grouping) for grouping in forms]


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_tiles_than_sms_over_and_over(kind: str) -> None:
    """128 groups of which few have rows, 50 launches: the same bits each time, and right ones."""
    case = GroupedCase(GemmProblem(kind, 16, 136, 1168, groups=128))
    sizes = [3 if i % 7 == 0 else 0 for i in range(128)]
    case.runs = made(case, "few", sizes)
    for run in case.runs:
        tensors = (*case.inputs(run), case.empty(run), run.grouping.layout)
        results = []
        for _ in range(50):
            tensors[4].fill_(7.0)
            public(tensors, run.grouping.by_index)
            results.append(tensors[4].clone())
        assert all(torch.equal(result, results[0]) for result in results)
        check_runs(public, case, [(run, False)])


def test_masks_of_one_row() -> None:
    """max M of 1, and of 3, which no box divides."""
    case = GroupedCase(GemmProblem("masked", 1, 136, 272, groups=9))
    sizes = [i % 2 for i in range(9)]
    for most in (1, 3):
        case.runs.append(case._run(masked(f"max M {most}", sizes, most, case.device)))
    check_runs(public, case, [(run, major) for run in case.runs for major in (False, True)])


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_follow_the_device(kind: str) -> None:
    """A captured call reads sizes at each replay; neither capture nor call waits for the device."""
    case = GroupedCase(GemmProblem(kind, 70, 136, 272, groups=4))
    run = case.by_offset
    a, sfa, b, sfb = case.inputs(run)
    d, layout = case.empty(run), run.grouping.layout.clone()
    tensors = (a, sfa, b, sfb, d, layout)
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
    values = [[0, 70, 0, 5], [70, 70, 70, 70], [0, 0, 0, 0]]
    for counts in values:
        d.fill_(7.0)
        if kind == "masked":
            layout.copy_(torch.tensor(counts))
            graph.replay()
            for i, count in enumerate(counts):
                assert torch.equal(d[i, :count], right[i, :count])
                assert bool((d[i, count:] == 7).all())
        else:
            ends = [min(70 * (i + 1), 70 * i + c) for i, c in enumerate(counts)]
            layout.copy_(torch.tensor([0, ends[0], 140, 210, max(210, ends[3])]))
            graph.replay()
            assert torch.equal(d[: ends[0]], right[: ends[0]])
            assert torch.equal(d[140:210], right[140:210])
            assert bool((d[max(210, ends[3]) :] == 7).all())


def test_memory_beyond_two_to_the_31() -> None:
    """Weights of 3.8 G elements, and D of 2.5 G elements, at their far ends."""
    groups, n, k = 128, 7168, 4096
    b = torch.zeros(groups, n, k, dtype=torch.uint8, device="cuda")
    b[-1] = 0x38  # one
    sfb = torch.ones(groups, n // 128, k // 128, device="cuda")
    a = torch.full((5, k), 0x38, dtype=torch.uint8, device="cuda")
    sfa, d = torch.ones(5, k // 128, device="cuda"), torch.zeros(5, n, device="cuda")
    e4m3 = torch.float8_e4m3fn
    ends = torch.tensor([0] * 127 + [2, 5], dtype=torch.int32, device="cuda")
    g.m_grouped_gemm_fp8_nt_contiguous((a.view(e4m3), sfa), (b.view(e4m3), sfb), d, m_offsets=ends)
    assert bool((d[:2] == 0).all())
    assert bool((d[2:] == k).all())
    del b
    m, n, k = 350_000, 7168, 128
    a = torch.zeros(m, k, dtype=torch.uint8, device="cuda")
    a[-3:] = 0x38
    b = torch.full((2, n, k), 0x38, dtype=torch.uint8, device="cuda")
    sfa = g.get_col_major_tma_aligned_tensor(torch.ones(m, 1, device="cuda"))
    out = torch.full((m, n), 7.0, dtype=torch.bfloat16, device="cuda")
    ends = torch.tensor([0, m - 2, m - 1], dtype=torch.int32, device="cuda")
    sfb = torch.ones(2, n // 128, 1, device="cuda")
    g.m_grouped_gemm_fp8_nt_contiguous(
        (a.view(e4m3), sfa), (b.view(e4m3), sfb), out, m_offsets=ends
    )
    assert bool((out[-4] == 0).all())
    assert bool((out[-3:-1] == 128).all())
    assert bool((out[-1] == 7).all())


def test_values_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    case = GroupedCase(GemmProblem("contiguous", 128, 136, 272, groups=2))
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
    case = GroupedCase(GemmProblem(kind, 70, 136, 272, groups=4))
    run = case.by_offset
    d = case.empty(run)
    tensors = (*case.inputs(run), d, run.grouping.layout)

    def step(*tensors: Any) -> torch.Tensor:
        a, sfa, b, sfb, d, layout = tensors
        if kind == "masked":
            g.m_grouped_gemm_fp8_nt_masked((a, sfa), (b, sfb), d, layout, 64)
        else:
            g.m_grouped_gemm_fp8_nt_contiguous((a, sfa), (b, sfb), d, m_offsets=layout)
        twice: torch.Tensor = d * 2
        return twice

    found: torch.Tensor = torch.compile(step, fullgraph=True)(*tensors)
    assert float(run.errors(found / 2)[0].amax()) < 4e-3


@pytest.mark.parametrize("kind", KINDS)
def test_the_search_verifies_and_times_them(kind: str, device: Device, tmp_path: Path) -> None:
    p = GemmProblem(kind, 128, 2112, 1024, groups=8)
    builder = create(Settings(tmp_path), driver.driver_version())
    cubin = builder.build(p, default_config(p, device))
    body = GpuBody(torch.cuda.current_device(), device)
    body.open(p)
    assert 0 < body.verify(cubin) < 4e-3
    (measured,) = body.time((cubin.key,), "cold")
    assert measured.median_us > 3


def test_bench() -> None:
    problems = [GemmProblem(kind, 128, 2112, 1024, groups=8) for kind in KINDS]
    report = run_bench(problems, Settings.from_env(), against=["torch"], floor=True)
    assert not report.failed, [row.notes for row in report.rows]
    first, second = report.rows
    assert {"kgen", "kgen m_offsets", "torch loop"} <= set(first.timings), first.notes
    assert {"kgen", "torch loop"} <= set(second.timings), second.notes
    assert second.notes["kgen m_offsets"] == "kind masked has no offsets"
