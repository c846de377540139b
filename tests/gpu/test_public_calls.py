"""Many sizes through the public call, checked tile by tile; order on streams; moved tensors.

What a single call must do is in test_runtime_gpu.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import kgen.runtime.gemm as g
from kgen.cases import Case
from kgen.verify import MAX_ERROR
from tests.gpu.bed import Batch, case_of, keep_busy, new_stream, report

N, K = 576, 1152


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    """The reference must not have answered in any of these tests."""
    g.reset_stats()
    yield
    assert g.stats()["fallbacks"] == {}


def call(*tensors: torch.Tensor) -> None:
    """The public call on tensors in the order of a launch, answered by a kernel."""
    a, sfa, b, sfb, d = tensors
    g.gemm_fp8_fp8_bf16_nt((a, sfa), (b, sfb), d)
    assert g.last_path() == "kernel"


def output(m: int) -> torch.Tensor:
    """A poisoned D."""
    return torch.full((m, N), torch.nan, dtype=torch.bfloat16, device="cuda")


def assert_right(d: torch.Tensor, case: Case) -> None:
    """Within the limit of verification, tile by tile."""
    assert float(case.errors(d)[0].amax()) <= MAX_ERROR


@pytest.mark.parametrize(
    ("n", "k"), [(576, 7168), (2112, 1024), (768, 1024), (64, 7168), (16, 1024)]
)
def test_sizes_that_others_refuse(n: int, k: int) -> None:
    """N that is no multiple of 128, in both layouts of A's scales."""
    batch = Batch(case_of(n, k))
    for m in (1, 16, 83, 128, 512):
        batch.run(f"m={m}", call, m)
        batch.run(f"m={m} row-major", call, m, row_major=True)
    failures = batch.failures()
    assert not failures, report(failures)


def test_every_m_with_one_weight() -> None:
    """A server's batch sizes, one by one, with the same B."""
    batch = Batch(case_of(2112, 7168, rows=4097))
    for m in (*range(1, 131), 1040, 1056, 1088, 4097):
        batch.run(f"m={m}", call, m)
    failures = batch.failures()
    assert not failures, report(failures)


def test_replay_reads_the_memory_anew() -> None:
    """A captured call computes with what its tensors hold at each replay."""
    case = case_of(N, K)
    a, sfa, b, sfb = (x.clone() for x in case.inputs(48))
    d = output(48)
    g.warm_up(48, N, K)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(a, sfa, b, sfb, d)
    assert bool(d.isnan().all()), "the capture must not have launched"
    graph.replay()
    assert_right(d, case)
    first = d.clone()
    a.view(torch.uint8).bitwise_xor_(0x80)  # every value of A negated
    graph.replay()
    assert torch.equal(d, -first)


def test_work_queued_before_is_waited_for() -> None:
    """The call runs on the current stream, behind what is slow there, not beside it."""
    case = case_of(N, K)
    a, sfa, b, sfb = case.inputs(64)
    late = torch.zeros(a.shape, dtype=torch.uint8, device="cuda")
    d = output(64)
    g.warm_up(64, N, K)
    torch.cuda.synchronize()
    stream = new_stream()
    with torch.cuda.stream(stream):
        keep_busy(20_000_000)
        late.copy_(a.view(torch.uint8))
        call(late.view(a.dtype), sfa, b, sfb, d)
    stream.synchronize()
    assert_right(d, case)


def test_tensors_that_move_are_seen() -> None:
    """The same shapes at other addresses get their own launch."""
    case = case_of(N, K)
    batch = Batch(case)
    kept: list[torch.Tensor] = []

    def moved(*tensors: torch.Tensor) -> None:
        kept.append(torch.empty(1024 * (1 + len(kept) % 7), device="cuda"))
        a, sfa, b, sfb = (x.clone() for x in tensors[:4])
        call(a, sfa, b, sfb, tensors[4])

    for index in range(50):
        batch.run(f"call {index}", moved, 17)
    assert batch.failures() == []


def test_first_use_by_many_threads() -> None:
    """Eight threads need the same new kernels at once; every result is right."""
    case = case_of(N, 640)
    wrong: list[str] = []
    barrier = threading.Barrier(8)

    def work(index: int) -> None:
        try:
            barrier.wait()
            with torch.cuda.stream(new_stream()):
                d = output(8 * index + 1)
                call(*case.inputs(8 * index + 1), d)
                torch.cuda.current_stream().synchronize()
            assert_right(d, case)
        except BaseException as error:
            wrong.append(repr(error))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
