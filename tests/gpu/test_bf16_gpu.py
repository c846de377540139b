"""BF16 operands: kernels of every kind of tile, and public calls, against the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kgen.runtime.gemm as g
from kgen.bench.run import run_bench
from kgen.cases import Case
from kgen.config import GemmConfig
from kgen.device import Device
from kgen.errors import KgenError, UnsupportedInput, WrongResult
from kgen.heuristic import default_config
from kgen.problem import BF16_FIELDS, GemmProblem, ceil_div
from kgen.reference import gemm_reference
from kgen.runtime import driver
from kgen.runtime.lookup import default_for
from kgen.runtime.operands import NO_SCALES
from kgen.search.builder import create
from kgen.search.gpu_body import GpuBody
from kgen.settings import Settings
from kgen.validity import why_invalid
from kgen.verify import limit_for, verify
from tests.gpu.bed import WIDE, Batch, Kernels, covering, report

PLAIN = GemmProblem("dense", m=257, n=2112, k=1160, **BF16_FIELDS)
#: Every branch of the templates, and the largest tiles: two waves, three warpgroups, the widest B.
CONFIGS = (
    GemmConfig(),
    GemmConfig(block_n=152, cluster_m=2),
    GemmConfig(block_n=112, cluster_n=2, b_eviction="evict_first"),
    GemmConfig(block_m=256, num_stages=2),
    GemmConfig(block_m=256, block_n=144, num_stages=2, cluster_m=2, raster_along="n"),
    GemmConfig(block_m=192, block_n=112, num_stages=3, num_math_warpgroups=3),
    GemmConfig(block_m=192, block_n=200, num_stages=2, num_math_warpgroups=3),
    GemmConfig(block_n=256, num_stages=3),
    GemmConfig(block_n=256, num_stages=2, cluster_n=2),
    GemmConfig(block_m=16, block_n=64, num_stages=8, num_math_warpgroups=1, split_k=4),
    GemmConfig(block_m=64, block_n=24, num_stages=2, num_math_warpgroups=1),
    GemmConfig(block_m=64, block_n=256, num_stages=4, num_math_warpgroups=1, split_k=2),
    GemmConfig(block_m=128, block_n=88, num_stages=4, split_k=8),
)
MS = (1, 2, 7, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 192, 255, 256, 1024, 1025, 1040)
NS = (8, 64, 576, 2112, 4096)
#: One WGMMA in half, one K block and a bit, odd numbers of 16 bytes, many passes of the ring.
KS = (8, 72, 128, 1000, 1160, 7168)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("d_dtype", ["bf16", "fp16", "fp32"])
def test_verified(d_dtype: str, bias: bool, kernels: Kernels, device: Device) -> None:
    """Each branch passes verification: random at M, M-1, M+1, exact, growth up to K = 65536."""
    problem = replace(PLAIN, bias=bias, d_dtype=d_dtype)
    valid = [c for c in CONFIGS if why_invalid(problem, c, device) is None]
    assert len(valid) > 8
    kernels.prefetch((problem, config) for config in valid)
    case = Case(problem)
    failures = []
    for config in valid:
        try:
            verified = verify(kernels.get(problem, config), case, any_nk=True)
            assert verified.growth > 0
            assert verified.exact_passes == 4
        except KgenError as error:
            failures.append(f"[{config}] {type(error).__name__}: {error}")
    assert not failures, report(failures)


def test_baked_sizes(kernels: Kernels) -> None:
    """N and K as constants, K in bytes."""
    config = GemmConfig(block_n=192, baked_dims="nk")
    verify(kernels.get(PLAIN, config), Case(PLAIN))


def test_every_width_of_a_tile(kernels: Kernels) -> None:
    """block_n from 16 to 256, in each way that D is stored."""
    tall = GemmConfig(block_m=64, num_stages=3, num_math_warpgroups=1)
    configs = [replace(tall, block_n=n) for n in range(16, 257, 8)]
    kernels.prefetch((PLAIN, config) for config in configs)
    batch = Batch(Case(GemmProblem("dense", 129, 2112, 1000, **BF16_FIELDS)))
    for config in configs:
        for m in (1, 65, 129):
            batch.run(f"m={m} [{config}]", kernels.get(PLAIN, config), m)
    failures = batch.failures()
    assert not failures, report(failures)


def test_pairs_of_choices(kernels: Kernels, device: Device) -> None:
    """Every pair of traits that can be valid, on sizes far from one another."""
    wide = replace(WIDE, **BF16_FIELDS)
    configs = covering(device, wide)
    kernels.prefetch((wide, config) for config in configs)
    failures = []
    for n, k in ((8, 8), (392, 72), (2112, 584), (200, 7168)):
        case = Case(GemmProblem("dense", 1025, n, k, **BF16_FIELDS))
        batch = Batch(case)
        for config in configs:
            if config.baked_dims == "none" and config.split_k <= case.problem.num_k_blocks:
                for m in (1, 64, 130, 1025):
                    name = f"m={m} n={n} k={k} [{config}]"
                    batch.run(name, kernels.get(wide, config), m)
        failures += batch.failures()
    assert not failures, report(failures)


@pytest.mark.parametrize("n", NS)
def test_defaults_on_a_grid(n: int, kernels: Kernels, device: Device) -> None:
    """Every K and M of the grid, odd ones included, with a bias."""
    failures = []
    for k in KS:
        wide = GemmProblem("dense", max(MS), n, k, bias=True, **BF16_FIELDS)
        case = Case(wide)
        chosen = {m: default_for(wide.with_m(m), device) for m in MS}
        kernels.prefetch((wide.with_m(m), config) for m, config in chosen.items())
        batch = Batch(case, limit=limit_for(case))
        for m, config in chosen.items():
            kernel = kernels.get(wide.with_m(m), config)
            batch.run(f"n={n} k={k} m={m} [{config}]", kernel, m)
        failures += batch.failures()
    assert not failures, report(failures)


@pytest.mark.parametrize("num_sms", [1, 7, 66])
def test_many_tiles_a_cta(num_sms: int, kernels: Kernels, device: Device) -> None:
    """A CTA goes on to its next tile with a bias of its own, however few CTAs there are."""
    problem = GemmProblem("dense", 1025, 2112, 520, bias=True, **BF16_FIELDS)
    batch = Batch(Case(problem))
    kernels.prefetch((problem, config) for config in CONFIGS)
    for config in CONFIGS:
        if why_invalid(problem, config, device) is None and config.cluster_size <= num_sms:
            kernel = kernels.get(problem, config)

            def launch(*tensors: torch.Tensor, kernel: Any = kernel) -> None:
                kernel(*tensors, num_sms=num_sms)

            batch.run(f"{num_sms} SMs [{config}]", launch, 1025)
    failures = batch.failures()
    assert not failures, report(failures)


def test_same_bits_every_time(kernels: Kernels) -> None:
    """Nothing depends on timing."""
    case = Case(PLAIN)
    for config in CONFIGS:
        kernel = kernels.get(PLAIN, config)
        first, second = (case.output.poisoned(257).clone() for _ in range(2))
        for d in (first, second):
            kernel(*case.inputs(257), d)
        assert torch.equal(first, second), str(config)


def test_real_kernels_are_seen_to_fail(kernels: Kernels) -> None:
    """Fed another row of A, another column's weights, 16 columns of K less, a row less."""
    case = Case(PLAIN)
    kernel = kernels.get(PLAIN, GemmConfig())

    def rolled(index: int) -> Any:
        def launch(*tensors: torch.Tensor) -> None:
            given = [*tensors]
            given[index] = given[index].roll(1, 0).contiguous()
            kernel(*given)

        return launch

    def short(*tensors: torch.Tensor) -> None:
        a, sfa, b, sfb, d = tensors
        kernel(a[:, :-16], sfa, b[:, :-16], sfb, d)

    def one_row_less(*tensors: torch.Tensor) -> None:
        a, sfa, b, sfb, d = tensors
        kernel(a[:-1], sfa, b, sfb, d[:-1])

    for wrong in (rolled(0), rolled(2), short, one_row_less):
        with pytest.raises(WrongResult):
            verify(wrong, case)


def test_the_search_verifies_and_times_them(device: Device, tmp_path: Path) -> None:
    builder = create(Settings(tmp_path), driver.driver_version())
    for kind, groups in (("dense", 1), ("contiguous", 8), ("masked", 8)):
        problem = GemmProblem(kind, 128, 2112, 1024, groups=groups, **BF16_FIELDS)
        cubin = builder.build(problem, default_config(problem, device))
        body = GpuBody(torch.cuda.current_device(), device)
        body.open(problem)
        assert 0 < body.verify(cubin) < 4e-3
        (measured,) = body.time((cubin.key,), "cold")
        assert measured.median_us > 2


def test_bench() -> None:
    """torch's own calls are peers that pass the check, and the floor has a rate of its own."""
    problems = [
        GemmProblem("dense", 128, 2112, 1024, **BF16_FIELDS),
        GemmProblem("dense", 128, 2112, 1024, bias=True, **BF16_FIELDS),
        GemmProblem("contiguous", 128, 2112, 1024, groups=8, **BF16_FIELDS),
        GemmProblem("masked", 128, 2112, 1024, groups=8, **BF16_FIELDS),
    ]
    found = run_bench(problems, Settings.from_env(), against=["torch"], floor=True)
    assert not found.failed, [row.notes for row in found.rows]
    peers = ("torch matmul", "torch matmul", "torch grouped_mm", "torch bmm")
    for row, peer in zip(found.rows, peers, strict=True):
        assert {"kgen", peer} <= set(row.timings), row.notes
        assert row.floor is not None
    assert found.floor is not None
    assert 500 < found.floor.bf16_tflops < 0.7 * found.floor.tflops


# ---------------------------------------------------------------------------- public calls


@pytest.fixture
def _no_fallback() -> Iterator[None]:
    g.reset_stats()
    yield
    assert g.stats()["fallbacks"] == {}


def matrices(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(m + n + k)
    a, b = (torch.randn(rows, k, device="cuda", generator=generator) for rows in (m, n))
    return a.bfloat16(), b.bfloat16()


def error_of(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: Any = None) -> float:
    exact = gemm_reference(a, NO_SCALES, b, NO_SCALES, bias=bias, recipe="none")
    return float((out.float() - exact).norm() / exact.norm())


@pytest.mark.usefixtures("_no_fallback")
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 576, 512), (83, 2112, 1160), (4097, 576, 72), (130, 262, 100), (5, 7, 9)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_public_calls(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """With and without a bias, sizes that need copies among them; twice, the second as prepared."""
    a, b = matrices(m, n, k)
    for bias in (None, torch.randn(n, device="cuda", dtype=dtype)):
        out = torch.full((m, n), torch.nan, device="cuda", dtype=dtype)
        for _ in range(2):
            out.fill_(torch.nan)
            g.bf16_gemm_nt(a, b, out, bias=bias)
            assert g.last_path() == ("kernel with copies" if k % 8 or n % 8 else "kernel")
            assert error_of(out, a, b, bias) < (4e-3 if dtype == torch.bfloat16 else 1e-3)
        again = torch.empty_like(out)
        torch.ops.kgen.bf16_gemm_nt(a, b, again, bias=bias)
        assert torch.equal(again, out)


@pytest.mark.usefixtures("_no_fallback")
def test_matrices_that_are_views() -> None:
    """Pitches are read in place; odd addresses, transposed and strided matrices by copies."""
    a, b = matrices(70, 136, 264)
    wide = torch.randn(70, 512, device="cuda").bfloat16()
    out = torch.empty(70, 512, device="cuda", dtype=torch.bfloat16)
    ways: list[tuple[torch.Tensor, torch.Tensor, str]] = [
        (wide[:, 8:272], out[:, :136], "kernel"),
        (wide[:, 1:265], out[:, :136], "kernel with copies"),
        (a.t().contiguous().t(), out[:, 8:144], "kernel with copies"),
        (a, out[:, 3:139], "kernel with copies"),
        (a, torch.empty(136, 70, device="cuda", dtype=torch.bfloat16).t(), "kernel with copies"),
    ]
    for own, into, path in ways:
        into.fill_(torch.nan)
        g.bf16_gemm_nt(own, b, into)
        assert g.last_path() == path
        assert error_of(into, own, b) < 4e-3


@pytest.mark.usefixtures("_no_fallback")
def test_a_captured_call_reads_its_operands_anew() -> None:
    """warm_up makes what the call needs: nothing is built or loaded inside the capture."""
    a, b = matrices(48, 576, 520)
    bias = torch.zeros(576, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(48, 576, device="cuda", dtype=torch.bfloat16)
    g.warm_up(48, 576, 520, recipe="none", bias=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        g.bf16_gemm_nt(a, b, out, bias=bias)
    a.mul_(2)
    bias.fill_(3)
    graph.replay()
    assert error_of(out, a, b, bias) < 4e-3


@pytest.mark.usefixtures("_no_fallback")
def test_a_budget_of_sms() -> None:
    a, b = matrices(1025, 2112, 520)
    whole, part = (torch.empty(1025, 2112, device="cuda") for _ in range(2))
    g.bf16_gemm_nt(a, b, whole)
    g.set_num_sms(20)
    try:
        g.bf16_gemm_nt(a, b, part)
    finally:
        g.set_num_sms(0)
    for out in (whole, part):
        assert error_of(out, a, b) < 5e-5


def test_memory_beyond_two_to_the_31() -> None:
    """A of 2.4 G elements and D of 2.4 G, at their far ends."""
    m, k = 300_000, 8192
    a = torch.zeros(m, k, dtype=torch.bfloat16, device="cuda")
    a[-3:] = 1
    b = torch.ones(8, k, dtype=torch.bfloat16, device="cuda")
    out = torch.full((m, 8), 7.0, dtype=torch.float32, device="cuda")
    g.bf16_gemm_nt(a, b, out)
    assert bool((out[:-3] == 0).all())
    assert bool((out[-3:] == k).all())
    del a
    b = torch.ones(k, 8, dtype=torch.bfloat16, device="cuda")
    a = torch.zeros(m, 8, dtype=torch.bfloat16, device="cuda")
    a[-3:] = 1
    wide = torch.full((m, k), 7.0, dtype=torch.bfloat16, device="cuda")
    g.bf16_gemm_nt(a, b, wide)
    assert bool((wide[-4] == 0).all())
    assert bool((wide[-3:] == 8).all())


def test_compiled_whole() -> None:
    a, b = matrices(70, 136, 264)
    out = torch.empty(70, 136, dtype=torch.bfloat16, device="cuda")

    def step(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        g.bf16_gemm_nt(a, b, out)
        twice: torch.Tensor = out * 2
        return twice

    found = torch.compile(step, fullgraph=True)(a, b, out)
    assert error_of(found / 2, a, b) < 4e-3
    with pytest.raises(UnsupportedInput, match="expected bfloat16"):
        g.bf16_gemm_nt(a.half(), b, out)


def test_torch_agrees_about_large_sizes(kernels: Kernels, device: Device) -> None:
    """M = 4096, the tiles that such sizes get, against torch.matmul in FP32 sums."""
    failures: Sequence[str] = []
    for n, k in ((576, 7168), (7168, 2048), (4096, 512)):
        problem = GemmProblem("dense", 4096, n, k, **BF16_FIELDS)
        config = default_config(problem, device)
        a, b = matrices(4096, n, k)
        out = torch.full((4096, n), torch.nan, device="cuda", dtype=torch.bfloat16)
        kernels.get(problem, config)(a, NO_SCALES, b, NO_SCALES, out)
        exact = (a @ b.t()).float()
        for row in range(ceil_div(4096, 128)):
            part = slice(128 * row, 128 * (row + 1))
            error = float((out[part] - exact[part]).norm() / exact[part].norm())
            if not error < 6e-3:
                failures = [*failures, f"n={n} k={k} rows {part.start}: {error:.1e} [{config}]"]
    assert not failures, report(failures)
