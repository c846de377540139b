"""What real compilers make of small kernels: resources, refusals, limits."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kgen.compiler import Compiled, Compiler, compile_source, ptx_source
from kgen.errors import CompileError
from kgen.toolchain import search_compilers
from tests.toolchain import sources
from tests.unit.test_toolchain import settings

_USED = re.compile(r"Used (\d+) registers.*?(?:, (\d+) bytes smem)?$", re.MULTILINE)


def log_facts(made: Compiled) -> tuple[int, int]:
    """(registers, static shared memory) as ptxas tells them in the log."""
    match = _USED.search(made.log)
    assert match is not None, made.log
    return int(match[1]), int(match[2] or 0)


@pytest.mark.parametrize("source", [sources.PLAIN, sources.STACK, sources.WGMMA])
def test_resources_read_from_the_cubin_are_those_of_the_log(
    source: str, compiler: Compiler
) -> None:
    made = compile_source(source, compiler)
    assert (made.registers, made.smem_static_bytes) == log_facts(made)
    assert made.spill_bytes == 0
    assert made.stack_bytes == (256 if source == sources.STACK else 0)
    assert made.smem_static_bytes == (400 if source == sources.PLAIN else 0)
    assert made.cubin[:4] == b"\x7fELF"
    assert made.seconds > 0


def test_a_spill_fails_the_build_and_keeps_the_log(compiler: Compiler) -> None:
    with pytest.raises(CompileError, match=r"\d+ bytes of registers spilled") as caught:
        compile_source(sources.SPILL, compiler)
    assert re.search(r"[1-9]\d* bytes spill stores", caught.value.log)


@pytest.mark.parametrize("code", sources.SERIALISED)
def test_serialised_wgmma_fails_the_build(code: str, compiler: Compiler) -> None:
    with pytest.raises(CompileError, match=rf"{code}.*instructions are serialized") as caught:
        compile_source(sources.SERIALISED[code], compiler)
    assert "spill stores" in caught.value.log


def test_setmaxnreg_without_bounds_fails_the_build(compiler: Compiler) -> None:
    with pytest.raises(CompileError, match=r"C7508.*'setmaxnreg' ignored"):
        compile_source(sources.SETMAXNREG_IGNORED, compiler)


def test_an_error_in_the_source_is_shown_with_its_line(compiler: Compiler) -> None:
    with pytest.raises(CompileError, match=r"kgen.cu\(3\): error") as caught:
        compile_source(
            '// é\nextern "C" __global__ void kgen_gemm() {\nno_such_name();\n}', compiler
        )
    assert "no_such_name" in caught.value.log
    assert compiler.id in str(caught.value)


def test_an_error_of_the_assembler_is_shown(compiler: Compiler) -> None:
    source = 'extern "C" __global__ void kgen_gemm() { asm volatile("nosuchthing;"); }'
    with pytest.raises(CompileError, match="nosuchthing"):
        compile_source(source, compiler)


def test_ptx_is_that_of_the_kernel(compiler: Compiler) -> None:
    ptx = ptx_source(sources.WGMMA, compiler)
    assert ".target sm_90a" in ptx
    assert ".entry kgen_gemm" in ptx
    assert "wgmma.mma_async.sync.aligned.m64n8k32" in ptx


def test_compiling_twice_gives_the_same_cubin(compiler: Compiler) -> None:
    once, twice = (compile_source(sources.WGMMA, compiler).cubin for _ in range(2))
    assert once == twice


def test_threads_compile_beside_each_other(nvrtc: Compiler) -> None:
    expected = compile_source(sources.WGMMA, nvrtc).cubin
    made: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: made.append(compile_source(sources.WGMMA, nvrtc).cubin))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert made == [expected] * 4


def test_a_compile_that_takes_too_long_is_given_up(compiler: Compiler) -> None:
    """In a process of its own: NVRTC may go on for a while, and the process must still end."""
    code = f"""
from kgen.compiler import Compiler, compile_source
from kgen.errors import CompileError
from tests.toolchain.sources import slow
try:
    compile_source(slow(3000), {compiler!r}, timeout_s=1.0)
except CompileError as error:
    print(error)
"""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (
        0,
        f"{compiler.id}: no result after 1 s, given up\n",
    ), done.stderr
    assert time.monotonic() - start < 20


def test_an_awkward_temporary_folder_does_no_harm(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    awkward = tmp_path / "a b é"
    awkward.mkdir()
    monkeypatch.setenv("TMPDIR", str(awkward))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert compile_source(sources.PLAIN, compiler).cubin
    assert list(awkward.iterdir()) == []


def test_nvrtc_without_its_builtins_is_explained(
    nvrtc: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "nvidia" / "cu13" / "lib" / Path(nvrtc.path).name
    library.parent.mkdir(parents=True)
    library.symlink_to(nvrtc.path)
    code = f"""
import sys
from tests.unit.test_toolchain import settings
from kgen.toolchain import search_compilers
sys.path[:] = [{str(tmp_path)!r}]
sys.prefix = {str(tmp_path)!r}
print(search_compilers(settings(), ("nvrtc",)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "found=()" in done.stdout, done.stderr
    assert "can not compile an empty kernel" in done.stdout
    assert "libnvrtc-builtins" in done.stdout


def test_every_compiler_here_compiles(nvrtc: Compiler) -> None:
    found = search_compilers(settings()).found
    assert nvrtc in found
    assert all(len(c.version) == 3 and c.version >= (12, 0, 0) for c in found)
