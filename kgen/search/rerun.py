"""One stored trial alone, once more: `rerun`, for a time or a failure that somebody doubts.

Takes the trial's id, gives what it was and what it is now, and appends the latter to the database.
Must not import torch, CUDA or optuna.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.cache.db import TuningDatabase
from kgen.device import Device
from kgen.intervals import Interval, median_interval
from kgen.search.events import TuneOptions
from kgen.search.gpu_run import gpu_run
from kgen.search.recheck import Checked, check_row
from kgen.settings import Settings


@dataclass(frozen=True)
class Rerun:
    """A stored trial and its repetition on `device`; intervals are of medians, in microseconds."""

    checked: Checked
    device: Device
    policy: str

    @property
    def elsewhere(self) -> bool:
        """Whether the stored trial is of another GPU model or number of SMs."""
        row = self.checked.row
        return (row.device_name, row.num_sms) != (self.device.name, self.device.num_sms)

    @property
    def then(self) -> Interval | None:
        """Bounds of the stored median; None without a time, or of too few samples."""
        return median_interval(self.checked.row.samples_us)

    @property
    def now(self) -> Interval | None:
        """Bounds of the new one."""
        return median_interval(self.checked.now.samples_us) if self.checked.now else None

    @property
    def agrees(self) -> bool | None:
        """Whether the intervals overlap; None where one is not known or policies differ."""
        if self.then is None or self.now is None or self.policy != self.checked.row.policy:
            return None
        return self.then.overlaps(self.now)


def rerun(
    settings: Settings, number: int, policy: str | None = None, options: TuneOptions | None = None
) -> Rerun:
    """Build, verify and time trial `number` again, under its own policy unless one is given.

    Raises DatabaseError for a number that is not there, before the GPU is touched, and GpuMissing.
    """
    options = options or TuneOptions()
    with TuningDatabase.open(settings.db_url, create=False, readonly=True) as db:
        row = db.trial(number)
    policy = policy or row.policy or options.policy
    with gpu_run(settings, "run-trial", options, {"trial": number}) as gpu:
        return Rerun(check_row(gpu, row, policy), gpu.device, policy)
