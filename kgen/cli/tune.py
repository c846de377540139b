"""`kgen tune`: find the fastest verified kernel of each problem and keep it in the database.

Takes shapes and limits, gives a table (or JSON) of winners on stdout and progress on stderr.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kgen import __version__
from kgen.cli.arguments import (
    Commands,
    add_command,
    add_policy,
    add_problems,
    add_surroundings,
    positive,
    required_lines,
    seconds,
)
from kgen.cli.output import count, data_json, microseconds, note, spread, table
from kgen.cli.refresh import run_refresh
from kgen.search.events import DEFAULT_TRIALS, PREDICTED, UNFINISHED, TuneOptions
from kgen.settings import Settings

if TYPE_CHECKING:
    from kgen.search.events import TuneReport

MORE = """\
On a Hopper GPU every candidate is verified before it is timed, and the fastest is stored. With
no GPU the leading candidates are compiled, ranked by the analytic model and stored as predicted;
a later run on a GPU starts from there. A run that was stopped goes on where it was.

A PROBLEM, or a line of a shapes file, is a kind (dense, contiguous, masked, wgrad or k_grouped) and
fields: m, n, k, groups, recipe, a_dtype, b_dtype, d_dtype, bias, fast_accum, batch_invariant,
num_sms, accumulate, and weight, its share of the budget. A value may be a list (m=1,16) or a range
(m=64..512*2 doubles, m=64..512+64 adds 64); the line stands for every combination."""

INTERRUPTED = 130
#: Names of kgen.search.strategies, which needs numpy.
SAMPLERS = ("model", "tpe", "genetic", "random", "exhaustive")


def add_parser(commands: Commands) -> None:
    """Add `kgen tune`."""
    parser = add_command(commands, "tune", "tune problems and store the winners", MORE)
    add_problems(parser)
    _add_limits(parser)
    parser.add_argument(
        "--no-gpu",
        action="store_true",
        help="compile and predict only (default: use the GPU when there is one)",
    )
    parser.add_argument(
        "--refresh",
        action="store_true",
        help="time only the stored --finalists of each problem, or of all, whose compiler, "
        "templates or driver changed since, and say what moved (default: search)",
    )
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=positive,
        help="compile processes (default: KGEN_JOBS, else the CPUs at hand)",
    )
    parser.add_argument(
        "--log",
        metavar="FILE",
        help="append one JSON line a trial to this file, as it ends (default: no log)",
    )
    add_policy(parser)
    add_surroundings(parser)
    parser.set_defaults(run=run)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    defaults = TuneOptions()
    limits = parser.add_argument_group("how far and how")
    limits.add_argument(
        "--trials",
        metavar="N",
        type=positive,
        help=f"most trials of a problem (default: {DEFAULT_TRIALS}, or no limit with a budget)",
    )
    limits.add_argument(
        "--budget",
        metavar="SECONDS",
        type=seconds,
        help="time of the whole run, shared out by the problems' weights (default: no limit)",
    )
    limits.add_argument(
        "--budget-per-problem",
        metavar="SECONDS",
        type=seconds,
        help="time of one problem (default: no limit)",
    )
    limits.add_argument(
        "--sampler",
        choices=SAMPLERS,
        default=defaults.sampler,
        help="how candidates are chosen (default: %(default)s)",
    )
    limits.add_argument(
        "--finalists",
        metavar="N",
        type=positive,
        default=defaults.finalists,
        help="configurations measured again, interleaved, at the end (default: %(default)s)",
    )
    limits.add_argument(
        "--leading",
        metavar="N",
        type=positive,
        default=defaults.leading,
        help="candidates compiled per problem where there is no GPU (default: %(default)s)",
    )
    limits.add_argument(
        "--seed",
        metavar="N",
        type=int,
        default=defaults.seed,
        help="of the sampler (default: %(default)s)",
    )


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Tune and print the report; 0 when every problem was served, 130 when interrupted."""
    options = TuneOptions(
        trials=args.trials,
        budget_s=args.budget,
        budget_per_problem_s=args.budget_per_problem,
        sampler=args.sampler,
        finalists=args.finalists,
        leading=args.leading,
        seed=args.seed,
        policy=args.policy,
        gpu=not args.no_gpu,
    )
    if args.refresh:
        return run_refresh(args, settings, options)
    lines = required_lines(args)
    _make_cache(settings.cache_dir)
    # Only now: a bad shapes file is reported before torch or CUDA is touched.
    from kgen.cli.progress import progress
    from kgen.cli.trial_log import logged
    from kgen.search.tune import tune

    with progress(options) as show, logged(args.log, show) as on_event:
        report = tune(lines, settings, options, on_event)
    if args.json:
        data_json({"command": args.command_line, "kgen": __version__, **report.to_dict()})
    else:
        print_report(report)
    _say_how_it_went(report)
    return INTERRUPTED if report.interrupted else report.exit_code


def _make_cache(folder: Path) -> None:
    """Make the cache folder, or say what follows; what children warn of is not shown."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(folder, os.W_OK | os.X_OK) else "no permission"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        note(f"{folder} can not be written ({reason}): compiled kernels are not kept")


def print_report(report: TuneReport) -> None:
    """The table of winners."""
    if report.measured:
        _print_measured(report)
    else:
        _print_predicted(report)


def _say_how_it_went(report: TuneReport) -> None:
    served = sum(problem.ok for problem in report.problems)
    note(
        f"{served} of {count(len(report.problems), 'problem')} "
        f"{'tuned' if report.measured else PREDICTED} in {report.seconds:.0f} s; "
        f"{count(report.num_compiles, 'kernel')} compiled, "
        f"{report.num_cache_hits} taken from the cache, "
        f"{count(sum(p.ok and p.skipped for p in report.problems), 'problem')} known before"
    )
    for problem in report.problems:
        if not problem.ok and not (report.interrupted and problem.outcome == UNFINISHED):
            note(f"{problem.problem}: {problem.outcome}: {problem.reason}")
    if report.interrupted:
        note("interrupted; finished trials are kept, the same command goes on from here")


def _print_measured(report: TuneReport) -> None:
    headings = ("problem", "outcome", "µs", "p10–p90", "TFLOPS", "vs default", "error", "trials")
    rows = [
        (
            str(p.problem),
            p.outcome,
            microseconds(p.median_us),
            spread(p.p10_us, p.p90_us),
            f"{p.problem.flops / p.median_us / 1e6:.0f}" if p.median_us else "–",
            f"{p.default_us / p.median_us:.2f}x" if p.default_us and p.median_us else "–",
            f"{p.error:.1e}" if p.error is not None else "–",
            str(p.num_trials),
            str(p.config or "–"),
        )
        for p in report.problems
    ]
    table((*headings, "configuration"), rows, text_columns=(0, 1, 8))


def _print_predicted(report: TuneReport) -> None:
    rows = [
        (
            str(p.problem),
            p.outcome,
            microseconds(p.predicted_us),
            str(p.num_trials),
            str(p.config or "–"),
        )
        for p in report.problems
    ]
    why = report.reason.partition(":")[0]
    table(
        ("problem", "outcome", "predicted µs", "compiled", "configuration"),
        rows,
        title=f"Predicted for {report.device.name}, not measured: {why}",
        text_columns=(0, 1, 4),
    )
