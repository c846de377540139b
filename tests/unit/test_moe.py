"""Routing, gathers and sums without a GPU: what must hold for any choices, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import kgen.runtime.casts as c
from kgen.errors import UnsupportedInput
from kgen.runtime import moe, plain
from kgen.runtime.cast_launch import with_adjacent_columns
from tests.cast_checks import BF16, E4M3, FP16, FP32, assert_same, bits, random, strides


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.integers(0, 40),
    top_k=st.integers(1, 5),
    experts=st.integers(1, 12),
    alignment=st.sampled_from([1, 3, 8, 128]),
    seed=st.integers(0, 10**6),
)
def test_routes(tokens: int, top_k: int, experts: int, alignment: int, seed: int) -> None:
    """Every choice of an expert has one row in the expert's part, in order; the rest is padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, experts + 2, (tokens, top_k), generator=generator)
    r = moe.route_tokens(ids, experts, alignment=alignment)
    assert all(t.dtype == torch.int32 for t in r)
    kept = (ids >= 0) & (ids < experts)
    assert r.counts.tolist() == [int((ids == e).sum()) for e in range(experts)]
    assert bool((r.positions[~kept] == -1).all())
    assert int(r.m_offsets[0]) == 0
    assert bool((r.m_offsets % alignment == 0).all())
    assert int(r.m_offsets[-1]) <= r.source_rows.numel()
    used = torch.zeros_like(r.source_rows, dtype=torch.bool)
    for expert in range(experts):
        first, after = r.m_offsets[expert : expert + 2].tolist()
        rows = r.positions[ids == expert]  # by token and choice
        assert rows.tolist() == list(range(first, first + len(rows)))
        assert after - first == -(-len(rows) // alignment) * alignment
        assert bool((r.m_indices[rows.long()] == expert).all())
        used[rows.long()] = True
    token_of = torch.arange(tokens)[:, None].expand(tokens, top_k)
    assert torch.equal(r.source_rows[r.positions[kept].long()].long(), token_of[kept])
    assert bool((r.source_rows[~used] == -1).all())
    assert bool((r.m_indices[~used] == -1).all())
    if alignment == 1:
        assert r.source_rows.numel() == ids.numel()


def test_capacity_holds_the_worst_case() -> None:
    """Each choice for an expert of its own: most padding there can be."""
    r = moe.route_tokens(torch.arange(6).view(3, 2), 8, alignment=128)
    assert int(r.m_offsets[-1]) == r.source_rows.numel() == 6 * 128


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_there_and_back(dtype: torch.dtype) -> None:
    x = random(50, 72, dtype)
    ids = torch.randint(0, 9, (50, 4), generator=torch.Generator().manual_seed(0))
    r = moe.route_tokens(ids, 9, alignment=16)
    rows = moe.gather_rows(x, r.source_rows)
    assert torch.equal(rows[r.positions[3, 2]], x[3])
    assert not bool(rows[r.m_indices < 0].any())
    assert torch.equal(moe.combine_rows(rows, r.positions, torch.full((50, 4), 0.25)), x)


def test_sums_are_made_in_order_in_fp32() -> None:
    x = torch.tensor([[2.0**24], [1.0], [1.0], [-(2.0**24)]])
    order = torch.tensor([[0, 1, 2, 3], [1, 2, 0, 3], [0, -1, 4, 3]], dtype=torch.int32)
    assert moe.combine_rows(x, order).flatten().tolist() == [0.0, 2.0, 0.0]
    out = moe.combine_rows(x.to(BF16), order, torch.ones(3, 4), FP32)
    assert out.dtype == FP32


def test_rows_that_are_not_there_add_nothing_not_even_nan() -> None:
    x = torch.tensor([[float("nan")], [1.0]])
    positions = torch.tensor([[1, -1], [1, 5]], dtype=torch.int32)
    assert moe.combine_rows(x, positions).flatten().tolist() == [1.0, 1.0]


def test_gathers_and_casts() -> None:
    x = random(20, 272, BF16)
    rows = torch.tensor([3, -1, 19, 20, 3], dtype=torch.int32)
    gathered = moe.gather_rows(x, rows)
    assert torch.equal(gathered[[0, 2, 4]], x[[3, 19, 3]])
    assert not bool(gathered[[1, 3]].any())
    direct = moe.gather_per_token_cast_to_fp8(x, rows)
    assert_same(direct, c.per_token_cast_to_fp8(gathered))
    assert_same(moe.gather_scaled_rows(c.per_token_cast_to_fp8(x), rows), direct)
    assert direct[1][1].tolist() == [1.0] * 3
    assert strides(direct[1]) == [1, 8]
    row_major = moe.gather_scaled_rows(c.per_token_cast_to_fp8(x), rows, row_major_scales=True)
    assert strides(row_major[1]) == [3, 1]
    out = torch.empty(5, 272, dtype=torch.uint8).view(E4M3), torch.empty(5, 3)
    assert moe.gather_per_token_cast_to_fp8(x, rows, out=out)[0] is out[0]
    assert_same(out, direct, layout=False)


def test_nan_bytes_are_moved_as_they_are() -> None:
    fp8 = torch.arange(256, dtype=torch.uint8).view(E4M3).view(8, 32)
    rows = torch.arange(7, -1, -1, dtype=torch.int32)
    assert torch.equal(bits(moe.gather_rows(fp8, rows)), bits(fp8).flip(0))


def test_nothing_to_gather() -> None:
    none = torch.empty(0, dtype=torch.int32)
    assert moe.gather_rows(torch.ones(3, 8), none).shape == (0, 8)
    assert moe.gather_per_token_cast_to_fp8(torch.ones(3, 8), none)[0].shape == (0, 8)
    rows = torch.zeros(2, dtype=torch.int32)
    assert not bool(moe.gather_rows(torch.ones(0, 8), rows).any())


def test_rows_cast_transposed() -> None:
    """The gathered rows' cast in the other direction, without gathering them first."""
    x = random(20, 272, BF16)
    for rows in ([3, -1, 19, 20, 3], [-1] * 130, list(range(19, -1, -1)) * 7):
        index = torch.tensor(rows, dtype=torch.int32)
        found = moe.gather_per_token_cast_to_fp8(x, index, transposed=True)
        assert_same(found, c.per_token_cast_to_fp8(moe.gather_rows(x, index), transposed=True))
    assert found[0].shape == (272, 140)
    assert strides(found[1]) == [1, 272]


@settings(deadline=None, max_examples=60)
@given(
    counts=st.lists(st.integers(0, 40), min_size=0, max_size=9),
    spare=st.integers(0, 5),
    alignment=st.sampled_from([1, 3, 16, 128]),
    named=st.booleans(),
)
def test_padded_groups(counts: list[int], spare: int, alignment: int, named: bool) -> None:
    """Every group's rows in order from a multiple of the alignment on; -1 everywhere else."""
    rows = sum(counts) + spare
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    names = torch.arange(100, 100 + rows, dtype=torch.int32) if named else None
    padded = moe.pad_groups(offsets, rows, alignment=alignment, source_rows=names)
    assert padded.ks.tolist() == [-(-count // alignment) * alignment for count in counts]
    expected = []
    for group, count in enumerate(counts):
        first = int(offsets[group]) + 100 * named
        filler = [-1] * (int(padded.ks[group]) - count)
        expected += [*range(first, first + count), *filler]
    found = padded.source_rows.tolist()
    assert len(found) % alignment == 0
    assert found[: len(expected)] == expected
    assert set(found[len(expected) :]) <= {-1}


def test_padded_groups_are_those_of_an_aligned_routing() -> None:
    """Two ways to the same rows: routing again with an alignment, or padding what was routed."""
    ids = torch.randint(0, 6, (90, 3), generator=torch.Generator().manual_seed(1))
    tight, aligned = (moe.route_tokens(ids, 6, alignment=n) for n in (1, 128))
    padded = moe.pad_groups(tight.m_offsets, 270, source_rows=tight.source_rows)
    assert torch.equal(padded.source_rows, aligned.source_rows)
    assert torch.equal(padded.ks, aligned.m_offsets.diff())


def test_a_sum_over_padded_rows_is_each_groups() -> None:
    """What a weight gradient adds up for a group has the rows of no other in it."""
    x, y = random(50, 136, BF16), random(50, 72, BF16, seed=1)
    offsets = torch.tensor([0, 20, 20, 49], dtype=torch.int32)
    padded = moe.pad_groups(offsets, 50)
    lhs, rhs = (
        moe.gather_per_token_cast_to_fp8(t, padded.source_rows, transposed=True) for t in (x, y)
    )
    start = 0
    for group, k in enumerate(padded.ks.tolist()):
        part = slice(start, start + k)
        a, b = (v.float()[:, part] * s.repeat_interleave(128, 1)[:, part] for v, s in (lhs, rhs))
        rows = slice(int(offsets[group]), int(offsets[group + 1]))
        exact = x[rows].float().t() @ y[rows].float()
        assert float((a @ b.t() - exact).norm()) <= 0.06 * float(exact.norm())
        start += k


def test_weights_find_their_rows() -> None:
    ids = torch.tensor([[0, 2], [2, 9], [1, 0]])
    weights = torch.arange(1.0, 7.0).view(3, 2)
    routing = moe.route_tokens(ids, 3)
    rows = moe.weights_of_rows(weights, routing.positions, 6)
    assert rows.tolist() == [1.0, 6.0, 5.0, 2.0, 3.0, 0.0]
    back = moe.gather_rows(rows[:, None], routing.positions.flatten()).view(3, 2)
    assert back.tolist() == [[1.0, 2.0], [3.0, 0.0], [5.0, 6.0]]


def test_swiglu_with_weights_is_scaled_in_fp32() -> None:
    """Powers of two move the scale alone; zero makes zeros with scale 1."""
    x = random(5, 512, BF16)
    weights = torch.tensor([1.0, 0.25, -2.0, 0.0, 8.0])
    values, scales = c.swiglu_per_token_cast_to_fp8(x, row_weights=weights)
    plain, plain_scales = c.swiglu_per_token_cast_to_fp8(x)
    rows = [0, 1, 4]
    assert torch.equal(bits(values)[rows], bits(plain)[rows])
    assert torch.equal(scales[rows], plain_scales[rows] * weights[rows, None])
    assert torch.equal(values[2].float(), -plain[2].float())
    assert not bool(values[3].float().any())
    assert scales[3].tolist() == [1.0, 1.0]
    masked = c.swiglu_per_token_cast_to_fp8(
        x[None], torch.tensor([5], dtype=torch.int32), row_weights=weights[None]
    )
    assert torch.equal(bits(masked[0][0]), bits(values))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu_backward_is_autograds(dtype: torch.dtype, weighted: bool) -> None:
    x, grad = random(7, 2 * 72, dtype) * 3, random(7, 72, dtype, seed=3)
    weights = torch.rand(7, generator=torch.Generator().manual_seed(0)) - 0.3
    exact, by = x.double().requires_grad_(), weights.double().requires_grad_()
    gate, up = exact.chunk(2, dim=-1)
    hidden = torch.nn.functional.silu(gate) * up
    if weighted:
        hidden = hidden * by[:, None]
    hidden.backward(grad.double())  # type: ignore[no-untyped-call]
    found = c.swiglu_backward(x, grad, weights if weighted else None)
    step = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 1e-6}[dtype]
    assert exact.grad is not None
    for one, other in ((found.grad_x, exact.grad), (found.hidden, hidden.detach())):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=step, atol=2e-5)
    assert (found.grad_weights is None) == (not weighted)
    if found.grad_weights is not None:
        assert by.grad is not None
        torch.testing.assert_close(found.grad_weights.double(), by.grad, rtol=1e-4, atol=1e-4)


def test_nothing_to_differentiate() -> None:
    for m, h in ((0, 8), (3, 0)):
        found = c.swiglu_backward(torch.ones(m, 2 * h), torch.ones(m, h), torch.ones(m))
        assert found.grad_x.shape == (m, 2 * h)
        assert found.grad_weights is not None
        assert found.grad_weights.tolist() == [0.0] * m
    none = torch.empty(0, dtype=torch.int32)
    assert c.transpose_block_cast((torch.zeros(0, 5).to(E4M3), torch.ones(0, 1)))[0].shape == (5, 0)
    assert moe.gather_per_token_cast_to_fp8(X, none, transposed=True)[0].shape == (8, 0)
    assert moe.pad_groups(none.new_zeros(1), 0).ks.shape == (0,)


NO_PAIR: Any = torch.zeros(3, 8)
X, ROWS, IDS = torch.zeros(3, 8), torch.zeros(2, dtype=torch.int32), torch.zeros(3, 2).int()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: moe.route_tokens(IDS, 2.5), "num_experts=2.5: expected a whole number"),  # type: ignore[arg-type]
        (lambda: moe.route_tokens(IDS, 4, alignment=True), "alignment=True: expected a whole"),
        (
            lambda: moe.gather_scaled_rows((3, torch.ones(2, 1)), IDS[0]),  # type: ignore[arg-type]
            r"values is int: expected a tensor \[M, K\]",
        ),
        (
            lambda: moe.gather_scaled_rows(
                (torch.ones(2, 8), torch.ones(2, 1, device="meta")), IDS[0]
            ),
            r"scales are torch.float32\[2, 1\] on meta: expected float32\[2, blocks\] on cpu",
        ),
        (lambda: moe.route_tokens(IDS[0], 4), r"topk_ids is \[2\]: expected a tensor \[tokens"),
        (lambda: moe.route_tokens(IDS.float(), 4), "topk_ids is torch.float32: expected int32"),
        (lambda: moe.route_tokens(IDS, 0), "num_experts=0: expected 1 to 1024"),
        (lambda: moe.route_tokens(IDS, 1025), "num_experts=1025: expected 1 to 1024"),
        (lambda: moe.route_tokens(IDS, 4, alignment=0), "alignment=0 with 6 choices"),
        (lambda: moe.route_tokens(IDS, 4, alignment=2**31), "fewer than 2.31 rows"),
        (lambda: moe.gather_rows(X[0], ROWS), r"x is \[8\]: expected a tensor \[M, K\]"),
        (lambda: moe.gather_rows(X, ROWS.long()), r"source_rows is torch.int64\[2\]"),
        (
            lambda: moe.gather_scaled_rows(NO_PAIR, ROWS),
            "expected the pair .values, scales., got Tensor",
        ),
        (
            lambda: moe.gather_scaled_rows((X, X[:2]), ROWS),
            r"scales are torch.float32\[2, 8\] on cpu: expected float32\[3, blocks\]",
        ),
        (lambda: moe.pad_groups(IDS, 3), r"m_offsets is torch.int32\[3, 2\] on cpu: expected"),
        (lambda: moe.pad_groups(ROWS.long(), 3), "m_offsets is torch.int64"),
        (lambda: moe.pad_groups(ROWS[:0], 3), r"m_offsets has 0 values: expected \[G\+1\]"),
        (lambda: moe.pad_groups(torch.zeros(1026).int(), 3), "m_offsets has 1026 values"),
        (lambda: moe.pad_groups(ROWS, -1), "num_rows=-1 alignment=128: expected at least 0"),
        (lambda: moe.pad_groups(ROWS, 2.0), "num_rows=2.0: expected a whole number"),  # type: ignore[arg-type]
        (lambda: moe.pad_groups(ROWS, 3, alignment=0), "alignment=0: expected at least 0 and 1"),
        (lambda: moe.pad_groups(ROWS, 3, source_rows=ROWS), r"int32\[2\]: expected \[3\]"),
        (lambda: moe.weights_of_rows(X, IDS, 3), r"weights are torch.float32\[3, 8\] and posi"),
        (
            lambda: moe.gather_per_token_cast_to_fp8(
                X, ROWS, transposed=True, out=(X.to(E4M3), X[:, :1])
            ),
            "out is given with transposed=True",
        ),
        (lambda: c.swiglu_backward(X[0], X), r"x is \[8\]: expected gate and up"),
        (lambda: c.swiglu_backward(X[:, :7], X), r"x is \[3, 7\]: expected gate and up"),
        (lambda: c.swiglu_backward(X, X), r"grad is torch.float32\[3, 8\]: expected torch.float32"),
        (lambda: c.swiglu_backward(X, X[:, :4].half()), r"grad is torch.float16\[3, 4\]"),
        (
            lambda: c.swiglu_backward(X, X[:, :4], X[:2, 0]),
            r"row_weights is torch.float32\[2\] on cpu: expected float32\[3\] on cpu",
        ),
        (
            lambda: c.swiglu_per_token_cast_to_fp8(X, row_weights=IDS[:, 0]),
            r"row_weights is torch.int32\[3\] on cpu: expected float32\[3\]",
        ),
        (
            lambda: c.swiglu_backward(X, X[:, :4].clone().requires_grad_()),
            "swiglu_backward has no gradient",
        ),
        (lambda: moe.combine_rows(X, IDS.long()), "positions is torch.int64 on cpu"),
        (lambda: moe.combine_rows(X.int(), IDS), "x is torch.int32: expected BF16, FP16 or FP32"),
        (lambda: moe.combine_rows(X, IDS, None, torch.int8), "out_dtype is torch.int8"),
        (lambda: moe.combine_rows(X, IDS, X), r"weights is torch.float32\[3, 8\] on cpu: expected"),
        (lambda: moe.combine_rows(X.clone().requires_grad_(), IDS), "combine_rows has no gradient"),
    ],
)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(UnsupportedInput, match=message):
        call()


def test_tensors_without_memory_meet_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracer's tensors have no addresses: a kernel given them would lose the process its GPU."""

    def find(*_: Any) -> None:
        raise AssertionError("a kernel was looked for")

    monkeypatch.setattr(plain.KERNELS, "find", find)
    with FakeTensorMode():
        x, rows = torch.empty(6, 256, dtype=BF16), torch.empty(5, dtype=torch.int32)
        routing = moe.route_tokens(torch.empty(6, 2, dtype=torch.int64), 4, alignment=8)
        assert [tuple(t.shape) for t in routing] == [(40,), (6, 2), (5,), (40,), (4,)]
        padded = moe.pad_groups(torch.empty(5, dtype=torch.int32), 6)
        assert [tuple(t.shape) for t in padded] == [(640,), (4,)]
        assert moe.gather_rows(x, rows).shape == (5, 256)
        turned = moe.gather_per_token_cast_to_fp8(x, rows, transposed=True)
        assert [tuple(t.shape) for t in turned] == [(256, 5), (256, 1)]
        assert c.swiglu_backward(x, x[:, :128]).grad_x.shape == (6, 256)
        assert c.transpose_block_cast((turned[0], torch.empty(2, 1)))[0].shape == (5, 256)
        a, scales = moe.gather_per_token_cast_to_fp8(x, rows)
        assert (a.shape, a.dtype, scales.shape) == ((5, 256), E4M3, (5, 2))
        assert moe.gather_scaled_rows((a, scales), rows)[1].shape == (5, 2)
        assert moe.combine_rows(x, rows[:, None], torch.empty(5, 1)).shape == (5, 256)
        assert c.swiglu_per_token_cast_to_fp8(x)[0].shape == (6, 128)
        masked = c.swiglu_per_token_cast_to_fp8(x[None], torch.empty(1, dtype=torch.int32))
        assert [tuple(t.shape) for t in masked] == [(1, 6, 128), (1, 6, 1)]


def test_conjugated_views_are_gathered_as_what_they_stand_for() -> None:
    x = torch.randn(4, 3, dtype=torch.complex64).conj()
    assert torch.equal(with_adjacent_columns(x).resolve_conj(), x)
    assert not with_adjacent_columns(x).is_conj()


def test_a_given_output_counts_as_written() -> None:
    out = torch.zeros(1, 8).to(E4M3), torch.zeros(1, 1)
    versions = [t._version for t in out]
    moe.gather_per_token_cast_to_fp8(torch.ones(2, 8), torch.ones(1, dtype=torch.int32), out=out)
    assert all(t._version > version for t, version in zip(out, versions, strict=True))
