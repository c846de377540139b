"""SwiGLU of an MLP's hidden rows: forward, fused with the cast per token, and backward.

Takes gate and up side by side, [..., 2H]; a row may have a weight of its own, such as its router's.
Everything runs on the tensors' device and its current stream, without waiting. On a Hopper GPU
kernels answer, elsewhere plain PyTorch. Has no gradient of its own. `kgen.runtime.casts` offers
these calls. Must not import search, verify or measure.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any, Final, NamedTuple

import torch

from kgen import quant
from kgen.errors import UnsupportedInput
from kgen.problem import ceil_div
from kgen.quant import E4M3, INPUT_DTYPES
from kgen.reference import D_DTYPE_NAMES
from kgen.runtime import moe_ops, ops
from kgen.runtime.cast_launch import (
    MAX_GROUPS,
    element_variables,
    is_vectorised,
    launch_rows,
    with_adjacent_columns,
)
from kgen.runtime.cast_options import CastOptions
from kgen.runtime.cast_out import check_out, empty_rows
from kgen.runtime.guard import count_write
from kgen.runtime.plain import KERNELS, Spec

Pair = tuple[torch.Tensor, torch.Tensor]

#: SwigluArgs of kgen/templates/casts/swiglu_backward.cu.j2.
_ARGS: Final = struct.Struct("<6Q4q2I")
#: Rows of a CTA there, a warp each.
_ROWS: Final = 8


class SwigluGradients(NamedTuple):
    """What `swiglu_backward` gives.

    grad_x         [M, 2H] of x's type: the gradient of gate and up
    hidden         [M, H] of x's type: the forward result, row weights included, not cast
    grad_weights   [M] FP32: the gradient of the row weights; None where there are none
    """

    grad_x: torch.Tensor
    hidden: torch.Tensor
    grad_weights: torch.Tensor | None


def swiglu_per_token_cast_to_fp8(
    x: torch.Tensor,
    masked_m: torch.Tensor | None = None,
    *,
    row_weights: torch.Tensor | None = None,
    pow2_scales: bool = False,
    row_major_scales: bool = False,
    dtype: torch.dtype = E4M3,
    out: Pair | None = None,
) -> Pair:
    """Cast gate / (1 + e^-gate) · up per token, for x = (gate, up) side by side; FP32 in between.

    x [M, 2H] gives values [M, H] and scales [M, ceil(H/128)]. With `masked_m`, int32 [G] on the
    device, x is [G, max_m, 2H] and only the first masked_m[g] rows of group g are read and written;
    the rest costs nothing. `row_weights`, FP32 [M] or [G, max_m], multiply the rows before the
    cast. `out` holds memory for values and scales, the values' rows adjacent or pitched; without it
    the result is new memory, laid out as `kgen.runtime.casts.cast_to_fp8` says for each group.
    The kernel's e^x is within 2 units in the last place: where a value lies next to a rounding
    boundary it may differ from the reference by one FP8 step. Raises UnsupportedInput.
    """
    CastOptions(pow2_scales=pow2_scales, dtype=dtype).check(x[0] if _masked(x, masked_m) else x)
    _check_halves(x)
    _check_weights(row_weights, x)
    ops.refuse_gradient("swiglu_per_token_cast_to_fp8", (x, row_weights))
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    if out is None:
        if ops.is_traced(x, masked_m, row_weights):
            choices = pow2_scales, row_major_scales, dtype
            made: Pair = torch.ops.kgen.swiglu_per_token_cast_to_fp8(
                x, masked_m, row_weights, *choices
            )
            return made
        values, scales = empty_rows(x, shape, row_major_scales, dtype)
        _run_cast(x, masked_m, row_weights, pow2_scales, values, scales)
        return values, scales
    values, scales = check_out(out, x, shape, dtype)
    if ops.is_traced(x, masked_m, row_weights, values, scales):
        torch.ops.kgen.swiglu_per_token_cast_to_fp8_out(
            x, masked_m, row_weights, pow2_scales, values, scales
        )
    else:
        _run_cast(x, masked_m, row_weights, pow2_scales, values, scales)
        count_write((values,))
        count_write((scales,))
    return values, scales


def swiglu_backward(
    x: torch.Tensor, grad: torch.Tensor, row_weights: torch.Tensor | None = None
) -> SwigluGradients:
    """The backward pass of gate / (1 + e^-gate) · up · weight, and the forward result again.

    x [M, 2H] is what the forward pass took, BF16, FP16 or FP32; grad [M, H] of x's type;
    row_weights FP32 [M] or None. All in FP32 in between, rounded once; with s = 1 / (1 + e^-gate)
    the gate's gradient is grad · weight · up · s · (1 + gate · (1 - s)). A row's grad_weights is a
    sum over H in one order. `hidden`, which the next weight's gradient needs, costs no pass of its
    own here. The kernel's e^x is within 2 units in the last place. Raises UnsupportedInput.
    """
    _check_halves(x)
    if x.dim() != 2 or x.dtype not in INPUT_DTYPES:
        raise UnsupportedInput(
            f"x is {x.dtype}{list(x.shape)}: expected [M, 2H] of BF16, FP16 or FP32"
        )
    wanted = (x.shape[0], x.shape[1] // 2)
    if not isinstance(grad, torch.Tensor) or (grad.dtype, tuple(grad.shape)) != (x.dtype, wanted):
        what = f"{grad.dtype}{list(grad.shape)}" if isinstance(grad, torch.Tensor) else type(grad)
        raise UnsupportedInput(f"grad is {what}: expected {x.dtype}{list(wanted)}, as x's halves")
    if grad.device != x.device:
        raise UnsupportedInput(f"grad is on {grad.device}: expected {x.device}, as x")
    _check_weights(row_weights, x)
    ops.refuse_gradient("swiglu_backward", (x, grad, row_weights))
    if ops.is_traced(x, grad, row_weights):
        made = torch.ops.kgen.swiglu_backward(x, grad, row_weights)
    else:
        made = _run_backward(x, grad, row_weights)
    return SwigluGradients(made[0], made[1], None if row_weights is None else made[2])


# ------------------------------------------------------------------------------ the path


def _to_new(  # noqa: PLR0917, the operator's arguments
    x: torch.Tensor,
    masked_m: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    pow2_scales: bool,
    row_major_scales: bool,
    dtype: torch.dtype,
) -> Pair:
    return swiglu_per_token_cast_to_fp8(
        x,
        masked_m,
        row_weights=row_weights,
        pow2_scales=pow2_scales,
        row_major_scales=row_major_scales,
        dtype=dtype,
    )


def _to_given(  # noqa: PLR0917, the operator's arguments
    x: torch.Tensor,
    masked_m: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    pow2_scales: bool,
    values: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    swiglu_per_token_cast_to_fp8(
        x,
        masked_m,
        row_weights=row_weights,
        pow2_scales=pow2_scales,
        dtype=values.dtype,
        out=(values, scales),
    )


def _run_cast(  # noqa: PLR0917, in the order of the operator
    x: torch.Tensor,
    masked_m: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    pow2_scales: bool,
    values: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    row_weights = None if row_weights is None else row_weights.contiguous()
    if not launch_rows(
        x,
        values,
        scales,
        pow2_scales=pow2_scales,
        swiglu=True,
        masked_m=masked_m,
        row_weights=row_weights,
    ):
        with torch.no_grad():
            _cast_reference(x, masked_m, row_weights, pow2_scales, values, scales)


def _run_backward(
    x: torch.Tensor, grad: torch.Tensor, row_weights: torch.Tensor | None
) -> list[torch.Tensor]:
    x, grad = with_adjacent_columns(x), with_adjacent_columns(grad)
    m, h = grad.shape
    vector = is_vectorised(x, h) and is_vectorised(grad, h)
    weighted = row_weights is not None
    kernels = KERNELS.find(x.device, _spec(D_DTYPE_NAMES[x.dtype], vector, weighted))
    if kernels is None:
        with torch.no_grad():
            return _backward_reference(x, grad, row_weights)
    made = [x.new_empty(m, 2 * h), x.new_empty(m, h)]
    if row_weights is not None:
        row_weights = row_weights.contiguous()
        made.append(row_weights.new_empty(m))
    tensors = (x, grad, row_weights, *made, *[None] * (3 - len(made)))
    args = _ARGS.pack(
        *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
        *(tensor.stride(0) for tensor in (x, grad, *made[:2])),
        *(m, h),
    )
    if h:
        kernels[0].launch(ceil_div(m, _ROWS), args)
    elif weighted:
        made[2].zero_()
    return made


@cache
def _spec(in_type: str, vector: bool, weighted: bool) -> Spec:
    variables = element_variables(in_type, in_type, vector, weighted)
    return Spec("casts/swiglu_backward.cu.j2", "kgen_swiglu_backward", _ROWS * 32, variables)


# -------------------------------------------------------------------------------- checks


def _check_halves(x: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise UnsupportedInput(f"x is a {type(x).__name__}: expected a torch.Tensor")
    if x.dim() < 2 or x.shape[-1] % 2:
        raise UnsupportedInput(f"x is {list(x.shape)}: expected gate and up, [..., 2H]")


def _check_weights(row_weights: Any, x: torch.Tensor) -> None:
    if row_weights is None:
        return
    is_tensor = isinstance(row_weights, torch.Tensor)
    fits = is_tensor and row_weights.dtype == torch.float32 and row_weights.device == x.device
    if not fits or tuple(row_weights.shape) != tuple(x.shape[:-1]):
        given = (
            f"{row_weights.dtype}{list(row_weights.shape)} on {row_weights.device}"
            if is_tensor
            else type(row_weights).__name__
        )
        raise UnsupportedInput(
            f"row_weights is {given}: expected float32{list(x.shape[:-1])} on {x.device}, one for "
            "each row of x"
        )


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


# ------------------------------------------------------------------------------ references


def _cast_reference(  # noqa: PLR0917, as _run_cast
    x: torch.Tensor,
    masked_m: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    pow2_scales: bool,
    values: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    hidden = quant.swiglu(x)
    if row_weights is not None:
        hidden = hidden * row_weights[..., None]
    rows = hidden.flatten(0, -2)
    q, s = quant.cast_to_fp8(rows, "token", dtype=values.dtype, pow2_scales=pow2_scales)
    q, s = q.view(values.shape), s.view(scales.shape)
    if masked_m is not None:  # by no count of the host's: a tracer knows none
        row = torch.arange(x.shape[1], device=x.device)
        counts = (row < masked_m[:, None])[..., None]
        q = torch.where(counts, q.view(torch.uint8), values.view(torch.uint8)).view(values.dtype)
        s = torch.where(counts, s, scales)
    values.copy_(q)
    scales.copy_(s)


def _backward_reference(
    x: torch.Tensor, grad: torch.Tensor, row_weights: torch.Tensor | None
) -> list[torch.Tensor]:
    gate, up = x.float().chunk(2, dim=-1)
    ones = 1.0 + torch.exp(-gate)
    sigmoid, silu = 1.0 / ones, gate / ones
    given, hidden = grad.float(), silu * up
    weights = 1.0 if row_weights is None else row_weights[:, None]
    scaled = given * weights
    of_gate = scaled * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    made = [torch.cat([of_gate, scaled * silu], dim=-1).to(x.dtype), (hidden * weights).to(x.dtype)]
    return made if row_weights is None else [*made, (given * hidden).sum(dim=-1)]


moe_ops.register(
    {
        "swiglu_per_token_cast_to_fp8": _to_new,
        "swiglu_per_token_cast_to_fp8_out": _to_given,
        "swiglu_backward": lambda *given: [t for t in swiglu_backward(*given) if t is not None],
    }
)
