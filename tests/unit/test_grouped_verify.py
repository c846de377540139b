"""Verification of grouped kernels passes a right one and catches each kind of wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kgen.errors import WrongResult
from kgen.grouped_cases import GroupedCase
from kgen.grouped_reference import contiguous_reference_into, index_of, masked_reference_into
from kgen.grouped_verify import verify_grouped
from kgen.problem import GemmProblem

KINDS = ("contiguous", "masked")


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest) -> GroupedCase:
    return GroupedCase(GemmProblem(request.param, 40, 136, 272, groups=4), "cpu")


def right(tensors: Any, by_index: bool) -> None:
    a, sfa, b, sfb, d, layout = tensors
    if d.dim() == 3:
        masked_reference_into(d, a, sfa, b, sfb, layout)
    else:
        index = layout if by_index else index_of(layout, a.shape[0])
        contiguous_reference_into(d, a, sfa, b, sfb, index)


def neighbours_weights(tensors: Any, by_index: bool) -> None:
    a, sfa, b, sfb, d, layout = tensors
    right((a, sfa, b.view(torch.uint8).roll(1, 0).view(b.dtype), sfb, d, layout), by_index)


def first_groups_scales(tensors: Any, by_index: bool) -> None:
    a, sfa, b, sfb, d, layout = tensors
    right((a, sfa, b, sfb[:1].expand_as(sfb), d, layout), by_index)


def a_row_behind(tensors: Any, by_index: bool) -> None:
    """As a TMA store of a whole tile does at a group's end."""
    right(tensors, by_index)
    d, layout = tensors[4:]
    if d.dim() == 3:
        d[-1, int(layout[-1]) :][:1] = 1.0
    elif by_index:
        d[(layout < 0).nonzero().flatten()[-1:]] = 1.0
    else:
        d[int(layout[-1]) :][:1] = 1.0


def a_row_missing(tensors: Any, by_index: bool) -> None:
    d, layout = tensors[4:]
    before = d.clone()
    right(tensors, by_index)
    if d.dim() == 3:
        group = int(layout.argmax())
        d[group, int(layout[group]) - 1 :] = before[group, int(layout[group]) - 1 :]
    elif len(layout):
        last = int((layout >= 0).nonzero()[-1:].sum()) if by_index else int(layout[-1]) - 1
        d[max(last, 0)] = before[max(last, 0)]


def into_the_next_group(tensors: Any, by_index: bool) -> None:
    """The last row of a group computed with the next one's weights."""
    a, sfa, b, sfb, d, layout = tensors
    if d.dim() == 3:
        right(tensors, by_index)
        d[2, :1] = d[2, :1] * 2
        return
    index = layout if by_index else index_of(layout, a.shape[0])
    ends = ((index[:-1] != index[1:]) & (index[:-1] >= 0)).nonzero().flatten()
    wrong = index.clone()
    wrong[ends[:1]] = (wrong[ends[:1]] + 1) % b.shape[0]
    right((a, sfa, b, sfb, d, wrong), True)


def test_a_right_kernel_passes(case: GroupedCase) -> None:
    verified = verify_grouped(right, case)
    assert verified.problem == case.problem
    assert 0 < verified.max_tile_error < 4e-3
    assert verified.exact_passes == 1


@pytest.mark.parametrize("d_dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_outputs(kind: str, d_dtype: str) -> None:
    problem = GemmProblem(kind, 128, 72, 144, groups=2, d_dtype=d_dtype)
    assert verify_grouped(right, GroupedCase(problem, "cpu")).max_strip_error < 5e-4


@pytest.mark.parametrize(
    "launch",
    [
        neighbours_weights,
        first_groups_scales,
        a_row_behind,
        a_row_missing,
        into_the_next_group,
        lambda tensors, by_index: None,
    ],
)
def test_a_wrong_kernel_is_caught(launch: Callable[..., None], case: GroupedCase) -> None:
    with pytest.raises(WrongResult, match=case.problem.kind):
        verify_grouped(launch, case)


def test_what_is_timed_is_told_by_indices_where_they_can_tell_it() -> None:
    aligned = GroupedCase(GemmProblem("contiguous", 128, 16, 128, groups=2), "cpu")
    assert aligned.full.grouping.by_index
    assert not aligned.by_offset.grouping.by_index
    assert aligned.full.a is aligned.by_offset.a
    uneven = GroupedCase(GemmProblem("contiguous", 100, 16, 128, groups=2), "cpu")
    assert uneven.full is uneven.by_offset


def test_groupings_are_adversarial(case: GroupedCase) -> None:
    sizes = [run.grouping.sizes for run in case.runs]
    assert any(sum(s) == 0 for s in sizes)
    assert any(s.count(0) == len(s) - 1 for s in sizes)
    assert any(0 < min(filter(None, s), default=0) < 2 for s in sizes)
    ignored = [run for run in case.runs if run.grouping.num_rows > len(run.grouping.rows)]
    assert ignored
    for run in ignored:
        a = run.a.flatten(0, -2).float()
        assert int(a.isnan().all(1).sum()) == run.grouping.num_rows - len(run.grouping.rows)
        assert bool(run.sfa.isnan().any())
