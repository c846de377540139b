"""Options that several subcommands share, and what follows from them.

Takes argparse parsers and namespaces, gives settings, problems and devices.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any, Final

from kgen.cli.output import note
from kgen.errors import UsageError
from kgen.settings import Settings, absolute_path

if TYPE_CHECKING:
    from kgen.cache.db import TuningDatabase
    from kgen.device import Device
    from kgen.problem import GemmProblem
    from kgen.shapes import ShapeLine, Shapes

OK: Final = 0
USAGE: Final = 2

#: Names of the policies in kgen.measure, which needs torch; the default one first.
POLICIES: Final = ("cold", "hot", "cold-events", "rotating", "graph", "screen")

#: What `add_subparsers` returns; argparse has no public name for it.
Commands = Any

PROBLEM_HELP: Final = 'a shapes line in quotes, such as "dense m=64 n=2112 k=7168"'
SHAPES_HELP: Final = (
    "shapes file (.txt, .csv or .jsonl), or the name of one that comes with kgen: deepseek_v3"
)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps line breaks of descriptions and gives options room."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


def add_command(commands: Commands, name: str, summary: str, more: str = "") -> Any:
    """A subcommand's parser; `summary` stands in the list of commands, `more` in its own help."""
    return commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n{more}".rstrip(),
        formatter_class=HelpFormatter,
    )


def add_problems(parser: argparse.ArgumentParser, default: str = "") -> None:
    """PROBLEM arguments and --shapes; `default` says what neither of them means."""
    tail = f" (default: {default})" if default else ""
    parser.add_argument("problem", metavar="PROBLEM", nargs="*", help=PROBLEM_HELP + tail)
    parser.add_argument(
        "--shapes",
        metavar="FILE",
        action="append",
        default=[],
        help=f"{SHAPES_HELP}; may be given several times{tail}",
    )


def add_cache(parser: argparse.ArgumentParser) -> None:
    """--cache and --db."""
    parser.add_argument(
        "--cache",
        metavar="DIR",
        help="folder of compiled kernels (default: KGEN_CACHE_DIR, else ~/.cache/kgen)",
    )
    parser.add_argument(
        "--db",
        metavar="DB",
        help="tuning database, a path or an SQLAlchemy URL "
        "(default: KGEN_DB, else tuning.db in the cache folder)",
    )


def add_compiler(parser: argparse.ArgumentParser) -> None:
    """--compiler."""
    parser.add_argument(
        "--compiler",
        metavar="NAME",
        help="auto, nvrtc, nvcc, or one at a version such as nvcc-12.8 "
        "(default: KGEN_COMPILER, else auto)",
    )


def add_policy(parser: argparse.ArgumentParser) -> None:
    """--policy."""
    parser.add_argument(
        "--policy",
        metavar="NAME",
        choices=POLICIES,
        default=POLICIES[0],
        help="how times are taken: cold, hot, cold-events, rotating, graph or screen "
        "(default: cold, L2 flushed)",
    )


def add_json(parser: argparse.ArgumentParser, default: str = "a table") -> None:
    """--json; `default` says what is printed without it."""
    parser.add_argument("--json", action="store_true", help=f"print JSON (default: {default})")


def add_surroundings(parser: argparse.ArgumentParser, json: str = "a table") -> None:
    """--compiler, --cache and --db, --json: what nearly every command works with."""
    add_compiler(parser)
    add_cache(parser)
    add_json(parser, default=json)


def add_problem(parser: argparse.ArgumentParser, usage: str) -> None:
    """The one PROBLEM of a command; `usage` is what may follow it, in the order to be written."""
    parser.usage = f"%(prog)s [-h] PROBLEM {usage}"
    # Any number, so that `one_problem` can say what is wrong where quotes were forgotten.
    parser.add_argument("problem", metavar="PROBLEM", nargs="*", help=PROBLEM_HELP)


def add_set(parser: argparse.ArgumentParser, default: str) -> None:
    """--set; `default` says what stands where it does not."""
    parser.add_argument(
        "--set",
        metavar="AXIS=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help=f"values of the configuration, such as block_n=152 (default: {default})",
    )


def set_values(texts: list[str]) -> dict[str, Any]:
    """The values of --set by axis; raises UsageError for what is no AXIS=VALUE."""
    from kgen.config import GemmConfig

    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text!r}: expected AXIS=VALUE, such as block_n=152")
        try:
            values[name] = GemmConfig.value_of(name, value)
        except UsageError as error:
            raise UsageError(f"--set {error}") from None
    return values


def positive(text: str) -> int:
    """An argparse type: a whole number from 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number from 1")
    return value


def seconds(text: str) -> float:
    """An argparse type: a time above 0, in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < inf:
        raise argparse.ArgumentTypeError(f"{text}: expected a number of seconds above 0")
    return value


def settings_of(args: argparse.Namespace) -> Settings:
    """The environment's settings with the command line's on top."""
    cache = getattr(args, "cache", None)
    given: dict[str, Any] = {
        "cache_dir": absolute_path(cache, "--cache") if cache else None,
        "db": getattr(args, "db", None),
        "compiler": getattr(args, "compiler", None),
        "jobs": getattr(args, "jobs", None),
    }
    given = {name: value for name, value in given.items() if value is not None}
    return replace(Settings.from_env(), **given)


def lines_of(problems: list[str], files: list[str]) -> Shapes:
    """The problems named on the command line and in shapes files, merged, and notes on them."""
    from kgen.shapes import Shapes, load_shapes, merge, parse_line

    loaded = [load_shapes(name) for name in files]
    _check_quotes(problems)
    given = [line for text in problems for line in parse_line(text, repr(text))]
    merged = merge([*given, *(line for shapes in loaded for line in shapes.lines)])
    notes = [text for shapes in loaded for text in shapes.notes]
    return Shapes(merged.lines, notes + merged.notes)


def one_problem(args: argparse.Namespace) -> GemmProblem:
    """The problem of a command that takes one; raises UsageError for none or several."""
    from kgen.shapes import parse_problem

    _check_quotes(args.problem)
    if len(args.problem) != 1:
        raise UsageError(f"{len(args.problem)} problems given; expected one, before any --set")
    return parse_problem(args.problem[0])


def _check_quotes(problems: list[str]) -> None:
    if len(problems) > 1 and all(" " not in text.strip() for text in problems):
        raise UsageError(f'put the problem in quotes: "{" ".join(problems)}"')


def required_lines(args: argparse.Namespace) -> list[ShapeLine]:
    """The problems of a command that needs some, its notes said; raises UsageError for none."""
    if not args.problem and not args.shapes:
        raise UsageError("no problem: give a PROBLEM, or --shapes FILE such as deepseek_v3")
    shapes = lines_of(args.problem, args.shapes)
    for text in shapes.notes:
        note(text)
    return shapes.lines


def device_at_hand() -> tuple[Device, str]:
    """The Hopper GPU's facts, or the reference H200's and why they stand in for a GPU's."""
    from kgen.device import H200
    from kgen.errors import DriverError

    try:
        from kgen.runtime.driver import device_facts

        device = device_facts(0)
    except (DriverError, ImportError) as error:
        return H200, str(error)
    if not device.is_hopper:
        return H200, f"{device.name} is {device.arch}; kgen's kernels need sm_90a"
    return device, ""


def database_at(settings: Settings) -> TuningDatabase:
    """The tuning database, for reading; raises DatabaseError where there is none yet."""
    from kgen.cache.db import TuningDatabase

    return TuningDatabase.open(settings.db_url, create=False, readonly=True)
