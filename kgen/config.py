"""How a problem is computed: `GemmConfig` (free choices), `Resources` (derived), `why_invalid`.

Takes a problem, a configuration and a device; gives plain values. Every rule about what the
kernel can do stands here once; space, heuristic, dispatch and tests call it, and the templates
repeat it only as static_assert. Must not import torch, CUDA or any third-party package.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import gcd
from typing import Any, Final

from kgen.device import Device
from kgen.errors import UsageError
from kgen.problem import (
    D_DTYPE_BYTES,
    GROUP_ALIGNMENT,
    GROUPED_KINDS,
    SCALE_BLOCK,
    GemmProblem,
    ceil_div,
    round_up,
)

#: K columns of one pipeline stage: one scale block, one 128-byte swizzle span of E4M3.
BLOCK_K: Final = 128
BLOCK_MS: Final = (16, 32, 64, 128, 192, 256)
WGMMA_M: Final = 64
WGMMA_MAX_N: Final = 256
WARPGROUP_THREADS: Final = 128
#: Largest cluster that every Hopper part must schedule (CUDA C++ guide: portable cluster size).
MAX_CLUSTER: Final = 8
MAX_STAGES: Final = 16
#: A thread takes some 50 ns to start a copy. Small stages need one for A and one for B to fill the
#: ring in time (1 to 9 % on an H200); with this many rows of A and B in a stage one does as well.
MIN_ROWS_ONE_LOAD_WARP: Final = 256
#: Registers per thread after setmaxnreg, by number of math warpgroups: (producer, math).
#: 64K registers a CTA; 384 threads launch with 168 each, 512 with 128 each. With one math
#: warpgroup each thread has 255 at launch, the most an instruction can name: no setmaxnreg, and
#: ptxas is seen to spill in places above 248.
REGISTER_SPLIT: Final = {1: (248, 248), 2: (40, 232), 3: (32, 160)}
#: Registers of the math loop beside the accumulators (scales, addresses, loop state), by number of
#: math warpgroups, and what a second 64-row wave, a cluster and an FP32 output add. Fitted to what
#: NVRTC and nvcc 13.0 compile without spills; the few tiles that spill all the same fail to build.
MATH_OVERHEAD_REGISTERS: Final = {1: 24, 2: 24, 3: 22}
#: More with three math warpgroups where tiles straddle scale blocks of B: 192x136 spilled.
SELECT_OVERHEAD_REGISTERS: Final = {1: 0, 2: 0, 3: 4}
WAVE_OVERHEAD_REGISTERS: Final = 7
CLUSTER_OVERHEAD_REGISTERS: Final = 9
FP32_OVERHEAD_REGISTERS: Final = 9
#: A contiguous group may start at any row, and TMA reads from multiples of 16 bytes only, else the
#: kernel dies of an illegal instruction: scales of A are loaded from a multiple of 4 rows on.
SFA_SLACK_ROWS: Final = 4
#: TMA writes to multiples of this in shared memory (PTX ISA, cp.async.bulk.tensor).
SMEM_ALIGN_BYTES: Final = 128
#: Tiles that a grouped kernel's scheduling warp may be ahead, and bytes of one and its barriers.
QUEUE_SLOTS: Final = 4
QUEUE_SLOT_BYTES: Final = 32
B_EVICTIONS: Final = ("evict_normal", "evict_first")
#: What scales and bias after the loop add, without and with a cluster: a bias under recipe "block",
#: and recipe "row" where K blocks are added up in FP32. The other loops leave room for it.
BIAS_OVERHEAD_REGISTERS: Final = (9, 16)
ROW_OVERHEAD_REGISTERS: Final = (0, 10)
#: What both together add where sums stay in the tensor cores, which lets tiles be wider.
ROW_AND_BIAS_REGISTERS: Final = 10
#: Registers that one WGMMA names beside its sums, as ptxas counts them; there must be as many at
#: launch, whatever setmaxnreg gives the math warpgroups later.
WGMMA_OVERHEAD_REGISTERS: Final = 26
LAUNCH_REGISTERS: Final = {1: 255, 2: 168, 3: 128}
D_STAGINGS: Final = ("own", "ring")
RASTER_ALONG: Final = ("m", "n")
BAKED_DIMS: Final = ("none", "nk")
SASS_PASSES: Final = ("none", "interleave")
NAMED_AXES: Final = {
    "b_eviction": B_EVICTIONS,
    "d_staging": D_STAGINGS,
    "raster_along": RASTER_ALONG,
    "baked_dims": BAKED_DIMS,
    "sass_pass": SASS_PASSES,
}


@dataclass(frozen=True, order=True)
class GemmConfig:
    """The free choices of one kernel. Everything else follows from them.

    block_m, block_n       rows and columns of D a CTA computes at a time
    num_stages             depth of the shared-memory pipeline, in K blocks of 128
    num_math_warpgroups    warpgroups that issue WGMMA; they share block_m
    num_accumulators       partial accumulators a warpgroup keeps: 2 overlap promotion with WGMMA
    cluster_m, cluster_n   CTAs of a cluster along M (share B by multicast) and N (share A)
    split_k                CTAs of a cluster that share one tile's K range and add up in order
    b_eviction             what L2 does with B, "evict_first" or "evict_normal": B that is read once
                           need not displace others, which a cold L2 would have to write back
    d_staging              where D waits for its store: memory of its "own", or in the "ring" over A
                           of the tile's last K blocks, which leaves room for another stage
    raster_along           dimension walked first within a strip of tiles
    raster_group           blocks of that dimension in a strip
    baked_dims             "nk": N and K are constants of the source; "none": arguments
    sass_pass              "interleave": yield and reuse bits of promotion FFMAs (ptxas <= 12.8)
    """

    block_m: int = 128
    block_n: int = 128
    num_stages: int = 4
    num_math_warpgroups: int = 2
    num_accumulators: int = 1
    cluster_m: int = 1
    cluster_n: int = 1
    split_k: int = 1
    b_eviction: str = "evict_normal"
    d_staging: str = "own"
    raster_along: str = "m"
    raster_group: int = 8
    baked_dims: str = "none"
    sass_pass: str = "none"

    @property
    def cluster_size(self) -> int:
        """CTAs of one cluster."""
        return self.cluster_m * self.cluster_n * self.split_k

    def to_dict(self) -> dict[str, Any]:
        """Field name to value, in the order of the fields."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GemmConfig:
        """The configuration with these fields; UsageError for an unknown name or a wrong type."""
        kinds = {f.name: str(f.type) for f in fields(cls)}
        for name, value in values.items():
            if name not in kinds:
                raise UsageError(
                    f"{name}={value!r}: no such axis; expected one of {', '.join(kinds)}"
                )
            if type(value).__name__ != kinds[name]:
                raise UsageError(f"{name}={value!r}: expected a value of type {kinds[name]}")
        return cls(**values)

    def __str__(self) -> str:
        """A short name: the tile, then every other axis that is not at its default."""
        default = GemmConfig()
        rest = [
            f"{name}={value}"
            for name, value in self.to_dict().items()
            if name not in ("block_m", "block_n", "num_stages", "num_math_warpgroups")
            and value != getattr(default, name)
        ]
        head = f"{self.block_m}x{self.block_n} s{self.num_stages} w{self.num_math_warpgroups}"
        return " ".join([head, *rest])


@dataclass(frozen=True)
class Invalid:
    """Why a configuration can not be used: the rule's name, to be counted, and the reason."""

    rule: str
    reason: str


@dataclass(frozen=True)
class Resources:
    """What follows from a configuration: shared memory, threads, registers, boxes.

    Offsets and sizes in bytes from the start of dynamic shared memory; the template lays out the
    same regions in the same order: A stages, B stages, D, split-K partials, scales of A, scales
    of B, vectors of each math warpgroup, barriers, the queue of tiles (grouped kinds). Boxes are
    (inner, outer) in elements.

    The vectors are what the sums of a tile are finished with: scales of its rows and columns
    (recipe "row") and its part of the bias.
    """

    threads: int
    num_load_warps: int
    producer_registers: int
    math_registers: int
    rows_per_warpgroup: int
    num_waves: int
    num_b_scales: int
    num_scale_positions: int
    b_offset: int
    d_offset: int
    partial_offset: int
    sfa_offset: int
    sfb_offset: int
    vector_offset: int
    vector_bytes: int
    barrier_offset: int
    queue_offset: int
    smem_bytes: int
    a_box: tuple[int, int]
    b_box: tuple[int, int]
    d_box: tuple[int, int]
    d_swizzle_bytes: int
    sfa_box: tuple[int, int]
    sfa_stage_bytes: int


def num_b_scales(block_n: int) -> int:
    """Most scale blocks of B that block_n columns touch, at any tile of the grid."""
    step = gcd(block_n, SCALE_BLOCK)
    return ceil_div(SCALE_BLOCK - step + block_n, SCALE_BLOCK)


def d_store_box(block_n: int, d_bytes: int) -> tuple[int, int]:
    """(columns, swizzle bytes) of one TMA store box, so that writing D to shared memory is free
    of bank conflicts: the widest swizzle that divides the row, else an odd number of 8-column
    groups in plain rows, which strides over all banks by itself.
    """
    row_bytes = block_n * d_bytes
    if row_bytes % 128 == 0:
        return 128 // d_bytes, 128
    if row_bytes % 64 == 0:
        return 64 // d_bytes, 64
    groups = block_n // 8
    odd = groups // (groups & -groups)
    if odd == 1:
        return 32 // d_bytes, 32
    return odd * 8, 0


def resources(
    config: GemmConfig,
    d_dtype: str = "bf16",
    recipe: str = "block",
    bias: bool = False,
    *,
    kind: str = "dense",
) -> Resources:
    """Everything derived from a configuration and these fields of the problem."""
    c = config
    d_bytes = D_DTYPE_BYTES[d_dtype]
    producer, math = REGISTER_SPLIT[c.num_math_warpgroups]
    rows = c.block_m // c.num_math_warpgroups
    d_rows = min(c.block_m, WGMMA_M)
    d_cols, d_swizzle = d_store_box(c.block_n, d_bytes)
    b_rows = c.block_n // c.cluster_m if c.block_n % (8 * c.cluster_m) == 0 else c.block_n
    # WGMMA reads 64 rows whatever block_m is: past a short last A stage there must be memory.
    b_offset = ((c.num_stages - 1) * c.block_m + max(c.block_m, WGMMA_M)) * BLOCK_K
    d_offset = b_offset + c.num_stages * c.block_n * BLOCK_K
    has_own_d = c.split_k == 1 and c.d_staging == "own"
    d_bytes_staged = c.block_m * c.block_n * d_bytes if has_own_d else 0
    partial_offset = d_offset + round_up(d_bytes_staged, 1024)
    owned_groups = ceil_div(c.block_n // 8, c.split_k)
    partial_bytes = c.split_k * owned_groups * c.block_m * 32 if c.split_k > 1 else 0
    sfa_offset = partial_offset + round_up(partial_bytes, 128)
    slack_rows = SFA_SLACK_ROWS if kind == "contiguous" else 0
    sfa_rows = max(c.block_m, WGMMA_M) + slack_rows
    sfa_stage_bytes = round_up(sfa_rows * 4, SMEM_ALIGN_BYTES) if recipe == "block" else 0
    sfb_offset = sfa_offset + c.num_stages * sfa_stage_bytes
    vector_offset = sfb_offset + (c.num_stages * 16 if recipe == "block" else 0)
    num_waves = ceil_div(rows, WGMMA_M)
    scales_bytes = (num_waves * WGMMA_M + c.block_n) * 4 if recipe == "row" else 0
    vector_bytes = scales_bytes + c.block_n * d_bytes * bias
    barrier_offset = vector_offset + c.num_math_warpgroups * vector_bytes
    queue_offset = barrier_offset + (c.num_stages + (c.split_k > 1)) * 16
    queue_bytes = QUEUE_SLOTS * QUEUE_SLOT_BYTES if kind in GROUPED_KINDS else 0
    return Resources(
        threads=WARPGROUP_THREADS * (1 + c.num_math_warpgroups),
        num_load_warps=1 if c.block_m + c.block_n >= MIN_ROWS_ONE_LOAD_WARP else 2,
        producer_registers=producer,
        math_registers=math,
        rows_per_warpgroup=rows,
        num_waves=num_waves,
        num_b_scales=num_b_scales(c.block_n),
        num_scale_positions=SCALE_BLOCK // gcd(c.block_n, SCALE_BLOCK),
        b_offset=b_offset,
        d_offset=d_offset,
        partial_offset=partial_offset,
        sfa_offset=sfa_offset,
        sfb_offset=sfb_offset,
        vector_offset=vector_offset,
        vector_bytes=vector_bytes,
        barrier_offset=barrier_offset,
        queue_offset=queue_offset,
        smem_bytes=queue_offset + queue_bytes,
        a_box=(BLOCK_K, c.block_m // c.cluster_n),
        b_box=(BLOCK_K, b_rows),
        d_box=(d_cols, d_rows),
        d_swizzle_bytes=d_swizzle,
        sfa_box=(c.block_m + slack_rows, 1),
        sfa_stage_bytes=sfa_stage_bytes,
    )


def num_accumulator_registers(config: GemmConfig, num_waves: int, fast_accum: bool) -> int:
    """Registers of a math thread that hold sums: in FP32, and partial ones of the tensor cores."""
    partials = 0 if fast_accum else config.num_accumulators
    return config.block_n // 2 * (num_waves + partials)


def grid_size(problem: GemmProblem, config: GemmConfig, device: Device) -> int:
    """CTAs to launch, in whole clusters: as many as the SM budget holds, at most one a tile."""
    m_blocks = problem.groups * ceil_div(problem.m, config.block_m)
    return grid_of(m_blocks, problem, config, device)


def grid_of(m_blocks: int, problem: GemmProblem, config: GemmConfig, device: Device) -> int:
    """As `grid_size`, for this many blocks along M, those of all groups together."""
    clusters = device.max_clusters(config.cluster_size)
    if problem.num_sms:
        clusters = max(1, min(clusters, problem.num_sms // config.cluster_size))
    m_clusters = ceil_div(m_blocks, config.cluster_m)
    n_clusters = ceil_div(ceil_div(problem.n, config.block_n), config.cluster_n)
    return min(clusters, m_clusters * n_clusters) * config.cluster_size


def why_invalid(problem: GemmProblem, config: GemmConfig, device: Device) -> Invalid | None:
    """The first rule that forbids this configuration, or None when it is valid."""
    return _why_not_a_kernel(problem, config, device) or _why_not_for(problem, config, device)


def _why_not_a_kernel(p: GemmProblem, c: GemmConfig, device: Device) -> Invalid | None:
    """Rules of the kernel itself, whatever the problem's sizes."""
    if c.block_m not in BLOCK_MS:
        return Invalid("block_m", f"block_m={c.block_m}: expected one of {BLOCK_MS}")
    if c.block_n % 8 or not 16 <= c.block_n <= WGMMA_MAX_N:
        return Invalid("block_n", f"block_n={c.block_n}: expected a multiple of 8 from 16 to 256")
    if not 2 <= c.num_stages <= MAX_STAGES:
        return Invalid("num_stages", f"num_stages={c.num_stages}: expected 2 to {MAX_STAGES}")
    if c.num_math_warpgroups not in REGISTER_SPLIT:
        return Invalid(
            "num_math_warpgroups", f"num_math_warpgroups={c.num_math_warpgroups}: expected 1 to 3"
        )
    if c.num_accumulators not in (1, 2):
        return Invalid(
            "num_accumulators", f"num_accumulators={c.num_accumulators}: expected 1 or 2"
        )
    if c.raster_group < 1:
        return Invalid("raster_group", f"raster_group={c.raster_group}: expected at least 1")
    for name, values in NAMED_AXES.items():
        value = getattr(c, name)
        if value not in values:
            return Invalid(name, f"{name}={value!r}: expected one of {', '.join(values)}")
    rows = c.block_m // c.num_math_warpgroups
    if c.block_m % c.num_math_warpgroups or (rows % WGMMA_M and c.num_math_warpgroups > 1):
        return Invalid(
            "warpgroup_rows",
            f"block_m={c.block_m} over {c.num_math_warpgroups} warpgroups: not whole 64 rows each",
        )
    if rows > 2 * WGMMA_M:
        return Invalid("warpgroup_rows", f"{rows} rows a warpgroup: at most 128")
    invalid = _why_cluster_invalid(c) or _why_not_under(p, c) or _why_too_large(p, c, device)
    if not invalid and c.d_staging == "ring":
        invalid = _why_no_ring(p, c)
    return invalid or (_why_not_grouped(p, c) if p.is_grouped else None)


def _why_not_grouped(p: GemmProblem, c: GemmConfig) -> Invalid | None:
    """Rules of kernels whose tiles are found on the device."""
    if c.cluster_m > 1 or c.split_k > 1:
        return Invalid(
            "grouped_cluster",
            f"cluster_m={c.cluster_m}, split_k={c.split_k}: kind {p.kind} needs 1 of both",
        )
    if p.kind == "contiguous" and GROUP_ALIGNMENT % c.block_m:
        return Invalid(
            "group_alignment",
            f"block_m={c.block_m}: a tile must not cross groups, which start on {GROUP_ALIGNMENT}",
        )
    return None


def _why_cluster_invalid(c: GemmConfig) -> Invalid | None:
    if min(c.cluster_m, c.cluster_n, c.split_k) < 1 or c.cluster_size > MAX_CLUSTER:
        return Invalid(
            "cluster_size",
            f"{c.cluster_m}x{c.cluster_n}, split_k={c.split_k}: expected 1 to {MAX_CLUSTER} CTAs",
        )
    if c.split_k > 1 and c.cluster_m * c.cluster_n > 1:
        return Invalid(
            "split_k_cluster", "split_k forms the cluster: cluster_m and cluster_n must be 1"
        )
    if c.split_k > 1 and c.block_m > c.num_math_warpgroups * WGMMA_M:
        return Invalid("split_k_waves", f"split_k={c.split_k} needs 64 rows a math warpgroup")
    if c.block_m % (8 * c.cluster_n):
        return Invalid(
            "cluster_slices",
            f"block_m={c.block_m}: not cluster_n={c.cluster_n} slices of whole groups of 8 rows",
        )
    return None


def _why_not_under(p: GemmProblem, c: GemmConfig) -> Invalid | None:
    """Rules of the problem's recipe and policies."""
    if p.fast_accum and c.num_accumulators != 1:
        return Invalid("accumulators_fast", "fast_accum=true sums into one accumulator")
    if p.recipe != "block" and c.sass_pass != "none":
        return Invalid("sass_pass_recipe", f"recipe={p.recipe} has no FFMA to interleave")
    if p.batch_invariant and c.split_k != 1:
        return Invalid(
            "batch_invariant",
            f"split_k={c.split_k} sums K in another order than split_k=1, which serves every M",
        )
    return None


def held_stages(block_n: int, d_dtype: str) -> int:
    """Stages whose A a tile of D takes with d_staging="ring": 128 bytes of a row of D in each."""
    return ceil_div(block_n * D_DTYPE_BYTES[d_dtype], BLOCK_K)


def _why_no_ring(p: GemmProblem, c: GemmConfig) -> Invalid | None:
    """Why D can not be staged in the ring."""
    if p.kind != "dense" or p.recipe != "block" or p.bias or c.split_k > 1:
        return Invalid(
            "ring_kind",
            "d_staging=ring is for dense block-scaled kernels without bias and split_k",
        )
    held = held_stages(c.block_n, p.d_dtype)
    if c.block_m % WGMMA_M or c.block_n * D_DTYPE_BYTES[p.d_dtype] % BLOCK_K:
        return Invalid(
            "ring_shape", f"{c.block_m}x{c.block_n}: D's rows are not whole rows of stages of A"
        )
    if held >= c.num_stages:
        return Invalid("ring_stages", f"num_stages={c.num_stages}: D alone takes {held}")
    return None


def _why_too_large(p: GemmProblem, c: GemmConfig, device: Device) -> Invalid | None:
    r = resources(c, p.d_dtype, p.recipe, p.bias, kind=p.kind)
    if c.num_accumulators > 1 and r.num_waves != 1:
        return Invalid(
            "accumulators_waves",
            f"num_accumulators={c.num_accumulators} needs 64 rows a math warpgroup",
        )
    need = (
        num_accumulator_registers(c, r.num_waves, p.fast_accum)
        + MATH_OVERHEAD_REGISTERS[c.num_math_warpgroups]
        + SELECT_OVERHEAD_REGISTERS[c.num_math_warpgroups] * (r.num_scale_positions > 1)
        + WAVE_OVERHEAD_REGISTERS * (r.num_waves - 1)
        + CLUSTER_OVERHEAD_REGISTERS * (c.cluster_size > 1)
        + FP32_OVERHEAD_REGISTERS * (p.d_dtype == "fp32")
        + BIAS_OVERHEAD_REGISTERS[c.cluster_size > 1] * (p.bias and p.recipe == "block")
        + ROW_OVERHEAD_REGISTERS[c.cluster_size > 1] * (p.recipe == "row" and not p.fast_accum)
    )
    both = ROW_AND_BIAS_REGISTERS * (p.recipe == "row" and p.bias and p.fast_accum)
    need += both
    at_launch = c.block_n // 2 + WGMMA_OVERHEAD_REGISTERS + both
    if at_launch > LAUNCH_REGISTERS[c.num_math_warpgroups]:
        return Invalid(
            "registers",
            f"block_n={c.block_n} takes {at_launch} registers in one WGMMA, and "
            f"{c.num_math_warpgroups} math warpgroups start with "
            f"{LAUNCH_REGISTERS[c.num_math_warpgroups]} a thread",
        )
    if need > r.math_registers:
        return Invalid(
            "registers", f"about {need} registers a math thread: {r.math_registers} available"
        )
    if r.smem_bytes > device.smem_per_block:
        return Invalid(
            "smem_bytes",
            f"{r.smem_bytes} bytes of shared memory: the device has {device.smem_per_block}",
        )
    return None


def _why_not_for(p: GemmProblem, c: GemmConfig, device: Device) -> Invalid | None:
    """Rules that a problem's sizes add: a choice that could only idle is not a candidate."""
    if c.d_staging == "ring" and held_stages(c.block_n, p.d_dtype) > p.num_k_blocks:
        return Invalid("ring_k_blocks", "D takes more stages than there are K blocks")
    if c.split_k > p.num_k_blocks:
        return Invalid("split_k_empty", f"split_k={c.split_k}: only {p.num_k_blocks} K blocks")
    if ceil_div(p.m, c.block_m) < c.cluster_m:
        return Invalid("cluster_idle", f"cluster_m={c.cluster_m}: fewer blocks along M")
    if ceil_div(p.n, c.block_n) < c.cluster_n:
        return Invalid("cluster_idle", f"cluster_n={c.cluster_n}: fewer blocks along N")
    if c.cluster_size > (p.num_sms or device.num_sms):
        return Invalid("cluster_sms", f"a cluster of {c.cluster_size} does not fit {p.num_sms} SMs")
    return None
