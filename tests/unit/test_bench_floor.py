"""The floor: its formula against published rows, and its kernels played by Python on the CPU."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kgen.bench import floor as bench_floor
from kgen.bench.floor import (
    RATE_ITERATIONS,
    STREAM_CUTS,
    Floor,
    expected_sum,
    floor_of,
    measure_floor,
    rate_call,
    rate_kernel,
    rate_source,
    stream_call,
    stream_kernel,
    stream_source,
)
from kgen.device import H200
from kgen.errors import DriverError, WrongResult
from kgen.measure import POLICIES, Timing
from kgen.problem import GemmProblem
from kgen.runtime import driver

COLD = POLICIES["cold"]
COMPILER: Any = SimpleNamespace(id="none")


class Played:
    """The GPU: keeps each launch's geometry and does what the two kernels do when checked.

    missing    words that the streaming kernel does not add up
    short      iterations that the rate kernel leaves out
    """

    def __init__(self, missing: int = 0, short: int = 0) -> None:
        self.missing, self.short = missing, short
        self.code = 0
        self.entries: list[str] = []
        self.launches: list[SimpleNamespace] = []

    def load(self, cubin: bytes, entry: str, smem_bytes: int, ordinal: int) -> tuple[int, int]:
        self.entries.append(entry)
        return 0, len(self.entries)

    def launch(self, config_at: int, function: int, params_at: int, extra: int | None) -> int:
        config = driver.LaunchConfig.from_address(config_at)
        params = (ctypes.c_void_p * 4).from_address(params_at)
        entry = self.entries[function - 1]
        kinds = {
            "kgen_stream": (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32),
            "kgen_rate": (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint32),
        }[entry]
        pairs = zip(kinds, params, strict=True)
        source, count, result, check = (kind.from_address(at).value for kind, at in pairs if at)
        self.launches.append(
            SimpleNamespace(
                entry=entry,
                grid=tuple(config.grid),
                block=tuple(config.block),
                smem_bytes=config.smem_bytes,
                stream=config.stream,
                count=count,
                check=check,
            )
        )
        if check:
            {"kgen_stream": self._stream, "kgen_rate": self._rate}[entry](source, count, result)
        return self.code

    def _stream(self, source: int, count: int, result: int) -> None:
        words = (ctypes.c_uint32 * (count // 4)).from_address(source)
        total = sum(words[self.missing :]) & 0xFFFFFFFF
        ctypes.c_uint32.from_address(result).value = total

    def _rate(self, source: int, count: int, result: int) -> None:
        assert ctypes.string_at(source, 3) == b"\x38" * 3, "checked on ones"
        sums = (ctypes.c_float * (H200.num_sms * 256)).from_address(result)
        sums[:] = [expected_sum(count - self.short)] * len(sums)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Played]:
    def start(**faults: int) -> Played:
        played = Played(**faults)
        compiled = SimpleNamespace(cubin=b"cubin")
        monkeypatch.setattr(bench_floor, "compile_source", lambda *_, **__: compiled)
        monkeypatch.setattr(bench_floor, "current_stream", lambda ordinal: 7)
        monkeypatch.setattr(driver, "load_function", played.load)
        monkeypatch.setattr(driver, "launch", lambda: played.launch)
        return played

    return start


def timing(us: float) -> Timing:
    return Timing("cold", us, us, us, (us,) * 16)


# ---- formula


@pytest.mark.parametrize(
    ("m", "n", "k", "stream_us", "floor_us", "limit"),
    [
        (1, 576, 7168, 3.34, 3.4, "stream"),
        (128, 2112, 7168, 6.56, 6.9, "stream"),
        (512, 32768, 512, 7.01, 15.5, "stream"),
        (512, 7168, 16384, 34.56, 70.7, "tensor cores"),
        (4096, 32768, 512, 7.01, 80.8, "tensor cores"),
        (4096, 7168, 16384, 34.56, 565.3, "tensor cores"),
    ],
)
def test_floor_is_that_of_the_published_baselines(  # noqa: PLR0917, a row of the table
    m: int, n: int, k: int, stream_us: float, floor_us: float, limit: str
) -> None:
    """Rows of the H200's table, from its streaming times and 1702 TFLOPS."""
    found = floor_of(GemmProblem("dense", m, n, k), stream_us, 1702.0, m * k)
    assert found.us == pytest.approx(floor_us, abs=0.06)
    assert found.limit == limit


def test_wider_outputs_cost_more() -> None:
    """FP32 writes twice the bytes of BF16: at 4 TB/s, 2 x 512 x 32768 bytes are 8.4 us."""
    problem = GemmProblem("dense", 512, 32768, 512, d_dtype="fp32")
    bf16 = floor_of(GemmProblem("dense", 512, 32768, 512), 7.0, 1702.0, 512 * 512).us
    assert floor_of(problem, 7.0, 1702.0, 512 * 512).us - bf16 == pytest.approx(8.39, abs=0.01)


def test_floor_of_a_problem_and_its_json() -> None:
    """13 ms a run are 1700 TFLOPS on 132 SMs."""
    floor = Floor({(576, 7168): timing(3.34)}, {(576, 7168): (16384, 12)}, timing(13_015.0), 132)
    assert floor.tflops == pytest.approx(1702, abs=1)
    assert floor.of(GemmProblem("dense", 1, 576, 7168)).us == pytest.approx(3.342, abs=1e-3)
    data = json.loads(json.dumps(floor.to_dict()))
    assert data["streams"][0]["n"] == 576
    assert data["streams"][0]["chunk_bytes"] == 16384
    assert data["streams"][0]["samples_us"] == [3.34] * 16
    assert data["rate"]["median_us"] == 13_015.0


# ---- kernels


def test_sources_are_whole() -> None:
    """Nothing to include, nothing left to replace."""
    text = stream_source(4096, 48)
    assert "constexpr u32 kChunkBytes = 4096;" in text
    assert "constexpr u32 kStages = 48;" in text
    rate = rate_source()
    assert "{%0, %1, %2, %3, " in rate
    assert '"+f"(d[127])' in rate
    assert "#include" not in text + rate


@pytest.mark.parametrize("size", [16, 1000 * 16, 16384 * 3])
def test_streaming_is_checked_then_timed_on_every_sm(
    play: Callable[..., Played], size: int
) -> None:
    """One checked launch, then calls that check nothing, on torch's current stream."""
    played = play()
    weights = torch.randint(0, 256, (size,), dtype=torch.uint8)
    call = stream_call(stream_kernel((16384, 12), COMPILER), weights, H200)
    call()
    checked, timed = played.launches
    assert (checked.check, timed.check) == (1, 0)
    assert timed.count == size
    assert (timed.grid, timed.block) == ((132, 1, 1), (32, 1, 1))
    assert (timed.smem_bytes, timed.stream) == (16384 * 12, 7)


def test_streaming_that_misses_a_word_is_wrong(play: Callable[..., Played]) -> None:
    """A time of it would be too good."""
    play(missing=1)
    with pytest.raises(WrongResult, match="not all read once"):
        stream_call(stream_kernel((2048, 48), COMPILER), torch.ones(64, dtype=torch.uint8), H200)


def values() -> torch.Tensor:
    return torch.randn(1 << 10).to(torch.float8_e4m3fn)


def test_rate_is_checked_then_timed(play: Callable[..., Played]) -> None:
    """On ones, a few iterations; timed on the values, many."""
    played = play()
    rate_call(rate_kernel(COMPILER), values(), H200)()
    checked, timed = played.launches
    assert (checked.check, checked.count) == (1, 3)
    assert (timed.check, timed.count) == (0, RATE_ITERATIONS)
    assert (timed.grid, timed.block, timed.smem_bytes) == ((132, 1, 1), (256, 1, 1), 65536)


def test_rate_that_skips_work_is_wrong(play: Callable[..., Played]) -> None:
    """Products left out would make a rate that is too good."""
    play(short=1)
    with pytest.raises(WrongResult, match="do not sum ones to 49152"):
        rate_call(rate_kernel(COMPILER), values(), H200)


def test_a_refused_launch_is_named(
    play: Callable[..., Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's code comes out with the kernel's name."""
    played = play()
    call = rate_call(rate_kernel(COMPILER), values(), H200)
    played.code = 701

    def raise_for(code: int, what: str) -> None:
        raise DriverError(f"{what}: {code}", code)

    monkeypatch.setattr(driver, "raise_for", raise_for)
    with pytest.raises(DriverError, match="launch of kgen_rate, grid 132: 701"):
        call()


def test_every_weight_is_streamed_once_and_the_fastest_cut_counts(
    play: Callable[..., Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All cuts alternate on the same bytes; the problem judged by is one row on these weights."""
    play()
    measured: list[dict[str, Any]] = []

    def measure_many(calls: Any, policy: Any, device: Any) -> dict[str, Timing]:
        measured.append(calls)
        for _, call in calls.values():
            call()
        return {name: timing(float(10 - place)) for place, name in enumerate(calls)}

    def on_cpu(make: Any) -> Any:
        return lambda *args, **rest: make(*args, **{**rest, "device": "cpu"})

    monkeypatch.setattr(bench_floor, "measure_many", measure_many)
    for name in ("randint", "randn"):
        monkeypatch.setattr(torch, name, on_cpu(getattr(torch, name)))
    floor = measure_floor([(64, 256), (8, 128), (64, 256)], COMPILER, COLD, H200)
    assert list(floor.streams) == [(64, 256), (8, 128)]
    assert floor.streams[8, 128].median_us == 8.0
    assert floor.cuts[8, 128] == STREAM_CUTS[-1]
    assert [len(calls) for calls in measured] == [3, 3, 1]
    verified = [next(iter(calls.values()))[0].problem for calls in measured[:2]]
    assert verified == [GemmProblem("dense", 1, 64, 256), GemmProblem("dense", 1, 8, 128)]


def test_sources_lie_in_the_package() -> None:
    """Beside the module that compiles them."""
    folder = Path(bench_floor.__file__).parent
    assert {path.name for path in folder.glob("*.cu")} == {"stream.cu", "rate.cu"}
