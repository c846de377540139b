"""`kgen profile`: the hardware's counters of a problem's kernel, through Nsight Compute.

Takes a problem, gives tables (or JSON) on stdout.
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
    add_problem,
    add_set,
    add_surroundings,
    device_at_hand,
    one_problem,
)
from kgen.cli.output import data, data_json, note, table
from kgen.errors import GpuMissing, UsageError
from kgen.settings import Settings

if TYPE_CHECKING:
    from kgen.search.profile import Metric, Profile

STALLS = 6
MORE = """\
The kernel that `kgen show` names, or the one with the values of --set, is built and verified, then
profiled by Nsight Compute over one launch, clocks as they are, caches flushed: time, device memory,
tensor cores, reasons for stalls. Needs a Hopper GPU, the program ncu, and the permission to read
counters; what is missing is said. Every profiler shows kernels by names such as
kgen_dense_block_to_bf16_64x88_s10_w1_split4, and ranges that say the problem where a program runs
with KGEN_NVTX=1."""


def add_parser(commands: Commands) -> None:
    """Add `kgen profile`."""
    summary = "read the GPU's counters for one problem's kernel"
    parser = add_command(commands, "profile", summary, MORE)
    add_problem(
        parser,
        "[--set AXIS=VALUE ...] [--all] [--ncu PATH] [-o NAME]\n"
        "                    [--json] [--compiler NAME] [--cache DIR] [--db DB]",
    )
    add_set(parser, "the kernel that `kgen show` names")
    parser.add_argument(
        "--all", action="store_true", help="print every metric (default: the telling ones)"
    )
    parser.add_argument(
        "--ncu", metavar="PATH", default="", help="Nsight Compute (default: it is looked for)"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="NAME",
        help="also keep the report, as NAME.ncu-rep (default: do not)",
    )
    add_surroundings(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Profile and print. Raises KgenError where Nsight Compute is missing or not permitted."""
    from kgen.cli.render import with_values
    from kgen.cli.show import choose
    from kgen.runtime.driver import driver_version
    from kgen.search.builder import create
    from kgen.search.profile import find_ncu, profile

    problem = one_problem(args)
    export = Path(args.output).absolute() if args.output else None
    if export and not export.parent.is_dir():
        raise UsageError(f"-o {args.output}: expected a name in a folder that is there")
    _, no_gpu = device_at_hand()
    if no_gpu:
        raise GpuMissing(f"profile needs a Hopper GPU: {no_gpu}")
    ncu = find_ncu(args.ncu, settings.cuda_home)
    if args.set:
        config, origin = with_values(problem, args.set), "as --set says"
    else:
        chosen = choose(problem, settings)
        config, origin = chosen.config, chosen.origin
    cubin = create(settings, driver_version()).build(problem, config)
    note(f"{config}: {origin}")
    found = profile(problem, cubin, ncu, export=export)
    if args.json:
        data_json({"problem": str(problem), "config": config.to_dict(), **_as_json(found)})
    elif args.all:
        _print(found.metrics, found.kernel)
    else:
        print_profile(found)
    if export:
        note(f"wrote {export}.ncu-rep")
    return OK


def print_profile(found: Profile) -> None:
    """Speeds of light, memory, tensor cores, and the leading reasons for stalls."""
    from kgen.search.profile import leading_stalls

    light = [metric for metric in found.metrics if "Speed Of Light" in metric.section]
    telling = [metric for metric in found.metrics if metric.is_dram or metric.is_tensor]
    _print(list(dict.fromkeys([*light, *telling])), found.kernel)
    stalls = leading_stalls(found.metrics, STALLS)
    if stalls:
        data("")
        rows = [(metric.stall.replace("_", " "), metric.text, metric.unit) for metric in stalls]
        table(("stalled for", "value", "unit"), rows, text_columns=(0, 2))


def _print(metrics: Any, title: str) -> None:
    rows = [(metric.section, metric.name, metric.text, metric.unit) for metric in metrics]
    table(("section", "metric", "value", "unit"), rows, title=title, text_columns=(0, 1, 3))


def _as_json(found: Profile) -> dict[str, Any]:
    def plain(metric: Metric) -> dict[str, Any]:
        return {**asdict(metric), "value": metric.value, "stall": metric.stall or None}

    return {"kernel": found.kernel, "metrics": [plain(metric) for metric in found.metrics]}
