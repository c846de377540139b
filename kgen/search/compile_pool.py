"""Compiles ahead of the GPU in spawned processes: `CompilePool`.

Takes problems and configurations, gives futures of cubins. A compiler that crashes or hangs costs
one candidate: its process is replaced and the future raises CompileError. Must not import torch,
CUDA or the compiler here; the children do.
"""

from __future__ import annotations

import queue
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Protocol

from kgen.config import GemmConfig
from kgen.errors import CompileError, WorkerDied, WorkerTimeout
from kgen.problem import GemmProblem
from kgen.render import problem_class
from kgen.search.child import Child
from kgen.search.stop import StopFlag

if TYPE_CHECKING:
    from kgen.build import Cubin
    from kgen.foreign import ForeignSource

#: A child that loads a compiler may take this long to be ready on a busy machine.
START_TIMEOUT_S: Final = 120.0


class Builder(Protocol):
    """What a compile process runs; the tuning process has one too, which never builds."""

    @property
    def sass_passes(self) -> tuple[str, ...]:
        """The values that the axis of that name has here."""

    def replica(self) -> dict[str, Any]:
        """Keyword arguments with which the factory makes the same builder elsewhere."""

    def facts(self) -> dict[str, str]:
        """compiler, template_hash and generator, as records keep them."""

    def key(self, problem: GemmProblem, config: GemmConfig) -> str:
        """The key that the configuration's cubin has, or would have; builds nothing."""

    def build(self, problem: GemmProblem, config: GemmConfig) -> Cubin:
        """The configuration's cubin; raises CompileError or another KgenError."""

    def build_foreign(self, source: ForeignSource, problem: GemmProblem) -> Cubin:
        """The cubin of a source by hand; raises CompileError or another KgenError."""

    def stored_foreign(self, key: str, problem: GemmProblem, config: GemmConfig) -> Cubin:
        """One that was built before; raises ArtifactError where it is gone."""


class CompilePool:
    """`jobs` processes that build cubins, each distinct source once in the life of the pool.

    Processes start when first needed. `replaced` holds the reason of every child that was lost.
    """

    def __init__(self, target: str, options: dict[str, Any], jobs: int, timeout_s: float) -> None:
        self._start = (target, options)
        self._timeout_s = timeout_s
        self._stop = StopFlag()
        self._idle: queue.SimpleQueue[Child] = queue.SimpleQueue()
        self._futures: dict[tuple[str, GemmConfig], Future[Cubin]] = {}
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix="kgen-compile")
        self.jobs = jobs
        self.replaced: queue.SimpleQueue[str] = queue.SimpleQueue()

    @property
    def num_waiting(self) -> int:
        """Builds that were asked for and are not done."""
        return sum(not future.done() for future in self._futures.values())

    def submit(self, problem: GemmProblem, config: GemmConfig) -> Future[Cubin]:
        """The cubin to be, shared by every problem whose source is the same."""
        key = (problem_class(problem, config), config)
        future = self._futures.get(key)
        if future is None or future.cancelled():
            future = self._threads.submit(self._build, problem, config)
            self._futures[key] = future
        return future

    def counts(self) -> tuple[int, int]:
        """Cubins compiled, and cubins found in the artifact store."""
        cubins = [f.result() for f in self._futures.values() if _succeeded(f)]
        num_cached = sum(cubin.from_cache for cubin in cubins)
        return len(cubins) - num_cached, num_cached

    def close(self) -> None:
        """Drop what waits, kill what runs, end the processes."""
        self._stop.set()
        self._threads.shutdown(wait=True, cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().kill()

    def _build(self, problem: GemmProblem, config: GemmConfig) -> Cubin:
        child = self._take()
        try:
            cubin: Cubin = child.call("build", problem, config, timeout_s=self._timeout_s)
        except (WorkerDied, WorkerTimeout) as error:
            self.replaced.put(str(error))
            raise CompileError(f"the compile of {config} was lost: {error}", str(error)) from None
        finally:
            if child.alive:
                self._idle.put(child)
        return cubin

    def _take(self) -> Child:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            target, options = self._start
            return Child(target, options, START_TIMEOUT_S, self._stop)


def _succeeded(future: Future[Cubin]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
