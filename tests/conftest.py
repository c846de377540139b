"""Marks tests by their folder, skips GPU tests where there is no Hopper GPU, isolates the cache."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TIERS = ("unit", "toolchain", "gpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test the mark of its folder; GPU tests carry a skip where none can run."""
    missing: str | None = None
    asked = False
    for item in items:
        tier = item.path.relative_to(HERE).parts[0]
        if tier in TIERS:
            item.add_marker(getattr(pytest.mark, tier))
        if tier == "gpu":
            item.add_marker(pytest.mark.xdist_group("gpu"))  # one process has the device to itself
            if not asked:  # asked once, and only here: importing torch costs a second
                asked, missing = True, why_no_hopper()
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))


def why_no_hopper() -> str | None:
    """Why GPU tests can not run here, or None where they can."""
    try:
        import torch
    except ImportError as error:
        return f"needs a Hopper GPU: torch can not be imported ({error})"
    if not torch.cuda.is_available():
        return f"needs a Hopper GPU: torch {torch.__version__} sees no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        name = torch.cuda.get_device_name()
        return f"needs a Hopper GPU (compute capability 9.0): {name} has {capability}"
    return None


@pytest.fixture(scope="module", autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small operations: handing them to threads on a busy machine costs far more than it gains.

    Holds for children too. GPU tests, whose references are large, are left alone.
    """
    if request.path.relative_to(HERE).parts[0] == "gpu":
        yield
        return
    torch = sys.modules.get("torch")  # not all need it
    before = torch.get_num_threads() if torch else 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        if torch:
            torch.set_num_threads(1)
        yield
    if torch:
        torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder of this run's own, and none of the user's KGEN_ variables."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("KGEN_")]:
        del os.environ[name]
    os.environ["KGEN_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    yield
    os.environ.clear()
    os.environ.update(before)
