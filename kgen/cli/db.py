"""`kgen db`: look at, tidy and join tuning databases; bundles and keys are in `db_bundles`.

Takes databases, gives tables (or JSON) on stdout. What a subcommand needs is imported when it runs.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kgen.cli import db_bundles
from kgen.cli.arguments import (
    OK,
    Commands,
    add_cache,
    add_command,
    add_json,
    add_problems,
    add_surroundings,
    database_at,
    lines_of,
    positive,
)
from kgen.cli.output import count, data, data_json, microseconds, note, table
from kgen.errors import DatabaseError
from kgen.settings import Settings, absolute_path

if TYPE_CHECKING:
    from kgen.cache.census import Difference
    from kgen.cache.db import TuningDatabase
    from kgen.cache.records import TrialRow
    from kgen.search.recheck import Checked

FAILED = 1
#: Trials of the fastest cubins that `prune` keeps; equal to census.KEEP, which needs SQLAlchemy.
KEEP = 10

MORE = """\
Rows are only ever added: what two databases say of one problem stands side by side, and the rule
of `kgen best` picks. Of the cubins verified and timed on a GPU model with the same number of SMs,
never wrong and never hung there, the one with the lowest median over all its rows. A bundle whose
signature is not trusted brings configurations only, as suggestions that `kgen tune` builds,
verifies and times. `kgen db COMMAND --help` tells more."""


def add_parser(commands: Commands) -> None:
    """Add `kgen db` with its subcommands."""
    parser = add_command(commands, "db", "share, join, check and tidy tuning databases", MORE)
    parts = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    db_bundles.add_export(parts)
    db_bundles.add_import(parts)
    _add_merge(parts)
    _add_diff(parts)
    _add_stats(parts)
    _add_verify(parts)
    _add_prune(parts)
    _add_migrate(parts)
    db_bundles.add_keys(parts)


def open_file(path: Path) -> TuningDatabase:
    """A database that is there, for reading."""
    from kgen.cache.db import TuningDatabase

    return TuningDatabase.open(path, create=False, readonly=True)


# -- merge and diff ---------------------------------------------------------------------------


def _add_merge(parts: Commands) -> None:
    more = (
        "Adds to A every row of B that A lacks; with -o, A stays as it is and a new file C gets\n"
        "the rows of both. One transaction: all rows of B, or none. Identical rows are kept once."
    )
    parser = add_command(parts, "merge", "add the rows of one database to another", more)
    parser.add_argument("a", metavar="A", help="a database file")
    parser.add_argument("b", metavar="B", nargs="+", help="database files whose rows are added")
    parser.add_argument("-o", "--output", metavar="C", help="a new file (default: add to A)")
    add_json(parser, default="a line")
    parser.set_defaults(run=run_merge)


def run_merge(args: argparse.Namespace, settings: Settings) -> int:
    """Merge; raises DatabaseError, with both files as they were."""
    from kgen.cache.db import TuningDatabase
    from kgen.cache.transfer import Added, merge_into, merge_new

    a, *others = [absolute_path(name, "merge") for name in (args.a, *args.b)]
    for path in others:
        if path.exists() and a.exists() and path.samefile(a):
            raise DatabaseError(f"{path} is given twice: name two databases")
    if args.output:
        target = absolute_path(args.output, "--output")
        counts = merge_new([a, *others], target, open_file)
    else:
        target, counts = a, Added()
        with TuningDatabase.open(a, create=False) as database:
            for path in others:
                with open_file(path) as source:
                    counts += merge_into(database, source)
    if args.json:
        data_json({"database": str(target), **asdict(counts)})
    else:
        added, known = db_bundles.told(counts.added), db_bundles.told(counts.known)
        data(f"{target}: {added} added; {known} known already")
    return OK


def _add_diff(parts: Commands) -> None:
    more = (
        "One line for each problem and device whose best kernel is another one, has another time,\n"
        "or is known on one side only. A ratio above 1 means that B's kernel is the faster one."
    )
    parser = add_command(parts, "diff", "compare the winners of two databases", more)
    parser.add_argument("a", metavar="A", help="a database file")
    parser.add_argument("b", metavar="B", help="another one")
    add_json(parser)
    parser.set_defaults(run=run_diff)


def run_diff(args: argparse.Namespace, settings: Settings) -> int:
    """Print what differs; 0 whether or not something does."""
    from kgen.cache.census import diff

    a, b = (absolute_path(name, "diff") for name in (args.a, args.b))
    with open_file(a) as first, open_file(b) as second:
        found = diff(first, second)
    if args.json:
        data_json([_difference_json(one) for one in found])
        return OK
    headings = ("problem", "device", "A µs", "B µs", "A/B", "A", "B")
    cells = [
        (
            str(one.problem),
            f"{one.device_name}, {one.num_sms} SMs",
            microseconds(one.a.median_us if one.a else None),
            microseconds(one.b.median_us if one.b else None),
            f"{one.ratio:.3f}" if one.ratio else "–",
            str(one.a.config) if one.a else "–",
            str(one.b.config) if one.b else "–",
        )
        for one in found
    ]
    if cells:
        table(headings, cells, text_columns=(0, 1, 5, 6))
    note(f"{count(len(found), 'difference')}" if found else "the winners are the same")
    return OK


def _difference_json(one: Difference) -> dict[str, Any]:
    return {
        "shape": str(one.problem),
        "device_name": one.device_name,
        "num_sms": one.num_sms,
        "a": one.a.to_dict() if one.a else None,
        "b": one.b.to_dict() if one.b else None,
        "ratio": one.ratio,
    }


# -- stats, prune, migrate --------------------------------------------------------------------


def _add_stats(parts: Commands) -> None:
    parser = add_command(parts, "stats", "tell how much is in the database, by device and status")
    add_cache(parser)
    add_json(parser)
    parser.set_defaults(run=run_stats)


def run_stats(args: argparse.Namespace, settings: Settings) -> int:
    """Print numbers of rows; raises DatabaseError where there is no database."""
    from kgen.cache.census import stats

    with closing(database_at(settings)) as database:
        found = stats(database)
    if args.json:
        data_json(found)
        return OK
    size = found["bytes"]
    rows = [
        ("database", found["database"]),
        ("schema", str(found["schema_version"])),
        ("size", "–" if size is None else f"{size / 2**20:.1f} MiB"),
        *((name, str(found[name])) for name in ("problems", "runs", "trials", "outcomes")),
        *((f"  {name}", str(number)) for name, number in found["statuses"].items() if number),
        *(
            (f"{d['name']}, {d['num_sms']} SMs", f"{d['trials']} trials, {d['timed']} timed")
            for d in found["devices"]
        ),
        ("first, last", f"{found['first'] or '–'}, {found['last'] or '–'}"),
    ]
    table(("", ""), rows, text_columns=(0, 1))
    return OK


def _add_prune(parts: Commands) -> None:
    more = (
        "Deletes timed trials of all but the fastest cubins of each problem, device and policy,\n"
        "and all but as many predictions. What `kgen best` says stays the same; failures,\n"
        "outcomes and runs stay. A copy named DB.unpruned.bak is made first."
    )
    parser = add_command(parts, "prune", "delete trials that no longer matter", more)
    parser.add_argument(
        "--keep", type=positive, default=KEEP, metavar="N", help=f"cubins kept (default: {KEEP})"
    )
    parser.add_argument("--dry-run", action="store_true", help="only tell (default: delete)")
    add_cache(parser)
    add_json(parser, default="a line")
    parser.set_defaults(run=run_prune)


def run_prune(args: argparse.Namespace, settings: Settings) -> int:
    """Prune the database; raises DatabaseError, with the database as it was."""
    from kgen.cache.census import prune
    from kgen.cache.db import TuningDatabase

    with TuningDatabase.open(settings.db_url, create=False) as database:
        pruned = prune(database, args.keep, args.dry_run)
        where = database.where
    if args.json:
        data_json({"database": where, "dry_run": args.dry_run, **asdict(pruned)})
        return OK
    verb = "would be deleted" if args.dry_run else "deleted"
    copy = f"; copy before: {pruned.backup}" if pruned.backup else ""
    data(f"{where}: {count(pruned.deleted, 'trial')} {verb}, {pruned.kept} kept{copy}")
    return OK


def _add_migrate(parts: Commands) -> None:
    more = "A copy named DB.vN.bak is made first. `kgen tune` does the same with an older database."
    parser = add_command(parts, "migrate", "convert the database to this kgen's schema", more)
    add_cache(parser)
    parser.set_defaults(run=run_migrate)


def run_migrate(args: argparse.Namespace, settings: Settings) -> int:
    """Bring the schema up to date; raises DatabaseError where no way leads there."""
    from kgen.cache import schema
    from kgen.cache.connect import connect
    from kgen.cache.db import TuningDatabase

    target = connect(settings.db_url, create=False, readonly=True, busy_limit_s=30.0)
    try:
        with target.engine.connect() as connection:
            before = schema.read_version(connection, target.where)
    finally:
        target.engine.dispose()
    if before is None:
        raise DatabaseError(f"{target.where} is empty: `kgen tune` makes a database of it")
    TuningDatabase.open(settings.db_url, create=before < schema.SCHEMA_VERSION).close()
    if before == schema.SCHEMA_VERSION:
        data(f"{target.where} has schema {before}, this kgen's: nothing to migrate")
    else:
        data(f"{target.where}: converted from schema {before} to {schema.SCHEMA_VERSION}")
    return OK


# -- verify -----------------------------------------------------------------------------------


def _add_verify(parts: Commands) -> None:
    more = (
        "Every winner of this GPU model is built, compared with the reference and timed again;\n"
        "what comes of it is recorded, so that a kernel that is wrong here is never picked again.\n"
        "The exit code is 1 when one failed, and where there is no Hopper GPU."
    )
    parser = add_command(parts, "verify", "check stored winners again on this GPU", more)
    add_problems(parser, default="every problem in the database")
    add_surroundings(parser)
    parser.set_defaults(run=run_verify)


def run_verify(args: argparse.Namespace, settings: Settings) -> int:
    """Check the winners; 1 when one failed. Raises GpuMissing without a GPU."""
    from kgen.search.recheck import recheck

    lines = lines_of(args.problem, args.shapes).lines
    wanted = {line.problem for line in lines} if lines else None
    found = recheck(settings, wanted, lambda one: note(f"{one.row.problem}: {one.status}"))
    known = {one.row.problem for one in found}
    unknown = [problem for problem in wanted or () if problem not in known]
    for problem in unknown:
        note(f"{problem}: no winner of this GPU; tune it with `kgen tune`")
    if args.json:
        data_json([_checked_json(one) for one in found])
    elif found:
        headings = ("problem", "status", "µs then", "µs now", "note")
        cells = [_checked_cells(one) for one in found]
        table(headings, cells, text_columns=(0, 1, 4))
    failed = [one for one in found if one.status != "ok"]
    note(f"{count(len(found), 'winner')} checked, {len(failed)} failed")
    return FAILED if failed or unknown else OK


def _checked_cells(one: Checked) -> tuple[str, ...]:
    why = one.reason or ("another cubin than the one stored" if one.stale else "")
    then, now = microseconds(one.row.median_us), microseconds(one.now_us)
    return str(one.row.problem), one.status, then, now, why[:100]


def _checked_json(one: Checked) -> dict[str, Any]:
    row: TrialRow = one.row
    return {
        "shape": str(row.problem),
        "config": row.config.to_dict(),
        "status": one.status,
        "stale": one.stale,
        "then_us": row.median_us,
        "now_us": one.now_us,
        "reason": one.reason,
    }
