"""From a path or URL to an engine on a database that is ours, or that may become ours.

Takes what the user named; gives the engine, the name to show and, for SQLite, the file. Refuses
what is not ours without writing a byte. Must not import anything of kgen.cache but schema and
sqlite.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, create_engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from kgen.cache import schema, sqlite
from kgen.errors import DatabaseError


@dataclass(frozen=True)
class Target:
    """An engine, how to name it in messages, and the file behind it when it is SQLite's."""

    engine: Engine
    where: str
    file: sqlite.SqliteFile | None = None


def connect(url: str | Path, create: bool, readonly: bool, busy_limit_s: float) -> Target:
    """The engine for a path or an SQLAlchemy URL; the schema is not brought up to date yet.

    Raises DatabaseError for a folder, a file that is no SQLite database, a database of another
    program or of a newer kgen, a missing file unless `create`, and an unknown kind of URL.
    """
    target = _parse(url)
    if target.get_backend_name() != "sqlite":
        where = target.render_as_string(hide_password=True)
        return Target(_server_engine(target, where), where)
    file = sqlite.file_of(target, busy_s=min(busy_limit_s, 1.0))
    if file is None:
        return Target(sqlite.memory_engine(to_json), str(url))
    sqlite.check_path(file, create and not readonly)
    if not file.is_empty:
        _look_without_touching(file)
    try:
        return Target(_file_engine(file, create, readonly), str(file.path), file)
    except (sqlite3.Error, ValueError) as error:
        raise DatabaseError(
            f"{file.path} can not be opened: {error}; name a file on a local disk with --db or "
            "KGEN_DB"
        ) from error


def to_json(value: Any) -> str:
    """JSON without NaN and infinity, which PostgreSQL and most readers refuse."""
    return json.dumps(value, allow_nan=False, sort_keys=True)


def _parse(url: str | Path) -> URL:
    if isinstance(url, Path) or "://" not in url:
        return URL.create("sqlite", database=str(Path(url).expanduser().absolute()))
    try:
        return make_url(url)
    except ArgumentError as error:
        raise DatabaseError(f"{url!r} is neither a path nor an SQLAlchemy URL: {error}") from error


def _server_engine(url: URL, where: str) -> Engine:
    try:
        return create_engine(url, pool_pre_ping=True, json_serializer=to_json)
    except (ImportError, ArgumentError) as error:
        raise DatabaseError(f"{where}: no driver for this kind of database: {error}") from error


def _file_engine(file: sqlite.SqliteFile, create: bool, readonly: bool) -> Engine:
    if readonly:
        return sqlite.readonly_engine(file, to_json)
    if create and not file.path.exists():
        sqlite.touch(file)
    sqlite.settle_journal(file)
    # Never "rwc": a file that was deleted meanwhile is an error, not a new empty database.
    return sqlite.file_engine(file, "rw", to_json)


def _look_without_touching(file: sqlite.SqliteFile) -> None:
    """Refuse what is not ours. A lock or a torn read says nothing: the real opening decides."""
    try:
        sqlite.look(file, lambda connection: schema.read_version(connection, str(file.path)))
    except DBAPIError as error:
        if sqlite.is_not_a_database(error):
            raise DatabaseError(sqlite.not_a_database(file.path)) from error
    except ValueError as error:  # it quotes its own damaged schema, which is not UTF-8
        raise DatabaseError(f"{file.path} is damaged, or no SQLite database: {error}") from error
