"""The kernel path of kgen.runtime.gemm on a driver made of callbacks: what is built, launched,
remembered, copied and counted. CPU tensors stand for those of a Hopper GPU."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kgen.config import GemmConfig
from kgen.errors import (
    ArtifactError,
    CompileError,
    CompilerMissing,
    DatabaseError,
    DriverError,
    LaunchError,
    UnsupportedInput,
)
from kgen.problem import GemmProblem, ceil_div
from kgen.runtime import calls, dispatch, driver, gemm
from kgen.runtime import copies as copying
from kgen.runtime.dispatch import Dispatcher
from kgen.runtime.lookup import Winner
from kgen.runtime.stats import KgenWarning, Stats
from tests.unit.fake_driver import FakeDriver
from tests.unit.test_tma import forget

N, K = 576, 512
TUNED = GemmConfig(block_m=64, block_n=48, num_stages=4, num_math_warpgroups=1)


class FakeBuilder:
    """Builds at once, counts, and fails for the configurations it is told to."""

    compiler_id = "nvrtc-13.0.0"

    def __init__(self) -> None:
        self.built: list[GemmConfig] = []
        self.foreign: list[str] = []
        self.bad: set[GemmConfig] = set()
        self.all_bad = False

    def key(self, problem: GemmProblem, config: GemmConfig) -> str:
        return f"key of {config}"

    def build(self, problem: GemmProblem, config: GemmConfig) -> Any:
        self.built.append(config)
        if self.all_bad or config in self.bad:
            raise CompileError(f"spills: {config}")
        return SimpleNamespace(data=b"cubin", entry="kgen_gemm", config=config, from_cache=False)

    def stored_foreign(self, key: str, problem: GemmProblem, config: GemmConfig) -> Any:
        self.foreign.append(key)
        if key == "gone":
            raise ArtifactError("no kernel by hand with that key")
        return SimpleNamespace(data=b"cubin", entry="kgen_gemm", config=config, from_cache=True)


class World:
    """A GPU, a database and a compiler, all of them made up."""

    def __init__(self) -> None:
        self.fake = FakeDriver()
        self.builder = FakeBuilder()
        self.winners: dict[GemmProblem, tuple[Winner, ...]] = {}
        self.reads = 0
        self.wants_foreign = False
        self.database_error: str | None = None
        self.capturing = False
        self.current = 0
        self.stats = Stats()

    def read_winners(
        self, problem: GemmProblem, device: object, url: str, foreign: bool = False
    ) -> Any:
        self.reads += 1
        self.wants_foreign = foreign
        if self.database_error:
            raise DatabaseError(self.database_error)
        return self.winners.get(problem.with_m(1), ())

    def tune(
        self, m: int, config: GemmConfig = TUNED, key: str = "", foreign: bool = False
    ) -> None:
        family = GemmProblem("dense", 1, N, K)
        row = Winner(m, config, key or f"key of {config}", foreign)
        self.winners[family] = (*self.winners.get(family, ()), row)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World()
    monkeypatch.setattr(driver, "_api", lambda: world.fake)
    monkeypatch.setattr(calls, "STATS", world.stats)
    monkeypatch.setattr(calls, "ordinal_of", lambda device: 0)
    monkeypatch.setattr(calls, "current_device", lambda: world.current)
    for module in (calls, copying):
        monkeypatch.setattr(module, "current_stream", lambda ordinal: 7000 + ordinal)
    monkeypatch.setattr(torch.cuda, "device", lambda ordinal: nullcontext())
    monkeypatch.setattr(calls, "StoredBuilder", lambda settings: world.builder)
    monkeypatch.setattr(dispatch, "read_winners", world.read_winners)
    monkeypatch.setattr(dispatch, "is_capturing", lambda ordinal: world.capturing)
    forget()
    gemm.reload()
    yield world
    gemm.set_num_sms(0)
    gemm.reload()
    forget()


def e4m3(rows: int, cols: int, pitch: int = 0) -> torch.Tensor:
    return torch.ones(rows, pitch or cols).to(torch.float8_e4m3fn)[:, :cols]


def call(m: int, n: int = N, k: int = K, **replaced: Any) -> dict[str, Any]:
    """Run one GEMM; gives its tensors."""
    blocks = ceil_div(k, 128)
    t = {
        "a": e4m3(m, k),
        "sfa": torch.ones(blocks, ceil_div(m, 4) * 4).t()[:m],
        "b": e4m3(n, k),
        "sfb": torch.ones(ceil_div(n, 128), blocks),
        "out": torch.zeros(m, n, dtype=torch.bfloat16),
    }
    t |= replaced
    run(t)
    return t


def run(t: dict[str, Any]) -> None:
    gemm.gemm_fp8_nt((t["a"], t["sfa"]), (t["b"], t["sfb"]), t["out"])


def numbers(world: World, *names: str) -> list[int]:
    snapshot = gemm.stats()
    return [snapshot[name] for name in names]


def test_a_tuned_problem_runs_on_its_winner(world: World) -> None:
    world.tune(64)
    t = call(64)
    assert world.builder.built == [TUNED]
    (launch,) = world.fake.launches
    assert launch.stream == 7000
    assert gemm.last_path() == "kernel"
    assert world.fake.maps[0].address == t["a"].data_ptr()
    assert numbers(world, "compiles", "database_hits", "database_misses") == [1, 1, 0]
    plan = gemm.plan_for(64, N, K)
    assert plan is not None
    assert plan.choice is not None
    assert (plan.choice.config, plan.choice.origin) == (TUNED, "tuned")


def test_after_the_first_call_nothing_is_asked_again(world: World) -> None:
    world.tune(64)
    t = call(64)
    maps, log = len(world.fake.maps), list(world.fake.log)
    world.read_winners = None  # type: ignore[assignment,method-assign]
    for _ in range(5):
        run(t)
    assert len(world.fake.launches) == 6
    assert len(world.fake.maps) == maps
    assert world.fake.log == log
    assert world.reads == 1
    assert numbers(world, "prepared", "compiles") == [1, 1]


def test_other_addresses_are_packed_anew_but_not_looked_up(world: World) -> None:
    world.tune(64)
    kept = [call(64) for _ in range(3)]
    assert len({t["a"].data_ptr() for t in kept}) == 3
    assert numbers(world, "prepared", "compiles", "database_hits") == [3, 1, 1]
    assert world.reads == 1


def test_the_same_address_with_another_shape_is_another_call(world: World) -> None:
    t = call(64)
    short = {**t, "a": t["a"][:32], "sfa": t["sfa"][:32], "out": t["out"][:32]}
    run(short)
    assert [len(world.fake.launches), world.fake.maps[4].dims[1]] == [2, 32]
    with pytest.raises(UnsupportedInput, match="a_scales"):
        run({**t, "sfa": t["sfa"][:, :3]})
    with pytest.raises(UnsupportedInput, match="b_scales"):
        run({**t, "sfb": t["sfb"].view(torch.int32)})
    assert len(world.fake.launches) == 2


def test_prepared_launches_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_PREPARED", 4)
    kept = [call(m) for m in range(1, 11)]
    assert len(gemm._prepared) == 4
    run(kept[0])
    assert len(world.fake.launches) == 11
    assert len(gemm._prepared) == 4


def test_compiles_are_bounded_by_configurations_not_by_m(world: World) -> None:
    for m in range(1, 200):
        call(m, n=64, k=256)
    distinct = len(set(world.builder.built))
    assert len(world.builder.built) == distinct <= 8
    assert world.reads == 1
    assert numbers(world, "database_misses") == [199]
    assert gemm.missed_shapes()[:2] == ["dense m=1 n=64 k=256", "dense m=2 n=64 k=256"]


def test_a_neighbour_is_counted_and_reported_as_missed(world: World) -> None:
    plan = gemm.plan_for(64, N, K)
    assert plan is not None
    assert plan.choice is not None
    gemm.reload()
    gemm.reset_stats()
    world.tune(60, plan.choice.config)
    call(64)
    assert numbers(world, "neighbours", "database_misses") == [1, 1]
    assert gemm.missed_shapes() == [f"dense m=64 n={N} k={K}"]


def test_stale_winners_warn_once_and_are_not_used(world: World) -> None:
    world.tune(64, key="of an older kgen")
    with pytest.warns(KgenWarning, match="verified as other cubins than nvrtc-13.0.0"):
        call(64)
    assert TUNED not in world.builder.built
    assert numbers(world, "stale", "database_hits") == [1, 0]


def test_a_refreshed_kernel_answers_where_the_faster_one_is_stale(world: World) -> None:
    """The fastest row may be of a cubin that no compiler here makes any more."""
    world.tune(64, key="old")
    world.tune(64, replace(TUNED, num_stages=5))
    call(64)
    assert gemm.plan_for(64, N, K).choice.config.num_stages == 5  # type: ignore[union-attr]
    assert numbers(world, "stale", "database_hits") == [0, 1]


def test_a_source_by_hand_answers_only_where_it_was_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.tune(64, key="by hand", foreign=True)
    world.tune(64, replace(TUNED, num_stages=5))
    monkeypatch.setenv("KGEN_FOREIGN", "1")
    gemm.reload()
    call(64)
    plan = gemm.plan_for(64, N, K)
    assert plan is not None
    assert plan.choice is not None
    assert (world.wants_foreign, plan.choice.origin) == (True, "foreign")
    assert world.builder.foreign == ["by hand"]
    assert numbers(world, "database_hits", "database_misses") == [1, 0]
    call(65)  # it serves no other M
    assert world.builder.foreign == ["by hand"]
    monkeypatch.delenv("KGEN_FOREIGN")
    gemm.reload()
    call(64)
    assert not world.wants_foreign


def test_a_source_by_hand_that_is_gone_gives_way_to_the_tuned_kernel(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.tune(64, key="gone", foreign=True)
    world.tune(64, replace(TUNED, num_stages=5))
    monkeypatch.setenv("KGEN_FOREIGN", "1")
    gemm.reload()
    call(64)
    assert world.builder.built == [replace(TUNED, num_stages=5)]
    assert numbers(world, "database_hits") == [1]


def test_a_dispatch_table_answers_every_m_with_few_kernels_and_is_no_miss(world: World) -> None:
    """Where its kernel can not be built, the winner of the M answers."""
    family = GemmProblem("dense", 1, N, K)
    wide = replace(TUNED, block_n=56)
    world.winners[family] = (
        Winner(64, TUNED, f"key of {TUNED}", serves_from=1),
        Winner(256, wide, f"key of {wide}", serves_from=65),
        Winner(200, replace(TUNED, num_stages=3), f"key of {replace(TUNED, num_stages=3)}"),
    )
    for m in (1, 17, 63, 64, 65, 199, 200, 256):
        call(m)
    assert world.builder.built == [TUNED, wide]
    assert numbers(world, "database_hits", "tables", "database_misses") == [8, 8, 0]
    assert gemm.missed_shapes() == []


def test_a_lost_database_warns_once_and_costs_one_try(world: World) -> None:
    world.database_error = "locked for 2 s"
    with pytest.warns(KgenWarning, match="default configurations, not tuned ones: locked") as seen:
        call(64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(64, n=64)
        call(100)
    assert len(seen) == 1
    assert world.reads == 1
    assert len(world.fake.launches) == 3


def test_a_winner_that_does_not_build_gives_way_to_the_default(world: World) -> None:
    world.tune(64)
    world.builder.bad = {TUNED}
    call(64)
    call(64)
    assert gemm.last_path() == "kernel"
    assert world.builder.built.count(TUNED) == 1
    assert len(world.fake.launches) == 2


def test_when_nothing_builds_the_reference_answers_warns_and_is_counted(world: World) -> None:
    world.builder.all_bad = True
    with pytest.warns(KgenWarning, match="slow reference on cpu, because spills") as seen:
        t = call(64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(t)
    assert len(seen) == 1
    assert gemm.last_path() == "reference"
    assert (t["out"] == K).all()
    assert sum(gemm.stats()["fallbacks"].values()) == 2
    tries = len(world.builder.built)
    call(64)
    assert len(world.builder.built) == tries <= 5


def test_a_driver_too_old_falls_back(world: World) -> None:
    world.fake.load_result = 222
    with pytest.warns(KgenWarning, match="made by nvrtc-13.0.0.*update the driver"):
        t = call(16)
    assert (t["out"] == K).all()


def test_no_driver_bindings_falls_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise DriverError("cuda.bindings.driver can not be imported: ...")

    monkeypatch.setattr(driver, "_api", missing)
    with pytest.warns(KgenWarning, match="can not be imported"):
        t = call(16)
    assert (t["out"] == K).all()


def test_no_compiler_falls_back_and_is_looked_for_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []

    def missing(settings: object) -> None:
        looked.append(settings)
        raise CompilerMissing("no compiler to use: looked here and there")

    monkeypatch.setattr(calls, "StoredBuilder", missing)
    with pytest.warns(KgenWarning, match="looked here and there"):
        call(16)
    assert (call(17)["out"] == K).all()
    assert len(looked) == 1
    gemm.reload()
    call(16)
    assert len(looked) == 2
    assert gemm.stats()["fallbacks"] == {"no compiler to use: looked here and there": 3}


def test_a_lost_context_is_raised_and_nothing_answers_instead(world: World) -> None:
    t = call(64)
    world.fake.launch_results = [700]
    with pytest.raises(DriverError, match="restart the process"):
        run(t)
    world.fake.load_result = 700
    with pytest.raises(DriverError, match="restart the process"):
        call(64, out=torch.zeros(64, N))
    assert gemm.stats()["fallbacks"] == {}


def test_in_a_capture_only_what_is_loaded_runs(world: World) -> None:
    world.tune(64)
    t = call(64)
    world.capturing = True
    run(t)
    call(64)  # other addresses: packing is host work
    with pytest.raises(LaunchError, match=rf"warm_up\(m=64, n=64, k={K}, ...\)"):
        call(64, n=64)
    assert len(world.fake.launches) == 3
    reads, log = world.reads, list(world.fake.log)
    with pytest.raises(LaunchError, match="forbids loading one"):
        call(64, n=64)
    assert (world.reads, world.fake.log) == (reads, log)
    world.capturing = False
    gemm.warm_up([64], 64, K)
    world.capturing = True
    call(64, n=64)
    assert len(world.fake.launches) == 4


def test_an_sm_budget_is_another_problem_and_bounds_the_grid(world: World) -> None:
    t = call(4096, n=64, k=128, sfa=torch.ones(4096, 1))
    gemm.set_num_sms(20)
    assert gemm.get_num_sms() == 20
    run(t)
    assert [launch.grid[0] <= 20 for launch in world.fake.launches] == [False, True]
    gemm.set_num_sms(500)  # more than there are: all of them
    run(t)
    assert world.fake.launches[2].grid == world.fake.launches[0].grid
    assert gemm.missed_shapes() == [
        "dense m=4096 n=64 k=128",
        "dense m=4096 n=64 k=128 num_sms=20",
    ]


def test_tensors_elsewhere_run_there(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def device(ordinal: int) -> Any:
        seen.append(ordinal)
        return nullcontext()

    t = call(64)
    monkeypatch.setattr(torch.cuda, "device", device)
    run(t)
    assert seen == []
    world.current = 1
    run(t)
    assert seen == [0]
    assert world.fake.launches[2].stream == 7000


def test_all_output_types_have_their_own_kernels(world: World) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        call(64, out=torch.zeros(64, N, dtype=dtype))
    assert [m.kind for m in world.fake.maps[2::4]] == [9, 6, 7]
    assert len(world.builder.built) == 3


# ------------------------------------------------------------------------ copies


def copies(world: World) -> dict[str, int]:
    found: dict[str, int] = gemm.stats()["copies"]
    return found


def test_aligned_views_are_read_in_place(world: World) -> None:
    out = torch.zeros(3, 704, dtype=torch.bfloat16)[:, :N]
    call(3, a=e4m3(3, K, 640), b=e4m3(N, K, 640), out=out)
    assert [m.strides for m in world.fake.maps[:3]] == [[640], [640], [1408]]
    assert copies(world) == {}
    assert gemm.last_path() == "kernel"


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("a", e4m3(16, K, 520), "a: a row pitch of 520 bytes, not a multiple of 16"),
        ("a", e4m3(16, 528)[:, 8:520], "a: an address that is not a multiple of 16 bytes"),
        ("a", e4m3(K, 16).t(), "a: columns 16 elements apart"),
        ("b", e4m3(N, K, 520), "b: a row pitch of 520 bytes, not a multiple of 16"),
        ("b", e4m3(N + 1, 64).flatten().as_strided((N, K), (16, 1)), "b: rows that overlap"),
    ],
)
def test_what_tma_can_not_take_is_copied_and_said(
    world: World, name: str, tensor: torch.Tensor, reason: str
) -> None:
    given: dict[str, Any] = {name: tensor}
    with pytest.warns(KgenWarning, match=f"copies {name} for each such call, because of"):
        t = call(16, **given)
    run(t)
    (found,) = copies(world)
    assert found.startswith(reason)
    assert copies(world)[found] == 2
    assert gemm.last_path() == "kernel with copies"
    own = world.fake.maps[0 if name == "a" else 1]
    assert own.address != tensor.data_ptr()
    assert own.strides == [K]
    assert len(world.fake.launches) == 2


def launches_write(world: World, value: float) -> None:
    """Make each launch fill the D of the last launch packed, as a kernel would."""

    def fill() -> None:
        d = world.fake.maps[2]
        kind = {9: torch.bfloat16, 6: torch.float16, 7: torch.float32}[d.kind]
        raw = (ctypes.c_uint8 * (d.strides[0] * d.dims[1])).from_address(d.address)
        flat = torch.frombuffer(raw, dtype=kind)
        flat.as_strided((d.dims[1], d.dims[0]), (len(flat) // d.dims[1], 1)).fill_(value)

    world.fake.on_launch = fill


def test_an_unaligned_output_is_written_through_one_of_our_own(world: World) -> None:
    launches_write(world, 3.0)
    base = torch.full((16, 580), -1.0, dtype=torch.bfloat16)
    with pytest.warns(KgenWarning, match="copies out"):
        call(16, out=base[:, 2 : 2 + N])
    assert (base[:, 2 : 2 + N] == 3).all()
    assert (base[:, :2] == -1).all()
    assert (base[:, 2 + N :] == -1).all()


@pytest.mark.parametrize("n", [1, 7, 573, 129])
def test_any_n_is_served(world: World, n: int) -> None:
    launches_write(world, 5.0)
    with pytest.warns(KgenWarning, match=f"N = {n}, not a multiple of 8"):
        t = call(16, n=n)
    assert (t["out"] == 5).all()
    assert world.fake.maps[1].address == t["b"].data_ptr()
    assert world.fake.maps[1].dims == [K, n]
    assert world.fake.maps[2].dims[0] % 8 == 0


def test_any_k_is_served(world: World) -> None:
    with pytest.warns(KgenWarning, match="K = 500, not a multiple of 16"):
        call(16, k=500)
    assert [m.dims for m in world.fake.maps[:2]] == [[512, 16], [512, N]]
    assert set(copies(world)) == {f"{x}: K = 500, not a multiple of 16" for x in "ab"}


def test_a_padded_copy_ends_in_zeros() -> None:
    copy = copying._aligned(e4m3(3, 20), 32)
    assert (copy[:, :20].float() == 1).all()
    assert (copy[:, 20:].float() == 0).all()


def test_row_major_scales_are_read_directly_for_few_rows(world: World) -> None:
    call(128, sfa=torch.ones(128, 4))
    assert len(world.fake.maps) == 3
    assert copies(world) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(132, sfa=torch.ones(132, 4))
    assert len(world.fake.maps) == 3 + 4
    assert copies(world) == {"a_scales: row-major": 1}
    assert gemm.last_path() == "kernel"


# ------------------------------------------------------------------------ dispatcher


def test_many_problems_do_not_grow_without_bound(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_MAX_PLANS", 8)
    dispatcher = Dispatcher(0, world.builder, "", world.stats)
    for m in range(1, 40):
        dispatcher.plan(GemmProblem("dense", m, 64, 256))
    assert len(dispatcher._plans) <= 8
    assert world.reads == 1
