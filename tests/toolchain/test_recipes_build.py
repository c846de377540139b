"""Kernels of every recipe, operand type, output type and bias compile, and to what they must."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest

from kgen.compiler import Compiler, compile_source
from kgen.config import GemmConfig
from kgen.device import H200
from kgen.disasm import disassemble
from kgen.errors import CompilerMissing
from kgen.problem import GemmProblem
from kgen.render import render
from kgen.validity import why_invalid

PLAIN = GemmProblem("dense", 4096, 7168, 2048)
#: (recipe, fast_accum), each with every output type and with a bias or not.
KINDS = [
    replace(PLAIN, recipe=recipe, fast_accum=fast, d_dtype=d_dtype, bias=bias)
    for recipe, fast in (("row", True), ("tensor", True), ("row", False), ("tensor", False))
    for d_dtype, bias in product(("bf16", "fp16", "fp32"), (False, True))
] + [replace(PLAIN, d_dtype=d_dtype, bias=True) for d_dtype in ("bf16", "fp16", "fp32")]
#: Every branch of the templates; those that a kind does not allow are left out.
CONFIGS = [
    GemmConfig(),
    GemmConfig(block_n=152, cluster_m=2),
    GemmConfig(num_accumulators=2, cluster_n=2),
    GemmConfig(block_m=256, num_stages=3),
    GemmConfig(block_m=192, block_n=112, num_stages=3, num_math_warpgroups=3),
    GemmConfig(block_m=16, block_n=64, num_stages=12, num_math_warpgroups=1, split_k=4),
    GemmConfig(block_m=64, block_n=24, num_stages=8, num_math_warpgroups=1),
    # Without promotion a tile may be as wide as a WGMMA.
    GemmConfig(block_n=256, num_stages=2),
    GemmConfig(block_m=192, block_n=200, num_stages=2, num_math_warpgroups=3),
]


def compiled(problem: GemmProblem, config: GemmConfig, compiler: Compiler) -> bytes:
    """The cubin; a spill or a serialised WGMMA fails."""
    source = render(problem, config)
    return compile_source(source.text, compiler, entry=source.entry).cubin


@pytest.mark.parametrize("problem", KINDS, ids=str)
def test_every_kind_compiles_without_spills(problem: GemmProblem, nvrtc: Compiler) -> None:
    valid = [c for c in CONFIGS if why_invalid(problem, c, H200) is None]
    assert len(valid) >= 5
    for config in valid:
        compiled(problem, config, nvrtc)


@pytest.mark.parametrize("recipe", ["block", "row", "tensor"])
@pytest.mark.parametrize("dtypes", [*product(("e4m3", "e5m2"), repeat=2)])
def test_wgmma_reads_the_types_asked_for(
    recipe: str, dtypes: tuple[str, str], nvrtc: Compiler
) -> None:
    of_a, of_b = dtypes
    problem = replace(PLAIN, recipe=recipe, a_dtype=of_a, b_dtype=of_b)
    listing = listed(compiled(problem, GemmConfig(), nvrtc))
    found = set(re.findall(r"QGMMA\.64x128x32\.F32\.(E\dM\d)\.(E\dM\d)", listing))
    assert found == {(of_a.upper(), of_b.upper())}


@pytest.mark.parametrize("recipe", ["row", "tensor"])
def test_two_k_blocks_are_in_flight_where_nothing_is_promoted(recipe: str, nvrtc: Compiler) -> None:
    """In the loop a warpgroup waits for all WGMMAs but the last K block's, and adds nothing up."""
    problem = replace(PLAIN, recipe=recipe, fast_accum=True)
    listing = listed(compiled(problem, GemmConfig(), nvrtc))
    waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)", listing)
    assert waits == ["0x1", "0x0"]
    # Peeled first block, then the loop: four each; only the first of all starts from nothing.
    wgmmas = re.findall(r"QGMMA[^;]*;", listing)
    assert len(wgmmas) == 8
    assert ["RZ" in one for one in wgmmas] == [True] + [False] * 7
    assert listing.count("FADD") < 8


def listed(cubin: bytes) -> str:
    try:
        return disassemble(cubin)
    except CompilerMissing as error:
        pytest.skip(str(error))
