"""Merging databases: every row once, none lost, nothing changed; and what prune and diff say."""

from __future__ import annotations

import random
import sqlite3
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kgen.cache import census
from kgen.cache.db import TuningDatabase
from kgen.cache.records import ProblemOutcome, TrialRecord
from kgen.cache.transfer import Added, merge_into, merge_new
from kgen.config import GemmConfig
from kgen.errors import DatabaseError
from kgen.problem import GemmProblem

MakeTrial = Callable[..., TrialRecord]
PROBLEM = GemmProblem("dense", 64, 2112, 7168)
HERE = ("NVIDIA H200", 132)


def open_it(path: Path) -> TuningDatabase:
    return TuningDatabase.open(path, create=False, readonly=True)


def database(path: Path, trials: list[TrialRecord], command: str = "") -> Path:
    with TuningDatabase.open(path) as db:
        run = db.begin_run(command).id if command else None
        for trial in trials:
            db.record(trial, run)
        outcome = ProblemOutcome(problem=PROBLEM, device_name="x", num_sms=1, outcome="tuned")
        db.record_outcome(outcome, run)
        if run:
            db.end_run(run)
    return path


def content(path: Path) -> set[str]:
    with open_it(path) as db:
        rows = [str(trial.to_dict() | {"id": 0, "run_id": 0}) for trial in db.trials()]
        rows += [str(outcome.to_dict() | {"run_id": 0}) for outcome in db.outcomes()]
        assert len(rows) == len(set(rows))
        return set(rows)


def test_a_merge_has_the_rows_of_both_once(tmp_path: Path, make_trial: MakeTrial) -> None:
    a = database(tmp_path / "a.db", [make_trial(10.0), make_trial(11.0)], "tune a")
    b = database(tmp_path / "b.db", [make_trial(9.0), make_trial(status="wrong")], "tune b")
    counts = merge_new([a, b], tmp_path / "c.db", open_it)
    assert counts.added == {"runs": 2, "trials": 4, "outcomes": 2}
    assert content(tmp_path / "c.db") == content(a) | content(b)
    merge_new([b, a], tmp_path / "d.db", open_it)
    assert content(tmp_path / "d.db") == content(tmp_path / "c.db")
    with open_it(tmp_path / "c.db") as db:
        commands = {run.id: run.command for run in db.runs()}
        assert [commands[t.run_id or 0] for t in db.trials()] == ["tune a"] * 2 + ["tune b"] * 2
    before = content(a)
    with TuningDatabase.open(a) as target, open_it(tmp_path / "c.db") as source:
        first, second = merge_into(target, source), merge_into(target, source)
    assert first.added == {"runs": 1, "trials": 2, "outcomes": 1}
    assert second.known == {"runs": 2, "trials": 4, "outcomes": 2}
    assert before < content(a)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_rows_of_no_run_belong_to_the_merge(tmp_path: Path, make_trial: MakeTrial) -> None:
    a = database(tmp_path / "a.db", [])
    b = database(tmp_path / "b.db", [make_trial(9.0)])
    with TuningDatabase.open(a) as target, open_it(b) as source:
        merge_into(target, source)
        (run,) = target.runs()
        assert (run.command, run.options, run.state) == (
            "kgen db merge",
            {"from": str(b)},
            "finished",
        )
        assert target.trials()[0].run_id == run.id


def test_a_run_that_goes_on_elsewhere_is_killed_here(tmp_path: Path) -> None:
    a = database(tmp_path / "a.db", [])
    with TuningDatabase.open(tmp_path / "b.db") as source, TuningDatabase.open(a) as target:
        source.begin_run("tune")
        merge_into(target, source)
        (run,) = target.runs()
        assert (run.state, run.ended) == ("killed", run.heartbeat)


def test_a_target_that_exists_stays(tmp_path: Path) -> None:
    a = database(tmp_path / "a.db", [])
    (tmp_path / "c.db").write_text("precious")
    with pytest.raises(DatabaseError, match="exists and stays"):
        merge_new([a, a], tmp_path / "c.db", open_it)
    assert (tmp_path / "c.db").read_text() == "precious"


def test_a_merge_that_fails_changes_nothing(tmp_path: Path, make_trial: MakeTrial) -> None:
    a = database(tmp_path / "a.db", [make_trial(10.0)])
    b = database(tmp_path / "b.db", [make_trial(9.0), make_trial(8.0)])
    with sqlite3.connect(b) as raw:  # as a broken disk might
        raw.execute("PRAGMA ignore_check_constraints = ON")
        raw.execute("DROP TRIGGER trials_no_update")
        raw.execute("UPDATE trials SET verified = 0 WHERE id = 2")
    before = content(a)
    with (
        TuningDatabase.open(a) as target,
        open_it(b) as source,
        pytest.raises(DatabaseError, match="refused a row"),
    ):
        merge_into(target, source)
    assert content(a) == before


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(parts=st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=4))
def test_merging_is_a_union(
    tmp_path: Path, make_trial: MakeTrial, parts: list[list[int]], tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("union")
    pool = database(folder / "pool.db", [make_trial(10.0 + n, policy=str(n)) for n in range(10)])
    with TuningDatabase.open(folder / "all.db") as target:
        for part in parts:
            with TuningDatabase.open(folder / "part.db") as some, open_it(pool) as source:
                merge_into(some, source)
            (folder / "part.db").rename(folder / f"{len(part)}.db")
            with open_it(folder / f"{len(part)}.db") as source:
                merge_into(target, source)
        assert len(target.trials()) == 10


def test_a_merge_needs_little_memory(tmp_path: Path, make_trial: MakeTrial) -> None:
    trials = [make_trial(10.0 + n, cubin_key=f"{n:064x}") for n in range(20)]
    a = database(tmp_path / "a.db", trials)
    b = database(tmp_path / "b.db", [])
    with sqlite3.connect(a) as raw:  # 20 * 2^10 rows of as many dates
        names = [row[1] for row in raw.execute("PRAGMA table_info(trials)")][1:]
        new = ", ".join("date || hex(randomblob(8))" if name == "date" else name for name in names)
        for _ in range(10):
            raw.execute(f"INSERT INTO trials ({', '.join(names)}) SELECT {new} FROM trials")
    with TuningDatabase.open(b) as target, open_it(a) as source:
        tracemalloc.start()
        counts = merge_into(target, source)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert counts.added["trials"] == 20 << 10
    assert peak < 40e6, "the rows themselves would take more"


def test_counts_add_up() -> None:
    one = Added({"runs": 1, "trials": 2, "outcomes": 3}, {"runs": 0, "trials": 1, "outcomes": 0})
    assert (one + one).added == {"runs": 2, "trials": 4, "outcomes": 6}


# -- census -------------------------------------------------------------------------------------


def many(make_trial: MakeTrial, seed: int) -> list[TrialRecord]:
    """Trials of a few problems, cubins and policies, with failures and predictions."""
    rng = random.Random(seed)
    found = []
    for _ in range(120):
        number = rng.randrange(12)
        config = GemmConfig(block_n=16 + 8 * number)
        where: dict[str, Any] = {
            "config": config,
            "cubin_key": f"{number:064x}",
            "problem": replace(PROBLEM, m=rng.choice((16, 64))),
            "num_sms": rng.choice((132, 78)),
        }
        kind = rng.random()
        if kind < 0.1:
            found.append(make_trial(status="compiled", predicted_us=rng.uniform(1, 9), **where))
        elif kind < 0.12:
            found.append(make_trial(status=rng.choice(("wrong", "timeout")), **where))
        else:
            policy = rng.choice(("cold", "hot"))
            found.append(make_trial(rng.uniform(5, 50), policy=policy, **where))
    return found


def best_of(db: TuningDatabase, policy: str | None) -> set[str]:
    return set(map(str, db.winners(policy=policy)))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("keep", [1, 2, 10])
def test_prune_leaves_what_best_says(
    tmp_path: Path, make_trial: MakeTrial, keep: int, seed: int
) -> None:
    path = database(tmp_path / "a.db", many(make_trial, seed), "tune")
    with TuningDatabase.open(path) as db:
        before = [best_of(db, policy) for policy in (None, "cold", "hot")]
        failed = db.counts()["wrong"], db.counts()["timeout"]
        told = census.prune(db, keep, dry_run=True)
        assert told.backup is None
        assert len(db.trials()) == 120
        pruned = census.prune(db, keep)
        assert (pruned.deleted, pruned.kept) == (told.deleted, told.kept)
        assert len(db.trials()) == pruned.kept
        assert [best_of(db, policy) for policy in (None, "cold", "hot")] == before
        assert (db.counts()["wrong"], db.counts()["timeout"]) == failed
        assert census.prune(db, keep).deleted == 0
        if pruned.deleted:
            assert pruned.backup is not None
            assert len(content(pruned.backup)) == 121
        with pytest.raises(DatabaseError, match="append-only"):
            db.write(lambda c: c.exec_driver_sql("DELETE FROM trials"))


def test_winners_one_by_one_are_the_winners(tmp_path: Path, make_trial: MakeTrial) -> None:
    with TuningDatabase.open(database(tmp_path / "a.db", many(make_trial, 7))) as db:
        key = str
        assert sorted(db.each_winner(), key=key) == sorted(db.winners(), key=key)


def test_diff_tells_whose_winner_is_faster(tmp_path: Path, make_trial: MakeTrial) -> None:
    other = replace(PROBLEM, m=1)
    a = database(tmp_path / "a.db", [make_trial(10.0), make_trial(3.0, problem=other)])
    b = database(tmp_path / "b.db", [make_trial(8.0, config=GemmConfig(block_n=96))])
    with open_it(a) as first, open_it(b) as second:
        assert census.diff(first, first) == []
        one, both = census.diff(first, second)
    assert (one.problem, one.b, one.ratio) == (other, None, None)
    assert both.ratio == pytest.approx(1.25)


def test_stats_count(tmp_path: Path, make_trial: MakeTrial) -> None:
    a = database(tmp_path / "a.db", [make_trial(10.0), make_trial(status="wrong")], "tune")
    with open_it(a) as db:
        found = census.stats(db)
    assert found["trials"] == 2
    assert found["statuses"]["wrong"] == 1
    assert found["devices"] == [{"name": HERE[0], "num_sms": 132, "trials": 2, "timed": 1}]
    assert (found["problems"], found["runs"], found["run_states"]) == (1, 1, {"finished": 1})
    assert found["bytes"] > 0
