"""Which configuration a problem gets at run time, and why: `choose` -> `Choice`.

Takes a problem, a device and what was tuned for its N, K and types at any M; gives a choice. Knows
no kernels and builds none. `read_winners` is the one access to the database, for a whole class of
problems at once. Must not import build, search or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kgen.config import GemmConfig
from kgen.device import Device
from kgen.heuristic import default_config, predict_us
from kgen.problem import MAX_EXTENT, GemmProblem
from kgen.validity import why_invalid

if TYPE_CHECKING:
    from kgen.cache.records import DispatchTable, TrialRow

#: Seconds that a call may wait for a database that somebody else has locked.
BUSY_LIMIT_S: Final = 2.0
#: Cubins of one M that are looked at; with the fourth stale too, a default does as well.
_FASTEST: Final = 4
#: Up to this M one default serves: its tiles are not taller, whatever the number of rows.
_LEAST_BUCKET: Final = 16


@dataclass(frozen=True)
class Winner:
    """One of the fastest verified configurations of one tuned M, and the cubin its time belongs to.

    foreign      the cubin is of a source by hand and can not be built from the configuration
    serves_from  of an entry of a dispatch table: the least M of its range, `m` being the largest
    is_newer     timed after the dispatch table was made, which does not know of it
    """

    m: int
    config: GemmConfig
    cubin_key: str
    foreign: bool = False
    serves_from: int | None = None
    is_newer: bool = False


@dataclass(frozen=True)
class Choice:
    """A configuration and where it comes from.

    origin    "tuned": measured and verified for this very problem · "foreign": the same of a source
              by hand, whose cubin is `foreign_key` · "table": of a dispatch table, within its bound
              at the points that it was made from · "neighbour": for another M (`tuned_m`), and
              predicted to be no slower here than the default · "default": the analytic model's,
              nothing tuned applies
    stale     winners left out because their cubin is not the one that would be built now
    """

    config: GemmConfig
    origin: str
    tuned_m: int | None = None
    stale: int = 0
    foreign_key: str = ""


def read_winners(
    problem: GemmProblem, device: Device, db_url: str, foreign: bool = False
) -> tuple[Winner, ...]:
    """Winners on this device for the problem's fields other than M, by growing M.

    The entries of the last dispatch table, if there is one, come first. Of one M the fastest few,
    fastest first: after a change of compiler or templates the first may be no kernel of today's,
    and the next one is. `foreign`: sources by hand as well.

    Raises DatabaseError: missing, not readable, another schema, or locked for BUSY_LIMIT_S.
    """
    from kgen.cache.db import TuningDatabase

    database = TuningDatabase.open(db_url, create=False, readonly=True, busy_limit_s=BUSY_LIMIT_S)
    try:
        here = (problem, device.name, device.num_sms)
        rankings = database.rankings_by_m(*here, foreign=foreign)
        table = database.dispatch_table(*here)
    finally:
        database.close()
    return winners_of(rankings, table)


def winners_of(
    rankings: Iterable[Sequence[TrialRow]], table: DispatchTable | None = None
) -> tuple[Winner, ...]:
    """The entries of a table, and the fastest few of each ranking, in their order."""
    entries = table.entries if table else ()
    starts = [1, *(entry.up_to + 1 for entry in entries)]
    since = table.date if table else ""
    return (
        *(
            Winner(entry.up_to, entry.config, entry.cubin_key, serves_from=start)
            for start, entry in zip(starts, entries, strict=False)
        ),
        *(
            Winner(
                row.problem.m,
                row.config,
                row.cubin_key,
                row.is_foreign,
                is_newer=bool(table) and row.date > since,
            )
            for ranked in rankings
            for row in ranked[:_FASTEST]
        ),
    )


def choose(
    problem: GemmProblem,
    device: Device,
    winners: Sequence[Winner],
    key_of: Callable[[GemmConfig], str] | None = None,
) -> Choice:
    """The configuration for a problem on a device, from the winners of its class.

    `key_of` gives the key of the cubin that would be built now: a winner with another key was
    verified as another cubin, so it is left out, and counted as stale where nothing that was tuned
    for this M is left (None: keys are not asked). A source by hand serves its own M only. Within
    the range of a dispatch table its kernels come first, but for what was tuned since.
    """
    stale: list[Winner] = []

    def usable(winner: Winner) -> bool:
        if winner.foreign:
            return winner.m == problem.m
        if why_invalid(problem, winner.config, device) is not None:
            return False
        if key_of is not None and key_of(winner.config) != winner.cubin_key:
            stale.append(winner)
            return False
        return True

    ranges = [w for w in winners if w.serves_from is not None]
    winners = [w for w in winners if w.serves_from is None]
    exact = next((w for w in winners if w.m == problem.m and usable(w)), None)
    if exact and exact.foreign:
        return Choice(exact.config, "foreign", exact.m, foreign_key=exact.cubin_key)
    if not (exact and exact.is_newer):
        entry = next((w for w in ranges if (w.serves_from or 0) <= problem.m <= w.m), None)
        if entry and usable(entry):
            return Choice(entry.config, "table", entry.m)
    if exact:
        return Choice(exact.config, "tuned", exact.m)
    # Sorting keeps the order of the winners of one M: fastest first.
    below = sorted((w for w in winners if w.m < problem.m), key=lambda w: -w.m)
    above = [w for w in winners if w.m > problem.m]
    near = [w for side in (below, above) if (w := next(filter(usable, side), None))]
    default = default_for(problem, device)
    if near:
        best = min(near, key=lambda w: predict_us(problem, w.config, device))
        if predict_us(problem, best.config, device) <= predict_us(problem, default, device):
            return Choice(best.config, "neighbour", best.m, len(stale))
    return Choice(default, "default", None, len(stale))


def default_for(problem: GemmProblem, device: Device) -> GemmConfig:
    """The model's configuration, out of few enough that every M together needs few kernels.

    The defaults of the two nearest bucket sizes of M are compared at the actual M: the number of
    kernels grows with the logarithm of M, and the tail of the last wave is still seen.
    """
    options = [default_config(problem.with_m(m), device) for m in buckets_around(problem.m)]
    valid = [config for config in options if why_invalid(problem, config, device) is None]
    if not valid:
        return default_config(problem, device)
    return min(valid, key=lambda config: predict_us(problem, config, device))


def buckets_around(m: int) -> tuple[int, ...]:
    """The one or two sizes among 16, 32, 48, 64, 96, 128 ... that enclose m."""
    if m <= _LEAST_BUCKET:
        return (_LEAST_BUCKET,)
    power = 1 << (m.bit_length() - 1)
    steps = [power, power + power // 2, 2 * power] if power > _LEAST_BUCKET else [power, 2 * power]
    below = max(step for step in steps if step <= m)
    above = min(step for step in steps if step >= m)
    return (below,) if below == above else (below, min(above, MAX_EXTENT))
