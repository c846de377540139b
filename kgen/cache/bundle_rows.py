"""Rows as lines of a bundle and back: only what kgen could have written passes.

Takes tuples in the order of a table's columns, gives lines of JSON; takes lines, gives tuples that
were checked value by value and as a record. Knows no files and no database.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from math import isfinite
from typing import Any, Final

from sqlalchemy import JSON, Boolean, Float, Integer

from kgen.cache import rows
from kgen.cache.connect import to_json
from kgen.cache.container import parse_json
from kgen.cache.records import RUN_STATES
from kgen.cache.transfer import COLUMNS, TABLES, Raw
from kgen.errors import BundleError, DatabaseError, UsageError

#: Letters of a text, and of a plain one: reasons and command lines may break lines and be long.
MAX_TEXT: Final = 1 << 16
MAX_PLAIN: Final = 1024
_LOOSE: Final = frozenset({"reason", "command"})
_DATES: Final = frozenset({"date", "started", "heartbeat", "ended"})
#: SQLite's and PostgreSQL's 64-bit integers.
_MAX_INT: Final = 2**63 - 1


def _kind(column: Any) -> str:
    for kind, name in ((Boolean, "flag"), (Integer, "int"), (Float, "float"), (JSON, "json")):
        if isinstance(column.type, kind):
            return name
    return "text"


_KINDS: Final = {
    name: tuple((c.name, _kind(c), bool(c.nullable)) for c in table.columns)
    for name, table in TABLES.items()
}


def _places(wanted: str) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(place for place, (_, kind, _) in enumerate(kinds) if kind == wanted)
        for name, kinds in _KINDS.items()
    }


_JSON_PLACES: Final = _places("json")
_FLOAT_PLACES: Final = _places("float")


def to_lines(name: str, found: Iterable[Raw]) -> Iterator[bytes]:
    """A line for each row, its line feed included. Raises DatabaseError for a damaged row."""
    places = _JSON_PLACES[name]
    for row in found:
        values = list(row)
        try:
            for place in places:
                if values[place] is not None:
                    values[place] = json.loads(values[place])
            yield json.dumps(values, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise DatabaseError(f"row {row[0]} of {name} is damaged: {error}") from error


def from_lines(name: str, lines: Iterable[bytes], where: str) -> Iterator[Raw]:
    """The row of each line, as `transfer.raw_rows` gives it.

    Raises BundleError, naming `where` and the line, for a row that kgen could not have written.
    """
    for number, line in enumerate(lines, 1):
        yield _from_line(name, line, f"{where}: line {number} of {name}")


def again(name: str, lines: Iterable[bytes]) -> Iterator[Raw]:
    """As `from_lines`, of lines that passed it before; raises BundleError where they changed."""
    floats, places = _FLOAT_PLACES[name], _JSON_PLACES[name]
    for line in lines:
        try:
            values = json.loads(line)
            for place in floats:
                if values[place] is not None:
                    values[place] = float(values[place])
            for place in places:
                if values[place] is not None:
                    values[place] = to_json(values[place])
            row = tuple(values)
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise BundleError(f"a bundle was altered while it was read: {error}") from error
        yield row


def _from_line(name: str, line: bytes, what: str) -> Raw:
    values = parse_json(line, what)
    kinds = _KINDS[name]
    if not isinstance(values, list) or len(values) != len(kinds):
        raise BundleError(f"{what}: expected a list of {len(kinds)} values")
    checked = [_checked(value, *kind, what=what) for value, kind in zip(values, kinds, strict=True)]
    record = dict(zip(COLUMNS[name], checked, strict=True))
    for flag, kind, _ in kinds:
        if kind == "flag":
            record[flag] = bool(record[flag])
    try:
        _CHECKS[name](record)
        for place in _JSON_PLACES[name]:
            if checked[place] is not None:
                checked[place] = to_json(checked[place])
    except (DatabaseError, UsageError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise BundleError(f"{what}: {str(error)[:300]}") from error
    return tuple(checked)


def _checked(value: Any, name: str, kind: str, nullable: bool, *, what: str) -> Any:
    """The value, if it is one of this kind of column."""
    if value is None and nullable:
        return None
    match kind:
        case "flag" if type(value) is int and value in (0, 1):
            return value
        case "int" if type(value) is int and -_MAX_INT <= value <= _MAX_INT:
            return value
        case "float" if type(value) in (int, float) and abs(value) < 1e308 and isfinite(value):
            return float(value)
        case "json" if isinstance(value, (dict, list)):
            return value
        case "text" if isinstance(value, str) and _is_text(name, value):
            return value
    raise BundleError(f"{what}: {name}={str(value)[:80]!r} is none that kgen writes")


def _is_text(name: str, value: str) -> bool:
    if name in _LOOSE:
        return len(value) <= MAX_TEXT and _is_unicode(value)
    if len(value) > MAX_PLAIN or not value.isprintable():
        return False
    return name not in _DATES or _is_date(value)


def _is_unicode(value: str) -> bool:
    """Without halves of surrogate pairs, which no database takes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_date(value: str) -> bool:
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def _check_run(record: dict[str, Any]) -> None:
    rows.run_row(record)
    if record["state"] not in RUN_STATES:
        raise ValueError(f"state={record['state']!r}: expected one of {', '.join(RUN_STATES)}")
    if (record["state"] == "running") != (record["ended"] is None):
        raise ValueError("a run has an end, or is running")
    if not isinstance(record["options"], dict):
        raise ValueError("options: expected an object")


def _check_trial(record: dict[str, Any]) -> None:
    trial = rows.trial_row(record)
    if not isinstance(trial.provenance, dict) or any(type(x) is bool for x in trial.samples_us):
        raise ValueError("provenance: expected an object; samples_us: a list of times")


def _check_outcome(record: dict[str, Any]) -> None:
    outcome = rows.outcome_row(record)
    if not (isinstance(outcome.invalid_by_rule, dict) and isinstance(outcome.details, dict)):
        raise ValueError("invalid_by_rule and details: expected objects")


_CHECKS: Final = {"runs": _check_run, "trials": _check_trial, "outcomes": _check_outcome}
