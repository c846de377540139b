"""What is to be computed: `GemmProblem`, one GEMM with its sizes and types.

Takes plain values, gives frozen values. Must not import torch, CUDA or any third-party package.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from kgen.errors import UsageError

#: dense: one matrix product. contiguous: the rows of all groups one after another, each group with
#: a B of its own. masked: every group has room for as many rows, of which the first few count.
KINDS: Final = ("dense", "contiguous", "masked")
GROUPED_KINDS: Final = ("contiguous", "masked")
#: Rows on which groups start that are told by an expert's number a row.
GROUP_ALIGNMENT: Final = 128
D_DTYPES: Final = ("bf16", "fp16", "fp32")
D_DTYPE_BYTES: Final = {"bf16": 2, "fp16": 2, "fp32": 4}

#: Columns of A (and of B) that share one scale, and rows of B that share one scale.
SCALE_BLOCK: Final = 128
#: TMA wants global strides in multiples of 16 bytes (CUDA driver API, cuTensorMapEncodeTiled).
TMA_ALIGN_BYTES: Final = 16
#: Largest extent: tensor maps hold 32-bit coordinates that the driver reads as signed.
MAX_EXTENT: Final = 2**31 - 1


def ceil_div(a: int, b: int) -> int:
    """The quotient a / b rounded up."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The least multiple of b that is not below a."""
    return ceil_div(a, b) * b


@dataclass(frozen=True, order=True)
class GemmProblem:
    """D[m, n] = A[m, k] · B[n, k]ᵀ with E4M3 operands and FP32 block scales.

    A carries a scale per row and 128 columns, B a scale per 128x128 block; D is `d_dtype`.
    Of the grouped kinds (GROUPED_KINDS) `groups` such products with a B each make one launch, and
    `m` is the rows of each group, those that are expected where groups differ.
    `num_sms` is an SM budget (0: every SM of the device) and part of the problem, since the
    best kernel for 132 SMs is not the best for 108. Raises UsageError for a field out of range.
    """

    kind: str
    m: int
    n: int
    k: int
    groups: int = 1
    d_dtype: str = "bf16"
    num_sms: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"kind={self.kind!r}: expected one of {', '.join(KINDS)}")
        if self.d_dtype not in D_DTYPES:
            raise UsageError(f"d_dtype={self.d_dtype!r}: expected one of {', '.join(D_DTYPES)}")
        for name, low in (("m", 1), ("n", 1), ("k", 1), ("groups", 1), ("num_sms", 0)):
            value = getattr(self, name)
            if not low <= value <= MAX_EXTENT:
                raise UsageError(f"{name}={value}: expected {low} to {MAX_EXTENT}")
        if self.n % 8:
            raise UsageError(
                f"n={self.n}: the kernel needs a multiple of 8; pad N to {round_up(self.n, 8)}"
            )
        if self.k % 16:
            raise UsageError(
                f"k={self.k}: TMA needs a multiple of 16; pad K to {round_up(self.k, 16)}"
            )
        if self.kind == "dense" and self.groups != 1:
            raise UsageError(f"groups={self.groups}: a dense problem has one group")

    @property
    def is_grouped(self) -> bool:
        """Whether groups share the launch: a kind of GROUPED_KINDS."""
        return self.kind in GROUPED_KINDS

    @property
    def num_k_blocks(self) -> int:
        """K blocks of 128 columns, the last one possibly partial."""
        return ceil_div(self.k, SCALE_BLOCK)

    @property
    def flops(self) -> int:
        """Floating-point operations, a multiply-add counted as two."""
        return 2 * self.groups * self.m * self.n * self.k

    @property
    def min_bytes(self) -> int:
        """The bytes that must cross device memory once: operands, scales and D."""
        scales = 4 * (self.m + ceil_div(self.n, SCALE_BLOCK)) * self.num_k_blocks
        d_bytes = self.m * self.n * D_DTYPE_BYTES[self.d_dtype]
        return self.groups * (self.m * self.k + self.n * self.k + scales + d_bytes)

    def with_m(self, m: int) -> GemmProblem:
        """The same problem with another number of rows."""
        return replace(self, m=m)

    def __str__(self) -> str:
        """The shapes line that stands for this problem; fields at their default are left out."""
        parts = [self.kind, f"m={self.m}", f"n={self.n}", f"k={self.k}"]
        if self.groups != 1:
            parts.append(f"groups={self.groups}")
        if self.d_dtype != "bf16":
            parts.append(f"d_dtype={self.d_dtype}")
        if self.num_sms:
            parts.append(f"num_sms={self.num_sms}")
        return " ".join(parts)
