"""Which configurations are worth a trial: the axes, and the valid points for a problem.

Takes a problem and a device, gives configurations in a fixed order. Validity is asked of
`validity.why_invalid`; on top of it, points that could only repeat or waste another point's work
are left out here (rules named `redundant_*`). Must not import torch, CUDA or any third-party
package.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import nsmallest
from itertools import product
from math import log2, prod
from typing import Any, Final

from kgen.config import NAMED_AXES, WGMMA_M, GemmConfig
from kgen.device import Device
from kgen.problem import GemmProblem, ceil_div, round_up
from kgen.validity import why_invalid

#: Every value that a configuration of the space may take; the keys are GemmConfig's fields, in
#: order. A new kernel ability is switched on here and nowhere else.
AXES: Final[dict[str, tuple[Any, ...]]] = {
    "block_m": (16, 32, 64, 128, 192, 256),
    "block_n": (
        *(16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 136),
        *(144, 152, 160, 168, 176, 184, 192, 200, 208, 216, 224, 232, 240, 248, 256),
    ),
    "num_stages": (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16),
    "num_math_warpgroups": (1, 2, 3),
    "num_accumulators": (1, 2),
    "cluster_m": (1, 2),
    "cluster_n": (1, 2),
    "split_k": (1, 2, 4, 8),
    "b_eviction": ("evict_normal", "evict_first"),
    "d_staging": ("own", "direct"),
    "raster_along": ("m", "n"),
    "raster_group": (4, 8, 16),
    # "nk" was measured to gain nothing (M=512, 4096x7168 on an H200) and costs a build per N and K.
    "baked_dims": ("none",),
    "sass_pass": ("none", "interleave"),
}
#: Axes whose value decides nothing about validity once the other axes are settled.
FREE_AXES: Final = (
    *("num_stages", "b_eviction", "raster_along", "raster_group", "baked_dims", "sass_pass"),
)
#: Blocks of rows that read the same B: from here on it is worth keeping. On an H200 "evict_first"
#: brought up to 11 % where one block does, -3 to 5 % for two to four, and cost 2 to 5 % beyond.
MAX_BLOCKS_EVICT_FIRST: Final = 4
#: Pipeline depths tried, as shares of the deepest that fits: memory left over is worth nothing,
#: but a shallower ring asks for less at once (TileOPs: a fifth stage cost 5 % at block_n=192).
DEPTH_SHARES: Final = (1.0, 0.75, 0.5)
#: More CTAs that share operands strand SMs: 30 clusters of 4 fit an H200, 120 of 132 SMs.
MAX_MULTICAST: Final = 2
#: With more tiles than this many waves, splitting K can only add work.
MAX_SPLIT_WAVES: Final = 2
#: Row counts of a tile by whole 64-row WGMMAs, and how far above M a tile may reach.
WHOLE_BLOCK_MS: Final = (64, 128, 192, 256)

#: How far apart two values of an axis are: (scale, whether to compare logarithms).
_ORDERED: Final = {
    "block_m": (1.0, True),
    "block_n": (1 / 32, False),
    "num_stages": (1 / 8, False),
    "num_math_warpgroups": (1.0, False),
    "num_accumulators": (1.0, False),
    "cluster_m": (1.0, True),
    "cluster_n": (1.0, True),
    "split_k": (1.0, True),
    "raster_group": (1 / 8, True),
}
#: Axes that multiply the points at a depth of the ring, the finishes apart.
_FREE_AT_A_DEPTH: Final = ("b_eviction", "raster_along", "raster_group")
#: How far apart two different names are; each named axis has two.
_NAMED_STEP: Final = 0.25


def valid_configs(
    problem: GemmProblem, device: Device, sass_passes: tuple[str, ...] = ("none",)
) -> tuple[GemmConfig, ...]:
    """Every configuration worth a trial, always in the same order. Cached.

    `sass_passes` asks for the pass axis, which only an older ptxas needs.
    """
    return _walk(problem, device, sass_passes)[0]


def count_invalid(
    problem: GemmProblem, device: Device, sass_passes: tuple[str, ...] = ("none",)
) -> Counter[str]:
    """Points of the axes' product that are left out, by the first rule that forbids them.

    Together with the valid ones they add up to `num_points`.
    """
    return Counter(_walk(problem, device, sass_passes)[1])


def num_points(sass_passes: tuple[str, ...] = ("none",)) -> int:
    """Points of the axes' product, valid or not."""
    return prod(len(values) for values in (AXES | {"sass_pass": sass_passes}).values())


def leading_configs(problem: GemmProblem, device: Device) -> list[list[GemmConfig]]:
    """For each valid tile, depth of its ring and eviction of B, its orders over the grid.

    Enough to name a default: the rest of `valid_configs` are twins of these.
    """
    found = []
    for tile in _tiles(_endless(problem), device)[0]:
        if _why_not_for(problem, tile.config, device):
            continue
        walks = _raster_walks(problem, tile.config, device)
        for depth in _depths(problem, tile, device):
            for eviction in _evictions(problem, tile.config):
                plain = _with(tile.config, num_stages=depth, b_eviction=eviction)
                found.append([_with(plain, **walk) for walk in walks])
    return found


def distance(a: GemmConfig, b: GemmConfig) -> float:
    """How far apart two configurations are: 0 for equal ones, about 1 for the next tile height."""
    return _distance(coordinates(a), coordinates(b))


def nearest(config: GemmConfig, candidates: Iterable[GemmConfig]) -> GemmConfig | None:
    """The candidate closest to `config`, the first of several; None without candidates."""
    found = neighbours(config, candidates, 1)
    return found[0] if found else None


def neighbours(
    config: GemmConfig, candidates: Iterable[GemmConfig], count: int
) -> list[GemmConfig]:
    """The `count` candidates closest to `config`, closest first, ties in the order given."""
    here = coordinates(config)
    return nsmallest(count, candidates, key=lambda other: _distance(here, coordinates(other)))


@lru_cache(maxsize=1 << 17)
def coordinates(config: GemmConfig) -> tuple[float, ...]:
    """A configuration as a point: distances are sums of absolute differences."""
    point = []
    for name, (scale, logarithmic) in _ORDERED.items():
        value = getattr(config, name)
        point.append(scale * (log2(value) if logarithmic else value))
    for name, values in NAMED_AXES.items():
        point.append(_NAMED_STEP * values.index(getattr(config, name)))
    return tuple(point)


def _distance(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    return sum([abs(x - y) for x, y in zip(a, b, strict=True)])


@dataclass(frozen=True)
class _Tile:
    """A kernel that fits the device, by its shallowest ring, and all depths that fit."""

    config: GemmConfig
    depths: tuple[int, ...]


@lru_cache(maxsize=16)
def _walk(
    problem: GemmProblem, device: Device, sass_passes: tuple[str, ...]
) -> tuple[tuple[GemmConfig, ...], Counter[str]]:
    tiles, left_out = _tiles(_endless(problem), device)
    finishes = list(product(AXES["baked_dims"], sass_passes))
    points_per_depth = len(finishes) * prod(len(AXES[name]) for name in _FREE_AT_A_DEPTH)
    left_out = Counter({r: points * len(finishes) for r, points in left_out.items()})
    configs: list[GemmConfig] = []
    for tile in tiles:
        points = points_per_depth * len(tile.depths)
        rule = _why_not_for(problem, tile.config, device)
        if rule:
            left_out[rule] += points
            continue
        depths = _depths(problem, tile, device)
        walks = _raster_walks(problem, tile.config, device)
        evictions = _evictions(problem, tile.config)
        left_out["redundant_num_stages"] += points - points_per_depth * len(depths)
        points = points_per_depth * len(depths)
        kept = points * len(evictions) // len(AXES["b_eviction"])
        left_out["redundant_b_eviction"] += points - kept
        found = [
            _with(
                tile.config,
                num_stages=depth,
                b_eviction=eviction,
                **walk,
                baked_dims=baked,
                sass_pass=sass_pass,
            )
            for depth in depths
            for eviction in evictions
            for walk in walks
            for baked, sass_pass in finishes
        ]
        left_out["redundant_raster"] += kept - len(found)
        configs += found
    return tuple(configs), +left_out


def _endless(problem: GemmProblem) -> GemmProblem:
    """A problem of the same class and without end, whose sizes forbid nothing."""
    return replace(problem, m=2**29, n=2**29, k=2**29, groups=1)


@lru_cache(maxsize=16)
def _tiles(endless: GemmProblem, device: Device) -> tuple[tuple[_Tile, ...], Counter[str]]:
    """Kernels for a problem whose sizes forbid nothing, and what rules forbid."""
    names = [name for name in AXES if name not in FREE_AXES]
    points = prod(len(AXES[name]) for name in _FREE_AT_A_DEPTH)
    left_out: Counter[str] = Counter()
    tiles: list[_Tile] = []
    for values in product(*(AXES[name] for name in names)):
        config = GemmConfig(**dict(zip(names, values, strict=True)))
        fitting: list[int] = []
        for depth in AXES["num_stages"]:
            config = _with(config, num_stages=depth)
            invalid = why_invalid(endless, config, device)
            if invalid:  # and so is every deeper ring
                deeper = len(AXES["num_stages"]) - len(fitting)
                left_out[invalid.rule] += deeper * points
                break
            fitting.append(depth)
        if fitting:
            tiles.append(_Tile(_with(config, num_stages=fitting[0]), tuple(fitting)))
    return tuple(tiles), left_out


def _why_not_for(p: GemmProblem, c: GemmConfig, device: Device) -> str:
    """The rule that leaves a kernel out for this problem, or nothing."""
    if c.block_m < WGMMA_M and p.m > c.block_m:
        return "redundant_block_m"  # each block costs a full 64-row WGMMA: one block, or 64 rows
    if c.block_m > WGMMA_M and c.block_m > _tallest(p.m):
        return "redundant_block_m"
    if c.block_n > max(AXES["block_n"][0], round_up(p.n, 8)):
        return "redundant_block_n"
    if c.cluster_m * c.cluster_n > MAX_MULTICAST:
        return "redundant_cluster"
    if c.split_k > 1 and _num_tiles(p, c) > MAX_SPLIT_WAVES * _num_sms(p, device):
        return "redundant_split_k"
    invalid = why_invalid(p, c, device)
    return invalid.rule if invalid else ""


def _tallest(m: int) -> int:
    """One step above the least whole tile that covers M; below half a WGMMA no step."""
    if m <= WGMMA_M // 2:
        return WGMMA_M
    above = [rows for rows in WHOLE_BLOCK_MS if rows >= m]
    return above[1] if len(above) > 1 else WHOLE_BLOCK_MS[-1]


def _num_sms(p: GemmProblem, device: Device) -> int:
    return min(p.num_sms or device.num_sms, device.num_sms)


def _num_tiles(p: GemmProblem, c: GemmConfig) -> int:
    return p.groups * ceil_div(p.m, c.block_m) * ceil_div(p.n, c.block_n)


def _depths(p: GemmProblem, tile: _Tile, device: Device) -> list[int]:
    """Deepest first. A ring deeper than all K blocks that a CTA ever loads is never full."""
    split_k = tile.config.split_k
    rounds = ceil_div(_num_tiles(p, tile.config) * split_k, _num_sms(p, device))
    blocks = ceil_div(p.num_k_blocks, split_k) * rounds
    useful = [depth for depth in tile.depths if depth <= blocks] or [tile.depths[0]]
    depths = {max(useful[0], int(share * useful[-1])) for share in DEPTH_SHARES}
    return sorted(depths & set(useful), reverse=True)


def _evictions(p: GemmProblem, c: GemmConfig) -> tuple[str, ...]:
    """Policies worth a trial, the likelier first."""
    blocks = ceil_div(p.m, c.block_m * c.cluster_m)
    if blocks == 1:
        return ("evict_first",)
    both: tuple[str, ...] = AXES["b_eviction"]
    return both if blocks <= MAX_BLOCKS_EVICT_FIRST else ("evict_normal",)


def _raster_walks(p: GemmProblem, c: GemmConfig, device: Device) -> list[dict[str, Any]]:
    """Distinct orders of the tiles. Where one wave holds them all, the order decides nothing."""
    blocks = {
        "m": ceil_div(p.m, c.block_m * c.cluster_m),
        "n": ceil_div(p.n, c.block_n * c.cluster_n),
    }
    walks = []
    for along in AXES["raster_along"]:
        for group in AXES["raster_group"]:
            walks.append({"raster_along": along, "raster_group": group})
            if group >= blocks[along]:
                break  # a wider strip is the same strip
    one_wave = p.groups * prod(blocks.values()) * c.cluster_size <= _num_sms(p, device)
    return walks[:1] if one_wave or min(blocks.values()) == 1 else walks


def _with(config: GemmConfig, **changes: Any) -> GemmConfig:
    return GemmConfig(**{**config.__dict__, **changes})
