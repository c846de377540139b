"""Is a kernel right? `verify(launch, case)` gives `Verified`, or raises WrongResult.

Takes a function that computes D from tensors, on any torch device, and what to check it on.
Must not import runtime, build, search or cache: what is checked is a function.

Three checks, cheapest to fail first; each reads its verdict from the device once.
random   normal data, scales spread over 0.5 to 1.5, at M, M-1 and M+1 rows and with both layouts
         of A's scales; per 128x128 tile and per strip of 128 rows x 8 columns, against FP32.
exact    at most 6 live K blocks a pass until each was live once; power-of-two scales; D has at most
         6 significant bits, and 8 with a k32 step missing, so BF16 shows every error of a scale
         or step exactly. The first pass at M rows, later ones at 768 to 1535 rows with the same
         last partial tile, all at the full N and K: every column strip, every K block, every row
         position in a tile.
growth   all-positive data and equal scales: the error at a large K may be 1.5 times that of
         K = 512 at most, which only a kernel that promotes every K block can keep, and, of BF16
         operands, one whose sums are FP32. Not asked of
         fast_accum, whose limit for random data grows with K instead.
Every launch writes into a buffer full of one NaN pattern, wider and longer than D: exactly the
m * n elements of D must have changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import sqrt
from typing import Final

import torch

from kgen.cases import GROWTH_BASE_K, LIVE_BLOCKS, STRIP, TILE, Case, GrowthCase, Launch
from kgen.errors import WrongResult
from kgen.problem import GemmProblem, ceil_div

__all__ = ["Case", "Launch", "Seal", "Verified", "verify", "verify_peer"]

#: Largest relative Frobenius error of a tile or strip. Rounding to BF16 gives 1.7e-3 on a tile, and
#: 3.9e-3 at most on the smallest strip (2^-8 of a value); the tensor core's truncation adds little.
MAX_ERROR: Final = 4e-3
#: The same for FP16 and FP32. Rounding to FP16 gives 4.9e-4 at most, truncation 4e-4 on strips of
#: one row; a result that went through BF16 on its way is refused.
MAX_FINE_ERROR: Final = 1.2e-3
#: The same for FP32 results of BF16 operands, and what each column of K may add to it: the tensor
#: cores cut what they add at 25 fraction bits, toward zero. Emulated on normal data, strips err by
#: 0.8e-6 at K = 512, 6e-6 at 4096 and 1e-4 at 65536.
MAX_BF16_ERROR: Final = 5e-5
MAX_BF16_ERROR_PER_K: Final = 4e-9
#: What K may add where all of it is summed inside the tensor cores, times the root of its k32
#: steps. Emulated on normal data, strips err by 1.0e-4 to 1.5e-4 times that root at K = 512 to
#: 16384; the worst is 3.4e-3.
MAX_FAST_ERROR: Final = 3e-4
MAX_GROWTH: Final = 1.5
GROWTH_KS: Final = (16384, 65536)
#: FP32 results of an exact kernel carry rounding noise only; growth of that is not judged.
GROWTH_FLOOR: Final = 5e-4
#: The same for BF16 operands, whose sums stay in the tensor cores: cut at 25 fraction bits, sums of
#: one sign err by 4e-4 at K = 65536, emulated; cut at 13, as those of FP8 are, by 8e-2 at 4096.
BF16_GROWTH_FLOOR: Final = 1e-3


@dataclass(frozen=True)
class Verified:
    """What a kernel that passed has shown: the only thing that may be timed.

    Errors are relative Frobenius errors, the largest over all tiles and strips; `growth` is the
    largest ratio of the error at a large K to that at K = 512 (0 where it was not asked).
    """

    problem: GemmProblem
    max_tile_error: float
    max_strip_error: float
    growth: float = 0.0
    exact_passes: int = 0


def verify(launch: Launch, case: Case, *, any_nk: bool = False) -> Verified:
    """Check a kernel on a case; raises WrongResult with what is wrong.

    `any_nk` says that the kernel takes any N and K: the growth check then also runs at K = 16384
    and 65536. A kernel whose N and K are baked in is checked at its own K.
    """
    tile, strip = check_random(launch, case, limit=limit_for(case))
    check_exact(launch, case)
    growth = check_growth(launch, case, any_nk)
    return Verified(case.problem, tile, strip, growth, case.exact.num_passes)


def limit_for(case: Case) -> float:
    """The largest error of a tile or strip of this case's output type and way to sum."""
    return limit_of(case.problem)


def limit_of(problem: GemmProblem) -> float:
    """The same by the problem."""
    if problem.recipe == "none" and problem.d_dtype == "fp32":
        return MAX_BF16_ERROR + MAX_BF16_ERROR_PER_K * problem.k
    limit = MAX_ERROR if problem.d_dtype == "bf16" else MAX_FINE_ERROR
    return limit + MAX_FAST_ERROR * sqrt(ceil_div(problem.k, 32)) * problem.fast_accum


def verify_peer(launch: Launch, case: Case, limit: float = MAX_ERROR) -> Verified:
    """Check somebody else's kernel at M only, on random data; raises WrongResult."""
    tile, strip = check_random(launch, case, [(case.problem.m, False)], limit)
    return Verified(case.problem, tile, strip)


def check_random(
    launch: Launch,
    case: Case,
    runs: list[tuple[int, bool]] | None = None,
    limit: float = MAX_ERROR,
) -> tuple[float, float]:
    """Largest tile and strip error over `runs` of (m, row-major scales); raises WrongResult."""
    m = case.problem.m
    runs = runs or [(m, False), (m - 1, False), (m + 1, False), (m, True)]
    runs = [run for run in runs if run[0]]
    found = []
    for rows, row_major in runs:
        d = case.output.poisoned(rows)
        launch(*case.inputs(rows, row_major), d, *case.bias)
        tiles, strips = case.errors(d)
        excess = case.output.num_changed() - d.numel()
        found.append(torch.stack([tiles.amax(), strips.amax(), excess.float()]))
    tile = strip = 0.0
    for run, (run_tile, run_strip, excess) in zip(runs, torch.stack(found).tolist(), strict=True):
        if not (run_tile <= limit and run_strip <= limit and excess == 0):
            raise WrongResult(_why_wrong(launch, case, run, limit))
        tile, strip = max(tile, run_tile), max(strip, run_strip)
    return tile, strip


def check_exact(launch: Launch, case: Case) -> None:
    """All passes of the exact case, and the last one again: row-major scales, another bias."""
    exact = case.exact
    runs = [(number, False) for number in range(exact.num_passes)] + [(exact.num_passes - 1, True)]
    found = []
    for number, last in runs:
        output = case.output if exact.rows(number) == case.problem.m else case.short_output
        d = output.poisoned(exact.rows(number))
        launch(*exact.inputs(number, last), d, *exact.bias(last))
        wrong = exact.num_wrong(d, number, last)
        found.append(torch.stack([wrong, output.num_changed() - d.numel()]))
    for run, counts in zip(runs, torch.stack(found).tolist(), strict=True):
        if counts != [0, 0]:
            raise WrongResult(_why_not_exact(launch, case, *run))


def check_growth(launch: Launch, case: Case, any_nk: bool) -> float:
    """Largest error at a large K over that at K = 512; raises WrongResult above MAX_GROWTH."""
    cases = [case.own_growth] if case.own_growth else []
    if any_nk:
        cases += shared_growths(case)
    if not cases:
        return 0.0
    worst = 0.0
    floor = BF16_GROWTH_FLOOR if case.problem.recipe == "none" else GROWTH_FLOOR
    errors = torch.stack([growth.errors(launch) for growth in cases]).tolist()
    for growth, (base, full) in zip(cases, errors, strict=True):
        ratio = full / max(base, floor)
        if not ratio <= MAX_GROWTH:
            raise WrongResult(
                f"{case.problem}: on all-positive data the relative error grows from {base:.2e} at "
                f"K={GROWTH_BASE_K} to {full:.2e} at K={growth.k}, more than {MAX_GROWTH} times: "
                "sums of K blocks are not kept in FP32"
            )
        worst = max(worst, ratio)
    return worst


def shared_growths(case: Case) -> list[GrowthCase]:
    """What kernels for any N and K are checked on beside the case, made once a process.

    Nothing under fast_accum, which lets errors grow.
    """
    if case.problem.fast_accum:
        return []
    plain = replace(case.problem, m=128, n=256, batch_invariant=False, num_sms=0)
    return [_shared_growth(replace(plain, k=k), case.device) for k in GROWTH_KS]


class Seal:
    """Made over tensors that no kernel may write to; tells whether one did."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.numel()]
        self._sums = self._add_up()

    def is_broken(self) -> bool:
        """Whether a tensor changed. Reads them all once and waits for the device."""
        return not torch.equal(self._sums, self._add_up())

    def _add_up(self) -> torch.Tensor:
        return torch.stack([_sum_of_bits(tensor) for tensor in self._tensors])


@lru_cache(maxsize=4)
def _shared_growth(problem: GemmProblem, device: torch.device) -> GrowthCase:
    return GrowthCase(problem, device)


def _why_not_exact(launch: Launch, case: Case, number: int, last_launch: bool) -> str:
    """Run a pass once more and say what is wrong; waits for the device."""
    exact, rows = case.exact, case.exact.rows(number)
    d = case.output.poisoned(rows)
    launch(*exact.inputs(number, last_launch), d, *exact.bias(last_launch))
    first = LIVE_BLOCKS * number
    last = min(first + LIVE_BLOCKS, case.problem.num_k_blocks) - 1
    head = f"{case.problem}: exact case, K blocks {first} to {last}, {rows} rows"
    words = [case.output.describe_changed(rows), exact.describe_wrong(d, number, last_launch)]
    return f"{head}, {_layout(last_launch)}: " + "; ".join(filter(None, words))


def _why_wrong(launch: Launch, case: Case, run: tuple[int, bool], limit: float) -> str:
    """Run once more and say what is wrong; waits for the device."""
    rows, row_major = run
    d = case.output.poisoned(rows)
    launch(*case.inputs(rows, row_major), d, *case.bias)
    head = f"{case.problem}: {rows} rows, {_layout(row_major)}: "
    changed = case.output.describe_changed(rows)
    if changed:
        return head + changed
    tiles, strips = case.errors(d)
    words = []
    for errors, what, width in ((tiles, "tile", TILE), (strips, "strip", STRIP)):
        worst = int(errors.nan_to_num(torch.inf).argmax())
        row, column = divmod(worst, errors.shape[1])
        bad = int((~(errors <= limit)).sum())
        words.append(
            f"{bad} of {errors.numel()} {what}s off by more than {limit:g}, the worst at row "
            f"{row * TILE}, column {column * width} by {float(errors[row, column]):.3g}"
        )
    return head + "; ".join(words)


def _layout(row_major: bool) -> str:
    return "row-major scales" if row_major else "column-major scales"


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    row_bytes = tensor.shape[-1] * tensor.element_size()
    if tensor.is_contiguous() and row_bytes % 8 == 0:
        return tensor.view(torch.int64).sum()
    # torch makes an int64 copy of what it adds up here: for small tensors only.
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.uint8).sum()
