"""Timing on a GPU: ranges, flush, floor, and the two timers against each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kgen.device import Device
from kgen.errors import MeasureError
from kgen.measure import POLICIES, floor_us, measure, measure_many
from kgen.problem import GemmProblem
from kgen.runtime.kernel import Launch, current_stream
from kgen.runtime.lookup import default_for
from kgen.verify import Case, Verified, verify
from tests.gpu.bed import Kernels

#: Weights of 14.7 MB: they fit L2, so a flush decides whether they come from memory.
PROBLEM = GemmProblem("dense", m=1, n=7168, k=2048)
COLD = POLICIES["cold"]


@pytest.fixture(scope="module")
def ready(kernels: Kernels, device: Device) -> Iterator[tuple[Verified, Launch]]:
    """The default kernel, verified, with a launch prepared on memory that stays."""
    kernel = kernels.get(PROBLEM, default_for(PROBLEM, device))
    case = Case(PROBLEM)
    verified = verify(kernel, case, any_nk=True)
    d = torch.empty(PROBLEM.m, PROBLEM.n, dtype=torch.bfloat16, device="cuda")
    yield verified, kernel.prepare(*case.inputs(PROBLEM.m), d)
    del case, d


def test_cold_is_slower_than_hot_and_above_the_floor(
    ready: tuple[Verified, Launch], device: Device
) -> None:
    """A driver launch is seen by the profiler; the flush makes it wait for memory."""
    verified, launch = ready
    stream = current_stream(0)

    def call() -> None:
        launch.run(stream)

    cold = measure(verified, call, COLD, device)
    hot = measure(verified, call, POLICIES["hot"], device)
    events = measure(verified, call, POLICIES["cold-events"], device)
    assert len(cold.samples_us) == COLD.rounds
    assert floor_us(PROBLEM, device) < cold.median_us < 100
    assert hot.median_us < 0.9 * cold.median_us
    assert -0.5 < events.median_us - cold.median_us < 10


def test_time_covers_all_of_a_call_and_nothing_else(
    ready: tuple[Verified, Launch], device: Device
) -> None:
    """A memset and a copy that belong to the call count; the flush, a fill as well, does not."""
    verified, launch = ready
    stream = current_stream(0)
    memory = torch.empty(1 << 25, dtype=torch.uint8, device="cuda")

    def with_more() -> None:
        memory.zero_()
        launch.run(stream)
        memory.add_(1)

    calls = {
        "alone": (verified, lambda: launch.run(stream)),
        "with more": (verified, with_more),
    }
    timings = measure_many(calls, COLD, device)
    alone, more = timings["alone"].median_us, timings["with more"].median_us
    assert more > alone + 15  # 100 MB written and read at 4 TB/s or so
    assert more < alone + 200


def test_a_call_without_work_is_an_error(ready: tuple[Verified, Launch], device: Device) -> None:
    """Silence, and a kernel too fast to have read its operands."""
    verified, _ = ready
    small = torch.empty(16, device="cuda")
    with pytest.raises(MeasureError, match="did nothing"):
        measure(verified, lambda: None, COLD, device)
    with pytest.raises(MeasureError, match="bytes alone need"):
        measure(verified, lambda: small.fill_(1), COLD, device)
