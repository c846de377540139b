"""Settings: what each variable does, what is refused, and that nothing is touched."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from kgen.errors import UsageError
from kgen.settings import Settings, keys_dir


def test_defaults_come_from_home() -> None:
    settings = Settings.from_env({"HOME": "/home/someone"})
    assert settings.cache_dir == Path("/home/someone/.cache/kgen")
    assert settings.db_url == "sqlite:////home/someone/.cache/kgen/tuning.db"
    assert (settings.compiler, settings.compile_timeout_s) == ("auto", 120.0)
    assert settings.jobs == len(os.sched_getaffinity(0))


def test_xdg_cache_home_counts_when_absolute() -> None:
    env = {"HOME": "/h", "XDG_CACHE_HOME": "/var/cache/me"}
    assert Settings.from_env(env).cache_dir == Path("/var/cache/me/kgen")
    assert Settings.from_env(env | {"XDG_CACHE_HOME": "here"}).cache_dir == Path("/h/.cache/kgen")


@pytest.mark.parametrize("env", [{}, {"HOME": ""}])
def test_without_home_the_account_says(env: dict[str, str]) -> None:
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    assert Settings.from_env(env).cache_dir == home / ".cache" / "kgen"


def test_without_home_or_account_a_folder_of_this_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert str(os.getuid()) in str(Settings.from_env({}).cache_dir)


def test_cache_dir_overrides_and_expands() -> None:
    env = {"HOME": "/h", "XDG_CACHE_HOME": "/x", "KGEN_CACHE_DIR": "~/kernels"}
    assert Settings.from_env(env).cache_dir == Path("~/kernels").expanduser()
    relative = Settings.from_env({"KGEN_CACHE_DIR": "kernels"})
    assert relative.cache_dir == Path.cwd() / "kernels"


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("/data/t.db", "sqlite:////data/t.db"),
        ("sqlite:////data/t.db", "sqlite:////data/t.db"),
        ("postgresql+psycopg://u@h/kgen", "postgresql+psycopg://u@h/kgen"),
        ("t.db", f"sqlite:///{Path.cwd()}/t.db"),
        ("/data/a?b=1.db", "/data/a?b=1.db"),
        ("/data/100%.db", "/data/100%.db"),
        ("/data/\udcff.db", "/data/\udcff.db"),
    ],
)
def test_database_is_a_path_or_a_url(given: str, url: str) -> None:
    assert Settings.from_env({"KGEN_DB": given}).db_url == url


def test_the_rest_of_the_variables() -> None:
    env = {
        "KGEN_COMPILER": "nvcc-12.8.93",
        "KGEN_JOBS": "7",
        "KGEN_COMPILE_TIMEOUT_S": "2.5",
        "KGEN_TRIAL_TIMEOUT_S": "3",
        "KGEN_LOG_LEVEL": "DEBUG",
        "CUDA_PATH": "/opt/cuda",
    }
    s = Settings.from_env(env)
    assert (s.compiler, s.jobs, s.log_level) == ("nvcc-12.8.93", 7, "debug")
    assert (s.compile_timeout_s, s.trial_timeout_s, s.cuda_home) == (2.5, 3.0, "/opt/cuda")
    assert Settings.from_env(env | {"CUDA_HOME": "/first"}).cuda_home == "/first"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KGEN_COMPILER", "gcc"),
        ("KGEN_COMPILER", "nvcc-new"),
        ("KGEN_JOBS", "0"),
        ("KGEN_JOBS", "many"),
        ("KGEN_JOBS", "1.5"),
        ("KGEN_COMPILE_TIMEOUT_S", "0"),
        ("KGEN_TRIAL_TIMEOUT_S", "nan"),
        ("KGEN_COMPILE_TIMEOUT_S", "inf"),
        ("KGEN_TRIAL_TIMEOUT_S", "1e300"),
        ("KGEN_CACHE_DIR", "~nobody-of-that-name/cache"),
        ("KGEN_LOG_LEVEL", "loud"),
    ],
)
def test_bad_values_name_the_variable(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=name):
        Settings.from_env({name: value})


def test_a_database_in_a_home_that_is_not_there_is_usage() -> None:
    with pytest.raises(UsageError, match=r"KGEN_DB='~nobody-of-that-name/t\.db'"):
        _ = Settings.from_env({"KGEN_DB": "~nobody-of-that-name/t.db"}).db_url


def test_empty_means_unset() -> None:
    names = ("KGEN_CACHE_DIR", "KGEN_DB", "KGEN_COMPILER", "KGEN_JOBS", "KGEN_LOG_LEVEL")
    assert Settings.from_env(dict.fromkeys(names, "")) == Settings.from_env({})


def test_import_and_settings_write_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    code = "import kgen.settings as s, kgen.cli.main; s.Settings.from_env().db_url"
    env = {"HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-B", "-c", code], env=env, check=True, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_keys_lie_with_the_configuration(tmp_path: Path) -> None:
    assert keys_dir({"KGEN_KEYS_DIR": str(tmp_path)}) == tmp_path
    assert keys_dir({"XDG_CONFIG_HOME": "/x", "HOME": "/h"}) == Path("/x/kgen")
    assert keys_dir({"XDG_CONFIG_HOME": "x", "HOME": "/h"}) == Path("/h/.config/kgen")
