"""A spawned process that answers calls and may die: `Child` here, `serve` over there.

Takes the name of a factory ("module:function") and its keyword arguments; gives the results of
the service's methods, or raises what they raised. The child can be killed at any moment, ends by
itself when its parent is gone, and takes the processes that it started with it. Must not import
torch, CUDA or anything of kgen but `errors`: a child loads only what its factory needs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import queue
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Connection, Pipe
from typing import Any, Final

from kgen.errors import Interrupted, KgenError, WorkerDied, WorkerTimeout
from kgen.search.stop import StopFlag

#: How often a waiting parent looks whether it was told to stop.
POLL_S: Final = 0.1
#: How long a killed process may take to go; the driver tears its context down first.
REAP_S: Final = 30.0
LOG_TAIL_BYTES: Final = 4000
_BOOT: Final = (
    "import sys; sys.path[:] = {path!r}; from kgen.search.child import serve; serve({fd})"
)


class Child:
    """One process with one service in it. Used by one thread at a time.

    Starting returns at once; the first call waits until the service is there. A call that runs
    out of time kills the process. After WorkerDied, WorkerTimeout or Interrupted the child is
    gone (`alive` is False): make another one.
    """

    def __init__(
        self, target: str, options: dict[str, Any], start_timeout_s: float, stop: StopFlag
    ) -> None:
        self._stop = stop
        self.alive = True
        self._ready = False
        self._deadline = time.monotonic() + start_timeout_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the child)
        self._pipe, theirs = Pipe()
        boot = _BOOT.format(path=sys.path, fd=theirs.fileno())
        with theirs:
            # A session of its own: Ctrl-C on the terminal is the parent's to handle, and a kill
            # of the group reaches compilers that the child started.
            self._process = subprocess.Popen(
                [sys.executable, "-c", boot],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._send((target, options))

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until the service stands; raises what its factory raised, or WorkerTimeout."""
        if not self._ready:
            self._receive("starting", self._deadline)
            self._ready = True

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """The result of service.method(*args), within `timeout_s` seconds once it is ready.

        Raises the KgenError that the method raised, WorkerTimeout, WorkerDied, Interrupted, or
        RuntimeError with the child's traceback for anything that was not foreseen.
        """
        self.wait_ready()
        self._send((method, args))
        return self._receive(method, time.monotonic() + timeout_s, timeout_s)

    def kill(self) -> None:
        """End the process and all it started, now."""
        self.alive = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # One that is stuck in the driver holds nothing that a new child needs to start.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_S)
        self._pipe.close()
        self._log.close()

    def _send(self, message: Any) -> None:
        try:
            self._pipe.send(message)
        except OSError:
            raise self._died("before it took a request") from None

    def _receive(self, what: str, deadline: float, limit_s: float | None = None) -> Any:
        try:
            while not self._pipe.poll(POLL_S):
                if self._stop.is_set():
                    self.kill()
                    raise Interrupted(f"stopped while {what} ran")
                if time.monotonic() > deadline:
                    raise self._timed_out(what, limit_s)
            kind, value = self._pipe.recv()
        except (EOFError, OSError):
            raise self._died(f"during {what}") from None
        if kind == "error":
            raise value
        if kind == "unexpected":
            raise RuntimeError(f"in a child process, during {what}:\n{value}")
        return value

    def _timed_out(self, what: str, limit_s: float | None) -> WorkerTimeout:
        tail = self._tail()
        self.kill()
        limit = "its start-up time" if limit_s is None else f"{limit_s:g} s"
        return WorkerTimeout(f"{what} took longer than {limit}; the process was killed{tail}")

    def _died(self, when: str) -> WorkerDied:
        try:
            code = self._process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        tail = self._tail()
        self.kill()
        return WorkerDied(f"the process died {when} ({how}){tail}")

    def _tail(self) -> str:
        """What the child last wrote; pread, since the file's position is the child's too."""
        size = os.fstat(self._log.fileno()).st_size
        start = max(0, size - LOG_TAIL_BYTES)
        text = os.pread(self._log.fileno(), LOG_TAIL_BYTES, start).decode(errors="replace").strip()
        return f": {text}" if text else ""


def load(target: str) -> Any:
    """The object that "module:name" names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def serve(fd: int) -> None:
    """The child's whole life: build the service, answer calls one by one, end with the parent."""
    faulthandler.enable()
    # Candidates crash as a matter of course, and a core of a process with a GPU is gigabytes.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipe = Connection(fd)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(pipe, requests), daemon=True).start()
    target, options = requests.get()
    service = None

    def start() -> None:
        nonlocal service
        service = load(target)(**options)

    pipe.send_bytes(_reply(start))
    while True:
        method, args = requests.get()
        pipe.send_bytes(_reply(getattr(service, method), *args))
        del args


def _read_requests(pipe: Connection, requests: queue.SimpleQueue[Any]) -> None:
    """Feed the main thread; the parent's end closes when it dies, even while a kernel hangs."""
    try:
        while True:
            requests.put(pipe.recv())
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


def _reply(function: Any, *args: Any) -> bytes:
    """The call's outcome as bytes. Exceptions travel without their tracebacks, which would keep
    tensors alive."""
    try:
        return pickle.dumps(("value", function(*args)))
    except KgenError as error:
        return pickle.dumps(("error", error))
    except Exception:
        return pickle.dumps(("unexpected", traceback.format_exc()))
