"""Batch invariance: a row's bits are the same whatever number of rows comes with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kgen.runtime.gemm as g
from kgen.cases import Case
from kgen.config import GemmConfig
from kgen.device import Device
from kgen.problem import GemmProblem
from kgen.space import valid_configs
from kgen.validity import why_invalid
from tests.gpu.bed import Kernels

#: (N, K) where defaults split K for few rows, and one where they do not.
SIZES = ((576, 7168), (2112, 7168), (7168, 2048))
MS = (*range(1, 257), 300, 512, 777, 1024, 2000, 4096)
RECIPES: tuple[dict[str, Any], ...] = (
    {},
    {"bias": True},
    {"recipe": "row", "fast_accum": True},
    {"recipe": "row", "bias": True},
    {"recipe": "tensor", "fast_accum": True},
)


@pytest.fixture(autouse=True)
def _invariant() -> Iterator[None]:
    g.reset_stats()
    g.set_batch_invariant(True)
    yield
    g.set_batch_invariant(False)
    assert g.stats()["fallbacks"] == {}


@pytest.mark.parametrize("fields", RECIPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_public_calls(n: int, k: int, fields: dict[str, Any]) -> None:
    """M from 1 to 256 and larger ones, bit by bit against the largest."""
    case = Case(GemmProblem("dense", max(MS), n, k, **fields))
    bias = next(iter(case.bias), None)

    def call(m: int) -> torch.Tensor:
        a, sfa, b, sfb = case.inputs(m)
        out = g.mm_fp8_nt(
            (a, sfa),
            (b, sfb),
            bias=bias,
            recipe=case.problem.recipe,
            fast_accum=case.problem.fast_accum,
        )
        assert g.last_path().startswith("kernel")
        return out

    whole = call(max(MS))
    wrong = torch.stack([(call(m) != whole[:m]).any() for m in MS])
    assert [m for m, bad in zip(MS, wrong.tolist(), strict=True) if bad] == []


@pytest.mark.parametrize("fields", RECIPES, ids=str)
def test_every_tile_gives_the_same_bits(
    fields: dict[str, Any], kernels: Kernels, device: Device
) -> None:
    """Whatever the tuner may pick: tiles, accumulators, clusters, warpgroups."""
    problem = GemmProblem("dense", 257, 2112, 7168, batch_invariant=True, **fields)
    case = Case(problem)
    chosen = {c.block_m: c for c in valid_configs(problem, device)[::-1]}
    chosen |= {-c.num_accumulators: c for c in valid_configs(problem, device)}
    more = [
        GemmConfig(block_n=152, cluster_m=2),
        GemmConfig(block_n=112, cluster_n=2),
        GemmConfig(192, 112, 3, 3),
    ]
    configs = [*chosen.values(), *(c for c in more if why_invalid(problem, c, device) is None)]
    kernels.prefetch((problem, config) for config in configs)
    results = []
    for config in configs:
        d = torch.empty(257, 2112, dtype=torch.bfloat16, device="cuda")
        kernels.get(problem, config)(*case.inputs(257), d, *case.bias)
        results.append(d)
    differing = [str(c) for c, d in zip(configs, results, strict=True) if not d.equal(results[0])]
    assert differing == []


def test_without_the_policy_few_rows_may_split_k() -> None:
    """That the policy does something: else these tests show nothing."""
    split = g.plan_for(1, 576, 7168)
    g.set_batch_invariant(False)
    free = g.plan_for(1, 576, 7168)
    assert split is not None
    assert free is not None
    assert split.choice is not None
    assert free.choice is not None
    assert split.choice.config.split_k == 1
    assert free.choice.config.split_k > 1


@pytest.mark.parametrize("num_sms", [20, 0])
def test_the_sm_budget_changes_no_bit(num_sms: int) -> None:
    case = Case(GemmProblem("dense", 100, 576, 7168))
    lhs, rhs = case.inputs(100)[:2], case.inputs(100)[2:]
    whole = g.mm_fp8_nt(lhs, rhs)
    try:
        g.set_num_sms(num_sms)
        assert torch.equal(g.mm_fp8_nt(lhs, rhs), whole)
    finally:
        g.set_num_sms(0)
