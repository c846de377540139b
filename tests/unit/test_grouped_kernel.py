"""kgen.runtime.grouped_kernel: GroupedArgs byte by byte, tensor maps of groups, what is refused."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kgen.config import QUEUE_SLOT_BYTES, QUEUE_SLOTS, GemmConfig, grid_of, resources
from kgen.device import H200
from kgen.errors import UnsupportedInput, UsageError
from kgen.heuristic import default_config, explain
from kgen.problem import GemmProblem, ceil_div
from kgen.quant import get_col_major_tma_aligned_tensor
from kgen.render import problem_class, render
from kgen.runtime import driver
from kgen.runtime.grouped_kernel import (
    GROUPED_ARGS_BYTES,
    ContiguousKernel,
    GroupedKernel,
    MaskedKernel,
    most_blocks,
)
from kgen.runtime.kernels import KERNELS
from kgen.space import valid_configs
from kgen.validity import why_invalid
from tests.unit.fake_driver import FakeDriver
from tests.unit.test_tma import forget

CONFIG = GemmConfig(block_m=128, block_n=112, num_stages=4)
TAIL = struct.Struct("<QQqqqqIIIIQq")
GROUPED_TAIL = struct.Struct("<QqqqII24x")
E4M3 = torch.float8_e4m3fn
G, M, N, K = 5, 260, 2112, 512


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    monkeypatch.setattr(driver, "_api", lambda: fake)
    forget()
    yield fake
    forget()


def tensors(kind: str, by_index: bool = False) -> dict[str, Any]:
    outer = (G, M) if kind == "masked" else (M,)
    layout = M if by_index else G + (kind == "contiguous")
    return {
        "a": torch.zeros(*outer, K).to(E4M3),
        "sfa": get_col_major_tma_aligned_tensor(torch.zeros(*outer, K // 128)),
        "b": torch.zeros(G, N, K).to(E4M3),
        "sfb": torch.zeros(G, ceil_div(N, 128), K // 128),
        "d": torch.zeros(*outer, N, dtype=torch.bfloat16),
        "layout": torch.zeros(layout, dtype=torch.int32),
    }


def load(kind: str) -> GroupedKernel:
    problem = GemmProblem(kind, 8, N, K, groups=G)
    kernel = KERNELS[kind].load(b"cubin", "kgen_gemm", CONFIG, problem, 0)
    assert isinstance(kernel, GroupedKernel)
    return kernel


def prepare(kind: str, t: dict[str, Any], by_index: bool = False) -> Any:
    return load(kind).prepare_grouped(tuple(t.values()), by_index=by_index)


def test_each_kind_has_its_kernel() -> None:
    assert KERNELS["contiguous"] is ContiguousKernel
    assert KERNELS["masked"] is MaskedKernel
    assert {kernel.kind for kernel in KERNELS.values()} == set(KERNELS)


def test_contiguous_args(fake: FakeDriver) -> None:
    t = tensors("contiguous")
    launch = prepare("contiguous", t)
    assert len(launch.args) == GROUPED_ARGS_BYTES == 640 + GROUPED_TAIL.size
    a, b, d, s = fake.maps
    assert (a.dims, a.strides) == ([K, M], [K])
    assert (b.dims, b.strides) == ([K, N, G], [K, N * K])
    assert (d.dims, d.strides) == ([N, M], [2 * N])
    assert (s.dims, s.strides) == ([M, 4], [M * 4])
    r = resources(CONFIG, "bf16", "contiguous")
    assert (a.box, b.box, d.box) == ([*r.a_box], [*r.b_box, 1], [*r.d_box])
    tail = TAIL.unpack_from(launch.args, 512)
    assert tail[:2] == (t["sfa"].data_ptr(), t["sfb"].data_ptr())
    assert tail[2:] == (1, M, 4, 1, M, N, K, 0, t["d"].data_ptr(), N)
    more = GROUPED_TAIL.unpack_from(launch.args, 640)
    assert more == (t["layout"].data_ptr(), 0, ceil_div(N, 128) * 4, 0, G, 0)
    t = tensors("contiguous", by_index=True)
    more = GROUPED_TAIL.unpack_from(prepare("contiguous", t, by_index=True).args, 640)
    assert (more[0], more[4], more[5]) == (t["layout"].data_ptr(), G, 1)


def test_masked_args(fake: FakeDriver) -> None:
    t = tensors("masked")
    launch = prepare("masked", t)
    a, b, d, s = fake.maps
    assert (a.dims, a.strides) == ([K, M, G], [K, M * K])
    assert (b.dims, b.strides) == ([K, N, G], [K, N * K])
    assert (d.dims, d.strides) == ([N, M, G], [2 * N, 2 * M * N])
    assert (s.dims, s.strides) == ([M, 4, G], [M * 4, M * 16])
    assert [x.box[2] for x in fake.maps] == [1] * 4
    assert [x.unit for x in fake.maps] == [[1, 1, 1]] * 4
    more = GROUPED_TAIL.unpack_from(launch.args, 640)
    assert more == (t["layout"].data_ptr(), M * 4, ceil_div(N, 128) * 4, M * N, G, 0)
    assert launch.grid == 132


def test_scales_that_tma_can_not_take_are_read_directly(fake: FakeDriver) -> None:
    for kind in ("contiguous", "masked"):
        fake.maps.clear()
        t = tensors(kind)
        t["sfa"] = t["sfa"].contiguous()  # row-major
        launch = prepare(kind, t)
        assert len(fake.maps) == 3
        assert TAIL.unpack_from(launch.args, 512)[9] == 1


def test_groups_may_lie_apart(fake: FakeDriver) -> None:
    t = tensors("masked")
    t["a"] = torch.zeros(G, M + 3, K).to(E4M3)[:, :M]
    t["b"] = torch.zeros(2 * G, N, K).to(E4M3)[::2]
    t["d"] = torch.zeros(G, M + 1, N + 8, dtype=torch.bfloat16)[:, :M, :N]
    launch = prepare("masked", t)
    a, b, d, _ = fake.maps
    assert a.strides == [K, (M + 3) * K]
    assert b.strides == [K, 2 * N * K]
    assert d.strides == [2 * (N + 8), 2 * (M + 1) * (N + 8)]
    assert GROUPED_TAIL.unpack_from(launch.args, 640)[3] == (M + 1) * (N + 8)


def test_one_row_and_one_group_leave_strides_open(fake: FakeDriver) -> None:
    t = {
        "a": torch.zeros(K).to(E4M3).as_strided((1, 1, K), (3, 7, 1)),
        "sfa": torch.zeros(4).as_strided((1, 1, 4), (5, 9, 1)),
        "b": torch.zeros(N, K).to(E4M3).as_strided((1, N, K), (1, K, 1)),
        "sfb": torch.zeros(1, ceil_div(N, 128), 4),
        "d": torch.zeros(N, dtype=torch.bfloat16).as_strided((1, 1, N), (1, 1, 1)),
        "layout": torch.ones(1, dtype=torch.int32),
    }
    launch = prepare("masked", t)
    assert [m.strides for m in fake.maps] == [[K, K], [K, N * K], [2 * N, 2 * N]]
    assert TAIL.unpack_from(launch.args, 512)[9] == 1  # a pitch of one float
    assert launch.grid == ceil_div(N, CONFIG.block_n)


@pytest.mark.parametrize("kind", ["contiguous", "masked"])
@pytest.mark.parametrize("name", ["a", "sfa", "b", "sfb", "d", "layout"])
def test_what_does_not_fit_is_named(kind: str, name: str, fake: FakeDriver) -> None:
    t = tensors(kind)
    wrong = t[name][1:] if name != "b" else t[name][:, :, :256]
    with pytest.raises(UnsupportedInput, match=r" is |[0-9]:"):
        prepare(kind, {**t, name: wrong})
    with pytest.raises(UnsupportedInput, match=name):
        prepare(kind, {**t, name: t[name].to(torch.int64)})


def test_nothing_to_do(fake: FakeDriver) -> None:
    t = tensors("contiguous")
    t |= {"a": t["a"][:0], "sfa": t["sfa"][:0], "d": t["d"][:0]}
    launch = prepare("contiguous", t)
    launch.run(0)
    assert launch.grid == 0
    assert not fake.launches


def test_the_grid_covers_the_most_tiles_that_there_can_be(fake: FakeDriver) -> None:
    offsets = GemmProblem("contiguous", 100, 112, 512, groups=50)
    assert most_blocks(offsets, CONFIG, by_index=False) == 50  # one a group
    assert most_blocks(replace(offsets, m=20), CONFIG, by_index=False) == 20  # one a row
    assert most_blocks(replace(offsets, m=300), CONFIG, by_index=True) == 3
    masked = GemmProblem("masked", 129, 112, 512, groups=50)
    assert most_blocks(masked, CONFIG, by_index=False) == 100
    assert grid_of(100, masked, CONFIG, H200) == 100
    assert grid_of(200, masked, CONFIG, H200) == 132
    assert grid_of(200, replace(masked, num_sms=20), CONFIG, H200) == 20


# ---------------------------------------------------------------- problem, rules, space, source


def test_problems_of_grouped_kinds() -> None:
    p = GemmProblem("masked", 64, 4096, 7168, groups=8)
    assert p.is_grouped
    assert not GemmProblem("dense", 64, 4096, 7168).is_grouped
    assert p.flops == 8 * p.with_m(64).flops // 8 == 2 * 8 * 64 * 4096 * 7168
    assert p.min_bytes > 8 * 4096 * 7168
    with pytest.raises(UsageError, match="a dense problem has one group"):
        GemmProblem("dense", 64, 4096, 7168, groups=8)


@pytest.mark.parametrize(
    ("kind", "config", "rule"),
    [
        ("contiguous", GemmConfig(cluster_m=2), "grouped_cluster"),
        ("masked", GemmConfig(cluster_m=2), "grouped_cluster"),
        ("masked", GemmConfig(split_k=2), "grouped_cluster"),
        ("contiguous", GemmConfig(block_m=256, num_stages=3), "group_alignment"),
        ("contiguous", GemmConfig(block_m=192, num_math_warpgroups=3), "group_alignment"),
        ("masked", GemmConfig(block_m=256, num_stages=3), None),
        ("contiguous", GemmConfig(cluster_n=2), None),
        ("contiguous", GemmConfig(block_m=64, num_math_warpgroups=1), None),
    ],
)
def test_rules(kind: str, config: GemmConfig, rule: str | None) -> None:
    found = why_invalid(GemmProblem(kind, 512, 4096, 7168, groups=4), config, H200)
    assert (found and found.rule) == rule


@pytest.mark.parametrize("kind", ["contiguous", "masked"])
def test_the_space_is_large_and_its_default_valid(kind: str) -> None:
    for m, groups in ((1, 1), (16, 32), (256, 32), (8192, 4)):
        problem = GemmProblem(kind, m, 4096, 7168, groups=groups)
        configs = valid_configs(problem, H200)
        assert len(configs) > 100
        assert all(why_invalid(problem, c, H200) is None for c in configs[::50])
        assert default_config(problem, H200) in configs


def test_the_model_counts_every_groups_weights() -> None:
    one, many = (GemmProblem("masked", 16, 4096, 7168, groups=g) for g in (1, 32))
    config = GemmConfig(block_m=16, block_n=128, num_stages=6, num_math_warpgroups=1)
    times = [explain(p, config, H200) for p in (one, many)]
    assert times[1].dram_us > 15 * times[0].dram_us
    assert times[1].total_us > 10 * times[0].total_us


def test_the_queue_lies_behind_the_barriers() -> None:
    dense, grouped = (resources(CONFIG, kind=kind) for kind in ("dense", "masked"))
    assert dense.smem_bytes == dense.queue_offset == grouped.queue_offset
    assert grouped.smem_bytes - dense.smem_bytes == QUEUE_SLOTS * QUEUE_SLOT_BYTES["masked"]
    assert grouped.queue_offset % 16 == 0


def test_one_source_serves_every_grouping_of_a_kind() -> None:
    p = GemmProblem("contiguous", 512, 4096, 7168, groups=4)
    assert render(p, CONFIG).text == render(replace(p, m=3, groups=77), CONFIG).text
    kinds = [GemmProblem("dense", 512, 4096, 7168), p, replace(p, kind="masked")]
    assert len({render(x, CONFIG).body_hash for x in kinds}) == 3
    assert [problem_class(x, CONFIG).split()[0] for x in kinds] == ["dense", "contiguous", "masked"]
