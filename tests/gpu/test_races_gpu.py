"""Races between loaders, math warps and the store warp, provoked by random delays."""

from __future__ import annotations

import pytest
import torch

from kgen.build import build
from kgen.cache.artifacts import ArtifactStore
from kgen.config import GemmConfig
from kgen.runtime import driver
from kgen.runtime.kernel import Kernel
from kgen.settings import Settings
from kgen.toolchain import default_compiler
from tests.delays import CONFIGS, PROBLEM, render_delayed
from tests.gpu.bed import Kernels, case_of

RUNS = 1000


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("row_major", [False, True], ids=["column-major", "row-major"])
def test_delays_change_no_bit(config: GemmConfig, row_major: bool, kernels: Kernels) -> None:
    """Whoever dawdles, D is that of the kernel without delays, bit for bit, a thousand times."""
    settings = Settings.from_env()
    compiler = default_compiler(settings, driver_cuda=driver.driver_version())
    store = ArtifactStore(settings.cache_dir)
    cubin = build(PROBLEM, config, compiler, store, render=render_delayed)
    ordinal = torch.cuda.current_device()
    delayed = Kernel.load(cubin.data, cubin.entry, config, PROBLEM, ordinal)
    case = case_of(PROBLEM.n, PROBLEM.k)
    inputs = case.inputs(PROBLEM.m, row_major)
    expected = case.output.poisoned(PROBLEM.m).clone()
    kernels.get(PROBLEM, config)(*inputs, expected)
    found = torch.empty_like(expected)
    differing = torch.zeros((), dtype=torch.int64, device=found.device)
    for _ in range(RUNS):
        found.fill_(float("nan"))
        delayed(*inputs, found)
        differing += (found.view(torch.int16) != expected.view(torch.int16)).any()
    assert int(differing) == 0, f"{int(differing)} of {RUNS} runs gave other bits"
