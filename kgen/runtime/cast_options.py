"""What a cast gives: `CastOptions`, the choices of one call, and `CastResult`.

Takes a tensor and choices; gives checked choices, memory for the results, and the results in plain
PyTorch. Every size may be symbolic. Must not import the driver, build or dispatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from kgen import quant
from kgen.errors import UnsupportedInput
from kgen.quant import E4M3

DIRECTIONS: Final = ("normal", "transposed", "both")


class CastResult(NamedTuple):
    """What a cast of x [M, K] gave; None for what was not asked for.

    values, scales       FP8 [M, K] and FP32 scales of x
    values_t, scales_t   FP8 [K, M] and FP32 scales of the transposed x, by the same recipe
    amax                 FP32, no dimensions: the largest finite magnitude in x
    """

    values: torch.Tensor | None
    scales: torch.Tensor | None
    values_t: torch.Tensor | None
    scales_t: torch.Tensor | None
    amax: torch.Tensor | None


@dataclass(frozen=True)
class CastOptions:
    """The choices of `kgen.runtime.casts.cast_to_fp8`; raises UnsupportedInput for wrong ones."""

    recipe: str = "token"
    direction: str = "normal"
    amax: bool = False
    pow2_scales: bool = False
    row_major_scales: bool = False
    dtype: torch.dtype = E4M3

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS:
            raise UnsupportedInput(
                f"direction {self.direction!r}: expected one of {', '.join(DIRECTIONS)}"
            )

    @property
    def normal(self) -> bool:
        """Whether x itself is cast."""
        return self.direction != "transposed"

    @property
    def transposed(self) -> bool:
        """Whether x transposed is cast."""
        return self.direction != "normal"

    def check(self, x: torch.Tensor) -> None:
        """Raise UnsupportedInput unless x can be cast so."""
        if not isinstance(x, torch.Tensor):
            raise UnsupportedInput(f"x is a {type(x).__name__}: expected a torch.Tensor")
        quant.check_cast_input(x, self.recipe, self.dtype)

    def allocate(self, x: torch.Tensor, m: int | None = None) -> CastResult:
        """Memory for the results, uninitialised but for `amax`, which is zero.

        `m`: rows that are cast, where they are not those of x.
        """
        m, k = x.shape[0] if m is None else m, x.shape[1]
        values = scales = values_t = scales_t = None
        if self.normal:
            values = x.new_empty(m, k, dtype=self.dtype)
            scales = quant.empty_scales(x, self.recipe, m, k, self.row_major_scales)
        if self.transposed:
            values_t = x.new_empty(k, m, dtype=self.dtype)
            scales_t = quant.empty_scales(x, self.recipe, k, m, self.row_major_scales)
        amax = x.new_zeros((), dtype=torch.float32) if self.amax else None
        return CastResult(values, scales, values_t, scales_t, amax)

    def reference(self, x: torch.Tensor) -> CastResult:
        """The results in plain PyTorch, laid out as `allocate` lays them out."""
        values = scales = values_t = scales_t = None
        if self.normal:
            values, scales = self._cast(x)
        if self.transposed:
            values_t, scales_t = self._cast(x.t())
        return CastResult(
            values, scales, values_t, scales_t, quant.amax_of(x) if self.amax else None
        )

    def _cast(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scales = quant.cast_to_fp8(
            x, self.recipe, dtype=self.dtype, pow2_scales=self.pow2_scales
        )
        m, k = x.shape
        laid_out = quant.empty_scales(x, self.recipe, m, k, self.row_major_scales)
        return values, laid_out.copy_(scales)
