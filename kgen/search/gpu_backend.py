"""The child that owns the GPU: is there one that kgen can time on? Then `create` hands it out.

Takes a device ordinal, gives the backend of `gpu_worker`. Asks the driver before it loads torch,
so that a machine without a GPU learns so at once.
"""

from __future__ import annotations

from kgen.errors import DriverError, GpuMissing
from kgen.runtime import driver
from kgen.search.gpu_worker import Backend


def create(ordinal: int = 0) -> Backend:
    """The backend on `cuda:ordinal`; raises GpuMissing with what was found instead of a GPU."""
    try:
        device = driver.device_facts(ordinal)
    except DriverError as error:
        raise GpuMissing(str(error).rstrip(".")) from error
    if not device.is_hopper:
        raise GpuMissing(f"no Hopper GPU: {device.name} is {device.arch}, kernels are for sm_90a")
    try:
        from kgen.search.gpu_body import GpuBody
    except ImportError as error:
        raise GpuMissing(f"{device.name} can not be used: {error}") from error
    return GpuBody(ordinal, device)
