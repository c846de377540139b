"""`kgen db export`, `import` and `keys`: tuning results as one file, and whom to believe.

Takes a database and bundles, gives lines (or JSON) on stdout; says on stderr what a signature is
worth.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict

from kgen.cli.arguments import (
    OK,
    SHAPES_HELP,
    Commands,
    add_cache,
    add_command,
    add_json,
    database_at,
    lines_of,
)
from kgen.cli.output import count, data, data_json, note, table
from kgen.errors import UsageError
from kgen.settings import Settings, absolute_path, keys_dir

#: As in kgen.cache.bundles, which needs SQLAlchemy; the default one first.
CUBINS = ("best", "all", "none")

EXPORT_MORE = """\
A bundle is a zip of rows (JSON lines), sources and cubins, with a manifest of their SHA-256 hashes
and the schema's version. Signed, it brings whoever trusts the key times and cubins; unsigned, it
brings configurations to try."""

IMPORT_MORE = """\
Nothing that is there is changed; rows that are known already are left out. A bundle signed by a key
of `kgen db keys list` brings its rows and, through the artifact store, its cubins. Any other brings
the fastest configurations of each problem as suggestions: `kgen tune` builds them from kgen's own
templates, verifies and times them. A bundle that is cut, altered, of another schema or made to do
harm is refused as a whole, with the database as it was."""

KEYS_MORE = """\
Keys are Ed25519; they lie in KGEN_KEYS_DIR, else ~/.config/kgen. Who makes a key gives its public
part, which is what is listed, to those who are to trust it. Needs the extra `sign`."""


def told(counts: Mapping[str, int]) -> str:
    """Numbers of rows in words."""
    return ", ".join(count(number, name[:-1]) for name, number in counts.items())


def add_export(parts: Commands) -> None:
    """Add `kgen db export`."""
    parser = add_command(parts, "export", "write the database, or a part, to a bundle", EXPORT_MORE)
    parser.add_argument(
        "--shapes",
        metavar="FILE",
        action="append",
        default=[],
        help=f"these problems only: {SHAPES_HELP} (default: all)",
    )
    parser.add_argument(
        "--best", action="store_true", help="rows of the winners only (default: every trial)"
    )
    parser.add_argument(
        "--cubins",
        choices=CUBINS,
        default=CUBINS[0],
        help="compiled kernels: of winners, of every row, or none (default: best)",
    )
    parser.add_argument("--sign", action="store_true", help="sign it (default: not signed)")
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the bundle")
    add_cache(parser)
    add_json(parser, default="a line")
    parser.set_defaults(run=run_export)


def run_export(args: argparse.Namespace, settings: Settings) -> int:
    """Write the bundle; raises BundleError, DatabaseError."""
    from kgen.cache.artifacts import ArtifactStore
    from kgen.cache.bundles import export
    from kgen.cache.trust import KeyRing

    path = absolute_path(args.output, "--output")
    problems = None
    if args.shapes:
        problems = {line.problem for line in lines_of([], args.shapes).lines}
    with database_at(settings) as database:
        done = export(
            database,
            path,
            ArtifactStore(settings.cache_dir),
            problems=problems,
            best=args.best,
            cubins=args.cubins,
            sign_with=KeyRing(keys_dir()) if args.sign else None,
        )
    if args.json:
        data_json({"bundle": str(path), **asdict(done)})
    else:
        data(f"{path}: {told(done.rows)}, {count(done.kernels, 'kernel')}")
    if done.key:
        note(f"signed by {done.key}")
    return OK


def add_import(parts: Commands) -> None:
    """Add `kgen db import`."""
    parser = add_command(parts, "import", "add what a bundle holds to the database", IMPORT_MORE)
    parser.add_argument("file", metavar="FILE", help="a bundle")
    add_cache(parser)
    add_json(parser, default="a line")
    parser.set_defaults(run=run_import)


def run_import(args: argparse.Namespace, settings: Settings) -> int:
    """Add the bundle; raises BundleError and DatabaseError, with the database as it was."""
    from kgen.cache.artifacts import ArtifactStore
    from kgen.cache.bundles import look, take
    from kgen.cache.container import open_bundle
    from kgen.cache.db import TuningDatabase
    from kgen.cache.trust import KeyRing

    path, keys = absolute_path(args.file, "import"), KeyRing(keys_dir())
    with open_bundle(path) as bundle:
        look(bundle, keys)  # no database is made for what is refused
        with TuningDatabase.open(settings.db_url) as database:
            taken = take(database, bundle, ArtifactStore(settings.cache_dir), keys)
            where = database.where
    verdict = taken.verdict
    note(f"{path}: {verdict.words}")
    if args.json:
        data_json({"database": where, **asdict(taken)})
        return OK
    if verdict.trusted:
        kernels = count(taken.kernels, "kernel")
        data(f"{where}: {told(taken.counts.added)}, {kernels} added; {_known(taken.counts.known)}")
        return OK
    number = taken.counts.added["trials"]
    data(f"{where}: {count(number, 'suggestion')} added; {_known(taken.counts.known)}")
    if taken.skipped:
        note(f"{count(taken.skipped, 'configuration')} left out: not valid for this kgen")
    if number:
        note("suggestions count once they ran here: `kgen tune` builds, verifies and times them")
    return OK


def _known(counts: Mapping[str, int]) -> str:
    return f"{sum(counts.values())} known already"


def add_keys(parts: Commands) -> None:
    """Add `kgen db keys`."""
    parser = add_command(parts, "keys", "make a signing key; list and trust keys", KEYS_MORE)
    parser.add_argument(
        "action", choices=("list", "generate", "trust", "distrust"), help="what to do"
    )
    parser.add_argument("key", metavar="KEY", nargs="?", help="ed25519:…, to trust or distrust")
    parser.add_argument(
        "--name", metavar="NAME", default="", help="whose key it is (default: none)"
    )
    add_json(parser, default="a table")
    parser.set_defaults(run=run_keys)


def run_keys(args: argparse.Namespace, settings: Settings) -> int:
    """Change or print the list of keys; raises BundleError, UsageError."""
    from kgen.cache.trust import KeyRing

    ring = KeyRing(keys_dir())
    if (args.key is not None) != (args.action in ("trust", "distrust")):
        raise UsageError(f"kgen db keys {args.action}: trust and distrust take a KEY, others none")
    if args.action == "generate":
        ring.generate()
        note(f"the private key is in {ring.folder}: keep it to yourself")
    elif args.action == "trust":
        ring.trust(args.key, args.name)
    elif args.action == "distrust":
        ring.distrust(args.key)
    found = ring.trusted()
    if args.json:
        data_json([{"key": key, "name": name} for key, name in found.items()])
    elif found:
        table(("key", "name"), list(found.items()), text_columns=(0, 1))
    else:
        note(f"no key is trusted in {ring.folder}")
    return OK
