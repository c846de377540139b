"""A kernel played on the CPU: two-level accumulation with, where asked, one fault built in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

#: Fraction bits that Hopper keeps of an FP8 sum inside the tensor core.
FRACTION_BITS = 13


def truncate(values: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Cut values toward zero at FRACTION_BITS below 2^exponent."""
    scale = torch.exp2(FRACTION_BITS - exponent)
    return torch.trunc(values * scale) / scale


def tensor_core(a: torch.Tensor, b: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """sums [m, n] + a [m, 32] · b [n, 32]ᵀ in double, aligned and cut as Hopper does it."""
    terms = torch.cat([a[:, None, :] * b[None, :, :], sums[:, :, None]], 2)
    largest = terms.abs().amax(2, keepdim=True).clamp(min=2.0**-100)
    exponent = torch.floor(torch.log2(largest))
    total = truncate(terms, exponent).sum(2)
    own = torch.floor(torch.log2(total.abs().clamp(min=2.0**-100)))
    return truncate(total, own)


@dataclass
class Simulated:
    """launch(a, sfa, b, sfb, d) or launch(a, sfa, b, sfb, d, bias) with hooks where faults are put.

    recipe, fast_accum  as in GemmProblem
    scale_a, scale_b    change the [m] or [n] scales of a K block: f(scales, block); under another
                        recipe than "block" those of the tile, block 0
    biases              change the [n] bias: f(bias)
    k32                 whether to leave out a k32 step: f(block, step)
    promotes            what happens after a block: f(block) is add, keep (no promotion, go on
                        summing) or drop (the sum is lost)
    store               writes D: f(d, result)
    cut                 emulate truncation in the tensor core (slow)
    """

    scale_a: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    scale_b: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    k32: Callable[[int, int], bool] | None = None
    promotes: Callable[[int], str] | None = None
    store: Callable[[torch.Tensor, torch.Tensor], None] | None = None
    cut: bool = False
    launches: int = 0
    recipe: str = "block"
    fast_accum: bool = False
    biases: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __call__(  # noqa: PLR0917, in the kernel's order
        self,
        a: torch.Tensor,
        sfa: torch.Tensor,
        b: torch.Tensor,
        sfb: torch.Tensor,
        d: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        self.launches += 1
        (m, k), n = a.shape, b.shape[0]
        dtype = torch.float64 if self.cut else torch.float32
        wide_a, wide_b = a.to(dtype), b.to(dtype)
        total = torch.zeros(m, n)
        partial = torch.zeros(m, n, dtype=dtype)
        for block in range(-(-k // 128)):
            columns = range(128 * block, min(128 * (block + 1), k), 32)
            for step, start in enumerate(columns):
                if self.k32 and self.k32(block, step):
                    continue
                part = slice(start, min(start + 32, k))
                if self.cut:
                    partial = tensor_core(wide_a[:, part], wide_b[:, part], partial)
                else:
                    partial = partial + wide_a[:, part] @ wide_b[:, part].T
            stays = self.fast_accum and 128 * (block + 1) < k
            action = self.promotes(block) if self.promotes else "keep" if stays else "add"
            if action == "keep":  # the next block goes on summing into the same registers
                continue
            if action == "add":
                by_block = self.recipe == "block"
                total += self._scaled(partial, sfa, sfb, block) if by_block else partial.float()
            partial = torch.zeros_like(partial)
        if self.recipe != "block":
            total = self._scaled(total, sfa.expand(m, 1), sfb.expand(n, 1), 0)
        if bias is not None:
            total += (self.biases(bias) if self.biases else bias).float()
        if self.store:
            self.store(d, total.to(d.dtype))
        else:
            d.copy_(total)

    def _scaled(
        self, partial: torch.Tensor, sfa: torch.Tensor, sfb: torch.Tensor, block: int
    ) -> torch.Tensor:
        n = partial.shape[1]
        rows = sfa[:, block]
        columns = sfb[:, block]
        if self.recipe == "block":
            columns = columns.repeat_interleave(128)[:n]
        if self.scale_a:
            rows = self.scale_a(rows, block)
        if self.scale_b:
            columns = self.scale_b(columns, block)
        return partial.float() * rows[:, None] * columns


def beyond(d: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """D with more rows and columns than it has, as a kernel without bounds would see it."""
    size = (d.shape[0] + rows, d.shape[1] + columns)
    return torch.as_strided(d, size, d.stride(), d.storage_offset())
