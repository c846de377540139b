"""The GPU that a bench runs on: `hopper_device`. Must not import search."""

from __future__ import annotations

import torch

from kgen.device import Device
from kgen.errors import DriverError, GpuMissing
from kgen.runtime.driver import device_facts


def hopper_device(needs: str, ordinal: int = 0) -> Device:
    """Facts of `cuda:ordinal`; unless it is a Hopper GPU raises GpuMissing, begun with `needs`."""
    try:
        device = device_facts(ordinal)
    except DriverError as error:
        raise GpuMissing(f"{needs} a Hopper GPU: {error}") from error
    if not device.is_hopper or not torch.cuda.is_available():
        raise GpuMissing(
            f"{needs} a Hopper GPU that torch {torch.__version__} can use: "
            f"{device.name} is {device.arch}"
        )
    return device
