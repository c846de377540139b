"""A package under an alias: imports of itself lead to itself, and nowhere else."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kgen.bench.package import import_as, package_in
from kgen.errors import UsageError

FILES = {
    "__init__.py": """
        from . import jit
        from .kernels import gemm
        print("noise on stdout")
    """,
    "jit.py": "VERSION = {version!r}\n",
    "kernels/__init__.py": "from .gemm import gemm\n",
    "kernels/gemm.py": """
        import peer_gemm
        import peer_gemm.jit
        import peer_gemm.jit as same
        from peer_gemm.jit import VERSION
        from ..jit import VERSION as relative

        def gemm():
            import importlib
            from peer_gemm import late
            by_name = importlib.import_module("peer_gemm.late")
            assert by_name is late
            return {{VERSION, relative, same.VERSION, peer_gemm.jit.VERSION, late.VERSION}}
    """,
    "late.py": "from peer_gemm.jit import VERSION\n",
}


def make(folder: Path, version: str, **changes: str) -> Path:
    """A package named peer_gemm whose every route says `version`."""
    package = folder / "peer_gemm"
    for name, text in {**FILES, **changes}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        path.write_text("\n".join(line[indent:] for line in lines).format(version=version) + "\n")
    return package


@pytest.fixture(autouse=True)
def _no_trace() -> Iterator[None]:
    """Modules and finders as they were before."""
    modules, finders, path = set(sys.modules), [*sys.meta_path], [*sys.path]
    yield
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    sys.meta_path[:], sys.path[:] = finders, path


def test_two_versions_and_the_ordinary_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each sees itself by every kind of import, also when imported late, before or after."""
    old, new = make(tmp_path / "old", "1"), make(tmp_path / "new", "2")
    first = import_as(old, "peer_old")
    sys.path.insert(0, str(tmp_path / "new"))
    plain = importlib.import_module("peer_gemm")
    second = import_as(new, "peer_new")
    assert first.gemm() == {"1"}
    assert second.gemm() == {"2"}
    assert plain.gemm() == {"2"}
    assert plain is not second
    assert sys.modules["peer_old.kernels.gemm"].__package__ == "peer_old.kernels"
    assert capsys.readouterr().out == "noise on stdout\n", "only the ordinary import may print"


def test_byte_code_of_the_alias_is_never_the_ordinary_one(tmp_path: Path) -> None:
    """The same folder under two aliases and by its own name."""
    package = make(tmp_path, "3")
    modules = [import_as(package, alias) for alias in ("peer_a", "peer_b")]
    assert not list(tmp_path.rglob("*.pyc"))
    sys.path.insert(0, str(tmp_path))
    importlib.import_module("peer_gemm").gemm()
    again = import_as(package, "peer_c")
    assert again.kernels.gemm is sys.modules["peer_c.kernels"].gemm
    assert len({module.gemm for module in (*modules, again)}) == 3


def test_a_folder_around_the_package_does_too(tmp_path: Path) -> None:
    """And the same alias gives the same module; another folder under it is refused."""
    package = make(tmp_path / "site", "4")
    assert package_in(tmp_path / "site") == package
    module = import_as(tmp_path / "site", "peer_site")
    assert import_as(package, "peer_site") is module
    with pytest.raises(UsageError, match="peer_site: a module of that name"):
        import_as(make(tmp_path / "other", "5"), "peer_site")


def test_a_renamed_folder_says_what_its_package_calls_itself(tmp_path: Path) -> None:
    """Without that name the absolute imports of a renamed folder would miss."""
    renamed = make(tmp_path, "6").rename(tmp_path / "peer_v1")
    (renamed / "late.py").write_text("from peer_v1.jit import VERSION\n")
    assert import_as(renamed, "peer_six", also="peer_gemm").gemm() == {"6"}
    with pytest.raises(ImportError, match="peer_gemm"):
        import_as(renamed, "peer_none")


def test_a_package_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its own error comes out, and the next attempt starts afresh."""
    package = make(tmp_path, "7", **{"__init__.py": "from . import jit\nimport no_such_module\n"})
    finders = [*sys.meta_path]
    with pytest.raises(ImportError, match="no_such_module"):
        import_as(package, "peer_bad")
    assert sys.meta_path == finders
    assert not [name for name in sys.modules if name.startswith("peer_bad")]


def test_folders_without_one_package_are_refused(tmp_path: Path) -> None:
    """None, two, or no folder at all."""
    with pytest.raises(UsageError, match="no such folder"):
        package_in(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="packages: none"):
        package_in(tmp_path)
    make(tmp_path, "8").rename(tmp_path / "other")
    make(tmp_path, "9")
    with pytest.raises(UsageError, match="packages: other, peer_gemm"):
        package_in(tmp_path)
