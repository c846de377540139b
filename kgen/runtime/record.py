"""Which problems a program calls, and how often: `Recorder`, for KGEN_RECORD and KGEN_MISSES.

Takes problems, gives cells to count their calls in, and keeps shapes files with the numbers of
calls as weights. What a process counted is added to its file every SAVE_EVERY_S seconds and when
it exits, so that processes and runs share one file. Runs that a CUDA graph replays are not seen,
only the call captured.
Must not import torch or CUDA. Importing it reads nothing and starts nothing.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Final

from kgen.errors import ShapesError, UsageError
from kgen.problem import GemmProblem
from kgen.runtime.stats import KgenWarning
from kgen.settings import absolute_path, recordings
from kgen.shape_writer import form_of, save, to_text
from kgen.shapes import MAX_PROBLEMS, ShapeLine, load_shapes

SAVE_EVERY_S: Final = 30.0
#: Longest wait for other processes that write into the same folder.
LOCK_WAIT_S: Final = 5.0
#: Stands for the process's id in the name of a file.
PID: Final = "{pid}"
#: Problems that a process counts; a file of shapes holds twice as many.
MAX_COUNTED: Final = MAX_PROBLEMS // 2


@dataclass
class _Sink:
    """A file, and how many calls of each problem are in it from this process."""

    variable: str
    path: Path
    misses_only: bool
    saved: dict[GemmProblem, int] = field(default_factory=dict)


class Recorder:
    """Counts calls and keeps them in files. Threads may share it; a forked child starts at zero.

    What is asked for is looked up when the first call comes, and again after `reopen`. Where
    nothing is, nothing is counted.
    """

    def __init__(self) -> None:
        self._sinks: list[_Sink] | None = None
        self._cells: dict[GemmProblem, list[int]] = {}
        self._guessed: set[GemmProblem] = set()
        self._warned: set[str] = set()
        self._begin()

    @property
    def is_on(self) -> bool:
        """Whether anything is recorded."""
        return bool(self._opened())

    def cell(self, problem: GemmProblem, guessed: bool) -> list[int] | None:
        """The place, a list of one number, where calls of a problem are counted; None: nowhere.

        `guessed`: a kernel answers that was not tuned for this problem.
        """
        if not self.is_on:
            return None
        with self._lock:
            if problem not in self._cells:
                if len(self._cells) >= MAX_COUNTED:
                    self._warn("many", f"kgen records {MAX_COUNTED} problems and no more")
                    return None
                self._cells[problem] = [0]
            if guessed:
                self._guessed.add(problem)
            if not self._started:
                self._start()
            return self._cells[problem]

    def save(self) -> None:
        """Add to the files what was counted since the last time. Never raises: warns once."""
        with self._saving:
            for sink in self._sinks or ():
                try:
                    self._save(sink)
                except (OSError, ShapesError) as error:
                    self._warn_of(sink, error)

    def reopen(self) -> None:
        """Save, and look up what is asked for when the next call comes."""
        self.save()
        self._stop.set()
        self._forget()

    def after_fork(self) -> None:
        """In a forked child: what the parent counted is the parent's, its threads are not here."""
        self._forget()

    def _forget(self) -> None:
        self._sinks = None
        self._cells, self._guessed = {}, set()
        self._begin()

    def _begin(self) -> None:
        self._lock, self._saving = threading.Lock(), threading.Lock()
        self._stop = threading.Event()
        self._started = False

    def _opened(self) -> list[_Sink]:
        if self._sinks is None:
            record, misses = recordings()
            wanted = (("KGEN_RECORD", record, False), ("KGEN_MISSES", misses, True))
            sinks = [_Sink(name, Path(path), only) for name, path, only in wanted if path]
            self._sinks = [sink for sink in sinks if self._is_usable(sink)]
        return self._sinks

    def _is_usable(self, sink: _Sink) -> bool:
        try:
            sink.path = absolute_path(str(sink.path), sink.variable)  # the program may go elsewhere
        except UsageError as error:
            self._warn_of(sink, error)
            return False
        return True

    def _start(self) -> None:
        self._started = True
        atexit.register(self.save)
        # A forked child of multiprocessing leaves without atexit.
        Finalize(None, self.save, exitpriority=0)
        threading.Thread(target=self._keep, args=(self._stop,), daemon=True).start()

    def _keep(self, stop: threading.Event) -> None:
        while not stop.wait(SAVE_EVERY_S):
            self.save()

    def _save(self, sink: _Sink) -> None:
        with self._lock:
            wanted = self._guessed if sink.misses_only else self._cells
            now = {problem: self._cells[problem][0] for problem in wanted}
        new = {problem: n - sink.saved.get(problem, 0) for problem, n in now.items()}
        new = {problem: n for problem, n in new.items() if n}
        if new:
            add_to(path_of(sink.path), new)
            sink.saved.update(now)

    def _warn_of(self, sink: _Sink, error: Exception) -> None:
        self._warn(sink.variable, f"{sink.variable}={sink.path} can not be kept: {error}")

    def _warn(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, KgenWarning, stacklevel=2)


#: The process's own.
RECORDER: Final = Recorder()
os.register_at_fork(after_in_child=RECORDER.after_fork)


def path_of(pattern: Path) -> Path:
    """This process's file."""
    return pattern.with_name(pattern.name.replace(PID, str(os.getpid())))


def files_of(pattern: Path) -> list[Path]:
    """Every process's file that there is."""
    before, found, after = pattern.name.partition(PID)
    if not found:
        return [pattern] if pattern.exists() else []
    names = (file.name for file in pattern.parent.glob("*"))
    return sorted(
        pattern.with_name(name)
        for name in names
        if name.startswith(before)
        and name.endswith(after)
        and name[len(before) : len(name) - len(after)].isdecimal()
    )


def add_to(path: Path, counts: Mapping[GemmProblem, int]) -> None:
    """Add calls to the weights of a shapes file, which is replaced whole.

    Processes that do so at once wait for each other. Raises OSError, also when they hold the
    folder for LOCK_WAIT_S, and ShapesError for a file that holds something else.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(path.parent):
        weights = dict.fromkeys(counts, 0.0)
        if path.exists() and path.stat().st_size:
            weights |= {line.problem: line.weight for line in load_shapes(path).lines}
        for problem, number in counts.items():
            weights[problem] += number
        lines = sorted_by_weight(ShapeLine(problem, n) for problem, n in weights.items())
        header = ["Calls that kgen served; weight: how many. For `kgen tune --shapes`."]
        save(path, to_text(lines, form_of(path), header=header))


def sorted_by_weight(lines: Iterable[ShapeLine]) -> list[ShapeLine]:
    """Lines by falling weight, then by problem."""
    return sorted(lines, key=lambda line: (-line.weight, line.problem))


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """One process at a time for a folder. The lock is on the folder: it leaves no file behind."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(handle, time.monotonic() + LOCK_WAIT_S)
        yield
    finally:
        with suppress(OSError):
            # Closing alone does not: a child forked meanwhile has the handle too.
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _lock(handle: int, until: float) -> None:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                reason = f"others have been writing into the folder for {LOCK_WAIT_S:g} s"
                raise OSError(errno.EBUSY, reason) from None
            time.sleep(0.01)
        except OSError:
            return  # a file system without locks: the last one to write wins
        else:
            return
