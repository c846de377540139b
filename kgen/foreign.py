"""A kernel source that somebody edited: `read_foreign` -> `ForeignSource`.

Takes the text of a file that began as what `kgen render` printed; gives it with the configuration
that its header states, which decides how it is launched: threads, shared memory, clusters, the
boxes of its tensor maps. Never compiles. Must not import compilers, torch or CUDA.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kgen.config import GemmConfig
from kgen.device import Device
from kgen.errors import UsageError
from kgen.problem import GemmProblem
from kgen.render import declared_entries, problem_class
from kgen.validity import why_invalid

#: Rules that were fitted to what compiles without spills: a source by hand may do better.
FITTED_RULES: Final = frozenset({"registers", "accumulators_vector"})
#: Far above any kernel; what is larger is no source.
MAX_BYTES: Final = 4 << 20
_AXIS: Final = re.compile(r"^// (\w+) = (\S+)$")
_CLASS: Final = re.compile(r"^// Problem class: (.+)$")


@dataclass(frozen=True)
class ForeignSource:
    """A source by hand. `sha256` is of the whole text, `name` of its file, for messages."""

    text: str
    sha256: str
    entry: str
    config: GemmConfig
    name: str


def read_foreign(
    path: Path, problem: GemmProblem, device: Device, given: Mapping[str, Any] | None = None
) -> ForeignSource:
    """The source in a file, to be launched for a problem.

    `given` holds values of axes that replace the header's. Raises UsageError for a file that can
    not be read or has no kernel, a header of another class of problems, an axis that neither
    states, and a configuration that can not be launched.
    """
    text = _text_of(path)
    header = _header(text)
    values = _axes(header, path) | dict(given or {})
    if lacking := [name for name in GemmConfig().to_dict() if name not in values]:
        raise UsageError(
            f"{path}: its header does not state {', '.join(lacking)}: begin with what "
            "`kgen render` prints and keep the comment at its top, or give them with --set"
        )
    config = GemmConfig.from_dict(values)
    stated = next((found[1] for line in header if (found := _CLASS.match(line))), None)
    expected = problem_class(problem, config)
    if stated is not None and stated != expected:
        raise UsageError(
            f"{path} is for the problem class [{stated}], and {problem} is of [{expected}]: render "
            "the source for this problem"
        )
    invalid = why_invalid(problem, config, device)
    if invalid and invalid.rule not in FITTED_RULES:
        raise UsageError(f"{path}: {config} can not be launched for {problem}: {invalid.reason}")
    entries = declared_entries(text)
    if len(entries) != 1:
        raise UsageError(
            f"{path}: {len(entries)} kernels that take `const __grid_constant__` arguments; "
            "expected one, as in what `kgen render` prints"
        )
    digest = hashlib.sha256(text.encode()).hexdigest()
    return ForeignSource(text, digest, entries[0], config, path.name)


def _text_of(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path}: {path.stat().st_size} bytes; expected a CUDA source")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} can not be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is no UTF-8 text: {error}") from error


def _header(text: str) -> list[str]:
    """The comment lines at the top."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        lines.append(line.rstrip())
    return lines


def _axes(header: list[str], path: Path) -> dict[str, Any]:
    values = {}
    for line in header:
        if found := _AXIS.match(line):
            try:
                values[found[1]] = GemmConfig.value_of(found[1], found[2])
            except UsageError as error:
                raise UsageError(f"{path}: its header says {error}") from None
    return values
