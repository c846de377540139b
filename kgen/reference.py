"""The reference product: FP32, from dequantised operands, in plain PyTorch on any device.

Takes FP8 operands with their scales or BF16 ones, and a bias; gives D. What verification compares
with, and what answers where no kernel can. Imports torch only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from kgen.problem import BY_K_RECIPES, SCALE_BLOCK, round_up

#: Output types by their names in problems, and the names by type.
TORCH_D_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
D_DTYPE_NAMES: Final = {dtype: name for name, dtype in TORCH_D_DTYPES.items()}
#: The same for operands.
TORCH_OPERAND_DTYPES: Final = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16,
}
OPERAND_DTYPE_NAMES: Final = {dtype: name for name, dtype in TORCH_OPERAND_DTYPES.items()}
#: Those that have scales.
FP8_DTYPES: Final = (torch.float8_e4m3fn, torch.float8_e5m2)

#: FP32 elements of a dequantised piece of an operand, or of D, held at a time (256 MB).
_MAX_ELEMENTS: Final = 2**26


def dequantize_a(a: torch.Tensor, sfa: torch.Tensor, recipe: str = "block") -> torch.Tensor:
    """A [M, K] in FP32: each value times its scale.

    sfa [M, ceil(K/128)] for recipes "block" and "vector", [M, 1] for "row", [1, 1] for "tensor";
    not used for "none".
    """
    if recipe == "none":
        return a.float()
    if recipe in BY_K_RECIPES:
        sfa = sfa.repeat_interleave(SCALE_BLOCK, dim=1)[:, : a.shape[1]]
    return a.float().mul_(sfa)


def dequantize_b(b: torch.Tensor, sfb: torch.Tensor, recipe: str = "block") -> torch.Tensor:
    """B [N, K] in FP32: each value times its scale.

    sfb [ceil(N/128), ceil(K/128)] for recipe "block", [N, ceil(K/128)] for "vector", [N, 1] for
    "row", [1, 1] for "tensor"; not used for "none".
    """
    if recipe == "block":
        sfb = sfb.repeat_interleave(SCALE_BLOCK, dim=0)[: b.shape[0]]
    return dequantize_a(b, sfb, recipe)


def gemm_reference(
    a: torch.Tensor,
    sfa: torch.Tensor,
    b: torch.Tensor,
    sfb: torch.Tensor,
    out_dtype: torch.dtype = torch.float32,
    *,
    bias: torch.Tensor | None = None,
    recipe: str = "block",
) -> torch.Tensor:
    """D [M, N] = A · Bᵀ (+ bias), summed in FP32 and rounded once to `out_dtype`.

    a [M, K] and b [N, K] FP8, or BF16 for recipe "none", with any strides, scales FP32 as in
    `dequantize_a` and `dequantize_b`, bias [N] of any type. Works in pieces: large problems need
    little more than D.
    """
    out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    gemm_reference_into(out, a, sfa, b, sfb, bias=bias, recipe=recipe)
    return out


def gemm_reference_into(
    out: torch.Tensor,
    a: torch.Tensor,
    sfa: torch.Tensor,
    b: torch.Tensor,
    sfb: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    recipe: str = "block",
) -> None:
    """Write D into `out` [M, N], of any strides; otherwise as `gemm_reference`."""
    m, k = a.shape
    n = b.shape[0]
    n_step = round_up(max(1, _MAX_ELEMENTS // max(k, 1) - SCALE_BLOCK), SCALE_BLOCK)
    m_step = max(1, _MAX_ELEMENTS // max(k, min(n, n_step), 1))
    with full_fp32(), torch.autocast(out.device.type, enabled=False):
        for n0 in range(0, n, n_step):
            columns = slice(n0, n0 + n_step)
            blocks = slice(n0 // SCALE_BLOCK, (n0 + n_step) // SCALE_BLOCK)
            by_column = {"block": sfb[blocks], "row": sfb[columns], "vector": sfb[columns]}
            of_b = by_column.get(recipe, sfb)
            b_piece = dequantize_b(b[columns], of_b, recipe).t()
            for m0 in range(0, m, m_step):
                rows = slice(m0, m0 + m_step)
                of_a = sfa[rows] if recipe in ("block", "row", "vector") else sfa
                product = dequantize_a(a[rows], of_a, recipe) @ b_piece
                if bias is not None:
                    product += bias[columns].float()
                out[rows, columns] = product


class _Precision:
    """How many are inside `full_fp32`, and what the last of them puts back."""

    lock = threading.Lock()
    depth = 0
    legacy: str | None = None
    matmul = ("none", "none")


@contextmanager
def full_fp32() -> Iterator[None]:
    """Matrix products of FP32 keep all 24 bits: no TF32 on a GPU, no BF16 on a CPU.

    torch keeps this as a process-wide switch; the user's setting comes back with the last one out.
    """
    with _Precision.lock:
        if _Precision.depth == 0:
            _save_and_set()
        _Precision.depth += 1
    try:
        yield
    finally:
        with _Precision.lock:
            _Precision.depth -= 1
            if _Precision.depth == 0:
                _restore()


def _save_and_set() -> None:
    # torch has an old and a new switch, and refuses the old one once the new one was used.
    try:
        _Precision.legacy = torch.get_float32_matmul_precision()
    except RuntimeError:
        _Precision.legacy = None
    cuda, cpu = _new_switches()
    _Precision.matmul = (cuda.fp32_precision, cpu.fp32_precision)
    if _Precision.legacy is not None:
        torch.set_float32_matmul_precision("highest")
    else:
        cuda.fp32_precision = cpu.fp32_precision = "ieee"


def _restore() -> None:
    if _Precision.legacy is not None:
        torch.set_float32_matmul_precision(_Precision.legacy)
    cuda, cpu = _new_switches()
    cuda.fp32_precision, cpu.fp32_precision = _Precision.matmul


def _new_switches() -> tuple[Any, Any]:
    backends: Any = torch.backends  # torch's stubs do not know mkldnn.matmul
    return backends.cuda.matmul, backends.mkldnn.matmul
