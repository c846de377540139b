"""Verification of weight gradients passes a right kernel and catches each kind of wrong one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kgen.cases import Case
from kgen.errors import WrongResult
from kgen.problem import GemmProblem
from kgen.wgrad_cases import KGroupedCase
from kgen.wgrad_reference import k_grouped_reference_into, wgrad_reference_into
from kgen.wgrad_verify import verify_k_grouped, verify_wgrad

ONE = GemmProblem.of("wgrad", 200, 136, 912)
GROUPS = GemmProblem.of("k_grouped", 136, 72, 256, groups=5)
Launch = Callable[..., None]


@pytest.fixture(scope="module", params=[True, False], ids=["adds", "writes"])
def case(request: pytest.FixtureRequest) -> Case:
    return Case(replace(ONE, accumulate=request.param), "cpu")


@pytest.fixture(scope="module", params=[True, False], ids=["adds", "writes"])
def groups(request: pytest.FixtureRequest) -> KGroupedCase:
    return KGroupedCase(replace(GROUPS, accumulate=request.param), "cpu")


def right(adds: bool, recipe: str = "vector") -> Launch:
    def launch(a: Any, sfa: Any, b: Any, sfb: Any, d: Any) -> None:
        wgrad_reference_into(d, a, sfa, b, sfb, recipe=recipe, adds=adds)

    return launch


def right_groups(adds: bool) -> Launch:
    def launch(tensors: Any, ks: Any) -> None:
        a, sfa, b, sfb, d = tensors
        k_grouped_reference_into(d, a, sfa, b, sfb, ks, adds=adds)

    return launch


def test_a_right_kernel_passes(case: Case) -> None:
    verified = verify_wgrad(right(case.problem.accumulate), case)
    assert verified.max_tile_error < 1e-6
    assert verified.exact_passes == 2
    assert verified.growth < 1.5


@pytest.mark.parametrize("accumulate", [True, False])
def test_scales_by_block_pass_as_well(accumulate: bool) -> None:
    problem = replace(ONE, recipe="block", accumulate=accumulate)
    verify_wgrad(right(accumulate, "block"), Case(problem, "cpu"))


def added_twice(adds: bool) -> Launch:
    def launch(*tensors: Any) -> None:
        right(adds)(*tensors)
        right(adds=True)(*tensors)

    return launch


def other_way(adds: bool) -> Launch:
    """Writes where it should add, and adds where it should write."""
    return right(not adds)


def a_neighbours_scale(adds: bool) -> Launch:
    def launch(a: Any, sfa: Any, b: Any, sfb: Any, d: Any) -> None:
        right(adds)(a, sfa, b, sfb.roll(2, 0), d)

    return launch


def scales_by_block(adds: bool) -> Launch:
    def launch(a: Any, sfa: Any, b: Any, sfb: Any, d: Any) -> None:
        right(adds, "block")(a, sfa, b, sfb[::128], d)

    return launch


def the_last_k_block_left_out(adds: bool) -> Launch:
    def launch(a: Any, sfa: Any, b: Any, sfb: Any, d: Any) -> None:
        right(adds)(a[:, :-16], sfa, b[:, :-16], sfb, d)

    return launch


def an_element_before(adds: bool) -> Launch:
    def launch(*tensors: Any) -> None:
        right(adds)(*tensors)
        d = tensors[4]
        d.as_strided((1,), (1,), d.storage_offset() - 1).fill_(0.0)

    return launch


@pytest.mark.parametrize(
    "wrong",
    [
        *[added_twice, other_way, a_neighbours_scale, scales_by_block],
        *[the_last_k_block_left_out, an_element_before],
    ],
    ids=lambda f: f.__name__,
)
def test_a_wrong_kernel_is_caught(wrong: Callable[[bool], Launch], case: Case) -> None:
    with pytest.raises(WrongResult, match="wgrad"):
        verify_wgrad(wrong(case.problem.accumulate), case)


def test_right_groups_pass(groups: KGroupedCase) -> None:
    verified = verify_k_grouped(right_groups(groups.problem.accumulate), groups)
    assert verified.max_tile_error < 1e-6
    assert verified.exact_passes == groups.exact.num_passes == 5


def test_groups_are_as_unlike_as_they_should_be(groups: KGroupedCase) -> None:
    by_name = {run.name: run for run in groups.runs}
    assert by_name["full"].ks == (256,) * 5
    assert by_name["uneven"].ks == (0, 384, 128, 2432, 0)
    assert by_name["one alone"].ks == (0, 0, 0, 0, 1152)
    assert sum(by_name["empty"].ks) == 0
    for name in ("uneven", "one alone", "empty"):
        run = by_name[name]
        assert bool(run.a[:, sum(run.ks) :].float().isnan().all())
        assert bool(run.sfb[:, sum(run.ks) // 128 :].isnan().all())
        assert run.a.shape[1] == sum(run.ks) + 256


def shifted(adds: bool) -> Launch:
    """Each group reads from one K block too late on."""

    def launch(tensors: Any, ks: Any) -> None:
        a, sfa, b, sfb, d = tensors
        used = int(sum(ks))
        bits = (x.view(torch.uint8)[:, :used].roll(-128, 1) for x in (a, b))
        a, b = (x.view(torch.float8_e4m3fn) for x in bits)
        right_groups(adds)((a, sfa, b, sfb, d), ks)

    return launch


def empty_groups_wrong(adds: bool) -> Launch:
    """Left as they are where they become zero, zero where they stay."""

    def launch(tensors: Any, ks: Any) -> None:
        before = tensors[4].clone()
        right_groups(adds)(tensors, ks)
        for group, k in enumerate(ks):
            if not int(k):
                tensors[4][group] = 0.0 if adds else before[group]

    return launch


def neighbours_swapped(adds: bool) -> Launch:
    def launch(tensors: Any, ks: Any) -> None:
        right_groups(adds)(tensors, ks)
        d = tensors[4]
        d[:2] = d[:2].flip(0)

    return launch


def a_row_between_groups(adds: bool) -> Launch:
    def launch(tensors: Any, ks: Any) -> None:
        right_groups(adds)(tensors, ks)
        d = tensors[4]
        d.as_strided((1,), (1,), d.storage_offset() + d.shape[1] * d.stride(1)).fill_(1.0)

    return launch


def wrong_from_the_device(adds: bool) -> Launch:
    def launch(tensors: Any, ks: Any) -> None:
        right_groups(adds)(tensors, ks.flip(0) if isinstance(ks, torch.Tensor) else ks)

    return launch


def row_major_misread(adds: bool) -> Launch:
    def launch(tensors: Any, ks: Any) -> None:
        a, sfa, b, sfb, d = tensors
        misread = sfb if sfb.stride(0) == 1 else sfb.roll(1, 0)
        right_groups(adds)((a, sfa, b, misread, d), ks)

    return launch


@pytest.mark.parametrize(
    "wrong",
    [
        *[shifted, empty_groups_wrong, neighbours_swapped, a_row_between_groups],
        *[wrong_from_the_device, row_major_misread],
    ],
    ids=lambda f: f.__name__,
)
def test_wrong_groups_are_caught(wrong: Callable[[bool], Launch], groups: KGroupedCase) -> None:
    with pytest.raises(WrongResult, match="k_grouped"):
        verify_k_grouped(wrong(groups.problem.accumulate), groups)
