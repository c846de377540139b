"""kgen's operators in PyTorch: opcheck, torch.compile in one graph with any M, export and fx,
modes, gradients, and what an import registers."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import kgen.runtime.gemm as g
from kgen.errors import UnsupportedInput
from kgen.reference import gemm_reference
from kgen.runtime import ops
from kgen.runtime.operands import Inputs

N, K = 136, 272  # two blocks of N and three of K, the last ones partial
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def operands(m: int) -> tuple[torch.Tensor, ...]:
    """a, a_scales, b, b_scales, and an output of NaN."""
    generator = torch.Generator().manual_seed(m)
    # Row-major: a graph for any M would take a column's pitch, of (1, 20), for M itself.
    x = torch.randn(m, K, generator=generator)
    a, sfa = g.per_token_cast_to_fp8(x, row_major_scales=True)
    b, sfb = g.per_block_cast_to_fp8(torch.randn(N, K, generator=generator))
    return a, sfa, b, sfb, torch.full((m, N), float("nan"), dtype=BF16)


def expected(t: tuple[torch.Tensor, ...]) -> torch.Tensor:
    a, sfa, b, sfb, _ = t
    return gemm_reference(a, sfa, b, sfb, BF16)


def by_out(
    a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """The public call between other work, as in a model."""
    g.gemm_fp8_fp8_bf16_nt((a, sfa), (b, sfb), out)
    return out.relu() + 1


def by_value(
    a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """The same through the functional form."""
    return g.mm_fp8_nt((a, sfa), (b, sfb)).relu() + 1


# ------------------------------------------------------------------------------- opcheck

SAMPLES: dict[str, Callable[[], list[tuple[Any, ...]]]] = {
    "gemm_fp8_nt": lambda: [operands(20), operands(1)],
    "mm_fp8_nt": lambda: [(*operands(20)[:4], torch.float16), (*operands(1)[:4], BF16)],
    "per_token_cast_to_fp8": lambda: [(torch.randn(20, K),), (torch.randn(20, 256, dtype=BF16),)],
    "per_block_cast_to_fp8": lambda: [(torch.randn(N, K),), (torch.randn(256, 256, dtype=BF16),)],
    "cast_to_fp8": lambda: [
        (torch.randn(20, K), "token", "both", True, False, False, E4M3),
        (torch.randn(21, 256, dtype=BF16), "channel", "transposed", False, True, False, E4M3),
        (torch.randn(5, K), "row", "normal", True, True, True, E4M3),
    ],
    "get_col_major_tma_aligned_tensor": lambda: [
        (torch.randn(20, 3),),
        (torch.randn(3, 20).t(),),  # aligned already: a copy all the same
        (torch.randn(2, 21, 3),),
    ],
}


@pytest.fixture
def _compares_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """opcheck compares by torch.allclose, which a CPU does not have for E4M3."""
    allclose = torch.allclose

    def by_bytes(one: torch.Tensor, other: torch.Tensor, **options: Any) -> bool:
        if one.dtype == torch.float8_e4m3fn:
            one, other = one.view(torch.uint8), other.view(torch.uint8)
        return allclose(one, other, **options)

    monkeypatch.setattr(torch, "allclose", by_bytes)


@pytest.mark.usefixtures("_compares_fp8")
@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name: str) -> None:
    for args in SAMPLES[name]():
        torch.library.opcheck(getattr(torch.ops.kgen, name).default, args)


def test_operators_give_what_the_functions_give() -> None:
    t = operands(20)
    torch.ops.kgen.gemm_fp8_nt(*t)
    assert torch.equal(t[4], expected(t))
    assert torch.equal(torch.ops.kgen.mm_fp8_nt(*t[:4], BF16), expected(t))
    assert torch.equal(g.mm_fp8_nt((t[0], t[1]), (t[2], t[3])), expected(t))
    x = torch.randn(20, K)
    for cast in ("per_token_cast_to_fp8", "per_block_cast_to_fp8"):
        for one, other in zip(getattr(torch.ops.kgen, cast)(x), getattr(g, cast)(x), strict=True):
            assert torch.equal(one.float(), other.float())
    aligned = torch.ops.kgen.get_col_major_tma_aligned_tensor(t[1])
    assert torch.equal(aligned, t[1])
    assert aligned.stride() == (1, 20)


def test_the_functional_form_takes_every_output_type_and_refuses_others() -> None:
    t = operands(5)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        out = g.mm_fp8_nt((t[0], t[1]), (t[2], t[3]), dtype)
        assert torch.equal(out, gemm_reference(t[0], t[1], t[2], t[3], dtype))
    with pytest.raises(UnsupportedInput, match=r"out_dtype=torch\.int8"):
        g.mm_fp8_nt((t[0], t[1]), (t[2], t[3]), torch.int8)
    with pytest.raises(UnsupportedInput, match=r"expected the pair \(a, a_scales\), got NoneType"):
        g.mm_fp8_nt(None, (t[2], t[3]))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedInput, match=r"b is float32.*per_block_cast_to_fp8"):
        g.mm_fp8_nt((t[0], t[1]), (t[2].float(), t[3]))


# ------------------------------------------------------------------------------- compile


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    reset: Any = torch.compiler.reset
    reset()


def compile_counted(function: Any, backend: str) -> tuple[Any, list[Any]]:
    """The function compiled for any sizes in one graph; and the graphs that were made of it."""
    graphs: list[Any] = []
    inner = torch._dynamo.lookup_backend(backend)

    def compiler(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(module)
        return inner(module, inputs)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=compiler)
    return compiled, graphs


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [by_out, by_value])
def test_one_graph_for_every_m(function: Any, backend: str) -> None:
    compiled, graphs = compile_counted(function, backend)
    for m in (20, 7, 33, 128):
        t = operands(m)
        assert torch.equal(compiled(*t), expected(t).relu() + 1)
        if function is by_out:
            assert torch.equal(t[4], expected(t))
    assert len(graphs) == 1
    assert "kgen.gemm_fp8_nt" in str(graphs[0].graph)


def layer(x: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor) -> torch.Tensor:
    """A linear layer with its casts, as somebody would write it."""
    a, sfa = g.per_token_cast_to_fp8(x)
    sfa = g.get_col_major_tma_aligned_tensor(sfa)
    return g.mm_fp8_nt((a, sfa), (b, sfb)).float() * 2


def opaque_layer(x: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor) -> torch.Tensor:
    """The same, the casts as operators."""
    a, sfa = torch.ops.kgen.per_token_cast_to_fp8(x)
    sfa = torch.ops.kgen.get_col_major_tma_aligned_tensor(sfa)
    out: torch.Tensor = torch.ops.kgen.mm_fp8_nt(a, sfa, b, sfb, BF16)
    return out.float() * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [layer, opaque_layer])
def test_casts_compile_with_the_gemm(function: Any, backend: str) -> None:
    compiled, graphs = compile_counted(function, backend)
    b, sfb = g.per_block_cast_to_fp8(torch.randn(N, K))
    made = 0
    for m in (20, 7, 33):
        x = torch.randn(m, K)
        assert torch.equal(compiled(x, b, sfb), layer(x, b, sfb))
        made = made or len(graphs)  # dynamo may begin twice, to take a constant as one
    assert len(graphs) == made


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
def test_inductor_compiles_around_the_operators(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled, graphs = compile_counted(by_out, "inductor")
    for m in (20, 7):
        t = operands(m)
        assert torch.equal(compiled(*t), expected(t).relu() + 1)
        assert torch.equal(t[4], expected(t))
    assert len(graphs) == 1


def test_weights_are_cast_in_a_graph_too() -> None:
    def cast(w: torch.Tensor) -> Any:
        return g.per_block_cast_to_fp8(w)

    compiled = torch.compile(cast, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (136, 40):
        w = torch.randn(n, K)
        for one, other in zip(compiled(w), cast(w), strict=True):
            assert torch.equal(one.float(), other.float())


def test_what_does_not_fit_fails_while_compiling_by_name() -> None:
    a, sfa, b, sfb, out = operands(20)
    compiled = torch.compile(by_out, fullgraph=True, backend="eager")
    for wrong, says in (
        ((a.float(), sfa, b, sfb, out), r"a is float32\[20, 272\]: expected float8_e4m3fn"),
        ((a, sfa.bfloat16(), b, sfb, out), r"a_scales is bfloat16\[20, 3\]: expected float32 with"),
        ((a, sfa, b[:, :256], sfb, out), r"b is float8_e4m3fn\[136, .+\]: expected \[N, 272\]"),
        ((a, sfa, b, sfb, out[:7]), r"out is bfloat16\[.+, 136\]: expected \[20, 136\]"),
    ):
        with pytest.raises(Exception, match=says):
            compiled(*wrong)


def test_export_and_fx_see_the_operator() -> None:
    class Model(torch.nn.Module):
        def forward(self, *t: torch.Tensor) -> torch.Tensor:
            return by_value(*t)

    t = operands(20)
    for strict in (False, True):
        program = torch.export.export(Model(), t, strict=strict)
        assert "kgen.gemm_fp8_nt" in str(program.graph)
        assert torch.equal(program.module()(*t), expected(t).relu() + 1)
    for mode in ("fake", "symbolic"):
        traced = make_fx(by_out, tracing_mode=mode)(*operands(20))
        assert "kgen.gemm_fp8_nt" in str(traced.graph)
        assert torch.equal(traced(*operands(20)), expected(t).relu() + 1)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_tracer_of_real_tensors_sees_the_operators() -> None:
    """What a launch of ours writes would be missing from its graph."""
    b, sfb = operands(20)[2:4]
    scaled = torch.ones(1, 2, 3)

    def work(x: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        a = g.per_token_cast_to_fp8(x)
        g.m_grouped_gemm_fp8_nt_contiguous(a, (b[None], scaled), out, m_offsets=offsets)
        return g.mm_fp8_nt(a, (b, sfb)) + out

    arguments = torch.randn(20, K), torch.tensor([0, 20], dtype=torch.int32), torch.zeros(20, N)
    wanted = work(*arguments)
    graph = make_fx(work, tracing_mode="real")(*arguments)
    names = [str(node.target) for node in graph.graph.nodes if "kgen" in str(node.target)]
    assert names == [
        "kgen.cast_to_fp8.default",
        "kgen.m_grouped_gemm_fp8_nt_contiguous.default",
        "kgen.gemm_fp8_nt.default",
    ]
    assert torch.equal(graph(*arguments), wanted)


def test_stand_in_tensors_get_stand_in_results() -> None:
    with FakeTensorMode():
        a = torch.empty(20, K).to(torch.float8_e4m3fn)
        b = torch.empty(N, K).to(torch.float8_e4m3fn)
        out = g.mm_fp8_nt((a, torch.empty(20, 3)), (b, torch.empty(2, 3)))
    assert (out.shape, out.dtype) == ((20, N), BF16)
    assert ops.stand_for_others(Inputs(out, out, out, out, out))


# --------------------------------------------------------------------- modes and gradients

MODES: dict[str, Callable[[], Any]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("function", [by_out, by_value])
def test_modes_change_nothing(function: Any, mode: str) -> None:
    t = operands(20)
    compiled = compile_counted(function, "aot_eager")[0]
    with MODES[mode]():
        assert torch.equal(function(*t), expected(t).relu() + 1)
        assert torch.equal(compiled(*t), expected(t).relu() + 1)
        inside = operands(20)
        assert torch.equal(function(*inside), expected(t).relu() + 1)


@pytest.mark.parametrize("which", range(5))
def test_no_gradient_is_said_not_left_out(which: int) -> None:
    t = list(operands(20))
    t[which] = t[which].requires_grad_()
    says = "has no gradient, and a tensor given to it requires one"
    with pytest.raises(UnsupportedInput, match=f"^gemm_fp8_nt {says}"):
        by_out(*t)
    with pytest.raises(UnsupportedInput, match=f"^kgen::gemm_fp8_nt {says}"):
        torch.ops.kgen.gemm_fp8_nt(*t)
    with pytest.raises(Exception, match=says):
        torch.compile(by_out, fullgraph=True, backend="aot_eager")(*t)
    with torch.no_grad():
        by_out(*t)
        torch.ops.kgen.gemm_fp8_nt(*t)
    assert torch.equal(t[4].detach(), expected(operands(20)))


@pytest.mark.parametrize("name", [name for name in SAMPLES if name != "gemm_fp8_nt"])
def test_functional_operators_have_no_gradient(name: str) -> None:
    args = list(SAMPLES[name]()[0])
    args[0] = args[0].detach().requires_grad_()
    operator = getattr(torch.ops.kgen, name)
    with pytest.raises(UnsupportedInput, match=f"kgen::{name} has no gradient"):
        operator(*args)
    with torch.no_grad():
        operator(*args)


def test_a_layer_with_a_backward_of_its_own_trains() -> None:
    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(w)
            return layer(x, *g.per_block_cast_to_fp8(w))

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad @ ctx.saved_tensors[0], None

    x = torch.randn(20, K, requires_grad=True)
    w = torch.randn(N, K)
    out: Any = Linear.apply(x, w)  # type: ignore[no-untyped-call]
    out.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, w.sum(0).expand(20, K), atol=1e-4)


def test_writing_over_what_autograd_saved_is_noticed() -> None:
    x = torch.ones(20, N, requires_grad=True)
    saved = torch.ones(20, N)
    product = x * saved
    g.gemm_fp8_nt(operands(20)[:2], operands(20)[2:4], saved)  # type: ignore[arg-type]
    total: Any = product.sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


# ------------------------------------------------------------------------------- registering


def test_registering_again_does_nothing() -> None:
    before = torch.ops.kgen.gemm_fp8_nt.default
    ops.register(lambda lhs, rhs, out: None)
    importlib.reload(ops).register(g.gemm_fp8_nt)
    assert torch.ops.kgen.gemm_fp8_nt.default is before
    t = operands(3)
    torch.ops.kgen.gemm_fp8_nt(*t)
    assert torch.equal(t[4], expected(t))


def test_an_import_registers_without_a_context_or_a_compiler() -> None:
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import kgen.runtime.gemm\n"
        "assert torch.ops.kgen.gemm_fp8_nt.default._schema.is_mutable\n"
        "assert not torch.cuda.is_initialized()\n"
        "heavy = {'torch._dynamo', 'torch._inductor', 'sympy', 'triton'} - before\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
