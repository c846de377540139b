"""Compiled kernels on disk, by key: source, cubin, log and facts in one folder each.

Takes and gives plain values. An entry appears whole, by a rename, or not at all; one that can not
be read or does not match its checksums is a miss. A folder that can not be written turns the
store into one in memory. Nothing is created before the first `put`. Must not import anything of
kgen but errors.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kgen.errors import ArtifactError

log = logging.getLogger(__name__)

SOURCE: Final = "kernel.cu"
CUBIN: Final = "kernel.cubin"
LOG: Final = "build.log"
FACTS: Final = "facts.json"
_KEY: Final = re.compile(r"[0-9a-f]{64}")
_TEMPORARY: Final = ".new-"
#: What a killed process left behind goes after a day; no build takes that long.
_STALE_S: Final = 24 * 3600.0
#: Tries at a place that others keep writing to.
_PUBLISH_TRIES: Final = 8
#: How a rename says that something stands there; it may be gone a moment later.
_OCCUPIED: Final = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR})
#: What reading something that is no whole entry can raise.
_UNUSABLE: Final = (OSError, ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True)
class Artifact:
    """One compiled kernel. `facts` is what the builder said of it, as JSON holds it;
    `source_path` is None where the store could not be written."""

    key: str
    cubin: bytes
    source_path: Path | None
    log: str
    facts: dict[str, Any]


class ArtifactStore:
    """Artifacts below `root`/artifacts. Safe to share between threads and processes."""

    def __init__(self, root: Path) -> None:
        self.folder = Path(root) / "artifacts"
        self._memory: dict[str, Artifact] = {}
        self._warned: set[str] = set()
        self._swept = False

    def get(self, key: str) -> Artifact | None:
        """The entry, or None: not there, or (with one warning) not whole or not readable."""
        if key in self._memory:
            return self._memory[key]
        path = self._path(key)
        if not os.path.lexists(path):
            return None
        try:
            return _read(key, path)
        except _UNUSABLE as error:
            self._warn(key, f"artifact {path}: not usable, built again: {_words(error)}")
            return None

    def put(
        self, key: str, source_text: str, cubin: bytes, log_text: str, facts: dict[str, Any]
    ) -> Artifact:
        """Publish an entry and give it back; of several at once for one key, one stays.

        Raises ArtifactError for an empty cubin or for facts that JSON can not hold.
        """
        path = self._path(key)
        files = _files(key, source_text, cubin, log_text, facts)
        try:
            self._publish(path, files)
        except OSError as error:
            self._warn("", f"{self.folder}: not writable, kernels are not kept: {_words(error)}")
            self._memory[key] = Artifact(key, cubin, None, log_text, facts)
            return self._memory[key]
        return Artifact(key, cubin, path / SOURCE, log_text, facts)

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ArtifactError(f"artifact key {key!r}: expected 64 hexadecimal digits")
        return self.folder / key[:2] / key

    def _publish(self, path: Path, files: dict[str, bytes]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not self._swept:
            self._swept = True
            _sweep(self.folder)
        new = self.folder / f"{_TEMPORARY}{uuid.uuid4().hex}"
        new.mkdir()
        try:
            for name, data in files.items():
                (new / name).write_bytes(data)
            _rename_into_place(new, path)
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def _warn(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            log.warning(message)


def _files(
    key: str, source_text: str, cubin: bytes, log_text: str, facts: dict[str, Any]
) -> dict[str, bytes]:
    """The files of an entry; the facts, written last, hold the checksums of all."""
    if not cubin:
        raise ArtifactError(f"artifact {key}: an empty cubin is not kept")
    files = {SOURCE: source_text.encode(), CUBIN: cubin, LOG: log_text.encode()}
    try:
        checksums = {name: _checksum(data) for name, data in files.items()}
        told = {"key": key, "facts": facts, "sha256": checksums | {FACTS: _facts_checksum(facts)}}
        files[FACTS] = json.dumps(told, indent=1).encode()
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"artifact {key}: facts that JSON can not hold: {error}") from error
    return files


def _read(key: str, path: Path) -> Artifact:
    """A whole entry; raises one of _UNUSABLE for anything else."""
    told = json.loads((path / FACTS).read_bytes())
    data = {name: (path / name).read_bytes() for name in (SOURCE, CUBIN, LOG)}
    found = {name: _checksum(content) for name, content in data.items()}
    found[FACTS] = _facts_checksum(told["facts"])
    if told["key"] != key or not isinstance(told["facts"], dict):
        raise ValueError(f"{FACTS} is of another entry")
    if wrong := [name for name, checksum in found.items() if told["sha256"][name] != checksum]:
        raise ValueError(f"wrong checksum of {', '.join(wrong)}")
    return Artifact(key, data[CUBIN], path / SOURCE, data[LOG].decode(), told["facts"])


def _rename_into_place(new: Path, path: Path) -> None:
    """Rename a folder to `path`. A whole entry there stays, having the same content; anything else
    is moved out of the way."""
    for _ in range(_PUBLISH_TRIES):
        try:
            new.rename(path)
            return
        except OSError as error:
            if error.errno not in _OCCUPIED:
                raise
        try:
            _read(path.name, path)
            return
        except _UNUSABLE:
            _move_away(path)
    raise FileExistsError(f"{path}: what is there could not be replaced")


def _move_away(path: Path) -> None:
    """Delete what stands at `path`: by a rename first, so that no half of it is ever seen."""
    away = path.parent.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
    with contextlib.suppress(FileNotFoundError):  # another process was quicker
        path.rename(away)
    if away.is_dir() and not away.is_symlink():
        shutil.rmtree(away, ignore_errors=True)
    else:
        away.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Remove what killed processes left."""
    for left in folder.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < time.time() - _STALE_S:
                shutil.rmtree(left, ignore_errors=True)


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _facts_checksum(facts: Any) -> str:
    return _checksum(json.dumps(facts, sort_keys=True).encode())


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
