"""`kgen best`: the best known kernel of each problem, from the database alone.

Takes problems (or none: every one in the database), gives a table (or JSON) on stdout. Needs no
GPU and writes nothing.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import TYPE_CHECKING, Any

from kgen.cli.arguments import (
    OK,
    Commands,
    add_cache,
    add_command,
    add_json,
    add_problems,
    database_at,
    lines_of,
)
from kgen.cli.output import data_json, microseconds, note, spread, table
from kgen.settings import Settings

if TYPE_CHECKING:
    from kgen.cache.db import TuningDatabase
    from kgen.cache.records import TrialRow
    from kgen.problem import GemmProblem

MORE = """\
Verified and timed kernels are listed for every device in the database. A problem with none shows
its predicted kernel, as such. A configuration such as 64x88 s10 w1 split_k=4 reads: block_m x
block_n, stages, math warpgroups, and what differs from the defaults. The exit code is 1 when
nothing is known of a problem asked for."""


def add_parser(commands: Commands) -> None:
    """Add `kgen best`."""
    parser = add_command(commands, "best", "list the best known kernel of each problem", MORE)
    add_problems(parser, default="every problem in the database")
    parser.add_argument(
        "--device", metavar="NAME", help='one device only, such as "NVIDIA H200" (default: all)'
    )
    add_cache(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Print the winners; 1 when a problem that was asked for is not in the database."""
    wanted = [line.problem for line in lines_of(args.problem, args.shapes).lines]
    with closing(database_at(settings)) as database:
        rows = best_rows(database, wanted, args.device)
    if args.json:
        data_json([_as_json(row) for row in rows])
    else:
        _print(rows)
    known = {row.problem for row in rows}
    unknown = [problem for problem in wanted if problem not in known]
    for problem in unknown:
        note(f"{problem}: nothing known; tune it with `kgen tune`")
    if not rows and not unknown:
        note(f"{database.where} holds no result yet")
    return 1 if unknown else OK


def best_rows(
    database: TuningDatabase, wanted: list[GemmProblem], device_name: str | None
) -> list[TrialRow]:
    """The winner of each problem and device, else its best prediction.

    In the order wanted, or sorted by size where every problem is.
    """
    rows = database.winners(device_name)
    timed = {row.problem for row in rows}
    rows += best_predicted(database, timed, device_name)
    if wanted:
        order = {problem: index for index, problem in enumerate(wanted)}
        rows = [row for row in rows if row.problem in order]
        return sorted(rows, key=lambda row: order[row.problem])
    return sorted(rows, key=_size)


def _size(row: TrialRow) -> tuple[Any, ...]:
    problem = row.problem
    sizes = (problem.n, problem.k, problem.m, problem.groups)
    return (problem.kind, *sizes, problem.d_dtype, problem.num_sms, row.device_name, row.num_sms)


def best_predicted(
    database: TuningDatabase, timed: set[GemmProblem], device_name: str | None
) -> list[TrialRow]:
    """Of each problem that has no timing, the compiled row that the model puts first."""
    best: dict[tuple[Any, ...], TrialRow] = {}
    for row in database.trials(device_name=device_name, statuses=("compiled",)):
        if row.predicted_us is None or row.problem in timed:
            continue
        key = (row.problem, row.device_name, row.num_sms)
        former = best.get(key)
        if former is None or row.predicted_us < (former.predicted_us or 0.0):
            best[key] = row
    return list(best.values())


def _print(rows: list[TrialRow]) -> None:
    devices = {f"{row.device_name}, {row.num_sms} SMs" for row in rows}
    several = len(devices) > 1
    headings = ("problem", *["device"] * several, "what", "µs", "p10–p90", "error", "configuration")
    cells = [
        (
            str(row.problem),
            *[f"{row.device_name}, {row.num_sms} SMs"] * several,
            "measured" if row.status == "ok" else "predicted",
            microseconds(row.median_us if row.status == "ok" else row.predicted_us),
            spread(row.p10_us, row.p90_us),
            f"{row.error:.1e}" if row.error is not None else "–",
            str(row.config),
        )
        for row in rows
    ]
    if cells:
        text_columns = (0, 1, 2, 6) if several else (0, 1, 5)
        table(headings, cells, title="" if several else devices.pop(), text_columns=text_columns)


def _as_json(row: TrialRow) -> dict[str, Any]:
    return row.to_dict() | {"measured": row.status == "ok"}
