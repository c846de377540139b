"""What the subcommands print: data on stdout, everything else on stderr.

Takes plain values; the only module that knows rich, which is imported when first used.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console

#: Columns of a table that no terminal limits: nothing is cut or wrapped in a file or a pipe.
UNLIMITED: Final = 10_000


def complain(message: str) -> None:
    """An error, on stderr."""
    print(f"kgen: error: {message}", file=sys.stderr)


def note(message: str) -> None:
    """Something worth knowing, on stderr."""
    print(f"kgen: {message}", file=sys.stderr)


def data(text: str) -> None:
    """A result, on stdout, ending in exactly one line feed."""
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")


def data_json(value: Any) -> None:
    """A result as JSON, on stdout."""
    data(json.dumps(value, indent=2, default=str, allow_nan=False))


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    text_columns: Sequence[int] = (0,),
) -> None:
    """A table on stdout; columns not in `text_columns` hold figures and stand to the right."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=Text(title) if title else None, title_justify="left", box=None)
    grid.pad_edge = False
    grid.padding = (0, 2, 0, 0)
    for index, heading in enumerate(headings):
        text = index in text_columns
        grid.add_column(Text(heading), justify="left" if text else "right", no_wrap=not text)
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    console(sys.stdout).print(grid)


def console(stream: Any) -> Console:
    """A rich console on a stream: colours and the window's width on a terminal, else plain."""
    from rich.console import Console

    terminal = stream.isatty()
    return Console(file=stream, width=None if terminal else UNLIMITED, highlight=False)


def log_to_stderr(level: str) -> None:
    """Send warnings and the log of kgen's modules to stderr."""
    logging.basicConfig(level=level.upper(), format="kgen: %(levelname)s: %(message)s")
    logging.captureWarnings(True)


def microseconds(value: float | None) -> str:
    """A time for a table: three figures at least, an en dash for none."""
    if value is None:
        return "–"
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"
