"""What a kernel's work costs: `Work` (counts and device facts) to `Times`, by the constants `Fit`.

Takes plain numbers, gives microseconds with a cold L2. `kgen.heuristic` counts the work of a
configuration; here stands all that is physics and measurement. Only + - * / ** and abs are used,
so that `Work` may as well hold arrays: `tools/fit_heuristic.py` fits `Fit` with the very
arithmetic that ranks. Must not import anything but the standard library.

    launch + fill + soft maximum of (rounds * (K blocks * max(math, feed) + epilogue),
                                     device memory + one epilogue)

math is the slower of the tensor cores and of one warpgroup's chain (wait, WGMMA, promotion); feed
is the slowest of the TMA thread, the L2 share of the CTA, rows past the end of A, and the ring's
depth against memory latency. Two that are equally slow delay each other: the maxima are soft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

#: Bytes of a K block's row, and rows of a WGMMA. Of wider types a K block has fewer columns and the
#: tensor cores' rate is as much lower: a K block takes the same time.
ROW_BYTES: Final = 128
WGMMA_ROWS: Final = 64
#: Times of instructions are stated at this clock (of the device facts that they were fitted with).
CLOCK_MHZ: Final = 1755.0
#: A launch of this length feels half of what power management takes.
POWER_US: Final = 100.0
#: Exponents of soft maxima that were not worth fitting.
FLOOR_SOFTNESS: Final = 3.0
FEED_SOFTNESS: Final = 4.0


class Work(NamedTuple):
    """What a launch has to do, whatever it costs. Floats, or arrays of one length.

    rounds, ctas, last_ctas   tiles of the busiest CTA; CTAs at once, and in the last round
    k_blocks                  of one CTA and tile
    stack                     CTAs that share an SM, at least 1
    waves, warpgroups, two_accumulators, block_m, block_n, stages, split_k: the configuration
    multicast, clustered      1 where CTAs share loads; where they form clusters; else 0
    scale_steps               runs of columns whose scale block is chosen at run time; 1: none
    rows_past_end             rows of all CTAs' A boxes beyond M
    box_rows                  weight rows of one TMA box
    load_rows                 rows of A and B that a CTA loads per K block
    ring_rows                 rows of all CTAs' rings
    min_bytes, again_bytes    through device memory at least; and once more if not kept in L2
    evict_first               1 where L2 gives up B first, else 0
    b_again_bytes             of B, read by more blocks of rows than the first
    reuse_bytes               what passes through L2 between two uses of the latter
    d_bytes                   of one element
    fast_accum                1 where sums stay in the tensor cores over all of K; else 0
    vector                    1 where each element of a K block has a scale of its own; else 0
    """

    rounds: float
    ctas: float
    last_ctas: float
    k_blocks: float
    stack: float
    waves: float
    warpgroups: float
    two_accumulators: float
    block_m: float
    block_n: float
    stages: float
    split_k: float
    multicast: float
    clustered: float
    scale_steps: float
    rows_past_end: float
    box_rows: float
    load_rows: float
    ring_rows: float
    min_bytes: float
    again_bytes: float
    evict_first: float
    b_again_bytes: float
    reuse_bytes: float
    d_bytes: float
    num_sms: float
    clock_mhz: float
    sm_tflops: float
    dram_gbps: float
    l2_bytes: float
    fast_accum: float = 0.0
    vector: float = 0.0


@dataclass(frozen=True, eq=False)  # compared and hashed as an object: it keys caches
class Fit:
    """The model's constants: microseconds at CLOCK_MHZ, bytes per clock, GB/s, or plain shares.

    All but those marked are fitted by tools/fit_heuristic.py, whose priors name the physics that
    each comes from.
    """

    #: Measured: an empty kernel.
    launch_us: float = 0.65
    #: Barriers, tensor maps, the first bytes from memory, the last store.
    fill_us: float = 1.537
    #: Start and end of a cluster; of one that adds partial sums; set-up per stage of the ring.
    cluster_us: float = 0.1915
    split_us: float = 0.1916
    stage_us: float = 0.0392
    #: Tensor cores against the device's measured rate, which is that of long runs.
    tensor_boost: float = 1.05
    #: A K block's WGMMAs take at least this much, however narrow.
    wgmma_floor_us: float = 0.06724
    #: A warpgroup waits for its WGMMAs, then promotes: per 128 columns.
    wait_us: float = 0.03087
    promotion_us: float = 0.02493
    #: Choosing among scale blocks at run time: each step of columns, and at all.
    select_us: float = 0.001942
    selects_us: float = 0.009207
    #: Scales of rows and columns: what a warpgroup's multiplications take from the tensor cores,
    #: per 128 columns. Not fitted, no trial is recorded yet: loops without loads ran at 1214 TFLOPS
    #: with it where they ran at 1690 without (192x128, three warpgroups).
    vector_us: float = 0.06
    #: The wait that two accumulators share, and what a K block costs in barriers and scales.
    pair_wait_us: float = 0.0672
    block_us: float = 0.0258
    #: Exponents of the soft maxima: tensor cores and chain; math and feed; CTAs and memory.
    math_softness: float = 5.606
    loop_softness: float = 2.478
    memory_softness: float = 4.543
    #: A stage's way into the ring from L2, and what device memory adds to it.
    latency_us: float = 0.5572
    dram_latency_us: float = 0.2919
    #: CTAs that share loads wait for each other at every K block.
    multicast_block_us: float = 0.03242
    #: One K block costs the TMA thread this much.
    tma_block_us: float = 0.06052
    #: Rows past the end of A are no gift: all CTAs' such rows of one K block share a unit that
    #: takes this long a row.
    row_past_end_us: float = 5.163e-05
    #: L2 to SMs in bytes per clock: to one SM, and an SM's share when all of them load.
    l2_sm_bytes: float = 108.7
    l2_share_bytes: float = 80.87
    #: Share of L2 that keeps operands from one use to the next.
    l2_usable: float = 0.5331
    #: Share of the copy bandwidth that TMA boxes of many rows reach; rows of a box lost on top.
    dram_share: float = 0.9684
    box_rows_lost: float = 2.223
    #: Bandwidth that one SM can draw from memory.
    sm_gbps: float = 81.5
    #: Cold also means dirty: the first bytes, up to an L2 full, push others out to memory.
    dirty_share: float = 0.07401
    #: What B spares of that when it is given up first, and the share of B to be fetched again then.
    evict_first_spares: float = 0.7684
    evict_first_loses: float = 0.03588
    #: Requests in flight beyond need crowd each other: rings as a share of L2; CTAs in lockstep.
    ring_crowding: float = 0.07687
    multicast_crowding: float = 0.03223
    #: Per tile: drain the last WGMMA, write D to shared memory, start the stores.
    epilogue_us: float = 0.1275
    epilogue_us_per_column_byte: float = 0.001266
    #: Split K: drain and a trip over the cluster; the partials' way there; each CTA to wait for.
    reduce_us: float = 0.6252
    reduce_us_per_kb: float = 0.0353
    reduce_us_per_cta: float = 0.02597
    #: Busy tensor cores lose this share of their clock in long launches.
    power_share: float = 0.04432


FIT: Final = Fit()


@dataclass(frozen=True)
class Times:
    """The parts of a predicted time, microseconds. `math_us` and `feed_us` are per K block."""

    total_us: float
    fixed_us: float
    math_us: float
    feed_us: float
    epilogue_us: float
    main_us: float
    dram_us: float


def times(w: Work, fit: Fit = FIT) -> Times:
    """How long the work takes, and its parts."""
    tick = CLOCK_MHZ / w.clock_mhz
    tensor_us, chain_us = _math_us(w, fit, tick)
    math_us = _soft(fit.math_softness, chain_us, tensor_us)
    feed_us = _feed_us(w, fit)
    block_us = _soft(fit.loop_softness, math_us, feed_us)
    block_us = block_us + fit.multicast_block_us * tick * w.multicast
    epilogue_us = _epilogue_us(w, fit, tick)
    dram_us = _dram_us(w, fit)
    main_us = w.rounds * (w.k_blocks * block_us + epilogue_us)
    fixed_us = fit.launch_us + fit.fill_us + fit.stage_us * w.stages
    fixed_us = fixed_us + fit.cluster_us * w.clustered + fit.split_us * _is_split(w)
    total_us = fixed_us + _soft(fit.memory_softness, main_us, dram_us + epilogue_us)
    busy = tensor_us / block_us
    total_us = total_us * (1 + fit.power_share * busy * total_us / (total_us + POWER_US))
    return Times(total_us, fixed_us, math_us, feed_us, epilogue_us, main_us, dram_us)


def _math_us(w: Work, fit: Fit, tick: float) -> tuple[float, float]:
    """One K block: all warpgroups' share of the tensor cores, and one warpgroup's own chain."""
    flops = 2 * WGMMA_ROWS * w.block_n * ROW_BYTES
    rate = w.sm_tflops * fit.tensor_boost * 1e6
    wgmma_us = _soft(FLOOR_SOFTNESS, flops / rate, fit.wgmma_floor_us * tick)
    steps = w.scale_steps - 1
    select_us = tick * (fit.select_us * steps + fit.selects_us * (1 - 1 / w.scale_steps))
    select_us = select_us + tick * fit.vector_us * w.vector * w.block_n / 128
    promotion_us = tick * fit.promotion_us * w.block_n / 128 + select_us
    tensor_us = w.warpgroups * w.waves * (wgmma_us + select_us) * w.stack
    one_us = w.waves * (wgmma_us + promotion_us + tick * fit.wait_us)
    # The first of two blocks is promoted while the second's WGMMAs run.
    uncovered_us = _larger(0.0, promotion_us - wgmma_us)
    two_us = wgmma_us + (promotion_us + uncovered_us + tick * fit.pair_wait_us) / 2
    chain_us = one_us + w.two_accumulators * (two_us - one_us)
    # Where nothing is promoted, the next K block's WGMMAs are issued before this one's are done.
    chain_us = chain_us * (1 - w.fast_accum)
    return tensor_us, chain_us + tick * fit.block_us


def _feed_us(w: Work, fit: Fit) -> float:
    """One K block's way into shared memory, device memory apart."""
    share = fit.l2_share_bytes * w.num_sms / w.ctas
    l2_us = w.load_rows * ROW_BYTES / (_smaller(fit.l2_sm_bytes, share) * w.clock_mhz)
    loaded_bytes = w.ctas * w.rounds * w.k_blocks * w.load_rows * ROW_BYTES
    from_dram = _smaller(1.0, w.min_bytes / loaded_bytes)
    latency_us = fit.latency_us + fit.dram_latency_us * from_dram
    past_end_us = w.rows_past_end * fit.row_past_end_us
    steady_us = _larger(l2_us, _larger(fit.tma_block_us * w.stack, past_end_us))
    return _soft(FEED_SOFTNESS, steady_us, latency_us / (w.stages - 1))


def _epilogue_us(w: Work, fit: Fit, tick: float) -> float:
    columns = w.block_n * w.waves
    store_us = fit.epilogue_us + fit.epilogue_us_per_column_byte * columns * w.d_bytes
    reduce_us = (
        fit.reduce_us
        + fit.reduce_us_per_kb * w.block_m * w.block_n * 4 / 1e3
        + fit.reduce_us_per_cta * w.split_k
    )
    return tick * (store_us + _is_split(w) * (reduce_us - store_us))


def _is_split(w: Work) -> float:
    return _smaller(1.0, w.split_k - 1)


def _dram_us(w: Work, fit: Fit) -> float:
    """All bytes through device memory; the last round's CTAs may be too few to fill it."""
    moved_bytes = w.min_bytes + lost_bytes(w.again_bytes, w.reuse_bytes, w.l2_bytes, fit)
    dirty_share = fit.dirty_share * (1 - fit.evict_first_spares * w.evict_first)
    moved_bytes = moved_bytes + dirty_share * _smaller(moved_bytes, w.l2_bytes)
    moved_bytes = moved_bytes + fit.evict_first_loses * w.evict_first * w.b_again_bytes
    full_gbps = w.dram_gbps * fit.dram_share * w.box_rows / (w.box_rows + fit.box_rows_lost)
    last_share = w.last_ctas / (w.rounds * w.ctas)
    us_per_kb = (1 - last_share) / _drawn_gbps(w, fit, full_gbps, w.ctas)
    us_per_kb = us_per_kb + last_share / _drawn_gbps(w, fit, full_gbps, w.last_ctas)
    ring = w.ring_rows * ROW_BYTES / w.l2_bytes
    crowding = (1 + fit.ring_crowding * ring) * (1 + fit.multicast_crowding * w.multicast)
    return moved_bytes * us_per_kb * crowding / 1e3


def lost_bytes(again_bytes: float, reuse_bytes: float, l2_bytes: float, fit: Fit = FIT) -> float:
    """How much of what is asked for again L2 has lost by then."""
    crowd = (reuse_bytes / (fit.l2_usable * l2_bytes)) ** 4
    return again_bytes * crowd / (1 + crowd)


def _drawn_gbps(w: Work, fit: Fit, full_gbps: float, ctas: float) -> float:
    """Bandwidth that so many CTAs get: the memory's, or what their SMs can draw."""
    return 1 / _soft(4.0, 1 / full_gbps, 1 / (_smaller(ctas, w.num_sms) * fit.sm_gbps))


def _soft(exponent: float, a: float, b: float) -> float:
    """A maximum that is above both when they are close."""
    value: float = (a**exponent + b**exponent) ** (1 / exponent)
    return value


def _larger(a: float, b: float) -> float:
    """max() that takes arrays."""
    return (a + b + abs(a - b)) / 2


def _smaller(a: float, b: float) -> float:
    """min() that takes arrays."""
    return (a + b - abs(a - b)) / 2
