"""Rows on their way between databases and bundles, as plain tuples: a million takes no minute.

Takes open connections and tuples, in the order of a table's columns; appends what is not there yet.
Two rows are the same when everything but their numbers is; nothing is ever changed or replaced.
Must not import anything of kgen.cache but schema, rows, sqlite and db.
"""

from __future__ import annotations

import os
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Table, func, insert, select

from kgen import __version__
from kgen.cache import liveness, rows, sqlite
from kgen.cache.connect import to_json
from kgen.cache.db import TuningDatabase
from kgen.cache.schema import outcomes, runs, trials
from kgen.errors import DatabaseError

Raw = tuple[Any, ...]

TABLES: Final[dict[str, Table]] = {"runs": runs, "trials": trials, "outcomes": outcomes}
COLUMNS: Final = {name: tuple(table.columns.keys()) for name, table in TABLES.items()}
#: Rows read and written at a time.
BATCH: Final = 2000
#: What tells one run from another; the rest of it changes while it runs.
_RUN_KEY: Final = ("command", "kgen_version", "host", "pid", "process", "started")
_RUN_PLACES: Final = tuple(COLUMNS["runs"].index(name) for name in _RUN_KEY)


@dataclass
class Added:
    """Rows that were appended, and rows that were there already, by table."""

    added: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TABLES, 0))
    known: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TABLES, 0))

    def __add__(self, other: Added) -> Added:
        return Added(
            {name: self.added[name] + other.added[name] for name in TABLES},
            {name: self.known[name] + other.known[name] for name in TABLES},
        )


def raw_rows(connection: Connection, name: str) -> Iterator[Raw]:
    """Every row of a table, by growing id, with its values as SQLite keeps them.

    Raises DatabaseError for another kind of database, whose drivers give other values.
    """
    dialect = connection.dialect
    if dialect.name != "sqlite":
        raise DatabaseError(
            f"rows are moved between SQLite files only, not {dialect.name}: name a file with --db"
        )
    table = TABLES[name]
    query = str(select(table).order_by(table.c.id).compile(dialect=dialect))
    for part in connection.exec_driver_sql(query).partitions(BATCH):
        yield from map(tuple, part)


def content_key(row: Raw) -> bytes:
    """A trial's or an outcome's content, whatever its numbers: 16 bytes of a hash."""
    return blake2b(repr(row[2:]).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def run_key(row: Raw) -> Raw:
    """What tells a run from others."""
    return tuple(row[place] for place in _RUN_PLACES)


class Receiver:
    """Appends rows to one database, within one transaction of the caller's.

    `command` and `options` describe the run to which rows go whose own run did not come along; it
    is made when first needed.
    """

    def __init__(self, connection: Connection, command: str, options: dict[str, Any]) -> None:
        self.counts = Added()
        self._connection = connection
        self._about = (command, options)
        self._run_ids: dict[int, int] = {}
        self._own_run: int | None = None
        self._dates: dict[str, set[str]] = {}
        self._seen: dict[str, set[bytes]] = defaultdict(set)

    def take_runs(self, found: Iterable[Raw]) -> None:
        """Append the runs that are not there, and remember where those that are there stand.

        A run that was still going is kept as killed at its last sign of life: it goes on elsewhere.
        """
        known = {run_key(row): row[0] for row in raw_rows(self._connection, "runs")}
        columns = COLUMNS["runs"]
        for row in found:
            there = known.get(run_key(row))
            if there is None:
                values = dict(zip(columns[1:], row[1:], strict=True))
                if values["state"] == "running":
                    values |= {"state": "killed", "ended": values["heartbeat"]}
                there = self._insert_run(values)
                known[run_key(row)] = there
                self.counts.added["runs"] += 1
            else:
                self.counts.known["runs"] += 1
            self._run_ids[row[0]] = there

    def take(self, name: str, found: Iterable[Raw]) -> None:
        """Append the trials or outcomes whose content is not there yet."""
        if name not in self._dates:
            self._dates[name] = _dates(self._connection, name)
        dates, seen, stream = self._dates[name], self._seen[name], iter(found)
        text = _insert_text(self._connection, name)
        while batch := list(islice(stream, BATCH)):
            fresh = []
            for row in batch:
                if row[2] in dates:  # one of its date is there, so all have to be looked at, once
                    dates.clear()
                    seen |= {content_key(known) for known in raw_rows(self._connection, name)}
                key = content_key(row)
                if key not in seen:
                    seen.add(key)
                    fresh.append((self._run_of(row[1]), *row[2:]))
            self.counts.added[name] += len(fresh)
            self.counts.known[name] += len(batch) - len(fresh)
            if fresh:
                self._connection.exec_driver_sql(text, fresh)

    def _run_of(self, run_id: int | None) -> int:
        if run_id is not None and run_id in self._run_ids:
            return self._run_ids[run_id]
        return self.own_run()

    def own_run(self) -> int:
        """The id of the run that stands for this transfer."""
        if self._own_run is None:
            (command, options), now = self._about, rows.now()
            values: dict[str, Any] = {"command": command, "kgen_version": __version__}
            values |= {"options": to_json(options)}
            values |= {"host": liveness.this_host(), "pid": os.getpid()}
            values |= {"process": liveness.process_token(os.getpid()) or ""}
            values |= {"started": now, "heartbeat": now, "ended": now, "state": "finished"}
            self._own_run = self._insert_run(values)
        return self._own_run

    def _insert_run(self, values: dict[str, Any]) -> int:
        ordered = tuple(values[column] for column in COLUMNS["runs"][1:])
        self._connection.exec_driver_sql(_insert_text(self._connection, "runs"), ordered)
        number = self._connection.execute(select(func.max(runs.c.id))).scalar_one()
        return int(number)


def _dates(connection: Connection, name: str) -> set[str]:
    return set(connection.execute(select(TABLES[name].c.date)).scalars())


def _insert_text(connection: Connection, name: str) -> str:
    """An INSERT of every column but the id, with the driver's own marks for values."""
    keys = list(COLUMNS[name][1:])
    return str(insert(TABLES[name]).compile(dialect=connection.dialect, column_keys=keys))


def merge_into(target: TuningDatabase, source: TuningDatabase) -> Added:
    """Append to `target` every row of `source` that it lacks, in one transaction.

    Raises DatabaseError; then nothing was changed.
    """

    def work(writer: Connection) -> Added:
        receiver = Receiver(writer, "kgen db merge", {"from": source.where})

        def send(reader: Connection) -> None:
            receiver.counts = Added()
            receiver.take_runs(raw_rows(reader, "runs"))
            for name in ("trials", "outcomes"):
                receiver.take(name, raw_rows(reader, name))

        with sqlite.in_bulk(writer):
            source.read(send)
        return receiver.counts

    return target.write(work)


def merge_new(sources: Sequence[Path], target: Path, open_it: Callable[[Path], Any]) -> Added:
    """Make `target` of the rows of all sources; it appears once it is whole.

    `open_it` opens a database for reading. Raises DatabaseError for a target that exists.
    """
    if target.exists():
        raise DatabaseError(f"{target} exists and stays: name a new file")
    new = target.with_name(f".{target.name}.{os.getpid()}.new")
    total = Added()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_it(sources[0]) as first:
            first.read(lambda c: _copy(c, new))
        with TuningDatabase.open(new) as merged:
            total.added |= merged.read(count_rows)
            for path in sources[1:]:
                with open_it(path) as source:
                    total += merge_into(merged, source)
        os.link(new, target)  # unlike a rename, it replaces nothing
    except FileExistsError:
        raise DatabaseError(f"{target} exists and stays: name a new file") from None
    except OSError as error:
        raise DatabaseError(f"{target} can not be written: {error.strerror}") from error
    finally:
        for tail in ("", "-wal", "-shm", "-journal"):
            with suppress(OSError):
                Path(f"{new}{tail}").unlink()
    return total


def count_rows(connection: Connection) -> dict[str, int]:
    """Number of rows of each table."""
    return {
        name: int(connection.execute(select(func.count()).select_from(table)).scalar_one())
        for name, table in TABLES.items()
    }


def _copy(connection: Connection, target: Path) -> None:
    driver: Any = connection.connection.driver_connection
    copy = sqlite3.connect(target)
    try:
        driver.backup(copy)
    except sqlite3.Error as error:
        raise DatabaseError(f"{target} can not be written: {error}") from error
    finally:
        copy.close()
