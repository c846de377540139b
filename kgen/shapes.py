"""Shapes files: which problems to tune, one a line, written by hand.

Takes a line, or a file in one of three forms chosen by its name (*.csv, *.jsonl, anything else:
lines), gives `ShapeLine` values and writes them back. Must not import torch, CUDA or any
third-party package, and reads nothing but the file it is given.

    line    ::=  kind field=value ...        # the rest of a line after a `#` is a comment
    value   ::=  item,item,...
    item    ::=  number | a..b*f | a..b+s    # geometric and arithmetic ranges, both ends included
    fields  ::=  kind groups m n k recipe a_dtype b_dtype d_dtype bias fast_accum
                 batch_invariant num_sms accumulate weight

`bias`, `fast_accum`, `batch_invariant` and `accumulate` are true or false; a field that is left
out has the default of its kind (`kgen.problem.defaults_of`); any of recipe=none, a_dtype=bf16 and
b_dtype=bf16 stands for all three.

A line stands for every combination of its values. Range ends are whole numbers; a range stops at
the last value that does not pass b. `weight` is one positive number: how much time the user
spends in each of the line's problems.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

from kgen.errors import ShapesError, UsageError
from kgen.problem import FLAGS, NAMES, OPTIONAL, GemmProblem

REQUIRED: Final = ("kind", "m", "n", "k")
FIELDS: Final = (*REQUIRED, *OPTIONAL, "weight")
TEXT_FIELDS: Final = tuple(NAMES)
EXAMPLE: Final = "dense m=64 n=2112 k=7168"
#: More problems than this in one file or line is a slip of the pen, not a plan.
MAX_PROBLEMS: Final = 100_000
#: Largest file read, in bytes: MAX_PROBLEMS lines of 160 characters.
MAX_FILE_BYTES: Final = 16 * 2**20
#: Bad lines spelled out in one error.
MAX_REPORTED: Final = 50
#: Where shapes files come with kgen: in the wheel, and in a checkout.
SHIPPED_DIRS: Final = (
    Path(__file__).parent / "data" / "shapes",
    Path(__file__).parent.parent / "shapes",
)

_NUMBER: Final = re.compile(r"[0-9]{1,18}")
_RANGE: Final = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})([*+])([0-9]{1,18})")

_FLAG_WORDS: Final = ("true", "false")

#: Field name to the values that it stands for on one line.
Fields = Mapping[str, Sequence[Any]]
#: Places and what stands there, as one form of file gives it.
Records = Iterator[tuple[str, Any]]


@dataclass(frozen=True)
class ShapeLine:
    """One problem to tune, its weight, and where it was asked for (`file:line`)."""

    problem: GemmProblem
    weight: float = 1.0
    where: str = "<argument>"


@dataclass(frozen=True)
class Shapes:
    """Distinct problems in order of first appearance, and notes for the user."""

    lines: list[ShapeLine]
    notes: list[str]


class _BadLine(Exception):
    """Why a line can not be used; the caller knows where it stands."""


def parse_line(text: str, where: str = "<argument>") -> list[ShapeLine]:
    """The problems of one line of the grammar, repeated ones included; none for a blank line.

    Raises ShapesError that starts with `where`.
    """
    return _problems(_split_line, text, where) if _content(text) else []


def parse_problem(text: str) -> GemmProblem:
    """The one problem that a line stands for. Raises ShapesError for none or several."""
    lines = parse_line(text, repr(text))
    if len(lines) != 1:
        raise ShapesError(f"{text!r}: {len(lines)} problems; expected one, like {EXAMPLE!r}")
    return lines[0].problem


def load_shapes(path: str | Path) -> Shapes:
    """The problems of a file, duplicates merged and their weights added.

    A bare name that is no file here may name a shipped one (`deepseek_v3`). Raises ShapesError
    for a file that can not be read or holds no problem, and one for all of its bad lines.
    """
    file, data = _read(Path(path))
    records, fields_of = _FORMS.get(file.suffix.lower(), (_line_records, _split_line))
    lines: list[ShapeLine] = []
    errors: list[str] = []
    for where, record in records(_decode(data, file), file):
        try:
            lines += _problems(fields_of, record, where)
        except ShapesError as error:
            errors.append(str(error))
        if len(lines) > MAX_PROBLEMS:
            errors.append(f"{where}: more than {MAX_PROBLEMS} problems up to here: split the file")
            break
    if errors:
        raise ShapesError(_report(errors))
    if not lines:
        raise ShapesError(f"{file}: holds no problem; write lines like {EXAMPLE!r}")
    return merge(lines)


def merge(lines: Iterable[ShapeLine]) -> Shapes:
    """Each problem once, where it came first, with the sum of its weights; a note a line."""
    first: dict[GemmProblem, ShapeLine] = {}
    repeats: dict[str, list[ShapeLine]] = {}
    for line in lines:
        seen = first.setdefault(line.problem, line)
        if seen is line:
            continue
        repeats.setdefault(line.where, []).append(seen)
        first[line.problem] = ShapeLine(line.problem, seen.weight + line.weight, seen.where)
    notes = [_note(where, earlier) for where, earlier in repeats.items()]
    return Shapes(list(first.values()), notes)


def _note(where: str, earlier: list[ShapeLine]) -> str:
    more = f" and {len(earlier) - 1} more" if len(earlier) > 1 else ""
    first = f"{earlier[0].problem}{more} given before ({earlier[0].where})"
    return f"{where}: {first}: tuned once, weights added"


def format_line(line: ShapeLine) -> str:
    """The line of the grammar that stands for this problem and weight alone."""
    return str(line.problem) + (f" weight={line.weight!r}" if line.weight != 1.0 else "")


def format_shapes(lines: Iterable[ShapeLine]) -> str:
    """A shapes file in the line grammar, one problem a line; `load_shapes` gives them back."""
    return "".join(f"{format_line(line)}\n" for line in lines)


def shipped_shapes() -> dict[str, Path]:
    """Name to path of the shapes files that come with kgen."""
    return {p.stem: p for folder in SHIPPED_DIRS for p in sorted(folder.glob("*.txt"))}


def _problems(fields_of: Callable[[Any], Fields], record: Any, where: str) -> list[ShapeLine]:
    try:
        if isinstance(record, _BadLine):  # the reader itself gave up here
            raise record
        return _expand(fields_of(record), where)
    except (_BadLine, UsageError) as error:
        raise ShapesError(f"{where}: {error}") from None


def _content(text: str) -> str:
    return text.split("#", 1)[0].strip()


def _split_line(text: str) -> Fields:
    words = _content(text).split()
    pairs = [("kind", words.pop(0))] if "=" not in words[0] else []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise _BadLine(f"{word!r}: expected field=value, with no blanks inside a value")
        pairs.append((name, value))
    return _text_fields(pairs)


def _text_fields(pairs: Iterable[tuple[str, str]]) -> Fields:
    fields: dict[str, Sequence[Any]] = {}
    for given, value in pairs:
        name = _field_name(given, fields)
        if not value:
            raise _BadLine(f"{name}= has no value")
        fields[name] = _values(name, value)
    return fields


def _field_name(given: str, fields: Fields) -> str:
    name = given.strip().lower()
    if name not in FIELDS:
        raise _BadLine(f"unknown field {given!r}: expected one of {', '.join(FIELDS)}")
    if name in fields:
        raise _BadLine(f"{name} is given twice")
    return name


def _values(name: str, text: str) -> Sequence[Any]:
    if name == "weight":
        return (_weight(text),)
    items = [item.strip() for item in text.split(",")]
    if "" in items:
        raise _BadLine(f"{name}={text!r}: an empty item; write items as a,b,c")
    if name in TEXT_FIELDS:
        return items
    if name in FLAGS:
        return [_flag(name, item) for item in items]
    values: list[int] = []
    for item in items:
        values += _integers(name, item)
        _check_count(name, len(values))
    return values


def _integers(name: str, item: str) -> Sequence[int]:
    if _NUMBER.fullmatch(item):
        return (int(item),)
    found = _RANGE.fullmatch(item)
    if not found:
        wanted = "a whole number, a..b*f or a..b+s, such as 64, 64..512*2, 8..128+8"
        raise _BadLine(f"{name}={item!r}: expected {wanted}")
    first, last, step = int(found[1]), int(found[2]), int(found[4])
    if first > last:
        raise _BadLine(f"{name}={item!r}: the range ends before it begins")
    if found[3] == "+":
        if step < 1:
            raise _BadLine(f"{name}={item!r}: a step of at least 1 is needed")
        _check_count(name, (last - first) // step + 1)
        return range(first, last + 1, step)
    if first < 1 or step < 2:
        raise _BadLine(f"{name}={item!r}: a geometric range needs a start from 1, a factor from 2")
    values = [first]
    while values[-1] * step <= last:
        values.append(values[-1] * step)
    return values


def _flag(name: str, item: str) -> bool:
    if item.lower() not in _FLAG_WORDS:
        raise _BadLine(f"{name}={item!r}: expected true or false")
    return item.lower() == "true"


def _weight(value: Any) -> float:
    try:
        weight = float(value)
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise _BadLine(f"weight={value!r}: expected one number above 0")
    return weight


def _check_count(name: str, count: int) -> None:
    if count > MAX_PROBLEMS:
        raise _BadLine(f"{name}: {count} values, at most {MAX_PROBLEMS}: use larger steps")


def _expand(fields: Fields, where: str) -> list[ShapeLine]:
    missing = [name for name in REQUIRED if name not in fields]
    if missing:
        raise _BadLine(f"{', '.join(missing)} missing: a line needs {', '.join(REQUIRED)}")
    _check_count("all fields together", math.prod(len(values) for values in fields.values()))
    names = [name for name in fields if name != "weight"]
    weight = fields.get("weight", (1.0,))[0]
    combinations = product(*(fields[name] for name in names))
    return [
        ShapeLine(GemmProblem.of(**dict(zip(names, values, strict=True))), weight, where)
        for values in combinations
    ]


# Files: each form has a function that yields (place, record) and one that reads a record.


def _line_records(text: str, file: Path) -> Records:
    for number, line in enumerate(text.split("\n"), 1):
        if _content(line):
            yield f"{file}:{number}", line


def _csv_records(text: str, file: Path) -> Records:
    header: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{file}:{number}"
        if not line.strip(" \t,") or line.lstrip().startswith("#"):
            continue
        try:  # line by line: no value has a line feed, and a stray quote must not eat the rest
            row = next(csv.reader([line], strict=True, skipinitialspace=True))
        except csv.Error as error:
            yield where, _BadLine(f"not readable as CSV: {error}")
            continue
        if header:
            yield where, (header, row)
        else:
            header = _header(row, where)


def _header(row: list[str], where: str) -> list[str]:
    seen: dict[str, Sequence[Any]] = {}
    try:
        for cell in row:
            seen[_field_name(cell, seen)] = ()
    except _BadLine as error:
        raise ShapesError(f"{where}: header: {error}") from None
    missing = [name for name in REQUIRED if name not in seen]
    if missing:
        raise ShapesError(f"{where}: header lacks the columns {', '.join(missing)}")
    return list(seen)


def _row_fields(record: tuple[list[str], list[str]]) -> Fields:
    header, row = record
    if len(row) != len(header):
        raise _BadLine(f'{len(row)} cells under {len(header)} columns; quote a list: "1,16"')
    cells = zip(header, (cell.strip() for cell in row), strict=True)
    return _text_fields((name, cell) for name, cell in cells if cell)


def _json_records(text: str, file: Path) -> Records:
    """One object a line; blank lines and lines that start with `#` are skipped."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield f"{file}:{number}", line


def _json_fields(line: str) -> Fields:
    """Values are numbers, texts in the grammar, or lists of them; null leaves a field out."""
    try:
        pairs = json.loads(line, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"not readable as JSON: {error}") from None
    if not isinstance(pairs, _Pairs):
        raise _BadLine(f"expected an object with the fields {', '.join(FIELDS)}")
    fields: dict[str, Sequence[Any]] = {}
    for given, value in pairs:
        name = _field_name(given, fields)
        if value is not None:
            fields[name] = _json_values(name, value)
    return fields


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as its pairs, so that a repeated field is seen."""


def _json_values(name: str, value: Any) -> Sequence[Any]:
    if name == "weight":
        return (_weight(None if isinstance(value, bool) else value),)
    items = value if type(value) is list and value else [value]
    values: list[Any] = []
    for item in items:
        _check_count(name, len(values))
        kind = str if name in TEXT_FIELDS else bool if name in FLAGS else int
        if isinstance(item, str):
            values += _values(name, item)
        elif type(item) is kind:
            values.append(item)
        else:
            wanted = {str: "a name", bool: "true or false", int: "a whole number"}[kind]
            raise _BadLine(f"{name}={item!r}: expected {wanted}")
    return values


#: File name's end to the readers of its form; every other name means lines.
_FORMS: Final[dict[str, tuple[Callable[[str, Path], Records], Callable[[Any], Fields]]]] = {
    ".csv": (_csv_records, _row_fields),
    ".jsonl": (_json_records, _json_fields),
}


def _read(path: Path) -> tuple[Path, bytes]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        shipped = shipped_shapes()
        if str(path) == path.name and path.suffix in ("", ".txt") and path.stem in shipped:
            return _read(shipped[path.stem])
        raise ShapesError(
            f"{path}: no such file; shapes that come with kgen: {', '.join(shipped) or 'none'}"
        ) from None
    except IsADirectoryError:
        raise ShapesError(f"{path}: is a folder; expected a shapes file") from None
    except (OSError, ValueError) as error:
        raise ShapesError(f"{path}: can not be read: {error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ShapesError(f"{path}: larger than {MAX_FILE_BYTES} bytes: not a shapes file")
    return path, data


def _decode(data: bytes, file: Path) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ShapesError(f"{file}: is UTF-16: save it as UTF-8")
    if b"\0" in data:
        number = data[: data.index(b"\0")].count(b"\n") + 1
        raise ShapesError(f"{file}:{number}: holds a NUL byte: a binary file, not shapes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data[: error.start].count(b"\n") + 1
        raise ShapesError(f"{file}:{number}: not UTF-8 text: {error.reason}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _report(errors: list[str]) -> str:
    shown = errors[:MAX_REPORTED]
    if len(errors) > len(shown):
        shown.append(f"... and {len(errors) - len(shown)} more bad lines")
    return "\n".join(shown)
