"""Writes the README's tables from the result files; with --check only says whether they agree.

    python tools/readme_tables.py [--check]

A table stands between `<!-- table:NAME -->` and `<!-- /table -->` and comes from results/NAME.json,
which tools/publish_results.py made from what `kgen bench --json` and `kgen tune --json` printed.
A table whose file is not there yet is empty.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kgen.bench.summary import (
    KGEN,
    METHOD,
    OVER_BEST,
    Mean,
    Row,
    best_peer,
    means,
    median_us,
    over_floor,
    peers_of,
    speedup,
    worst,
)
from kgen.problem import GemmProblem

ROOT: Final = Path(__file__).parents[1]
_TABLE: Final = re.compile(r"(<!-- table:([\w-]+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)


def render(results: dict[str, Any]) -> str:
    """The Markdown of one result file: where it comes from, the rows, the summary."""
    found = means(results)
    speedups = [mean for mean in found if mean.what.startswith("speedup over ")]
    parts = [_origin(results), _rows(results)]
    parts += [_speedups(speedups)] if speedups else []
    parts += [_worst(results)] if len(peers_of(results)) > 1 else []
    over = [mean for mean in found if mean not in speedups]
    parts += [_over_floor(over)] if over else []
    return "\n\n".join(filter(None, parts)) + "\n"


def _origin(results: dict[str, Any]) -> str:
    device, policy = results["device"], results["policy"]
    how = "cold L2" if policy["flush_l2"] else "warm L2"
    lines = [
        f"{device['name']} ({device['num_sms']} SMs), driver {results['driver']}, torch "
        f"{results['torch']}, {results['date'][:10]}, commit {results['commit'][:12]}: "
        f"`{results['command']}`, {how}, median of {policy['rounds']} alternating calls."
    ]
    if floor := results.get("floor"):
        rates = {"": floor["tflops"], " on BF16": floor.get("bf16_tflops")}
        rate = " and ".join(f"{tflops:.0f}{what}" for what, tflops in rates.items() if tflops)
        lines.append(
            f"Floor: the weights' streaming time, measured in the same run, with A and D at "
            f"{floor['beside_tbps']:g} TB/s, or the operations at {rate} TFLOPS, "
            "the rate the tensor cores sustained; the larger counts."
        )
    if missing := results.get("missing"):
        lines.append(f"Not there: {', '.join(missing)}.")
    if tune := results.get("tune"):
        trials = sum(problem["num_trials"] for problem in tune["problems"])
        lines.append(
            f"The kernels were tuned before by `{tune['command']}`: {len(tune['problems'])} "
            f"problems, {trials} trials, {tune['seconds']:.0f} s."
        )
    return " ".join(lines)


def _rows(results: dict[str, Any]) -> str:
    others = [name for name in results["providers"] if name != KGEN]
    several = peers_of(results) if len(peers_of(results)) > 1 else []
    floor = "floor" in results
    kinds = any(row["problem"].get("kind", "dense") != "dense" for row in results["rows"])
    headings = ["kind", "groups"] * kinds + ["M", "N", "K", "kgen µs", "p10–p90", "TFLOPS", "GB/s"]
    headings += ["floor µs", "over floor"] if floor else []
    headings += [OVER_BEST, "speedup"] if several else []
    for name in others:
        headings.append(f"{name}{'*' if name in results['reference_only'] else ''} µs")
        headings += [] if several else ["speedup"]
    lines = [headings, ["--:"] * len(headings)]
    for row in results["rows"]:
        problem = GemmProblem(**row["problem"])
        cells = [problem.kind, str(problem.groups)] * kinds + _own_cells(row, problem)
        cells += _floor_cells(row) if floor else []
        cells += _best_cells(row, several) if several else []
        # Beside the best peer's ratio the others' would make the table too wide.
        width = 1 if several else 2
        lines.append([*cells, *(cell for name in others for cell in _cells(row, name)[:width])])
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    if easier := results["reference_only"]:
        text += f"\n\n\\* {', '.join(easier)}: an easier problem, as a mark to reach."
    return text


def _own_cells(row: Row, problem: GemmProblem) -> list[str]:
    own = row["providers"].get(KGEN, {})
    cells = [str(size) for size in (problem.m, problem.n, problem.k)]
    if "median_us" not in own:
        return cells + ["–"] * 4
    return [
        *cells,
        f"**{_us(own['median_us'])}**",
        f"{_us(own['p10_us'])}–{_us(own['p90_us'])}",
        f"{problem.flops / own['median_us'] / 1e6:.0f}",
        f"{problem.min_bytes / own['median_us'] / 1e3:.0f}",
    ]


def _floor_cells(row: Row) -> list[str]:
    floor, over = row.get("floor", {}).get("us"), over_floor(row)
    return [_us(floor) if floor else "–", f"{over:.2f}" if over else "–"]


def _best_cells(row: Row, peers: Sequence[str]) -> list[str]:
    best = best_peer(row, peers)
    return [best.name, f"**{best.ratio:.2f}**"] if best else ["–", "–"]


def _cells(row: Row, name: str) -> list[str]:
    time, ratio = median_us(row, name), speedup(row, name)
    return [_us(time) if time else "–", f"{ratio:.2f}" if ratio else "–"]


def _us(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"


def _speedups(found: Sequence[Mean]) -> str:
    lines = ["| speedup over | rows | geometric mean | least |", "|---|---|--:|--:|"]
    for mean in found:
        name = mean.what.removeprefix("speedup over ")
        lines.append(
            f"| {name} | {mean.rows} ({mean.count}) | {mean.mean:.2f} | {mean.least:.2f} |"
        )
    return "\n".join(lines)


def _worst(results: dict[str, Any]) -> str:
    low = worst(results)
    if low is None:
        return ""
    words = f"Worst against its best peer: {low.shape}, {low.ratio:.3f} times {low.peer}"
    if low.interval is None:
        return f"{words}."
    bounds = f"{low.interval.low:.3f} to {low.interval.high:.3f}"
    return f"{words} ({bounds}, {low.interval.coverage:.0%}: {METHOD})."


def _over_floor(found: Sequence[Mean]) -> str:
    lines = ["| time over the floor | rows | geometric mean | most |", "|---|---|--:|--:|"]
    for mean in found:
        what = mean.what.replace(" over floor", "")
        lines.append(f"| {what} | {mean.rows} ({mean.count}) | {mean.mean:.2f} | {mean.most:.2f} |")
    return "\n".join(lines)


def update(text: str, results: Path) -> str:
    """The page with every table as its result file has it."""

    def replaced(match: re.Match[str]) -> str:
        path = results / f"{match[2]}.json"
        table = f"\n{render(json.loads(path.read_text()))}\n" if path.exists() else ""
        return match[1] + table + match[4]

    return _TABLE.sub(replaced, text)


def pages() -> list[Path]:
    """The README and the pages under docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the pages agree with the results, or now do; 1 when --check finds they do not."""
    parser = argparse.ArgumentParser(description=__doc__, usage="%(prog)s [--check]")
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument(
        "--page", type=Path, action="append", help="a page to update (default: README and docs)"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="the result files")
    args = parser.parse_args(argv)
    differing = False
    for page in args.page or pages():
        before = page.read_text()
        after = update(before, args.results)
        if before == after:
            continue
        if args.check:
            print(f"{page} differs from {args.results}: run python tools/readme_tables.py")
            differing = True
        else:
            page.write_text(after)
    return int(differing)


if __name__ == "__main__":
    sys.exit(main())
