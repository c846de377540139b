"""Casts to FP8 with block scales, and the scale layout that TMA reads, in plain PyTorch.

Takes tensors on any device; gives (FP8 values, FP32 scales) with value · scale ≈ input. The kernels
of `kgen.runtime.casts` give the same bits. Imports torch only.

What a block may hold, in every recipe:

zeros            exact zeros, signs kept, scale 1
finite numbers   scale = largest magnitude / largest FP8 number, at least MIN_SCALE; the quotient
                 x / scale, rounded to nearest even
subnormals       as other numbers; so small a block that its scale would be below MIN_SCALE loses
                 digits, and what is below half the least FP8 number times MIN_SCALE becomes zero
NaN, infinity    become NaN (0x7f) and leave their block's scale, and so all other values, alone
"""

from __future__ import annotations

from typing import Final

import torch

from kgen.errors import UnsupportedInput
from kgen.problem import SCALE_BLOCK, TMA_ALIGN_BYTES, ceil_div, round_up

E4M3: Final = torch.float8_e4m3fn
E4M3_MAX: Final = 448.0
#: The largest number of each FP8 type that a cast can give.
FP8_MAX: Final = {E4M3: E4M3_MAX, torch.float8_e5m2: 57344.0}
#: The least scale. Below it amax / 448 loses digits or becomes 0, and x / 0 would be inf; what
#: so small a block holds then rounds to zero, an error under 2^-126.
MIN_SCALE: Final = torch.finfo(torch.float32).tiny
#: Rows and columns that share a scale, by recipe; None: all of them.
RECIPES: Final[dict[str, tuple[int | None, int | None]]] = {
    "token": (1, SCALE_BLOCK),
    "block": (SCALE_BLOCK, SCALE_BLOCK),
    "channel": (SCALE_BLOCK, 1),
    "row": (1, None),
    "tensor": (None, None),
}
INPUT_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_ALIGN_FLOATS: Final = TMA_ALIGN_BYTES // 4


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast x [M, K] with one scale for each row and 128 columns.

    Gives E4M3 [M, K] and FP32 scales [M, ceil(K/128)], both row-major; the last block may be
    partial. x is BF16, FP16 or FP32. Raises UnsupportedInput for another dtype or rank.
    """
    return cast_to_fp8(x, "token")


def per_block_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast x [N, K] with one scale for each block of 128 rows and 128 columns.

    Gives E4M3 [N, K] and FP32 scales [ceil(N/128), ceil(K/128)], both row-major; the last blocks
    may be partial. Dtypes and errors as in `per_token_cast_to_fp8`.
    """
    return cast_to_fp8(x, "block")


def cast_to_fp8(
    x: torch.Tensor, recipe: str, *, dtype: torch.dtype = E4M3, pow2_scales: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast x [M, K] by a recipe of RECIPES: values of `dtype` [M, K] and FP32 scales, row-major.

    The scales' shape is `scales_shape`. `pow2_scales` rounds them up to powers of two, as UE8M0
    holds them. Raises UnsupportedInput for another dtype, rank or recipe.
    """
    check_cast_input(x, recipe, dtype)
    shape = scales_shape(recipe, *x.shape)
    if not x.numel():
        return x.new_empty(x.shape, dtype=dtype), x.new_ones(shape, dtype=torch.float32)
    (m, k), (rows, cols) = x.shape, shape
    block_m, block_k = (
        extent if size is None else size
        for size, extent in zip(RECIPES[recipe], (m, k), strict=True)
    )
    padded = _padded(x, rows * block_m, cols * block_k)
    tiles = padded.view(rows, block_m, cols, block_k)
    values, scales = _cast(tiles, FP8_MAX[dtype], pow2_scales)
    return values.view(padded.shape)[:m, :k].to(dtype).contiguous(), scales.view(rows, cols)


def scales_shape(recipe: str, m: int, k: int) -> tuple[int, int]:
    """token [M, ceil(K/128)] · block [ceil(M/128), ceil(K/128)] · channel [ceil(M/128), K] ·
    row [M, 1] · tensor [1, 1]"""
    block_m, block_k = RECIPES[recipe]
    return (
        1 if block_m is None else ceil_div(m, block_m),
        1 if block_k is None else ceil_div(k, block_k),
    )


def empty_scales(x: torch.Tensor, recipe: str, m: int, k: int, row_major: bool) -> torch.Tensor:
    """Memory on x's device for the scales of an [m, k] matrix.

    Unless row-major, in the layout that kernels read by TMA: columns of a token's scales, and rows
    of a channel's, lie together and begin on 16 bytes. Other scales are row-major always.
    """
    shape = scales_shape(recipe, m, k)
    if row_major or recipe not in ("token", "channel"):
        return x.new_empty(shape, dtype=torch.float32)
    pitch = round_up(m if recipe == "token" else k, _ALIGN_FLOATS)
    strides = (1, pitch) if recipe == "token" else (pitch, 1)
    return torch.empty_strided(shape, strides, dtype=torch.float32, device=x.device)


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitude of x, FP32 with no dimensions; 0 where there is none."""
    if not x.numel():
        return x.new_zeros((), dtype=torch.float32)
    return torch.where(torch.isfinite(x), x, 0.0).abs().amax().float()


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """gate / (1 + e^-gate) · up in FP32 [..., H], for x [..., 2H] = (gate, up) side by side."""
    gate, up = x.float().chunk(2, dim=-1)
    return gate / (1.0 + torch.exp(-gate)) * up


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


def check_cast_input(x: torch.Tensor, recipe: str, dtype: torch.dtype) -> None:
    """Raise UnsupportedInput unless x [M, K] can be cast to `dtype` by this recipe."""
    if not isinstance(recipe, str) or recipe not in RECIPES:
        raise UnsupportedInput(f"recipe {recipe!r}: expected one of {', '.join(RECIPES)}")
    if dtype not in FP8_MAX:
        raise UnsupportedInput(f"dtype={dtype}: expected float8_e4m3fn or float8_e5m2")
    if x.layout != torch.strided:
        raise UnsupportedInput(f"a tensor of {x.layout}: expected plain memory (torch.strided)")
    if x.dtype not in INPUT_DTYPES or x.dim() != 2:
        raise UnsupportedInput(
            f"a tensor of {x.dtype}{list(x.shape)}: expected two dimensions of BF16, FP16 or FP32"
        )


def _padded(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    padding = (0, cols - x.shape[1], 0, rows - x.shape[0])
    return torch.nn.functional.pad(x.float(), padding).contiguous()


def _cast(
    tiles: torch.Tensor, fp8_max: float, pow2_scales: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles [rows, block_m, cols, block_k] as FP32 quotients, and their scales."""
    finite = torch.isfinite(tiles)
    amax = torch.where(finite, tiles, 0.0).abs().amax(dim=(1, 3), keepdim=True)
    # By a tensor: on a GPU torch multiplies by the reciprocal of a Python number instead.
    scales = (amax / amax.new_full((), fp8_max)).clamp_min(MIN_SCALE)
    if pow2_scales:
        scales = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    scales = torch.where(amax > 0, scales, 1.0)
    # The quotient may round to just over the largest number. E4M3 has no inf, and torch's cast of
    # one differs between versions and devices (448 or NaN): say NaN.
    values = (tiles / scales).clamp(-fp8_max, fp8_max)
    return torch.where(finite, values, float("nan")), scales
