"""Kernels of weight gradients compile: no spills in a draw of the space, and to what they must."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from kgen.compiler import Compiler, compile_source
from kgen.config import GemmConfig, resources_of
from kgen.device import H200
from kgen.disasm import disassemble
from kgen.errors import CompileError, CompilerMissing
from kgen.heuristic import default_config
from kgen.problem import GemmProblem
from kgen.render import render
from kgen.shapes import load_shapes
from kgen.space import valid_configs

ONE = GemmProblem.of("wgrad", 4096, 4096, 8192)
GROUPS = GemmProblem.of("k_grouped", 4096, 4096, 8192, groups=4)
CLASSES = [
    replace(problem, accumulate=accumulate)
    for problem in (ONE, replace(ONE, recipe="block"), GROUPS)
    for accumulate in (True, False)
]
#: Configurations drawn for each class; of the widest tiles under "block" a few spill, as those of
#: dense FP32 do: such builds fail and are left out.
DRAWN, MAY_SPILL = 16, 2
THREE = GemmConfig(block_m=192, block_n=112, num_math_warpgroups=3, d_staging="direct")


def compiled(problem: GemmProblem, config: GemmConfig, compiler: Compiler) -> bytes:
    """The cubin; a spill or a serialised WGMMA fails."""
    source = render(problem, config)
    return compile_source(source.text, compiler, entry=source.entry).cubin


def listed(cubin: bytes) -> str:
    try:
        return disassemble(cubin)
    except CompilerMissing as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("problem", CLASSES, ids=str)
def test_a_draw_of_the_space_compiles(problem: GemmProblem, nvrtc: Compiler) -> None:
    """Under "vector" none of the tiles that the register rule lets pass spills."""
    spilled = []
    for config in random.Random(1).sample(valid_configs(problem, H200), DRAWN):
        try:
            compiled(problem, config, nvrtc)
        except CompileError as error:
            spilled.append((config, str(error)))
    assert all("spilled" in error for _, error in spilled), spilled
    assert len(spilled) <= MAY_SPILL * (problem.recipe == "block"), spilled


def test_defaults_compile(nvrtc: Compiler) -> None:
    for line in load_shapes("deepseek_v3_wgrad").lines:
        compiled(line.problem, default_config(line.problem, H200), nvrtc)


@pytest.mark.parametrize("accumulate", [True, False])
def test_every_branch_compiles_on_every_compiler(accumulate: bool, compiler: Compiler) -> None:
    narrow = GemmConfig(block_m=16, block_n=88, num_math_warpgroups=1, num_stages=6)
    for problem in (ONE, GROUPS):
        for config in (
            *(GemmConfig(), THREE, replace(narrow, d_staging="direct", cluster_n=2)),
            *(narrow, GemmConfig(block_n=96, cluster_m=2)),
        ):
            compiled(replace(problem, accumulate=accumulate), config, compiler)
    split = GemmConfig(block_m=64, block_n=64, num_math_warpgroups=1, num_stages=6, split_k=4)
    compiled(replace(ONE, accumulate=accumulate), split, compiler)


@pytest.mark.parametrize("config", [GemmConfig(), THREE], ids=str)
def test_scales_of_columns_are_read_while_wgmmas_run(config: GemmConfig, nvrtc: Compiler) -> None:
    """All that are held: no read of shared memory stands between the wait and the sums."""
    assert resources_of(config, ONE).held_groups == config.block_n // 8
    listing = listed(compiled(ONE, config, nvrtc))
    start = listing.index("QGMMA")
    wait = start + re.search(r"WARPGROUP\.DEPBAR", listing[start:]).start()  # type: ignore[union-attr]
    under_way, after = listing[start:wait], listing[wait:]
    assert len(re.findall(r"QGMMA\.", under_way)) == 4
    assert len(re.findall(r"\bLDS\.64 ", under_way)) >= config.block_n // 8 - 1
    assert "FFMA" not in under_way
    elements = config.block_n // 2
    promotion = after[: after.index("BRA")]
    assert len(re.findall(r"\bFFMA ", promotion)) == elements
    assert "LDS" not in promotion
    assert len(re.findall(r"\bFMUL ", under_way + promotion)) == elements


@pytest.mark.parametrize(
    ("staging", "accumulate", "expected"),
    [
        ("own", True, "UTMAREDG"),
        ("own", False, "UTMASTG"),
        ("direct", True, "REDG.E.ADD.F32x2"),
        ("direct", False, "STG.E.64"),
    ],
)
def test_d_leaves_as_asked(staging: str, accumulate: bool, expected: str, nvrtc: Compiler) -> None:
    ways = ("UTMAREDG", "UTMASTG", "REDG.E.ADD.F32x2", "STG.E.64")
    for kind in (ONE, GROUPS):
        problem = replace(kind, accumulate=accumulate)
        listing = listed(compiled(problem, GemmConfig(d_staging=staging), nvrtc))
        assert [way for way in ways if way in listing] == [expected]
