"""Timing tables for `kgen replay`, from a Hopper GPU: thousands of configurations of each problem.

    python tools/record_table.py --shapes FILE --commit HASH --out tests/data/tables
    python tools/record_table.py --shapes FILE --commit HASH --compile-only --cache DIR

The second form needs no GPU: it builds what the first one will time, into the artifact store below
DIR (a 16-core machine builds some 40 kernels a second). Carried along and named with --cache there,
nothing is compiled again, if the compiler is the same; what is missing is built while others run.

Of each problem's valid configurations --count are drawn at random, by the same lot for all
problems; all of them where there are no more. One file a problem is written when it is done, and
not recorded again: the same command goes on from there. Steps and their seconds go to stderr.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from kgen.cli.arguments import (
    add_compiler,
    add_problems,
    positive,
    required_lines,
    seconds,
    settings_of,
)
from kgen.errors import Interrupted, KgenError
from kgen.problem import GemmProblem
from kgen.search.events import TuneOptions
from kgen.search.recorder import Recorded, RecordOptions, record_tables
from kgen.search.tables import write

FAILED, USAGE, INTERRUPTED = 1, 2, 130


def table_path(folder: Path, problem: GemmProblem) -> Path:
    """Where the table of a problem lies: its shapes line with _ for what a name should not hold."""
    name = str(problem).replace(" ", "_").replace("=", "")
    return folder / f"{name}.csv.gz"


def say(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    defaults = RecordOptions()
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_problems(made)
    made.add_argument("--commit", required=True, help="the commit that is recorded, for the header")
    made.add_argument(
        "--out", type=Path, default=Path(), metavar="DIR", help="where tables go (default: here)"
    )
    made.add_argument("--compile-only", action="store_true", help="build everything, time nothing")
    made.add_argument(
        "--count",
        type=positive,
        default=defaults.count,
        help="configurations of a problem (default: %(default)s)",
    )
    made.add_argument(
        "--seed", type=int, default=defaults.seed, help="of the draw (default: %(default)s)"
    )
    made.add_argument(
        "--batch",
        type=positive,
        default=defaults.batch,
        help="kernels that are timed together (default: %(default)s)",
    )
    made.add_argument(
        "--fastest",
        type=int,
        default=defaults.fastest,
        help="of the fastest, how many are verified and measured again (default: %(default)s)",
    )
    made.add_argument(
        "--sample",
        type=int,
        default=defaults.sample,
        help="and of the others, at random (default: %(default)s)",
    )
    made.add_argument("--budget", type=seconds, help="seconds for all of it (default: no limit)")
    made.add_argument(
        "--jobs", type=positive, help="compile processes (default: KGEN_JOBS, else the CPUs)"
    )
    add_compiler(made)
    made.add_argument(
        "--cache", metavar="DIR", help="folder of compiled kernels (default: KGEN_CACHE_DIR)"
    )
    return made


def main(arguments: list[str] | None = None, tune: TuneOptions | None = None) -> int:
    """Record; 0 when every problem has its whole table. `tune` names another backend, for tests."""
    args = parser().parse_args(arguments)
    try:
        settings = settings_of(args)
        lines = required_lines(args)
        args.out.mkdir(parents=True, exist_ok=True)
    except (KgenError, OSError) as error:
        say(f"record_table: {error}")
        return USAGE
    missing = [line for line in lines if not table_path(args.out, line.problem).exists()]
    if args.compile_only:
        missing = lines
    elif len(missing) < len(lines):
        say(f"{len(lines) - len(missing)} tables are there already; delete one to record it again")
    tune = tune or TuneOptions()
    options = RecordOptions(
        count=args.count,
        seed=args.seed,
        batch=args.batch,
        fastest=args.fastest,
        sample=args.sample,
        budget_s=args.budget,
        commit=args.commit,
        tune=TuneOptions(**{**vars(tune), "gpu": tune.gpu and not args.compile_only}),
    )
    start = time.monotonic()
    unfinished = 0

    def on_recorded(recorded: Recorded) -> None:
        nonlocal unfinished
        unfinished += bool(recorded.num_left or recorded.reason)
        if recorded.table is not None:
            write(recorded.table, table_path(args.out, recorded.problem))
        say(f"[{time.monotonic() - start:5.0f} s] {describe(recorded)}")

    try:
        record_tables(missing, settings, options, on_recorded, say)
    except Interrupted:
        say("interrupted; tables that were written are kept")
        return INTERRUPTED
    except KgenError as error:
        say(f"record_table: {error}")
        return FAILED
    return FAILED if unfinished else 0


def describe(recorded: Recorded) -> str:
    """One problem in a line: how many of which status, the spread of times, where seconds went."""
    words = [f"{recorded.problem}: {recorded.num_drawn} of {recorded.num_valid} valid drawn"]
    if recorded.table is not None:
        rows = recorded.table.rows
        statuses = [row.status for row in rows]
        words += [f"{statuses.count(name)} {name}" for name in dict.fromkeys(statuses)]
        words.append(f"{sum(row.verified for row in rows)} verified")
        times = sorted(row.median_us for row in rows if row.median_us is not None)
        middle = times[len(times) // 2] / times[0]
        words.append(f"best {times[0]:.2f} us, median {middle:.2f} times that")
    words += [f"{step} {value:.1f} s" for step, value in recorded.seconds.items()]
    words += [f"{recorded.num_left} left"] * bool(recorded.num_left)
    words += [recorded.reason] * bool(recorded.reason)
    return ", ".join(words)


if __name__ == "__main__":
    sys.exit(main())
