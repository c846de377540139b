"""What is in tuning databases: how much, what differs between two, and what nobody needs any more.

Takes open databases, gives values; only `prune` changes one, after a backup. Must not import
artifacts, search, runtime or torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import func, select

from kgen.cache import rows, sqlite
from kgen.cache.db import TuningDatabase
from kgen.cache.records import TrialRow
from kgen.cache.schema import SCHEMA_VERSION, runs, trials
from kgen.cache.transfer import count_rows
from kgen.config import GemmConfig
from kgen.errors import DatabaseError
from kgen.problem import GemmProblem

#: Cubins of each problem and device that `prune` keeps.
KEEP: Final = 10

Place = tuple[GemmProblem, str, int]


@dataclass(frozen=True)
class Pruned:
    """Trials deleted and kept, and the copy made before (None: nothing was deleted)."""

    deleted: int
    kept: int
    backup: Path | None


@dataclass(frozen=True)
class Difference:
    """A problem and device whose best kernels differ; None where a side has no timed kernel."""

    problem: GemmProblem
    device_name: str
    num_sms: int
    a: TrialRow | None
    b: TrialRow | None

    @property
    def ratio(self) -> float | None:
        """Time of a over time of b: above 1 where b is faster."""
        if self.a is None or self.b is None or not self.a.median_us or not self.b.median_us:
            return None
        return self.a.median_us / self.b.median_us


def stats(database: TuningDatabase) -> dict[str, Any]:
    """Numbers of rows, trials by status and by device, problems, dates; plain values for JSON.

    `bytes` is the size of the file, None of a database that is none.
    """
    t = trials.c
    problems = [t[name] for name in _PROBLEM_FIELDS]
    counts = database.read(count_rows)
    by_device = database.read(
        lambda c: c.execute(
            select(t.device_name, t.device_num_sms, func.count(), func.count(t.median_us))
            .group_by(t.device_name, t.device_num_sms)
            .order_by(func.count().desc())
        ).all()
    )
    num_problems = database.read(
        lambda c: c.execute(
            select(func.count()).select_from(select(*problems).distinct().subquery())
        ).scalar_one()
    )
    first, last = database.read(
        lambda c: c.execute(select(func.min(t.date), func.max(t.date))).one()
    )
    states = database.read(
        lambda c: c.execute(select(runs.c.state, func.count()).group_by(runs.c.state)).all()
    )
    path = database.file.path if database.file else None
    return {
        "database": database.where,
        "schema_version": SCHEMA_VERSION,
        "bytes": path.stat().st_size if path else None,
        **counts,
        "problems": num_problems,
        "statuses": database.counts(),
        "devices": [
            {"name": name, "num_sms": sms, "trials": number, "timed": timed}
            for name, sms, number, timed in by_device
        ],
        "run_states": {row[0]: row[1] for row in states},
        "first": first,
        "last": last,
    }


_PROBLEM_FIELDS: Final = tuple(GemmProblem.__dataclass_fields__)


def diff(a: TuningDatabase, b: TuningDatabase) -> list[Difference]:
    """Problems and devices whose best kernel differs: another cubin, another time, or none."""
    of_a, of_b = _winners(a), _winners(b)
    found = []
    for place in sorted(of_a.keys() | of_b.keys()):
        mine, yours = of_a.get(place), of_b.get(place)
        if mine is None or yours is None or _told(mine) != _told(yours):
            found.append(Difference(*place, mine, yours))
    return found


def _winners(database: TuningDatabase) -> dict[Place, TrialRow]:
    return {(row.problem, row.device_name, row.num_sms): row for row in database.each_winner()}


def _told(row: TrialRow) -> tuple[Any, ...]:
    return row.cubin_key, row.config, row.policy, row.median_us


def prune(database: TuningDatabase, keep: int = KEEP, dry_run: bool = False) -> Pruned:
    """Delete timed trials of all but the `keep` fastest cubins of each problem, device and policy,
    and all but as many leading predictions.

    Kept are failures, which are not tried again, sources by hand, outcomes, runs, and what "best"
    says of every problem under every policy. Raises DatabaseError where the database is no file.
    """
    if database.file is None:
        raise DatabaseError(f"{database.where} is no file: only SQLite files are pruned")
    doomed = [number for place in _places(database) for number in _doomed(place, keep)]
    total = database.read(count_rows)["trials"]
    if not doomed or dry_run:
        return Pruned(len(doomed), total - len(doomed), None)
    backup = sqlite.back_up(database.file, "unpruned")
    database.write(lambda c: sqlite.delete_rows(c, trials.name, doomed))
    database.let_go()
    sqlite.compact(database.file)
    return Pruned(len(doomed), total - len(doomed), backup)


def _places(database: TuningDatabase) -> Iterable[list[TrialRow]]:
    """The trials of one problem on all devices at a time."""
    query = select(*(trials.c[name] for name in _PROBLEM_FIELDS)).distinct()
    for found in database.read(lambda c: c.execute(query).mappings().all()):
        by_place = rows.by_problem_and_device(database.trials(GemmProblem(**found)))
        yield from by_place.values()


def _doomed(place: list[TrialRow], keep: int) -> list[int]:
    """The ids of one problem's and device's trials that go.

    The policy that "best" takes by itself is the one with most cubins: it keeps one more than the
    others, so that it stays so.
    """
    main = next(iter(rows.ranking(place)), None)
    by_policy: dict[str, list[TrialRow]] = defaultdict(list)
    for row in place:
        if row.status == "ok" and not row.is_foreign:
            by_policy[row.policy].append(row)
    goes: set[int] = set()
    for policy, timed in by_policy.items():
        room = keep + (main is not None and policy == main.policy)
        fastest = dict.fromkeys(row.cubin_key for row in rows.ranking(place, policy))
        stays = set(list(fastest)[:room])
        goes |= {row.id for row in timed if row.cubin_key not in stays}
    predicted = [r for r in place if r.status == "compiled"]
    predicted.sort(key=lambda r: (r.predicted_us is None, r.predicted_us, -r.id))
    configs: set[GemmConfig] = set()
    for row in predicted:
        if row.config not in configs and len(configs) < keep:
            configs.add(row.config)
        else:
            goes.add(row.id)
    return sorted(goes)
