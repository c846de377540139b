"""Recipes, operand types, bias and policies: fields of problems, files, configurations, calls."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kgen.runtime.gemm as g
from kgen.cache.db import TuningDatabase
from kgen.cache.records import TrialRecord
from kgen.config import GemmConfig, resources
from kgen.device import H200
from kgen.errors import ShapesError, UnsupportedInput, UsageError
from kgen.heuristic import default_config, explain
from kgen.problem import GROUPED_KINDS, GemmProblem
from kgen.reference import gemm_reference
from kgen.render import problem_class
from kgen.runtime import calls
from kgen.runtime.copies import copy_reasons
from kgen.runtime.operands import as_matrices, check, unpack
from kgen.settings import batch_invariant_by_default
from kgen.shape_writer import to_text
from kgen.shapes import ShapeLine, load_shapes, parse_problem
from kgen.space import valid_configs
from kgen.validity import why_invalid

PLAIN = GemmProblem("dense", 64, 2112, 7168)
ROW = replace(PLAIN, recipe="row", fast_accum=True)
FULL = replace(
    PLAIN,
    recipe="row",
    a_dtype="e5m2",
    b_dtype="e4m3",
    d_dtype="fp32",
    bias=True,
    fast_accum=True,
    batch_invariant=True,
    num_sms=100,
)
WORDS = (
    "dense m=64 n=2112 k=7168 recipe=row a_dtype=e5m2 d_dtype=fp32 bias=true fast_accum=true "
    "batch_invariant=true num_sms=100"
)


# ------------------------------------------------------------------------ problems and files


def test_a_problem_says_what_differs_from_the_defaults() -> None:
    assert str(FULL) == WORDS
    assert parse_problem(WORDS) == FULL
    assert str(PLAIN) == "dense m=64 n=2112 k=7168"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("recipe=column", "recipe='column': expected one of block, row, tensor"),
        ("a_dtype=fp8", "a_dtype='fp8': expected one of e4m3, e5m2"),
        ("bias=1", "bias='1': expected true or false"),
        ("fast_accum=true", "fast_accum=true: recipe=block scales each 128 columns"),
    ],
)
def test_a_wrong_field_is_named(words: str, says: str) -> None:
    with pytest.raises(ShapesError, match=says):
        parse_problem(f"dense m=1 n=8 k=16 {words}")


@pytest.mark.parametrize("kind", GROUPED_KINDS)
def test_grouped_kinds_are_batch_invariant_without_being_asked(kind: str) -> None:
    """Calls never ask, so that what is tuned under the policy would never be used."""
    with pytest.raises(ShapesError, match="never split K and are so by themselves; leave it out"):
        parse_problem(f"{kind} m=8 n=8 k=16 groups=2 batch_invariant=true")


def test_flags_are_bools() -> None:
    with pytest.raises(UsageError, match="bias=1: expected true or false"):
        GemmProblem("dense", 1, 8, 16, bias=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["txt", "csv", "jsonl"])
def test_every_form_of_file_keeps_the_fields(form: str, tmp_path: Path) -> None:
    lines = [ShapeLine(FULL), ShapeLine(PLAIN), ShapeLine(replace(ROW, m=1))]
    path = tmp_path / f"shapes.{form}"
    path.write_text(to_text(lines, form))
    assert [line.problem for line in load_shapes(path).lines] == [FULL, PLAIN, replace(ROW, m=1)]


def test_json_takes_its_own_true_and_false(tmp_path: Path) -> None:
    path = tmp_path / "shapes.jsonl"
    head = '{"kind": "dense", "m": 1, "n": 8, "k": 16, "bias": '
    path.write_text(f'{head}[true, "false"]}}\n')
    assert [line.problem.bias for line in load_shapes(path).lines] == [True, False]
    path.write_text(f"{head}1}}\n")
    with pytest.raises(ShapesError, match="bias=1: expected true or false"):
        load_shapes(path)


@pytest.mark.parametrize("name", ["row", "tensor"])
def test_shipped_shapes_are_the_same_sizes(name: str) -> None:
    plain = [line.problem for line in load_shapes("deepseek_v3").lines]
    found = [line.problem for line in load_shapes(f"deepseek_v3_{name}").lines]
    assert len(found) == 42
    assert found == [replace(p, recipe=name, fast_accum=True) for p in plain]


def test_bytes_count_scales_and_bias() -> None:
    m, n, k = 64, 2112, 7168
    base = m * k + n * k + 2 * m * n
    assert PLAIN.min_bytes == base + 4 * (m + 17) * 56
    assert ROW.min_bytes == base + 4 * (m + n)
    assert replace(ROW, recipe="tensor").min_bytes == base + 8
    assert replace(ROW, bias=True).min_bytes == base + 4 * (m + n) + 2 * n
    assert ROW.flops == PLAIN.flops


def test_the_database_keeps_the_fields_apart(tmp_path: Path) -> None:
    with TuningDatabase.open(tmp_path / "tuning.db") as db:
        for problem in (PLAIN, FULL):
            trial = TrialRecord(
                problem=problem,
                config=GemmConfig(),
                device_name="H200",
                num_sms=132,
                cubin_key="k",
                status="compiled",
            )
            db.record(trial)
        assert [row.problem for row in db.trials(FULL)] == [FULL]
        assert type(db.trials(FULL)[0].problem.bias) is bool
        assert db.trials(replace(FULL, batch_invariant=False)) == []


# ------------------------------------------------------------------- configurations and model


@pytest.mark.parametrize(
    ("problem", "config", "rule"),
    [
        (ROW, GemmConfig(num_accumulators=2), "accumulators_fast"),
        (replace(ROW, fast_accum=False), GemmConfig(num_accumulators=2), ""),
        (ROW, GemmConfig(sass_pass="interleave"), "sass_pass_recipe"),
        (PLAIN, GemmConfig(sass_pass="interleave"), ""),
        (ROW, GemmConfig(block_n=256, num_stages=2), ""),
        (PLAIN, GemmConfig(block_n=256, num_stages=2), "registers"),
        (ROW, GemmConfig(192, 200, 2, 3), ""),
        (ROW, GemmConfig(192, 208, 2, 3), "registers"),
        (replace(PLAIN, batch_invariant=True), GemmConfig(split_k=2), "batch_invariant"),
        (replace(PLAIN, batch_invariant=True), GemmConfig(), ""),
    ],
)
def test_rules(problem: GemmProblem, config: GemmConfig, rule: str) -> None:
    found = why_invalid(problem, config, H200)
    assert (found.rule if found else "") == rule


def test_memory_holds_no_scales_of_stages_but_vectors() -> None:
    config = GemmConfig()
    block, row = resources(config), resources(config, recipe="row", bias=True)
    assert block.vector_bytes == 0
    assert row.vector_bytes == 4 * (64 + 128) + 2 * 128
    assert row.barrier_offset == row.sfa_offset + 2 * row.vector_bytes
    assert resources(config, recipe="tensor").barrier_offset == row.sfa_offset
    assert resources(config, bias=True).barrier_offset == block.barrier_offset + 2 * 256
    for d_dtype, recipe, bias in itertools.product(
        ("bf16", "fp32"), ("block", "row", "tensor"), (False, True)
    ):
        assert resources(config, d_dtype, recipe, bias).barrier_offset % 8 == 0


def test_a_batch_invariant_space_has_one_order_of_summing() -> None:
    for m in (1, 64, 4096):
        configs = valid_configs(replace(PLAIN, m=m, batch_invariant=True), H200)
        assert {config.split_k for config in configs} == {1}
    assert {c.split_k for c in valid_configs(PLAIN, H200)} > {1}


@pytest.mark.parametrize("m", [1, 64, 512, 4096])
def test_defaults_are_valid_and_no_slower_without_promotion(m: int) -> None:
    block, row = replace(PLAIN, m=m), replace(ROW, m=m)
    found = {p: default_config(p, H200) for p in (block, row, replace(row, recipe="tensor"))}
    for problem, config in found.items():
        assert why_invalid(problem, config, H200) is None
    times = [explain(p, found[p], H200).total_us for p in (block, row)]
    assert times[1] <= times[0]


def test_a_kernels_class_names_what_its_source_depends_on() -> None:
    assert problem_class(PLAIN, GemmConfig()) == "dense d_dtype=bf16"
    expected = "dense recipe=row a_dtype=e5m2 d_dtype=fp32 bias=true fast_accum=true"
    assert problem_class(FULL, GemmConfig()) == expected


# ---------------------------------------------------------------------------------- calls

M, N, K = 20, 264, 272
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def operands(recipe: str, m: int = M, n: int = N, k: int = K, kinds: str = "e4m3 e4m3") -> Any:
    of_a, of_b = (FP8[name] for name in kinds.split())
    generator = torch.Generator().manual_seed(m + n + k)
    x, w = (torch.randn(rows, k, generator=generator) for rows in (m, n))
    if recipe == "row":
        return g.per_row_cast_to_fp8(x, dtype=of_a), g.per_row_cast_to_fp8(w, dtype=of_b)
    if recipe == "tensor":
        return g.per_tensor_cast_to_fp8(x, dtype=of_a), g.per_tensor_cast_to_fp8(w, dtype=of_b)
    return g.per_token_cast_to_fp8(x), g.per_block_cast_to_fp8(w)


def expected(lhs: Any, rhs: Any, bias: Any = None) -> torch.Tensor:
    """From the definition, for scales by row or by tensor."""
    (a, sfa), (b, sfb) = lhs, rhs
    product: torch.Tensor = (a.float() * sfa.reshape(-1, 1)) @ (b.float() * sfb.reshape(-1, 1)).T
    return product if bias is None else product + bias.float()


@pytest.mark.parametrize("recipe", ["row", "tensor"])
@pytest.mark.parametrize("kinds", ["e4m3 e4m3", "e5m2 e4m3", "e4m3 e5m2", "e5m2 e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_calls_give_the_definition(recipe: str, kinds: str, dtype: torch.dtype) -> None:
    lhs, rhs = operands(recipe, kinds=kinds)
    bias = torch.randn(N).to(dtype)
    for given in (None, bias):
        out = g.mm_fp8_nt(lhs, rhs, dtype, bias=given, fast_accum=True)
        assert torch.allclose(out, expected(lhs, rhs, given).to(dtype), rtol=1e-2, atol=1e-2)
        again = torch.empty_like(out)
        g.gemm_fp8_nt(lhs, rhs, again, bias=given, recipe=recipe)
        assert torch.equal(out, again)


def test_block_takes_e5m2_and_a_bias() -> None:
    (a, sfa), (b, sfb) = operands("block")
    a = a.float().to(torch.float8_e5m2)
    bias = torch.randn(N).bfloat16()
    out = g.mm_fp8_nt((a, sfa), (b, sfb), bias=bias)
    assert torch.equal(out, gemm_reference(a, sfa, b, sfb, torch.bfloat16, bias=bias))
    plain = gemm_reference(a, sfa, b, sfb)
    assert torch.allclose(out.float(), plain + bias.float(), rtol=1e-2, atol=1e-1)


def test_scales_may_have_any_of_the_shapes() -> None:
    (a, sfa), (b, sfb) = operands("row")
    wanted = g.mm_fp8_nt((a, sfa), (b, sfb))
    sfa, sfb = sfa[:, 0], sfb[:, 0]
    wide = torch.stack([sfa, sfa], 1)
    for of_a in (sfa, sfa[:, None], wide[:, 0], wide[:, :1]):
        for of_b in (sfb, sfb[:, None], sfb[None]):
            x = unpack((a, of_a), (b, of_b), wanted)
            assert check(x).recipe == "row"
            assert as_matrices(x, "row").sfb.shape == (N, 1)
            assert torch.equal(g.mm_fp8_nt((a, of_a), (b, of_b)), wanted)
    (a, sfa), (b, sfb) = operands("tensor")
    wanted = g.mm_fp8_nt((a, sfa), (b, sfb))
    for shape in ((), (1,), (1, 1)):
        out = g.mm_fp8_nt((a, sfa.view(shape)), (b, sfb.view(shape)))
        assert torch.equal(out, wanted)


@pytest.mark.parametrize(
    ("m", "n", "k", "kind", "recipe"),
    [
        (5, 9, 100, "row", "row"),
        (5, 9, 100, "block", "block"),
        (1, 8, 16, "row", "row"),
        (5, 1, 100, "row", "block"),  # one row of B and one K block: the same numbers
        (5, 9, 100, "tensor", "tensor"),
        (1, 9, 100, "tensor", "block"),  # one block each: the same numbers
        (1, 8, 1024, "block", "block"),
    ],
)
def test_the_recipe_is_what_shapes_say(m: int, n: int, k: int, kind: str, recipe: str) -> None:
    lhs, rhs = operands(kind, m, n, k)
    sizes = check(unpack(lhs, rhs, torch.empty(m, n)))
    assert sizes.recipe == recipe


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 100, 128), (7, 1, 128), (1, 8, 16)])
def test_where_several_fit_they_mean_the_same(m: int, n: int, k: int) -> None:
    (a, _), (b, _) = operands("row", m, n, k)
    found = []
    for recipe in ("block", "row", "tensor"):
        of_a = torch.full((1, 1) if recipe == "tensor" else (m, 1), 0.5)
        of_b = torch.full((n, 1) if recipe == "row" else (1, 1), 3.0)
        found.append(g.mm_fp8_nt((a, of_a), (b, of_b), torch.float32, recipe=recipe))
        found.append(g.mm_fp8_nt((a, of_a), (b, of_b), torch.float32))
    for other in found[1:]:
        assert torch.allclose(found[0], other)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 8, 16), (5, 0, 16), (3, 16, 0)])
def test_nothing_to_compute(m: int, n: int, k: int) -> None:
    lhs, rhs = operands("row", m, n, k)
    out = torch.full((m, n), torch.nan)
    bias = torch.arange(n).float()
    g.gemm_fp8_nt(lhs, rhs, out, bias=bias)
    assert g.last_path() == "empty"
    assert torch.equal(out, bias.expand(m, n))


def test_wrong_calls_are_refused_by_name() -> None:
    (a, sfa), (b, sfb) = operands("row")
    sfa, sfb = sfa[:, 0], sfb[:, 0]
    good = torch.zeros(N, dtype=torch.bfloat16)

    def refused(says: str, lhs: Any = (a, sfa), rhs: Any = (b, sfb), **options: Any) -> None:
        with pytest.raises(UnsupportedInput, match=says):
            g.mm_fp8_nt(lhs, rhs, **options)

    refused(r"bias is float32\[264\].*expected out's type, bfloat16", bias=good.float())
    refused(r"bias is bfloat16\[263\].*expected \[264\]", bias=good[1:])
    refused("bias is a int: expected a torch.Tensor", bias=3)
    refused("recipe='column': expected one of block, row, tensor$", recipe="column")
    refused("recipe='token': .*; scales of token and block casts are 'block'", recipe="token")
    refused(r"expected \[\] and \[\] for recipe='tensor'", recipe="tensor")
    refused(r"expected \[20, 3\]", recipe="block")
    refused(r"a_scales is float32\[19\]", lhs=(a, sfa[1:]))
    refused("or both single values", rhs=(b, sfb[:1]))
    refused("fast_accum='no': expected True or False", fast_accum="no")
    refused("fast_accum=True with recipe='block'", recipe="block", fast_accum=True)
    lhs, rhs = operands("block")
    refused("fast_accum=True is for one scale a row", lhs, rhs, fast_accum=True)
    refused("bias is .* expanded over one value", bias=good[:1].expand(N))
    out = torch.zeros(M, N, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedInput, match="out shares memory with bias"):
        g.gemm_fp8_nt((a, sfa), (b, sfb), out, bias=out[0])
    with pytest.raises(UnsupportedInput, match="has no gradient"):
        g.mm_fp8_nt((a, sfa), (b, sfb), bias=good.clone().requires_grad_())


def test_what_a_kernel_needs_padded_is_named() -> None:
    lhs, rhs = operands("row", n=262)
    bias = torch.zeros(263)[1:]
    x = unpack(lhs, rhs, torch.empty(M, 262), bias)
    assert {*copy_reasons(x, check(x))} == {"out", "b_scales", "bias"}
    odd = torch.zeros(N + 1, dtype=torch.bfloat16)[1:]
    lhs, rhs = operands("row")
    x = unpack(lhs, rhs, torch.empty(M, N, dtype=torch.bfloat16), odd)
    assert {*copy_reasons(x, check(x))} == {"bias"}


# ------------------------------------------------------------------------------- operators


def test_operators_take_the_options() -> None:
    lhs, rhs = operands("row")
    bias = torch.randn(N).bfloat16()
    wanted = g.mm_fp8_nt(lhs, rhs, bias=bias, fast_accum=True)
    options = {"bias": bias, "recipe": "row", "fast_accum": True}
    args = (*lhs, *rhs, torch.bfloat16)
    assert torch.equal(torch.ops.kgen.mm_fp8_nt(*args, **options), wanted)
    # The schema test compares FP8 inputs by torch.allclose, which a CPU does not have.
    utils = ("test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.kgen.mm_fp8_nt.default, args, options, test_utils=utils)
    out = torch.empty(M, N, dtype=torch.bfloat16)
    operator = torch.ops.kgen.gemm_fp8_nt.default
    torch.library.opcheck(operator, (*lhs, *rhs, out), options, test_utils=utils)
    with pytest.raises(UnsupportedInput, match="kgen::mm_fp8_nt has no gradient"):
        torch.ops.kgen.mm_fp8_nt(*args, bias=bias.clone().requires_grad_())


@pytest.mark.parametrize("recipe", ["row", "tensor"])
def test_one_graph_for_every_m(recipe: str) -> None:
    def layer(x: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor, bias: torch.Tensor) -> Any:
        cast = g.per_row_cast_to_fp8 if recipe == "row" else g.per_tensor_cast_to_fp8
        return g.mm_fp8_nt(cast(x), (b, sfb), bias=bias, fast_accum=True).relu()

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    _, (b, sfb) = operands(recipe)
    bias = torch.randn(N).bfloat16()
    for m in (20, 7, 33):
        x = torch.randn(m, K)
        assert torch.equal(compiled(x, b, sfb, bias), layer(x, b, sfb, bias))


# --------------------------------------------------------------------------- batch invariance


@pytest.fixture
def _policy() -> Iterator[None]:
    yield
    calls.Policy.batch_invariant, calls.Policy.key = None, (0, None)


@pytest.mark.usefixtures("_policy")
def test_the_policy_is_the_environments_until_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "batch_invariant_by_default", lambda: True)
    calls.Policy.batch_invariant, calls.Policy.key = None, (0, None)
    assert g.is_batch_invariant()
    g.set_batch_invariant(False)
    assert not g.is_batch_invariant()
    with pytest.raises(UsageError, match="batch_invariant=1: expected True or False"):
        g.set_batch_invariant(1)  # type: ignore[arg-type]


def test_the_variable() -> None:
    assert not batch_invariant_by_default({})
    for word, value in (("1", True), ("true", True), ("0", False), ("False", False), ("", False)):
        assert batch_invariant_by_default({"KGEN_BATCH_INVARIANT": word}) is value
    with pytest.raises(UsageError, match="KGEN_BATCH_INVARIANT='yes': expected 1 or 0"):
        batch_invariant_by_default({"KGEN_BATCH_INVARIANT": "yes"})


def test_the_policy_is_part_of_a_calls_problem() -> None:
    lhs, rhs = operands("row")
    x = unpack(lhs, rhs, torch.empty(M, N))
    problem = check(x).problem(3, batch_invariant=True)
    assert problem == GemmProblem(
        "dense", M, N, K, recipe="row", d_dtype="fp32", batch_invariant=True, num_sms=3
    )
