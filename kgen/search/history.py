"""What tuning gained over time: `best_so_far`, from the trials of one problem.

Takes rows of the database in the order recorded, gives a staircase. Must not import torch, CUDA or
optuna.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from statistics import median

from kgen.cache.records import TrialRow
from kgen.config import GemmConfig


@dataclass(frozen=True)
class Point:
    """After a trial: seconds of tuning and trials since the first, the best in microseconds."""

    seconds: float
    num_trials: int
    best_us: float


def best_so_far(rows: Iterable[TrialRow], policy: str) -> list[Point]:
    """A point for each trial from the first timed one on; all rows are of one problem and device.

    The best is the tuner's own notion: the least median over the times of one configuration, which
    grows when finals correct a lucky first time. Sources by hand and predictions are no trials, and
    time between two runs does not count. Times are of `policy`.
    """
    points: list[Point] = []
    times: dict[GemmConfig, list[float]] = {}
    seconds, num_trials = 0.0, 0
    before: TrialRow | None = None
    for row in rows:
        if row.is_foreign or row.status == "compiled" or row.policy not in ("", policy):
            continue
        if before is not None and before.run_id == row.run_id:
            step = datetime.fromisoformat(row.date) - datetime.fromisoformat(before.date)
            seconds += max(0.0, step.total_seconds())
        before = row
        num_trials += 1
        if row.median_us is not None:
            times.setdefault(row.config, []).append(row.median_us)
        if times:
            best_us = min(median(found) for found in times.values())
            points.append(Point(seconds, num_trials, best_us))
    return points
