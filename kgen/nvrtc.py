"""NVRTC, the CUDA run-time compiler, loaded from a library file.

Takes source text and options, gives what NVRTC gave: cubin, PTX and log. Through ctypes, so that
any NVRTC from 12.0 on can be used, several in one process (the bindings of cuda-python load one,
of their own choice). Must not import anything of kgen but errors.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from kgen.errors import CompilerMissing

_NVRTC_SUCCESS: Final = 0
_CANCEL_TYPE: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


@dataclass(frozen=True)
class Output:
    """What one NVRTC compilation gave; `error` is empty on success, NVRTC's own words if not."""

    cubin: bytes
    ptx: str
    log: str
    error: str
    timed_out: bool = False


class Library:
    """One loaded libnvrtc. Safe to use from several threads."""

    def __init__(self, path: str) -> None:
        """Load the library at `path`; raises CompilerMissing with the loader's message."""
        self.path = path
        try:
            if Path(path).is_absolute():
                # NVRTC opens its builtins by name, and 13.0 does not look beside itself for them.
                for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
                    ctypes.CDLL(str(builtins))
            self._lib = ctypes.CDLL(path)
            self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise CompilerMissing(f"{path}: can not be loaded as NVRTC: {error}") from error

    def compile(self, source: str, options: tuple[str, ...], timeout_s: float) -> Output:
        """Compile; returns after `timeout_s` at the latest.

        NVRTC can not be killed and asks only now and then whether to stop: on a timeout it may
        go on for a while in its thread. Who needs the core back compiles in a child process.
        """
        cancelled = threading.Event()
        results: list[Output | BaseException] = []

        def work() -> None:
            try:
                results.append(self._compile(source, options, cancelled))
            except BaseException as error:
                results.append(error)

        thread = threading.Thread(target=work, name="nvrtc", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if not results:
            cancelled.set()
            return Output(b"", "", "", f"no result after {timeout_s:g} s", timed_out=True)
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0]

    def _compile(self, source: str, options: tuple[str, ...], cancelled: threading.Event) -> Output:
        program = ctypes.c_void_p()
        text = source.encode("utf-8")
        status = self._lib.nvrtcCreateProgram(
            ctypes.byref(program), text, b"kgen.cu", 0, None, None
        )
        if status != _NVRTC_SUCCESS:
            return Output(b"", "", "", self._words(status))
        keep_alive = self._watch(program, cancelled)
        try:
            raw = [o.encode("utf-8") for o in options]
            status = self._lib.nvrtcCompileProgram(
                program, len(raw), (ctypes.c_char_p * len(raw))(*raw)
            )
            log = self._get(program, "ProgramLog").rstrip(b"\0\n").decode("utf-8", "replace")
            if status != _NVRTC_SUCCESS:
                return Output(b"", "", log, self._words(status))
            ptx = self._get(program, "PTX").rstrip(b"\0").decode("utf-8", "replace")
            return Output(self._get(program, "CUBIN"), ptx, log, "")
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))
            del keep_alive

    def _watch(self, program: ctypes.c_void_p, cancelled: threading.Event) -> Callable[..., Any]:
        """Let `cancelled` stop the compilation (NVRTC 12.8 and newer ask; older ones do not)."""
        callback = _CANCEL_TYPE(lambda _payload, _reserved: int(cancelled.is_set()))
        if hasattr(self._lib, "nvrtcSetFlowCallback"):
            self._lib.nvrtcSetFlowCallback(program, callback, None)
        return callback

    def _get(self, program: ctypes.c_void_p, what: str) -> bytes:
        """One product of a compilation; empty when NVRTC made none of that kind."""
        size = ctypes.c_size_t()
        if getattr(self._lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)):
            return b""
        buffer = ctypes.create_string_buffer(size.value)
        if getattr(self._lib, f"nvrtcGet{what}")(program, buffer):
            return b""
        return buffer.raw

    def _words(self, status: int) -> str:
        return str(self._lib.nvrtcGetErrorString(status).decode("utf-8", "replace"))


def can_load(name: str) -> bool:
    """Whether the system's loader finds a library of this name."""
    try:
        load(name)
    except CompilerMissing:
        return False
    return True


@cache
def load(path: str) -> Library:
    """The library at `path`, loaded once a process."""
    return Library(path)
