"""How long does a call take? Named policies; tuner and bench measure by the same one.

Takes verified calls, gives `Timing`. A call's time runs from the start of its first device activity
to the end of its last, memsets and conversions included. Which activities are the call's own, and
not the flush's before it, is known by an explicit range around the call: the profiler tags every
driver call with the innermost open range (CUPTI external correlation), whoever makes it, and gives
per range and stream the span from first to last activity. No kernel is ever told by its name.
Must not import build, search or cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch

from kgen.device import Device
from kgen.errors import ImplausibleTime, MeasureError, UsageError
from kgen.nvml import read_clocks
from kgen.problem import D_DTYPE_BYTES, GemmProblem
from kgen.runtime import driver
from kgen.verify import Verified

Call = Callable[[], object]

#: Writing this many times the L2's size leaves nothing in it that a call could use, in any
#: replacement order seen; on an H200 about 500 MB, as the published baselines flushed.
FLUSH_L2_MULTIPLE: Final = 8
#: Of what the device's bandwidth allows, the share below which a cold time can not be true.
FLOOR_MARGIN: Final = 0.8
#: A call that takes so many times the fastest one is out of the race: FAR_ROUNDS rounds say enough.
FAR_MULTIPLE: Final = 2.0
FAR_ROUNDS: Final = 2
#: Rounds of a control kernel: enough to see clocks or other work move times by some percent.
CONTROL_ROUNDS: Final = 4
_PREFIX: Final = "kgen.measure/"


@dataclass(frozen=True)
class Policy:
    """How calls are timed.

    timer        profiler: device time of a call's own activities, from CUPTI. events: CUDA events
                 around the call, about 2 us more, where the profiler can not be used
    flush_l2     write a buffer larger than L2 before each call, outside its time
    rounds       calls of each kind that are timed; kinds alternate, another first in each round
    warmup_ms    calls and flushes at least so long before, so that clocks are up and steady
    rotates      each call takes the next of several sets of inputs, together larger than L2, as
                 the layers of a model do: the caller's business
    graph_calls  so many calls are captured in one CUDA graph, whose replay is timed and divided,
                 as models with small kernels are run; 0: no graph
    """

    name: str
    timer: str
    flush_l2: bool
    rounds: int = 16
    warmup_ms: float = 30.0
    rotates: bool = False
    graph_calls: int = 0


POLICIES: Final = {
    policy.name: policy
    for policy in (
        Policy("cold", "profiler", flush_l2=True),
        Policy("hot", "profiler", flush_l2=False),
        Policy("cold-events", "events", flush_l2=True),
        Policy("rotating", "profiler", flush_l2=False, rotates=True),
        # Events: their 2 us are shared by the calls, and the gaps between these belong to it.
        Policy("graph", "events", flush_l2=False, rotates=True, graph_calls=20),
        # Many kernels at once, for a timing table: the fastest are measured again.
        Policy("screen", "profiler", flush_l2=True, rounds=6, warmup_ms=5.0),
    )
}
DEFAULT_POLICY: Final = "cold"


def policy_named(name: str) -> Policy:
    """The policy of that name. Raises UsageError.

    No name stands for another one: records are compared by it.
    """
    if name not in POLICIES:
        raise UsageError(f"measuring policy {name!r}: expected one of {', '.join(POLICIES)}")
    return POLICIES[name]


@dataclass(frozen=True)
class Timing:
    """Device times of one call, in microseconds, and the clocks seen while they were taken."""

    policy: str
    median_us: float
    p10_us: float
    p90_us: float
    samples_us: tuple[float, ...]
    clocks: dict[str, Any] = field(default_factory=dict)

    @property
    def spread_us(self) -> float:
        """90th minus 10th percentile."""
        return self.p90_us - self.p10_us


class Range(NamedTuple):
    """What one stream did inside one range: from the first activity's start to the last's end."""

    label: str
    start_ns: int
    end_ns: int


class Step(NamedTuple):
    """One timed call of a session: its label, whose it is, and the call."""

    label: str
    name: str
    call: Call


def measure(verified: Verified, call: Call, policy: Policy, device: Device | None = None) -> Timing:
    """Time one call; see `measure_many`."""
    return measure_many({"call": (verified, call)}, policy, device)["call"]


def measure_many(
    calls: Mapping[str, tuple[Verified, Call]],
    policy: Policy,
    device: Device | None = None,
    best_us: float | None = None,
    control: str = "",
) -> dict[str, Timing]:
    """Time calls on the current device and stream, alternating, each as often.

    `device` gives L2 size and bandwidth (default: read from the driver). With `best_us`, the
    fastest time known (inf: none yet), calls that the warm-up shows to take FAR_MULTIPLE times
    that, or the fastest here, are timed FAR_ROUNDS times only: fewer samples say so. `control`
    names the call that is only there to be compared with itself, CONTROL_ROUNDS times. Calls must
    not wait for the device, nor open profiler ranges of their own; for a policy with a graph they
    must launch on torch's current stream. Raises MeasureError for a time
    below what the problem's bytes need, for a call that did nothing on the device, and when the
    profiler can not be used.
    """
    if device is None:
        device = driver.device_facts(torch.cuda.current_device())
    flush = _flush_for(device) if policy.flush_l2 else _nothing
    own_calls = {name: call for name, (_, call) in calls.items()}
    if policy.graph_calls:
        own_calls = {name: _captured(c, policy.graph_calls) for name, c in own_calls.items()}
    per_call = max(1, policy.graph_calls)
    rough_us = _warm_up(own_calls, flush, policy.warmup_ms)
    rough_us = {name: us / per_call for name, us in rough_us.items()}
    far = frozenset[str]() if best_us is None else far_calls(rough_us, best_us)
    fewer = dict.fromkeys(far, FAR_ROUNDS) | ({control: CONTROL_ROUNDS} if control else {})
    _reset_persisting_l2()
    steps = schedule(own_calls, policy.rounds, fewer)
    samples, clocks = _TIMERS[policy.timer](steps, flush)
    timings = {}
    for name, (verified, _) in calls.items():
        own = [samples[step.label] / per_call for step in steps if step.name == name]
        floor = floor_us(verified.problem, device) if policy.flush_l2 else 0.0
        timings[name] = summarise(name, own, floor, policy, clocks)
    return timings


def _captured(call: Call, count: int) -> Call:
    """A CUDA graph of `count` calls, to be replayed; `call` launches on torch's current stream."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph.replay


def far_calls(rough_us: Mapping[str, float], best_us: float) -> frozenset[str]:
    """The calls that take more than FAR_MULTIPLE times the fastest one, known or among them."""
    limit = FAR_MULTIPLE * min(best_us, *rough_us.values())
    return frozenset(name for name, us in rough_us.items() if us > limit)


def schedule(
    calls: Mapping[str, Call], rounds: int, fewer: Mapping[str, int] | None = None
) -> list[Step]:
    """Every call once a round, each round starting with the next one of them.

    Those in `fewer` are left out after so many rounds.
    """
    steps: list[Step] = []
    for turn in range(rounds):
        names = [name for name in calls if turn < (fewer or {}).get(name, rounds)]
        first = turn % max(1, len(names))
        for name in names[first:] + names[:first]:
            steps.append(Step(f"{_PREFIX}{len(steps)}", name, calls[name]))
    return steps


def floor_us(problem: GemmProblem, device: Device) -> float:
    """The least cold time, in microseconds, that the problem's bytes allow, with a margin.

    Operands and scales must come from memory; of D only what exceeds L2 must have left it.
    """
    d_bytes = problem.groups * problem.m * problem.n * D_DTYPE_BYTES[problem.d_dtype]
    must_move = problem.min_bytes - min(d_bytes, device.l2_bytes)
    return FLOOR_MARGIN * must_move / (device.dram_gbps * 1e3)


def summarise(
    name: str, samples: Sequence[float], floor: float, policy: Policy, clocks: dict[str, Any]
) -> Timing:
    """Median and spread of samples in microseconds; ImplausibleTime for one below the floor."""
    bad = [sample for sample in samples if not sample > floor]
    if bad or not samples:
        took = f"{bad[0]:.3f} us" if bad else "no time at all"
        raise ImplausibleTime(
            f"{name}: {took} under policy {policy.name}, but its bytes alone need {floor:.3f} us: "
            "the call did not do its work, or the cache was not cold"
        )
    ordered = sorted(samples)
    return Timing(
        policy=policy.name,
        median_us=median(ordered),
        p10_us=percentile(ordered, 0.1),
        p90_us=percentile(ordered, 0.9),
        samples_us=tuple(samples),
        clocks=clocks,
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of ascending values lie, interpolated."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spans_us(ranges: Iterable[Range], labels: Sequence[str]) -> dict[str, float]:
    """Microseconds from first start to last end of each label, over all its streams.

    Raises MeasureError for a label that no device activity carries.
    """
    found: dict[str, tuple[int, int]] = {}
    for label, start, end in ranges:
        first, last = found.get(label, (start, end))
        found[label] = min(first, start), max(last, end)
    missing = [label for label in labels if label not in found]
    if missing:
        raise MeasureError(
            f"{len(missing)} of {len(labels)} timed calls did nothing on the device that the "
            "profiler saw; if the profiler can not trace here, use policy cold-events"
        )
    return {label: (found[label][1] - found[label][0]) / 1e3 for label in labels}


def device_ranges(events: Iterable[Any]) -> list[Range]:
    """The ranges among the profiler's raw events: those that lie on the device.

    A range appears on the CPU too, under the same name, from when it was entered to when it was
    left; that one says nothing about the device.
    """
    return [
        Range(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type().name == "CUDA" and event.name().startswith(_PREFIX)
    ]


def _profile(steps: Sequence[Step], flush: Call) -> tuple[dict[str, float], dict[str, Any]]:
    """Microseconds by label from one profiler session, and the clocks in the middle of it."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    # acc_events only keeps torch from warning that a session forgets the one before.
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        flush()
        steps[0].call()  # pays for the session's start, untimed
        for step in steps:
            flush()
            with torch.profiler.record_function(step.label):
                step.call()
        clocks = _clocks()
        torch.cuda.synchronize()
    ranges = device_ranges(_raw_events(profiler))
    return spans_us(ranges, [step.label for step in steps]), clocks


def _raw_events(profiler: Any) -> list[Any]:
    # The public events() builds a tree of Python objects first: seconds for what takes 0.1 ms here.
    results = getattr(getattr(profiler, "profiler", None), "kineto_results", None)
    if results is None:
        raise MeasureError(
            f"the profiler of torch {torch.__version__} gives no raw events; use policy cold-events"
        )
    return list(results.events())


def _with_events(steps: Sequence[Step], flush: Call) -> tuple[dict[str, float], dict[str, Any]]:
    """Microseconds by label from CUDA events recorded around each call, and the clocks."""
    clocks: dict[str, Any] = {}
    return _event_times(steps, flush, clocks), clocks


def _event_times(
    steps: Sequence[Step], flush: Call, clocks: dict[str, Any] | None = None
) -> dict[str, float]:
    """Microseconds by label from CUDA events; `clocks` gets those seen. Waits for the device."""
    pairs = {}
    for step in steps:
        flush()
        start, end = (_new_event() for _ in range(2))
        start.record()
        step.call()
        end.record()
        pairs[step.label] = start, end
    if clocks is not None:
        clocks.update(_clocks())
    torch.cuda.synchronize()
    return {label: 1e3 * start.elapsed_time(end) for label, (start, end) in pairs.items()}


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


_TIMERS: Final = {"profiler": _profile, "events": _with_events}


def _flush_for(device: Device) -> Call:
    """Writes FLUSH_L2_MULTIPLE times the L2: cold, and full of dirty lines as after other work."""
    words = FLUSH_L2_MULTIPLE * device.l2_bytes // 4
    buffer = torch.empty(words, dtype=torch.int32, device="cuda")
    return lambda: buffer.fill_(1)


def _nothing() -> None:
    """The flush of a policy without one."""


def _warm_up(calls: Mapping[str, Call], flush: Call, least_ms: float) -> dict[str, float]:
    """Run all calls for so long, twice at least; each one's least time in us, by CUDA events."""
    until = perf_counter() + least_ms / 1e3
    rough_us: dict[str, float] = {}
    for turn in count(1):
        steps = [Step(name, name, call) for name, call in calls.items()]
        for name, us in _event_times(steps, flush).items():
            rough_us[name] = min(us, rough_us.get(name, us))
        if turn > 1 and perf_counter() > until:
            break
    return rough_us


def _reset_persisting_l2() -> None:
    """Lines that an earlier kernel made persist would survive any flush."""
    with driver.current_device(torch.cuda.current_device()):
        driver.check(driver.api().cuCtxResetPersistingL2Cache(), "cuCtxResetPersistingL2Cache")


def _clocks() -> dict[str, Any]:
    """The clocks while the device works off what was just queued."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return dict(read_clocks(str(getattr(properties, "uuid", ""))))
