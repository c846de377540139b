"""How sure is a median? `median_interval`, whatever the values' distribution.

With the values sorted, the k-th from below and from above enclose their median with a probability
that the binomial distribution gives exactly (David, Nagaraja, "Order Statistics", 2003, section
7.1). Imports nothing of kgen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import comb
from typing import Final, NamedTuple

#: Coverage that an interval has at least.
COVERAGE: Final = 0.95


class Interval(NamedTuple):
    """Bounds of a median, and the probability that they enclose it."""

    low: float
    high: float
    coverage: float

    def overlaps(self, other: Interval) -> bool:
        """Whether a value lies in both."""
        return self.low <= other.high and other.low <= self.high


def median_interval(values: Iterable[float], coverage: float = COVERAGE) -> Interval | None:
    """The narrowest pair of order statistics around the median that covers it often enough.

    None where even the outermost pair does not: below 6 values for 95 %.
    """
    ordered = sorted(values)
    count = len(ordered)
    outside = 0.0  # probability that fewer than k values lie below the median
    found = None
    for k in range(1, count // 2 + 1):
        outside += comb(count, k - 1) / 2**count
        if 1 - 2 * outside < coverage:
            break
        found = Interval(ordered[k - 1], ordered[count - k], 1 - 2 * outside)
    return found


def ratio_interval(over: Sequence[float], under: Sequence[float]) -> Interval | None:
    """Bounds of the median of `over` / `under`, taken in pairs: rounds that alternated.

    None for too few of them, or numbers that differ.
    """
    if len(over) != len(under):
        return None
    return median_interval(a / b for a, b in zip(over, under, strict=True))
