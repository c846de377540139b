"""`kgen bench --casts`: casts and gathers beside copies of as many bytes.

Takes the arguments of `kgen bench`, gives a table (or JSON) on stdout. Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kgen.cli.arguments import OK
from kgen.cli.output import count, data_json, microseconds, note, spread, table

if TYPE_CHECKING:
    from kgen.bench.casts import Row


def run_casts(args: argparse.Namespace) -> int:
    """Time and print; the exit code is 1 where one is slower than the target."""
    from kgen.bench.casts import TARGET, run_casts_bench

    report = run_casts_bench(policy=args.policy, on_row=_say)
    if args.json:
        data_json(report.to_dict())
    else:
        headings = ["call", "M", "K", "µs", "p10–p90", "GB/s", "copy GB/s", "of copy"]
        table(headings, [_cells(row) for row in report.rows], text_columns=(0,))
    slow = sum(row.share < TARGET for row in report.rows)
    if slow:
        note(f"{count(slow, 'call')} below {TARGET:.0%} of copy speed")
    return 1 if slow else OK


def _say(row: Row) -> None:
    note(f"{row.name}, {row.m}x{row.k}: {row.share:.0%} of copy speed")


def _cells(row: Row) -> list[str]:
    return [
        row.name,
        str(row.m),
        str(row.k),
        microseconds(row.timing.median_us),
        spread(row.timing.p10_us, row.timing.p90_us),
        f"{row.gbps(row.timing):.0f}",
        f"{row.gbps(row.copy):.0f}",
        f"{row.share:.0%}",
    ]
