"""Why a problem runs on the kernel that it runs on: `explain` -> `Explanation`.

Takes a problem, a device and an open database; gives the size of the space and what left it, what
came of the trials, which kernels can not be told apart, how winner, default and runner-up differ,
and where the runtime's answer comes from. Measures and builds nothing. Must not import search,
torch or the CUDA driver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from difflib import unified_diff
from typing import Any, Final

from kgen.cache import rows
from kgen.cache.db import TuningDatabase
from kgen.cache.keys import or_nothing
from kgen.cache.records import ProblemOutcome, TrialRow
from kgen.config import GemmConfig
from kgen.device import Device
from kgen.heuristic import default_config, predict_us
from kgen.intervals import Interval, median_interval
from kgen.problem import GemmProblem
from kgen.render import render
from kgen.runtime.lookup import Choice, Winner, choose, winners_of
from kgen.space import count_invalid, num_points, valid_configs

#: Kernels after the tie set that are listed.
FOLLOWERS: Final = 3


@dataclass(frozen=True)
class Kernel:
    """A verified, timed cubin of the problem; times in microseconds.

    trial      id of its newest row: what `kgen run-trial` takes
    interval   bounds of its median over all its samples; None of fewer than six
    is_tied    the interval overlaps the winner's: the two can not be told apart
    is_stale   today's compiler and templates give another cubin; None where nobody can tell
    """

    trial: int
    config: GemmConfig
    cubin_key: str
    median_us: float
    num_samples: int
    interval: Interval | None
    is_tied: bool
    is_stale: bool | None
    predicted_us: float


@dataclass(frozen=True)
class Comparison:
    """Two configurations of the problem: the axes in which they differ, as (own, other)."""

    axes: dict[str, tuple[Any, Any]]
    num_lines: int
    diff: str = field(repr=False, default="")


@dataclass(frozen=True)
class Explanation:
    """All there is to say of a problem on a device; see `explain`.

    kernels       fastest first, under `policy`; the first is the winner
    by_status     trials on this device by status, with sources by hand apart as "foreign"
    num_rows      of these trials; num_configs: configurations in them
    default_us    the default's median, if it was timed; its prediction stands beside it
    """

    problem: GemmProblem
    device: Device
    choice: Choice
    num_points: int
    num_valid: int
    invalid_by_rule: dict[str, int]
    by_status: dict[str, int]
    num_rows: int
    num_configs: int
    policy: str
    kernels: tuple[Kernel, ...]
    default: GemmConfig
    default_us: float | None
    default_predicted_us: float
    outcome: ProblemOutcome | None

    @property
    def winner(self) -> Kernel | None:
        """The fastest kernel; None where nothing was verified and timed here."""
        return self.kernels[0] if self.kernels else None

    @property
    def runner_up(self) -> Kernel | None:
        """The next fastest of another configuration."""
        others = (k for k in self.kernels[1:] if k.config != self.kernels[0].config)
        return next(others, None)

    @property
    def ties(self) -> tuple[Kernel, ...]:
        """The winner and what can not be told apart from it."""
        return tuple(kernel for kernel in self.kernels if kernel.is_tied)


def explain(
    problem: GemmProblem,
    device: Device,
    database: TuningDatabase | None,
    key_of: Callable[[GemmConfig], str] | None = None,
    sass_passes: tuple[str, ...] = ("none",),
) -> Explanation:
    """What is known of a problem on a device, from the database (None: there is none) and models.

    `key_of` gives the key of the cubin that would be built today (None: nobody can tell). Raises
    InvalidConfig where the device fits no configuration, and DatabaseError.
    """
    found, winners, outcome = _stored(problem, device, database)
    ranked = rows.ranking(found)
    samples = _samples(found, ranked)
    key = or_nothing(key_of) if key_of else None
    kernels = _kernels(problem, device, ranked, samples, key)
    default = default_config(problem, device)
    of_default = (kernel.median_us for kernel in kernels if kernel.config == default)
    statuses = Counter("foreign" if row.is_foreign else row.status for row in found)
    return Explanation(
        problem=problem,
        device=device,
        choice=choose(problem, device, winners, key),
        num_points=num_points(sass_passes),
        num_valid=len(valid_configs(problem, device, sass_passes)),
        invalid_by_rule=dict(count_invalid(problem, device, sass_passes).most_common()),
        by_status=dict(statuses),
        num_rows=len(found),
        num_configs=len({row.config for row in found}),
        policy=ranked[0].policy if ranked else "",
        kernels=kernels,
        default=default,
        default_us=next(of_default, None),
        default_predicted_us=predict_us(problem, default, device),
        outcome=outcome,
    )


def _stored(
    problem: GemmProblem, device: Device, database: TuningDatabase | None
) -> tuple[list[TrialRow], tuple[Winner, ...], ProblemOutcome | None]:
    """Trials of the problem, what the runtime finds of its class, and its last outcome."""
    if database is None:
        return [], (), None
    here = (problem, device.name, device.num_sms)
    outcomes = database.outcomes(*here)
    return (
        database.trials(*here),
        winners_of(database.rankings_by_m(*here), database.dispatch_table(*here)),
        outcomes[-1] if outcomes else None,
    )


def _samples(
    found: Iterable[TrialRow], ranked: Iterable[TrialRow]
) -> dict[tuple[str, GemmConfig], list[float]]:
    """All samples of each ranked cubin, under the policy of its rank."""
    pooled: dict[tuple[str, GemmConfig], list[float]] = {}
    policies = {row.policy for row in ranked}
    for row in found:
        if row.policy in policies:
            pooled.setdefault((row.cubin_key, row.config), []).extend(row.samples_us)
    return pooled


def _kernels(
    problem: GemmProblem,
    device: Device,
    ranked: list[TrialRow],
    samples: dict[tuple[str, GemmConfig], list[float]],
    key_of: Callable[[GemmConfig], str] | None,
) -> tuple[Kernel, ...]:
    kernels: list[Kernel] = []
    for row in ranked:
        assert row.median_us is not None, "a ranked row has a time"
        own = samples[row.cubin_key, row.config]
        interval = median_interval(own)
        best = kernels[0].interval if kernels else interval
        kernels.append(
            Kernel(
                trial=row.id,
                config=row.config,
                cubin_key=row.cubin_key,
                median_us=row.median_us,
                num_samples=len(own),
                interval=interval,
                is_tied=not kernels or bool(interval and best and interval.overlaps(best)),
                is_stale=None if key_of is None else key_of(row.config) != row.cubin_key,
                predicted_us=predict_us(problem, row.config, device),
            )
        )
    return tuple(kernels)


def compare(problem: GemmProblem, own: GemmConfig, other: GemmConfig) -> Comparison:
    """How two configurations differ, in axes and in the sources that are rendered today.

    `diff` leads from `other` to `own`; raises RenderError where the templates refuse one.
    """
    mine, yours = own.to_dict(), other.to_dict()
    axes = {name: (mine[name], yours[name]) for name in mine if mine[name] != yours[name]}
    before, after = (render(problem, config).text.splitlines() for config in (other, own))
    lines = list(unified_diff(before, after, str(other), str(own), lineterm="", n=2))
    changed = sum(line[0] in "+-" and line[:3] not in ("+++", "---") for line in lines)
    return Comparison(axes, changed, "\n".join(lines))
