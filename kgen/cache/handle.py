"""One handle on a database of kgen's: opened, brought up to date, read and written: `Handle`.

Takes a path or a URL and functions that work on a connection; a lock has them called again until
the limit is reached. Must not import rows, artifacts, search, runtime or torch.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self, TypeVar
from weakref import WeakSet

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError

from kgen.cache import schema, sqlite
from kgen.cache.connect import Target, connect
from kgen.errors import DatabaseError, UsageError

T = TypeVar("T")

#: Seconds to wait for other writers before giving up.
BUSY_LIMIT_S: Final = 30.0
_handles: Final[WeakSet[Handle]] = WeakSet()


class Handle:
    """One handle on a database; threads may share it, processes each open their own.

    Every method raises DatabaseError: locked for longer than the limit, unreadable, a record
    that breaks a rule, or a handle that came here through a fork. `where` names the database in
    messages, `file` is SQLite's, or None.
    """

    def __init__(self, target: Target, busy_limit_s: float = BUSY_LIMIT_S) -> None:
        """For `open`, which is the way to get one."""
        self.where = target.where
        self._engine = target.engine
        self.file = target.file
        self._identity = target.file.identity if target.file else None
        self._limit_s = busy_limit_s
        self._pid = os.getpid()
        _handles.add(self)

    @classmethod
    def open(
        cls,
        url: str | Path,
        *,
        create: bool = True,
        readonly: bool = False,
        busy_limit_s: float = BUSY_LIMIT_S,
    ) -> Self:
        """Open, and if need be create, the database at an SQLAlchemy URL or a path.

        A missing or empty file is initialised (create=False: refused); an older schema is
        converted after a backup; a newer one, another program's database, a file that is none
        and a folder are refused untouched. `readonly` never writes, not even a journal mode.
        """
        db = cls(connect(url, create, readonly, busy_limit_s), busy_limit_s)
        try:
            db._prepare(create and not readonly)
        except BaseException:
            db.close()
            raise
        return db

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; a database in memory is gone then."""
        self._engine.dispose()

    def let_go(self) -> None:
        """Close idle connections; the next use opens one again. Nothing in memory is lost."""
        if self.file is not None or self._engine.dialect.name != "sqlite":
            self._engine.dispose()

    # -- transactions --------------------------------------------------------------------------

    def _prepare(self, create: bool) -> None:
        version = self.read(lambda c: schema.read_version(c, self.where))
        if version is None and not create:
            raise DatabaseError(f"{self.where} is empty: `kgen tune` makes a database of it")
        if version is not None and version < schema.SCHEMA_VERSION:
            if not schema.can_migrate(version):
                raise schema.refuse_older(self.where, version)
            if not create:
                raise DatabaseError(
                    f"{self.where} has schema {version}: run `kgen tune` once to convert it to "
                    f"{schema.SCHEMA_VERSION}"
                )
        if version != schema.SCHEMA_VERSION:
            self.write(self._bring_up)
        self.read(lambda c: schema.check_columns(c, self.where))

    def _bring_up(self, connection: Connection) -> None:
        """Create or migrate under the write lock; another starter may have been first."""
        version = schema.read_version(connection, self.where)
        if version is None:
            schema.create(connection)
        elif version < schema.SCHEMA_VERSION:
            if self.file is not None:
                sqlite.back_up(self.file, f"v{version}")
            schema.migrate(connection, version)

    def _all(self, query: Any, record_of: Callable[[dict[str, Any]], T]) -> list[T]:
        """Every row as a record. A damaged file gives values that no kgen wrote."""
        try:
            found = self.read(lambda c: c.execute(query).mappings().all())
            return [record_of(dict(row)) for row in found]
        except (UsageError, ValueError, TypeError) as error:
            raise DatabaseError(f"{self.where} holds a row that makes no sense: {error}") from error

    def read(self, work: Callable[[Connection], T]) -> T:
        """What `work` gives in one transaction; a lock may have it called again."""
        return self._attempt(work, writes=False)

    def write(self, work: Callable[[Connection], T]) -> T:
        """As `read`, with the right to write: all of it is kept, or, where it raises, nothing."""
        return self._attempt(work, writes=True)

    def _attempt(self, work: Callable[[Connection], T], writes: bool) -> T:
        """One transaction, tried again while others hold the lock, until the limit is reached."""
        self._check_still_ours()
        deadline = time.monotonic() + self._limit_s
        pause = 0.005
        while True:
            try:
                with self._transaction(writes) as connection:
                    return work(connection)
            except SQLAlchemyError as error:
                busy = isinstance(error, DBAPIError) and sqlite.is_busy(error)
                if not busy or time.monotonic() >= deadline:
                    raise self._explain(error, busy) from error
            except ValueError as error:  # a damaged file: text, or a driver's message, not UTF-8
                raise DatabaseError(f"{self.where} can not be read: {error}") from error
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, 0.25)

    def _check_still_ours(self) -> None:
        if os.getpid() != self._pid:
            raise DatabaseError(
                f"{self.where} was opened by process {self._pid} and is used by its fork "
                f"{os.getpid()}: open it again there, or start processes with 'spawn'"
            )
        if self.file is not None and self.file.identity != self._identity:
            raise DatabaseError(f"{self.where} was moved or deleted while in use: start again")

    @contextmanager
    def _transaction(self, writes: bool) -> Iterator[Connection]:
        with self._engine.connect() as connection:
            connection.execution_options(kgen_writes=writes)
            with connection.begin():
                yield connection

    def _explain(self, error: SQLAlchemyError, busy: bool) -> DatabaseError:
        cause = getattr(error, "orig", None) or error
        if busy:
            return DatabaseError(
                f"{self.where} was locked by another process for {self._limit_s:g} s: find what "
                "holds it, or use another file with --db or KGEN_DB"
            )
        if isinstance(error, IntegrityError) or not isinstance(error, DBAPIError):
            return DatabaseError(f"{self.where} refused a row: {cause}")
        return DatabaseError(
            f"{self.where} can not be used: {cause}; if the file system is at fault (a network "
            "mount, a full disk), name a file on a local disk with --db or KGEN_DB"
        )


def _before_fork() -> None:
    """Close idle connections: SQLite forbids even closing in a child what its parent opened."""
    for handle in list(_handles):
        handle.let_go()


os.register_at_fork(before=_before_fork)
