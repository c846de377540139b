"""A plain block-scaled FP8 GEMM in Triton: what a user would write, tuned as Triton tunes.

Takes the tensors of a case, writes D. Imports triton: to be imported only where it was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl

#: K columns of a step: one block of scales.
STEP: Final = 128
_CONFIGS: Final = [
    triton.Config({"rows": rows, "columns": columns}, num_warps=warps, num_stages=stages)
    for rows, columns in ((16, 64), (16, 128), (64, 64), (64, 128), (128, 128))
    for warps in (4, 8)
    for stages in (3, 4)
]


def _bench(call: Callable[[], Any], quantiles: Sequence[float]) -> Any:
    """As Triton's own, in a fifth of its time: there are 20 configurations a problem."""
    return triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)


@triton.autotune(configs=_CONFIGS, key=["m", "n", "k"], do_bench=_bench)
@triton.jit
def _kernel(  # noqa: PLR0917, a kernel's arguments
    a,
    b,
    d,
    sfa,
    sfb,
    m,
    n,
    k,
    d_pitch,
    sfa_row,
    sfa_block,
    sfb_row,
    even_k: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    # Eight tiles along M share a panel of B while it lies in L2.
    tile = tl.program_id(0)
    across = tl.cdiv(n, columns)
    band = tile // (8 * across)
    height = tl.minimum(tl.cdiv(m, rows) - 8 * band, 8)
    inside = tile % (8 * across)
    row = (8 * band + inside % height) * rows + tl.arange(0, rows)
    column = (inside // height) * columns + tl.arange(0, columns)
    # Past the end any row does, as nobody stores it: loads then need no mask.
    row_read, column_read = row % m, column % n
    step = tl.arange(0, 128)
    a_at = a + row_read.to(tl.int64)[:, None] * k + step[None, :]
    b_at = b + column_read.to(tl.int64)[None, :] * k + step[:, None]
    sfa_at = sfa + row_read * sfa_row
    sfb_at = sfb + (column_read // 128) * sfb_row
    sums = tl.zeros((rows, columns), tl.float32)
    for block in range(tl.cdiv(k, 128)):
        if even_k:
            x = tl.load(a_at)
            y = tl.load(b_at)
        else:
            left = k - 128 * block
            x = tl.load(a_at, mask=step[None, :] < left, other=0.0)
            y = tl.load(b_at, mask=step[:, None] < left, other=0.0)
        scale = tl.load(sfa_at)[:, None] * tl.load(sfb_at)[None, :]
        sums += tl.dot(x, y) * scale
        a_at += 128
        b_at += 128
        sfa_at += sfa_block
        sfb_at += 1
    d_at = d + row.to(tl.int64)[:, None] * d_pitch + column[None, :]
    tl.store(d_at, sums.to(d.dtype.element_ty), mask=(row[:, None] < m) & (column[None, :] < n))


def gemm(
    a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor, d: torch.Tensor
) -> None:
    """D [m, n] from E4M3 a [m, k], b [n, k], rows contiguous, and their FP32 scales, in place."""
    (m, k), n = a.shape, b.shape[0]

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(m, meta["rows"]) * triton.cdiv(n, meta["columns"]),)

    pitches = (d.stride(0), sfa.stride(0), sfa.stride(1), sfb.stride(0))
    _kernel[grid](a, b, d, sfa, sfb, m, n, k, *pitches, even_k=k % STEP == 0)
