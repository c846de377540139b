"""The default configuration on every small M and a grid of N and K, partial tiles everywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kgen.config import GemmConfig
from kgen.device import Device
from kgen.problem import GemmProblem
from kgen.runtime.lookup import default_for
from tests.gpu.bed import GRID_KS, GRID_MS, GRID_NS, Batch, Kernels, case_of, report

Defaults = Callable[[int, int], dict[int, GemmConfig]]


@pytest.fixture(scope="module")
def defaults(device: Device, kernels: Kernels) -> Defaults:
    """Default configurations by M for an (N, K), all of the grid's already being compiled."""
    chosen = {
        (n, k): {m: default_for(GemmProblem("dense", m, n, k), device) for m in GRID_MS}
        for n in GRID_NS
        for k in GRID_KS
    }
    for (n, k), by_m in chosen.items():
        kernels.prefetch((GemmProblem("dense", m, n, k), config) for m, config in by_m.items())
    return lambda n, k: chosen[n, k]


@pytest.mark.parametrize("k", GRID_KS)
@pytest.mark.parametrize("n", GRID_NS)
def test_every_m(n: int, k: int, kernels: Kernels, defaults: Defaults) -> None:
    """1..130 and 1024 + {0, 1, 16} rows, with both layouts of A's scales."""
    batch = Batch(case_of(n, k))
    for m, config in defaults(n, k).items():
        kernel = kernels.get(GemmProblem("dense", m, n, k), config)
        batch.run(f"m={m} [{config}]", kernel, m)
        batch.run(f"m={m} row-major [{config}]", kernel, m, row_major=True)
    failures = batch.failures()
    case_of.cache_clear()
    assert not failures, report(failures)


@pytest.mark.parametrize("d_dtype", ["fp16", "fp32"])
@pytest.mark.parametrize(("n", "k"), [(64, 144), (576, 1152), (2112, 7168)])
def test_other_outputs(n: int, k: int, d_dtype: str, kernels: Kernels, device: Device) -> None:
    """FP16 and FP32 outputs of the default, at row counts around each block_m."""
    rows = (1, 3, 16, 17, 64, 65, 127, 130, 1025)
    problems = [GemmProblem("dense", m, n, k, d_dtype=d_dtype) for m in rows]
    chosen = [(problem, default_for(problem, device)) for problem in problems]
    kernels.prefetch(chosen)
    batch = Batch(case_of(n, k, d_dtype))
    for problem, config in chosen:
        kernel = kernels.get(problem, config)
        batch.run(f"{problem} [{config}]", kernel, problem.m)
    failures = batch.failures()
    assert not failures, report(failures)


@pytest.mark.parametrize("num_sms", [1, 7, 66, 131])
def test_sm_budget(num_sms: int, kernels: Kernels, device: Device) -> None:
    """Fewer CTAs walk the same tiles, clusters that do not divide the budget included."""
    n, k = 2112, 1152
    batch = Batch(case_of(n, k))
    for m in (1, 130, 1025):
        problem = GemmProblem("dense", m, n, k, num_sms=num_sms)
        config = default_for(problem, device)
        kernel = kernels.get(problem, config)

        def launch(*tensors: torch.Tensor, kernel: Callable[..., None] = kernel) -> None:
            kernel(*tensors, num_sms=num_sms)

        batch.run(f"{problem} [{config}]", launch, m)
    failures = batch.failures()
    assert not failures, report(failures)


def test_more_outputs_than_31_bits_count(kernels: Kernels, device: Device) -> None:
    """M * N past 2^31: the first, the last and some rows between, and nothing past the end."""
    m, n, k = 524416, 4096, 128
    problem = GemmProblem("dense", m, n, k)
    assert problem.m * problem.n > 2**31
    kernel = kernels.get(problem, default_for(problem, device))
    small = case_of(n, k)
    rows = small.problem.m
    a = torch.zeros(m, k, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    sfa = torch.ones(m, 1, device="cuda")
    out = torch.full((m + 8, n), torch.nan, dtype=torch.bfloat16, device="cuda")
    starts = (0, 128 * 2049, m - rows)
    for start in starts:
        a.view(torch.uint8)[start : start + rows] = small.a[:rows].view(torch.uint8)
        sfa[start : start + rows] = small.sfa[:rows]
    kernel(a, sfa, small.b, small.sfb, out[:m])
    errors = torch.stack(
        [small.errors(out[start : start + rows])[0].amax() for start in starts]
    ).tolist()
    assert max(errors) <= 4e-3
    assert bool(out[m:].isnan().all())
    assert int(out[:m].isnan().any(1).sum()) == 0
    gap = out[rows : 128 * 2049]
    assert bool((gap == 0).all())
