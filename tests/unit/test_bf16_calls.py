"""The public calls with BF16 operands: results on the CPU, what is refused, PyTorch's compiler, and
the kernel path on a driver made of callbacks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from kgen.config import GemmConfig
from kgen.errors import LaunchError, UnsupportedInput
from kgen.problem import BF16_FIELDS, GemmProblem
from kgen.runtime import gemm, grouped
from kgen.runtime.lookup import Winner
from tests.unit.test_dispatch import World
from tests.unit.test_dispatch import world as world  # noqa: PLC0414, a fixture

BF16 = torch.bfloat16
G, M, N, K = 3, 384, 72, 136
TUNED = GemmConfig(block_m=64, block_n=48, num_stages=4, num_math_warpgroups=1)


@pytest.fixture(autouse=True)
def _settings_anew() -> Iterator[None]:
    grouped.forget()
    yield
    grouped.forget()


def matrices(m: int = 20, n: int = N, k: int = K, dtype: torch.dtype = BF16) -> Any:
    """a, b, and an output of NaN."""
    generator = torch.Generator().manual_seed(m + n + k)
    a, b = (torch.randn(rows, k, generator=generator).to(BF16) for rows in (m, n))
    return a, b, torch.full((m, n), torch.nan, dtype=dtype)


def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    exact = a.double() @ b.double().T
    return exact if bias is None else exact + bias.double()


def near(out: torch.Tensor, exact: torch.Tensor) -> bool:
    limit = {torch.float32: 1e-6, torch.float16: 1e-3, BF16: 4e-3}[out.dtype]
    return float((out.double() - exact).norm()) <= limit * float(exact.norm())


# --------------------------------------------------------------------------------- dense


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize(("m", "n", "k"), [(20, N, K), (1, 8, 8), (5, 7, 9)])
def test_results(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    a, b, out = matrices(m, n, k, dtype)
    bias = torch.randn(n).to(dtype)
    for given in (None, bias):
        gemm.bf16_gemm_nt(a, b, out, bias=given)
        assert near(out, product(a, b, given))
        assert gemm.last_path() == "reference"


def test_nothing_to_sum_or_to_write() -> None:
    a, b, out = matrices(4, 8, 0)
    gemm.bf16_gemm_nt(a, b, out)
    assert gemm.last_path() == "empty"
    assert bool((out == 0).all())
    gemm.bf16_gemm_nt(*matrices(0))
    assert gemm.last_path() == "empty"


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("a", {"dtype": torch.float16}, r"a is float16\[20, 136\].*expected bfloat16"),
    ("b", {"dtype": torch.float8_e4m3fn}, "expected bfloat16; gemm_fp8_nt takes FP8"),
    ("out", {"dtype": torch.float64}, "expected bfloat16, float16 or float32"),
    ("b", {"size": (N, K + 8)}, r"expected \[M, K\] and \[N, K\]"),
    ("out", {"size": (20, N + 8)}, r"out is .*expected \[20, 72\]"),
    ("bias", {"size": (N + 8,)}, r"bias is .*expected \[72\]"),
    ("bias", {"size": (N,), "dtype": torch.float32}, "expected out's type, bfloat16"),
    ("a", {"size": (2, 20, K)}, "expected two dimensions"),
]


@pytest.mark.parametrize(("name", "other", "words"), REFUSED)
def test_what_is_refused(name: str, other: dict[str, Any], words: str) -> None:
    a, b, out = matrices()
    given: dict[str, Any] = {"a": a, "b": b, "out": out, "bias": None}
    like = given[name] if given[name] is not None else out[0]
    size = other.get("size", tuple(like.shape))
    given[name] = torch.zeros(size).to(other.get("dtype", BF16))
    with pytest.raises(UnsupportedInput, match=words):
        gemm.bf16_gemm_nt(given["a"], given["b"], given["out"], bias=given["bias"])


def test_other_things_that_are_refused() -> None:
    a, b, out = matrices()
    with pytest.raises(UnsupportedInput, match="a is a list: expected a"):
        gemm.bf16_gemm_nt([a], b, out)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedInput, match="shares memory with a"):
        gemm.bf16_gemm_nt(a[:, :N], b[:, :N], a[:, :N])
    with pytest.raises(UnsupportedInput, match="bf16_gemm_nt has no gradient"):
        gemm.bf16_gemm_nt(a.clone().requires_grad_(), b, out)
    none = torch.empty(0, 0)
    with pytest.raises(UnsupportedInput, match="expected float8_e4m3fn or float8_e5m2"):
        gemm.gemm_fp8_nt((a, none), (b, none), out)
    with pytest.raises(UnsupportedInput, match="expected one of block, row, tensor"):
        gemm.gemm_fp8_nt((a, none), (b, none), out, recipe="none")


def test_plans_are_asked_for_by_recipe() -> None:
    assert gemm.plan_for(20, N, K, device="cpu", recipe="none") is None
    assert gemm.plan_for(20, N, K, device="cpu", recipe="none", a_dtype=BF16, bias=True) is None
    with pytest.raises(UnsupportedInput, match="expected bfloat16 for recipe='none'"):
        gemm.plan_for(20, N, K, device="cpu", recipe="none", b_dtype=torch.float8_e4m3fn)
    with pytest.raises(UnsupportedInput, match="expected float8_e4m3fn or float8_e5m2"):
        gemm.plan_for(20, N, K, device="cpu", a_dtype=BF16)
    with pytest.raises(UnsupportedInput, match="fast_accum for row and tensor only"):
        gemm.plan_for(20, N, K, device="cpu", recipe="none", fast_accum=True)


def test_the_operator() -> None:
    for bias in (None, torch.randn(N).to(BF16)):
        operator = torch.ops.kgen.bf16_gemm_nt.default
        torch.library.opcheck(operator, matrices(), {"bias": bias})
    a, b, out = matrices()
    with pytest.raises(UnsupportedInput, match="kgen::bf16_gemm_nt has no gradient"):
        torch.ops.kgen.bf16_gemm_nt(a.clone().requires_grad_(), b, out)


def test_compiled_and_traced() -> None:
    def step(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        gemm.bf16_gemm_nt(a, b, out)
        more: torch.Tensor = out + 1
        return more

    compiled = torch.compile(step, fullgraph=True, backend="eager", dynamic=True)
    for m in (20, 33, 1):
        a, b, out = matrices(m)
        gemm.bf16_gemm_nt(a, b, out)
        assert torch.equal(compiled(a, b, torch.zeros_like(out)), out + 1)
    a, b, out = matrices()
    graph = make_fx(step, tracing_mode="symbolic")(a, b, out.clone())
    assert "kgen.bf16_gemm_nt" in graph.code
    assert torch.equal(graph(a, b, torch.zeros_like(out)), step(a, b, out))


# ------------------------------------------------------------------------------- grouped


def groups(masked: bool = False, k: int = K, n: int = N) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(M, k, generator=generator).to(BF16)
    b = torch.randn(G, n, k, generator=generator).to(BF16)
    t = {"a": a, "b": b, "out": torch.full((M, n), 7.0, dtype=BF16)}
    if masked:
        t["a"], t["out"] = a.view(G, M // G, k), t["out"].view(G, M // G, n)
    return t


def run(t: dict[str, Any], **layout: Any) -> torch.Tensor:
    if "masked_m" in layout:
        gemm.m_grouped_bf16_gemm_nt_masked(t["a"], t["b"], t["out"], **layout)
    else:
        gemm.m_grouped_bf16_gemm_nt_contiguous(t["a"], t["b"], t["out"], **layout)
    out: torch.Tensor = t["out"]
    return out


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_contiguous_groups() -> None:
    t = groups()
    by_offset = run(t, m_offsets=int32(0, 100, 100, 200))
    assert near(by_offset[:100], product(t["a"][:100], t["b"][0]))
    assert near(by_offset[100:200], product(t["a"][100:200], t["b"][2]))
    assert bool((by_offset[200:] == 7).all())
    by_index = run(groups(), m_indices=int32(*[2] * 128, *[-1] * 128, *[0] * 127, -1))
    assert near(by_index[:128], product(t["a"][:128], t["b"][2]))
    assert near(by_index[256:383], product(t["a"][256:383], t["b"][0]))
    assert bool((by_index[128:256] == 7).all())
    assert bool((by_index[383] == 7).all())
    assert gemm.last_path() == "reference"


def test_masked_groups() -> None:
    t = groups(masked=True)
    out = run(t, masked_m=int32(128, 0, 3), expected_m=64)
    assert near(out[0], product(t["a"][0], t["b"][0]))
    assert near(out[2, :3], product(t["a"][2, :3], t["b"][2]))
    assert bool((out[1] == 7).all())
    assert bool((out[2, 3:] == 7).all())


GROUPED_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"a": torch.zeros(M, K)}, r"a is float32\[384, 136\].*expected bfloat16"),
    ({"b": torch.zeros(G, N, K).to(torch.float8_e4m3fn)}, "b is float8_e4m3fn.*expected bfloat16"),
    ({"b": torch.zeros(N, K, dtype=BF16)}, r"expected \[G, N, K\]"),
    ({"a": torch.zeros(M, K + 8, dtype=BF16)}, r"a is .*expected \[M, K\] = \[384, 136\]"),
    ({"out": torch.zeros(M, N + 8, dtype=BF16)}, r"out is .*expected \[M, N\] = \[384, 72\]"),
    ({"a": torch.zeros(K, M, dtype=BF16).t()}, "columns 384 elements apart; pass memory"),
    ({"a": [1]}, "a is a list: expected a torch.Tensor"),
]


@pytest.mark.parametrize(("replaced", "words"), GROUPED_REFUSED)
def test_what_grouped_calls_refuse(replaced: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedInput, match=words):
        run(groups() | replaced, m_offsets=int32(0, 1, 2, 3))


def test_other_things_that_grouped_calls_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UnsupportedInput, match="K=132: expected a multiple of 8; pad A and B to 136"
    ):
        run(groups(k=132), m_offsets=int32(0, 1, 2, 3))
    with pytest.raises(UnsupportedInput, match="N=68: expected a multiple of 8"):
        run(groups(n=68), m_offsets=int32(0, 1, 2, 3))
    with pytest.raises(UnsupportedInput, match="given neither"):
        run(groups())
    t = groups()
    t["b"].requires_grad_()
    with pytest.raises(UnsupportedInput, match="m_grouped_bf16_gemm_nt_contiguous has no gradient"):
        run(t, m_offsets=int32(0, 1, 2, 3))
    monkeypatch.setenv("KGEN_CHECK", "1")
    grouped.forget()
    with pytest.raises(UnsupportedInput, match=r"m_offsets\[2\] is 8, below m_offsets\[1\] = 9"):
        run(groups(), m_offsets=int32(0, 9, 8, 10))
    with pytest.raises(UnsupportedInput, match=r"masked_m\[1\] is 129"):
        run(groups(masked=True), masked_m=int32(0, 129, 1), expected_m=1)


def test_grouped_operators() -> None:
    t, tests = groups(), ("test_schema", "test_autograd_registration", "test_faketensor")
    operator = torch.ops.kgen.m_grouped_bf16_gemm_nt_contiguous.default
    given = (t["a"], t["b"], t["out"], None, int32(0, 1, 2, 3))
    torch.library.opcheck(operator, given, test_utils=tests)
    t = groups(masked=True)
    operator = torch.ops.kgen.m_grouped_bf16_gemm_nt_masked.default
    other = (t["a"], t["b"], t["out"], int32(3, 0, 128), 64)
    torch.library.opcheck(operator, other, test_utils=tests)


def test_grouped_calls_are_compiled_whole() -> None:
    def contiguous(a: Any, b: Any, out: Any, layout: Any) -> torch.Tensor:
        gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, out, m_offsets=layout)
        more: torch.Tensor = out + 1
        return more

    def masked(a: Any, b: Any, out: Any, layout: Any) -> torch.Tensor:
        gemm.m_grouped_bf16_gemm_nt_masked(a, b, out, layout, 64)
        more: torch.Tensor = out + 1
        return more

    offsets, counts = int32(0, 100, 100, 200), int32(3, 0, 128)
    compiled = torch.compile(contiguous, fullgraph=True, backend="eager", dynamic=True)
    t = groups()
    found = compiled(t["a"], t["b"], t["out"], offsets)
    assert torch.equal(found, run(groups(), m_offsets=offsets) + 1)
    compiled, t = torch.compile(masked, fullgraph=True, backend="eager"), groups(masked=True)
    found = compiled(t["a"], t["b"], t["out"], counts)
    assert torch.equal(found, run(groups(masked=True), masked_m=counts, expected_m=64) + 1)


# ---------------------------------------------------------------- the kernel path


def test_a_tuned_problem_runs_on_its_winner(world: World) -> None:
    family = GemmProblem("dense", 1, N, K, **BF16_FIELDS)
    world.winners[family] = (Winner(20, TUNED, f"key of {TUNED}"),)
    a, b, out = matrices()
    gemm.bf16_gemm_nt(a, b, out)
    assert world.builder.built == [TUNED]
    assert gemm.last_path() == "kernel"
    assert [m.dims for m in world.fake.maps] == [[2 * K, 20], [2 * K, N], [N, 20]]
    assert [m.strides for m in world.fake.maps] == [[2 * K], [2 * K], [2 * N]]
    gemm.bf16_gemm_nt(a, b, out)
    assert len(world.fake.launches) == 2
    assert len(world.fake.maps) == 3, "the second call was prepared"
    bias = torch.zeros(N, dtype=BF16)
    gemm.bf16_gemm_nt(a, b, out, bias=bias)
    assert len(world.builder.built) == 2, "a bias is another kernel"
    assert gemm.stats()["prepared"] == 2
    assert gemm.missed_shapes()[0].endswith("recipe=none a_dtype=bf16 b_dtype=bf16 bias=true")


def test_a_warm_call_may_be_captured(world: World) -> None:
    gemm.warm_up(20, N, K, recipe="none")
    world.capturing = True
    gemm.bf16_gemm_nt(*matrices())
    assert gemm.last_path() == "kernel"
    with pytest.raises(LaunchError, match="run the same call once"):
        gemm.bf16_gemm_nt(*matrices(20, N, 2 * K))


def test_odd_sizes_are_padded_to_eight(world: World) -> None:
    gemm.bf16_gemm_nt(*matrices(5, 7, 9))
    assert gemm.last_path() == "kernel with copies"
    assert [m.dims for m in world.fake.maps] == [[32, 5], [32, 7], [8, 5]]
    reasons = gemm.stats()["copies"]
    assert "a: K = 9, not a multiple of 8" in reasons
    gemm.bf16_gemm_nt(*matrices(5, 8, 24))
    assert gemm.last_path() == "kernel", "24 columns are 48 bytes: TMA takes them"


def test_a_grouped_problem_runs_on_its_winner(world: World) -> None:
    family = GemmProblem("contiguous", 1, N, K, groups=G, **BF16_FIELDS)
    world.winners[family] = (Winner(M // G, TUNED, f"key of {TUNED}"),)
    t, offsets = groups(), int32(0, 100, 100, 200)
    run(t, m_offsets=offsets)
    assert world.builder.built == [TUNED]
    assert gemm.last_path() == "kernel"
    a, b, d = world.fake.maps
    assert (a.dims, a.strides) == ([2 * K, M], [2 * K])
    assert (b.dims, b.strides) == ([2 * K, N, G], [2 * K, 2 * N * K])
    assert (d.dims, d.strides) == ([N, M], [2 * N])
    run(t, m_offsets=offsets)
    assert len(world.fake.launches) == 2
    assert len(world.fake.maps) == 3, "the second call was prepared"
    run(groups(masked=True), masked_m=int32(1, 2, 3), expected_m=64)
    assert gemm.last_path() == "kernel"
    a = world.fake.maps[3]
    assert (a.dims, a.strides) == ([2 * K, M // G, G], [2 * K, 2 * K * M // G])
    words = f"masked m=64 n={N} k={K} groups={G} recipe=none a_dtype=bf16 b_dtype=bf16"
    assert gemm.missed_shapes()[0] == words
