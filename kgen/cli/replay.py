"""`kgen replay`: search strategies on recorded timing tables, with no GPU.

Takes tables and names of strategies, gives each one's regret after so many evaluations and seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kgen import __version__
from kgen.cli.arguments import Commands, add_command, add_json, positive, seconds
from kgen.cli.output import count, data_json, note, table
from kgen.errors import UsageError
from kgen.settings import Settings

if TYPE_CHECKING:
    from kgen.search.replay import RecordedProblem, Trace

MORE = """\
A table holds what thousands of configurations of a problem took on a GPU: tools/record_table.py
records one, tools/export_trials.py makes one of a database's trials. Strategies may ask for what is
in the table; regret is how much slower their best is than the table's. The clock is simulated:
compilers side by side, and one GPU that verifies and times what is built.

blind draws at random and knows no model; random does so after the model's default; model corrects
the model by what it measured; taught does so after what it found for problems of another N or K.
Regret is given as the median, and the 90th percentile, over problems and seeds."""

#: Names of kgen.search.replay.SEARCHES, which needs optuna.
SEARCHES: Final = ("blind", "model", "tpe", "genetic", "random", "taught")
_BUDGETS_S: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
_ALMOST_ALL: Final = 0.9


def add_parser(commands: Commands) -> None:
    """Add `kgen replay`."""
    parser = add_command(commands, "replay", "try search strategies on recorded tables", MORE)
    parser.add_argument(
        "tables",
        metavar="TABLE",
        nargs="+",
        type=Path,
        help="a table (.csv.gz), or a folder of them",
    )
    parser.add_argument(
        "--sampler",
        metavar="NAME",
        action="append",
        choices=SEARCHES,
        help=f"one of {', '.join(SEARCHES)}; may be given several times (default: all)",
    )
    parser.add_argument(
        "--evaluations",
        metavar="N",
        type=positive,
        default=64,
        help="evaluations of a search (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats",
        metavar="N",
        type=positive,
        default=5,
        help="seeds of what is random (default: %(default)s)",
    )
    _add_costs(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def _add_costs(parser: argparse.ArgumentParser) -> None:
    costs = parser.add_argument_group("the simulated clock, where a table does not tell")
    costs.add_argument(
        "--jobs", metavar="N", type=positive, default=16, help="compilers (default: %(default)s)"
    )
    for name, default, what in (
        ("compile", 0.4, "a build"),
        ("verify", 0.06, "a verification"),
        ("time", 0.04, "a timing"),
    ):
        costs.add_argument(
            f"--{name}-s",
            metavar="SECONDS",
            type=seconds,
            default=default,
            help=f"{what} (default: %(default)s)",
        )


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Replay and print; 0."""
    from kgen.search.replay import Costs, compare, recorded_problems
    from kgen.search.tables import read

    costs = Costs(args.compile_s, args.verify_s, args.time_s, jobs=args.jobs)
    problems = recorded_problems(map(read, _files(args.tables)), costs)
    names = args.sampler or list(SEARCHES)
    traces = compare(problems, names, args.evaluations, args.repeats)
    if args.json:
        data_json(_as_json(args, problems, traces))
    else:
        _print(args.evaluations, problems, traces)
    return 0


def _files(given: list[Path]) -> list[Path]:
    """The tables that were named, those in folders by name."""
    files = []
    for path in given:
        inside = sorted(path.glob("*.csv.gz")) if path.is_dir() else [path]
        if not inside:
            raise UsageError(f"{path}: a folder without tables (*.csv.gz)")
        files += inside
    return files


def _budgets(evaluations: int) -> list[int]:
    """1, 2, 4 ... and the whole."""
    powers = [2**i for i in range(evaluations.bit_length()) if 2**i < evaluations]
    return [*powers, evaluations]


def _print(
    evaluations: int, problems: list[RecordedProblem], traces: dict[str, list[Trace]]
) -> None:
    rows = [
        (str(p.problem), str(len(p.valid)), f"{p.best_us:.2f}", f"{p.median_us / p.best_us:.2f}")
        for p in problems
    ]
    table(("problem", "configurations", "best µs", "median / best"), rows, text_columns=(0,))
    longest = max((t.seconds[-1] for own in traces.values() for t in own if t.seconds), default=0.0)
    _print_regrets(
        "Regret in %, median and 90th percentile, after so many evaluations",
        {str(n): methodcaller("after", n) for n in _budgets(evaluations)},
        traces,
    )
    _print_regrets(
        "The same after so many seconds on the simulated clock",
        {f"{s:g} s": methodcaller("at", s) for s in _BUDGETS_S if s < longest},
        traces,
    )
    note(f"{count(len(problems), 'problem')}; regret is over the best of what was recorded")


def _print_regrets(
    title: str, budgets: dict[str, Callable[[Trace], float]], traces: dict[str, list[Trace]]
) -> None:
    rows = [
        (name, *(_regret([regret(trace) for trace in own]) for regret in budgets.values()))
        for name, own in traces.items()
    ]
    table(("sampler", *budgets), rows, title=title, text_columns=(0,))


def _regret(values: list[float]) -> str:
    from kgen.search.replay import quantile

    return f"{100 * quantile(values, 0.5):.1f} {100 * quantile(values, _ALMOST_ALL):.1f}"


def _as_json(
    args: argparse.Namespace, problems: list[RecordedProblem], traces: dict[str, list[Trace]]
) -> dict[str, Any]:
    """Every trace, so that any figure can be made of it; regrets as shares, None before a time."""
    return {
        "command": args.command_line,
        "kgen": __version__,
        "problems": [
            {
                "problem": str(p.problem),
                "num_configs": len(p.valid),
                "best_us": p.best_us,
                "median_us": p.median_us,
            }
            for p in problems
        ],
        "searches": {
            name: [
                {
                    "problem": str(t.problem),
                    "seconds": [round(s, 3) for s in t.seconds],
                    "regret": [_finite(us / t.best_us - 1) for us in t.best_so_far_us],
                }
                for t in own
            ]
            for name, own in traces.items()
        },
    }


def _finite(value: float) -> float | None:
    return round(value, 6) if value < float("inf") else None
