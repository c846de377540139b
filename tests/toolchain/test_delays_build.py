"""Kernels with delays compile as those without: the GPU tests that run them rely on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kgen.build import build
from kgen.cache.artifacts import ArtifactStore
from kgen.config import GemmConfig
from kgen.settings import Settings
from kgen.toolchain import default_compiler
from tests.delays import CONFIGS, HAND_OVERS, PROBLEM, render_delayed


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_kernels_with_delays_compile(config: GemmConfig, tmp_path: Path) -> None:
    compiler = default_compiler(Settings.from_env())
    cubin = build(PROBLEM, config, compiler, ArtifactStore(tmp_path), render=render_delayed)
    assert cubin.spill_bytes == 0


def test_every_hand_over_is_delayed() -> None:
    text = render_delayed(PROBLEM, CONFIGS[0]).text
    assert text.count("    dawdle();") == len(HAND_OVERS)
