"""`kgen plot`: best so far over time, time over the floor, importance of each axis.

Takes problems and the database, or a bench result, gives a PNG and an SVG (or JSON on stdout).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kgen.cli.arguments import (
    OK,
    Commands,
    add_cache,
    add_command,
    add_json,
    add_problems,
    database_at,
    device_at_hand,
    lines_of,
)
from kgen.cli.output import data_json, note
from kgen.errors import UsageError
from kgen.settings import Settings

if TYPE_CHECKING:
    from kgen.cache.records import TrialRow
    from kgen.problem import GemmProblem

MORE = """\
progress    best so far over seconds and trials, a line a problem, from the database
floor       time over the floor of each shape: of the winners in the database over what the device's
            figures allow, or, with --report, of a result of `kgen bench --floor --json` over the
            measured floor, peers included
importance  which axes decided, by Optuna's PED-ANOVA over the timed configurations of each problem

NAME.png and NAME.svg are written. matplotlib comes with the extra: pip install 'kgen[plot]'.
The trials are those of the GPU at hand, or of an H200 where there is none, or as --device says."""

WHATS = ("progress", "floor", "importance")


def add_parser(commands: Commands) -> None:
    """Add `kgen plot`."""
    parser = add_command(commands, "plot", "draw what tuning and timing gave", MORE)
    parser.add_argument("what", metavar="WHAT", choices=WHATS, help=" or ".join(WHATS))
    add_problems(parser, default="every problem in the database")
    parser.add_argument(
        "--report",
        metavar="FILE",
        help="with floor: draw this result of kgen bench (default: the database)",
    )
    parser.add_argument(
        "-o", "--output", metavar="NAME", help="the plot's name (default: kgen_ and WHAT)"
    )
    parser.add_argument(
        "--device", metavar="NAME", help="trials of this device (default: the one at hand)"
    )
    add_cache(parser)
    add_json(parser, default="draw")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Draw, or print the numbers. Raises UsageError where there is nothing to draw."""
    path = Path(args.output or f"kgen_{args.what}")
    if not args.json:  # before the database is read, not after
        from kgen.bench.plot import outputs, require_matplotlib

        outputs(path)
        require_matplotlib()
    if args.report and (args.what != "floor" or args.problem or args.shapes):
        raise UsageError("--report goes with floor, and draws every problem of its file")
    numbers, title = _numbers(args, settings)
    if args.json:
        data_json(numbers)
        return OK
    files = _draw(args.what, numbers, title, path)
    note(f"wrote {', '.join(map(str, files))}")
    return OK


def _draw(what: str, numbers: dict[str, Any], title: str, path: Path) -> list[Path]:
    if what == "floor":
        from kgen.bench.plot import plot

        return plot(numbers, path)
    from kgen.bench.tuning_plots import plot_importance, plot_progress

    return (plot_progress if what == "progress" else plot_importance)(numbers, title, path)


def _numbers(args: argparse.Namespace, settings: Settings) -> tuple[dict[str, Any], str]:
    """What is drawn, and the title."""
    if args.report:
        return read_report(Path(args.report)), ""
    wanted = [line.problem for line in lines_of(args.problem, args.shapes).lines]
    with closing(database_at(settings)) as database:
        device, _ = device_at_hand()
        name = args.device or device.name
        rows = database.trials(wanted[0] if len(wanted) == 1 else None, name)
    groups = dict(_groups(rows, wanted))
    for problem in wanted:
        if problem not in groups:
            note(f"{problem}: no trial on {name}")
    numbers = {"progress": _progress, "floor": _floors, "importance": _importance}[args.what]
    return numbers(groups, name), name


def _groups(
    rows: list[TrialRow], wanted: list[GemmProblem]
) -> Iterator[tuple[GemmProblem, list[TrialRow]]]:
    """The trials of each problem, on the number of SMs that most of them are of."""
    from kgen.cache.rows import by_problem_and_device

    found: dict[GemmProblem, list[TrialRow]] = {}
    for (problem, _, _), group in by_problem_and_device(rows).items():
        if (not wanted or problem in wanted) and len(group) > len(found.get(problem, ())):
            found[problem] = group
    order = wanted or list(found)
    yield from ((problem, found[problem]) for problem in order if problem in found)


def _progress(groups: dict[GemmProblem, list[TrialRow]], name: str) -> dict[str, Any]:
    from kgen.cache.rows import ranking
    from kgen.search.history import best_so_far

    curves = {}
    for problem, group in groups.items():
        if ranked := ranking(group):
            curves[str(problem)] = [asdict(p) for p in best_so_far(group, ranked[0].policy)]
    return curves


def _importance(groups: dict[GemmProblem, list[TrialRow]], name: str) -> dict[str, Any]:
    from kgen.cache.rows import ranking
    from kgen.search.importance import LEAST_TIMED, axis_importance

    shares = {}
    for problem, group in groups.items():
        times = {row.config: row.median_us for row in reversed(ranking(group)) if row.median_us}
        found = axis_importance(times)
        if found:
            shares[str(problem)] = found
        else:
            note(
                f"{problem}: {len(times)} timed configurations tell nothing; "
                f"it takes {LEAST_TIMED}, and axes that differ"
            )
    return shares


def _floors(groups: dict[GemmProblem, list[TrialRow]], name: str) -> dict[str, Any]:
    """As a report of `kgen bench`, with winners' times and the floor of the device's figures."""
    from kgen.cache.rows import ranking
    from kgen.device import Device
    from kgen.search.plan import floor_us

    rows: list[dict[str, Any]] = []
    dates = []
    for problem, group in groups.items():
        if not (ranked := ranking(group)):
            continue
        best = ranked[0]
        try:
            device = Device.from_dict(best.provenance["device"])
        except ValueError as error:
            note(f"{problem}: left out: {error}")
            continue
        rows.append(
            {
                "shape": str(problem),
                "problem": asdict(problem),
                "providers": {"kgen": {"median_us": best.median_us}},
                "floor": {"us": floor_us(problem, device)},
            }
        )
        dates.append(best.date)
    return {
        "device": {"name": name},
        "date": max(dates, default=""),
        "providers": ["kgen"],
        "reference_only": [],
        "rows": rows,
    }


def read_report(path: Path) -> dict[str, Any]:
    """A result of `kgen bench --json`, or a file that tools/publish_results.py made of one.

    Raises UsageError for anything else.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--report {path} can not be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"--report {path} is no JSON: {error}") from error
    if not isinstance(report, dict) or not {"rows", "providers"} <= report.keys():
        raise UsageError(f"--report {path} is no result of `kgen bench --json`")
    return report
