"""What `--against` asks for: torch, triton, and packages in folders under names of one's own.

Takes the command line's words, gives `Against` values. Imports nothing heavy: a slip of the pen is
told before torch is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kgen.errors import UsageError

#: Peers that need no folder.
BUILT_IN: Final = ("torch", "triton")
EXPECTED: Final = "torch, triton, or NAME=DIR with the folder of a peer's package"
_NAME: Final = re.compile(r"[A-Za-z][\w.@+-]*")
_TAKEN: Final = ("kgen", *BUILT_IN)


@dataclass(frozen=True)
class Against:
    """A peer asked for: one of BUILT_IN, or the package in `folder`."""

    name: str
    folder: Path | None = None

    @property
    def alias(self) -> str:
        """The module name under which the package is imported."""
        return "kgen_peer_" + re.sub(r"\W", "_", self.name)


def parse_against(words: Iterable[str]) -> tuple[Against, ...]:
    """The peers of comma-separated words, each once, in order. Raises UsageError."""
    found: dict[str, Against] = {}
    for text in (part.strip() for word in words for part in word.split(",")):
        one = _parse(text)
        if found.setdefault(one.name, one) != one:
            raise UsageError(f"--against: {one.name} stands for two folders")
    return tuple(found.values())


def _parse(text: str) -> Against:
    if text in BUILT_IN:
        return Against(text)
    name, equals, folder = text.partition("=")
    if not equals or not folder:
        raise UsageError(f"--against {text!r}: expected {EXPECTED}")
    if not _NAME.fullmatch(name) or name in _TAKEN:
        raise UsageError(
            f"--against {text!r}: {name!r} can not be a name; expected letters, digits, . _ @ + -, "
            f"a letter first, and none of {', '.join(_TAKEN)}"
        )
    return Against(name, Path(folder).expanduser())
