"""Verification under every recipe: right kernels pass, each kind of wrong one is caught."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from kgen.cases import Case, ExactCase, GrowthCase
from kgen.errors import WrongResult
from kgen.problem import GemmProblem
from kgen.verify import (
    MAX_ERROR,
    MAX_GROWTH,
    check_exact,
    check_random,
    limit_for,
    shared_growths,
    verify,
)
from tests.unit.simulated import Simulated

CPU = torch.device("cpu")
#: Partial tiles and strips on every side, two passes of live K blocks, a partial last one.
BLOCK = GemmProblem("dense", m=140, n=328, k=912)
ROW = replace(BLOCK, recipe="row", fast_accum=True)
TENSOR = replace(ROW, recipe="tensor")
RECIPES = [BLOCK, ROW, TENSOR, replace(ROW, fast_accum=False), replace(TENSOR, fast_accum=False)]


def simulated(problem: GemmProblem, **faults: object) -> Simulated:
    """A kernel for the problem with these faults."""
    kind = {"recipe": problem.recipe, "fast_accum": problem.fast_accum}
    return Simulated(**kind, **faults)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cases() -> dict[GemmProblem, Case]:
    """With a bias, made once."""
    problems = [replace(problem, bias=True) for problem in (BLOCK, ROW, TENSOR)]
    return {problem: Case(problem, CPU) for problem in problems}


@pytest.mark.parametrize("problem", RECIPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_right_kernel_passes(problem: GemmProblem, bias: bool) -> None:
    problem = replace(problem, bias=bias)
    kernel = simulated(problem)
    verified = verify(kernel, Case(problem, CPU))
    assert verified.max_tile_error < MAX_ERROR / 2
    assert verified.exact_passes == 2
    assert (verified.growth == 0) == problem.fast_accum


@pytest.mark.parametrize("dtypes", [*itertools.product(("e4m3", "e5m2"), repeat=2)])
@pytest.mark.parametrize("d_dtype", ["bf16", "fp16", "fp32"])
def test_every_type_is_exact_in_the_tensor_core(dtypes: tuple[str, str], d_dtype: str) -> None:
    """Truncated to 13 fraction bits and summed over all of K; the exact case stays exact."""
    of_a, of_b = dtypes
    for base in (BLOCK, ROW, TENSOR):
        types = replace(base, a_dtype=of_a, b_dtype=of_b, d_dtype=d_dtype, bias=True)
        problem = replace(types, m=19, n=24, k=784)
        case = Case(problem, CPU)
        assert case.a.dtype == {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[of_a]
        check_exact(simulated(problem, cut=True), case)


@pytest.mark.parametrize("k", [16 * i for i in range(1, 9)] + [640, 784])
def test_every_end_of_k_is_exact(k: int) -> None:
    for problem in (ROW, TENSOR):
        problem = replace(problem, m=19, n=24, k=k)  # noqa: PLW2901
        check_exact(simulated(problem, cut=True), Case(problem, CPU))


def next_ones(values: torch.Tensor, block: int = 0) -> torch.Tensor:
    """Each takes its neighbour's."""
    return values.roll(-1)


def one_row(scales: torch.Tensor, block: int = 0) -> torch.Tensor:
    wrong = scales.clone()
    wrong[77 % len(wrong)] = wrong[78 % len(wrong)]
    return wrong


def strip(values: torch.Tensor, block: int = 0) -> torch.Tensor:
    """Eight columns take those of the next eight."""
    wrong = values.clone()
    wrong[120:128] = wrong[128:136]
    return wrong


def left_out(bias: torch.Tensor) -> torch.Tensor:
    return bias * 0


def last_left_out(bias: torch.Tensor) -> torch.Tensor:
    wrong = bias.clone()
    wrong[-1] = 0
    return wrong


def twice(bias: torch.Tensor) -> torch.Tensor:
    return bias * 2


#: Fault, and the recipes that have what it spoils.
MUTATIONS: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "neighbour's row scale": ({"scale_a": next_ones}, ("row",)),
    "neighbour's row scale in one row": ({"scale_a": one_row}, ("row",)),
    "neighbour's channel scale": ({"scale_b": next_ones}, ("row",)),
    "next strip's channel scales": ({"scale_b": strip}, ("row",)),
    "scale of A left out": ({"scale_a": lambda s, b: s * 0 + 1}, ("row", "tensor")),
    "scale of B left out": ({"scale_b": lambda s, b: s * 0 + 1}, ("row", "tensor")),
    "missing bias": ({"biases": left_out}, ("block", "row", "tensor")),
    "missing bias in the last column": ({"biases": last_left_out}, ("block", "row", "tensor")),
    "neighbour's bias": ({"biases": next_ones}, ("block", "row", "tensor")),
    "next strip's bias": ({"biases": strip}, ("block", "row", "tensor")),
    "bias added twice": ({"biases": twice}, ("block", "row", "tensor")),
    "one missing k32 step": ({"k32": lambda b, s: (b, s) == (5, 2)}, ("row", "tensor")),
    "missing last k32 step": ({"k32": lambda b, s: (b, s) == (7, 0)}, ("row", "tensor")),
    "one lost K block": (
        {"promotes": lambda b: "drop" if b == 4 else "add"},
        ("row", "tensor"),
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name: str, cases: dict[GemmProblem, Case]) -> None:
    """By all checks, and by the exact case alone."""
    faults, recipes = MUTATIONS[name]
    for problem, case in cases.items():
        if problem.recipe in recipes:
            with pytest.raises(WrongResult):
                verify(simulated(problem, **faults), case)
            with pytest.raises(WrongResult, match="exact case"):
                check_exact(simulated(problem, **faults), case)


def test_exact_case_catches_each_k32_step(cases: dict[GemmProblem, Case]) -> None:
    for problem, case in cases.items():
        for at in itertools.product(range(problem.num_k_blocks), range(4)):
            if 128 * at[0] + 32 * at[1] < problem.k:
                kernel = simulated(problem, k32=lambda b, s, at=at: (b, s) == at)
                with pytest.raises(WrongResult, match="exact case"):
                    check_exact(kernel, case)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 1024), (3, 8, 4096), (24, 24, 7168)])
@pytest.mark.parametrize("d_dtype", ["bf16", "fp32"])
def test_fast_accum_has_room_for_the_tensor_core(m: int, n: int, k: int, d_dtype: str) -> None:
    problem = replace(ROW, m=m, n=n, k=k, d_dtype=d_dtype)
    case = Case(problem, CPU)
    assert limit_for(case) > limit_for(Case(replace(problem, fast_accum=False), CPU))
    assert max(check_random(simulated(problem, cut=True), case)) < 0.8 * limit_for(case)


def test_what_must_be_promoted_and_is_not_is_caught() -> None:
    """Sums that stay in the tensor cores pass where they may only."""
    slow = replace(ROW, m=16, n=16, k=4096, fast_accum=False)
    base, full = GrowthCase(slow, CPU).errors(Simulated(recipe="row", fast_accum=True, cut=True))
    assert full > MAX_GROWTH * base
    assert shared_growths(Case(replace(ROW, m=1, n=8, k=16), CPU)) == []


def test_exact_scales_differ_from_their_neighbours() -> None:
    exact = ExactCase(replace(ROW, m=600, n=2048), CPU)
    for rows in (1, 2, 4, 8, 16, 24, 32, 64, 96, 128, 192, 256, 384, 512):
        assert bool((exact.sfa[rows:] != exact.sfa[:-rows]).all())
    for columns in (1, 2, 4, 8, 16, 24, 32, 64, 96, 128, 192, 256):
        assert bool((exact.sfb[columns:] != exact.sfb[:-columns]).all())


def test_scales_of_rows_come_strided_as_well() -> None:
    case = Case(ROW, CPU)
    plain, strided = case.inputs(5)[1], case.inputs(5, row_major=True)[1]
    assert (plain.shape, plain.stride(0), strided.stride(0)) == ((5, 1), 1, 2)
    assert torch.equal(plain, strided)
    assert Case(TENSOR, CPU).inputs(5, row_major=True)[1].shape == (1, 1)
