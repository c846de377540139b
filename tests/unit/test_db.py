"""The tuning database: queries, writers side by side, writers that die, locks, journals, forks."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

import kgen.cache.lessons
from kgen.cache import liveness, schema, sqlite
from kgen.cache.db import TuningDatabase
from kgen.cache.lessons import lessons
from kgen.cache.records import ProblemOutcome, TrialRecord
from kgen.config import GemmConfig
from kgen.errors import DatabaseError
from kgen.problem import GemmProblem
from kgen.settings import Settings

MakeTrial = Callable[..., TrialRecord]
ROOT = Path(__file__).parent.parent.parent
PROBLEM = GemmProblem("dense", 64, 2112, 7168)
HERE = ("NVIDIA H200", 132)
WIDE, NARROW, FLAT = GemmConfig(block_n=208), GemmConfig(block_n=96), GemmConfig(block_m=64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuning.db"


@pytest.fixture
def db() -> TuningDatabase:
    return TuningDatabase.open("sqlite://")


# -- queries ------------------------------------------------------------------------------------


def test_a_trial_comes_back_as_it_went_in(path: Path, make_trial: MakeTrial) -> None:
    trials = [
        make_trial(10.25, predicted_us=9.0),
        make_trial(status="faulted", reason="illegal address (700)"),
        make_trial(status="compiled", source="predicted", predicted_us=8.5, registers=90),
        make_trial(status="wrong", error=3.0, problem=replace(PROBLEM, num_sms=108, m=1)),
    ]
    with TuningDatabase.open(path) as db:
        ids = [db.record(trial) for trial in trials]
    assert ids == [1, 2, 3, 4]
    with TuningDatabase.open(path) as db:
        rows = db.trials()
    for row, trial in zip(rows, trials, strict=True):
        for name in TrialRecord.__dataclass_fields__:
            assert getattr(row, name) == getattr(trial, name), name
    assert [row.id for row in rows] == ids
    assert all(row.date.endswith("+00:00") for row in rows)


def test_best_is_the_fastest_median_of_a_cubin(db: TuningDatabase, make_trial: MakeTrial) -> None:
    """One lucky sample must not win: WIDE was 8 us once and 11 and 12 us when looked at again."""
    for us in (8.0, 11.0, 12.0):
        db.record(make_trial(us, config=WIDE, cubin_key="w" * 64))
    for us in (10.0, 10.4):
        db.record(make_trial(us, config=NARROW, cubin_key="n" * 64))
    db.record(make_trial(status="faulted", config=FLAT, cubin_key="f" * 64))
    ranked = db.ranking(PROBLEM, *HERE)
    assert [(row.config, row.median_us, row.num_rows) for row in ranked] == [
        (NARROW, pytest.approx(10.2), 2),
        (WIDE, 11.0, 3),
    ]
    best = db.best(PROBLEM, *HERE)
    assert best == ranked[0]
    assert best.id == 5
    assert best.p10_us == pytest.approx(9.8)
    assert best.p90_us == pytest.approx(10.92)


def test_lessons_are_the_newest_results_of_a_device_and_policy(
    db: TuningDatabase, make_trial: MakeTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = PROBLEM.with_m(1)
    db.record(make_trial(9.0, config=WIDE))
    db.record(make_trial(8.0, config=WIDE, cubin_key="of an older template"))
    db.record(make_trial(status="faulted", config=FLAT))
    db.record(make_trial(status="compile_failed", config=NARROW))
    db.record(make_trial(7.0, config=NARROW, policy="hot"))
    db.record(make_trial(7.0, config=NARROW, num_sms=114))
    db.record(make_trial(5.0, config=NARROW, problem=other))
    known = lessons(db, *HERE, "cold")
    assert known == {PROBLEM: {WIDE: 8.0, FLAT: None}, other: {NARROW: 5.0}}
    assert list(known) == [PROBLEM, other]
    assert lessons(db, *HERE, "hot") == {PROBLEM: {NARROW: 7.0, FLAT: None}}
    assert lessons(db, "NVIDIA H100", 132, "cold") == {}
    db.record(make_trial(1.0, config=WIDE, cubin_key="f" * 64, source="foreign"))
    assert lessons(db, *HERE, "cold") == known, "a source by hand teaches nothing"
    monkeypatch.setattr(kgen.cache.lessons, "MOST_ROWS", 2)
    assert lessons(db, *HERE, "cold") == {PROBLEM: {FLAT: None}, other: {NARROW: 5.0}}


def final(chosen: GemmConfig, *tied: GemmConfig) -> dict[str, Any]:
    return {"final": {"chosen": str(chosen), "tied": [str(c) for c in (chosen, *tied)]}}


def test_the_winner_of_a_tie_is_best(db: TuningDatabase, make_trial: MakeTrial) -> None:
    """NARROW is as good as WIDE and was chosen; a later one beyond the tie is better than both."""

    def add(us: float, config: GemmConfig, more: dict[str, Any] | None = None) -> None:
        trial = make_trial(us, config=config, cubin_key=str(config.block_n)[0] * 64)
        db.record(replace(trial, provenance={**trial.provenance, **(more or {})}))

    def best() -> GemmConfig:
        found = db.best(PROBLEM, *HERE)
        assert found is not None
        return found.config

    add(10.0, WIDE)
    add(10.1, NARROW)
    assert best() == WIDE
    add(10.0, WIDE, final(NARROW, WIDE))
    add(10.1, NARROW, final(NARROW, WIDE))
    assert best() == NARROW
    assert [row.config for row in db.winners()] == [NARROW]
    assert [row.config for row in db.ranking(PROBLEM, *HERE)] == [NARROW, WIDE]
    add(10.0, WIDE)  # timed alone since, as by kgen run-trial: what the finals decided stays
    assert best() == NARROW
    add(9.0, FLAT)
    assert best() == FLAT


@pytest.mark.parametrize(
    "told",
    [None, 3, [], {}, {"tied": 3}, {"chosen": 1, "tied": [None]}, final(FLAT, WIDE)["final"]],
)
def test_finals_that_say_nothing_of_use_change_nothing(
    db: TuningDatabase, make_trial: MakeTrial, told: Any
) -> None:
    """Provenance may come from anywhere; who was chosen may be out since."""
    for us, config in ((10.0, WIDE), (10.1, NARROW)):
        trial = make_trial(us, config=config, cubin_key=str(config.block_n)[0] * 64)
        db.record(replace(trial, provenance={**trial.provenance, "final": told}))
    best = db.best(PROBLEM, *HERE)
    assert best is not None
    assert best.config == WIDE


def test_best_of_nothing_is_none(db: TuningDatabase, make_trial: MakeTrial) -> None:
    assert db.best(PROBLEM, *HERE) is None
    db.record(make_trial(status="compiled", source="predicted", predicted_us=1.0))
    db.record(make_trial(status="wrong"))
    assert db.best(PROBLEM, *HERE) is None


@pytest.mark.parametrize("status", ["wrong", "faulted", "timeout"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_cubin_that_was_ever_wrong_is_never_best(
    db: TuningDatabase, make_trial: MakeTrial, status: str, order: tuple[int, int]
) -> None:
    fast = {"config": WIDE, "cubin_key": "w" * 64}
    pair = [make_trial(5.0, **fast), make_trial(status=status, **fast)]
    for index in order:
        db.record(pair[index])
    db.record(make_trial(10.0, config=NARROW, cubin_key="n" * 64))
    best = db.best(PROBLEM, *HERE)
    assert best is not None
    assert best.config == NARROW


def test_policies_are_not_mixed(db: TuningDatabase, make_trial: MakeTrial) -> None:
    db.record(make_trial(10.0, config=WIDE, cubin_key="w" * 64))
    db.record(make_trial(11.0, config=NARROW, cubin_key="n" * 64))
    db.record(make_trial(4.0, config=NARROW, cubin_key="n" * 64, policy="warm"))
    best = db.best(PROBLEM, *HERE)
    assert best is not None
    assert (best.config, best.policy, best.median_us) == (WIDE, "cold", 10.0)
    warm = db.best(PROBLEM, *HERE, policy="warm")
    assert warm is not None
    assert (warm.config, warm.median_us) == (NARROW, 4.0)
    assert db.best(PROBLEM, *HERE, policy="other") is None


@pytest.mark.parametrize(
    "other",
    [
        ("NVIDIA H20", 78),
        ("NVIDIA H100 PCIe", 114),
        ("NVIDIA H200", 60),
        ("NVIDIA H100 80GB HBM3", 132),
    ],
)
def test_other_devices_only_suggest(
    db: TuningDatabase, make_trial: MakeTrial, other: tuple[str, int]
) -> None:
    name, num_sms = other
    db.record(make_trial(5.0, config=WIDE, device_name=name, num_sms=num_sms))
    assert db.best(PROBLEM, *HERE) is None
    assert db.best(PROBLEM, *other) is not None
    (hint,) = db.suggestions(PROBLEM, *HERE)
    assert hint.config == WIDE
    assert hint.origin == f"measured on {name} with {num_sms} SMs, not here"
    assert not hint.row.valid_for(hint.row.cubin_key, *HERE)
    db.record(make_trial(6.0, config=WIDE))
    assert db.suggestions(PROBLEM, *HERE) == []
    assert len(db.trials(PROBLEM)) == 2, "the other device's row is kept"


def test_suggestions_are_in_order(db: TuningDatabase, make_trial: MakeTrial) -> None:
    by_n = [GemmConfig(block_n=8 * n) for n in range(2, 9)]
    tried, failed, far, near, other, soon, late = by_n
    predict = {"status": "compiled", "source": "predicted"}
    db.record(make_trial(**predict, config=late, predicted_us=9.0))
    db.record(make_trial(**predict, config=soon, predicted_us=7.0))
    db.record(make_trial(**predict, config=tried, predicted_us=1.0))
    db.record(make_trial(**predict, config=failed, predicted_us=2.0))
    db.record(make_trial(3.0, config=other, device_name="NVIDIA H100 PCIe", num_sms=114))
    db.record(make_trial(4.0, config=late, device_name="NVIDIA H100 PCIe", num_sms=114))
    db.record(make_trial(9.0, config=far, num_sms=60))
    db.record(make_trial(9.0, config=near, num_sms=120))
    db.record(make_trial(8.0, config=tried))
    db.record(make_trial(status="timeout", config=failed))
    hints = db.suggestions(PROBLEM, *HERE)
    assert [hint.config for hint in hints] == [near, far, other, soon, late]
    assert {hint.origin for hint in hints[3:]} == {"predicted, never run"}
    anywhere = db.suggestions(PROBLEM)
    assert {hint.config for hint in anywhere} == set(by_n), "no device at hand: all is elsewhere"


def test_rankings_by_m(db: TuningDatabase, make_trial: MakeTrial) -> None:
    for m, us, config in ((64, 10.0, WIDE), (64, 9.0, NARROW), (1, 5.0, FLAT)):
        db.record(
            make_trial(us, problem=PROBLEM.with_m(m), config=config, cubin_key=str(config.block_n))
        )
    db.record(make_trial(1.0, problem=replace(PROBLEM, m=2, n=4096)))
    db.record(make_trial(1.0, problem=replace(PROBLEM, m=3, d_dtype="fp32")))
    db.record(make_trial(1.0, problem=replace(PROBLEM, m=4, num_sms=108)))
    db.record(make_trial(1.0, problem=PROBLEM.with_m(5), num_sms=114))
    db.record(make_trial(status="wrong", problem=PROBLEM.with_m(6)))
    found = db.rankings_by_m(PROBLEM.with_m(999), *HERE)
    assert [[(row.problem.m, row.config) for row in ranked] for ranked in found] == [
        [(1, FLAT)],
        [(64, NARROW), (64, WIDE)],
    ]


def test_a_source_by_hand_is_no_winner_unless_asked_for(
    db: TuningDatabase, make_trial: MakeTrial
) -> None:
    """It is the fastest, and its failure says nothing of the configuration it was made from."""
    db.record(make_trial(10.0, config=WIDE))
    db.record(make_trial(5.0, config=WIDE, cubin_key="f" * 64, source="foreign"))
    db.record(make_trial(status="wrong", config=NARROW, cubin_key="e" * 64, source="foreign"))
    db.record(make_trial(status="compiled", config=NARROW, source="predicted", predicted_us=9.0))
    assert [row.median_us for row in db.ranking(PROBLEM, *HERE)] == [10.0]
    assert [row.median_us for row in db.winners()] == [10.0]
    ((first, second),) = db.rankings_by_m(PROBLEM, *HERE, foreign=True)
    assert (first.median_us, first.is_foreign, second.is_foreign) == (5.0, True, False)
    assert [hint.config for hint in db.suggestions(PROBLEM, *HERE)] == [NARROW]


def test_variants_of_a_shape_have_their_own_rows(db: TuningDatabase, make_trial: MakeTrial) -> None:
    """B53: what differs in any field, the compiler's key included, is never mixed."""
    variants = [PROBLEM, replace(PROBLEM, d_dtype="fp32"), replace(PROBLEM, num_sms=108)]
    for us, problem in enumerate(variants, 5):
        db.record(make_trial(float(us), problem=problem))
    assert [row.median_us for row in db.winners()] == [5.0, 6.0, 7.0]
    for us, problem in enumerate(variants, 5):
        best = db.best(problem, *HERE)
        assert best is not None
        assert best.median_us == us
    db.record(make_trial(4.0, cubin_key="nvcc" * 16))
    ranked = db.ranking(PROBLEM, *HERE)
    assert [(r.cubin_key[:4], r.num_rows) for r in ranked] == [("nvcc", 1), ("cccc", 1)]


def test_filters_and_counts(db: TuningDatabase, make_trial: MakeTrial) -> None:
    db.record(make_trial())
    db.record(make_trial(status="timeout", cubin_key="t" * 64))
    db.record(make_trial(status="timeout", num_sms=114, problem=PROBLEM.with_m(1)))
    assert db.counts()["timeout"] == 2
    assert db.counts(PROBLEM, *HERE) == {
        "ok": 1,
        "compiled": 0,
        "compile_failed": 0,
        "launch_failed": 0,
        "faulted": 0,
        "timeout": 1,
        "wrong": 0,
    }
    assert len(db.trials(statuses=("timeout", "wrong"))) == 2
    assert len(db.trials(PROBLEM)) == 2
    assert len(db.trials(None, "NVIDIA H200", 114)) == 1
    assert len(db.winners(*HERE)) == 1
    assert db.winners("NVIDIA H20") == []


def test_outcomes(db: TuningDatabase) -> None:
    where: dict[str, Any] = {"device_name": HERE[0], "num_sms": HERE[1]}
    invalid = {"smem_bytes": 40, "registers": 2}
    first = ProblemOutcome(
        problem=PROBLEM, **where, outcome="untunable", reason="none", invalid_by_rule=invalid
    )
    db.record_outcome(first)
    last = ProblemOutcome(
        problem=PROBLEM, **where, outcome="tuned", num_trials=9, details={"seed": 1}
    )
    db.record_outcome(last)
    db.record_outcome(replace(last, problem=PROBLEM.with_m(1)))
    found = db.outcomes(PROBLEM, *HERE)
    assert [o.outcome for o in found] == ["untunable", "tuned"]
    assert found[0].invalid_by_rule == invalid
    assert replace(found[1], date="") == last
    assert len(db.outcomes()) == 3
    assert db.outcomes(PROBLEM, "NVIDIA H20", 78) == []


def test_export_is_json(db: TuningDatabase, make_trial: MakeTrial) -> None:
    run = db.begin_run("kgen tune", {"seed": 3})
    db.record(make_trial(), run.id)
    values = json.loads(json.dumps(db.export(), allow_nan=False))
    assert values["trials"][0]["run_id"] == run.id
    assert values["trials"][0]["shape"] == str(PROBLEM)
    assert values["runs"][0]["options"] == {"seed": 3}
    assert values["outcomes"] == []


# -- runs ---------------------------------------------------------------------------------------


def test_a_run_has_one_writer(path: Path, make_trial: MakeTrial) -> None:
    with TuningDatabase.open(path) as mine, TuningDatabase.open(path) as other:
        run = mine.begin_run("kgen tune")
        mine.record(make_trial(), run.id)
        for call in (
            lambda: other.record(make_trial(), run.id),
            lambda: other.end_run(run.id),
            lambda: mine.record(make_trial(), 99),
        ):
            with pytest.raises(DatabaseError, match="one writer"):
                call()
        second = other.begin_run("kgen tune")
        assert other.record(make_trial(), second.id) == 2
        mine.end_run(run.id)
        with pytest.raises(DatabaseError, match="one writer"):
            mine.record(make_trial(), run.id)
        assert [r.state for r in mine.runs()] == ["finished", "running"]
        with pytest.raises(DatabaseError, match="refused"):
            other.end_run(second.id, "whatever")
        other.end_run(second.id, "interrupted")
        assert [r.state for r in mine.runs()] == ["finished", "interrupted"]


WRITER = """
import pickle, sys
from kgen.cache.db import TuningDatabase
db = TuningDatabase.open(sys.argv[1])
trial = pickle.loads(bytes.fromhex(sys.argv[2]))
run = db.begin_run("kgen tune --shapes x")
while True:
    print(db.record(trial, run.id), flush=True)
"""


def test_a_killed_writer_loses_nothing_and_its_run_is_closed(
    path: Path, make_trial: MakeTrial
) -> None:
    """SIGKILL at any moment, in a commit too: every row it was told of is there."""
    import pickle

    command = [sys.executable, "-c", WRITER, str(path), pickle.dumps(make_trial()).hex()]
    told = 0
    for _ in range(2):
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(5):
                told = int(writer.stdout.readline())
            time.sleep(random.uniform(0, 0.05))
            writer.send_signal(signal.SIGKILL)
            told = max([told, *map(int, writer.stdout.read().split())])
    with TuningDatabase.open(path) as db:
        assert [run.state for run in db.runs()] == ["killed", "running"], "closed by the next run"
        assert [run.id for run in db.close_stale_runs()] == [2]
        assert {run.state for run in db.runs()} == {"killed"}
        rows = db.trials()
        assert [row.id for row in rows] == list(range(1, len(rows) + 1))
        assert told <= len(rows) <= told + 1
        assert db.record(make_trial(), db.begin_run("again").id) == len(rows) + 1
    with closing(sqlite3.connect(path)) as raw:
        assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_living_run_is_not_closed_and_a_reused_id_does_not_count(path: Path) -> None:
    with TuningDatabase.open(path) as db:
        run = db.begin_run("kgen tune")
        assert db.close_stale_runs() == []
        later = {"process": "another start of this id"}
        with closing(sqlite3.connect(path)) as raw, raw:
            raw.execute("UPDATE runs SET process = :process", later)
        assert [r.id for r in db.close_stale_runs()] == [run.id]


def test_a_run_of_another_host_is_stale_when_silent(path: Path, make_trial: MakeTrial) -> None:
    with TuningDatabase.open(path) as db:
        run = db.begin_run("kgen tune")
        with closing(sqlite3.connect(path)) as raw, raw:
            raw.execute("UPDATE runs SET host = 'node7'")
        assert db.close_stale_runs() == []
        with closing(sqlite3.connect(path)) as raw, raw:
            raw.execute("UPDATE runs SET heartbeat = '2026-01-01T00:00:00+00:00'")
        assert [r.id for r in db.close_stale_runs()] == [run.id]
        db.record(make_trial(), run.id)
        assert [r.state for r in db.runs()] == ["running"], "it was not dead after all"


def test_tokens_tell_processes_apart() -> None:
    mine = liveness.process_token(os.getpid())
    assert mine
    with subprocess.Popen(["sleep", "30"]) as child:
        other = liveness.process_token(child.pid)
        assert other
        assert other != mine
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert liveness.process_token(child.pid) is None, "a zombie is dead"
    assert liveness.process_token(child.pid) is None


# -- many at once -------------------------------------------------------------------------------

WRITERS, ROWS = 8, 12


def write_rows(path: str, start: Any, trial: TrialRecord, index: int, bad: Any) -> None:
    try:
        start.wait()
        with TuningDatabase.open(path) as db:
            run = db.begin_run(f"writer {index}")
            for number in range(ROWS):
                db.record(replace(trial, cubin_key=f"{index}-{number}"), run.id)
                db.best(trial.problem, trial.device_name, trial.num_sms)
            db.end_run(run.id)
    except BaseException as error:
        bad.put(f"{index}: {error!r}")
        raise


@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_many_processes_create_and_write_at_once(
    path: Path, make_trial: MakeTrial, journal: str
) -> None:
    url = str(path)
    if journal == "delete":  # the vfs has no shared memory, which refuses write-ahead mode
        url = f"sqlite:///file:{path}?vfs=unix-dotfile&uri=true"
    # Forked, to begin together rather than as imports end; handles are opened in the children.
    context = multiprocessing.get_context("fork")
    start, bad = context.Barrier(WRITERS), context.SimpleQueue()
    writers = [
        context.Process(target=write_rows, args=(url, start, make_trial(), index, bad))
        for index in range(WRITERS)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert bad.empty(), bad.get()
    assert [writer.exitcode for writer in writers] == [0] * WRITERS
    with TuningDatabase.open(url) as db:
        rows = db.trials()
        assert {row.cubin_key for row in rows} == {
            f"{index}-{number}" for index in range(WRITERS) for number in range(ROWS)
        }
        assert len(rows) == WRITERS * ROWS
        assert [run.state for run in db.runs()] == ["finished"] * WRITERS


def test_threads_share_a_handle(path: Path, make_trial: MakeTrial) -> None:
    with TuningDatabase.open(path) as db:
        failures: list[BaseException] = []

        def write() -> None:
            try:
                for _ in range(10):
                    db.record(make_trial())
                    db.best(PROBLEM, *HERE)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert db.counts()["ok"] == 40


def hold_lock(path: Path) -> sqlite3.Connection:
    raw = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    raw.execute("BEGIN EXCLUSIVE")
    return raw


def test_a_lock_is_waited_for(path: Path, make_trial: MakeTrial) -> None:
    with TuningDatabase.open(path) as db:
        lock = hold_lock(path)
        release = threading.Timer(0.4, lock.close)
        began = time.monotonic()
        release.start()
        assert db.record(make_trial()) == 1
        assert time.monotonic() - began > 0.3
        release.join()


def test_a_lock_held_for_ever_is_an_error_within_the_limit(
    path: Path, make_trial: MakeTrial
) -> None:
    with TuningDatabase.open(path, busy_limit_s=0.3) as db, closing(hold_lock(path)):
        began = time.monotonic()
        with pytest.raises(DatabaseError, match=r"locked by another process for 0\.3 s"):
            db.record(make_trial())
        assert time.monotonic() - began < 3
        assert db.trials() == [], "readers go on in write-ahead mode"


def test_opening_under_a_lock_held_for_ever_is_an_error(path: Path) -> None:
    TuningDatabase.open(path).close()
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA journal_mode = DELETE")
    with closing(hold_lock(path)):
        began = time.monotonic()
        with pytest.raises(DatabaseError, match="locked by another process"):
            TuningDatabase.open(path, busy_limit_s=0.3)
        assert time.monotonic() - began < 3
    with closing(hold_lock(path.with_name("new.db"))), pytest.raises(DatabaseError, match="locked"):
        TuningDatabase.open(path.with_name("new.db"), busy_limit_s=0.3)


# -- journals and file systems ------------------------------------------------------------------


def journal_mode(path: Path) -> str:
    with closing(sqlite3.connect(path)) as raw:
        return str(raw.execute("PRAGMA journal_mode").fetchone()[0])


def test_write_ahead_mode_is_used_where_it_works(path: Path) -> None:
    TuningDatabase.open(path).close()
    assert journal_mode(path) == "wal"


def test_a_refused_write_ahead_mode_falls_back_with_a_warning(
    path: Path, make_trial: MakeTrial, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite's dot-file locking has no shared memory, as network mounts have none."""
    url = f"sqlite:///file:{path}?vfs=unix-dotfile&uri=true"
    with caplog.at_level(logging.WARNING), TuningDatabase.open(url) as db:
        db.record(make_trial())
        assert db.counts()["ok"] == 1
    with caplog.at_level(logging.WARNING), TuningDatabase.open(url) as db:
        assert db.record(make_trial()) == 2
    assert caplog.text.count("a rollback journal is used") == 1, "said once"
    assert "KGEN_DB" in caplog.text
    assert journal_mode(path) == "delete"


def test_a_write_ahead_file_is_turned_back_where_that_does_not_work(
    path: Path, make_trial: MakeTrial, caplog: pytest.LogCaptureFixture
) -> None:
    with TuningDatabase.open(path) as db:
        db.record(make_trial())
    url = f"sqlite:///file:{path}?vfs=unix-dotfile&uri=true"
    with caplog.at_level(logging.WARNING), TuningDatabase.open(url) as db:
        assert db.record(make_trial()) == 2
    assert "left write-ahead mode" in caplog.text
    assert journal_mode(path) == "delete"


def test_network_mounts_get_no_write_ahead_mode(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_trial: MakeTrial,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with TuningDatabase.open(path) as db:
        db.record(make_trial())
    monkeypatch.setattr(sqlite, "on_network", lambda _: True)
    with caplog.at_level(logging.WARNING), TuningDatabase.open(path) as db:
        assert db.record(make_trial()) == 2
    assert "network file system" in caplog.text
    assert journal_mode(path) == "delete"


def test_network_mounts_are_told_by_the_longest_mount_point(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/sda / ext4 rw 0 0\n"
        "filer:/home /home nfs4 rw 0 0\n"
        "/dev/sdb /home/scratch xfs rw 0 0\n"
        "//nas/x /mnt/with\\040space cifs rw 0 0\n"
    )
    expected = {
        "/home/me/tuning.db": True,
        "/home/scratch/tuning.db": False,
        "/homely/tuning.db": False,
        "/mnt/with space/a/tuning.db": True,
        "/var/tuning.db": False,
    }
    assert {p: sqlite.on_network(Path(p), str(mounts)) for p in expected} == expected
    assert not sqlite.on_network(Path("/home/x.db"), str(tmp_path / "missing"))


class Unsynced(sqlite3.Connection):
    """A file system that can not sync: the commit of a writer fails as SQLite reports it."""

    def commit(self) -> None:
        if self.total_changes:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            raise error
        super().commit()


def test_a_failing_disk_is_an_error_that_names_the_way_out(
    path: Path, monkeypatch: pytest.MonkeyPatch, make_trial: MakeTrial
) -> None:
    TuningDatabase.open(path).close()
    plain = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: plain(*a, **k, factory=Unsynced))
    with (
        TuningDatabase.open(path) as db,
        pytest.raises(DatabaseError, match=r"disk I/O error.*local disk.*KGEN_DB"),
    ):
        db.record(make_trial())
    monkeypatch.undo()
    with TuningDatabase.open(path) as db:
        assert db.trials() == []


def test_a_reader_changes_nothing(path: Path, make_trial: MakeTrial) -> None:
    with TuningDatabase.open(path) as db:
        db.record(make_trial())
    before = path.read_bytes()
    with TuningDatabase.open(path, readonly=True) as db:
        assert db.best(PROBLEM, *HERE) is not None
        with pytest.raises(DatabaseError, match="can not be used"):
            db.record(make_trial())
    assert path.read_bytes() == before


def test_a_file_deleted_under_a_run_is_an_error(path: Path, make_trial: MakeTrial) -> None:
    with TuningDatabase.open(path) as db:
        db.record(make_trial())
        path.unlink()
        with pytest.raises(DatabaseError, match="moved or deleted"):
            db.record(make_trial())
        assert not path.exists()


@pytest.mark.parametrize("name", ["a?b=c#d%20e.db", "\udcff\u00e4 .db", "file:x.db"])
def test_a_file_may_have_any_name(tmp_path: Path, make_trial: MakeTrial, name: str) -> None:
    for url in (tmp_path / name, Settings(tmp_path, db=str(tmp_path / name)).db_url):
        with TuningDatabase.open(url) as db:
            db.record(make_trial())
    assert db.where == str(tmp_path / name)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    with TuningDatabase.open(tmp_path / name, create=False, readonly=True) as db:
        assert len(db.trials()) == 2


def test_a_name_that_can_not_be_is_an_error(tmp_path: Path) -> None:
    for create in (False, True):
        for name, reason in (("x" * 300, "File name too long"), ("a\0b", "null byte")):
            with pytest.raises(DatabaseError, match=f"can not be reached: .*{reason}"):
                TuningDatabase.open(tmp_path / name, create=create)


def test_bytes_that_changed_are_an_error(path: Path, make_trial: MakeTrial) -> None:
    """Whatever they hit: a page's head, the schema's text, which SQLite then quotes, a row."""
    with TuningDatabase.open(path) as db:
        for _ in range(5):
            db.record(make_trial())
    good = path.read_bytes()
    rng = random.Random(1)
    for _ in range(40):
        bad = bytearray(good)
        for _ in range(40):
            bad[rng.randrange(100, len(bad))] = rng.randrange(256)
        path.write_bytes(bad)
        with (
            suppress(DatabaseError),
            TuningDatabase.open(path, create=False, readonly=True) as db,
        ):
            db.trials()


@pytest.mark.parametrize("damage", ["kind = 'sparse'", "m = NULL", "provenance = '{oops'"])
def test_a_row_that_no_kgen_wrote_is_an_error(
    path: Path, make_trial: MakeTrial, damage: str
) -> None:
    """As a damaged page gives it: no constraint or trigger was asked."""
    with TuningDatabase.open(path) as db:
        db.record(make_trial())
    with closing(sqlite3.connect(path)) as raw:
        (sql,) = raw.execute("SELECT sql FROM sqlite_master WHERE name = 'trials'").fetchone()
        rows = raw.execute("SELECT * FROM trials").fetchall()
        raw.executescript(
            "DROP TABLE trials;"
            + sql.replace("NOT NULL", "").split("CONSTRAINT")[0].rstrip().rstrip(",")
            + ")"
        )
        raw.executemany(f"INSERT INTO trials VALUES ({','.join('?' * len(rows[0]))})", rows)
        raw.execute(f"UPDATE trials SET {damage}")
        raw.commit()
    with (
        TuningDatabase.open(path, create=False, readonly=True) as db,
        pytest.raises(DatabaseError, match=r"makes no sense|can not be read"),
    ):
        db.trials()


def test_a_broken_file_is_an_error(path: Path, make_trial: MakeTrial) -> None:
    with TuningDatabase.open(path) as db:
        for _ in range(30):
            db.record(make_trial())
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    with pytest.raises(DatabaseError):
        TuningDatabase.open(path).trials()


# -- forks --------------------------------------------------------------------------------------


def test_a_handle_does_not_cross_a_fork(path: Path, make_trial: MakeTrial) -> None:
    with TuningDatabase.open(path) as db:
        db.record(make_trial())
        pid = os.fork()
        if pid == 0:  # the child; nothing of pytest may run here
            code = 1
            try:
                db.trials()
            except DatabaseError as error:
                code = 0 if "open it again" in str(error) else 2
                with TuningDatabase.open(path) as own:
                    own.record(make_trial())
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert db.record(make_trial()) == 3


def test_no_connection_is_open_when_a_process_forks(path: Path, make_trial: MakeTrial) -> None:
    """SQLite forbids even closing in a child what its parent opened."""

    def open_files() -> set[str]:
        links = Path("/proc/self/fd").iterdir()
        return {os.readlink(link) for link in links if link.exists()}

    with TuningDatabase.open(path) as db:
        db.record(make_trial())
        assert str(path) in open_files(), "one connection waits for the next use"
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            found = str(path) in open_files()
            os.write(writer, b"open" if found else b"none")
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(reader, 4) == b"none"
        os.close(reader)
        os.close(writer)


def test_importing_opens_nothing(tmp_path: Path) -> None:
    code = "import kgen.cache.db, os; print(os.listdir('.'))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path / "none")}
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "[]"


def test_a_schema_row_that_makes_no_sense_is_refused(path: Path) -> None:
    with TuningDatabase.open(path) as db:
        db.write(lambda c: c.execute(update(schema.schema_info).values(version=0)))
    with pytest.raises(DatabaseError, match="no readable schema version"):
        TuningDatabase.open(path)
