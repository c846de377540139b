"""`kgen tune --log FILE`: one JSON line for each trial, as it goes into the database.

Takes the events of `kgen.search.events`, appends lines to a file. Lines are written at once, so
that another program can follow; a disk that is full costs the log, not the run.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from kgen.cli.output import note
from kgen.errors import UsageError
from kgen.search.events import OnEvent, RunStarted, TrialFinished, TuneEvent


class TrialLog:
    """Writes trials to an open file; events may come from several threads."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._device = ""
        self._is_lost = False

    def __call__(self, event: TuneEvent) -> None:
        """Append the trial that an event tells of."""
        match event:
            case RunStarted():
                self._device = event.device.name
            case TrialFinished():
                self._write(self._values(event))

    def _values(self, event: TrialFinished) -> dict[str, Any]:
        return {
            "date": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "elapsed_s": round(time.monotonic() - self._start, 3),
            "device": self._device,
            "problem": str(event.problem),
            "config": event.config.to_dict(),
            "stage": event.stage,
            "status": event.status,
            "reason": event.reason,
            "median_us": event.median_us,
            "p10_us": event.p10_us,
            "p90_us": event.p90_us,
            "error": event.error,
            "predicted_us": event.predicted_us,
            "best_us": event.best_us,
            "num_trials": event.num_trials,
            "gpu_busy_s": round(event.gpu_busy_s, 3),
        }

    def _write(self, values: dict[str, Any]) -> None:
        with self._lock:
            if self._is_lost:
                return
            try:
                self._file.write(json.dumps(values, allow_nan=False) + "\n")
                self._file.flush()
            except OSError as error:
                self._is_lost = True
                note(f"{self._file.name} takes no more lines ({error.strerror}); the run goes on")


@contextmanager
def logged(path: str | None, on_event: OnEvent) -> Iterator[OnEvent]:
    """`on_event`, and the log of trials before it where a path is given.

    Lines are appended. Raises UsageError for a file that can not be written.
    """
    if path is None:
        yield on_event
        return
    try:
        file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115, closed below
    except OSError as error:
        raise UsageError(f"--log {path} can not be written: {error.strerror}") from error
    log = TrialLog(file)

    def both(event: TuneEvent) -> None:
        log(event)
        on_event(event)

    try:
        yield both
    finally:
        try:
            file.close()
        except OSError as error:
            note(f"{path} is not complete: {error.strerror}")
