"""The floor on a real device: its kernels do their work, and the figures are those of the chip."""

from __future__ import annotations

import pytest
import torch

from kgen.bench.floor import (
    STREAM_CUTS,
    measure_floor,
    rate_call,
    rate_kernel,
    stream_call,
    stream_kernel,
)
from kgen.compiler import Compiler, default_compiler
from kgen.measure import POLICIES
from kgen.problem import GemmProblem
from kgen.runtime import driver
from kgen.settings import Settings


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return default_compiler(Settings.from_env(), driver.driver_version())


@pytest.mark.parametrize("cut", STREAM_CUTS)
@pytest.mark.parametrize("size", [16, 16384 + 16, 132 * 16384 * 12 + 48])
def test_every_byte_is_streamed(compiler: Compiler, cut: tuple[int, int], size: int) -> None:
    """Sizes below one copy, with a short last copy, and around the ring of buffers."""
    weights = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    stream_call(stream_kernel(cut, compiler), weights, driver.device_facts(0))()
    torch.cuda.synchronize()


def test_every_product_is_summed(compiler: Compiler) -> None:
    """Checked on ones inside; then once on random values."""
    values = torch.randn(1 << 20, device="cuda").to(torch.float8_e4m3fn)
    rate_call(rate_kernel(compiler), values, driver.device_facts(0))()
    torch.cuda.synchronize()


def test_floor_is_plausible(compiler: Compiler) -> None:
    """Within a tenth of what the driver's clocks promise; a small weight costs a start."""
    device = driver.device_facts(0)
    floor = measure_floor([(7168, 16384), (576, 7168)], compiler, POLICIES["cold"], device)
    assert 0.85 < floor.tflops / device.fp8_tflops < 1.1
    large = floor.streams[7168, 16384].median_us
    assert 0.75 < 7168 * 16384 / large / 1e3 / device.dram_gbps < 1.0
    assert 1.0 < floor.streams[576, 7168].median_us < large / 4
    assert floor.of(GemmProblem("dense", 4096, 7168, 16384)).limit == "tensor cores"
    assert floor.of(GemmProblem("dense", 16, 7168, 16384)).limit == "stream"
