"""Does the profiler tell calls apart as kgen.measure expects? Run once on a GPU machine.

    python tools/probe_measure.py

Prints the raw device events of one session with a flush, a torch call (a memset and a kernel) and a
kernel launched through the driver; then known spin kernels timed by profiler, by CUDA events and
by their own clock; then what a session costs. Every line that matters starts with ok or FAIL; the
exit code is the number of failures.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from kgen import measure
from kgen.compiler import compile_source
from kgen.nvml import read_clocks
from kgen.runtime import driver
from kgen.settings import Settings
from kgen.toolchain import default_compiler

SPIN = """
typedef unsigned long long u64;
extern "C" __global__ void spin(const __grid_constant__ u64 nanoseconds) {
    u64 start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - start < nanoseconds);
}
"""
failures = 0


def say(good: bool, words: str) -> None:
    """One verdict."""
    global failures  # noqa: PLW0603
    failures += not good
    print("ok  " if good else "FAIL", words, flush=True)


class Spin:
    """A kernel that runs for a known time, launched as kgen launches: no torch op."""

    def __init__(self) -> None:
        compiled = compile_source(SPIN, default_compiler(Settings.from_env()), entry="spin")
        torch.zeros(1, device="cuda")
        _, self._function = driver.load_function(compiled.cubin, "spin", 0, 0)

    def call(self, microseconds: float) -> Callable[[], None]:
        """A launch on the current stream."""
        value = ctypes.c_uint64(int(1000 * microseconds))
        params = (ctypes.c_void_p * 1)(ctypes.addressof(value))
        config = driver.LaunchConfig()
        config.grid[:], config.block[:] = (1, 1, 1), (32, 1, 1)

        def launch() -> None:
            _ = value  # kept alive with the call
            config.stream = torch._C._cuda_getCurrentRawStream(0)
            code = driver.launch()(
                ctypes.addressof(config), self._function, ctypes.addressof(params), None
            )
            if code:
                driver.raise_for(code, "spin")

        return launch


def steps_of(*calls: Callable[[], object]) -> list[measure.Step]:
    """The calls as steps of one session."""
    return [measure.Step(f"kgen.measure/{i}", str(i), call) for i, call in enumerate(calls)]


def session(steps: list[measure.Step], flush: Callable[[], object]) -> list[Any]:
    """Raw events of a session made as kgen.measure makes it."""
    kept: list[Any] = []
    original = measure._raw_events

    def keep(profiler: Any) -> list[Any]:
        kept.extend(original(profiler))
        return kept

    measure._raw_events = keep
    try:
        measure._profile(steps, flush)
    except Exception as error:
        say(False, f"session: {type(error).__name__}: {error}")
    finally:
        measure._raw_events = original
    return kept


def show_structure(spin: Spin, flush: Callable[[], object]) -> None:
    """The raw device events, and whether both calls have exactly their own activities."""
    memory = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")

    def torch_call() -> None:
        memory.zero_()  # a memset
        memory.add_(1)  # a kernel

    events = session(steps_of(torch_call, spin.call(20)), flush)
    on_device = [e for e in events if e.device_type().name == "CUDA"]
    if not on_device:
        say(False, f"no device event among {len(events)}: the profiler can not trace here")
        return
    origin = min(e.start_ns() for e in on_device)
    print(f"{len(events)} events, on the device:  start us, us, type, correlation, linked, name")
    for e in sorted(on_device, key=lambda e: (e.start_ns(), -e.duration_ns())):
        kind = e.activity_type() if hasattr(e, "activity_type") else "?"
        print(
            f"  {(e.start_ns() - origin) / 1e3:9.1f} {e.duration_ns() / 1e3:8.2f} {kind:20s} "
            f"{e.correlation_id():6d} {e.linked_correlation_id():6d} {e.name()[:48]}"
        )
    ranges = measure.device_ranges(on_device)
    labels = [r.label for r in ranges]
    say(labels.count("kgen.measure/0") == 1, "torch call: one range on the device")
    say(labels.count("kgen.measure/1") == 1, "driver launch: one range on the device")
    inside = {
        r.label: [
            e.name()[:24]
            for e in on_device
            if r.start_ns <= e.start_ns() < r.end_ns and not e.name().startswith("kgen.measure/")
        ]
        for r in ranges
    }
    say(len(inside.get("kgen.measure/0", ())) == 2, f"torch call: {inside.get('kgen.measure/0')}")
    say(len(inside.get("kgen.measure/1", ())) == 1, f"launch: {inside.get('kgen.measure/1')}")


def compare_timers(spin: Spin, flush: Callable[[], object]) -> None:
    """Known durations by both timers; a torch copy by both timers."""
    source = torch.empty(1 << 27, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    calls = {
        "spin 5 us": spin.call(5),
        "spin 50 us": spin.call(50),
        "torch copy 128 MiB": lambda: target.copy_(source),
    }
    steps = measure.schedule(calls, 16)
    for name in calls:
        times = {}
        for timer in ("profiler", "events"):
            samples, clocks = measure._TIMERS[timer](steps, flush)
            own = sorted(samples[s.label] for s in steps if s.name == name)
            times[timer] = own[len(own) // 2]
        profiler, events = times["profiler"], times["events"]
        words = f"{name}: profiler {profiler:.2f} us, events {events:.2f} us"
        known = float(name.split()[1]) if name.startswith("spin") else profiler
        say(known <= profiler < known + 4 and -0.5 < events - profiler < 8, words)
        print(f"     clocks in flight: {clocks}")


def cost(flush: Callable[[], object], spin: Spin) -> None:
    """What a session takes beside the calls."""
    steps = measure.schedule({"x": spin.call(5)}, 16)
    for _ in range(3):
        start = time.perf_counter()
        measure._profile(steps, flush)
        profiled = time.perf_counter() - start
        start = time.perf_counter()
        measure._with_events(steps, flush)
        print(
            f"     session of 16 calls: {1e3 * profiled:.1f} ms, "
            f"with events {1e3 * (time.perf_counter() - start):.1f} ms"
        )


def main() -> int:
    """All of it."""
    device = driver.device_facts(0)
    print(
        f"torch {torch.__version__}, {device.name}, driver for CUDA {device.driver_version}, "
        f"L2 {device.l2_bytes >> 20} MiB, {device.dram_gbps:.0f} GB/s sustained"
    )
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    facts = read_clocks(uuid)
    say(facts["sm_mhz"] is not None, f"NVML clocks of {uuid}: {facts}")
    torch.ones(1, device="cuda")  # makes the context
    measure._reset_persisting_l2()
    flush = measure._flush_for(device)
    spin = Spin()
    show_structure(spin, flush)
    compare_timers(spin, flush)
    cost(flush, spin)
    print("all as expected" if not failures else f"{failures} failures")
    return failures


if __name__ == "__main__":
    sys.exit(main())
