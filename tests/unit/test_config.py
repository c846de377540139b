"""Configurations: each rule of `why_invalid`, and resources against a count by other means."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kgen.config import BLOCK_MS, GemmConfig, d_store_box, grid_size, num_b_scales, resources
from kgen.device import H200
from kgen.errors import UsageError
from kgen.problem import D_DTYPE_BYTES, D_DTYPES, GemmProblem
from kgen.validity import why_invalid

LARGE = GemmProblem("dense", 4096, 7168, 2048)
WIDTHS = st.integers(2, 32).map(lambda x: 8 * x)

any_config = st.builds(
    GemmConfig,
    block_m=st.sampled_from(BLOCK_MS),
    block_n=WIDTHS,
    num_stages=st.integers(2, 16),
    num_math_warpgroups=st.integers(1, 3),
    num_accumulators=st.integers(1, 2),
    cluster_m=st.integers(1, 4),
    cluster_n=st.integers(1, 4),
    split_k=st.integers(1, 8),
)


ENDLESS = GemmProblem("dense", 2**20, 2**20, 2**20, d_dtype="fp32")


@cache
def fitting_tiles() -> list[GemmConfig]:
    """Every kernel that fits with two stages and the widest output type, clusters included."""
    heights = [(16, 1), (32, 1), (64, 1), (128, 1), (128, 2), (192, 3), (256, 2)]
    clusters = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (3, 1, 1), (1, 1, 2), (1, 1, 3)]
    shapes = product(heights, range(16, 257, 8), (1, 2), [*clusters, (1, 1, 8)])
    tiles = [
        GemmConfig(m, n, 2, w, acc, cluster_m=cm, cluster_n=cn, split_k=k)
        for (m, w), n, acc, (cm, cn, k) in shapes
    ]
    return [tile for tile in tiles if why_invalid(ENDLESS, tile, H200) is None]


@st.composite
def fitting_configs(draw: st.DrawFn) -> GemmConfig:
    config = draw(st.sampled_from(fitting_tiles()))
    deeper = [replace(config, num_stages=s) for s in range(3, 17)]
    return draw(
        st.sampled_from([config, *(c for c in deeper if why_invalid(ENDLESS, c, H200) is None)])
    )


def rule(problem: GemmProblem = LARGE, **changes: Any) -> str:
    found = why_invalid(problem, GemmConfig(**changes), H200)
    if found is None:
        return ""
    assert found.reason
    return found.rule


# Validity.


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"block_m": 96}, "block_m"),
        ({"block_n": 12}, "block_n"),
        ({"block_n": 8}, "block_n"),
        ({"block_n": 264}, "block_n"),
        ({"num_stages": 1}, "num_stages"),
        ({"num_stages": 17}, "num_stages"),
        ({"num_math_warpgroups": 4}, "num_math_warpgroups"),
        ({"num_math_warpgroups": 0}, "num_math_warpgroups"),
        ({"num_accumulators": 3}, "num_accumulators"),
        ({"raster_along": "k"}, "raster_along"),
        ({"raster_group": 0}, "raster_group"),
        ({"baked_dims": "m"}, "baked_dims"),
        ({"sass_pass": "magic"}, "sass_pass"),
        ({"num_math_warpgroups": 3}, "warpgroup_rows"),
        ({"block_m": 64}, "warpgroup_rows"),
        ({"block_m": 192, "num_math_warpgroups": 2}, "warpgroup_rows"),
        ({"block_m": 192, "num_math_warpgroups": 1}, "warpgroup_rows"),
        ({"block_m": 16, "num_math_warpgroups": 1}, ""),
        ({"block_m": 192, "num_math_warpgroups": 3}, ""),
        ({"block_m": 256, "num_stages": 3}, ""),
        ({"cluster_m": 2}, ""),
        ({"cluster_m": 2, "cluster_n": 4}, ""),
        ({"cluster_m": 3, "cluster_n": 3}, "cluster_size"),
        ({"cluster_m": 0}, "cluster_size"),
        ({"split_k": 0}, "cluster_size"),
        ({"split_k": 9}, "cluster_size"),
        ({"split_k": 2, "cluster_m": 2}, "split_k_cluster"),
        ({"split_k": 2}, ""),
        ({"split_k": 2, "block_m": 256, "block_n": 64}, "split_k_waves"),
        ({"block_m": 64, "num_math_warpgroups": 1, "split_k": 2}, ""),
        ({"block_m": 16, "num_math_warpgroups": 1, "cluster_n": 3}, "cluster_slices"),
        ({"block_m": 16, "num_math_warpgroups": 1, "cluster_n": 2}, ""),
        ({"num_accumulators": 2, "block_m": 256, "block_n": 64}, "accumulators_waves"),
        ({"num_accumulators": 2}, ""),
        ({"num_stages": 12}, "smem_bytes"),
    ],
)
def test_rules(changes: dict[str, Any], expected: str) -> None:
    assert rule(**changes) == expected


@pytest.mark.parametrize(
    ("changes", "widest"),
    [
        ({"num_stages": 2}, 208),
        ({"num_stages": 2, "num_accumulators": 2}, 136),
        ({"num_stages": 2, "block_m": 256}, 128),
        ({"num_stages": 2, "block_m": 192, "num_math_warpgroups": 3}, 128),
    ],
)
def test_the_widest_tiles_that_registers_allow(changes: dict[str, Any], widest: int) -> None:
    assert rule(**changes, block_n=widest) == ""
    assert rule(**changes, block_n=widest + 8) == "registers"


@pytest.mark.parametrize(
    ("problem", "changes", "expected"),
    [
        (GemmProblem("dense", 128, 7168, 2048), {"cluster_m": 2}, "cluster_idle"),
        (GemmProblem("dense", 129, 7168, 2048), {"cluster_m": 2}, ""),
        (GemmProblem("dense", 4096, 128, 2048), {"cluster_n": 2}, "cluster_idle"),
        (replace(LARGE, num_sms=1), {"cluster_m": 2}, "cluster_sms"),
        (
            GemmProblem("dense", 64, 576, 304),
            {"block_m": 64, "num_math_warpgroups": 1, "split_k": 4},
            "split_k_empty",
        ),
        (
            GemmProblem("dense", 64, 576, 304),
            {"block_m": 64, "num_math_warpgroups": 1, "split_k": 3},
            "",
        ),
        (GemmProblem("dense", 1, 8, 16), {}, ""),
    ],
)
def test_rules_of_a_problem(problem: GemmProblem, changes: dict[str, Any], expected: str) -> None:
    assert rule(problem, **changes) == expected


def test_shared_memory_is_the_devices() -> None:
    config = GemmConfig()
    need = resources(config).smem_bytes
    assert why_invalid(LARGE, config, replace(H200, smem_per_block=need)) is None
    short = why_invalid(LARGE, config, replace(H200, smem_per_block=need - 1))
    assert short is not None
    assert short.rule == "smem_bytes"
    assert str(need) in short.reason


# Resources.


@given(WIDTHS)
def test_scale_blocks_of_a_tile_by_counting(block_n: int) -> None:
    touched = [(n0 + block_n - 1) // 128 - n0 // 128 + 1 for n0 in range(0, 128 * block_n, block_n)]
    assert num_b_scales(block_n) == max(touched)
    starts = {n0 % 128 for n0 in range(0, 128 * block_n, block_n)}
    assert resources(GemmConfig(block_n=block_n)).num_scale_positions == len(starts)


def test_widths_that_touch_three_scale_blocks() -> None:
    assert {152, 168, 176, 200, 208} <= {n for n in range(16, 257, 8) if num_b_scales(n) == 3}
    assert [num_b_scales(n) for n in (64, 128, 16, 112, 192, 256)] == [1, 1, 1, 2, 2, 2]


@given(WIDTHS, st.sampled_from((2, 4)))
def test_store_boxes_are_what_tma_takes(block_n: int, d_bytes: int) -> None:
    columns, swizzle = d_store_box(block_n, d_bytes)
    assert block_n % columns == 0
    assert 1 <= columns <= 256
    assert columns * d_bytes % 16 == 0
    assert swizzle in (0, 32, 64, 128)
    if swizzle:
        assert columns * d_bytes == swizzle
    else:  # rows an odd number of 16-byte (BF16) or 32-byte (FP32) groups apart
        assert columns // 8 % 2 == 1


@given(fitting_configs(), st.sampled_from(D_DTYPES))
def test_regions_do_not_overlap(config: GemmConfig, d_dtype: str) -> None:
    c, r = config, resources(config, d_dtype)
    k_bytes = 128
    staging = c.block_m * c.block_n * D_DTYPE_BYTES[d_dtype] if c.split_k == 1 else 0
    partials = c.block_m * c.block_n * 4 if c.split_k > 1 else 0
    regions = [
        (0, c.num_stages * c.block_m * k_bytes),
        (r.b_offset, c.num_stages * c.block_n * k_bytes),
        (r.d_offset, staging),
        (r.partial_offset, partials),
        (r.sfa_offset, c.num_stages * r.sfa_stage_bytes),
        (r.sfb_offset, c.num_stages * 4 * r.num_b_scales),
        (r.barrier_offset, c.num_stages * 16),
        (r.smem_bytes, 0),
    ]
    for (offset, size), (following, _) in pairwise(regions):
        assert offset + size <= following
    assert r.smem_bytes <= H200.smem_per_block
    # The last 64-row WGMMA of a short tile reads memory that exists.
    assert (c.num_stages - 1) * c.block_m * k_bytes + 64 * k_bytes <= r.d_offset
    assert (c.num_stages - 1) * r.sfa_stage_bytes + 64 * 4 <= r.sfb_offset - r.sfa_offset
    assert r.b_offset % 1024 == 0  # 128-byte swizzle repeats every 1024 bytes
    assert r.d_offset % 1024 == 0
    assert r.partial_offset % 16 == r.sfa_offset % 128 == r.sfa_stage_bytes % 128 == 0
    assert r.barrier_offset % 8 == 0


@given(fitting_configs())
def test_boxes_and_threads(config: GemmConfig) -> None:
    c, r = config, resources(config)
    assert r.threads == 128 * (c.num_math_warpgroups + 1)
    registers = 128 * (r.producer_registers + c.num_math_warpgroups * r.math_registers)
    assert registers <= 65536
    assert r.a_box == (128, c.block_m // c.cluster_n)
    assert r.a_box[1] * c.cluster_n == c.block_m
    assert r.b_box[1] in (c.block_n, c.block_n // c.cluster_m)
    for inner, outer in (r.a_box, r.b_box, r.d_box, r.sfa_box):
        assert 1 <= inner <= 256
        assert 1 <= outer <= 256
    assert r.a_box[1] % 8 == r.b_box[1] % 8 == 0  # whole swizzle groups
    assert r.num_waves * 64 * c.num_math_warpgroups >= c.block_m


# Grid.


@given(
    st.integers(1, 10**6),
    st.integers(1, 10**5),
    fitting_configs(),
    st.sampled_from((0, 8, 9, 108, 500)),
)
def test_grids_are_whole_clusters_within_the_budget(
    m: int, n8: int, config: GemmConfig, num_sms: int
) -> None:
    problem = GemmProblem("dense", m, 8 * n8, 2**15, num_sms=num_sms)
    grid = grid_size(problem, config, H200)
    assert grid % config.cluster_size == 0
    assert 0 < grid <= min(num_sms or 132, 132)
    assert grid // config.cluster_size <= H200.max_clusters(config.cluster_size)


@pytest.mark.parametrize(
    ("changes", "m", "n", "expected"),
    [
        ({}, 128, 128, 1),
        ({}, 129, 128, 2),
        ({}, 4096, 7168, 132),
        ({"cluster_m": 2}, 4096, 7168, 132),
        ({"cluster_m": 2}, 129, 128, 2),
        ({"cluster_m": 2, "cluster_n": 2}, 4096, 7168, 120),
        ({"block_m": 16, "num_math_warpgroups": 1, "split_k": 8, "block_n": 64}, 16, 576, 72),
        ({"block_m": 16, "num_math_warpgroups": 1, "split_k": 8, "block_n": 64}, 16, 4096, 120),
    ],
)
def test_grid_sizes(changes: dict[str, Any], m: int, n: int, expected: int) -> None:
    problem = GemmProblem("dense", m, n, 7168)
    assert grid_size(problem, GemmConfig(**changes), H200) == expected


# Values.


@given(any_config)
def test_to_and_from_a_dictionary(config: GemmConfig) -> None:
    assert GemmConfig.from_dict(config.to_dict()) == config
    assert config.cluster_size == config.cluster_m * config.cluster_n * config.split_k


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"block_q": 1}, "block_q=1: no such axis"),
        ({"block_m": "128"}, "block_m='128': expected a value of type int"),
        ({"block_m": True}, "block_m=True: expected a value of type int"),
        ({"block_m": 128.0}, "block_m=128.0: expected a value of type int"),
        ({"raster_along": 1}, "raster_along=1: expected a value of type str"),
    ],
)
def test_a_wrong_dictionary_is_named(values: dict[str, Any], part: str) -> None:
    with pytest.raises(UsageError) as caught:
        GemmConfig.from_dict(values)
    assert part in str(caught.value)


def test_a_short_name_shows_what_differs() -> None:
    assert str(GemmConfig()) == "128x128 s4 w2"
    assert str(GemmConfig(64, 152, 6, 1, cluster_n=2, baked_dims="nk")) == (
        "64x152 s6 w1 cluster_n=2 baked_dims=nk"
    )


@given(any_config, any_config)
def test_names_tell_configurations_apart(a: GemmConfig, b: GemmConfig) -> None:
    assert (str(a) == str(b)) == (a == b)
