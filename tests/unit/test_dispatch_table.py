"""From tuned M to a table and into the runtime: measured on a simulated GPU, kept, looked up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kgen.cache.db import TuningDatabase
from kgen.cache.records import DispatchEntry, DispatchTable
from kgen.cli.main import main
from kgen.config import GemmConfig
from kgen.device import H200
from kgen.errors import DatabaseError, RenderError, UsageError
from kgen.explain import explain
from kgen.problem import GemmProblem
from kgen.runtime.lookup import choose, read_winners
from kgen.search.dispatch_table import derive_table, measure_across, points_between
from kgen.search.events import TuneOptions
from kgen.search.gpu_run import gpu_run
from kgen.settings import Settings
from tests.unit.conftest import MakeTrial
from tests.unit.fake_search import BUILDER, DEVICE, GPU, FakeBuilder, time_us

#: Small N and K keep the space, and so the tests, small.
CLASS = GemmProblem("dense", 1, 576, 512)
CONFIGS = [
    GemmConfig(block_m=64, block_n=n, num_stages=4, num_math_warpgroups=1) for n in (48, 56, 64)
]
A, B, C = CONFIGS
HERE = (DEVICE.name, DEVICE.num_sms)


def key_of(config: GemmConfig) -> str:
    return FakeBuilder().key(CLASS, config)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path, jobs=1, trial_timeout_s=10.0)


Row = tuple[int, GemmConfig, float]


def store(
    settings: Settings,
    make_trial: MakeTrial,
    *found: Row,
    problem: GemmProblem = CLASS,
    key: str = "",
) -> None:
    with TuningDatabase.open(settings.db_url) as db:
        for m, config, us in found:
            own = key or FakeBuilder().key(problem, config)
            db.record(make_trial(us, problem=problem.with_m(m), config=config, cubin_key=own))


def derive(settings: Settings, bound: float = 0.03, problem: GemmProblem = CLASS) -> Any:
    with TuningDatabase.open(settings.db_url) as db:
        key = lambda config: FakeBuilder().key(problem, config)  # noqa: E731
        return derive_table(db, problem, DEVICE, key, policy="cold", bound=bound)


# ---- deriving


def test_ranges_points_and_costs(settings: Settings, make_trial: MakeTrial) -> None:
    rows = [(16, A, 5.0), (16, B, 5.1), (64, A, 6.0), (64, B, 6.1)]
    rows += [(256, A, 9.0), (256, B, 8.0), (1024, B, 20.0), (1024, C, 19.9)]
    store(settings, make_trial, *rows)
    found = derive(settings)
    assert [(one.low, one.entry.up_to, one.entry.config) for one in found.served] == [
        (1, 1024, B)
    ], "B alone is within 3 % everywhere"
    assert found.served[0].points == (16, 64, 256, 1024)
    assert found.table.worst == found.served[0].worst == pytest.approx(5.1 / 5.0 - 1)
    assert (found.table.num_kernels, found.num_winners, found.is_smallest) == (1, 3, True)
    assert found.table.entries[0].cubin_key == key_of(B)
    exact = derive(settings, bound=0.0)
    assert [(one.low, one.entry.up_to, one.entry.config) for one in exact.served] == [
        (1, 64, A),
        (65, 256, B),
        (257, 1024, C),
    ]
    assert exact.table.worst == 0.0


def test_stale_and_invalid_times_do_not_count(settings: Settings, make_trial: MakeTrial) -> None:
    store(settings, make_trial, (16, A, 5.0), (64, A, 6.0), (256, B, 8.0))
    store(settings, make_trial, (16, B, 1.0), (1024, B, 9.0), key="0" * 64)
    store(settings, make_trial, (256, replace(A, num_stages=99), 1.0))
    found = derive(settings)
    assert found.stale == (1024,)
    assert found.table.points == (16, 64, 256)
    assert found.table.worst == 0.0

    def refuses(config: GemmConfig) -> str:
        raise RenderError("the template refuses")

    with (
        TuningDatabase.open(settings.db_url) as db,
        pytest.raises(UsageError, match=r"times of M = \[16, 64, 256, 1024\] are of another"),
    ):
        derive_table(db, CLASS, DEVICE, refuses, policy="cold", bound=0.03)


def test_too_few_m(settings: Settings, make_trial: MakeTrial) -> None:
    store(settings, make_trial, (16, A, 5.0), (64, A, 6.0))
    with (
        TuningDatabase.open(settings.db_url) as db,
        pytest.raises(UsageError, match=r"0 M with a time under policy hot .* m=1\.\.16384\*2"),
    ):
        derive_table(db, CLASS, DEVICE, key_of, policy="hot", bound=0.03)


def test_points_between_are_even_by_ratio() -> None:
    assert points_between([1, 2, 4, 64, 4096], 1) == [3, 16, 512]
    assert points_between([64, 4096], 2) == [256, 1024]
    assert points_between([1, 2, 3], 3) == []
    assert points_between([16, 64], 0) == []


# ---- measuring


def options(**fake_gpu: Any) -> TuneOptions:
    return TuneOptions(backend=GPU, backend_options=fake_gpu, builder=BUILDER)


def measured(settings: Settings, neighbours: int = 1, between: int = 1, **fake_gpu: Any) -> Any:
    told: list[tuple[int, int, list[str]]] = []
    with gpu_run(settings, "dispatch-table", options(**fake_gpu)) as gpu:
        number = measure_across(
            gpu, CLASS, neighbours, between, lambda *values: told.append(values)
        )
    return number, told


def test_winners_are_timed_across_neighbours_and_between(
    settings: Settings, make_trial: MakeTrial, tmp_path: Path
) -> None:
    sure = [(16, A, 500.0), (64, B, 500.0), (1024, C, 500.0)] * 3  # medians that stay
    store(settings, make_trial, *sure, (1024, A, 600.0))
    journal = tmp_path / "journal"
    number, told = measured(settings, journal=str(journal))
    assert told == [(16, 2, []), (32, 2, []), (64, 3, []), (256, 2, []), (1024, 2, [])]
    assert number == 11
    timed: dict[str, list[str]] = {}
    for line in journal.read_text().splitlines():
        word, _, rest = line.partition(" ")
        if word == "open":
            timed[rest] = []
        elif word == "time":
            timed[list(timed)[-1]].append(rest)
    assert timed == {
        str(CLASS.with_m(m)): [str(config) for config in configs]
        for m, configs in {16: (A, B), 32: (A, B), 64: (B, A, C), 256: (B, C), 1024: (C, B)}.items()
    }
    with TuningDatabase.open(settings.db_url) as db:
        rows = db.trials(CLASS.with_m(32))
        assert [row.median_us for row in rows] == [time_us(CLASS.with_m(32), c) for c in (A, B)]
        assert {row.provenance["stage"] for row in rows} == {"between"}
    found = derive(settings, bound=0.0)
    assert found.table.points == (16, 32, 64, 256, 1024)
    # What lies between is no tuned M, and what was timed is not timed again.
    again, told = measured(settings)
    assert (again, told) == (0, [])
    number, told = measured(settings, neighbours=2)
    assert [m for m, _, _ in told] == [16, 32, 256], "A has a time at 1024"


def test_a_kernel_that_fails_at_another_m_serves_it_not(
    settings: Settings, make_trial: MakeTrial
) -> None:
    store(settings, make_trial, (16, A, 500.0), (64, B, 500.0))
    number, told = measured(settings, between=0, behaviours={str(A): "wrong"})
    assert number == 2
    assert all("wrong: tile (3, 1)" in failures[0] for _, _, failures in told)
    found = derive(settings, bound=0.5)
    assert [one.entry.config for one in found.served] == [B]
    with TuningDatabase.open(settings.db_url) as db:
        assert [row.status for row in db.trials(CLASS.with_m(64))] == ["ok", "ok", "wrong"]


# ---- keeping and looking up


def table(*entries: tuple[int, GemmConfig], **changes: Any) -> DispatchTable:
    values: dict[str, Any] = {
        "problem": CLASS,
        "device_name": H200.name,
        "num_sms": 132,
        "policy": "cold",
        "bound": 0.03,
        "worst": 0.01,
        "points": tuple(up_to for up_to, _ in entries),
        "entries": tuple(DispatchEntry(m, config, key_of(config)) for m, config in entries),
    }
    return DispatchTable(**{**values, **changes})


def test_the_last_table_of_a_class_counts(settings: Settings) -> None:
    with TuningDatabase.open(settings.db_url) as db:
        db.record_table(table((64, A)))
        db.record_table(table((64, B), (256, C)))
        db.record_table(table((64, A), problem=replace(CLASS, batch_invariant=True)))
        db.record_table(table((64, A), device_name="NVIDIA H20", num_sms=78))
        found = db.dispatch_table(CLASS.with_m(77), *HERE)
        assert found is not None
        kept = replace(found, date="", run_id=None)
        assert kept == table((64, B), (256, C))
        assert found.date
        invariant = db.dispatch_table(replace(CLASS, batch_invariant=True), *HERE)
        assert invariant is not None
        assert invariant.entries[0].config == A
        assert db.dispatch_table(replace(CLASS, n=1024), *HERE) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bound": 1.5}, "bound"),
        ({"worst": 0.05}, "worst"),
        ({"points": ()}, "points at M = "),
        ({"points": (64, 16)}, "ascending"),
        ({"points": (16, 128)}, "expected the last point, 128"),
        ({"entries": ()}, "entries at M = "),
    ],
)
def test_tables_that_contradict_themselves(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DatabaseError, match=message):
        table((16, A), (64, B), **changes)


def test_a_table_is_never_changed(settings: Settings) -> None:
    with TuningDatabase.open(settings.db_url) as db:
        db.record_table(table((64, A)))
        with pytest.raises(DatabaseError):
            db.write(lambda c: c.exec_driver_sql("UPDATE dispatch_tables SET bound = 0.5"))


def test_the_runtime_takes_the_table_for_every_m_in_it(
    settings: Settings, make_trial: MakeTrial
) -> None:
    """But for what was tuned since; and what lies above is as if there were none."""
    store(settings, make_trial, (16, A, 5.0), (64, B, 6.0))
    with TuningDatabase.open(settings.db_url) as db:
        db.record_table(table((16, A), (256, C)))

    def chosen(m: int) -> tuple[str, GemmConfig]:
        problem = CLASS.with_m(m)
        choice = choose(problem, H200, read_winners(problem, H200, settings.db_url), key_of)
        return choice.origin, choice.config

    assert [chosen(m) for m in (1, 16)] == [("table", A)] * 2
    assert [chosen(m) for m in (17, 64, 256)] == [("table", C)] * 3
    assert chosen(257)[0] in ("neighbour", "default")
    store(settings, make_trial, (100, B, 7.0), (16, C, 1.0))
    assert chosen(100) == ("tuned", B)
    assert chosen(16) == ("tuned", C)
    assert chosen(99) == ("table", C)
    with TuningDatabase.open(settings.db_url) as db:
        found = explain(CLASS.with_m(99), H200, db, key_of)
    assert (found.choice.origin, found.choice.tuned_m) == ("table", 256)


def test_a_stale_entry_gives_way(settings: Settings, make_trial: MakeTrial) -> None:
    store(settings, make_trial, (64, B, 6.0))
    old = (DispatchEntry(64, C, "0" * 64),)
    with TuningDatabase.open(settings.db_url) as db:
        db.record_table(table((64, C), entries=old))
    winners = read_winners(CLASS.with_m(64), H200, settings.db_url)
    choice = choose(CLASS.with_m(64), H200, winners, key_of)
    assert (choice.origin, choice.config) == ("tuned", B)


# ---- the command


def test_command_without_a_gpu(
    settings: Settings, make_trial: MakeTrial, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys are those of the compiler here, so the times are stored under them."""
    from kgen.build import key_of as real_key
    from kgen.toolchain import default_compiler

    compiler = default_compiler(settings)
    for m, config, us in ((16, A, 5.0), (64, A, 6.0), (64, B, 6.3), (256, B, 8.0)):
        key = real_key(CLASS, config, compiler)
        store(settings, make_trial, (m, config, us), key=key)
    words = ["dispatch-table", "dense m=1,2 n=576 k=512", "--db", settings.db_url]
    words += ["--cache", str(settings.cache_dir), "--no-gpu"]
    assert main([*words, "--dry-run"]) == 0
    done = capsys.readouterr()
    assert "nothing is timed: the GPU was left out on request" in done.err
    assert done.out.splitlines()[0] == "dense n=576 k=512 on NVIDIA H200, 132 SMs"
    lines = [line.split() for line in done.out.splitlines()[2:4]]
    assert [line[:3] for line in lines] == [["1–64", "2", "0.0%"], ["65–256", "1", "0.0%"]]
    assert "2 kernels, the fewest possible, for 3 M with 2 winners" in done.out
    with TuningDatabase.open(settings.db_url) as db:
        assert db.dispatch_table(CLASS, *HERE) is None
    assert main([*words, "--bound", "0.06", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["bound"], told["num_kernels"]) == (0.06, 2)
    with TuningDatabase.open(settings.db_url) as db:
        kept = db.dispatch_table(CLASS, *HERE)
    assert kept is not None
    assert [entry.up_to for entry in kept.entries] == [64, 256]
    words.insert(1, "dense m=1 n=1024 k=512")
    assert main(words) == 1
    assert "n=1024 k=512: 0 M with a time" in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--bound", "1"), ("--bound", "x"), ("--between", "-1")])
def test_wrong_usage(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["dispatch-table", "dense m=1 n=576 k=512", *option])
    assert left.value.code == 2
    assert "expected a" in capsys.readouterr().err


def test_one_order_of_sums_over_a_batch_invariant_table(
    settings: Settings, make_trial: MakeTrial
) -> None:
    """Its problem forbids split_k, so no entry of its table can have one."""
    invariant = replace(CLASS, batch_invariant=True)
    split = replace(A, split_k=2)
    store(settings, make_trial, (16, A, 5.0), (16, split, 1.0), (64, B, 6.0), problem=invariant)
    found = derive(settings, problem=invariant)
    assert [one.entry.config for one in found.served] == [A, B]
    assert found.table.problem.batch_invariant
