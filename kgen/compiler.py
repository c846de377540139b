"""Compile CUDA C++ to an sm_90a cubin, by NVRTC or by nvcc, behind one interface.

Takes source text, gives the cubin with its log and resources, or raises CompileError. A build
that spills, or whose WGMMA or setmaxnreg the assembler did not honour, is a failed build.
Never launches anything. Must not import render, sass, cache, torch or the CUDA driver.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from kgen import elf, nvcc, nvrtc
from kgen.errors import CompileError, CompilerMissing, KgenError

ARCH: Final = "sm_90a"
DEFAULT_TIMEOUT_S: Final = 120.0
_FLAGS: Final = ("-std=c++17", "--ptxas-options=-v")

#: Messages of ptxas that mean: assembled, but not as written. C7508: setmaxnreg ignored;
#: C7510 to C7515: WGMMA serialised.
_REFUSED_CODES: Final = ("C7508", *(f"C75{n}" for n in range(10, 16)))
_REFUSED: Final = re.compile(rf"\b({'|'.join(_REFUSED_CODES)})\b")
_FRAME: Final = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
_PTX_VERSION: Final = re.compile(r"\bV(\d+)\.(\d+)\.(\d+)")


class SettingsLike(Protocol):
    """The part of kgen.settings.Settings that choosing a compiler needs."""

    @property
    def compiler(self) -> str:
        """auto, nvrtc, nvcc, or one of these with the start of a version: nvcc-12.8."""


@dataclass(frozen=True)
class Compiler:
    """One compiler at hand. Plain values: it crosses processes."""

    name: str
    version: tuple[int, ...]
    path: str

    @property
    def id(self) -> str:
        """Name and full version, as cache keys and records hold it: `nvrtc-13.5.37`."""
        return f"{self.name}-{'.'.join(str(v) for v in self.version)}"

    def flags(self, arch: str = ARCH) -> tuple[str, ...]:
        """The options given to this compiler, all that the cubin depends on beside the source."""
        return (f"--gpu-architecture={arch}", *_FLAGS)


@dataclass(frozen=True)
class Compiled:
    """A cubin and what the assembler said of it. Registers, spills and stack are per thread."""

    cubin: bytes
    log: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    smem_static_bytes: int
    seconds: float


@dataclass(frozen=True)
class Search:
    """What looking for compilers brought: those found, best first, and why others were not."""

    found: tuple[Compiler, ...]
    missing: tuple[str, ...]


def search_compilers(settings: SettingsLike) -> Search:
    """Look for every NVRTC and nvcc: Python packages, CUDA_HOME, PATH. Never raises."""
    found: list[Compiler] = []
    missing: list[str] = []
    for name, paths in (("nvrtc", _nvrtc_paths()), ("nvcc", _nvcc_paths(settings))):
        if not paths:
            missing.append(f"{name}: none found")
        for path in paths:
            try:
                found.append(Compiler(name, _version_of(name, path), path))
            except KgenError as error:
                missing.append(f"{name}: {error}")
    found.sort(key=lambda c: (c.name == "nvrtc", c.version), reverse=True)
    return Search(tuple(found), tuple(missing))


def find_compilers(settings: SettingsLike) -> list[Compiler]:
    """The compilers that `settings.compiler` allows, best first; possibly none."""
    found = search_compilers(settings).found
    return [c for c in found if settings.compiler == "auto" or _matches(settings.compiler, c)]


def default_compiler(settings: SettingsLike) -> Compiler:
    """The compiler to use; raises CompilerMissing naming what was searched."""
    allowed = find_compilers(settings)
    if allowed:
        return allowed[0]
    search = search_compilers(settings)
    raise CompilerMissing(
        f"no compiler for KGEN_COMPILER={settings.compiler}; found: "
        f"{', '.join(c.id for c in search.found) or 'none'}; {'; '.join(search.missing)}. "
        "Install NVRTC with: pip install 'cuda-python[all]'"
    )


def _matches(wanted: str, compiler: Compiler) -> bool:
    return compiler.id == wanted or compiler.id.startswith((f"{wanted}-", f"{wanted}."))


def _nvrtc_paths() -> list[str]:
    paths = [
        str(p)
        for root in sys.path
        if root
        for pattern in ("nvidia/cu*/lib/libnvrtc.so.*", "nvidia/cuda_nvrtc/lib/libnvrtc.so.*")
        for p in sorted(Path(root).glob(pattern))
    ]
    return list(dict.fromkeys(paths))


def _nvcc_paths(settings: SettingsLike) -> list[str]:
    home = str(getattr(settings, "cuda_home", ""))
    candidates = [str(Path(home, "bin", "nvcc")) if home else None, shutil.which("nvcc")]
    return list(dict.fromkeys(c for c in candidates if c and Path(c).is_file()))


def _version_of(name: str, path: str) -> tuple[int, ...]:
    if name == "nvcc":
        return nvcc.version(path)
    probe = 'extern "C" __global__ void probe() {}'
    options = (f"--gpu-architecture={ARCH}",)
    output = nvrtc.load(path).compile(probe, options, DEFAULT_TIMEOUT_S)
    match = _PTX_VERSION.search(output.ptx)
    if match is None:
        raise CompilerMissing(f"{path}: can not compile: {output.error} {output.log}".strip())
    return tuple(int(v) for v in match.groups())


def compile_source(
    text: str,
    compiler: Compiler,
    arch: str = ARCH,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    entry: str = "kgen_gemm",
) -> Compiled:
    """Compile a source whose kernel is `entry`; raises CompileError, with the log, for a refusal,
    a timeout, no output, a spill, or code the assembler did not honour."""
    start = time.monotonic()
    cubin, log = _run(text, compiler, arch, timeout_s, "cubin")
    _refuse_bad_code(log, compiler)
    try:
        facts = elf.kernel_facts(cubin, entry)
    except KgenError as error:
        raise CompileError(f"{compiler.id}: unusable output: {error}", log) from error
    spills, stack = _frame_of(log)
    if spills:
        raise CompileError(f"{compiler.id}: {spills} bytes of register spills", log)
    return Compiled(
        cubin=cubin,
        log=log,
        registers=facts.registers,
        spill_bytes=spills,
        stack_bytes=max(stack, facts.stack_bytes),
        smem_static_bytes=facts.smem_static_bytes,
        seconds=time.monotonic() - start,
    )


def ptx_source(text: str, compiler: Compiler, arch: str = ARCH) -> str:
    """The PTX of a source, as `compiler` writes it; raises CompileError."""
    data, _ = _run(text, compiler, arch, DEFAULT_TIMEOUT_S, "ptx")
    return data.decode("utf-8", "replace")


def _run(
    text: str, compiler: Compiler, arch: str, timeout_s: float, kind: str
) -> tuple[bytes, str]:
    """The product of the wanted kind, and the log; raises CompileError when there is none."""
    options = compiler.flags(arch)
    if compiler.name == "nvrtc":
        out = nvrtc.load(compiler.path).compile(text, options, timeout_s)
        data, log, error = (out.cubin if kind == "cubin" else out.ptx.encode()), out.log, out.error
        timed_out = out.timed_out
    else:
        done = nvcc.compile_to(kind, compiler.path, text, options, timeout_s)
        data, log, timed_out = done.data, done.log, done.timed_out
        error = f"exit code {done.exit_code}" if done.exit_code else ""
    if timed_out:
        raise CompileError(f"{compiler.id}: timed out after {timeout_s:g} s", log)
    if error:
        raise CompileError(f"{compiler.id}: {error}\n{log}".rstrip(), log)
    if not data:
        raise CompileError(f"{compiler.id}: succeeded but wrote no {kind}\n{log}".rstrip(), log)
    return data, log


def _refuse_bad_code(log: str, compiler: Compiler) -> None:
    for line in log.splitlines():
        if _REFUSED.search(line):
            raise CompileError(f"{compiler.id}: {line.strip()}", log)


def _frame_of(log: str) -> tuple[int, int]:
    """(spill bytes, stack bytes): the largest of any function in the log."""
    frames = [tuple(int(v) for v in m) for m in _FRAME.findall(log)]
    if not frames:
        raise CompileError("the compiler's log does not report spills; expected ptxas -v", log)
    return max(max(s, t) for _, s, t in frames), max(f for f, _, _ in frames)
