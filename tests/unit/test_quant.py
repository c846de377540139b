"""kgen.quant: casts that keep what they must, whatever a block holds; the scale layout of TMA."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kgen.errors import UnsupportedInput
from kgen.problem import ceil_div
from kgen.quant import (
    MIN_SCALE,
    get_col_major_tma_aligned_tensor,
    per_block_cast_to_fp8,
    per_token_cast_to_fp8,
)
from kgen.reference import dequantize_a, dequantize_b

Cast = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
CASTS = pytest.mark.parametrize("cast", [per_token_cast_to_fp8, per_block_cast_to_fp8])


def back(cast: Cast, x: torch.Tensor) -> torch.Tensor:
    values, scales = cast(x)
    rows = x.shape[0] if cast is per_token_cast_to_fp8 else ceil_div(x.shape[0], 128)
    assert values.dtype == torch.float8_e4m3fn
    assert values.shape == x.shape
    assert values.is_contiguous()
    assert scales.dtype == torch.float32
    assert scales.shape == (rows, ceil_div(x.shape[1], 128))
    assert scales.is_contiguous()
    assert torch.isfinite(scales).all()
    assert (scales > 0).all()
    dequantize = dequantize_a if cast is per_token_cast_to_fp8 else dequantize_b
    return dequantize(values, scales)


@CASTS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "k"), [(1, 16), (130, 144), (128, 128), (257, 512), (3, 100)])
def test_values_come_back_within_half_a_step(
    cast: Cast, dtype: torch.dtype, rows: int, k: int
) -> None:
    generator = torch.Generator().manual_seed(rows * k)
    x = torch.randn(rows, k, generator=generator).to(dtype)
    x[0, -1] = 100.0  # the last, partial block has its own scale
    error = (back(cast, x) - x.float()).abs()
    # Half a step: 2^-4 of the value, or of the least normal number, 2^-6 · amax / 448.
    assert (error <= x.float().abs() / 16 + 100.0 / 448 * 2**-10).all()


def test_each_block_has_its_own_scale() -> None:
    x = torch.ones(256, 256)
    x[:128, 128:] = 7.0
    x[128:, :128] = 0.5
    _, scales = per_block_cast_to_fp8(x)
    assert torch.equal(scales * 448, torch.tensor([[1.0, 7.0], [0.5, 1.0]]))
    _, rows = per_token_cast_to_fp8(x)
    assert torch.equal(rows[[0, 128]] * 448, torch.tensor([[1.0, 7.0], [0.5, 1.0]]))
    assert rows.shape == (256, 2)


@CASTS
def test_zeros_stay_exact_zeros(cast: Cast) -> None:
    assert torch.equal(back(cast, torch.zeros(130, 272)), torch.zeros(130, 272))
    x = torch.randn(256, 256)
    x[:128, :128] = 0
    x[200] = 0
    y = back(cast, x)
    assert not y[:128, :128].any()
    assert not y[200].any()
    assert torch.isfinite(y).all()


@CASTS
@pytest.mark.parametrize("value", [2.0**-149, 2.0**-126, 1e-40, 1e-38, 3.4e38, 2.0**127])
def test_extreme_finite_blocks_stay_finite(cast: Cast, value: float) -> None:
    x = torch.full((16, 144), value)
    x[1] = -value
    y = back(cast, x)
    assert torch.isfinite(y).all()
    assert ((y - x).abs() <= max(value / 16, MIN_SCALE)).all()


@CASTS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_stay_where_they_are(cast: Cast, bad: float) -> None:
    x = torch.randn(130, 272)
    clean = back(cast, x)
    scale = x.abs().amax()
    x[5, 7], clean[5, 7] = bad, float("nan")
    y = back(cast, x)
    assert torch.isnan(y[5, 7])
    assert torch.isfinite(y).sum() == y.numel() - 1
    rest = torch.isfinite(y)
    # The block's scale may be another when the element that went was its largest.
    assert ((y - x)[rest].abs() <= scale / 16).all()


@CASTS
def test_a_block_of_nothing_finite(cast: Cast) -> None:
    assert torch.isnan(back(cast, torch.full((4, 16), float("inf")))).all()


@CASTS
def test_empty_and_strided_inputs(cast: Cast) -> None:
    assert back(cast, torch.zeros(0, 256)).shape == (0, 256)
    base = torch.randn(64, 300)
    assert torch.equal(back(cast, base[::2, :272]), back(cast, base[::2, :272].clone()))
    assert torch.equal(back(cast, base.t()), back(cast, base.t().contiguous()))


@CASTS
@pytest.mark.parametrize(
    "x", [torch.zeros(4, 16, dtype=torch.int32), torch.zeros(4).float(), torch.zeros(2, 4, 16)]
)
def test_other_tensors_are_refused(cast: Cast, x: torch.Tensor) -> None:
    with pytest.raises(UnsupportedInput, match="expected two dimensions of BF16, FP16 or FP32"):
        cast(x)


# ---------------------------------------------------------------------- scale layout


@pytest.mark.parametrize("shape", [(130, 56), (1, 1), (1, 56), (7, 1), (64, 3), (0, 4)])
def test_scales_become_column_major(shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    y = get_col_major_tma_aligned_tensor(x)
    assert torch.equal(x, y)
    assert y.data_ptr() % 16 == 0
    if min(shape) > 1:
        assert y.stride() == (1, (shape[0] + 3) // 4 * 4)
    assert get_col_major_tma_aligned_tensor(y).data_ptr() == y.data_ptr()


def test_aligned_scales_are_given_back_as_they_are() -> None:
    padded = torch.randn(56, 256).t()[:130]
    assert get_col_major_tma_aligned_tensor(padded) is padded
    odd = torch.randn(56, 130).t()
    assert get_col_major_tma_aligned_tensor(odd).stride() == (1, 132)
    shifted = torch.randn(56, 256).t()[1:129]
    assert get_col_major_tma_aligned_tensor(shifted).data_ptr() % 16 == 0


def test_expanded_scales_are_not_mistaken_for_columns() -> None:
    x = torch.randn(1, 1).expand(8, 4)
    y = get_col_major_tma_aligned_tensor(x)
    assert y.stride() == (1, 8)
    assert torch.equal(x, y)
    columns = torch.randn(8, 1).expand(8, 4)
    assert get_col_major_tma_aligned_tensor(columns).stride() == (1, 8)


def test_groups_of_scales() -> None:
    x = torch.randn(3, 130, 5)
    y = get_col_major_tma_aligned_tensor(x)
    assert torch.equal(x, y)
    assert y.stride() == (132 * 5, 1, 132)
    assert get_col_major_tma_aligned_tensor(y) is y


@pytest.mark.parametrize("x", [torch.zeros(4, 4).half(), torch.zeros(4), torch.zeros(1, 1, 1, 1)])
def test_other_scales_are_refused(x: torch.Tensor) -> None:
    with pytest.raises(UnsupportedInput, match=r"expected torch.float32 \[M, K blocks\]"):
        get_col_major_tma_aligned_tensor(x)
