"""A run on this machine's GPU that is no search: `gpu_run`, for stored and hand-picked kernels.

Takes settings and the run's name, gives a `GpuRun` whose checks are recorded under it. Must not
import torch, CUDA or optuna.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kgen.cache.db import TuningDatabase
from kgen.config import GemmConfig
from kgen.device import Device
from kgen.errors import GpuMissing, KgenError
from kgen.heuristic import predict_us
from kgen.problem import GemmProblem
from kgen.search.events import OnEvent, TuneOptions
from kgen.search.gpu_worker import GpuWorker, Measured
from kgen.search.run import Run, status_of
from kgen.search.stop import StopFlag, stopped_by_signals
from kgen.search.tune import Opening
from kgen.settings import Settings

if TYPE_CHECKING:
    from kgen.build import Cubin


@dataclass(frozen=True)
class GpuRun:
    """A run that is open: where it records, and the GPU that it has. `name` is the stage of its
    trials in the database."""

    run: Run
    gpu: GpuWorker
    name: str

    @property
    def device(self) -> Device:
        """The GPU's facts."""
        return self.run.device

    def check(
        self,
        problem: GemmProblem,
        cubins: Sequence[Cubin],
        policy: str,
        sources: Sequence[str] = (),
    ) -> list[Measured]:
        """Verify and time kernels of one problem, alternating when there are several, and record.

        `sources` are those of the records, "tuned" where it is left out. A failure is recorded when
        it is known whose it is: of one kernel alone. Raises what `GpuWorker.measure` raises.
        """
        self.run.check_stop()
        sources = sources or ["tuned"] * len(cubins)
        try:
            found = self.gpu.measure(problem, cubins, policy)
        except KgenError as error:
            if len(cubins) == 1:
                self.record_failure(problem, cubins[0], error, sources[0])
            raise
        for cubin, measured, source in zip(cubins, found, sources, strict=True):
            predicted_us = predict_us(problem, cubin.config, self.device)
            self.run.record_ok(problem, cubin, measured, predicted_us, self.name, source=source)
        return found

    def check_all(
        self, problem: GemmProblem, cubins: Sequence[Cubin], policy: str
    ) -> list[tuple[Cubin, KgenError]]:
        """As `check`, together; where that fails, one by one, to find out who spoilt it.

        Gives the cubins that failed, and why. Raises what is no candidate's fault.
        """
        try:
            if len(cubins) > 1:
                self.check(problem, cubins, policy)
                return []
        except KgenError as error:
            status_of(error)  # raises what is no candidate's fault
        failed: list[tuple[Cubin, KgenError]] = []
        for cubin in cubins:
            try:
                self.check(problem, [cubin], policy)
            except KgenError as error:
                status_of(error)
                failed.append((cubin, error))
        return failed

    def build_and_check(
        self, problem: GemmProblem, configs: Sequence[GemmConfig], policy: str
    ) -> list[tuple[GemmConfig, str]]:
        """Build configurations side by side and `check_all`; each that failed, and "status: why".

        A build that fails is recorded. Raises what is no candidate's fault.
        """
        run = self.run
        cubins: list[Cubin] = []
        failed: list[tuple[GemmConfig, str]] = []
        futures = [run.pool.submit(problem, config) for config in configs]
        for config, future in zip(configs, futures, strict=True):
            run.wait_any([future], float("inf"))
            try:
                cubins.append(future.result())
            except KgenError as error:
                status, reason = status_of(error), str(error)
                run.record_failure(problem, config, status, reason)
                failed.append((config, f"{status}: {reason}"))
        for cubin, why in self.check_all(problem, cubins, policy):
            failed.append((cubin.config, f"{status_of(why)}: {why}"))
        return failed

    def record_failure(
        self, problem: GemmProblem, cubin: Cubin, error: KgenError, source: str = "tuned"
    ) -> None:
        """Append what went wrong, if it is the kernel's fault; raises `error` if it is not."""
        status, reason = status_of(error), str(error)
        self.run.record_failure(
            problem, cubin.config, status, reason, cubin_key=cubin.key, source=source
        )


@contextmanager
def gpu_run(
    settings: Settings,
    name: str,
    options: TuneOptions | None = None,
    kept: Mapping[str, Any] | None = None,
    on_event: OnEvent = lambda event: None,
) -> Iterator[GpuRun]:
    """Open the database, the GPU and a run called `name`; `kept` is stored with it.

    Ctrl-C and SIGTERM end it in seconds: Interrupted is raised at the next check. Raises GpuMissing
    where there is no GPU, DatabaseError where there is no database.
    """
    options = options or TuneOptions()
    stop = StopFlag()
    with ExitStack() as stack:
        stack.enter_context(stopped_by_signals(stop))
        db = TuningDatabase.open(settings.db_url, create=False)
        stack.callback(db.close)
        opening = Opening(settings, options, on_event, stop, stack)
        machine = opening.find_gpu()
        if machine.gpu is None or machine.hello is None:
            raise GpuMissing(f"{name} needs a GPU, and there is none here: {machine.reason}")
        run_id = db.begin_run(name, {"started": time.time(), **(kept or {})}).id
        state = "failed"
        try:
            yield GpuRun(opening.make_run(db, run_id, machine), machine.gpu, name)
            state = "finished"
        finally:
            db.end_run(run_id, "interrupted" if stop.is_set() else state)
