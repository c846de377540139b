"""What can be had without a GPU: `Forecast`, leading candidates compiled and ranked by the model.

Takes the run and its problems, gives reports. Nothing here is measured, and nothing is recorded
as if it were. Must not import torch, CUDA or optuna.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kgen.cache.records import TrialRow
from kgen.config import GemmConfig
from kgen.errors import KgenError
from kgen.heuristic import predict_us, seeds
from kgen.problem import GemmProblem
from kgen.search.events import (
    PREDICTED,
    TUNED,
    UNFINISHED,
    UNTUNABLE,
    ProblemFinished,
    ProblemReport,
    ProblemStarted,
    TrialFinished,
)
from kgen.search.run import Run, status_of, why_no_valid
from kgen.shapes import ShapeLine
from kgen.space import count_invalid, valid_configs

if TYPE_CHECKING:
    from kgen.build import Cubin

#: Candidates whose build failed are made good for, up to this many times those asked for.
MAX_ATTEMPTS: Final = 4
#: Without a budget the second and later candidates of each problem are left when this is over.
DEFAULT_BUDGET_S: Final = 180.0


@dataclass
class Prospect:
    """One problem and its candidates, best first."""

    line: ShapeLine
    ranked: list[GemmConfig]
    wanted: int
    invalid_by_rule: dict[str, int]
    num_valid: int
    next: int = 0
    num_new: int = 0
    compiled: dict[GemmConfig, float] = field(default_factory=dict)
    failed: dict[GemmConfig, tuple[str, str]] = field(default_factory=dict)
    waiting: dict[Future[Cubin], GemmConfig] = field(default_factory=dict)
    measured: TrialRow | None = None

    @property
    def problem(self) -> GemmProblem:
        """The problem."""
        return self.line.problem

    @property
    def is_served(self) -> bool:
        """Whether nothing more has to be built for it."""
        return self.measured is not None or len(self.compiled) >= self.wanted or self.is_spent

    @property
    def is_spent(self) -> bool:
        """Whether there is no candidate left that is worth an attempt."""
        return self.next >= len(self.ranked)


class Forecast:
    """All problems of a run without a GPU."""

    def __init__(self, run: Run, lines: Sequence[ShapeLine]) -> None:
        self._run = run
        self._until = time.monotonic() + (run.options.budget_s or DEFAULT_BUDGET_S)
        self._prospects = [_prospect(run, line) for line in lines]
        self._reports: dict[int, ProblemReport] = {}

    def reports(self) -> list[ProblemReport]:
        """Where every problem stands, in the order given."""
        return [self._reports.get(id(p)) or _report(p) for p in self._prospects]

    def work(self) -> None:
        """Compile and rank the leading candidates; raises Interrupted when told to stop.

        All problems get their best candidate before any gets its second, so that a budget that
        is too short leaves no problem with nothing.
        """
        for index, prospect in enumerate(self._prospects):
            self._introduce(prospect, index + 1)
        while len(self._reports) < len(self._prospects):
            self._run.check_stop()
            is_late = time.monotonic() > self._until
            for prospect in self._prospects:
                if id(prospect) not in self._reports:
                    self._advance(prospect, is_late)
            futures = [future for prospect in self._prospects for future in prospect.waiting]
            self._run.wait_any(futures, until=math.inf)
            for prospect in self._prospects:
                _collect(self._run, prospect)

    def _introduce(self, prospect: Prospect, index: int) -> None:
        num_known = len(prospect.compiled) + len(prospect.failed)
        invalid, num_valid = prospect.invalid_by_rule, prospect.num_valid
        self._run.on_event(ProblemStarted(prospect.problem, index, num_valid, num_known, invalid))

    def _advance(self, prospect: Prospect, is_late: bool) -> None:
        _submit(self._run, prospect, is_late)
        if not prospect.waiting:
            report = _report(prospect)
            self._reports[id(prospect)] = report
            _finish(self._run, prospect, report)


def _prospect(run: Run, line: ShapeLine) -> Prospect:
    """What the database and the model say of a problem."""
    run.check_stop()  # with many problems, seconds pass here
    problem, device = line.problem, run.device
    valid = valid_configs(problem, device)
    invalid = dict(count_invalid(problem, device))
    wanted = run.options.leading
    ranked = seeds(problem, device, wanted * MAX_ATTEMPTS)
    prospect = Prospect(line, ranked, wanted, invalid, len(valid))
    for row in run.db.trials(problem, device.name, device.num_sms):
        if not run.is_current(row):
            continue
        if row.status == "compiled":
            prospect.compiled[row.config] = predict_us(problem, row.config, device)
        elif row.status == "compile_failed":
            prospect.failed[row.config] = (row.status, row.reason)
    prospect.measured = run.db.best(problem, device.name, device.num_sms)
    return prospect


def _submit(run: Run, prospect: Prospect, is_late: bool) -> None:
    """Have one more candidate built, unless one waits or enough are there."""
    enough = prospect.is_served or (is_late and prospect.compiled)
    while not enough and not prospect.waiting and not prospect.is_spent:
        config = prospect.ranked[prospect.next]
        prospect.next += 1
        if config not in prospect.compiled and config not in prospect.failed:
            prospect.waiting[run.pool.submit(prospect.problem, config)] = config


def _collect(run: Run, prospect: Prospect) -> None:
    """Record what is built."""
    for future in [f for f in prospect.waiting if f.done()]:
        config = prospect.waiting.pop(future)
        predicted = predict_us(prospect.problem, config, run.device)
        status, reason = "compiled", ""
        try:
            run.record_compiled(prospect.problem, future.result(), predicted)
            prospect.compiled[config] = predicted
        except KgenError as error:
            status, reason = status_of(error), str(error)
            run.record_failure(prospect.problem, config, status, reason)
            prospect.failed[config] = (status, reason)
        prospect.num_new += 1
        run.on_event(
            TrialFinished(
                prospect.problem,
                config,
                status,
                reason,
                None,
                predicted,
                None,
                len(prospect.compiled) + len(prospect.failed),
            )
        )


def _finish(run: Run, prospect: Prospect, report: ProblemReport) -> None:
    """Record the outcome and tell of it."""
    if report.outcome in (PREDICTED, UNTUNABLE) and prospect.num_new:
        run.record_outcome(
            prospect.problem,
            report.outcome,
            reason=report.reason,
            num_trials=report.num_trials,
            invalid_by_rule=report.invalid_by_rule,
            details={"leading": prospect.wanted},
        )
    run.on_event(ProblemFinished(report))


def _report(prospect: Prospect) -> ProblemReport:
    """What is known now. A time that was measured earlier is worth more than any guess."""
    by_status = Counter(status for status, _ in prospect.failed.values())
    by_status["compiled"] = len(prospect.compiled)
    common: dict[str, Any] = {
        "num_trials": len(prospect.compiled) + len(prospect.failed),
        "num_new_trials": prospect.num_new,
        "num_valid": prospect.num_valid,
        "by_status": dict(by_status),
        "invalid_by_rule": prospect.invalid_by_rule,
        "skipped": not prospect.num_new,
    }
    problem, weight = prospect.problem, prospect.line.weight
    if row := prospect.measured:
        return ProblemReport(
            problem,
            weight,
            TUNED,
            config=row.config,
            median_us=row.median_us,
            p10_us=row.p10_us,
            p90_us=row.p90_us,
            error=row.error,
            predicted_us=row.predicted_us,
            **common,
        )
    if prospect.compiled:
        config = min(prospect.compiled, key=lambda c: prospect.compiled[c])
        us = prospect.compiled[config]
        return ProblemReport(problem, weight, PREDICTED, config=config, predicted_us=us, **common)
    if prospect.waiting or not prospect.is_spent:
        reason = "stopped before its first kernel was compiled"
        return ProblemReport(problem, weight, UNFINISHED, reason, **common)
    return ProblemReport(problem, weight, UNTUNABLE, _why_untunable(prospect), **common)


def _why_untunable(prospect: Prospect) -> str:
    if not prospect.ranked:
        return why_no_valid(prospect.invalid_by_rule)
    first = next(iter(prospect.failed.values()))[1]
    return f"none of {len(prospect.failed)} candidates could be built; the first: {first}"
