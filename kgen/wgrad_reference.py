"""Weight gradients in plain PyTorch on any device: what answers where no kernel can, and in tests.

Takes FP8 operands with their scales; writes D or adds to it. Waits for the device where the
groups' columns are told on one. Imports torch only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kgen.problem import SCALE_BLOCK
from kgen.reference import gemm_reference


def wgrad_reference_into(
    out: torch.Tensor,
    a: torch.Tensor,
    sfa: torch.Tensor,
    b: torch.Tensor,
    sfb: torch.Tensor,
    *,
    recipe: str,
    adds: bool,
) -> None:
    """`out` [M, N] FP32 = A · Bᵀ, or with `adds` += it.

    a [M, K] and b [N, K], scales as `kgen.problem.scale_shapes` says of the recipe. Without columns
    the product is zero.
    """
    if not a.shape[1]:
        if not adds:
            out.zero_()
        return
    product = gemm_reference(a, sfa, b, sfb, recipe=recipe)
    if adds:
        out += product
    else:
        out.copy_(product)


def k_grouped_reference_into(  # noqa: PLR0917, the operands in the kernel's order
    out: torch.Tensor,
    a: torch.Tensor,
    sfa: torch.Tensor,
    b: torch.Tensor,
    sfb: torch.Tensor,
    ks: Sequence[int] | torch.Tensor,
    *,
    adds: bool,
) -> None:
    """`out` [G, M, N] FP32: of each group the product over its own columns, as above.

    a [M, K], or of one dimension with each group's [M, ks[g]] one after another; b alike; sfa and
    sfb [M, K/128] and [N, K/128]; ks multiples of 128, of which the first are the first group's.
    """
    start = 0
    for group, k in enumerate(ks.tolist() if isinstance(ks, torch.Tensor) else ks):
        blocks = slice(start // SCALE_BLOCK, (start + k) // SCALE_BLOCK)
        of_a, of_b = (
            _columns(x, rows, start, k) for x, rows in ((a, out.shape[1]), (b, out.shape[2]))
        )
        scales = sfa[:, blocks], sfb[:, blocks]
        start += k
        wgrad_reference_into(
            out[group], of_a, scales[0], of_b, scales[1], recipe="vector", adds=adds
        )


def _columns(x: torch.Tensor, rows: int, start: int, k: int) -> torch.Tensor:
    if x.dim() == 1:
        return x[rows * start : rows * (start + k)].view(rows, k)
    return x[:, start : start + k]
