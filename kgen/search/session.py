"""One problem in a run: what is known of it, what is being built, what it is worth: `Session`.

Takes a shapes line and the run; gives candidates whose cubins are ready, and the report. Must not
import torch, CUDA or optuna.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

from kgen.cache.records import ProblemOutcome, TrialRow
from kgen.config import GemmConfig, grid_size, resources_of
from kgen.heuristic import default_config, predict_us, seeds
from kgen.search.control import Control
from kgen.search.events import TUNED, UNFINISHED, UNTUNABLE, ProblemReport
from kgen.search.gpu_worker import Measured
from kgen.search.model_strategy import Lesson, away
from kgen.search.plan import Progress, floor_us
from kgen.search.run import Run, why_no_valid
from kgen.search.strategies import MAX_PENDING, NUM_SEEDS, Guide, make_strategy
from kgen.search.strategy import Strategy
from kgen.search.ties import Standing
from kgen.shapes import ShapeLine
from kgen.space import count_invalid, nearest, valid_configs

if TYPE_CHECKING:
    from kgen.build import Cubin

#: What a kernel is launched with beside its code: another one is another kernel.
Launch = tuple[Any, ...]


@dataclass(frozen=True)
class Candidate:
    """A configuration on its way to the GPU."""

    config: GemmConfig
    future: Future[Cubin]


class Session:
    """The state of one problem in this run, on top of what the database knew."""

    def __init__(self, run: Run, line: ShapeLine) -> None:
        self._run = run
        self.line = line
        self.problem = line.problem
        self.progress = Progress(line.weight, floor_us(line.problem, run.device))
        self.pending: list[Candidate] = []
        self.is_closed = False
        self.untunable = ""
        self.num_new = 0
        self.is_prepared = False
        self.is_introduced = False
        self._asked_all = False
        self._times: dict[GemmConfig, list[Measured]] = {}
        self._failed: dict[GemmConfig, tuple[str, str]] = {}
        self._codes: dict[Launch, GemmConfig] = {}
        self.standings: list[Standing] = []
        self.control: Cubin | None = None
        self._watch: Control | None = None
        for row in self._known_rows():
            self._remember_row(row)
        unbuilt = sum(status == "compile_failed" for status, _ in self._failed.values())
        self.progress.num_trials = self.num_configs - unbuilt
        self.progress.num_unbuilt = unbuilt
        self._incumbent = self._known_winner()
        self.progress.end_slice(None)

    # -- what was known ------------------------------------------------------------------------

    def _known_rows(self) -> list[TrialRow]:
        """Rows that still hold: the same device, policy, and the cubin that is built today."""
        device = self._run.device
        rows = self._run.db.trials(self.problem, device.name, device.num_sms)
        return [
            row
            for row in rows
            if row.status != "compiled"
            and row.policy in ("", self._run.options.policy)
            and self._run.is_current(row)
        ]

    def _remember_row(self, row: TrialRow) -> None:
        if row.status != "ok":
            self._failed[row.config] = (row.status, row.reason)
            return
        assert row.median_us is not None, "the schema forbids it"
        assert row.p10_us is not None, "the schema forbids it"
        assert row.p90_us is not None, "the schema forbids it"
        assert row.error is not None, "the schema forbids it"
        self._remember(
            row.config,
            Measured(
                row.policy,
                row.error,
                row.median_us,
                row.p10_us,
                row.p90_us,
                tuple(row.samples_us),
            ),
        )

    def _known_winner(self) -> GemmConfig | None:
        """The winner of earlier runs, if that still holds."""
        device, policy = self._run.device, self._run.options.policy
        best = self._run.db.best(self.problem, device.name, device.num_sms, policy)
        return best.config if best and best.config in self._times else None

    def _remember(self, config: GemmConfig, measured: Measured) -> None:
        self._times.setdefault(config, []).append(measured)
        self.progress.best_us = self.best_us

    def last_outcome(self) -> ProblemOutcome | None:
        """How an earlier run left the problem on this device, if one finished it."""
        device = self._run.device
        found = self._run.db.outcomes(self.problem, device.name, device.num_sms)
        return found[-1] if found else None

    # -- the search ----------------------------------------------------------------------------

    @cached_property
    def valid(self) -> tuple[GemmConfig, ...]:
        """Every configuration that may be tried."""
        return valid_configs(self.problem, self._run.device, self._run.builder.sass_passes)

    @cached_property
    def invalid_by_rule(self) -> dict[str, int]:
        """How many configurations each rule left out."""
        passes = self._run.builder.sass_passes
        return dict(count_invalid(self.problem, self._run.device, passes))

    @cached_property
    def default(self) -> GemmConfig:
        """The heuristic's choice: tried first, and what the winner is compared with."""
        return default_config(self.problem, self._run.device)

    def prepare(self) -> None:
        """List the space and set up the search: up to a second of work, done once.

        May run in another thread, before anything else of this problem does.
        """
        if self.valid:
            _ = self._strategy, self.invalid_by_rule
        self.is_prepared = True

    @cached_property
    def _strategy(self) -> Strategy:
        device = self._run.device
        suggested = self._run.db.suggestions(self.problem, device.name, device.num_sms)
        hints = [hint.config for hint in suggested]
        hints += [self.neighbour] if self.neighbour else []
        first = [self.default, *hints, *seeds(self.problem, device, NUM_SEEDS)]
        known: dict[GemmConfig, float | None] = dict.fromkeys(self._failed)
        known |= {config: self.best_of(config) for config in self._times}
        options = self._run.options
        guide = Guide(self.problem, device, self._lessons(), num_hints=len(hints))
        return make_strategy(options.sampler, self.valid, first, known, options.seed, guide=guide)

    def _lessons(self) -> list[Lesson]:
        """What was learned of other problems, in this run and before."""
        # Copies: the run goes on while this one is prepared in another thread.
        return [
            Lesson(problem, config, us)
            for problem, known in list(self._run.lessons.items())
            for config, us in list(known.items())
            if problem != self.problem
        ]

    @cached_property
    def neighbour(self) -> GemmConfig | None:
        """The winner of the nearest problem that is known, or the valid configuration next to it.

        It always races: what served a neighbour is what an untuned call would be given.
        """
        timed = [
            (apart, lesson.median_us, lesson.config)
            for lesson in self._lessons()
            if lesson.median_us is not None
            and (apart := away(self.problem, lesson.problem)) is not None
        ]
        return nearest(min(timed)[2], self.valid) if timed else None

    @property
    def num_configs(self) -> int:
        """Configurations that were tried, in this run and before."""
        return len(self._times) + len(self._failed)

    def expected_gain(self) -> float | None:
        """What the strategy expects of the next trial, in parts of the best time."""
        return self._strategy.expected_gain()

    @property
    def is_exhausted(self) -> bool:
        """Whether every valid configuration was asked for and has ended."""
        return self._asked_all and not self.pending

    def fill(self, limit: int) -> None:
        """Have up to `limit` configurations of this problem building or built."""
        self._asked_all = self._asked_all or not self.valid
        while len(self.pending) < min(limit, MAX_PENDING) and not self._asked_all:
            config = self._strategy.ask()
            if config is None:
                self._asked_all = True
            else:
                future = self._run.pool.submit(self.problem, config)
                self.pending.append(Candidate(config, future))

    def take(self, until: float) -> Candidate | None:
        """The next candidate that is built, or has failed to; None when `until` came first.

        The first of all is the default, whoever else is ready.
        """
        is_first = not self._times and not self._failed
        eligible = self.pending[:1] if is_first else self.pending
        if not self._run.wait_any((c.future for c in eligible), until):
            return None
        chosen = next(c for c in eligible if c.future.done())
        self.pending.remove(chosen)
        return chosen

    def add_twin(self, cubin: Cubin) -> bool:
        """Whether the same code, launched alike, was timed before: then that is what it takes.

        It costs no trial, and can not win: its elder does.
        """
        elder = self._codes.setdefault(self._launch_of(cubin), cubin.config)
        if elder == cubin.config or elder not in self._times:
            return False
        self._strategy.tell(cubin.config, self.best_of(elder))
        return True

    def _launch_of(self, cubin: Cubin) -> Launch:
        config, problem = cubin.config, self.problem
        code = hashlib.sha256(cubin.data).digest()
        clusters = (config.cluster_m, config.cluster_n, config.split_k)
        grid = grid_size(problem, config, self._run.device)
        return code, resources_of(config, problem), clusters, grid

    def add_trial(self, cubin: Cubin, measured: Measured) -> str:
        """A candidate of the search was timed; tells of times that moved, else nothing.

        The default becomes the control that is timed beside those that follow.
        """
        self.add_time(cubin.config, measured)
        if cubin.config == self.default:
            self.control, self._watch = cubin, Control(measured.median_us)
        elif self._watch and measured.control_us is not None:
            return self._watch.add(measured.control_us)
        return ""

    def add_time(self, config: GemmConfig, measured: Measured) -> None:
        """A candidate was timed."""
        is_new = config not in self._times
        self._remember(config, measured)
        if is_new:
            self.num_new += 1
            self._strategy.tell(config, measured.median_us)
        self._run.lessons.setdefault(self.problem, {})[config] = self.best_of(config)

    def add_failure(self, config: GemmConfig, status: str, reason: str) -> None:
        """A candidate failed; what it did before does not count any more."""
        is_new = config not in self._times
        self._times.pop(config, None)
        self._failed[config] = (status, reason)
        self.progress.best_us = self.best_us
        if is_new:
            self.num_new += 1
            self._strategy.tell(config, None)
        if status != "compile_failed":
            self._run.lessons.setdefault(self.problem, {})[config] = None

    # -- results -------------------------------------------------------------------------------

    def best_of(self, config: GemmConfig) -> float:
        """The median of a configuration's times, as the database has it; inf without one."""
        times = self._times.get(config)
        return median(m.median_us for m in times) if times else math.inf

    @property
    def winner(self) -> GemmConfig | None:
        """The fastest configuration that passed, or who won the finals' tie that it is in."""
        fastest = min(self._times, key=self._order, default=None)
        tied = [standing.config for standing in self.standings if standing.tied]
        return tied[0] if fastest in tied and tied[0] in self._times else fastest

    def _order(self, config: GemmConfig) -> tuple[float, GemmConfig]:
        return self.best_of(config), config

    @property
    def best_us(self) -> float | None:
        """The winner's time, in microseconds."""
        return self.best_of(self.winner) if self.winner else None

    def finalists(self, number: int) -> list[GemmConfig]:
        """The fastest `number`, and of `preferred` those that passed."""
        leading = sorted(self._times, key=self._order)[:number]
        return list(dict.fromkeys([*leading, *(c for c in self.preferred if c in self._times)]))

    @property
    def preferred(self) -> list[GemmConfig]:
        """Who keeps a tie: the winner of earlier runs, the default, the nearest known winner."""
        known = (self._incumbent, self.default, self.neighbour)
        return list(dict.fromkeys(config for config in known if config is not None))

    def settle(self, standings: list[Standing]) -> None:
        """Take note of what the finals said, the winner first."""
        self.standings = standings

    def final_of(self, config: GemmConfig) -> dict[str, Any]:
        """What the database keeps of the finals beside the configuration's time."""
        (own,) = [standing for standing in self.standings if standing.config == config]
        return {
            "ratio": own.ratio,
            "low": own.low,
            "high": own.high,
            "chosen": str(self.standings[0].config),
            "tied": [str(standing.config) for standing in self.standings if standing.tied],
        }

    def close(self) -> None:
        """Give up what is still waiting to be built."""
        self.is_closed = True
        self.pending.clear()

    def predicted_us(self, config: GemmConfig) -> float:
        """The analytic model's figure."""
        return predict_us(self.problem, config, self._run.device)

    def why_untunable(self, is_full: bool) -> str:
        """Why the problem can have no winner here, or "" while it may still get one."""
        if self.untunable and self.winner is None:
            return self.untunable
        if self.winner is not None or not self.is_introduced:
            return ""
        if not self.valid:
            return why_no_valid(self.invalid_by_rule)
        if not (is_full or self.is_exhausted or self.progress.hopeless):
            return ""
        counts = Counter(status for status, _ in self._failed.values())
        words = ", ".join(f"{status} {n}" for status, n in sorted(counts.items()))
        example = next(iter(self._failed.values()), ("", ""))[1]
        return f"none of {len(self._failed)} candidates passed: {words}; the first: {example}"

    def report(self, is_full: bool) -> ProblemReport:
        """Where the problem stands now."""
        reason = self.why_untunable(is_full)
        values: dict[str, Any] = {}
        outcome = UNTUNABLE if reason else UNFINISHED
        if self.winner is not None:
            outcome = TUNED
            times = self._times[self.winner]
            default_us = self.best_of(self.default) if self.is_introduced else math.inf
            values = {
                "config": self.winner,
                "median_us": self.best_us,
                "p10_us": median(m.p10_us for m in times),
                "p90_us": median(m.p90_us for m in times),
                "error": max(m.error for m in times),
                "default_us": default_us if math.isfinite(default_us) else None,
                "predicted_us": self.predicted_us(self.winner),
                "num_tied": sum(standing.tied for standing in self.standings),
            }
        elif not reason:
            reason = f"the run ended after {len(self._failed)} trials, none of which passed"
        by_status = Counter(status for status, _ in self._failed.values())
        return ProblemReport(
            self.problem,
            self.line.weight,
            outcome,
            reason,
            num_trials=self.num_configs,
            num_new_trials=self.num_new,
            num_valid=len(self.valid) if self.is_introduced else 0,
            by_status=dict(by_status, ok=len(self._times)),
            invalid_by_rule=self.invalid_by_rule if self.is_introduced else {},
            **values,
        )
