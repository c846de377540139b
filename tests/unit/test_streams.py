"""Known calls on a made-up driver: what a prepared launch is right for, and streams, threads and
devices. CPU tensors stand for those of Hopper GPUs."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kgen.errors import DriverError, UnsupportedInput
from kgen.runtime import calls, copies, gemm, guard
from kgen.runtime.guard import layout_of, same_as
from tests.unit.test_dispatch import K, N, World, call, e4m3, run
from tests.unit.test_dispatch import world as world  # noqa: PLC0414, a fixture

GUARDS = ["torch's guard", "python"]


@pytest.fixture(params=GUARDS)
def guard_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of recognising tensors."""
    kind: str = request.param
    if kind == "python":
        monkeypatch.setattr(guard, "_TensorGuards", None)
    else:
        assert guard._TensorGuards is not None
    return kind


# ------------------------------------------------------------------------ recognised or not


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return e4m3(4, 32), torch.ones(4, 8)


OTHERS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "rows": lambda a, x: (a[:3], x),
    "columns": lambda a, x: (a, x[:, :7]),
    "pitch": lambda a, x: (a, torch.ones(4, 9)[:, :8]),
    "turned": lambda a, x: (a, torch.ones(8, 4).t()),
    "rank": lambda a, x: (a, x[None]),
    "flat": lambda a, x: (a.view(-1), x),
    "type": lambda a, x: (a.view(torch.uint8), x),
    "same size type": lambda a, x: (a, x.view(torch.int32)),
    "device": lambda a, x: (a, x.to("meta")),
    "gradient": lambda a, x: (a, x.clone().requires_grad_()),
    "negated": lambda a, x: (a, torch._neg_view(x)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_differs_is_not_taken_for_the_same(guard_kind: str, case: str) -> None:
    tensors = pair()
    same = same_as(tensors)
    assert same(*tensors)
    assert same(*pair())  # an address is not the guard's business
    others = OTHERS[case](*tensors)
    assert not same(*others)
    assert (layout_of(others) == layout_of(tensors)) == (case == "gradient")


def test_a_guard_made_for_a_gradient_still_refuses_it(guard_kind: str) -> None:
    a, x = pair()
    x.requires_grad_()
    with torch.no_grad():
        same = same_as((a, x))
        assert same(a, x)
    assert not same(a, x)


def test_a_guard_of_torch_that_changed_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(*tensors: torch.Tensor, **names: Any) -> Any:
        raise TypeError("unexpected keyword")

    monkeypatch.setattr(guard, "_TensorGuards", changed)
    tensors = pair()
    assert same_as(tensors)(*tensors)
    assert not same_as(tensors)(*OTHERS["pitch"](*tensors))


def test_the_same_addresses_with_another_layout_are_another_call(
    world: World, guard_kind: str
) -> None:
    memory = torch.ones(64 * N * 2, dtype=torch.bfloat16)
    out = memory[: 64 * N].view(64, N)
    t = call(64, out=out)
    other_calls: tuple[dict[str, Any], ...] = (
        {"out": memory.as_strided((64, N), (N + 8, 1))},
        {"out": out.view(torch.float16)},
        {"sfa": t["sfa"].t().reshape(64, 4) * 1, "out": out},
    )
    for number, other in enumerate(other_calls, 2):
        run({**t, **other})
        assert gemm.stats()["prepared"] == number
        assert len(world.fake.launches) == number
    run(t)
    with pytest.raises(UnsupportedInput, match="a_scales"):
        run({**t, "sfa": t["sfa"][:, :3]})
    with pytest.raises(UnsupportedInput, match="b is uint8"):
        run({**t, "b": t["b"].view(torch.uint8)})
    with pytest.raises(UnsupportedInput, match="a_scales is a negated view"):
        run({**t, "sfa": torch._neg_view(t["sfa"])})
    assert len(world.fake.launches) == len(other_calls) + 2


def test_a_budget_of_sms_is_not_served_by_a_launch_for_all(world: World) -> None:
    t = call(4096, n=64, k=128, sfa=torch.ones(4096, 1))
    for num_sms in (20, 0, 40, 20):
        gemm.set_num_sms(num_sms)
        run(t)
    grids = [launch.grid[0] for launch in world.fake.launches]
    assert grids[0] == grids[2] > grids[3] > grids[1] == grids[4]
    assert gemm.stats()["prepared"] == 3


def test_memory_freed_and_used_again_is_served_by_its_launch(world: World) -> None:
    t = call(64)
    address = t["a"].data_ptr()
    fresh = t["a"].clone()
    t["a"].set_(fresh.untyped_storage(), 0, fresh.shape, fresh.stride())  # moved under our feet
    run(t)
    assert [m.address for m in world.fake.maps[::4]] == [address, fresh.data_ptr()]
    t["a"] = fresh.view(64, K)  # another tensor where one was
    run(t)
    assert gemm.stats()["prepared"] == 2
    assert world.fake.launches[2].argument == world.fake.launches[1].argument


def test_a_mode_does_not_pack_again(world: World, guard_kind: str) -> None:
    t = call(64)
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            run(t)
            run(t)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            run(t)
        run(t)
    assert gemm.stats()["prepared"] == 1
    assert len(world.fake.launches) == 11


def test_a_known_tensor_that_comes_to_require_a_gradient_is_refused(
    world: World, guard_kind: str
) -> None:
    t = call(64)
    t["sfb"].requires_grad_()
    with pytest.raises(UnsupportedInput, match="gemm_fp8_nt has no gradient"):
        run(t)
    with torch.no_grad():
        run(t)
    assert len(world.fake.launches) == 2


def test_a_launch_counts_as_a_write(world: World) -> None:
    t = call(64)
    version = t["out"]._version
    run(t)
    assert t["out"]._version == version + 1


# ------------------------------------------------------------------ streams, threads, devices


class Cuda(threading.local):
    """Per thread: torch's current device, and the stream of each device."""

    device = 0
    stream = 0
    #: Where the tensors of the next first call are.
    tensors_on = 0

    def __init__(self, launched_on: list[int]) -> None:
        #: The current device of each launch so far, of all threads.
        self.launched_on = launched_on

    @contextmanager
    def use(self, ordinal: int) -> Iterator[None]:
        former, self.device = self.device, ordinal
        try:
            yield
        finally:
            self.device = former


@pytest.fixture
def cuda(world: World, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda([])
    monkeypatch.setattr(calls, "ordinal_of", lambda device: cuda.tensors_on)
    monkeypatch.setattr(calls, "current_device", lambda: cuda.device)
    monkeypatch.setattr(torch.cuda, "device", cuda.use)
    for module in (calls, copies):
        monkeypatch.setattr(module, "current_stream", lambda n: 1000 * n + cuda.stream)
    world.fake.on_launch = lambda: cuda.launched_on.append(cuda.device)
    return cuda


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run it in so many threads at once; raises what the first of them raised."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def guarded(index: int) -> None:
        try:
            barrier.wait()
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_sixteen_threads_launch_on_their_own_streams(world: World, cuda: Cuda) -> None:
    shared = call(8)
    world.fake.launches.clear()

    def work(index: int) -> None:
        cuda.stream = 1 + index
        own = call(16 + index)
        for _ in range(20):
            run(own)
            run(shared)
        assert gemm.last_path() == "kernel"

    in_threads(16, work)
    seen = Counter((launch.stream, launch.argument) for launch in world.fake.launches)
    assert Counter(seen.values()) == {20: 16, 21: 16}
    assert {stream for stream, _ in seen} == set(range(1, 17))
    per_argument = Counter(argument for _, argument in seen)
    assert sorted(per_argument.values()) == [1] * 16 + [16]
    assert gemm.stats()["prepared"] == 17


def test_threads_that_all_come_first_build_once(world: World, cuda: Cuda) -> None:
    world.tune(64)
    in_threads(16, lambda _: run(call(64)))
    assert len(world.builder.built) == 1
    assert len(world.fake.launches) == 32


def test_alternating_devices_each_get_their_kernel_and_stream(world: World, cuda: Cuda) -> None:
    tensors = []
    for ordinal in (0, 1, 2):
        cuda.tensors_on = ordinal
        tensors.append(call(64))
        assert cuda.device == 0
    assert [line for line in world.fake.log if line.startswith("load")] == [
        f"load 5 in {1000 + ordinal}" for ordinal in (0, 1, 2)
    ]
    cuda.stream = 5
    for current in (2, 0):
        with cuda.use(current):
            for t in tensors:
                run(t)
                assert cuda.device == current
    assert [launch.stream for launch in world.fake.launches[3:]] == [5, 1005, 2005] * 2
    assert cuda.launched_on == [0, 1, 2] * 3


def test_the_current_device_comes_back_after_a_fault(world: World, cuda: Cuda) -> None:
    cuda.tensors_on = 1
    t = call(64)
    world.fake.launch_results = [700]
    with pytest.raises(DriverError, match="restart the process"):
        run(t)
    assert cuda.device == 0


def test_copies_are_made_on_the_tensors_device(world: World, cuda: Cuda) -> None:
    cuda.tensors_on = 1
    with pytest.warns(RuntimeWarning, match="copies a"):
        call(16, a=e4m3(16, K, 520))
    assert world.fake.launches[0].stream == 1000
    assert cuda.launched_on == [1]
    assert cuda.device == 0


def test_threads_on_their_own_devices_do_not_disturb_each_other(world: World, cuda: Cuda) -> None:
    def work(index: int) -> None:
        cuda.device = cuda.tensors_on = index % 4
        own = call(64)
        for _ in range(10):
            run(own)
            assert cuda.device == index % 4

    in_threads(16, work)
    streams = Counter(launch.stream for launch in world.fake.launches)
    assert streams == dict.fromkeys((0, 1000, 2000, 3000), 44)
    assert Counter(cuda.launched_on) == dict.fromkeys(range(4), 44)


@pytest.mark.parametrize("name", ["a", "sfa", "b", "sfb", "out"])
def test_mixed_devices_are_refused_by_name(world: World, name: str) -> None:
    t = call(64)
    label = {"sfa": "a_scales", "sfb": "b_scales"}.get(name, name)
    with pytest.raises(UnsupportedInput, match=f"{label} on meta.*expected all tensors on one dev"):
        run({**t, name: t[name].to("meta")})
    assert len(world.fake.launches) == 1


def test_a_child_forked_after_the_import_computes() -> None:
    code = (
        "import os, torch, kgen.runtime.gemm as g\n"
        "child = os.fork()\n"
        "a = g.per_token_cast_to_fp8(torch.ones(3, 128))\n"
        "b = g.per_block_cast_to_fp8(torch.ones(8, 128))\n"
        "assert (g.mm_fp8_nt(a, b) == 128).all()\n"
        "assert (torch.ops.kgen.mm_fp8_nt(*a, *b, torch.float32) == 128).all()\n"
        "if child:\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
