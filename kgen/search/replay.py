"""How good is a strategy? It is run on recorded timing tables, with no GPU: `compare`.

Takes tables and names of strategies, gives traces: the best time after each evaluation, and when on
the clock it was there. The space is what the table holds: what a strategy may ask for was recorded,
and regret is over the best of it. The clock is simulated: compilers work side by side, one GPU
verifies and times what is built, as `search.campaign` does it. Must not import torch, CUDA, verify,
measure or the database.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from statistics import median
from typing import Final

from kgen.config import GemmConfig
from kgen.device import Device
from kgen.errors import UsageError
from kgen.heuristic import diverse, predict_us, rank
from kgen.problem import GemmProblem
from kgen.search.model_strategy import Lesson
from kgen.search.strategies import MAX_PENDING, NUM_SEEDS, SAMPLERS, Guide, make_strategy
from kgen.search.strategy import Strategy
from kgen.search.tables import TableRow, TimingTable

#: Drawn at random without a hint from the model: what every strategy is compared with.
BLIND: Final = "blind"
#: Strategy "model" with lessons: what it found, by itself, for problems of another N or K.
TAUGHT: Final = "taught"
SEARCHES: Final = (BLIND, *(name for name in SAMPLERS if name != "exhaustive"), TAUGHT)
#: These do the same whatever the seed.
_FIXED: Final = ("model", TAUGHT)


@dataclass(frozen=True)
class Costs:
    """Seconds of what a table does not tell, and how many compilers there are.

    compile_s   of one kernel; verify_s, time_s: of its verification and timing on the GPU
    timeout_s   of one that hangs
    """

    compile_s: float = 0.4
    verify_s: float = 0.06
    time_s: float = 0.04
    timeout_s: float = 20.0
    jobs: int = 16


@dataclass(frozen=True)
class Trace:
    """One search: after evaluation i, seconds since its start, and the best time (inf: none yet).

    `best_us` is the fastest of the table; times of launches are in microseconds.
    """

    problem: GemmProblem
    seconds: tuple[float, ...]
    best_so_far_us: tuple[float, ...]
    best_us: float
    asked: tuple[GemmConfig, ...]

    def after(self, evaluations: int) -> float:
        """Regret after so many evaluations, or all if there were fewer: 0.02 is 2 % too slow."""
        done = self.best_so_far_us[:evaluations]
        return done[-1] / self.best_us - 1 if done else math.inf

    def at(self, seconds: float) -> float:
        """Regret after so many seconds."""
        return self.after(sum(when <= seconds for when in self.seconds))


class RecordedProblem:
    """The rows of one problem, ready to be searched as often as wanted."""

    def __init__(
        self, problem: GemmProblem, device: Device, rows: Sequence[TableRow], costs: Costs
    ) -> None:
        times = [row.median_us for row in rows if row.median_us is not None]
        if not times:
            raise UsageError(f"{problem}: the table has no time of it; nothing can be replayed")
        self.problem = problem
        self.device = device
        self.best_us = min(times)
        self.median_us = median(times)
        self.valid = tuple(row.config for row in rows)
        self._rows = {row.config: row for row in rows}
        self._costs = costs
        verified = [row for row in rows if row.verify_s is not None]
        self._verify_s = median([r.verify_s or 0.0 for r in verified] or [costs.verify_s])
        self._time_s = median([r.time_s or 0.0 for r in verified] or [costs.time_s])
        ranked = rank(problem, device, self.valid)
        self._seeds = diverse(ranked, [predict_us(problem, c, device) for c in ranked], NUM_SEEDS)

    def strategy(self, name: str, seed: int, lessons: Sequence[Lesson] = ()) -> Strategy:
        """The strategy of that name at its start, as the tuner makes it; BLIND knows no model."""
        if name == BLIND:
            shuffled = list(self.valid)
            random.Random(seed).shuffle(shuffled)
            return make_strategy("exhaustive", shuffled)
        guide = Guide(self.problem, self.device, lessons)
        name = "model" if name == TAUGHT else name
        return make_strategy(name, self.valid, self._seeds, seed=seed, guide=guide)

    def replay(self, strategy: Strategy, evaluations: int) -> Trace:
        """Search until so many configurations were evaluated, or all."""
        clock = 0.0
        compilers = [0.0] * self._costs.jobs
        heapify(compilers)
        pending: list[tuple[float, GemmConfig]] = []
        seconds: list[float] = []
        best: list[float] = []
        asked: list[GemmConfig] = []
        while len(best) < evaluations:
            while len(pending) < min(MAX_PENDING, evaluations - len(best)):
                config = strategy.ask()
                if config is None:
                    break
                ready = max(clock, heappop(compilers)) + self._compile_s(config)
                heappush(compilers, ready)
                pending.append((ready, config))
            if not pending:
                break
            # The first of all is waited for; then whatever is built first.
            index = 0 if not best else min(range(len(pending)), key=lambda i: pending[i][0])
            ready, config = pending.pop(index)
            row = self._rows[config]
            clock = max(clock, ready) + self._gpu_s(row)
            strategy.tell(config, row.median_us)
            us = math.inf if row.median_us is None else row.median_us
            best.append(min(us, best[-1] if best else math.inf))
            seconds.append(clock)
            asked.append(config)
        return Trace(self.problem, tuple(seconds), tuple(best), self.best_us, tuple(asked))

    def lessons(self, evaluations: int) -> list[Lesson]:
        """What a search by "model" with nothing to go by finds out."""
        trace = self.replay(self.strategy("model", 0), evaluations)
        return [Lesson(self.problem, c, self._rows[c].median_us) for c in trace.asked]

    def _compile_s(self, config: GemmConfig) -> float:
        known = self._rows[config].compile_s
        return self._costs.compile_s if known is None else known

    def _gpu_s(self, row: TableRow) -> float:
        match row.status:
            case "compile_failed":
                return 0.0
            case "timeout":
                return self._costs.timeout_s
            case "ok":
                return self._verify_s + self._time_s
        return self._verify_s


def recorded_problems(tables: Iterable[TimingTable], costs: Costs) -> list[RecordedProblem]:
    """The problems of some tables, in their order; one that is in several has the last one's rows.

    Raises UsageError for one without a time.
    """
    found = {
        problem: RecordedProblem(problem, table.device, rows, costs)
        for table in tables
        for problem, rows in table.by_problem().items()
    }
    return list(found.values())


def compare(
    problems: Sequence[RecordedProblem],
    names: Sequence[str],
    evaluations: int,
    repeats: int,
    on_done: Callable[[str, GemmProblem], None] = lambda name, problem: None,
) -> dict[str, list[Trace]]:
    """Traces of each strategy (names of SEARCHES) on each problem, with `repeats` seeds.

    Raises UsageError for an unknown name.
    """
    for name in names:
        if name not in SEARCHES:
            raise UsageError(f"sampler {name!r}: expected one of {', '.join(SEARCHES)}")
    taught = {p.problem: p.lessons(evaluations) for p in problems} if TAUGHT in names else {}
    traces: dict[str, list[Trace]] = {name: [] for name in names}
    for name in names:
        for each in problems:
            lessons = _of_others(taught, each.problem) if name == TAUGHT else []
            for seed in range(1 if name in _FIXED else repeats):
                strategy = each.strategy(name, seed, lessons)
                traces[name].append(each.replay(strategy, evaluations))
            on_done(name, each.problem)
    return traces


def _of_others(taught: Mapping[GemmProblem, list[Lesson]], problem: GemmProblem) -> list[Lesson]:
    """Lessons of problems of another N or K: those of the same are told apart too easily."""
    own = (problem.n, problem.k)
    return [lesson for p, some in taught.items() if (p.n, p.k) != own for lesson in some]


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed; no interpolation, which inf forbids."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]
