"""The artifact store: whole entries or none, whoever writes at once, whatever was left broken."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kgen.cache.artifacts import CUBIN, FACTS, LOG, SOURCE, Artifact, ArtifactStore
from kgen.errors import ArtifactError

KEY = "0a" * 32
CONTENT = bytes(range(256)) * 40
FACTS_HELD = {"registers": 168, "compiler": "nvrtc-13.0.88", "config": {"block_m": 128}}


def put(store: ArtifactStore, key: str = KEY) -> Artifact:
    return store.put(key, "// source é\n", CONTENT, "ptxas info: é", FACTS_HELD)


def entry(root: Path) -> Path:
    return root / "artifacts" / KEY[:2] / KEY


def leftovers(root: Path) -> list[Path]:
    return list((root / "artifacts").glob(".new-*"))


def test_what_was_put_is_got(tmp_path: Path) -> None:
    root = tmp_path / "a b é" / "nested"
    published = put(ArtifactStore(root))
    got = ArtifactStore(root).get(KEY)
    assert got == published
    assert (got.cubin, got.log, got.facts) == (CONTENT, "ptxas info: é", FACTS_HELD)
    assert got.source_path is not None
    assert got.source_path.read_text(encoding="utf-8") == "// source é\n"
    assert leftovers(root) == []


def test_nothing_is_created_before_the_first_put(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    assert ArtifactStore(root).get(KEY) is None
    assert not root.exists()


def test_another_key_is_a_miss_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ArtifactStore(tmp_path)
    put(store)
    assert store.get("0b" * 32) is None
    assert caplog.records == []


def test_entries_are_as_readable_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        put(ArtifactStore(tmp_path))
    finally:
        os.umask(before)
    assert entry(tmp_path).stat().st_mode & 0o777 == 0o755


def edit_facts(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    told = json.loads((path / FACTS).read_text())
    change(told)
    (path / FACTS).write_text(json.dumps(told))


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("not a folder")


def replace_by_empty_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def replace_by_dead_link(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to("nowhere")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cubin emptied": lambda p: (p / CUBIN).write_bytes(b""),
    "cubin halved": lambda p: (p / CUBIN).write_bytes(CONTENT[: len(CONTENT) // 2]),
    "cubin is text": lambda p: (p / CUBIN).write_text("error: no space left on device"),
    "cubin is a folder": lambda p: replace_by_folder(p / CUBIN),
    "cubin missing": lambda p: (p / CUBIN).unlink(),
    "one bit flipped": lambda p: (p / CUBIN).write_bytes(b"\x01" + CONTENT[1:]),
    "source changed": lambda p: (p / SOURCE).write_text("// other"),
    "log missing": lambda p: (p / LOG).unlink(),
    "facts missing": lambda p: (p / FACTS).unlink(),
    "facts emptied": lambda p: (p / FACTS).write_text(""),
    "facts cut off": lambda p: (p / FACTS).write_bytes((p / FACTS).read_bytes()[:60]),
    "facts are no object": lambda p: (p / FACTS).write_text("[1, 2]"),
    "facts without checksums": lambda p: edit_facts(p, lambda f: f.pop("sha256")),
    "facts changed": lambda p: edit_facts(p, lambda f: f["facts"].update(registers=1)),
    "facts not a table": lambda p: edit_facts(p, lambda f: f.update(facts="text")),
    "facts of another key": lambda p: edit_facts(p, lambda f: f.update(key="0b" * 32)),
    "facts in another code": lambda p: (p / FACTS).write_bytes(b"\xff\xfe{}"),
    "entry is a file": replace_by_file,
    "entry is empty": replace_by_empty_folder,
    "entry is a dead link": replace_by_dead_link,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_a_miss_with_one_warning_and_heals(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(ArtifactStore(tmp_path))
    DAMAGE[damage](entry(tmp_path))
    store = ArtifactStore(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert store.get(KEY) is None
        assert store.get(KEY) is None
    assert len(caplog.records) == 1
    assert KEY in caplog.text
    put(store)
    healed = ArtifactStore(tmp_path).get(KEY)
    assert healed is not None
    assert healed.cubin == CONTENT
    assert len(caplog.records) == 1
    assert leftovers(tmp_path) == []


def test_a_damaged_entry_that_another_process_removes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two heal one entry: the place was taken at the rename, and is free when looked at."""
    put(ArtifactStore(tmp_path))
    (entry(tmp_path) / CUBIN).write_bytes(b"")
    rename = Path.rename

    def beaten(new: Path, path: Path) -> Path:
        try:
            return rename(new, path)
        except OSError:
            shutil.rmtree(path)
            raise

    monkeypatch.setattr(Path, "rename", beaten)
    put(ArtifactStore(tmp_path))
    assert caplog.records == []
    healed = ArtifactStore(tmp_path).get(KEY)
    assert healed is not None
    assert healed.cubin == CONTENT


def a_file(tmp_path: Path) -> Path:
    (tmp_path / "taken").write_text("a file")
    return tmp_path / "taken"


@pytest.mark.parametrize(
    "root_of",
    [
        a_file,
        lambda p: a_file(p) / "below" / "it",
        lambda p: Path("/proc/no such folder"),
        lambda p: p / ("too long " * 40),
    ],
    ids=["a file", "below a file", "a read-only place", "a name too long"],
)
def test_a_folder_that_can_not_be_written_means_memory_and_one_warning(
    root_of: Callable[[Path], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ArtifactStore(root_of(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert store.get(KEY) is None
        first = put(store)
        put(store, "0b" * 32)
    assert first.source_path is None
    assert store.get(KEY) == first
    assert first.cubin == CONTENT
    assert len(caplog.records) == 1
    assert "not writable" in caplog.text


def test_what_a_killed_process_left_goes_after_a_day_and_not_before(tmp_path: Path) -> None:
    folder = tmp_path / "artifacts"
    old, young = folder / ".new-old", folder / ".new-young"
    for left in (old, young):
        left.mkdir(parents=True)
        (left / CUBIN).write_bytes(b"half")
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    put(ArtifactStore(tmp_path))
    assert leftovers(tmp_path) == [young]


@pytest.mark.parametrize("key", ["", "../" * 21 + "a", "0A" * 32, "0a" * 31, "0a" * 32 + "\n"])
def test_only_digests_are_keys(key: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="64 hexadecimal digits"):
        ArtifactStore(tmp_path).get(key)


def test_what_is_no_artifact_is_refused(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    with pytest.raises(ArtifactError, match="empty cubin"):
        store.put(KEY, "source", b"", "log", {})
    with pytest.raises(ArtifactError, match="facts that JSON can not hold"):
        store.put(KEY, "source", b"cubin", "log", {"facts": object()})
    assert store.get(KEY) is None


ROUNDS, PROCESSES = 20, 8


def race(root: str, barrier: Any, failures: Any) -> None:
    """Put and get the same key as the others do, at the same moment, over and over."""
    logging.disable()
    for number in range(ROUNDS):
        barrier.wait(60)
        key = f"{number:064x}"
        store = ArtifactStore(Path(root))
        published = put(store, key)
        got = store.get(key)
        if got is None or got.cubin != CONTENT or published.source_path is None:
            failures.put(f"round {number}: {got}")


def test_many_processes_publish_one_key_at_once(tmp_path: Path) -> None:
    for number in range(0, ROUNDS, 2):  # every second key has a broken entry in its place
        key = f"{number:064x}"
        broken = tmp_path / "artifacts" / key[:2] / key
        broken.mkdir(parents=True)
        (broken / CUBIN).write_bytes(b"half")
    spawn = multiprocessing.get_context("spawn")
    barrier, failures = spawn.Barrier(PROCESSES), spawn.Queue()
    children = [
        spawn.Process(target=race, args=(str(tmp_path), barrier, failures))
        for _ in range(PROCESSES)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(90)
    assert [child.exitcode for child in children] == [0] * PROCESSES
    assert failures.empty(), failures.get()
    assert leftovers(tmp_path) == []
    store = ArtifactStore(tmp_path)
    assert all(store.get(f"{number:064x}") is not None for number in range(ROUNDS))
