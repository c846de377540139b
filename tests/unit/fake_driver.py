"""A CUDA driver made of Python callbacks: it records calls and answers as it is told to.

`encode` and `launch` are real C function pointers, so that argument passing is what it is on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any, ClassVar

P, U = ctypes.c_void_p, ctypes.c_uint32
ENCODE_TYPE = ctypes.CFUNCTYPE(ctypes.c_int, P, U, U, P, P, P, P, P, U, U, U, U)
LAUNCH_TYPE = ctypes.CFUNCTYPE(ctypes.c_int, P, P, P, P)
OCCUPANCY_TYPE = ctypes.CFUNCTYPE(ctypes.c_int, P, P, P)


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_INVALID_CLUSTER_SIZE = 912


class Enum:
    def __getattr__(self, name: str) -> str:
        return name


def words(address: int, count: int, kind: Any = ctypes.c_uint64) -> list[int]:
    return list((kind * count).from_address(address))


class FakeDriver:
    """The names of cuda.bindings.driver that kgen uses."""

    CUresult = CUresult
    CUdevice_attribute = Enum()
    CUfunction_attribute = Enum()
    CUmodule = int
    attributes: ClassVar[dict[str, int]] = {
        "COMPUTE_CAPABILITY_MAJOR": 9,
        "COMPUTE_CAPABILITY_MINOR": 0,
        "MULTIPROCESSOR_COUNT": 132,
        "CLOCK_RATE": 1980000,
        "MEMORY_CLOCK_RATE": 3201000,
        "GLOBAL_MEMORY_BUS_WIDTH": 6144,
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
        "L2_CACHE_SIZE": 62914560,
    }

    def __init__(self, **attributes: int) -> None:
        self.facts = {**self.attributes, **attributes}
        self.version = 13000
        self.log: list[str] = []
        self.maps: list[SimpleNamespace] = []
        self.launches: list[SimpleNamespace] = []
        self.encode_result = 0
        self.launch_results: list[int] = []
        self.on_launch: Callable[[], None] = lambda: None
        self.load_result = 0
        self.current: list[int] = []
        self._encode = ENCODE_TYPE(self._encode_2d)
        self._launch = LAUNCH_TYPE(self._launch_kernel)
        self._occupancy = OCCUPANCY_TYPE(self._max_active_clusters)
        #: Clusters that fit, by size, as seen on an H200 with 200 KB of shared memory a CTA.
        self.clusters = {2: 66, 4: 30, 8: 15}

    def cuInit(self, flags: int) -> tuple[int]:
        return (0,)

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return 0, self.version

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:
        return 0, ordinal

    def cuDeviceGetName(self, length: int, device: int) -> tuple[int, bytes]:
        return 0, b"NVIDIA H200" + b"\0" * (length - 11)

    def cuDeviceGetAttribute(self, key: str, device: int) -> tuple[int, int]:
        return 0, self.facts[key.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:
        return 0, 1000 + device

    def cuCtxPushCurrent(self, context: int) -> tuple[int]:
        self.current.append(context)
        return (0,)

    def cuCtxPopCurrent(self) -> tuple[int, int]:
        return 0, self.current.pop()

    def cuModuleLoadData(self, image: bytes) -> tuple[int, int]:
        self.log.append(f"load {len(image)} in {self.current[-1]}")
        return self.load_result, 77

    def cuModuleGetFunction(self, module: int, entry: bytes) -> tuple[int, int]:
        return 0, 88

    def cuFuncSetAttribute(self, function: int, key: str, value: int) -> tuple[int]:
        self.log.append(f"{key}={value}")
        return (0,)

    def cuModuleUnload(self, module: int) -> tuple[int]:
        self.log.append(f"unload {module}")
        return (0,)

    def cuGetProcAddress(self, name: bytes, version: int, flags: int) -> tuple[int, int, int]:
        function: dict[bytes, Any] = {
            b"cuTensorMapEncodeTiled": self._encode,
            b"cuLaunchKernelEx": self._launch,
            b"cuOccupancyMaxActiveClusters": self._occupancy,
        }
        pointer = ctypes.cast(function[name], P).value
        assert pointer
        return 0, pointer, 0

    def _encode_2d(self, *args: int) -> int:
        target, kind, rank, address, dims, strides, box, unit, interleave, swizzle, promo, oob = (
            args
        )
        self.maps.append(
            SimpleNamespace(
                target=target,
                kind=kind,
                address=address,
                dims=words(dims, rank),
                strides=words(strides, rank - 1),
                box=words(box, rank, U),
                unit=words(unit, rank, U),
                swizzle=swizzle,
                options=(interleave, promo, oob),
            )
        )
        # A map that says which it is: 128 bytes of the call's number.
        ctypes.memset(target, len(self.maps), 128)
        return self.encode_result

    def _max_active_clusters(self, count: int, function: int, config: int) -> int:
        (attributes,) = words(config + 40, 1)
        size = words(attributes, 3, U)[2]
        ctypes.c_int.from_address(count).value = self.clusters.get(size, 0)
        return 0

    def _launch_kernel(self, config: int, function: int, params: int, extra: int | None) -> int:
        words32 = words(config, 14, U)
        stream, attributes = words(config + 32, 2)
        count = words32[12]
        argument = words(params, 1)[0]
        self.launches.append(
            SimpleNamespace(
                grid=words32[0:3],
                block=words32[3:6],
                smem_bytes=words32[6],
                stream=stream,
                attributes=[words(attributes + 72 * i, 5, U) for i in range(count)],
                function=function,
                argument=argument,
                args=ctypes.string_at(argument, 640),
                extra=extra,
                context=self.current[-1:],
            )
        )
        self.on_launch()
        return self.launch_results.pop(0) if self.launch_results else 0
