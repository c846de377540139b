"""Strategies by name: `make_strategy`.

Takes what is searched and what is known of it, gives a `Strategy`. Must not import build, verify,
measure, cache or torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kgen.config import GemmConfig
from kgen.device import Device
from kgen.errors import UsageError
from kgen.problem import GemmProblem
from kgen.search.model_strategy import Lesson, ModelStrategy
from kgen.search.optuna_strategy import GeneticStrategy, TpeStrategy
from kgen.search.strategy import ExhaustiveStrategy, RandomStrategy, Strategy

SAMPLERS: Final = ("model", "tpe", "genetic", "random", "exhaustive")
#: The heuristic's best that a search starts from: with so many hardly a recorded problem is left
#: without one within 2 % of its best (tools/fit_heuristic.py).
NUM_SEEDS: Final = 16
#: Builds of one problem that may wait at a time; more would be chosen with less knowledge.
MAX_PENDING: Final = 8
#: Seeds that the model-guided strategy begins with where no other problem taught anything; with
#: lessons it goes on by itself from the first.
MODEL_SEEDS: Final = 8
#: Spaces up to this size are enumerated: there is nothing to learn before they are used up.
SMALL_SPACE: Final = 16


@dataclass(frozen=True)
class Guide:
    """What the model-guided strategy knows beside the set: the problem, and what others taught.

    `num_hints` of the seeds are not the model's own: they are all tried.
    """

    problem: GemmProblem
    device: Device
    lessons: Sequence[Lesson] = ()
    num_hints: int = 0


def make_strategy(
    name: str,
    valid: Iterable[GemmConfig],
    seeds: Iterable[GemmConfig] = (),
    known: Mapping[GemmConfig, float | None] | None = None,
    seed: int = 0,
    *,
    guide: Guide | None = None,
) -> Strategy:
    """The strategy called `name`: one of SAMPLERS.

    seeds   configurations in the order to try them first; invalid ones are passed over
    known   results of earlier runs, failures as None: learned from and not asked again
    seed    of the random numbers, any whole number: the same calls give the same configurations
    guide   what the model-guided strategy goes by; the others need none

    Raises UsageError for an unknown name, and for "model" without a guide.
    """
    if name not in SAMPLERS:
        raise UsageError(f"sampler={name!r}: expected one of {', '.join(SAMPLERS)}")
    valid = list(dict.fromkeys(valid))
    if name == "exhaustive" or len(valid) <= SMALL_SPACE:
        strategy: Strategy = ExhaustiveStrategy(valid, seeds)
    elif name == "genetic":
        strategy = GeneticStrategy(valid, seeds, seed)
    elif name == "model":
        if guide is None:
            raise UsageError("sampler='model': expected a guide, the problem and its device")
        num_seeds = 1 if guide.lessons else MODEL_SEEDS
        first = list(seeds)[: guide.num_hints + num_seeds]
        strategy = ModelStrategy(guide.problem, guide.device, valid, first, guide.lessons)
    elif name == "random":
        strategy = RandomStrategy(valid, seeds, seed)
    else:
        strategy = TpeStrategy(valid, seeds, seed)
    for config, median_us in sorted((known or {}).items(), key=_fastest_first):
        strategy.tell(config, median_us)
    return strategy


def _fastest_first(known: tuple[GemmConfig, float | None]) -> float:
    return math.inf if known[1] is None else known[1]
