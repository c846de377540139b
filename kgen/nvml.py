"""Clocks and driver release as NVML reports them; unknown, never wrong, where it can not be asked.

Takes a GPU's UUID, gives plain values. NVML comes with the driver and is called by ctypes: no
package is needed. Must not import torch or CUDA.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final

#: nvml.h: nvmlClockType_t, NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE.
_SM_CLOCK: Final = 1
_MEMORY_CLOCK: Final = 2
_VERSION_SIZE: Final = 80


@cache
def _library() -> Any:
    """The initialised library, or None."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


@cache
def _handle(uuid: str) -> ctypes.c_void_p | None:
    handle = ctypes.c_void_p()
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    code = _library().nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    return None if code else handle


def read_clocks(uuid: str) -> dict[str, int | None]:
    """`sm_mhz`, `memory_mhz` and `throttle_reasons` (NVML's bit mask) now; None: unknown."""
    facts: dict[str, int | None] = dict.fromkeys(("sm_mhz", "memory_mhz", "throttle_reasons"))
    library = _library()
    handle = _handle(uuid) if library else None
    if handle is None:
        return facts
    for name, clock in (("sm_mhz", _SM_CLOCK), ("memory_mhz", _MEMORY_CLOCK)):
        mhz = ctypes.c_uint()
        if library.nvmlDeviceGetClockInfo(handle, clock, ctypes.byref(mhz)) == 0:
            facts[name] = mhz.value
    reasons = ctypes.c_ulonglong()
    if library.nvmlDeviceGetCurrentClocksThrottleReasons(handle, ctypes.byref(reasons)) == 0:
        facts["throttle_reasons"] = reasons.value
    return facts


def driver_release() -> str:
    """The driver's release, such as 580.159.04; empty: unknown."""
    library = _library()
    text = ctypes.create_string_buffer(_VERSION_SIZE)
    if library is None or library.nvmlSystemGetDriverVersion(text, _VERSION_SIZE):
        return ""
    return text.value.decode(errors="replace")
