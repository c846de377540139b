"""The rules of the tables, against raw SQL; versions, migration, and files that are not ours."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

from kgen.cache import schema
from kgen.cache.db import TuningDatabase
from kgen.cache.records import TrialRecord
from kgen.config import GemmConfig
from kgen.errors import DatabaseError
from kgen.problem import GemmProblem

DATA = Path(__file__).parent.parent / "data"
ROOT = Path(__file__).parent.parent.parent
MakeTrial = Callable[..., TrialRecord]

#: A row that is right, as raw SQL sees it.
ROW: dict[str, Any] = {
    "date": "2026-12-01T00:00:00+00:00",
    **asdict(GemmProblem("dense", 64, 2112, 7168)),
    "device_name": "NVIDIA H200",
    "device_num_sms": 132,
    **GemmConfig().to_dict(),
    "cubin_key": "c" * 64,
    "status": "ok",
    "reason": "",
    "source": "tuned",
    "verified": 1,
    "error": 0.0017,
    "median_us": 10.0,
    "p10_us": 9.5,
    "p90_us": 10.5,
    "samples_us": "[9.5, 10.0, 10.5]",
    "policy": "cold",
    "provenance": "{}",
}
UNTIMED = {"median_us": None, "p10_us": None, "p90_us": None, "samples_us": None}
FAILED = {**UNTIMED, "status": "faulted", "verified": 0, "error": None}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fresh") / "tuning.db"
    TuningDatabase.open(path).close()
    return path


@pytest.fixture
def path(tmp_path: Path, fresh: Path) -> Path:
    """A new database: copied, since making one waits for the disk several times."""
    return Path(shutil.copy(fresh, tmp_path / "tuning.db"))


def insert(path: Path, changes: dict[str, Any], verb: str = "INSERT") -> None:
    row = ROW | changes
    names, marks = ", ".join(row), ", ".join("?" * len(row))
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("PRAGMA foreign_keys = ON")  # SQLite has every connection ask for them
        raw.execute(f"{verb} INTO trials ({names}) VALUES ({marks})", list(row.values()))


def rows_in(path: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as raw:
        return raw.execute("SELECT id, status, median_us FROM trials").fetchall()


def test_a_right_row_is_accepted(path: Path) -> None:
    insert(path, {})
    insert(path, FAILED)
    insert(path, FAILED | {"status": "timeout", "verified": 1, "error": 0.001})
    assert [row[1] for row in rows_in(path)] == ["ok", "faulted", "timeout"]


@pytest.mark.parametrize(
    "changes",
    [
        {"verified": 0},
        {"verified": None},
        {"verified": 2},
        {"verified": "yes"},
        {"status": None},
        {"status": "wrong"},
        {"status": "compiled"},
        {"status": "fine"},
        {"status": ""},
        {"source": None},
        {"source": "predicted"},
        {"error": None},
        {"error": "small"},
        {"error": 1.01},
        {"error": -0.1},
        {"median_us": None},
        {"median_us": 0.0},
        {"median_us": -3.0},
        {"median_us": float("inf")},
        {"median_us": "fast"},
        {"median_us": b"fast"},
        {"p10_us": None},
        {"p90_us": None},
        {"p10_us": 11.0},
        {"p90_us": float("inf")},
        {"samples_us": None},
        {"cubin_key": None},
        {"cubin_key": ""},
        {"policy": None},
        {"policy": ""},
        {"provenance": None},
        {"device_name": None},
        {"device_name": ""},
        {"device_num_sms": None},
        {"device_num_sms": 0},
        {"m": None},
        {"m": 0},
        {"m": "many"},
        {"block_n": None},
        {"date": None},
        {"run_id": 77},
        FAILED | {"median_us": 10.0},
        FAILED | {"p90_us": 10.0},
        FAILED | {"samples_us": "[10.0]"},
        FAILED | {"status": "wrong", "verified": 1},
        FAILED | {"status": "compiled", "verified": 1},
        # A NULL that makes a term unknown must not carry a time through.
        {"status": None, "verified": None, "error": None},
        {"verified": None, "median_us": None, "status": "faulted"},
        {**UNTIMED},
    ],
    ids=str,
)
def test_raw_sql_can_not_insert_what_is_not_true(path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(sqlite3.IntegrityError):
        insert(path, changes)
    assert rows_in(path) == []


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE trials SET median_us = 1.0",
        "UPDATE trials SET reason = 'x' WHERE status = 'faulted'",
        "DELETE FROM trials",
        "DELETE FROM trials WHERE id = 2",
        "UPDATE OR REPLACE trials SET id = 1 WHERE id = 2",
    ],
)
def test_trials_are_append_only(path: Path, statement: str) -> None:
    insert(path, {})
    insert(path, FAILED)
    before = rows_in(path)
    with (
        closing(sqlite3.connect(path)) as raw,
        pytest.raises(sqlite3.IntegrityError, match="append-only"),
    ):
        raw.execute(statement)
    assert rows_in(path) == before


@pytest.mark.parametrize("verb", ["REPLACE", "INSERT OR REPLACE"])
def test_a_row_can_not_be_replaced(path: Path, verb: str) -> None:
    insert(path, {})
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        insert(path, {"id": 1, "median_us": 9.9}, verb)
    assert rows_in(path) == [(1, "ok", 10.0)]


@pytest.mark.parametrize(
    "change",
    [
        "median_us = 5.0, p10_us = 5.0, p90_us = 5.0, samples_us = '[5]'",
        "status = 'ok'",
        "median_us = 5.0",
        "status = NULL",
        "verified = NULL",
        "samples_us = '[5]'",
    ],
)
def test_the_checks_hold_for_update_even_without_the_triggers(path: Path, change: str) -> None:
    insert(path, FAILED)
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("DROP TRIGGER trials_no_update")
        with pytest.raises(sqlite3.IntegrityError, match="constraint failed"):
            raw.execute(f"UPDATE trials SET {change}")
        raw.execute("UPDATE trials SET reason = 'this much is possible then'")


def test_an_update_can_not_take_the_verification_from_under_a_time(path: Path) -> None:
    insert(path, {})
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("DROP TRIGGER trials_no_update")
        for change in ("verified = 0", "verified = NULL", "status = 'wrong'", "error = NULL"):
            with pytest.raises(sqlite3.IntegrityError, match="constraint failed"):
                raw.execute(f"UPDATE trials SET {change}")


def test_columns_are_the_fields_of_problem_and_config() -> None:
    names = set(schema.trials.c.keys())
    assert {f.name for f in fields(GemmProblem)} <= names
    assert {f.name for f in fields(GemmConfig)} <= names


def ddl(path: Path) -> dict[str, str]:
    with closing(sqlite3.connect(path)) as raw:
        found = raw.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    return {name: " ".join(sql.split()) for name, sql in found}


def test_a_changed_schema_has_a_new_version(path: Path) -> None:
    """Another column or rule: raise SCHEMA_VERSION, add a migration, keep the old sample, and
    make the new one with tools/schema_sample.py."""
    sample = DATA / f"schema_v{schema.SCHEMA_VERSION}.db"
    assert ddl(path) == ddl(sample)


def test_samples_of_every_schema_can_still_be_read(tmp_path: Path) -> None:
    samples = sorted(DATA.glob("schema_v*.db"))
    assert [s.name for s in samples] == [
        f"schema_v{v}.db" for v in range(1, schema.SCHEMA_VERSION + 1)
    ]
    for sample in samples:
        copy = tmp_path / sample.name
        shutil.copy(sample, copy)
        with TuningDatabase.open(copy) as db:
            best = db.best(GemmProblem("dense", 64, 2112, 7168), "NVIDIA H200", 132)
            assert best is not None
            assert best.median_us == 10.0
            assert db.counts()["wrong"] == 1
            assert [o.outcome for o in db.outcomes()] == ["tuned", "untunable"]
            assert [run.state for run in db.runs()] == ["finished"]


def test_the_tables_are_plain_enough_for_postgresql() -> None:
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    for table in schema.metadata.sorted_tables:
        text = str(CreateTable(table).compile(dialect=dialect))
        assert "CREATE TABLE" in text
        for index in table.indexes:
            assert str(CreateIndex(index).compile(dialect=dialect))
    assert "verified BOOLEAN NOT NULL" in str(CreateTable(schema.trials).compile(dialect=dialect))


def test_sqlite_has_one_place() -> None:
    for source in (ROOT / "kgen").rglob("*.py"):
        if source.name != "sqlite.py":
            text = source.read_text(encoding="utf-8")
            assert "PRAGMA" not in text, source
            assert "sqlite_master" not in text, source


# -- files --------------------------------------------------------------------------------------


def everything_in(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def test_an_empty_file_is_initialised(tmp_path: Path) -> None:
    path = tmp_path / "empty.db"
    path.touch()
    with TuningDatabase.open(path) as db:
        assert db.trials() == []


@pytest.mark.parametrize("readonly", [False, True])
def test_a_newer_schema_is_refused_untouched(path: Path, readonly: bool) -> None:
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("UPDATE schema_info SET version = 9")
    before = everything_in(path.parent)
    with pytest.raises(DatabaseError, match=r"schema 9.*knows up to 1.*left it alone"):
        TuningDatabase.open(path, readonly=readonly)
    assert everything_in(path.parent) == before
    assert set(before) == {"tuning.db"}


def test_a_newer_schema_whose_writer_was_killed_is_refused_untouched(path: Path) -> None:
    """Then the version stands in the -wal file, and reading it must not fold that in."""
    raw = sqlite3.connect(path)
    raw.execute("UPDATE schema_info SET version = 9")
    raw.commit()
    other = path.parent / "copy"
    other.mkdir()
    for name in ("tuning.db", "tuning.db-wal"):
        shutil.copy(path.parent / name, other / name)
    raw.close()
    before = everything_in(other)
    assert len(before["tuning.db-wal"]) > 0
    with pytest.raises(DatabaseError, match="schema 9"):
        TuningDatabase.open(other / "tuning.db")
    after = everything_in(other)
    after.pop("tuning.db-shm", None)  # SQLite's index of the -wal file, no data
    assert after == before


def test_an_older_schema_without_a_way_is_told_in_one_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "SCHEMA_VERSION", 2)
    before = path.read_bytes()
    with pytest.raises(DatabaseError, match=r"schema 1.*needs 2.*mv .*tuning\.db") as caught:
        TuningDatabase.open(path)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


def add_note(connection: Connection) -> None:
    connection.exec_driver_sql("ALTER TABLE runs ADD COLUMN note VARCHAR")


def break_off(connection: Connection) -> None:
    add_note(connection)
    connection.exec_driver_sql("SELECT * FROM no_such_table")


def test_an_older_schema_is_migrated_after_a_backup(
    path: Path, monkeypatch: pytest.MonkeyPatch, make_trial: MakeTrial
) -> None:
    with TuningDatabase.open(path) as db:
        db.record(make_trial())
    monkeypatch.setattr(schema, "SCHEMA_VERSION", 2)
    monkeypatch.setattr(schema, "MIGRATIONS", {1: add_note})
    with pytest.raises(DatabaseError, match="kgen tune"):
        TuningDatabase.open(path, readonly=True)
    with TuningDatabase.open(path) as db:
        assert len(db.trials()) == 1
    for name, version in (("tuning.db", 2), ("tuning.db.v1.bak", 1)):
        with closing(sqlite3.connect(path.parent / name)) as raw:
            assert raw.execute("SELECT version FROM schema_info").fetchall() == [(version,)]
            assert raw.execute("SELECT count(*) FROM trials").fetchall() == [(1,)]
    assert "note VARCHAR" in ddl(path)["runs"]
    TuningDatabase.open(path).close()
    assert not (path.parent / "tuning.db.v1-2.bak").exists()


def test_a_migration_that_fails_leaves_the_old_database(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ddl(path)
    monkeypatch.setattr(schema, "SCHEMA_VERSION", 2)
    monkeypatch.setattr(schema, "MIGRATIONS", {1: break_off})
    with pytest.raises(DatabaseError, match="no_such_table"):
        TuningDatabase.open(path)
    assert ddl(path) == before
    assert (path.parent / "tuning.db.v1.bak").exists()


def test_a_missing_column_is_named(path: Path) -> None:
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("ALTER TABLE trials DROP COLUMN registers")
    with pytest.raises(DatabaseError, match=r"trials lacks registers: move it away"):
        TuningDatabase.open(path)


@pytest.mark.parametrize("content", [b"x", b"not a database\n" * 100, b"SQLite format 3\0" * 40])
def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(DatabaseError, match="not an SQLite database"):
        TuningDatabase.open(path)
    assert everything_in(tmp_path) == {"notes.txt": content}


def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "photos.db"
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("CREATE TABLE photos (name TEXT)")
    before = everything_in(tmp_path)
    with pytest.raises(DatabaseError, match=r"something else.*photos"):
        TuningDatabase.open(path)
    assert everything_in(tmp_path) == before


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="folder"):
        TuningDatabase.open(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_not_made_by_a_reader(tmp_path: Path) -> None:
    for options in ({"create": False}, {"readonly": True}):
        with pytest.raises(DatabaseError, match="no database at"):
            TuningDatabase.open(tmp_path / "sub" / "tuning.db", **options)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty.db").touch()
    with pytest.raises(DatabaseError, match="empty"):
        TuningDatabase.open(tmp_path / "empty.db", create=False)


def test_a_folder_that_can_not_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DatabaseError, match="folder"):
        TuningDatabase.open(tmp_path / "file" / "tuning.db")


@pytest.mark.parametrize("url", ["nonsense://", "frog+toad://a/b", "://"])
def test_a_bad_url_is_an_error(url: str) -> None:
    with pytest.raises(DatabaseError):
        TuningDatabase.open(url)


def test_a_path_may_hold_any_character(tmp_path: Path, make_trial: MakeTrial) -> None:
    path = tmp_path / "über 100% #1?" / "t&ü.db"
    with TuningDatabase.open(path) as db:
        db.record(make_trial())
    assert path.exists()
    with TuningDatabase.open(f"sqlite:///file:{tmp_path}/plain.db?uri=true") as db:
        db.record(make_trial())
    assert (tmp_path / "plain.db").exists()


def test_json_columns_hold_json(path: Path, make_trial: MakeTrial) -> None:
    with TuningDatabase.open(path) as db:
        db.record(make_trial())
        with pytest.raises(DatabaseError, match="refused"):
            db.record(make_trial(provenance={**make_trial().provenance, "x": float("nan")}))
    with closing(sqlite3.connect(path)) as raw:
        ((text,),) = raw.execute("SELECT provenance FROM trials").fetchall()
    assert json.loads(text)["clocks"] == {"sm_mhz": 1755.0, "mem_mhz": 3201.0}
