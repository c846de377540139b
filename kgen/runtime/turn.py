"""Block casts transposed after the cast: `transpose_block_cast`, on the tensors' device.

Takes FP8 values and the scales of their 128x128 blocks, gives those of the transposed matrix: bytes
and scales move, nothing is rounded again. On a Hopper GPU a kernel answers, elsewhere plain
PyTorch. `kgen.runtime.casts` offers it. Must not import search, verify or measure.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any, Final

import torch

from kgen.errors import UnsupportedInput
from kgen.problem import SCALE_BLOCK, ceil_div
from kgen.quant import FP8_MAX
from kgen.runtime import moe_ops, ops
from kgen.runtime.cast_launch import with_adjacent_columns
from kgen.runtime.plain import KERNELS, Spec

Pair = tuple[torch.Tensor, torch.Tensor]

#: TurnArgs of kgen/templates/casts/turn.cu.j2.
_ARGS: Final = struct.Struct("<4Q7q2I")


def transpose_block_cast(weight: Pair) -> Pair:
    """The block cast of W transposed, of weight = (values [N, K], scales) that W was cast to.

    values    E4M3 or E5M2 [N, K], or [G, N, K], each group by itself
    scales    FP32 [ceil(N/128), ceil(K/128)], or [G, ...], of any strides

    Gives values [K, N] and scales [ceil(K/128), ceil(N/128)], or [G, ...], contiguous and in memory
    of their own: the bits that `per_block_cast_to_fp8(w, transposed=True)` gives, for a block's
    scale does not depend on the direction. Has no gradient. Raises UnsupportedInput.
    """
    values, scales = _check(weight)
    ops.refuse_gradient("transpose_block_cast", (values, scales))
    if ops.is_traced(values, scales):
        turned: Pair = torch.ops.kgen.transpose_block_cast(values, scales)
        return turned
    return _run(values, scales)


def _run(values: torch.Tensor, scales: torch.Tensor) -> Pair:
    values = with_adjacent_columns(values)
    *_, m, k = values.shape
    kernels = KERNELS.find(values.device, _spec(_is_vectorised(values), m % 16 == 0))
    if kernels is None:
        return _reference(values, scales)
    values_t, scales_t = moe_ops.empty_transposed(values), moe_ops.empty_transposed(scales)
    if values.numel():
        groups = values.shape[0] if values.dim() == 3 else 1
        of_groups = [t.stride(0) if t.dim() == 3 else 0 for t in (values, values_t, scales)]
        args = _ARGS.pack(
            *(t.data_ptr() for t in (values, values_t, scales, scales_t)),
            *(values.stride(-2), of_groups[0], values_t.stride(-2), of_groups[1]),
            *(scales.stride(-2), scales.stride(-1), of_groups[2]),
            *(m, k),
        )
        kernels[0].launch(groups * ceil_div(m, SCALE_BLOCK) * ceil_div(k, SCALE_BLOCK), args)
    return values_t, scales_t


def _check(weight: Any) -> Pair:
    """The pair of values and scales of a block cast; raises UnsupportedInput for anything else."""
    if not isinstance(weight, tuple | list) or len(weight) != 2:
        raise UnsupportedInput(f"expected the pair (values, scales), got {type(weight).__name__}")
    values, scales = weight
    for name, tensor in (("values", values), ("scales", scales)):
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            given = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise UnsupportedInput(f"{name} are {given}: expected a plain tensor")
    if values.dtype not in FP8_MAX or values.dim() not in (2, 3):
        raise UnsupportedInput(
            f"values are {values.dtype}{list(values.shape)}: expected float8_e4m3fn or float8_e5m2 "
            "[N, K] or [G, N, K]; a weight is cast by per_block_cast_to_fp8(w, transposed=True)"
        )
    blocks = (*values.shape[:-2], *(ceil_div(extent, SCALE_BLOCK) for extent in values.shape[-2:]))
    if scales.dtype != torch.float32 or tuple(scales.shape) != blocks:
        raise UnsupportedInput(
            f"scales are {scales.dtype}{list(scales.shape)}: expected float32{list(blocks)}, one "
            "for each 128x128 block of values. Scales of other recipes belong to rows, whose "
            "transposed have none: cast W transposed"
        )
    if values.device != scales.device:
        raise UnsupportedInput(
            f"values on {values.device}, scales on {scales.device}: expected one device"
        )
    return values, scales


def _is_vectorised(values: torch.Tensor) -> bool:
    """Whether rows can be read eight bytes at a time."""
    strides = values.stride()[:-1]
    return not any(n % 8 for n in (values.shape[-1], values.data_ptr(), *strides))


@cache
def _spec(vector: bool, vector_t: bool) -> Spec:
    return Spec("casts/turn.cu.j2", "kgen_turn", 256, {"vector": vector, "vector_t": vector_t})


def _reference(values: torch.Tensor, scales: torch.Tensor) -> Pair:
    turned = (t.transpose(-1, -2) for t in (values.view(torch.uint8), scales))
    # Clones: of one row or column, transposed, contiguous() gives the same memory.
    values_t, scales_t = (t.clone(memory_format=torch.contiguous_format) for t in turned)
    return values_t.view(values.dtype), scales_t


moe_ops.register({"transpose_block_cast": lambda *weight: transpose_block_cast(weight)})
