"""A package in a folder, imported under a name of one's own: two versions stand side by side.

Takes a folder and an alias, gives the module. Its files are compiled afresh, with absolute imports
of the package itself turned to the alias, and cached nowhere: an ordinary import of the same
package, before or after, gets the ordinary one. Must not import anything of kgen but errors.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import sys
from collections.abc import Sequence, Set
from contextlib import redirect_stdout
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

from kgen.errors import UsageError

_INIT: Final = "__init__.py"


def package_in(folder: Path) -> Path:
    """The package's own folder: `folder`, or the one package in it.

    Raises UsageError where there is none, or more than one.
    """
    if (folder / _INIT).is_file():
        return folder
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    found = sorted(path.parent for path in folder.glob(f"*/{_INIT}") if path.parent.name != "tests")
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise UsageError(f"{folder}: expected a package, or a folder with one; packages: {names}")
    return found[0]


def import_as(folder: Path, alias: str, also: str = "") -> ModuleType:
    """Import the package in `folder` as the module `alias`; a second call gives the same module.

    The package may call itself by its folder's name, and by `also`. Raises UsageError for a folder
    without a package or an alias in use, and whatever the package raises itself.
    """
    package = package_in(folder).resolve()
    loaded = sys.modules.get(alias)
    if loaded is not None:
        if getattr(loaded, "__file__", None) == str(package / _INIT):
            return loaded
        raise UsageError(f"{alias}: a module of that name is loaded already, from elsewhere")
    finder = _Finder(alias, {package.name, also} - {""})
    spec = finder.package_spec(package)
    module = importlib.util.module_from_spec(spec)
    sys.meta_path.insert(0, finder)
    sys.modules[alias] = module
    assert spec.loader is not None
    try:
        with redirect_stdout(io.StringIO()):  # what it prints is no part of a result
            spec.loader.exec_module(module)
    except BaseException:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if f"{name}.".startswith(f"{alias}.")]:
            del sys.modules[name]
        raise
    return module


class _Finder:
    """Finds the modules below one alias; stays in `sys.meta_path` for imports made later."""

    def __init__(self, alias: str, own_names: Set[str]) -> None:
        self._alias, self._own_names = alias, own_names

    def package_spec(self, package: Path) -> ModuleSpec:
        """The spec of the package itself."""
        path = str(package / _INIT)
        loader = self._loader(self._alias, path)
        spec = importlib.util.spec_from_file_location(
            self._alias, path, loader=loader, submodule_search_locations=[str(package)]
        )
        assert spec is not None
        return spec

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As importlib asks: None for what does not lie below the alias."""
        if path is None or not name.startswith(f"{self._alias}."):
            return None
        details: Any = (
            (ExtensionFileLoader, EXTENSION_SUFFIXES),
            (self._loader, SOURCE_SUFFIXES),
        )
        for folder in path:
            spec = FileFinder(folder, *details).find_spec(name, target)
            if spec is not None and spec.loader is not None:
                return spec
        return None

    def _loader(self, name: str, path: str) -> _Loader:
        return _Loader(name, path, _Renamed(self._own_names, self._alias))


class _Loader(SourceFileLoader):
    """Compiles a file of the package with its imports of itself renamed."""

    def __init__(self, name: str, path: str, renamed: _Renamed) -> None:
        super().__init__(name, path)
        self._renamed = renamed

    def get_code(self, fullname: str) -> CodeType:
        """Not from, and not into, the byte code that an ordinary import of this file uses."""
        path = self.get_filename(fullname)
        tree = self._renamed.visit(ast.parse(self.get_data(path), path))
        code: CodeType = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
        return code


class _Renamed(ast.NodeTransformer):
    """Turns own names to `alias` in absolute imports, wherever in a file they stand."""

    def __init__(self, own_names: Set[str], alias: str) -> None:
        self._own_names, self._alias = own_names, alias

    def _is_own(self, name: str) -> bool:
        return name.partition(".")[0] in self._own_names

    def _new(self, name: str) -> str:
        _, dot, rest = name.partition(".")
        return f"{self._alias}{dot}{rest}"

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        """`from own.x import y`."""
        if not node.level and node.module and self._is_own(node.module):
            node.module = self._new(node.module)
        return node

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        """`import own.x` binds `own`, and so it must still do; `import own.x as y` binds y."""
        new: list[ast.stmt] = []
        for each in node.names:
            name = ast.alias(each.name, each.asname)
            if self._is_own(each.name):
                name.name = self._new(each.name)
                if not each.asname:
                    own_name, dot, _ = each.name.partition(".")
                    new.append(ast.Import([ast.alias(self._alias, own_name)]))
                    if not dot:
                        continue
                    # The plain form binds the alias' first part as well: a name nobody looks at.
            new.append(ast.Import([name]))
        return [ast.copy_location(statement, node) for statement in new]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """`import_module("own.x")` with the name written out."""
        self.generic_visit(node)
        first: Any = node.args[0] if node.args else None
        named = isinstance(first, ast.Constant) and isinstance(first.value, str)
        called = ast.unparse(node.func).rpartition(".")[2]
        if named and called in ("import_module", "__import__") and self._is_own(first.value):
            first.value = self._new(first.value)
        return node
