"""What to try next: `Strategy`, ask and tell over a fixed set of valid configurations.

Takes the valid configurations of one problem, those to begin with and what is already known;
gives one configuration at a time, none twice, until the set is used up. Times are in
microseconds; a failure has none. The only user of optuna. Must not import build, verify,
measure, cache or torch.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kgen.config import GemmConfig
from kgen.errors import UsageError
from kgen.space import nearest

SAMPLERS: Final = ("tpe", "random", "exhaustive")
#: Spaces up to this size are enumerated: there is nothing to learn before they are used up.
SMALL_SPACE: Final = 16
#: Results that TPE wants before it draws conclusions from them.
TPE_STARTUP: Final = 10
#: Candidates that TPE weighs against each other for one suggestion.
TPE_CANDIDATES: Final = 48
#: TPE takes a tenth of the results for good ones: with fewer times than that, failures too.
TPE_LEAST_TIMED: Final = 0.1


def make_strategy(
    name: str,
    valid: Iterable[GemmConfig],
    seeds: Iterable[GemmConfig] = (),
    known: Mapping[GemmConfig, float | None] | None = None,
    seed: int = 0,
) -> Strategy:
    """The strategy called `name`: tpe, random or exhaustive.

    seeds   configurations in the order to try them first; invalid ones are passed over
    known   results of earlier runs, failures as None: learned from and not asked again
    seed    of the random numbers, any whole number: the same calls give the same configurations

    Raises UsageError for an unknown name.
    """
    if name not in SAMPLERS:
        raise UsageError(f"sampler={name!r}: expected one of {', '.join(SAMPLERS)}")
    valid = list(dict.fromkeys(valid))
    if name == "exhaustive" or len(valid) <= SMALL_SPACE:
        strategy: Strategy = ExhaustiveStrategy(valid, seeds)
    elif name == "random":
        strategy = RandomStrategy(valid, seeds, seed)
    else:
        strategy = TpeStrategy(valid, seeds, seed)
    for config, median_us in (known or {}).items():
        strategy.tell(config, median_us)
    return strategy


class Strategy:
    """Asks for configurations and is told what came of them; see `make_strategy`.

    Any number may be asked for before the first is told: one that is on its way is not asked
    for again. Results of configurations that were never asked for are taken as well.
    """

    def __init__(self, valid: Iterable[GemmConfig], seeds: Iterable[GemmConfig]) -> None:
        self._open = dict.fromkeys(valid)
        self._seeds = [config for config in dict.fromkeys(seeds) if config in self._open]
        self._pending: set[GemmConfig] = set()
        self._told: set[GemmConfig] = set()

    def ask(self) -> GemmConfig | None:
        """A configuration that was neither asked for nor told; None when there is none left."""
        if not self._open:
            return None
        config = self._next_seed() or self._choose()
        del self._open[config]
        self._pending.add(config)
        return config

    def ask_many(self, count: int) -> list[GemmConfig]:
        """Up to `count` configurations, fewer when the set is used up."""
        asked = (self.ask() for _ in range(min(count, len(self._open))))
        return [config for config in asked if config is not None]

    def tell(self, config: GemmConfig, median_us: float | None) -> None:
        """What came of a configuration: its time, or None for a failure.

        A time that is not a positive finite number is a failure too. Only the first word about
        a configuration counts.
        """
        if config in self._told:
            return
        self._told.add(config)
        self._pending.discard(config)
        self._open.pop(config, None)
        is_time = median_us is not None and math.isfinite(median_us) and median_us > 0
        self._learn(config, median_us if is_time else None)

    @property
    def num_open(self) -> int:
        """Configurations that can still be asked for."""
        return len(self._open)

    @property
    def num_pending(self) -> int:
        """Configurations asked for of which nothing was told yet."""
        return len(self._pending)

    def _next_seed(self) -> GemmConfig | None:
        while self._seeds:
            config = self._seeds.pop(0)
            if config in self._open:
                return config
        return None

    def _choose(self) -> GemmConfig:
        """One of `_open`, which is not empty."""
        raise NotImplementedError

    def _learn(self, config: GemmConfig, median_us: float | None) -> None:
        """Take note of a result; None is a failure."""


class ExhaustiveStrategy(Strategy):
    """Every configuration: the seeds in their order, then the rest in theirs."""

    def _choose(self) -> GemmConfig:
        return next(iter(self._open))


class RandomStrategy(Strategy):
    """The first seed, which every result is compared with, then one as likely as the other."""

    def __init__(self, valid: Iterable[GemmConfig], seeds: Iterable[GemmConfig], seed: int) -> None:
        super().__init__(valid, seeds)
        del self._seeds[1:]
        self._rng = random.Random(seed)

    def _choose(self) -> GemmConfig:
        return self._rng.choice(list(self._open))


class TpeStrategy(Strategy):
    """The seeds, then Optuna's tree-structured Parzen estimator.

    Its suggestion is a hint, since most points of the axes' product are invalid: the nearest
    configuration that is still open is tried instead, and that one is what the study learns of.
    The study lives in memory and holds results only: suggestions are closed at once.
    """

    def __init__(self, valid: Iterable[GemmConfig], seeds: Iterable[GemmConfig], seed: int) -> None:
        import optuna

        super().__init__(valid, seeds)
        self._optuna: Any = optuna
        self._axes = _axes(self._open)
        self._distributions: dict[str, Any] = {
            name: optuna.distributions.IntDistribution(0, len(values) - 1)
            if isinstance(values[0], int)
            else optuna.distributions.CategoricalDistribution(values)
            for name, values in self._axes.items()
        }
        self._num_timed = 0
        self._rng = random.Random(seed)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                seed=seed % 2**32,  # all that numpy takes
                multivariate=True,
                constant_liar=False,  # what is on its way is not in the study
                n_startup_trials=TPE_STARTUP,
                n_ei_candidates=TPE_CANDIDATES,
            )
        self._study = optuna.create_study(sampler=sampler, direction="minimize")

    def _choose(self) -> GemmConfig:
        if self._num_timed < TPE_LEAST_TIMED * len(self._told):
            return self._rng.choice(list(self._open))
        config = nearest(self._hint(), self._open)
        assert config is not None, "only called while something is open"
        return config

    def _hint(self) -> GemmConfig:
        """A point of the axes' product, valid or not."""
        trial = self._study.ask(self._distributions)
        self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        choices = {
            name: values[trial.params[name]] if isinstance(values[0], int) else trial.params[name]
            for name, values in self._axes.items()
        }
        return GemmConfig(**{**next(iter(self._open)).to_dict(), **choices})

    def _learn(self, config: GemmConfig, median_us: float | None) -> None:
        """Results go in as they are, failures as pruned: worse than any time, with no number."""
        values = config.to_dict()
        if any(values[name] not in choices for name, choices in self._axes.items()):
            return  # of an earlier space: its point has no place on these axes
        state = self._optuna.trial.TrialState
        self._num_timed += median_us is not None
        params = {
            name: choices.index(values[name]) if isinstance(choices[0], int) else values[name]
            for name, choices in self._axes.items()
        }
        self._study.add_trial(
            self._optuna.trial.create_trial(
                state=state.PRUNED if median_us is None else state.COMPLETE,
                value=median_us,
                params=params,
                distributions=self._distributions,
            )
        )


def _axes(configs: Iterable[GemmConfig]) -> dict[str, tuple[Any, ...]]:
    """The values each axis takes in the set, in order; axes with a single one are left out."""
    rows = [config.to_dict() for config in configs]
    axes = {name: tuple(sorted({row[name] for row in rows})) for name in rows[0]}
    return {name: values for name, values in axes.items() if len(values) > 1}
