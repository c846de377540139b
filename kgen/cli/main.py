"""The `kgen` command: reads the command line, runs one subcommand, maps errors to exit codes.

Takes arguments, gives an exit code. What a subcommand needs is imported when it runs, so that
`kgen --help` needs neither torch nor CUDA and answers at once.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Final

import kgen
from kgen.cli import bench as bench_command
from kgen.cli import (
    best,
    db,
    dispatch_table,
    doctor,
    explain,
    misses,
    plot,
    profile,
    race,
    render,
    replay,
    run_trial,
    shapes,
    show,
    tune,
)
from kgen.cli.arguments import OK, USAGE, HelpFormatter, settings_of
from kgen.cli.output import OutputError, complain, flush, log_to_stderr, prepare_streams
from kgen.errors import Interrupted, KgenError, UsageError

#: Modules of the subcommands, in the order of the help.
COMMANDS: Final = (
    *(tune, dispatch_table, best, show, explain, render, run_trial, race, profile),
    *(bench_command, plot, shapes, misses, replay, db, doctor),
)
FAILED: Final = 1
INTERRUPTED: Final = 130
EPILOG: Final = """\
exit codes: 0 all done, 1 some failed, 2 wrong usage, 130 interrupted
Data goes to stdout, progress to stderr. KGEN_CACHE_DIR, KGEN_DB, KGEN_COMPILER, KGEN_JOBS and
KGEN_LOG_LEVEL set what the options do not. `kgen tune --help` tells how problems are written."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; each subcommand sets `run` in its namespace."""
    parser = argparse.ArgumentParser(
        prog="kgen",
        description="Tuned, verified FP8 GEMM kernels for NVIDIA Hopper.",
        epilog=EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kgen {kgen.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; argparse itself exits with 0 or 2."""
    prepare_streams()
    words = sys.argv[1:] if argv is None else list(argv)
    args = build_parser().parse_args(words)
    args.command_line = shlex.join(["kgen", *words])
    try:
        settings = settings_of(args)
        log_to_stderr(settings.log_level)
        code = int(args.run(args, settings))
        flush()
        return code
    except UsageError as error:
        complain(str(error))
        return USAGE
    except (KeyboardInterrupt, Interrupted):
        complain("interrupted")
        return INTERRUPTED
    except KgenError as error:
        complain(str(error))
        return FAILED
    except BrokenPipeError:  # the reader of stdout left, as `head` does; nothing is wrong
        _drop_output()
        return OK
    except OutputError as error:
        complain(str(error))
        _drop_output()
        return FAILED


def _drop_output() -> None:
    """Have Python's last flush go nowhere, since it would fail as well."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
