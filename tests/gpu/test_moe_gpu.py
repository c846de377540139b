"""Routing, gathers and sums on a GPU: the CPU reference's bits, in every run, in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kgen.runtime.casts as c
from kgen.runtime import moe
from kgen.runtime.plain import KERNELS
from tests.cast_checks import BF16, FP16, FP32, assert_same, bits, random

ROUTES = [
    (1, 1, 1, 1),
    (7, 2, 5, 1),
    (64, 8, 256, 128),
    (512, 8, 256, 1),
    (513, 8, 256, 128),
    (4096, 8, 256, 128),
    (1500, 8, 33, 1),
    (1025, 4, 16, 128),
    (0, 8, 4, 4),
    (3, 8, 1024, 64),
    (20000, 8, 1024, 1),
]


@pytest.fixture(autouse=True)
def _kernels_only() -> Iterator[None]:
    yield
    assert KERNELS.failures == []


def choices(tokens: int, top_k: int, experts: int, seed: int = 0) -> torch.Tensor:
    """Ids that may be just outside the experts."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, experts + 1, (tokens, top_k), generator=generator)


def by_both(function: Callable[..., Any], *tensors: Any) -> None:
    """On the GPU as on the CPU, where the reference answers."""
    expected = function(*tensors)
    found = function(*(_on_gpu(tensor) for tensor in tensors))
    assert_same([t.cpu() for t in found], expected, layout=False)


def _on_gpu(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_on_gpu(one) for one in value)
    return value.cuda() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(("tokens", "top_k", "experts", "alignment"), ROUTES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_routes(tokens: int, top_k: int, experts: int, alignment: int, dtype: torch.dtype) -> None:
    ids = choices(tokens, top_k, experts).to(dtype)
    by_both(lambda t: moe.route_tokens(t, experts, alignment=alignment), ids)


def test_all_choices_of_one_expert() -> None:
    by_both(lambda t: moe.route_tokens(t, 64, alignment=128), torch.full((3000, 8), 17))


def test_routes_are_the_same_in_every_run() -> None:
    ids = choices(5000, 8, 100).cuda()
    first = moe.route_tokens(ids, 100)
    for _ in range(20):
        assert_same(moe.route_tokens(ids, 100), first)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(("m", "k"), [(9, 7168), (5, 72), (6, 13), (700, 2048)])
def test_rows(m: int, k: int, dtype: torch.dtype) -> None:
    """Gathered as they are, with scales, cast on the way; added up with weights and without."""
    generator = torch.Generator().manual_seed(m)
    x = random(m, k, dtype)
    rows = torch.randint(-1, m + 1, (1037,), generator=generator, dtype=torch.int32)
    by_both(lambda x, r: [moe.gather_rows(x, r)], x, rows)
    by_both(moe.gather_scaled_rows, c.per_token_cast_to_fp8(x), rows)
    by_both(moe.gather_per_token_cast_to_fp8, x, rows)
    by_both(lambda x, r: moe.gather_per_token_cast_to_fp8(x, r, pow2_scales=True), x, rows)
    for top_k in (1, 8, 11):
        positions = torch.randint(-1, m + 1, (65, top_k), generator=generator, dtype=torch.int32)
        weights = torch.randn(65, top_k, generator=generator)
        for out_dtype in (BF16, FP16, FP32):
            sums: Any = lambda x, p, w, d=out_dtype: [moe.combine_rows(x, p, w, d)]  # noqa: E731
            by_both(sums, x, positions, weights)
            by_both(sums, x, positions, None)


def test_there_and_back() -> None:
    """Rows that go to their experts and come back with weights that add up to one are the rows."""
    x = random(1000, 7168, BF16, "cuda")
    routing = moe.route_tokens(choices(1000, 8, 64).clamp(0, 63).cuda(), 64, alignment=128)
    gathered = moe.gather_rows(x, routing.source_rows)
    weights = torch.full((1000, 8), 0.125, device="cuda")
    assert torch.equal(moe.combine_rows(gathered, routing.positions, weights), x)
    padding = routing.m_indices < 0
    assert not bool(bits(gathered[padding]).any())


def test_no_host_synchronisation() -> None:
    """Every call may be made while torch refuses to wait, and replayed from a graph."""
    ids = choices(600, 8, 64).cuda()
    x = random(600, 1024, BF16, "cuda")
    weights = torch.rand(600, 8, device="cuda")

    def layer() -> tuple[torch.Tensor, ...]:
        routing = moe.route_tokens(ids, 64, alignment=128)
        lhs = moe.gather_per_token_cast_to_fp8(x, routing.source_rows)
        again = moe.gather_scaled_rows(c.per_token_cast_to_fp8(x), routing.source_rows)
        rows = moe.gather_rows(x, routing.source_rows)
        return *lhs, *again, moe.combine_rows(rows, routing.positions, weights), *routing

    layer()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    for seed in (1, 2):
        ids.copy_(choices(600, 8, 64, seed))
        x.copy_(random(600, 1024, BF16, seed=seed))
        graph.replay()
        assert_same(captured, layer(), layout=False)
        assert_same(captured[:2], captured[2:4])
