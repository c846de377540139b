"""`kgen db`: its commands, what they print and their exit codes."""

from __future__ import annotations

import argparse
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kgen.cache import bundles, census, schema
from kgen.cache.db import TuningDatabase
from kgen.cli import db as db_command
from kgen.cli import db_bundles
from kgen.cli.main import build_parser, main
from tests.unit.conftest import MakeTrial

PARTS = ("export", "import", "merge", "diff", "stats", "verify", "prune", "migrate", "keys")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with a database of two timed trials, and a folder for keys."""
    for name in ("KGEN_DB", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KGEN_KEYS_DIR", str(tmp_path / "keys"))
    return tmp_path


@pytest.fixture
def db(home: Path, make_trial: MakeTrial) -> Path:
    path = home / "cache" / "tuning.db"
    with TuningDatabase.open(path) as db:
        db.record(make_trial(10.0))
        db.record(make_trial(8.0, cubin_key="d" * 64))
    return path


def parsers() -> dict[str, argparse.ArgumentParser]:
    def children(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
        return next(dict(a.choices) for a in parser._actions if isinstance(a.choices, dict))

    return children(children(build_parser())["db"])


def exit_code_of(*words: str) -> int:
    try:
        return main(words)
    except SystemExit as left:
        return int(left.code or 0)


def test_commands_are_these() -> None:
    assert set(parsers()) == set(PARTS)
    for name, parser in parsers().items():
        for action in parser._actions:
            if action.option_strings and action.option_strings[-1] != "--help":
                assert "default: " in (action.help or "") or action.required, f"{name} {action}"


def test_defaults_are_those_of_the_modules() -> None:
    assert db_command.KEEP == census.KEEP
    assert db_bundles.CUBINS == bundles.CUBINS


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("fly",),
        ("export",),
        ("import",),
        ("merge", "a.db"),
        ("prune", "--keep", "0"),
        ("keys", "trust"),
        ("keys", "list", "ed25519:00"),
        ("export", "--shapes", "absent.txt", "-o", "x"),
        ("export", "--cubins", "some", "-o", "x"),
    ],
)
def test_wrong_usage_is_2(words: tuple[str, ...], capsys: Capture) -> None:
    assert exit_code_of("db", *words) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "words", [("stats",), ("export", "-o", "x"), ("prune",), ("migrate",), ("import", "absent")]
)
def test_without_a_database_it_is_1(home: Path, words: tuple[str, ...], capsys: Capture) -> None:
    assert main(["db", *words]) == 1
    assert "kgen: error:" in capsys.readouterr().err
    assert not (home / "cache").exists()


def told(capsys: Capture, *words: str) -> Any:
    assert main(["db", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_from_export_to_import(db: Path, home: Path, capsys: Capture) -> None:
    path = home / "x.kgen"
    done = told(capsys, "export", "-o", str(path), "--json")
    assert done["rows"] == {"trials": 2, "outcomes": 0, "runs": 0}
    other = str(home / "other.db")
    taken = told(capsys, "import", str(path), "--db", other, "--json")
    assert taken["counts"]["added"]["trials"] == 1  # both are of one configuration
    assert taken["verdict"]["words"] == "not signed"
    assert main(["db", "import", str(path), "--db", other]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("other.db: 0 suggestions added; 1 known already\n")
    assert "not signed" in err


def test_signed_by_a_key_that_was_made_here(db: Path, home: Path, capsys: Capture) -> None:
    pytest.importorskip("cryptography")
    path = str(home / "x.kgen")
    assert main(["db", "export", "--sign", "-o", path]) == 1
    assert "kgen db keys generate" in capsys.readouterr().err
    (one,) = told(capsys, "keys", "generate", "--json")
    assert told(capsys, "export", "--sign", "-o", path, "--json")["key"] == one["key"]
    other = str(home / "other.db")
    assert main(["db", "import", path, "--db", other]) == 0
    assert "2 trials, 0 outcomes, 0 kernels added" in capsys.readouterr().out
    assert main(["db", "keys", "distrust", one["key"]]) == 0
    capsys.readouterr()
    assert main(["db", "import", path, "--db", str(home / "third.db")]) == 0
    out, err = capsys.readouterr()
    assert "1 suggestion added" in out
    assert "not trusted here" in err
    (again,) = told(capsys, "keys", "trust", one["key"], "--name", "Ada", "--json")
    assert again == {"key": one["key"], "name": "Ada"}


def test_a_hostile_bundle_makes_no_database(db: Path, home: Path, capsys: Capture) -> None:
    path = home / "x.kgen"
    assert main(["db", "export", "-o", str(path)]) == 0
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../../evil", b"x")
    other = home / "new" / "other.db"
    assert main(["db", "import", str(path), "--db", str(other)]) == 1
    assert "no bundle has an entry of that name" in capsys.readouterr().err
    assert not other.parent.exists()


def test_merge_diff_and_stats(db: Path, home: Path, make_trial: MakeTrial, capsys: Capture) -> None:
    b, c = home / "b.db", home / "c.db"
    with TuningDatabase.open(b) as other:
        other.record(make_trial(4.0, cubin_key="e" * 64))
    merged = told(capsys, "merge", str(db), str(b), "-o", str(c), "--json")
    assert merged["added"]["trials"] == 3
    assert main(["db", "merge", str(db), str(b), "-o", str(c)]) == 1
    assert main(["db", "merge", str(db), str(db)]) == 1
    capsys.readouterr()
    (one,) = told(capsys, "diff", str(db), str(b), "--json")
    assert one["ratio"] == pytest.approx(2.0)
    assert main(["db", "diff", str(db), str(b)]) == 0
    assert "2.000" in capsys.readouterr().out
    assert main(["db", "merge", str(db), str(b)]) == 0
    assert "1 trial, 0 outcomes added" in capsys.readouterr().out
    assert told(capsys, "diff", str(db), str(c), "--json") == []
    assert told(capsys, "stats", "--json")["trials"] == 3
    assert main(["db", "stats"]) == 0
    assert "NVIDIA H200, 132 SMs" in capsys.readouterr().out


def test_prune_tells_and_deletes(db: Path, make_trial: MakeTrial, capsys: Capture) -> None:
    with TuningDatabase.open(db) as database:
        database.record(make_trial(9.0, cubin_key="a" * 64))
    assert told(capsys, "prune", "--keep", "1", "--dry-run", "--json")["deleted"] == 1
    assert main(["db", "prune", "--keep", "1"]) == 0
    assert "1 trial deleted, 2 kept; copy before: " in capsys.readouterr().out


def test_migrate_says_that_there_is_nothing_to_do(
    db: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert main(["db", "migrate"]) == 0
    assert capsys.readouterr().out == f"{db} has schema 1, this kgen's: nothing to migrate\n"
    monkeypatch.setattr(schema, "SCHEMA_VERSION", 2)
    assert main(["db", "migrate"]) == 1
    assert "can not convert" in capsys.readouterr().err
    monkeypatch.setattr(schema, "MIGRATIONS", {1: lambda connection: None})
    assert main(["db", "migrate"]) == 0
    assert "converted from schema 1 to 2" in capsys.readouterr().out
    assert db.with_name("tuning.db.v1.bak").exists()


def test_verify_needs_a_gpu(db: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    from kgen.errors import GpuMissing
    from kgen.search.gpu_worker import GpuWorker

    def no_gpu(self: GpuWorker) -> None:
        raise GpuMissing("no CUDA driver on this machine")

    monkeypatch.setattr(GpuWorker, "hello", no_gpu)
    assert main(["db", "verify"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "verify needs a GPU, and there is none here" in err
