"""Bundles: what goes in comes out, whom to believe, and what an enemy's file may do: nothing."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kgen.cache import bundle_rows, bundles, container
from kgen.cache.artifacts import ArtifactStore
from kgen.cache.container import MANIFEST, ROWS, create_bundle, open_bundle
from kgen.cache.db import TuningDatabase
from kgen.cache.records import ProblemOutcome, TrialRecord
from kgen.cache.schema import SCHEMA_VERSION
from kgen.cache.transfer import COLUMNS
from kgen.cache.trust import KeyRing
from kgen.config import GemmConfig
from kgen.errors import BundleError
from kgen.problem import GemmProblem

MakeTrial = Callable[..., TrialRecord]
PROBLEM = GemmProblem("dense", 64, 2112, 7168)
OTHER = GemmProblem("dense", 128, 2112, 7168)
HERE = ("NVIDIA H200", 132)
WIDE, NARROW = GemmConfig(block_n=208), GemmConfig(block_n=96)
FACTS = {"registers": 168, "spill_bytes": 0, "entry": "gemm"}


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    store = ArtifactStore(tmp_path / "cache")
    for letter in "wn":
        store.put(letter_key(letter), f"// {letter}\n", letter.encode() * 9, "log", FACTS)
    return store


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing(tmp_path / "keys")


@pytest.fixture
def full(tmp_path: Path, make_trial: MakeTrial) -> TuningDatabase:
    """A run with two cubins timed, one failure, one prediction, an outcome; and a row without."""
    db = TuningDatabase.open(tmp_path / "full.db")
    run = db.begin_run("kgen tune x", {"seed": 1}).id
    db.record(make_trial(10.0, config=WIDE, cubin_key=letter_key("w"), predicted_us=9.0), run)
    db.record(make_trial(8.0, config=NARROW, cubin_key=letter_key("n")), run)
    db.record(make_trial(status="wrong", config=GemmConfig(block_m=64), error=3.0), run)
    db.record(make_trial(status="compiled", source="predicted", predicted_us=7.0), run)
    db.record(make_trial(30.0, problem=OTHER, config=WIDE, cubin_key=letter_key("w")))
    outcome = ProblemOutcome(problem=PROBLEM, device_name=HERE[0], num_sms=132, outcome="tuned")
    db.record_outcome(outcome, run)
    db.end_run(run)
    return db


def letter_key(letter: str) -> str:
    return hashlib.sha256(letter.encode()).hexdigest()


def fresh(tmp_path: Path, name: str = "fresh.db") -> TuningDatabase:
    return TuningDatabase.open(tmp_path / name)


def content(db: TuningDatabase) -> list[Any]:
    """Everything but the numbers of rows."""
    rows = [trial.to_dict() | {"id": 0, "run_id": 0} for trial in db.trials()]
    return rows + [outcome.to_dict() | {"run_id": 0} for outcome in db.outcomes()]


def take(db: TuningDatabase, path: Path, store: ArtifactStore, ring: KeyRing) -> bundles.Taken:
    with open_bundle(path) as bundle:
        return bundles.take(db, bundle, store, ring)


# -- whom to believe ----------------------------------------------------------------------------


def test_a_trusted_bundle_brings_rows_runs_and_kernels(
    tmp_path: Path, full: TuningDatabase, store: ArtifactStore, ring: KeyRing
) -> None:
    pytest.importorskip("cryptography")
    key = ring.generate()
    path = tmp_path / "full.kgen"
    done = bundles.export(full, path, store, sign_with=ring)
    assert (done.rows, done.kernels, done.key) == (
        {"trials": 5, "outcomes": 1, "runs": 1},
        2,  # of the winners of both problems
        key,
    )
    there = ArtifactStore(tmp_path / "there")
    with fresh(tmp_path) as db:
        taken = take(db, path, there, ring)
        assert taken.verdict.trusted
        assert taken.counts.added == {"trials": 5, "outcomes": 1, "runs": 1}
        assert taken.kernels == 2
        assert content(db) == content(full)
        assert [run.command for run in db.runs()] == ["kgen tune x", "kgen db import"]
        assert [trial.run_id for trial in db.trials()] == [1, 1, 1, 1, 2]
        assert db.best(PROBLEM, *HERE) == full.best(PROBLEM, *HERE)
        again = take(db, path, there, ring)
        assert again.counts.known == {"trials": 5, "outcomes": 1, "runs": 1}
        assert sum(again.counts.added.values()) == again.kernels == 0
        assert len(db.runs()) == 2
    artifact = there.get(letter_key("n"))
    assert artifact is not None
    assert (artifact.cubin, artifact.facts, artifact.log) == (b"n" * 9, FACTS, "log")
    assert artifact.source_path is not None
    assert artifact.source_path.read_text() == "// n\n"


@pytest.mark.parametrize("signed", [False, True])
def test_any_other_bundle_only_suggests(
    tmp_path: Path, full: TuningDatabase, store: ArtifactStore, ring: KeyRing, signed: bool
) -> None:
    path = tmp_path / "full.kgen"
    stranger = None
    if signed:
        pytest.importorskip("cryptography")
        stranger = KeyRing(tmp_path / "stranger")
        stranger.generate()
    bundles.export(full, path, store, sign_with=stranger)
    there = ArtifactStore(tmp_path / "there")
    with fresh(tmp_path) as db:
        taken = take(db, path, there, ring)
        assert not taken.verdict.trusted
        assert taken.counts.added["trials"] == 3
        assert not there.folder.exists()
        rows = db.trials()
        assert {(row.status, row.source, row.cubin_key) for row in rows} == {
            ("compiled", "predicted", "")
        }
        assert all(not row.verified and row.median_us is None for row in rows)
        assert db.best(PROBLEM, *HERE) is None
        assert db.winners() == []
        hints = db.suggestions(PROBLEM, *HERE)
        assert {hint.config for hint in hints} == {WIDE, NARROW}
        assert db.outcomes() == []
        assert [run.command for run in db.runs()] == ["kgen db import"]
        again = take(db, path, there, ring)
        assert again.counts.known["trials"] == 3
        assert len(db.trials()) == 3


def test_only_the_fastest_of_a_stranger_are_suggested(
    tmp_path: Path, make_trial: MakeTrial, store: ArtifactStore, ring: KeyRing
) -> None:
    with fresh(tmp_path, "many.db") as db:
        for number in range(100):
            config = GemmConfig(block_n=16 + 8 * (number % 20), num_stages=2 + number // 20)
            db.record(make_trial(100.0 - number, config=config, cubin_key=f"{number:064x}"))
        bundles.export(db, tmp_path / "many.kgen", store)
    with fresh(tmp_path) as db:
        taken = take(db, tmp_path / "many.kgen", store, ring)
        assert taken.counts.added["trials"] + taken.skipped == 8
        assert {row.config.num_stages for row in db.trials()} <= {6}


def test_a_kernel_that_is_there_stays(
    tmp_path: Path, full: TuningDatabase, store: ArtifactStore, ring: KeyRing
) -> None:
    pytest.importorskip("cryptography")
    ring.generate()
    bundles.export(full, tmp_path / "x.kgen", store, sign_with=ring)
    there = ArtifactStore(tmp_path / "there")
    there.put(letter_key("n"), "// mine\n", b"mine", "", FACTS)
    with fresh(tmp_path) as db:
        assert take(db, tmp_path / "x.kgen", there, ring).kernels == 1
    kept = there.get(letter_key("n"))
    assert kept is not None
    assert kept.cubin == b"mine"


def test_a_part_is_exported(
    tmp_path: Path, full: TuningDatabase, store: ArtifactStore, ring: KeyRing
) -> None:
    path = tmp_path / "part.kgen"
    assert bundles.export(full, path, store, best=True).rows == {
        "trials": 2,
        "outcomes": 1,
        "runs": 1,
    }
    one = bundles.export(full, path, store, problems=[OTHER], cubins="all")
    assert (one.rows, one.kernels) == ({"trials": 1, "outcomes": 0, "runs": 0}, 1)
    assert bundles.export(full, path, store, cubins="none").kernels == 0
    assert sorted(p.name for p in tmp_path.glob(".*")) == []


# -- hostile files ------------------------------------------------------------------------------


@pytest.fixture
def good(tmp_path: Path, full: TuningDatabase, store: ArtifactStore) -> Path:
    path = tmp_path / "good.kgen"
    bundles.export(full, path, store)
    return path


def entries_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_zip(path: Path, entries: list[tuple[str | zipfile.ZipInfo, bytes]]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries:
            archive.writestr(name, data, zipfile.ZIP_DEFLATED)
    return path


def remade(path: Path, change: Callable[[dict[str, bytes], dict[str, Any]], None]) -> Path:
    """The bundle with entries and manifest changed, its hashes in order again."""
    entries = entries_of(path)
    manifest = json.loads(entries.pop(MANIFEST))
    change(entries, manifest)
    for name, data in entries.items():
        told = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        manifest["files"].setdefault(name, {}).update(told)
    items: list[tuple[str | zipfile.ZipInfo, bytes]] = list(entries.items())
    return write_zip(path, [*items, (MANIFEST, json.dumps(manifest).encode())])


def refused(
    tmp_path: Path, path: Path, match: str, ring: KeyRing | None = None, name: str = "mine.db"
) -> None:
    """The bundle is refused with those words, and the database says what it said."""
    with fresh(tmp_path, name) as db:
        before = db.export()
        there = ArtifactStore(tmp_path / "there")
        with pytest.raises(BundleError, match=match):
            take(db, path, there, ring or KeyRing(tmp_path / "none"))
        assert db.export() == before
        assert not there.folder.exists()


@pytest.mark.parametrize(
    "name",
    [
        "../evil.txt",
        "/etc/passwd",
        "rows/../../evil",
        "artifacts/../kernel.cu",
        "artifacts/" + "0" * 64 + "/../kernel.cu",
        "artifacts/" + "0" * 64 + "/kernel.so",
        "artifacts/" + "A" * 64 + "/kernel.cu",
        "C:\\evil",
        "rows/",
        "rows/trials.jsonl/",
        "manifest.json\0.txt",
        "rows/trials.pickle",
        "x" * 60_000,
        "",
    ],
)
def test_names_that_no_bundle_has_are_refused(tmp_path: Path, good: Path, name: str) -> None:
    with zipfile.ZipFile(good, "a") as archive:
        info = zipfile.ZipInfo("placeholder")
        info.filename = name
        archive.writestr(info, b"x")
    refused(tmp_path, good, "no bundle has an entry of that name|no bundle, cut")


def test_links_and_odd_entries_are_refused(tmp_path: Path, good: Path) -> None:
    name = f"artifacts/{'0' * 64}/kernel.cu"
    link = zipfile.ZipInfo(name)
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(good, "a") as archive:
        archive.writestr(link, b"/etc/passwd")
    refused(tmp_path, good, "no regular file")
    packed = zipfile.ZipInfo(name)
    packed.compress_type = zipfile.ZIP_BZIP2
    with zipfile.ZipFile(tmp_path / "b.kgen", "w") as archive:
        archive.writestr(packed, b"x" * 100)
    refused(tmp_path, tmp_path / "b.kgen", "packed as no bundle is")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_doubled_names_are_refused(tmp_path: Path, good: Path) -> None:
    with zipfile.ZipFile(good, "a") as archive:
        archive.writestr(ROWS["trials"], b"")
    refused(tmp_path, good, "two entries named")


def test_a_bomb_is_refused_before_it_unfolds(tmp_path: Path, good: Path) -> None:
    def bomb(entries: dict[str, bytes], manifest: dict[str, Any]) -> None:
        entries[ROWS["trials"]] = b"\n" * (50 << 20)

    refused(tmp_path, remade(good, bomb), "zip bomb")


def test_declared_sizes_are_bounded(tmp_path: Path, good: Path) -> None:
    patch_directory(good, b"manifest.json", 24, struct.pack("<L", 0xFFFFFFF0))
    refused(tmp_path, good, "expected at most|cut or altered")


def test_more_than_was_declared_is_not_unfolded(tmp_path: Path, good: Path) -> None:
    """The directory says 4 bytes, the data holds a hundred thousand."""

    def long(entries: dict[str, bytes], manifest: dict[str, Any]) -> None:
        entries[ROWS["outcomes"]] = bytes(range(256)) * 400

    path = remade(good, long)
    patch_directory(path, ROWS["outcomes"].encode(), 24, struct.pack("<L", 4))
    refused(tmp_path, path, "altered")


def test_too_many_entries_are_not_even_listed(
    tmp_path: Path, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "MAX_ENTRIES", 4)
    refused(tmp_path, good, "expected at most 4 entries")


def test_entries_that_share_their_bytes_are_refused(tmp_path: Path, good: Path) -> None:
    data = bytearray(good.read_bytes())
    end = struct.unpack("<4s4H2LH", data[-22:])
    place = data.index(ROWS["outcomes"].encode(), end[6]) - 46
    data[place + 42 : place + 46] = struct.pack("<L", 0)
    good.write_bytes(data)
    refused(tmp_path, good, "lies over another|cut or altered|File name in directory")


@pytest.mark.parametrize("junk", [b"x", b"x" * 22, b"PK\5\6" + bytes(18)])
def test_bytes_around_a_bundle_are_refused(tmp_path: Path, good: Path, junk: bytes) -> None:
    whole = good.read_bytes()
    good.write_bytes(whole + junk)
    refused(tmp_path, good, "no bundle|before or behind")
    good.write_bytes(junk + whole)
    refused(tmp_path, good, "before or behind")


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    for number, data in enumerate((b"", b"x", b"SQLite format 3\0" * 99, b"PK\5\6" + bytes(18))):
        path = tmp_path / f"{number}.kgen"
        path.write_bytes(data)
        refused(tmp_path, path, "no bundle|no manifest")
    refused(tmp_path, tmp_path / "absent", "can not be read")
    refused(tmp_path, tmp_path, "can not be read")


def test_another_schema_is_refused(tmp_path: Path, good: Path) -> None:
    def newer(entries: dict[str, bytes], manifest: dict[str, Any]) -> None:
        manifest["schema_version"] = SCHEMA_VERSION + 1

    def columns(entries: dict[str, bytes], manifest: dict[str, Any]) -> None:
        manifest["columns"]["trials"].append("secret")

    def format_(entries: dict[str, bytes], manifest: dict[str, Any]) -> None:
        manifest["format_version"] = 2

    whole = good.read_bytes()
    for change, words in (
        (newer, "schema '2', made"),
        (columns, "schema '1', with other"),
        (format_, "format '2'"),
    ):
        good.write_bytes(whole)
        refused(tmp_path, remade(good, change), words)


def test_a_manifest_names_what_is_there(tmp_path: Path, good: Path) -> None:
    def less(entries: dict[str, bytes], manifest: dict[str, Any]) -> None:
        del entries[next(name for name in entries if name.endswith(".cubin"))]

    def rows(entries: dict[str, bytes], manifest: dict[str, Any]) -> None:
        del entries[ROWS["runs"]], manifest["files"][ROWS["runs"]]

    def part(entries: dict[str, bytes], manifest: dict[str, Any]) -> None:
        name = next(name for name in entries if name.endswith(".cubin"))
        del entries[name], manifest["files"][name]

    def digest(entries: dict[str, bytes], manifest: dict[str, Any]) -> None:
        manifest["files"]["rows/more.jsonl"] = {"sha256": "x", "bytes": -1}

    whole = good.read_bytes()
    for change, words in (
        (less, "not in both"),
        (rows, "does not name its rows"),
        (part, "lacks kernel.cubin"),
        (digest, "nothing sensible"),
    ):
        good.write_bytes(whole)
        refused(tmp_path, remade(good, change), words)


def test_rows_are_read_the_same_a_second_time(good: Path) -> None:
    with open_bundle(good) as bundle:
        for table in ROWS:
            first = list(bundle_rows.from_lines(table, bundle.lines(table), "x"))
            assert list(bundle_rows.again(table, bundle.lines(table))) == first
            assert len(first) > 0


@pytest.mark.parametrize("line", [b"[", b"1", b"[]", b"{}", b"\xff", b'["x"]'])
def test_a_bundle_that_changes_while_it_is_read_is_refused(line: bytes) -> None:
    with pytest.raises(BundleError, match="altered while it was read"):
        list(bundle_rows.again("trials", [line]))


TRIALS = COLUMNS["trials"]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("m", "64"),
        ("m", 0),
        ("m", 2**80),
        ("m", True),
        ("bias", 2),
        ("kind", "sparse"),
        ("median_us", 0.0),
        ("median_us", "8"),
        ("median_us", 1e400),
        ("p10_us", 11.0),
        ("error", 2.0),
        ("verified", 0),
        ("status", "fine"),
        ("source", "predicted"),
        ("cubin_key", ""),
        ("device_name", ""),
        ("device_name", "H200\x1b[2J"),
        ("device_name", "\ud800"),
        ("device_num_sms", 0),
        ("date", "yesterday"),
        ("date", "2026-01-01"),
        ("samples_us", []),
        ("samples_us", ["1"]),
        ("samples_us", {"a": 1}),
        ("provenance", {}),
        ("provenance", [1]),
        ("provenance", "x"),
        ("policy", "x" * 2000),
        ("reason", "x" * 70_000),
        ("reason", "\ud800"),
        ("id", None),
        ("run_id", 1.5),
    ],
)
def test_rows_that_kgen_never_wrote_are_refused(
    tmp_path: Path, good: Path, column: str, value: Any
) -> None:
    def spoil(entries: dict[str, bytes], manifest: dict[str, Any]) -> None:
        first, *rest = entries[ROWS["trials"]].splitlines(keepends=True)
        row = json.loads(first)
        row[TRIALS.index(column)] = value
        entries[ROWS["trials"]] = b"".join([*rest, json.dumps(row).encode() + b"\n"])

    refused(tmp_path, remade(good, spoil), "line 5 of trials|line 5 of")


@pytest.mark.parametrize(
    "line",
    [b"", b"{}", b"[1]", b"[" * 100_000, b"NaN", b"\xff", b"1" * 5000, b'{"a":1,"a":2}'],
)
@pytest.mark.parametrize("table", ["runs", "trials", "outcomes"])
def test_lines_that_are_no_rows_are_refused(
    tmp_path: Path, good: Path, table: str, line: bytes
) -> None:
    def spoil(entries: dict[str, bytes], manifest: dict[str, Any]) -> None:
        entries[ROWS[table]] += line + b"\n"

    refused(tmp_path, remade(good, spoil), f"of {table}")


def test_endless_and_half_lines_are_refused(tmp_path: Path, good: Path) -> None:
    def half(entries: dict[str, bytes], manifest: dict[str, Any]) -> None:
        entries[ROWS["runs"]] = entries[ROWS["runs"]][:-1]

    def endless(entries: dict[str, bytes], manifest: dict[str, Any]) -> None:
        entries[ROWS["runs"]] = bytes(range(33, 127)) * 20_000

    whole = good.read_bytes()
    refused(tmp_path, remade(good, half), "middle of a line")
    good.write_bytes(whole)
    refused(tmp_path, remade(good, endless), "line above|zip bomb")


def test_rows_are_refused_of_trusted_bundles_too(
    tmp_path: Path, full: TuningDatabase, store: ArtifactStore, ring: KeyRing
) -> None:
    """The last row is bad, after four that were appended already: the transaction ends."""
    pytest.importorskip("cryptography")
    ring.generate()
    path = tmp_path / "x.kgen"
    bundles.export(full, path, store)

    def spoil(entries: dict[str, bytes], manifest: dict[str, Any]) -> None:
        lines = entries[ROWS["trials"]].splitlines(keepends=True)
        entries[ROWS["trials"]] = b"".join(lines).replace(b"wrong", b"wring")

    entries = entries_of(remade(path, spoil))
    signature = ring.sign(entries[MANIFEST])
    items: list[tuple[str | zipfile.ZipInfo, bytes]] = list(entries.items())
    write_zip(path, [*items, ("signature.json", json.dumps(signature).encode())])
    refused(tmp_path, path, "line 3 of trials", ring)


def test_a_signature_of_another_manifest_is_refused(
    tmp_path: Path, full: TuningDatabase, store: ArtifactStore, ring: KeyRing
) -> None:
    pytest.importorskip("cryptography")
    ring.generate()
    path = tmp_path / "x.kgen"
    bundles.export(full, path, store, sign_with=ring)
    entries = entries_of(path)
    signature = entries.pop("signature.json")
    manifest = json.loads(entries.pop(MANIFEST)) | {"kgen_version": "9"}
    for text in (
        signature,
        b'{"key": "x"}',
        b"[]",
        signature.replace(b'"signature": "', b'"s": "'),
    ):
        write_zip(
            path,
            [*entries.items(), (MANIFEST, json.dumps(manifest).encode()), ("signature.json", text)],
        )
        refused(tmp_path, path, "altered|expected a JSON object", ring)


def test_a_cut_bundle_is_refused(tmp_path: Path, good: Path) -> None:
    whole = good.read_bytes()
    with fresh(tmp_path) as db:
        for length in range(0, len(whole), 97):
            good.write_bytes(whole[:length])
            with pytest.raises(BundleError):
                take(db, good, ArtifactStore(tmp_path / "there"), KeyRing(tmp_path / "none"))
        assert db.trials() == []


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_an_altered_bundle_brings_what_it_did_or_is_refused(
    tmp_path: Path, good: Path, data: st.DataObject
) -> None:
    """One byte is changed: then either nobody needed it (a date in a header), or it is refused."""
    whole = bytearray(good.read_bytes())
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "altered.kgen"
    path.write_bytes(whole)
    with closing(TuningDatabase.open("sqlite://")) as db:
        try:
            taken = take(db, path, ArtifactStore(tmp_path / "there"), KeyRing(tmp_path / "none"))
        except BundleError:
            assert db.trials() == []
            return
        assert taken.counts.added["trials"] == 3


def patch_directory(path: Path, name: bytes, offset: int, value: bytes) -> None:
    """Change a field of an entry in the zip's directory."""
    data = bytearray(path.read_bytes())
    start = struct.unpack("<4s4H2LH", data[-22:])[6]
    place = data.index(name, start) - 46 + offset
    data[place : place + len(value)] = value
    path.write_bytes(data)


# -- the file -----------------------------------------------------------------------------------


def test_a_bundle_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.kgen"

    def crash() -> None:
        with create_bundle(path) as writer:
            writer.add(ROWS["runs"], b"")
            raise RuntimeError("a crash")

    with pytest.raises(RuntimeError):
        crash()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BundleError, match="can not be written"), create_bundle(path / "y" / "z"):
        pass


def test_many_entries_need_a_longer_directory(tmp_path: Path) -> None:
    """Above 65,535 entries a zip has another end: it is read, and cut it is refused as well."""
    path = tmp_path / "x.kgen"
    with create_bundle(path) as writer:
        for name in ROWS.values():
            writer.add(name, b"")
        for number in range(16_400):
            for part in container.PARTS:
                writer.add(container.part_name(f"{number:064x}", part), b"x")
        writer.finish({})
    with open_bundle(path) as bundle:
        assert len(bundle.kernels()) == 16_400
    whole = path.read_bytes()
    for cut in (whole[:-23] + whole[-22:], whole[:-42] + bytes(20) + whole[-22:], b"x" + whole):
        path.write_bytes(cut)

        def read() -> None:
            with open_bundle(path):
                pass

        with pytest.raises(BundleError):
            read()


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "x.kgen"

    def write() -> None:
        with create_bundle(path) as writer:
            for name in ROWS.values():
                writer.add(name, b"\n" * (2 << 20))
            writer.finish({})

    with pytest.raises(BundleError, match="zip bomb"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_the_same_content_gives_the_same_bytes(
    tmp_path: Path, full: TuningDatabase, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kgen.cache.rows.now", lambda: "2026-01-01T00:00:00.000+00:00")
    for name in "ab":
        bundles.export(full, tmp_path / name, store)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    shutil.rmtree(store.folder)
    bundles.export(full, tmp_path / "c", store)
    with open_bundle(tmp_path / "c") as bundle:
        assert bundle.kernels() == []
