"""Which compilers are at hand: `Compiler`, where to look for one, and what a driver can load.

Takes the settings, gives plain values. Looks into Python's own folders, CUDA_HOME and PATH, and
believes a compiler only once it has compiled an empty kernel. Must not import anything of kgen
but errors, nvcc and nvrtc.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Protocol

from kgen import nvcc, nvrtc
from kgen.errors import CompilerMissing, KgenError

ARCH: Final = "sm_90a"
#: The first CUDA that knows sm_90a.
FIRST_CUDA: Final = 12
NAMES: Final = ("nvrtc", "nvcc")
_PROBE: Final = 'extern "C" __global__ void probe() {}'
_PROBE_TIMEOUT_S: Final = 60.0
#: As `nvcc --version` and the head of a PTX file have it.
_VERSION: Final = re.compile(r"\bV(\d+)\.(\d+)\.(\d+)")
#: Where PyPI's packages put them: CUDA 13 in one folder, CUDA 12 in one per package.
_NVRTC_PATTERNS: Final = ("nvidia/cu*/lib/libnvrtc.so.*", "nvidia/cuda_nvrtc/lib/libnvrtc.so.*")
_NVCC_PATTERNS: Final = ("nvidia/cu*/bin/nvcc",)


class SettingsLike(Protocol):
    """The part of `kgen.settings.Settings` that choosing a compiler needs."""

    @property
    def compiler(self) -> str:
        """auto, nvrtc, nvcc, or one of these with the start of a version: nvcc-12.8."""

    @property
    def cuda_home(self) -> str:
        """Folder of a CUDA toolkit; empty: none."""


@dataclass(frozen=True)
class Compiler:
    """One compiler that works here. Plain values: it crosses processes."""

    name: str
    version: tuple[int, ...]
    path: str

    @property
    def id(self) -> str:
        """Name and full version, as cache keys and records hold it: nvrtc-13.5.37."""
        return f"{self.name}-{'.'.join(str(v) for v in self.version)}"

    def flags(self, arch: str = ARCH) -> tuple[str, ...]:
        """Every option this compiler is given: all that a cubin depends on beside the source."""
        flags: tuple[str, ...] = (f"--gpu-architecture={arch}", "-std=c++17")
        flags += ("--ptxas-options=-v",)
        # From its own cache NVRTC gives a cubin without ptxas' report of registers and spills. The
        # option came with 12.9.
        if self.name == "nvrtc" and self.version >= (12, 9):
            flags += ("--no-cache",)
        return flags


@dataclass(frozen=True)
class Search:
    """What looking for compilers brought: those found, best first, and why others were not."""

    found: tuple[Compiler, ...]
    missing: tuple[str, ...]


def search_compilers(settings: SettingsLike, names: Iterable[str] = NAMES) -> Search:
    """Every NVRTC and nvcc at hand: NVRTC before nvcc, newer before older. Never raises."""
    found: list[Compiler] = []
    missing: list[str] = []
    for name in names:
        candidates = list(_nvrtc_paths() if name == "nvrtc" else _nvcc_paths(settings))
        if not candidates:
            missing.append(f"{name}: not found in {_searched(name, settings)}")
        for path in candidates:
            try:
                found.append(Compiler(name, _working_version(name, path), path))
            except KgenError as error:
                missing.append(f"{name}: {error}")
    found.sort(key=lambda c: (-NAMES.index(c.name), c.version), reverse=True)
    return Search(tuple(found), tuple(missing))


def find_compilers(settings: SettingsLike) -> list[Compiler]:
    """The compilers that `settings.compiler` allows, best first; possibly none."""
    names = [n for n in NAMES if settings.compiler == "auto" or settings.compiler.startswith(n)]
    found = search_compilers(settings, names).found
    return [c for c in found if _is_wanted(settings.compiler, c)]


def default_compiler(
    settings: SettingsLike, driver_cuda: tuple[int, int] | None = None
) -> Compiler:
    """The compiler to use: the best that is allowed and whose cubins the driver can load.

    `driver_cuda` is the CUDA version (major, minor) the driver supports; None where there is no
    GPU. Raises CompilerMissing naming what was searched and why each one found does not do.
    """
    reasons: list[str] = []
    for name in NAMES:
        search = search_compilers(settings, (name,))
        reasons += search.missing
        for compiler in search.found:
            if not _is_wanted(settings.compiler, compiler):
                reasons.append(f"{compiler.id} is another one")
            elif driver_cuda and (reason := why_not_loadable(compiler, driver_cuda)):
                reasons.append(reason)
            else:
                return compiler
    wanted = settings.compiler
    asked = "" if wanted == "auto" else f" as {wanted} (--compiler, KGEN_COMPILER)"
    raise CompilerMissing(
        f"no compiler to use{asked}: {'; '.join(reasons)}. "
        "NVRTC comes with: pip install 'cuda-python[all]'"
    )


def why_not_loadable(compiler: Compiler, driver_cuda: tuple[int, int]) -> str | None:
    """Why the driver can not load this compiler's cubins, or None when it can.

    A cubin loads under every driver of the same CUDA major version (NVIDIA's minor-version
    compatibility) and under newer ones; an older major version refuses it.
    """
    if compiler.version[0] <= driver_cuda[0]:
        return None
    driver, older = ".".join(str(v) for v in driver_cuda), driver_cuda[0] + 1
    other = f", or: pip install 'cuda-python[all]<{older}'" if older > FIRST_CUDA else ""
    return (
        f"{compiler.id}: the GPU's driver supports CUDA {driver} and can not load cubins of "
        f"CUDA {compiler.version[0]}; update the driver{other}"
    )


def _is_wanted(wanted: str, compiler: Compiler) -> bool:
    """Whether `wanted` names this compiler: nvcc-12.8 is nvcc-12.8.93 but not nvcc-12.80.1."""
    return wanted in ("auto", compiler.name) or f"{compiler.id}.".startswith(f"{wanted}.")


def _searched(name: str, settings: SettingsLike) -> str:
    if name == "nvrtc":
        return f"the packages of {sys.prefix}, nor as libnvrtc.so of the system"
    home = f"CUDA_HOME={settings.cuda_home}" if settings.cuda_home else "CUDA_HOME (not set)"
    return f"{home}, on PATH or in the packages of {sys.prefix}"


def _nvrtc_paths() -> Iterator[str]:
    """Libraries in Python's folders; names for the system's loader only where there are none."""
    paths = list(_in_python(_NVRTC_PATTERNS))
    yield from paths
    if not paths:
        yield from (n for n in ("libnvrtc.so.13", "libnvrtc.so.12") if nvrtc.can_load(n))


def _nvcc_paths(settings: SettingsLike) -> Iterator[str]:
    """Each nvcc once, a toolkit that was named before one that lies about."""
    home = Path(settings.cuda_home, "bin", "nvcc") if settings.cuda_home else None
    paths = [str(home)] if home and home.is_file() else []
    paths += [p for p in (shutil.which("nvcc"),) if p]
    paths += _in_python(_NVCC_PATTERNS)
    yield from _distinct(paths)


def _in_python(patterns: tuple[str, ...]) -> Iterator[str]:
    """Files below the folders that Python imports from."""
    roots = [Path(p) for p in (*sys.path, f"{sys.prefix}/lib") if p]
    found = (p for root in roots for pattern in patterns for p in sorted(root.glob(pattern)))
    yield from _distinct(str(p) for p in found)


def _distinct(paths: Iterable[str]) -> Iterator[str]:
    """The first path of each file."""
    seen: set[Path] = set()
    for path in paths:
        real = Path(path).resolve()
        if real not in seen:
            seen.add(real)
            yield path


def _working_version(name: str, path: str) -> tuple[int, ...]:
    """The version of a compiler that compiles; raises CompilerMissing."""
    answer = _probe(name, path, Path(path).stat().st_mtime_ns if Path(path).exists() else 0)
    if isinstance(answer, str):
        raise CompilerMissing(answer)
    return answer


@cache
def _probe(name: str, path: str, mtime_ns: int) -> tuple[int, ...] | str:
    """The version, or what it did instead; asked once a process: one that hangs takes a minute."""
    cubin, said, version = _ask(name, path)
    match = _VERSION.search(version)
    if not cubin or match is None:
        return f"{path}: can not compile an empty kernel: {said.strip()}"
    return tuple(int(v) for v in match.groups())


def _ask(name: str, path: str) -> tuple[bytes, str, str]:
    """An empty kernel's cubin, what the compiler said of it, and text that tells its version."""
    options = (f"--gpu-architecture={ARCH}",)
    if name == "nvrtc":
        output = nvrtc.load(path).compile(_PROBE, options, _PROBE_TIMEOUT_S)
        return output.cubin, f"{output.error} {output.log}", output.ptx
    done = nvcc.compile_to("cubin", path, _PROBE, options, _PROBE_TIMEOUT_S)
    if done.timed_out:
        return b"", f"no result after {_PROBE_TIMEOUT_S:g} s", ""
    version = nvcc.version_text(path, _PROBE_TIMEOUT_S) if done.data else ""
    return done.data, f"exit code {done.exit_code}: {done.log}", version
