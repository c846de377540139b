"""Strided views, guards around every output, odd scale layouts, special values."""

from __future__ import annotations

import pytest
import torch

from kgen.config import GemmConfig
from kgen.device import Device
from kgen.problem import GemmProblem
from kgen.runtime.kernel import Kernel
from kgen.runtime.lookup import default_for
from tests.gpu.bed import Kernels, case_of, keep_busy, new_stream

E4M3 = torch.float8_e4m3fn
N, K = 576, 1168
#: One that stores with TMA in plain rows, one with the widest swizzle and multicast.
CONFIGS = (
    GemmConfig(block_m=64, block_n=56, num_stages=4, num_math_warpgroups=1),
    GemmConfig(block_m=128, block_n=128, num_stages=4, cluster_n=2),
    GemmConfig(block_m=128, block_n=152, num_stages=4, cluster_m=2),
)


@pytest.fixture(scope="module", params=CONFIGS, ids=str)
def kernel(request: pytest.FixtureRequest, kernels: Kernels) -> Kernel:
    """One of the kernels, for any M, N and K."""
    problem = GemmProblem("dense", 64, N, K)
    kernels.prefetch((problem, config) for config in CONFIGS)
    return kernels.get(problem, request.param)


def padded(x: torch.Tensor, extra: int) -> torch.Tensor:
    """The same values as a view whose pitch is `extra` columns longer, with rubbish between."""
    rows, columns = x.shape
    base = torch.full((rows, columns + extra), 0x7F, dtype=torch.uint8, device=x.device)  # NaN
    base[:, :columns] = x.view(torch.uint8)
    return base.view(E4M3)[:, :columns]


@pytest.mark.parametrize("m", [3, 64, 128])
def test_strided_views_give_the_same_bits(m: int, kernel: Kernel) -> None:
    """A and B with a pitch of K + 128, D of N + 128 among sentinels: as packed, bit for bit."""
    case = case_of(N, K)
    a, sfa, b, sfb = case.inputs(m)
    packed = torch.full((m, N), torch.nan, dtype=torch.bfloat16, device="cuda")
    kernel(a.contiguous(), sfa, b, sfb, packed)
    base = torch.full((m + 2, N + 128), 7.0, dtype=torch.bfloat16, device="cuda")
    view = base[1 : m + 1, :N]
    kernel(padded(a, 128), sfa, padded(b, 128), sfb, view)
    assert torch.equal(view, packed)
    assert float(case.errors(packed)[0].amax()) <= 4e-3
    base[1 : m + 1, :N] = 7.0
    assert bool((base == 7.0).all()), "written outside D"


@pytest.mark.parametrize("m", [1, 3, 64, 130])
def test_scale_layouts_give_the_same_bits(m: int, kernel: Kernel) -> None:
    """Row-major, column-major with aligned and odd pitch, a view of wider scales, B's too."""
    case = case_of(N, K)
    a, sfa, b, sfb = case.inputs(m)
    blocks = sfa.shape[1]
    wide = torch.full((m, blocks + 3), torch.nan, device="cuda")
    wide[:, :blocks] = sfa
    odd = torch.full((blocks, m + 1), torch.nan, device="cuda")
    odd[:, :m] = sfa.T
    wide_b = torch.full((sfb.shape[0], blocks + 5), torch.nan, device="cuda")
    wide_b[:, :blocks] = sfb
    variants = {
        "column-major": (sfa, sfb),
        "row-major": (sfa.contiguous(), sfb),
        "row-major with a pitch": (wide[:, :blocks], sfb),
        "column-major, odd pitch": (odd[:, :m].T, sfb),
        "B column-major": (sfa, sfb.T.contiguous().T),
        "B with a pitch": (sfa, wide_b[:, :blocks]),
    }
    results = {}
    for name, (scale_a, scale_b) in variants.items():
        d = torch.full((m, N), torch.nan, dtype=torch.bfloat16, device="cuda")
        kernel(a, scale_a, b, scale_b, d)
        results[name] = d
    assert float(case.errors(results["column-major"])[0].amax()) <= 4e-3
    for name, d in results.items():
        assert torch.equal(d, results["column-major"]), name


def test_expanded_scales(kernel: Kernel) -> None:
    """One scale for all rows, as a view of stride 0."""
    case = case_of(N, K)
    a, sfa, b, sfb = case.inputs(130)
    row = sfa[:1].contiguous()
    d, same = (torch.empty(130, N, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    kernel(a, row.expand(130, -1), b, sfb, d)
    kernel(a, row.repeat(130, 1), b, sfb, same)
    assert torch.equal(d, same)


def test_zero_scales_of_zero_blocks(kernel: Kernel) -> None:
    """Scale 0 with zero data gives exact zeros, no NaN."""
    case = case_of(N, K)
    a, sfa, b, sfb = (x.clone() for x in case.inputs(130))
    a.view(torch.uint8)[7] = 0
    sfa[7] = 0
    b.view(torch.uint8)[128:256] = 0
    sfb[1] = 0
    d = torch.full((130, N), torch.nan, dtype=torch.bfloat16, device="cuda")
    kernel(a, sfa, b, sfb, d)
    assert bool((d[7] == 0).all())
    assert bool((d[:, 128:256] == 0).all())
    assert bool(d.isfinite().all())
    assert int((d == 0).all(1).sum()) == 1


@pytest.mark.parametrize("value", [0x7F, 0xFF])
def test_nan_reaches_its_own_row_and_column_only(value: int, kernel: Kernel) -> None:
    """A NaN in A spoils its row, one in B its column, nothing else."""
    case = case_of(N, K)
    a, sfa, b, sfb = (x.clone() for x in case.inputs(130))
    a.view(torch.uint8)[77, 200] = value
    b.view(torch.uint8)[301, 1160] = value
    d = torch.zeros(130, N, dtype=torch.bfloat16, device="cuda")
    kernel(a, sfa, b, sfb, d)
    spoilt = d.isnan()
    assert bool(spoilt[77].all())
    assert bool(spoilt[:, 301].all())
    assert int(spoilt.sum()) == N + 130 - 1


def test_zero_rows_launch_nothing(kernel: Kernel) -> None:
    """M = 0 is no error and writes nothing."""
    case = case_of(N, K)
    d = torch.empty(0, N, dtype=torch.bfloat16, device="cuda")
    a, sfa, b, sfb = case.inputs(1)
    assert kernel.prepare(a[:0], sfa[:0], b, sfb, d).grid == 0
    kernel(a[:0], sfa[:0], b, sfb, d)


def test_launches_on_several_streams(kernels: Kernels, device: Device) -> None:
    """The current stream is used, and launches of one kernel on two streams do not mix."""
    problem = GemmProblem("dense", 130, N, K)
    kernel = kernels.get(problem, default_for(problem, device))
    case = case_of(N, K)
    inputs = case.inputs(130)
    torch.cuda.synchronize()
    outputs = []
    for _ in range(4):
        stream = new_stream()
        with torch.cuda.stream(stream):
            d = torch.full((130, N), torch.nan, dtype=torch.bfloat16, device="cuda")
            keep_busy(1_000_000)  # the launch must wait its turn on this stream
            d.fill_(torch.nan)
            kernel(*inputs, d)
            outputs.append(d)
    torch.cuda.synchronize()
    for d in outputs:
        assert float(case.errors(d)[0].amax()) <= 4e-3
