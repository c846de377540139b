"""`kgen bench`: time the best kernels of a shapes file, beside other implementations if asked.

Takes shapes, gives a table (or JSON) of times on stdout. Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
from math import exp, log
from typing import TYPE_CHECKING

from kgen.cli.arguments import (
    OK,
    Commands,
    add_cache,
    add_command,
    add_compiler,
    add_json,
    add_policy,
    add_problems,
    required_lines,
)
from kgen.cli.output import data_json, microseconds, note, spread, table
from kgen.settings import Settings

if TYPE_CHECKING:
    from kgen.bench.run import BenchReport, Row

MORE = """\
Timed is what the runtime would launch: the database's winner, else the model's choice. Everything
is verified before it is timed, and all calls of a problem alternate in one process. Needs a
Hopper GPU; a problem that the fallback would answer is not timed, and the exit code is 1."""

KGEN = "kgen"


def add_parser(commands: Commands) -> None:
    """Add `kgen bench`."""
    parser = add_command(commands, "bench", "time the best kernels, beside others if asked", MORE)
    add_problems(parser)
    parser.add_argument(
        "--against",
        choices=("torch",),
        action="append",
        default=[],
        help="also time torch._scaled_mm, blockwise and with one scale per tensor "
        "(default: kgen alone)",
    )
    add_policy(parser)
    add_compiler(parser)
    add_cache(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Time and print; raises GpuMissing where there is no Hopper GPU."""
    lines = required_lines(args)
    from kgen.bench.run import run_bench

    report = run_bench(
        [line.problem for line in lines],
        settings,
        against=args.against,
        policy=args.policy,
        command=args.command_line,
        on_row=_say,
    )
    if args.json:
        data_json(report.to_dict())
    else:
        print_report(report)
    return 1 if report.failed else OK


def _say(row: Row) -> None:
    times = [f"{name} {microseconds(timing.median_us)} µs" for name, timing in row.timings.items()]
    notes = [f"{name}: {text}" for name, text in row.notes.items()]
    note(f"{row.problem}: {'; '.join([*times, *notes])}")


def print_report(report: BenchReport) -> None:
    """A line a problem: kgen's time, then each peer's and how many times faster kgen is."""
    peers = [name for name in report.providers if name != KGEN]
    headings = ["problem", "kgen µs", "p10–p90", "TFLOPS", "error"]
    for name in peers:
        easier = " (easier)" if name in report.reference_only else ""
        headings += [f"{name}{easier} µs", "speedup"]
    rows = [_cells(row, peers) for row in report.rows]
    if peers and rows:
        means = [cell for name in peers for cell in ("", _mean_speedup(report, name))]
        rows.append(["geometric mean", "", "", "", "", *means, "", ""])
    text_columns = (0, len(headings), len(headings) + 1)
    table([*headings, "configuration", "from"], rows, text_columns=text_columns)


def _cells(row: Row, peers: list[str]) -> list[str]:
    own = row.timings.get(KGEN)
    details = row.details.get(KGEN, {})
    cells = [
        str(row.problem),
        microseconds(own.median_us if own else None),
        spread(own.p10_us, own.p90_us) if own else "–",
        f"{row.problem.flops / own.median_us / 1e6:.0f}" if own else "–",
        f"{row.errors[KGEN]:.1e}" if own else "–",
    ]
    for name in peers:
        timing, ratio = row.timings.get(name), row.speedup(name)
        cells.append(microseconds(timing.median_us if timing else None))
        cells.append(f"{ratio:.2f}x" if ratio else "–")
    return [*cells, str(details.get("short", "–")), str(details.get("origin", "–"))]


def _mean_speedup(report: BenchReport, name: str) -> str:
    ratios = [ratio for row in report.rows if (ratio := row.speedup(name))]
    return f"{exp(sum(map(log, ratios)) / len(ratios)):.2f}x" if ratios else "–"
