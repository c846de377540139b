"""`kgen doctor`: what kgen finds on this machine, what is missing, and how to mend it.

Takes the settings, gives a table (or JSON) on stdout. Writes nothing and compiles at most one
empty kernel.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

import kgen
from kgen.cli.arguments import OK, Commands, add_command, add_surroundings
from kgen.cli.output import data, data_json, note, table
from kgen.errors import KgenError
from kgen.settings import Settings

MORE = """\
Nothing is written. A missing GPU is no failure: kgen then compiles and predicts. The exit code
is 1 when something is missing that `kgen tune` can not do without."""

FOUND: Final = "found"
ABSENT: Final = "absent"
BROKEN: Final = "broken"
PACKAGES: Final = ("jinja2", "numpy", "torch", "optuna", "sqlalchemy", "cuda-bindings")


@dataclass(frozen=True)
class Finding:
    """One thing looked for. `state`: found, absent (kgen does without), broken (it can not)."""

    name: str
    state: str
    what: str
    fix: str = ""


def add_parser(commands: Commands) -> None:
    """Add `kgen doctor`."""
    parser = add_command(commands, "doctor", "tell what is found here and what is missing", MORE)
    add_surroundings(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Print the findings; 1 when something indispensable is broken."""
    findings = examine(settings)
    if args.json:
        data_json([asdict(finding) for finding in findings])
    else:
        rows = [(f.name, f.state, f.what) for f in findings]
        table(("", "", ""), rows, text_columns=(0, 1, 2))
        for finding in findings:
            if finding.fix:
                data(f"\n{finding.name}: {finding.fix}")
    broken = [finding.name for finding in findings if finding.state == BROKEN]
    if broken:
        note(f"broken: {', '.join(broken)}")
    return 1 if broken else OK


def examine(settings: Settings) -> list[Finding]:
    """Everything looked for, in the order in which kgen needs it. Raises nothing."""
    checks: tuple[Callable[[Settings], Iterator[Finding]], ...] = (
        _python,
        _packages,
        _compilers,
        _disassembler,
        _gpu,
        _cache,
        _database,
    )
    return [finding for check in checks for finding in check(settings)]


def _python(settings: Settings) -> Iterator[Finding]:
    version = platform.python_version()
    yield Finding("kgen", FOUND, f"{kgen.__version__} in {Path(kgen.__file__).parent}")
    yield Finding("python", FOUND, f"{version} on {platform.system()} {platform.machine()}")


def _packages(settings: Settings) -> Iterator[Finding]:
    for name in PACKAGES:
        try:
            yield Finding(name, FOUND, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(name, BROKEN, "not installed", f"pip install {name}")


def _compilers(settings: Settings) -> Iterator[Finding]:
    from kgen.toolchain import default_compiler, search_compilers

    search = search_compilers(settings)
    for compiler in search.found:
        yield Finding("compiler", FOUND, f"{compiler.id} ({compiler.path})")
    for text in search.missing:
        yield Finding("compiler", ABSENT, text)
    try:
        yield Finding("compiler used", FOUND, default_compiler(settings, driver_cuda()).id)
    except KgenError as error:
        fix = "pip install 'cuda-python[all]', or set KGEN_COMPILER to one that was found"
        yield Finding("compiler used", BROKEN, str(error), fix)


def driver_cuda() -> tuple[int, int] | None:
    """The CUDA version (major, minor) that the GPU's driver serves, or None without one."""
    from kgen.runtime.driver import driver_version

    try:
        return driver_version()
    except KgenError:
        return None


def _disassembler(settings: Settings) -> Iterator[Finding]:
    from kgen.disasm import find_nvdisasm

    try:
        yield Finding("nvdisasm", FOUND, str(find_nvdisasm()))
    except KgenError:
        fix = "for `kgen show --sass`: pip install nvidia-cuda-nvdisasm"
        yield Finding("nvdisasm", ABSENT, "not found", fix)


def _gpu(settings: Settings) -> Iterator[Finding]:
    from kgen.runtime.driver import device_facts

    try:
        device = device_facts(0)
    except KgenError as error:
        fix = "without a Hopper GPU `kgen tune` compiles and predicts; nothing is measured"
        yield Finding("gpu", ABSENT, str(error), fix)
        return
    facts = (
        f"{device.name}, {device.arch}, {device.num_sms} SMs, "
        f"driver for CUDA {device.driver_version}"
    )
    if device.is_hopper:
        yield Finding("gpu", FOUND, facts)
    else:
        fix = "kgen's kernels run on compute capability 9.0 only: H100, H200, GH200"
        yield Finding("gpu", ABSENT, facts, fix)


def _cache(settings: Settings) -> Iterator[Finding]:
    folder = settings.cache_dir
    if reason := why_not_writable(folder):
        fix = (
            "nothing compiled is kept; set --cache or KGEN_CACHE_DIR to a folder that you may write"
        )
        yield Finding("cache", ABSENT, f"{folder}: {reason}", fix)
    else:
        yield Finding(
            "cache", FOUND, f"{folder}{'' if os.path.exists(folder) else ' (not made yet)'}"
        )


def why_not_writable(folder: Path) -> str | None:
    """Why nothing can be written in a folder, made or not, or None; tries nothing out."""
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not existing.is_dir():
        return f"{existing} is not a folder"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} can not be written"
    return None


def _database(settings: Settings) -> Iterator[Finding]:
    from kgen.cache.db import TuningDatabase

    url = settings.db_url
    path = settings.db_path or Path(url.removeprefix("sqlite:///"))
    is_file = settings.db_path or url.startswith("sqlite:///")
    if is_file and not os.path.exists(path):
        reason = why_not_writable(path.parent)
        state, what = (BROKEN, reason) if reason else (FOUND, "not made yet")
        fix = "set --db or KGEN_DB to a place that you may write" if reason else ""
        yield Finding("database", state, f"{path} ({what})", fix)
        return
    try:
        with closing(TuningDatabase.open(url, create=False, readonly=True)) as database:
            yield Finding("database", FOUND, f"{database.where}: {_trials(database.counts())}")
    except KgenError as error:
        yield Finding("database", BROKEN, str(error))


def _trials(counts: dict[str, int]) -> str:
    some = [f"{number} {status}" for status, number in counts.items() if number]
    return f"trials: {', '.join(some) or 'none'}"
