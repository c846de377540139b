"""Disassembly when nvdisasm is missing, refuses, or lies on PATH only."""

from __future__ import annotations

from pathlib import Path

import pytest

from kgen.disasm import disassemble, find_nvdisasm
from kgen.errors import CompilerMissing, SassError
from tests.unit.synthetic_cubin import NOP, Kernel, cubin

CUBIN = cubin(Kernel("k", (NOP,) * 8))


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvdisasm on PATH, the only one; prints its words and the size of the file it is given."""
    program = tmp_path / "a b é" / "nvdisasm"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$*"\nwc -c < kgen.cubin\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr("sys.path", [])
    return program


def test_the_cubin_and_the_options_reach_it(fake: Path) -> None:
    assert find_nvdisasm() == fake
    assert disassemble(CUBIN, ("-hex",)).split() == ["-hex", "kgen.cubin", str(len(CUBIN))]


def test_that_of_the_packages_comes_first(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = tmp_path / "nvidia" / "cu13" / "bin" / "nvdisasm"
    packaged.parent.mkdir(parents=True)
    packaged.write_text("")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert find_nvdisasm() == packaged


def test_a_refusal_is_shown(fake: Path) -> None:
    fake.write_text("#!/bin/sh\necho 'nvdisasm fatal: no such thing' >&2\nexit 255\n")
    with pytest.raises(SassError, match="exit code 255: nvdisasm fatal: no such thing"):
        disassemble(CUBIN)


def test_one_that_can_not_run_is_missing(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.write_text("#!/no/such/interpreter\n")
    with pytest.raises(CompilerMissing, match="can not be run"):
        disassemble(CUBIN)


def test_without_one_the_fix_is_named(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CompilerMissing, match="pip install nvidia-cuda-nvdisasm"):
        find_nvdisasm()
