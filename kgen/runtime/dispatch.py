"""From a problem to a loaded kernel on one device: `Dispatcher.plan` -> `Plan`.

Takes a problem; gives the kernel that answers it, or why the reference must. Builds each
(problem class, configuration) once, asks the database once for each class; a problem seen before
costs one dictionary look-up, no lock. Never raises because of the database, a compiler or a
cubin that can not be loaded: the plan then says so. Must not import search, verify or measure.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final, Protocol

import torch

from kgen.config import GemmConfig
from kgen.errors import DatabaseError, DriverError, KgenError, LaunchError
from kgen.problem import GemmProblem
from kgen.runtime import driver
from kgen.runtime.counting import counted
from kgen.runtime.kernel import Kernel
from kgen.runtime.kernels import KERNELS
from kgen.runtime.lookup import Choice, Winner, choose, default_for, read_winners
from kgen.runtime.stats import Stats
from kgen.settings import Settings

if TYPE_CHECKING:
    from kgen.build import Cubin, PlainCubin
    from kgen.render import PlainSource

#: Problems remembered. A server sees many M; a forgotten one is looked up in memory again.
_MAX_PLANS: Final = 1 << 16
#: Configurations tried after the chosen one and the default before the reference must answer.
_SPARE_CONFIGS: Final = 3
#: Origins of choices that were measured for the problem itself, or whose cost over a range of M
#: was; the others are guesses.
_MEASURED: Final = ("tuned", "foreign", "table")


class Builder(Protocol):
    """What makes cubins for the dispatcher."""

    @property
    def compiler_id(self) -> str:
        """The compiler's name and version, for messages."""

    def key(self, problem: GemmProblem, config: GemmConfig) -> str:
        """The key of the cubin that `build` would give."""

    def build(self, problem: GemmProblem, config: GemmConfig) -> Cubin:
        """The configuration's cubin; raises a KgenError."""

    def stored_foreign(self, key: str, problem: GemmProblem, config: GemmConfig) -> Cubin:
        """The cubin of a source by hand that was built before; raises a KgenError."""


@dataclass(frozen=True)
class Plan:
    """How a problem is answered: by `kernel` with the choice behind it, or, when that is None, by
    the reference because of `reason`."""

    kernel: Kernel | None
    choice: Choice | None = None
    reason: str = ""


class Dispatcher:
    """Plans for one device. Threads may share it."""

    def __init__(
        self,
        ordinal: int,
        builder: Builder,
        db_url: str,
        stats: Stats,
        *,
        foreign: bool = False,
        nvtx: bool = False,
    ) -> None:
        """`foreign`: kernels of sources by hand may answer; `nvtx`: calls are marked for profilers.

        Raises DriverError when the device's facts can not be had.
        """
        self.ordinal = ordinal
        self.device = driver.device_facts(ordinal)
        self._builder = builder
        self._db_url = db_url
        self._stats = stats
        self._foreign = foreign
        self._nvtx = nvtx
        self._lock = threading.RLock()
        self._plans: dict[GemmProblem, Plan] = {}
        self._winners: dict[GemmProblem, tuple[Winner, ...]] = {}
        self._kernels: dict[tuple[str, GemmConfig, str], Kernel] = {}
        self._failed: dict[tuple[str, GemmConfig, str], KgenError] = {}
        self._database_lost = False

    def plan(self, problem: GemmProblem) -> Plan:
        """The plan for a problem; the first call for it may build and load a kernel.

        Raises LaunchError when that is needed while the current stream is being captured, and
        DriverError when the context is lost.
        """
        plan = self._plans.get(problem)
        if plan is None:
            with self._lock:
                plan = self._plans.get(problem) or self._make(problem)
                if len(self._plans) >= _MAX_PLANS:
                    self._plans.clear()
                self._plans[problem] = plan
        return plan

    def _make(self, problem: GemmProblem) -> Plan:
        failures = []
        try:
            choice = self._choose(problem)
            for candidate in self._candidates(problem, choice):
                try:
                    kernel = self._kernel(problem, candidate)
                except KgenError as error:
                    raise_if_final(error)
                    failures.append(error)
                else:
                    self._count(problem, candidate)
                    guessed = candidate.origin not in _MEASURED
                    kernel = counted(kernel, problem, guessed, marked=self._nvtx)
                    return Plan(kernel, candidate)
        except KgenError as error:
            raise_if_final(error)
            failures.append(error)
        return Plan(None, None, str(failures[0]))

    def _choose(self, problem: GemmProblem, *, foreign: bool = True) -> Choice:
        """The choice from what was tuned; without `foreign` no source by hand."""
        winners = [w for w in self._winners_of(problem) if foreign or not w.foreign]
        choice = choose(problem, self.device, winners, lambda c: self._builder.key(problem, c))
        if choice.stale:
            self._stats.add("stale", choice.stale)
            self._stats.warn_once(
                "stale",
                f"{choice.stale} tuned configurations for [{problem}] were verified as other "
                f"cubins than {self._builder.compiler_id} and this kgen make, and are not used: "
                "run `kgen tune --refresh`",
            )
        return choice

    def _winners_of(self, problem: GemmProblem) -> tuple[Winner, ...]:
        family = problem.with_m(1)
        if family not in self._winners:
            self._refuse_capture(problem)
            self._winners[family] = self._read(problem)
        return self._winners[family]

    def _read(self, problem: GemmProblem) -> tuple[Winner, ...]:
        if self._database_lost:
            return ()
        try:
            return read_winners(problem, self.device, self._db_url, self._foreign)
        except DatabaseError as error:
            # A database that fails once may make every first call wait: not asked again.
            self._database_lost = True
            self._stats.warn_once(
                "database", f"kgen runs on default configurations, not tuned ones: {error}"
            )
            return ()

    def _candidates(self, problem: GemmProblem, choice: Choice) -> Iterator[Choice]:
        yield choice
        if choice.foreign_key:
            yield self._choose(problem, foreign=False)
        default = default_for(problem, self.device)
        if default != choice.config:
            yield Choice(default, "default")
        from kgen.heuristic import rank

        for config in rank(problem, self.device)[:_SPARE_CONFIGS]:
            yield Choice(config, "default")

    def _kernel(self, problem: GemmProblem, choice: Choice) -> Kernel:
        from kgen.render import problem_class

        key = (problem_class(problem, choice.config), choice.config, choice.foreign_key)
        if key in self._failed:
            raise self._failed[key]
        if key not in self._kernels:
            self._refuse_capture(problem)
            try:
                self._kernels[key] = self._load(problem, choice)
            except KgenError as error:
                self._failed[key] = error
                raise
        return self._kernels[key]

    def _load(self, problem: GemmProblem, choice: Choice) -> Kernel:
        config = choice.config
        if choice.foreign_key:
            cubin = self._builder.stored_foreign(choice.foreign_key, problem, config)
        else:
            cubin = self._builder.build(problem, config)
        self._stats.add("cache_hits" if cubin.from_cache else "compiles")
        kernel = KERNELS[problem.kind].load(
            cubin.data,
            cubin.entry,
            config,
            problem,
            self.ordinal,
            made_by=self._builder.compiler_id,
        )
        self._stats.add("loads")
        return kernel

    def _count(self, problem: GemmProblem, choice: Choice) -> None:
        if choice.origin in _MEASURED:
            self._stats.add("database_hits")
            if choice.origin == "table":
                self._stats.add("tables")
            return
        if choice.origin == "neighbour":
            self._stats.add("neighbours")
        self._stats.miss(problem)

    def _refuse_capture(self, problem: GemmProblem) -> None:
        if is_capturing(self.ordinal):
            raise Capturing(
                f"[{problem}] has no loaded kernel yet, and a CUDA graph is being captured, which "
                f"forbids loading one: before the capture, {_how_to_warm(problem)}"
            )


def _how_to_warm(problem: GemmProblem) -> str:
    sizes = f"m={problem.m}, n={problem.n}, k={problem.k}"
    if problem.kind != "dense":
        sizes += f', kind="{problem.kind}", groups={problem.groups}'
    return f"run the same call once, or kgen.runtime.gemm.warm_up({sizes}, ...)"


class Capturing(LaunchError):
    """A kernel was needed that can not be loaded while a graph is captured."""


def is_capturing(ordinal: int) -> bool:
    """Whether torch's current stream of a device is being captured into a graph."""
    if not torch.cuda.is_available():
        return False
    with torch.cuda.device(ordinal):
        return bool(torch.cuda.is_current_stream_capturing())


def hopper_ordinal(device: torch.device) -> int | None:
    """The CUDA ordinal of a Hopper GPU; None for a CPU or a GPU that no kernel is made for."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    return ordinal if _is_hopper(ordinal) else None


@cache
def _is_hopper(ordinal: int) -> bool:
    return torch.cuda.get_device_capability(ordinal) == (9, 0)


def raise_if_final(error: KgenError) -> None:
    """A lost context and a capture are the caller's to know; the rest has a fallback."""
    if isinstance(error, Capturing) or (isinstance(error, DriverError) and error.fatal):
        raise error


class StoredBuilder:
    """Builds through the artifact store, with the compiler that the settings choose.

    Raises CompilerMissing when there is none whose cubins the driver can load.
    """

    def __init__(self, settings: Settings) -> None:
        from kgen.cache.artifacts import ArtifactStore
        from kgen.toolchain import default_compiler

        self._compiler = default_compiler(settings, driver.driver_version())
        self._store = ArtifactStore(settings.cache_dir)
        self._timeout_s = settings.compile_timeout_s

    @property
    def compiler_id(self) -> str:
        """As in Builder."""
        return self._compiler.id

    def key(self, problem: GemmProblem, config: GemmConfig) -> str:
        """As in Builder."""
        from kgen.build import key_of

        return key_of(problem, config, self._compiler)

    def build(self, problem: GemmProblem, config: GemmConfig) -> Cubin:
        """As in Builder."""
        from kgen.build import build

        return build(problem, config, self._compiler, self._store, self._timeout_s)

    def stored_foreign(self, key: str, problem: GemmProblem, config: GemmConfig) -> Cubin:
        """As in Builder."""
        from kgen.build import stored_foreign

        return stored_foreign(key, problem, config, self._store)

    def build_plain(self, source: PlainSource) -> PlainCubin:
        """The cubin of a kernel beside the GEMM; raises a KgenError."""
        from kgen.build import build_plain

        return build_plain(source, self._compiler, self._store, self._timeout_s)
