"""What is to be computed: `GemmProblem`, one GEMM with its sizes and types.

Takes plain values, gives frozen values. Must not import torch, CUDA or any third-party package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Final

from kgen.errors import UsageError

#: dense: one matrix product. contiguous: the rows of all groups one after another, each group with
#: a B of its own. masked: every group has room for as many rows, of which the first few count.
#: wgrad: one product as a weight's gradient needs it, FP32 and added to what D holds. k_grouped: as
#: many such products as there are groups, each over a part of the columns of A and B.
KINDS: Final = ("dense", "contiguous", "masked", "wgrad", "k_grouped")
GROUPED_KINDS: Final = ("contiguous", "masked")
WGRAD_KINDS: Final = ("wgrad", "k_grouped")
#: Rows on which groups start that are told by an expert's number a row.
GROUP_ALIGNMENT: Final = 128
D_DTYPES: Final = ("bf16", "fp16", "fp32")
D_DTYPE_BYTES: Final = {"bf16": 2, "fp16": 2, "fp32": 4}
#: What the scales belong to: 1x128 of A and 128x128 of B; a row of A and of B; a whole tensor;
#: 1x128 of A and of B (cuBLASLt's VEC128). "none": BF16 operands, which have no scales.
DENSE_RECIPES: Final = ("block", "row", "tensor", "none")
RECIPES: Final = (*DENSE_RECIPES, "vector")
#: Those whose scales change with K: each 128 columns leave the tensor cores by themselves.
BY_K_RECIPES: Final = ("block", "vector")
#: Types of A and of B, and bytes of an element.
OPERAND_DTYPES: Final = ("e4m3", "e5m2", "bf16")
OPERAND_DTYPE_BYTES: Final = {"e4m3": 1, "e5m2": 1, "bf16": 2}
#: The fields that say BF16 operands; they go together.
BF16_FIELDS: Final[dict[str, Any]] = {"recipe": "none", "a_dtype": "bf16", "b_dtype": "bf16"}

#: Columns of A (and of B) that share one scale, and rows of B that share one scale.
SCALE_BLOCK: Final = 128
#: Bytes of a row of A or B in one K block, a stage of the pipeline: the span of TMA's widest
#: swizzle, and the scale block of FP8.
K_BLOCK_BYTES: Final = 128
#: TMA wants global strides in multiples of 16 bytes (CUDA driver API, cuTensorMapEncodeTiled).
TMA_ALIGN_BYTES: Final = 16
#: Largest extent: tensor maps hold 32-bit coordinates that the driver reads as signed.
MAX_EXTENT: Final = 2**31 - 1


def implied(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a problem, and where one of them says BF16 operands the others that say so.

    None that is given is changed.
    """
    says = any(fields.get(name) == value for name, value in BF16_FIELDS.items())
    return {**(BF16_FIELDS if says else {}), **fields}


def ceil_div(a: int, b: int) -> int:
    """The quotient a / b rounded up."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The least multiple of b that is not below a."""
    return ceil_div(a, b) * b


@dataclass(frozen=True, order=True)
class GemmProblem:
    """D[m, n] = A[m, k] · B[n, k]ᵀ (+ bias[n]), FP8 operands with FP32 scales, or BF16 ones.

    kind, groups       of the grouped kinds (GROUPED_KINDS) `groups` such products with a B each
                       make one launch, and `m` is the rows of each group, those that are expected
                       where groups differ; so far with recipe "block" and E4M3, or BF16, and no
                       bias. Of kind "k_grouped" `groups` products of their own, each with `k`
                       columns of A and B, those that are expected where groups differ. Kinds of
                       WGRAD_KINDS write FP32, with recipe "vector" or (wgrad) "block"
    recipe             what a scale belongs to. "block": a row and 128 columns of A, 128x128 of B;
                       "row": a row of A (a token), a row of B (an output channel); "tensor": all
                       of A, all of B; "vector": a row and 128 columns of either, for the kinds of
                       WGRAD_KINDS only; "none": there are no scales
    a_dtype, b_dtype   "e4m3" or "e5m2", each by itself; "bf16" both and only with recipe "none"
    d_dtype            "bf16", "fp16" or "fp32"
    bias               a vector [n] of `d_dtype` is added in FP32, before D is rounded
    fast_accum         all of K is summed inside the tensor cores, which keep 13 fraction bits of
                       a sum (torch._scaled_mm's use_fast_accum=True); otherwise each 128 columns
                       are added up in FP32. Recipe "block" has to do the latter; BF16 operands
                       have no choice: tensor cores keep FP32 sums of them
    accumulate         D += the product, instead of D =; for the kinds of WGRAD_KINDS only
    batch_invariant    the bits of a row of D do not depend on m, the device or num_sms; kernels of
                       grouped kinds are so always, and calls do not ask for it
    num_sms            an SM budget (0: every SM of the device), part of the problem, since the
                       best kernel for 132 SMs is not the best for 108

    Raises UsageError for a field out of range.
    """

    kind: str
    m: int
    n: int
    k: int
    groups: int = 1
    recipe: str = "block"
    a_dtype: str = "e4m3"
    b_dtype: str = "e4m3"
    d_dtype: str = "bf16"
    bias: bool = False
    fast_accum: bool = False
    batch_invariant: bool = False
    num_sms: int = 0
    accumulate: bool = False

    def __post_init__(self) -> None:
        for name, names in NAMES.items():
            if getattr(self, name) not in names:
                raise UsageError(
                    f"{name}={getattr(self, name)!r}: expected one of {', '.join(names)}"
                )
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name}={getattr(self, name)!r}: expected true or false")
        self._check_types()
        self._check_wgrad()
        for name, low in (("m", 1), ("n", 1), ("k", 1), ("groups", 1), ("num_sms", 0)):
            value = getattr(self, name)
            high = MAX_EXTENT // self.operand_bytes if name == "k" else MAX_EXTENT
            if not low <= value <= high:
                raise UsageError(f"{name}={value}: expected {low} to {high}")
        if self.n % 8:
            raise UsageError(
                f"n={self.n}: the kernel needs a multiple of 8; pad N to {round_up(self.n, 8)}"
            )
        step = k_step(self.a_dtype)
        if self.k % step:
            raise UsageError(
                f"k={self.k}: TMA needs a multiple of {step}; pad K to {round_up(self.k, step)}"
            )
        if self.kind in ("dense", "wgrad") and self.groups != 1:
            raise UsageError(f"groups={self.groups}: a {self.kind} problem has one group")

    def _check_types(self) -> None:
        """What goes together of recipe, types, bias and policies."""
        of_bf16 = {getattr(self, name) == value for name, value in BF16_FIELDS.items()}
        given = " ".join(f"{name}={getattr(self, name)}" for name in BF16_FIELDS)
        if self.is_wgrad and True in of_bf16:
            raise UsageError(
                f"kind={self.kind} {given}: weight gradients take FP8 operands with their scales, "
                "and no BF16 ones"
            )
        if len(of_bf16) > 1:
            together = " ".join(f"{name}={value}" for name, value in BF16_FIELDS.items())
            raise UsageError(
                f"{given}: BF16 operands come in pairs and have no scales: expected {together}, or "
                "FP8 types with another recipe"
            )
        if self.fast_accum and self.recipe == "none":
            raise UsageError(
                "fast_accum=true: tensor cores keep FP32 sums of BF16 products; leave it out"
            )
        if self.fast_accum and self.recipe in BY_K_RECIPES:
            raise UsageError(
                f"fast_accum=true: recipe={self.recipe} scales each 128 columns by themselves, so "
                "their sums have to leave the tensor cores; leave it out, or take recipe=row or "
                "tensor"
            )
        types = (self.recipe, self.a_dtype, self.b_dtype)
        plain = types in (("block", "e4m3", "e4m3"), ("none", "bf16", "bf16")) and not self.bias
        if self.is_grouped and not plain:
            raise UsageError(
                f"kind={self.kind}: a grouped kind takes recipe=block with E4M3 operands, or BF16 "
                "ones, and no bias; given another of them"
            )
        if self.is_grouped and self.batch_invariant:
            raise UsageError(
                f"kind={self.kind} batch_invariant=true: kernels of a grouped kind never split "
                "K and are so by themselves; leave it out"
            )

    def _check_wgrad(self) -> None:
        """The rules of weight gradients, and that other kinds do not have what is theirs."""
        if not self.is_wgrad:
            if self.recipe == "vector" or self.accumulate:
                raise UsageError(
                    f"kind={self.kind} recipe={self.recipe} accumulate={self.accumulate}: "
                    f"recipe=vector and accumulate=true are for {', '.join(WGRAD_KINDS)}"
                )
            return
        recipes = ("vector",) if self.kind == "k_grouped" else ("vector", "block")
        is_plain = not (self.bias or self.fast_accum or self.batch_invariant)
        if self.recipe not in recipes or self.d_dtype != "fp32" or not is_plain:
            raise UsageError(
                f"kind={self.kind}: takes d_dtype=fp32, recipe={' or '.join(recipes)}, no bias, "
                "fast_accum or batch_invariant; given another of them"
            )
        if self.kind == "k_grouped" and self.k % SCALE_BLOCK:
            raise UsageError(
                f"k={self.k}: kind k_grouped takes multiples of {SCALE_BLOCK}; pad each group's K "
                f"with zeros to {round_up(self.k, SCALE_BLOCK)}"
            )

    @classmethod
    def of(cls, kind: str, m: int, n: int, k: int, **fields: Any) -> GemmProblem:
        """A problem with what a shapes line of its kind may leave out: see `defaults_of`.

        What says BF16 operands says all that goes with them: see `implied`.
        """
        return cls(kind, m, n, k, **({**KIND_DEFAULTS.get(kind, {}), **implied(fields)}))

    @property
    def is_grouped(self) -> bool:
        """Whether groups share the launch: a kind of GROUPED_KINDS."""
        return self.kind in GROUPED_KINDS

    @property
    def is_wgrad(self) -> bool:
        """Whether D is a weight's gradient: a kind of WGRAD_KINDS."""
        return self.kind in WGRAD_KINDS

    @property
    def num_k_blocks(self) -> int:
        """K blocks of 128 bytes a row, the last one possibly partial."""
        return ceil_div(self.k * self.operand_bytes, K_BLOCK_BYTES)

    @property
    def operand_bytes(self) -> int:
        """Bytes of an element of A, and of B: their types are equally wide."""
        return OPERAND_DTYPE_BYTES[self.a_dtype]

    @property
    def k_block(self) -> int:
        """Columns of a K block: 128 of FP8, 64 of BF16."""
        return K_BLOCK_BYTES // self.operand_bytes

    @property
    def promotes(self) -> bool:
        """Whether each K block's sums leave the tensor cores to be added up in FP32."""
        return not (self.fast_accum or self.recipe == "none")

    @property
    def flops(self) -> int:
        """Floating-point operations, a multiply-add counted as two."""
        return 2 * self.groups * self.m * self.n * self.k

    @property
    def min_bytes(self) -> int:
        """The bytes that must cross device memory once: operands, scales and D.

        D counts twice where it is added to.
        """
        d_size = D_DTYPE_BYTES[self.d_dtype]
        scales = 4 * sum(rows * columns for rows, columns in self.scale_shapes)
        vectors = scales + self.n * d_size * self.bias
        d_bytes = self.m * self.n * d_size * (1 + self.accumulate)
        operands = (self.m + self.n) * self.k * self.operand_bytes
        return self.groups * (operands + vectors + d_bytes)

    @property
    def scale_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(rows, columns) of A's scales and of B's, as kernels take them."""
        return scale_shapes(self.recipe, self.m, self.n, self.k)

    def with_m(self, m: int) -> GemmProblem:
        """The same problem with another number of rows."""
        return replace(self, m=m)

    def with_num_sms(self, num_sms: int) -> GemmProblem:
        """The same problem under another budget of SMs."""
        return replace(self, num_sms=num_sms)

    def __str__(self) -> str:
        """The shapes line that stands for this problem; fields at their default are left out."""
        parts = [self.kind, f"m={self.m}", f"n={self.n}", f"k={self.k}"]
        for name, default in defaults_of(self.kind).items():
            value = getattr(self, name)
            if value != default:
                parts.append(f"{name}={str(value).lower()}")
        return " ".join(parts)


#: Fields that hold one of a few names, and those that are true or false.
NAMES: Final = {
    "kind": KINDS,
    "recipe": RECIPES,
    "a_dtype": OPERAND_DTYPES,
    "b_dtype": OPERAND_DTYPES,
    "d_dtype": D_DTYPES,
}
FLAGS: Final = ("bias", "fast_accum", "batch_invariant", "accumulate")
#: Fields that a shapes line may leave out, with their defaults.
OPTIONAL: Final[dict[str, Any]] = {
    f.name: f.default for f in fields(GemmProblem) if f.default is not MISSING
}
#: What of them is another default under a kind: a weight's gradient is FP32, scaled by vectors, and
#: added to D.
KIND_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    kind: {"recipe": "vector", "d_dtype": "fp32", "accumulate": True} for kind in WGRAD_KINDS
}


def defaults_of(kind: str) -> dict[str, Any]:
    """What a shapes line of a kind has where it leaves a field out, in the order of OPTIONAL."""
    return {**OPTIONAL, **KIND_DEFAULTS.get(kind, {})}


def k_step(dtype: str) -> int:
    """What K is a multiple of with operands of this type, so that pitches are those TMA takes."""
    return TMA_ALIGN_BYTES // OPERAND_DTYPE_BYTES[dtype]


def scale_shapes(recipe: str, m: int, n: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(rows, columns) of A's scales and of B's under a recipe; all 0 where there are none."""
    if recipe == "none":
        return (0, 0), (0, 0)
    if recipe in BY_K_RECIPES:
        blocks = ceil_div(k, SCALE_BLOCK)
        return (m, blocks), (ceil_div(n, SCALE_BLOCK) if recipe == "block" else n, blocks)
    return ((m, 1), (n, 1)) if recipe == "row" else ((1, 1), (1, 1))
