"""Weight gradients: every trait of a kernel, unequal groups, guards, graphs, large memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import kgen.runtime.gemm as g
from kgen.bench.run import run_bench
from kgen.cases import Case
from kgen.config import GemmConfig
from kgen.device import Device
from kgen.errors import UnsupportedInput
from kgen.heuristic import default_config
from kgen.problem import GemmProblem
from kgen.runtime import driver, wgrad
from kgen.runtime.casts import cast_to_fp8
from kgen.runtime.wgrad_kernel import KGroupedKernel, WgradKernel
from kgen.search.builder import create
from kgen.search.gpu_body import GpuBody
from kgen.settings import Settings
from kgen.space import AXES
from kgen.validity import why_invalid
from kgen.verify import MAX_FINE_ERROR, check_random
from kgen.wgrad_cases import KGroupedCase, accumulating, held_before
from kgen.wgrad_verify import check_k_grouped, verify_k_grouped, verify_wgrad
from tests.gpu.bed import Kernels, covering

#: Partial tiles whatever a tile's size, a partial last K block; groups of 7 in turn.
SMALL = GemmProblem.of("wgrad", 584, 328, 1168)
GROUPS = GemmProblem.of("k_grouped", 456, 392, 512, groups=7)
#: Where configurations have to be valid, so that all of them are.
WIDE = GemmProblem.of("wgrad", 1040, 2112, 7168)
WIDE_GROUPS = GemmProblem.of("k_grouped", 1040, 2112, 7168, groups=3)


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    """The reference must not have answered in any of these tests."""
    g.reset_stats()
    yield
    assert g.stats()["fallbacks"] == {}


@cache
def case_of(problem: GemmProblem) -> Case:
    return Case(problem)


@cache
def groups_of(problem: GemmProblem) -> KGroupedCase:
    return KGroupedCase(problem)


def launch_of(kernel: Any) -> Any:
    if isinstance(kernel, KGroupedKernel):
        return kernel.run_k_grouped
    assert isinstance(kernel, WgradKernel)
    return kernel


def verify_all(
    problem: GemmProblem, configs: Sequence[GemmConfig], kernels: Kernels
) -> dict[str, str]:
    """What is wrong with each configuration of a problem's class, in words."""
    kernels.prefetch((problem, config) for config in configs)
    wrong = {}
    for config in configs:
        launch = launch_of(kernels.get(problem, config))
        try:
            if problem.kind == "k_grouped":
                verify_k_grouped(launch, groups_of(problem))
            else:
                verify_wgrad(launch, case_of(problem))
        except Exception as error:
            wrong[str(config)] = str(error)
            torch.cuda.synchronize()  # raises where the context is lost: the rest says nothing
    return wrong


@pytest.mark.parametrize("accumulate", [True, False])
def test_every_trait_of_a_kernel(accumulate: bool, kernels: Kernels, device: Device) -> None:
    """Tiles, warpgroups, accumulators, clusters, split K, both ways of D; scales row-major too."""
    problem = replace(SMALL, accumulate=accumulate)
    configs = covering(device, replace(WIDE, accumulate=accumulate))
    configs = configs if accumulate else configs[::2]
    assert len(configs) > 25
    assert {config.d_staging for config in configs} == set(AXES["d_staging"])
    assert verify_all(problem, configs, kernels) == {}


@pytest.mark.parametrize("accumulate", [True, False])
def test_scales_by_block(accumulate: bool, kernels: Kernels, device: Device) -> None:
    problem = replace(SMALL, recipe="block", accumulate=accumulate)
    configs = covering(device, replace(WIDE, recipe="block", accumulate=accumulate))[::3]
    assert verify_all(problem, configs, kernels) == {}


@pytest.mark.parametrize("accumulate", [True, False])
def test_every_trait_with_groups(accumulate: bool, kernels: Kernels, device: Device) -> None:
    """Unequal groups, some without columns, one alone, none; ks from the host and the device."""
    problem = replace(GROUPS, accumulate=accumulate)
    configs = covering(device, replace(WIDE_GROUPS, accumulate=accumulate))
    configs = configs if accumulate else configs[::2]
    assert verify_all(problem, configs, kernels) == {}


@pytest.mark.parametrize("kind", ["wgrad", "k_grouped"])
@pytest.mark.parametrize("dtypes", [("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2")])
def test_e5m2(kind: str, dtypes: tuple[str, str], kernels: Kernels, device: Device) -> None:
    problem = SMALL if kind == "wgrad" else GROUPS
    problem = replace(problem, a_dtype=dtypes[0], b_dtype=dtypes[1])
    assert verify_all(problem, [default_config(problem, device)], kernels) == {}


@pytest.mark.parametrize(
    "sizes",
    [
        *[(8, 8, 16), (1, 8, 128), (129, 136, 144), (1536, 256, 2048), (1538, 256, 2048)],
        *[(7168, 2112, 4096), (512, 1024, 147456)],
    ],
)
def test_sizes_by_the_public_call(sizes: tuple[int, int, int]) -> None:
    """Also those at which others faulted (shared memory by another formula than the kernel's)."""
    case = Case(GemmProblem.of("wgrad", *sizes))
    check_random(accumulating(public), case, [(sizes[0], False), (sizes[0], True)], MAX_FINE_ERROR)


def public(*tensors: torch.Tensor) -> None:
    """The public call, answered by a kernel."""
    a, sfa, b, sfb, d = tensors
    g.wgrad_gemm_fp8_fp8_fp32_nt((a, sfa), (b, sfb), d)
    assert g.last_path() == "kernel"


def public_groups(accumulate: bool = True) -> Any:
    def launch(tensors: Any, ks: Any) -> None:
        a, sfa, b, sfb, d = tensors
        used = a.shape[1] if isinstance(ks, torch.Tensor) else sum(ks)
        blocks = used // 128  # numbers have to add up to what a has
        pairs = (a[:, :used], sfa[:, :blocks]), (b[:, :used], sfb[:, :blocks])
        g.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(*pairs, d, ks, accumulate=accumulate)
        assert g.last_path() == ("kernel" if used else "empty")

    return launch


def test_each_call_adds_once() -> None:
    """First call, which may build and look up, and calls from cache: ones plus n products."""
    case = case_of(SMALL)
    a, sfa, b, sfb = case.inputs(SMALL.m)
    product = torch.zeros(SMALL.m, SMALL.n, device="cuda")
    g.wgrad_gemm_fp8_fp8_fp32_nt((a, sfa), (b, sfb), product, accumulate=False)
    d = torch.ones_like(product)
    for calls in (1, 2, 3):
        public(a, sfa, b, sfb, d)
        assert torch.allclose(d, 1 + calls * product, rtol=1e-5, atol=1e-4)
    d.fill_(torch.nan)
    g.wgrad_gemm_fp8_fp8_fp32_nt((a, sfa), (b, sfb), d, accumulate=False)
    assert torch.equal(d, product)


def test_operands_of_the_transposing_cast() -> None:
    """From activations and gradients of a layer to its weight's gradient, against FP32."""
    tokens, rows, columns = 1040, 264, 520
    generator = torch.Generator("cuda").manual_seed(0)
    dy = torch.randn(tokens, rows, device="cuda", generator=generator, dtype=torch.bfloat16)
    x = torch.randn(tokens, columns, device="cuda", generator=generator, dtype=torch.bfloat16)
    pairs = []
    for operand in (dy, x):
        cast = cast_to_fp8(operand, "token", direction="transposed")
        pairs.append((cast.values_t, cast.scales_t))
    d = torch.zeros(rows, columns, device="cuda")
    g.wgrad_gemm_fp8_fp8_fp32_nt(pairs[0], pairs[1], d)  # type: ignore[arg-type]  # both are there
    assert g.last_path() == "kernel"
    wide = [q.float() * s.repeat_interleave(128, 1)[:, :tokens] for q, s in pairs]  # type: ignore[union-attr]
    right = wide[0].double() @ wide[1].double().T
    assert float((d - right).norm() / right.norm()) < MAX_FINE_ERROR
    assert float((d - dy.float().T @ x.float()).norm() / right.norm()) < 0.06  # E4M3's own error


def groupings() -> Iterator[Sequence[int]]:
    """K blocks of 128 groups."""
    yield [0] * 127 + [1]
    yield [1] + [0] * 127
    yield [1] * 128
    yield [0, 9] * 64
    yield [i % 5 for i in range(128)]
    yield [0] * 64 + [40] + [0] * 63
    yield [i // 16 for i in range(128)]  # rising: the order of a window is turned round


@pytest.mark.parametrize("accumulate", [True, False])
def test_many_groups(accumulate: bool) -> None:
    """128 of them, and 150, more than go with a launch."""
    case = KGroupedCase(GemmProblem.of("k_grouped", 40, 136, 128, groups=128))
    case.problem = replace(case.problem, accumulate=accumulate)
    many = [*groupings(), [i % 4 for i in range(150)]]
    case.runs = [
        case.run(f"no. {i}", [128 * blocks for blocks in sizes], 40, 136)
        for i, sizes in enumerate(many)
    ]
    runs = [(run, major) for run in case.runs for major in (False, True)]
    check_k_grouped(public_groups(accumulate), case, runs)


@pytest.mark.parametrize("shape", [(1408, 1408, (384, 256)), (192, 3072, (128, 256))])
def test_clusters_do_not_straddle_groups(
    shape: tuple[int, int, tuple[int, ...]], kernels: Kernels, device: Device
) -> None:
    """An odd number of tiles a group: others hung here, or took a neighbour's operands."""
    m, n, ks = shape
    problem = GemmProblem.of("k_grouped", m, n, 384, groups=2)
    case = KGroupedCase(problem)
    case.runs = [case.run("odd", ks, m, n)]
    configs = [
        replace(tile, cluster_m=cluster_m, cluster_n=3 - cluster_m, d_staging=staging)
        for cluster_m in (1, 2)
        for tile in (GemmConfig(), GemmConfig(block_m=192, block_n=96, num_math_warpgroups=3))
        for staging in ("own", "direct")
    ]
    kernels.prefetch((problem, config) for config in configs)
    for config in configs:
        assert why_invalid(problem, config, device) is None
        launch = launch_of(kernels.get(problem, config))
        check_k_grouped(launch, case, [(run, False) for run in case.runs])


def test_fewer_tiles_than_sms_over_and_over() -> None:
    """128 groups of which few have columns, 50 launches: the same bits each time, right ones."""
    case = KGroupedCase(GemmProblem.of("k_grouped", 16, 136, 128, groups=128))
    run = case.run("few", [1152 if i % 37 == 0 else 0 for i in range(128)], 16, 136)
    tensors, ks = (*run.inputs(), case.empty(run)), run.ks_on_device()
    results = []
    for _ in range(50):
        tensors[4].fill_(torch.nan)
        public_groups(accumulate=False)(tensors, ks)
        results.append(tensors[4].clone())
    assert all(torch.equal(result, results[0]) for result in results)
    assert float(run.errors(results[0]).amax()) < MAX_FINE_ERROR


def test_flat_operands() -> None:
    """Each group's matrices one after another, scales either way round."""
    case = groups_of(GROUPS)
    run = case.run("flat", [384, 0, 128, 1280, 0, 256], 136, 264, behind=0)
    a, sfa, b, sfb = run.inputs()
    flat = []
    for x in (a, b):
        parts = torch.split(x.view(torch.uint8), list(run.ks), dim=1)
        flat.append(torch.cat([part.flatten() for part in parts]).view(x.dtype))
    right = torch.zeros(run.shape, device="cuda")
    g.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt((a, sfa), (b, sfb), right, run.ks, accumulate=False)
    assert float(run.errors(right).amax()) < MAX_FINE_ERROR
    for scales in ((sfa, sfb), (sfa.t().contiguous(), sfb.t().contiguous())):
        d = torch.ones(run.shape, device="cuda")
        pairs = (flat[0], scales[0]), (flat[1], scales[1])
        for _ in range(3):
            g.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(*pairs, d, list(run.ks))
            assert g.last_path() == "kernel"
        assert torch.allclose(d, 1 + 3 * right, rtol=1e-5, atol=1e-4)
        assert bool((d[1] == 1).all())


@pytest.mark.parametrize("accumulate", [True, False])
def test_graphs_follow_the_device(accumulate: bool) -> None:
    """A captured call reads ks at each replay; neither capture nor call waits for the device."""
    case = groups_of(GROUPS)
    run = case.run("graph", [256] * 4, 136, 264, behind=0)
    d, ks = torch.zeros(run.shape, device="cuda"), run.ks_on_device()
    tensors = (*run.inputs(), d)
    launch = public_groups(accumulate)
    launch(tensors, ks)
    previous = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launch(tensors, ks)
        launch(tensors, run.ks)
    finally:
        torch.cuda.set_sync_debug_mode(previous)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(tensors, ks)
    for blocks in ([2, 2, 2, 2], [0, 8, 0, 0], [0, 0, 0, 0], [1, 0, 4, 3]):
        columns = [128 * number for number in blocks]
        expected = torch.zeros(run.shape, device="cuda")
        g.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(
            (tensors[0], tensors[1]), (tensors[2], tensors[3]), expected, ks.new_tensor(columns)
        )
        d.fill_(7.0)
        ks.copy_(torch.tensor(columns))
        graph.replay()
        wanted = expected + 7 * accumulate
        assert torch.allclose(d, wanted, rtol=1e-5, atol=1e-4)
        empty = [i for i, number in enumerate(blocks) if not number]
        assert bool((d[empty] == 7 * accumulate).all())


def test_senseless_ks_write_nothing_else() -> None:
    """Without KGEN_CHECK nobody looks: results are wrong, but the kernel ends and keeps to D."""
    case = groups_of(GROUPS)
    run = case.run("senseless", [256] * 5, 136, 264)
    for values in (
        [-128, 256, 128, 0, 128],
        [2**31 - 1] * 5,
        [1, 127, 129, 255, 4000],
        [10**6] * 5,
    ):
        ks = torch.tensor(values, dtype=torch.int32, device="cuda")
        d = case.poisoned(run)
        d.copy_(held_before(d))
        public_groups()((*run.inputs(), d), ks)
        assert int(case.output.num_changed()) == d.numel()


def test_values_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    run = groups_of(GROUPS).run("checked", [256] * 3, 136, 264, behind=0)
    tensors = (*run.inputs(), torch.zeros(run.shape, device="cuda"))
    monkeypatch.setenv("KGEN_CHECK", "1")
    wgrad.forget()
    try:
        public_groups()(tensors, run.ks_on_device())
        for values, words in (
            ([128, 100, 0], r"ks\[1\] is 100"),
            ([512, 512, 0], "add up to 1024"),
        ):
            ks = torch.tensor(values, dtype=torch.int32, device="cuda")
            with pytest.raises(UnsupportedInput, match=words):
                public_groups()(tensors, ks)
    finally:
        monkeypatch.undo()
        wgrad.forget()


def test_memory_beyond_two_to_the_31() -> None:
    """A of 2.3 G elements, and D of 2.2 G elements, at their far ends."""
    e4m3 = torch.float8_e4m3fn
    m, n, k = 70_000, 64, 32768
    a = torch.zeros(m, k, dtype=torch.uint8, device="cuda")
    a[-3:] = 0x38  # one
    b = torch.full((n, k), 0x38, dtype=torch.uint8, device="cuda")
    sfa = g.get_col_major_tma_aligned_tensor(torch.ones(m, k // 128, device="cuda"))
    sfb = g.get_col_major_tma_aligned_tensor(torch.ones(n, k // 128, device="cuda"))
    d = torch.ones(m, n, device="cuda")
    public(a.view(e4m3), sfa, b.view(e4m3), sfb, d)
    assert bool((d[:-3] == 1).all())
    assert bool((d[-3:] == k + 1).all())
    del a, sfa, d
    groups, m, n = 130, 4096, 4096
    a = torch.full((m, 128), 0x38, dtype=torch.uint8, device="cuda")
    b = torch.full((n, 128), 0x38, dtype=torch.uint8, device="cuda")
    ones = g.get_col_major_tma_aligned_tensor(torch.ones(m, 1, device="cuda"))
    d = torch.full((groups, m, n), 3.0, device="cuda")
    ks = [0] * (groups - 1) + [128]
    pairs = (a.view(e4m3), ones), (b.view(e4m3), ones)
    g.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(*pairs, d, ks)
    assert bool((d[:-1] == 3).all())
    assert bool((d[-1] == 131).all())
    g.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(*pairs, d, ks, accumulate=False)
    assert bool((d[:-1] == 0).all())
    assert bool((d[-1] == 128).all())


@pytest.mark.parametrize("grouped", [False, True])
def test_compiled_whole(grouped: bool) -> None:
    run = groups_of(GROUPS).run("compiled", [256, 128], 136, 264, behind=0)
    d = torch.zeros(run.shape if grouped else run.shape[1:], device="cuda")

    def step(*tensors: Any) -> torch.Tensor:
        a, sfa, b, sfb, d, ks = tensors
        if grouped:
            g.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt((a, sfa), (b, sfb), d, ks)
        else:
            g.wgrad_gemm_fp8_fp8_fp32_nt((a, sfa), (b, sfb), d)
        twice: torch.Tensor = d * 2
        return twice

    tensors = (*run.inputs(), d, run.ks_on_device())
    found: torch.Tensor = torch.compile(step, fullgraph=True)(*tensors)
    expected = torch.zeros_like(d)
    step(*tensors[:4], expected, tensors[5])
    assert torch.equal(found, 2 * expected)
    assert float(expected.abs().amax()) > 1


@pytest.mark.parametrize(
    "problem",
    [
        GemmProblem.of("wgrad", 2048, 2112, 1024),
        GemmProblem.of("k_grouped", 1024, 512, 512, groups=4),
    ],
    ids=str,
)
def test_the_search_verifies_and_times_them(
    problem: GemmProblem, device: Device, tmp_path: Path
) -> None:
    builder = create(Settings(tmp_path), driver.driver_version())
    cubin = builder.build(problem, default_config(problem, device))
    body = GpuBody(torch.cuda.current_device(), device)
    body.open(problem)
    assert 0 < body.verify(cubin) < MAX_FINE_ERROR
    (measured,) = body.time((cubin.key,), "cold")
    assert measured.median_us > 3


def test_bench() -> None:
    problems = [
        GemmProblem.of("wgrad", 2048, 2112, 1024),
        GemmProblem.of("wgrad", 2048, 2112, 1024, recipe="block"),
        GemmProblem.of("k_grouped", 1024, 512, 512, groups=4),
    ]
    report = run_bench(problems, Settings.from_env(), against=["torch"], floor=True)
    assert not report.failed, [row.notes for row in report.rows]
    assert all("kgen" in row.timings for row in report.rows)
    assert "takes one product" in report.rows[2].notes["torch vector"]
