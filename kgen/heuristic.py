"""An analytic model of the kernel: how long a configuration takes, and the order that follows.

Takes a problem, a configuration and measured device facts (SMs, L2, bandwidth, clock, FP8 rate;
never the GPU's name), gives microseconds with a cold L2. It is meant to rank, and to be within
about a tenth of the truth where it was fitted. Here the work of a configuration is counted;
`kgen.model` says what it costs. Must not import torch, CUDA or any third-party package.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice
from math import exp, gcd, log
from typing import Final

from kgen.config import WGMMA_M, GemmConfig, num_accumulator_registers, resources
from kgen.device import Device
from kgen.errors import InvalidConfig
from kgen.model import FIT, Fit, Times, Work, lost_bytes, times
from kgen.problem import D_DTYPE_BYTES, SCALE_BLOCK, GemmProblem, ceil_div, round_up
from kgen.space import distance, leading_configs, valid_configs

#: Registers of an SM, and the step in which a thread's are given out.
SM_REGISTERS: Final = 65536
REGISTER_STEP: Final = 8
#: Shared memory that each CTA takes beside its own.
CTA_SMEM_BYTES: Final = 1024
#: Registers of a lone math warpgroup's threads beside its accumulators; more where scale blocks
#: are chosen at run time, and where loads are shared. What NVRTC 13.0 gave 833 kernels: the CTAs
#: that fit an SM come out right for 96 of 100.
THREAD_REGISTERS: Final = 18
SELECT_REGISTERS: Final = 8
MULTICAST_REGISTERS: Final = 16

#: How much slower a near twin of a seed is made to seem, and what is near: what did best when
#: recorded trials were replayed; see the figures that tools/fit_heuristic.py prints.
TWIN_PENALTY: Final = 0.02
TWIN_DISTANCE: Final = 0.6
#: Best ranked configurations that seeds are chosen from, for each seed; seeds chosen with care.
SEED_CHOICE: Final = 24
MAX_CHOSEN: Final = 64


def predict_us(problem: GemmProblem, config: GemmConfig, device: Device, fit: Fit = FIT) -> float:
    """Microseconds that a launch takes with a cold L2, for a valid configuration."""
    return explain(problem, config, device, fit).total_us


def explain(problem: GemmProblem, config: GemmConfig, device: Device, fit: Fit = FIT) -> Times:
    """The predicted time and its parts. `math_us` and `feed_us` are per K block of one CTA."""
    return times(work_of(problem, config, device), fit)


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
    found = explain(problem, config, device)
    return found.total_us, found.dram_us


@lru_cache(maxsize=4096)
def default_config(problem: GemmProblem, device: Device) -> GemmConfig:
    """The configuration to use where nothing was tuned: the first of `rank`. Cached.

    Raises InvalidConfig where the device fits none.
    """
    bests = _best_walks(problem, device)
    if not bests:
        raise InvalidConfig(f"{problem}: no configuration fits {device.name} ({device.arch})")
    return min(bests, key=lambda config: _order(problem, config, device))


def seeds(problem: GemmProblem, device: Device, count: int) -> list[GemmConfig]:
    """Up to `count` configurations to begin a search with: the default, then fast ones that differ.

    The top of a plain ranking is full of twins, and the model errs for all of them at once. Each
    choice makes what is like it seem slower by up to TWIN_PENALTY.
    """
    bests = _best_walks(problem, device)
    ranked = sorted(bests, key=lambda config: _order(problem, config, device))
    return diverse(ranked, [predict_us(problem, c, device) for c in ranked], count)


def diverse(
    ranked: Sequence[GemmConfig], times_us: Sequence[float], count: int
) -> list[GemmConfig]:
    """Up to `count` of `ranked`, fastest first as `times_us` has it, twins put off.

    With many wanted the later ones are in plain order.
    """
    wanted = min(count, MAX_CHOSEN)
    leading = zip(ranked, times_us, strict=True)
    costs = {c: log(us) for c, us in islice(leading, wanted * SEED_CHOICE)}
    found: list[GemmConfig] = []
    while costs and len(found) < wanted:
        chosen = min(costs, key=costs.__getitem__)
        del costs[chosen]
        found.append(chosen)
        for other in costs:
            costs[other] += TWIN_PENALTY * exp(-distance(chosen, other) / TWIN_DISTANCE)
    return list(dict.fromkeys([*found, *ranked]))[:count]


def _best_walks(problem: GemmProblem, device: Device) -> list[GemmConfig]:
    """For each tile and depth of the ring the order over the grid that asks least of memory.

    An order changes memory traffic alone, and dimensions that are constants nothing: the best of
    these is the best of all.
    """

    def lost(c: GemmConfig) -> float:
        return lost_bytes(*_reuse(problem, c), device.l2_bytes)

    return [min(walks, key=lost) for walks in leading_configs(problem, device)]


def work_of(p: GemmProblem, c: GemmConfig, device: Device) -> Work:
    """What a launch has to do."""
    sms = min(p.num_sms or device.num_sms, device.num_sms)
    m_clusters = p.groups * ceil_div(ceil_div(p.m, c.block_m), c.cluster_m)
    n_clusters = ceil_div(ceil_div(p.n, c.block_n), c.cluster_n)
    rounds, ctas, last_ctas = _rounds(p, c, device, m_clusters * n_clusters)
    again_bytes, reuse_bytes = _reuse(p, c)
    is_multicast = c.cluster_m * c.cluster_n > 1
    k_blocks = ceil_div(p.num_k_blocks, c.split_k)
    step = gcd(c.block_n, SCALE_BLOCK)
    ring_rows = min(c.num_stages, rounds * k_blocks) * (c.block_m + c.block_n) * ctas
    return Work(
        rounds=rounds,
        ctas=ctas,
        last_ctas=last_ctas,
        k_blocks=k_blocks,
        stack=ceil_div(ctas, sms),
        waves=ceil_div(c.block_m // c.num_math_warpgroups, WGMMA_M),
        warpgroups=c.num_math_warpgroups,
        two_accumulators=c.num_accumulators - 1,
        block_m=c.block_m,
        block_n=c.block_n,
        stages=c.num_stages,
        split_k=c.split_k,
        multicast=float(is_multicast),
        clustered=float(c.cluster_size > 1),
        scale_steps=c.block_n // step if p.recipe == "block" and step < SCALE_BLOCK else 1,
        rows_past_end=max(0, c.block_m - p.m) / c.cluster_n * ctas,
        box_rows=_box_rows(c.block_n, c.cluster_m),
        load_rows=c.block_m / c.cluster_n + c.block_n / c.cluster_m,
        ring_rows=ring_rows,
        min_bytes=p.min_bytes,
        again_bytes=again_bytes,
        evict_first=float(c.b_eviction == "evict_first"),
        b_again_bytes=(m_clusters - p.groups) * p.n * p.k * p.operand_bytes,
        reuse_bytes=reuse_bytes,
        d_bytes=D_DTYPE_BYTES[p.d_dtype],
        num_sms=device.num_sms,
        clock_mhz=device.sm_clock_mhz,
        sm_tflops=device.fp8_tflops / device.num_sms,
        dram_gbps=device.dram_gbps,
        l2_bytes=device.l2_bytes,
        fast_accum=float(not p.promotes),
        vector=float(p.recipe == "vector"),
    )


def _rounds(p: GemmProblem, c: GemmConfig, device: Device, tiles: int) -> tuple[int, int, int]:
    """Tiles of the busiest CTA, CTAs at once, and CTAs of the last round; `tiles` in clusters.

    Unlike a plain grid, one of clusters is as large as the driver says that it can be: small
    kernels share SMs.
    """
    size = c.cluster_size
    clusters = device.max_clusters(size)
    if size > 1 and c.num_math_warpgroups == 1:  # setmaxnreg takes all registers of an SM
        kind = (p.kind, p.d_dtype, p.recipe, p.bias, p.promotes)
        clusters *= _ctas_per_sm(c, kind, device.smem_per_block)
    if p.num_sms:
        clusters = max(1, min(clusters, p.num_sms // size))
    clusters = min(clusters, tiles)
    rounds = ceil_div(tiles, clusters)
    return rounds, clusters * size, (tiles - (rounds - 1) * clusters) * size


@lru_cache(maxsize=1 << 14)
def _ctas_per_sm(c: GemmConfig, kind: tuple[str, str, str, bool, bool], smem_per_block: int) -> int:
    """CTAs of a kernel with one math warpgroup that an SM holds at a time; an estimate.

    `kind`: the problem's kind, d_dtype, recipe, bias and promotes.
    """
    name, d_dtype, recipe, bias, promotes = kind
    r = resources(c, d_dtype, recipe, bias, kind=name)
    registers = num_accumulator_registers(c, r.num_waves, promotes) + THREAD_REGISTERS
    registers += SELECT_REGISTERS * (recipe == "block" and r.num_scale_positions > 1)
    registers += MULTICAST_REGISTERS * (c.cluster_m * c.cluster_n > 1)
    by_registers = SM_REGISTERS // (r.threads * round_up(registers, REGISTER_STEP))
    by_smem = (smem_per_block + CTA_SMEM_BYTES) // (r.smem_bytes + CTA_SMEM_BYTES)
    return max(1, min(by_registers, by_smem))


@lru_cache(maxsize=256)
def _box_rows(block_n: int, cluster_m: int) -> int:
    return resources(GemmConfig(block_n=block_n, cluster_m=cluster_m)).b_box[1]


def _reuse(p: GemmProblem, c: GemmConfig) -> tuple[float, float]:
    """Bytes that strips of tiles ask for again, and what passes through L2 in between.

    Each strip walks over all of the moving operand; with it go the strip's own rows and its D.
    """
    if c.raster_along == "m":
        rows, still, moving = c.block_m * c.cluster_m, p.m, p.n
    else:
        rows, still, moving = c.block_n * c.cluster_n, p.n, p.m
    along = ceil_div(still, rows)
    strip = min(c.raster_group, along)
    strip_rows = min(strip * rows, still)
    d_bytes = strip_rows * moving * D_DTYPE_BYTES[p.d_dtype]
    row_bytes = p.k * p.operand_bytes
    again = (
        p.groups * (ceil_div(along, strip) - 1) * moving * row_bytes
    )  # no group uses another's B
    return again, (moving + strip_rows) * row_bytes + d_bytes
