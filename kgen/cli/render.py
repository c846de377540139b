"""`kgen render`: the CUDA source of one problem and configuration; no GPU, no compile.

Takes a problem and axis values, gives the source on stdout.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kgen.cli.arguments import OK, PROBLEM_HELP, Commands, add_command, add_json
from kgen.cli.output import data, data_json
from kgen.errors import UsageError
from kgen.settings import Settings

if TYPE_CHECKING:
    from kgen.config import GemmConfig
    from kgen.problem import GemmProblem

MORE = """\
Starts from the configuration that the analytic model puts first on an H200 and applies --set.
Without --set the source is that of the model's choice. An axis value that the kernel can not
have is refused with the reason."""


def add_parser(commands: Commands) -> None:
    """Add `kgen render`."""
    parser = add_command(commands, "render", "print the CUDA source of a configuration", MORE)
    parser.add_argument("problem", metavar="PROBLEM", help=PROBLEM_HELP)
    parser.add_argument(
        "--set",
        metavar="AXIS=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="values of the configuration, such as block_n=152 (default: the model's choice)",
    )
    add_json(parser, default="the source")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Print the source; raises UsageError for an unknown axis or an invalid configuration."""
    from kgen.device import H200
    from kgen.heuristic import default_config
    from kgen.render import render
    from kgen.shapes import parse_problem

    problem = parse_problem(args.problem)
    config = with_values(problem, default_config(problem, H200), args.set)
    source = render(problem, config)
    if args.json:
        data_json(
            {
                "problem": str(problem),
                "problem_class": source.problem_class,
                "config": config.to_dict(),
                "entry": source.entry,
                "body_sha256": source.body_hash,
                "source": source.text,
            }
        )
    else:
        data(source.text)
    return OK


def with_values(problem: GemmProblem, base: GemmConfig, texts: list[str]) -> GemmConfig:
    """`base` with each "axis=value" applied; raises UsageError when the result is not valid."""
    from kgen.config import GemmConfig, why_invalid
    from kgen.device import H200

    if not texts:
        return base
    values = base.to_dict()
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text!r}: expected AXIS=VALUE, such as block_n=152")
        if name not in values:
            raise UsageError(f"--set {text}: no such axis; expected one of {', '.join(values)}")
        values[name] = _like(values[name], value, text)
    config = GemmConfig.from_dict(values)
    if invalid := why_invalid(problem, config, H200):
        raise UsageError(f"{problem} with {' '.join(texts)}: {invalid.reason}")
    return config


def _like(example: Any, value: str, text: str) -> Any:
    if not isinstance(example, int):
        return value
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"--set {text}: expected a whole number") from None
