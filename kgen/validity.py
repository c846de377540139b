"""Which configurations a kernel can be made of: `why_invalid`, every rule once.

Takes a problem, a configuration and a device; gives the first rule that is broken. Space,
heuristic, dispatch and tests call it; the templates repeat the rules only as static_assert. Must
not import torch, CUDA or any third-party package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kgen.config import (
    BLOCK_MS,
    NAMED_AXES,
    REGISTER_SPLIT,
    WGMMA_M,
    WGMMA_MAX_N,
    GemmConfig,
    num_accumulator_registers,
    resources_of,
)
from kgen.device import Device
from kgen.problem import GROUP_ALIGNMENT, GemmProblem, ceil_div

#: Largest cluster that every Hopper part must schedule (CUDA C++ guide: portable cluster size).
MAX_CLUSTER: Final = 8
MAX_STAGES: Final = 16
#: Registers of the math loop beside the accumulators (scales, addresses, loop state), by number of
#: math warpgroups, and what a second 64-row wave, a cluster and an FP32 output add. Fitted to what
#: NVRTC and nvcc 13.0 compile without spills; the few tiles that spill all the same fail to build.
MATH_OVERHEAD_REGISTERS: Final = {1: 24, 2: 24, 3: 22}
#: More with three math warpgroups where tiles straddle scale blocks of B: 192x136 spilled.
SELECT_OVERHEAD_REGISTERS: Final = {1: 0, 2: 0, 3: 4}
WAVE_OVERHEAD_REGISTERS: Final = 7
CLUSTER_OVERHEAD_REGISTERS: Final = 9
FP32_OVERHEAD_REGISTERS: Final = 9
#: The queue of kind k_grouped takes more beside one math warpgroup: 64x208 spilled.
QUEUE_OVERHEAD_REGISTERS: Final = {1: 8, 2: 0, 3: 0}
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


@dataclass(frozen=True)
class Invalid:
    """Why a configuration can not be used: the rule's name, to be counted, and the reason."""

    rule: str
    reason: str


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
    if c.d_staging == "direct" and (not p.is_wgrad or c.split_k > 1):
        return Invalid(
            "direct_kind", "d_staging=direct is for FP32 of weight gradients without split_k"
        )
    rows = c.block_m // c.num_math_warpgroups
    if c.block_m % c.num_math_warpgroups or (rows % WGMMA_M and c.num_math_warpgroups > 1):
        return Invalid(
            "warpgroup_rows",
            f"block_m={c.block_m} over {c.num_math_warpgroups} warpgroups: not whole 64 rows each",
        )
    if rows > 2 * WGMMA_M:
        return Invalid("warpgroup_rows", f"{rows} rows a warpgroup: at most 128")
    invalid = _why_cluster_invalid(c) or _why_not_under(p, c) or _why_too_large(p, c, device)
    if not invalid and p.kind == "k_grouped":
        invalid = _why_not_k_grouped(c)
    return invalid or (_why_not_grouped(p, c) if p.is_grouped else None)


def _why_not_k_grouped(c: GemmConfig) -> Invalid | None:
    """Rules of kernels whose K blocks are found on the device."""
    if c.split_k > 1:
        return Invalid("k_grouped_split", f"split_k={c.split_k}: groups split K by themselves")
    if c.baked_dims != "none":
        return Invalid("k_grouped_baked", "baked_dims=nk: K is that of all groups of a launch")
    if c.num_math_warpgroups == 3 and c.block_n in (104, 120) and c.cluster_m > 1:
        # The only tiles near the limit that spilled (NVRTC 13.0.88); 192x112 and 192x128 do not.
        return Invalid("registers", f"192x{c.block_n} with cluster_m spills in kind k_grouped")
    return None


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
    if not p.promotes and c.num_accumulators != 1:
        return Invalid("accumulators_fast", "without promotion there is one accumulator")
    if p.recipe != "block" and c.sass_pass != "none":
        return Invalid("sass_pass_recipe", f"recipe={p.recipe} has no FFMA to interleave")
    if p.recipe == "vector" and c.num_accumulators > 1:
        # Scales of columns take the registers: at their best 7 % behind one accumulator.
        return Invalid("accumulators_vector", "recipe=vector has one accumulator")
    if p.batch_invariant and c.split_k != 1:
        return Invalid(
            "batch_invariant",
            f"split_k={c.split_k} sums K in another order than split_k=1, which serves every M",
        )
    return None


def _why_too_large(p: GemmProblem, c: GemmConfig, device: Device) -> Invalid | None:
    r = resources_of(c, p)
    if c.num_accumulators > 1 and r.num_waves != 1:
        return Invalid(
            "accumulators_waves",
            f"num_accumulators={c.num_accumulators} needs 64 rows a math warpgroup",
        )
    need = (
        num_accumulator_registers(c, r.num_waves, p.promotes)
        + MATH_OVERHEAD_REGISTERS[c.num_math_warpgroups]
        + SELECT_OVERHEAD_REGISTERS[c.num_math_warpgroups]
        * (r.num_scale_positions > 1 and p.recipe != "vector")
        + WAVE_OVERHEAD_REGISTERS * (r.num_waves - 1)
        + CLUSTER_OVERHEAD_REGISTERS * (c.cluster_size > 1)
        + FP32_OVERHEAD_REGISTERS * (p.d_dtype == "fp32" and c.d_staging != "direct")
        + QUEUE_OVERHEAD_REGISTERS[c.num_math_warpgroups] * (p.kind == "k_grouped")
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
    if c.split_k > p.num_k_blocks:
        return Invalid("split_k_empty", f"split_k={c.split_k}: only {p.num_k_blocks} K blocks")
    if ceil_div(p.m, c.block_m) < c.cluster_m:
        return Invalid("cluster_idle", f"cluster_m={c.cluster_m}: fewer blocks along M")
    if ceil_div(p.n, c.block_n) < c.cluster_n:
        return Invalid("cluster_idle", f"cluster_n={c.cluster_n}: fewer blocks along N")
    if c.cluster_size > (p.num_sms or device.num_sms):
        return Invalid("cluster_sms", f"a cluster of {c.cluster_size} does not fit {p.num_sms} SMs")
    return None
