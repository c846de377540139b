"""Programs that pretend to be nvcc: shell scripts in a folder with an awkward name."""

from __future__ import annotations

from pathlib import Path

from kgen.compiler import Compiler
from tests.unit.synthetic_cubin import NOP, Kernel, cubin

VERSION_TEXT = "Cuda compilation tools, release 13.0, V13.0.88"
RESOURCES = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
CUBIN = cubin(Kernel("kgen_gemm", (NOP,) * 8, registers=168))

#: Writes a good cubin to what -o names.
GOOD = f"""
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
cat "$(dirname "$0")/good.cubin" > "$out"
echo "ptxas info: {RESOURCES}"
"""


def fake_nvcc(folder: Path, body: str) -> str:
    """Path of an nvcc that answers --version and otherwise runs `body`."""
    home = folder / "a b é; $(false)" / "bin"
    home.mkdir(parents=True, exist_ok=True)
    (home / "good.cubin").write_bytes(CUBIN)
    program = home / "nvcc"
    answer = f'[ "$1" = --version ] && {{ echo "{VERSION_TEXT}"; exit 0; }}'
    program.write_text(f"#!/bin/sh\n{answer}\n{body}\n")
    program.chmod(0o755)
    return str(program)


def fake_compiler(folder: Path, body: str) -> Compiler:
    """The compiler that `fake_nvcc` makes."""
    return Compiler("nvcc", (13, 0, 88), fake_nvcc(folder, body))
