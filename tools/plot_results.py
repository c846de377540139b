"""Draws time over the floor from a result file, where the GPU machine has no matplotlib.

    python tools/plot_results.py results/dense.json results/dense

writes results/dense.png and results/dense.svg. The file comes from `kgen bench --floor --json` or
tools/publish_results.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kgen.bench.plot import plot
from kgen.errors import KgenError


def main(argv: Sequence[str] | None = None) -> int:
    """0 when both files were written, 1 with the reason when not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("results", type=Path, help="a result file with floors")
    parser.add_argument("out", type=Path, help="the plot's name, with or without .png or .svg")
    args = parser.parse_args(argv)
    try:
        files = plot(json.loads(args.results.read_text()), args.out)
    except KgenError as error:
        print(error)
        return 1
    print(*files)
    return 0


if __name__ == "__main__":
    sys.exit(main())
