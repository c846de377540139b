"""Which compiler is chosen, and what is said when there is none."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kgen import toolchain
from kgen.build import useful_sass_passes
from kgen.errors import CompilerMissing
from kgen.settings import Settings
from kgen.toolchain import (
    Compiler,
    Search,
    default_compiler,
    find_compilers,
    search_compilers,
    why_not_loadable,
)
from tests.unit.fake_nvcc import GOOD, fake_nvcc

NVRTC_13 = Compiler("nvrtc", (13, 0, 88), "/13/libnvrtc.so.13")
NVRTC_12 = Compiler("nvrtc", (12, 8, 93), "/12/libnvrtc.so.12")
NVCC_13 = Compiler("nvcc", (13, 0, 88), "/13/bin/nvcc")
NVCC_12 = Compiler("nvcc", (12, 9, 86), "/12/bin/nvcc")
ALL = (NVRTC_13, NVRTC_12, NVCC_13, NVCC_12)


def settings(compiler: str = "auto", cuda_home: str = "") -> Settings:
    return Settings(cache_dir=Path("/nowhere"), compiler=compiler, cuda_home=cuda_home)


@pytest.fixture
def at_hand(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make these the compilers of this machine."""

    def install(*compilers: Compiler) -> None:
        def search(_: object, names: tuple[str, ...] = toolchain.NAMES) -> Search:
            found = tuple(c for c in compilers if c.name in names)
            missing = (f"{n}: not there" for n in names if n not in {c.name for c in found})
            return Search(found, tuple(missing))

        monkeypatch.setattr(toolchain, "search_compilers", search)

    return install


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("auto", ALL),
        ("nvrtc", (NVRTC_13, NVRTC_12)),
        ("nvcc", (NVCC_13, NVCC_12)),
        ("nvcc-12", (NVCC_12,)),
        ("nvrtc-12.8", (NVRTC_12,)),
        ("nvrtc-12.8.93", (NVRTC_12,)),
        ("nvrtc-12.8.9", ()),
        ("nvrtc-1", ()),
        ("nvcc-12.8", ()),
    ],
)
def test_a_name_with_the_start_of_a_version_chooses(
    wanted: str, expected: tuple[Compiler, ...], at_hand: Callable[..., None]
) -> None:
    at_hand(*ALL)
    assert tuple(find_compilers(settings(wanted))) == expected
    if expected:
        assert default_compiler(settings(wanted)) == expected[0]
    else:
        with pytest.raises(CompilerMissing, match=f"{wanted}.*nvrtc-13.0.88 is another one"):
            default_compiler(settings(wanted))


def test_a_driver_gets_cubins_that_it_can_load(at_hand: Callable[..., None]) -> None:
    at_hand(*ALL)
    assert default_compiler(settings(), (13, 0)) == NVRTC_13
    assert default_compiler(settings(), (14, 2)) == NVRTC_13
    assert default_compiler(settings(), (12, 4)) == NVRTC_12
    assert default_compiler(settings("nvcc"), (12, 4)) == NVCC_12


def test_a_driver_too_old_for_all_is_named_with_both_versions(at_hand: Callable[..., None]) -> None:
    at_hand(NVRTC_13, NVCC_13)
    with pytest.raises(CompilerMissing) as caught:
        default_compiler(settings(), (12, 4))
    assert "nvrtc-13.0.88: the GPU's driver supports CUDA 12.4" in str(caught.value)
    assert "can not load cubins of CUDA 13" in str(caught.value)
    assert "'cuda-python[all]<13'" in str(caught.value)


def test_same_major_version_loads_whatever_the_minor() -> None:
    newer = Compiler("nvrtc", (13, 5, 37), "")
    assert why_not_loadable(newer, (13, 0)) is None
    assert why_not_loadable(newer, (12, 9)) is not None
    advice = why_not_loadable(newer, (11, 8))
    assert advice is not None
    assert "pip install" not in advice  # no CUDA 11 knows sm_90a


def test_without_any_the_message_says_where_it_looked(at_hand: Callable[..., None]) -> None:
    at_hand()
    with pytest.raises(CompilerMissing) as caught:
        default_compiler(settings())
    assert "nvrtc: not there; nvcc: not there" in str(caught.value)
    assert "pip install 'cuda-python[all]'" in str(caught.value)


@pytest.mark.parametrize("home", ["", "empty"])
def test_no_nvcc_anywhere(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr("sys.path", [])
    cuda_home = str(tmp_path / home) if home else ""
    search = search_compilers(settings(cuda_home=cuda_home), ("nvcc",))
    where = f"CUDA_HOME={cuda_home}" if home else r"CUDA_HOME (not set)"
    assert search.found == ()
    (said,) = search.missing
    assert said.startswith(f"nvcc: not found in {where}, on PATH or in the packages of ")


def test_nvcc_of_cuda_home_comes_before_that_of_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = fake_nvcc(tmp_path / "1", GOOD), fake_nvcc(tmp_path / "2", GOOD)
    monkeypatch.setenv("PATH", f"{Path(second).parent}:/usr/bin:/bin")
    home = str(Path(first).parents[1])
    found = search_compilers(settings(cuda_home=home), ("nvcc",)).found
    assert [c.path for c in found][:2] == [first, second]
    assert found[0].version == (13, 0, 88)
    assert [c.path for c in search_compilers(settings(), ("nvcc",)).found][:1] == [second]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("exit 0", "can not compile an empty kernel: exit code 0"),
        ("echo 'gcc: No such file or directory'; exit 1", "exit code 1: gcc: No such file"),
    ],
)
def test_an_nvcc_that_can_not_compile_is_not_found_but_explained(
    body: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(fake_nvcc(tmp_path, body)).parent}:/usr/bin:/bin")
    monkeypatch.setattr("sys.path", [])
    search = search_compilers(settings(), ("nvcc",))
    assert search.found == ()
    (said,) = search.missing
    assert reason in said


def test_a_library_that_is_none_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13"
    library.parent.mkdir(parents=True)
    library.write_text("not a library")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    search = search_compilers(settings(), ("nvrtc",))
    assert search.found == ()
    assert f"{library}: can not be loaded as NVRTC" in search.missing[0]


def test_only_ptxas_up_to_12_8_has_a_use_for_the_pass() -> None:
    assert useful_sass_passes(NVRTC_12) == ("none", "interleave")
    assert useful_sass_passes(NVCC_12) == ("none",)
    assert useful_sass_passes(NVRTC_13) == ("none",)


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No other nvcc than a test's own, and nothing remembered of it afterwards."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    toolchain._probe.cache_clear()
    yield
    toolchain._probe.cache_clear()


@pytest.mark.usefixtures("nothing_known")
def test_a_compiler_that_hangs_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question takes its whole time limit: doctor and a tuning run ask several times."""
    monkeypatch.setattr(toolchain, "_PROBE_TIMEOUT_S", 0.5)
    nvcc = Path(fake_nvcc(tmp_path, f"echo asked >> '{tmp_path}/asked'; sleep 60"))
    nvcc.write_text(nvcc.read_text().replace("exit 0", "sleep 60"))
    home = str(nvcc.parent.parent)
    for _ in range(3):
        search = search_compilers(settings("nvcc", home), ("nvcc",))
        assert any("no result after 0.5 s" in text for text in search.missing)
    assert (tmp_path / "asked").read_text().split() == ["asked"]


@pytest.mark.usefixtures("nothing_known")
def test_no_room_for_temporary_files_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    home = str(Path(fake_nvcc(tmp_path, GOOD)).parent.parent)
    search = search_compilers(settings("nvcc", home), ("nvcc",))
    assert any("no temporary files for it (TMPDIR)" in text for text in search.missing)
