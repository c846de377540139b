"""`kgen shapes`: shapes files printed, converted and checked, or made from a model's config.

Takes shapes files or a config.json, gives a shapes file on stdout or in a file.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kgen.cli.arguments import OK, SHAPES_HELP, Commands, add_command, lines_of, positive
from kgen.cli.output import count, data, note
from kgen.errors import KgenError, ShapesError, UsageError
from kgen.model_shapes import DEFAULT_TOKENS, LM_HEADS, Split, model_shapes
from kgen.problem import KINDS
from kgen.settings import Settings
from kgen.shape_writer import FORMS, form_of, save, to_text
from kgen.shapes import MAX_PROBLEMS, parse_line

if TYPE_CHECKING:
    from kgen.problem import GemmProblem
    from kgen.shapes import ShapeLine

MORE = """\
Given shapes files, it merges and checks them, and prints them in the form asked for; comments are
not kept. Given a model's config.json, it writes the problems that one GPU of a serving engine runs:
q, k and v in one GEMM, gate and up in one, tensor-parallel parts by --tp, whole experts by --ep.

M is the tokens that a group of --tp GPUs works on at a time; for experts, the rows each of them
gets where routing is even. Where --ep is larger than --tp, ep / tp such groups send tokens to the
same experts. The weight is how often a forward pass runs the problem on one GPU: a budget goes
where the model's time goes. Routers, embeddings and attention itself are no FP8 GEMMs and not
listed. A layer that kgen can not compute is named and the rest written, with exit code 1."""

#: What belongs to --from-config alone, with its default.
_OF_CONFIG: Final[dict[str, Any]] = {
    "tp": 1,
    "ep": 1,
    "tokens": DEFAULT_TOKENS,
    "lm_head": LM_HEADS[0],
    "experts": KINDS[0],
}


def add_parser(commands: Commands) -> None:
    """Add `kgen shapes`."""
    summary = "print, convert and check shapes files, or make one from a model's config"
    parser = add_command(commands, "shapes", summary, MORE)
    parser.add_argument("file", metavar="FILE", nargs="*", help=SHAPES_HELP)
    parser.add_argument(
        "--from-config",
        metavar="CONFIG",
        help="a Hugging Face config.json, or the folder it lies in (default: none)",
    )
    parser.add_argument(
        "--tp",
        metavar="N",
        type=positive,
        help=f"GPUs that divide each layer (default: {_OF_CONFIG['tp']})",
    )
    parser.add_argument(
        "--ep",
        metavar="N",
        type=positive,
        help=f"GPUs that share out the experts (default: {_OF_CONFIG['ep']}: --tp divides them)",
    )
    parser.add_argument(
        "--tokens",
        metavar="LIST",
        help=f"numbers of tokens, as m= in a shapes line (default: {DEFAULT_TOKENS})",
    )
    parser.add_argument(
        "--lm-head",
        choices=LM_HEADS,
        help=f"output type of the last layer, or none to leave it out (default: {LM_HEADS[0]})",
    )
    parser.add_argument(
        "--experts",
        choices=KINDS,
        help="kind of the experts' problems: dense ones one by one, or all of a GPU's in one of a "
        f"grouped kind (default: {KINDS[0]})",
    )
    add_output(parser)
    parser.set_defaults(run=run)


def add_output(parser: argparse.ArgumentParser) -> None:
    """--format and --output, for `write`."""
    parser.add_argument(
        "--format",
        choices=FORMS,
        help="form of what is written (default: by the name of -o, else txt)",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where it is written (default: stdout)"
    )


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Write a shapes file; 1 when a layer was left out. Raises UsageError."""
    given = [name for name in _OF_CONFIG if getattr(args, name) is not None]
    if bool(args.file) == bool(args.from_config):
        raise UsageError("give shapes files, or --from-config CONFIG")
    if args.from_config:
        return _from_config(args)
    if given:
        option = given[0].replace("_", "-")
        raise UsageError(f"--{option} goes with --from-config; a shapes file is taken as it is")
    shapes = lines_of([], args.file)
    for text in shapes.notes:
        note(text)
    write(args, shapes.lines)
    return OK


def write(
    args: argparse.Namespace,
    lines: list[ShapeLine],
    comments: Mapping[GemmProblem, str] | None = None,
    header: Iterable[str] = (),
) -> None:
    """Write a shapes file where --output says, in the form of --format.

    Raises OutputError for stdout, KgenError for a file.
    """
    form = args.format or form_of(args.output or "")
    text = to_text(lines, form, comments, header)
    if not args.output:
        data(text)
    else:
        try:
            save(Path(args.output), text)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise KgenError(f"{args.output} can not be written: {reason}") from None
    note(count(len(lines), "problem") + (f" in {args.output}" if args.output else ""))


def _from_config(args: argparse.Namespace) -> int:
    from kgen.model_configs import load_config

    values = {
        name: default if getattr(args, name) is None else getattr(args, name)
        for name, default in _OF_CONFIG.items()
    }
    split = Split(**values | {"tokens": _rows(values["tokens"])})
    fields = load_config(args.from_config)
    try:
        found = model_shapes(fields, split)
    except UsageError as error:
        raise UsageError(f"{args.from_config}: {error}") from None
    for text in [*found.notes, *found.left_out]:
        note(text)
    if len(found.lines) > MAX_PROBLEMS:
        raise UsageError(f"{len(found.lines)} problems, at most {MAX_PROBLEMS}: fewer --tokens")
    if not found.lines:
        raise UsageError(f"{args.from_config}: no layer that kgen can compute")
    write(args, found.lines, found.layers, _header(args, split))
    return 1 if found.left_out else OK


def _rows(text: str) -> tuple[int, ...]:
    try:
        lines = parse_line(f"dense m={text} n=8 k=16", "--tokens")
    except ShapesError as error:
        raise UsageError(str(error)) from None
    return tuple(dict.fromkeys(line.problem.m for line in lines))


def _header(args: argparse.Namespace, split: Split) -> list[str]:
    words = ["kgen", "shapes", "--from-config", args.from_config]
    for name in _OF_CONFIG:
        if getattr(args, name) is not None:
            words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    return [
        f"What one GPU runs with tp={split.tp} ep={split.ep}: {shlex.join(words)}",
        "m: tokens of a tensor-parallel group, or rows of one expert; weight: runs a forward pass",
    ]
