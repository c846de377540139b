"""Is a kernel of a weight's gradient right? `verify_wgrad` and `verify_k_grouped` give `Verified`.

As `kgen.verify`. A kernel that adds to D finds small whole numbers there, which are taken off
again, so that an element added twice, or not at all, is off. Groups along K: all at the problem's
K, unequal ones with some of no columns, one alone, none at all; told by numbers and by a tensor on
the device, NaN behind the last group's columns; the exact case tells one group's K blocks from
another's. Nothing around D or between its groups may change. That every K block is promoted is not
checked of groups by itself: the loop is that of kind wgrad.
Must not import runtime, build, search or cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kgen.cases import Case, Launch
from kgen.errors import WrongResult
from kgen.verify import MAX_FINE_ERROR, Verified, verify
from kgen.wgrad_cases import KGroupedCase, KGroupedLaunch, KGroupedRun, accumulating, held_before


def verify_wgrad(launch: Launch, case: Case, *, any_nk: bool = False) -> Verified:
    """Check a kernel of kind wgrad as `kgen.verify.verify` does; raises WrongResult."""
    return verify(accumulating(launch) if case.problem.accumulate else launch, case, any_nk=any_nk)


def verify_k_grouped(launch: KGroupedLaunch, case: KGroupedCase) -> Verified:
    """Check a kernel on a case; raises WrongResult with what is wrong. Waits for the device."""
    runs = [(run, False) for run in case.runs]
    runs += [(run, True) for run in case.runs if run.name == "uneven"]
    tile, strip = check_k_grouped(launch, case, runs)
    _check_exact(launch, case)
    return Verified(case.problem, tile, strip, exact_passes=case.exact.num_passes)


def check_k_grouped(
    launch: KGroupedLaunch,
    case: KGroupedCase,
    runs: Sequence[tuple[KGroupedRun, bool]],
    *,
    limit: float = MAX_FINE_ERROR,
    on_host: Sequence[bool] = (True, False),
) -> tuple[float, float]:
    """Largest tile and strip error over runs, each with whether scales are row-major.

    `on_host`: whether ks are handed over as numbers, each way in turn. Raises WrongResult above
    the limit, and where anything but D was written.
    """
    asked = [(*run, host) for run in runs for host in on_host]
    found = []
    for run, row_major, host in asked:
        d = _launch(launch, case, run, row_major, host)
        excess = case.output.num_changed() - d.numel()
        found.append(torch.cat([run.errors(d), excess.float()[None]]))
    tile = strip = 0.0
    for (run, row_major, host), (of_tile, of_strip, excess) in zip(
        asked, torch.stack(found).tolist(), strict=True
    ):
        name = f"{case.problem}: {run.name}, ks {_where(host)}"
        name += ", row-major scales" * row_major
        if excess:
            raise WrongResult(f"{name}: {excess:+.0f} elements written that are not D's")
        if not (of_tile <= limit and of_strip <= limit):
            raise WrongResult(
                f"{name}: a tile is off by {of_tile:.3g}, a strip of 8 columns by {of_strip:.3g}: "
                f"at most {limit:g} is right"
            )
        tile, strip = max(tile, of_tile), max(strip, of_strip)
    return tile, strip


def _check_exact(launch: KGroupedLaunch, case: KGroupedCase) -> None:
    found = []
    for number, run in enumerate(case.exact.passes()):
        d = _launch(launch, case, run, row_major=False, host=number % 2 == 0)
        wrong = d.new_zeros((), dtype=torch.int64)
        for group, reference in enumerate(run.references):
            wrong += torch.count_nonzero(d[group] if reference is None else d[group] != reference)
        found.append(torch.stack([wrong, case.output.num_changed() - d.numel()]))
    for number, (wrong, excess) in enumerate(torch.stack(found).tolist()):
        if wrong or excess:
            raise WrongResult(
                f"{case.problem}: exact case over uneven groups, pass {number}: {wrong} elements "
                f"differ, {excess:+d} written that are not D's"
            )


def _launch(
    launch: KGroupedLaunch, case: KGroupedCase, run: KGroupedRun, row_major: bool, host: bool
) -> torch.Tensor:
    """The product of a run, in the case's output."""
    d = case.poisoned(run)
    adds = case.problem.accumulate
    if adds:
        d.copy_(held_before(d))
    launch((*run.inputs(row_major), d), run.ks if host else run.ks_on_device())
    if adds:
        d.sub_(held_before(d))
    return d


def _where(host: bool) -> str:
    return "as numbers" if host else "on the device"
