"""Everything that is true of SQLite only: files, locks, journals, triggers, backups.

Takes a URL, gives an SQLAlchemy engine over one file and says what state the file is in. No
other module of kgen holds SQL or pragmas that PostgreSQL would not take. Must not import
anything of kgen but errors.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote, unquote

from sqlalchemy import URL, Connection, Engine, QueuePool, StaticPool, create_engine, event
from sqlalchemy.exc import DBAPIError

from kgen.errors import DatabaseError

Serializer = Callable[[Any], str]
T = TypeVar("T")

log = logging.getLogger(__name__)

#: Write-ahead mode needs memory shared by all writers, which these do not give across hosts.
NETWORK_FILE_SYSTEMS: Final = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs", "gfs2"}
    | {"glusterfs", "gpfs", "lustre", "nfs", "nfs4", "ocfs2", "orangefs", "smb3", "smbfs"}
    | {"virtiofs"}
)
#: Page cache while rows come in bulk, in KiB; an index of a million trials takes some 100 MiB.
BULK_CACHE_KIB: Final = 320 << 10
SMALLEST_PAGE: Final = 512
_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_warned: Final[set[Path]] = set()
_NOT_A_DATABASE: Final = frozenset({sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT})


@dataclass(frozen=True)
class SqliteFile:
    """One database file, the parameters of its URI (vfs and the like), and the seconds a single
    statement waits for a lock; waiting longer is the caller's loop, which has the limit.
    """

    path: Path
    query: Mapping[str, str] = field(default_factory=dict)
    busy_s: float = 1.0

    def uri(self, mode: str, **more: str) -> str:
        """The SQLite URI; mode is ro, rw or rwc."""
        query = {**self.query, "mode": mode, **more}
        pairs = "&".join(f"{quote(k)}={quote(v)}" for k, v in query.items())
        return f"file:{quote(os.fsencode(self.path))}?{pairs}"  # names need not be UTF-8

    @property
    def identity(self) -> tuple[int, int] | None:
        """Tells this file from another one of the same name; None when there is none."""
        try:
            stat = self.path.stat()
        except OSError:
            return None
        return stat.st_dev, stat.st_ino

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it yet, or no such file."""
        return not self.path.exists() or self.path.stat().st_size == 0


def file_of(url: URL, busy_s: float = 1.0) -> SqliteFile | None:
    """The file a sqlite URL names; None for a database in memory."""
    name = url.database or ""
    if name in ("", ":memory:"):
        return None
    query = {k: v if isinstance(v, str) else v[-1] for k, v in url.query.items() if k != "uri"}
    if name.startswith("file:"):
        name = unquote(name.removeprefix("file:"))
    return SqliteFile(Path(name).expanduser().absolute(), query, busy_s)


def check_path(file: SqliteFile, create: bool) -> None:
    """Raises DatabaseError for what can not be a database file; makes its folder if asked.

    Looks at names and sizes only. Opening the file here and closing it again would drop the
    POSIX locks that other connections of this process hold on it.
    """
    path = file.path
    try:
        path.stat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # a folder that may not be entered, too long a name
        raise DatabaseError(f"{path} can not be reached: {error}") from error
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "not a regular file"
        raise DatabaseError(f"{path} is {what}: give the database a file name (--db or KGEN_DB)")
    if path.exists() and 0 < path.stat().st_size < SMALLEST_PAGE:
        raise DatabaseError(not_a_database(path))  # SQLite takes a single byte for an empty file
    if not create:
        if not path.exists():
            raise DatabaseError(f"no database at {path}: `kgen tune` makes one")
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatabaseError(f"{path.parent}: can not make the folder: {error.strerror}") from error


def touch(file: SqliteFile) -> None:
    """Make an empty file, as SQLite does; raises sqlite3.Error where it can not."""
    with closing(sqlite3.connect(file.uri("rwc"), uri=True, timeout=file.busy_s)) as connection:
        connection.execute("SELECT count(*) FROM sqlite_master")


def memory_engine(to_json: Serializer) -> Engine:
    """One database in this process's memory, gone with the engine."""
    here = {"check_same_thread": False}
    engine = create_engine(
        "sqlite://", poolclass=StaticPool, connect_args=here, json_serializer=to_json
    )
    return _with_events(engine)


def file_engine(
    file: SqliteFile, mode: str, to_json: Serializer = json.dumps, immutable: bool = False
) -> Engine:
    """An engine over the file, which keeps one connection when idle: closing the last one folds
    the journal into the file, which costs more than a row does.
    """
    text = file.uri(mode, **({"immutable": "1"} if immutable else {}))

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(text, uri=True, timeout=file.busy_s, check_same_thread=False)

    engine = create_engine(
        "sqlite://",
        creator=connect,
        poolclass=QueuePool,
        pool_size=1,
        max_overflow=-1,  # threads wait for SQLite, whose limit is ours, not for the pool
        json_serializer=to_json,
    )
    return _with_events(engine)


def _with_events(engine: Engine) -> Engine:
    """Transactions begin as told: a writer takes its lock at once, so that it never has to give
    up half-way (a reader that turns writer is refused at once, whatever the time limit).
    """

    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("kgen_writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def not_a_database(path: Path) -> str:
    """The message for a file of something else."""
    return f"{path} is not an SQLite database: name another file with --db or KGEN_DB"


def is_busy(error: DBAPIError) -> bool:
    """Whether a statement failed only because another connection holds a lock."""
    return _code(error.orig) in _BUSY


def is_not_a_database(error: DBAPIError) -> bool:
    """Whether the file is something else than an SQLite database, or a broken one."""
    return _code(error.orig) in _NOT_A_DATABASE


def _code(error: BaseException | None) -> int:
    """The primary result code; extended codes carry it in their low byte."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF


def look(file: SqliteFile, work: Callable[[Connection], T]) -> T:
    """Read a file without leaving a trace beside it.

    With nothing in a journal, "immutable" keeps SQLite from making even the -shm and -wal files.
    What it reads while another process writes may be torn: good enough to refuse, not to go on.
    """
    wal = Path(f"{file.path}-wal")
    engine = file_engine(file, "ro", immutable=not (wal.exists() and wal.stat().st_size))
    try:
        with engine.connect() as connection:
            return work(connection)
    finally:
        engine.dispose()


def readonly_engine(file: SqliteFile, to_json: Serializer) -> Engine:
    """An engine that can not write; on a read-only medium it does without lock files."""
    engine = file_engine(file, "ro", to_json)
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql("SELECT count(*) FROM sqlite_master")
    except DBAPIError as error:
        engine.dispose()
        if _code(error.orig) in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            return file_engine(file, "ro", to_json, immutable=True)
    return engine


def settle_journal(file: SqliteFile) -> str:
    """Put the file in write-ahead mode where that works, else in rollback mode, with a warning.

    Gives the journal mode the file is in. A file that is in use stays as it is. Raises
    sqlite3.Error when not even a rollback journal works.
    """
    want = "wal"
    if on_network(file.path):
        want = "delete"
        _warn_of_journal(file, "it lies on a network file system")
    with _raw(file) as connection:
        try:
            mode = _pragma(connection, "journal_mode")
        except sqlite3.OperationalError as error:
            if _code(error) in _BUSY:
                return "unknown"
            mode = _leave_wal(file, error)
        if mode in (want, "memory"):
            return mode
        try:
            got, why = _pragma(connection, f"journal_mode = {want}"), "the file system refused it"
        except sqlite3.OperationalError as error:
            if _code(error) in _BUSY:
                return mode
            got, why = mode, str(error)
    if got != want:
        _warn_of_journal(file, why)
    return got


def _warn_of_journal(file: SqliteFile, why: str) -> None:
    """Once for each file and process."""
    if file.path in _warned:
        return
    _warned.add(file.path)
    log.warning(
        "%s: no write-ahead journal (%s); a rollback journal is used, which is slower with many "
        "writers. A file on a local disk is better: --db or KGEN_DB",
        file.path,
        why,
    )


def _leave_wal(file: SqliteFile, error: sqlite3.OperationalError) -> str:
    """A file that came here in write-ahead mode, where shared memory does not work: under an
    exclusive lock SQLite needs none, which is enough to turn it back.
    """
    with _raw(file) as connection:
        _pragma(connection, "locking_mode = EXCLUSIVE")
        mode = _pragma(connection, "journal_mode = DELETE")
        log.warning("%s: left write-ahead mode, which does not work here: %s", file.path, error)
        return mode


@contextmanager
def _raw(file: SqliteFile) -> Iterator[sqlite3.Connection]:
    uri = file.uri("rw")
    with closing(sqlite3.connect(uri, uri=True, timeout=file.busy_s)) as connection:
        connection.isolation_level = None
        yield connection


def _pragma(connection: sqlite3.Connection, text: str) -> str:
    row = connection.execute(f"PRAGMA {text}").fetchone()
    return str(row[0]).lower() if row else ""


def on_network(path: Path, mounts: str = "/proc/self/mounts") -> bool:
    """Whether the file lies on a network file system, as far as the system's mounts tell."""
    try:
        lines = Path(mounts).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    best, kind = "", ""
    where = path.parent.resolve()
    for line in lines:
        _, point, fs, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if where.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, fs
    return kind in NETWORK_FILE_SYSTEMS


def append_only(connection: Connection, table: str) -> None:
    """Triggers that refuse to change or delete a row of the table, REPLACE included."""
    refuse = _refusal(table)
    taken = f"EXISTS (SELECT 1 FROM {table} WHERE id = NEW.id)"
    for name, when in (
        ("no_update", f"BEFORE UPDATE ON {table}"),
        ("no_delete", f"BEFORE DELETE ON {table}"),
        ("no_replace", f"BEFORE INSERT ON {table} WHEN {taken}"),
    ):
        connection.exec_driver_sql(f"CREATE TRIGGER {table}_{name} {when} BEGIN {refuse}; END")


def _refusal(table: str) -> str:
    return f"SELECT RAISE(ABORT, '{table} is append-only: rows are never changed or deleted')"


def delete_rows(connection: Connection, table: str, ids: Sequence[int]) -> None:
    """Delete rows of an append-only table, which is one again before the transaction ends."""
    name = f"{table}_no_delete"
    connection.exec_driver_sql(f"DROP TRIGGER {name}")
    connection.exec_driver_sql(f"DELETE FROM {table} WHERE id = ?", [(number,) for number in ids])
    connection.exec_driver_sql(
        f"CREATE TRIGGER {name} BEFORE DELETE ON {table} BEGIN {_refusal(table)}; END"
    )


@contextmanager
def in_bulk(connection: Connection) -> Iterator[None]:
    """Room for the indexes of a million rows in memory while many are added; else nothing.

    For another kind of database nothing changes.
    """
    if connection.dialect.name != "sqlite":
        yield
        return
    usual = connection.exec_driver_sql("PRAGMA cache_size").scalar_one()
    connection.exec_driver_sql(f"PRAGMA cache_size = -{BULK_CACHE_KIB}")
    try:
        yield
    finally:
        connection.exec_driver_sql(f"PRAGMA cache_size = {usual}")


def compact(file: SqliteFile) -> None:
    """Give the room of deleted rows back to the file system; left undone where others use it."""
    with suppress(sqlite3.Error), _raw(file) as connection:
        connection.execute("VACUUM")


def back_up(file: SqliteFile, label: str) -> Path:
    """Copy the database, journal included, beside itself as NAME.label.bak; gives the copy.

    An older copy of that name is kept under its own and the new one numbered.
    """
    target = Path(f"{file.path}.{label}.bak")
    number = 2
    while target.exists():
        target = Path(f"{file.path}.{label}-{number}.bak")
        number += 1
    try:
        with _raw(file) as source, closing(sqlite3.connect(target)) as copy:
            source.backup(copy)
    except sqlite3.Error as error:
        target.unlink(missing_ok=True)
        raise DatabaseError(
            f"{file.path}: no backup at {target}, so it was not converted: {error}"
        ) from error
    return target
