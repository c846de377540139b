"""The packages hold what they must, every dependency is pinned, and CI's files agree."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kgen

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

needs_hatchling = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None,
    reason="builds the package: needs hatchling, of the extra test",
)


def canonical(requirement: str) -> str:
    """The normalised name of a requirement, without extras, version and marker."""
    return canonicalize_name(Requirement(requirement).name)


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.strip()]
    pinned = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonical(name): version for name, version in pinned}


def needed_by(name: str, extras: set[str]) -> set[str]:
    """Names that an installed distribution requires on this machine."""
    found: set[str] = set()
    for requirement in map(Requirement, metadata.requires(name) or []):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            found.add(canonicalize_name(requirement.name))
    return found


def closure(names: set[str]) -> set[str]:
    """Everything installed that these distributions bring; `[all]` of the CUDA bindings."""
    seen: set[str] = set()
    waiting = [canonical(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            waiting += needed_by(
                name, {"all"} if name in ("cuda-python", "cuda-bindings") else set()
            )
        except metadata.PackageNotFoundError:
            continue
    return seen


def declared() -> set[str]:
    """What pyproject.toml names: dependencies, test tools, the build back end."""
    extras = PROJECT["optional-dependencies"]
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    everything = [
        *PROJECT["dependencies"],
        *extras["sass"],
        *extras["cuda128"],
        *extras["plot"],
        *extras["sign"],
        *extras["test"],
        *build,
    ]
    return {canonical(requirement) for requirement in everything} - {"kgen"}


def test_every_dependency_is_pinned() -> None:
    missing = {name for name in closure(declared()) if name not in pins()}
    assert not missing


def test_pins_are_exact_versions() -> None:
    assert all(re.fullmatch(r"\d[\w.]*", version) for version in pins().values())
    assert "+" not in pins()["torch"], "a local version would shut out other builds of torch"


def test_cuda_pins_are_those_of_torchs_cuda_build() -> None:
    # torch 2.13.0's wheel on PyPI requires cuda-toolkit 13.0.3; other pins could not be installed.
    assert (pins()["torch"], pins()["cuda-toolkit"]) == ("2.13.0", "13.0.3.0")
    assert pins()["nvidia-cuda-nvrtc"].startswith("13.0.")


def test_dependencies_are_the_declared_ones() -> None:
    assert {canonical(requirement) for requirement in PROJECT["dependencies"]} == {
        "jinja2",
        "cuda-python",
        "numpy",
        "torch",
        "optuna",
        "sqlalchemy",
        "rich",
    }
    assert PROJECT["requires-python"] == ">=3.11"


def test_the_check_of_a_python_at_hand_covers_the_dependencies() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import check_python  # type: ignore[import-not-found,unused-ignore]
    finally:
        sys.path.remove(str(ROOT / "tools"))
    required = {canonical(requirement) for requirement in PROJECT["dependencies"]}
    assert required <= set(check_python.MODULES)
    assert check_python.main() == 0


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@needs_hatchling
def test_wheel_holds_templates_and_shapes(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [path for path in (ROOT / "kgen").rglob("*") if path.is_file()]
    package = {
        path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts
    }
    assert package <= names
    assert {name for name in names if name.endswith((".j2", ".cuh"))}
    assert "kgen/data/shapes/deepseek_v3.txt" in names
    assert not {name for name in names if name.startswith(("tests", "tools", "results"))}
    assert any(name.endswith("licenses/LICENSE") for name in names)


@needs_hatchling
def test_wheel_metadata(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    fields = HeaderParser().parsestr(archive.read(path).decode())
    assert fields["Version"] == kgen.__version__
    assert fields["License-Expression"] == "Apache-2.0"
    assert {"sass", "test"} <= set(fields.get_all("Provides-Extra") or ())


@needs_hatchling
def test_sdist_can_be_tested_and_built(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"Makefile", "constraints.txt", "LICENSE", "README.md", "shapes/deepseek_v3.txt"}
    assert needed <= names
    assert "tests/unit/test_packaging.py" in names


def test_ci_entry() -> None:
    entry = ROOT / ".ci" / "run"
    text = entry.read_text()
    assert os.access(entry, os.X_OK)
    assert "make test" in text
    assert "-rs" in text
    subprocess.run(["bash", "-n", str(entry)], check=True)


@pytest.mark.parametrize("target", ["tune", "test"])
def test_make_targets_set_themselves_up(target: str) -> None:
    """On a fresh machine both would make the environment first; VENV=0 makes none."""
    dry = ["make", "-n", "-C", str(ROOT), target, "VENV=/no/such/venv"]
    plan = subprocess.run(dry, check=True, capture_output=True, text=True).stdout
    assert "-m venv /no/such/venv" in plan
    assert "constraints.txt" in plan
    bare = subprocess.run(
        [*dry[:-1], "VENV=0", "PYTHON=/some/python"], check=True, capture_output=True, text=True
    ).stdout
    assert "-m venv" not in bare
    assert "pip" not in bare.replace("/some/python tools/check_python.py", "")
    assert "/some/python -m" in bare


def test_changelog_and_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "## Unreleased" in changelog or f"## {kgen.__version__}" in changelog
    assert re.fullmatch(r"\d+\.\d+\.\d+", kgen.__version__)
