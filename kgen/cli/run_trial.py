"""`kgen run-trial`: repeat one stored trial alone and print it beside what is stored.

Takes a trial's id, gives a small table (or JSON) on stdout.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kgen.cli.arguments import (
    OK,
    POLICIES,
    Commands,
    add_command,
    add_surroundings,
    positive,
)
from kgen.cli.output import data_json, microseconds, note, spread, table
from kgen.settings import Settings

if TYPE_CHECKING:
    from kgen.search.rerun import Rerun

FAILED = 1

MORE = """\
The trial's configuration is built with today's compiler and templates, compared with the reference
and timed, alone, under the policy that it was timed under. The result is one more row of the
database: a kernel that is wrong or hangs now is never picked again. `kgen explain` lists ids. The
exit code is 1 where the trial fails now, and where there is no Hopper GPU."""


def add_parser(commands: Commands) -> None:
    """Add `kgen run-trial`."""
    parser = add_command(commands, "run-trial", "repeat one stored trial alone", MORE)
    parser.add_argument(
        "id", metavar="ID", type=positive, help="the trial's number in the database"
    )
    parser.add_argument(
        "--policy", metavar="NAME", choices=POLICIES, help="how to time (default: as it was timed)"
    )
    add_surroundings(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Repeat and print; 1 when the trial fails now. Raises GpuMissing without a GPU."""
    from kgen.search.rerun import rerun

    found = rerun(settings, args.id, args.policy)
    if args.json:
        data_json(_as_json(found))
    else:
        print_rerun(found)
    return OK if found.checked.status == "ok" else FAILED


def print_rerun(found: Rerun) -> None:
    """Stored and repeated in two lines, and what differs in notes."""
    checked, row, now = found.checked, found.checked.row, found.checked.now
    headings = ("", "status", "µs", "p10–p90", "95 % interval", "error", "device", "policy", "date")
    device = f"{found.device.name}, {found.device.num_sms} SMs"
    cells = [
        (
            "stored",
            row.status,
            microseconds(row.median_us),
            spread(row.p10_us, row.p90_us),
            spread(found.then.low, found.then.high) if found.then else "–",
            f"{row.error:.1e}" if row.error is not None else "–",
            f"{row.device_name}, {row.num_sms} SMs",
            row.policy or "–",
            row.date[:16],
        ),
        (
            "now",
            checked.status,
            microseconds(checked.now_us),
            spread(now.p10_us, now.p90_us) if now else "–",
            spread(found.now.low, found.now.high) if found.now else "–",
            f"{now.error:.1e}" if now else "–",
            device,
            found.policy,
            "",
        ),
    ]
    title = f"trial {row.id}: {row.problem}: {row.config}"
    table(headings, cells, title=title, text_columns=(0, 1, 6, 7, 8))
    for text in told(found):
        note(text)


def told(found: Rerun) -> list[str]:
    """What to know when the two lines are compared."""
    checked, row = found.checked, found.checked.row
    texts = []
    if row.reason:
        texts.append(f"stored reason: {row.reason}")
    if checked.reason:
        texts.append(f"{checked.status} now: {checked.reason}")
    if checked.stale and checked.status != "invalid":
        texts.append("another cubin than the one stored: compiler or templates differ since")
    if found.elsewhere:
        texts.append("the stored trial ran on another GPU: the times say nothing of each other")
    elif row.median_us and checked.now_us:
        ratio = checked.now_us / row.median_us
        verdict = "no intervals to compare"
        if found.agrees is not None:
            verdict = f"the intervals {'overlap' if found.agrees else 'do not overlap'}"
        texts.append(f"{ratio:.3f} times the stored time; {verdict}")
    return texts


def _as_json(found: Rerun) -> dict[str, Any]:
    checked = found.checked
    return {
        "stored": checked.row.to_dict(),
        "status": checked.status,
        "stale": checked.stale,
        "reason": checked.reason,
        "now": asdict(checked.now) if checked.now else None,
        "device": asdict(found.device),
        "policy": found.policy,
        "agrees": found.agrees,
    }
