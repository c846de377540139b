"""A bundle as a file: a zip of a few known names, and a manifest of their hashes, in front.

Takes and gives bytes and lines; knows no rows and no keys. `open_bundle` looks at the file as at an
enemy's: every name, size, place and hash is checked before anything of it is used, and no name is
ever a path on this machine. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_IFMT, S_IFREG
from typing import IO, Any, Final

from kgen.errors import BundleError

FORMAT: Final = "kgen bundle"
FORMAT_VERSION: Final = 1
MANIFEST: Final = "manifest.json"
SIGNATURE: Final = "signature.json"
#: Rows, by the table that they are of, in the order in which they are read.
ROWS: Final = {name: f"rows/{name}.jsonl" for name in ("runs", "trials", "outcomes")}
#: Files of one compiled kernel, below artifacts/KEY.
PARTS: Final = ("kernel.cu", "kernel.cubin", "build.log", "facts.json")

_ARTIFACT: Final = re.compile(
    r"artifacts/([0-9a-f]{64})/(kernel\.cu|kernel\.cubin|build\.log|facts\.json)"
)
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")

#: Limits of what is read, in entries and bytes; a bundle beyond them is refused.
MAX_ENTRIES: Final = 100_000
MAX_MANIFEST: Final = 32 << 20
MAX_SIGNATURE: Final = 4096
MAX_PART: Final = 64 << 20
MAX_ROWS: Final = 4 << 30
MAX_TOTAL: Final = 16 << 30
MAX_LINE: Final = 1 << 20
#: Rows deflate to a twentieth or thirtieth, a bomb to a thousandth. Small entries are let be.
MAX_RATIO: Final = 200
_RATIO_FROM: Final = 1 << 20
_CHUNK: Final = 1 << 20

_EOCD: Final = struct.Struct("<4s4H2LH")
_LOCATOR: Final = struct.Struct("<4sLQL")
_EOCD64: Final = struct.Struct("<4sQ2H2L4Q")
_LOCAL: Final = struct.Struct("<4s5H3L2H")
#: Of one entry in the directory: its fixed part, the longest name taken, and zip64's extra field.
_DIRECTORY_ENTRY: Final = 46 + 128 + 64


def part_name(key: str, part: str) -> str:
    """The entry of one file of a compiled kernel."""
    return f"artifacts/{key}/{part}"


@dataclass
class Writer:
    """Writes the entries of a bundle, one after the other, and notes their hashes.

    The manifest is written last, by `finish`; the file appears under its name only when whole.
    """

    archive: zipfile.ZipFile
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, name: str, data: bytes) -> None:
        """One entry at once."""
        with self.open(name) as write:
            write(data)

    @contextmanager
    def open(self, name: str) -> Iterator[Any]:
        """A function that takes the entry's bytes, piece by piece."""
        digest, size = hashlib.sha256(), 0

        def write(data: bytes) -> None:
            nonlocal size
            digest.update(data)
            size += len(data)
            stream.write(data)

        with self.archive.open(_entry(name), "w", force_zip64=True) as stream:
            yield write
        self.files[name] = {"sha256": digest.hexdigest(), "bytes": size}

    def finish(self, facts: dict[str, Any]) -> bytes:
        """Write the manifest, of the entries and these facts; gives its bytes, for a signature."""
        manifest = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            **facts,
            "files": self.files,
        }
        data = json.dumps(manifest, sort_keys=True, indent=1, allow_nan=False).encode()
        self.archive.writestr(_entry(MANIFEST), data)
        return data

    def sign(self, signature: dict[str, str]) -> None:
        """Write the signature, after `finish`."""
        self.archive.writestr(_entry(SIGNATURE), json.dumps(signature, sort_keys=True).encode())


def _entry(name: str) -> zipfile.ZipInfo:
    """Always the same date: equal content gives equal bytes."""
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_DEFLATED
    info.external_attr = (S_IFREG | 0o644) << 16
    return info


@contextmanager
def create_bundle(path: Path) -> Iterator[Writer]:
    """A writer of a new file at `path`, which replaces what is there once it is whole.

    Raises BundleError where the file can not be written, or holds more than is ever read.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with zipfile.ZipFile(new, "x", compresslevel=3) as archive:
            yield Writer(archive)
        with open_bundle(new):
            pass  # what was written can be read, and is within the limits
        new.replace(path)
    except OSError as error:
        raise BundleError(f"{path} can not be written: {error.strerror or error}") from error
    finally:
        new.unlink(missing_ok=True)


@dataclass(frozen=True)
class Bundle:
    """An open bundle whose every byte matches its manifest.

    `signature` is None where there is none; whether it is good, and of whom, `cache.trust` says.
    """

    name: str
    archive: zipfile.ZipFile
    manifest: dict[str, Any]
    manifest_bytes: bytes
    signature: dict[str, Any] | None

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest, in hex: names the whole content."""
        return hashlib.sha256(self.manifest_bytes).hexdigest()

    def kernels(self) -> list[str]:
        """Keys of the compiled kernels in it."""
        found = (_ARTIFACT.fullmatch(name) for name in self.manifest["files"])
        return sorted({match[1] for match in found if match})

    def read(self, name: str) -> bytes:
        """An entry's bytes, compared with the manifest again; raises BundleError."""
        return b"".join(self._chunks(name))

    def lines(self, table: str) -> Iterator[bytes]:
        """The lines of a table's rows, compared with the manifest at their end; raises BundleError.

        Whoever uses them keeps a transaction open until the last one came.
        """
        rest = b""
        for chunk in self._chunks(ROWS[table]):
            *whole, rest = (rest + chunk).split(b"\n")
            if len(rest) > MAX_LINE:
                raise BundleError(f"{self.name}: {ROWS[table]} has a line above {MAX_LINE} bytes")
            yield from whole
        if rest:
            raise BundleError(f"{self.name}: {ROWS[table]} ends in the middle of a line")

    def _chunks(self, name: str) -> Iterator[bytes]:
        told = self.manifest["files"][name]
        digest, size = hashlib.sha256(), 0
        for chunk in _inflate(self.name, self.archive, name):
            size += len(chunk)
            if size > told["bytes"]:
                break
            digest.update(chunk)
            yield chunk
        if size != told["bytes"] or digest.hexdigest() != told["sha256"]:
            raise BundleError(f"{self.name}: {name} is not what the manifest says: it was altered")


@contextmanager
def open_bundle(path: Path) -> Iterator[Bundle]:
    """The bundle at `path`, every entry of which was compared with its manifest.

    Raises BundleError for what is no bundle, cut, altered, hostile, or of another format.
    """
    try:
        with path.open("rb") as file:
            _check_ends(path, file)
            with zipfile.ZipFile(file) as archive:
                yield _opened(str(path), file, archive)
    except OSError as error:
        raise BundleError(f"{path} can not be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, struct.error, UnicodeDecodeError, NotImplementedError) as error:
        raise BundleError(f"{path} is no bundle, cut or altered: {error}") from error


def _check_ends(path: Path, file: IO[bytes]) -> None:
    """Bound what the directory costs before zipfile reads it: it reads whatever it is told."""
    size = file.seek(0, os.SEEK_END)
    if size < _EOCD.size:
        raise BundleError(f"{path} is no bundle, or cut: it has {size} bytes")
    file.seek(size - _EOCD.size)
    magic, *_, count, length, start, comment = _EOCD.unpack(file.read(_EOCD.size))
    if magic != b"PK\5\6" or comment:
        raise BundleError(f"{path} is no bundle, or cut: `kgen db export` makes one")
    end = size - _EOCD.size
    if count == 0xFFFF or 0xFFFFFFFF in (length, start):
        end -= _LOCATOR.size + _EOCD64.size
        if end < 0:
            raise BundleError(f"{path} is no bundle, or cut: no room for its zip64 record")
        file.seek(end)
        magic, *_, count, length, start = _EOCD64.unpack(file.read(_EOCD64.size))
        locator, _, where, _ = _LOCATOR.unpack(file.read(_LOCATOR.size))
        if (magic, locator, where) != (b"PK\6\6", b"PK\6\7", end):
            raise BundleError(f"{path} is no bundle, or cut: its zip64 record is not in its place")
    if count > MAX_ENTRIES or length > MAX_ENTRIES * _DIRECTORY_ENTRY:
        raise BundleError(
            f"{path} has {count} entries and a directory of {length} bytes: expected at most "
            f"{MAX_ENTRIES} entries; export fewer problems at a time"
        )
    if start + length != end:
        raise BundleError(f"{path} has bytes before or behind its content: it was altered or cut")
    file.seek(0)


def _opened(name: str, file: IO[bytes], archive: zipfile.ZipFile) -> Bundle:
    entries = archive.infolist()
    seen: set[str] = set()
    for entry in entries:
        _check_entry(name, entry)
        if entry.filename in seen:
            raise BundleError(f"{name} has two entries named {entry.filename!r}")
        seen.add(entry.filename)
    _check_places(name, file, archive, entries)
    total = sum(entry.file_size for entry in entries)
    if total > MAX_TOTAL:
        raise BundleError(f"{name} would unfold to {total} bytes: expected at most {MAX_TOTAL}")
    if MANIFEST not in seen:
        raise BundleError(f"{name} has no {MANIFEST}: it is no bundle")
    data = b"".join(_inflate(name, archive, MANIFEST))
    manifest = _manifest(name, data)
    signature = None
    if SIGNATURE in seen:
        signature = parse_object(
            b"".join(_inflate(name, archive, SIGNATURE)), f"{name}: {SIGNATURE}"
        )
    if named := seen - {MANIFEST, SIGNATURE} ^ set(manifest["files"]):
        raise BundleError(f"{name}: {min(named)} is in the file or in its manifest, not in both")
    bundle = Bundle(name, archive, manifest, data, signature)
    for entry_name in manifest["files"]:
        for _ in bundle._chunks(entry_name):
            pass
    for key in bundle.kernels():
        if lacking := [p for p in PARTS if part_name(key, p) not in seen]:
            raise BundleError(f"{name}: kernel {key} lacks {', '.join(lacking)}")
    return bundle


def _check_entry(name: str, entry: zipfile.ZipInfo) -> None:
    shown = repr(entry.filename[:200])
    # zipfile cuts names at a NUL; `orig_filename` is what stands in the file.
    limit = _limit_of(entry.filename)
    if limit is None or entry.orig_filename != entry.filename:
        raise BundleError(f"{name} holds {shown}: no bundle has an entry of that name")
    if S_IFMT(entry.external_attr >> 16) not in (0, S_IFREG):
        raise BundleError(f"{name}: {shown} is no regular file")
    if entry.flag_bits & 0x1 or entry.compress_type not in (
        zipfile.ZIP_STORED,
        zipfile.ZIP_DEFLATED,
    ):
        raise BundleError(f"{name}: {shown} is encrypted, or packed as no bundle is")
    if entry.file_size > limit:
        raise BundleError(f"{name}: {shown} has {entry.file_size} bytes: expected at most {limit}")
    if entry.file_size > max(_RATIO_FROM, MAX_RATIO * entry.compress_size):
        raise BundleError(
            f"{name}: {shown} would unfold from {entry.compress_size} to {entry.file_size} bytes, "
            f"more than {MAX_RATIO} times: refused as a zip bomb"
        )


def _limit_of(name: str) -> int | None:
    """The most bytes of an entry of that name; None of a name that no bundle has."""
    if name == MANIFEST:
        return MAX_MANIFEST
    if name == SIGNATURE:
        return MAX_SIGNATURE
    if name in ROWS.values():
        return MAX_ROWS
    return MAX_PART if _ARTIFACT.fullmatch(name) else None


def _check_places(
    name: str, file: IO[bytes], archive: zipfile.ZipFile, entries: list[zipfile.ZipInfo]
) -> None:
    """Entries lie one after the other from the first byte: none shares its bytes with another."""
    least = 0
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        file.seek(entry.header_offset)
        header = _LOCAL.unpack(file.read(_LOCAL.size))
        if entry.header_offset < least or (least == 0 and entry.header_offset != 0):
            raise BundleError(f"{name}: {entry.filename} lies over another entry: refused")
        least = entry.header_offset + _LOCAL.size + sum(header[-2:]) + entry.compress_size
    if least > archive.start_dir:
        raise BundleError(f"{name}: an entry reaches into the directory: refused")


def _inflate(name: str, archive: zipfile.ZipFile, entry: str) -> Iterator[bytes]:
    """The entry's bytes, never more than the directory says; zipfile checks their CRC."""
    try:
        with archive.open(entry) as stream:
            while chunk := stream.read(_CHUNK):
                yield chunk
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise BundleError(f"{name}: {entry} is cut or altered: {error}") from error


def _manifest(name: str, data: bytes) -> dict[str, Any]:
    manifest = parse_object(data, f"{name}: {MANIFEST}")
    if manifest.get("format") != FORMAT:
        raise BundleError(f"{name} is no bundle of kgen: its manifest does not say so")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise BundleError(
            f"{name} has format {str(manifest.get('format_version'))[:40]!r}, this kgen reads "
            f"{FORMAT_VERSION}: export it again with this kgen, or use the one that made it"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not set(ROWS.values()) <= set(files):
        raise BundleError(f"{name}: its manifest does not name its rows")
    for entry, told in files.items():
        if entry in (MANIFEST, SIGNATURE) or _limit_of(entry) is None or not _is_told(told):
            raise BundleError(f"{name}: its manifest says nothing sensible of {entry[:200]!r}")
    return manifest


def _is_told(told: Any) -> bool:
    return (
        isinstance(told, dict)
        and isinstance(told.get("sha256"), str)
        and _DIGEST.fullmatch(told["sha256"]) is not None
        and type(told.get("bytes")) is int
        and told["bytes"] >= 0
    )


def dump_object(value: dict[str, Any]) -> bytes:
    """A JSON object as `parse_object` takes it."""
    return json.dumps(value, sort_keys=True, allow_nan=False).encode()


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object without doubled names, NaN or infinity; raises BundleError."""
    value = parse_json(data, what)
    if not isinstance(value, dict):
        raise BundleError(f"{what}: expected a JSON object")
    return value


def parse_json(data: bytes | str, what: str) -> Any:
    """A JSON value without doubled names, NaN or infinity; raises BundleError."""
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{what} is no JSON that a bundle holds: {str(error)[:200]}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in an object")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_no_constant)
