"""kgen.runtime.kernel: GemmArgs byte by byte, the launch's shape, and what is refused."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kgen.config import GemmConfig, resources
from kgen.errors import DriverError, LaunchError, UnsupportedInput
from kgen.problem import GemmProblem, ceil_div
from kgen.runtime import driver
from kgen.runtime.kernel import ARGS_BYTES, Kernel
from tests.unit.fake_driver import FakeDriver
from tests.unit.test_tma import forget

CONFIG = GemmConfig(block_m=128, block_n=112, num_stages=4)
TAIL = struct.Struct("<QQqqqqIIIIQqQQqqQ8x")
PROBLEM = GemmProblem("dense", 1, 8, 16)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    monkeypatch.setattr(driver, "_api", lambda: fake)
    forget()
    yield fake
    forget()


def aligned(rows: int, cols: int, dtype: torch.dtype, pitch: int = 0) -> torch.Tensor:
    """A tensor on a 16-byte boundary, which torch's CPU allocator gives (64)."""
    return torch.zeros(rows, pitch or cols).to(dtype)[:, :cols]


def tensors(m: int, n: int, k: int, d_dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    e4m3 = torch.float8_e4m3fn
    blocks = ceil_div(k, 128)
    return {
        "a": aligned(m, k, e4m3),
        "sfa": torch.zeros(blocks, ceil_div(m, 4) * 4).t()[:m],
        "b": aligned(n, k, e4m3),
        "sfb": torch.zeros(ceil_div(n, 128), blocks),
        "d": aligned(m, n, d_dtype),
    }


def load(config: GemmConfig = CONFIG, d_dtype: str = "bf16") -> Kernel:
    problem = GemmProblem("dense", 1, 8, 16, d_dtype=d_dtype)
    return Kernel.load(b"cubin", "kgen_gemm", config, problem, 0)


def tail(args: bytes) -> SimpleNamespace:
    names = [
        *("sfa", "sfb", "sfa_m", "sfa_k", "sfb_n", "sfb_k", "m", "n", "k", "direct"),
        *("d", "d_m", "a", "b", "a_m", "b_n", "bias"),
    ]
    return SimpleNamespace(**dict(zip(names, TAIL.unpack_from(args, 512), strict=True)))


def test_args_hold_what_the_kernel_reads(fake: FakeDriver) -> None:
    t = tensors(130, 2112, 7168)
    launch = load().prepare(**t)
    assert len(launch.args) == ARGS_BYTES == 512 + TAIL.size
    r = resources(CONFIG, "bf16")
    a, b, d, s = fake.maps
    assert [m.target - a.target for m in fake.maps] == [0, 128, 256, 384]
    assert a.target % 64 == 0
    assert (a.kind, a.address, a.dims, a.strides) == (0, t["a"].data_ptr(), [7168, 130], [7168])
    assert (b.kind, b.address, b.dims, b.strides) == (0, t["b"].data_ptr(), [7168, 2112], [7168])
    assert (d.kind, d.address, d.dims, d.strides) == (9, t["d"].data_ptr(), [2112, 130], [4224])
    assert (s.kind, s.address, s.dims, s.strides) == (7, t["sfa"].data_ptr(), [130, 56], [132 * 4])
    assert [m.box for m in fake.maps] == [list(x) for x in (r.a_box, r.b_box, r.d_box, r.sfa_box)]
    assert [m.swizzle for m in fake.maps] == [
        3,
        3,
        {128: 3, 64: 2, 32: 1, 0: 0}[r.d_swizzle_bytes],
        0,
    ]
    args = launch.args
    assert [args[i] for i in (0, 127, 128, 256, 384, 511)] == [1, 1, 2, 3, 4, 4]
    f = tail(args)
    assert (f.sfa, f.sfb) == (t["sfa"].data_ptr(), t["sfb"].data_ptr())
    assert (f.sfa_m, f.sfa_k, f.sfb_n, f.sfb_k) == (1, 132, 56, 1)
    assert (f.d, f.d_m) == (t["d"].data_ptr(), 2112)
    assert (f.m, f.n, f.k, f.direct) == (130, 2112, 7168, 0)
    assert (f.d, f.d_m) == (t["d"].data_ptr(), 2112)
    assert (f.a, f.b) == (t["a"].data_ptr(), t["b"].data_ptr())
    assert (f.a_m, f.b_n, f.bias) == (7168, 7168, 0)
    assert launch.args[624:] == b"\0" * 16


@pytest.mark.parametrize(("d_dtype", "kind", "size"), [("fp16", 6, 2), ("fp32", 7, 4)])
def test_other_outputs(fake: FakeDriver, d_dtype: str, kind: int, size: int) -> None:
    torch_dtype = {"fp16": torch.float16, "fp32": torch.float32}[d_dtype]
    load(d_dtype=d_dtype).prepare(**tensors(16, 576, 512, torch_dtype))
    d = fake.maps[2]
    assert (d.kind, d.strides) == (kind, [576 * size])
    assert d.box == list(resources(CONFIG, d_dtype).d_box)


def test_views_keep_their_own_pitch(fake: FakeDriver) -> None:
    t = tensors(3, 576, 512)
    t["a"] = aligned(3, 512, torch.float8_e4m3fn, 640)
    t["b"] = aligned(576, 512, torch.float8_e4m3fn, 640)
    t["d"] = aligned(3, 576, torch.bfloat16, 704)
    load().prepare(**t)
    assert [m.strides for m in fake.maps[:3]] == [[640], [640], [1408]]


def direct(fake: FakeDriver, m: int, k: int, sfa: torch.Tensor) -> SimpleNamespace:
    fake.maps.clear()
    launch = load().prepare(**{**tensors(m, 576, k), "sfa": sfa})
    f = tail(launch.args)
    assert len(fake.maps) == (3 if f.direct else 4)
    if f.direct:
        assert launch.args[384:512] == b"\0" * 128
    return f


def test_scales_that_tma_can_not_take_are_read_directly(fake: FakeDriver) -> None:
    row_major = torch.zeros(64, 56)
    f = direct(fake, 64, 7168, row_major)
    assert (f.direct, f.sfa_m, f.sfa_k) == (1, 56, 1)
    f = direct(fake, 63, 7168, torch.zeros(56, 63).t())  # column-major, pitch not aligned
    assert (f.direct, f.sfa_m, f.sfa_k) == (1, 1, 63)
    f = direct(fake, 60, 7168, torch.zeros(56, 64).t()[1:61])  # aligned pitch, odd address
    assert (f.direct, f.sfa_m, f.sfa_k) == (1, 1, 64)
    assert direct(fake, 60, 7168, torch.zeros(56, 64).t()[4:]).direct == 0


def test_extents_of_one_do_not_depend_on_open_strides(fake: FakeDriver) -> None:
    one_row = torch.zeros(8, 7168).to(torch.float8_e4m3fn).as_strided((1, 7168), (3, 1))
    t = {**tensors(1, 576, 7168), "a": one_row}
    t["d"] = torch.zeros(2000, dtype=torch.bfloat16).as_strided((1, 576), (5, 1))
    t["sfa"] = torch.zeros(56).as_strided((1, 56), (999, 1))
    f = tail(load().prepare(**t).args)
    assert [m.strides for m in fake.maps] == [[7168], [7168], [1152]]
    assert (f.direct, f.sfa_k) == (1, 1)
    assert direct(fake, 1, 128, torch.zeros(1, 1).as_strided((1, 1), (7, 9))).direct == 0
    assert fake.maps[3].strides == [16]
    assert direct(fake, 64, 128, torch.zeros(64, 1)).direct == 0  # row-major of one column
    assert fake.maps[3].strides == [256]


def test_the_launch_has_the_grid_of_the_actual_rows(fake: FakeDriver) -> None:
    kernel = load()
    launch = kernel.prepare(**tensors(130, 2112, 512))
    launch.run(0xABC)
    (call,) = fake.launches
    r = resources(CONFIG, "bf16")
    assert call.grid == [2 * ceil_div(2112, 112), 1, 1] == [launch.grid, 1, 1]
    assert (call.block, call.smem_bytes) == ([r.threads, 1, 1], r.smem_bytes)
    assert (call.function, call.stream, call.attributes, call.extra) == (88, 0xABC, [], None)
    assert call.argument % 64 == 0
    assert call.args == launch.args
    assert kernel.prepare(**tensors(4096, 2112, 512)).grid == 132
    assert kernel.prepare(**tensors(4096, 2112, 512), num_sms=20).grid == 20


def test_a_grid_is_no_larger_than_the_clusters_that_fit(fake: FakeDriver) -> None:
    config = GemmConfig(block_m=64, block_n=64, num_math_warpgroups=1, split_k=4)
    kernel = load(config)
    assert kernel.prepare(**tensors(64, 7168, 512)).grid == 4 * 30
    fake.clusters[8] = 0
    with pytest.raises(LaunchError, match="no room for a cluster of 8"):
        load(replace(config, split_k=8))


def test_clusters_are_asked_for(fake: FakeDriver) -> None:
    config = GemmConfig(block_m=64, block_n=64, num_math_warpgroups=1, split_k=4)
    launch = load(config).prepare(**tensors(16, 576, 7168))
    launch.run(0)
    assert fake.launches[0].attributes == [[4, 0, 4, 1, 1]]
    assert fake.launches[0].grid == [9 * 4, 1, 1]


def test_columns_of_a_short_b_are_padded_by_tma(fake: FakeDriver) -> None:
    t = {**tensors(16, 573, 512), "d": aligned(16, 576, torch.bfloat16)}
    f = tail(load().prepare(**t).args)
    assert fake.maps[1].dims == [512, 573]
    assert fake.maps[2].dims == [576, 16]
    assert f.n == 576
    with pytest.raises(UnsupportedInput, match=r"expected torch.bfloat16\[16, 576\]"):
        load().prepare(**tensors(16, 573, 512))


def test_no_rows_no_launch(fake: FakeDriver) -> None:
    launch = load().prepare(**tensors(0, 576, 512))
    launch.run(0)
    assert (launch.grid, fake.maps, fake.launches) == (0, [], [])


def test_shared_memory_is_asked_for_at_load(fake: FakeDriver) -> None:
    load()
    need = resources(CONFIG, "bf16").smem_bytes
    assert fake.log == [
        "load 5 in 1000",
        f"CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES={need}",
    ]
    assert fake.current == []


def test_a_driver_too_old_for_the_cubin_gives_both_versions(fake: FakeDriver) -> None:
    fake.load_result, fake.version = 222, 12020
    with pytest.raises(LaunchError, match=r"made by nvrtc 13\.5.*CUDA 12\.2: update the driver"):
        Kernel.load(b"cubin", "kgen_gemm", CONFIG, PROBLEM, 0, made_by="nvrtc 13.5")
    assert fake.current == []


def test_a_lost_context_is_said_to_be_lost(fake: FakeDriver) -> None:
    fake.load_result = 700
    with pytest.raises(DriverError, match="restart the process"):
        load()
    fake.load_result = 0
    launch = load().prepare(**tensors(16, 576, 512))
    fake.launch_results = [700]
    with pytest.raises(DriverError, match="restart the process") as caught:
        launch.run(0)
    assert caught.value.fatal
    assert len(fake.launches) == 1


def test_a_thread_with_no_context_gets_the_device(fake: FakeDriver) -> None:
    launch = load().prepare(**tensors(16, 576, 512))
    fake.launch_results = [201, 0]
    launch.run(5)
    assert [call.context for call in fake.launches] == [[], [1000]]
    fake.launch_results = [201, 201]
    with pytest.raises(DriverError, match=r"launch of kgen_gemm \[128x112"):
        launch.run(5)


def test_many_streams_and_threads_share_one_launch(fake: FakeDriver) -> None:
    launch = load().prepare(**tensors(16, 576, 512))

    def work(stream: int) -> None:
        for i in range(100):
            launch.run(stream * 1000 + i)

    threads = [threading.Thread(target=work, args=(stream,)) for stream in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(call.stream or 0 for call in fake.launches) == sorted(
        stream * 1000 + i for stream in range(8) for i in range(100)
    )
    assert len({call.args for call in fake.launches}) == 1


BAD = {
    "a of another type": ("a", aligned(16, 512, torch.bfloat16), "a is torch.bfloat16"),
    "b too short": ("b", aligned(576, 384, torch.float8_e4m3fn), r"b is .*\[576, 384\]: expected"),
    "a in columns": ("a", torch.zeros(512, 16).to(torch.float8_e4m3fn).t(), "column stride 16"),
    "d in columns": ("d", torch.zeros(576, 16).to(torch.bfloat16).t(), "column stride 16"),
    "sfa short": ("sfa", torch.zeros(16, 3), r"expected torch.float32\[16, 4\]"),
    "sfb transposed": ("sfb", torch.zeros(4, 5), r"expected torch.float32\[5, 4\]"),
    "sfb in bf16": ("sfb", torch.zeros(5, 4).bfloat16(), "sfb is torch.bfloat16"),
    "d fp32": ("d", torch.zeros(16, 576), "d is torch.float32"),
    "flat a": ("a", torch.zeros(512).to(torch.float8_e4m3fn), "two dimensions"),
    "a pitch": ("a", aligned(16, 512, torch.float8_e4m3fn, 520), "pitch of 520 bytes"),
    "a address": (
        "a",
        torch.zeros(17 * 512).to(torch.float8_e4m3fn)[8:].as_strided((16, 512), (512, 1)),
        "address",
    ),
    "a expanded": ("a", aligned(1, 512, torch.float8_e4m3fn).expand(16, 512), "pitch of 0 bytes"),
}


@pytest.mark.parametrize("case", BAD)
def test_tensors_the_kernel_can_not_read_are_refused(fake: FakeDriver, case: str) -> None:
    name, tensor, says = BAD[case]
    with pytest.raises(UnsupportedInput, match=says):
        load().prepare(**{**tensors(16, 576, 512), name: tensor})
    assert not fake.launches
