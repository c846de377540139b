"""From a problem and a configuration to a cubin: render, compile, patch, behind the store.

Takes a compiler and an artifact store, gives a `Cubin`, of a source by hand as well, or a
`PlainCubin` of a kernel beside the GEMM; the one place that joins those stages.
Never launches anything. Must not import torch, the CUDA driver, search or runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kgen import sass
from kgen.cache.artifacts import Artifact, ArtifactStore
from kgen.cache.keys import cubin_key
from kgen.compiler import DEFAULT_TIMEOUT_S, Compiled, Compiler, compile_source
from kgen.config import SASS_PASSES, GemmConfig
from kgen.errors import ArtifactError, CompileError
from kgen.foreign import ForeignSource
from kgen.problem import GemmProblem
from kgen.render import PlainSource, Source, render

Render = Callable[[GemmProblem, GemmConfig], Source]
AnySource = Source | PlainSource | ForeignSource
#: From the next version on ptxas interleaves by itself.
LAST_UNINTERLEAVED: Final = (12, 8)


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel, ready to load. Plain values: it crosses processes.

    `problem` is the one it was built for, and stands for all that it serves; `registers` and
    `spill_bytes` are per thread; `source_path` is empty where nothing was stored; `compile_s` are
    the seconds that the compiler took, whenever that was.
    """

    key: str
    data: bytes
    entry: str
    config: GemmConfig
    problem: GemmProblem
    registers: int
    spill_bytes: int
    from_cache: bool
    source_path: str
    log: str
    compile_s: float = 0.0


@dataclass(frozen=True)
class PlainCubin:
    """A compiled kernel that is no GEMM. Registers are per thread, static shared memory per CTA."""

    key: str
    data: bytes
    entry: str
    registers: int
    smem_static_bytes: int
    from_cache: bool


def build(
    problem: GemmProblem,
    config: GemmConfig,
    compiler: Compiler,
    store: ArtifactStore,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    *,
    render: Render = render,
) -> Cubin:
    """The configuration's cubin, from the store or compiled and stored; failures store nothing.

    Raises RenderError, CompileError (its log kept), SassError, CompilerMissing.
    """
    source = render(problem, config)
    key = _key(source, compiler)
    artifact = store.get(key)
    if artifact is not None:
        return _cubin(artifact, source, problem, from_cache=True)
    compiled = _compile(source, compiler, timeout_s, f"{config} for {problem}")
    patched = sass.patch(compiled.cubin, config.sass_pass)
    facts = _facts(source, compiler, compiled, patched.sites_changed)
    artifact = store.put(key, source.text, patched.cubin, compiled.log, facts)
    return _cubin(artifact, source, problem, from_cache=False)


def build_foreign(
    source: ForeignSource,
    problem: GemmProblem,
    compiler: Compiler,
    store: ArtifactStore,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Cubin:
    """The cubin of a source by hand, kept in the store with its text; failures store nothing.

    Its key is never that of a kernel of kgen's, even where nothing was edited. Raises
    CompileError (its log kept), SassError, CompilerMissing.
    """
    sass_pass = source.config.sass_pass
    key = cubin_key(
        f"foreign {source.sha256} {source.config.to_dict()}",
        compiler.flags(),
        compiler.id,
        sass_pass,
        sass.pass_version(sass_pass),
    )
    artifact = store.get(key)
    from_cache = artifact is not None
    if artifact is None:
        compiled = _compile(source, compiler, timeout_s, source.name)
        patched = sass.patch(compiled.cubin, sass_pass)
        facts = {
            **_compile_facts(source, compiler, compiled),
            "foreign": source.name,
            "config": source.config.to_dict(),
            "sass_pass": sass_pass,
            "sass_sites": patched.sites_changed,
        }
        artifact = store.put(key, source.text, patched.cubin, compiled.log, facts)
    return _cubin(artifact, source, problem, from_cache)


def stored_foreign(
    key: str, problem: GemmProblem, config: GemmConfig, store: ArtifactStore
) -> Cubin:
    """The cubin of a source by hand that was built before. Raises ArtifactError where it is gone,
    and for the key of something else."""
    artifact = store.get(key)
    facts = artifact.facts if artifact else {}
    if artifact is None or "foreign" not in facts or facts.get("config") != config.to_dict():
        raise ArtifactError(
            f"{store.folder} has no kernel by hand with key {key[:12]}: race its source again"
        )
    entry, name = str(facts["entry"]), str(facts["foreign"])
    return _cubin(artifact, ForeignSource("", "", entry, config, name), problem, from_cache=True)


def build_plain(
    source: PlainSource,
    compiler: Compiler,
    store: ArtifactStore,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> PlainCubin:
    """The cubin of a kernel beside the GEMM, from the store or compiled and stored.

    Raises CompileError (its log kept), ArtifactError, CompilerMissing.
    """
    key = cubin_key(
        source.body_hash, compiler.flags(), compiler.id, "none", sass.pass_version("none")
    )
    artifact = store.get(key)
    from_cache = artifact is not None
    if artifact is None:
        compiled = _compile(source, compiler, timeout_s, source.name)
        facts = _compile_facts(source, compiler, compiled)
        artifact = store.put(key, source.text, compiled.cubin, compiled.log, facts)
    return PlainCubin(
        key=key,
        data=artifact.cubin,
        entry=source.entry,
        registers=int(artifact.facts["registers"]),
        smem_static_bytes=int(artifact.facts["smem_static_bytes"]),
        from_cache=from_cache,
    )


def key_of(
    problem: GemmProblem, config: GemmConfig, compiler: Compiler, render: Render = render
) -> str:
    """The key that `build` would give the cubin; renders, but compiles nothing."""
    return _key(render(problem, config), compiler)


def useful_sass_passes(compiler: Compiler) -> tuple[str, ...]:
    """The passes that can change what this compiler makes: the values of that axis for it."""
    return SASS_PASSES if compiler.version[:2] <= LAST_UNINTERLEAVED else ("none",)


def _key(source: Source, compiler: Compiler) -> str:
    sass_pass = source.config.sass_pass
    return cubin_key(
        source.body_hash, compiler.flags(), compiler.id, sass_pass, sass.pass_version(sass_pass)
    )


def _compile(source: AnySource, compiler: Compiler, timeout_s: float, what: str) -> Compiled:
    """`what` says in an error's message which kernel did not compile."""
    try:
        return compile_source(source.text, compiler, timeout_s=timeout_s, entry=source.entry)
    except CompileError as error:
        raise CompileError(f"{what}: {error}", error.log) from error


def _facts(
    source: Source, compiler: Compiler, compiled: Compiled, sass_sites: int
) -> dict[str, Any]:
    """What the store keeps beside the files; `_cubin` reads registers and spills back."""
    return {
        **_compile_facts(source, compiler, compiled),
        "problem_class": source.problem_class,
        "config": source.config.to_dict(),
        "sass_pass": source.config.sass_pass,
        "sass_sites": sass_sites,
    }


def _compile_facts(source: AnySource, compiler: Compiler, compiled: Compiled) -> dict[str, Any]:
    return {
        "registers": compiled.registers,
        "spill_bytes": compiled.spill_bytes,
        "stack_bytes": compiled.stack_bytes,
        "smem_static_bytes": compiled.smem_static_bytes,
        "compile_seconds": round(compiled.seconds, 3),
        "compiler": compiler.id,
        "flags": list(compiler.flags()),
        "entry": source.entry,
    }


def _cubin(
    artifact: Artifact, source: Source | ForeignSource, problem: GemmProblem, from_cache: bool
) -> Cubin:
    return Cubin(
        key=artifact.key,
        data=artifact.cubin,
        entry=source.entry,
        config=source.config,
        problem=problem,
        registers=int(artifact.facts["registers"]),
        spill_bytes=int(artifact.facts["spill_bytes"]),
        from_cache=from_cache,
        source_path=str(artifact.source_path or ""),
        log=artifact.log,
        compile_s=float(artifact.facts["compile_seconds"]),
    )
