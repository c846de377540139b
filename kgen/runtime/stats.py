"""What the runtime did: counters, the shapes nobody tuned, warnings given once.

Takes events from dispatch and gemm, gives plain values. Imports the standard library and
`problem` only.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from typing import Any, Final

from kgen.problem import GemmProblem

#: Shapes remembered for `missed_shapes`; a server that sees more is told about the first ones.
_MAX_MISSED: Final = 10000


class KgenWarning(RuntimeWarning):
    """The runtime did something slower than it could: the message says what and why."""


class Stats:
    """Counters since the process started or `reset`; a call with a prepared launch counts nothing.

    compiles, cache_hits      kernels built, and found built in the artifact store
    database_hits             problems that were tuned themselves, or that a dispatch table serves
    tables                    the latter alone
    neighbours                problems served by the winner of another M
    database_misses           problems that were not tuned
    stale                     winners left out: verified as another cubin than today's
    loads, prepared           kernels loaded on a device, launches packed
    fallbacks                 calls the reference answered, by reason
    copies                    matrices copied for a call, by reason
    """

    _NUMBERS: Final = (
        "compiles",
        "cache_hits",
        "database_hits",
        "tables",
        "neighbours",
        "database_misses",
        "stale",
        "loads",
        "prepared",
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self.reset()

    def reset(self) -> None:
        """Start counting anew. What was warned about stays warned about."""
        with self._lock:
            self._numbers = dict.fromkeys(self._NUMBERS, 0)
            self._reasons: dict[str, Counter[str]] = {"fallbacks": Counter(), "copies": Counter()}
            self._missed: dict[GemmProblem, None] = {}

    def after_fork(self) -> None:
        """In a forked child: the parent's lock may have been held by a thread that is not here."""
        self._lock = threading.Lock()

    def add(self, name: str, number: int = 1) -> None:
        """Count an event."""
        with self._lock:
            self._numbers[name] += number

    def add_reason(self, name: str, reason: str) -> None:
        """Count a fallback or a copy by its reason."""
        with self._lock:
            self._reasons[name][reason] += 1

    def miss(self, problem: GemmProblem) -> None:
        """Count a problem that was not tuned, and remember it."""
        with self._lock:
            self._numbers["database_misses"] += 1
            if len(self._missed) < _MAX_MISSED:
                self._missed[problem] = None

    def missed_shapes(self) -> list[str]:
        """The problems that were not tuned, as lines of a shapes file."""
        with self._lock:
            return [str(problem) for problem in self._missed]

    def snapshot(self) -> dict[str, Any]:
        """Every counter by its name; `fallbacks` and `copies` by reason."""
        with self._lock:
            reasons = {name: dict(counter) for name, counter in self._reasons.items()}
            return {**self._numbers, **reasons}

    def warn_once(self, key: str, message: str) -> None:
        """Give a KgenWarning unless one with this key was given before."""
        with self._lock:
            if key in self._warned:
                return
            self._warned.add(key)
        warnings.warn(message, KgenWarning, stacklevel=2)
