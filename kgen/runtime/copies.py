"""GEMMs on matrices that the kernel can not use in place: through copies, on the current stream.

Takes a call's inputs and a kernel; gives why something must be copied, and runs it so. Must not
import cache, build or search.
"""

from __future__ import annotations

from typing import Final

import torch

from kgen.problem import k_step, round_up
from kgen.quant import get_col_major_tma_aligned_tensor
from kgen.runtime.kernel import Kernel, current_stream
from kgen.runtime.operands import Inputs, Sizes, unfit_matrices
from kgen.runtime.stats import Stats

#: Up to this M the kernel reads row-major scales of A itself; above, turning them is cheaper.
MAX_DIRECT_M: Final = 128


def copy_reasons(x: Inputs, sizes: Sizes) -> dict[str, str]:
    """Name of each tensor that must be copied, with the reason."""
    reasons = unfit_matrices(x)
    step = k_step(sizes.a_dtype)
    if sizes.k % step:
        reasons |= dict.fromkeys("ab", f"K = {sizes.k}, not a multiple of {step}")
    if sizes.n % 8:
        padded = ["out", *["b_scales"] * (sizes.recipe == "row"), *["bias"] * sizes.bias]
        reasons |= dict.fromkeys(padded, f"N = {sizes.n}, not a multiple of 8")
    return reasons


def is_worth_turning(sfa: torch.Tensor) -> bool:
    """Whether to make A's scales column-major first."""
    rows, blocks = sfa.shape
    return rows > MAX_DIRECT_M and blocks > 1 and sfa.stride(0) != 1


def run_with_copies(
    x: Inputs, sizes: Sizes, reasons: dict[str, str], kernel: Kernel, *, num_sms: int, stats: Stats
) -> None:
    """Copy what `reasons` name and scales worth turning, launch; counts, and warns of matrices."""
    with torch.cuda.device(kernel.ordinal), torch.no_grad():
        k = round_up(sizes.k, k_step(sizes.a_dtype))
        a = _aligned(x.a, k) if "a" in reasons else x.a
        b = _aligned(x.b, k) if "b" in reasons else x.b
        turned = is_worth_turning(x.sfa)
        sfa = get_col_major_tma_aligned_tensor(x.sfa) if turned else x.sfa
        n = round_up(sizes.n, 8)
        sfb = _padded(x.sfb, n) if "b_scales" in reasons else x.sfb
        bias = _padded(x.bias, n) if "bias" in reasons and x.bias is not None else x.bias
        out = x.out.new_empty(sizes.m, n) if "out" in reasons else x.out
        launch = kernel.prepare(a, sfa, b, sfb, out, bias, num_sms=num_sms)
        launch.run(current_stream(kernel.ordinal))
        if out is not x.out:
            x.out.copy_(out[:, : sizes.n])
    for name, reason in reasons.items():
        stats.add_reason("copies", f"{name}: {reason}")
        stats.warn_once(
            f"copy {name} {reason}", f"kgen copies {name} for each such call, because of {reason}"
        )
    if turned:
        stats.add_reason("copies", "a_scales: row-major")


def _padded(values: torch.Tensor, rows: int) -> torch.Tensor:
    """A contiguous copy with so many rows; those past the end are zero."""
    copy = values.new_zeros(rows, *values.shape[1:])
    copy[: values.shape[0]] = values
    return copy


def _aligned(matrix: torch.Tensor, k: int) -> torch.Tensor:
    """A row-major copy with k columns; those past the matrix are zero and add nothing."""
    copy = matrix.new_empty(matrix.shape[0], k)
    copy[:, : matrix.shape[1]].copy_(matrix)
    # Zero bytes are zero in FP8 and BF16; torch fills no float8 tensor on some versions.
    copy[:, matrix.shape[1] :].view(torch.uint8).zero_()
    return copy
