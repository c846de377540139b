"""A part of a tuning database as one file, and back: `export`, `take`.

Takes a database, an artifact store and keys; gives a bundle, or what a bundle brought. A bundle of
a trusted key brings its rows as they are and its compiled kernels; any other brings configurations
only, as suggestions that are built, verified and timed here before they count. Must not import
build, search, runtime or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection

from kgen import __version__
from kgen.cache import container, rows, sqlite
from kgen.cache.artifacts import ArtifactStore
from kgen.cache.bundle_rows import again, from_lines, to_lines
from kgen.cache.container import PARTS, ROWS, Bundle, create_bundle, part_name
from kgen.cache.db import TuningDatabase
from kgen.cache.schema import SCHEMA_VERSION
from kgen.cache.suggest import Suggester
from kgen.cache.transfer import COLUMNS, Added, Raw, Receiver, raw_rows
from kgen.cache.trust import KeyRing, Verdict
from kgen.errors import ArtifactError, BundleError
from kgen.problem import GemmProblem

#: Which compiled kernels come along: those of winners, those of every row exported, none.
CUBINS: Final = ("best", "all", "none")

_PROBLEM: Final = tuple(f.name for f in fields(GemmProblem))
_AT: Final = {name: COLUMNS["trials"].index(name) for name in COLUMNS["trials"]}


@dataclass(frozen=True)
class Exported:
    """What a bundle holds: rows by table, compiled kernels, and the key that signed it or ""."""

    rows: dict[str, int]
    kernels: int
    key: str


@dataclass(frozen=True)
class Taken:
    """What a bundle brought.

    verdict       what its signature is worth
    counts        rows by table; of a bundle that is not trusted, trials are suggestions
    kernels       compiled kernels that went into the store
    skipped       configurations that are not valid for this kgen, of a bundle that is not trusted
    """

    verdict: Verdict
    counts: Added
    kernels: int
    skipped: int


def export(
    database: TuningDatabase,
    path: Path,
    store: ArtifactStore,
    *,
    problems: Collection[GemmProblem] | None = None,
    best: bool = False,
    cubins: str = "best",
    sign_with: KeyRing | None = None,
) -> Exported:
    """Write the database, or its part on some problems or of winners only, to a bundle at `path`.

    A file that is there is replaced once the new one is whole. Raises BundleError, DatabaseError.
    """
    winners = _winners(database, problems) if best or cubins == "best" else set()
    wanted = None if problems is None else {_problem_values(p) for p in problems}
    keys = {key for key, _ in winners} if cubins == "best" else set()
    used: set[int | None] = set()
    counts: dict[str, int] = {}

    def keep_trial(row: Raw) -> bool:
        if wanted is not None and row[_FIRST : _FIRST + len(_PROBLEM)] not in wanted:
            return False
        if best and (row[_AT["cubin_key"]], row[_FIRST : _AT["cubin_key"]]) not in winners:
            return False
        if cubins == "all" and row[_AT["cubin_key"]]:
            keys.add(row[_AT["cubin_key"]])
        used.add(row[1])
        return True

    def keep_outcome(row: Raw) -> bool:
        if wanted is None or row[_FIRST : _FIRST + len(_PROBLEM)] in wanted:
            used.add(row[1])
            return True
        return False

    whole = wanted is None and not best
    kept: dict[str, Callable[[Raw], bool]] = {
        "trials": keep_trial,
        "outcomes": keep_outcome,
        "runs": lambda row: whole or row[0] in used,
    }

    def write_rows(connection: Connection) -> None:
        for name in ("trials", "outcomes", "runs"):
            counts[name] = 0
            with writer.open(ROWS[name]) as write:
                for line in to_lines(name, filter(kept[name], raw_rows(connection, name))):
                    counts[name] += 1
                    write(line)

    with create_bundle(path) as writer:
        database.read(write_rows)
        kernels = sum(_add_kernel(writer, store, key) for key in sorted(keys))
        manifest = writer.finish(
            {
                "schema_version": SCHEMA_VERSION,
                "kgen_version": __version__,
                "created": rows.now(),
                "columns": COLUMNS,
                "rows": counts,
                "kernels": kernels,
            }
        )
        signature = sign_with.sign(manifest) if sign_with else {}
        if signature:
            writer.sign(signature)
    return Exported(counts, kernels, signature.get("key", ""))


_FIRST: Final = _AT[_PROBLEM[0]]


def _problem_values(problem: GemmProblem) -> Raw:
    return tuple(getattr(problem, name) for name in _PROBLEM)


def _winners(
    database: TuningDatabase, problems: Collection[GemmProblem] | None
) -> set[tuple[str, Raw]]:
    """Cubin key, and problem, device and configuration, of every winner."""
    found = set()
    for row in database.each_winner():
        if problems is None or row.problem in problems:
            place = (*_problem_values(row.problem), row.device_name, row.num_sms)
            found.add((row.cubin_key, (*place, *row.config.to_dict().values())))
    return found


def _add_kernel(writer: container.Writer, store: ArtifactStore, key: str) -> bool:
    """Put a compiled kernel into the bundle; False where the store does not have it whole."""
    try:
        artifact = store.get(key)
        if artifact is None or artifact.source_path is None:
            return False
        source = artifact.source_path.read_bytes()
    except (ArtifactError, OSError):
        return False
    facts = container.dump_object(artifact.facts)
    parts = (source, artifact.cubin, artifact.log.encode(), facts)
    if max(map(len, parts)) > container.MAX_PART:
        return False
    for name, data in zip(PARTS, parts, strict=True):
        writer.add(part_name(key, name), data)
    return True


def look(bundle: Bundle, keys: KeyRing) -> Verdict:
    """What an open bundle's signature is worth; raises BundleError where it can not be taken."""
    verdict = keys.judge(bundle.manifest_bytes, bundle.signature, bundle.name)
    _check_schema(bundle)
    return verdict


def take(database: TuningDatabase, bundle: Bundle, store: ArtifactStore, keys: KeyRing) -> Taken:
    """Append what an open bundle may bring. A row that is there already is left as it is.

    Raises BundleError for one that is altered, hostile or of another schema, and DatabaseError;
    then the database is as it was.
    """
    verdict = look(bundle, keys)
    options = {"bundle": bundle.digest, "signature": verdict.words}
    # All of it is looked at before the database is locked, and most of the work done.
    kernels = list(_kernels(bundle)) if verdict.trusted else []
    suggester = Suggester(bundle.digest, bundle.name)
    for name in ("runs", "outcomes"):
        for _ in _rows(bundle, name):
            pass
    suggester.look_at(_rows(bundle, "trials"))
    skipped = 0 if verdict.trusted else suggester.prepare()

    def work(connection: Connection) -> Added:
        receiver = Receiver(connection, "kgen db import", options)
        with sqlite.in_bulk(connection):
            if verdict.trusted:
                receiver.take_runs(_rows(bundle, "runs", seen=True))
                for name in ("trials", "outcomes"):
                    receiver.take(name, _rows(bundle, name, seen=True))
            else:
                suggester.suggest(connection, receiver)
        return receiver.counts

    counts = database.write(work)
    stored = sum(_store_kernel(bundle, store, key) for key in kernels)
    return Taken(verdict, counts, stored, skipped)


def _check_schema(bundle: Bundle) -> None:
    """Raises BundleError for a bundle whose rows are of another schema than this kgen's."""
    told = bundle.manifest
    columns = {name: list(names) for name, names in COLUMNS.items()}
    if told.get("schema_version") == SCHEMA_VERSION and told.get("columns") == columns:
        return
    theirs = str(told.get("schema_version"))[:40]
    others = ", with other columns" if told.get("schema_version") == SCHEMA_VERSION else ""
    raise BundleError(
        f"{bundle.name} holds rows of schema {theirs!r}{others}, made by kgen "
        f"{str(told.get('kgen_version'))[:40]!r}; this kgen ({__version__}) reads schema "
        f"{SCHEMA_VERSION} as it knows it: export it again with this version"
    )


def _rows(bundle: Bundle, name: str, seen: bool = False) -> Iterator[Raw]:
    """A table's rows; `seen`: they were checked before, and their hash says they are the same."""
    if seen:
        return again(name, bundle.lines(name))
    return from_lines(name, bundle.lines(name), bundle.name)


def _kernels(bundle: Bundle) -> Iterator[str]:
    """The keys of the compiled kernels, whose facts and texts were looked at."""
    for key in bundle.kernels():
        _parts(bundle, key)
        yield key


def _parts(bundle: Bundle, key: str) -> tuple[str, bytes, str, dict[str, Any]]:
    """Source, cubin, log and facts, as the store takes them."""
    source, cubin, log, facts = (bundle.read(part_name(key, part)) for part in PARTS)
    told = container.parse_object(facts, f"{bundle.name}: facts of {key}")
    counts = [told.get(name) for name in ("registers", "spill_bytes")]
    if not cubin or any(type(count) is not int for count in counts):
        raise BundleError(f"{bundle.name}: kernel {key} is empty, or its facts say nothing of it")
    try:
        return source.decode(), cubin, log.decode(), told
    except UnicodeDecodeError as error:
        raise BundleError(f"{bundle.name}: kernel {key} has a source or log of no text") from error


def _store_kernel(bundle: Bundle, store: ArtifactStore, key: str) -> bool:
    """Put a kernel into the store unless it has one of that key, which stays."""
    if store.get(key) is not None:
        return False
    store.put(key, *_parts(bundle, key))
    return True
