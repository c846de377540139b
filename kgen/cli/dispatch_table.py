"""`kgen dispatch-table`: few kernels for every M, from the M that were tuned.

Takes problems, whose M says nothing; gives each table (or JSON) on stdout and stores it.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from kgen.cli.arguments import (
    OK,
    Commands,
    add_command,
    add_policy,
    add_problems,
    add_surroundings,
    device_at_hand,
    positive,
    required_lines,
)
from kgen.cli.output import count, data, data_json, note, table
from kgen.errors import GpuMissing, UsageError
from kgen.settings import Settings

if TYPE_CHECKING:
    from kgen.cache.db import TuningDatabase
    from kgen.device import Device
    from kgen.problem import GemmProblem
    from kgen.search.dispatch_table import Derived

FAILED = 1
BOUND = 0.03

MORE = """\
Tune some M first, such as m=1..16384*2. Then, on a GPU, the winner of each M is verified and timed
at the next tuned M on both sides and at M between them, and the fewest kernels are chosen that are
at no such M slower than the best there by more than --bound. An M between two of these runs on the
kernel of the upper one. Without a GPU, or with --no-gpu, only times that are stored count.

The table is kept in the database; the runtime takes it for every M from 1 to the largest tuned one,
but for an M that was timed after it was made. Problems with batch_invariant=true have tables of
their own, and so has every N, K, type and kind. The last table of a class counts."""


def add_parser(commands: Commands) -> None:
    """Add `kgen dispatch-table`."""
    summary = "derive few kernels for all M from the tuned ones"
    parser = add_command(commands, "dispatch-table", summary, MORE)
    add_problems(parser)
    parser.add_argument(
        "--bound",
        metavar="SHARE",
        type=share,
        default=BOUND,
        help="how much slower than the best a kernel may be (default: %(default)s, 3 %%)",
    )
    parser.add_argument(
        "--neighbours",
        metavar="N",
        type=positive,
        default=2,
        help="tuned M on either side whose winners are timed at an M (default: %(default)s)",
    )
    parser.add_argument(
        "--between",
        metavar="N",
        type=whole,
        default=1,
        help="M between two tuned ones at which their winners are timed (default: %(default)s)",
    )
    parser.add_argument(
        "--no-gpu", action="store_true", help="time nothing (default: use the GPU if there is one)"
    )
    parser.add_argument("--dry-run", action="store_true", help="store no table (default: store it)")
    add_policy(parser)
    add_surroundings(parser)
    parser.set_defaults(run=run)


def share(text: str) -> float:
    """An argparse type: a share from 0 to below 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text}: expected a share below 1, such as 0.03")
    return value


def whole(text: str) -> int:
    """An argparse type: a whole number from 0."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number from 0")
    return value


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Derive, print and store; 1 where a problem has too few tuned M."""
    from kgen.search.events import TuneOptions

    problems = list(dict.fromkeys(line.problem.with_m(1) for line in required_lines(args)))
    options = TuneOptions(policy=args.policy)
    try:
        if args.no_gpu:
            raise GpuMissing("the GPU was left out on request")
        found = _on_gpu(args, settings, options, problems)
    except GpuMissing as error:
        note(f"nothing is timed: {error}")
        found = _from_stored(args, settings, problems)
    if args.json:
        data_json([_as_json(one) for one in found])
    else:
        for one in found:
            print_table(one)
    return OK if len(found) == len(problems) else FAILED


def _on_gpu(
    args: argparse.Namespace, settings: Settings, options: Any, problems: list[GemmProblem]
) -> list[Derived]:
    from kgen.search.dispatch_table import measure_across
    from kgen.search.gpu_run import gpu_run

    found = []
    with gpu_run(settings, "dispatch-table", options) as gpu:
        for problem in problems:

            def tell(m: int, number: int, failures: list[str]) -> None:
                note(f"m={m}: {count(number, 'kernel')} timed, {len(failures)} failed")
                for text in failures:
                    note(f"m={m}: {text}")

            measure_across(gpu, problem, args.neighbours, args.between, tell)
            key = partial(gpu.run.key, problem)
            found += _derive(args, gpu.run.db, problem, gpu.device, key, gpu.run.run_id)
    return found


def _from_stored(
    args: argparse.Namespace, settings: Settings, problems: list[GemmProblem]
) -> list[Derived]:
    from kgen.build import key_of
    from kgen.cache.db import TuningDatabase
    from kgen.toolchain import default_compiler

    compiler = default_compiler(settings)
    device, _ = device_at_hand()
    found = []
    with closing(TuningDatabase.open(settings.db_url, create=False)) as database:
        for problem in problems:
            key = partial(key_of, problem, compiler=compiler)
            found += _derive(args, database, problem, device, key, None)
    return found


def _derive(  # noqa: PLR0917, as many things as a table is made of
    args: argparse.Namespace,
    database: TuningDatabase,
    problem: GemmProblem,
    device: Device,
    key: Any,
    run_id: int | None,
) -> list[Derived]:
    """The table, stored; none, with a note, where there are too few M."""
    from kgen.search.dispatch_table import derive_table

    try:
        derived = derive_table(database, problem, device, key, policy=args.policy, bound=args.bound)
    except UsageError as error:
        note(str(error))
        return []
    if derived.stale:
        note(
            f"{problem}: not used, being of another compiler or other templates: times of "
            f"M = {list(derived.stale)}: kgen tune --refresh"
        )
    if not args.dry_run:
        database.record_table(derived.table, run_id)
    return [derived]


def print_table(derived: Derived) -> None:
    """A line for each range of M."""
    made = derived.table
    rows = [
        (
            f"{one.low}–{one.entry.up_to}",
            str(len(one.points)),
            f"{one.worst:.1%}",
            str(one.entry.config),
        )
        for one in derived.served
    ]
    fields = " ".join(part for part in str(made.problem).split() if not part.startswith("m="))
    title = f"{fields} on {made.device_name}, {made.num_sms} SMs"
    table(("M", "points", "over best", "configuration"), rows, title=title, text_columns=(0, 3))
    least = "the fewest possible" if derived.is_smallest else "perhaps not the fewest possible"
    data(
        f"{count(made.num_kernels, 'kernel')}, {least}, for {len(made.points)} M with "
        f"{count(derived.num_winners, 'winner')}; at most {made.worst:.1%} over the best known "
        f"there (bound {made.bound:.1%})"
    )
    data("")


def _as_json(derived: Derived) -> dict[str, Any]:
    return {
        **derived.table.to_dict(),
        "problem": str(derived.table.problem),
        "num_kernels": derived.table.num_kernels,
        "is_smallest": derived.is_smallest,
        "num_winners": derived.num_winners,
        "served": [
            {"low": one.low, "up_to": one.entry.up_to, "points": one.points, "worst": one.worst}
            for one in derived.served
        ],
        "stale": derived.stale,
    }
