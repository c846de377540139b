"""Operators around grouped GEMMs: opcheck, whole graphs for any number of tokens, tracers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import kgen.runtime.casts as c
import kgen.runtime.gemm as g
from kgen.errors import UnsupportedInput
from kgen.runtime import moe, moe_ops
from tests.cast_checks import BF16, E4M3, E5M2, FP16, FP32, assert_same, random
from tests.unit.test_ops import _compares_fp8 as _compares_fp8  # noqa: PLC0414, a fixture

T, H, E = 20, 256, 4


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def ids(tokens: int = T) -> torch.Tensor:
    return torch.randint(-1, E + 1, (tokens, 2), generator=torch.Generator().manual_seed(tokens))


def fp8(rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows, k).to(E4M3), torch.ones(rows, -(-k // 128))


ROWS = int32(3, -1, 19, 20, 3, 7, 8)
#: A tensor that requires a gradient is put first in each.
SAMPLES: dict[str, Callable[[], list[tuple[Any, ...]]]] = {
    "transpose_block_cast": lambda: [
        c.per_block_cast_to_fp8(random(200, 144, BF16)),
        c.per_block_cast_to_fp8(random(2 * 256, 144, BF16).view(2, 256, 144)),
    ],
    "swiglu_per_token_cast_to_fp8": lambda: [
        (random(T, 2 * H, BF16), None, None, False, False, E4M3),
        (random(T, 2 * H, FP32), None, torch.rand(T), True, True, E5M2),
        (random(T, 2 * H, BF16).view(2, 10, -1), int32(10, 10), None, False, False, E4M3),
    ],
    "swiglu_per_token_cast_to_fp8_out": lambda: [
        (random(T, 2 * H, BF16), None, torch.rand(T), False, *fp8(T, H)),
        (
            *(random(T, 2 * H, BF16).view(2, 10, -1), int32(3, 0), None, False),
            *(torch.zeros(2, 10, H).to(E4M3), torch.ones(2, 10, 2)),
        ),
    ],
    "swiglu_backward": lambda: [
        (random(T, 2 * H, BF16), random(T, H, BF16), None),
        (random(T, 2 * H, FP16), random(T, H, FP16), torch.rand(T)),
    ],
    "route_tokens": lambda: [(ids(), E, 1), (ids(7).int(), E, 128)],
    "pad_groups": lambda: [
        (int32(0, 5, 5, 30), 40, 128, None),
        (int32(0, 5, 5, 40), 40, 16, torch.arange(40, dtype=torch.int32)),
    ],
    "gather_rows": lambda: [(random(T, H, BF16), ROWS), (random(T, 13, FP32), ROWS)],
    "gather_scaled_rows": lambda: [
        (*c.per_token_cast_to_fp8(random(T, H, BF16)), ROWS, False),
        (*c.per_token_cast_to_fp8(random(T, H, BF16)), ROWS, True),
    ],
    "gather_per_token_cast_to_fp8": lambda: [
        (random(T, H, BF16), ROWS, False, False, False, E4M3),
        (random(T, H, BF16), ROWS, True, True, False, E4M3),
        (random(T, H, BF16), ROWS, True, False, True, E5M2),
    ],
    "gather_per_token_cast_to_fp8_out": lambda: [
        (random(T, H, BF16), ROWS, False, *fp8(7, H)),
    ],
    "combine_rows": lambda: [
        (random(T, H, BF16), ROWS[:6].view(3, 2), None, None),
        (random(T, H, BF16), ROWS[:6].view(3, 2), torch.rand(3, 2), FP32),
    ],
}
WITH_FLOATS = [name for name in SAMPLES if name not in ("route_tokens", "pad_groups")]


def test_every_operator_has_samples() -> None:
    assert set(SAMPLES) == set(moe_ops._SCHEMAS) == set(moe_ops._FAKES)


@pytest.mark.usefixtures("_compares_fp8")
@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name: str) -> None:
    check: Any = torch.library.opcheck
    for args in SAMPLES[name]():
        check(getattr(torch.ops.kgen, name).default, args)


@pytest.mark.parametrize("name", WITH_FLOATS)
def test_none_has_a_gradient(name: str) -> None:
    args = list(SAMPLES[name]()[0])
    if name in ("transpose_block_cast", "gather_scaled_rows"):
        args[1] = args[1].clone().requires_grad_()  # FP8 values need none
    else:
        args[0] = args[0].clone().requires_grad_()
    operator = getattr(torch.ops.kgen, name)
    with pytest.raises(UnsupportedInput, match=f"kgen::{name} has no gradient"):
        operator(*args)
    with torch.no_grad():
        operator(*args)


def test_wrong_tensors_are_refused_by_operators_too() -> None:
    x = random(T, H, BF16)
    calls: list[tuple[Callable[[Any], object], str]] = [
        (lambda o: o.gather_rows(x, ROWS.long()), "source_rows is torch.int64"),
        (lambda o: o.combine_rows(x, ids(), None, None), "positions is torch.int64"),
        (lambda o: o.route_tokens(ids(), 0, 1), "num_experts=0"),
        (lambda o: o.pad_groups(ids()[0], 3, 1, None), "m_offsets is torch.int64"),
        (lambda o: o.swiglu_backward(x, x, None), r"grad is torch.bfloat16\[20, 256\]"),
        (lambda o: o.transpose_block_cast(x, x), "values are torch.bfloat16"),
    ]
    for call, says in calls:
        with pytest.raises(UnsupportedInput, match=says):
            call(torch.ops.kgen)


# ------------------------------------------------------------------------------- a layer


def weights() -> tuple[torch.Tensor, ...]:
    gate_up = c.per_block_cast_to_fp8(random(E * 256, H, BF16).view(E, 256, H) / 16)
    down = c.per_block_cast_to_fp8(random(E * H, 128, BF16, seed=1).view(E, H, 128) / 11)
    return *gate_up, *down


def layer(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, *w: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Forward, and backward of the result itself: every call that there is."""
    r = moe.route_tokens(topk_ids, E)
    rows = r.source_rows.shape[0]
    hidden, out = x.new_zeros(rows, w[0].shape[1]), x.new_zeros(rows, x.shape[1])
    lhs = moe.gather_per_token_cast_to_fp8(x, r.source_rows, row_major_scales=True)
    g.m_grouped_gemm_fp8_nt_contiguous(lhs, (w[0], w[1]), hidden, m_offsets=r.m_offsets)
    of_rows = moe.weights_of_rows(topk_weights, r.positions, rows)
    lhs = c.swiglu_per_token_cast_to_fp8(hidden, row_weights=of_rows, row_major_scales=True)
    g.m_grouped_gemm_fp8_nt_contiguous(lhs, (w[2], w[3]), out, m_offsets=r.m_offsets)
    y = moe.combine_rows(out, r.positions)
    cast = c.per_token_cast_to_fp8(y, row_major_scales=True)
    grad = moe.gather_scaled_rows(cast, r.source_rows, row_major_scales=True)
    grad_hidden = x.new_zeros(rows, w[2].shape[2])
    down_t = c.transpose_block_cast((w[2], w[3]))
    g.m_grouped_dgrad_gemm_fp8_nt_contiguous(grad, down_t, grad_hidden, m_offsets=r.m_offsets)
    back = c.swiglu_backward(hidden, grad_hidden, of_rows)
    padded = moe.pad_groups(r.m_offsets, rows, source_rows=r.source_rows)
    turned = moe.gather_per_token_cast_to_fp8(
        x, padded.source_rows, transposed=True, row_major_scales=True
    )
    assert back.grad_weights is not None
    scores = moe.gather_rows(back.grad_weights[:, None], r.positions.flatten())
    return y * 2, back.grad_x, back.hidden, scores, turned[0].float(), turned[1], padded.ks + 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_layer_is_one_graph_for_any_number_of_tokens(backend: str) -> None:
    reset: Any = torch.compiler.reset
    reset()
    graphs = []
    inner: Any = torch._dynamo.lookup_backend(backend)

    def compiler(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(module)
        return inner(module, inputs)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=compiler)
    w, made = weights(), 0
    for tokens in (20, 7, 33):
        x, scores = random(tokens, H, BF16), torch.rand(tokens, 2)
        assert_same(compiled(x, ids(tokens), scores, *w), layer(x, ids(tokens), scores, *w))
        made = made or len(graphs)
    assert len(graphs) == made
    called = {str(node.target).removesuffix(".default") for node in graphs[-1].graph.nodes}
    assert {f"kgen.{name}" for name in SAMPLES if not name.endswith("_out")} <= called


def test_given_memory_is_written_in_a_graph() -> None:
    reset: Any = torch.compiler.reset
    reset()
    x, rows = random(T, 2 * H, BF16), ROWS

    def step(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        c.swiglu_per_token_cast_to_fp8(x, out=(values, scales))
        first = values.float() * 1
        moe.gather_per_token_cast_to_fp8(x[:, :H], rows, out=(values[:7], scales[:7]))
        return first + values.float()

    expected_memory, memory = fp8(T, H), fp8(T, H)
    expected = step(x, *expected_memory)
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(step, fullgraph=True, backend=backend)
        assert torch.equal(compiled(x, *memory), expected)
        assert_same(memory, expected_memory)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_tracers_see_the_operators(mode: Any) -> None:
    x, scores, w = random(T, H, BF16), torch.rand(T, 2), weights()
    graph = make_fx(layer, tracing_mode=mode)(x, ids(), scores, *w)
    names = {str(node.target) for node in graph.graph.nodes if "kgen" in str(node.target)}
    assert {f"kgen.{name}.default" for name in SAMPLES if not name.endswith("_out")} <= names
    assert_same(graph(x, ids(), scores, *w), layer(x, ids(), scores, *w))
