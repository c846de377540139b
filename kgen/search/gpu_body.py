"""What the GPU's child does: `GpuBody` makes inputs, verifies candidates and times them.

Takes problems and cubins, gives `Measured`. Lives in a process of its own (see `gpu_worker`),
which is killed when a candidate hangs and replaced when one breaks the context.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, cycle
from pathlib import Path
from time import perf_counter
from typing import Final

import torch

from kgen.build import Cubin
from kgen.cases import Case
from kgen.device import Device
from kgen.errors import (
    DriverError,
    GpuMissing,
    KgenError,
    LaunchError,
    MeasureError,
    Untunable,
    WrongResult,
)
from kgen.grouped_cases import GroupedCase
from kgen.measure import Timing, measure_many, policy_named
from kgen.problem import GemmProblem, ceil_div
from kgen.reference import TORCH_D_DTYPES
from kgen.runtime import driver
from kgen.runtime.kernel import Kernel, Launch, current_stream
from kgen.runtime.kernels import KERNELS
from kgen.runtime.nvtx import nvtx_range
from kgen.search.gpu_cases import (
    AnyCase,
    Judge,
    Operands,
    checked_as,
    copy_of,
    operands_of,
    prepared,
    verified_as,
)
from kgen.search.gpu_worker import Hello, Measured, Screened
from kgen.verify import Seal, Verified, shared_growths
from kgen.wgrad_cases import KGroupedCase

#: A spread (10th to 90th percentile over the median) that calls for a second measurement: another
#: process on the GPU, a clock that moved.
NOISY: Final = 0.25
#: Where the kernel module tells its version.
_DRIVER_VERSION: Final = Path("/sys/module/nvidia/version")


#: Copies of the inputs that a rotating policy goes through: of this size together, but so many.
ROTATED_L2_MULTIPLE: Final = 3
MOST_COPIES: Final = 64


@dataclass(frozen=True)
class Contender:
    """A candidate that passed, ready to be timed."""

    kernel: Kernel
    launch: Launch
    verified: Verified


class GpuBody:
    """The backend on one device. `case` and output belong to the problem that is open."""

    def __init__(self, ordinal: int, device: Device) -> None:
        if not torch.cuda.is_available():
            raise GpuMissing(f"torch {torch.__version__} sees no CUDA device where the driver does")
        torch.cuda.set_device(ordinal)
        self._ordinal = ordinal
        self._torch_device = torch.device("cuda", ordinal)
        self._device = device
        self._case: AnyCase | None = None
        self._output: torch.Tensor | None = None
        self._seal: Seal | None = None
        self._contenders: dict[str, Contender] = {}
        self._copies: list[Operands] = []

    def hello(self) -> Hello:
        """The device at hand."""
        uuid = str(torch.cuda.get_device_properties(self._ordinal).uuid)
        version = _DRIVER_VERSION.read_text().strip() if _DRIVER_VERSION.exists() else ""
        return Hello(self._device, uuid, version, driver.driver_version())

    def open(self, problem: GemmProblem) -> None:
        """Free the last problem and make inputs and reference of this one."""
        self._close()
        with _explained(f"inputs and reference of {problem}"):
            if problem.is_grouped or problem.kind == "k_grouped":
                self._open_groups(problem)
                return
            case = Case(problem, self._torch_device)
            # Made here, under the limit of `open`, and not in the first candidate's time.
            _ = case.output, case.exact, case.own_growth
            dtype = TORCH_D_DTYPES[problem.d_dtype]
            self._output = torch.zeros(problem.m, problem.n, dtype=dtype, device=case.device)
            shared = [growth.constants() for growth in shared_growths(case)]
            self._seal = Seal(chain(case.constants(), *shared))
            self._case = case
            torch.cuda.synchronize()

    def _open_groups(self, problem: GemmProblem) -> None:
        device = self._torch_device
        if problem.is_grouped:
            case: GroupedCase | KGroupedCase = GroupedCase(problem, device)
        else:
            case = KGroupedCase(problem, device)
        self._output = case.empty(case.full)  # type: ignore[arg-type]  # its own
        _ = case.output
        self._seal = Seal(case.constants())
        self._case = case
        torch.cuda.synchronize()

    def _close(self) -> None:
        contenders = list(self._contenders.values())
        self._contenders.clear()
        for contender in contenders:
            contender.kernel.unload()
        self._copies.clear()
        self._case = self._output = self._seal = None
        gc.collect()
        torch.cuda.empty_cache()

    def verify(self, cubin: Cubin) -> float:
        """Load the cubin and check it; the largest error of a tile."""
        return self._admit(cubin, verified_as)

    def hold(self, cubin: Cubin) -> float:
        """Load a cubin that was verified before and check one launch of it."""
        return self._admit(cubin, checked_as)

    def screen(
        self, cubins: Sequence[Cubin], policy: str, best_us: float, diary: str
    ) -> list[Screened]:
        """Check each by one launch, time those that passed together, unload them."""
        found = []
        for index, cubin in enumerate(cubins):
            Path(diary).write_text(str(index))
            found.append(self._check(cubin))
        Path(diary).write_text("")
        keys = [c.key for c, one in zip(cubins, found, strict=True) if one.status == "ok"]
        start = perf_counter()
        timed: dict[str, Measured] = {}
        try:
            if keys:
                measured = self._measured(self._time(tuple(keys), policy, best_us))
                timed = dict(zip(keys, measured, strict=True))
                self._check_seal(f"{len(keys)} candidates" if len(keys) > 1 else "the candidate")
        finally:
            for key in keys:
                with suppress(DriverError):  # of a lost context: this process ends
                    self._contenders.pop(key).kernel.unload()
        share_s = (perf_counter() - start) / max(1, len(keys))
        return [
            replace(one, measured=timed[c.key], time_s=share_s) if c.key in timed else one
            for c, one in zip(cubins, found, strict=True)
        ]

    def _check(self, cubin: Cubin) -> Screened:
        """Admit the cubin to a screen's timing, or say why not."""
        start = perf_counter()
        status, reason = "ok", ""
        try:
            self._admit(cubin, checked_as)
        except WrongResult as error:
            status, reason = "wrong", str(error)
        except LaunchError as error:
            status, reason = "launch_failed", str(error)
        return Screened(status, reason, check_s=perf_counter() - start)

    def _admit(self, cubin: Cubin, judge: Judge) -> float:
        """Load the cubin, have it judged and keep it for `time`; the largest error of a tile."""
        assert self._case is not None, "a problem is open"
        assert self._output is not None, "a problem is open"
        problem, config = self._case.problem, cubin.config
        load = Kernel.load if problem.kind == "dense" else KERNELS[problem.kind].load
        kernel = load(cubin.data, cubin.entry, config, cubin.problem, self._ordinal)
        try:
            with (
                nvtx_range(f"kgen verify {problem}: {config}"),
                _explained(f"verification of {config} for {problem}"),
            ):
                verified = judge(kernel, self._case, self._ordinal)
        except WrongResult as error:
            kernel.unload()
            self._check_seal(f"{config}, which is wrong ({error}),")
            raise
        if judge is verified_as:
            self._check_seal(str(config))
        ready = prepared(kernel, self._case, operands_of(self._case), self._output)
        self._contenders[cubin.key] = Contender(kernel, ready, verified)
        return verified.max_tile_error

    def _check_seal(self, who: str) -> None:
        """Raise as for a fault, which costs this process its life, when inputs or references were
        written to: the next candidates would be judged by them.
        """
        assert self._seal is not None, "a problem is open"
        with _explained(f"a look at the inputs after {who}"):
            is_broken = self._seal.is_broken()
        if is_broken:
            raise DriverError(f"{who} wrote outside its output, into what all share", fatal=True)

    def time(
        self,
        keys: tuple[str, ...],
        policy: str,
        best_us: float | None = None,
        control: str = "",
    ) -> list[Measured]:
        """Time the candidates, alternating. What can not be true, or is noisy, is taken twice.

        Raises DriverError, `fatal`, when one of them wrote outside its output.
        """
        beside = control if control and control not in keys else ""
        timings = self._time_well((*keys, *filter(None, [beside])), policy, best_us, beside)
        control_us = timings[control].median_us if control else None
        timings.pop(beside, None)
        measured = [replace(one, control_us=control_us) for one in self._measured(timings)]
        self._check_seal(f"{len(keys)} candidates" if len(keys) > 1 else "the candidate")
        return measured

    def _time_well(
        self, keys: tuple[str, ...], policy: str, best_us: float | None, control: str
    ) -> dict[str, Timing]:
        try:
            timings = self._time(keys, policy, best_us, control)
        except MeasureError:
            return self._time(keys, policy, best_us, control)
        if any(timing.spread_us > NOISY * timing.median_us for timing in timings.values()):
            again = self._time(keys, policy, best_us, control)
            if _noise(again) < _noise(timings):
                timings = again
        return timings

    def _time(
        self,
        keys: tuple[str, ...],
        policy: str,
        best_us: float | None = None,
        control: str = "",
    ) -> dict[str, Timing]:
        chosen, ordinal = policy_named(policy), self._ordinal
        calls = {}
        assert self._case is not None, "a problem is open"
        with nvtx_range(f"kgen time {self._case.problem}"), _explained("timing"):
            for key in keys:
                contender = self._contenders[key]
                launches = self._rotated(contender) if chosen.rotates else [contender.launch]
                turns = cycle([launch.run for launch in launches])
                calls[key] = (
                    contender.verified,
                    lambda turns=turns: next(turns)(current_stream(ordinal)),
                )
            return measure_many(calls, chosen, self._device, best_us, control)

    def _rotated(self, contender: Contender) -> list[Launch]:
        """Launches on inputs of their own, which together L2 can not hold."""
        assert self._case is not None, "a problem is open"
        assert self._output is not None, "a problem is open"
        own = operands_of(self._case)
        if not self._copies:
            num_bytes = sum(x.numel() * x.element_size() for x in own)
            wanted = ceil_div(ROTATED_L2_MULTIPLE * self._device.l2_bytes, num_bytes)
            count = max(2, min(wanted, MOST_COPIES))
            self._copies = [tuple(map(copy_of, own)) for _ in range(count)]
        return [
            prepared(contender.kernel, self._case, operands, self._output)
            for operands in self._copies
        ]

    def _measured(self, timings: dict[str, Timing]) -> list[Measured]:
        return [
            Measured(
                policy=timing.policy,
                error=self._contenders[key].verified.max_tile_error,
                median_us=timing.median_us,
                p10_us=timing.p10_us,
                p90_us=timing.p90_us,
                samples_us=timing.samples_us,
                clocks=timing.clocks,
            )
            for key, timing in timings.items()
        ]

    def launch(self, key: str, text: str) -> None:
        """Run a verified candidate once, in a range of this text, and wait for it."""
        with nvtx_range(text), _explained("a launch"):
            self._contenders[key].launch.run(current_stream(self._ordinal))
            torch.cuda.synchronize()

    def check_policy(self, policy: str) -> None:
        """Try the policy on a fill: if that can not be timed, no candidate is to blame."""
        wanted = policy_named(policy)
        buffer = torch.empty(1 << 20, dtype=torch.uint8, device=self._torch_device)
        trivial = Verified(GemmProblem("dense", 1, 8, 16), 0.0, 0.0)
        with _explained(f"policy {policy}"):
            try:
                measure_many({"fill": (trivial, lambda: buffer.fill_(0))}, wanted, self._device)
            except MeasureError as error:
                raise GpuMissing(
                    f"policy {policy} can not be used on this machine: {error}"
                ) from error


def _noise(timings: dict[str, Timing]) -> float:
    return max(timing.spread_us / timing.median_us for timing in timings.values())


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn torch's errors into what they mean: no memory, a refused call, a lost context."""
    try:
        yield
    except KgenError:
        raise
    except torch.cuda.OutOfMemoryError as error:
        free, total = (x / 2**30 for x in torch.cuda.mem_get_info())
        raise Untunable(
            f"{what}: out of GPU memory, {free:.1f} of {total:.1f} GiB free ({error})"
        ) from error
    except RuntimeError:
        # Torch has no class for a lost context; the context itself knows.
        driver.check(driver.api().cuCtxSynchronize(), what)
        raise
