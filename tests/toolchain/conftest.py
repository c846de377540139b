"""Compilers for this tier; a test whose compiler is not here is skipped with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from kgen.compiler import Compiler, default_compiler
from kgen.errors import CompilerMissing
from kgen.settings import Settings


def compiler_or_skip(wanted: str) -> Compiler:
    """The compiler that KGEN_COMPILER=`wanted` would choose."""
    try:
        return default_compiler(Settings(cache_dir=Path("/nowhere"), compiler=wanted))
    except CompilerMissing as error:
        pytest.skip(f"needs {wanted}: {error}")


@pytest.fixture(params=["nvrtc", "nvcc", "nvrtc-12.8"])
def compiler(request: pytest.FixtureRequest) -> Compiler:
    """Each back end in turn: NVRTC and nvcc as found, and CUDA 12.8's, the extra `cuda128`."""
    return compiler_or_skip(request.param)


@pytest.fixture
def cuda128() -> Compiler:
    """The last compiler whose ptxas does not interleave."""
    return compiler_or_skip("nvrtc-12.8")


@pytest.fixture
def nvrtc() -> Compiler:
    """NVRTC as found."""
    return compiler_or_skip("nvrtc")
