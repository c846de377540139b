"""Casts to FP8 with scales, and the scale layout that TMA reads, in plain PyTorch.

Takes tensors on any device; gives (FP8 values, FP32 scales) with value · scale ≈ input.
Imports torch only.
"""

from __future__ import annotations

from typing import Final

import torch

from kgen.errors import UnsupportedInput
from kgen.problem import SCALE_BLOCK, TMA_ALIGN_BYTES, ceil_div, round_up

E4M3: Final = torch.float8_e4m3fn
E5M2: Final = torch.float8_e5m2
E4M3_MAX: Final = 448.0
#: Largest finite value by type. E5M2 has an inf beyond it, which no cast here makes.
FP8_MAX: Final = {E4M3: E4M3_MAX, E5M2: 57344.0}
#: The least scale. Below it amax / 448 loses digits or becomes 0, and x / 0 would be inf; what
#: so small a block holds then rounds to zero, an error under 2^-126.
MIN_SCALE: Final = torch.finfo(torch.float32).tiny
_INPUTS: Final = (torch.bfloat16, torch.float16, torch.float32)
_ALIGN_FLOATS: Final = TMA_ALIGN_BYTES // 4


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast x [M, K] with one scale for each row and 128 columns.

    Gives E4M3 [M, K] and FP32 scales [M, ceil(K/128)], both row-major; the last block may be
    partial. A block of zeros becomes exact zeros with scale 1. NaN and inf become NaN and leave
    their block's scale, and so all other values, alone. x is BF16, FP16 or FP32.
    Raises UnsupportedInput for another dtype or rank.
    """
    m, k = _shape(x)
    blocks = ceil_div(k, SCALE_BLOCK)
    tiles = _padded(x, m, blocks * SCALE_BLOCK).view(m, blocks, SCALE_BLOCK)
    values, scales = _cast(tiles, dim=(2,))
    return values.view(m, blocks * SCALE_BLOCK)[:, :k].contiguous(), scales.view(m, blocks)


def per_block_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast x [N, K] with one scale for each block of 128 rows and 128 columns.

    Gives E4M3 [N, K] and FP32 scales [ceil(N/128), ceil(K/128)], both row-major; the last blocks
    may be partial. Zeros, NaN, inf, dtypes and errors as in `per_token_cast_to_fp8`.
    """
    n, k = _shape(x)
    rows, cols = ceil_div(n, SCALE_BLOCK), ceil_div(k, SCALE_BLOCK)
    padded = _padded(x, rows * SCALE_BLOCK, cols * SCALE_BLOCK)
    values, scales = _cast(padded.view(rows, SCALE_BLOCK, cols, SCALE_BLOCK), dim=(1, 3))
    return values.view(padded.shape)[:n, :k].contiguous(), scales.view(rows, cols)


def per_row_cast_to_fp8(
    x: torch.Tensor, dtype: torch.dtype = E4M3
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast x [rows, K] with one scale for each row: a token of A, an output channel of B.

    Gives `dtype` (E4M3 or E5M2) [rows, K], row-major, and FP32 scales [rows]. Zeros, NaN, inf,
    dtypes and errors as in `per_token_cast_to_fp8`; a row of zeros has scale 1.
    """
    rows, k = _shape(x)
    wide = x.float().contiguous() if k else x.new_zeros(rows, 1, dtype=torch.float32)
    values, scales = _cast(wide, dim=(1,), dtype=dtype)
    return values[:, :k], scales.view(-1)


def per_tensor_cast_to_fp8(
    x: torch.Tensor, dtype: torch.dtype = E4M3
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast x [rows, K] with one scale for all of it.

    Gives `dtype` (E4M3 or E5M2) [rows, K], row-major, and an FP32 scalar on x's device; nothing
    waits for the device. Otherwise as `per_row_cast_to_fp8`.
    """
    shape = _shape(x)
    wide = x.float().contiguous() if x.numel() else x.new_zeros(1, 1, dtype=torch.float32)
    values, scales = _cast(wide, dim=(0, 1), dtype=dtype)
    return values[: shape[0], : shape[1]], scales.view(())


def get_col_major_tma_aligned_tensor(x: torch.Tensor) -> torch.Tensor:
    """The scales x [M, K blocks] or [G, M, K blocks] column-major, columns on 16 bytes.

    Same shape and values, strides (1, round_up(M, 4)): what TMA reads. Gives x itself when it
    is laid out so already. Raises UnsupportedInput for another dtype than FP32 or another rank.
    """
    if _is_scales(x) and _is_tma_aligned(x):
        return x
    return col_major_tma_aligned_copy(x)


def col_major_tma_aligned_copy(x: torch.Tensor) -> torch.Tensor:
    """As `get_col_major_tma_aligned_tensor`, in memory of its own."""
    return empty_col_major(x).copy_(x)


def empty_col_major(x: torch.Tensor) -> torch.Tensor:
    """Memory for the copy of x; same errors."""
    if not _is_scales(x):
        raise UnsupportedInput(
            f"scales of {x.dtype}{list(x.shape)}: expected torch.float32 [M, K blocks], or three "
            "dimensions with the groups first"
        )
    *groups, m, blocks = x.shape
    pitch = round_up(m, _ALIGN_FLOATS)
    strides = (*[pitch * blocks] * len(groups), 1, pitch)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)


def _is_scales(x: torch.Tensor) -> bool:
    return x.dtype == torch.float32 and x.dim() in (2, 3)


def _is_tma_aligned(x: torch.Tensor) -> bool:
    pitch = x.stride(-1)
    aligned = pitch % _ALIGN_FLOATS == 0 and x.data_ptr() % TMA_ALIGN_BYTES == 0
    if x.dim() == 3:
        aligned = aligned and x.stride(0) % _ALIGN_FLOATS == 0
        aligned = aligned and x.stride(0) >= pitch * x.shape[2]
    return aligned and x.stride(-2) == 1 and pitch >= max(x.shape[-2], 1)


def _shape(x: torch.Tensor) -> tuple[int, int]:
    if x.dtype not in _INPUTS or x.dim() != 2:
        raise UnsupportedInput(
            f"a tensor of {x.dtype}{list(x.shape)}: expected two dimensions of BF16, FP16 or FP32"
        )
    return x.shape[0], x.shape[1]


def _padded(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    padding = (0, cols - x.shape[1], 0, rows - x.shape[0])
    return torch.nn.functional.pad(x.float(), padding).contiguous()


def _cast(
    tiles: torch.Tensor, dim: tuple[int, ...], dtype: torch.dtype = E4M3
) -> tuple[torch.Tensor, torch.Tensor]:
    if dtype not in FP8_MAX:
        raise UnsupportedInput(f"a cast to {dtype}: expected float8_e4m3fn or float8_e5m2")
    largest = FP8_MAX[dtype]
    finite = torch.isfinite(tiles)
    amax = torch.where(finite, tiles, 0.0).abs().amax(dim=dim, keepdim=True)
    scales = torch.where(amax > 0, (amax / largest).clamp_min(MIN_SCALE), 1.0)
    # The quotient may round to just over 448. E4M3 has no inf, and torch's cast of one differs
    # between versions and devices (448 or NaN): say NaN.
    values = (tiles / scales).clamp(-largest, largest)
    return torch.where(finite, values, float("nan")).to(dtype), scales
