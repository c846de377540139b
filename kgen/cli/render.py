"""`kgen render`: the CUDA source of one problem and configuration; no GPU, no compile.

Takes a problem and axis values, gives the source on stdout.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from kgen.cli.arguments import (
    OK,
    Commands,
    add_command,
    add_json,
    add_problem,
    add_set,
    one_problem,
    set_values,
)
from kgen.cli.output import data, data_json
from kgen.errors import UsageError
from kgen.settings import Settings

if TYPE_CHECKING:
    from kgen.config import GemmConfig
    from kgen.problem import GemmProblem

MORE = """\
Of the configurations with the values of --set, the one that the analytic model puts first on an
H200 is printed. Values that no valid configuration has are refused with the reason."""


def add_parser(commands: Commands) -> None:
    """Add `kgen render`."""
    parser = add_command(commands, "render", "print the CUDA source of a configuration", MORE)
    add_problem(parser, "[--set AXIS=VALUE ...] [--json]")
    add_set(parser, "the model's choice")
    add_json(parser, default="the source")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Print the source; raises UsageError for an unknown axis or an invalid configuration."""
    from kgen.render import render

    problem = one_problem(args)
    config = with_values(problem, args.set)
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


def with_values(problem: GemmProblem, texts: list[str]) -> GemmConfig:
    """The best ranked configuration that has each "axis=value"; raises UsageError for none.

    Values that the space leaves out replace those of the best ranked configuration they go with.
    """
    from kgen.device import H200
    from kgen.heuristic import rank
    from kgen.validity import why_invalid

    values = set_values(texts)
    ranked = rank(problem, H200)
    for config in ranked:
        if values.items() <= config.to_dict().items():
            return config
    changed = [replace(config, **values) for config in ranked]
    for config in changed:
        if why_invalid(problem, config, H200) is None:
            return config
    invalid = why_invalid(problem, changed[0], H200)
    reason = invalid.reason if invalid else ""
    raise UsageError(f"no valid configuration of {problem} has {' '.join(texts)}: {reason}")
