"""The configuration space: valid, bounded, in order, and accounted for to the last point."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kgen import space
from kgen.config import GemmConfig
from kgen.device import H200
from kgen.problem import GemmProblem, ceil_div
from kgen.shapes import load_shapes
from kgen.space import (
    AXES,
    count_invalid,
    distance,
    leading_configs,
    nearest,
    neighbours,
    num_points,
    valid_configs,
)
from kgen.validity import why_invalid

SHIPPED = [line.problem for line in load_shapes("deepseek_v3").lines]
LARGE = GemmProblem("dense", 4096, 7168, 2048)
SMALL = GemmProblem("dense", 1, 576, 7168)

any_problem = st.builds(
    GemmProblem,
    kind=st.just("dense"),
    m=st.integers(1, 9000),
    n=st.integers(1, 5000).map(lambda x: 8 * x),
    k=st.integers(1, 1200).map(lambda x: 16 * x),
    d_dtype=st.sampled_from(("bf16", "fp32")),
    num_sms=st.sampled_from((0, 1, 2, 108)),
)


def test_axes_are_the_fields_of_a_configuration() -> None:
    assert list(AXES) == [f.name for f in fields(GemmConfig)]
    assert all(len(set(values)) == len(values) for values in AXES.values())
    assert AXES["block_n"] == tuple(range(16, 257, 8))


@pytest.mark.parametrize("problem", SHIPPED, ids=str)
def test_the_space_is_large_enough_and_bounded(problem: GemmProblem) -> None:
    configs = valid_configs(problem, H200)
    assert 500 <= len(configs) <= 20_000
    assert len(set(configs)) == len(configs)


@settings(max_examples=25, deadline=None)
@given(any_problem, st.randoms(use_true_random=False))
def test_every_point_is_valid_and_every_other_is_counted(problem: GemmProblem, random) -> None:  # type: ignore[no-untyped-def]
    configs = valid_configs(problem, H200)
    for config in random.sample(configs, min(40, len(configs))):
        assert why_invalid(problem, config, H200) is None
        assert all(getattr(config, name) in values for name, values in AXES.items())
    left_out = count_invalid(problem, H200)
    assert len(configs) + sum(left_out.values()) == num_points()
    assert all(count > 0 for count in left_out.values())


@settings(max_examples=25, deadline=None)
@given(any_problem)
def test_every_problem_has_a_configuration(problem: GemmProblem) -> None:
    assert valid_configs(problem, H200)


def test_rules_are_counted_by_name() -> None:
    counts = count_invalid(LARGE, H200)
    assert {"warpgroup_rows", "registers", "smem_bytes"} <= set(counts)
    counts["registers"] = 0  # a copy: the cache must not change
    assert count_invalid(LARGE, H200)["registers"] > 0


def test_order_is_fixed_and_the_walk_is_cached_and_quick() -> None:
    space._walk.cache_clear()
    space._tiles.cache_clear()
    start = time.process_time()
    first = valid_configs(LARGE, H200)
    assert time.process_time() - start < 2.0  # 0.2 s where this was written
    assert valid_configs(LARGE, H200) is first
    space._walk.cache_clear()
    assert valid_configs(LARGE, H200) == first


def test_the_pass_is_an_axis_only_when_asked_for() -> None:
    plain = valid_configs(SMALL, H200)
    both = valid_configs(SMALL, H200, sass_passes=("none", "interleave"))
    assert {c.sass_pass for c in plain} == {"none"}
    assert len(both) == 2 * len(plain)
    assert {replace(c, sass_pass="none") for c in both} == set(plain)
    left_out = count_invalid(SMALL, H200, sass_passes=("none", "interleave"))
    assert len(both) + sum(left_out.values()) == num_points(("none", "interleave"))


def test_unaligned_widths_are_in_it() -> None:
    widths = {c.block_n for c in valid_configs(LARGE, H200)}
    assert {16, 104, 112, 120, 136, 152, 168, 176, 200} <= widths


def values(problem: GemmProblem, name: str) -> set[object]:
    return {getattr(c, name) for c in valid_configs(problem, H200)}


@pytest.mark.parametrize(
    ("m", "block_ms"),
    [
        (1, {16, 32, 64}),
        (16, {16, 32, 64}),
        (17, {32, 64}),
        (33, {64, 128}),
        (65, {64, 128, 192}),
        (4096, {64, 128, 192, 256}),
    ],
)
def test_tile_heights_follow_m(m: int, block_ms: set[int]) -> None:
    assert values(GemmProblem("dense", m, 7168, 2048), "block_m") == block_ms


def test_tiles_are_not_wider_than_n() -> None:
    assert values(GemmProblem("dense", 64, 8, 512), "block_n") == {16}
    assert max(values(GemmProblem("dense", 64, 72, 512), "block_n")) == 72  # type: ignore[type-var]


def test_order_over_the_grid_is_no_choice_in_one_wave() -> None:
    one_wave = {(c.raster_along, c.raster_group) for c in valid_configs(SMALL, H200)}
    assert len(one_wave) == 1
    many = {(c.raster_along, c.raster_group) for c in valid_configs(LARGE, H200)}
    assert many == {(along, group) for along in ("m", "n") for group in AXES["raster_group"]}


def test_rings_are_deep_but_never_deeper_than_the_work() -> None:
    rings: dict[GemmConfig, set[int]] = {}
    for c in valid_configs(LARGE, H200):
        rings.setdefault(replace(c, num_stages=2), set()).add(c.num_stages)
    for config, depths in rings.items():
        assert why_invalid(LARGE, replace(config, num_stages=max(depths) + 1), H200)
        assert len(depths) <= len(space.DEPTH_SHARES)
    one_block = GemmProblem("dense", 1, 64, 128)
    assert values(one_block, "num_stages") == {2}
    assert max(values(GemmProblem("dense", 1, 64, 768), "num_stages")) == 6  # type: ignore[type-var]


@pytest.mark.parametrize("problem", [LARGE, SMALL, GemmProblem("dense", 100, 2112, 7168)], ids=str)
def test_leading_configs_are_the_plain_ones_by_tile_and_depth(problem: GemmProblem) -> None:
    plain = [c for c in valid_configs(problem, H200) if c.baked_dims == "none"]
    leading = leading_configs(problem, H200)
    assert [c for walks in leading for c in walks] == plain
    walked = ("raster_along", "raster_group")
    for walks in leading:
        assert len({tuple(getattr(c, n) for n in AXES if n not in walked) for c in walks}) == 1


@pytest.fixture
def split_axis(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Abilities of the kernel switched on as the AXES table would."""
    monkeypatch.setitem(AXES, "split_k", (1, 2, 4, 8))
    monkeypatch.setitem(AXES, "num_accumulators", (1, 2))
    space._walk.cache_clear()
    space._tiles.cache_clear()
    yield
    space._walk.cache_clear()
    space._tiles.cache_clear()


@pytest.mark.usefixtures("split_axis")
def test_split_k_and_accumulators_need_only_their_axis() -> None:
    for problem in (SMALL, LARGE):
        configs = valid_configs(problem, H200)
        assert len(configs) + sum(count_invalid(problem, H200).values()) == num_points()
        assert values(problem, "num_accumulators") == {1, 2}
    assert values(SMALL, "split_k") == {1, 2, 4, 8}
    assert values(GemmProblem("dense", 1, 576, 256), "split_k") == {1, 2}
    for config in valid_configs(LARGE, H200):
        if config.split_k > 1:
            tiles = ceil_div(4096, config.block_m) * ceil_div(7168, config.block_n)
            assert tiles <= space.MAX_SPLIT_WAVES * 132


# Distance and projection.

some_config = st.builds(GemmConfig, **{name: st.sampled_from(axis) for name, axis in AXES.items()})


@given(some_config, some_config, some_config)
def test_distance_is_a_metric(a: GemmConfig, b: GemmConfig, c: GemmConfig) -> None:
    assert distance(a, b) == distance(b, a)
    assert (distance(a, b) == 0) == (a == b)
    assert distance(a, c) <= distance(a, b) + distance(b, c) + 1e-9


def test_nearest_projects_on_the_candidates() -> None:
    candidates = valid_configs(SMALL, H200)
    inside = candidates[len(candidates) // 2]
    assert nearest(inside, candidates) == inside
    outside = replace(inside, block_n=256, num_stages=16, block_m=256)
    found = nearest(outside, candidates)
    assert found in candidates
    assert distance(outside, found) == min(distance(outside, c) for c in candidates)
    assert nearest(inside, []) is None


def test_neighbours_are_sorted_and_keep_the_order_of_ties() -> None:
    here = GemmConfig()
    near, far = replace(here, block_n=136), replace(here, block_n=200)
    left, right = replace(here, cluster_m=2), replace(here, cluster_n=2)
    assert neighbours(here, [far, right, left, near], 3) == [near, right, left]
