"""`kgen bench --host`: what a call costs the Python thread that makes it.

Takes the arguments of `kgen bench`, gives a table a problem (or JSON) on stdout. Needs a Hopper
GPU.
"""

from __future__ import annotations

import argparse

from kgen.cli.arguments import OK, required_lines
from kgen.cli.output import data_json, microseconds, table


def run_host(args: argparse.Namespace) -> int:
    """Time and print; a problem of the bench's own where none is named."""
    named = args.problem or args.shapes
    problems = [line.problem for line in required_lines(args)] if named else []
    from kgen.bench.host import DEFAULT_PROBLEM, run_host_bench

    reports = [run_host_bench(problem) for problem in problems or [DEFAULT_PROBLEM]]
    if args.json:
        data_json([report.to_dict() for report in reports])
        return OK
    for report in reports:
        headings = ["call", "µs", f"µs, {report.num_sets} sets in turn"]
        rows = [
            [name, microseconds(cost.one_us), microseconds(cost.rotating_us)]
            for name, cost in report.costs.items()
        ]
        table(headings, rows, title=f"host cost of {report.problem}")
    return OK
