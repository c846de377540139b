"""Shapes files written: `to_text` gives what `kgen.shapes.load_shapes` reads back.

Takes shape lines, and comments for some of them; gives the text of a file in one of the forms of
`FORMS`. Must not import torch, CUDA or any third-party package; writes no file but in `save`.
"""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from kgen.problem import OPTIONAL, GemmProblem, defaults_of
from kgen.shapes import ShapeLine, format_line

#: Names of the forms; a file's name ends in one of them, and any other ending means "txt".
FORMS: Final = ("txt", "csv", "jsonl")
_PERMISSIONS: Final = 0o666


def form_of(path: str | Path) -> str:
    """The form that a file's name says."""
    ending = Path(path).suffix.lower().removeprefix(".")
    return ending if ending in FORMS else "txt"


def to_text(
    lines: Iterable[ShapeLine],
    form: str = "txt",
    comments: Mapping[GemmProblem, str] | None = None,
    header: Iterable[str] = (),
) -> str:
    """A shapes file in a form of `FORMS`, opened by the comment lines of `header`.

    In "txt", neighbours that differ in M alone and share weight and comment stand on one line,
    the comment at its end. In "csv" and "jsonl" each problem has a row of its own, and comments
    are lines that start with `#`: kgen passes over them, other readers have to be told.
    """
    said = comments or {}
    lines = list(lines)
    body = {"txt": _text, "csv": _csv, "jsonl": _jsonl}[form](lines, said)
    return "".join(f"{line}\n" for line in [*(f"# {text}".rstrip() for text in header), *body])


def save(path: Path, text: str) -> None:
    """Put a whole file in place at once: a reader sees the former one or this one.

    Makes the folder, and writes to what a link leads to. Raises OSError, and leaves no other file
    behind then.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():  # /dev/stdout and its like are not replaced
        path.write_text(text, encoding="utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(_mode_of(path))
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise


def weight_text(weight: float) -> str:
    """A weight as short as it can be written without losing anything."""
    return str(int(weight)) if weight.is_integer() and weight < 1e15 else repr(weight)


def _mode_of(path: Path) -> int:
    """The permissions of the file there, or of a new one; mkstemp's let nobody else read."""
    try:
        return path.stat().st_mode & 0o777
    except OSError:
        mask = os.umask(0)
        os.umask(mask)
        return _PERMISSIONS & ~mask


def _text(lines: list[ShapeLine], comments: Mapping[GemmProblem, str]) -> Iterator[str]:
    rows = list(_text_rows(lines, comments))
    width = max((len(row) for row, comment in rows if comment), default=0)
    for row, comment in rows:
        yield f"{row.ljust(width)}  # {comment}" if comment else row


def _text_rows(
    lines: list[ShapeLine], comments: Mapping[GemmProblem, str]
) -> Iterator[tuple[str, str]]:
    def alike(line: ShapeLine) -> tuple[GemmProblem, float, str]:
        return line.problem.with_m(1), line.weight, comments.get(line.problem, "")

    for (family, weight, comment), group in groupby(lines, alike):
        rows = ",".join(str(line.problem.m) for line in group)
        row = format_line(ShapeLine(family)).replace("m=1 ", f"m={rows} ", 1)
        yield row + (f" weight={weight_text(weight)}" if weight != 1.0 else ""), comment


def _csv(lines: list[ShapeLine], comments: Mapping[GemmProblem, str]) -> Iterator[str]:
    names = _names(lines)
    yield ",".join(names)
    for comment, group in groupby(lines, lambda line: comments.get(line.problem, "")):
        if comment:
            yield f"# {comment}"
        for line in group:
            buffer = io.StringIO()
            values = _record(line, names).values()
            words = [str(v).lower() if isinstance(v, bool) else v for v in values]
            csv.writer(buffer, lineterminator="").writerow(words)
            yield buffer.getvalue()


def _jsonl(lines: list[ShapeLine], comments: Mapping[GemmProblem, str]) -> Iterator[str]:
    names = _names(lines)
    for comment, group in groupby(lines, lambda line: comments.get(line.problem, "")):
        if comment:
            yield f"# {comment}"
        for line in group:
            yield json.dumps(_record(line, names))


def _names(lines: list[ShapeLine]) -> list[str]:
    """The columns: fields are left out where every problem has the default."""
    used = [
        name
        for name in OPTIONAL
        if any(getattr(p, name) != defaults_of(p.kind)[name] for p in (x.problem for x in lines))
    ]
    return ["kind", "m", "n", "k", *used, "weight"]


def _record(line: ShapeLine, names: list[str]) -> dict[str, Any]:
    whole = line.weight.is_integer() and line.weight < 1e15
    weight = {"weight": int(line.weight) if whole else line.weight}
    return {name: getattr(line.problem, name) for name in names[:-1]} | weight
