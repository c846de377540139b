"""What the rows of a bench say: best peers, geometric means by class of M, the worst row.

Takes rows as `kgen bench --json` prints them, of older files too, gives plain values. Imports
nothing heavy: the README's tables are made from it.

Interval: rounds are paired, since all calls of a problem alternate; it is that of the median of the
paired ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import exp, log
from typing import Any, Final, NamedTuple

from kgen.intervals import Interval, median_interval

KGEN: Final = "kgen"
#: Ends the names of those that were given A's scales row-major, conversion inside their time.
ROW_MAJOR: Final = " row-major"
METHOD: Final = "exact binomial interval of the median of paired ratios"
OVER_BEST: Final = "best peer"
#: Classes of rows by M, in words.
CLASSES: Final[tuple[tuple[str, Callable[[int], bool]], ...]] = (
    ("all", lambda m: True),
    ("M ≤ 128", lambda m: m <= 128),
    ("128 < M < 4096", lambda m: 128 < m < 4096),
    ("M ≥ 4096", lambda m: m >= 4096),
)
SMALL_M: Final = CLASSES[1]

Row = dict[str, Any]


class Best(NamedTuple):
    """The fastest peer of a row, its time over kgen's, and the interval of that."""

    name: str
    ratio: float
    interval: Interval | None


@dataclass(frozen=True)
class Mean:
    """A geometric mean over some rows; `least` and `most` are of single rows."""

    what: str
    rows: str
    count: int
    mean: float
    least: float
    most: float


@dataclass(frozen=True)
class Worst:
    """The row in which kgen does worst against its best peer."""

    shape: str
    peer: str
    ratio: float
    interval: Interval | None


def median_us(row: Row, name: str) -> float | None:
    """A provider's time in a row; None where it has none."""
    value: float | None = row["providers"].get(name, {}).get("median_us")
    return value


def own_name(name: str) -> str:
    """As what kgen stands against a provider: given scales in the same layout as that one.

    Against kgen with row-major scales kgen itself stands: the price of the layout.
    """
    row_major = name.endswith(ROW_MAJOR) and name != KGEN + ROW_MAJOR
    return KGEN + ROW_MAJOR if row_major else KGEN


def speedup(row: Row, name: str) -> float | None:
    """The other's time over kgen's; None where one of them has none."""
    own, other = median_us(row, own_name(name)), median_us(row, name)
    return other / own if own and other else None


def peers_of(report: dict[str, Any]) -> list[str]:
    """The providers that solve the same problem as kgen, in the report's order."""
    others = (KGEN, *report["reference_only"])
    return [
        name for name in report["providers"] if name not in others and not name.endswith(ROW_MAJOR)
    ]


def best_peer(row: Row, peers: Iterable[str]) -> Best | None:
    """The fastest of `peers`; None where none of them, or kgen, has a time."""
    ratios = {name: ratio for name in peers if (ratio := speedup(row, name))}
    if not ratios:
        return None
    name = min(ratios, key=lambda each: ratios[each])
    return Best(name, ratios[name], interval(row, name))


def over_floor(row: Row, name: str = KGEN) -> float | None:
    """A provider's time over the row's floor; None without both."""
    time, floor = median_us(row, name), row.get("floor", {}).get("us")
    return time / floor if time and floor else None


def interval(row: Row, name: str) -> Interval | None:
    """Bounds of the median of the other's time over kgen's; None for too few paired rounds."""
    samples = [
        row["providers"].get(each, {}).get("samples_us", ()) for each in (name, own_name(name))
    ]
    if len(samples[0]) != len(samples[1]):
        return None
    ratios = sorted(other / own for other, own in zip(*samples, strict=True))
    return median_interval(ratios)


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive values, at least one."""
    return exp(sum(map(log, values)) / len(values))


def means(report: dict[str, Any]) -> list[Mean]:
    """Speed-ups over each peer and over the best, and times over the floor, by class of M."""
    rows: list[Row] = report["rows"]
    peers = peers_of(report)
    found: list[Mean] = []
    if len(peers) > 1:
        found += _by_class(f"speedup over {OVER_BEST}", rows, lambda row: _ratio(row, peers))
    for name in report["providers"]:
        if name != KGEN:
            found += _by_class(f"speedup over {name}", rows, partial(speedup, name=name))
    found += _by_class(f"{KGEN} over floor", rows, over_floor)
    found += _by_class(f"{OVER_BEST} over floor", rows, lambda row: _best_over_floor(row, peers))
    return found + _small_m_over_floor(rows)


def worst(report: dict[str, Any]) -> Worst | None:
    """The row with the least speed-up over its best peer; None where no row has one."""
    peers = peers_of(report)
    found = [(row, best) for row in report["rows"] if (best := best_peer(row, peers))]
    if not found:
        return None
    row, best = min(found, key=lambda pair: pair[1].ratio)
    return Worst(row["shape"], best.name, best.ratio, best.interval)


def summarise(report: dict[str, Any]) -> dict[str, Any]:
    """`means` and `worst` as plain values for JSON."""
    low = worst(report)
    summary: dict[str, Any] = {"means": [asdict(mean) for mean in means(report)]}
    if low:
        bounds = low.interval._asdict() if low.interval else None
        summary["worst"] = {**asdict(low), "interval": bounds, "method": METHOD}
    return summary


def _ratio(row: Row, peers: Sequence[str]) -> float | None:
    best = best_peer(row, peers)
    return best.ratio if best else None


def _best_over_floor(row: Row, peers: Sequence[str]) -> float | None:
    found = [value for name in peers if (value := over_floor(row, name))]
    return min(found, default=None)


def _by_class(
    what: str,
    rows: Sequence[Row],
    value: Callable[[Row], float | None],
    classes: Iterable[tuple[str, Callable[[int], bool]]] = CLASSES,
) -> list[Mean]:
    found = []
    for words, belongs in classes:
        values = [v for row in rows if belongs(row["problem"]["m"]) and (v := value(row))]
        if values:
            mean = geometric_mean(values)
            found.append(Mean(what, words, len(values), mean, min(values), max(values)))
    return found


def _small_m_over_floor(rows: Sequence[Row]) -> list[Mean]:
    """kgen over the floor at small M, for each (N, K) with several such rows."""
    words, belongs = SMALL_M
    found: list[Mean] = []
    for n, k in dict.fromkeys((row["problem"]["n"], row["problem"]["k"]) for row in rows):
        own = [row for row in rows if (row["problem"]["n"], row["problem"]["k"]) == (n, k)]
        if sum(belongs(row["problem"]["m"]) for row in own) > 1:
            name = f"{KGEN} over floor, N={n} K={k}"
            found += _by_class(name, own, over_floor, [(words, belongs)])
    return found
