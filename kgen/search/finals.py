"""The finals of a problem: its leading configurations timed interleaved, and who wins.

One lucky measurement names no winner: the fastest, the default, the nearest known winner and the
winner of an earlier run race each other, and a tie goes to what was known before. Takes the session
of the problem and how to measure and record; changes the session. Must not import torch, CUDA or
optuna.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from kgen.config import GemmConfig
from kgen.errors import Interrupted, KgenError, Untunable
from kgen.search.events import Notice
from kgen.search.gpu_worker import Measured
from kgen.search.plan import Plan
from kgen.search.run import Run, status_of
from kgen.search.session import Session
from kgen.search.ties import decide

if TYPE_CHECKING:
    from kgen.build import Cubin

#: The finalists are measured together once more should the first time bring in a new one.
FINAL_ROUNDS: Final = 2

#: Called with a session, a configuration, its status and reason, and the time of one that passed.
Tell = Callable[[Session, GemmConfig, str, str, Measured | None], None]


class Measure(Protocol):
    """Has the GPU's worker verify and time cubins of a problem, alternating."""

    def __call__(self, session: Session, cubins: list[Cubin]) -> list[Measured]: ...


class Finals:
    """Takes the finals of one problem after the other."""

    def __init__(self, run: Run, plan: Plan, measure: Measure, tell: Tell) -> None:
        self._run = run
        self._plan = plan
        self._measure = measure
        self._tell = tell

    def take(self, session: Session) -> None:
        """Time the leading configurations together, record that, and settle who wins."""
        done: set[GemmConfig] = set()
        for _ in range(FINAL_ROUNDS):
            finalists = session.finalists(self._run.options.finalists)
            if len(finalists) < 2 or done.issuperset(finalists):
                return
            done.update(finalists)
            cubins = self._cubins_of(session, finalists)
            if len(cubins) < 2:
                return
            try:
                self._time_together(session, cubins)
            except Untunable as error:  # the search's times hold all the same
                self._run.on_event(Notice(f"{session.problem}: no finals: {error}"))
                return

    def _cubins_of(self, session: Session, configs: list[GemmConfig]) -> list[Cubin]:
        """Their cubins, most of them built before; none when the time is up first.

        One that can not be built again (its artifact is gone, the compiler too slow today) is left
        out with a notice: nothing is wrong with the time it has.
        """
        futures = [self._run.pool.submit(session.problem, config) for config in configs]
        cubins = []
        for config, future in zip(configs, futures, strict=True):
            if not self._run.wait_any([future], self._plan.deadline):
                return []
            try:
                cubins.append(future.result())
            except KgenError as error:
                status_of(error)  # raises what is no candidate's fault
                text = f"{session.problem}: not in the finals: {config}: {error}"
                self._run.on_event(Notice(text))
        return cubins

    def _time_together(self, session: Session, cubins: list[Cubin]) -> None:
        try:
            measured = self._measure(session, cubins)
        except (Interrupted, Untunable):
            raise
        except KgenError as error:
            self._run.on_event(Notice(f"{session.problem}: finals failed, one by one: {error}"))
            self._time_one_by_one(session, cubins)
            return
        samples = {c.config: m.samples_us for c, m in zip(cubins, measured, strict=True)}
        session.settle(decide(samples, session.preferred))
        for cubin, one in zip(cubins, measured, strict=True):
            self._record(session, cubin, one, final=session.final_of(cubin.config))

    def _time_one_by_one(self, session: Session, cubins: Sequence[Cubin]) -> None:
        """Find out which finalist spoilt the others' measurement, and take it out."""
        for cubin in cubins:
            try:
                (one,) = self._measure(session, [cubin])
            except Untunable:
                raise
            except KgenError as error:
                status, reason = status_of(error), str(error)
                self._run.record_failure(session.problem, cubin.config, status, reason)
                session.add_failure(cubin.config, status, reason)
                self._tell(session, cubin.config, status, reason, None)
            else:
                self._record(session, cubin, one)

    def _record(self, session: Session, cubin: Cubin, measured: Measured, **more: Any) -> None:
        predicted_us = session.predicted_us(cubin.config)
        self._run.record_ok(session.problem, cubin, measured, predicted_us, stage="final", **more)
        session.add_time(cubin.config, measured)
        self._tell(session, cubin.config, "ok", "", measured)
