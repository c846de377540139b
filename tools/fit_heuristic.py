"""Fits the constants of kgen/model.py to recorded trials, and says how well the model chooses.

    python tools/fit_heuristic.py tests/data/trials_h200_dense.csv.gz            fit, print
    python tools/fit_heuristic.py tests/data/trials_h200_dense.csv.gz --accept   write kgen/model.py
    python tools/fit_heuristic.py tests/data/trials_h200_dense.csv.gz --check    judge it as it is

The constants that best explain the logarithms of the times, weighted towards fast configurations,
and that choose well, within the bounds of what is known of them: `PRIORS`. Levenberg-Marquardt
with numeric derivatives, deterministic, seconds on one core. Figures are over recorded
configurations only: the model ranks those that were timed, and its first is compared with the
fastest of them. (The default, which is chosen among all valid ones, need not have been timed.)
"Left out": each pair of N and K judged by constants fitted without it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kgen import model
from kgen.config import GemmConfig
from kgen.device import Device
from kgen.heuristic import default_config, diverse, work_of
from kgen.model import Fit, Work
from kgen.problem import GemmProblem
from kgen.search.tables import read
from kgen.space import nearest

Array = NDArray[np.float64]

#: What is known of each constant before the fit: its value, the standard deviation of its
#: logarithm, and from where. "h200" is docs' table of measurements on one H200, 2026-11-30.
PRIORS: Final[dict[str, tuple[float, float, str]]] = {
    "fill_us": (1.35, 0.3, "h200: what streaming times of 4 to 117 MB leave at size zero"),
    "cluster_us": (0.2, 0.5, "guess"),
    "split_us": (0.2, 0.7, "guess"),
    "stage_us": (0.01, 1.0, "guess: two barriers"),
    "tensor_boost": (1.05, 0.05, "h200: 1790 TFLOPS in runs of 1-3 ms, 1702 in 13 ms"),
    "wgmma_floor_us": (0.04, 0.2, "h200: N=8 430, N=16 773, N=32 1281 TFLOPS"),
    "wait_us": (0.06, 0.4, "h200: one accumulator, one warpgroup, N=128: 1019 TFLOPS"),
    "promotion_us": (0.05, 0.4, "64 FFMA a thread are 64 clocks"),
    "select_us": (0.003, 0.5, "guess: five clocks a step"),
    "selects_us": (0.004, 0.8, "guess"),
    "pair_wait_us": (0.04, 0.5, "h200: two accumulators, one warpgroup: 1434 TFLOPS"),
    "block_us": (0.03, 0.7, "guess: a barrier, two scales"),
    "math_softness": (4.0, 0.4, "h200: two warpgroups 1539 TFLOPS, three 1690"),
    "loop_softness": (5.0, 0.4, "guess"),
    "memory_softness": (8.0, 0.5, "guess"),
    "latency_us": (0.7, 0.3, "an L2 hit under load"),
    "dram_latency_us": (0.5, 0.5, "guess"),
    "evict_first_spares": (0.8, 0.3, "h200: 39.1 to 35.0 us for 117 MB"),
    "evict_first_loses": (0.1, 0.7, "guess"),
    "multicast_block_us": (0.02, 0.8, "guess: a remote arrival"),
    "tma_block_us": (0.1, 0.4, "h200: 16-row boxes stream at 0.13-0.15 us a box pair"),
    "row_past_end_us": (4.5e-5, 0.4, "DeepGEMM v1 with 64-row tiles at M=1 and 16"),
    "l2_sm_bytes": (64.0, 0.3, "L2 to one SM, bytes a clock"),
    "l2_share_bytes": (6154 / 132, 0.3, "DeepGEMM's heuristic"),
    "l2_usable": (0.5, 0.4, "half of L2 is near an SM"),
    "dram_share": (0.955, 0.02, "h200: 38 to 117 MB at 3.74 of 3.92 TB/s"),
    "box_rows_lost": (6.0, 0.5, "h200: boxes of 32 rows 3.0 TB/s, of 64 and more 3.4"),
    "sm_gbps": (45.0, 0.3, "guess: 90 SMs should fill an H200"),
    "dirty_share": (0.12, 0.5, "h200: up to 38 MB at 3.33 TB/s"),
    "ring_crowding": (0.1, 0.8, "guess"),
    "multicast_crowding": (0.05, 0.8, "guess"),
    "epilogue_us": (0.25, 0.5, "DeepGEMM at M=4096: 0.55-0.6 us for a tile of 128x128"),
    "epilogue_us_per_column_byte": (0.00137, 0.4, "as above"),
    "reduce_us": (0.8, 0.4, "guess"),
    "reduce_us_per_kb": (0.015, 0.6, "guess: 70 GB/s an SM"),
    "reduce_us_per_cta": (0.05, 1.0, "guess"),
    "power_share": (0.05, 0.5, "h200: 1790 to 1702 TFLOPS"),
}
#: Weights in the sum of squares: a time that is off by 3 % (times of one kernel differ by 2 to 3),
#: by 14 % for a whole problem, a regret (relative time lost) of 3 %, and two prior deviations.
SPREAD: Final = 0.03
PROBLEM_SPREAD: Final = 0.14
REGRET_SCALE: Final = 0.03
PRIOR_DEVIATIONS: Final = 2.0
#: Beyond this an error counts by its size, not its square.
ROBUST: Final = 0.08
#: Configurations predicted so much apart are told from each other.
TEMPERATURE: Final = 0.02
STEP: Final = 1e-4
#: Configurations that a search starts with.
NUM_SEEDS: Final = 16
#: Files' places for constants: `    name: float = value`.
CONSTANT: Final = r"(?m)^(    {name}: float = ).*$"


@dataclass(frozen=True)
class Data:
    """Recorded trials as arrays; `index` numbers the problem of each."""

    problems: tuple[GemmProblem, ...]
    configs: tuple[GemmConfig, ...]
    index: NDArray[np.intp]
    times_us: Array
    work: Work
    device: Device

    @classmethod
    def of(cls, times: dict[GemmProblem, dict[GemmConfig, float]], device: Device) -> Data:
        problems = tuple(sorted(times, key=lambda p: (p.n, p.k, p.m, str(p))))
        rows = [(i, c, us) for i, p in enumerate(problems) for c, us in times[p].items()]
        works = [work_of(problems[i], c, device) for i, c, _ in rows]
        columns: list[Any] = [np.array(column, float) for column in zip(*works, strict=True)]
        return cls(
            problems,
            tuple(c for _, c, _ in rows),
            np.array([i for i, _, _ in rows]),
            np.array([us for _, _, us in rows]),
            Work(*columns),
            device,
        )

    def of_problems(self, wanted: Callable[[GemmProblem], bool]) -> Data:
        """The trials of some problems."""
        kept = [i for i, problem in enumerate(self.problems) if wanted(problem)]
        number = np.full(len(self.problems), -1)
        number[kept] = np.arange(len(kept))
        at = np.flatnonzero(number[self.index] >= 0)
        columns: Any = self.work
        return Data(
            tuple(self.problems[i] for i in kept),
            tuple(self.configs[j] for j in at),
            number[self.index[at]],
            self.times_us[at],
            Work(*(column[at] for column in columns)),
            self.device,
        )

    @property
    def best_us(self) -> Array:
        """The fastest recorded time of each problem."""
        best = np.full(len(self.problems), np.inf)
        np.minimum.at(best, self.index, self.times_us)
        return best


# -- the fit -------------------------------------------------------------------------------------


def fit_of(logs: Array) -> Fit:
    """The constants, from the logarithms of those that are fitted."""
    return replace(Fit(), **dict(zip(PRIORS, map(float, np.exp(logs)), strict=True)))


def predicted_us(data: Data, fit: Fit) -> Array:
    """Predicted times of all trials."""
    total: Any = model.times(data.work, fit).total_us
    return np.asarray(total, float)


def fit(data: Data, iterations: int = 30) -> Fit:
    """The constants that explain the data, begun at the priors."""
    start = np.log([value for value, _, _ in PRIORS.values()])
    deviations = np.array([deviation for _, deviation, _ in PRIORS.values()])
    residuals = _residuals(data)

    def all_residuals(logs: Array) -> Array:
        prior = (logs - start) / deviations / PRIOR_DEVIATIONS
        return np.concatenate([residuals(fit_of(logs)), prior])

    return fit_of(_least_squares(all_residuals, start, iterations))


def _residuals(data: Data) -> Callable[[Fit], Array]:
    """What the fit makes small: errors within each problem, of problems, and regret."""
    index, count = data.index, len(data.problems)
    lost = np.log(data.times_us / data.best_us[index])
    weights = np.exp(-2 * lost) + 0.05
    weights /= np.bincount(index, weights)[index]

    def residuals(constants: Fit) -> Array:
        logs = np.log(predicted_us(data, constants))
        errors = logs - np.log(data.times_us)
        means = np.bincount(index, weights * errors)
        within = np.sqrt(weights) * _robust(errors - means[index]) / SPREAD
        first = np.full(count, np.inf)
        np.minimum.at(first, index, logs)
        chosen = np.exp((first[index] - logs) / TEMPERATURE)
        regret = np.bincount(index, chosen * lost) / np.bincount(index, chosen)
        return np.concatenate(
            [within, means / PROBLEM_SPREAD, np.sqrt((regret + 1e-4) / REGRET_SCALE)]
        )

    return residuals


def _robust(errors: Array) -> Array:
    """Errors whose squares grow linearly beyond ROBUST."""
    size = np.abs(errors)
    beyond = np.sqrt(np.maximum(2 * ROBUST * size - ROBUST**2, 1e-12))
    return np.sign(errors) * np.where(size < ROBUST, size, beyond)


def _least_squares(residuals: Callable[[Array], Array], start: Array, iterations: int) -> Array:
    """Levenberg-Marquardt."""
    logs, damping = start.copy(), 1.0
    now = residuals(logs)
    for _ in range(iterations):
        steps = STEP * np.eye(len(logs))
        jacobian = np.stack([(residuals(logs + step) - now) / STEP for step in steps], axis=1)
        square, slope = jacobian.T @ jacobian, jacobian.T @ now
        for _ in range(6):
            damped = square + damping * np.diag(0.1 * np.diag(square) + 0.1)
            step = np.clip(np.linalg.solve(damped, -slope), -0.3, 0.3)
            then = residuals(logs + step)
            if then @ then < now @ now:
                break
            damping *= 4
        else:
            return logs
        gained = 1 - (then @ then) / (now @ now)
        logs, now, damping = logs + step, then, max(damping / 5, 1e-3)
        if gained < 1e-4:
            break
    return logs


# -- how well it chooses -------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """How the model does on the recorded configurations of one problem.

    first, among_8     time of its first choice, and the best of its first eight, over the best
    among_seeds        the best of NUM_SEEDS that differ, over the best
    correlation        of ranks, Spearman's
    spread, offset     standard deviation of the logarithm of predicted / recorded; its median
    """

    problem: GemmProblem
    first: float
    among_8: float
    among_seeds: float
    correlation: float
    spread: float
    offset: float
    chosen: GemmConfig
    best: GemmConfig


def score(data: Data, fit: Fit) -> list[Score]:
    """One score a problem, in their order."""
    logs = np.log(predicted_us(data, fit))
    found = []
    for i, problem in enumerate(data.problems):
        at = np.flatnonzero(data.index == i)
        us, predicted = data.times_us[at], logs[at]
        order = np.argsort(predicted, kind="stable")
        errors = predicted - np.log(us)
        ranked = [data.configs[j] for j in at[order]]
        seeds = set(diverse(ranked, list(np.exp(predicted[order])), NUM_SEEDS))
        is_seed = np.array([data.configs[j] in seeds for j in at])
        found.append(
            Score(
                problem,
                float(us[order[0]] / us.min()),
                float(us[order[:8]].min() / us.min()),
                float(us[is_seed].min() / us.min()),
                float(np.corrcoef(_ranks(predicted), _ranks(us))[0, 1]) if len(us) > 1 else 1.0,
                float(errors.std()),
                float(np.median(errors)),
                ranked[0],
                data.configs[at[us.argmin()]],
            )
        )
    return found


def _ranks(values: Array) -> Array:
    return np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(float)


def left_out(data: Data, iterations: int = 30) -> list[Score]:
    """Scores of each pair (N, K) by constants fitted to the others."""
    found = []
    for pair in sorted({(p.n, p.k) for p in data.problems}):

        def is_left_out(p: GemmProblem, pair: tuple[int, int] = pair) -> bool:
            return (p.n, p.k) == pair

        others = data.of_problems(lambda p, out=is_left_out: not out(p))  # type: ignore[misc]
        found += score(data.of_problems(is_left_out), fit(others, iterations))
    return found


def mean_first(scores: Sequence[Score]) -> float:
    """Geometric mean of the first choice's time over the best."""
    return exp(sum(log(s.first) for s in scores) / len(scores))


def summary(scores: Sequence[Score]) -> str:
    """The figures over all problems, in a line."""
    near = sum(s.among_8 <= 1.02 for s in scores)
    seeded = sum(s.among_seeds <= 1.02 for s in scores)
    return (
        f"first choice / best: geometric mean {mean_first(scores):.4f}, "
        f"worst {max(s.first for s in scores):.3f}; within 2 % of the best: "
        f"one of the first 8 for {near}, one of {NUM_SEEDS} seeds for {seeded} of {len(scores)}; "
        f"rank correlation {np.mean([s.correlation for s in scores]):.3f}; "
        f"spread {np.mean([s.spread for s in scores]):.3f}"
    )


def describe(s: Score) -> str:
    """One problem, in a line."""
    return (
        f"{s.problem!s:34} first {s.first:.3f} among 8 {s.among_8:.3f} "
        f"rank {s.correlation:.2f} spread {s.spread:.3f} offset {s.offset:+.3f}  "
        f"[{s.chosen}] best [{s.best}]"
    )


def describe_defaults(data: Data) -> list[str]:
    """What the shipped constants choose among all valid configurations, or the nearest timed."""
    lines, logs, num_timed = [], [], 0
    for i, problem in enumerate(data.problems):
        at = np.flatnonzero(data.index == i)
        times = {data.configs[j]: float(data.times_us[j]) for j in at}
        default = default_config(problem, data.device)
        close = default if default in times else nearest(default, times)
        assert close is not None, "a problem has at least one time"
        num_timed += default in times
        logs.append(log(times[close] / min(times.values())))
        lines.append(
            f"{problem!s:34} [{default}] {'was' if default in times else 'not'} timed; "
            f"{'it' if default in times else f'[{close}]'} takes {exp(logs[-1]):.3f} of the best"
        )
    mean = exp(sum(logs) / len(logs))
    lines.append(f"defaults: {num_timed} of {len(logs)} timed; they or the nearest: {mean:.4f}")
    return lines


# -- the constants' file -------------------------------------------------------------------------


def written(text: str, fit: Fit) -> str:
    """The module's text with these constants; raises ValueError where one has no place."""
    for name in PRIORS:
        value = float(f"{getattr(fit, name):.4g}")
        pattern = CONSTANT.format(name=name)
        text, places = re.subn(pattern, rf"\g<1>{value!r}", text)
        if places != 1:
            raise ValueError(f"{name}: {places} places match {pattern!r}, expected one")
    return text


def main() -> int:
    """Fit or check, print, and write where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trials", type=Path, help="what tools/export_trials.py wrote")
    parser.add_argument(
        "--accept", action="store_true", help="write the constants to kgen/model.py"
    )
    parser.add_argument("--check", action="store_true", help="judge the present constants only")
    args = parser.parse_args()
    export = read(args.trials)
    data = Data.of(export.times(), export.device)
    print(f"{len(data.configs)} times of {len(data.problems)} problems, {export.device.name}")
    print(f"present:  {summary(score(data, Fit()))}")
    if args.check:
        print(*map(describe, score(data, Fit())), *describe_defaults(data), sep="\n")
        return 0
    fitted = fit(data)
    print(*map(describe, score(data, fitted)), sep="\n")
    print(f"fitted:   {summary(score(data, fitted))}")
    print(f"left out: {summary(left_out(data))}")
    for name, (value, _, source) in PRIORS.items():
        print(f"  {name} = {getattr(fitted, name):.4g}  ({value:.4g}: {source})")
    if args.accept:
        path = Path(model.__file__)
        path.write_text(written(path.read_text(), fitted))
        print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
