"""Is a grouped kernel right? `verify_grouped(launch, case)` gives `Verified`, or WrongResult.

As `kgen.verify`, with groupings instead of numbers of rows: every group full, uneven groups with
empty ones, one group alone, no rows at all; told by offsets and by indices with holes, or by
counts. Rows that do not count hold NaN in A and its scales and must stay untouched in D, as all
around D must. The exact case runs over uneven groups, told apart by powers of two. That every K
block is promoted is not checked by itself: the loop is the dense kernel's.
Must not import runtime, build, search or cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kgen.errors import WrongResult
from kgen.grouped_cases import GroupedCase, GroupedLaunch, GroupedRun
from kgen.verify import Verified, limit_of


def verify_grouped(launch: GroupedLaunch, case: GroupedCase) -> Verified:
    """Check a kernel on a case; raises WrongResult with what is wrong. Waits for the device."""
    row_major = [(run, True) for run in case.runs if run.grouping.name.startswith("uneven")]
    runs = [(run, False) for run in case.runs] + row_major
    tile, strip = check_runs(launch, case, runs)
    _check_exact(launch, case)
    return Verified(case.problem, tile, strip, exact_passes=case.exact.num_passes)


def check_runs(
    launch: GroupedLaunch,
    case: GroupedCase,
    runs: Sequence[tuple[GroupedRun, bool]],
    *,
    untouched: bool = True,
) -> tuple[float, float]:
    """Largest tile and strip error over runs, each with whether A's scales are row-major.

    Raises WrongResult above the limit of the output type, and unless `untouched` is False where
    anything but the rows that count was written.
    """
    limit = limit_of(case.problem)
    found = []
    for run, row_major in runs:
        tiles, strips = _launch(launch, case, run, row_major)
        excess = case.output.num_changed() - run.reference.numel()
        worst = [_largest(tiles), _largest(strips), excess.float()]
        found.append(torch.stack(worst))
    tile = strip = 0.0
    for (run, row_major), (of_tile, of_strip, excess) in zip(
        runs, torch.stack(found).tolist(), strict=True
    ):
        name = f"{case.problem}: {run.grouping.name}{', row-major scales' if row_major else ''}"
        if not (of_tile <= limit and of_strip <= limit):
            raise WrongResult(
                f"{name}: a tile is off by {of_tile:.3g}, a strip of 8 columns by {of_strip:.3g}: "
                f"at most {limit:g} is right"
            )
        if untouched and excess:
            words = f"{excess:+.0f} elements written that are not of a row that counts"
            raise WrongResult(f"{name}: {words}")
        tile, strip = max(tile, of_tile), max(strip, of_strip)
    return tile, strip


def _check_exact(launch: GroupedLaunch, case: GroupedCase) -> None:
    found = []
    for run in case.exact.passes():
        d = case.poisoned(run.grouping)
        tensors = (run.a, run.sfa, case.exact.b, case.exact.sfb, d, run.grouping.layout)
        launch(tensors, run.grouping.by_index)
        rows = run.grouping.rows
        own = d.flatten(0, -2)[rows[: len(run.reference)]]
        wrong = torch.count_nonzero(own != run.reference)
        excess = case.output.num_changed() - len(rows) * case.problem.n
        found.append(torch.stack([wrong, excess]))
    for number, (wrong, excess) in enumerate(torch.stack(found).tolist()):
        # Rows that an exact pass leaves out hold NaN, which may be the guards' own.
        if wrong or excess > 0:
            raise WrongResult(
                f"{case.problem}: exact case over uneven groups, pass {number}: {wrong} elements "
                f"differ, {excess:+d} written"
            )


def _launch(
    launch: GroupedLaunch, case: GroupedCase, run: GroupedRun, row_major: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    a, sfa, b, sfb = case.inputs(run, row_major)
    d = case.poisoned(run.grouping)
    launch((a, sfa, b, sfb, d, run.grouping.layout), run.grouping.by_index)
    return run.errors(d)


def _largest(errors: torch.Tensor) -> torch.Tensor:
    return errors.amax() if errors.numel() else errors.new_zeros(())
