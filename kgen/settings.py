"""What the environment says: `Settings`, read once and handed on as a value.

Takes a mapping of environment variables, gives a frozen value. The only module that reads the
environment; nothing is read, created or written on import. Must not import anything of kgen
but `errors`.
"""

from __future__ import annotations

import os
import pwd
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kgen.errors import UsageError

#: Longer waits are refused by the system's timers.
MAX_TIMEOUT_S: Final = 1e6
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
_COMPILER: Final = re.compile(r"auto|(nvrtc|nvcc)(-\d+(\.\d+)*)?")
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
#: What in a path would be read as something else in a URL, or is no text: names need not be UTF-8.
_NOT_FOR_URLS: Final = re.compile(r"[?#%\udc80-\udcff]")


@dataclass(frozen=True)
class Settings:
    """Everything kgen takes from its surroundings.

    cache_dir            artifacts, and the database unless `db` says otherwise
    db                   path or SQLAlchemy URL of the tuning database; empty: in `cache_dir`
    compiler             auto, nvrtc, nvcc, or one of them at a version: nvcc-12.8
    cuda_home            a CUDA toolkit to look for nvcc in, beside PATH; empty: none
    jobs                 compile processes
    compile_timeout_s    seconds a compile may take
    trial_timeout_s      seconds a candidate may take on the GPU, verification and timing each
    log_level            debug, info, warning, error
    record, misses       shapes files that running programs keep: what they call, and what of it
                         was not tuned; `{pid}` stands for the process; empty: none
    foreign              whether the runtime may use kernels of sources by hand (`kgen race`)
    nvtx                 whether the runtime marks its calls for profilers
    """

    cache_dir: Path
    db: str = ""
    compiler: str = "auto"
    cuda_home: str = ""
    jobs: int = 1
    compile_timeout_s: float = 120.0
    trial_timeout_s: float = 20.0
    log_level: str = "warning"
    record: str = ""
    misses: str = ""
    foreign: bool = False
    nvtx: bool = False

    def __post_init__(self) -> None:
        if not _COMPILER.fullmatch(self.compiler):
            raise UsageError(
                f"compiler {self.compiler!r} (KGEN_COMPILER, --compiler): expected auto, nvrtc, "
                "nvcc, or one at a version such as nvcc-12.8"
            )
        if self.jobs < 1:
            raise UsageError(f"KGEN_JOBS={self.jobs}: expected at least 1")
        for name in ("compile_timeout_s", "trial_timeout_s"):
            if not 0 < getattr(self, name) <= MAX_TIMEOUT_S:
                raise UsageError(
                    f"KGEN_{name.upper()}={getattr(self, name)}: expected seconds, more than 0 and "
                    f"at most {MAX_TIMEOUT_S:g}"
                )
        if self.log_level not in LOG_LEVELS:
            raise UsageError(
                f"KGEN_LOG_LEVEL={self.log_level!r}: expected one of {', '.join(LOG_LEVELS)}"
            )

    @property
    def db_url(self) -> str:
        """The database as an SQLAlchemy URL, which the database takes as well as a plain path.

        A path becomes a sqlite URL, or stays one where a URL would mean another file.
        """
        path = self.db_path
        if path is None:
            return self.db
        return str(path) if _NOT_FOR_URLS.search(str(path)) else f"sqlite:///{path}"

    @property
    def db_path(self) -> Path | None:
        """The database's file; None where a URL was given."""
        if _URL.match(self.db):
            return None
        return absolute_path(self.db, "KGEN_DB") if self.db else self.cache_dir / "tuning.db"

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Settings from KGEN_* in `env` (the process's own when None); unset and empty are alike.

        Raises UsageError for a value that can not be used, naming the variable.
        """
        env = os.environ if env is None else env
        record, misses = recordings(env)
        return cls(
            cache_dir=_cache_dir(env),
            db=env.get("KGEN_DB", ""),
            compiler=env.get("KGEN_COMPILER") or "auto",
            cuda_home=env.get("CUDA_HOME") or env.get("CUDA_PATH") or "",
            jobs=int(_number(env, "KGEN_JOBS", _cpus())),
            compile_timeout_s=_number(env, "KGEN_COMPILE_TIMEOUT_S", cls.compile_timeout_s),
            trial_timeout_s=_number(env, "KGEN_TRIAL_TIMEOUT_S", cls.trial_timeout_s),
            log_level=(env.get("KGEN_LOG_LEVEL") or "warning").lower(),
            record=record,
            misses=misses,
            foreign=_flag(env, "KGEN_FOREIGN"),
            nvtx=_flag(env, "KGEN_NVTX"),
        )


def recordings(env: Mapping[str, str] | None = None) -> tuple[str, str]:
    """KGEN_RECORD and KGEN_MISSES alone: a call that needs nothing else minds no other variable."""
    env = os.environ if env is None else env
    return env.get("KGEN_RECORD", ""), env.get("KGEN_MISSES", "")


def batch_invariant_by_default(env: Mapping[str, str] | None = None) -> bool:
    """KGEN_BATCH_INVARIANT alone: 1 or true, 0 or false; unset and empty mean false.

    Raises UsageError for another value.
    """
    return _flag(os.environ if env is None else env, "KGEN_BATCH_INVARIANT")


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "").lower()
    if value not in ("", "0", "1", "false", "true"):
        raise UsageError(f"{name}={value!r}: expected 1 or 0, true or false")
    return value in ("1", "true")


def wants_checks(env: Mapping[str, str] | None = None) -> bool:
    """KGEN_CHECK alone: whether calls look at the values of indices, offsets and counts first.

    Raises UsageError for anything but 0 and 1.
    """
    text = (os.environ if env is None else env).get("KGEN_CHECK", "")
    if text not in ("", "0", "1"):
        raise UsageError(f"KGEN_CHECK={text!r}: expected 0 or 1")
    return text == "1"


def keys_dir(env: Mapping[str, str] | None = None) -> Path:
    """Where the signing key and the list of trusted keys lie: KGEN_KEYS_DIR, else kgen in
    XDG_CONFIG_HOME, else ~/.config/kgen. Raises UsageError for a path that can not be used.
    """
    env = os.environ if env is None else env
    if given := env.get("KGEN_KEYS_DIR"):
        return absolute_path(given, "KGEN_KEYS_DIR")
    base = Path(env.get("XDG_CONFIG_HOME", ""))
    if base.is_absolute():
        return base / "kgen"
    return _user_cache(env).with_name(".config") / "kgen"


def absolute_path(text: str, name: str) -> Path:
    """The path with `~` and the present folder put in; `name` is whose value `text` is.

    Raises UsageError where there is no such home, or no present folder.
    """
    try:
        return Path(text).expanduser().absolute()
    except (RuntimeError, OSError) as error:
        raise UsageError(f"{name}={text!r} is no usable path: {error}") from None


def _cache_dir(env: Mapping[str, str]) -> Path:
    if given := env.get("KGEN_CACHE_DIR"):
        return absolute_path(given, "KGEN_CACHE_DIR")
    base = Path(env.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():  # the XDG specification has relative paths ignored
        return base / "kgen"
    return _user_cache(env) / "kgen"


def _user_cache(env: Mapping[str, str]) -> Path:
    if home := env.get("HOME"):
        return Path(home) / ".cache"
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir) / ".cache"
    except KeyError:  # containers with random user ids have neither HOME nor an entry
        return Path(tempfile.gettempdir()) / f"uid-{os.getuid()}"


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name)
    if not text:
        return default
    kind = type(default)
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise UsageError(f"{name}={text!r}: expected {what}") from None


def _cpus() -> int:
    """CPUs this process may use; in a container or under taskset fewer than the machine has."""
    return len(os.sched_getaffinity(0)) or 1
