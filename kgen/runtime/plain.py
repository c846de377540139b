"""Kernels beside the GEMM: casts, gathers. `KERNELS.find` gives a loaded one, `launch` starts it.

Takes a `Spec`, the template and its choices; builds through the artifact store with the compiler
that the settings choose, loads once a device. Where that can not be, says so once, and the caller's
reference answers. Must not import search, verify or measure.
"""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import dataclass
from typing import Any

import torch

from kgen.errors import DriverError, KgenError, LaunchError
from kgen.runtime import driver
from kgen.runtime.dispatch import (
    Capturing,
    StoredBuilder,
    hopper_ordinal,
    is_capturing,
    raise_if_final,
)
from kgen.runtime.kernel import current_device, current_stream
from kgen.runtime.stats import Stats
from kgen.settings import Settings


@dataclass(frozen=True, eq=False)
class Spec:
    """A kernel by template, entry and variables, with its launch geometry. Equal only to itself:
    make each once."""

    template: str
    entry: str
    threads: int
    variables: dict[str, Any]
    smem_bytes: int = 0


class PlainKernel:
    """A kernel loaded on one device, which takes one struct as its argument."""

    def __init__(self, spec: Spec, function: int, ordinal: int) -> None:
        self._spec, self._function, self.ordinal = spec, function, ordinal

    def launch(self, grid: int, args: bytes, smem_bytes: int | None = None) -> None:
        """Start `grid` CTAs (none: nothing) on the current stream of the kernel's device.

        Does not wait. Raises DriverError, `fatal` when the context is lost.
        """
        if not grid:
            return
        if current_device() == self.ordinal:
            self._launch(grid, args, smem_bytes)
        else:
            with torch.cuda.device(self.ordinal):
                self._launch(grid, args, smem_bytes)

    def _launch(self, grid: int, args: bytes, smem_bytes: int | None) -> None:
        # Made anew for each call: threads may launch at once, and the driver copies both.
        config = driver.LaunchConfig()
        config.grid[:] = (grid, 1, 1)
        config.block[:] = (self._spec.threads, 1, 1)
        config.smem_bytes = self._spec.smem_bytes if smem_bytes is None else smem_bytes
        config.stream = current_stream(self.ordinal)
        memory = ctypes.create_string_buffer(args, len(args))
        params = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
        call = ctypes.addressof(config), self._function, ctypes.addressof(params), None
        code = driver.launch()(*call)
        if code in (driver.INVALID_CONTEXT, driver.INVALID_HANDLE):
            with driver.current_device(self.ordinal):  # a thread that never touched CUDA
                code = driver.launch()(*call)
        if code:
            driver.raise_for(code, f"launch of {self._spec.entry}, grid {grid}")


class PlainKernels:
    """Every kernel of this kind in the process. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = Stats()
        self._builder: StoredBuilder | KgenError | None = None
        self._kernels: dict[tuple[int, Spec], PlainKernel | None] = {}
        #: Why kernels could not be had, so that references answer instead.
        self.failures: list[str] = []
        #: What callers keep beside their kernels; it goes when those go.
        self.plans: dict[Any, Any] = {}

    def find(self, device: torch.device, *specs: Spec) -> list[PlainKernel] | None:
        """The kernels for tensors on a device; None where the reference must answer.

        Raises LaunchError when one would have to be loaded while a CUDA graph is captured,
        DriverError when the context is lost.
        """
        ordinal = hopper_ordinal(device)
        if ordinal is None:
            return None
        found = []
        for spec in specs:
            try:
                kernel = self._kernels[ordinal, spec]
            except KeyError:
                kernel = self._load_once(ordinal, spec)
            if kernel is None:
                return None
            found.append(kernel)
        return found

    def num_sms(self, device: torch.device) -> int:
        """SMs of a device that `find` found kernels for."""
        return driver.device_facts(hopper_ordinal(device) or 0).num_sms

    def reset(self, builder: StoredBuilder | None = None) -> None:
        """Forget every kernel, and build with `builder` (default: as the settings say) from now."""
        self._lock = threading.Lock()
        self._kernels.clear()
        self.failures.clear()
        self.plans.clear()
        self._builder = builder
        self._stats.after_fork()

    def _load_once(self, ordinal: int, spec: Spec) -> PlainKernel | None:
        with self._lock:
            if (ordinal, spec) not in self._kernels:
                if is_capturing(ordinal):
                    raise Capturing(
                        f"{spec.entry} is not loaded yet, and a CUDA graph is being captured, "
                        "which forbids loading it: make the same call once before the capture"
                    )
                self._kernels[ordinal, spec] = self._load(ordinal, spec)
            return self._kernels[ordinal, spec]

    def _load(self, ordinal: int, spec: Spec) -> PlainKernel | None:
        from kgen.render import render_plain

        try:
            cubin = self._made_builder().build_plain(
                render_plain(spec.template, spec.entry, spec.variables)
            )
            function = driver.load_function(cubin.data, cubin.entry, spec.smem_bytes, ordinal)[1]
        except KgenError as error:
            raise_if_final(error)
            if isinstance(error, DriverError):
                error = LaunchError(f"{spec.entry} can not be loaded on cuda:{ordinal}: {error}")
            self.failures.append(str(error))
            self._stats.warn_once(
                str(error), f"kgen answers with the slow reference on cuda:{ordinal}: {error}"
            )
            return None
        return PlainKernel(spec, function, ordinal)

    def _made_builder(self) -> StoredBuilder:
        if self._builder is None:
            try:
                self._builder = StoredBuilder(Settings.from_env())
            except KgenError as error:
                self._builder = error
        if isinstance(self._builder, KgenError):
            raise self._builder
        return self._builder


KERNELS = PlainKernels()
# Handles of the parent mean nothing in a child, and its lock may have been held.
os.register_at_fork(after_in_child=KERNELS.reset)
