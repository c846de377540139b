"""`kgen explain`: why a problem runs on the kernel that it runs on.

Takes a problem, gives text (or JSON) on stdout. Needs no GPU and writes nothing.
"""

from __future__ import annotations

import argparse
from contextlib import closing, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from kgen.cli.arguments import (
    OK,
    Commands,
    add_command,
    add_problem,
    add_surroundings,
    database_at,
    device_at_hand,
    one_problem,
)
from kgen.cli.output import count, data, data_json, microseconds, note, spread, table
from kgen.errors import CompilerMissing, DatabaseError
from kgen.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from kgen.config import GemmConfig
    from kgen.device import Device
    from kgen.explain import Comparison, Explanation, Kernel
    from kgen.problem import GemmProblem
    from kgen.runtime.lookup import Choice

MORE = """\
Told are: where the runtime's answer comes from; how large the space is and which rule left out how
much; the trials by status; the kernels that can not be told apart from the fastest, with the 95 %
intervals of their medians; and how the winner differs from the default and the runner-up, in
configuration and source. Everything comes from the database and the analytic model, for the GPU at
hand, or an H200 where there is none. IDs are what `kgen run-trial` takes."""

#: What each origin of a choice means, in words.
ORIGINS: Final = {
    "tuned": "exact: verified and timed for this very problem",
    "table": "table: of the dispatch table, whose range ends at m={m}",
    "neighbour": "nearest: tuned for m={m}, and predicted to be no slower here than the default",
    "default": "heuristic: the analytic model's choice, nothing tuned applies",
}


def add_parser(commands: Commands) -> None:
    """Add `kgen explain`."""
    summary = "tell why a problem runs on the kernel it runs on"
    parser = add_command(commands, "explain", summary, MORE)
    add_problem(
        parser,
        "[--diff {default,runner-up}] [--json]\n"
        "                    [--compiler NAME] [--cache DIR] [--db DB]",
    )
    parser.add_argument(
        "--diff",
        choices=("default", "runner-up"),
        help="print the source's difference from this kernel's instead (default: count its lines)",
    )
    add_surroundings(parser, json="text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Explain; raises InvalidConfig where no configuration fits the device."""
    from kgen.explain import explain

    problem = one_problem(args)
    device, no_gpu = device_at_hand()
    if no_gpu:
        note(f"no GPU here, so this is about an {device.name}: {no_gpu}")
    key_of, passes = _todays_kernels(problem, settings)
    with _database(settings) as database:
        found = explain(problem, device, database, key_of, passes)
    if args.diff:
        print_diff(found, args.diff)
    elif args.json:
        data_json(_as_json(found))
    else:
        print_explanation(found)
    return OK


def _database(settings: Settings) -> Any:
    """The database, for reading; nothing, with a note, where there is none."""
    try:
        return closing(database_at(settings))
    except DatabaseError as error:
        note(str(error))
        return nullcontext(None)


def _todays_kernels(
    problem: GemmProblem, settings: Settings
) -> tuple[Callable[[GemmConfig], str] | None, tuple[str, ...]]:
    """What gives the keys of the cubins that would be built now, and the useful SASS passes."""
    from kgen.build import key_of, useful_sass_passes
    from kgen.toolchain import default_compiler

    try:
        compiler = default_compiler(settings)
    except CompilerMissing as error:
        note(f"which kernels are still what is built today, nobody can tell: {error}")
        return None, ("none",)
    return lambda config: key_of(problem, config, compiler), useful_sass_passes(compiler)


def origin_words(choice: Choice) -> str:
    """Where a choice comes from, in words."""
    return ORIGINS[choice.origin].format(m=choice.tuned_m)


def print_explanation(found: Explanation) -> None:
    """Sections of text, the answer first."""
    device: Device = found.device
    data(f"{found.problem} on {device.name}, {device.num_sms} SMs")
    data(f"answer  {found.choice.config}")
    data(f"        {origin_words(found.choice)}")
    if found.choice.stale:
        data(
            f"        {count(found.choice.stale, 'tuned kernel')} passed over, being of another "
            "compiler or other templates: kgen tune --refresh"
        )
    _print_space(found)
    _print_trials(found)
    if found.kernels:
        _print_kernels(found)
        _print_comparisons(found)


def _print_space(found: Explanation) -> None:
    data("")
    share = found.num_valid / found.num_points
    data(f"space   {found.num_valid} of {found.num_points} points are worth a trial ({share:.2%})")
    rows = [
        (rule, str(points), f"{points / found.num_points:.1%}")
        for rule, points in found.invalid_by_rule.items()
    ]
    table(("        left out by", "points", "share"), [(f"        {r}", *c) for r, *c in rows])
    data("        redundant_...: the point could only repeat or waste another one's work")


def _print_trials(found: Explanation) -> None:
    data("")
    words = ", ".join(f"{status} {number}" for status, number in sorted(found.by_status.items()))
    if not found.num_rows:
        data("trials  none on this device: kgen tune")
        return
    what = f"{count(found.num_rows, 'row')} of {count(found.num_configs, 'configuration')}"
    data(f"trials  {words} ({what})")
    if found.outcome:
        said = f": {found.outcome.reason}" if found.outcome.reason else ""
        data(f"        last run of kgen tune: {found.outcome.outcome}{said}, {found.outcome.date}")


def _print_kernels(found: Explanation) -> None:
    from kgen.explain import FOLLOWERS

    data("")
    ties = len(found.ties)
    data(
        f"tie set {count(ties, 'kernel')} of {len(found.kernels)} that passed, policy "
        f"{found.policy}: their 95 % intervals meet the winner's"
    )
    shown = [*found.ties, *[k for k in found.kernels if not k.is_tied][:FOLLOWERS]]
    headings = ("     ID", "µs", "95 % interval", "over winner", "predicted µs", "samples", "")
    cells = [(*_kernel_cells(found, kernel), str(kernel.config)) for kernel in shown]
    table((*headings, "configuration"), cells, text_columns=(6, 7))
    rest = len(found.kernels) - len(shown)
    if rest:
        data(f"        and {rest} more")


def _kernel_cells(found: Explanation, kernel: Kernel) -> tuple[str, ...]:
    best_us = found.kernels[0].median_us
    marks = ["winner"] if kernel is found.winner else ["tie"] if kernel.is_tied else []
    marks += ["default"] if kernel.config == found.default else []
    marks += ["stale"] if kernel.is_stale else []
    return (
        str(kernel.trial),
        microseconds(kernel.median_us),
        spread(kernel.interval.low, kernel.interval.high) if kernel.interval else "–",
        f"{kernel.median_us / best_us:.3f}x",
        microseconds(kernel.predicted_us),
        str(kernel.num_samples),
        ", ".join(marks),
    )


def _print_comparisons(found: Explanation) -> None:
    from kgen.explain import compare

    winner = found.winner
    assert winner is not None, "there are kernels"
    data("")
    default_us = found.default_us
    if winner.config == found.default:
        data("default the winner is the default")
    else:
        words = "not timed"
        if default_us:
            ratio = default_us / winner.median_us
            words = f"{microseconds(default_us)} µs, {ratio:.3f}x the winner's time"
        data(f"default {found.default}: {words}")
        _print_difference(compare(found.problem, winner.config, found.default), "default")
    if runner_up := found.runner_up:
        over = runner_up.median_us / winner.median_us
        tied = ", not told apart" if runner_up.is_tied else ""
        words = f"{microseconds(runner_up.median_us)} µs, {over:.3f}x the winner's time{tied}"
        data(f"next    {runner_up.config}: {words}")
        _print_difference(compare(found.problem, winner.config, runner_up.config), "runner-up")


def _print_difference(difference: Comparison, name: str) -> None:
    axes = "; ".join(f"{axis} {own}, not {other}" for axis, (own, other) in difference.axes.items())
    data(f"        the winner has {axes}")
    lines = count(difference.num_lines, "line")
    data(f"        {lines} of source differ: --diff {name} shows them")


def print_diff(found: Explanation, name: str) -> None:
    """The source's difference from the default's, or the runner-up's; notes where there is none."""
    from kgen.explain import compare

    own = found.winner.config if found.winner else found.choice.config
    runner_up = found.runner_up.config if found.runner_up else None
    other = found.default if name == "default" else runner_up
    if other is None or other == own:
        note(f"{own}: there is no other {name}")
        return
    data(compare(found.problem, own, other).diff)


def _as_json(found: Explanation) -> dict[str, Any]:
    from kgen.explain import compare

    winner, runner_up = found.winner, found.runner_up
    others = {"default": found.default, "runner_up": runner_up.config if runner_up else None}
    values = asdict(found)
    values["problem"] = str(found.problem)
    values["choice"]["words"] = origin_words(found.choice)
    values["outcome"] = found.outcome.to_dict() if found.outcome else None
    for kernel, made in zip(found.kernels, values["kernels"], strict=True):
        made["interval"] = kernel.interval._asdict() if kernel.interval else None
    values["differences"] = {
        name: asdict(compare(found.problem, winner.config, other))
        for name, other in others.items()
        if winner and other and other != winner.config
    }
    return values
