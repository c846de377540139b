"""The floor's two kernels compile with every compiler, unspilled, and do what is timed."""

from __future__ import annotations

import re

import pytest

from kgen.bench.floor import RATE_THREADS, STREAM_CUTS, rate_source, stream_source
from kgen.compiler import Compiler, compile_source
from kgen.device import H200
from kgen.disasm import disassemble
from kgen.errors import CompilerMissing


def sass_of(cubin: bytes) -> str:
    try:
        return disassemble(cubin)
    except CompilerMissing as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("cut", STREAM_CUTS)
def test_streaming_kernel(compiler: Compiler, cut: tuple[int, int]) -> None:
    """Bulk copies into shared memory, and its buffers fit."""
    made = compile_source(stream_source(*cut), compiler, entry="kgen_stream")
    assert made.spill_bytes == made.stack_bytes == 0
    assert cut[0] * cut[1] + made.smem_static_bytes <= H200.smem_per_block
    assert "UBLKCP" in sass_of(made.cubin)


def test_rate_kernel(compiler: Compiler) -> None:
    """Four m64n256k32 an iteration, none dropped, none serialised, registers for two warpgroups."""
    made = compile_source(rate_source(), compiler, entry="kgen_rate")
    assert made.spill_bytes == made.stack_bytes == 0
    assert made.registers * RATE_THREADS <= 65536
    products = re.findall(r"QGMMA\.64x256x32", sass_of(made.cubin))
    assert len(products) >= 4
    assert len(products) % 4 == 0
