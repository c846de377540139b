"""Fixtures of the GPU tests: kernels compiled ahead, the device's facts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kgen.device import Device
from kgen.runtime import driver
from tests.gpu.bed import Kernels, case_of


@pytest.fixture(scope="session")
def device() -> Device:
    """Facts of the GPU at hand."""
    return driver.device_facts(torch.cuda.current_device())


@pytest.fixture(scope="session")
def kernels() -> Iterator[Kernels]:
    """Compiles in the background while other tests run."""
    made = Kernels()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _faults_show_where_they_happen() -> Iterator[None]:
    """Wait after each test, so that a fault is reported by the test that made it."""
    yield
    torch.cuda.synchronize()


@pytest.fixture(scope="module", autouse=True)
def _free_cases() -> Iterator[None]:
    """Each module's cases go with it."""
    yield
    case_of.cache_clear()
    torch.cuda.empty_cache()
