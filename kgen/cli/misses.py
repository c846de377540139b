"""`kgen misses`: what running programs called that was not tuned, as a shapes file.

Takes the files that the runtime kept where KGEN_MISSES says; gives them merged, on stdout or in a
file, for `kgen tune --shapes`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kgen.cli.arguments import OK, Commands, add_command, lines_of
from kgen.cli.output import note
from kgen.cli.shapes import add_output, write
from kgen.errors import UsageError
from kgen.runtime.record import files_of, sorted_by_weight
from kgen.settings import Settings, absolute_path

MORE = """\
A program that runs with KGEN_MISSES=FILE keeps in FILE every problem that had no tuned kernel of
its own, with the number of calls as the weight: one line a problem here, most calls first. Several
processes and runs add up; {pid} in FILE keeps processes apart, and is read here as any number.
KGEN_RECORD=FILE keeps all calls in the same way, tuned or not; without a Hopper GPU, where nothing
can be missed, it alone does. Once tuned, delete the file."""


def add_parser(commands: Commands) -> None:
    """Add `kgen misses`."""
    summary = "print what running programs called that was not tuned"
    parser = add_command(commands, "misses", summary, MORE)
    parser.add_argument(
        "file", metavar="FILE", nargs="*", help="recorded files (default: those of KGEN_MISSES)"
    )
    add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Print the misses, most calls first. Raises UsageError where nothing says where they are."""
    files = args.file or [str(file) for file in _recorded(settings)]
    if not files:
        note(
            f"nothing was recorded in {settings.misses}: every call was tuned, none made yet, or "
            "the program ran where there is no Hopper GPU (there KGEN_RECORD keeps its calls)"
        )
        return OK
    write(args, sorted_by_weight(lines_of([], files).lines))
    return OK


def _recorded(settings: Settings) -> list[Path]:
    if not settings.misses:
        raise UsageError(
            "no file: give FILE, or set KGEN_MISSES as in the program whose misses are wanted"
        )
    return files_of(absolute_path(settings.misses, "KGEN_MISSES"))
