"""Scales by row and by tensor, E5M2, a bias: kernels and public calls against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import kgen.runtime.gemm as g
from kgen.cases import Case
from kgen.config import GemmConfig
from kgen.device import Device
from kgen.errors import KgenError, WrongResult
from kgen.problem import GemmProblem
from kgen.reference import gemm_reference
from kgen.runtime.lookup import default_for
from kgen.validity import why_invalid
from kgen.verify import limit_for, verify
from tests.gpu.bed import Batch, Kernels, report

PLAIN = GemmProblem("dense", m=257, n=2112, k=1168)
#: (recipe, fast_accum) as fields.
SUMS: tuple[dict[str, Any], ...] = (
    {"recipe": "row", "fast_accum": True},
    {"recipe": "row"},
    {"recipe": "tensor", "fast_accum": True},
    {"recipe": "tensor"},
)
#: Every branch of the templates.
CONFIGS = (
    GemmConfig(),
    GemmConfig(block_n=152, cluster_m=2),
    GemmConfig(block_n=112, num_accumulators=2, cluster_n=2),
    GemmConfig(block_m=256, block_n=120, num_stages=2),
    GemmConfig(block_m=192, block_n=112, num_stages=3, num_math_warpgroups=3),
    GemmConfig(block_m=16, block_n=64, num_stages=8, num_math_warpgroups=1, split_k=4),
    GemmConfig(block_m=64, block_n=24, num_stages=2, num_math_warpgroups=1),
    GemmConfig(block_m=128, block_n=256, num_stages=2),
)
MS = (1, 2, 7, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 192, 255, 256, 1024, 1025, 1040)
NS = (8, 64, 576, 2112, 4096)
KS = (16, 128, 144, 512, 1152, 7168)


@pytest.mark.parametrize("sums", SUMS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("d_dtype", ["bf16", "fp32"])
def test_verified(
    sums: dict[str, Any], bias: bool, d_dtype: str, kernels: Kernels, device: Device
) -> None:
    """Each branch passes verification: random at M, M-1, M+1, exact, growth where it promotes."""
    problem = replace(PLAIN, **sums, bias=bias, d_dtype=d_dtype)
    assert _wrong(problem, kernels, device) == []


@pytest.mark.parametrize("d_dtype", ["bf16", "fp16", "fp32"])
def test_a_bias_with_scales_by_block(d_dtype: str, kernels: Kernels, device: Device) -> None:
    """The present loop with a bias after it."""
    assert _wrong(replace(PLAIN, bias=True, d_dtype=d_dtype), kernels, device) == []


@pytest.mark.parametrize(
    ("a_dtype", "b_dtype"), [("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e5m2",) * 2]
)
@pytest.mark.parametrize("sums", [{}, *SUMS], ids=str)
def test_e5m2(
    a_dtype: str, b_dtype: str, sums: dict[str, Any], kernels: Kernels, device: Device
) -> None:
    """Either operand, or both, under every recipe."""
    problem = replace(PLAIN, **sums, a_dtype=a_dtype, b_dtype=b_dtype, d_dtype="fp16")
    assert _wrong(problem, kernels, device, CONFIGS[:3]) == []


def _wrong(
    problem: GemmProblem,
    kernels: Kernels,
    device: Device,
    configs: tuple[GemmConfig, ...] = CONFIGS,
) -> list[str]:
    valid = [c for c in configs if why_invalid(problem, c, device) is None]
    assert valid
    kernels.prefetch((problem, config) for config in valid)
    case = Case(problem)
    failures = []
    for config in valid:
        try:
            verified = verify(kernels.get(problem, config), case, any_nk=True)
            assert (verified.growth == 0) == problem.fast_accum
        except KgenError as error:
            failures.append(f"[{config}] {type(error).__name__}: {error}")
    return failures


@pytest.mark.parametrize("sums", SUMS, ids=str)
@pytest.mark.parametrize("n", NS)
def test_defaults_on_a_grid(n: int, sums: dict[str, Any], kernels: Kernels, device: Device) -> None:
    """Every K and M of the grid, with a bias, both layouts of the scales by row."""
    failures = []
    for k in KS:
        wide = GemmProblem("dense", max(MS), n, k, bias=True, **sums)
        case = Case(wide)
        chosen = {m: default_for(wide.with_m(m), device) for m in MS}
        kernels.prefetch((wide.with_m(m), config) for m, config in chosen.items())
        batch = Batch(case, limit=limit_for(case))
        for m, config in chosen.items():
            kernel = kernels.get(wide.with_m(m), config)
            batch.run(f"n={n} k={k} m={m} [{config}]", kernel, m)
            if sums["recipe"] == "row":
                batch.run(f"n={n} k={k} m={m} strided [{config}]", kernel, m, row_major=True)
        failures += batch.failures()
    assert not failures, report(failures)


@pytest.mark.parametrize("num_sms", [1, 7, 66])
def test_many_tiles_a_cta(num_sms: int, kernels: Kernels, device: Device) -> None:
    """A CTA's next tile has scales and a bias of its own, however few CTAs there are."""
    problem = GemmProblem("dense", 1025, 2112, 512, recipe="row", fast_accum=True, bias=True)
    batch = Batch(Case(problem), limit=limit_for(Case(problem)))
    kernels.prefetch((problem, config) for config in CONFIGS)
    for config in CONFIGS:
        if why_invalid(problem, config, device) is None and config.cluster_size <= num_sms:
            kernel = kernels.get(problem, config)

            def launch(*tensors: torch.Tensor, kernel: Any = kernel) -> None:
                kernel(*tensors, num_sms=num_sms)

            batch.run(f"{num_sms} SMs [{config}]", launch, 1025)
    failures = batch.failures()
    assert not failures, report(failures)


@pytest.mark.parametrize("sums", SUMS, ids=str)
def test_same_bits_every_time(sums: dict[str, Any], kernels: Kernels, device: Device) -> None:
    """Nothing depends on timing."""
    problem = replace(PLAIN, **sums, bias=True)
    case = Case(problem)
    for config in CONFIGS:
        if why_invalid(problem, config, device) is None:
            kernel = kernels.get(problem, config)
            first, second = (case.output.poisoned(257).clone() for _ in range(2))
            for d in (first, second):
                kernel(*case.inputs(257), d, *case.bias)
            assert torch.equal(first, second), str(config)


def test_real_kernels_are_seen_to_fail(kernels: Kernels) -> None:
    """Fed another row's scales, another channel's, another bias."""
    problem = replace(PLAIN, recipe="row", fast_accum=True, bias=True)
    case = Case(problem)
    kernel = kernels.get(problem, GemmConfig())
    for index in (1, 3, 5):

        def wrong(*tensors: torch.Tensor, index: int = index) -> None:
            given = [*tensors]
            given[index] = given[index].roll(1, 0).contiguous()
            kernel(*given)

        with pytest.raises(WrongResult):
            verify(wrong, case)


# ---------------------------------------------------------------------------- public calls


@pytest.fixture
def _no_fallback() -> Iterator[None]:
    g.reset_stats()
    yield
    assert g.stats()["fallbacks"] == {}


def operands(recipe: str, m: int, n: int, k: int, dtype: torch.dtype) -> Any:
    """Cast on the GPU; A of this type."""
    generator = torch.Generator("cuda").manual_seed(m + n + k)
    x, w = (torch.randn(rows, k, device="cuda", generator=generator) for rows in (m, n))
    if recipe == "row":
        return g.per_row_cast_to_fp8(x, dtype=dtype), g.per_row_cast_to_fp8(w)
    return g.per_tensor_cast_to_fp8(x, dtype=dtype), g.per_tensor_cast_to_fp8(w)


@pytest.mark.usefixtures("_no_fallback")
@pytest.mark.parametrize("recipe", ["row", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 576, 512), (83, 2112, 1152), (130, 262, 100), (5, 7, 9)]
)
def test_public_calls(recipe: str, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    """With and without a bias and fast sums, sizes that need copies; each twice, as prepared."""
    (a, sfa), (b, sfb) = operands(recipe, m, n, k, dtype)
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    shapes = {"sfa": sfa.reshape(-1, 1), "sfb": sfb.reshape(-1, 1)}
    for given in (None, bias):
        exact = gemm_reference(a, shapes["sfa"], b, shapes["sfb"], bias=given, recipe=recipe)
        for fast in (False, True):
            for _ in range(2):
                out = g.mm_fp8_nt((a, sfa), (b, sfb), bias=given, fast_accum=fast)
                assert g.last_path().startswith("kernel")
                error = (out.float() - exact).norm() / exact.norm()
                assert float(error) < 4e-3
    if recipe == "row":
        again = g.mm_fp8_nt((a, sfa[:, 0]), (b, sfb.t()), bias=bias, fast_accum=True)
        assert torch.equal(again, out)
    operator = torch.ops.kgen.mm_fp8_nt(
        a, sfa, b, sfb, torch.bfloat16, bias=bias, recipe=recipe, fast_accum=True
    )
    assert torch.equal(operator, out)


@pytest.mark.usefixtures("_no_fallback")
def test_a_captured_call_reads_scales_and_bias_anew() -> None:
    (a, sfa), (b, sfb) = operands("row", 48, 576, 512, torch.float8_e4m3fn)
    bias = torch.zeros(576, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(48, 576, device="cuda", dtype=torch.bfloat16)
    g.warm_up(48, 576, 512, recipe="row", bias=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        g.gemm_fp8_nt((a, sfa), (b, sfb), out, bias=bias)
    sfa.mul_(2)
    bias.fill_(3)
    graph.replay()
    exact = gemm_reference(a, sfa, b, sfb, bias=bias, recipe="row")
    assert float((out.float() - exact).norm() / exact.norm()) < 4e-3


@pytest.mark.parametrize("recipe", ["row", "tensor"])
@pytest.mark.parametrize("fast_accum", [False, True])
def test_torch_is_a_peer(recipe: str, fast_accum: bool) -> None:
    """torch._scaled_mm computes the same problem, by the bench's own check."""
    from kgen.bench.providers import TorchRecipe

    problem = GemmProblem("dense", 256, 2112, 7168, recipe=recipe, fast_accum=fast_accum)
    ready = TorchRecipe(recipe).ready(Case(problem))
    assert ready.verified.max_tile_error < 5e-2
    ready.call()
