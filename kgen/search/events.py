"""What `kgen tune` is asked, what it says on the way and what it hands back: plain values.

Takes nothing, gives the dataclasses that `search.tune` and the command line share. Must not
import torch, CUDA, optuna or sqlalchemy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kgen.config import GemmConfig
from kgen.device import Device
from kgen.problem import GemmProblem

#: Trials a problem gets when neither a number of trials nor a budget was given.
DEFAULT_TRIALS: Final = 40
#: Module and factory of the child that owns the GPU; tests name a fake one.
GPU_BACKEND: Final = "kgen.search.gpu_backend:create"
#: Module and factory of what turns configurations into cubins; tests name a fake one.
BUILDER: Final = "kgen.search.builder:create"

TUNED: Final = "tuned"
PREDICTED: Final = "predicted"
UNTUNABLE: Final = "untunable"
UNFINISHED: Final = "unfinished"


@dataclass(frozen=True)
class TuneOptions:
    """How far a run goes. Times in seconds; None means no limit of that kind.

    trials                  most trials a problem has, those of earlier runs included
    budget_s                wall-clock of the whole run, shared out by weight
    budget_per_problem_s    wall-clock a problem may use in this run
    sampler                 model, tpe, genetic, random or exhaustive
    policy                  name of the measuring policy of `kgen.measure`
    finalists               configurations measured again, interleaved, before one is named
    gpu                     False: compile and predict only, even where a GPU is
    device                  stands in for the GPU's facts where there is none
    leading                 candidates a problem gets where there is no GPU
    seed                    of the sampler
    backend, builder        "module:factory" that the child processes import
    backend_options, builder_options   keyword arguments of the factories, picklable
    """

    trials: int | None = None
    budget_s: float | None = None
    budget_per_problem_s: float | None = None
    sampler: str = "model"
    policy: str = "cold"
    finalists: int = 4
    gpu: bool = True
    device: Device | None = None
    leading: int = 4
    seed: int = 0
    backend: str = GPU_BACKEND
    builder: str = BUILDER
    backend_options: dict[str, Any] = field(default_factory=dict)
    builder_options: dict[str, Any] = field(default_factory=dict)

    @property
    def trial_limit(self) -> int | None:
        """Most trials of one problem: a default when nothing at all was limited."""
        unlimited = self.budget_s is None and self.budget_per_problem_s is None
        return DEFAULT_TRIALS if self.trials is None and unlimited else self.trials


@dataclass(frozen=True)
class RunStarted:
    """The run knows its device. `measured` False: nothing will be timed, `reason` says why."""

    device: Device
    measured: bool
    reason: str
    num_problems: int
    num_jobs: int


@dataclass(frozen=True)
class ProblemStarted:
    """A problem is worked on for the first time in this run; `index` counts from 1."""

    problem: GemmProblem
    index: int
    num_valid: int
    num_known: int
    invalid_by_rule: dict[str, int]


@dataclass(frozen=True)
class TrialFinished:
    """One trial is in the database. Times in microseconds; `best_us` is the problem's best so far.

    num_trials    configurations of the problem that were tried, in this run and before
    stage         search, or final: measured again among the fastest
    error         largest relative tile error; as p10_us and p90_us None where nothing was timed
    gpu_busy_s    seconds of this run that the GPU's worker has had work
    """

    problem: GemmProblem
    config: GemmConfig
    status: str
    reason: str
    median_us: float | None
    predicted_us: float | None
    best_us: float | None
    num_trials: int
    stage: str = "search"
    p10_us: float | None = None
    p90_us: float | None = None
    error: float | None = None
    gpu_busy_s: float = 0.0


@dataclass(frozen=True)
class WorkerReplaced:
    """A child died or was killed and a new one took its place; `worker` is compile or gpu."""

    worker: str
    reason: str


@dataclass(frozen=True)
class Notice:
    """Something the user should know: another run holds the GPU, a stale run was closed."""

    text: str


@dataclass(frozen=True)
class ProblemReport:
    """Where a problem stands at the end of a run. Times in microseconds.

    `outcome`: tuned (a verified winner is in the database), predicted (compiled and ranked by
    the model, nothing timed), untunable (`reason` says why), unfinished (the run ended first).
    `p10_us`, `p90_us` are the winner's spread and `error` its largest relative tile error;
    `default_us` is the heuristic's own choice, measured beside the winner; `num_tied`
    configurations, the winner among them, could not be told from the fastest in the finals.
    """

    problem: GemmProblem
    weight: float
    outcome: str
    reason: str = ""
    config: GemmConfig | None = None
    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    error: float | None = None
    default_us: float | None = None
    predicted_us: float | None = None
    num_tied: int = 0
    num_trials: int = 0
    num_new_trials: int = 0
    num_valid: int = 0
    skipped: bool = False
    by_status: dict[str, int] = field(default_factory=dict)
    invalid_by_rule: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the user got what this machine can give for the problem."""
        return self.outcome in (TUNED, PREDICTED)


@dataclass(frozen=True)
class ProblemFinished:
    """A problem will not be worked on again in this run."""

    report: ProblemReport


@dataclass(frozen=True)
class TuneReport:
    """The whole run, problems in the order they were given."""

    device: Device
    measured: bool
    reason: str
    run_id: int
    problems: tuple[ProblemReport, ...]
    seconds: float
    interrupted: bool = False
    num_compiles: int = 0
    num_cache_hits: int = 0

    @property
    def exit_code(self) -> int:
        """0 when every problem was served, 1 otherwise (130 is the command line's business)."""
        return 0 if not self.interrupted and all(p.ok for p in self.problems) else 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; problems as shapes lines, configurations as dictionaries."""
        values = asdict(self)
        for row, problem in zip(values["problems"], self.problems, strict=True):
            row["problem"] = str(problem.problem)
        return values


TuneEvent = RunStarted | ProblemStarted | TrialFinished | WorkerReplaced | Notice | ProblemFinished
#: Gets every event of a run, one at a time; some come from another thread than the caller's.
OnEvent = Callable[[TuneEvent], None]
