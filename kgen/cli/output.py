"""What the subcommands print: data on stdout, everything else on stderr.

Takes plain values. Rich is imported when a terminal first needs it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod


#: Text columns no wider than this are not wrapped where a table is wider than the terminal.
LONGEST_WHOLE: Final = 12
#: Blanks between columns.
COLUMN_GAP: Final = 2


class OutputError(Exception):
    """Standard output takes nothing more: a full disk, for one. A reader that left is no error."""


def prepare_streams() -> None:
    """Have stdout and stderr exist, and take what their encoding has no letter for (µ, –)."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started this process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace" if name == "stdout" else "backslashreplace")


def complain(message: str) -> None:
    """An error, on stderr."""
    _say(f"kgen: error: {message}")


def note(message: str) -> None:
    """Something worth knowing, on stderr."""
    _say(f"kgen: {message}")


def _say(line: str) -> None:
    with suppress(OSError):  # work goes on when nobody reads of it
        print(line, file=sys.stderr, flush=True)


def data(text: str) -> None:
    """A result, on stdout, ending in exactly one line feed. Raises OutputError."""
    with _writing():
        sys.stdout.write(text if text.endswith("\n") else f"{text}\n")


def flush() -> None:
    """Write out what is buffered. Raises OutputError."""
    with _writing():
        sys.stdout.flush()


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"standard output can not be written: {error.strerror}") from error


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

    A terminal gets colours and wrapped cells, anything else whole lines of aligned columns. Where
    a table is wider than the terminal, its long texts stand in a second one below.
    """
    lines = [list(headings), *map(list, rows)] if any(headings) else [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if sys.stdout.isatty():
        for columns in _parts(widths, text_columns):
            some = [[line[index] for index in columns] for line in (headings, *rows)]
            texts = [place for place, index in enumerate(columns) if index in text_columns]
            _print_rich(some[0], some[1:], title, texts)
            title = ""
        return
    if title:
        data(title)
    for line in lines:
        cells = [
            cell.ljust(width) if index in text_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        data((" " * COLUMN_GAP).join(cells).rstrip())


def _parts(widths: Sequence[int], text_columns: Sequence[int]) -> list[list[int]]:
    """The columns of each table that one table becomes on this terminal: all, or figures first."""
    every = list(range(len(widths)))
    long = [index for index in text_columns if index and widths[index] > LONGEST_WHOLE]
    figures = [index for index in every if index not in long]
    fits = sum(widths) + COLUMN_GAP * (len(widths) - 1) <= console(sys.stdout).width
    if fits or not long or set(figures) <= set(text_columns):
        return [every]
    return [figures, [0, *long]]


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
