"""The run on a GPU: `Campaign` gives each problem its trials, its finals and its report.

Takes the run, the GPU's worker and the problems. While the GPU works on one candidate the next
ones are chosen and compiled. For each candidate the order is fixed: build, verify, measure,
record. Must not import torch, CUDA or optuna.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kgen.errors import KgenError, Untunable
from kgen.search.events import (
    TUNED,
    UNFINISHED,
    Notice,
    ProblemFinished,
    ProblemReport,
    ProblemStarted,
    TrialFinished,
)
from kgen.search.finals import Finals
from kgen.search.gpu_worker import GpuWorker, Measured
from kgen.search.plan import Plan
from kgen.search.run import Run, status_of
from kgen.search.session import Candidate, Session
from kgen.shapes import ShapeLine

if TYPE_CHECKING:
    from kgen.build import Cubin
    from kgen.config import GemmConfig
    from kgen.problem import GemmProblem

#: Builds that wait beyond the processes at work, so that none of these runs dry.
SPARE_BUILDS: Final = 2
#: Problems whose search is set up before their turn; later ones learn from more results.
PREPARED_AHEAD: Final = 3


class Campaign:
    """All problems of a run on one GPU."""

    def __init__(self, run: Run, gpu: GpuWorker, plan: Plan, lines: Sequence[ShapeLine]) -> None:
        self._run = run
        self._gpu = gpu
        self._plan = plan
        self._sessions = [Session(run, line) for line in lines]
        self._total_weight = sum(line.weight for line in lines)
        self._reports: dict[int, ProblemReport] = {}
        self._next: list[Session] = []
        self._num_started = 0
        self._mark = time.monotonic()
        self._gpu_busy_s = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kgen-gpu")
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="kgen-prepare")
        self._prepared: dict[int, Future[None]] = {}
        self._finals = Finals(run, plan, self._measure, partial(self._tell, stage="final"))

    def work(self) -> None:
        """Do all that the limits allow; raises Interrupted when told to stop."""
        try:
            for session in self._open():
                self._skip_if_finished(session)
            self._run.load_lessons()
            while self._open():
                if chosen := self._choose():
                    self._work_on(chosen)
                elif waiting := self._open():
                    # Finals may take less than was kept for them: then trials go on.
                    self._finish(min(waiting, key=lambda session: session.progress.worth))
        except BaseException:
            self._run.stop.set()  # what the GPU's thread waits for ends at once
            raise
        finally:
            for threads in (self._preparing, self._thread):
                threads.shutdown(cancel_futures=True)

    def reports(self) -> list[ProblemReport]:
        """Where every problem stands, in the order given."""
        return [
            self._reports.get(id(session)) or session.report(is_full=False)
            for session in self._sessions
        ]

    # -- who is next ---------------------------------------------------------------------------

    def _open(self) -> list[Session]:
        return [session for session in self._sessions if id(session) not in self._reports]

    def _choose(self) -> Session | None:
        """The problem that gets the next slice; finishes those that have had all."""
        for session in self._open():
            if self._is_done(session):
                self._finish(session)
        waiting = self._open()
        if not waiting or not self._plan.room_for_trial(len(waiting)):
            return None
        order = self._plan.order([session.progress for session in waiting])
        self._next = [waiting[index] for index in order]
        for session in self._next[:PREPARED_AHEAD]:
            if id(session) not in self._prepared:
                self._prepared[id(session)] = self._preparing.submit(session.prepare)
        return self._next[0]

    def _is_done(self, session: Session) -> bool:
        return bool(session.untunable) or session.is_exhausted or self._is_full(session)

    def _is_full(self, session: Session) -> bool:
        return self._plan.is_full(session.progress)

    def _skip_if_finished(self, session: Session) -> None:
        """Leave a problem alone that an earlier run gave as much as this one would."""
        outcome = session.last_outcome()
        if outcome is None or outcome.outcome != TUNED or session.winner is None:
            return
        if not self._is_covered(session, outcome.details):
            return
        report = replace(
            session.report(is_full=True),
            skipped=True,
            default_us=outcome.details.get("default_us"),
            invalid_by_rule=dict(outcome.invalid_by_rule),
        )
        self._reports[id(session)] = report
        self._run.on_event(ProblemFinished(report))

    def _is_covered(self, session: Session, details: Any) -> bool:
        """Whether limits that were used up, as an outcome keeps them, include the present ones."""
        now = self._limits(session)
        if details.get("num_exhausted") == len(session.valid):
            return True
        if now["trials"] is not None and session.progress.num_trials >= now["trials"]:
            return True
        for name in ("share_s", "per_problem_s"):
            if now[name] is not None and details.get(name) is not None:
                return bool(now[name] <= details[name] * 1.001)
        return False

    def _limits(self, session: Session) -> dict[str, Any]:
        options = self._run.options
        share = None
        if options.budget_s is not None:
            share = options.budget_s * session.line.weight / self._total_weight
        return {
            "trials": options.trial_limit,
            "share_s": share,
            "per_problem_s": options.budget_per_problem_s,
        }

    # -- trials --------------------------------------------------------------------------------

    def _work_on(self, session: Session) -> None:
        """One slice of trials for one problem."""
        if not self._introduce(session):
            return
        before_us = session.best_us
        self._mark = time.monotonic()
        for _ in range(self._plan.slice_trials(session.progress)):
            self._run.check_stop()
            if self._is_done(session) or not self._plan.room_for_trial(len(self._open())):
                break
            session.fill(self._plan.trials_left(session.progress))
            candidate = session.take(self._plan.deadline)
            if candidate is None:
                break
            self._try(session, candidate)
        session.progress.end_slice(before_us, session.expected_gain())

    def _introduce(self, session: Session) -> bool:
        """Wait until the problem is prepared and tell of it; False when the time was up first."""
        if session.is_introduced:
            return True
        prepared = self._prepared[id(session)]
        if not self._run.wait_any([prepared], self._plan.deadline):
            return False
        prepared.result()
        session.is_introduced = True
        self._num_started += 1
        self._run.on_event(
            ProblemStarted(
                session.problem,
                self._num_started,
                len(session.valid),
                session.progress.num_trials,
                session.invalid_by_rule,
            )
        )
        return True

    def _build_ahead(self, session: Session, gpu: Future[list[Measured]]) -> None:
        """Keep the compilers busy while the GPU is: for this problem, and those that come next."""
        session.fill(self._plan.trials_left(session.progress))
        enough = self._run.pool.jobs + SPARE_BUILDS
        for other in self._next[1:]:
            if gpu.done() or self._run.pool.num_waiting >= enough:
                break
            if other.is_prepared and not other.pending:
                other.fill(self._plan.slice_trials(other.progress))

    def _try(self, session: Session, candidate: Candidate) -> None:
        """Verify, time and record one candidate; a failure is a value."""
        config = candidate.config
        status, reason, timed = "ok", "", None
        on_gpu = False
        try:
            cubin = candidate.future.result()
            if session.add_twin(cubin):
                return
            on_gpu = True
            (timed,) = self._measure(
                session, [cubin], best_us=session.best_us or math.inf, control=session.control
            )
        except Untunable as error:
            session.untunable = str(error)
            return
        except KgenError as error:
            status, reason = status_of(error), str(error)
            self._run.record_failure(session.problem, config, status, reason)
            session.add_failure(config, status, reason)
        else:
            predicted_us = session.predicted_us(config)
            self._run.record_ok(session.problem, cubin, timed, predicted_us, stage="search")
            if moved := session.add_trial(cubin, timed):
                self._run.on_event(Notice(f"{session.problem}: {moved}"))
        seconds, self._mark = time.monotonic() - self._mark, time.monotonic()
        session.progress.add_attempt(on_gpu, seconds)
        self._plan.note_trial(seconds)
        self._tell(session, config, status, reason, timed)

    def _measure(
        self,
        session: Session,
        cubins: list[Cubin],
        best_us: float | None = None,
        control: Cubin | None = None,
    ) -> list[Measured]:
        """Have the GPU's worker measure, and choose and compile what comes next meanwhile."""
        future = self._thread.submit(self._on_gpu, session.problem, cubins, best_us, control)
        if not session.is_closed:
            self._build_ahead(session, future)
        return future.result()

    def _on_gpu(
        self,
        problem: GemmProblem,
        cubins: list[Cubin],
        best_us: float | None,
        control: Cubin | None,
    ) -> list[Measured]:
        """In the GPU's thread: measure, and count the seconds."""
        start = time.monotonic()
        try:
            policy = self._run.options.policy
            return self._gpu.measure(problem, cubins, policy, best_us, control)
        finally:
            self._gpu_busy_s += time.monotonic() - start

    def _tell(
        self,
        session: Session,
        config: GemmConfig,
        status: str,
        reason: str,
        timed: Measured | None = None,
        *,
        stage: str = "search",
    ) -> None:
        self._run.tell_of_lost_compilers()
        self._run.on_event(
            TrialFinished(
                session.problem,
                config,
                status,
                reason,
                timed.median_us if timed else None,
                session.predicted_us(config),
                session.best_us,
                session.num_configs,
                stage,
                timed.p10_us if timed else None,
                timed.p90_us if timed else None,
                timed.error if timed else None,
                self._gpu_busy_s,
            )
        )

    # -- finals --------------------------------------------------------------------------------

    def _finish(self, session: Session) -> None:
        """Measure the finalists again, record the outcome, report."""
        session.close()
        is_full = self._is_done(session)
        if session.winner is not None and not session.untunable and self._plan.room_for_final():
            started = time.monotonic()
            self._finals.take(session)
            self._plan.note_final(time.monotonic() - started)
        report = session.report(is_full)
        self._reports[id(session)] = report
        if report.outcome != UNFINISHED:
            details = {**self._limits(session), "default_us": report.default_us}
            details["finals"] = [standing.to_dict() for standing in session.standings]
            if session.is_exhausted:
                details["num_exhausted"] = len(session.valid)
            self._run.record_outcome(
                session.problem,
                report.outcome,
                reason=report.reason,
                num_trials=report.num_trials,
                invalid_by_rule=report.invalid_by_rule,
                details=details,
            )
        self._run.on_event(ProblemFinished(report))
