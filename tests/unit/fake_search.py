"""A GPU and a compiler for tests of kgen.search: they misbehave where they are told to.

Behaviours are keyed by str(config). Imported by child processes, so it loads neither torch nor
CUDA.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kgen.build import Cubin
from kgen.config import GemmConfig
from kgen.device import H200
from kgen.errors import (
    ArtifactError,
    CompileError,
    DriverError,
    GpuMissing,
    ImplausibleTime,
    LaunchError,
    RenderError,
    Untunable,
    WrongResult,
)
from kgen.foreign import ForeignSource
from kgen.problem import GemmProblem
from kgen.render import problem_class
from kgen.search.gpu_worker import Hello, Measured, Screened

DEVICE = replace(H200, measured=True)
GPU = "tests.unit.fake_search:FakeGpu"
NO_GPU = "tests.unit.fake_search:NoGpu"
BUILDER = "tests.unit.fake_search:FakeBuilder"


def time_us(problem: GemmProblem, config: GemmConfig) -> float:
    """A time that only depends on what is timed, well above any floor."""
    digest = hashlib.sha256(f"{problem} {config}".encode()).digest()
    return 1000.0 + digest[0] + digest[1] / 256


@dataclass
class FakeGpu:
    """The backend. `behaviours`: str(config) to hang, abort, segv, fault, wrong, refused, ...

    `starts` is a file: a process that finds it dies at once, so that only the first one starts.
    `untunable` lists problems (as shapes lines) that can not be opened, `fast` configurations
    that would be the fastest of all, `journal` a file that gets a line for every call, `spans`
    one that gets begin and end of every measurement. `flaky` passes alone, and faults with others
    and ever after.
    """

    behaviours: dict[str, str] = field(default_factory=dict)
    untunable: tuple[str, ...] = ()
    fast: tuple[str, ...] = ()
    open_behaviour: str = ""
    policy_behaviour: str = ""
    starts: str = ""
    journal: str = ""
    flaky: str = ""
    spans: str = ""
    uuid: str = "fake"
    trial_s: float = 0.0
    dead: bool = False
    problem: GemmProblem | None = None
    verified: dict[str, GemmConfig] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.starts and Path(self.starts).exists():
            os.abort()

    def hello(self) -> Hello:
        if self.starts:
            Path(self.starts).touch()
        return Hello(DEVICE, self.uuid, "580.1", (13, 0))

    def open(self, problem: GemmProblem) -> None:
        self._check_context()
        self._note(f"open {problem}")
        self.problem, self.verified = None, {}
        self._misbehave(self.open_behaviour)
        if str(problem) in self.untunable:
            raise Untunable(f"{problem}: needs 900 GiB, the GPU has 139")
        self.problem = problem

    def check_policy(self, policy: str) -> None:
        assert policy
        self._note(f"check {policy}")
        self._misbehave(self.policy_behaviour)

    def verify(self, cubin: Cubin) -> float:
        self._check_context()
        self._note(f"verify {cubin.config}")
        if str(cubin.config) == self.flaky and "flaky" in Path(self.journal).read_text():
            self._misbehave("fault")
        self._misbehave(self.behaviours.get(str(cubin.config), ""))
        self.verified[cubin.key] = cubin.config
        return 1.7e-3

    def launch(self, key: str, text: str) -> None:
        self._note(f"launch {self.verified[key]} in {text}")

    def hold(self, cubin: Cubin) -> float:
        self._check_context()
        self._note(f"hold {cubin.config}")
        self.verified[cubin.key] = cubin.config
        return 1.7e-3

    def time(
        self,
        keys: tuple[str, ...],
        policy: str,
        best_us: float | None = None,
        control: str = "",
    ) -> list[Measured]:
        begin = time.monotonic()
        control_us = self._us(self.verified[control]) if control else None
        time.sleep(self.trial_s * len(keys))
        configs = [self.verified[key] for key in keys]
        if len(keys) > 1 and self.flaky in map(str, configs):
            self._note("flaky")
            self._misbehave("fault")
        if self.spans:
            with Path(self.spans).open("a") as file:
                file.write(f"{begin} {time.monotonic()}\n")
        return [replace(self._time(config), control_us=control_us) for config in configs]

    def screen(
        self, cubins: Sequence[Cubin], policy: str, best_us: float, diary: str
    ) -> list[Screened]:
        self._check_context()
        self._note(f"screen {len(cubins)} {best_us:.2f}")
        found = []
        for index, cubin in enumerate(cubins):
            how = self.behaviours.get(str(cubin.config), "")
            late = how.startswith("late ")  # while it is timed, as far as anybody can tell
            Path(diary).write_text("" if late else str(index))
            how = how.removeprefix("late ")
            if how in ("wrong", "refused"):
                status = {"wrong": "wrong", "refused": "launch_failed"}[how]
                found.append(Screened(status, f"it is {how}", check_s=0.001))
                continue
            self._misbehave(how)
            measured = self._time(cubin.config)
            found.append(Screened("ok", "", measured, check_s=0.001, time_s=0.002))
        Path(diary).write_text("")
        return found

    def _time(self, config: GemmConfig) -> Measured:
        self._note(f"time {config}")
        if self.behaviours.get(str(config)) == "too fast":
            raise ImplausibleTime("1 us is below the floor of 5 us")
        us = self._us(config)
        clocks = {"sm_mhz": 1755, "mem_mhz": 3201}
        return Measured("cold", 1.7e-3, us, us - 1, us + 1, (us - 1, us, us + 1), clocks)

    def _us(self, config: GemmConfig) -> float:
        assert self.problem is not None
        return 500.0 if str(config) in self.fast else time_us(self.problem, config)

    def _misbehave(self, how: str) -> None:
        match how:
            case "hang":
                while True:
                    pass
            case "abort":
                os.abort()
            case "segv":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "fault":
                self.dead = True
                self._check_context()
            case "wrong":
                raise WrongResult("tile (3, 1): error 0.12, at most 0.004")
            case "refused":
                raise LaunchError("the driver refused 300000 bytes of shared memory")
            case "bug":
                raise ZeroDivisionError("a bug in the backend")

    def _check_context(self) -> None:
        if self.dead:
            raise DriverError("an illegal memory access was encountered", 700, fatal=True)

    def _note(self, line: str) -> None:
        if self.journal:
            with Path(self.journal).open("a") as file:
                file.write(line + "\n")


class NoGpu:
    """A machine without one."""

    def __init__(self, **_: Any) -> None:
        raise GpuMissing("no CUDA driver on this machine")


class Starter:
    """A service that starts a process of its own, as one that runs nvcc does."""

    def start_sleep(self) -> int:
        return subprocess.Popen(["sleep", "3600"]).pid


@dataclass
class FakeBuilder:
    """The compiler. `behaviours`: str(config) to fail, abort, hang or be unrenderable.

    `journal` as above. All configurations in `shared` have the cubin of the first.
    """

    behaviours: dict[str, str] = field(default_factory=dict)
    journal: str = ""
    build_s: float = 0.0
    shared: tuple[str, ...] = ()
    version: str = "1"
    settings: Any = None
    driver_cuda: tuple[int, int] | None = None

    sass_passes: tuple[str, ...] = ("none",)

    def replica(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def facts(self) -> dict[str, str]:
        return {"compiler": "fake-1.0", "template_hash": "f" * 64, "generator": "kgen test"}

    def key(self, problem: GemmProblem, config: GemmConfig) -> str:
        if self.behaviours.get(str(config)) == "unrenderable":
            raise RenderError("the template refuses")
        name = self.shared[0] if str(config) in self.shared else str(config)
        text = f"{self.version} {problem_class(problem, config)} {name}"
        return hashlib.sha256(text.encode()).hexdigest()

    def build(self, problem: GemmProblem, config: GemmConfig) -> Cubin:
        if self.journal:
            with Path(self.journal).open("a") as file:
                file.write(f"build {config}\n")
        time.sleep(self.build_s)
        match self.behaviours.get(str(config), ""):
            case "unrenderable":
                raise RenderError("the template refuses")
            case "fail":
                raise CompileError("ptxas spilled 16 bytes", "the log")
            case "abort":
                os.abort()
            case "hang":
                time.sleep(3600)
        return self._cubin(self.key(problem, config), problem, config)

    def build_foreign(self, source: ForeignSource, problem: GemmProblem) -> Cubin:
        if "syntax error" in source.text:
            raise CompileError(f"{source.name}: expected a ';'", "the log")
        key = hashlib.sha256(f"foreign {source.sha256}".encode()).hexdigest()
        return self._cubin(key, problem, source.config)

    def stored_foreign(self, key: str, problem: GemmProblem, config: GemmConfig) -> Cubin:
        if self.behaviours.get(key) == "gone":
            raise ArtifactError("no kernel by hand with that key: race its source again")
        return self._cubin(key, problem, config)

    def _cubin(self, key: str, problem: GemmProblem, config: GemmConfig) -> Cubin:
        return Cubin(
            key=key,
            data=b"\x7fELF" + key.encode(),
            entry="kgen_gemm",
            config=config,
            problem=problem,
            registers=168,
            spill_bytes=0,
            from_cache=False,
            source_path="",
            log="",
        )
