"""kgen.search.gpu_body and gpu_backend, on the CPU: what they do around a kernel and a timer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kgen.build import Cubin
from kgen.cases import Case, GrowthCase
from kgen.config import GemmConfig
from kgen.device import H200, Device
from kgen.errors import DriverError, GpuMissing, MeasureError, Untunable, WrongResult
from kgen.measure import DEFAULT_POLICY, Timing
from kgen.problem import BF16_FIELDS, GemmProblem
from kgen.reference import gemm_reference
from kgen.runtime import driver
from kgen.search import gpu_backend, gpu_body, gpu_cases
from kgen.search.events import TuneOptions
from kgen.search.gpu_body import GpuBody

PROBLEM = GemmProblem("dense", 5, 136, 144)


class FakeKernel:
    """Computes on the CPU; `offset` is added to every element of the result."""

    unloaded = 0

    def __init__(self, offset: float, config: GemmConfig) -> None:
        self.offset, self.config = offset, config

    @classmethod
    def load(cls, data: bytes, entry: str, config: GemmConfig, *_: Any) -> FakeKernel:
        return cls(float(data), config)

    def prepare(self, *tensors: Any, num_sms: int = 0) -> FakeLaunch:
        return FakeLaunch(self, tensors)

    def unload(self) -> None:
        FakeKernel.unloaded += 1


class FakeLaunch:
    def __init__(self, kernel: FakeKernel, tensors: Any) -> None:
        self.kernel, self.tensors = kernel, tensors

    def run(self, stream: int) -> None:
        a, sfa, b, sfb, d = self.tensors
        recipe = "none" if a.dtype == torch.bfloat16 else "block"
        d.copy_(gemm_reference(a, sfa, b, sfb, d.dtype, recipe=recipe) + self.kernel.offset)


def timing(median_us: float, spread_us: float = 0.1) -> Timing:
    half = spread_us / 2
    return Timing("cold", median_us, median_us - half, median_us + half, (median_us,))


class Timer:
    """Stands in for measure_many: gives what was put in `results`, raises what can be raised."""

    def __init__(self) -> None:
        self.results: list[dict[str, Timing] | Exception] = []
        self.asked: list[tuple[str, ...]] = []
        self.told: list[tuple[float | None, str]] = []

    def __call__(
        self,
        calls: dict[str, Any],
        policy: Any,
        device: Device,
        best_us: float | None = None,
        control: str = "",
    ) -> dict[str, Timing]:
        self.told.append((best_us, control))
        for verified, call in calls.values():
            assert verified.problem
            call()
        self.asked.append(tuple(calls))
        if tuple(calls) == ("fill",):
            return {}
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    made = Timer()
    monkeypatch.setattr(gpu_body, "measure_many", made)
    return made


@pytest.fixture
def body(monkeypatch: pytest.MonkeyPatch, timer: Timer) -> GpuBody:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(gpu_body, "Kernel", FakeKernel)
    for module in (gpu_body, gpu_cases):
        monkeypatch.setattr(module, "current_stream", lambda ordinal: 0)
    growth = GrowthCase(GemmProblem("dense", 8, 16, 1024), torch.device("cpu"))
    monkeypatch.setattr(gpu_body, "shared_growths", lambda case: [growth])
    made = GpuBody(0, H200)
    made._torch_device = torch.device("cpu")
    made.open(PROBLEM)
    return made


def cubin(offset: float = 0.0, key: str = "k") -> Cubin:
    data = str(offset).encode()
    # With N and K baked in the growth check stays at the problem's own K, which is quick here.
    config = GemmConfig(baked_dims="nk")
    return Cubin(key, data, "kgen_gemm", config, PROBLEM, 168, 0, False, "", "")


def test_a_right_kernel_is_verified_and_then_timed(body: GpuBody, timer: Timer) -> None:
    assert 0 < body.verify(cubin()) < 4e-3
    assert 0 < body.verify(cubin(key="other")) < 4e-3
    timer.results = [{"k": timing(10.0), "other": timing(11.0)}]
    first, second = body.time(("k", "other"), "cold")
    assert (first.median_us, second.median_us) == (10.0, 11.0)
    assert first.policy == "cold"
    assert 0 < first.error < 4e-3


def test_a_control_is_timed_beside_and_told_with_each(body: GpuBody, timer: Timer) -> None:
    body.verify(cubin())
    assert 0 < body.hold(cubin(key="control")) < 4e-3
    timer.results = [{"k": timing(10.0), "control": timing(12.0)}]
    (one,) = body.time(("k",), "cold", 9.0, "control")
    assert (one.median_us, one.control_us) == (10.0, 12.0)
    assert timer.asked[-1] == ("k", "control")
    assert timer.told[-1] == (9.0, "control")
    timer.results = [{"control": timing(12.5)}]
    (one,) = body.time(("control",), "cold", None, "control")
    assert (one.median_us, one.control_us) == (12.5, 12.5)


def test_a_rotating_policy_goes_through_copies_of_the_inputs(
    body: GpuBody, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enough of them that L2 holds no part, each call the next, all with the same values."""
    body.verify(cubin())
    body.verify(cubin(key="other"))
    seen: list[int] = []
    original = FakeLaunch.run

    def spy(self: FakeLaunch, stream: int) -> None:
        seen.append(self.tensors[0].data_ptr())
        original(self, stream)

    monkeypatch.setattr(FakeLaunch, "run", spy)

    def three_times(calls: Any, policy: Any, *_: Any) -> dict[str, Timing]:
        for _, call in calls.values():
            for _turn in range(3):
                call()
        return {name: timing(10.0) for name in calls}

    monkeypatch.setattr(gpu_body, "measure_many", three_times)
    monkeypatch.setattr(gpu_body, "MOST_COPIES", 2)
    assert body._case is not None
    body.time(("k", "other"), "rotating")
    assert len(set(seen)) == 2
    assert seen[0] == seen[2] != seen[1]
    assert seen[:3] == seen[3:]
    own = gpu_cases.operands_of(body._case)
    for copies in body._copies:
        for copy, tensor in zip(copies, own, strict=True):
            assert copy.stride() == tensor.stride()
            assert copy.data_ptr() != tensor.data_ptr()
            assert torch.equal(copy.float(), tensor.float())
    assert body._output is not None
    assert body._output.abs().sum() > 0
    body.open(PROBLEM.with_m(3))
    assert not body._copies
    body.verify(cubin())
    seen.clear()
    body.time(("k",), "cold")
    assert len(set(seen)) == 1


def test_a_screen_checks_times_and_lets_go(
    body: GpuBody, timer: Timer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary = tmp_path / "diary"
    timer.results = [{"a": timing(10.0), "c": timing(11.0)}]
    before = FakeKernel.unloaded
    found = body.screen(
        [cubin(key="a"), cubin(1000.0, "b"), cubin(key="c")], "screen", 9.0, str(diary)
    )
    assert [one.status for one in found] == ["ok", "wrong", "ok"]
    assert [one.measured and one.measured.median_us for one in found] == [10.0, None, 11.0]
    assert 0 < found[0].measured.error < 4e-3  # type: ignore[union-attr]
    assert "off by more than" in found[1].reason
    assert all(one.check_s > 0 for one in found)
    assert FakeKernel.unloaded == before + 3
    assert timer.told[-1] == (9.0, "")
    with pytest.raises(KeyError):
        body.time(("a",), "cold")
    assert body.screen([cubin(1000.0, "b")], "screen", 9.0, str(diary))[0].status == "wrong"
    assert diary.read_text() == ""
    monkeypatch.setattr(gpu_cases, "check_random", raiser(DriverError("lost", 700, fatal=True)))
    with pytest.raises(DriverError):
        body.screen([cubin(1000.0, "b")], "screen", 9.0, str(diary))
    assert diary.read_text() == "0"


def test_a_screen_that_fails_lets_go_too(body: GpuBody, timer: Timer, tmp_path: Path) -> None:
    diary = str(tmp_path / "diary")
    timer.results = [MeasureError("below the floor")]
    before = FakeKernel.unloaded
    with pytest.raises(MeasureError):
        body.screen([cubin(key="a"), cubin(key="c")], "screen", 9.0, diary)
    assert FakeKernel.unloaded == before + 2
    assert isinstance(body._case, Case)
    body._case.a.view(torch.uint8)[0, 0] ^= 64
    timer.results = [{"a": timing(10.0)}]
    with pytest.raises(DriverError, match="wrote outside its output"):
        body.screen([cubin(key="a")], "screen", 9.0, diary)


def test_a_wrong_kernel_can_not_be_timed(body: GpuBody) -> None:
    with pytest.raises(WrongResult):
        body.verify(cubin(offset=1000.0))
    with pytest.raises(KeyError):
        body.time(("k",), "cold")


@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize("victim", [2, 3, 4, -1])  # b, sfb, reference, growth
def test_a_kernel_that_writes_outside_its_output_is_a_fault(
    body: GpuBody, monkeypatch: pytest.MonkeyPatch, victim: int, is_wrong: bool
) -> None:
    """Else every later candidate would be judged by what it left, and go on record as wrong."""
    assert body._seal is not None
    target = body._seal._tensors[victim]
    last_run = 4 if is_wrong else 6  # after it, no check would see what it did

    class Stray(FakeLaunch):
        def run(self, stream: int) -> None:
            super().run(stream)
            Stray.runs += 1
            if Stray.runs == last_run:
                target.view(torch.uint8)[0, 0] ^= 64

        runs = 0

    monkeypatch.setattr(FakeKernel, "prepare", lambda k, *tensors, num_sms: Stray(k, tensors))
    with pytest.raises(DriverError, match="wrote outside its output") as fault:
        body.verify(cubin(offset=1.0 if is_wrong else 0.0))
    assert fault.value.fatal


def test_a_stray_write_while_timed_is_a_fault(body: GpuBody, timer: Timer) -> None:
    body.verify(cubin())
    assert isinstance(body._case, Case)
    body._case.a.view(torch.uint8)[0, 0] ^= 64
    timer.results = [{"k": timing(10.0)}]
    with pytest.raises(DriverError, match="the candidate wrote outside its output"):
        body.time(("k",), "cold")


def test_bf16_operands_are_verified_and_timed(body: GpuBody, timer: Timer) -> None:
    """Scales that are none, in inputs and in the seal over them."""
    body.open(GemmProblem("dense", 5, 136, 72, **BF16_FIELDS))
    assert 0 < body.verify(cubin()) < 4e-3
    timer.results = [{"k": timing(10.0)}]
    assert body.time(("k",), "cold")[0].median_us == 10.0
    with pytest.raises(WrongResult):
        body.verify(cubin(offset=1000.0))


def test_the_next_problem_forgets_the_last_one(body: GpuBody) -> None:
    body.verify(cubin())
    before = FakeKernel.unloaded
    body.open(PROBLEM.with_m(3))
    assert FakeKernel.unloaded == before + 1
    with pytest.raises(KeyError):
        body.time(("k",), "cold")


def test_a_time_that_can_not_be_true_is_taken_twice(body: GpuBody, timer: Timer) -> None:
    body.verify(cubin())
    timer.results = [MeasureError("below the floor"), {"k": timing(10.0)}]
    assert body.time(("k",), "cold")[0].median_us == 10.0
    timer.results = [MeasureError("below the floor"), MeasureError("again")]
    with pytest.raises(MeasureError, match="again"):
        body.time(("k",), "cold")


@pytest.mark.parametrize(("second", "kept"), [(timing(12.0), 12.0), (timing(13.0, 9.0), 10.0)])
def test_of_a_noisy_measurement_the_calmer_repeat_counts(
    body: GpuBody, timer: Timer, second: Timing, kept: float
) -> None:
    body.verify(cubin())
    timer.results = [{"k": timing(10.0, 5.0)}, {"k": second}]
    assert body.time(("k",), "cold")[0].median_us == kept
    assert not timer.results


def test_a_policy_that_does_not_work_here_is_no_candidates_fault(
    body: GpuBody, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> dict[str, Timing]:
        raise MeasureError("the profiler can not trace here")

    body.check_policy("cold")
    assert timer.asked == [("fill",)]
    monkeypatch.setattr(gpu_body, "measure_many", refuse)
    with pytest.raises(GpuMissing, match=r"policy cold (.|\n)*can not trace"):
        body.check_policy("cold")


def raiser(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_no_memory_makes_a_problem_untunable(
    body: GpuBody, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 << 30, 139 << 30))
    monkeypatch.setattr(gpu_body, "Case", raiser(torch.cuda.OutOfMemoryError("tried 900 GiB")))
    with pytest.raises(Untunable, match=r"2\.0 of 139\.0 GiB free"):
        body.open(PROBLEM)
    monkeypatch.setattr(gpu_body, "Case", Case)
    body.open(PROBLEM)
    assert body.verify(cubin()) < 4e-3


def test_torch_s_error_on_a_lost_context_is_told_from_a_bug(
    body: GpuBody, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Api:
        code = 700

        def cuCtxSynchronize(self) -> tuple[int]:
            return (self.code,)

    api = Api()
    monkeypatch.setattr(driver, "api", lambda: api)
    monkeypatch.setattr(driver, "raise_for", raiser(DriverError("lost", 700, fatal=True)))
    monkeypatch.setattr(gpu_cases, "verify", raiser(RuntimeError("CUDA error: what happened?")))
    with pytest.raises(DriverError, match="lost"):
        body.verify(cubin())
    api.code = 0
    with pytest.raises(RuntimeError, match="what happened"):
        body.verify(cubin())


def test_the_policy_of_a_run_is_the_default_one() -> None:
    assert TuneOptions().policy == DEFAULT_POLICY


def test_no_driver_and_other_devices_are_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "device_facts", raiser(DriverError("no CUDA driver here.")))
    with pytest.raises(GpuMissing, match=r"no CUDA driver here$"):
        gpu_backend.create()
    ampere = Device("NVIDIA A100", "sm_80", 108, 166912, 1, 1.0, 1.0, 1.0)
    monkeypatch.setattr(driver, "device_facts", lambda ordinal: ampere)
    with pytest.raises(GpuMissing, match="A100 is sm_80"):
        gpu_backend.create()
    monkeypatch.setattr(driver, "device_facts", lambda ordinal: H200)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(GpuMissing, match="sees no CUDA device"):
        gpu_backend.create()
