"""nvcc, run as a child process in a folder of its own.

Takes source text and options, gives cubin (or PTX), log and exit code. No shell, and no path of
the user's in the command: nvcc sees two short relative names, whatever the temporary folder is
called. Must not import anything of kgen but errors.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kgen.errors import CompilerMissing

#: Variables by which a user's shell would add flags that no cache key knows of.
_HIDDEN_FLAGS: Final = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
_VERSION: Final = re.compile(r"\bV(\d+)\.(\d+)\.(\d+)")
_VERSION_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True)
class Output:
    """What one run of nvcc gave: the produced file's bytes (empty if none), and all it printed."""

    data: bytes
    log: str
    exit_code: int
    timed_out: bool = False


def version(path: str) -> tuple[int, int, int]:
    """The version that `nvcc --version` prints; raises CompilerMissing saying why there is none."""
    done = _run([path, "--version"], None, _VERSION_TIMEOUT_S)
    match = _VERSION.search(done.log)
    if done.timed_out or done.exit_code or match is None:
        how = "timed out" if done.timed_out else f"exit code {done.exit_code}"
        raise CompilerMissing(
            f"{path}: `nvcc --version` gave no version ({how}): {done.log[:300]!r}"
        )
    major, minor, patch = (int(x) for x in match.groups())
    return major, minor, patch


def compile_to(
    kind: str, path: str, source: str, options: tuple[str, ...], timeout_s: float
) -> Output:
    """Compile `source` to `kind` ("cubin" or "ptx"); a timeout ends nvcc and all its children."""
    with tempfile.TemporaryDirectory(prefix="kgen-nvcc-") as folder:
        Path(folder, "kgen.cu").write_text(source, encoding="utf-8")
        command = [path, f"-{kind}", *options, "-o", f"kgen.{kind}", "kgen.cu"]
        done = _run(command, folder, timeout_s)
        produced = Path(folder, f"kgen.{kind}")
        data = produced.read_bytes() if produced.is_file() else b""
        return Output(data, done.log, done.exit_code, done.timed_out)


def _run(command: list[str], folder: str | None, timeout_s: float) -> Output:
    without = [word for name in _HIDDEN_FLAGS for word in ("-u", name)]
    try:
        child = subprocess.Popen(
            ["/usr/bin/env", *without, *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise CompilerMissing(f"{command[0]}: can not be run: {error}") from error
    try:
        printed, _ = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _end(child)
        return Output(b"", f"no result after {timeout_s:g} s", -signal.SIGKILL, timed_out=True)
    except BaseException:
        _end(child)
        raise
    return Output(b"", printed.decode("utf-8", "replace").rstrip(), child.returncode)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill nvcc with the cicc and ptxas it started: they share its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
