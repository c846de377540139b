"""Optuna chooses: `TpeStrategy`, its tree-structured Parzen estimator, and `GeneticStrategy`.

As `strategy`. The only user of optuna. Must not import build, verify, measure, cache or torch.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable
from typing import Any, Final

from kgen.config import GemmConfig
from kgen.search.strategy import Strategy
from kgen.space import nearest

#: Results that TPE wants before it draws conclusions from them.
TPE_STARTUP: Final = 10
#: Candidates that TPE weighs against each other for one suggestion.
TPE_CANDIDATES: Final = 48
#: TPE takes a tenth of the results for good ones: with fewer times than that, failures too.
TPE_LEAST_TIMED: Final = 0.1
#: Of a generation: a search has some 64 evaluations, and five generations are few enough.
POPULATION: Final = 12


class OptunaStrategy(Strategy):
    """The seeds, then one of Optuna's samplers.

    Its suggestion is a hint, since most points of the axes' product are invalid: the nearest
    configuration that is still open is tried instead. The study lives in memory.
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
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = self._sampler(seed % 2**32)  # all that numpy takes
        self._study = optuna.create_study(sampler=sampler, direction="minimize")

    def _sampler(self, seed: int) -> Any:
        """Optuna's sampler."""
        raise NotImplementedError

    def _choose(self) -> GemmConfig:
        trial = self._study.ask(self._distributions)
        config = nearest(self._hint(trial), self._open)
        assert config is not None, "only called while something is open"
        self._take_over(trial, config)
        return config

    def _hint(self, trial: Any) -> GemmConfig:
        """The suggestion, a point of the axes' product, valid or not."""
        choices = {
            name: values[trial.params[name]] if isinstance(values[0], int) else trial.params[name]
            for name, values in self._axes.items()
        }
        return GemmConfig(**{**next(iter(self._open)).to_dict(), **choices})

    def _take_over(self, trial: Any, config: GemmConfig) -> None:
        """Close the suggestion: the study learns of the configuration that is tried instead."""
        self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)

    def _learn(self, config: GemmConfig, median_us: float | None) -> None:
        """Results go in as they are, failures as pruned: worse than any time, with no number."""
        values = config.to_dict()
        if any(values[name] not in choices for name, choices in self._axes.items()):
            return  # of an earlier space: its point has no place on these axes
        state = self._optuna.trial.TrialState
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


class TpeStrategy(OptunaStrategy):
    """The seeds, then the tree-structured Parzen estimator; chance while nothing passed."""

    def __init__(self, valid: Iterable[GemmConfig], seeds: Iterable[GemmConfig], seed: int) -> None:
        super().__init__(valid, seeds, seed)
        self._num_timed = 0
        self._rng = random.Random(seed)

    def _sampler(self, seed: int) -> Any:
        return self._optuna.samplers.TPESampler(
            seed=seed,
            multivariate=True,
            constant_liar=False,  # what is on its way is not in the study
            n_startup_trials=TPE_STARTUP,
            n_ei_candidates=TPE_CANDIDATES,
        )

    def _choose(self) -> GemmConfig:
        if self._num_timed < TPE_LEAST_TIMED * len(self._told):
            return self._rng.choice(list(self._open))
        return super()._choose()

    def _learn(self, config: GemmConfig, median_us: float | None) -> None:
        self._num_timed += median_us is not None
        super()._learn(config, median_us)


class GeneticStrategy(OptunaStrategy):
    """The seeds, then generations that breed from the fastest of the one before (NSGA-II).

    A generation is of suggestions, so that a result belongs to the suggestion it came from.
    """

    def __init__(self, valid: Iterable[GemmConfig], seeds: Iterable[GemmConfig], seed: int) -> None:
        super().__init__(valid, seeds, seed)
        self._trials: dict[GemmConfig, Any] = {}

    def _sampler(self, seed: int) -> Any:
        return self._optuna.samplers.NSGAIISampler(population_size=POPULATION, seed=seed)

    def _take_over(self, trial: Any, config: GemmConfig) -> None:
        self._trials[config] = trial

    def _learn(self, config: GemmConfig, median_us: float | None) -> None:
        trial = self._trials.pop(config, None)
        if trial is None:
            super()._learn(config, median_us)
        elif median_us is None:
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial, median_us)


def _axes(configs: Iterable[GemmConfig]) -> dict[str, tuple[Any, ...]]:
    """The values each axis takes in the set, in order; axes with a single one are left out."""
    rows = [config.to_dict() for config in configs]
    axes = {name: tuple(sorted({row[name] for row in rows})) for name in rows[0]}
    return {name: values for name, values in axes.items() if len(values) > 1}
