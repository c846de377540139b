"""Kernels whose roles dawdle at random before every hand-over, to provoke races between them."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from kgen.config import GemmConfig
from kgen.problem import GemmProblem
from kgen.render import Source, render

#: Each family of hand-overs, and the smallest tiles, whose K blocks are the shortest.
CONFIGS = (
    GemmConfig(block_m=16, block_n=16, num_stages=13, num_math_warpgroups=1, raster_along="n"),
    GemmConfig(
        block_m=16, block_n=16, num_stages=4, num_math_warpgroups=1, cluster_m=2, cluster_n=2
    ),
    GemmConfig(
        block_m=64, block_n=24, num_stages=16, num_math_warpgroups=1, num_accumulators=2, split_k=8
    ),
    GemmConfig(block_m=64, block_n=24, num_stages=2, num_math_warpgroups=1, split_k=4),
    GemmConfig(block_m=128, block_n=120, num_stages=3, num_accumulators=2),
    GemmConfig(block_m=256, block_n=112, num_stages=2, cluster_n=2, b_eviction="evict_first"),
    GemmConfig(block_m=192, block_n=64, num_stages=3, num_math_warpgroups=3, cluster_m=2),
)
PROBLEM = GemmProblem("dense", m=257, n=1096, k=1168)

_DELAY = """
// Up to some microseconds, for one warp in four.
__device__ __forceinline__ void dawdle() {
    u32 time;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(time));
    time = (time ^ threadIdx.x / 32 * 2654435761u ^ blockIdx.x * 40503u) * 2246822519u >> 16;
    if (time % 4 == 0) asm volatile("nanosleep.u32 %0;" ::"r"(time % 4096));
}
"""
#: The functions of include/ptx.cuh that hand something over, or wait for it.
HAND_OVERS = (
    *("mbarrier_wait", "mbarrier_arrive", "mbarrier_arrive_expect", "mbarrier_arrive_remote"),
    *("copy_async_arrive", "named_sync", "named_arrive", "tma_store_commit"),
)


def render_delayed(problem: GemmProblem, config: GemmConfig) -> Source:
    """What `kgen.render.render` gives, with a delay at the start of every hand-over."""
    source = render(problem, config)
    head, body = source.text.split("\n\n", 1)
    lines = []
    for line in body.splitlines():
        lines.append(line)
        if line.startswith("__device__") and any(f" {name}(" in line for name in HAND_OVERS):
            assert line.endswith("{"), f"a hand-over whose head is one line: {line}"
            lines.append("    dawdle();")
    start = next(i for i, line in enumerate(lines) if line.startswith("// ---- mbarriers"))
    body = "\n".join([*lines[:start], _DELAY, *lines[start:]]) + "\n"
    digest = hashlib.sha256(body.encode()).hexdigest()
    return replace(source, text=f"{head}\n\n{body}", body_hash=digest)
