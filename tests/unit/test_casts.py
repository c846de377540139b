"""Casts without a GPU: recipes against the definition, layouts, errors, SwiGLU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kgen.runtime.casts as c
import kgen.runtime.gemm as g
from kgen import quant
from kgen.errors import UnsupportedInput
from kgen.quant import FP8_MAX, MIN_SCALE, RECIPES
from kgen.runtime.cast_options import CastOptions
from tests.cast_checks import (
    BF16,
    DIRECTIONS,
    E4M3,
    E5M2,
    FP16,
    FP32,
    assert_same,
    awkward,
    bits,
    random,
    strides,
)

PAIRS = {
    "token": c.per_token_cast_to_fp8,
    "block": c.per_block_cast_to_fp8,
    "channel": c.per_channel_cast_to_fp8,
    "row": c.per_row_cast_to_fp8,
    "tensor": c.per_tensor_cast_to_fp8,
}
EVERY = pytest.mark.parametrize("recipe", RECIPES)


def block_by_block(
    x: torch.Tensor, recipe: str, dtype: torch.dtype, pow2: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: slices, and numbers one at a time where that is not too slow."""
    (m, k), largest = x.shape, torch.tensor(FP8_MAX[dtype])
    step_m, step_k = (
        n if size is None else size for size, n in zip(RECIPES[recipe], (m, k), strict=True)
    )
    values = torch.empty(m, k, dtype=dtype)
    rows = []
    for i in range(0, m, step_m):
        row = []
        for j in range(0, k, step_k):
            block = x[i : i + step_m, j : j + step_k].float()
            finite = block[block.isfinite()].abs()
            amax = finite.max() if finite.numel() else torch.tensor(0.0)
            scale = torch.tensor(1.0)
            if amax > 0:
                scale = torch.maximum(amax / largest, torch.tensor(MIN_SCALE))
                if pow2:
                    mantissa, exponent = torch.frexp(scale)
                    scale = torch.ldexp(torch.tensor(1.0), exponent - int(mantissa == 0.5))
            quotient = (block / scale).clamp(-largest, largest)
            quotient[~block.isfinite()] = float("nan")
            values[i : i + step_m, j : j + step_k] = quotient.to(dtype)
            row.append(scale)
        rows.append(torch.stack(row))
    return values, torch.stack(rows)


@EVERY
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_definition(recipe: str, pow2: bool, dtype: torch.dtype) -> None:
    for x in (random(130, 144, BF16), awkward(40, 272, FP32), awkward(20, 100, FP16)):
        found = quant.cast_to_fp8(x, recipe, dtype=dtype, pow2_scales=pow2)
        assert_same(found, block_by_block(x, recipe, dtype, pow2), recipe, layout=False)


@EVERY
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_directions(recipe: str, direction: str) -> None:
    """Transposed is the recipe's cast of x transposed; amax and what was not asked for."""
    x = awkward(130, 272, BF16)
    result = c.cast_to_fp8(x, recipe, direction=direction, amax=direction == "both")
    normal, transposed = direction != "transposed", direction != "normal"
    assert [t is not None for t in result] == [
        normal,
        normal,
        transposed,
        transposed,
        direction == "both",
    ]
    if normal:
        assert_same(result[:2], PAIRS[recipe](x))
        assert_same(result[:2], quant.cast_to_fp8(x, recipe), layout=False)
    if transposed:
        assert_same(result[2:4], PAIRS[recipe](x.t()))
        assert_same(result[2:4], PAIRS[recipe](x, transposed=True))
    if result.amax is not None:
        assert float(result.amax) == float(x.float()[x.isfinite()].abs().max())


def test_a_block_cast_transposed_is_the_transposed_cast() -> None:
    x = awkward(130, 272, BF16)
    (values, scales), turned = c.per_block_cast_to_fp8(x), c.per_block_cast_to_fp8(x.t())
    assert_same((bits(values).t(), scales.t()), (bits(turned[0]), turned[1]), layout=False)


@EVERY
def test_layouts(recipe: str) -> None:
    """Token scales as get_col_major_tma_aligned_tensor lays them out; channel scales transposed."""
    x = random(130, 270, BF16)
    values, scales, values_t, scales_t, _ = c.cast_to_fp8(x, recipe, direction="both")
    assert values is not None
    assert values_t is not None
    assert scales is not None
    assert scales_t is not None
    assert values.is_contiguous()
    assert values_t.is_contiguous()
    assert scales.shape == quant.scales_shape(recipe, 130, 270)
    assert scales_t.shape == quant.scales_shape(recipe, 270, 130)
    if recipe == "token":
        assert strides(scales) == [1, 132]
        assert strides(scales_t) == [1, 272]
        assert g.get_col_major_tma_aligned_tensor(scales) is scales
    elif recipe == "channel":
        assert strides(scales) == [272, 1]
        assert strides(scales_t) == [132, 1]
        assert g.get_col_major_tma_aligned_tensor(scales.t()).data_ptr() == scales.data_ptr()
    plain = c.cast_to_fp8(x, recipe, row_major_scales=True).scales
    assert plain is not None
    assert plain.is_contiguous()
    assert torch.equal(plain, scales)


@EVERY
@pytest.mark.parametrize("shape", [(0, 256), (5, 0), (0, 0)])
def test_empty(recipe: str, shape: tuple[int, int]) -> None:
    """No elements, scales of 1 where there are any, amax 0."""
    result = c.cast_to_fp8(torch.empty(shape), recipe, direction="both", amax=True)
    assert [t.shape for t in result if t is not None] == [
        shape,
        quant.scales_shape(recipe, *shape),
        shape[::-1],
        quant.scales_shape(recipe, *shape[::-1]),
        (),
    ]
    assert all(bool((t == 1).all()) for t in (result.scales, result.scales_t) if t is not None)
    assert float(result.amax or 0) == 0


@EVERY
@settings(deadline=None, max_examples=25)
@given(
    m=st.integers(1, 150),
    k=st.integers(1, 280),
    power=st.integers(-60, 60),
    seed=st.integers(0, 1000),
)
def test_properties(recipe: str, m: int, k: int, power: int, seed: int) -> None:
    """Within half a step of each number; a power of two in x moves to the scales, bit by bit."""
    x = random(m, k, FP32, seed=seed)
    values, scales = PAIRS[recipe](x)
    block_m, block_k = RECIPES[recipe]
    wide = scales.repeat_interleave(block_m or m, 0).repeat_interleave(block_k or k, 1)[:m, :k]
    error = (values.float() * wide - x).abs()
    assert bool((error <= x.abs() / 16 + wide * 2**-10).all())
    assert int((values.float().abs() == 448).sum()) >= scales.numel()
    moved = PAIRS[recipe](x * 2.0**power)
    assert torch.equal(bits(moved[0]), bits(values))
    assert torch.equal(moved[1], scales * 2.0**power)
    rounded = PAIRS[recipe](x, pow2_scales=True)[1]
    assert bool((torch.frexp(rounded)[0] == 0.5).all())
    assert bool(((rounded >= scales) & (rounded < 2 * scales)).all())


def test_zeros_keep_their_signs_and_scale_one() -> None:
    x = torch.tensor([[0.0, -0.0] * 64])
    for cast in PAIRS.values():
        values, scales = cast(x)
        assert bits(values)[0, :2].tolist() == [0, 0x80]
        assert float(scales[0, 0]) == 1


def test_the_names_in_gemm_are_these() -> None:
    assert g.per_token_cast_to_fp8 is c.per_token_cast_to_fp8
    assert g.per_block_cast_to_fp8 is c.per_block_cast_to_fp8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipe": "column"}, "recipe 'column': expected one of token, block"),
        ({"direction": "up"}, "direction 'up': expected one of normal, transposed, both"),
        ({"dtype": BF16}, "expected float8_e4m3fn or float8_e5m2"),
        ({"x": torch.zeros(3)}, r"torch.float32\[3\]: expected two dimensions"),
        ({"x": torch.zeros(3, 4, dtype=torch.int8)}, "expected two dimensions of BF16, FP16"),
        ({"x": [1.0]}, "x is a list: expected a torch.Tensor"),
        ({"x": torch.zeros(3, 4, requires_grad=True)}, "cast_to_fp8 has no gradient"),
    ],
)
def test_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedInput, match=message):
        c.cast_to_fp8(**{"x": torch.zeros(3, 4), **arguments})


def test_unknown_choices() -> None:
    with pytest.raises(TypeError, match="a token cast has no choice amax: expected transposed"):
        c.per_token_cast_to_fp8(torch.zeros(3, 4), amax=True)


def test_negated_views() -> None:
    x = torch._neg_view(random(8, 128, FP32))
    assert_same(c.per_token_cast_to_fp8(x), c.per_token_cast_to_fp8(x.clone()))


# -------------------------------------------------------------------------------- swiglu


def test_swiglu_is_silu_of_the_gate_times_up() -> None:
    x = random(33, 2 * 200, BF16)
    gate, up = x.float().chunk(2, 1)
    torch.testing.assert_close(quant.swiglu(x), torch.nn.functional.silu(gate) * up)
    values, scales = c.swiglu_per_token_cast_to_fp8(x)
    assert_same((values, scales), quant.cast_to_fp8(quant.swiglu(x), "token"), layout=False)
    assert strides(scales) == [1, 36]
    row_major = c.swiglu_per_token_cast_to_fp8(x, row_major_scales=True, pow2_scales=True)[1]
    assert row_major.is_contiguous()
    assert bool((torch.frexp(row_major)[0] == 0.5).all())


def test_masked_swiglu_leaves_the_rest_alone() -> None:
    x = random(4 * 9, 2 * 256, BF16).view(4, 9, 512)
    x[:, 7:] = float("nan")
    counts = torch.tensor([7, 0, -3, 90], dtype=torch.int32)
    values = torch.full((4, 9, 256), 0x55, dtype=torch.uint8).view(E4M3)
    scales = torch.full((4, 9, 2), 7.0)
    version = values._version
    out = c.swiglu_per_token_cast_to_fp8(x, counts, out=(values, scales))
    assert out[0] is values
    assert values._version > version
    for i, count in enumerate((7, 0, 0, 9)):
        alone = c.swiglu_per_token_cast_to_fp8(x[i, :count])
        assert_same((values[i, :count], scales[i, :count]), alone, layout=False)
        assert bool((values.view(torch.uint8)[i, count:] == 0x55).all())
        assert bool((scales[i, count:] == 7).all())
    assert c.swiglu_per_token_cast_to_fp8(x, counts)[1].stride() == (24, 1, 12)


COUNTS = torch.zeros(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.zeros(3, 7)}, r"x is \[3, 7\]: expected gate and up"),
        ({"x": torch.zeros(4, 3, 8)}, "expected two dimensions"),
        ({"x": None}, "x is a NoneType"),
        ({"masked_m": COUNTS}, r"x is \[3, 8\]: with masked_m expected \[G, max_m, 2H\]"),
        (
            {"x": torch.zeros(4, 3, 8), "masked_m": COUNTS.long()},
            r"masked_m is torch.int64\[4\] on cpu: expected contiguous torch.int32\[4\]",
        ),
        ({"x": torch.zeros(4, 3, 8), "masked_m": COUNTS[:2]}, r"masked_m is torch.int32\[2\]"),
        ({"out": (torch.zeros(3, 4), torch.zeros(3, 1))}, "out's values are torch.float32"),
        ({"out": (None, torch.zeros(3, 1))}, "out's values are a NoneType"),
        ({"out": (torch.zeros(3, 4).to(E4M3),)}, r"out is a tuple: expected the pair \(values"),
        ({"out": torch.zeros(2, 3, 4)}, r"out is a Tensor: expected the pair \(values, scales\)"),
        (
            {"out": (torch.zeros(1, 4).to(E4M3).expand(3, 4), torch.zeros(3, 1))},
            "out's values have strides .*expanded over one value: expected memory for each",
        ),
        ({"x": torch.zeros(4, 3, 8), "masked_m": [0] * 4}, "masked_m is a list: expected a torch"),
        (
            {"out": (torch.zeros(3, 4).to(E4M3), torch.zeros(3, 4))},
            r"out's scales are torch.float32\[3, 4\] on cpu: expected torch.float32\[3, 1\]",
        ),
        (
            {"out": (torch.zeros(4, 3).to(E4M3).t(), torch.zeros(3, 1))},
            "expected adjacent columns",
        ),
    ],
)
def test_errors_of_swiglu(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedInput, match=message):
        c.swiglu_per_token_cast_to_fp8(**{"x": torch.zeros(3, 8), **arguments})


def test_swiglu_does_not_write_what_it_reads() -> None:
    x = torch.zeros(3, 8)
    ours = x.view(torch.uint8)[:, 4:8].view(E4M3), torch.zeros(3, 1)
    with pytest.raises(UnsupportedInput, match="out's values share memory with x"):
        c.swiglu_per_token_cast_to_fp8(x, out=ours)
    theirs = torch.zeros(3, 4).to(E4M3), x[:, 7:]
    with pytest.raises(UnsupportedInput, match="out's scales share memory with x"):
        c.swiglu_per_token_cast_to_fp8(x, out=theirs)


@pytest.mark.parametrize("recipe", ["token", "tensor"])
def test_in_a_graph(recipe: str) -> None:
    """One operator, for any M, in torch.compile."""

    def cast(x: torch.Tensor) -> Any:
        return [t for t in c.cast_to_fp8(x, recipe, direction="both", amax=True) if t is not None]

    compiled = torch.compile(cast, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (20, 144):
        x = random(m, 272, BF16)
        assert_same(compiled(x), cast(x))


def test_options_are_values() -> None:
    assert CastOptions() == CastOptions("token", "normal")
    assert hash(CastOptions(amax=True)) == hash(CastOptions(amax=True))
