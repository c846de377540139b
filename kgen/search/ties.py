"""Which of some kernels that were timed together wins? `decide`: the tie set, and the choice in it.

Takes samples that alternated, gives `Standing`s. One that is not slower than the fastest by more
than the noise is tied with it; of those tied the one that stands first in a given order wins, so
that a challenger takes the place of what is known only where that is slower beyond doubt. Must not
import torch, CUDA, optuna or the database.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from kgen.config import GemmConfig
from kgen.intervals import median_interval


@dataclass(frozen=True)
class Standing:
    """A configuration beside the fastest one it was timed with, round by round.

    ratio      median of its times over those of the fastest
    low, high  interval of that median (`kgen.intervals`); both the ratio where rounds are too few
    tied       the interval holds 1: the data do not tell it from the fastest
    """

    config: GemmConfig
    ratio: float
    low: float
    high: float
    tied: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**vars(self), "config": self.config.to_dict()}


def decide(
    samples_us: Mapping[GemmConfig, Sequence[float]], preferred: Sequence[GemmConfig]
) -> list[Standing]:
    """The winner first, then the others of its tie, then the rest; each by its ratio.

    samples_us   at least one configuration, each with the times of the same rounds in their order
    preferred    who wins a tie, the first of them that is in it; without one the fastest wins
    """
    fastest = min(samples_us, key=lambda config: (median(samples_us[config]), config))
    standings = [_beside(c, samples_us[c], samples_us[fastest]) for c in samples_us]
    tied = [s.config for s in standings if s.tied]
    winner = next((config for config in preferred if config in tied), fastest)
    return sorted(standings, key=lambda s: (s.config != winner, not s.tied, s.ratio, s.config))


def _beside(config: GemmConfig, own: Sequence[float], fastest: Sequence[float]) -> Standing:
    ratios = [a / b for a, b in zip(own, fastest, strict=True)]
    ratio = median(ratios)
    found = median_interval(ratios)
    low, high = (found.low, found.high) if found else (ratio, ratio)
    return Standing(config, ratio, low, high, tied=low <= 1.0)
