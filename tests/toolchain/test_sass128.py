"""The interleaving pass on real code: what changes of ptxas 12.8's, and none of newer."""

from __future__ import annotations

import re
import struct

import pytest

from kgen import elf, sass
from kgen.compiler import Compiler, compile_source
from kgen.config import GemmConfig
from kgen.disasm import disassemble, find_nvdisasm
from kgen.errors import CompilerMissing
from kgen.problem import GemmProblem
from kgen.render import declared_entries, render
from tests.toolchain import sources
from tests.toolchain.conftest import compiler_or_skip

STAY, REUSE = 1 << 45, 0xF << 58
KERNELS = {
    "promotion": sources.PROMOTION,
    "one accumulator": render(GemmProblem("dense", 128, 4096, 7168), GemmConfig()).text,
    "two accumulators": render(
        GemmProblem("dense", 128, 4096, 7168), GemmConfig(num_accumulators=2)
    ).text,
}
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?);")


def words(cubin: bytes) -> list[tuple[int, int]]:
    """(low, high) of every instruction."""
    (code,) = elf.code_sections(cubin)
    return list(struct.iter_unpack("<QQ", cubin[code.offset : code.offset + code.size]))


def long_runs(code: list[tuple[int, int]]) -> list[list[int]]:
    """High words of each stretch of at least eight FFMAs."""
    text = "".join("F" if low & 0xFFF == 0x223 else "." for low, _ in code)
    return [[high for _, high in code[m.start() : m.end()]] for m in re.finditer("F{8,}", text)]


def listing(cubin: bytes) -> list[str]:
    """Instructions as nvdisasm prints them."""
    try:
        find_nvdisasm()
    except CompilerMissing as error:
        pytest.skip(str(error))
    return _INSTRUCTION.findall(disassemble(cubin))


def compiled(kernel: str, compiler: Compiler) -> bytes:
    text = KERNELS[kernel]
    entry = next(iter(declared_entries(text)), "kgen_gemm")
    return compile_source(text, compiler, entry=entry).cubin


@pytest.mark.parametrize("kernel", KERNELS)
def test_code_of_12_8_changes_as_expected_and_nowhere_else(kernel: str, cuda128: Compiler) -> None:
    before = compiled(kernel, cuda128)
    runs_before = long_runs(words(before))
    assert sum(map(len, runs_before)) >= 56
    assert all(high & STAY for run in runs_before for high in run), "12.8 lets no FFMA yield"

    result = sass.patch(before, "interleave")
    assert len(result.cubin) == len(before)
    for run, old in zip(long_runs(words(result.cubin)), runs_before, strict=True):
        for i, high in enumerate(run):
            gave_up = not high & STAY
            assert high == (old[i] & ~(STAY | REUSE) if gave_up else old[i])
            if i and old[i] & REUSE:  # it yields where its neighbour still reuses, only there
                assert gave_up == bool(run[i - 1] & REUSE)
    changed = [a != b for a, b in zip(words(before), words(result.cubin), strict=True)]
    assert sum(changed) == result.sites_changed
    assert result.sites_changed >= 0.4 * sum(map(len, runs_before))
    (code,) = elf.code_sections(before)
    for part in (slice(0, code.offset), slice(code.offset + code.size, None)):
        assert before[part] == result.cubin[part]


@pytest.mark.parametrize("kernel", KERNELS)
def test_patched_code_disassembles_to_the_same_without_some_reuse(
    kernel: str, cuda128: Compiler
) -> None:
    before = compiled(kernel, cuda128)
    result = sass.patch(before, "interleave")
    old, new = listing(before), listing(result.cubin)
    assert len(old) == len(new) == len(words(before))
    differing = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
    assert len(differing) == result.sites_changed
    assert all(a.replace(".reuse", "") == b and b.startswith("FFMA") for a, b in differing)


@pytest.mark.parametrize("name", ["nvrtc-13", "nvcc-13"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_newer_code_has_nothing_to_change(kernel: str, name: str) -> None:
    cubin = compiled(kernel, compiler_or_skip(name))
    runs = long_runs(words(cubin))
    assert sum(map(len, runs)) >= 56
    assert all(any(not high & STAY for high in run) for run in runs), "it interleaves by itself"
    assert sass.patch(cubin, "interleave") == sass.Patched(cubin, 0)


@pytest.mark.parametrize("name", ["nvrtc-13", "nvrtc-12.8"])
def test_neither_interleaves_with_a_single_math_warpgroup(name: str) -> None:
    """The line that ptxas draws, and the pass with it: a launch bound of 256 threads."""
    bounded = sources.PROMOTION.replace("__launch_bounds__(384)", "__launch_bounds__(256)")
    cubin = compile_source(bounded, compiler_or_skip(name)).cubin
    assert elf.launch_bound(cubin, "kgen_gemm") == 256
    assert all(high & STAY for run in long_runs(words(cubin)) for high in run)
    assert sass.patch(cubin, "interleave") == sass.Patched(cubin, 0)
