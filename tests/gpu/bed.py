"""What GPU tests share: kernels compiled ahead, batched checks, covering configurations.

Checks stay on the device and are read once a batch: a test of hundreds of launches waits once.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from typing import Any

import torch

from kgen.cases import Case
from kgen.config import GemmConfig, d_store_box, num_b_scales
from kgen.device import Device
from kgen.problem import GemmProblem
from kgen.render import problem_class
from kgen.runtime import driver
from kgen.runtime.kernel import Kernel
from kgen.runtime.kernels import KERNELS
from kgen.search.compile_pool import CompilePool
from kgen.search.events import BUILDER
from kgen.settings import Settings
from kgen.space import AXES
from kgen.validity import why_invalid
from kgen.verify import MAX_ERROR

#: Rows that the largest M of the grid needs; its references are made once per (N, K) and sliced.
GRID_ROWS = 1040
GRID_MS = (*range(1, 131), 1024, 1025, 1040)
GRID_NS = (8, 16, 64, 576, 768, 2112, 4096)
GRID_KS = (128, 144, 512, 1152, 7168, 16384)
#: Where every covering configuration has to be valid.
WIDE = GemmProblem("dense", m=1040, n=2112, k=7168)

Launch = Callable[..., None]


class Kernels:
    """Kernels by problem and configuration, compiled by a pool of processes, loaded once."""

    def __init__(self) -> None:
        options = {"settings": Settings.from_env(), "driver_cuda": driver.driver_version()}
        self._pool = CompilePool(BUILDER, options, len(os.sched_getaffinity(0)), 120.0)
        self._loaded: dict[tuple[str, GemmConfig], Kernel] = {}

    def prefetch(self, wanted: Iterable[tuple[GemmProblem, GemmConfig]]) -> None:
        """Have these compiled in the background, in this order."""
        for problem, config in wanted:
            self._pool.submit(problem, config)

    def get(self, problem: GemmProblem, config: GemmConfig) -> Kernel:
        """The loaded kernel; waits for its compile and raises what that raised."""
        key = (problem_class(problem, config), config)
        if key not in self._loaded:
            cubin = self._pool.submit(problem, config).result()
            ordinal = torch.cuda.current_device()
            load = KERNELS[problem.kind].load
            self._loaded[key] = load(cubin.data, cubin.entry, config, cubin.problem, ordinal)
        return self._loaded[key]

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


@dataclass
class Batch:
    """Launches on slices of one case, each checked on the device; `failures` waits for it."""

    case: Case
    limit: float = MAX_ERROR
    _found: list[torch.Tensor] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)

    def run(self, name: str, launch: Launch, m: int, row_major: bool = False) -> None:
        """Launch on m rows, into poisoned memory with guards, and queue the checks."""
        d = self.case.output.poisoned(m)
        launch(*self.case.inputs(m, row_major), d, *self.case.bias)
        tiles, strips = self.case.errors(d)
        excess = self.case.output.num_changed() - d.numel()
        self._found.append(torch.stack([tiles.amax(), strips.amax(), excess.float()]))
        self._names.append(name)

    def failures(self) -> list[str]:
        """What is wrong: name, largest tile and strip error, elements written too many."""
        assert self._found, "a batch that ran nothing has shown nothing"
        return [
            f"{name}: tile {tile:.2e}, strip {strip:.2e}, {excess:+.0f} elements written"
            for name, (tile, strip, excess) in zip(
                self._names, torch.stack(self._found).tolist(), strict=True
            )
            if not (tile <= self.limit and strip <= self.limit and excess == 0)
        ]


@cache
def case_of(n: int, k: int, d_dtype: str = "bf16", rows: int = GRID_ROWS) -> Case:
    """A case of many rows, kept: slices of it serve every M."""
    return Case(GemmProblem("dense", rows, n, k, d_dtype=d_dtype))


def traits(config: GemmConfig) -> dict[str, Any]:
    """What the template or the layout decides on, axis by axis; the values that pairs are made of.

    Widths that differ only in size behave alike: of block_n counts how many scale blocks a tile
    touches, how D is stored, and whether the last group of 8 columns stands alone.
    """
    deep = (2, 3, 4, 8, 16)
    values = {name: getattr(config, name) for name in AXES if name != "sass_pass"}
    swizzle = d_store_box(config.block_n, 2)[1]
    values["block_n"] = (num_b_scales(config.block_n), swizzle, config.block_n // 8 % 2)
    values["num_stages"] = next(d for d in deep if config.num_stages <= d)
    return values


def covering(device: Device, problem: GemmProblem = WIDE, seed: int = 0) -> list[GemmConfig]:
    """Configurations with every value of every axis and every pair of traits that can be valid."""
    draw = random.Random(seed)
    chosen: list[GemmConfig] = []
    seen_values: set[tuple[str, Any]] = set()
    seen_pairs: set[Any] = set()
    for fixed in _wishes():
        if _has(fixed, seen_values):
            continue
        tries = list(_valid_with(fixed, problem, device, draw))
        if not tries:
            continue
        best = max(tries, key=lambda c: len(_pairs(c) - seen_pairs))
        chosen.append(best)
        seen_values |= set(best.to_dict().items())
        seen_pairs |= _pairs(best)
    return chosen + _more_pairs(problem, device, draw, seen_pairs)


def _wishes() -> Iterator[dict[str, Any]]:
    for name, values in AXES.items():
        if name != "sass_pass":
            for value in values:
                yield {name: value}


def _has(fixed: dict[str, Any], seen: set[tuple[str, Any]]) -> bool:
    return set(fixed.items()) <= seen


def _valid_with(
    fixed: dict[str, Any], problem: GemmProblem, device: Device, draw: random.Random
) -> Iterator[GemmConfig]:
    """Up to 8 random valid configurations with these values."""
    found = 0
    for _ in range(8000):  # few tiles are as wide as registers allow
        values = {name: draw.choice(axis) for name, axis in AXES.items()}
        config = replace(GemmConfig(**values | {"sass_pass": "none"}), **fixed)
        if why_invalid(problem, config, device) is None:
            found += 1
            yield config
            if found == 8:
                return


def _pairs(config: GemmConfig) -> set[Any]:
    return set(combinations(traits(config).items(), 2))


def _more_pairs(
    problem: GemmProblem, device: Device, draw: random.Random, seen: set[Any]
) -> list[GemmConfig]:
    """Random valid configurations, the most useful first, until pairs no longer turn up."""
    pool = [c for _ in range(60) for c in _valid_with({}, problem, device, draw)]
    chosen: list[GemmConfig] = []
    while pool:
        best = max(pool, key=lambda c: len(_pairs(c) - seen))
        if len(_pairs(best) - seen) < 1:
            return chosen
        chosen.append(best)
        seen |= _pairs(best)
        pool.remove(best)
    return chosen


def new_stream() -> torch.cuda.Stream:
    """A stream of its own."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def keep_busy(cycles: int) -> None:
    """Occupy the current stream for so many clocks."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def report(failures: Sequence[str]) -> str:
    """The first failures, for an assertion's message."""
    return f"{len(failures)} wrong:\n" + "\n".join(failures[:20])
