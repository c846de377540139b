"""Kernels beside the GEMM on a made-up driver: found, loaded, launched, or why not."""

from __future__ import annotations

import ctypes
import struct
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kgen.build import PlainCubin
from kgen.errors import CompileError, DriverError, LaunchError
from kgen.render import render_plain
from kgen.runtime import cast_launch, driver, moe, plain
from kgen.runtime import casts as c
from kgen.runtime.cast_options import CastOptions
from kgen.runtime.plain import PlainKernels, Spec
from kgen.runtime.stats import KgenWarning
from tests.cast_checks import BF16, FP32, random

SPEC = Spec("moe/gather.cu.j2", "kgen_gather", 256, {"vector_bytes": 16, "scaled": False}, 1024)
CUDA = torch.device("cuda", 0)


class World:
    """A GPU 0, and a builder, that do as they are told."""

    def __init__(self) -> None:
        self.launches: list[SimpleNamespace] = []
        self.codes: list[int] = []
        self.built: list[str] = []
        self.loaded: list[tuple[str, int, int]] = []
        self.build_error: Exception | None = None
        self.load_error: Exception | None = None
        self.capturing = False
        self.current = 0

    def build_plain(self, source: Any) -> PlainCubin:
        self.built.append(source.entry)
        if self.build_error:
            raise self.build_error
        return PlainCubin("key", b"cubin", source.entry, 40, 0, False)

    def load(self, data: bytes, entry: str, smem_bytes: int, ordinal: int) -> tuple[int, int]:
        self.loaded.append((entry, smem_bytes, ordinal))
        if self.load_error:
            raise self.load_error
        return 7, 88

    def launch(self, config_at: int, function: int, params_at: int, extra: None) -> int:
        config = driver.LaunchConfig.from_address(config_at)
        at = ctypes.c_void_p.from_address(params_at).value or 0
        self.launches.append(
            SimpleNamespace(
                grid=tuple(config.grid),
                block=tuple(config.block),
                smem_bytes=config.smem_bytes,
                stream=config.stream,
                function=function,
                args=ctypes.string_at(at, 64),
            )
        )
        return self.codes.pop(0) if self.codes else 0


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(
        plain, "hopper_ordinal", lambda device: 0 if device.type == "cuda" else None
    )
    monkeypatch.setattr(plain, "is_capturing", lambda ordinal: world.capturing)
    monkeypatch.setattr(plain, "StoredBuilder", lambda settings: world)
    monkeypatch.setattr(plain, "current_device", lambda: world.current)
    monkeypatch.setattr(plain, "current_stream", lambda ordinal: 7000 + ordinal)
    monkeypatch.setattr(driver, "load_function", world.load)
    monkeypatch.setattr(driver, "launch", lambda: world.launch)
    monkeypatch.setattr(driver, "current_device", lambda ordinal: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda ordinal: nullcontext())
    return world


def found(kernels: PlainKernels, *specs: Spec) -> list[Any]:
    kernel = kernels.find(CUDA, *specs)
    assert kernel is not None
    return kernel


def test_loaded_once_and_launched(world: World) -> None:
    kernels = PlainKernels()
    for _ in range(3):
        (kernel,) = found(kernels, SPEC)
    assert world.built == ["kgen_gather"]
    assert world.loaded == [("kgen_gather", 1024, 0)]
    kernel.launch(5, bytes(range(64)))
    kernel.launch(6, bytes(64), 512)
    kernel.launch(0, bytes(64))
    one, other = world.launches
    assert (one.grid, one.block, one.smem_bytes) == ((5, 1, 1), (256, 1, 1), 1024)
    assert (one.stream, one.function, one.args) == (7000, 88, bytes(range(64)))
    assert other.smem_bytes == 512


def test_another_device_is_made_current(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def device(ordinal: int) -> Any:
        made.append(ordinal)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", device)
    world.current = 3
    found(PlainKernels(), SPEC)[0].launch(1, bytes(64))
    assert made == [0]


def test_cpu_tensors_have_no_kernel(world: World) -> None:
    assert PlainKernels().find(torch.device("cpu"), SPEC) is None
    assert world.built == []


@pytest.mark.parametrize("stage", ["build", "load"])
def test_what_can_not_be_had_is_said_once(world: World, stage: str) -> None:
    if stage == "build":
        world.build_error = CompileError("no good")
    else:
        world.load_error = DriverError("no good", 218)
    kernels = PlainKernels()
    with pytest.warns(KgenWarning, match=r"slow reference on cuda:0: .*no good"):
        assert kernels.find(CUDA, SPEC) is None
    assert kernels.find(CUDA, SPEC) is None
    assert len(world.built) == 1
    assert len(kernels.failures) == 1
    kernels.reset()
    assert kernels.failures == []
    world.build_error = world.load_error = None
    assert kernels.find(CUDA, SPEC) is not None


def test_a_lost_context_is_no_reason_for_the_reference(world: World) -> None:
    world.load_error = DriverError("lost", 700, fatal=True)
    with pytest.raises(DriverError, match="lost"):
        PlainKernels().find(CUDA, SPEC)


def test_loading_is_refused_while_a_graph_is_captured(world: World) -> None:
    kernels = PlainKernels()
    world.capturing = True
    with pytest.raises(LaunchError, match=r"kgen_gather is not loaded yet.*before the capture"):
        kernels.find(CUDA, SPEC)
    world.capturing = False
    found(kernels, SPEC)
    world.capturing = True
    found(kernels, SPEC)


def test_a_thread_without_a_context_tries_again(world: World) -> None:
    world.codes = [driver.INVALID_CONTEXT, 0]
    found(PlainKernels(), SPEC)[0].launch(1, bytes(64))
    assert len(world.launches) == 2


class Recording:
    """In place of KERNELS, for CPU tensors: keeps launches, computes nothing."""

    def __init__(self) -> None:
        self.specs: list[Spec] = []
        self.calls: list[tuple[int, bytes]] = []
        self.plans: dict[Any, Any] = {}

    def find(self, device: torch.device, *specs: Spec) -> list[Recording]:
        self.specs += specs
        return [self] * len(specs)

    def num_sms(self, device: torch.device) -> int:
        return 132

    def launch(self, grid: int, args: bytes, smem_bytes: int | None = None) -> None:
        self.calls.append((grid, args))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recording:
    recording = Recording()
    monkeypatch.setattr(cast_launch, "KERNELS", recording)
    return recording


def test_kernels_and_grids_of_casts(recorded: Recording) -> None:
    """Rows alone, rows at once, tiles; two passes where the scales span tiles."""
    x = random(300, 520, BF16)
    for recipe, direction, grids in (
        ("token", "normal", [10 * 3]),
        ("row", "normal", [300]),
        ("block", "normal", [3 * 5]),
        ("token", "both", [3 * 5]),
        ("row", "both", [3 * 5] * 2),
        ("tensor", "normal", [3 * 5] * 2),
    ):
        recorded.calls.clear()
        c.run_cast(x, CastOptions(recipe, direction))
        assert [grid for grid, _ in recorded.calls] == grids, (recipe, direction)
        assert all(len(args) == 184 for _, args in recorded.calls)


def test_arguments_of_a_cast(recorded: Recording) -> None:
    x = random(300, 600, BF16)[:, :520]
    result = c.run_cast(x, CastOptions("token", "both"))
    ((_, args),) = recorded.calls
    values = struct.unpack("<10Q10q4IQ", args)
    assert values[:6] == (*(t.data_ptr() for t in (x, *result[:4]) if t is not None), 0)
    assert values[10:13] == (600, 520, 300)
    assert values[13:17] == (1, 300, 1, 520)
    assert values[20:] == (300, 520, 300, 1, 0)


def test_arguments_of_gathered_rows_cast_transposed(recorded: Recording) -> None:
    """The result's rows and x's own: tiles are those of the rows that are named."""
    x, rows = random(40, 600, BF16)[:, :520], torch.zeros(300, dtype=torch.int32)
    values, scales = moe.gather_per_token_cast_to_fp8(x, rows, transposed=True)
    ((grid, args),) = recorded.calls
    assert grid == 3 * 5
    assert recorded.specs[0].variables["gather"] is True
    found = struct.unpack("<10Q10q4IQ", args)
    addresses = (x.data_ptr(), 0, 0, values.data_ptr(), scales.data_ptr(), 0, 0, 0, rows.data_ptr())
    assert found[:9] == addresses
    assert found[10:13] == (600, 0, 300)
    assert found[15:17] == (1, 520)
    assert found[20:] == (300, 520, 40, 1, 0)
    moe.gather_per_token_cast_to_fp8(x, rows[:16], transposed=True)
    assert struct.unpack("<4I", recorded.calls[1][1][-24:-8]) == (16, 520, 40, 1)


def test_arguments_of_weights_of_rows(recorded: Recording) -> None:
    x, weights = random(33, 512, BF16), torch.rand(33, 2)[:, 0]
    c.swiglu_per_token_cast_to_fp8(x, row_weights=weights)
    ((_, args),) = recorded.calls
    assert recorded.specs[0].variables["weighted"] is True
    *sizes, address = struct.unpack("<4IQ", args[-24:])
    assert sizes == [33, 256, 33, 1]
    assert address not in (0, weights.data_ptr()), "of a copy: every second number"


@pytest.mark.parametrize(
    ("x", "vector"),
    [
        (random(4, 256, BF16), True),
        (random(4, 252, BF16), False),
        (random(4, 264, BF16)[:, 4:260], False),
        (random(4, 264, BF16)[:, 8:], True),
        (random(4, 260, FP32)[:, :256], True),
        (random(4, 258, FP32)[:, :256], False),
        (random(1, 258, FP32)[:, :256], True),
    ],
)
def test_rows_on_sixteen_bytes_are_read_so(
    x: torch.Tensor, vector: bool, recorded: Recording
) -> None:
    c.run_cast(x, CastOptions())
    assert recorded.specs[0].variables["vector"] is vector


def test_a_masked_cast_starts_no_more_than_the_device_holds(recorded: Recording) -> None:
    x = torch.empty(64, 4096, 2 * 2048, dtype=BF16)
    c.swiglu_per_token_cast_to_fp8(x, torch.zeros(64, dtype=torch.int32))
    c.swiglu_per_token_cast_to_fp8(x[:1, :40], torch.zeros(1, dtype=torch.int32))
    assert [grid for grid, _ in recorded.calls] == [132 * 4, 2 * 8]


def test_kernels_are_made_once_a_choice_and_looked_up_once_a_layout(recorded: Recording) -> None:
    for m in (3, 5, 3):
        c.run_cast(random(m, 256, BF16), CastOptions())
    assert len(recorded.specs) == 2
    assert recorded.specs[0] is recorded.specs[1]
    assert recorded.calls[0][1][80:] == recorded.calls[2][1][80:]
    shifted = random(3, 257, BF16).view(-1)[1:769].view(3, 256)
    c.run_cast(shifted, CastOptions())
    assert recorded.specs[2].variables["vector"] is False


def test_sources_name_their_choices() -> None:
    source = render_plain(SPEC.template, SPEC.entry, SPEC.variables)
    assert source.text.startswith("// kgen_gather [vector_bytes=16 scaled=False] for sm_90a")
    assert source.body_hash in source.text
    assert "#include" not in source.text
