"""The public GEMM call on a GPU: the kernel answers, rightly, wherever the tensors come from.

A call that the reference answered fails the test, whatever its numbers.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kgen.runtime.gemm as g
from kgen.errors import LaunchError, UnsupportedInput
from kgen.reference import gemm_reference

SIZES = [(1, 576, 512), (83, 2112, 1152), (130, 16, 144), (1040, 768, 512)]


@pytest.fixture(autouse=True)
def _counted() -> Iterator[None]:
    g.reset_stats()
    yield
    g.set_num_sms(0)
    assert g.stats()["fallbacks"] == {}


def operands(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(m + n + k)
    a, sfa = g.per_token_cast_to_fp8(torch.randn(m, k, device="cuda", generator=generator))
    b, sfb = g.per_block_cast_to_fp8(torch.randn(n, k, device="cuda", generator=generator))
    out = torch.full((m, n), float("nan"), dtype=dtype, device="cuda")
    return {"a": a, "sfa": sfa, "b": b, "sfb": sfb, "out": out}


def run(t: dict[str, Any]) -> torch.Tensor:
    g.gemm_fp8_nt((t["a"], t["sfa"]), (t["b"], t["sfb"]), t["out"])
    assert g.last_path().startswith("kernel")
    out: torch.Tensor = t["out"]
    return out


def assert_right(t: dict[str, Any], out: torch.Tensor) -> None:
    exact = gemm_reference(t["a"], t["sfa"], t["b"], t["sfb"])
    squares = torch.stack([(out.float() - exact).square(), exact.square()])
    pad = -out.shape[1] % 8
    padded = torch.nn.functional.pad(squares, (0, pad))
    strips = padded.reshape(2, out.shape[0], -1, 8).sum(dim=(1, 3))
    error = (strips[0] / strips[1]).max().sqrt().item()
    assert error <= 4e-3, f"relative error {error} in a strip of 8 columns"


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_results(m: int, n: int, k: int) -> None:
    t = operands(m, n, k)
    assert_right(t, run(t))
    assert g.last_path() == "kernel"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_outputs(dtype: torch.dtype) -> None:
    t = operands(83, 2112, 1152, dtype)
    assert_right(t, run(t))
    assert g.last_path() == "kernel"


def test_scale_layouts_are_bit_equal() -> None:
    t = operands(83, 2112, 1152)
    first = run(t).clone()
    for scales in (
        g.get_col_major_tma_aligned_tensor(t["sfa"]),
        t["sfa"].t().contiguous().t(),
        t["sfa"].repeat_interleave(2, 0)[::2],
    ):
        assert torch.equal(run({**t, "sfa": scales}), first)
    assert torch.equal(run({**t, "sfb": t["sfb"].t().contiguous().t()}), first)


@pytest.mark.parametrize("pitch", [16, 128, 3])
def test_pitched_views_are_bit_equal_and_write_nothing_beside(pitch: int) -> None:
    t = operands(64, 576, 512)
    packed = run(t).clone()
    for name in ("a", "b"):
        wide = torch.zeros(t[name].shape[0], 512 + pitch, device="cuda").to(t[name].dtype)
        wide[:, :512] = t[name]
        t[name] = wide[:, :512]
    base = torch.full((64, 576 + pitch), 7.0, dtype=torch.bfloat16, device="cuda")
    t["out"] = base[:, :576]
    assert torch.equal(run(t), packed)
    assert (base[:, 576:] == 7).all()
    assert g.last_path() == ("kernel with copies" if pitch == 3 else "kernel")


@pytest.mark.parametrize(("n", "k"), [(573, 512), (1, 144), (576, 500), (129, 130)])
def test_sizes_that_need_copies(n: int, k: int) -> None:
    t = operands(20, n, k)
    assert_right(t, run(t))
    assert g.last_path() == "kernel with copies"


def test_misaligned_addresses() -> None:
    t = operands(20, 576, 512)
    packed = run(t).clone()
    memory = torch.zeros(20 * 512 + 8, device="cuda").to(t["a"].dtype)
    shifted = memory[8:].view(20, 512)
    shifted.copy_(t["a"])
    assert torch.equal(run({**t, "a": shifted}), packed)
    assert g.last_path() == "kernel with copies"


def test_no_rows() -> None:
    t = operands(4, 576, 512)
    g.gemm_fp8_nt((t["a"][:0], t["sfa"][:0]), (t["b"], t["sfb"]), t["out"][:0])
    assert g.last_path() == "empty"
    assert g.stats()["compiles"] == 0


def test_a_seen_shape_is_captured_and_an_unseen_one_named() -> None:
    t = operands(64, 576, 512)
    eager = run(t).clone()
    unseen = operands(64, 584, 640, torch.float16)
    g.reload()
    run(t)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(t)
        with pytest.raises(LaunchError, match="warm_up"):
            run(unseen)
    t["out"].fill_(float("nan"))
    graph.replay()
    assert torch.equal(t["out"], eager)
    assert_right(unseen, run(unseen))


def test_other_streams_and_threads() -> None:
    t = operands(83, 2112, 1152)
    first = run(t).clone()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                for _ in range(50):
                    mine = {**t, "out": torch.empty_like(t["out"])}
                    run(mine)
                    gc.collect(0)
                same = torch.equal(mine["out"], first)
            assert same
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_an_sm_budget() -> None:
    t = operands(1040, 768, 512)
    run(t)
    g.set_num_sms(20)
    assert g.get_num_sms() == 20
    t["out"].fill_(float("nan"))
    assert_right(t, run(t))


def test_a_budget_above_the_device_is_refused() -> None:
    from kgen.errors import UsageError

    with pytest.raises(UsageError, match="the current device has"):
        g.set_num_sms(100000)


def test_the_call_is_cheap_once_seen() -> None:
    t = operands(64, 576, 512)
    for _ in range(10):
        run(t)
    before = g.stats()
    for _ in range(100):
        run(t)
    assert g.stats() == before


def test_tensors_of_two_devices_are_refused() -> None:
    t = operands(64, 576, 512)
    with pytest.raises(UnsupportedInput, match="expected all tensors on one device"):
        run({**t, "b": t["b"].cpu()})


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_than_the_current_device() -> None:
    t = operands(64, 576, 512)
    first = run(t).clone()
    there = {name: tensor.to("cuda:1") for name, tensor in t.items()}
    assert torch.cuda.current_device() == 0
    for _ in range(2):
        there["out"].fill_(float("nan"))
        torch.cuda.synchronize(1)
        assert torch.equal(run(there).cpu(), first.cpu())
    assert torch.cuda.current_device() == 0
    with pytest.raises(UnsupportedInput, match="expected all tensors on one device"):
        run({**t, "a": there["a"]})
