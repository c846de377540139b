"""SASS of a cubin as text, by NVIDIA's nvdisasm.

Takes cubin bytes, gives nvdisasm's listing. The program comes with PyPI's nvidia-cuda-nvdisasm
(the extra `sass`) or a CUDA toolkit. Must not import anything of kgen but errors.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from kgen.errors import CompilerMissing, SassError

_PACKAGED: Final = ("nvidia/cu*/bin/nvdisasm", "nvidia/cuda_nvdisasm/bin/nvdisasm")
_TIMEOUT_S: Final = 60.0


def find_nvdisasm() -> Path:
    """The nvdisasm of Python's packages, else of PATH; raises CompilerMissing with the fix."""
    for root in filter(None, sys.path):
        for pattern in _PACKAGED:
            for path in sorted(Path(root).glob(pattern)):
                return path
    if on_path := shutil.which("nvdisasm"):
        return Path(on_path)
    raise CompilerMissing(
        f"nvdisasm not found in the packages of {sys.prefix} nor on PATH; "
        "it comes with: pip install nvidia-cuda-nvdisasm"
    )


def disassemble(cubin: bytes, options: tuple[str, ...] = ()) -> str:
    """The listing of a cubin; `options` are nvdisasm's own (-hex: encodings beside the code).

    Raises CompilerMissing without nvdisasm, SassError when it refuses the cubin.
    """
    program = find_nvdisasm()
    with tempfile.TemporaryDirectory(prefix="kgen-sass-") as folder:
        Path(folder, "kgen.cubin").write_bytes(cubin)
        command = [str(program), *options, "kgen.cubin"]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except OSError as error:
            raise CompilerMissing(f"{program}: can not be run: {error}") from error
        except subprocess.TimeoutExpired as error:
            raise SassError(f"{program}: no result after {_TIMEOUT_S:g} s") from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()
        raise SassError(f"{program}: exit code {done.returncode}: {said}")
    return done.stdout.decode("utf-8", "replace")
