"""Routing, gathers and sums on a GPU: the CPU reference's bits, in every run, in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kgen.runtime.casts as c
from kgen.runtime import moe
from kgen.runtime.plain import KERNELS
from tests.cast_checks import (
    BF16,
    FP16,
    FP32,
    assert_same,
    bits,
    check_swiglu_gradients,
    random,
)

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
    for length in (1037, 1024, 3):  # rows of the result in whole vectors, and not
        by_both(
            lambda x, r: moe.gather_per_token_cast_to_fp8(x, r, transposed=True), x, rows[:length]
        )
    by_both(lambda x, r: moe.gather_per_token_cast_to_fp8(x, r, pow2_scales=True), x, rows)
    for top_k in (1, 8, 11):
        positions = torch.randint(-1, m + 1, (65, top_k), generator=generator, dtype=torch.int32)
        weights = torch.randn(65, top_k, generator=generator)
        for out_dtype in (BF16, FP16, FP32):
            sums: Any = lambda x, p, w, d=out_dtype: [moe.combine_rows(x, p, w, d)]  # noqa: E731
            by_both(sums, x, positions, weights)
            by_both(sums, x, positions, None)


@pytest.mark.parametrize(
    ("groups", "rows", "alignment"),
    [(1, 5, 128), (8, 808, 128), (40, 300, 16), (1024, 90, 4), (256, 65536, 128), (3, 0, 128)],
)
def test_padded_groups(groups: int, rows: int, alignment: int) -> None:
    """Empty groups, rows in none, and offsets that make no sense."""
    generator = torch.Generator().manual_seed(groups)
    ends = torch.randint(0, rows + 1, (groups,), generator=generator).sort().values.int()
    names = torch.randperm(rows, generator=generator).int()
    good = torch.cat([torch.zeros(1, dtype=torch.int32), ends])
    for offsets in (good, good.flip(0), good * 0, good * 3 - 7):
        by_both(lambda o: moe.pad_groups(o, rows, alignment=alignment), offsets)
        by_both(
            lambda o, n: moe.pad_groups(o, rows, alignment=alignment, source_rows=n), offsets, names
        )


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(("m", "h"), [(19, 264), (3, 13), (1, 2048), (2048, 1408), (9, 8)])
def test_swiglu_backward(m: int, h: int, dtype: torch.dtype) -> None:
    """Close to the reference, with weights of rows and without, for strided tensors too."""
    x, grad = random(m, 2 * h, dtype, "cuda") * 3, random(m, h, dtype, "cuda", seed=1)
    wide = torch.cat([grad, grad, grad, grad], dim=1)[:, h : 2 * h]
    weights = (torch.rand(m, generator=torch.Generator().manual_seed(2)) - 0.3).cuda()
    for of_rows in (None, weights):
        on_cpu = None if of_rows is None else of_rows.cpu()
        expected = c.swiglu_backward(x.cpu(), grad.cpu(), on_cpu)
        for given in (grad, wide):
            found = c.swiglu_backward(x, given, of_rows)
            on_host = [None if t is None else t.cpu() for t in found]
            assert on_host[0] is not None
            assert on_host[1] is not None
            gradients = c.SwigluGradients(on_host[0], on_host[1], on_host[2])
            check_swiglu_gradients(gradients, expected, dtype)


def test_swiglu_with_weights_of_rows() -> None:
    """Powers of two move the scales alone, whatever e^x is; masked as not masked."""
    x = random(700, 2 * 1408, BF16, "cuda")
    exponents = torch.randint(-3, 4, (700,), generator=torch.Generator().manual_seed(0))
    weights = torch.exp2(exponents.float()).cuda()
    values, scales = c.swiglu_per_token_cast_to_fp8(x, row_weights=weights)
    plain, plain_scales = c.swiglu_per_token_cast_to_fp8(x)
    assert torch.equal(bits(values), bits(plain))
    assert torch.equal(scales, plain_scales * weights[:, None])
    counts = torch.tensor([700 // 2, 700 // 2], dtype=torch.int32, device="cuda")
    masked = c.swiglu_per_token_cast_to_fp8(
        x.view(2, 350, -1), counts, row_weights=weights.view(2, 350)
    )
    assert torch.equal(bits(masked[0]).view(700, -1), bits(values))
    assert torch.equal(masked[1].reshape(700, -1), scales)


@pytest.mark.parametrize(
    "shape", [(128, 256), (144, 1032), (130, 13), (1, 1), (3, 200, 136), (8, 2816, 2048)]
)
def test_turned_weights(shape: tuple[int, ...]) -> None:
    """Every byte and scale moved, also out of a larger matrix."""
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    pair = values.view(torch.float8_e4m3fn), torch.rand(blocks, generator=generator)
    by_both(lambda *pair: c.transpose_block_cast(pair), *pair)
    part = shape[-1] // 2 + 1

    def cut(values: torch.Tensor, scales: torch.Tensor) -> Any:
        return c.transpose_block_cast((values[..., :part], scales[..., : -(-part // 128)]))

    by_both(cut, *pair)


def test_weights_turned_or_cast_turned_are_the_same() -> None:
    w = random(8 * 272, 2048, BF16, "cuda").view(8, 272, 2048)
    by_turning = c.transpose_block_cast(c.per_block_cast_to_fp8(w))
    assert_same(by_turning, c.per_block_cast_to_fp8(w, transposed=True))
    for i in range(8):
        one = c.cast_to_fp8(w[i], "block", direction="transposed")
        assert_same((by_turning[0][i], by_turning[1][i]), one[2:4])


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
        padded = moe.pad_groups(routing.m_offsets, rows.shape[0], source_rows=routing.source_rows)
        columns = moe.gather_per_token_cast_to_fp8(x, padded.source_rows, transposed=True)
        of_rows = moe.weights_of_rows(weights, routing.positions, rows.shape[0])
        back = c.swiglu_backward(rows, rows[:, :512], of_rows)
        assert back.grad_weights is not None
        more = (*padded, *columns, of_rows, back.grad_x, back.hidden, back.grad_weights)
        return *lhs, *again, *more, moe.combine_rows(rows, routing.positions, weights), *routing

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
