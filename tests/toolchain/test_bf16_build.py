"""Kernels with BF16 operands compile: every output, a bias or not, every kind, the widest tiles."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import product

import pytest

from kgen.bench.floor import RATE_THREADS, rate_source
from kgen.compiler import Compiler, compile_source
from kgen.config import GemmConfig
from kgen.device import H200
from kgen.disasm import disassemble
from kgen.errors import CompileError, CompilerMissing
from kgen.heuristic import default_config
from kgen.problem import BF16_FIELDS, GemmProblem
from kgen.render import render
from kgen.space import valid_configs
from kgen.validity import why_invalid

PLAIN = GemmProblem("dense", 4096, 7168, 2048, **BF16_FIELDS)
OUTPUTS = [*product(("bf16", "fp16", "fp32"), (False, True))]
#: Every branch of the templates, and where registers end.
CONFIGS = [
    GemmConfig(),
    GemmConfig(block_n=256, num_stages=2),
    GemmConfig(block_n=256, num_stages=2, cluster_m=2),
    GemmConfig(block_m=256, num_stages=2, cluster_n=2),
    GemmConfig(block_m=256, block_n=176, num_stages=2, cluster_m=2),
    GemmConfig(block_m=256, block_n=192, num_stages=2),
    GemmConfig(block_m=192, block_n=200, num_stages=2, num_math_warpgroups=3),
    GemmConfig(block_m=192, num_stages=3, num_math_warpgroups=3, cluster_m=2),
    GemmConfig(block_m=16, block_n=64, num_stages=12, num_math_warpgroups=1, split_k=4),
    GemmConfig(block_m=64, block_n=256, num_stages=3, num_math_warpgroups=1, split_k=2),
    GemmConfig(block_m=64, block_n=24, num_stages=8, num_math_warpgroups=1),
    GemmConfig(baked_dims="nk"),
]
#: Rows at which defaults are other kernels.
MS = (1, 16, 64, 128, 512, 4096)
#: Configurations drawn for each output type and kind, and how many of them may spill.
DRAWN, MAY_SPILL = 16, 1


def compiled(problem: GemmProblem, config: GemmConfig, compiler: Compiler) -> bytes:
    """The cubin; a spill or a serialised WGMMA fails."""
    source = render(problem, config)
    return compile_source(source.text, compiler, entry=source.entry).cubin


def listed(cubin: bytes) -> str:
    try:
        return disassemble(cubin)
    except CompilerMissing as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("d_dtype", "bias"), OUTPUTS)
def test_every_branch_compiles_without_spills(d_dtype: str, bias: bool, nvrtc: Compiler) -> None:
    problem = replace(PLAIN, d_dtype=d_dtype, bias=bias)
    valid = [c for c in CONFIGS if why_invalid(problem, c, H200) is None]
    assert len(valid) >= 7
    for config in valid:
        compiled(problem, config, nvrtc)


@pytest.mark.parametrize("kind", ["dense", "contiguous", "masked"])
@pytest.mark.parametrize("d_dtype", ["bf16", "fp32"])
def test_defaults_and_a_draw_of_the_space_compile(kind: str, d_dtype: str, nvrtc: Compiler) -> None:
    """Not every tile that the register rule lets pass fits: such builds fail and are left out."""
    problem = replace(PLAIN, kind=kind, d_dtype=d_dtype)
    for m in MS:
        compiled(problem, default_config(problem.with_m(m), H200), nvrtc)
    drawn = random.Random(0).sample(valid_configs(problem.with_m(512), H200), DRAWN)
    spilled = []
    for config in drawn:
        try:
            compiled(problem, config, nvrtc)
        except CompileError as error:
            spilled.append((config, str(error)))
    assert all("spilled" in error for _, error in spilled), spilled
    assert len(spilled) <= MAY_SPILL, spilled


def test_every_compiler_takes_them(compiler: Compiler) -> None:
    for config in (CONFIGS[2], CONFIGS[8]):
        compiled(PLAIN, config, compiler)
    compiled(replace(PLAIN, kind="masked"), GemmConfig(block_n=208, cluster_n=2), compiler)


def test_two_k_blocks_are_in_flight(nvrtc: Compiler) -> None:
    """BF16 WGMMAs of 16 columns, four a K block; waits for all but the last K block's; no sums."""
    listing = listed(compiled(PLAIN, GemmConfig(block_n=256, num_stages=3), nvrtc))
    wgmmas = re.findall(r"HGMMA\.64x256x16\.F32\.BF16[^;]*;", listing)
    assert len(wgmmas) == 8, "a peeled first block, then the loop"
    assert ["RZ" in one for one in wgmmas] == [True] + [False] * 7
    assert "QGMMA" not in listing
    assert re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)", listing) == ["0x1", "0x0"]
    assert listing.count("FADD") < 8


def test_the_floors_rate_kernel(compiler: Compiler) -> None:
    """Four m64n256k16 an iteration, none dropped, none serialised."""
    made = compile_source(rate_source("bf16"), compiler, entry="kgen_rate")
    assert made.spill_bytes == made.stack_bytes == 0
    assert made.registers * RATE_THREADS <= 65536
    products = re.findall(r"HGMMA\.64x256x16\.F32\.BF16", listed(made.cubin))
    assert len(products) >= 4
    assert len(products) % 4 == 0
