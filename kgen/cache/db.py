"""The tuning database: `TuningDatabase`, append-only facts and the queries over them.

Takes records and gives records. A row is committed when `record` returns; "best" is a query. A
timing holds for its cubin key, device model and SM count; everything else is a suggestion. SQL
that every database takes stands here, what is special to SQLite in `cache.sqlite`. Must not
import artifacts, search, runtime or torch.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, func, insert, select, update

from kgen import __version__
from kgen.cache import liveness, rows, schema
from kgen.cache.connect import Target
from kgen.cache.handle import BUSY_LIMIT_S, Handle
from kgen.cache.records import (
    STATUSES,
    DispatchTable,
    ProblemOutcome,
    RunRecord,
    Suggestion,
    TrialRecord,
    TrialRow,
)
from kgen.cache.schema import dispatch_tables, outcomes, runs, trials
from kgen.errors import DatabaseError
from kgen.problem import GemmProblem

#: A run of another host counts as dead when it wrote nothing for this long.
STALE_AFTER: Final = timedelta(hours=1)
_ANY: Final = GemmProblem("dense", 1, 8, 16)


class TuningDatabase(Handle):
    """One handle on a tuning database; threads may share it, processes each open their own.

    Every method raises DatabaseError: locked for longer than the limit, unreadable, a record
    that breaks a rule, or a handle that came here through a fork. `where` names the database in
    messages, `file` is SQLite's, or None.
    """

    def __init__(self, target: Target, busy_limit_s: float = BUSY_LIMIT_S) -> None:
        """For `open`, which is the way to get one."""
        super().__init__(target, busy_limit_s)
        self._own_runs: set[int] = set()

    # -- facts ---------------------------------------------------------------------------------

    def record(self, trial: TrialRecord, run_id: int | None = None) -> int:
        """Append a trial and commit; gives the row's id. `run_id` must be a run begun here."""
        return self._append(trials.insert(), rows.trial_values(trial, run_id), run_id)

    def record_outcome(self, outcome: ProblemOutcome, run_id: int | None = None) -> int:
        """Append how a problem ended and commit; gives the row's id."""
        return self._append(outcomes.insert(), rows.outcome_values(outcome, run_id), run_id)

    def record_table(self, table: DispatchTable, run_id: int | None = None) -> int:
        """Append a dispatch table and commit; gives the row's id. The last of a class counts."""
        return self._append(dispatch_tables.insert(), rows.table_values(table, run_id), run_id)

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

    def dispatch_table(
        self, problem: GemmProblem, device_name: str, num_sms: int
    ) -> DispatchTable | None:
        """The last table made for the problem's class at any M on a device, or None."""
        where = _at(dispatch_tables.c, problem, device_name, num_sms, any_m=True)
        query = select(dispatch_tables).where(*where).order_by(dispatch_tables.c.id.desc()).limit(1)
        return next(iter(self._all(query, rows.table_row)), None)

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
