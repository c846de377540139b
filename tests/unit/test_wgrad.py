"""Weight gradients without a GPU: problems and lines, WgradArgs byte by byte, calls, refusals."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kgen.runtime.gemm as g
from kgen.config import QUEUE_SLOT_BYTES, QUEUE_SLOTS, GemmConfig, resources
from kgen.device import H200
from kgen.errors import LaunchError, ShapesError, UnsupportedInput, UsageError
from kgen.heuristic import default_config, explain
from kgen.problem import WGRAD_KINDS, GemmProblem
from kgen.quant import cast_to_fp8 as cast
from kgen.quant import get_col_major_tma_aligned_tensor as column_major
from kgen.render import problem_class
from kgen.runtime import driver, wgrad
from kgen.runtime.casts import cast_to_fp8
from kgen.runtime.counting import counted
from kgen.runtime.kernel import TAIL
from kgen.runtime.kernels import KERNELS
from kgen.runtime.record import RECORDER
from kgen.runtime.wgrad_kernel import WGRAD_ARGS_BYTES, KGroupedKernel, WgradKernel
from kgen.shape_writer import form_of, to_text
from kgen.shapes import load_shapes, parse_problem
from kgen.space import valid_configs
from kgen.validity import why_invalid
from tests.unit.fake_driver import FakeDriver
from tests.unit.test_tma import forget

E4M3 = torch.float8_e4m3fn
M, N, K, G = 264, 136, 1024, 3
CONFIG = GemmConfig(block_n=96, d_staging="direct")
PROBLEM = GemmProblem.of("wgrad", M, N, K)
GROUPS = GemmProblem.of("k_grouped", M, N, 384, groups=G)
KS = (256, 0, 768)
#: ks, maps, d_stride_g, groups, ks of its own.
MORE = struct.Struct("<QQqI36x128i")


# ------------------------------------------------------------------------- problems and lines


def test_a_line_has_the_defaults_of_its_kind() -> None:
    for kind in WGRAD_KINDS:
        p = parse_problem(f"{kind} m=64 n=128 k=256")
        assert (p.recipe, p.d_dtype, p.accumulate) == ("vector", "fp32", True)
        assert p == GemmProblem.of(kind, 64, 128, 256)
        assert str(p) == f"{kind} m=64 n=128 k=256"
    p = parse_problem("wgrad m=64 n=128 k=256 recipe=block accumulate=false")
    assert (p.recipe, p.accumulate) == ("block", False)
    assert str(p) == "wgrad m=64 n=128 k=256 recipe=block accumulate=false"
    assert parse_problem(str(p)) == p
    assert not parse_problem("dense m=64 n=128 k=256").accumulate


@pytest.mark.parametrize("suffix", ["txt", "csv", "jsonl"])
def test_files_give_them_back(suffix: str, tmp_path: Path) -> None:
    lines = load_shapes("deepseek_v3_wgrad").lines
    assert len(lines) == 9
    overwrites = [replace(x, problem=replace(x.problem, accumulate=False)) for x in lines]
    dense = load_shapes("deepseek_v3").lines[:1]
    for some in (lines, overwrites, lines + overwrites + dense):
        path = tmp_path / f"shapes.{suffix}"
        path.write_text(to_text(some, form_of(path)))
        assert [x.problem for x in load_shapes(path).lines] == [x.problem for x in some]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("dense m=8 n=8 k=16 accumulate=true", "accumulate=true are for wgrad, k_grouped"),
        ("contiguous m=8 n=8 k=16 recipe=vector", "takes recipe=block"),
        ("dense m=8 n=8 k=16 recipe=vector", "recipe=vector and accumulate=true are for"),
        ("wgrad m=8 n=8 k=16 d_dtype=bf16", "takes d_dtype=fp32"),
        ("wgrad m=8 n=8 k=16 recipe=row", "recipe=vector or block"),
        ("wgrad m=8 n=8 k=16 bias=true", "no bias"),
        ("wgrad m=8 n=8 k=16 groups=2", "a wgrad problem has one group"),
        ("k_grouped m=8 n=8 k=128 recipe=block", "recipe=vector"),
        ("k_grouped m=8 n=8 k=144", "pad each group's K with zeros to 256"),
        ("wgrad m=8 n=12 k=16", "multiple of 8"),
        ("wgrad m=8 n=8 k=16 fast_accum=true", "recipe=vector scales each 128 columns"),
    ],
)
def test_what_can_not_be_is_refused(line: str, words: str) -> None:
    with pytest.raises(ShapesError, match=words):
        parse_problem(line)
    with pytest.raises(UsageError):
        GemmProblem("wgrad", 8, 8, 16)  # without what a line of its kind has


def test_bytes_and_operations() -> None:
    p = GemmProblem.of("k_grouped", 256, 128, 512, groups=3)
    d_bytes = 256 * 128 * 4
    operands = (256 + 128) * 512 + (256 + 128) * 4 * 4
    assert p.min_bytes == 3 * (operands + 2 * d_bytes)
    assert replace(p, accumulate=False).min_bytes == 3 * (operands + d_bytes)
    assert p.flops == 2 * 3 * 256 * 128 * 512


# ----------------------------------------------------------------------------- configurations


def test_what_a_kernel_may_be() -> None:
    def rule(p: GemmProblem, **changes: Any) -> str:
        found = why_invalid(p, GemmConfig(**changes), H200)
        return found.rule if found else ""

    groups = replace(GROUPS, m=4096, n=4096)
    dense = GemmProblem("dense", 4096, 4096, 4096, d_dtype="fp32")
    assert rule(groups, d_staging="direct", cluster_m=2) == ""
    assert rule(dense, d_staging="direct") == "direct_kind"
    split = {"block_m": 64, "num_math_warpgroups": 1, "block_n": 64, "split_k": 2}
    assert rule(PROBLEM, **split) == ""
    assert rule(PROBLEM, **split, d_staging="direct") == "direct_kind"
    assert rule(groups, **split) == "k_grouped_split"
    assert rule(groups, baked_dims="nk") == "k_grouped_baked"
    three = {"block_m": 192, "num_math_warpgroups": 3, "num_stages": 3, "cluster_m": 2}
    assert rule(groups, **three, block_n=120) == "registers"
    assert rule(groups, **three, block_n=112) == rule(PROBLEM, **three, block_n=120) == ""
    assert all(c.d_staging == "own" for c in valid_configs(dense, H200))


def test_direct_leaves_room_for_more_stages() -> None:
    wide = GemmConfig(block_m=192, num_math_warpgroups=3)
    deepest = {
        staging: max(
            stages
            for stages in range(2, 9)
            if not why_invalid(PROBLEM, replace(wide, num_stages=stages, d_staging=staging), H200)
        )
        for staging in ("own", "direct")
    }
    assert deepest == {"own": 3, "direct": 5}


def test_resources() -> None:
    r = resources(CONFIG, "fp32", "vector", kind="wgrad")
    assert r.sfb_stage_bytes == 384
    assert r.sfb_box == (96, 1)
    assert r.held_groups == 12  # all: 2 * 48 sums and 24 scales of 232 registers
    grouped = resources(CONFIG, "fp32", "vector", kind="k_grouped")
    assert grouped.smem_bytes - r.smem_bytes == QUEUE_SLOTS * QUEUE_SLOT_BYTES["k_grouped"]
    assert grouped.queue_offset % 16 == 0
    three = GemmConfig(block_m=192, block_n=112, num_math_warpgroups=3)
    assert resources(three, "fp32", "vector", kind="wgrad").held_groups == 8  # of 14
    assert resources(three, "fp32", "block", kind="wgrad").held_groups == 0


def test_one_source_serves_all_sizes_and_not_the_other_mode() -> None:
    assert problem_class(PROBLEM, CONFIG) == "wgrad recipe=vector d_dtype=fp32 accumulate=true"
    other = replace(PROBLEM, accumulate=False)
    assert problem_class(other, CONFIG) == "wgrad recipe=vector d_dtype=fp32"


def test_the_model_knows_what_vectors_cost() -> None:
    p = GemmProblem.of("wgrad", 16384, 7168, 4096)
    config = GemmConfig(block_m=192, num_math_warpgroups=3, num_stages=3)
    vector = explain(p, config, H200)
    block = explain(replace(p, recipe="block"), config, H200)
    assert vector.math_us > 1.2 * block.math_us
    groups = GemmProblem.of("k_grouped", 7168, 4096, 8192, groups=4)
    found = default_config(groups, H200)
    assert why_invalid(groups, found, H200) is None
    one = GemmProblem.of("wgrad", 7168, 4096, 8192)
    ratio = explain(groups, found, H200).total_us / explain(one, found, H200).total_us
    assert 3.5 < ratio < 4.5


# ------------------------------------------------------------------------------------ launches


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    monkeypatch.setattr(driver, "_api", lambda: fake)
    forget()
    yield fake
    forget()


def operands(recipe: str = "vector", groups: int = 0) -> dict[str, torch.Tensor]:
    rows = N if recipe == "vector" else 2
    sfb = torch.zeros(rows, K // 128)
    return {
        "a": torch.zeros(M, K).to(E4M3),
        "sfa": column_major(torch.zeros(M, K // 128)),
        "b": torch.zeros(N, K).to(E4M3),
        "sfb": column_major(sfb) if recipe == "vector" else sfb,
        "d": torch.zeros(groups, M, N) if groups else torch.zeros(M, N),
    }


def load(problem: GemmProblem) -> Any:
    return KERNELS[problem.kind].load(b"cubin", "kgen_gemm", CONFIG, problem, 0)


def test_each_kind_has_its_kernel() -> None:
    assert KERNELS["wgrad"] is WgradKernel
    assert KERNELS["k_grouped"] is KGroupedKernel


def test_args_of_one_product(fake: FakeDriver) -> None:
    t = operands()
    launch = load(PROBLEM).prepare(*t.values())
    assert len(launch.args) == WGRAD_ARGS_BYTES == 640 + 128 + MORE.size
    a, b, d, sfa, sfb = fake.maps
    assert (a.dims, b.dims, d.dims) == ([K, M], [K, N], [N, M])
    assert (sfa.dims, sfa.strides, sfa.box) == ([M, 8], [M * 4], [128, 1])
    assert (sfb.dims, sfb.strides, sfb.box) == ([N, 8], [N * 4], [96, 1])
    assert sfb.target - a.target == 640
    assert struct.unpack_from("<4I", launch.args, TAIL + 48) == (M, N, K, 0)
    assert not any(launch.args[768:])


def test_scales_of_either_side_are_read_directly_where_tma_can_not(fake: FakeDriver) -> None:
    for name in ("sfa", "sfb"):
        fake.maps.clear()
        t = operands()
        t[name] = t[name].contiguous()
        launch = load(PROBLEM).prepare(*t.values())
        assert len(fake.maps) == 3
        assert struct.unpack_from("<4I", launch.args, TAIL + 48)[3] == 1


def test_scales_by_block_have_no_tensor_map(fake: FakeDriver) -> None:
    launch = load(replace(PROBLEM, recipe="block")).prepare(*operands("block").values())
    assert len(fake.maps) == 4
    assert not any(launch.args[640:])


def test_args_of_groups(fake: FakeDriver) -> None:
    t = operands(groups=G)
    launch = load(GROUPS).prepare_k_grouped(tuple(t.values()), KS)
    d = fake.maps[-1]
    assert (d.dims, d.strides) == ([N, M, G], [4 * N, 4 * M * N])
    more = MORE.unpack_from(launch.args, 768)
    assert more[:4] == (0, 0, M * N, G)
    assert more[4:] == (*KS, *[0] * 125)
    on_device = torch.tensor(KS, dtype=torch.int32)
    launch = load(GROUPS).prepare_k_grouped(tuple(t.values()), on_device)
    more = MORE.unpack_from(launch.args, 768)
    assert more[:4] == (on_device.data_ptr(), 0, M * N, G)
    assert not any(more[4:])
    assert launch.grid == 3 * 3 * 2


def test_more_groups_than_go_with_a_launch(fake: FakeDriver) -> None:
    t = operands() | {"d": torch.zeros(200, M, N)}
    ks = [128 * (i < 8) for i in range(200)]
    launch = load(GROUPS).prepare_k_grouped(tuple(t.values()), ks)
    (kept,) = launch._kept
    assert kept.tolist() == ks
    more = MORE.unpack_from(launch.args, 768)
    assert more[0] == kept.data_ptr()
    assert not any(more[4:])


def test_flat_operands_have_a_tensor_map_each(fake: FakeDriver) -> None:
    t = operands(groups=G)
    a, b = t["a"].flatten(), t["b"].flatten()
    launch = load(GROUPS).prepare_k_grouped((a, t["sfa"], b, t["sfb"], t["d"]), KS, flat=True)
    own = fake.maps[:4]
    assert [x.dims for x in own] == [[256, M], [256, N], [768, M], [768, N]]
    assert [x.strides for x in own] == [[256], [256], [768], [768]]
    assert [x.address for x in own] == [
        *(a.data_ptr(), b.data_ptr()),
        *(a.data_ptr() + 256 * M, b.data_ptr() + 256 * N),
    ]
    (kept,) = launch._kept
    assert kept.shape == (2 * G * 128,)
    assert MORE.unpack_from(launch.args, 768)[1] == kept.data_ptr()
    with pytest.raises(UnsupportedInput, match="need numbers"):
        load(GROUPS).prepare_k_grouped(
            (a, t["sfa"], b, t["sfb"], t["d"]), torch.tensor(KS, dtype=torch.int32), flat=True
        )


def test_nothing_is_copied_while_a_graph_is_captured(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    t = operands(groups=G)
    tensors = (t["a"].flatten(), t["sfa"], t["b"].flatten(), t["sfb"], t["d"])
    with pytest.raises(LaunchError, match="run the same call once before"):
        load(GROUPS).prepare_k_grouped(tensors, KS, flat=True)
    load(GROUPS).prepare_k_grouped(tuple(t.values()), KS)


@pytest.mark.parametrize("name", ["a", "sfa", "b", "sfb", "d"])
def test_what_does_not_fit_a_kernel_is_named(name: str, fake: FakeDriver) -> None:
    t = operands()
    with pytest.raises(UnsupportedInput, match=r" is |[0-9]:"):
        load(PROBLEM).prepare(*(t | {name: t[name][..., 1:]}).values())
    t = operands(groups=G)
    wrong: Any = tuple((t | {name: t[name][..., 1:]}).values())
    with pytest.raises(UnsupportedInput, match=r" is |[0-9]:"):
        load(GROUPS).prepare_k_grouped(wrong, KS)


def test_runs_are_counted(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KGEN_RECORD", str(tmp_path / "calls.txt"))
    RECORDER.reopen()
    try:
        one, groups = (counted(load(p), p, guessed=False) for p in (PROBLEM, GROUPS))
        assert isinstance(one, WgradKernel)
        assert isinstance(groups, KGroupedKernel)
        one.prepare(*operands().values()).run(0)
        t = operands(groups=G)
        tensors: Any = (t["a"].flatten(), t["sfa"], t["b"].flatten(), t["sfb"], t["d"])
        launch = groups.prepare_k_grouped(tensors, KS, flat=True)
        assert launch._kept, "the maps live as long as what counts"
        launch.run(0)
        launch.run(0)
        RECORDER.save()
        counts = {x.problem: x.weight for x in load_shapes(tmp_path / "calls.txt").lines}
        assert counts == {PROBLEM: 1, GROUPS: 2}
    finally:
        monkeypatch.undo()
        RECORDER.reopen()


# --------------------------------------------------------------------------------------- calls


@pytest.fixture(scope="module")
def layer() -> SimpleNamespace:
    """A layer's activations and gradients of 512 tokens, cast for its weight's gradient."""
    generator = torch.Generator().manual_seed(0)
    dy, x = (torch.randn(512, rows, generator=generator) for rows in (48, 64))
    of_dy, of_x = (cast_to_fp8(t, "token", direction="transposed") for t in (dy, x))
    return SimpleNamespace(
        dy=dy,
        x=x,
        lhs=(of_dy.values_t, of_dy.scales_t),
        rhs=(of_x.values_t, of_x.scales_t),
        by_block=cast(x.t().contiguous(), "block"),
    )


def wide(pair: Any) -> torch.Tensor:
    values, scales = pair
    product: torch.Tensor = values.float() * scales.repeat_interleave(128, 1)[:, : values.shape[1]]
    return product


def near(found: torch.Tensor, right: torch.Tensor, error: float = 1e-6) -> bool:
    return float((found - right).norm() / right.norm()) < error


def test_a_product_is_added_or_written(layer: SimpleNamespace) -> None:
    right = wide(layer.lhs) @ wide(layer.rhs).T
    out = torch.ones(48, 64)
    g.wgrad_gemm_fp8_fp8_fp32_nt(layer.lhs, layer.rhs, out)
    assert g.last_path() == "reference"
    assert near(out - 1, right)
    g.wgrad_gemm_fp8_fp8_fp32_nt(layer.lhs, layer.rhs, out)
    assert near(out - 1, 2 * right)
    out.fill_(torch.nan)
    g.wgrad_gemm_fp8_fp8_fp32_nt(layer.lhs, layer.rhs, out, accumulate=False)
    assert near(out, right)
    assert near(out, layer.dy.T @ layer.x, 0.05)  # what E4M3 loses


def test_scales_by_block(layer: SimpleNamespace) -> None:
    out = torch.zeros(48, 64)
    g.wgrad_gemm_fp8_fp8_fp32_nt(layer.lhs, layer.by_block, out)
    values, scales = layer.by_block
    rows = scales.repeat_interleave(128, 0)[:64]
    assert near(out, wide(layer.lhs) @ wide((values, rows)).T)


@pytest.mark.parametrize("on_device", [False, True])
def test_groups_have_columns_of_their_own(layer: SimpleNamespace, on_device: bool) -> None:
    a, b = wide(layer.lhs), wide(layer.rhs)
    numbers = [128, 0, 384]
    ks = torch.tensor(numbers, dtype=torch.int32) if on_device else numbers
    out = torch.ones(3, 48, 64)
    g.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(layer.lhs, layer.rhs, out, ks)
    assert near(out[0] - 1, a[:, :128] @ b[:, :128].T)
    assert bool((out[1] == 1).all())
    assert near(out[2] - 1, a[:, 128:] @ b[:, 128:].T)
    g.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(layer.lhs, layer.rhs, out, ks, accumulate=False)
    assert bool((out[1] == 0).all())
    assert near(out[2], a[:, 128:] @ b[:, 128:].T)


def test_flat_groups(layer: SimpleNamespace) -> None:
    ks = [128, 0, 384]
    right = torch.zeros(3, 48, 64)
    g.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(layer.lhs, layer.rhs, right, ks)
    flat = []
    for values, _ in (layer.lhs, layer.rhs):
        parts = torch.split(values.view(torch.uint8), ks, dim=1)
        flat.append(torch.cat([part.flatten() for part in parts]).view(values.dtype))
    for turn in (False, True):
        scales = [s.t().contiguous() if turn else s for _, s in (layer.lhs, layer.rhs)]
        out = torch.zeros(3, 48, 64)
        pairs = (flat[0], scales[0]), (flat[1], scales[1])
        g.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(*pairs, out, ks)
        assert torch.allclose(out, right)


def test_nothing_to_sum(layer: SimpleNamespace) -> None:
    nothing = (layer.lhs[0][:, :0], layer.lhs[1][:, :0]), (layer.rhs[0][:, :0], layer.rhs[1][:, :0])
    for accumulate, left in ((True, 5.0), (False, 0.0)):
        out = torch.full((48, 64), 5.0)
        g.wgrad_gemm_fp8_fp8_fp32_nt(*nothing, out, accumulate=accumulate)
        assert g.last_path() == "empty"
        assert bool((out == left).all())
        out = torch.full((2, 48, 64), 5.0)
        g.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(*nothing, out, [0, 0], accumulate=accumulate)
        assert bool((out == left).all())


CAST = r'cast_to_fp8\(x, "token", direction="transposed"\)'


def refused(words: str, lhs: Any, rhs: Any, out: torch.Tensor, ks: Any = None) -> None:
    call: Any = g.wgrad_gemm_fp8_fp8_fp32_nt
    arguments: tuple[Any, ...] = (lhs, rhs, out)
    if ks is not None:
        call, arguments = g.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt, (*arguments, ks)
    with pytest.raises(UnsupportedInput, match=words):
        call(*arguments)


def test_untransposed_operands_are_told_the_cast(layer: SimpleNamespace) -> None:
    lhs, rhs = cast(layer.dy, "token"), cast(layer.x, "token")
    out = torch.zeros(48, 64)
    refused(f"look untransposed.*{CAST}", lhs, rhs, out)
    turned = tuple((values.t(), scales.t()) for values, scales in (lhs, rhs))
    refused(CAST, turned[0], turned[1], out)
    views = tuple((values.t(), s) for (values, _), (_, s) in ((lhs, layer.lhs), (rhs, layer.rhs)))
    refused(f"columns 48 elements apart; cast it by .*{CAST}", views[0], views[1], out)
    refused(f"a is float32.*{CAST}", (layer.dy.T, layer.lhs[1]), layer.rhs, out)


def test_what_is_not_served_is_named(layer: SimpleNamespace) -> None:
    lhs, rhs, out = layer.lhs, layer.rhs, torch.zeros(48, 64)
    three = torch.zeros(2, 48, 64)
    refused("out is bfloat16.*expected float32", lhs, rhs, out.bfloat16())
    refused(r"out is .*expected \[M, N\]", lhs, rhs, three)
    refused(r"out is .*expected \[G, M, N\]", lhs, rhs, out, [512])
    refused(r"b is .*expected \[56, 512\]", lhs, rhs, torch.zeros(48, 56))
    refused("N=60: expected a multiple of 8", lhs, (rhs[0][:60], rhs[1][:60]), torch.zeros(48, 60))
    left, right = ((v[:, :508], s) for v, s in (lhs, rhs))
    refused("K=508.*to 512", left, right, out)
    left, right = ((v[:, :272], s) for v, s in (lhs, rhs))
    refused("K=272.*to 384", left, right, three, [144, 128])
    refused(r"b_scales is .*expected \[64, 4\] or \[1, 4\]", lhs, (rhs[0], rhs[1][:, :3]), out)
    refused(r"pass a_scales\.t\(\)", (lhs[0], lhs[1].t()), rhs, out)
    refused(r"a_scales is .*expected float32", (lhs[0], lhs[1].half()), rhs, out)
    refused("expected the pair", lhs[0], rhs, out)
    shared = torch.zeros(48 * 512 + 64, dtype=torch.uint8).view(E4M3)
    crossing = shared[: 48 * 512].view(48, 512)
    crossed = shared.view(torch.float32)[: 48 * 64].view(48, 64)
    refused("out shares memory with a", (crossing, lhs[1]), rhs, crossed)
    with pytest.raises(UnsupportedInput, match="accumulate=1"):
        g.wgrad_gemm_fp8_fp8_fp32_nt(lhs, rhs, out, accumulate=1)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedInput, match="gradient"):
        g.wgrad_gemm_fp8_fp8_fp32_nt(lhs, rhs, torch.zeros(48, 64, requires_grad=True))


def test_ks_that_make_no_sense_are_refused(layer: SimpleNamespace) -> None:
    lhs, rhs, out = layer.lhs, layer.rhs, torch.zeros(2, 48, 64)
    refused(r"ks\[0\] is 100: expected a multiple of 128", lhs, rhs, out, [100, 412])
    refused(r"ks\[1\] is -128", lhs, rhs, out, [640, -128])
    refused("add up to 256, a has 512 columns: expected as many", lhs, rhs, out, [128, 128])
    refused("3 ks, out is", lhs, rhs, out, [128, 128, 256])
    refused("whole numbers", lhs, rhs, out, [128.0, 384.0])
    refused(r"ks is int64\[2\]", lhs, rhs, out, torch.tensor([128, 384]))
    flat = (lhs[0].flatten(), lhs[1]), (rhs[0].flatten(), rhs[1])
    refused("give ks as numbers", *flat, out, torch.tensor([128, 384], dtype=torch.int32))


def test_values_on_the_device_are_looked_at_where_asked(
    layer: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KGEN_CHECK", "1")
    wgrad.forget()
    try:
        out = torch.zeros(2, 48, 64)
        for values, words in (([128, 100], r"ks\[1\] is 100"), ([512, 128], "no more")):
            refused(words, layer.lhs, layer.rhs, out, torch.tensor(values, dtype=torch.int32))
        ks = torch.tensor([128, 128], dtype=torch.int32)  # may leave columns out
        g.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(layer.lhs, layer.rhs, out, ks)
    finally:
        monkeypatch.undo()
        wgrad.forget()


@pytest.mark.parametrize("form", ["one", "numbers", "tensor"])
def test_traced_whole(layer: SimpleNamespace, form: str) -> None:
    tensor = torch.tensor([128, 384], dtype=torch.int32)
    ks: Any = {"numbers": [128, 384], "tensor": tensor}.get(form)

    def step(*tensors: Any) -> torch.Tensor:
        a, sfa, b, sfb, out = tensors
        if ks is None:
            g.wgrad_gemm_fp8_fp8_fp32_nt((a, sfa), (b, sfb), out)
        else:
            g.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt((a, sfa), (b, sfb), out, ks)
        twice: torch.Tensor = out * 2
        return twice

    shape = (48, 64) if ks is None else (2, 48, 64)
    operands = (*layer.lhs, *layer.rhs)
    expected = step(*operands, torch.ones(shape))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*operands, torch.ones(shape)), expected)
    assert float(expected.abs().amax()) > 3


def test_calls_are_recorded(
    layer: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KGEN_RECORD", str(tmp_path / "calls.jsonl"))
    RECORDER.reopen()
    try:
        out = torch.zeros(2, 48, 64)
        g.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(layer.lhs, layer.rhs, out, [128, 384])
        g.wgrad_gemm_fp8_fp8_fp32_nt(layer.lhs, layer.by_block, out[0], accumulate=False)
        RECORDER.save()
        records = [
            json.loads(line)
            for line in (tmp_path / "calls.jsonl").read_text().splitlines()
            if not line.startswith("#")
        ]
        assert [r["kind"] for r in records] == ["k_grouped", "wgrad"]
        found = [x.problem for x in load_shapes(tmp_path / "calls.jsonl").lines]
        assert found == [
            GemmProblem.of("k_grouped", 48, 64, 256, groups=2),
            GemmProblem.of("wgrad", 48, 64, 512, recipe="block", accumulate=False),
        ]
    finally:
        monkeypatch.undo()
        RECORDER.reopen()
