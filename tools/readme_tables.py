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
from collections.abc import Callable, Iterable, Sequence
from math import exp, log
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
KGEN: Final = "kgen"
_TABLE: Final = re.compile(r"(<!-- table:([\w-]+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)

Row = dict[str, Any]


def render(results: dict[str, Any]) -> str:
    """The Markdown of one result file: where it comes from, the rows, the summary."""
    peers = [name for name in results["providers"] if name != KGEN]
    rows = results["rows"]
    parts = [_origin(results), _rows(rows, peers, results["reference_only"])]
    parts += [_summary(rows, peers)] if peers else []
    return "\n\n".join(parts) + "\n"


def _origin(results: dict[str, Any]) -> str:
    device, policy = results["device"], results["policy"]
    how = "cold L2" if policy["flush_l2"] else "warm L2"
    lines = [
        f"{device['name']} ({device['num_sms']} SMs), driver {results['driver']}, torch "
        f"{results['torch']}, {results['date'][:10]}, commit {results['commit'][:12]}: "
        f"`{results['command']}`, {how}, median of {policy['rounds']} alternating calls."
    ]
    if tune := results.get("tune"):
        trials = sum(problem["num_trials"] for problem in tune["problems"])
        lines.append(
            f"The kernels were tuned before by `{tune['command']}`: {len(tune['problems'])} "
            f"problems, {trials} trials, {tune['seconds']:.0f} s."
        )
    return " ".join(lines)


def _rows(rows: Sequence[Row], peers: Sequence[str], reference_only: Sequence[str]) -> str:
    headings = ["M", "N", "K", "kgen µs", "p10–p90", "TFLOPS", "GB/s"]
    for name in peers:
        headings += [f"{name}{'*' if name in reference_only else ''} µs", "speedup"]
    lines = [headings, ["--:"] * len(headings), *(_cells(row, peers) for row in rows)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    if reference_only:
        text += f"\n\n\\* {', '.join(reference_only)}: an easier problem, as a mark to reach."
    return text


def _cells(row: Row, peers: Sequence[str]) -> list[str]:
    problem, own = row["problem"], row["providers"].get(KGEN, {})
    cells = [str(problem[name]) for name in ("m", "n", "k")]
    if "median_us" in own:
        cells += [
            f"**{_us(own['median_us'])}**",
            f"{_us(own['p10_us'])}–{_us(own['p90_us'])}",
            f"{2 * problem['m'] * problem['n'] * problem['k'] / own['median_us'] / 1e6:.0f}",
            f"{_bytes(problem) / own['median_us'] / 1e3:.0f}",
        ]
    else:
        cells += ["–"] * 4
    for name in peers:
        time, ratio = _median(row, name), speedup(row, name)
        cells += [_us(time) if time else "–", f"{ratio:.2f}" if ratio else "–"]
    return cells


def _bytes(problem: dict[str, Any]) -> int:
    """Operands, scales and D, once."""
    m, n, k = (problem[name] for name in ("m", "n", "k"))
    d_bytes = 4 if problem["d_dtype"] == "fp32" else 2
    scales = 4 * (m + -(-n // 128)) * -(-k // 128)
    return int(m * k + n * k + scales + d_bytes * m * n)


def _us(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"


def _median(row: Row, name: str) -> float | None:
    value: float | None = row["providers"].get(name, {}).get("median_us")
    return value


def speedup(row: Row, name: str) -> float | None:
    """The other's time over kgen's; None where one of them has none."""
    own, other = _median(row, KGEN), _median(row, name)
    return other / own if own and other else None


def _summary(rows: Sequence[Row], peers: Sequence[str]) -> str:
    ranges: list[tuple[str, Callable[[int], bool]]] = [
        ("all", lambda m: True),
        ("M ≤ 128", lambda m: m <= 128),
        ("128 < M < 4096", lambda m: 128 < m < 4096),
        ("M ≥ 4096", lambda m: m >= 4096),
    ]
    lines = ["| speedup over | rows | geometric mean | least |", "|---|---|--:|--:|"]
    for name in peers:
        for words, belongs in ranges:
            found = _ratios((row for row in rows if belongs(row["problem"]["m"])), name)
            if found:
                mean = exp(sum(map(log, found)) / len(found))
                lines.append(f"| {name} | {words} ({len(found)}) | {mean:.2f} | {min(found):.2f} |")
    return "\n".join(lines)


def _ratios(rows: Iterable[Row], name: str) -> list[float]:
    return [ratio for row in rows if (ratio := speedup(row, name))]


def update(text: str, results: Path) -> str:
    """The page with every table as its result file has it."""

    def replaced(match: re.Match[str]) -> str:
        path = results / f"{match[2]}.json"
        table = f"\n{render(json.loads(path.read_text()))}\n" if path.exists() else ""
        return match[1] + table + match[4]

    return _TABLE.sub(replaced, text)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the README agrees with the results, or now does; 1 when --check finds it does not."""
    parser = argparse.ArgumentParser(description=__doc__, usage="%(prog)s [--check]")
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--page", type=Path, default=ROOT / "README.md", help="the page to update")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="the result files")
    args = parser.parse_args(argv)
    before = args.page.read_text()
    after = update(before, args.results)
    if before == after:
        return 0
    if args.check:
        print(f"{args.page} differs from {args.results}: run python tools/readme_tables.py")
        return 1
    args.page.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
