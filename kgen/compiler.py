"""Compile CUDA C++ to an sm_90a cubin, by NVRTC or by nvcc, behind one interface.

Takes source text, gives the cubin with its log and resources, or raises CompileError. A build
that spills, or whose WGMMA or setmaxnreg the assembler did not honour, is a failed build.
Never launches anything. Must not import render, sass, cache, torch or the CUDA driver.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Final

from kgen import elf, nvcc, nvrtc
from kgen.errors import CompileError, SassError
from kgen.toolchain import (
    ARCH,
    Compiler,
    Search,
    default_compiler,
    find_compilers,
    search_compilers,
    why_not_loadable,
)

__all__ = [
    "ARCH",
    "Compiled",
    "Compiler",
    "Search",
    "compile_source",
    "default_compiler",
    "find_compilers",
    "ptx_source",
    "search_compilers",
    "why_not_loadable",
]

DEFAULT_TIMEOUT_S: Final = 120.0
#: Messages of ptxas that mean: assembled, but not as written. C7508: setmaxnreg ignored; C7510
#: to C7515: WGMMA serialised. They are mere information in its log. Both have more variants than
#: codes are known for, so the words count too.
REFUSED_CODES: Final = ("C7508", "C7510", "C7511", "C7512", "C7513", "C7514", "C7515")
_REFUSED: Final = re.compile(
    rf"\b({'|'.join(REFUSED_CODES)})\b|'setmaxnreg' ignored|instructions are serialized"
)
_FRAME: Final = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)


@dataclass(frozen=True)
class Compiled:
    """A cubin and what the assembler said of it. Registers, spills and stack are per thread,
    static shared memory per block."""

    cubin: bytes
    log: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    smem_static_bytes: int
    seconds: float


def compile_source(
    text: str,
    compiler: Compiler,
    arch: str = ARCH,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    entry: str = "kgen_gemm",
) -> Compiled:
    """Compile a source whose kernel is `entry`.

    Raises CompileError, with the log, for a refusal, a timeout, no output, a spill, or code the
    assembler did not honour; CompilerMissing when the compiler is no longer there.
    """
    start = time.monotonic()
    cubin, log = _produce("cubin", text, compiler, arch, timeout_s)
    if refused := next((line for line in log.splitlines() if _REFUSED.search(line)), None):
        raise CompileError(f"{compiler.id}: {refused.strip()}", log)
    spill_bytes, stack_bytes = _frame(compiler, log)
    if spill_bytes:
        raise CompileError(f"{compiler.id}: {spill_bytes} bytes of registers spilled", log)
    try:
        facts = elf.kernel_facts(cubin, entry)
    except SassError as error:
        raise CompileError(f"{compiler.id}: no usable cubin: {error}", log) from error
    return Compiled(
        cubin=cubin,
        log=log,
        registers=facts.registers,
        spill_bytes=spill_bytes,
        stack_bytes=stack_bytes,
        smem_static_bytes=facts.smem_static_bytes,
        seconds=time.monotonic() - start,
    )


def ptx_source(
    text: str, compiler: Compiler, arch: str = ARCH, timeout_s: float = DEFAULT_TIMEOUT_S
) -> str:
    """The PTX that `compiler` makes of a source; raises CompileError with the log."""
    return _produce("ptx", text, compiler, arch, timeout_s)[0].decode("utf-8", "replace")


def _produce(
    kind: str, text: str, compiler: Compiler, arch: str, timeout_s: float
) -> tuple[bytes, str]:
    """The cubin or PTX, and the log; raises CompileError when there is none."""
    if "\0" in text:
        raise CompileError(f"{compiler.id}: the source has a NUL character; it would be cut there")
    options = compiler.flags(arch)
    if compiler.name == "nvrtc":
        made = nvrtc.load(compiler.path).compile(text, options, timeout_s)
        data = made.cubin if kind == "cubin" else made.ptx.encode()
        log, error, timed_out = made.log, made.error, made.timed_out
    else:
        run = nvcc.compile_to(kind, compiler.path, text, options, timeout_s)
        data, log, timed_out = run.data, run.log, run.timed_out
        error = f"exit code {run.exit_code}" if run.exit_code else ""
    if timed_out:
        raise CompileError(f"{compiler.id}: no result after {timeout_s:g} s, given up", log)
    if error or not data:
        what = error or f"succeeded but wrote no {kind}"
        raise CompileError(f"{compiler.id}: {what}\n{log}".rstrip(), log)
    return data, log


def _frame(compiler: Compiler, log: str) -> tuple[int, int]:
    """(spill bytes, stack bytes), the largest of any function; both counts of spills are of the
    same registers, stored and loaded. Without this report a spill would go unseen: refused."""
    frames = [[int(v) for v in match] for match in _FRAME.findall(log)]
    if not frames:
        raise CompileError(f"{compiler.id}: the log does not tell spills:\n{log}", log)
    return max(max(f[1:]) for f in frames), max(f[0] for f in frames)
