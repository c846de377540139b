"""`kgen bench`: time the best kernels of a shapes file, beside other implementations if asked.

Takes shapes, gives a table (or JSON) of times on stdout. Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse

from kgen.cli.arguments import (
    OK,
    Commands,
    add_cache,
    add_command,
    add_compiler,
    add_json,
    add_problems,
    required_lines,
)
from kgen.settings import Settings

MORE = """\
Every kernel is verified before it is timed, and all calls of a problem alternate in one process
under the policy that `kgen tune` uses. Needs a Hopper GPU; fails where a fallback would answer."""


def add_parser(commands: Commands) -> None:
    """Add `kgen bench`."""
    parser = add_command(commands, "bench", "time the best kernels, beside others if asked", MORE)
    add_problems(parser)
    parser.add_argument(
        "--against",
        choices=("torch",),
        action="append",
        default=[],
        help="also time torch._scaled_mm (default: kgen alone)",
    )
    add_compiler(parser)
    add_cache(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Time and print; raises GpuMissing where there is no Hopper GPU."""
    lines = required_lines(args)
    raise NotImplementedError
    return OK
