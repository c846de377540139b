"""Casts of BF16, FP16 and FP32 matrices to FP8 with FP32 scales, on the tensors' device.

On a Hopper GPU a kernel answers, close to the time of copying the bytes, on the device's current
stream and without waiting; elsewhere `kgen.quant` does in plain PyTorch. Both give the same bits;
`kgen.quant` says what becomes of zeros, subnormals, infinities and NaN. Importing this module
touches no GPU. Has no gradient.
Must not import search, verify or measure.
"""

from __future__ import annotations

from typing import Any

import torch

from kgen.problem import SCALE_BLOCK, ceil_div
from kgen.quant import E4M3
from kgen.runtime import ops
from kgen.runtime.cast_launch import launch_cast
from kgen.runtime.cast_options import CastOptions, CastResult
from kgen.runtime.swiglu import SwigluGradients, swiglu_backward, swiglu_per_token_cast_to_fp8
from kgen.runtime.turn import transpose_block_cast

__all__ = [
    "CastResult",
    "SwigluGradients",
    "cast_to_fp8",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_row_cast_to_fp8",
    "per_tensor_cast_to_fp8",
    "per_token_cast_to_fp8",
    "swiglu_backward",
    "swiglu_per_token_cast_to_fp8",
    "transpose_block_cast",
]

Pair = tuple[torch.Tensor, torch.Tensor]


def cast_to_fp8(
    x: torch.Tensor,
    recipe: str = "token",
    *,
    direction: str = "normal",
    amax: bool = False,
    pow2_scales: bool = False,
    row_major_scales: bool = False,
    dtype: torch.dtype = E4M3,
) -> CastResult:
    """Cast x [M, K] by a recipe, x transposed by the same recipe, or both in one pass.

    x                  BF16, FP16 or FP32; any strides; columns that are not adjacent cost a copy
    recipe             which elements share a scale: "token" 1x128, "block" 128x128, "channel"
                       128x1, "row" a row, "tensor" all
    direction          "normal": x [M, K] · "transposed": x transposed, [K, M], K-major as weight
                       gradients read it · "both"
    amax               also give the largest finite magnitude in x
    pow2_scales        scales rounded up to powers of two (UE8M0, held as FP32)
    row_major_scales   False: the layout that kernels read by TMA, token scales column-major with
                       columns on 16 bytes (`get_col_major_tma_aligned_tensor`), channel scales
                       with rows on 16 bytes; True: plain row-major
    dtype              float8_e4m3fn or float8_e5m2

    Partial last blocks, and empty tensors, are served. "row" reads x twice where the transposed
    result is wanted, "tensor" always; the others once. Raises UnsupportedInput for anything else,
    LaunchError when a kernel would have to be loaded while a CUDA graph is captured.
    """
    options = CastOptions(recipe, direction, amax, pow2_scales, row_major_scales, dtype)
    options.check(x)
    if ops.is_traced(x):
        return ops.call_cast(x, options)
    return run_cast(x, options)


def per_token_cast_to_fp8(x: torch.Tensor, **choices: Any) -> Pair:
    """Values [M, K] and scales [M, ceil(K/128)]: one for each row and 128 columns of x [M, K].

    `choices`: pow2_scales, row_major_scales, dtype and errors as in `cast_to_fp8`; and
    `transposed=True` casts x transposed instead, which gives [K, M] and [K, ceil(M/128)].
    """
    return _pair(x, "token", **choices)


def per_block_cast_to_fp8(x: torch.Tensor, **choices: Any) -> Pair:
    """Values [N, K] and scales [ceil(N/128), ceil(K/128)]: one for each 128x128 block of x [N, K].

    x may be [G, N, K], experts' weights: values and scales then are [G, ...], each group cast by
    itself; where N is no multiple of 128 that is a launch for each. `choices` as in
    `per_token_cast_to_fp8`.
    """
    if isinstance(x, torch.Tensor) and x.dim() == 3:
        return _groups(x, **choices)
    return _pair(x, "block", **choices)


def per_channel_cast_to_fp8(x: torch.Tensor, **choices: Any) -> Pair:
    """Values [M, K] and scales [ceil(M/128), K]: one for each column and 128 rows of x [M, K].

    `choices` as in `per_token_cast_to_fp8`.
    """
    return _pair(x, "channel", **choices)


def per_row_cast_to_fp8(x: torch.Tensor, **choices: Any) -> Pair:
    """Values [M, K] and scales [M, 1]: one for each row of x [M, K].

    `choices` as in `per_token_cast_to_fp8`.
    """
    return _pair(x, "row", **choices)


def per_tensor_cast_to_fp8(x: torch.Tensor, **choices: Any) -> Pair:
    """Values [M, K] and one scale [1, 1] of x [M, K].

    `choices` as in `per_token_cast_to_fp8`.
    """
    return _pair(x, "tensor", **choices)


# ------------------------------------------------------------------------------ the path


def run_cast(x: torch.Tensor, options: CastOptions) -> CastResult:
    """`cast_to_fp8` on tensors that hold memory, with checked choices."""
    ops.refuse_gradient("cast_to_fp8", (x,))
    with torch.no_grad():
        if not x.numel():
            return options.reference(x)
        result = launch_cast(x, options)
        return options.reference(x) if result is None else result


def _pair(x: torch.Tensor, recipe: str, *, transposed: bool = False, **choices: Any) -> Pair:
    unknown = choices.keys() - {"pow2_scales", "row_major_scales", "dtype"}
    if unknown:
        raise TypeError(
            f"a {recipe} cast has no choice {', '.join(sorted(unknown))}: expected transposed, "
            "pow2_scales, row_major_scales, dtype; cast_to_fp8 takes direction and amax"
        )
    result = cast_to_fp8(x, recipe, direction="transposed" if transposed else "normal", **choices)
    pair = result[2:4] if transposed else result[:2]
    assert pair[0] is not None
    assert pair[1] is not None
    return pair[0], pair[1]


def _groups(x: torch.Tensor, *, transposed: bool = False, **choices: Any) -> Pair:
    """Block casts of x [G, N, K]: one of its rows together where no block has two groups' rows."""
    groups, n, k = x.shape
    blocks = ceil_div(n, SCALE_BLOCK), ceil_div(k, SCALE_BLOCK)
    if n % SCALE_BLOCK == 0 or groups <= 1:
        values, scales = _pair(x.reshape(groups * n, k), "block", **choices)
        pair = values.view(groups, n, k), scales.view(groups, *blocks)
    else:
        pairs = [_pair(group, "block", **choices) for group in x]
        stacked = torch.stack([values.view(torch.uint8) for values, _ in pairs])
        pair = stacked.view(pairs[0][0].dtype), torch.stack([scales for _, scales in pairs])
    return transpose_block_cast(pair) if transposed else pair


ops.register_casts(run_cast)
