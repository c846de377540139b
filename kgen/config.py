"""How a problem is computed: `GemmConfig` (free choices) and `Resources` (derived).

Takes a problem, a configuration and a device; gives plain values. Which configurations there can
be a kernel of, `kgen.validity` says. Must not import torch, CUDA or any third-party package.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import gcd
from typing import Any, Final

from kgen.device import Device
from kgen.errors import UsageError
from kgen.problem import (
    BY_K_RECIPES,
    D_DTYPE_BYTES,
    K_BLOCK_BYTES,
    SCALE_BLOCK,
    GemmProblem,
    ceil_div,
    round_up,
)

BLOCK_MS: Final = (16, 32, 64, 128, 192, 256)
WGMMA_M: Final = 64
WGMMA_MAX_N: Final = 256
WARPGROUP_THREADS: Final = 128
#: A thread takes some 50 ns to start a copy. Small stages need one for A and one for B to fill the
#: ring in time (1 to 9 % on an H200); with this many rows of A and B in a stage one does as well.
MIN_ROWS_ONE_LOAD_WARP: Final = 256
#: Registers per thread after setmaxnreg, by number of math warpgroups: (producer, math).
#: 64K registers a CTA; 384 threads launch with 168 each, 512 with 128 each. With one math
#: warpgroup each thread has 255 at launch, the most an instruction can name: no setmaxnreg, and
#: ptxas is seen to spill in places above 248.
REGISTER_SPLIT: Final = {1: (248, 248), 2: (40, 232), 3: (32, 160)}
#: Registers of a math thread that neither sums nor scales of columns may take (recipe "vector"), by
#: number of math warpgroups, and those that each takes beside of a cluster, the tile queue of kind
#: k_grouped and D staged by "own".
HELD_SPARE_REGISTERS: Final = {1: 32, 2: 20, 3: 20}
HELD_OVERHEAD_REGISTERS: Final = 11
#: A contiguous group may start at any row, and TMA reads from multiples of 16 bytes only, else the
#: kernel dies of an illegal instruction: scales of A are loaded from a multiple of 4 rows on.
SFA_SLACK_ROWS: Final = 4
#: A stage's scales of B under recipe "block": at most four.
B_SCALES_BYTES: Final = 16
#: TMA writes to multiples of this in shared memory (PTX ISA, cp.async.bulk.tensor).
SMEM_ALIGN_BYTES: Final = 128
#: Tiles that a grouped kernel's scheduling warp may be ahead, and bytes of one and its barriers.
QUEUE_SLOTS: Final = 4
QUEUE_SLOT_BYTES: Final = {"contiguous": 32, "masked": 32, "k_grouped": 48}
B_EVICTIONS: Final = ("evict_normal", "evict_first")
D_STAGINGS: Final = ("own", "direct")
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
    num_stages             depth of the shared-memory pipeline, in K blocks of 128 bytes a row
    num_math_warpgroups    warpgroups that issue WGMMA; they share block_m
    num_accumulators       partial accumulators a warpgroup keeps: 2 overlap promotion with WGMMA
    cluster_m, cluster_n   CTAs of a cluster along M (share B by multicast) and N (share A)
    split_k                CTAs of a cluster that share one tile's K range and add up in order
    b_eviction             what L2 does with B, "evict_first" or "evict_normal": B that is read once
                           need not displace others, which a cold L2 would have to write back
    d_staging              where D waits for its store: in memory of its "own", or nowhere: FP32
                           goes "direct" from registers to D (weight gradients only)
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

    @classmethod
    def value_of(cls, name: str, text: str) -> Any:
        """The value of an axis written as text. Raises UsageError for an unknown name or no number.

        Whether a configuration may have the value, `kgen.validity` says.
        """
        example = vars(cls()).get(name)
        if example is None:
            names = ", ".join(vars(cls()))
            raise UsageError(f"{name}={text}: no such axis; expected one of {names}")
        if not isinstance(example, int):
            return text
        try:
            return int(text)
        except ValueError:
            raise UsageError(f"{name}={text}: expected a whole number") from None

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
class Resources:
    """What follows from a configuration: shared memory, threads, registers, boxes.

    Offsets and sizes in bytes from the start of dynamic shared memory; the template lays out the
    same regions in the same order: A stages, B stages, D, split-K partials, scales of A, scales
    of B, vectors of each math warpgroup, barriers, the queue of tiles (grouped kinds). Boxes are
    (inner, outer) in elements, those of A and B in bytes by rows.

    The vectors are what the sums of a tile are finished with: scales of its rows and columns
    (recipe "row") and its part of the bias. `held_groups`: groups of 8 columns whose scales are
    held in registers while WGMMAs run (recipe "vector").
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
    sfb_box: tuple[int, int]
    sfb_stage_bytes: int
    held_groups: int


def queue_slot_bytes(kind: str) -> int:
    """Bytes of a tile in the queue with its barriers; 0 of kinds that have no queue."""
    return QUEUE_SLOT_BYTES.get(kind, 0)


def held_groups(config: GemmConfig, num_waves: int, kind: str) -> int:
    """Groups of 8 columns whose scales, two a thread, fit into registers while WGMMAs run."""
    beside = (config.cluster_size > 1) + (kind == "k_grouped") + (config.d_staging == "own")
    warpgroups = config.num_math_warpgroups
    free = REGISTER_SPLIT[warpgroups][1] - HELD_SPARE_REGISTERS[warpgroups]
    free -= num_accumulator_registers(config, num_waves, promotes=True)
    free -= HELD_OVERHEAD_REGISTERS * beside
    return max(0, min(config.block_n // 8, free // 2))


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
    b_offset = ((c.num_stages - 1) * c.block_m + max(c.block_m, WGMMA_M)) * K_BLOCK_BYTES
    d_offset = b_offset + c.num_stages * c.block_n * K_BLOCK_BYTES
    has_own_d = c.split_k == 1 and c.d_staging == "own"
    d_bytes_staged = c.block_m * c.block_n * d_bytes if has_own_d else 0
    partial_offset = d_offset + round_up(d_bytes_staged, 1024)
    owned_groups = ceil_div(c.block_n // 8, c.split_k)
    partial_bytes = c.split_k * owned_groups * c.block_m * 32 if c.split_k > 1 else 0
    sfa_offset = partial_offset + round_up(partial_bytes, 128)
    slack_rows = SFA_SLACK_ROWS if kind == "contiguous" else 0
    sfa_rows = max(c.block_m, WGMMA_M) + slack_rows
    by_k = recipe in BY_K_RECIPES
    sfa_stage_bytes = round_up(sfa_rows * 4, SMEM_ALIGN_BYTES) if by_k else 0
    sfb_offset = sfa_offset + c.num_stages * sfa_stage_bytes
    vectors_of_b = round_up(c.block_n * 4, SMEM_ALIGN_BYTES)
    sfb_stage_bytes = {"block": B_SCALES_BYTES, "vector": vectors_of_b}.get(recipe, 0)
    vector_offset = sfb_offset + c.num_stages * sfb_stage_bytes
    num_waves = ceil_div(rows, WGMMA_M)
    scales_bytes = (num_waves * WGMMA_M + c.block_n) * 4 if recipe == "row" else 0
    vector_bytes = scales_bytes + c.block_n * d_bytes * bias
    barrier_offset = vector_offset + c.num_math_warpgroups * vector_bytes
    queue_offset = barrier_offset + (c.num_stages + (c.split_k > 1)) * 16
    queue_bytes = QUEUE_SLOTS * queue_slot_bytes(kind)
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
        a_box=(K_BLOCK_BYTES, c.block_m // c.cluster_n),
        b_box=(K_BLOCK_BYTES, b_rows),
        d_box=(d_cols, d_rows),
        d_swizzle_bytes=d_swizzle,
        sfa_box=(c.block_m + slack_rows, 1),
        sfa_stage_bytes=sfa_stage_bytes,
        sfb_box=(c.block_n, 1),
        sfb_stage_bytes=sfb_stage_bytes,
        held_groups=held_groups(c, num_waves, kind) if recipe == "vector" else 0,
    )


def resources_of(config: GemmConfig, problem: GemmProblem) -> Resources:
    """`resources` of a kernel of the problem's class."""
    p = problem
    return resources(config, p.d_dtype, p.recipe, p.bias, kind=p.kind)


def num_accumulator_registers(config: GemmConfig, num_waves: int, promotes: bool) -> int:
    """Registers of a math thread that hold sums: in FP32, and partial ones of the tensor cores."""
    partials = config.num_accumulators if promotes else 0
    return config.block_n // 2 * (num_waves + partials)


def grid_size(problem: GemmProblem, config: GemmConfig, device: Device) -> int:
    """CTAs to launch, in whole clusters: as many as the SM budget holds, at most one a tile."""
    # CTAs of a cluster along M share a group.
    m_blocks = problem.groups * round_up(ceil_div(problem.m, config.block_m), config.cluster_m)
    return grid_of(m_blocks, problem, config, device)


def grid_of(m_blocks: int, problem: GemmProblem, config: GemmConfig, device: Device) -> int:
    """As `grid_size`, for this many blocks along M, those of all groups together."""
    clusters = device.max_clusters(config.cluster_size)
    if problem.num_sms:
        clusters = max(1, min(clusters, problem.num_sms // config.cluster_size))
    m_clusters = ceil_div(m_blocks, config.cluster_m)
    n_clusters = ceil_div(ceil_div(problem.n, config.block_n), config.cluster_n)
    return min(clusters, m_clusters * n_clusters) * config.cluster_size
