"""`run_host_bench`: what one call costs the Python thread that makes it, kgen's beside torch's.

Takes a problem, gives `HostReport` of plain values. GPU work is waited for between bursts, outside
the clock, so that no call waits for room in the launch queue. Must not import search.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, Final

import torch

import kgen.runtime.gemm as g
from kgen.bench.gpu import hopper_device
from kgen.errors import LaunchError, UsageError
from kgen.nvml import driver_release
from kgen.problem import GemmProblem
from kgen.reference import TORCH_D_DTYPES

#: The default problem: its kernel is short, its calls the more so to be counted.
DEFAULT_PROBLEM: Final = GemmProblem("dense", m=64, n=576, k=7168)
#: Sets of tensors that a rotating caller goes through, as layers of a model do.
NUM_SETS: Final = 64
#: Calls in a burst; the driver queues 1024 launches before one waits.
_BURST: Final = 256
_ROUNDS: Final = 40

Call = Callable[[], object]
KGEN: Final = "kgen.gemm_fp8_nt"


@dataclass(frozen=True)
class HostCost:
    """Median microseconds of a call: on the same tensors each time, and rotating over all sets."""

    one_us: float
    rotating_us: float


@dataclass(frozen=True)
class HostReport:
    """Costs by name, in the order they were timed, and where they come from."""

    problem: str
    num_sets: int
    provenance: dict[str, Any]
    costs: dict[str, HostCost]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def run_host_bench(problem: GemmProblem = DEFAULT_PROBLEM, num_sets: int = NUM_SETS) -> HostReport:
    """Cost of kgen's public calls, its operator and torch._scaled_mm, alternating in one process.

    Only the host's part is timed: results are checked by the tests, not here. torch._scaled_mm has
    one scale per tensor, which asks less of it. Raises GpuMissing without a Hopper GPU, LaunchError
    where kgen's fallback would answer, UsageError for another recipe than "block".
    """
    if problem.recipe != "block" or problem.bias:
        raise UsageError(f"{problem}: --host times calls of recipe=block without a bias")
    ordinal = torch.cuda.current_device() if torch.cuda.is_available() else 0
    device = hopper_device("host costs are timed on", ordinal)
    calls = make_calls(problem, "cuda", num_sets)
    calls[KGEN][0]()
    if g.last_path() != "kernel":
        raise LaunchError(f"{problem}: kgen was answered by: {g.last_path()}, expected: kernel")
    costs = time_calls(calls, torch.cuda.synchronize)
    provenance = {
        "device": device.name,
        "driver": driver_release() or "unknown",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
    }
    return HostReport(str(problem), num_sets, provenance, costs)


def time_calls(
    calls: Mapping[str, Sequence[Call]],
    wait: Callable[[], object],
    *,
    burst: int = _BURST,
    rounds: int = _ROUNDS,
) -> dict[str, HostCost]:
    """Median cost of each name's calls: its first alone, and all in turn; names alternate.

    `wait` is called before each burst, untimed.
    """
    bursts: dict[str, tuple[list[Call], list[Call]]] = {}
    for name, own in calls.items():
        rotating = [own[i % len(own)] for i in range(burst)]
        bursts[name] = [own[0]] * burst, rotating
    samples: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
    for round_ in range(rounds + 1):
        for name, both in bursts.items():
            for burst_calls, found in zip(both, samples[name], strict=True):
                cost = _time_burst(burst_calls, wait)
                if round_:  # the first builds, packs and fills caches
                    found.append(cost)
    return {name: HostCost(median(one), median(all_)) for name, (one, all_) in samples.items()}


def _time_burst(calls: Sequence[Call], wait: Callable[[], object]) -> float:
    wait()
    start = time.perf_counter_ns()
    for call in calls:
        call()
    return (time.perf_counter_ns() - start) / len(calls) / 1e3


def make_calls(problem: GemmProblem, device: str, num_sets: int) -> dict[str, list[Call]]:
    """Each implementation's call, by name, for each set of tensors of its own."""
    found: dict[str, list[Call]] = {}
    m, n, k = problem.m, problem.n, problem.k
    dtype = TORCH_D_DTYPES[problem.d_dtype]
    one = torch.ones((), device=device)
    for _ in range(num_sets):
        a, sfa = g.per_token_cast_to_fp8(torch.randn(m, k, device=device))
        b, sfb = g.per_block_cast_to_fp8(torch.randn(n, k, device=device))
        lhs, rhs = (a, g.get_col_major_tma_aligned_tensor(sfa)), (b, sfb)
        out = torch.empty(m, n, dtype=dtype, device=device)
        operator = torch.ops.kgen.gemm_fp8_nt.default
        for name, call in (
            (KGEN, partial(g.gemm_fp8_nt, lhs, rhs, out)),
            ("kgen.mm_fp8_nt", partial(g.mm_fp8_nt, lhs, rhs, dtype)),
            ("torch.ops.kgen.gemm_fp8_nt", partial(operator, *lhs, *rhs, out)),
            ("torch._scaled_mm", partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=dtype)),
        ):
            found.setdefault(name, []).append(call)
    return found
