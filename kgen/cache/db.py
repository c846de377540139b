"""The tuning database: `TuningDatabase`, append-only facts and the queries over them.

Takes records and gives records. A row is committed when `record` returns; "best" is a query. A
timing holds for its cubin key, device model and SM count; everything else is a suggestion. SQL
that every database takes stands here, what is special to SQLite in `cache.sqlite`. Must not
import artifacts, search, runtime or torch.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeVar
from weakref import WeakSet

from sqlalchemy import ColumnElement, Connection, func, insert, select, update
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError

from kgen import __version__
from kgen.cache import liveness, rows, schema, sqlite
from kgen.cache.connect import Target, connect
from kgen.cache.records import (
    STATUSES,
    ProblemOutcome,
    RunRecord,
    Suggestion,
    TrialRecord,
    TrialRow,
)
from kgen.cache.schema import outcomes, runs, trials
from kgen.errors import DatabaseError, UsageError
from kgen.problem import GemmProblem

T = TypeVar("T")

#: Seconds to wait for other writers before giving up.
BUSY_LIMIT_S: Final = 30.0
#: A run of another host counts as dead when it wrote nothing for this long.
STALE_AFTER: Final = timedelta(hours=1)
_ANY: Final = GemmProblem("dense", 1, 8, 16)
_handles: Final[WeakSet[TuningDatabase]] = WeakSet()


class TuningDatabase:
    """One handle on a tuning database; threads may share it, processes each open their own.

    Every method raises DatabaseError: locked for longer than the limit, unreadable, a record
    that breaks a rule, or a handle that came here through a fork. `where` names the database in
    messages, `file` is SQLite's, or None.
    """

    def __init__(self, target: Target, busy_limit_s: float = BUSY_LIMIT_S) -> None:
        """For `open`, which is the way to get one."""
        self.where = target.where
        self._engine = target.engine
        self.file = target.file
        self._identity = target.file.identity if target.file else None
        self._limit_s = busy_limit_s
        self._pid = os.getpid()
        self._own_runs: set[int] = set()
        _handles.add(self)

    @classmethod
    def open(
        cls,
        url: str | Path,
        *,
        create: bool = True,
        readonly: bool = False,
        busy_limit_s: float = BUSY_LIMIT_S,
    ) -> TuningDatabase:
        """Open, and if need be create, the database at an SQLAlchemy URL or a path.

        A missing or empty file is initialised (create=False: refused); an older schema is
        converted after a backup; a newer one, another program's database, a file that is none
        and a folder are refused untouched. `readonly` never writes, not even a journal mode.
        """
        db = cls(connect(url, create, readonly, busy_limit_s), busy_limit_s)
        try:
            db._prepare(create and not readonly)
        except BaseException:
            db.close()
            raise
        return db

    def __enter__(self) -> TuningDatabase:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; a database in memory is gone then."""
        self._engine.dispose()

    def let_go(self) -> None:
        """Close idle connections; the next use opens one again. Nothing in memory is lost."""
        if self.file is not None or self._engine.dialect.name != "sqlite":
            self._engine.dispose()

    # -- facts ---------------------------------------------------------------------------------

    def record(self, trial: TrialRecord, run_id: int | None = None) -> int:
        """Append a trial and commit; gives the row's id. `run_id` must be a run begun here."""
        return self._append(trials.insert(), rows.trial_values(trial, run_id), run_id)

    def record_outcome(self, outcome: ProblemOutcome, run_id: int | None = None) -> int:
        """Append how a problem ended and commit; gives the row's id."""
        return self._append(outcomes.insert(), rows.outcome_values(outcome, run_id), run_id)

    def _append(self, statement: Any, values: dict[str, Any], run_id: int | None) -> int:
        if run_id is not None and run_id not in self._own_runs:
            raise DatabaseError(f"run {run_id} is not this handle's: each run has one writer")

        def work(connection: Connection) -> int:
            if run_id is not None:
                # A run that others took for dead is alive again.
                alive = {"heartbeat": rows.now(), "state": "running", "ended": None}
                connection.execute(update(runs).where(runs.c.id == run_id).values(alive))
            key: Any = connection.execute(statement.values(values)).inserted_primary_key
            return int(key[0])

        return self.write(work)

    # -- queries -------------------------------------------------------------------------------

    def trials(
        self,
        problem: GemmProblem | None = None,
        device_name: str | None = None,
        num_sms: int | None = None,
        statuses: Collection[str] = (),
    ) -> list[TrialRow]:
        """Trials in the order they were recorded, of all problems, devices and statuses or some."""
        where = _at(trials.c, problem, device_name, num_sms)
        if statuses:
            where.append(trials.c.status.in_(list(statuses)))
        return self._trials(where)

    def trial(self, number: int) -> TrialRow:
        """The trial with this id. Raises DatabaseError where there is none."""
        found = self._trials([trials.c.id == number])
        if not found:
            raise DatabaseError(
                f"{self.where} has no trial {number}: `kgen explain PROBLEM` lists the ids"
            )
        return found[0]

    def _trials(self, where: list[ColumnElement[bool]]) -> list[TrialRow]:
        return self._all(select(trials).where(*where).order_by(trials.c.id), rows.trial_row)

    def ranking(
        self, problem: GemmProblem, device_name: str, num_sms: int, policy: str | None = None
    ) -> list[TrialRow]:
        """Every cubin verified and timed for the problem on this device, fastest first.

        `median_us` is the median over the rows of one cubin. Times of different policies are not
        mixed: None takes the policy that most cubins were timed under. A cubin that ever was
        wrong, faulted or hung here is left out. The times hold while the cubin key does: see
        `TrialRow.valid_for`.
        """
        return rows.ranking(self.trials(problem, device_name, num_sms), policy)

    def best(
        self, problem: GemmProblem, device_name: str, num_sms: int, policy: str | None = None
    ) -> TrialRow | None:
        """The fastest of `ranking`, or None when nothing was verified and timed here."""
        return next(iter(self.ranking(problem, device_name, num_sms, policy)), None)

    def rankings_by_m(
        self,
        problem: GemmProblem,
        device_name: str,
        num_sms: int,
        policy: str | None = None,
        *,
        foreign: bool = False,
    ) -> list[list[TrialRow]]:
        """`ranking` of each M timed here for the problem's other fields, by growing M.

        `foreign`: sources by hand as well.
        """
        where = _at(trials.c, problem, device_name, num_sms, any_m=True)
        groups = rows.by_problem_and_device(self._trials(where)).values()
        rankings = [rows.ranking(group, policy, foreign=foreign) for group in groups]
        return sorted(filter(None, rankings), key=lambda ranked: ranked[0].problem.m)

    def winners(
        self,
        device_name: str | None = None,
        num_sms: int | None = None,
        policy: str | None = None,
    ) -> list[TrialRow]:
        """The best of every problem on every device, or on one, in the order first tuned."""
        return _winners(self._trials(_at(trials.c, None, device_name, num_sms)), policy)

    def each_winner(self) -> Iterator[TrialRow]:
        """As `winners`, one problem after the other: memory for one problem's trials suffices."""
        problems = [trials.c[name] for name in asdict(_ANY)]
        places = select(*problems, trials.c.device_name, trials.c.device_num_sms).distinct()
        ran = trials.c.status.not_in(("compiled", "compile_failed", "launch_failed"))
        for place in self.read(lambda c: c.execute(places.where(ran)).mappings().all()):
            here = [trials.c[name] == value for name, value in place.items()]
            yield from _winners(self._trials([*here, ran]), None)

    def suggestions(
        self, problem: GemmProblem, device_name: str | None = None, num_sms: int | None = None
    ) -> list[Suggestion]:
        """Winners of other devices, then predictions: to be verified here before use."""
        return rows.suggestions(self.trials(problem), device_name, num_sms)

    def outcomes(
        self,
        problem: GemmProblem | None = None,
        device_name: str | None = None,
        num_sms: int | None = None,
    ) -> list[ProblemOutcome]:
        """How problems ended, in the order recorded; the last of a problem and device counts."""
        where = _at(outcomes.c, problem, device_name, num_sms)
        return self._all(select(outcomes).where(*where).order_by(outcomes.c.id), rows.outcome_row)

    def counts(
        self,
        problem: GemmProblem | None = None,
        device_name: str | None = None,
        num_sms: int | None = None,
    ) -> dict[str, int]:
        """Number of trials of each status, zeros included."""
        query = select(trials.c.status, func.count()).group_by(trials.c.status)
        query = query.where(*_at(trials.c, problem, device_name, num_sms))
        found = self.read(lambda c: c.execute(query).all())
        return dict.fromkeys(STATUSES, 0) | {row[0]: row[1] for row in found}

    def export(self) -> dict[str, Any]:
        """Everything as plain values for JSON."""
        return {
            "schema_version": schema.SCHEMA_VERSION,
            "kgen_version": __version__,
            "runs": [asdict(run) for run in self.runs()],
            "trials": [trial.to_dict() for trial in self.trials()],
            "outcomes": [outcome.to_dict() for outcome in self.outcomes()],
        }

    # -- runs ----------------------------------------------------------------------------------

    def begin_run(self, command: str, options: Mapping[str, Any] | None = None) -> RunRecord:
        """Open a run that only this handle may write to; runs of dead processes are closed."""
        self.close_stale_runs()
        pid, date = os.getpid(), rows.now()
        values: dict[str, Any] = {
            "command": command,
            "kgen_version": __version__,
            "options": dict(options or {}),
            "host": liveness.this_host(),
            "pid": pid,
            "process": liveness.process_token(pid) or "",
            "started": date,
            "heartbeat": date,
            "state": "running",
        }
        run_id = self._append(insert(runs), values, None)
        self._own_runs.add(run_id)
        return RunRecord(id=run_id, ended=None, **values)

    def end_run(self, run_id: int, state: str = "finished") -> None:
        """Close a run of this handle as finished, interrupted or failed."""
        if run_id not in self._own_runs:
            raise DatabaseError(f"run {run_id} is not this handle's: each run has one writer")
        self._close_run(run_id, state)
        self._own_runs.remove(run_id)

    def runs(self) -> list[RunRecord]:
        """Every run, in the order begun."""
        return self._all(select(runs).order_by(runs.c.id), rows.run_row)

    def close_stale_runs(self) -> list[RunRecord]:
        """Close runs whose process is gone (killed, or a machine that went away); gives them."""
        stale = [run for run in self.runs() if run.state == "running" and _is_dead(run)]
        for run in stale:
            # Unless it wrote, or ended, since it was looked at.
            unchanged = (runs.c.state == "running", runs.c.heartbeat == run.heartbeat)
            self._close_run(run.id, "killed", *unchanged)
        return stale

    def _close_run(self, run_id: int, state: str, *still: ColumnElement[bool]) -> None:
        values = {"state": state, "ended": rows.now()}
        query = update(runs).where(runs.c.id == run_id, *still).values(values)
        self.write(lambda connection: connection.execute(query))

    # -- transactions --------------------------------------------------------------------------

    def _prepare(self, create: bool) -> None:
        version = self.read(lambda c: schema.read_version(c, self.where))
        if version is None and not create:
            raise DatabaseError(f"{self.where} is empty: `kgen tune` makes a database of it")
        if version is not None and version < schema.SCHEMA_VERSION:
            if not schema.can_migrate(version):
                raise schema.refuse_older(self.where, version)
            if not create:
                raise DatabaseError(
                    f"{self.where} has schema {version}: run `kgen tune` once to convert it to "
                    f"{schema.SCHEMA_VERSION}"
                )
        if version != schema.SCHEMA_VERSION:
            self.write(self._bring_up)
        self.read(lambda c: schema.check_columns(c, self.where))

    def _bring_up(self, connection: Connection) -> None:
        """Create or migrate under the write lock; another starter may have been first."""
        version = schema.read_version(connection, self.where)
        if version is None:
            schema.create(connection)
        elif version < schema.SCHEMA_VERSION:
            if self.file is not None:
                sqlite.back_up(self.file, f"v{version}")
            schema.migrate(connection, version)

    def _all(self, query: Any, record_of: Callable[[dict[str, Any]], T]) -> list[T]:
        """Every row as a record. A damaged file gives values that no kgen wrote."""
        try:
            found = self.read(lambda c: c.execute(query).mappings().all())
            return [record_of(dict(row)) for row in found]
        except (UsageError, ValueError, TypeError) as error:
            raise DatabaseError(f"{self.where} holds a row that makes no sense: {error}") from error

    def read(self, work: Callable[[Connection], T]) -> T:
        """What `work` gives in one transaction; a lock may have it called again."""
        return self._attempt(work, writes=False)

    def write(self, work: Callable[[Connection], T]) -> T:
        """As `read`, with the right to write: all of it is kept, or, where it raises, nothing."""
        return self._attempt(work, writes=True)

    def _attempt(self, work: Callable[[Connection], T], writes: bool) -> T:
        """One transaction, tried again while others hold the lock, until the limit is reached."""
        self._check_still_ours()
        deadline = time.monotonic() + self._limit_s
        pause = 0.005
        while True:
            try:
                with self._transaction(writes) as connection:
                    return work(connection)
            except SQLAlchemyError as error:
                busy = isinstance(error, DBAPIError) and sqlite.is_busy(error)
                if not busy or time.monotonic() >= deadline:
                    raise self._explain(error, busy) from error
            except ValueError as error:  # a damaged file: text, or a driver's message, not UTF-8
                raise DatabaseError(f"{self.where} can not be read: {error}") from error
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, 0.25)

    def _check_still_ours(self) -> None:
        if os.getpid() != self._pid:
            raise DatabaseError(
                f"{self.where} was opened by process {self._pid} and is used by its fork "
                f"{os.getpid()}: open it again there, or start processes with 'spawn'"
            )
        if self.file is not None and self.file.identity != self._identity:
            raise DatabaseError(f"{self.where} was moved or deleted while in use: start again")

    @contextmanager
    def _transaction(self, writes: bool) -> Iterator[Connection]:
        with self._engine.connect() as connection:
            connection.execution_options(kgen_writes=writes)
            with connection.begin():
                yield connection

    def _explain(self, error: SQLAlchemyError, busy: bool) -> DatabaseError:
        cause = getattr(error, "orig", None) or error
        if busy:
            return DatabaseError(
                f"{self.where} was locked by another process for {self._limit_s:g} s: find what "
                "holds it, or use another file with --db or KGEN_DB"
            )
        if isinstance(error, IntegrityError) or not isinstance(error, DBAPIError):
            return DatabaseError(f"{self.where} refused a row: {cause}")
        return DatabaseError(
            f"{self.where} can not be used: {cause}; if the file system is at fault (a network "
            "mount, a full disk), name a file on a local disk with --db or KGEN_DB"
        )


def _at(
    column: Any,
    problem: GemmProblem | None,
    device_name: str | None,
    num_sms: int | None,
    any_m: bool = False,
) -> list[ColumnElement[bool]]:
    """Conditions for rows of a problem and a device, each left out when None."""
    wanted = asdict(problem) if problem else {}
    if any_m:
        del wanted["m"]
    if device_name is not None:
        wanted["device_name"] = device_name
    if num_sms is not None:
        wanted["device_num_sms"] = num_sms
    return [column[name] == value for name, value in wanted.items()]


def _winners(found: list[TrialRow], policy: str | None) -> list[TrialRow]:
    groups = rows.by_problem_and_device(found).values()
    return [ranked[0] for group in groups if (ranked := rows.ranking(group, policy))]


def _is_dead(run: RunRecord) -> bool:
    if run.host != liveness.this_host():
        return datetime.now(UTC) - datetime.fromisoformat(run.heartbeat) > STALE_AFTER
    token = liveness.process_token(run.pid)
    return token is None or bool(token and run.process and token != run.process)


def _before_fork() -> None:
    """Close idle connections: SQLite forbids even closing in a child what its parent opened."""
    for handle in list(_handles):
        handle.let_go()


os.register_at_fork(before=_before_fork)
