"""Grouped products in plain PyTorch on any device: what answers where no kernel can, and in tests.

Takes E4M3 operands with their scales, or BF16 ones, and what tells the groups; writes D. Waits for
the device where the groups' sizes lie on one. Imports torch only.
"""

from __future__ import annotations

import torch

from kgen.reference import gemm_reference


def contiguous_reference_into(  # noqa: PLR0917, the operands in the kernel's order
    out: torch.Tensor,
    a: torch.Tensor,
    sfa: torch.Tensor,
    b: torch.Tensor,
    sfb: torch.Tensor,
    index: torch.Tensor,
    *,
    recipe: str = "block",
) -> None:
    """Row i of `out` [M, N] = row i of A · B[index[i]]ᵀ; rows of a negative index stay as they are.

    a [M, K], sfa [M, ceil(K/128)], b [G, N, K], sfb [G, ceil(N/128), ceil(K/128)], index [M];
    under recipe "none" scales are not used.
    """
    for group in range(b.shape[0]):
        rows = (index == group).nonzero().flatten()
        if len(rows):
            part = _rows_of(a, rows)
            scales = (sfa, sfb) if recipe == "none" else (sfa[rows], sfb[group])
            out[rows] = gemm_reference(
                part, scales[0], b[group], scales[1], out.dtype, recipe=recipe
            )


def _rows_of(a: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """a[rows]: not every torch indexes E4M3."""
    return a[rows] if a.element_size() > 1 else a.view(torch.uint8)[rows].view(a.dtype)


def masked_reference_into(  # noqa: PLR0917, the operands in the kernel's order
    out: torch.Tensor,
    a: torch.Tensor,
    sfa: torch.Tensor,
    b: torch.Tensor,
    sfb: torch.Tensor,
    counts: torch.Tensor,
    *,
    recipe: str = "block",
) -> None:
    """The first counts[g] rows of `out` [G, max M, N] = those of A[g] · B[g]ᵀ; others stay.

    a [G, max M, K], sfa [G, max M, ceil(K/128)], b, sfb and recipe as above, counts [G].
    """
    for group, count in enumerate(counts.clamp(0, a.shape[1]).tolist()):
        if count:
            scales = (sfa, sfb) if recipe == "none" else (sfa[group, :count], sfb[group])
            part = gemm_reference(a[group, :count], scales[0], b[group], scales[1], recipe=recipe)
            out[group, :count] = part.to(out.dtype)


def index_of(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Groups' offsets [G+1] as the group of each of `rows` rows, -1 where it is in none."""
    numbers = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    index = torch.bucketize(numbers, offsets, right=True) - 1
    return torch.where(index < len(offsets) - 1, index, -1)
