"""What to try next: `Strategy`, ask and tell over a fixed set of valid configurations.

Takes the valid configurations of one problem and those to begin with; gives one configuration at a
time, none twice, until the set is used up. Times are in microseconds; a failure has none. The
strategies that need nothing else are here; `strategies` knows all by name. Must not import build,
verify, measure, cache or torch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

from kgen.config import GemmConfig


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

    def expected_gain(self) -> float | None:
        """By what part of the best time the next configuration is expected to improve on it.

        None of a strategy that does not know; 0 where nothing is left to ask for.
        """
        return None if self._open else 0.0

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
