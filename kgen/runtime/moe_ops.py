"""What lies around grouped GEMMs as PyTorch operators, `torch.ops.kgen.*`, for torch.compile.

    transpose_block_cast(values, scales) -> (Tensor, Tensor)
    swiglu_per_token_cast_to_fp8(x, masked_m, row_weights, pow2_scales, row_major_scales, dtype)
        -> (Tensor, Tensor)
    swiglu_backward(x, grad, row_weights) -> Tensor[]
    route_tokens(topk_ids, num_experts, alignment) -> Tensor[]
    pad_groups(m_offsets, num_rows, alignment, source_rows) -> (Tensor, Tensor)
    gather_rows(x, source_rows) -> Tensor
    gather_scaled_rows(values, scales, source_rows, row_major_scales) -> (Tensor, Tensor)
    gather_per_token_cast_to_fp8(x, source_rows, transposed, pow2_scales, row_major_scales, dtype)
        -> (Tensor, Tensor)
    combine_rows(x, positions, weights, out_dtype) -> Tensor

Shapes and types as in the functions of the same names in `kgen.runtime.casts` and
`kgen.runtime.moe`; two have a form `..._out` that writes values and scales it is given. The
functions' modules give what runs one; here are schemas and stand-ins, in which every size may be
symbolic. Imports torch, quant, ops and cast_out; touches no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from kgen import quant
from kgen.problem import SCALE_BLOCK, ceil_div, round_up
from kgen.runtime.cast_out import empty_rows
from kgen.runtime.ops import check, define

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]

_TO_NEW: Final = "bool pow2_scales, bool row_major_scales, ScalarType dtype) -> (Tensor, Tensor)"
_TO_GIVEN: Final = "bool pow2_scales, Tensor(a!) values, Tensor(b!) scales) -> ()"
_SWIGLU: Final = "(Tensor x, Tensor? masked_m, Tensor? row_weights, "
_SCHEMAS: Final = {
    "transpose_block_cast": "(Tensor values, Tensor scales) -> (Tensor, Tensor)",
    "swiglu_per_token_cast_to_fp8": _SWIGLU + _TO_NEW,
    "swiglu_per_token_cast_to_fp8_out": _SWIGLU + _TO_GIVEN,
    "swiglu_backward": "(Tensor x, Tensor grad, Tensor? row_weights) -> Tensor[]",
    "route_tokens": "(Tensor topk_ids, int num_experts, int alignment) -> Tensor[]",
    "pad_groups": (
        "(Tensor m_offsets, SymInt num_rows, int alignment, Tensor? source_rows) "
        "-> (Tensor, Tensor)"
    ),
    "gather_rows": "(Tensor x, Tensor source_rows) -> Tensor",
    "gather_scaled_rows": (
        "(Tensor values, Tensor scales, Tensor source_rows, bool row_major_scales) "
        "-> (Tensor, Tensor)"
    ),
    "gather_per_token_cast_to_fp8": "(Tensor x, Tensor source_rows, bool transposed, " + _TO_NEW,
    "gather_per_token_cast_to_fp8_out": "(Tensor x, Tensor source_rows, " + _TO_GIVEN,
    "combine_rows": (
        "(Tensor x, Tensor positions, Tensor? weights, ScalarType? out_dtype) -> Tensor"
    ),
}


def register(kernels: Mapping[str, Callable[..., Any]]) -> None:
    """Define these operators, once a process, by what runs them on tensors that hold memory."""
    define(_SCHEMAS, kernels, _FAKES)


def padded_rows(count: int, num_groups: int, alignment: int) -> int:
    """Rows that `count` rows in groups of any sizes fit, each used group padded to alignment."""
    if alignment == 1:
        return count
    return round_up(count + min(count, num_groups) * (alignment - 1), alignment)


def route_shapes(ids: Tensor, num_experts: int, alignment: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of the five tensors of a `kgen.runtime.moe.Routing`."""
    capacity = padded_rows(ids.shape[0] * ids.shape[1], num_experts, alignment)
    return (capacity,), tuple(ids.shape), (num_experts + 1,), (capacity,), (num_experts,)


def empty_transposed(x: Tensor) -> Tensor:
    """Memory for x [..., m, k] transposed, contiguous."""
    *groups, m, k = x.shape
    return x.new_empty(*groups, k, m)


# ---------------------------------------------------------------------------- stand-ins


def _fake_transpose(values: Tensor, scales: Tensor) -> Pair:
    return empty_transposed(values), empty_transposed(scales)


def _fake_swiglu(  # noqa: PLR0917, the operator's arguments
    x: Tensor,
    masked_m: Tensor | None,
    row_weights: Tensor | None,
    pow2_scales: bool,
    row_major_scales: bool,
    dtype: torch.dtype,
) -> Pair:
    check(x.dim() == (2 if masked_m is None else 3), "x", x, "[M, 2H], or [G, max M, 2H] masked")
    return empty_rows(x, (*x.shape[:-1], x.shape[-1] // 2), row_major_scales, dtype)


def _fake_swiglu_out(  # noqa: PLR0917, the operator's arguments
    x: Tensor,
    masked_m: Tensor | None,
    row_weights: Tensor | None,
    pow2_scales: bool,
    values: Tensor,
    scales: Tensor,
) -> None:
    check(values.dim() == x.dim() == scales.dim(), "values", values, "as many dimensions as x")


def _fake_backward(x: Tensor, grad: Tensor, row_weights: Tensor | None) -> list[Tensor]:
    check(x.dim() == 2 == grad.dim(), "x", x, "[M, 2H]")
    made = [x.new_empty(x.shape), x.new_empty(grad.shape)]
    return made if row_weights is None else [*made, row_weights.new_empty(x.shape[0])]


def _fake_route(ids: Tensor, num_experts: int, alignment: int) -> list[Tensor]:
    shapes = route_shapes(ids, num_experts, alignment)
    return [ids.new_empty(shape, dtype=torch.int32) for shape in shapes]


def _fake_pad(offsets: Tensor, num_rows: int, alignment: int, rows: Tensor | None) -> Pair:
    groups = offsets.shape[0] - 1
    return offsets.new_empty(padded_rows(num_rows, groups, alignment)), offsets.new_empty(groups)


def _fake_gather(x: Tensor, rows: Tensor) -> Tensor:
    return x.new_empty(rows.shape[0], x.shape[1])


def _fake_gather_scaled(values: Tensor, scales: Tensor, rows: Tensor, row_major: bool) -> Pair:
    of_rows = scales.new_empty(rows.shape[0], scales.shape[1])
    return _fake_gather(values, rows), of_rows if row_major else quant.empty_col_major(of_rows)


def _fake_gather_cast(  # noqa: PLR0917, the operator's arguments
    x: Tensor,
    rows: Tensor,
    transposed: bool,
    pow2_scales: bool,
    row_major_scales: bool,
    dtype: torch.dtype,
) -> Pair:
    shape = rows.shape[0], x.shape[1]
    return empty_rows(x, shape[::-1] if transposed else shape, row_major_scales, dtype)


def _fake_gather_cast_out(
    x: Tensor, rows: Tensor, pow2_scales: bool, values: Tensor, scales: Tensor
) -> None:
    check(values.shape[1] == x.shape[1], "values", values, f"[{rows.shape[0]}, {x.shape[1]}]")
    blocks = ceil_div(x.shape[1], SCALE_BLOCK)
    check(scales.shape[1] == blocks, "scales", scales, f"[{rows.shape[0]}, {blocks}]")


def _fake_combine(
    x: Tensor, positions: Tensor, weights: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    return x.new_empty(positions.shape[0], x.shape[1], dtype=out_dtype or x.dtype)


_FAKES: Final[dict[str, Callable[..., Any]]] = {
    "transpose_block_cast": _fake_transpose,
    "swiglu_per_token_cast_to_fp8": _fake_swiglu,
    "swiglu_per_token_cast_to_fp8_out": _fake_swiglu_out,
    "swiglu_backward": _fake_backward,
    "route_tokens": _fake_route,
    "pad_groups": _fake_pad,
    "gather_rows": _fake_gather,
    "gather_scaled_rows": _fake_gather_scaled,
    "gather_per_token_cast_to_fp8": _fake_gather_cast,
    "gather_per_token_cast_to_fp8_out": _fake_gather_cast_out,
    "combine_rows": _fake_combine,
}
