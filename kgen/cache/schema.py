"""The tables of the tuning database, their rules and their version.

Takes an SQLAlchemy connection; creates, checks or migrates what it leads to. The rules are
CHECK constraints, so that no client can store a time without a passed verification. Plain SQL
that PostgreSQL takes too; must not import anything of kgen.cache but records and sqlite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final

from sqlalchemy import (
    JSON,
    Boolean,
    CheckConstraint,
    Column,
    Connection,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    insert,
    inspect,
    select,
    update,
)

from kgen import __version__
from kgen.cache import sqlite
from kgen.cache.records import (
    MAX_ERROR,
    MAX_US,
    MIN_US,
    OUTCOMES,
    RUN_STATES,
    SOURCES,
    STATUSES,
    TIMED_SOURCES,
    UNVERIFIED,
)
from kgen.config import GemmConfig
from kgen.errors import DatabaseError
from kgen.problem import FLAGS, MAX_EXTENT, GemmProblem

SCHEMA_VERSION: Final = 1
#: From a version to the next one, in one transaction: {1: to_version_2, ...}.
MIGRATIONS: Final[dict[int, Callable[[Connection], None]]] = {}

metadata: Final = MetaData()


def _columns_of(kind: type[GemmProblem] | type[GemmConfig]) -> list[Column[Any]]:
    """One column a field, of the same name: a new field is a new schema version."""
    types: dict[str, Any] = {
        "int": Integer(),
        "str": String(),
        "bool": Boolean(create_constraint=False),
    }
    return [Column(f.name, types[str(f.type)], nullable=False) for f in fields(kind)]


def _among(column: str, values: tuple[str, ...] | frozenset[str]) -> str:
    return f"{column} IN ({', '.join(repr(v) for v in sorted(values))})"


def _between(column: str, low: object, high: object) -> str:
    # An upper bound also keeps text out: SQLite sorts it above every number.
    return f"{column} BETWEEN {low} AND {high}"


#: Every term is true or false, never NULL: SQL lets a CHECK pass that comes out NULL.
_TIMED: Final = " AND ".join(
    [
        "status = 'ok'",
        _among("source", TIMED_SOURCES),
        "verified IS TRUE",
        *(f"{name} IS NOT NULL" for name in ("error", "p10_us", "p90_us", "samples_us")),
        _between("error", 0, MAX_ERROR),
        _between("median_us", MIN_US, MAX_US),
        _between("p10_us", MIN_US, "median_us"),
        _between("p90_us", "median_us", MAX_US),
        "length(cubin_key) > 0",
        "length(policy) > 0",
    ]
)
_UNTIMED: Final = " AND ".join(
    ["status <> 'ok'"]
    + [f"{name} IS NULL" for name in ("median_us", "p10_us", "p90_us", "samples_us")]
)


def _problem_checks(name: str, *, any_m: bool = False) -> list[CheckConstraint]:
    sizes = ("n", "k", "groups") if any_m else ("m", "n", "k", "groups")
    extents = " AND ".join(_between(c, 1, MAX_EXTENT) for c in sizes)
    budget = _between("num_sms", 0, MAX_EXTENT)
    flags = " AND ".join(f"{flag} IN (FALSE, TRUE)" for flag in FLAGS)
    device = f"length(device_name) > 0 AND {_between('device_num_sms', 1, MAX_EXTENT)}"
    return [
        CheckConstraint(f"{extents} AND {budget}", name=f"{name}_extents"),
        CheckConstraint(flags, name=f"{name}_flags"),
        CheckConstraint(device, name=f"{name}_device"),
    ]


schema_info: Final = Table(
    "schema_info",
    metadata,
    Column("id", Integer, CheckConstraint("id = 1", name="schema_info_one_row"), primary_key=True),
    Column("version", Integer, nullable=False),
    Column("kgen_version", String, nullable=False),
)

runs: Final = Table(
    "runs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("command", String, nullable=False),
    Column("kgen_version", String, nullable=False),
    Column("options", JSON, nullable=False),
    Column("host", String, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("process", String, nullable=False),
    Column("started", String, nullable=False),
    Column("heartbeat", String, nullable=False),
    Column("ended", String),
    Column("state", String, nullable=False),
    CheckConstraint(_among("state", RUN_STATES), name="runs_state"),
    CheckConstraint("(state = 'running') = (ended IS NULL)", name="runs_ended"),
)

trials: Final = Table(
    "trials",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", Integer, ForeignKey("runs.id")),
    Column("date", String, nullable=False),
    *_columns_of(GemmProblem),
    Column("device_name", String, nullable=False),
    Column("device_num_sms", Integer, nullable=False),
    *_columns_of(GemmConfig),
    Column("cubin_key", String, nullable=False),
    Column("status", String, nullable=False),
    Column("reason", String, nullable=False),
    Column("source", String, nullable=False),
    Column("verified", Boolean(create_constraint=False), nullable=False),
    Column("error", Float),
    Column("median_us", Float),
    Column("p10_us", Float),
    Column("p90_us", Float),
    Column("samples_us", JSON(none_as_null=True)),
    Column("predicted_us", Float),
    Column("policy", String, nullable=False),
    Column("registers", Integer),
    Column("provenance", JSON, nullable=False),
    CheckConstraint(_among("status", STATUSES), name="trials_status"),
    CheckConstraint(_among("source", SOURCES), name="trials_source"),
    CheckConstraint("verified IN (FALSE, TRUE)", name="trials_verified"),
    CheckConstraint(
        f"verified IS FALSE OR NOT ({_among('status', UNVERIFIED)})", name="trials_unverified"
    ),
    CheckConstraint(f"median_us IS NULL OR ({_TIMED})", name="trials_timed"),
    CheckConstraint(f"median_us IS NOT NULL OR ({_UNTIMED})", name="trials_untimed"),
    *_problem_checks("trials"),
)
Index("trials_by_problem", *(trials.c[f.name] for f in fields(GemmProblem)))
Index("trials_by_status", trials.c.status)

outcomes: Final = Table(
    "outcomes",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", Integer, ForeignKey("runs.id")),
    Column("date", String, nullable=False),
    *_columns_of(GemmProblem),
    Column("device_name", String, nullable=False),
    Column("device_num_sms", Integer, nullable=False),
    Column("outcome", String, nullable=False),
    Column("reason", String, nullable=False),
    Column("num_trials", Integer, nullable=False),
    Column("invalid_by_rule", JSON, nullable=False),
    Column("details", JSON, nullable=False),
    CheckConstraint(_among("outcome", OUTCOMES), name="outcomes_outcome"),
    CheckConstraint("outcome <> 'untunable' OR length(reason) > 0", name="outcomes_reason"),
    *_problem_checks("outcomes"),
)


dispatch_tables: Final = Table(
    "dispatch_tables",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", Integer, ForeignKey("runs.id")),
    Column("date", String, nullable=False),
    *(column for column in _columns_of(GemmProblem) if column.name != "m"),
    Column("device_name", String, nullable=False),
    Column("device_num_sms", Integer, nullable=False),
    Column("policy", String, nullable=False),
    Column("bound", Float, nullable=False),
    Column("worst", Float, nullable=False),
    Column("points", JSON, nullable=False),
    Column("entries", JSON, nullable=False),
    CheckConstraint("bound BETWEEN 0 AND 1", name="dispatch_tables_bound"),
    CheckConstraint("worst BETWEEN 0 AND bound", name="dispatch_tables_worst"),
    *_problem_checks("dispatch_tables", any_m=True),
)


def read_version(connection: Connection, where: str) -> int | None:
    """The schema version of a database, or None of an empty one.

    Raises DatabaseError for a newer version and for a database of something else.
    """
    names = inspect(connection).get_table_names()
    if not names:
        return None
    if schema_info.name not in names:
        raise DatabaseError(
            f"{where} is a database of something else (it holds {', '.join(sorted(names)[:4])}): "
            "name another one with --db or KGEN_DB"
        )
    version = connection.execute(select(schema_info.c.version)).scalar_one_or_none()
    if not isinstance(version, int) or version < 1:
        raise DatabaseError(f"{where} has no readable schema version: {_start_afresh(where)}")
    if version > SCHEMA_VERSION:
        raise DatabaseError(
            f"{where} has schema {version}, this kgen ({__version__}) knows up to "
            f"{SCHEMA_VERSION} and has left it alone: use the newer kgen, or another file with "
            "--db or KGEN_DB"
        )
    return version


def create(connection: Connection) -> None:
    """Every table, in the caller's transaction; the database is empty."""
    metadata.create_all(connection)
    if connection.dialect.name == "sqlite":
        sqlite.append_only(connection, trials.name)
        sqlite.append_only(connection, outcomes.name)
        sqlite.append_only(connection, dispatch_tables.name)
    connection.execute(
        insert(schema_info).values(id=1, version=SCHEMA_VERSION, kgen_version=__version__)
    )


def can_migrate(version: int) -> bool:
    """Whether there is a way from this version to the present one."""
    return all(step in MIGRATIONS for step in range(version, SCHEMA_VERSION))


def migrate(connection: Connection, version: int) -> None:
    """Bring the database from `version` to the present one, in the caller's transaction."""
    for step in range(version, SCHEMA_VERSION):
        MIGRATIONS[step](connection)
    connection.execute(update(schema_info).values(version=SCHEMA_VERSION, kgen_version=__version__))


def refuse_older(where: str, version: int) -> DatabaseError:
    """The error for a schema from which no way leads to the present one."""
    return DatabaseError(
        f"{where} has schema {version}, this kgen needs {SCHEMA_VERSION} and can not convert it: "
        f"{_start_afresh(where)}"
    )


def check_columns(connection: Connection, where: str) -> None:
    """Raises DatabaseError when a table or column of this version is not there."""
    present = inspect(connection)
    names = set(present.get_table_names())
    for table in metadata.tables.values():
        have = present.get_columns(table.name) if table.name in names else []
        lacking = set(table.columns.keys()) - {column["name"] for column in have}
        if lacking:
            raise DatabaseError(
                f"{where} says schema {SCHEMA_VERSION} but its table {table.name} lacks "
                f"{', '.join(sorted(lacking)[:4])}: {_start_afresh(where)}"
            )


def _start_afresh(where: str) -> str:
    return f"move it away (mv {where} {where}.old) and run `kgen tune` again"
