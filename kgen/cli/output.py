"""What the subcommands print: data on stdout, everything else on stderr.

Takes plain values. Rich is imported when a terminal first needs it.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod


#: Text columns no wider than this are not wrapped where a table is wider than the terminal.
LONGEST_WHOLE: Final = 12


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
    """A table on stdout; columns not in `text_columns` hold figures and stand to the right.

    A terminal gets colours and wrapped cells, anything else whole lines of aligned columns.
    """
    if sys.stdout.isatty():
        _print_rich(headings, rows, title, text_columns)
        return
    lines = [list(headings), *map(list, rows)] if any(headings) else [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if title:
        data(title)
    for line in lines:
        cells = [
            cell.ljust(width) if index in text_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        data("  ".join(cells).rstrip())


def _print_rich(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str,
    text_columns: Sequence[int],
) -> None:
    from rich.table import Table
    from rich.text import Text

    columns = list(zip(headings, *rows, strict=True))
    grid = Table(title=Text(title) if title else None, title_justify="left", box=None)
    grid.pad_edge = False
    grid.show_header = any(headings)
    for index, heading in enumerate(headings):
        text = index in text_columns
        justify: JustifyMethod = "left" if text else "right"
        whole = not text or max(map(len, columns[index])) <= LONGEST_WHOLE
        grid.add_column(Text(heading), justify=justify, no_wrap=whole, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    console(sys.stdout).print(grid)


def console(stream: Any) -> Console:
    """A rich console on a terminal: it takes the window's width, and no colours if NO_COLOR."""
    from rich.console import Console

    return Console(file=stream, highlight=False)


def log_to_stderr(level: str) -> None:
    """Send warnings and the log of kgen's modules to stderr."""
    logging.basicConfig(level=level.upper(), format="kgen: %(levelname)s: %(message)s")
    logging.captureWarnings(True)


def microseconds(value: float | None) -> str:
    """A time for a table: three figures at least, an en dash for none."""
    if value is None:
        return "–"
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"


def spread(low_us: float | None, high_us: float | None) -> str:
    """A range of times for a table, an en dash for none."""
    if low_us is None or high_us is None:
        return "–"
    return f"{microseconds(low_us)}–{microseconds(high_us)}"


def count(number: int, what: str) -> str:
    """A number and its noun, in the plural where it is one."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
