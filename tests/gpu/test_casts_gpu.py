"""Casts on a GPU give the CPU reference's bits, write nothing else, and go into CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kgen.runtime.casts as c
import kgen.runtime.gemm as g
from kgen import quant
from kgen.errors import LaunchError, UnsupportedInput
from kgen.reference import gemm_reference
from kgen.runtime.cast_options import CastOptions
from kgen.runtime.plain import KERNELS
from tests.cast_checks import (
    BF16,
    DIRECTIONS,
    E4M3,
    E5M2,
    FP16,
    FP32,
    RECIPES,
    SHAPES,
    assert_same,
    awkward,
    bits,
    check_cast,
    check_guards,
    guarded,
    random,
    written_outside,
)
from tests.gpu.bed import keep_busy, new_stream


@pytest.fixture(autouse=True)
def _kernels_only() -> Iterator[None]:
    yield
    assert KERNELS.failures == []


# ---------------------------------------------------------------------------------- bits


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_bits_of_the_reference(recipe: str, direction: str, dtype: torch.dtype) -> None:
    """Ordinary and awkward blocks, whole and partial, with amax."""
    for m, k in (*SHAPES, (1040, 2112), (257, 7168)):
        for x in (random(m, k, dtype, "cuda"), awkward(m, k, dtype, "cuda")):
            check_cast(x, CastOptions(recipe, direction, amax=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_other_choices(recipe: str) -> None:
    """Powers of two, row-major scales, E5M2, no amax; all together and alone."""
    x = awkward(144, 1032, BF16, "cuda")
    for direction in DIRECTIONS:
        check_cast(x, CastOptions(recipe, direction))
        check_cast(x, CastOptions(recipe, direction, pow2_scales=True))
        check_cast(x, CastOptions(recipe, direction, row_major_scales=True))
        check_cast(x, CastOptions(recipe, direction, dtype=E5M2))
        check_cast(x, CastOptions(recipe, direction, True, True, True, E5M2))


@pytest.mark.parametrize("recipe", ["token", "row", "block"])
def test_every_bf16_in_blocks_of_every_scale(recipe: str) -> None:
    """All 65536 numbers, in rows that numbers of any magnitude scale."""
    generator = torch.Generator().manual_seed(0)
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)
    x = x.view(64, 1024).repeat(32, 1)
    finite = x.float().abs() < 2.0 ** torch.randint(-126, 128, (2048, 1), generator=generator)
    x = torch.where(finite, x, 0.0)
    check_cast(x.to("cuda"), CastOptions(recipe))


def test_rows_longer_than_a_cta_holds() -> None:
    for k in (8192, 8200, 16384, 40000):
        check_cast(awkward(16, k, BF16, "cuda"), CastOptions("row", amax=True))


def test_strided_rows() -> None:
    base = random(400, 6000, BF16, "cuda")
    views = (base[:, 8:2720], base[::2, 3:1310], base[:50].t(), base[:1].expand(70, 6000))
    for x in views:
        for recipe in RECIPES:
            check_cast(x, CastOptions(recipe, "both"))


@pytest.mark.parametrize("shape", [(0, 256), (5, 0), (0, 0)])
def test_empty(shape: tuple[int, int]) -> None:
    for recipe in RECIPES:
        check_cast(torch.empty(shape, device="cuda"), CastOptions(recipe, "both", amax=True))


def test_more_than_two_to_the_31_elements() -> None:
    """Offsets do not wrap, in rows or transposed."""
    m, k = 300_032, 7168
    x = torch.zeros(m, k, dtype=BF16, device="cuda")
    last = random(128, k, BF16, "cuda")
    x[-128:] = last
    result = c.cast_to_fp8(x, "token", direction="both")
    expected = CastOptions("token", "both").reference(last)
    values, scales, values_t, scales_t, _ = result
    assert values is not None
    assert scales is not None
    assert values_t is not None
    assert scales_t is not None
    found = (values[-128:], scales[-128:].contiguous(), values_t[:, -128:], scales_t[:, -1:])
    for one, other in zip(found, expected, strict=False):
        assert other is not None
        assert torch.equal(bits(one), bits(other))
    assert not bool(bits(values[:-128]).any())


# -------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_is_written_beside_the_results(recipe: str) -> None:
    for m, k in (*SHAPES, (1040, 2112)):
        for direction in DIRECTIONS:
            check_guards(random(m, k, BF16, "cuda"), CastOptions(recipe, direction))


def swiglu_out(groups: int, m: int, h: int) -> Any:
    """Guarded values and scales [G, m, h], and their buffers."""
    values = torch.empty(groups, m, h, dtype=E4M3, device="cuda")
    scales = torch.empty(groups, m, -(-h // 128), device="cuda")
    pairs = guarded(values), guarded(quant.empty_col_major(scales))
    for _, view in pairs:
        (view if view.dtype == FP32 else view.view(torch.uint8)).fill_(7)
    return pairs


@pytest.mark.parametrize(
    ("groups", "m", "h"), [(3, 70, 256), (40, 33, 136), (2, 5, 100), (128, 256, 2048), (1, 1, 8)]
)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_masked_swiglu(groups: int, m: int, h: int, dtype: torch.dtype) -> None:
    """Close to the reference; rows past a group's count, and all around, stay as they were."""
    x = random(groups * m, 2 * h, dtype, "cuda").view(groups, m, 2 * h)
    counts = torch.arange(-1, groups - 1, dtype=torch.int32, device="cuda") * (m + 9) // groups
    pairs = swiglu_out(groups, m, h)
    values, scales = (view for _, view in pairs)
    c.swiglu_per_token_cast_to_fp8(x, counts, out=(values, scales))
    for i, count in enumerate(counts.clamp(0, m).tolist()):
        assert_close_swiglu(x[i, :count], values[i, :count], scales[i, :count])
        assert bool((scales[i, count:] == 7).all())
        assert bool((bits(values[i, count:]) == 7).all())
    for buffer, view in pairs:
        assert written_outside(buffer, view) == 0


def assert_close_swiglu(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Scales within the error of e^x, values within one step of FP8, nearly all equal."""
    q, s = quant.cast_to_fp8(quant.swiglu(x), "token")
    torch.testing.assert_close(scales.contiguous(), s, rtol=2e-6, atol=0)
    steps = (bits(values).int() - bits(q).int()).abs()
    assert not steps.numel() or int(steps.max()) <= 1
    assert int((steps > 0).sum()) <= steps.numel() // 500 + 1


@pytest.mark.parametrize(("m", "h"), [(1, 8), (130, 272), (33, 100), (4096, 2048)])
def test_swiglu(m: int, h: int) -> None:
    for dtype in (BF16, FP16, FP32):
        x = random(m, 2 * h, dtype, "cuda") * 4
        assert_close_swiglu(x, *c.swiglu_per_token_cast_to_fp8(x))


def test_swiglu_of_extremes() -> None:
    """Gates whose e^x overflows or vanishes; what is not finite spoils nobody else."""
    gate = torch.tensor([-200.0, -88.0, 88.0, 200.0, 0.0, -0.0, float("inf"), float("nan")])
    x = torch.cat([gate.repeat(32), torch.ones(256)]).repeat(4, 1).cuda()
    assert_close_swiglu(x, *c.swiglu_per_token_cast_to_fp8(x))


def test_all_groups_empty_but_one() -> None:
    x = random(64 * 128, 512, BF16, "cuda").view(64, 128, 512)
    counts = torch.zeros(64, dtype=torch.int32, device="cuda")
    counts[41] = 77
    values, scales = c.swiglu_per_token_cast_to_fp8(x, counts)
    assert_close_swiglu(x[41, :77], values[41, :77], scales[41, :77])


# ------------------------------------------------------------------------ the public calls


@pytest.mark.parametrize("m", [1, 64, 1000])
def test_gemm_of_casts(m: int) -> None:
    """The names in kgen.runtime.gemm cast by kernel, in the layout that the GEMM reads."""
    n, k = 576, 1152
    x, w = random(m, k, BF16, "cuda"), random(n, k, BF16, "cuda", seed=1)
    lhs, rhs = g.per_token_cast_to_fp8(x), g.per_block_cast_to_fp8(w)
    assert g.get_col_major_tma_aligned_tensor(lhs[1]) is lhs[1]
    expected = gemm_reference(*lhs, *rhs, FP32)
    torch.testing.assert_close(g.mm_fp8_nt(lhs, rhs, FP32), expected, rtol=2e-3, atol=0.5)
    relative = (g.mm_fp8_nt(lhs, rhs, FP32) - x.float() @ w.float().t()).norm() / expected.norm()
    assert float(relative) < 0.05


def test_in_torch_compile() -> None:
    def layer(x: torch.Tensor) -> Any:
        result = c.cast_to_fp8(x * 0.5, "channel", direction="both", amax=True)
        return [t for t in result if t is not None]

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for m in (20, 144):
        x = random(m, 272, BF16, "cuda")
        assert_same(compiled(x), layer(x))


def test_current_stream() -> None:
    x = torch.zeros(512, 1024, dtype=BF16, device="cuda")
    stream = new_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        keep_busy(3_000_000)
        x.fill_(2.0)
        values, scales = c.per_token_cast_to_fp8(x)
    stream.synchronize()
    assert bool((values.float() == 448).all())
    assert bool((scales == scales[0, 0]).all())
    assert float(scales[0, 0]) == float(torch.tensor(2.0) / torch.tensor(448.0))


def test_cuda_graph() -> None:
    """Replays read what lies there then; a kernel not loaded yet is refused by name."""
    x = random(144, 1032, BF16, "cuda")
    grouped = random(4 * 64, 512, BF16, "cuda").view(4, 64, 512)
    counts = torch.tensor([3, 64, 0, 9], dtype=torch.int32, device="cuda")
    options = CastOptions("tensor", "both", amax=True)
    c.run_cast(x, options)
    c.swiglu_per_token_cast_to_fp8(grouped, counts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = c.run_cast(x, options)
        values, scales = c.swiglu_per_token_cast_to_fp8(grouped, counts)
    for seed in (1, 2):
        x.copy_(random(144, 1032, BF16, "cuda", seed) * seed)
        counts.copy_(torch.tensor([seed, 0, 64, 1], dtype=torch.int32))
        graph.replay()
        assert_same(result, options.reference(x))
        for i, count in enumerate(counts.tolist()):
            assert_close_swiglu(grouped[i, :count], values[i, :count], scales[i, :count])


def test_capture_before_loading_is_refused() -> None:
    x = random(64, 128, FP16, "cuda")
    KERNELS.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(LaunchError, match="before the capture"):
        c.per_channel_cast_to_fp8(x)
    c.per_channel_cast_to_fp8(x)


def test_errors_name_what_was_given() -> None:
    x = random(8, 256, BF16, "cuda")
    with pytest.raises(UnsupportedInput, match=r"masked_m is torch.int64"):
        c.swiglu_per_token_cast_to_fp8(x[None], torch.zeros(1, dtype=torch.int64, device="cuda"))
    with pytest.raises(UnsupportedInput, match=r"on cpu: expected .* on cuda:0"):
        c.swiglu_per_token_cast_to_fp8(x[None], torch.zeros(1, dtype=torch.int32))
