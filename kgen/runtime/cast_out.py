"""Memory that per-token casts write to: `check_out` for a caller's, `empty_rows` for new.

Takes shapes and tensors, every size of which may be symbolic; gives pairs of values and scales.
Must not import the driver, build or dispatch.
"""

from __future__ import annotations

from typing import Any

import torch

from kgen import quant
from kgen.errors import UnsupportedInput
from kgen.problem import SCALE_BLOCK, ceil_div
from kgen.runtime import ops
from kgen.runtime.operands import share_memory

Pair = tuple[torch.Tensor, torch.Tensor]


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
        has_memory = not (x.is_meta or ops.is_traced(x, tensor))
        if has_memory and share_memory(tensor, x):
            raise UnsupportedInput(
                f"out's {name} share memory with x: expected memory of their own"
            )
    if values.shape[-1] > 1 and values.stride(-1) != 1:
        raise UnsupportedInput(
            f"out's values have strides {tuple(values.stride())}: expected adjacent columns"
        )
    return values, scales


def empty_rows(
    x: torch.Tensor, shape: tuple[int, ...], row_major: bool, dtype: torch.dtype
) -> Pair:
    """New memory for FP8 of `shape`, [M, H] or [G, M, H], cast per token."""
    scales = x.new_empty((*shape[:-1], ceil_div(shape[-1], SCALE_BLOCK)), dtype=torch.float32)
    return x.new_empty(shape, dtype=dtype), scales if row_major else quant.empty_col_major(scales)
