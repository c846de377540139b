"""How a run is told to end: `StopFlag`, and the signals that raise it.

Takes nothing, gives a flag that waiting loops look at. Must not import anything of kgen.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopFlag:
    """A flag without a lock, unlike threading.Event: a signal handler may set it at any point."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Ask the run to end as soon as it can."""
        self._is_set = True

    def is_set(self) -> bool:
        """Whether the run was asked to end."""
        return self._is_set


@contextmanager
def stopped_by_signals(stop: StopFlag) -> Iterator[None]:
    """Ctrl-C and SIGTERM set the flag; a second one interrupts at once, as without this.

    Outside the main thread, where Python delivers no signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    previous = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
