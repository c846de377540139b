"""kgen.runtime.tma and kgen.runtime.driver: what is handed to the driver, and what it answers."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kgen.device import H200
from kgen.errors import DriverError, UnsupportedInput
from kgen.runtime import driver
from kgen.runtime.driver import AlignedBuffer, LaunchConfig
from kgen.runtime.tma import TensorMap, encode_2d
from tests.unit.fake_driver import FakeDriver, words


def forget() -> None:
    for cached in (
        driver.device_facts,
        driver._primary_context,
        driver._occupancy,
        driver.encode_tensor_map,
        driver.launch,
        driver._occupancy,
    ):
        cached.cache_clear()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    monkeypatch.setattr(driver, "_api", lambda: fake)
    forget()
    yield fake
    forget()


MAP = TensorMap("uint8", 0x7F0000000010, (7168, 130), 7296, (128, 64), 128)


def test_the_driver_gets_every_field(fake: FakeDriver) -> None:
    data = encode_2d(MAP)
    assert data == b"\x01" * 128
    (call,) = fake.maps
    assert (call.kind, call.address, call.dims) == (0, 0x7F0000000010, [7168, 130])
    assert (call.strides, call.box, call.unit, call.swizzle) == ([7296], [128, 64], [1, 1], 3)
    assert call.options == (0, 3, 0)  # no interleave, L2 promotion of 256 bytes, zeros outside


@pytest.mark.parametrize(
    ("data_type", "code"), [("uint8", 0), ("fp16", 6), ("fp32", 7), ("bf16", 9)]
)
def test_enum_values_are_those_of_the_bindings(data_type: str, code: int) -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    names = {"uint8": "UINT8", "fp16": "FLOAT16", "fp32": "FLOAT32", "bf16": "BFLOAT16"}
    kind = getattr(bindings.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{names[data_type]}")
    assert int(kind) == code


def test_structures_are_laid_out_as_the_bindings_do() -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    theirs: Any = bindings.CUlaunchConfig()
    theirs.gridDimX, theirs.gridDimY, theirs.gridDimZ = 7, 2, 3
    theirs.blockDimX, theirs.blockDimY, theirs.blockDimZ = 384, 5, 6
    theirs.sharedMemBytes, theirs.hStream = 232448, 0x55667788
    attribute = bindings.CUlaunchAttribute()
    attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster = attribute.value.clusterDim
    cluster.x, cluster.y, cluster.z = 4, 1, 1
    theirs.attrs, theirs.numAttrs = [attribute], 1

    mine = driver.cluster_attribute(4)
    config = LaunchConfig()
    config.grid[:], config.block[:] = (7, 2, 3), (384, 5, 6)
    config.smem_bytes, config.stream, config.num_attributes = 232448, 0x55667788, 1
    raw = ctypes.string_at(theirs.getPtr(), ctypes.sizeof(config))
    assert raw[:40] == bytes(config)[:40]
    assert raw[48:52] == bytes(config)[48:52]
    attributes = words(theirs.getPtr() + 40, 1)[0]
    assert ctypes.string_at(attributes, 72) == bytes(mine)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"address": 0x7F0000000008}, "address"),
        ({"address": 0}, "address"),
        ({"pitch_bytes": 7176}, "pitch of 7176 bytes: expected a multiple of 16"),
        ({"pitch_bytes": 0}, "pitch"),
        ({"pitch_bytes": 2**40}, "2\\^40"),
        ({"dims": (7168, 0)}, "extents"),
        ({"dims": (2**31, 1)}, "extents"),
        ({"box": (128, 257)}, "box"),
        ({"box": (8, 64)}, "box row of 8 bytes"),
        ({"box": (144, 64)}, "box row of 144 bytes with a swizzle of 128"),
    ],
)
def test_what_tma_can_not_take_is_refused_by_name(
    fake: FakeDriver, change: dict[str, Any], says: str
) -> None:
    fields = {**MAP.__dict__, **change}
    with pytest.raises(UnsupportedInput, match=says):
        encode_2d(TensorMap(**fields))
    assert not fake.maps


def test_a_map_is_never_written_to_an_unaligned_place(fake: FakeDriver) -> None:
    buffer = AlignedBuffer(256)
    with pytest.raises(ValueError, match="multiple of 64"):
        MAP.encode_into(buffer.address + 16)
    assert not fake.maps


def test_buffers_are_aligned_wherever_python_puts_them() -> None:
    kept = [AlignedBuffer(576 + i % 7) for i in range(200)]
    assert all(buffer.address % 64 == 0 for buffer in kept)
    kept[0].write(570, b"123456")
    assert bytes(kept[0])[568:] == b"\0\x00123456"
    with pytest.raises(ValueError, match="do not fit"):
        kept[0].write(571, b"123456")


def test_a_refusal_of_the_driver_names_the_matrix(fake: FakeDriver) -> None:
    fake.encode_result = 201
    with pytest.raises(DriverError, match=r"INVALID_CONTEXT \(201\)") as caught:
        encode_2d(MAP)
    assert "7296" in str(caught.value)
    assert not caught.value.fatal


# ------------------------------------------------------------------------------- driver


def test_facts_come_from_the_device(fake: FakeDriver) -> None:
    device = driver.device_facts(0)
    assert device.measured
    assert (device.name, device.arch, device.driver_version) == ("NVIDIA H200", "sm_90a", "13.0")
    assert (device.num_sms, device.smem_per_block, device.l2_bytes) == (132, 232448, 62914560)
    assert device.dram_gbps == pytest.approx(H200.dram_gbps, rel=1e-3)
    assert device.fp8_tflops == pytest.approx(H200.fp8_tflops, rel=1e-3)


def test_a_driver_that_hides_its_clocks_leaves_the_reference(
    fake: FakeDriver,
) -> None:
    fake.facts.update(CLOCK_RATE=0, MEMORY_CLOCK_RATE=0, MULTIPROCESSOR_COUNT=66)
    device = driver.device_facts(0)
    assert device.dram_gbps == H200.dram_gbps
    assert device.sm_clock_mhz == H200.sm_clock_mhz
    assert device.fp8_tflops == pytest.approx(H200.fp8_tflops / 2)


@pytest.mark.parametrize(("major", "minor", "arch"), [(9, 0, "sm_90a"), (8, 9, "sm_89")])
def test_only_hopper_is_hopper(fake: FakeDriver, major: int, minor: int, arch: str) -> None:
    fake.facts.update(COMPUTE_CAPABILITY_MAJOR=major, COMPUTE_CAPABILITY_MINOR=minor)
    device = driver.device_facts(0)
    assert device.arch == arch
    assert device.is_hopper == (major == 9)


def test_check_unpacks_and_tells_fatal_from_ordinary(fake: FakeDriver) -> None:
    assert driver.check((0,), "x") is None
    assert driver.check((0, 5), "x") == 5
    assert driver.check((0, 5, 6), "x") == (5, 6)
    assert driver.check((0, 0), "x") == 0
    with pytest.raises(DriverError, match="lost: restart the process") as fatal:
        driver.check((700, None), "cuModuleLoadData")
    assert fatal.value.fatal
    assert fatal.value.code == 700
    with pytest.raises(DriverError, match="x: CUDA error 12345") as other:
        driver.check((12345,), "x")
    assert not other.value.fatal


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_importing_touches_neither_driver_nor_bindings() -> None:
    code = (
        "import sys, kgen.runtime.driver, kgen.runtime.tma\n"
        "assert 'cuda.bindings' not in sys.modules and 'torch' not in sys.modules\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_bindings_that_can_not_be_imported_show_the_real_reason() -> None:
    code = "import sys; sys.modules['cuda'] = None\nfrom kgen.runtime import driver\ndriver.api()\n"
    done = run_python(code)
    assert "DriverError: cuda.bindings.driver can not be imported: ModuleNotFoundError" in (
        done.stderr
    )
    assert "named cuda.py" in done.stderr


def test_a_forked_child_is_told_to_spawn() -> None:
    code = (
        "import os, sys\n"
        "from kgen.runtime import driver\n"
        "sys.path.insert(0, '.')\n"
        "from tests.unit.fake_driver import FakeDriver\n"
        "import types\n"
        "module = types.ModuleType('cuda.bindings.driver'); fake = FakeDriver()\n"
        "bindings = types.ModuleType('cuda.bindings'); bindings.driver = fake\n"
        "sys.modules['cuda.bindings'] = bindings\n"
        "before = os.fork()\n"
        "if before == 0: driver.api(); os._exit(0)\n"  # nothing was used yet: the child may
        "assert os.waitstatus_to_exitcode(os.waitpid(before, 0)[1]) == 0\n"
        "driver.device_facts(0)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try: driver.device_facts(0)\n"
        "    except Exception as e: os._exit(7 if 'spawn' in str(e) and e.fatal else 8)\n"
        "    os._exit(9)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "driver.device_facts(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=os.getcwd(),
    )
    assert done.returncode == 0, done.stderr
