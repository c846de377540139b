"""Compiling with an nvcc that fails, lies, hangs or lives in an awkward place."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from kgen.compiler import Compiler, compile_source, ptx_source
from kgen.errors import CompileError, CompilerMissing
from tests.unit.fake_nvcc import CUBIN, GOOD, RESOURCES, fake_compiler

SOURCE = "// é\n"


def refused(compiler: Compiler, timeout_s: float = 30.0) -> CompileError:
    """The error of a compilation that must fail."""
    with pytest.raises(CompileError) as caught:
        compile_source(SOURCE, compiler, timeout_s=timeout_s)
    assert str(caught.value).startswith("nvcc-13.0.88: ")
    return caught.value


def test_a_cubin_and_its_resources_come_back(tmp_path: Path) -> None:
    made = compile_source(SOURCE, fake_compiler(tmp_path, GOOD))
    assert made.cubin == CUBIN
    assert (made.registers, made.spill_bytes, made.stack_bytes) == (168, 0, 0)
    assert RESOURCES in made.log


def test_success_without_output_is_a_failure(tmp_path: Path) -> None:
    error = refused(fake_compiler(tmp_path, "echo all is well"))
    assert "succeeded but wrote no cubin" in str(error)
    assert error.log == "all is well"


def test_an_empty_file_is_no_output(tmp_path: Path) -> None:
    assert "wrote no cubin" in str(refused(fake_compiler(tmp_path, ": > kgen.cubin")))


def test_a_failure_shows_what_was_printed(tmp_path: Path) -> None:
    error = refused(fake_compiler(tmp_path, "echo 'line 7: no such thing' >&2; exit 3"))
    assert "exit code 3" in str(error)
    assert "line 7: no such thing" in str(error)
    assert error.log == "line 7: no such thing"


def test_a_failure_is_one_even_with_a_cubin(tmp_path: Path) -> None:
    assert "exit code 1" in str(refused(fake_compiler(tmp_path, f"{GOOD}\nexit 1")))


def test_a_crash_is_a_failure(tmp_path: Path) -> None:
    assert "exit code -11" in str(refused(fake_compiler(tmp_path, "kill -SEGV $$")))


@pytest.mark.parametrize("written", ["text", "\\177ELF\\002\\001"])
def test_output_that_is_no_cubin_is_refused(written: str, tmp_path: Path) -> None:
    body = f"printf '{written}' > kgen.cubin; echo '{RESOURCES}'"
    assert "no usable cubin" in str(refused(fake_compiler(tmp_path, body)))


def test_a_cubin_without_the_kernel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="no kernel 'other' in the cubin: it has kgen_gemm"):
        compile_source(SOURCE, fake_compiler(tmp_path, GOOD), entry="other")


@pytest.mark.parametrize(
    "said",
    [
        "ptxas info : (C7508) Potential Performance Loss: anything",
        *(f"ptxas info : (C751{n}) Potential Performance Loss: anything" for n in range(6)),
        "ptxas info : (C7599) ... 'setmaxnreg' ignored to allow debugging.",
        "ptxas info : (C7599) ... wgmma.mma_async instructions are serialized due to whatever",
        "64 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads",
        "64 bytes stack frame, 0 bytes spill stores, 8 bytes spill loads",
    ],
)
def test_code_that_is_not_as_written_fails_the_build(said: str, tmp_path: Path) -> None:
    error = refused(fake_compiler(tmp_path, f'{GOOD}\necho "{said}"'))
    assert said in error.log
    assert RESOURCES in error.log
    assert said in str(error) or "12 bytes of" in str(error) or "8 bytes of" in str(error)


def test_other_remarks_of_ptxas_do_not(tmp_path: Path) -> None:
    remark = "ptxas info : (C7517) wgmma.wait_group is injected in around line 46"
    assert remark in compile_source(SOURCE, fake_compiler(tmp_path, f'{GOOD}\necho "{remark}"')).log


def test_a_log_that_does_not_tell_spills_is_refused(tmp_path: Path) -> None:
    body = GOOD.replace(RESOURCES, "nothing of note")
    assert "does not tell spills" in str(refused(fake_compiler(tmp_path, body)))


def test_the_largest_stack_of_any_function_counts(tmp_path: Path) -> None:
    body = f'{GOOD}\necho "16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"'
    assert compile_source(SOURCE, fake_compiler(tmp_path, body)).stack_bytes == 16


def test_a_hang_ends_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    body = f"sh -c 'echo $$ >> \"{pids}\"; sleep 600' & echo $$ >> '{pids}'\nwait"
    start = time.monotonic()
    error = refused(fake_compiler(tmp_path, body), timeout_s=1.0)
    assert "no result after 1 s" in str(error)
    assert time.monotonic() - start < 20
    for pid in map(int, pids.read_text().split()):
        assert not _lives(pid)


def _lives(pid: int) -> bool:
    """Whether a process runs; a killed orphan may stay as a zombie until someone reaps it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_a_child_that_keeps_the_output_open_does_not_hang_the_build(tmp_path: Path) -> None:
    """What was started outlives nvcc: communicate() waits for it, and the limit ends that too."""
    start = time.monotonic()
    assert "no result" in str(refused(fake_compiler(tmp_path, "sleep 30 &"), timeout_s=1.0))
    assert time.monotonic() - start < 20


def test_it_stays_in_our_process_group(tmp_path: Path) -> None:
    body = f"""ps -o pgid= -p $$ > '{tmp_path}/group' 2>/dev/null ||
cut -d' ' -f5 /proc/$$/stat > '{tmp_path}/group'
{GOOD}"""
    compile_source(SOURCE, fake_compiler(tmp_path, body))
    assert int((tmp_path / "group").read_text()) == os.getpgrp()


def test_no_path_and_no_hidden_flag_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    awkward = tmp_path / "tmp é ' \" $(touch injected); x"
    awkward.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(awkward))
    for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.setenv(name, "-O0")
    body = f"""echo "$*" > '{tmp_path}/words'; env > '{tmp_path}/env'; cat kgen.cu > '{tmp_path}/cu'
{GOOD}"""
    compile_source(SOURCE, fake_compiler(tmp_path, body))
    words = (tmp_path / "words").read_text().split()
    assert words == [
        "-cubin",
        "--gpu-architecture=sm_90a",
        "-std=c++17",
        "--ptxas-options=-v",
        *("-o", "kgen.cubin", "kgen.cu"),
    ]
    assert "NVCC_" not in (tmp_path / "env").read_text()
    assert (tmp_path / "cu").read_text(encoding="utf-8") == SOURCE
    assert list(awkward.iterdir()) == []
    assert not list(tmp_path.rglob("injected"))


def test_one_that_went_away_is_missing(tmp_path: Path) -> None:
    gone = Compiler("nvcc", (13, 0, 88), str(tmp_path / "nvcc"))
    with pytest.raises(CompilerMissing, match=r"nvcc: can not be run: .*No such file"):
        compile_source(SOURCE, gone)


def test_one_that_is_no_program_is_missing(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, GOOD)
    Path(compiler.path).chmod(0o644)
    with pytest.raises(CompilerMissing, match=r"can not be run: .*Permission denied"):
        compile_source(SOURCE, compiler)


def test_a_source_with_a_nul_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="NUL"):
        compile_source("int a;\0 int b;", fake_compiler(tmp_path, GOOD))


def test_ptx_needs_no_resources(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, 'printf ".version 9.0" > kgen.ptx')
    assert ptx_source(SOURCE, compiler) == ".version 9.0"
