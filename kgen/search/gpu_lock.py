"""One kernel is timed on a GPU at a time, whoever tunes: `GpuLock`, a file lock per device.

Takes the device's UUID, gives a context manager. Must not import torch or CUDA.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kgen.errors import GpuMissing, Interrupted
from kgen.search.stop import StopFlag

_POLL_S: Final = 0.005
#: A wait this long is worth a word to the user.
_NOTICE_S: Final = 1.0


class GpuLock:
    """A lock that every process of every user on this host shares, by the GPU's UUID.

    Held for one candidate at a time, so that two runs advance side by side. Two files make it
    fair: whoever waits for the GPU holds the queue, and who just had the GPU queues again.
    `on_wait` is called once, when another process makes this one wait.
    """

    def __init__(
        self, uuid: str, stop: StopFlag, on_wait: Callable[[], None], folder: str = ""
    ) -> None:
        base = Path(folder or tempfile.gettempdir())
        self._paths = [base / f"kgen-gpu-{uuid}.{part}" for part in ("queue", "lock")]
        self._stop = stop
        self._on_wait: Callable[[], None] | None = on_wait

    @contextmanager
    def held(self) -> Iterator[None]:
        """The GPU to oneself. Raises Interrupted when told to stop while waiting."""
        with _open_file(self._paths[0]) as queue, _open_file(self._paths[1]) as gpu:
            self._acquire(queue)
            self._acquire(gpu)
            fcntl.flock(queue, fcntl.LOCK_UN)
            yield

    def _acquire(self, fd: int) -> None:
        since = time.monotonic()
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            time.sleep(_POLL_S)
            if self._stop.is_set():
                raise Interrupted("stopped while waiting for the GPU")
            if self._on_wait and time.monotonic() - since > _NOTICE_S:
                self._on_wait()
                self._on_wait = None


@contextmanager
def _open_file(path: Path) -> Iterator[int]:
    fd = _open(path)
    try:
        yield fd
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    """The lock file; another user's can only be opened for reading, which a lock accepts.

    Raises GpuMissing where it can be neither made nor opened: without it no time is to be trusted.
    """
    try:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)
        except PermissionError:
            fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise GpuMissing(
            f"{path}, the lock that keeps runs on one GPU apart, can not be opened: "
            f"{error.strerror}; delete it, or set TMPDIR to a folder that all users share"
        ) from error
    with contextlib.suppress(PermissionError):  # another user's
        os.fchmod(fd, 0o666)  # whatever the umask: the other users must be able to open it
    return fd
