"""Kernels of the grouped kinds compile: every trait of a tile, with few spills left out."""

from __future__ import annotations

import random

import pytest

from kgen.compiler import Compiled, Compiler, compile_source
from kgen.config import GemmConfig
from kgen.device import H200
from kgen.errors import CompileError
from kgen.heuristic import default_config
from kgen.problem import GemmProblem
from kgen.render import render
from kgen.space import valid_configs

KINDS = ("contiguous", "masked")
#: Rows of groups at which defaults are other kernels.
SIZES = ((1, 32), (16, 32), (64, 8), (256, 32), (1024, 1), (8192, 4))
#: Configurations drawn for each output type, and how many of them may spill.
DRAWN, MAY_SPILL = 24, 2


def problem(kind: str, m: int = 512, groups: int = 8, d_dtype: str = "bf16") -> GemmProblem:
    return GemmProblem(kind, m, 4096, 7168, groups=groups, d_dtype=d_dtype)


def compiled(p: GemmProblem, config: GemmConfig, compiler: Compiler) -> Compiled:
    source = render(p, config)
    return compile_source(source.text, compiler, entry=source.entry)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "groups"), SIZES)
def test_defaults_compile(kind: str, m: int, groups: int, nvrtc: Compiler) -> None:
    p = problem(kind, m, groups)
    made = compiled(p, default_config(p, H200), nvrtc)
    assert made.spill_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d_dtype", ["bf16", "fp16", "fp32"])
def test_a_draw_of_the_space_compiles(kind: str, d_dtype: str, nvrtc: Compiler) -> None:
    """Not every tile that the register rule lets pass fits: such builds fail and are left out."""
    p = problem(kind, d_dtype=d_dtype)
    drawn = random.Random(0).sample(valid_configs(p, H200), DRAWN)
    spilled = []
    for config in drawn:
        try:
            compiled(p, config, nvrtc)
        except CompileError as error:
            spilled.append((config, str(error)))
    assert all("spilled" in error for _, error in spilled), spilled
    assert len(spilled) <= MAY_SPILL, spilled


@pytest.mark.parametrize("kind", KINDS)
def test_every_branch_compiles_on_every_compiler(kind: str, compiler: Compiler) -> None:
    configs = [
        GemmConfig(),
        GemmConfig(block_m=16, block_n=88, num_math_warpgroups=1, cluster_n=2, num_stages=8),
        GemmConfig(block_n=152, b_eviction="evict_first", raster_along="n"),
        GemmConfig(num_accumulators=2, cluster_n=2, baked_dims="nk"),
    ]
    for config in configs:
        compiled(problem(kind), config, compiler)
