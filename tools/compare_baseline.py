"""Is the set-up right? Compares floor and peers of a result file with an earlier measurement.

    python tools/compare_baseline.py results/dense.json ../shared/baselines/h200.json

The baseline is one JSON object: `limits` with `stream_us` (a list of n, k, us) and
`fp8_mma_tflops_random`, and `dense`, a list of rows with m, n, k and microseconds under NAME_us. A
provider is compared under its own name, torch's two under cuBLASLt's. Said is whatever differs by
more: a floor either way, a peer that is slower now.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kgen.bench.summary import KGEN, geometric_mean, median_us

#: Shares by which a limit may differ, and a peer be slower.
FLOOR_SHARE: Final = 0.03
PEER_SHARE: Final = 0.05
_NAMES: Final = {"torch blockwise": "cublaslt_block", "torch tensorwise": "cublaslt_tensorwise"}


def limits(results: dict[str, Any], baseline: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Each limit that both have, and its figure now over its figure then."""
    floor, before = results.get("floor"), baseline["limits"]
    if not floor:
        return
    yield "tensor-core rate", floor["tflops"] / before["fp8_mma_tflops_random"]
    then = {(row["n"], row["k"]): row["us"] for row in before["stream_us"]}
    for row in floor["streams"]:
        if (row["n"], row["k"]) in then:
            name = f"streaming N={row['n']} K={row['k']}"
            yield name, row["median_us"] / then[row["n"], row["k"]]


def peers(results: dict[str, Any], baseline: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By provider: each shape that both have, and its time now over its time then."""
    then = {(row["m"], row["n"], row["k"]): row for row in baseline["dense"]}
    found: dict[str, dict[str, float]] = {}
    for name in results["providers"]:
        if name == KGEN:
            continue
        key = f"{_NAMES.get(name, name)}_us"
        found[name] = {}
        for row in results["rows"]:
            shape = tuple(row["problem"][field] for field in ("m", "n", "k"))
            now, before = median_us(row, name), then.get(shape, {}).get(key)
            if now and before:
                found[name][row["shape"]] = now / before
    return found


def compare(results: dict[str, Any], baseline: dict[str, Any]) -> tuple[list[str], bool]:
    """What to print, and whether everything is as it was."""
    lines, good = [], True
    for name, ratio in limits(results, baseline):
        off = abs(ratio - 1) > FLOOR_SHARE
        lines.append(f"{name}: {ratio:.3f} times{', DIFFERS' if off else ''}")
        good &= not off
    if not lines:
        lines.append("no floor in common")
        good = False
    for name, ratios in peers(results, baseline).items():
        if not ratios:
            lines.append(f"{name}: no row in common")
            continue
        mean = geometric_mean([*ratios.values()])
        slow = {shape: ratio for shape, ratio in ratios.items() if ratio > 1 + PEER_SHARE}
        lines.append(f"{name}: {len(ratios)} rows, {mean:.3f} times in geometric mean")
        lines += [f"  {shape}: {ratio:.3f} times, SLOWER" for shape, ratio in slow.items()]
        good &= not slow
    return lines, good


def main(argv: Sequence[str] | None = None) -> int:
    """0 when floor and peers are those of the baseline, 1 when not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("results", type=Path, help="output of kgen bench --floor --json")
    parser.add_argument("baseline", type=Path, help="the earlier measurement")
    args = parser.parse_args(argv)
    results, baseline = (json.loads(path.read_text()) for path in (args.results, args.baseline))
    lines, good = compare(results, baseline)
    print("\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
