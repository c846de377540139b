"""nvcc, run as a child process in a folder of its own.

Takes source text and options, gives cubin (or PTX), log and exit code. No shell, and no path of
the user's in the command: nvcc sees two short relative names, whatever the temporary folder is
called. Must not import anything of kgen but errors.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kgen.errors import CompileError, CompilerMissing

#: Variables by which a user's shell would add flags that no cache key knows of.
_HIDDEN_FLAGS: Final = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
#: How env, like a shell, says that there is no such program or that it is none.
_NOT_RUNNABLE: Final = (126, 127)


@dataclass(frozen=True)
class Output:
    """What one run of nvcc gave: the produced file's bytes (empty if none), and all it printed."""

    data: bytes
    log: str
    exit_code: int
    timed_out: bool = False


def version_text(path: str, timeout_s: float) -> str:
    """What `nvcc --version` prints; possibly nothing."""
    return _run([path, "--version"], tempfile.gettempdir(), timeout_s).log


def compile_to(
    kind: str, path: str, source: str, options: tuple[str, ...], timeout_s: float
) -> Output:
    """Compile `source` to `kind` ("cubin" or "ptx"); a timeout ends nvcc and all its children.

    Raises CompilerMissing when it can not be run, CompileError without room for its files.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="kgen-nvcc-") as folder:
            return _compile_in(folder, kind, path, source, options, timeout_s)
    except OSError as error:
        raise CompileError(f"{path}: no temporary files for it (TMPDIR): {error}") from error


def _compile_in(  # noqa: PLR0917, as in compile_to
    folder: str, kind: str, path: str, source: str, options: tuple[str, ...], timeout_s: float
) -> Output:
    Path(folder, "kgen.cu").write_text(source, encoding="utf-8")
    command = [path, f"-{kind}", *options, "-o", f"kgen.{kind}", "kgen.cu"]
    done = _run(command, folder, timeout_s)
    produced = Path(folder, f"kgen.{kind}")
    data = produced.read_bytes() if produced.is_file() else b""
    return Output(data, done.log, done.exit_code, done.timed_out)


def _run(command: list[str], folder: str, timeout_s: float) -> Output:
    without = [word for name in _HIDDEN_FLAGS for word in ("-u", name)]
    try:
        child = subprocess.Popen(
            ["/usr/bin/env", *without, *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        raise CompilerMissing(f"{command[0]}: can not be run: {error}") from error
    try:
        printed, _ = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill_tree(child)
        return Output(b"", "", -signal.SIGKILL, timed_out=True)
    except BaseException:
        _kill_tree(child)
        raise
    log = printed.decode("utf-8", "replace").rstrip()
    if child.returncode in _NOT_RUNNABLE:
        raise CompilerMissing(f"{command[0]}: can not be run: {log}")
    return Output(b"", log, child.returncode)


def _kill_tree(child: subprocess.Popen[bytes]) -> None:
    """Kill nvcc with the cicc and ptxas it runs. They stay in our process group, so that who kills
    that reaches them too; stopped first, nvcc starts no other while they are listed."""
    if child.poll() is None:
        child.send_signal(signal.SIGSTOP)
        for pid in _descendants(child.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        child.kill()
        child.wait()
    if child.stdout:
        child.stdout.close()


def _descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [d for child in map(int, children) for d in (child, *_descendants(child))]
