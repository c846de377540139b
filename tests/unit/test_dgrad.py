"""Input gradients by name, and weights turned after the cast: results on a CPU, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kgen.runtime.casts as c
import kgen.runtime.gemm as g
from kgen.errors import UnsupportedInput
from kgen.runtime import moe
from tests.cast_checks import BF16, E4M3, E5M2, FP32, assert_same, random

M, N, K = 40, 272, 144  # of Y = X · Wᵀ: X [M, K], W [N, K]
GROUPS = 3


def dense() -> tuple[torch.Tensor, torch.Tensor]:
    """dY [M, N] and W [N, K]."""
    return random(M, N, BF16), random(N, K, BF16, seed=1)


def of_groups() -> tuple[torch.Tensor, torch.Tensor]:
    """dY [M, N] and W [G, N, K]."""
    return random(M, N, BF16), random(GROUPS * N, K, BF16, seed=2).view(GROUPS, N, K)


def close_to(found: torch.Tensor, dy: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether dX is dY · W but for what two casts to FP8 cost."""
    exact = dy.float() @ w.float()
    return float((found.float() - exact).norm() / exact.norm()) < 0.06


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# ------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(N, K), (128, 256), (5, 300), (1, 1)])
def test_turning_a_cast_weight_is_casting_it_turned(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """The same bits, so no second rounding."""
    w = random(*shape, BF16)
    turned = c.transpose_block_cast(c.per_block_cast_to_fp8(w, dtype=dtype))
    assert_same(turned, c.per_block_cast_to_fp8(w, transposed=True, dtype=dtype))
    assert_same(c.transpose_block_cast(turned), c.per_block_cast_to_fp8(w, dtype=dtype))


@pytest.mark.parametrize(("groups", "n"), [(3, 272), (4, 256), (1, 5), (0, 128), (0, 5)])
def test_weights_of_experts_are_cast_each_by_itself(groups: int, n: int) -> None:
    """In one launch where no block has rows of two, and in both directions."""
    w = random(max(groups, 1) * n, K, BF16).view(-1, n, K)[:groups]
    values, scales = c.per_block_cast_to_fp8(w)
    values_t, scales_t = c.per_block_cast_to_fp8(w, transposed=True)
    assert (values.shape, scales.shape) == ((groups, n, K), (groups, -(-n // 128), 2))
    assert (values_t.shape, scales_t.shape) == ((groups, K, n), (groups, 2, -(-n // 128)))
    for i in range(groups):
        assert_same((values[i], scales[i]), c.per_block_cast_to_fp8(w[i]))
        assert_same((values_t[i], scales_t[i]), c.per_block_cast_to_fp8(w[i], transposed=True))


VALUES, SCALES = torch.zeros(N, K).to(E4M3), torch.ones(3, 2)


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        (VALUES, "expected the pair .values, scales., got Tensor"),
        ((VALUES, 3), "scales are int: expected a plain tensor"),
        ((VALUES.float(), SCALES), r"values are torch.float32\[272, 144\]: expected float8"),
        ((VALUES[0], SCALES), r"values are .*\[144\]: expected"),
        ((VALUES, SCALES.t()), r"scales are torch.float32\[2, 3\]: expected float32\[3, 2\]"),
        ((VALUES, torch.ones(N, 1)), "Scales of other recipes belong to rows"),
        ((VALUES, SCALES.to("meta")), "values on cpu, scales on meta: expected one device"),
        ((VALUES, SCALES.clone().requires_grad_()), "transpose_block_cast has no gradient"),
    ],
)
def test_what_can_not_be_turned(weight: Any, says: str) -> None:
    with pytest.raises(UnsupportedInput, match=says):
        c.transpose_block_cast(weight)


# ----------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("turned", [False, True])
def test_dense(turned: bool) -> None:
    dy, w = dense()
    grad = g.per_token_cast_to_fp8(dy)
    if turned:
        weight_t = g.transpose_block_cast(g.per_block_cast_to_fp8(w))
    else:
        weight_t = g.per_block_cast_to_fp8(w, transposed=True)
    out = torch.empty(M, K, dtype=BF16)
    g.dgrad_gemm_fp8_fp8_bf16_nt(grad, weight_t, out)
    assert close_to(out, dy, w)
    assert torch.equal(out, g.mm_fp8_nt(grad, weight_t))
    wide = torch.empty(M, K)
    g.dgrad_gemm_fp8_nt(grad, weight_t, wide)
    assert torch.equal(wide, g.mm_fp8_nt(grad, weight_t, FP32))
    with pytest.raises(UnsupportedInput, match=r"gemm_fp8_fp8_bf16_nt writes torch\.bfloat16"):
        g.dgrad_gemm_fp8_fp8_bf16_nt(grad, weight_t, wide)


def test_dense_by_rows_and_by_tensors() -> None:
    dy, w = dense()
    for cast, recipe in ((g.per_row_cast_to_fp8, "row"), (g.per_tensor_cast_to_fp8, "tensor")):
        out = torch.empty(M, K, dtype=BF16)
        weight_t = cast(w, transposed=True)
        g.dgrad_gemm_fp8_nt(cast(dy), weight_t, out, recipe=recipe, fast_accum=True)
        assert close_to(out, dy, w)


def test_groups_of_rows() -> None:
    dy, w = of_groups()
    grad = g.per_token_cast_to_fp8(dy)
    weight_t = g.per_block_cast_to_fp8(w, transposed=True)
    out = torch.full((M, K), 7.0, dtype=BF16)
    g.m_grouped_dgrad_gemm_fp8_fp8_bf16_nt_contiguous(
        grad, weight_t, out, m_offsets=int32(0, 13, 13, 30)
    )
    assert close_to(out[:13], dy[:13], w[0])
    assert close_to(out[13:30], dy[13:30], w[2])
    assert bool((out[30:] == 7).all())
    index, by_index = int32(*[1] * M), torch.empty(M, K)
    g.m_grouped_dgrad_gemm_fp8_nt_contiguous(grad, weight_t, by_index, index)
    assert close_to(by_index, dy, w[1])


def test_groups_of_counts() -> None:
    dy, w = random(GROUPS * 16, N, BF16), of_groups()[1]
    values, scales = g.per_token_cast_to_fp8(dy, row_major_scales=True)
    grad = values.view(GROUPS, 16, N), scales.view(GROUPS, 16, -1)
    weight_t = g.per_block_cast_to_fp8(w, transposed=True)
    for dtype in (BF16, FP32):
        out = torch.full((GROUPS, 16, K), 7.0, dtype=dtype)
        masked = g.m_grouped_dgrad_gemm_fp8_nt_masked
        if dtype == BF16:
            masked = g.m_grouped_dgrad_gemm_fp8_fp8_bf16_nt_masked
        masked(grad, weight_t, out, int32(5, 0, 16), 8)
        assert close_to(out[0, :5], dy[:5], w[0])
        assert close_to(out[2], dy[32:], w[2])
        assert bool((out[1] == 7).all())


# ------------------------------------------------------------------------------- refused


def test_operands_that_are_not_transposed() -> None:
    dy, w = dense()
    grad, weight = g.per_token_cast_to_fp8(dy), g.per_block_cast_to_fp8(w)
    out = torch.empty(M, K, dtype=BF16)
    says = (
        r"weight_t is float8_e4m3fn\[{}\].*: expected W transposed, .*transposed=True\), or turn "
    )
    for call in (g.dgrad_gemm_fp8_nt, g.dgrad_gemm_fp8_fp8_bf16_nt):
        with pytest.raises(UnsupportedInput, match=says.format("272, 144")):
            call(grad, weight, out)
        view = weight[0].t(), weight[1].t()
        with pytest.raises(UnsupportedInput, match=says.format("144, 272") + "what is cast"):
            call(grad, view, out)
        weight_t = g.transpose_block_cast(weight)
        for wrong in (
            g.per_token_cast_to_fp8(dy, transposed=True),
            (grad[0].t().contiguous().t(), grad[1]),
        ):
            with pytest.raises(
                UnsupportedInput, match=r"grad is .*: expected dY \[M, N\].*for the"
            ):
                call(wrong, weight_t, out)


def test_groups_that_are_not_transposed() -> None:
    dy, w = of_groups()
    grad, weight = g.per_token_cast_to_fp8(dy), g.per_block_cast_to_fp8(w)
    out = torch.empty(M, K, dtype=BF16)
    for contiguous in (
        g.m_grouped_dgrad_gemm_fp8_nt_contiguous,
        g.m_grouped_dgrad_gemm_fp8_fp8_bf16_nt_contiguous,
    ):
        with pytest.raises(UnsupportedInput, match=r"weight_t is .*\[3, 272, 144\].*transpose_blo"):
            contiguous(grad, weight, out, m_offsets=int32(0, 1, 2, 3))
    values, scales = (t[None].expand(GROUPS, *t.shape).contiguous() for t in grad)
    for masked in (
        g.m_grouped_dgrad_gemm_fp8_nt_masked,
        g.m_grouped_dgrad_gemm_fp8_fp8_bf16_nt_masked,
    ):
        with pytest.raises(UnsupportedInput, match=r"weight_t is .*\[3, 272, 144\].*transpose_blo"):
            masked((values, scales), weight, torch.empty(GROUPS, M, K), int32(1, 2, 3), 2)


@pytest.mark.parametrize(
    ("grad", "weight_t", "says"),
    [
        (None, (VALUES, SCALES), r"expected the pair \(a, a_scales\), got NoneType"),
        ((VALUES, SCALES), VALUES, r"a is|expected the pair|b is"),
        ((torch.zeros(M, 7).to(E4M3), SCALES), (VALUES, SCALES), r"a is float8_e4m3fn\[40, 7\]"),
    ],
)
def test_other_errors_are_the_products(grad: Any, weight_t: Any, says: str) -> None:
    with pytest.raises(UnsupportedInput, match=says):
        g.dgrad_gemm_fp8_nt(grad, weight_t, torch.empty(M, K))


# ---------------------------------------------------------------------- in torch.compile


def test_compiled_whole() -> None:
    """A layer's input gradient with its casts is one graph, for any number of rows."""
    w = dense()[1]
    weight = g.per_block_cast_to_fp8(w)

    def step(dy: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        out = dy.new_empty(dy.shape[0], values.shape[1])
        grad = g.per_token_cast_to_fp8(dy)
        g.dgrad_gemm_fp8_fp8_bf16_nt(grad, g.transpose_block_cast((values, scales)), out)
        return out * 2

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (40, 7, 130):
        dy = random(m, N, BF16)
        assert torch.equal(compiled(dy, *weight), step(dy, *weight))
    with pytest.raises(Exception, match="expected W transposed"):
        torch.compile(
            lambda dy: g.dgrad_gemm_fp8_nt(
                g.per_token_cast_to_fp8(dy), weight, dy.new_empty(dy.shape[0], K)
            ),
            fullgraph=True,
            backend="eager",
        )(dense()[0])


def test_a_layer_of_experts_uses_them() -> None:
    """Rows that were gathered for the forward product go back by the same offsets."""
    dy, w = of_groups()
    routing = moe.route_tokens(torch.arange(M)[:, None] % GROUPS, GROUPS)
    grad = moe.gather_per_token_cast_to_fp8(dy, routing.source_rows)
    rows = torch.empty(M, K, dtype=BF16)
    weight_t = g.per_block_cast_to_fp8(w, transposed=True)
    g.m_grouped_dgrad_gemm_fp8_fp8_bf16_nt_contiguous(
        grad, weight_t, rows, m_offsets=routing.m_offsets
    )
    dx = moe.combine_rows(rows, routing.positions)
    for expert in range(GROUPS):
        assert close_to(dx[expert::GROUPS], dy[expert::GROUPS], w[expert])
