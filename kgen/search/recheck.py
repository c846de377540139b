"""Do stored winners still hold? `recheck` builds, verifies and times them again on this GPU.

Takes settings and problems, gives `Checked` values, and appends what it saw to the database. Must
not import torch, CUDA or optuna.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from kgen.cache.records import TrialRow
from kgen.errors import (
    ArtifactError,
    GpuMissing,
    Interrupted,
    KgenError,
    RenderError,
    Untunable,
)
from kgen.problem import GemmProblem
from kgen.search.events import TuneOptions
from kgen.search.gpu_run import GpuRun, gpu_run
from kgen.search.gpu_worker import Measured
from kgen.search.run import status_of
from kgen.settings import Settings
from kgen.validity import why_invalid


@dataclass(frozen=True)
class Checked:
    """A stored trial, looked at again.

    status    "ok", or why it failed: one of records.STATUSES, "untunable", "invalid"
    stale     its cubin is not what is built today: the new one was checked, under the new key
    now       what was measured now; None where it failed, for `reason`
    """

    row: TrialRow
    status: str
    stale: bool = False
    now: Measured | None = None
    reason: str = ""

    @property
    def now_us(self) -> float | None:
        """The new median, in microseconds; None where it failed."""
        return self.now.median_us if self.now else None


def recheck(
    settings: Settings,
    problems: Collection[GemmProblem] | None = None,
    on_checked: Callable[[Checked], None] = lambda checked: None,
    options: TuneOptions | None = None,
) -> list[Checked]:
    """Check the winners of this device, or those of some problems, and record what came of it.

    Raises GpuMissing where there is no GPU to check on, and DatabaseError.
    """
    found: list[Checked] = []
    with gpu_run(settings, "verify", options) as gpu:
        for row in gpu.run.db.winners(gpu.device.name, gpu.device.num_sms):
            if problems is None or row.problem in problems:
                found.append(check_row(gpu, row, row.policy))
                on_checked(found[-1])
    return found


def check_row(gpu: GpuRun, row: TrialRow, policy: str) -> Checked:
    """Build, verify and time what a stored trial was about, and record it."""
    problem, config = row.problem, row.config
    gpu.run.check_stop()
    builder, stale = gpu.run.builder, False
    sources = ["foreign" if row.is_foreign else "tuned"]  # what was only predicted runs now
    try:
        if row.is_foreign:
            cubin = builder.stored_foreign(row.cubin_key, problem, config)
        else:
            if why := why_invalid(problem, config, gpu.device):
                return Checked(row, "invalid", True, reason=why.reason)
            stale = gpu.run.key(problem, config) != row.cubin_key
            cubin = builder.build(problem, config)
    except (ArtifactError, RenderError) as error:
        return Checked(row, "invalid", True, reason=str(error))
    except KgenError as error:
        status, reason = status_of(error), str(error)
        gpu.run.record_failure(problem, config, status, reason)
        return Checked(row, status, stale, reason=reason)
    try:
        (measured,) = gpu.check(problem, [cubin], policy, sources)
    except (GpuMissing, Interrupted):
        raise
    except Untunable as error:
        return Checked(row, "untunable", stale, reason=str(error))
    except KgenError as error:
        return Checked(row, status_of(error), stale, reason=str(error))
    return Checked(row, "ok", stale, measured)
