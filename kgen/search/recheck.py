"""Do stored winners still hold? `recheck` builds, verifies and times them again on this GPU.

Takes settings and problems, gives `Checked` values, and appends what it saw to the database. Must
not import torch, CUDA or optuna.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass

from kgen.cache.db import TuningDatabase
from kgen.cache.records import TrialRow
from kgen.errors import GpuMissing, KgenError, RenderError, Untunable
from kgen.heuristic import predict_us
from kgen.problem import GemmProblem
from kgen.search.events import TuneOptions
from kgen.search.gpu_worker import GpuWorker
from kgen.search.run import Run, status_of
from kgen.search.stop import StopFlag, stopped_by_signals
from kgen.search.tune import Opening
from kgen.settings import Settings
from kgen.validity import why_invalid


@dataclass(frozen=True)
class Checked:
    """A winner, looked at again.

    status    "ok", or why it failed: one of records.STATUSES, "untunable", "invalid"
    stale     its cubin is not what is built today: the new one was checked, under the new key
    now_us    the new median, in microseconds; None where it failed, for `reason`
    """

    row: TrialRow
    status: str
    stale: bool = False
    now_us: float | None = None
    reason: str = ""


def recheck(
    settings: Settings,
    problems: Collection[GemmProblem] | None = None,
    on_checked: Callable[[Checked], None] = lambda checked: None,
    options: TuneOptions | None = None,
) -> list[Checked]:
    """Check the winners of this device, or those of some problems, and record what came of it.

    Raises GpuMissing where there is no GPU to check on, and DatabaseError.
    """
    options = options or TuneOptions()
    stop = StopFlag()
    found: list[Checked] = []
    with ExitStack() as stack:
        stack.enter_context(stopped_by_signals(stop))
        db = TuningDatabase.open(settings.db_url, create=False)
        stack.callback(db.close)
        opening = Opening(settings, options, lambda event: None, stop, stack)
        machine = opening.find_gpu()
        if machine.gpu is None or machine.hello is None:
            raise GpuMissing(
                f"winners are checked on a GPU, and there is none here: {machine.reason}"
            )
        device = machine.hello.device
        winners = db.winners(device.name, device.num_sms)
        wanted = [r for r in winners if problems is None or r.problem in problems]
        run_id = db.begin_run("verify", {"started": time.time(), "winners": len(wanted)}).id
        state = "failed"
        try:
            run = opening.make_run(db, run_id, machine)
            for row in wanted:
                run.check_stop()
                found.append(_check(run, machine.gpu, row))
                on_checked(found[-1])
            state = "finished"
        finally:
            db.end_run(run_id, "interrupted" if stop.is_set() else state)
    return found


def _check(run: Run, gpu: GpuWorker, row: TrialRow) -> Checked:
    """Build, verify and time one winner, and record it."""
    problem, config = row.problem, row.config
    if why := why_invalid(problem, config, run.device):
        return Checked(row, "invalid", True, reason=str(why))
    try:
        stale = run.key(problem, config) != row.cubin_key
    except RenderError as error:
        return Checked(row, "invalid", True, reason=str(error))
    try:
        cubin = run.builder.build(problem, config)
        (measured,) = gpu.measure(problem, [cubin], row.policy)
    except GpuMissing:
        raise
    except Untunable as error:
        return Checked(row, "untunable", stale, reason=str(error))
    except KgenError as error:
        status = status_of(error)
        run.record_failure(problem, config, status, str(error))
        return Checked(row, status, stale, reason=str(error))
    predicted_us = predict_us(problem, config, run.device)
    run.record_ok(problem, cubin, measured, predicted_us, "verify")
    return Checked(row, "ok", stale, measured.median_us)
