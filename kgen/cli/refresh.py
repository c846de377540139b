"""`kgen tune --refresh`: the stored top few of each problem timed again, and what moved.

Takes the arguments of `kgen tune`, gives a table (or JSON) on stdout, a line a problem on stderr.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kgen.cli.arguments import OK, lines_of
from kgen.cli.output import count, data_json, microseconds, note, table
from kgen.errors import UsageError
from kgen.settings import Settings

if TYPE_CHECKING:
    from kgen.search.events import TuneEvent, TuneOptions
    from kgen.search.refresh import Refreshed, Stood

FAILED_CODE = 1
INTERRUPTED = 130


def run_refresh(args: argparse.Namespace, settings: Settings, options: TuneOptions) -> int:
    """Refresh and print; 1 when a problem failed or is unknown. Raises GpuMissing without a GPU."""
    from kgen.search.refresh import CURRENT, FAILED, NOT_REACHED, UNKNOWN, refresh

    if not options.gpu:
        raise UsageError("--refresh times kernels: it can not go with --no-gpu")
    problems = [line.problem for line in lines_of(args.problem, args.shapes).lines]
    device, found, interrupted = refresh(settings, problems, options, _say, _say_event)
    if args.json:
        values = [_as_json(one) for one in found]
        data_json({"device": asdict(device), "interrupted": interrupted, "problems": values})
    else:
        print_refreshed(found)
    words = {CURRENT: "current", UNKNOWN: "unknown", FAILED: "failed", NOT_REACHED: "not reached"}
    counts = {text: sum(one.outcome == outcome for one in found) for outcome, text in words.items()}
    rest = ", ".join(f"{number} {text}" for text, number in counts.items() if number)
    moved = sum(one.moved not in ("", "nothing") for one in found)
    note(f"{count(len(found), 'problem')}: {moved} moved{', ' if rest else ''}{rest}")
    if interrupted:
        note("interrupted; what was timed is kept, the same command goes on from here")
        return INTERRUPTED
    bad = any(one.outcome in (FAILED, UNKNOWN) or one.failures for one in found)
    return FAILED_CODE if bad else OK


def print_refreshed(found: list[Refreshed]) -> None:
    """A line for each problem that was timed again, before and now."""
    headings = ("problem", "µs before", "same now", "best now", "now/before", "moved", "changed")
    rows = [
        (
            str(one.problem),
            _us(one.before),
            _us(one.its_time_now),
            _us(one.now),
            f"{one.ratio:.3f}" if one.ratio else "–",
            one.moved or one.outcome,
            ", ".join(one.changes),
            str(one.now.config if one.now else "–"),
        )
        for one in found
        if one.before is not None
    ]
    if rows:
        table((*headings, "configuration now"), rows, text_columns=(0, 5, 6, 7))


def _us(stood: Stood | None) -> str:
    return microseconds(stood.median_us if stood else None)


def _say(one: Refreshed) -> None:
    """What came of a problem, and what changed for it."""
    from kgen.search.refresh import CURRENT, UNKNOWN

    known = {
        CURRENT: "nothing to refresh, its times are of today's compiler, templates and driver",
        UNKNOWN: "no time is stored for this GPU; tune it with `kgen tune`",
    }
    changed = "; ".join(
        f"{name} {was[:16]} -> {now[:16]}" for name, (was, now) in one.changes.items()
    )
    what = known.get(one.outcome) or one.reason or one.moved or one.outcome
    note(f"{one.problem}: {what}{f' ({changed})' if changed else ''}")
    for config, reason in one.failures.items():
        note(f"{one.problem}: {config}: {reason}")


def _say_event(event: TuneEvent) -> None:
    from kgen.cli.progress import worker_line
    from kgen.search.events import Notice, WorkerReplaced

    match event:
        case WorkerReplaced():
            note(worker_line(event))
        case Notice():
            note(event.text)


def _as_json(one: Refreshed) -> dict[str, Any]:
    def place(stood: Stood | None) -> dict[str, Any] | None:
        if stood is None:
            return None
        interval = stood.interval._asdict() if stood.interval else None
        return {
            "config": stood.config.to_dict(),
            "median_us": stood.median_us,
            "interval": interval,
        }

    return {
        "problem": str(one.problem),
        "outcome": one.outcome,
        "reason": one.reason,
        "changes": {name: {"before": a, "now": b} for name, (a, b) in one.changes.items()},
        "before": place(one.before),
        "its_time_now": place(one.its_time_now),
        "now": place(one.now),
        "ratio": one.ratio,
        "moved": one.moved,
        "failures": dict(one.failures),
    }
