"""An analytic model of the kernel: how long a configuration takes, and the order that follows.

Takes a problem, a configuration and measured device facts (SMs, L2, bandwidth, clock, FP8 rate;
never the GPU's name), gives microseconds with a cold L2. It is meant to rank, and to be within
about a third of the truth; `Fit` holds every figure that is not physics, each with its source,
so that a later fit against recorded timings replaces one value. Must not import torch, CUDA or
any third-party package.

The time of a launch is that of its slowest resource, plus what nothing hides:

    launch + pipeline fill + max(rounds * (K blocks * max(math, feed) + epilogue),
                                 device memory + one epilogue) + last store

where math is tensor cores, promotion and their latency for one K block, and feed is the slowest
of the TMA thread, the L2 share of the CTA, and the ring's depth against memory latency. Two of
them that are equally slow delay each other, so their maximum is a soft one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from kgen.config import BLOCK_K, WGMMA_M, GemmConfig, grid_size, num_b_scales, resources
from kgen.device import Device
from kgen.errors import InvalidConfig
from kgen.problem import D_DTYPE_BYTES, GemmProblem, ceil_div
from kgen.space import leading_configs, valid_configs

#: (block_n, TFLOPS) points, ascending.
Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True, eq=False)  # compared and hashed as an object: it keys caches
class Fit:
    """The model's constants. Times in microseconds, clocks and bytes per SM.

    `ceilings`: main loops with promotion on one H200, operands fixed in shared memory, by
    (accumulators, math warpgroups) over block_n: the table of 2026-11-30. Only their ratio to
    that device's plain FP8 rate, `ceilings_rate`, is used.
    """

    ceilings_rate: float = 1702.0
    ceilings_sms: int = 132
    ceilings: tuple[tuple[tuple[int, int], Curve], ...] = (
        ((1, 1), ((64, 914), (96, 954), (112, 970), (128, 1019), (136, 1065), (200, 1224))),
        ((1, 2), ((64, 1357), (96, 1444), (112, 1483), (128, 1539), (136, 1385), (200, 1433))),
        # Nothing was measured above 128 here: the drop that two warpgroups show there.
        ((1, 3), ((64, 1424), (96, 1537), (112, 1616), (128, 1690), (136, 1520))),
        ((2, 1), ((96, 1308), (112, 1440), (128, 1434), (144, 1480))),
        ((2, 2), ((96, 1630), (112, 1650), (128, 1689))),
        ((2, 3), ((64, 1500), (96, 1622))),
    )
    #: A lone warpgroup also waits for barriers and scales, which no other one covers: what
    #: DeepGEMM's 16-column tiles take at N=576, where 36 CTAs leave memory idle (0.115-0.13 us).
    lone_warpgroup_us: float = 0.04
    #: Exponent of the soft maximum of math and feed: 1.12 times either when both are equal.
    contention: float = 6.0
    #: A second 64-row wave shares one barrier wait and one scale fetch with the first.
    second_wave: float = 0.97
    #: Extra select and multiply per scale block of B beyond the first. Guess: not measured.
    per_b_scale: float = 0.01
    #: Empty kernel 0.65; barriers, tensor maps and the first bytes from memory: what streaming
    #: times of 4 to 117 MB leave over at size zero (2.3 to 2.9 in all).
    launch_us: float = 0.65
    fill_us: float = 1.3
    last_store_us: float = 0.5
    #: Start and end of a cluster wait for its CTAs. Guess: not measured.
    cluster_us: float = 0.2
    #: Per tile: drain the last WGMMA, write D to shared memory, start the stores. From DeepGEMM
    #: at M=4096: what its time leaves over per tile of 128x128 at K=512, 1536 and 2048 (0.55-0.6).
    epilogue_us: float = 0.25
    epilogue_us_per_column_byte: float = 0.00137
    #: One K block costs the TMA thread this much: 16-row boxes of 7168x16384 stream at 0.15 us a
    #: box pair on 132 SMs; DeepGEMM's 16-column tiles at N=2112, M=64 take 0.13.
    tma_block_us: float = 0.14
    #: Rows past the end of A are no gift: all CTAs' such rows of one K block share a unit that
    #: takes this long a row. DeepGEMM v1 with 64-row tiles takes 0.32-0.43 us a K block at M=1
    #: and 16 against 0.15 at M=64, on 112 to 132 CTAs; on 36 CTAs there is no such loss.
    row_past_end_us: float = 4.5e-5
    #: Loaded latency of a stage: the ring must hold this much to stream.
    latency_us: float = 1.2
    #: L2 to SMs in bytes per clock: per SM, and for the whole of 132 (DeepGEMM's heuristic).
    l2_sm_bytes: float = 64.0
    l2_bytes_per_sm_share: float = 6154 / 132
    #: Share of L2 that holds operands for reuse; the rest is D, and copies in the far half. Guess.
    l2_usable: float = 0.5
    #: Bulk copies stream at 3.72 of 4.0 TB/s, DeepGEMM at 3.2-3.4 (7168x16384, M=64); boxes of
    #: `rows` weight rows reach rows / (rows + box_rows_lost) of that (32 rows: 3.0 TB/s).
    dram_share: float = 0.9
    box_rows_lost: float = 6.0
    #: Bandwidth that one SM can draw from memory. Guess: 60 SMs should fill an H200.
    sm_gbps: float = 65.0
    #: Split K: the last WGMMA drained and one trip over the cluster, then a tile of FP32 partials
    #: at the rate of remote shared memory. Guess: not measured.
    reduce_us: float = 0.8
    reduce_gbps: float = 70.0


FIT: Final = Fit()


@dataclass(frozen=True)
class Times:
    """The parts of a predicted time, microseconds; what `explain` shows."""

    total_us: float
    fixed_us: float
    rounds: int
    k_blocks: int
    math_us: float
    feed_us: float
    epilogue_us: float
    dram_us: float


def predict_us(problem: GemmProblem, config: GemmConfig, device: Device, fit: Fit = FIT) -> float:
    """Microseconds that a launch takes with a cold L2, for a valid configuration."""
    return explain(problem, config, device, fit).total_us


def explain(problem: GemmProblem, config: GemmConfig, device: Device, fit: Fit = FIT) -> Times:
    """The predicted time and its parts. `math_us` and `feed_us` are per K block of one CTA."""
    grid = _grid(problem, config, device)
    k_blocks = ceil_div(problem.num_k_blocks, config.split_k)
    math_us = _math_us(config, device, fit)
    feed_us = _feed_us(problem, config, device, fit, grid.ctas)
    epilogue_us = _epilogue_us(problem, config, fit)
    dram_us = _dram_us(problem, config, device, fit, grid)
    fixed_us = fit.launch_us + fit.fill_us + fit.last_store_us
    if config.cluster_size > 1:
        fixed_us += fit.cluster_us
    slower, faster = max(math_us, feed_us), min(math_us, feed_us)
    both_us = slower * (1 + (faster / slower) ** fit.contention) ** (1 / fit.contention)
    main_us = grid.rounds * (k_blocks * both_us + epilogue_us)
    total_us = fixed_us + max(main_us, dram_us + epilogue_us)
    return Times(total_us, fixed_us, grid.rounds, k_blocks, math_us, feed_us, epilogue_us, dram_us)


def rank(
    problem: GemmProblem, device: Device, configs: Iterable[GemmConfig] | None = None
) -> list[GemmConfig]:
    """Configurations (all valid ones by default) from fastest to slowest as predicted.

    Of equal predictions the one that asks less of device memory comes first, then the one listed
    first.
    """
    found = valid_configs(problem, device) if configs is None else configs
    return sorted(found, key=lambda config: _order(problem, config, device))


def _order(problem: GemmProblem, config: GemmConfig, device: Device) -> tuple[float, float]:
    times = explain(problem, config, device)
    return times.total_us, times.dram_us


@lru_cache(maxsize=4096)
def default_config(problem: GemmProblem, device: Device) -> GemmConfig:
    """The configuration to use where nothing was tuned: the first of `rank`. Cached.

    Raises InvalidConfig where the device fits none.
    """
    # A deeper ring is never predicted slower, dimensions that are no constants neither, and an
    # order over the grid changes memory traffic alone: the best of these is the best of all.
    bests = [
        min(walks, key=lambda config: _dram_bytes(problem, config, device, FIT))
        for walks in leading_configs(problem, device)
    ]
    if not bests:
        raise InvalidConfig(f"{problem}: no configuration fits {device.name} ({device.arch})")
    return min(bests, key=lambda config: _order(problem, config, device))


def _sms(problem: GemmProblem, device: Device) -> int:
    return min(problem.num_sms or device.num_sms, device.num_sms)


@dataclass(frozen=True)
class _Grid:
    """Tiles that the busiest CTA computes one after another; CTAs that run at once."""

    rounds: int
    ctas: int
    last_ctas: int


def _grid(p: GemmProblem, c: GemmConfig, device: Device) -> _Grid:
    ctas = grid_size(p, c, device)
    m_clusters = ceil_div(ceil_div(p.m, c.block_m), c.cluster_m)
    n_clusters = ceil_div(ceil_div(p.n, c.block_n), c.cluster_n)
    needed = m_clusters * n_clusters * c.cluster_size
    rounds = ceil_div(needed, ctas)
    return _Grid(rounds, ctas, needed - (rounds - 1) * ctas)


def _math_us(c: GemmConfig, device: Device, fit: Fit) -> float:
    """One K block of a CTA's math warpgroups: WGMMA, waiting for it, and promotion."""
    waves = ceil_div(c.block_m // c.num_math_warpgroups, WGMMA_M)
    curve = _curve_us(fit, c.num_accumulators, c.num_math_warpgroups)
    rate = (fit.ceilings_rate / fit.ceilings_sms) / (device.fp8_tflops / device.num_sms)
    us = _interpolate(curve, c.block_n) * rate
    if c.num_math_warpgroups == 1 and waves == 1:
        us += fit.lone_warpgroup_us
    us *= 1 + fit.per_b_scale * (num_b_scales(c.block_n) - 1)
    return us * (1 if waves == 1 else waves * fit.second_wave)


@lru_cache(maxsize=64)
def _curve_us(fit: Fit, accumulators: int, warpgroups: int) -> Curve:
    """Microseconds a K block over block_n, from the ceilings' TFLOPS."""
    ceilings = dict(fit.ceilings)[accumulators, warpgroups]
    flops = 2 * warpgroups * WGMMA_M * BLOCK_K
    return tuple((n, flops * n * fit.ceilings_sms / (rate * 1e6)) for n, rate in ceilings)


def _interpolate(curve: Curve, x: int) -> float:
    """Linear between the curve's points, and on beyond its ends."""
    i = min(max(1, bisect_left(curve, (x,))), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[i - 1], curve[i]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _feed_us(p: GemmProblem, c: GemmConfig, device: Device, fit: Fit, ctas: int) -> float:
    """One K block's way into shared memory, device memory apart."""
    rows = c.block_m / c.cluster_n + c.block_n / c.cluster_m
    per_clock = min(fit.l2_sm_bytes, fit.l2_bytes_per_sm_share * device.num_sms / ctas)
    l2_us = rows * BLOCK_K / (per_clock * device.sm_clock_mhz)
    rows_past_end = max(0, c.block_m - p.m) / c.cluster_n * ctas
    return max(
        l2_us,
        fit.tma_block_us,
        rows_past_end * fit.row_past_end_us,
        fit.latency_us / c.num_stages,
    )


def _epilogue_us(p: GemmProblem, c: GemmConfig, fit: Fit) -> float:
    columns = c.block_n * ceil_div(c.block_m // c.num_math_warpgroups, WGMMA_M)
    if c.split_k > 1:
        return fit.reduce_us + c.block_m * c.block_n * 4 / (fit.reduce_gbps * 1e3)
    return fit.epilogue_us + fit.epilogue_us_per_column_byte * columns * D_DTYPE_BYTES[p.d_dtype]


def _dram_us(p: GemmProblem, c: GemmConfig, device: Device, fit: Fit, grid: _Grid) -> float:
    """All bytes through device memory; the last round's CTAs may be too few to fill it."""
    rows = _b_box_rows(c.block_n, c.cluster_m)
    full_gbps = device.dram_gbps * fit.dram_share * rows / (rows + fit.box_rows_lost)
    last_share = grid.last_ctas / (grid.last_ctas + (grid.rounds - 1) * grid.ctas)
    us_per_kb = (1 - last_share) / min(full_gbps, grid.ctas * fit.sm_gbps)
    us_per_kb += last_share / min(full_gbps, grid.last_ctas * fit.sm_gbps)
    return _dram_bytes(p, c, device, fit) * us_per_kb / 1e3


@lru_cache(maxsize=256)
def _b_box_rows(block_n: int, cluster_m: int) -> int:
    return resources(GemmConfig(block_n=block_n, cluster_m=cluster_m)).b_box[1]


def _dram_bytes(p: GemmProblem, c: GemmConfig, device: Device, fit: Fit) -> float:
    """Operands, read again where L2 can not keep them, scales and D."""
    a_bytes, b_bytes = p.m * p.k, p.n * p.k
    usable = fit.l2_usable * device.l2_bytes
    if a_bytes + b_bytes <= usable:
        return p.min_bytes
    blocks = {"m": ceil_div(p.m, c.block_m), "n": ceil_div(p.n, c.block_n)}
    along = blocks[c.raster_along]
    if c.raster_along == "m":
        strip, rows, still, moving = c.raster_group * c.cluster_m, c.block_m, a_bytes, b_bytes
    else:
        strip, rows, still, moving = c.raster_group * c.cluster_n, c.block_n, b_bytes, a_bytes
    strip = min(strip, along)
    again = 0
    if moving > usable:  # each strip walks over all of the moving operand
        again += moving * (ceil_div(along, strip) - 1)
    if strip * rows * p.k > usable:  # a strip does not even keep its own operand
        tiles = strip * blocks["m"] * blocks["n"] // along
        again += still * (ceil_div(tiles, _sms(p, device)) - 1)
    return p.min_bytes + again
