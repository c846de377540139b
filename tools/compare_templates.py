"""Two versions of the kernel templates against each other on a GPU, in one process.

    python tools/compare_templates.py OLD_FOLDER [--results results/dense.json] [PROBLEM ...]

Builds each problem's winner of a result file (--default: the analytic model's choice) from the
templates in OLD_FOLDER and from kgen's own, verifies both, times them alternating under the tuner's
policy, and prints new over old. A kernel that hangs costs itself only. OLD_FOLDER is kgen/templates
of another commit:

    git archive COMMIT kgen/templates | tar x -C /tmp/old
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import exp, log
from pathlib import Path
from typing import NamedTuple

from kgen.build import Cubin, build
from kgen.cache.artifacts import ArtifactStore
from kgen.config import GemmConfig
from kgen.errors import KgenError
from kgen.heuristic import default_config
from kgen.measure import DEFAULT_POLICY
from kgen.problem import GemmProblem
from kgen.render import render
from kgen.search.events import GPU_BACKEND
from kgen.search.gpu_worker import GpuWorker, Measured
from kgen.search.stop import StopFlag
from kgen.settings import Settings
from kgen.shapes import parse_problem
from kgen.toolchain import Compiler, default_compiler

RESULTS = Path(__file__).parent.parent / "results" / "dense.json"


class Pair(NamedTuple):
    """One kernel from both versions of the templates."""

    problem: GemmProblem
    config: GemmConfig
    old: Cubin
    new: Cubin

    @property
    def same(self) -> bool:
        """Whether the versions give the same code: nothing to compare."""
        return self.old.key == self.new.key


def candidates(results: Path, only: Sequence[str]) -> list[tuple[GemmProblem, GemmConfig]]:
    """Problems of a result file with their winners; those named, or all."""
    winners = {
        parse_problem(row["shape"]): GemmConfig.from_dict(row["providers"]["kgen"]["config"])
        for row in json.loads(results.read_text())["rows"]
        if "config" in row["providers"].get("kgen", {})
    }
    wanted = [parse_problem(text) for text in only]
    return [(problem, winners[problem]) for problem in wanted or winners if problem in winners]


def build_pair(
    job: tuple[GemmProblem, GemmConfig], folder: Path, compiler: Compiler, store: ArtifactStore
) -> Pair:
    """Both cubins of a job; raises CompileError."""
    problem, config = job
    old = build(problem, config, compiler, store, render=partial(render, folder=folder))
    return Pair(problem, config, old, build(problem, config, compiler, store))


def report(pair: Pair, measured: list[Measured]) -> tuple[str, float]:
    """A line and the ratio of the new time to the old."""
    old, new = measured
    ratio = new.median_us / old.median_us
    spread = f"{new.p10_us:.2f}-{new.p90_us:.2f}"
    times = f"{old.median_us:9.2f} {new.median_us:9.2f} {ratio:6.3f}  {spread:>15}"
    return f"{times}  {pair.problem}  {pair.config}", ratio


def compare(pairs: Sequence[Pair], policy: str, timeout_s: float) -> list[float]:
    """Verify, time and print every pair that differs; the ratios."""
    worker = GpuWorker(GPU_BACKEND, {}, timeout_s, StopFlag())
    worker.hello()
    ratios = []
    try:
        for pair in pairs:
            try:
                line, ratio = report(
                    pair, worker.measure(pair.problem, [pair.old, pair.new], policy)
                )
            except KgenError as error:
                print(f"{type(error).__name__}: {pair.problem}  {pair.config}: {error}", flush=True)
                continue
            ratios.append(ratio)
            print(line, flush=True)
    finally:
        worker.close()
    return ratios


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every pair was timed, 1 when one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="kgen/templates of the other version")
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", help="default: all of --results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="whose winners to build")
    parser.add_argument("--default", action="store_true", help="the model's choice, not winners")
    parser.add_argument("--policy", default=DEFAULT_POLICY)
    parser.add_argument("--build-only", action="store_true", help="compile both, launch nothing")
    args = parser.parse_args(argv)
    if not (args.folder / "gemm.cu.j2").is_file():
        parser.error(f"{args.folder}: no gemm.cu.j2 in it; expected a folder of templates")
    jobs = candidates(args.results, args.problems)
    settings = Settings.from_env()
    compiler = default_compiler(settings)
    if args.default:
        from kgen.device import H200

        jobs = [(problem, default_config(problem, H200)) for problem, _ in jobs]
    make = partial(
        build_pair, folder=args.folder, compiler=compiler, store=ArtifactStore(settings.cache_dir)
    )
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        pairs = list(pool.map(make, jobs))
    changed = [pair for pair in pairs if not pair.same]
    print(f"{len(changed)} of {len(pairs)} kernels differ, built by {compiler.id}")
    if args.build_only or not changed:
        return 0
    print("   old us    new us  ratio      p10-p90 new  problem, configuration")
    ratios = compare(changed, args.policy, settings.trial_timeout_s)
    if ratios:
        mean = exp(sum(map(log, ratios)) / len(ratios))
        print(f"geometric mean {mean:.3f}, worst {max(ratios):.3f}, best {min(ratios):.3f}")
    return 0 if len(ratios) == len(changed) else 1


if __name__ == "__main__":
    sys.exit(main())
