"""Problems: what is refused, what follows from the sizes, and the line that stands for one."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kgen.errors import UsageError
from kgen.problem import MAX_EXTENT, GemmProblem, ceil_div, round_up


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_rounding(a: int, b: int) -> None:
    assert (ceil_div(a, b) - 1) * b < a <= ceil_div(a, b) * b
    assert round_up(a, b) % b == 0
    assert 0 <= round_up(a, b) - a < b


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"kind": "sparse"}, "kind='sparse': expected one of dense"),
        ({"d_dtype": "fp8"}, "d_dtype='fp8': expected one of bf16, fp16, fp32"),
        ({"m": 0}, "m=0: expected 1 to"),
        ({"m": -1}, "m=-1: expected 1 to"),
        ({"n": 0}, "n=0: expected 1 to"),
        ({"k": MAX_EXTENT + 1}, f"expected 1 to {MAX_EXTENT}"),
        ({"num_sms": -1}, "num_sms=-1: expected 0 to"),
        ({"n": 20}, "n=20: the kernel needs a multiple of 8; pad N to 24"),
        ({"k": 24}, "k=24: TMA needs a multiple of 16; pad K to 32"),
        ({"groups": 0}, "groups=0: expected 1 to"),
        ({"groups": 3}, "groups=3: a dense problem has one group"),
    ],
)
def test_a_field_out_of_range_is_named(changes: dict[str, object], part: str) -> None:
    fields: dict[str, object] = {"kind": "dense", "m": 4, "n": 8, "k": 16} | changes
    with pytest.raises(UsageError) as caught:
        GemmProblem(**fields)  # type: ignore[arg-type]
    assert part in str(caught.value)


def test_the_largest_extents_are_taken() -> None:
    edge = GemmProblem("dense", MAX_EXTENT, MAX_EXTENT // 8 * 8, MAX_EXTENT // 16 * 16)
    assert edge.num_k_blocks == 2**24


def test_counts() -> None:
    problem = GemmProblem("dense", 10, 264, 400)
    assert problem.num_k_blocks == 4  # the last one partial
    assert problem.flops == 2 * 10 * 264 * 400
    operands, scales = 10 * 400 + 264 * 400, 4 * (10 * 4 + 3 * 4)
    assert problem.min_bytes == operands + scales + 10 * 264 * 2
    wide = GemmProblem("dense", 10, 264, 400, d_dtype="fp32")
    assert wide.min_bytes - problem.min_bytes == 10 * 264 * 2


def test_with_m_changes_m_alone() -> None:
    problem = GemmProblem("dense", 10, 264, 400, d_dtype="fp16", num_sms=66)
    assert problem.with_m(3) == GemmProblem("dense", 3, 264, 400, d_dtype="fp16", num_sms=66)
    with pytest.raises(UsageError):
        problem.with_m(0)


def test_it_is_a_value() -> None:
    problem = GemmProblem("dense", 10, 264, 400)
    assert len({problem, GemmProblem("dense", 10, 264, 400)}) == 1
    assert problem < problem.with_m(11)
    with pytest.raises(FrozenInstanceError):
        problem.m = 3  # type: ignore[misc]


def test_text_leaves_defaults_out() -> None:
    assert str(GemmProblem("dense", 10, 264, 400)) == "dense m=10 n=264 k=400"
    text = str(GemmProblem("dense", 10, 264, 400, d_dtype="fp32", num_sms=66))
    assert text == "dense m=10 n=264 k=400 d_dtype=fp32 num_sms=66"
