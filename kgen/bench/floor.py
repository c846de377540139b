"""What can no kernel on this device beat? The time its weights need, and the tensor cores' rate.

Takes (N, K) pairs and settings, gives `Floor`, from two small kernels of kgen's own that are
checked before they are timed, under the bench's policy. Must not import search.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final, NamedTuple

import torch

from kgen.compiler import Compiler, compile_source
from kgen.device import Device
from kgen.errors import WrongResult
from kgen.measure import Call, Policy, Timing, measure_many
from kgen.problem import D_DTYPE_BYTES, OPERAND_DTYPE_BYTES, GemmProblem
from kgen.reference import TORCH_OPERAND_DTYPES
from kgen.runtime import driver
from kgen.runtime.kernel import current_stream
from kgen.verify import Verified

#: TB/s at which A is read and D written beside the weights, as in the published baselines.
BESIDE_TBPS: Final = 4.0
#: (bytes of a copy, copies in flight a CTA) that are tried; the fastest counts.
STREAM_CUTS: Final = ((16384, 12), (4096, 48), (2048, 48))
#: Bytes of shared operands and of the values they are taken from, in the rate kernel.
_OPERAND_BYTES: Final = 65536
_VALUE_BYTES: Final = 1 << 20
#: Makes a run of 13 ms at 1700 TFLOPS on 132 SMs: a rate that the clocks sustain.
RATE_ITERATIONS: Final = 20_000
RATE_THREADS: Final = 256
#: The end of a WGMMA's name, and of its arguments, by type of the operands.
_WGMMA: Final = {"e4m3": ("k32.f32.e4m3.e4m3", ""), "bf16": ("k16.f32.bf16.bf16", ", 0, 0")}
_CHECK_ITERATIONS: Final = 3
#: Bound of a problem as shapes: which of the two terms is the larger.
STREAM, TENSOR_CORES = "stream", "tensor cores"


class Bound(NamedTuple):
    """The floor of one problem in microseconds, and which limit it comes from."""

    us: float
    limit: str


@dataclass(frozen=True)
class Floor:
    """What was measured: microseconds to stream each (N, bytes of K), and the tensor cores' rate.

    `rate` is the time of RATE_ITERATIONS on E4M3, `bf16_rate` that on BF16, if it was asked for.
    """

    streams: dict[tuple[int, int], Timing]
    cuts: dict[tuple[int, int], tuple[int, int]]
    rate: Timing
    num_sms: int
    bf16_rate: Timing | None = None

    @property
    def tflops(self) -> float:
        """The sustained rate of E4M3 products on random data."""
        return self._tflops(self.rate, 1)

    @property
    def bf16_tflops(self) -> float:
        """The same of BF16 products; raises ValueError where it was not measured."""
        if self.bf16_rate is None:
            raise ValueError("the rate of BF16 products was not measured")
        return self._tflops(self.bf16_rate, 2)

    def _tflops(self, rate: Timing, size: int) -> float:
        ops = self.num_sms * RATE_ITERATIONS * _ops_per_iteration(size)
        return ops / rate.median_us / 1e6

    def of(self, problem: GemmProblem) -> Bound:
        """max(stream + what A and D take beside it, operations at the sustained rate)."""
        a_bytes = problem.groups * problem.m * problem.k * problem.operand_bytes
        stream_us = self.streams[weights_of(problem)].median_us
        tflops = self.bf16_tflops if problem.recipe == "none" else self.tflops
        return floor_of(problem, stream_us, tflops, a_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, samples included."""
        rate = self.bf16_rate
        bf16 = {} if rate is None else {"bf16_tflops": self.bf16_tflops, "bf16_rate": _plain(rate)}
        return {
            **bf16,
            "tflops": self.tflops,
            "rate": _plain(self.rate),
            "beside_tbps": BESIDE_TBPS,
            "streams": [
                {"n": n, "k": k, "chunk_bytes": self.cuts[n, k][0], **_plain(timing)}
                for (n, k), timing in self.streams.items()
            ],
        }


def weights_of(problem: GemmProblem) -> tuple[int, int]:
    """Rows of all groups' weights together, and bytes of K: what must be streamed."""
    return problem.groups * problem.n, problem.k * problem.operand_bytes


def floor_of(problem: GemmProblem, stream_us: float, tflops: float, a_bytes: int) -> Bound:
    """The floor from its two limits; D counts as its output type has it."""
    d_bytes = problem.groups * problem.m * problem.n * D_DTYPE_BYTES[problem.d_dtype]
    d_bytes *= 1 + problem.accumulate  # read as well
    streamed = stream_us + (a_bytes + d_bytes) / (BESIDE_TBPS * 1e6)
    computed = problem.flops / (tflops * 1e6)
    return Bound(streamed, STREAM) if streamed >= computed else Bound(computed, TENSOR_CORES)


def measure_floor(
    weights: Iterable[tuple[int, int]],
    compiler: Compiler,
    policy: Policy,
    device: Device,
    *,
    with_bf16: bool = False,
) -> Floor:
    """Stream every (N, bytes of K) of `weights` and take the rate, on `cuda:0`.

    `with_bf16`: the rate of BF16 as well. Raises CompileError, DriverError, WrongResult for a
    kernel that did not do its work, and MeasureError.
    """
    kernels = {cut: stream_kernel(cut, compiler) for cut in STREAM_CUTS}
    streams: dict[tuple[int, int], Timing] = {}
    cuts: dict[tuple[int, int], tuple[int, int]] = {}
    for n, k in dict.fromkeys(weights):
        timings = _stream((n, k), kernels, policy, device)
        cut = min(timings, key=lambda one: timings[one].median_us)
        streams[n, k], cuts[n, k] = timings[cut], cut
        torch.cuda.empty_cache()
    rates = [
        _rate(rate_kernel(compiler, dtype), dtype, policy, device)
        for dtype in ("e4m3", "bf16")[: 1 + with_bf16]
    ]
    return Floor(streams, cuts, rates[0], device.num_sms, *rates[1:])


# ----------------------------------------------------------------------------- sources


def stream_source(chunk_bytes: int, stages: int) -> str:
    """The streaming kernel for copies of `chunk_bytes`, `stages` of them in flight."""
    return _source("stream.cu", kChunkBytes=chunk_bytes, kStages=stages)


def rate_source(dtype: str = "e4m3") -> str:
    """The tensor-core kernel for "e4m3" or "bf16", with its 128 accumulators written out."""
    text = _source("rate.cu", kOperandBytes=_OPERAND_BYTES, kValueBytes=_VALUE_BYTES)
    names = ", ".join(f"%{i}" for i in range(128))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(128))
    head, kernel = text.split('extern "C"', 1)  # the comment above it names both words
    types, layouts = _WGMMA[dtype]
    kernel = kernel.replace("ACCUMULATORS", names).replace("OPERANDS", operands)
    kernel = kernel.replace("TYPES", types).replace("LAYOUTS", layouts)
    return f'{head}extern "C"{kernel}'


def _source(name: str, **constants: int) -> str:
    include = files("kgen") / "templates" / "include"
    parts = [(include / part).read_text() for part in ("types.cuh", "ptx.cuh")]
    parts += [f"constexpr u32 {key} = {value};" for key, value in constants.items()]
    return "\n".join([*parts, (files("kgen") / "bench" / name).read_text()])


# ----------------------------------------------------------------------------- kernels


class SmallKernel:
    """A kernel outside the GEMM family: compiled, loaded on `cuda:0`, launched with plain values.

    Raises CompileError and DriverError.
    """

    def __init__(
        self, text: str, entry: str, compiler: Compiler, *, threads: int, smem_bytes: int
    ) -> None:
        cubin = compile_source(text, compiler, entry=entry).cubin
        self.entry = entry
        self._threads, self._smem_bytes = threads, smem_bytes
        self._function = driver.load_function(cubin, entry, smem_bytes, 0)[1]

    def bind(self, grid: int, *arguments: Any) -> Callable[[], None]:
        """A call that starts it on torch's current stream; `arguments` are ctypes values."""
        config = driver.LaunchConfig()
        config.grid[:], config.block[:] = (grid, 1, 1), (self._threads, 1, 1)
        config.smem_bytes = self._smem_bytes
        addresses = [ctypes.addressof(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)

        def call() -> None:
            _ = arguments  # their memory is what the pointers name
            config.stream = current_stream(0)
            at = ctypes.addressof(config), self._function, ctypes.addressof(pointers), None
            if code := driver.launch()(*at):
                driver.raise_for(code, f"launch of {self.entry}, grid {grid}")

        return call


def stream_kernel(cut: tuple[int, int], compiler: Compiler) -> SmallKernel:
    """The streaming kernel of one entry of STREAM_CUTS."""
    chunk_bytes, stages = cut
    text = stream_source(chunk_bytes, stages)
    return SmallKernel(text, "kgen_stream", compiler, threads=32, smem_bytes=chunk_bytes * stages)


def rate_kernel(compiler: Compiler, dtype: str = "e4m3") -> SmallKernel:
    """The tensor-core kernel for operands of this type."""
    text = rate_source(dtype)
    return SmallKernel(text, "kgen_rate", compiler, threads=RATE_THREADS, smem_bytes=_OPERAND_BYTES)


# ----------------------------------------------------------------------------- measurements


def _stream(
    weight: tuple[int, int],
    kernels: dict[tuple[int, int], SmallKernel],
    policy: Policy,
    device: Device,
    where: str = "cuda",
) -> dict[tuple[int, int], Timing]:
    """Times of every cut on the same N x K bytes, alternating."""
    n, k = weight
    weights = torch.randint(0, 256, (n * k,), dtype=torch.uint8, device=where)
    calls = {str(cut): stream_call(kernels[cut], weights, device) for cut in kernels}
    # One row of A: the policy's own check of a cold time then counts the weights' bytes.
    verified = Verified(GemmProblem("dense", 1, n, k), 0.0, 0.0)
    timings = measure_many({name: (verified, call) for name, call in calls.items()}, policy, device)
    return {cut: timings[str(cut)] for cut in kernels}


def stream_call(kernel: SmallKernel, weights: torch.Tensor, device: Device) -> Call:
    """A call that streams `weights` (uint8, a multiple of 16), checked: every word arrives once.

    Raises WrongResult.
    """
    total = torch.zeros(1, dtype=torch.int32, device=weights.device)

    def bound(check: int) -> Callable[[], None]:
        call = kernel.bind(
            device.num_sms,
            ctypes.c_void_p(weights.data_ptr()),
            ctypes.c_uint64(weights.numel()),
            ctypes.c_void_p(total.data_ptr()),
            ctypes.c_uint32(check),
        )
        return lambda: (weights, total, call())[2]  # a launch holds addresses only

    bound(1)()
    expected = int(weights.view(torch.int32).sum()) & 0xFFFFFFFF
    found = int(total) & 0xFFFFFFFF
    if found != expected:
        raise WrongResult(
            f"{kernel.entry}: the words of {weights.numel()} bytes add up to {found}, "
            f"not {expected}: they were not all read once"
        )
    return bound(0)


def _rate(
    kernel: SmallKernel, dtype: str, policy: Policy, device: Device, where: str = "cuda"
) -> Timing:
    count = _VALUE_BYTES // OPERAND_DTYPE_BYTES[dtype]
    values = torch.randn(count, device=where).to(TORCH_OPERAND_DTYPES[dtype])
    call = rate_call(kernel, values, device)
    # The least problem there is: this time is judged by no problem's bytes.
    verified = Verified(GemmProblem("dense", 1, 8, 16), 0.0, 0.0)
    return measure_many({kernel.entry: (verified, call)}, policy, device)[kernel.entry]


def rate_call(kernel: SmallKernel, values: torch.Tensor, device: Device) -> Call:
    """A call that multiplies `values` (1 MiB of the kernel's type) RATE_ITERATIONS times, checked
    on ones.

    Raises WrongResult.
    """
    sums = torch.zeros(device.num_sms, RATE_THREADS, device=values.device)
    ones = torch.ones_like(values, dtype=torch.float32).to(values.dtype)

    def bound(operands: torch.Tensor, iterations: int, check: int) -> Callable[[], None]:
        call = kernel.bind(
            device.num_sms,
            ctypes.c_void_p(operands.data_ptr()),
            ctypes.c_uint32(iterations),
            ctypes.c_void_p(sums.data_ptr()),
            ctypes.c_uint32(check),
        )
        return lambda: (operands, sums, call())[2]

    bound(ones, _CHECK_ITERATIONS, 1)()
    expected = expected_sum(_CHECK_ITERATIONS, values.itemsize)
    if not bool((sums == expected).all()):
        wrong = int((sums != expected).sum())
        raise WrongResult(
            f"{kernel.entry}: {wrong} of {sums.numel()} threads do not sum ones to {expected:g}"
        )
    return bound(values, RATE_ITERATIONS, 0)


def expected_sum(iterations: int, size: int = 1) -> float:
    """What a thread's 128 accumulators of products of ones of `size` bytes add up to.

    Each gets four times 32 bytes' an iteration.
    """
    return 128.0 * 4 * (32 // size) * iterations


def _ops_per_iteration(size: int) -> int:
    """Operations of one SM on elements of `size` bytes: two warpgroups, four m64n256, 32 bytes."""
    return 2 * 4 * 2 * 64 * 256 * (32 // size)


def _plain(timing: Timing) -> dict[str, Any]:
    values: Sequence[str] = ("median_us", "p10_us", "p90_us", "samples_us", "clocks")
    return {name: getattr(timing, name) for name in values}
