"""Launches of the casting kernels: `launch_cast`, `launch_rows`.

Takes checked tensors and choices; packs CastArgs, the kernels' one argument, which
kgen/templates/casts/args.cuh declares alike. Must not import search, verify or measure.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from kgen.errors import UnsupportedInput
from kgen.problem import MAX_EXTENT, SCALE_BLOCK, TMA_ALIGN_BYTES, ceil_div
from kgen.quant import E4M3
from kgen.reference import D_DTYPE_NAMES
from kgen.runtime.cast_options import CastOptions, CastResult
from kgen.runtime.ops import any_stands_for_another
from kgen.runtime.plain import KERNELS, PlainKernel, Spec

#: The halves of CastArgs of kgen/templates/casts/args.cuh.
_ADDRESSES: Final = struct.Struct("<10Q")
_TAIL: Final = struct.Struct("<10q4IQ")
_OUT_TYPES: Final = {E4M3: "e4m3", torch.float8_e5m2: "e5m2"}
#: Which elements share a scale: of the normal result, and of the transposed one, seen from x.
_KINDS: Final = {
    "token": ("row", "column"),
    "block": ("one", "one"),
    "channel": ("column", "row"),
    "row": ("row", "column"),
    "tensor": ("one", "one"),
}
#: Recipes whose scales depend on more than one tile, so that a pass must look for them first.
_GLOBAL: Final = ("row", "tensor")
#: Rows and columns that a CTA of rows.cu.j2 takes at a time, and groups that it can hold counts of.
_ROWS_TILE: Final = (32, 256)
MAX_GROUPS: Final = 1024
#: CTAs an SM that walk over what is there, where the host does not know how much that is.
_WALKERS: Final = 4
#: Layouts remembered; a forgotten one is only worked out again.
_MAX_PLANS: Final = 4096


@dataclass(frozen=True, slots=True)
class _Plan:
    """What stays the same for tensors of one layout: kernels, CTAs, the end of CastArgs, and how
    many floats the passes hand over."""

    kernels: list[PlainKernel]
    grid: int
    tail: bytes
    work: int


def launch_cast(
    x: torch.Tensor, options: CastOptions, rows: torch.Tensor | None = None
) -> CastResult | None:
    """Cast x, which is not empty, into new memory; None where there is no kernel.

    With `rows`, contiguous int32: those rows of x, of which there is one, in tiles of their own,
    so by no recipe of _GLOBAL and not in the normal direction alone.
    """
    x = with_adjacent_columns(x)
    m = x.shape[0] if rows is None else rows.shape[0]
    key = (
        *(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % TMA_ALIGN_BYTES),
        *(options, None if rows is None else m),
    )
    plan = KERNELS.plans.get(key)
    result = None
    if plan is None:
        found = _kernels_for(x, options, m, rows is not None)
        if found is None:
            return None
        result = options.allocate(x, m)
        plan = _plan(x, options, m, result, found)
        if len(KERNELS.plans) >= _MAX_PLANS:
            KERNELS.plans.clear()
        KERNELS.plans[key] = plan
    result = result or options.allocate(x, m)
    work = x.new_zeros(plan.work, dtype=torch.float32) if plan.work else None
    args = _addresses(x, result, work, rows) + plan.tail
    for kernel in plan.kernels:
        kernel.launch(plan.grid, args)
    if options.amax and work is not None:
        return result._replace(amax=work[-1])
    return result


def _kernels_for(
    x: torch.Tensor, options: CastOptions, m: int, gather: bool
) -> list[PlainKernel] | None:
    k = x.shape[1]
    vector = is_vectorised(x, k)
    choice = (D_DTYPE_NAMES[x.dtype], _OUT_TYPES[options.dtype], vector, options.pow2_scales)
    if _is_by_row(options):
        if options.recipe == "row":
            return KERNELS.find(x.device, _row_spec(*choice, options.amax, _row_threads(k)))
        return KERNELS.find(x.device, _rows_spec(*choice, options.amax))
    first = options.recipe in _GLOBAL
    kinds = _KINDS[options.recipe]
    want_amax = options.amax or options.recipe == "tensor"
    parts = (options.normal, options.transposed, options.transposed and m % 16 == 0, kinds, gather)
    specs = [_tile_spec(*choice, "cast", first, want_amax and not first, *parts)]
    if first:
        specs.insert(0, _tile_spec(*choice, "amax", first, want_amax, *parts))
    return KERNELS.find(x.device, *specs)


def _is_by_row(options: CastOptions) -> bool:
    """Whether no tiles are needed: a row's scales depend on the row alone."""
    return not options.transposed and options.recipe in ("token", "row")


def _plan(
    x: torch.Tensor,
    options: CastOptions,
    m: int,
    result: CastResult,
    kernels: list[PlainKernel],
) -> _Plan:
    k = x.shape[1]
    grid, work = ceil_div(m, SCALE_BLOCK) * ceil_div(k, SCALE_BLOCK), 0
    if _is_by_row(options):
        grid = m if options.recipe == "row" else _row_tiles(m, k)
    elif options.recipe in _GLOBAL:
        work = m + k + 1  # amax of every row, then of every column, then of all
    return _Plan(kernels, grid, _tail(x, result), work)


def launch_rows(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    *,
    pow2_scales: bool,
    swiglu: bool = False,
    masked_m: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
) -> bool:
    """Cast per token into checked memory: x, its SwiGLU, or those rows of it that `rows` names.

    `row_weights`, contiguous, multiply the rows of a SwiGLU. False where there is no kernel, or no
    memory.
    """
    if any_stands_for_another(x, values, scales, masked_m, rows, row_weights):
        return False
    x = with_adjacent_columns(x)
    k = values.shape[-1]
    vector = is_vectorised(x, k) and is_vectorised(values, k, 8)
    spec = _rows_spec(
        D_DTYPE_NAMES[x.dtype],
        _OUT_TYPES[values.dtype],
        vector,
        pow2_scales,
        False,
        swiglu,
        masked_m is not None,
        rows is not None,
        row_weights is not None,
    )
    kernels = KERNELS.find(x.device, spec)
    if kernels is None:
        return False
    if not values.numel():
        return True
    m = values.shape[-2]
    groups = values.shape[0] if masked_m is not None else 1
    grid = groups * _row_tiles(m, k)
    if masked_m is not None:
        grid = min(grid, KERNELS.num_sms(x.device) * _WALKERS)
    result = CastResult(values, scales, None, None, None)
    args = _addresses(x, result, None, rows, masked_m) + _tail(x, result, row_weights)
    kernels[0].launch(grid, args)
    return True


def _addresses(
    x: torch.Tensor,
    result: CastResult,
    work: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> bytes:
    """The first half of CastArgs. `work`: amax of rows, columns and all."""
    of_rows = of_columns = of_all = 0
    if work is not None:
        of_rows = work.data_ptr()
        of_columns = of_rows + 4 * x.shape[0]
        of_all = of_columns + 4 * x.shape[1]
    values, scales, values_t, scales_t, amax = result
    return _ADDRESSES.pack(
        x.data_ptr(),
        0 if values is None else values.data_ptr(),
        0 if scales is None else scales.data_ptr(),
        0 if values_t is None else values_t.data_ptr(),
        0 if scales_t is None else scales_t.data_ptr(),
        of_all if amax is None or work is not None else amax.data_ptr(),
        of_rows,
        of_columns,
        0 if rows is None else rows.data_ptr(),
        0 if counts is None else counts.data_ptr(),
    )


def _tail(x: torch.Tensor, result: CastResult, row_weights: torch.Tensor | None = None) -> bytes:
    """The second half of CastArgs: strides, sizes and what came later."""
    values, scales, values_t, scales_t, _ = result
    strides = (
        x.stride(-2),
        values.stride(-2) if values is not None else 0,
        values_t.stride(0) if values_t is not None else 0,
        *(scales.stride()[-2:] if scales is not None else (0, 0)),
        *(scales_t.stride() if scales_t is not None else (0, 0)),
        *(t.stride(0) if t is not None and t.dim() == 3 else 0 for t in (x, values, scales)),
    )
    groups = x.shape[0] if x.dim() == 3 else 1
    # The result's: x has other columns before a SwiGLU, other rows before a gather.
    m, k = x.shape[-2:]
    if values is not None:
        m, k = values.shape[-2:]
    elif values_t is not None:
        k, m = values_t.shape
    weights = 0 if row_weights is None else row_weights.data_ptr()
    return _TAIL.pack(*strides, m, k, x.shape[-2], groups, weights)


def _row_tiles(m: int, k: int) -> int:
    return ceil_div(m, _ROWS_TILE[0]) * ceil_div(k, _ROWS_TILE[1])


def _row_threads(k: int) -> int:
    """Threads that hold a row of k at 32 elements each, within a warp and eight."""
    return min(256, max(32, 1 << (ceil_div(k, 32) - 1).bit_length()))


# --------------------------------------------------------------------------- the kernels


@cache
def _rows_spec(  # noqa: PLR0917, a kernel's choices, made once each
    in_type: str,
    out_type: str,
    vector: bool,
    pow2_scales: bool,
    amax: bool,
    swiglu: bool = False,
    masked: bool = False,
    gather: bool = False,
    weighted: bool = False,
) -> Spec:
    return Spec("casts/rows.cu.j2", "kgen_cast_rows", 256, dict(locals()))


@cache
def _row_spec(  # noqa: PLR0917
    in_type: str, out_type: str, vector: bool, pow2_scales: bool, amax: bool, threads: int
) -> Spec:
    return Spec("casts/row.cu.j2", "kgen_cast_row", threads, dict(locals()))


@cache
def _tile_spec(  # noqa: PLR0917
    in_type: str,
    out_type: str,
    vector: bool,
    pow2_scales: bool,
    stage: str,
    global_scale: bool,
    amax: bool,
    normal: bool,
    transposed: bool,
    vector_t: bool,
    kinds: tuple[str, str],
    gather: bool,
) -> Spec:
    variables = dict(locals())
    variables["normal_scale"], variables["transposed_scale"] = variables.pop("kinds")
    return Spec("casts/tile.cu.j2", "kgen_cast_tile", 256, variables)


def element_variables(
    in_type: str, result_type: str, vector: bool, weighted: bool
) -> dict[str, Any]:
    """Variables of a kernel that works on elements as casts do, and itself casts nothing."""
    return {
        "in_type": in_type,
        "result_type": result_type,
        "vector": vector,
        "weighted": weighted,
        "out_type": "e4m3",  # of the elements' common code
        "pow2_scales": False,
    }


# ------------------------------------------------------------------------------- tensors


def with_adjacent_columns(x: torch.Tensor) -> torch.Tensor:
    """x itself, or a copy where kernels could not read its rows."""
    x = x.resolve_neg().resolve_conj()
    if max(x.shape) > MAX_EXTENT:
        raise UnsupportedInput(f"x is {list(x.shape)}: expected each extent at most {MAX_EXTENT}")
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def is_vectorised(x: torch.Tensor, k: int, align: int = 16) -> bool:
    """Whether rows can be read eight elements at a time: k a multiple of 8, every row on `align`
    bytes."""
    size = x.element_size()
    strides = [stride for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
    return (
        k % 8 == 0
        and x.data_ptr() % align == 0
        and all(stride * size % align == 0 for stride in strides)
    )
