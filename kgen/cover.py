"""The fewest configurations that serve every M within a bound: `cover`.

Takes times by M and configuration, gives the configuration of each M. Knows no database and no GPU.
Must not import torch, CUDA or any third-party package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Final

from kgen.config import GemmConfig
from kgen.errors import UsageError

#: Steps after which the search for a smaller set ends; the greedy one is taken if it found none.
MAX_STEPS: Final = 200_000

#: Microseconds of each configuration that was timed at an M.
Times = Mapping[int, Mapping[GemmConfig, float]]


@dataclass(frozen=True)
class Cover:
    """What each M runs on, by growing M; `is_smallest`: no fewer configurations would do.

    worst    the largest share by which a choice is slower than the best of its M
    """

    choices: dict[int, GemmConfig]
    worst: float
    is_smallest: bool

    @property
    def configs(self) -> tuple[GemmConfig, ...]:
        """The different ones, in the order in which M needs them first."""
        return tuple(dict.fromkeys(self.choices.values()))


def cover(times_us: Times, bound: float) -> Cover:
    """The smallest set of which each M has one at most `bound` (0.03: 3 %) slower than its best.

    Of several smallest ones that with the least geometric mean of time over best; equals go to the
    configurations that sort first. A configuration that was not timed at an M does not serve it.
    Raises UsageError without times, and for a bound that is none.
    """
    if not times_us or not all(times_us.values()):
        raise UsageError("no times: tune the problem at several M first")
    if not 0.0 <= bound < 1.0:
        raise UsageError(f"bound {bound}: expected a share from 0 to below 1, such as 0.03")
    costs = _costs(times_us, bound)
    chosen, is_smallest = _Search(costs).run()
    choices = {
        m: min((config for config in chosen if config in costs[m]), key=lambda c: (costs[m][c], c))
        for m in sorted(costs)
    }
    worst = max(
        times_us[m][config] / min(times_us[m].values()) - 1 for m, config in choices.items()
    )
    return Cover(choices, worst, is_smallest)


def _costs(times_us: Times, bound: float) -> dict[int, dict[GemmConfig, float]]:
    """Logarithm of time over best, of the configurations within the bound at each M."""
    costs = {}
    for m, times in times_us.items():
        best = min(times.values())
        costs[m] = {
            config: log(us / best) for config, us in times.items() if us <= best * (1 + bound)
        }
    return costs


class _Search:
    """Exact cover of all points by iterative deepening, bounded in steps."""

    def __init__(self, costs: dict[int, dict[GemmConfig, float]]) -> None:
        self._costs = costs
        self._steps = 0
        self._best: tuple[float, tuple[GemmConfig, ...]] | None = None

    def run(self) -> tuple[tuple[GemmConfig, ...], bool]:
        """The chosen set, and whether it is known to be the smallest."""
        greedy = self._greedy()
        for size in range(1, len(greedy) + 1):
            self._deepen((), size)
            if self._best is not None:
                return self._best[1], self._steps <= MAX_STEPS
            if self._steps > MAX_STEPS:
                break
        return greedy, False

    def _greedy(self) -> tuple[GemmConfig, ...]:
        """Again and again the configuration that serves most of what is left."""
        left = set(self._costs)
        chosen: list[GemmConfig] = []
        while left:
            served: dict[GemmConfig, list[float]] = {}
            for m in left:
                for config, cost in self._costs[m].items():
                    served.setdefault(config, []).append(cost)
            config = min(served, key=lambda c: (-len(served[c]), sum(served[c]), c))
            chosen.append(config)
            left = {m for m in left if config not in self._costs[m]}
        return tuple(chosen)

    def _deepen(self, chosen: tuple[GemmConfig, ...], size: int) -> None:
        """Try every set that begins with `chosen` and has `size` members."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            return
        left = [m for m, costs in self._costs.items() if not any(c in costs for c in chosen)]
        if not left:
            total = sum(
                min(costs[c] for c in chosen if c in costs) for costs in self._costs.values()
            )
            candidate = (total, tuple(sorted(chosen)))
            if self._best is None or candidate < self._best:
                self._best = candidate
            return
        if len(chosen) == size:
            return
        # The point with the fewest candidates: one of them must be in the set.
        hardest = min(left, key=lambda m: (len(self._costs[m]), m))
        for config in sorted(self._costs[hardest]):
            self._deepen((*chosen, config), size)
