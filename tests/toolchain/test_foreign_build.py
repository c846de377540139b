"""A source by hand is built as kgen's own are, under a key of its own, and found again by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kgen.build import build, build_foreign, stored_foreign
from kgen.cache.artifacts import ArtifactStore
from kgen.compiler import Compiler
from kgen.config import GemmConfig
from kgen.device import H200
from kgen.errors import ArtifactError, CompileError
from kgen.foreign import read_foreign
from kgen.problem import GemmProblem
from kgen.render import render

PROBLEM = GemmProblem("dense", 64, 2112, 7168)
CONFIG = GemmConfig(block_m=64, block_n=64, num_stages=6, num_math_warpgroups=1)


def test_an_unedited_source_gives_the_same_code_under_another_key(
    nvrtc: Compiler, tmp_path: Path
) -> None:
    file = tmp_path / "mine.cu"
    file.write_text(render(PROBLEM, CONFIG).text)
    store = ArtifactStore(tmp_path)
    source = read_foreign(file, PROBLEM, H200)
    mine = build_foreign(source, PROBLEM, nvrtc, store)
    own = build(PROBLEM, CONFIG, nvrtc, store)
    assert (mine.data, mine.registers, mine.entry) == (own.data, own.registers, own.entry)
    assert mine.key != own.key
    assert not own.from_cache
    assert Path(mine.source_path).read_text() == source.text
    assert build_foreign(source, PROBLEM, nvrtc, store) == replace(mine, from_cache=True)
    found = stored_foreign(mine.key, PROBLEM, CONFIG, store)
    assert (found.data, found.config, found.entry) == (mine.data, CONFIG, mine.entry)
    for key, config in ((own.key, CONFIG), (mine.key, GemmConfig()), ("0" * 64, CONFIG)):
        with pytest.raises(ArtifactError, match="race its source again"):
            stored_foreign(key, PROBLEM, config, store)


def test_a_mistake_is_told_with_the_file_s_name(nvrtc: Compiler, tmp_path: Path) -> None:
    file = tmp_path / "mine.cu"
    file.write_text(render(PROBLEM, CONFIG).text + "\nint x = no_such_name;\n")
    source = read_foreign(file, PROBLEM, H200)
    with pytest.raises(CompileError, match=r"(?s)mine\.cu: .*no_such_name") as caught:
        build_foreign(source, PROBLEM, nvrtc, ArtifactStore(tmp_path))
    assert "no_such_name" in caught.value.log
    assert not list(tmp_path.rglob("*.cubin"))
