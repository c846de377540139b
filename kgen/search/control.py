"""Does the GPU stay as it was? `Control` watches one kernel that is timed beside every candidate.

Takes its times in microseconds, gives a sentence when they have moved. Must not import anything
but the standard library.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

#: Times that moved by more than this, in the median of the last ones, are worth a word: candidates
#: before and after are not to be compared but in the finals, which alternate.
DRIFT: Final = 0.05
LAST: Final = 3


class Control:
    """One problem's control kernel; `first_us` is what it took when it was chosen."""

    def __init__(self, first_us: float) -> None:
        self._usual_us = first_us
        self._last: deque[float] = deque(maxlen=LAST)

    def add(self, us: float) -> str:
        """Take note of a time; what to tell the user, or nothing. Each move is told once."""
        self._last.append(us)
        if len(self._last) < LAST:
            return ""
        now_us = median(self._last)
        moved = now_us / self._usual_us - 1
        if abs(moved) <= DRIFT:
            return ""
        told = (
            f"the control kernel takes {now_us:.2f} us, {moved:+.0%} against {self._usual_us:.2f}: "
            "clocks moved, or other work runs on the GPU"
        )
        self._usual_us = now_us
        self._last.clear()
        return told
