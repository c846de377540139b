"""The CUDA driver: results checked, device facts, modules, and the two calls made per GEMM.

Takes ordinals (as torch counts devices), cubin bytes and plain numbers; gives handles as ints.
The only user of `cuda.bindings.driver`, which is imported at the first call, never before: an
import of this module creates no context and works where no driver is installed. `encode_tensor_map`
and `launch` go to the driver by ctypes: the bindings hold a tensor map in memory of their own that
is not aligned as the driver wants it, and cost several microseconds a launch.
Must not import cache, build or search.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

from kgen.device import H200, Device
from kgen.errors import DriverError

#: A tensor map, and a kernel argument that holds one, lie on 64 bytes (cuda.h: CUtensorMap).
TENSOR_MAP_ALIGN: Final = 64
TENSOR_MAP_BYTES: Final = 128

NOT_INITIALIZED: Final = 3
INVALID_CONTEXT: Final = 201
INVALID_HANDLE: Final = 400
#: CUDA_ERROR_INVALID_CLUSTER_SIZE
INVALID_CLUSTER: Final = 912
#: Results after which every later call in the process fails: the context is gone.
FATAL_RESULTS: Final = frozenset(
    {4, 46, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 911, 999}
)
#: Results with which the loader refuses an image made for another machine or a newer driver.
REFUSED_IMAGE_RESULTS: Final = frozenset({200, 209, 218, 222, 223, 300})

_CLUSTER_DIMENSION: Final = 4
#: What a kernel sustains of the peak that the driver's clocks give, measured on one H200
#: (kgen.device.H200 against 6144 bits at 3201 MHz, double data rate, and 1980 MHz).
_H200_PEAK_GBPS: Final = 4916.7
_H200_MAX_CLOCK_MHZ: Final = 1980.0


class _Process:
    forked = False


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h, its union read as a cluster dimension."""

    _fields_ = (
        ("id", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32 * 3),
        ("rest", ctypes.c_uint8 * 52),
    )


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint32),
    )


class AlignedBuffer:
    """Zeroed host memory whose `address` is a multiple of 64; the one place that aligns."""

    def __init__(self, size: int) -> None:
        self._memory = ctypes.create_string_buffer(size + TENSOR_MAP_ALIGN)
        start = ctypes.addressof(self._memory)
        self.address = -(-start // TENSOR_MAP_ALIGN) * TENSOR_MAP_ALIGN
        self.size = size

    def __bytes__(self) -> bytes:
        return ctypes.string_at(self.address, self.size)

    def write(self, offset: int, data: bytes) -> None:
        """Put `data` at `offset` bytes from the start."""
        if not 0 <= offset <= self.size - len(data):
            raise ValueError(f"{len(data)} bytes at {offset} do not fit {self.size}")
        ctypes.memmove(self.address + offset, data, len(data))


def _after_fork() -> None:
    # A child can use nothing that its parent got from the driver: each way in must ask anew.
    _Process.forked = _Process.forked or _api.cache_info().currsize > 0
    for cached in (device_facts, _primary_context, _occupancy, encode_tensor_map, launch):
        cached.cache_clear()


os.register_at_fork(after_in_child=_after_fork)


@cache
def _api() -> Any:
    """The bindings' driver module, initialised. Raises DriverError when there is no driver."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError(
            f"cuda.bindings.driver can not be imported: {error!r}. "
            "Install cuda-python 12.9 or 13.x, and check that no local file is named cuda.py"
        ) from error
    try:
        code = int(driver.cuInit(0)[0])
    except RuntimeError as error:  # the bindings found no libcuda
        raise DriverError("no CUDA driver on this machine (libcuda.so.1 not found)") from error
    if code:
        raise DriverError(f"cuInit: {_name(driver, code)}", code, code in FATAL_RESULTS)
    return driver


def api() -> Any:
    """The initialised bindings. Raises DriverError without a driver, or after a fork."""
    if _Process.forked:
        raise DriverError(
            "CUDA was used before this process was forked, and does not survive a fork: "
            "start worker processes with the 'spawn' method",
            NOT_INITIALIZED,
            fatal=True,
        )
    return _api()


def _name(bindings: Any, code: int) -> str:
    try:
        return f"{bindings.CUresult(code).name} ({code})"
    except ValueError:
        return f"CUDA error {code}"


def raise_for(code: int, what: str) -> None:
    """Raise the DriverError for a result that is not 0; `what` names call and operands."""
    message = f"{what}: {_name(_api(), code)}"
    fatal = code in FATAL_RESULTS
    if fatal:
        message += "; the CUDA context of this process is lost: restart the process"
    raise DriverError(message, code, fatal)


def check(result: tuple[Any, ...], what: str) -> Any:
    """The values of a bindings call after its status: none, one, or a tuple.

    Raises DriverError, `fatal` for a status after which the context is unusable.
    """
    code = int(result[0])
    if code:
        raise_for(code, what)
    values = result[1:]
    return values[0] if len(values) == 1 else values or None


# ----------------------------------------------------------------------------- devices


def driver_version() -> tuple[int, int]:
    """The newest CUDA version the installed driver serves, as (major, minor)."""
    version = int(check(api().cuDriverGetVersion(), "cuDriverGetVersion"))
    return version // 1000, version % 1000 // 10


@cache
def device_facts(ordinal: int) -> Device:
    """Facts of the device that torch calls `cuda:ordinal`, read from the driver.

    SM count, shared memory and L2 are those of the device in use (a MIG slice has its own).
    Bandwidth, clock and rate are what the clocks and bus give, times the share that one H200
    sustained; a driver that does not tell a clock leaves the H200's figure.
    """
    cuda = api()
    device = check(cuda.cuDeviceGet(ordinal), f"cuDeviceGet({ordinal})")
    name = check(cuda.cuDeviceGetName(256, device), "cuDeviceGetName")

    def fact(attribute: str) -> int:
        key = getattr(cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
        return int(check(cuda.cuDeviceGetAttribute(key, device), f"attribute {attribute}"))

    major, minor = fact("COMPUTE_CAPABILITY_MAJOR"), fact("COMPUTE_CAPABILITY_MINOR")
    sms = fact("MULTIPROCESSOR_COUNT")
    clock = fact("CLOCK_RATE") / 1000 / _H200_MAX_CLOCK_MHZ or 1.0
    peak_gbps = 2 * fact("MEMORY_CLOCK_RATE") * fact("GLOBAL_MEMORY_BUS_WIDTH") / 8 / 1e6
    return Device(
        name=bytes(name).split(b"\0", 1)[0].decode(errors="replace"),
        arch=f"sm_{major}{minor}" + ("a" if major >= 9 else ""),
        num_sms=sms,
        smem_per_block=fact("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        l2_bytes=fact("L2_CACHE_SIZE"),
        dram_gbps=H200.dram_gbps * (peak_gbps / _H200_PEAK_GBPS or 1.0),
        sm_clock_mhz=H200.sm_clock_mhz * clock,
        fp8_tflops=H200.fp8_tflops * clock * sms / H200.num_sms,
        driver_version="{}.{}".format(*driver_version()),
        measured=True,
    )


@cache
def _primary_context(ordinal: int) -> Any:
    # Retained once and never released: torch holds the same context to the end of the process.
    cuda = api()
    device = check(cuda.cuDeviceGet(ordinal), f"cuDeviceGet({ordinal})")
    return check(cuda.cuDevicePrimaryCtxRetain(device), f"cuDevicePrimaryCtxRetain({ordinal})")


@contextmanager
def current_device(ordinal: int) -> Iterator[None]:
    """Make the device's primary context (torch's own) current, and the former one after."""
    cuda = api()
    check(cuda.cuCtxPushCurrent(_primary_context(ordinal)), f"cuCtxPushCurrent({ordinal})")
    try:
        yield
    finally:
        check(cuda.cuCtxPopCurrent(), "cuCtxPopCurrent")


# ----------------------------------------------------------------------------- modules


def load_function(image: bytes, entry: str, smem_bytes: int, ordinal: int) -> tuple[int, int]:
    """(module, function) handles of a cubin's kernel, ready for `smem_bytes` of dynamic memory.

    Raises DriverError; its `code` is in REFUSED_IMAGE_RESULTS when the driver can not read the
    image.
    """
    cuda = api()
    with current_device(ordinal):
        module = check(cuda.cuModuleLoadData(image), f"cuModuleLoadData of {len(image)} bytes")
        try:
            found = cuda.cuModuleGetFunction(module, entry.encode())
            function = check(found, f"cuModuleGetFunction({entry})")
            key = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            done = cuda.cuFuncSetAttribute(function, key, smem_bytes)
            check(done, f"{smem_bytes} bytes of shared memory for {entry}")
        except DriverError:
            cuda.cuModuleUnload(module)
            raise
    return int(module), int(function)


def max_active_clusters(
    function: int, size: int, threads: int, smem_bytes: int, ordinal: int
) -> int:
    """Clusters of `size` CTAs of a kernel that the device can hold at a time.

    Raises DriverError when there is room for none, or the driver refuses.
    """
    attribute = cluster_attribute(size)
    config = LaunchConfig()
    config.grid[:], config.block[:] = (size, 1, 1), (threads, 1, 1)
    config.smem_bytes = smem_bytes
    config.attributes, config.num_attributes = ctypes.addressof(attribute), 1
    count = ctypes.c_int()
    with current_device(ordinal):
        code = _occupancy()(ctypes.addressof(count), function, ctypes.addressof(config))
    if code:
        raise_for(code, f"clusters of {size} CTAs with {smem_bytes} bytes of shared memory")
    if count.value < 1:
        raise DriverError(
            f"no room for a cluster of {size} CTAs on cuda:{ordinal}", INVALID_CLUSTER
        )
    return count.value


def unload(module: int, ordinal: int) -> None:
    """Unload a module that no launch, pending or captured, still uses."""
    cuda = api()
    with current_device(ordinal):
        check(cuda.cuModuleUnload(cuda.CUmodule(module)), "cuModuleUnload")


# ------------------------------------------------------------- the two calls made per GEMM


def _driver_call(name: str, *types: Any) -> Callable[..., int]:
    # 12.0 is the version in which both functions came; the driver picks the matching ABI.
    pointer, status = check(api().cuGetProcAddress(name.encode(), 12000, 0), name)
    if not pointer:
        raise DriverError(f"{name}: the driver does not have it ({status}); CUDA 12.0 is needed")
    # CFUNCTYPE lets go of the GIL: a launch blocks while the stream's queue is full.
    function: Callable[..., int] = ctypes.CFUNCTYPE(ctypes.c_int, *types)(int(pointer))
    return function


@cache
def _occupancy() -> Callable[..., int]:
    pointers = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return _driver_call("cuOccupancyMaxActiveClusters", *pointers)


@cache
def encode_tensor_map() -> Callable[..., int]:
    """cuTensorMapEncodeTiled(map, type, rank, address, dims, strides, box, element strides,
    interleave, swizzle, L2 promotion, out-of-bounds fill): arrays by address, enums by value.
    """
    p, u = ctypes.c_void_p, ctypes.c_uint32
    return _driver_call("cuTensorMapEncodeTiled", p, u, u, p, p, p, p, p, u, u, u, u)


@cache
def launch() -> Callable[..., int]:
    """cuLaunchKernelEx(configuration, function, parameter pointers, 0), all by address."""
    p = ctypes.c_void_p
    return _driver_call("cuLaunchKernelEx", p, p, p, p)


def cluster_attribute(cluster_size: int) -> LaunchAttribute:
    """The launch attribute that forms clusters of this many CTAs along x."""
    attribute = LaunchAttribute()
    attribute.id = _CLUSTER_DIMENSION
    attribute.cluster[:] = (cluster_size, 1, 1)
    return attribute
