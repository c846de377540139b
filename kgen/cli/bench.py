"""`kgen bench`: time the best kernels of a shapes file, beside peers and the floor if asked.

Takes shapes, gives tables (or JSON) of times on stdout, and a plot. Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kgen.bench.against import parse_against
from kgen.bench.summary import KGEN, OVER_BEST, Best, Worst, best_peer, means, peers_of, worst
from kgen.cli.arguments import (
    OK,
    Commands,
    add_command,
    add_policy,
    add_problems,
    add_surroundings,
    required_lines,
)
from kgen.cli.cast_speed import run_casts
from kgen.cli.host_cost import run_host
from kgen.cli.output import count, data, data_json, microseconds, note, spread, table
from kgen.settings import Settings

if TYPE_CHECKING:
    from kgen.bench.run import BenchReport, Row

INTERRUPTED = 130

MORE = """\
Timed is what the runtime would launch: the database's winner, else the model's choice. Everything
is verified before it is timed, and all calls of a problem alternate in one process. Needs a
Hopper GPU; a problem that the fallback would answer is not timed, and the exit code is 1.

Peers: torch (torch._scaled_mm, blockwise and with one scale per tensor; for BF16 torch.matmul,
torch._grouped_mm and torch.bmm), triton (a plain kernel), and NAME=DIR, a package in a folder with
DeepGEMM's fp8_gemm_nt or gemm_fp8_fp8_bf16_nt, bf16_gemm_nt, or their grouped calls; several
versions of one library may stand side by side under names of yours. The best peer of a problem is
the fastest that solves the same problem."""


def add_parser(commands: Commands) -> None:
    """Add `kgen bench`."""
    parser = add_command(commands, "bench", "time the best kernels, beside others if asked", MORE)
    add_problems(parser)
    parser.add_argument(
        "--against",
        metavar="PEER,...",
        action="append",
        default=[],
        help="also time these: torch, triton, NAME=DIR; may be given several times "
        "(default: kgen alone)",
    )
    parser.add_argument(
        "--floor",
        action="store_true",
        help="also measure what no kernel can beat here: the weights' streaming time and the "
        "tensor cores' rate (default: do not)",
    )
    parser.add_argument(
        "--row-major",
        action="store_true",
        help="also time everybody from row-major scales of A, conversion included, in columns of "
        "their own (default: aligned column-major ones only)",
    )
    parser.add_argument(
        "--plot",
        metavar="NAME",
        help="draw time over the floor into NAME.png and NAME.svg; implies --floor, needs "
        "matplotlib (default: no plot)",
    )
    parser.add_argument(
        "--host",
        action="store_true",
        help="instead time what a call costs the Python thread, kgen's and torch._scaled_mm's, on "
        "the same tensors and on 64 sets in turn (default: time kernels)",
    )
    parser.add_argument(
        "--casts",
        action="store_true",
        help="instead time casts to FP8 and the gathers of a mixture of experts on 4096x7168 and "
        "larger, beside a copy of as many bytes (default: time kernels)",
    )
    add_policy(parser)
    add_surroundings(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Time and print; raises GpuMissing where there is no Hopper GPU."""
    if args.host:
        return run_host(args)
    if args.casts:
        return run_casts(args)
    lines = required_lines(args)
    parse_against(args.against)
    if args.plot:  # before minutes on a GPU, not after
        from kgen.bench.plot import outputs, require_matplotlib

        outputs(Path(args.plot))
        require_matplotlib()
    from kgen.bench.run import run_bench

    report = run_bench(
        [line.problem for line in lines],
        settings,
        against=args.against,
        floor=args.floor or bool(args.plot),
        row_major=args.row_major,
        policy=args.policy,
        command=args.command_line,
        on_row=_say,
        on_missing=lambda name, reason: note(f"{name} is missing: {reason}"),
    )
    if args.json:
        data_json(report.to_dict())
    else:
        print_report(report)
    if args.plot:
        from kgen.bench.plot import plot

        note(f"wrote {', '.join(map(str, plot(report.to_dict(), Path(args.plot))))}")
    if report.not_reached:
        note(f"interrupted: {count(len(report.not_reached), 'problem')} not reached")
        return INTERRUPTED
    return 1 if report.failed else OK


def _say(row: Row) -> None:
    times = [f"{name} {microseconds(timing.median_us)} µs" for name, timing in row.timings.items()]
    notes = [f"{name}: {text}" for name, text in row.notes.items()]
    floor = [f"floor {microseconds(row.floor.us)} µs"] if row.floor else []
    note(f"{row.problem}: {'; '.join([*times, *floor, *notes])}")


def print_report(report: BenchReport) -> None:
    """A line a problem: kgen's time, the floor, each peer's and how many times faster kgen is.

    Then the geometric means by class of M, the worst problem, and the peers that are missing.
    """
    plain = report.to_dict()
    others = [name for name in report.providers if name != KGEN]
    best_of = peers_of(plain) if len(peers_of(plain)) > 1 else []
    headings = ["problem", "kgen µs", "p10–p90", "TFLOPS", "error"]
    headings += ["floor µs", "over floor"] if report.floor else []
    for name in others:
        easier = " (easier)" if name in report.reference_only else ""
        headings += [f"{name}{easier} µs"] + ([] if best_of else ["speedup"])
    texts = [0]
    if best_of:
        texts.append(len(headings))
        headings += [OVER_BEST, "speedup"]
    texts += [len(headings), len(headings) + 1]
    rows = []
    for row, values in zip(report.rows, plain["rows"], strict=True):
        cells = _own_cells(row, bool(report.floor))
        for name in others:
            # Beside the best peer's ratio the others' would make the table too wide.
            cells += _peer_cells(row, name)[: 1 if best_of else 2]
        cells += _best_cells(best_peer(values, best_of)) if best_of else []
        details = row.details.get(KGEN, {})
        rows.append([*cells, str(details.get("short", "–")), str(details.get("origin", "–"))])
    table([*headings, "configuration", "from"], rows, text_columns=texts)
    _print_means(plain)
    if low := worst(plain):
        data(f"worst against its best peer: {_worst_words(low)}")
    for name, reason in report.missing.items():
        data(f"missing: {name}, {reason}")


def _own_cells(row: Row, floor: bool) -> list[str]:
    own = row.timings.get(KGEN)
    cells = [
        str(row.problem),
        microseconds(own.median_us if own else None),
        spread(own.p10_us, own.p90_us) if own else "–",
        f"{row.problem.flops / own.median_us / 1e6:.0f}" if own else "–",
        f"{row.errors[KGEN]:.1e}" if own else "–",
    ]
    if floor:
        least = row.floor.us if row.floor else None
        over = f"{own.median_us / least:.2f}x" if own and least else "–"
        cells += [microseconds(least), over]
    return cells


def _peer_cells(row: Row, name: str) -> list[str]:
    timing, ratio = row.timings.get(name), row.speedup(name)
    return [
        microseconds(timing.median_us if timing else None),
        f"{ratio:.2f}x" if ratio else "–",
    ]


def _best_cells(best: Best | None) -> list[str]:
    return [best.name, f"{best.ratio:.2f}x"] if best else ["–", "–"]


def _print_means(plain: dict[str, object]) -> None:
    found = means(plain)
    if not found:
        return
    headings = ["geometric mean of", "problems", "count", "mean", "least", "most"]
    rows = [
        [
            mean.what,
            mean.rows,
            str(mean.count),
            *(f"{value:.2f}x" for value in (mean.mean, mean.least, mean.most)),
        ]
        for mean in found
    ]
    data("")
    table(headings, rows, text_columns=(0, 1))
    data("")


def _worst_words(low: Worst) -> str:
    words = f"{low.shape}, {low.ratio:.3f}x {low.peer}"
    if low.interval is None:
        return f"{words}; too few rounds for an interval"
    bounds = f"{low.interval.low:.3f} to {low.interval.high:.3f}"
    return f"{words}; {low.interval.coverage:.0%} interval of paired rounds {bounds}"
