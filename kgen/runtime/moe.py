"""Rows of a mixture of experts: which token goes where, gathered, cast, and added up again.

Everything runs on the tensors' device and its current stream, without waiting for it: counts stay
on the device. On a Hopper GPU kernels answer, elsewhere plain PyTorch; both give the same bits, and
the same in every run. Importing this module touches no GPU. Has no gradient.
Must not import search, verify or measure.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any, Final

import torch

from kgen import quant
from kgen.errors import UnsupportedInput
from kgen.problem import ceil_div
from kgen.quant import E4M3, INPUT_DTYPES
from kgen.reference import D_DTYPE_NAMES
from kgen.runtime import moe_ops, ops
from kgen.runtime.cast_launch import (
    element_variables,
    is_vectorised,
    launch_cast,
    launch_rows,
    with_adjacent_columns,
)
from kgen.runtime.cast_options import CastOptions
from kgen.runtime.cast_out import check_out, empty_rows
from kgen.runtime.guard import count_write
from kgen.runtime.plain import KERNELS, Spec
from kgen.runtime.routing import (
    PaddedGroups,
    Routing,
    check_vector,
    pad_groups,
    route_tokens,
    weights_of_rows,
)

__all__ = [
    "PaddedGroups",
    "Routing",
    "combine_rows",
    "gather_per_token_cast_to_fp8",
    "gather_rows",
    "gather_scaled_rows",
    "pad_groups",
    "route_tokens",
    "weights_of_rows",
]

Pair = tuple[torch.Tensor, torch.Tensor]

#: RowsArgs of kgen/templates/moe/args.cuh.
_ROWS_ARGS: Final = struct.Struct("<5Q6q6I")
#: Rows of a CTA of gather.cu.j2, and columns of one of combine.cu.j2.
_GATHER_ROWS: Final = 8
_COMBINE_THREADS: Final = 128
_WORD_BYTES: Final = (16, 8, 4, 2, 1)


def gather_rows(x: torch.Tensor, source_rows: torch.Tensor) -> torch.Tensor:
    """x[source_rows] for x [M, K] of any dtype and int32 source_rows [P]: [P, K].

    Zeros where an index is outside 0 to M - 1, such as -1. Raises UnsupportedInput.
    """
    _check_matrix("x", x)
    check_vector("source_rows", source_rows, x.device)
    ops.refuse_gradient("gather_rows", (x,))
    if ops.is_traced(x, source_rows):
        gathered: torch.Tensor = torch.ops.kgen.gather_rows(x, source_rows)
        return gathered
    return _gather(x, None, source_rows, row_major_scales=True)[0]


def gather_scaled_rows(
    lhs: Pair, source_rows: torch.Tensor, *, row_major_scales: bool = False
) -> Pair:
    """Rows of lhs = (values [M, K], FP32 scales [M, blocks]), cast before: [P, K], [P, blocks].

    Zeros with scale 1 where an index of the int32 source_rows [P] is outside 0 to M - 1. Scales of
    any strides; the result's are column-major with columns on 16 bytes unless `row_major_scales`.
    Raises UnsupportedInput.
    """
    if not isinstance(lhs, tuple | list) or len(lhs) != 2:
        raise UnsupportedInput(f"expected the pair (values, scales), got {type(lhs).__name__}")
    values, scales = lhs
    _check_matrix("values", values)
    is_tensor = isinstance(scales, torch.Tensor)
    if (
        not is_tensor
        or scales.dim() != 2
        or scales.dtype != torch.float32
        or scales.shape[0] != values.shape[0]
        or scales.device != values.device
    ):
        given = f"{_describe(scales)} on {scales.device}" if is_tensor else type(scales).__name__
        raise UnsupportedInput(
            f"scales are {given}: expected float32[{values.shape[0]}, blocks] on {values.device}"
        )
    check_vector("source_rows", source_rows, values.device)
    ops.refuse_gradient("gather_scaled_rows", (values, scales))
    if ops.is_traced(values, scales, source_rows):
        made: Pair = torch.ops.kgen.gather_scaled_rows(
            values, scales, source_rows, row_major_scales
        )
        return made
    gathered, of_rows = _gather(values, scales, source_rows, row_major_scales)
    assert of_rows is not None
    return gathered, of_rows


def gather_per_token_cast_to_fp8(
    x: torch.Tensor,
    source_rows: torch.Tensor,
    *,
    transposed: bool = False,
    pow2_scales: bool = False,
    row_major_scales: bool = False,
    dtype: torch.dtype = E4M3,
    out: Pair | None = None,
) -> Pair:
    """`casts.per_token_cast_to_fp8(x[source_rows])` in one pass: values [P, K], scales [P, blocks].

    `transposed=True` casts x[source_rows] transposed instead, as weight gradients read it: values
    [K, P], scales [K, ceil(P/128)]. A row is zero where its index in the int32 source_rows [P] is
    outside 0 to M - 1; a block of nothing else has scale 1. `out`, which a transposed result can
    not have, and other choices as in `casts.swiglu_per_token_cast_to_fp8`. Raises UnsupportedInput.
    """
    CastOptions(pow2_scales=pow2_scales, dtype=dtype).check(x)
    check_vector("source_rows", source_rows, x.device)
    ops.refuse_gradient("gather_per_token_cast_to_fp8", (x,))
    if transposed and out is not None:
        raise UnsupportedInput("out is given with transposed=True: expected one of the two")
    if out is None and ops.is_traced(x, source_rows):
        made: Pair = torch.ops.kgen.gather_per_token_cast_to_fp8(
            x, source_rows, transposed, pow2_scales, row_major_scales, dtype
        )
        return made
    if transposed:
        options = CastOptions("token", "transposed", False, pow2_scales, row_major_scales, dtype)
        return _gather_transposed(x, source_rows, options)
    shape = (source_rows.shape[0], x.shape[1])
    if out is None:
        values, scales = empty_rows(x, shape, row_major_scales, dtype)
        _gather_cast(x, source_rows, values, scales, pow2_scales)
        return values, scales
    values, scales = check_out(out, x, shape, dtype)
    if ops.is_traced(x, source_rows, values, scales):
        torch.ops.kgen.gather_per_token_cast_to_fp8_out(x, source_rows, pow2_scales, values, scales)
    else:
        _gather_cast(x, source_rows, values, scales, pow2_scales)
        count_write((values,))
        count_write((scales,))
    return values, scales


def combine_rows(
    x: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Σ over j of weights[t, j] · x[positions[t, j]]: un-permutes x [P, K] to [tokens, K].

    positions int32 [tokens, top_k]; outside 0 to P - 1, such as -1: adds nothing. weights FP32 of
    the same shape, None: ones. Products and sums in FP32, each rounded, in the order of j, so that
    every run gives the same bits; the result is rounded once, to `out_dtype` (default: x's). x and
    result are BF16, FP16 or FP32. Raises UnsupportedInput.
    """
    result_dtype = _check_combine(x, positions, weights, out_dtype)
    ops.refuse_gradient("combine_rows", (x, weights))
    if ops.is_traced(x, positions, weights):
        sums: torch.Tensor = torch.ops.kgen.combine_rows(x, positions, weights, out_dtype)
        return sums
    x = with_adjacent_columns(x)
    positions = positions.contiguous()
    weights = None if weights is None else weights.contiguous()
    tokens, top_k, k = *positions.shape, x.shape[1]
    types = D_DTYPE_NAMES[x.dtype], D_DTYPE_NAMES[result_dtype]
    spec = _combine_spec(*types, is_vectorised(x, k), weights is not None)
    kernels = KERNELS.find(x.device, spec)
    if kernels is None:
        return _combine_reference(x, positions, weights, result_dtype)
    out = x.new_empty(tokens, k, dtype=result_dtype)
    args = _pack_rows(x, positions, out, weights, None, k, top_k)
    kernels[0].launch(tokens * ceil_div(k, _COMBINE_THREADS * 8), args)
    return out


# ------------------------------------------------------------------------------ the path


def _gather(
    x: torch.Tensor, scales: torch.Tensor | None, source_rows: torch.Tensor, row_major_scales: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    x, rows = with_adjacent_columns(x), source_rows.contiguous()
    width = x.shape[1] * x.element_size()
    out = x.new_empty(rows.shape[0], x.shape[1])
    out_scales = None
    if scales is not None:
        out_scales = scales.new_empty(rows.shape[0], scales.shape[1])
        out_scales = out_scales if row_major_scales else quant.empty_col_major(out_scales)
    kernels = KERNELS.find(x.device, _gather_spec(_word_bytes(x, width), scales is not None))
    if kernels is None:
        with torch.no_grad():
            out = _gather_reference(x, rows, 0)
            if scales is not None and out_scales is not None:
                out_scales.copy_(_gather_reference(scales, rows, 1))
        return out, out_scales
    args = _pack_rows(x, rows, out, scales, out_scales, width, 0)
    kernels[0].launch(ceil_div(rows.shape[0], _GATHER_ROWS), args)
    return out, out_scales


def _gather_cast(
    x: torch.Tensor,
    source_rows: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    pow2_scales: bool,
) -> None:
    rows = source_rows.contiguous()
    if not launch_rows(x, values, scales, pow2_scales=pow2_scales, rows=rows):
        with torch.no_grad():
            gathered = _gather_reference(x, rows, 0)
            q, s = quant.cast_to_fp8(gathered, "token", dtype=values.dtype, pow2_scales=pow2_scales)
            values.copy_(q)
            scales.copy_(s)


def _gather_transposed(x: torch.Tensor, source_rows: torch.Tensor, options: CastOptions) -> Pair:
    rows = source_rows.contiguous()
    with torch.no_grad():
        result = launch_cast(x, options, rows) if rows.numel() and x.numel() else None
        result = result or options.reference(_gather_reference(x, rows, 0))
    assert result.values_t is not None
    assert result.scales_t is not None
    return result.values_t, result.scales_t


def _word_bytes(x: torch.Tensor, width: int) -> int:
    """The widest word that rows of so many bytes are made of, and lie at multiples of."""
    pitch = x.stride(0) * x.element_size() if x.shape[0] > 1 else 0
    return next(n for n in _WORD_BYTES if width % n == pitch % n == x.data_ptr() % n == 0)


def _pack_rows(  # noqa: PLR0917, in the order of the struct
    x: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    out_scales: torch.Tensor | None,
    width: int,
    top_k: int,
) -> bytes:
    tensors = (x, rows, out, scales, out_scales)
    strides = [tensor.stride(0) * tensor.element_size() for tensor in (x, out)]
    for tensor in (scales, out_scales):
        strides += tensor.stride() if tensor is not None else (0, 0)
    blocks = scales.shape[1] if scales is not None else 0
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    sizes = (rows.shape[0], width, x.shape[0], blocks, top_k, 0)
    return _ROWS_ARGS.pack(*addresses, *strides, *sizes)


@cache
def _gather_spec(vector_bytes: int, scaled: bool) -> Spec:
    variables = {"vector_bytes": vector_bytes, "scaled": scaled}
    return Spec("moe/gather.cu.j2", "kgen_gather", _GATHER_ROWS * 32, variables)


@cache
def _combine_spec(in_type: str, result_type: str, vector: bool, weighted: bool) -> Spec:
    variables = element_variables(in_type, result_type, vector, weighted)
    return Spec("moe/combine.cu.j2", "kgen_combine", _COMBINE_THREADS, variables)


# ------------------------------------------------------------------------------ references


def _gather_reference(x: torch.Tensor, rows: torch.Tensor, fill: float) -> torch.Tensor:
    there = (rows >= 0) & (rows < x.shape[0])
    if not x.shape[0]:
        return x.new_full((rows.shape[0], x.shape[1]), fill)
    gathered = _bytes(x).index_select(0, torch.where(there, rows, 0).long())
    filler = _bytes(torch.full((1, x.shape[1]), fill, device=x.device).to(x.dtype))
    return torch.where(there[:, None], gathered, filler).view(x.dtype)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The same memory as numbers that torch can index and choose among, whatever x holds."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _combine_reference(
    x: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    with torch.no_grad():
        sums = x.new_zeros(positions.shape[0], x.shape[1], dtype=torch.float32)
        for j in range(positions.shape[1]):
            at = positions[:, j]
            there = (at >= 0) & (at < x.shape[0])
            terms = _gather_reference(x, at, 0).float()
            if weights is not None:
                terms = terms * weights[:, j, None]
            sums = torch.where(there[:, None], sums + terms, sums)
        return sums.to(dtype)


# ------------------------------------------------------------------------------- checks


def _check_matrix(name: str, x: Any) -> None:
    if not isinstance(x, torch.Tensor) or x.dim() != 2:
        given = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise UnsupportedInput(f"{name} is {given}: expected a tensor [M, K]")


def _describe(x: torch.Tensor) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _check_combine(
    x: Any, positions: Any, weights: Any, out_dtype: torch.dtype | None
) -> torch.dtype:
    """The result's type."""
    for name, tensor in (("x", x), ("positions", positions)):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 2:
            given = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor)
            raise UnsupportedInput(f"{name} is {given}: expected a tensor of two dimensions")
    dtype: torch.dtype = out_dtype or x.dtype
    for name, kind in (("x is", x.dtype), ("out_dtype is", dtype)):
        if kind not in INPUT_DTYPES:
            raise UnsupportedInput(f"{name} {kind}: expected BF16, FP16 or FP32")
    if positions.dtype != torch.int32 or positions.device != x.device:
        raise UnsupportedInput(
            f"positions is {positions.dtype} on {positions.device}: expected torch.int32 on "
            f"{x.device}"
        )
    if weights is not None:
        fits = isinstance(weights, torch.Tensor) and weights.shape == positions.shape
        if not fits or weights.dtype != torch.float32 or weights.device != x.device:
            what = (
                f"{weights.dtype}{list(weights.shape)} on {weights.device}"
                if isinstance(weights, torch.Tensor)
                else type(weights).__name__
            )
            raise UnsupportedInput(
                f"weights is {what}: expected float32{list(positions.shape)} on {x.device}"
            )
    return dtype


def _gather_cast_to_given(
    x: torch.Tensor, rows: torch.Tensor, pow2: bool, values: torch.Tensor, scales: torch.Tensor
) -> None:
    out = values, scales
    gather_per_token_cast_to_fp8(x, rows, pow2_scales=pow2, dtype=values.dtype, out=out)


moe_ops.register(
    {
        "gather_rows": gather_rows,
        "gather_scaled_rows": lambda values, scales, rows, row_major: gather_scaled_rows(
            (values, scales), rows, row_major_scales=row_major
        ),
        "gather_per_token_cast_to_fp8": lambda x, rows, transposed, pow2, row_major, dtype: (
            gather_per_token_cast_to_fp8(
                x,
                rows,
                transposed=transposed,
                pow2_scales=pow2,
                row_major_scales=row_major,
                dtype=dtype,
            )
        ),
        "gather_per_token_cast_to_fp8_out": _gather_cast_to_given,
        "combine_rows": combine_rows,
    }
)
