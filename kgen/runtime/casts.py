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
from torch.compiler import is_dynamo_compiling

from kgen import quant
from kgen.errors import UnsupportedInput
from kgen.problem import SCALE_BLOCK, ceil_div
from kgen.quant import E4M3
from kgen.runtime import ops
from kgen.runtime.cast_launch import MAX_GROUPS, launch_cast, launch_rows
from kgen.runtime.cast_options import CastOptions, CastResult
from kgen.runtime.guard import count_write
from kgen.runtime.operands import share_memory

__all__ = [
    "CastResult",
    "cast_to_fp8",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_row_cast_to_fp8",
    "per_tensor_cast_to_fp8",
    "per_token_cast_to_fp8",
    "swiglu_per_token_cast_to_fp8",
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
    if is_dynamo_compiling() or ops.any_stands_for_another(x):
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

    `choices` as in `per_token_cast_to_fp8`.
    """
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


def swiglu_per_token_cast_to_fp8(
    x: torch.Tensor,
    masked_m: torch.Tensor | None = None,
    *,
    pow2_scales: bool = False,
    row_major_scales: bool = False,
    dtype: torch.dtype = E4M3,
    out: Pair | None = None,
) -> Pair:
    """Cast gate / (1 + e^-gate) · up per token, for x = (gate, up) side by side; FP32 in between.

    x [M, 2H] gives values [M, H] and scales [M, ceil(H/128)]. With `masked_m`, int32 [G] on the
    device, x is [G, max_m, 2H] and only the first masked_m[g] rows of group g are read and written;
    the rest costs nothing. `out` holds memory for values and scales, the values' rows adjacent or
    pitched; without it the result is new memory, laid out as `cast_to_fp8` says for each group.
    The kernel's e^x is within 2 units in the last place: where a value lies next to a rounding
    boundary it may differ from the reference by one FP8 step. Raises UnsupportedInput.
    """
    CastOptions(pow2_scales=pow2_scales, dtype=dtype).check(x[0] if _masked(x, masked_m) else x)
    if x.shape[-1] % 2:
        raise UnsupportedInput(f"x is {list(x.shape)}: expected gate and up, [..., 2H]")
    ops.refuse_gradient("swiglu_per_token_cast_to_fp8", (x,))
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    if out is None:
        values, scales = _empty_rows(x, shape, row_major_scales, dtype)
    else:
        values, scales = check_out(out, x, shape, dtype)
    if not launch_rows(x, values, scales, pow2_scales=pow2_scales, swiglu=True, masked_m=masked_m):
        with torch.no_grad():
            _swiglu_reference(x, masked_m, values, scales, pow2_scales)
    count_write((values,))
    count_write((scales,))
    return values, scales


# ------------------------------------------------------------------------------ the path


def run_cast(x: torch.Tensor, options: CastOptions) -> CastResult:
    """`cast_to_fp8` on tensors that hold memory, with checked choices."""
    ops.refuse_gradient("cast_to_fp8", (x,))
    with torch.no_grad():
        if not x.numel():
            return options.reference(x)
        result = launch_cast(x, options)
        return options.reference(x) if result is None else result


# ------------------------------------------------------------------------------- tensors


def check_out(out: Any, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Pair:
    """The pair of values and scales, which x's FP8 of `shape`, cast per token, can be written to.

    Raises UnsupportedInput for anything else.
    """
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise UnsupportedInput(f"out is a {type(out).__name__}: expected the pair (values, scales)")
    values, scales = out
    blocks = (*shape[:-1], ceil_div(shape[-1], SCALE_BLOCK))
    for name, tensor, kind, wanted in (
        ("values", values, dtype, shape),
        ("scales", scales, torch.float32, blocks),
    ):
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedInput(f"out's {name} are a {type(tensor).__name__}: expected a tensor")
        if tensor.dtype != kind or tuple(tensor.shape) != wanted or tensor.device != x.device:
            raise UnsupportedInput(
                f"out's {name} are {tensor.dtype}{list(tensor.shape)} on {tensor.device}: "
                f"expected {kind}{list(wanted)} on {x.device}"
            )
        if any(n > 1 and step == 0 for n, step in zip(wanted, tensor.stride(), strict=True)):
            raise UnsupportedInput(
                f"out's {name} have strides {tuple(tensor.stride())}, expanded over one value: "
                "expected memory for each element"
            )
        has_memory = not (x.is_meta or ops.any_stands_for_another(x, tensor))
        if has_memory and share_memory(tensor, x):
            raise UnsupportedInput(
                f"out's {name} share memory with x: expected memory of their own"
            )
    if values.shape[-1] > 1 and values.stride(-1) != 1:
        raise UnsupportedInput(
            f"out's values have strides {tuple(values.stride())}: expected adjacent columns"
        )
    return values, scales


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


def _masked(x: Any, masked_m: torch.Tensor | None) -> bool:
    """Whether there is a mask; raises UnsupportedInput for one that does not fit x."""
    if not isinstance(x, torch.Tensor):
        raise UnsupportedInput(f"x is a {type(x).__name__}: expected a torch.Tensor")
    if masked_m is None:
        return False
    if x.dim() != 3 or not 1 <= x.shape[0] <= MAX_GROUPS:
        raise UnsupportedInput(
            f"x is {list(x.shape)}: with masked_m expected [G, max_m, 2H] with G from 1 to "
            f"{MAX_GROUPS}"
        )
    if not isinstance(masked_m, torch.Tensor):
        raise UnsupportedInput(f"masked_m is a {type(masked_m).__name__}: expected a torch.Tensor")
    good = masked_m.dtype == torch.int32 and masked_m.device == x.device
    if not good or masked_m.shape != x.shape[:1] or not masked_m.is_contiguous():
        raise UnsupportedInput(
            f"masked_m is {masked_m.dtype}{list(masked_m.shape)} on {masked_m.device}: expected "
            f"contiguous torch.int32[{x.shape[0]}] on {x.device}"
        )
    return True


def _empty_rows(
    x: torch.Tensor, shape: tuple[int, ...], row_major: bool, dtype: torch.dtype
) -> Pair:
    """New memory for FP8 of `shape`, [M, H] or [G, M, H], cast per token."""
    scales = x.new_empty((*shape[:-1], ceil_div(shape[-1], SCALE_BLOCK)), dtype=torch.float32)
    return x.new_empty(shape, dtype=dtype), scales if row_major else quant.empty_col_major(scales)


def _swiglu_reference(
    x: torch.Tensor,
    masked_m: torch.Tensor | None,
    values: torch.Tensor,
    scales: torch.Tensor,
    pow2_scales: bool,
) -> None:
    rows = quant.swiglu(x).flatten(0, -2)
    q, s = quant.cast_to_fp8(rows, "token", dtype=values.dtype, pow2_scales=pow2_scales)
    q, s = q.view(values.shape), s.view(scales.shape)
    if masked_m is not None:  # by no count of the host's: a tracer knows none
        row = torch.arange(x.shape[1], device=x.device)
        counts = (row < masked_m[:, None])[..., None]
        q = torch.where(counts, q.view(torch.uint8), values.view(torch.uint8)).view(values.dtype)
        s = torch.where(counts, s, scales)
    values.copy_(q)
    scales.copy_(s)


ops.register_casts(run_cast)
