"""`kgen show`: the kernel kgen would use for a problem, as configuration, source, PTX or SASS.

Takes a problem, gives text on stdout. PTX and SASS need a compiler, nothing needs a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
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
from kgen.cli.output import data, data_json, microseconds, note
from kgen.errors import DatabaseError
from kgen.settings import Settings

if TYPE_CHECKING:
    from kgen.cache.records import TrialRow
    from kgen.config import GemmConfig
    from kgen.device import Device
    from kgen.problem import GemmProblem

MORE = """\
The configuration is the best verified one in the database for the GPU at hand (an H200 where
there is none), else the best predicted one, else the analytic model's choice. The summary says
which; of everything else, stderr does."""


@dataclass(frozen=True)
class Chosen:
    """A configuration, where it comes from, and its trial when it has one."""

    problem: GemmProblem
    device: Device
    config: GemmConfig
    origin: str
    row: TrialRow | None


def add_parser(commands: Commands) -> None:
    """Add `kgen show`."""
    parser = add_command(commands, "show", "show the kernel of one problem", MORE)
    add_problem(
        parser,
        "[--source | --ptx | --sass | --config] [--json]\n"
        "                 [--compiler NAME] [--cache DIR] [--db DB]",
    )
    what = parser.add_mutually_exclusive_group()
    for name, text in (
        ("source", "the CUDA source"),
        ("ptx", "the PTX that the compiler makes of it"),
        ("sass", "the machine code, disassembled by nvdisasm"),
        ("config", "the configuration, one axis a line, as `kgen render --set` takes them"),
    ):
        what.add_argument(
            f"--{name}", dest="what", action="store_const", const=name, help=f"print {text}"
        )
    parser.set_defaults(what="summary")
    add_surroundings(parser, json="text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Print what was asked for; raises CompilerMissing, CompileError for PTX and SASS."""
    chosen = choose(one_problem(args), settings)
    if args.what != "summary" or args.json:  # the summary says it itself
        note(f"{chosen.config}: {chosen.origin}")
    if args.json:
        text = None if args.what in ("summary", "config") else SHOWN[args.what](chosen, settings)
        data_json(_as_json(chosen) | ({args.what: text} if text else {}))
    else:
        data(SHOWN[args.what](chosen, settings))
    return OK


def choose(problem: GemmProblem, settings: Settings) -> Chosen:
    """The best known configuration for the device at hand, and how well it is known."""
    from kgen.heuristic import default_config

    device, no_gpu = device_at_hand()
    where = f"{device.name}{' (no GPU here)' if no_gpu else ''}"
    try:
        with closing(database_at(settings)) as database:
            best = database.best(problem, device.name, device.num_sms)
            others = database.suggestions(problem, device.name, device.num_sms)
    except DatabaseError:
        best, others = None, []
    if best is not None:
        return Chosen(problem, device, best.config, f"verified and timed on {where}", best)
    if others:
        first = others[0]
        return Chosen(problem, device, first.config, first.origin, first.row)
    config = default_config(problem, device)
    return Chosen(problem, device, config, f"the analytic model's choice for {where}", None)


def _summary(chosen: Chosen, settings: Settings) -> str:
    from kgen.config import grid_size, resources_of

    p = chosen.problem
    derived = resources_of(chosen.config, p)
    facts = {
        "problem": str(chosen.problem),
        "configuration": str(chosen.config),
        "origin": chosen.origin,
        "grid": f"{grid_size(chosen.problem, chosen.config, chosen.device)} CTAs of "
        f"{derived.threads} threads, clusters of {chosen.config.cluster_size}",
        "shared memory": f"{derived.smem_bytes} bytes",
        **_measured(chosen),
    }
    width = max(map(len, facts))
    return "\n".join(f"{name:{width}}  {value}" for name, value in facts.items())


def _measured(chosen: Chosen) -> dict[str, str]:
    row = chosen.row
    if row is None:
        return {}
    facts = {"device": f"{row.device_name}, {row.num_sms} SMs", "status": row.status}
    if row.median_us is not None:
        facts["time"] = f"{microseconds(row.median_us)} µs ({row.policy}), "
        facts["time"] += f"p10 {microseconds(row.p10_us)}, p90 {microseconds(row.p90_us)}"
        facts["rate"] = f"{chosen.problem.flops / row.median_us / 1e6:.0f} TFLOPS"
    elif row.predicted_us is not None:
        facts["predicted"] = f"{microseconds(row.predicted_us)} µs, not measured"
    if row.error is not None:
        facts["error"] = f"{row.error:.2e} (largest relative tile error)"
    if row.registers is not None:
        facts["registers"] = str(row.registers)
    return facts | {"cubin": row.cubin_key or "–", "date": row.date}


def _config(chosen: Chosen, settings: Settings) -> str:
    return "\n".join(f"{axis}={value}" for axis, value in chosen.config.to_dict().items())


def _source(chosen: Chosen, settings: Settings) -> str:
    from kgen.render import render

    return render(chosen.problem, chosen.config).text


def _ptx(chosen: Chosen, settings: Settings) -> str:
    from kgen.compiler import ptx_source
    from kgen.toolchain import default_compiler

    return ptx_source(_source(chosen, settings), default_compiler(settings))


def _sass(chosen: Chosen, settings: Settings) -> str:
    from kgen.build import build
    from kgen.cache.artifacts import ArtifactStore
    from kgen.disasm import disassemble
    from kgen.toolchain import default_compiler

    store = ArtifactStore(settings.cache_dir)
    compiler = default_compiler(settings)
    cubin = build(chosen.problem, chosen.config, compiler, store, settings.compile_timeout_s)
    return disassemble(cubin.data)


#: What can be printed, by the name of its option.
SHOWN: Final[dict[str, Callable[[Chosen, Settings], str]]] = {
    "summary": _summary,
    "config": _config,
    "source": _source,
    "ptx": _ptx,
    "sass": _sass,
}


def _as_json(chosen: Chosen) -> dict[str, Any]:
    return {
        "problem": str(chosen.problem),
        "device": asdict(chosen.device),
        "origin": chosen.origin,
        "config": chosen.config.to_dict(),
        "trial": chosen.row.to_dict() if chosen.row else None,
    }
