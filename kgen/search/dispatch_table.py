"""From tuned M points to few kernels for all M between: `measure_across`, `derive_table`.

Takes a problem (its own M says nothing) and the database; times winners at their neighbours' M on
the GPU, gives the smallest `DispatchTable` within a bound. Must not import torch, CUDA or optuna.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

from kgen.cache.db import TuningDatabase
from kgen.cache.records import DispatchEntry, DispatchTable
from kgen.config import GemmConfig
from kgen.cover import cover
from kgen.device import Device
from kgen.errors import UsageError
from kgen.problem import GemmProblem
from kgen.search.gpu_run import GpuRun
from kgen.search.run import is_current
from kgen.validity import why_invalid

KeyOf = Callable[[GemmConfig], str]
#: Stage of trials at an M between two tuned ones: a later call does not take it for a tuned one.
BETWEEN: Final = "between"


@dataclass(frozen=True)
class Served:
    """What one entry of a table costs: M from `low` to the entry's, at `points`; in shares.

    worst    largest share over the best at a point
    """

    low: int
    entry: DispatchEntry
    points: tuple[int, ...]
    worst: float


@dataclass(frozen=True)
class Derived:
    """A table and how it came about.

    is_smallest    no fewer kernels would do
    num_winners    different configurations that win at some point
    stale          M whose every time is of another compiler or other templates: not used
    """

    table: DispatchTable
    served: tuple[Served, ...]
    is_smallest: bool
    num_winners: int
    stale: tuple[int, ...] = field(default=())


@dataclass(frozen=True)
class Known:
    """Microseconds by M and configuration of the cubins that would be built today.

    tuned    M that were tuned themselves; the others were only timed between them
    stale    M that have times of other cubins only
    """

    times: dict[int, dict[GemmConfig, float]]
    tuned: tuple[int, ...]
    stale: tuple[int, ...]


def current_times(
    database: TuningDatabase, problem: GemmProblem, device: Device, key_of: KeyOf, policy: str
) -> Known:
    """What is known of the problem's class under a policy.

    `key_of` may raise RenderError: then there is no such cubin.
    """
    times: dict[int, dict[GemmConfig, float]] = {}
    tuned, stale = [], []
    for ranked in database.rankings_by_m(problem, device.name, device.num_sms, policy):
        m = ranked[0].problem.m
        found = {
            row.config: row.median_us
            for row in ranked
            if row.median_us is not None
            and is_current(row, device, lambda _, config: key_of(config))
        }
        if not found:
            stale.append(m)
            continue
        times[m] = found
        if any(row.provenance.get("stage") != BETWEEN for row in ranked):
            tuned.append(m)
    return Known(times, tuple(tuned), tuple(stale))


def points_between(points: Sequence[int], number: int) -> list[int]:
    """`number` M in each gap of ascending points, evenly by ratio; fewer where a gap is narrow."""
    found = set()
    for low, high in pairwise(points):
        ratio = high / low
        found |= {round(low * ratio ** ((i + 1) / (number + 1))) for i in range(number)}
    return sorted(found - set(points))


def measure_across(
    gpu: GpuRun,
    problem: GemmProblem,
    neighbours: int,
    between: int,
    on_point: Callable[[int, int, list[str]], None] = lambda m, number, failures: None,
) -> int:
    """Time each M's winner at the `neighbours` next tuned M on both sides, and at M between.

    At each M all its candidates are verified and timed together, alternating, unless each has a
    time there already; M between two tuned ones get the candidates of both. Gives the number of
    kernels timed. `on_point` is told of each M, how many were timed and which failed. Raises
    GpuMissing, Interrupted.
    """
    run, device = gpu.run, gpu.device
    known = current_times(
        run.db, problem, device, lambda c: run.key(problem, c), run.options.policy
    )
    times, points = known.times, known.tuned
    winners = [min(times[m], key=lambda c: (times[m][c], c)) for m in points]
    wanted: dict[int, list[GemmConfig]] = {}
    for place, m in enumerate(points):
        near = winners[max(0, place - neighbours) : place + neighbours + 1]
        wanted[m] = list(dict.fromkeys([winners[place], *near]))
    for m in points_between(points, between):
        above = next(place for place, point in enumerate(points) if point > m)
        near = winners[max(0, above - neighbours) : above + neighbours]
        wanted[m] = list(dict.fromkeys(near))
    total = 0
    for m in sorted(wanted):
        candidates = [c for c in wanted[m] if not why_invalid(problem.with_m(m), c, device)]
        if set(candidates) <= set(times.get(m, ())):
            continue
        stage = gpu if m in points else replace(gpu, name=BETWEEN)
        failed = stage.build_and_check(problem.with_m(m), candidates, run.options.policy)
        failures = [f"{config}: {why}" for config, why in failed]
        total += len(candidates) - len(failures)
        on_point(m, len(candidates), failures)
    return total


def derive_table(
    database: TuningDatabase,
    problem: GemmProblem,
    device: Device,
    key_of: KeyOf,
    *,
    policy: str,
    bound: float,
) -> Derived:
    """The smallest table within `bound` at every M that has a time under `policy`.

    An M between two points runs on the kernel of the upper one, whose tiles cover it as well.
    Raises UsageError where fewer than two M have a time of today's cubins.
    """
    known = current_times(database, problem, device, key_of, policy)
    times, stale = known.times, known.stale
    if len(times) < 2:
        hint = f"; times of M = {list(stale)} are of another compiler or templates" if stale else ""
        raise UsageError(
            f"{problem.with_m(1)}: {len(times)} M with a time under policy {policy} on "
            f"{device.name}{hint}: tune two at least, such as m=1..16384*2"
        )
    found = cover(times, bound)
    points = sorted(times)
    served = []
    low, first = 1, 0
    for place, m in enumerate(points):
        config = found.choices[m]
        if place + 1 < len(points) and found.choices[points[place + 1]] == config:
            continue
        own = tuple(points[first : place + 1])
        worst = max(times[p][config] / min(times[p].values()) - 1 for p in own)
        served.append(Served(low, DispatchEntry(m, config, key_of(config)), own, worst))
        low, first = m + 1, place + 1
    table = DispatchTable(
        problem=problem.with_m(1),
        device_name=device.name,
        num_sms=device.num_sms,
        policy=policy,
        bound=bound,
        worst=min(found.worst, bound),  # rounding of a ratio may exceed the bound by a digit
        points=tuple(points),
        entries=tuple(one.entry for one in served),
    )
    winners = {min(times[m], key=lambda c: (times[m][c], c)) for m in points}
    return Derived(table, tuple(served), found.is_smallest, len(winners), stale)
