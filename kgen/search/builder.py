"""How a run builds cubins: `KernelBuilder`, one in the tuning process and one in each compiler.

Takes the settings and what the GPU's driver can load, or a compiler that was chosen before; gives
cubins from the artifact store or fresh. Must not import torch or the CUDA driver.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from kgen import __version__
from kgen.build import (
    Cubin,
    build,
    build_foreign,
    key_of,
    stored_foreign,
    useful_sass_passes,
)
from kgen.cache.artifacts import ArtifactStore
from kgen.config import GemmConfig
from kgen.foreign import ForeignSource
from kgen.problem import GemmProblem
from kgen.settings import Settings
from kgen.toolchain import Compiler, default_compiler


class KernelBuilder:
    """Builds with one compiler into one artifact store."""

    def __init__(self, settings: Settings, compiler: Compiler) -> None:
        self._settings = settings
        self._compiler = compiler
        self._store = ArtifactStore(settings.cache_dir)

    @property
    def sass_passes(self) -> tuple[str, ...]:
        """The values that the axis of that name has with this compiler."""
        return useful_sass_passes(self._compiler)

    def facts(self) -> dict[str, str]:
        """compiler, template_hash and generator, as records keep them."""
        return {
            "compiler": self._compiler.id,
            "template_hash": template_hash(),
            "generator": f"kgen {__version__}",
        }

    def replica(self) -> dict[str, Any]:
        """Keyword arguments with which `create` makes the same builder in another process."""
        return {"settings": self._settings, "compiler": self._compiler}

    def key(self, problem: GemmProblem, config: GemmConfig) -> str:
        """The key of the configuration's cubin; renders, builds nothing."""
        return key_of(problem, config, self._compiler)

    def build(self, problem: GemmProblem, config: GemmConfig) -> Cubin:
        """The configuration's cubin; raises CompileError, RenderError, SassError."""
        timeout_s = self._settings.compile_timeout_s
        return build(problem, config, self._compiler, self._store, timeout_s)

    def build_foreign(self, source: ForeignSource, problem: GemmProblem) -> Cubin:
        """The cubin of a source by hand; raises CompileError, SassError."""
        timeout_s = self._settings.compile_timeout_s
        return build_foreign(source, problem, self._compiler, self._store, timeout_s)

    def stored_foreign(self, key: str, problem: GemmProblem, config: GemmConfig) -> Cubin:
        """One that was built before; raises ArtifactError where it is gone."""
        return stored_foreign(key, problem, config, self._store)


def create(
    settings: Settings,
    driver_cuda: tuple[int, int] | None = None,
    compiler: Compiler | None = None,
) -> KernelBuilder:
    """A builder with the given compiler, or the best whose cubins the driver can load.

    Raises CompilerMissing, which says what was looked for.
    """
    return KernelBuilder(settings, compiler or default_compiler(settings, driver_cuda))


@cache
def template_hash() -> str:
    """SHA-256 over every file of kgen/templates, names included."""
    digest = hashlib.sha256()
    folder = resources.files("kgen") / "templates"
    for name, data in sorted(_files(folder, "")):
        digest.update(f"{name} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def _files(folder: Traversable, prefix: str) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for entry in folder.iterdir():
        name = f"{prefix}{entry.name}"
        if entry.is_dir():
            found += _files(entry, f"{name}/")
        else:
            found.append((name, entry.read_bytes()))
    return found
