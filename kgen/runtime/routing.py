"""Where tokens go in a mixture of experts: sorted by expert, groups padded; on the device.

Takes the router's choices and groups' offsets, gives indices for `kgen.runtime.moe` to gather and
add up rows by, which also offers these calls. Counts stay on the device: nothing waits for it. On
a Hopper GPU kernels answer, elsewhere plain PyTorch; both give the same bits, and the same in every
run. Must not import search, verify or measure.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any, Final, NamedTuple

import torch

from kgen.errors import UnsupportedInput
from kgen.problem import SCALE_BLOCK, ceil_div
from kgen.runtime import moe_ops, ops
from kgen.runtime.plain import KERNELS, Spec

#: RouteArgs of kgen/templates/moe/args.cuh, and PadArgs of pad.cu.j2 beside it.
_ROUTE_ARGS: Final = struct.Struct("<7Q6I")
_PAD_ARGS: Final = struct.Struct("<4Q4I")
#: Choices that a CTA of route.cu.j2 sees to, its threads and warps, and experts that it can count.
_CHUNK: Final = 4096
_ROUTE_THREADS: Final = 512
_ROUTE_WARPS: Final = 16
MAX_EXPERTS: Final = 1024
#: Padded rows that a CTA of pad.cu.j2 writes, and its threads.
_PAD_ROWS: Final = 4096
_PAD_THREADS: Final = 256


class Routing(NamedTuple):
    """Where tokens go, expert by expert; int32, on the device of the choices.

    Rows of one expert lie together, in the order of token and choice, and begin at a multiple of
    the alignment. `capacity` is known on the host: every choice, and what alignment may add.

    source_rows   [capacity] the token of each row; -1 in padding and past the end
    positions     [tokens, top_k] the row of each choice; -1 where it was dropped
    m_offsets     [experts + 1] first row of each expert; the last is the number of rows in use
    m_indices     [capacity] expert of each row; -1 in padding and past the end
    counts        [experts] rows of each expert, padding not counted
    """

    source_rows: torch.Tensor
    positions: torch.Tensor
    m_offsets: torch.Tensor
    m_indices: torch.Tensor
    counts: torch.Tensor


class PaddedGroups(NamedTuple):
    """Rows of groups in places of their own; int32, on the offsets' device.

    Each group begins at a multiple of the alignment. How many places there are is known on the
    host: all rows, and what padding may add to any groups of them.

    source_rows   [places] the row in each place; -1 in padding and past the end
    ks            [groups] places of each group, a multiple of the alignment
    """

    source_rows: torch.Tensor
    ks: torch.Tensor


def route_tokens(topk_ids: torch.Tensor, num_experts: int, *, alignment: int = 1) -> Routing:
    """Sort the choices topk_ids [tokens, top_k], int32 or int64, by expert; stable.

    Ids outside 0 to num_experts - 1, such as -1, are dropped: other GPUs' experts, for one.
    `alignment`: rows that each expert's part is filled up to a multiple of; 1: no padding. Up to
    1024 experts. Raises UnsupportedInput.
    """
    _check_ids(topk_ids, num_experts, alignment)
    if ops.is_traced(topk_ids):
        return Routing(*torch.ops.kgen.route_tokens(topk_ids, num_experts, alignment))
    count = topk_ids.numel()
    capacity = moe_ops.padded_rows(count, num_experts, alignment)
    ids = topk_ids.contiguous()
    chunks = max(1, ceil_div(count, _CHUNK))
    phases = ("all",) if chunks == 1 else ("count", "scan", "place")
    id_type = "int64" if ids.dtype == torch.int64 else "int32"
    specs = [_route_spec(phase, id_type) for phase in phases]
    kernels = KERNELS.find(ids.device, *specs)
    if kernels is None:
        return _route_reference(ids, num_experts, alignment, capacity)
    shapes = moe_ops.route_shapes(ids, num_experts, alignment)
    made = Routing(*(ids.new_empty(shape, dtype=torch.int32) for shape in shapes))
    chunk_counts = ids.new_empty(chunks * num_experts, dtype=torch.int32)
    addresses = [tensor.data_ptr() for tensor in (ids, *made, chunk_counts)]
    sizes = (count, num_experts, max(1, ids.shape[1]), alignment, capacity, chunks)
    args = _ROUTE_ARGS.pack(*addresses, *sizes)
    for phase, kernel in zip(phases, kernels, strict=True):
        smem_bytes = 0 if phase == "scan" else 4 * _ROUTE_WARPS * num_experts
        kernel.launch(1 if phase == "scan" else chunks, args, smem_bytes)
    return made


def pad_groups(
    m_offsets: torch.Tensor,
    num_rows: int,
    *,
    alignment: int = SCALE_BLOCK,
    source_rows: torch.Tensor | None = None,
) -> PaddedGroups:
    """Places for the rows of groups, each group filled up to a multiple of `alignment`.

    m_offsets     int32 [G+1] as grouped products take it: group g has the rows from m_offsets[g] up
                  to m_offsets[g + 1], of `num_rows` at most; up to 1024 groups
    source_rows   int32 [num_rows], what to name in a row's place: the token that it came from, say
                  (`Routing.source_rows`); None: the row itself

    A weight gradient sums over rows in blocks of 128, of one group each: cast what it reads by
    `kgen.runtime.moe.gather_per_token_cast_to_fp8(x, padded.source_rows, transposed=True)`. Raises
    UnsupportedInput.
    """
    _check_groups(m_offsets, num_rows, alignment, source_rows)
    if ops.is_traced(m_offsets, source_rows):
        return PaddedGroups(*torch.ops.kgen.pad_groups(m_offsets, num_rows, alignment, source_rows))
    offsets = m_offsets.contiguous()
    rows = None if source_rows is None else source_rows.contiguous()
    groups = offsets.shape[0] - 1
    capacity = moe_ops.padded_rows(num_rows, groups, alignment)
    kernels = KERNELS.find(offsets.device, _PAD_SPEC)
    if kernels is None:
        return _pad_reference(offsets, num_rows, alignment, rows, capacity)
    made = PaddedGroups(offsets.new_empty(capacity), offsets.new_empty(groups))
    tensors = (offsets, rows, *made)
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    args = _PAD_ARGS.pack(*addresses, groups, num_rows, alignment, capacity)
    kernels[0].launch(max(1, ceil_div(capacity, _PAD_ROWS)), args)
    return made


def weights_of_rows(weights: torch.Tensor, positions: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The weight of each of `num_rows` rows, FP32: weights[t, j] at positions[t, j], elsewhere 0.

    weights [tokens, top_k] FP32, positions int32 of its shape as in `Routing`: one row a choice.
    A few calls of PyTorch, which torch.compile sees. Raises UnsupportedInput.
    """
    fits = isinstance(weights, torch.Tensor) and weights.dtype == torch.float32
    same = fits and isinstance(positions, torch.Tensor) and weights.shape == positions.shape
    if not same or positions.dtype != torch.int32:
        given = [
            f"{t.dtype}{list(t.shape)}" if isinstance(t, torch.Tensor) else type(t).__name__
            for t in (weights, positions)
        ]
        raise UnsupportedInput(
            f"weights are {given[0]} and positions {given[1]}: expected float32 and int32 [tokens, "
            "top_k]"
        )
    there = (positions >= 0) & (positions < num_rows)
    at = torch.where(there, positions, num_rows).flatten().long()
    rows = weights.new_zeros(num_rows + 1).scatter(0, at, weights.flatten())
    return rows[:num_rows]


# ------------------------------------------------------------------------------ the path


@cache
def _route_spec(phase: str, id_type: str) -> Spec:
    variables = {"phase": phase, "id_type": id_type}
    smem_bytes = 0 if phase == "scan" else 4 * _ROUTE_WARPS * MAX_EXPERTS
    return Spec("moe/route.cu.j2", "kgen_route", _ROUTE_THREADS, variables, smem_bytes)


_PAD_SPEC: Final = Spec("moe/pad.cu.j2", "kgen_pad", _PAD_THREADS, {})


# ------------------------------------------------------------------------------ references


def _route_reference(ids: torch.Tensor, num_experts: int, alignment: int, capacity: int) -> Routing:
    flat = ids.flatten().long()
    kept = (flat >= 0) & (flat < num_experts)
    group = torch.where(kept, flat, num_experts)
    order = torch.argsort(group, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.long, device=ids.device)
    counts.scatter_add_(0, group, torch.ones_like(group))
    padded = (counts[:num_experts] + alignment - 1) // alignment * alignment
    offsets = torch.nn.functional.pad(padded.cumsum(0), (1, 0))
    first = torch.nn.functional.pad(counts.cumsum(0), (1, 0))[: num_experts + 1]
    sorted_group = group[order]
    rank = torch.arange(flat.numel(), device=ids.device) - first[sorted_group]
    row = torch.where(sorted_group < num_experts, offsets[sorted_group] + rank, capacity)
    source_rows, m_indices = (row.new_full((capacity + 1,), -1) for _ in range(2))
    source_rows[row] = torch.div(order, max(1, ids.shape[1]), rounding_mode="floor")
    m_indices[row] = sorted_group
    positions = torch.empty_like(flat)
    positions[order] = torch.where(row < capacity, row, -1)
    parts = (
        source_rows[:capacity],
        positions.view(ids.shape),
        offsets,
        m_indices[:capacity],
        counts[:num_experts],
    )
    return Routing(*(part.int() for part in parts))


def _pad_reference(
    offsets: torch.Tensor, num_rows: int, alignment: int, rows: torch.Tensor | None, capacity: int
) -> PaddedGroups:
    at = offsets.long().clamp(0, num_rows)
    counts = (at[1:] - at[:-1]).clamp(min=0)
    ks = (counts + alignment - 1) // alignment * alignment
    first = torch.nn.functional.pad(ks.cumsum(0), (1, 0))
    places = torch.arange(capacity, device=offsets.device)
    if not counts.numel():
        return PaddedGroups(torch.full_like(places, -1).int(), ks.int())
    group = (torch.bucketize(places, first, right=True) - 1).clamp(max=len(counts) - 1)
    row = at[group] + places - first[group]
    there = (row < at[group + 1]) & (places < first[-1])
    named = row if rows is None or not num_rows else rows.long()[row.clamp(0, num_rows - 1)]
    return PaddedGroups(torch.where(there, named, -1).int(), ks.int())


# -------------------------------------------------------------------------------- checks


def _check_ids(topk_ids: Any, num_experts: int, alignment: int) -> None:
    if not isinstance(topk_ids, torch.Tensor) or topk_ids.dim() != 2:
        given = list(topk_ids.shape) if isinstance(topk_ids, torch.Tensor) else type(topk_ids)
        raise UnsupportedInput(f"topk_ids is {given}: expected a tensor [tokens, top_k]")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise UnsupportedInput(f"topk_ids is {topk_ids.dtype}: expected int32 or int64")
    for name, number in (("num_experts", num_experts), ("alignment", alignment)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise UnsupportedInput(f"{name}={number!r}: expected a whole number")
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise UnsupportedInput(f"num_experts={num_experts}: expected 1 to {MAX_EXPERTS}")
    if alignment < 1 or moe_ops.padded_rows(topk_ids.numel(), num_experts, alignment) >= 2**31:
        raise UnsupportedInput(
            f"alignment={alignment} with {topk_ids.numel()} choices: expected at least 1, and "
            "fewer than 2^31 rows in all"
        )


def check_vector(name: str, vector: Any, device: torch.device | None = None) -> None:
    """Raises UnsupportedInput for anything but an int32 tensor [any], on `device` if given."""
    if not isinstance(vector, torch.Tensor):
        raise UnsupportedInput(f"{name} is a {type(vector).__name__}: expected a torch.Tensor")
    device = device or vector.device
    if vector.dtype != torch.int32 or vector.dim() != 1 or vector.device != device:
        raise UnsupportedInput(
            f"{name} is {vector.dtype}{list(vector.shape)} on {vector.device}: expected "
            f"torch.int32 with one dimension on {device}"
        )


def _check_groups(m_offsets: Any, num_rows: Any, alignment: Any, source_rows: Any) -> None:
    check_vector("m_offsets", m_offsets)
    if source_rows is not None:
        check_vector("source_rows", source_rows, m_offsets.device)
    groups = m_offsets.shape[0] - 1
    if not 0 <= groups <= MAX_EXPERTS:
        raise UnsupportedInput(
            f"m_offsets has {groups + 1} values: expected [G+1] with at most {MAX_EXPERTS} groups"
        )
    for name, number in (("num_rows", num_rows), ("alignment", alignment)):
        if isinstance(number, bool) or not isinstance(number, int | torch.SymInt):
            raise UnsupportedInput(f"{name}={number!r}: expected a whole number")
    if num_rows < 0 or alignment < 1 or moe_ops.padded_rows(num_rows, groups, alignment) >= 2**31:
        raise UnsupportedInput(
            f"num_rows={num_rows} alignment={alignment}: expected at least 0 and 1, and fewer than "
            "2^31 rows in all"
        )
    if source_rows is not None and source_rows.shape[0] != num_rows:
        raise UnsupportedInput(
            f"source_rows is int32{list(source_rows.shape)}: expected [{num_rows}], one for each "
            "row"
        )


moe_ops.register(
    {
        "route_tokens": lambda ids, experts, alignment: list(
            route_tokens(ids, experts, alignment=alignment)
        ),
        "pad_groups": lambda offsets, num_rows, alignment, rows: tuple(
            pad_groups(offsets, num_rows, alignment=alignment, source_rows=rows)
        ),
    }
)
