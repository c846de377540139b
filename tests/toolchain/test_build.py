"""The build behind the store: what is kept, what is found again, what is not kept."""

from __future__ import annotations

import logging
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from kgen import build as build_module
from kgen.build import Cubin, build, key_of
from kgen.cache.artifacts import CUBIN, ArtifactStore
from kgen.compiler import Compiler
from kgen.config import GemmConfig
from kgen.errors import CompileError
from kgen.problem import GemmProblem
from kgen.render import Source
from tests.toolchain import sources
from tests.unit.fake_nvcc import RESOURCES, fake_compiler

PROBLEM = GemmProblem("dense", 128, 4096, 7168)
CONFIG = GemmConfig()


def stub(text: str) -> build_module.Render:
    """A renderer that always gives this source."""

    def render(problem: GemmProblem, config: GemmConfig) -> Source:
        return Source(text, str(hash(text)), "kgen_gemm", "dense", config)

    return render


def entries(root: Path) -> list[Path]:
    return list(root.rglob("*"))


def test_built_once_then_found(nvrtc: Compiler, tmp_path: Path) -> None:
    first = build(PROBLEM, CONFIG, nvrtc, ArtifactStore(tmp_path))
    again = build(PROBLEM, CONFIG, nvrtc, ArtifactStore(tmp_path))
    assert not first.from_cache
    assert again == replace(first, from_cache=True)
    assert first.key == key_of(PROBLEM, CONFIG, nvrtc)
    assert first.registers == 168
    assert first.problem == PROBLEM
    assert Path(first.source_path).read_text(encoding="utf-8").startswith("// FP8")
    assert pickle.loads(pickle.dumps(first)) == first


def test_one_cubin_serves_every_m_and_budget(nvrtc: Compiler) -> None:
    key = key_of(PROBLEM, CONFIG, nvrtc)
    assert key_of(replace(PROBLEM, m=1, num_sms=64, n=512, k=512), CONFIG, nvrtc) == key
    others = [
        key_of(replace(PROBLEM, d_dtype="fp32"), CONFIG, nvrtc),
        key_of(PROBLEM, replace(CONFIG, block_n=152), nvrtc),
        key_of(PROBLEM, replace(CONFIG, baked_dims="nk"), nvrtc),
        key_of(PROBLEM, replace(CONFIG, sass_pass="interleave"), nvrtc),
        key_of(PROBLEM, CONFIG, replace(nvrtc, version=(*nvrtc.version[:2], 999))),
        key_of(PROBLEM, CONFIG, replace(nvrtc, name="nvcc")),
    ]
    assert len({key, *others}) == 7


def test_without_a_writable_store_the_build_still_gives_a_cubin(
    nvrtc: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    store = ArtifactStore(tmp_path / "file")
    with caplog.at_level(logging.WARNING):
        first = build(PROBLEM, CONFIG, nvrtc, store, render=stub(sources.WGMMA))
        again = build(PROBLEM, CONFIG, nvrtc, store, render=stub(sources.WGMMA))
    assert (first.source_path, first.from_cache, again.from_cache) == ("", False, True)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("damaged", [b"", b"text", b"\x7fELF\x02\x01"])
def test_a_broken_cubin_is_built_again_with_one_warning(
    damaged: bytes, nvrtc: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = build(PROBLEM, CONFIG, nvrtc, ArtifactStore(tmp_path), render=stub(sources.WGMMA))
    Path(first.source_path).with_name(CUBIN).write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        again = build(PROBLEM, CONFIG, nvrtc, ArtifactStore(tmp_path), render=stub(sources.WGMMA))
    assert (again.data, again.from_cache) == (first.data, False)
    assert len(caplog.records) == 1
    assert build(
        PROBLEM, CONFIG, nvrtc, ArtifactStore(tmp_path), render=stub(sources.WGMMA)
    ).from_cache


def test_the_pass_runs_between_compiler_and_store(cuda128: Compiler, tmp_path: Path) -> None:
    def made(sass_pass: str) -> Cubin:
        config = replace(CONFIG, sass_pass=sass_pass)
        render = stub(sources.PROMOTION)
        return build(PROBLEM, config, cuda128, ArtifactStore(tmp_path), render=render)

    plain, patched = made("none"), made("interleave")
    assert plain.key != patched.key
    assert plain.data != patched.data
    assert len(plain.data) == len(patched.data)
    assert made("interleave").data == patched.data
    store = ArtifactStore(tmp_path)
    kept = [store.get(cubin.key) for cubin in (plain, patched)]
    assert all(kept)
    assert [k.facts["sass_sites"] > 0 for k in kept if k] == [False, True]


@pytest.mark.parametrize("source", [sources.SPILL, sources.SERIALISED["C7514"], "nonsense"])
def test_a_failed_build_keeps_its_message_and_stores_nothing(
    source: str, nvrtc: Compiler, tmp_path: Path
) -> None:
    with pytest.raises(CompileError) as caught:
        build(PROBLEM, CONFIG, nvrtc, ArtifactStore(tmp_path / "cache"), render=stub(source))
    assert caught.value.log
    assert str(CONFIG) in str(caught.value)
    assert str(PROBLEM) in str(caught.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "body",
    [
        "exit 0",
        "echo text >&2; exit 1",
        ": > kgen.cubin",
        f"echo text > kgen.cubin; echo '{RESOURCES}'",
        "sleep 60",
    ],
)
def test_an_nvcc_that_fails_or_lies_leaves_nothing(body: str, tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "cache")
    compiler = fake_compiler(tmp_path, body)
    with pytest.raises(CompileError):
        build(PROBLEM, CONFIG, compiler, store, timeout_s=1.0, render=stub("// nothing"))
    assert not (tmp_path / "cache").exists()
    assert store.get(key_of(PROBLEM, CONFIG, compiler, stub("// nothing"))) is None
