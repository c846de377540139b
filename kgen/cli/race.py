"""`kgen race`: a kernel source edited by hand, verified and timed beside kgen's own.

Takes a problem and a source file, gives a table (or JSON) on stdout.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kgen.cli.arguments import (
    OK,
    Commands,
    add_command,
    add_policy,
    add_problem,
    add_set,
    add_surroundings,
    device_at_hand,
    one_problem,
    positive,
    set_values,
)
from kgen.cli.output import data_json, microseconds, note, table
from kgen.settings import Settings

if TYPE_CHECKING:
    from kgen.search.race import Contestant, Race

FAILED = 1
ROUNDS = 3

MORE = """\
FILE is a source as `kgen render` or `kgen show --source` prints it, edited. How it is launched
(threads, shared memory, clusters, boxes of the tensor maps) follows from the configuration in the
comment at its top, or from --set where an edit changed it. It is compiled as kgen's own kernels are
(a spill is refused), compared with the reference, and timed, alternating, with the tuned kernel and
the default. Every time is kept in the database; that of FILE as foreign: `kgen best`, `kgen tune`
and the runtime pass over it, unless a program runs with KGEN_FOREIGN=1. The exit code is 1 where
FILE fails, and where there is no Hopper GPU."""


def add_parser(commands: Commands) -> None:
    """Add `kgen race`."""
    summary = "time a source edited by hand beside the tuned kernel"
    parser = add_command(commands, "race", summary, MORE)
    add_problem(
        parser,
        "--source FILE [--set AXIS=VALUE ...] [--rounds N]\n"
        "                 [--policy NAME] [--json] [--compiler NAME] [--cache DIR] [--db DB]",
    )
    parser.add_argument("--source", metavar="FILE", required=True, help="the edited CUDA source")
    add_set(parser, "what FILE's header says")
    parser.add_argument(
        "--rounds",
        metavar="N",
        type=positive,
        default=ROUNDS,
        help="interleaved measurements of everybody (default: %(default)s)",
    )
    add_policy(parser)
    add_surroundings(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Race and print; 1 when the source fails. Raises UsageError before the GPU is touched."""
    from kgen.foreign import read_foreign
    from kgen.search.events import TuneOptions
    from kgen.search.race import race

    problem = one_problem(args)
    device, _ = device_at_hand()
    source = read_foreign(Path(args.source), problem, device, set_values(args.set))
    found = race(settings, problem, source, args.rounds, TuneOptions(policy=args.policy))
    if args.json:
        data_json(_as_json(found))
    else:
        print_race(found, source.name)
    return OK if found.foreign.status == "ok" else FAILED


def print_race(found: Race, name: str) -> None:
    """A line for each kernel, and what to know in notes."""
    headings = ("kernel", "status", "µs", "FILE takes", "95 % interval", "FILE is", "error", "regs")
    cells = [(*_cells(found, one, name), str(one.config)) for one in found.contestants]
    title = f"{found.problem} on {found.device.name}, policy {found.policy}"
    table((*headings, "configuration"), cells, title=title, text_columns=(0, 1, 5, 8))
    for text in found.notes:
        note(text)
    for one in found.contestants:
        if one.reason:
            note(f"{one.name}: {one.status}: {one.reason}")


def _cells(found: Race, one: Contestant, name: str) -> tuple[str, ...]:
    from kgen.search.race import verdict

    ratio = None if one is found.foreign else found.ratio(one)
    interval = ratio[1] if ratio else None
    return (
        f"{name} (foreign)" if one is found.foreign else one.name,
        one.status,
        microseconds(one.median_us),
        f"{ratio[0]:.3f}x" if ratio else "–",
        f"{interval.low:.3f}–{interval.high:.3f}" if interval else "–",
        "–" if one is found.foreign else verdict(ratio),
        f"{one.error:.1e}" if one.error is not None else "–",
        str(one.registers or "–"),
    )


def _as_json(found: Race) -> dict[str, Any]:
    from kgen.search.race import verdict

    others = {one.name: found.ratio(one) for one in found.contestants[1:]}
    return {
        "problem": str(found.problem),
        "device": asdict(found.device),
        "policy": found.policy,
        "contestants": [
            {**asdict(one), "config": one.config.to_dict(), "median_us": one.median_us}
            for one in found.contestants
        ],
        "foreign_over": {
            name: {
                "ratio": ratio[0] if ratio else None,
                "interval": ratio[1]._asdict() if ratio and ratio[1] else None,
                "foreign_is": verdict(ratio),
            }
            for name, ratio in others.items()
        },
        "notes": list(found.notes),
    }
