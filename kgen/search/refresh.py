"""After a new compiler, driver or template: are the stored winners still the winners? `refresh`.

Takes problems, times only the fastest few that are stored of each, with today's compiler, templates
and driver, and says what moved. Rows of before stay as they are. Must not import torch, CUDA or
optuna.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from kgen.cache import rows
from kgen.cache.records import TrialRow
from kgen.config import GemmConfig
from kgen.device import Device
from kgen.errors import GpuMissing, Interrupted, Untunable
from kgen.heuristic import default_config
from kgen.intervals import Interval, median_interval
from kgen.problem import GemmProblem
from kgen.search.events import OnEvent, TuneOptions
from kgen.search.gpu_run import GpuRun, gpu_run
from kgen.settings import Settings
from kgen.validity import why_invalid

#: Entries of a trial's provenance in which a change calls for a new time.
CIRCUMSTANCES: Final = ("compiler", "template_hash", "driver", "cuda")

#: Nothing changed since; times stand beside those of before; the problem has none; it failed.
CURRENT: Final = "current"
REFRESHED: Final = "refreshed"
UNKNOWN: Final = "unknown"
FAILED: Final = "failed"
NOT_REACHED: Final = "not reached"


@dataclass(frozen=True)
class Stood:
    """A kernel's place at one time: its median and the bounds of that, in microseconds."""

    config: GemmConfig
    median_us: float
    interval: Interval | None


@dataclass(frozen=True)
class Refreshed:
    """One problem, before and now.

    outcome    refreshed, current, unknown (no time is stored here), failed (for `reason`), or not
               reached
    changes    what differs since: circumstance to (before, now)
    before     the winner of before; `its_time_now` is the same configuration today, None where it
               failed
    now        the winner among those timed again
    failures   configurations that failed today, by reason
    """

    problem: GemmProblem
    outcome: str
    reason: str = ""
    changes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    before: Stood | None = None
    its_time_now: Stood | None = None
    now: Stood | None = None
    failures: Mapping[str, str] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """The winner's time now over the winner's before."""
        if self.before is None or self.now is None:
            return None
        return self.now.median_us / self.before.median_us

    @property
    def moved(self) -> str:
        """What moved, in words; times have moved where their intervals do not meet."""
        if self.before is None or self.now is None:
            return ""
        words = [] if self.now.config == self.before.config else ["another winner"]
        then, here = self.before.interval, self.now.interval
        if then is None or here is None:
            words.append("too few samples to tell times apart")
        elif not then.overlaps(here):
            words.append("faster" if here.high < then.low else "slower")
        return ", ".join(words) or "nothing"


def refresh(
    settings: Settings,
    problems: Collection[GemmProblem],
    options: TuneOptions,
    on_refreshed: Callable[[Refreshed], None] = lambda refreshed: None,
    on_event: OnEvent = lambda event: None,
) -> tuple[Device, list[Refreshed], bool]:
    """Refresh some problems (none given: every one with a winner here).

    Gives the device, a result for each problem, and whether the run was interrupted; what was
    recorded until then is kept, and the same call goes on from there. `options.finalists`
    configurations of each problem are timed again, and the default, under `options.policy`, within
    `options.budget_s`. Raises GpuMissing and DatabaseError.
    """
    found: list[Refreshed] = []
    until = time.monotonic() + options.budget_s if options.budget_s else float("inf")
    wanted: list[GemmProblem] = list(problems)
    device: Device | None = None
    interrupted = False
    try:
        with gpu_run(settings, "refresh", options, on_event=on_event) as gpu:
            device = gpu.device
            wanted = wanted or [
                row.problem for row in gpu.run.db.winners(device.name, device.num_sms)
            ]
            for problem in wanted:
                late = time.monotonic() > until
                one = Refreshed(problem, NOT_REACHED) if late else _refresh(gpu, problem)
                found.append(one)
                on_refreshed(one)
    except Interrupted:
        if device is None:  # before there was anything to report
            raise
        interrupted = True
    found += [Refreshed(problem, NOT_REACHED) for problem in wanted[len(found) :]]
    assert device is not None, "a run knows its device"
    return device, found, interrupted


def _refresh(gpu: GpuRun, problem: GemmProblem) -> Refreshed:
    run, device = gpu.run, gpu.device
    run.check_stop()
    policy, number = run.options.policy, run.options.finalists
    stored = run.db.trials(problem, device.name, device.num_sms)
    today = circumstances(gpu)
    earlier = _last_generation(stored, today, policy)
    if not earlier:
        known = any(row.status == "ok" and row.policy == policy for row in stored)
        return Refreshed(problem, CURRENT if known else UNKNOWN)
    leading = list(dict.fromkeys(row.config for row in earlier))[:number]
    before = _stood(earlier[0], _samples(stored, earlier[0]))
    changes = {
        name: (str(earlier[0].provenance.get(name, "")), today[name])
        for name in CIRCUMSTANCES
        if earlier[0].provenance.get(name, "") != today[name]
    }
    ours = [row for row in stored if _of(row) == today and not row.is_foreign]
    done = {row.config for row in ours if row.policy in ("", policy)}
    if done.issuperset(leading):
        return Refreshed(problem, CURRENT)
    failures: dict[str, str] = {}
    try:
        configs = dict.fromkeys([*leading, default_config(problem, device)])
        _time_again(gpu, problem, list(configs), failures)
    except (GpuMissing, Interrupted):
        raise
    except Untunable as error:
        return Refreshed(problem, FAILED, str(error), changes, before)
    stored = run.db.trials(problem, device.name, device.num_sms)
    ranked = rows.ranking([row for row in stored if _of(row) == today], policy)
    places = [_stood(row, _samples(stored, row)) for row in ranked]
    if not places:
        reason = next(iter(failures.values()), "nothing could be timed")
        return Refreshed(problem, FAILED, reason, changes, before, failures=failures)
    again = next((place for place in places if place.config == before.config), None)
    return Refreshed(problem, REFRESHED, "", changes, before, again, places[0], failures)


def circumstances(gpu: GpuRun) -> dict[str, str]:
    """Today's, as the provenance of a trial has them."""
    kept = gpu.run.provenance({})
    return {name: str(kept.get(name, "")) for name in CIRCUMSTANCES}


def _of(row: TrialRow) -> dict[str, str]:
    return {name: str(row.provenance.get(name, "")) for name in CIRCUMSTANCES}


def _last_generation(stored: list[TrialRow], today: dict[str, str], policy: str) -> list[TrialRow]:
    """The ranking under the circumstances before today's; empty where there were none."""
    bad = [row for row in stored if row.failed]
    timed = [row for row in stored if row.status == "ok" and not row.is_foreign]
    old = [row for row in timed if row.policy == policy and _of(row) != today]
    if not old:
        return []
    latest = _of(old[-1])
    return rows.ranking([*bad, *(row for row in old if _of(row) == latest)], policy)


def _samples(stored: list[TrialRow], row: TrialRow) -> list[float]:
    """All samples of a cubin under the circumstances of a row."""
    alike = [one for one in stored if _same(one, row) and _of(one) == _of(row)]
    return [sample for one in alike for sample in one.samples_us]


def _same(a: TrialRow, b: TrialRow) -> bool:
    return (a.cubin_key, a.config, a.policy) == (b.cubin_key, b.config, b.policy)


def _stood(row: TrialRow, samples: list[float]) -> Stood:
    assert row.median_us is not None, "a ranked row has a time"
    return Stood(row.config, row.median_us, median_interval(samples))


def _time_again(
    gpu: GpuRun, problem: GemmProblem, configs: list[GemmConfig], failures: dict[str, str]
) -> None:
    """Build those still valid side by side, time them together, and record what comes of each."""
    valid = []
    for config in configs:
        if invalid := why_invalid(problem, config, gpu.device):
            failures[str(config)] = f"not valid any more: {invalid.reason}"
        else:
            valid.append(config)
    for config, why in gpu.build_and_check(problem, valid, gpu.run.options.policy):
        failures[str(config)] = why
