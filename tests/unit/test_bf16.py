"""BF16 operands: which problems there are, their kernels and arguments, what verification sees."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kgen.cases import Case, ExactCase
from kgen.config import GemmConfig, resources_of
from kgen.device import H200
from kgen.errors import UsageError, WrongResult
from kgen.grouped_cases import GroupedCase
from kgen.grouped_reference import contiguous_reference_into, index_of, masked_reference_into
from kgen.grouped_verify import verify_grouped
from kgen.heuristic import default_config, predict_us, seeds
from kgen.problem import BF16_FIELDS, WGRAD_KINDS, GemmProblem, implied
from kgen.render import render
from kgen.runtime.kernel import MAP_A, MAP_B, operands
from kgen.search.plan import floor_us
from kgen.shapes import load_shapes, parse_line, parse_problem
from kgen.space import valid_configs
from kgen.validity import why_invalid
from kgen.verify import Seal, check_exact, check_random, limit_of, shared_growths, verify
from tests.unit import simulated
from tests.unit.simulated import tensor_core

CPU = torch.device("cpu")
PLAIN = GemmProblem("dense", m=140, n=328, k=456, **BF16_FIELDS)
FP8 = GemmProblem("dense", m=140, n=328, k=912)

# ------------------------------------------------------------------------------ problems


@pytest.mark.parametrize(
    "fields",
    [
        {"recipe": "none"},
        {"a_dtype": "bf16", "b_dtype": "bf16"},
        {"recipe": "none", "a_dtype": "bf16"},
        {"recipe": "none", "a_dtype": "bf16", "b_dtype": "e5m2"},
        {"recipe": "row", "a_dtype": "bf16", "b_dtype": "bf16"},
        {"b_dtype": "bf16"},
    ],
)
def test_bf16_goes_with_bf16_and_without_scales(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected recipe=none a_dtype=bf16 b_dtype=bf16, or FP8"):
        GemmProblem("dense", 1, 8, 16, **fields)


@pytest.mark.parametrize("kind", WGRAD_KINDS)
@pytest.mark.parametrize("fields", [BF16_FIELDS, {"recipe": "none"}, {"a_dtype": "bf16"}])
def test_weight_gradients_have_none(kind: str, fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="weight gradients take FP8 operands with their scales"):
        GemmProblem.of(kind, 128, 128, 128, **fields)
    with pytest.raises(UsageError, match=f"kind={kind} recipe=vector a_dtype=bf16 b_dtype=bf16"):
        GemmProblem.of(kind, 128, 128, 128, **(BF16_FIELDS | {"recipe": "vector"}))


def test_sizes_and_bytes() -> None:
    assert PLAIN.operand_bytes == 2
    assert PLAIN.k_block == 64
    assert PLAIN.num_k_blocks == 8  # the last one of 8 columns
    assert not PLAIN.promotes
    assert PLAIN.scale_shapes == ((0, 0), (0, 0))
    assert PLAIN.min_bytes == 2 * (140 * 456 + 328 * 456 + 140 * 328)
    assert replace(PLAIN, bias=True).min_bytes == PLAIN.min_bytes + 2 * 328
    assert replace(PLAIN, k=8).num_k_blocks == 1
    with pytest.raises(UsageError, match="a multiple of 8; pad K to 464"):
        replace(PLAIN, k=457)
    with pytest.raises(UsageError, match="expected 1 to 1073741823"):
        replace(PLAIN, k=2**30)
    with pytest.raises(UsageError, match="tensor cores keep FP32 sums of BF16 products"):
        replace(PLAIN, fast_accum=True)


def test_grouped_kinds_take_them_without_a_bias() -> None:
    for kind in ("contiguous", "masked"):
        grouped = replace(PLAIN, kind=kind, groups=3)
        assert grouped.min_bytes == 3 * PLAIN.min_bytes
        with pytest.raises(UsageError, match="or BF16 ones, and no bias"):
            replace(grouped, bias=True)


def test_one_word_of_a_line_says_it_all(tmp_path: Path) -> None:
    for word in ("recipe=none", "a_dtype=bf16", "b_dtype=bf16", "b_dtype=bf16 recipe=none"):
        assert parse_problem(f"dense m=140 n=328 k=456 {word}") == PLAIN
    assert parse_problem(str(PLAIN)) == PLAIN
    both = [line.problem for line in parse_line("dense m=140 n=328 k=912 recipe=block,none")]
    assert both == [FP8, replace(PLAIN, k=912)]
    with pytest.raises(UsageError, match="a_dtype=bf16 b_dtype=e4m3: BF16 operands come in pairs"):
        parse_problem("dense m=140 n=328 k=456 a_dtype=bf16 b_dtype=e4m3")
    table, lines = tmp_path / "a.csv", tmp_path / "a.jsonl"
    table.write_text("kind,m,n,k,recipe,a_dtype\ndense,140,328,456,none,\ndense,140,328,912,,\n")
    assert [line.problem for line in load_shapes(table).lines] == [PLAIN, FP8]
    lines.write_text(json.dumps({"kind": "dense", "m": 140, "n": 328, "k": 456, "recipe": "none"}))
    assert [line.problem for line in load_shapes(lines).lines] == [PLAIN]
    assert implied({"m": 1}) == {"m": 1}


def test_shipped_shapes() -> None:
    problems = [line.problem for line in load_shapes("deepseek_v3_bf16").lines]
    assert all(p.recipe == "none" for p in problems)
    scaled = {str(line.problem) for line in load_shapes("deepseek_v3").lines}
    dense = [p for p in problems if p.kind == "dense"]
    fp8: dict[str, Any] = {"recipe": "block", "a_dtype": "e4m3", "b_dtype": "e4m3"}
    assert {str(replace(p, **fp8)) for p in dense} <= scaled
    assert len([p for p in dense if p.m == 4096]) == 7
    assert {p.kind for p in problems} == {"dense", "contiguous", "masked"}


# ------------------------------------------------------------------------------- kernels

LARGE = GemmProblem("dense", 4096, 7168, 2048, **BF16_FIELDS)


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (GemmConfig(block_n=256, num_stages=3), None),
        (GemmConfig(block_m=256, num_stages=3), None),
        (GemmConfig(block_m=256, block_n=192, num_stages=2), None),
        (GemmConfig(block_m=192, block_n=200, num_stages=2, num_math_warpgroups=3), None),
        (GemmConfig(block_m=256, block_n=208, num_stages=2), "registers"),
        (GemmConfig(block_m=192, block_n=208, num_stages=2, num_math_warpgroups=3), "registers"),
        (GemmConfig(num_accumulators=2), "accumulators_fast"),
        (GemmConfig(sass_pass="interleave"), "sass_pass_recipe"),
        (GemmConfig(block_n=256, num_stages=4), "smem_bytes"),
    ],
)
def test_which_tiles_there_are(config: GemmConfig, rule: str | None) -> None:
    invalid = why_invalid(LARGE, config, H200)
    assert (invalid and invalid.rule) == rule


def test_the_space_is_wider_than_with_promotion() -> None:
    found = valid_configs(LARGE, H200)
    assert {c.num_accumulators for c in found} == {1}
    assert {(128, 256), (256, 128), (192, 200)} <= {(c.block_m, c.block_n) for c in found}
    for m in (1, 64, 4096):
        problem = LARGE.with_m(m)
        assert why_invalid(problem, default_config(problem, H200), H200) is None
        assert len(seeds(problem, H200, 8)) == 8


def test_the_model_takes_a_k_block_of_either_type_for_as_long() -> None:
    """Half the columns at half the rate, over as many bytes."""
    fast = GemmProblem("dense", 4096, 7168, 4096, recipe="tensor", fast_accum=True)
    config = GemmConfig(block_n=256, num_stages=3)
    scales = 8
    bf16 = predict_us(LARGE, config, H200)
    assert bf16 == pytest.approx(predict_us(fast, config, H200), rel=1e-6)
    assert LARGE.min_bytes == fast.min_bytes - scales
    assert floor_us(LARGE, H200) == pytest.approx(floor_us(fast, H200))


def test_sources() -> None:
    text = render(PLAIN, GemmConfig(block_n=256, num_stages=3)).text
    assert text.startswith("// BF16 GEMM for sm_90a")
    assert "m64n256k16.f32.bf16.bf16" in text
    assert "accumulate, 1, 1, 0, 0;" in text
    for scaled in ("load_scales(", "kSfbOffset", "struct Finish", "QGMMA"):
        assert scaled not in text
    baked = render(PLAIN, GemmConfig(baked_dims="nk"))
    assert f"kN = {PLAIN.n}, kK = {2 * PLAIN.k};" in baked.text, "K in bytes"
    assert "struct Finish" in render(replace(PLAIN, bias=True), GemmConfig()).text


def test_arguments_count_bytes() -> None:
    m, n, k, pitch = 5, 16, 72, 80
    a = torch.zeros(m, pitch, dtype=torch.bfloat16)[:, :k]
    b, d = torch.zeros(n, k, dtype=torch.bfloat16), torch.zeros(m, n, dtype=torch.bfloat16)
    none = torch.empty(0, 0)
    problem = GemmProblem("dense", 1, 8, 8, **BF16_FIELDS)
    o = operands((a, none, b, none, d), problem)
    maps = o.maps(resources_of(GemmConfig(), problem), "bf16")
    for at, rows, bytes_apart in ((MAP_A, m, 2 * pitch), (MAP_B, n, 2 * k)):
        assert maps[at].data_type == "uint8"
        assert maps[at].dims == (2 * k, rows)
        assert maps[at].pitch_bytes == bytes_apart
        assert maps[at].why_not() is None
    assert o.sfa_direct
    assert (o.a.row_stride, o.b.row_stride, o.d.row_stride) == (2 * pitch, 2 * k, n)


# -------------------------------------------------------------------------- verification


@dataclass
class Played:
    """A kernel on the CPU with, where asked, one fault: f(a or b) as they are read, a k16 step
    (K block, step) left out, or sums cut as tensor cores cut them."""

    of_a: Callable[[torch.Tensor], torch.Tensor] | None = None
    of_b: Callable[[torch.Tensor], torch.Tensor] | None = None
    left_out: tuple[int, int] | None = None
    cut: bool = False

    def __call__(  # noqa: PLR0917, in the kernel's order
        self,
        a: torch.Tensor,
        sfa: torch.Tensor,
        b: torch.Tensor,
        sfb: torch.Tensor,
        d: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        a, b = (f(x) if f else x for f, x in ((self.of_a, a), (self.of_b, b)))
        if self.left_out:
            start = 64 * self.left_out[0] + 16 * self.left_out[1]
            a = a.clone()
            a[:, start : start + 16] = 0
        total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64)
        if self.cut:
            for start in range(0, a.shape[1], 16):
                part = slice(start, start + 16)
                total = tensor_core(a[:, part].double(), b[:, part].double(), total)
        else:
            total = a.double() @ b.double().T
        result = total.float()
        d.copy_(result if bias is None else result + bias.float())


@pytest.mark.parametrize("d_dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_right_kernel_passes(d_dtype: str, bias: bool) -> None:
    problem = replace(PLAIN, d_dtype=d_dtype, bias=bias, k=584)
    verified = verify(Played(), Case(problem, CPU))
    assert verified.max_strip_error < limit_of(problem)
    assert verified.exact_passes == 2
    assert verified.growth > 0, "sums are asked to stay FP32"


@pytest.mark.parametrize("k", [8 * i for i in range(1, 10)] + [128, 328, 392])
def test_every_end_of_k_is_exact(k: int) -> None:
    check_exact(Played(), Case(replace(PLAIN, m=19, n=24, k=k), CPU))


def test_every_k16_step_is_seen() -> None:
    case = Case(PLAIN, CPU)
    for block, step in itertools.product(range(PLAIN.num_k_blocks), range(4)):
        if 64 * block + 16 * step < PLAIN.k:
            with pytest.raises(WrongResult, match="exact case"):
                check_exact(Played(left_out=(block, step)), case)


def one_row(x: torch.Tensor) -> torch.Tensor:
    wrong = x.clone()
    wrong[77 % len(x)] = wrong[78 % len(x)]
    return wrong


@pytest.mark.parametrize(
    "faults",
    [
        {"of_a": lambda x: x.roll(1, 0)},
        {"of_b": lambda x: x.roll(1, 0)},
        {"of_a": one_row},
        {"of_b": one_row},
        {"left_out": (7, 0)},
    ],
)
def test_mutations_are_caught(faults: dict[str, Any]) -> None:
    """By all checks, and by the exact case alone."""
    case = Case(PLAIN, CPU)
    with pytest.raises(WrongResult):
        verify(Played(**faults), case)
    with pytest.raises(WrongResult, match="exact case"):
        check_exact(Played(**faults), case)


def test_sums_of_25_bits_pass_and_of_13_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Hopper sums BF16, and FP8: the former has room under the limit of FP32 results."""
    problem = GemmProblem("dense", 3, 16, 4096, d_dtype="fp32", **BF16_FIELDS)
    case = Case(problem, CPU)
    monkeypatch.setattr(simulated, "FRACTION_BITS", 25)
    assert max(check_random(Played(cut=True), case, limit=limit_of(problem))) < 2e-5
    check_exact(Played(cut=True), case)
    monkeypatch.setattr(simulated, "FRACTION_BITS", 13)
    with pytest.raises(WrongResult):
        check_random(Played(cut=True), case, limit=limit_of(problem))
    growth = case.own_growth
    assert growth is not None
    full = growth.errors(Played(cut=True))[1]
    assert full > 10 * 1.5e-3
    assert [g.k for g in shared_growths(Case(replace(problem, k=8), CPU))] == [16384, 65536]


def test_a_result_that_went_through_fp16_is_refused() -> None:
    problem = replace(PLAIN, d_dtype="fp32")
    case = Case(problem, CPU)

    def rounded(*tensors: torch.Tensor) -> None:
        Played()(*tensors)
        tensors[4].copy_(tensors[4].half())

    with pytest.raises(WrongResult, match="tiles off"):
        verify(rounded, case)


def test_exact_rows_and_columns_differ_from_their_neighbours() -> None:
    exact = ExactCase(replace(PLAIN, m=600, n=2048), CPU)
    a, _, b, _ = exact.inputs(0)
    for rows in (1, 2, 4, 8, 16, 24, 32, 64, 96, 128, 192, 256, 384, 512):
        assert bool((a[rows:, 0] != a[:-rows, 0]).all())
    for columns in (1, 2, 4, 8, 16, 24, 32, 64, 96, 128, 192, 256):
        assert bool((b[columns:, 0] != b[:-columns, 0]).all())


def test_seals_see_writes_into_inputs() -> None:
    """Over scales that are none as well, as the search's child makes them."""
    case = Case(replace(PLAIN, bias=True), CPU)
    shared = [growth.constants() for growth in shared_growths(Case(replace(PLAIN, k=8), CPU))]
    grouped = GroupedCase(GemmProblem("masked", 3, 16, 72, groups=2, **BF16_FIELDS), CPU)
    seal = Seal(itertools.chain(case.constants(), *shared, grouped.constants()))
    assert not seal.is_broken()
    for victim in (case.a, case.b, grouped.b[0], grouped.full.a[0]):
        before = victim.clone()
        victim[0, 1] += 1
        assert seal.is_broken()
        victim.copy_(before)
        assert not seal.is_broken()


# ------------------------------------------------------------------------------- grouped


def right(tensors: Any, by_index: bool) -> None:
    a, sfa, b, sfb, d, layout = tensors
    if d.dim() == 3:
        masked_reference_into(d, a, sfa, b, sfb, layout, recipe="none")
    else:
        index = layout if by_index else index_of(layout, a.shape[0])
        contiguous_reference_into(d, a, sfa, b, sfb, index, recipe="none")


def neighbours_weights(tensors: Any, by_index: bool) -> None:
    a, sfa, b, sfb, d, layout = tensors
    right((a, sfa, b.roll(1, 0), sfb, d, layout), by_index)


@pytest.mark.parametrize("kind", ["contiguous", "masked"])
def test_grouped_kernels_are_checked(kind: str) -> None:
    """NaN in rows that do not count, groups told apart by powers of two."""
    case = GroupedCase(GemmProblem(kind, 40, 136, 72, groups=4, **BF16_FIELDS), "cpu")
    assert bool(case.runs[1].a.isnan().any())
    verified = verify_grouped(right, case)
    assert verified.exact_passes == 1
    assert 0 < verified.max_tile_error < 4e-3
    with pytest.raises(WrongResult):
        verify_grouped(neighbours_weights, case)
