"""kgen.search.tune: whole runs on a GPU and a compiler that misbehave on demand."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import kgen.search.offline
import kgen.search.session
from kgen.cache.db import TuningDatabase
from kgen.cache.records import RunRecord
from kgen.config import GemmConfig
from kgen.errors import (
    CompileError,
    CompilerMissing,
    DriverError,
    ImplausibleTime,
    Interrupted,
    KgenError,
    LaunchError,
    MeasureError,
    WorkerDied,
    WorkerTimeout,
    WrongResult,
)
from kgen.problem import GemmProblem
from kgen.search.events import (
    ProblemFinished,
    RunStarted,
    TrialFinished,
    TuneEvent,
    TuneOptions,
    TuneReport,
    WorkerReplaced,
)
from kgen.search.run import status_of
from kgen.search.stop import StopFlag
from kgen.search.tune import spent_before, tune
from kgen.settings import Settings
from kgen.shapes import ShapeLine
from tests.unit.fake_search import BUILDER, DEVICE, GPU, NO_GPU, time_us

SMALL = GemmProblem("dense", 64, 2112, 7168)
BIG = GemmProblem("dense", 4096, 4096, 7168)
TINY = GemmProblem("dense", 16, 576, 7168)
#: A space for tests: quick to list, and known.
SPACE = tuple(replace(GemmConfig(), block_n=n) for n in range(64, 256, 8))


def lines(*problems: GemmProblem, weight: float = 1.0) -> list[ShapeLine]:
    return [ShapeLine(problem, weight, f"test:{i}") for i, problem in enumerate(problems)]


@dataclass
class Bench:
    """A place to tune in: a folder with the database, what was told, what the GPU was asked."""

    folder: Path
    events: list[TuneEvent] = field(default_factory=list)

    @property
    def settings(self) -> Settings:
        # One compiler: candidates are then ready in the order in which they were chosen.
        return Settings(self.folder, jobs=1, compile_timeout_s=20, trial_timeout_s=20)

    @property
    def journal(self) -> list[str]:
        path = self.folder / "journal"
        return path.read_text().splitlines() if path.exists() else []

    def options(self, fake_gpu: Any, fake_builder: Any, **more: Any) -> TuneOptions:
        journal = str(self.folder / "journal")
        values = {"backend": GPU, "sampler": "exhaustive", **more}
        return TuneOptions(
            backend_options={"journal": journal, **fake_gpu},
            builder=BUILDER,
            builder_options={"journal": journal, **fake_builder},
            **values,
        )

    def tune(
        self,
        asked: list[ShapeLine],
        fake_gpu: dict[str, Any] | None = None,
        fake_builder: dict[str, Any] | None = None,
        settings: Settings | None = None,
        stop: StopFlag | None = None,
        **options: Any,
    ) -> TuneReport:
        chosen = self.options(fake_gpu or {}, fake_builder or {}, **options)
        return tune(asked, settings or self.settings, chosen, self.events.append, stop)

    @property
    def db(self) -> TuningDatabase:
        return TuningDatabase.open(self.settings.db_url)

    def trials(self, problem: GemmProblem = SMALL) -> list[Any]:
        return self.db.trials(problem)

    def told(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where GPU locks lie
    return Bench(tmp_path)


UseSpace = Callable[..., None]


@pytest.fixture
def use_space(monkeypatch: pytest.MonkeyPatch) -> UseSpace:
    """Replaces the space of every problem by a few known configurations."""

    def use(configs: tuple[GemmConfig, ...] = SPACE, default: int = 3) -> None:
        for module in (kgen.search.session, kgen.search.offline):
            monkeypatch.setattr(module, "valid_configs", lambda p, d, s=(): configs)
            monkeypatch.setattr(module, "count_invalid", lambda p, d, s=(): Counter(smem_bytes=9))
        session = kgen.search.session
        order = list(dict.fromkeys([configs[default], *configs]))
        for module in (session, kgen.search.offline):
            monkeypatch.setattr(module, "seeds", lambda p, d, count: order[:count])
        monkeypatch.setattr(session, "default_config", lambda p, d: configs[default])

    return use


# -- one candidate goes wrong ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "status"),
    [("fault", "faulted"), ("segv", "faulted"), ("hang", "timeout"), ("refused", "launch_failed")],
)
def test_trial_2_of_20_fails_and_the_others_are_timed(
    bench: Bench, use_space: UseSpace, behaviour: str, status: str
) -> None:
    use_space()
    bad = SPACE[0]  # the default is SPACE[3], so this one comes second
    settings = replace(bench.settings, trial_timeout_s=1.0)
    report = bench.tune(
        lines(SMALL), {"behaviours": {str(bad): behaviour}}, settings=settings, trials=20
    )
    search = [t for t in bench.trials() if t.provenance.get("stage") != "final"]
    assert Counter(t.status for t in search) == {"ok": 19, status: 1}
    assert [t.config for t in search[:2]] == [SPACE[3], bad]
    assert search[1].status == status
    assert search[1].reason
    assert report.exit_code == 0
    assert report.problems[0].config not in (None, bad)
    assert len(bench.told(WorkerReplaced)) == (status != "launch_failed")


def test_a_wrong_candidate_is_recorded_never_timed_never_chosen(
    bench: Bench, use_space: UseSpace
) -> None:
    use_space()
    bad = SPACE[5]
    gpu = {"behaviours": {str(bad): "wrong"}, "fast": (str(bad),)}
    report = bench.tune(lines(SMALL), gpu, trials=len(SPACE))
    (row,) = [t for t in bench.trials() if t.config == bad]
    assert (row.status, row.median_us, row.verified) == ("wrong", None, False)
    assert "tile" in row.reason
    assert f"time {bad}" not in bench.journal
    best = min((c for c in SPACE if c != bad), key=lambda c: time_us(SMALL, c))
    assert report.problems[0].config == best
    assert report.problems[0].by_status == {"ok": len(SPACE) - 1, "wrong": 1}


def test_a_time_that_can_not_be_true_is_never_chosen(bench: Bench, use_space: UseSpace) -> None:
    use_space(SPACE[:5])
    bad = SPACE[1]
    bench.tune(lines(SMALL), {"behaviours": {str(bad): "too fast"}}, trials=5)
    (row,) = [t for t in bench.trials() if t.config == bad]
    assert row.status == "wrong"
    assert "below the floor" in row.reason


def test_a_finalist_that_faults_late_is_out(bench: Bench, use_space: UseSpace) -> None:
    use_space(SPACE[:6])
    bad = SPACE[1]
    report = bench.tune(lines(SMALL), {"fast": (str(bad),), "flaky": str(bad)}, trials=6)
    assert report.problems[0].config != bad
    assert bench.db.best(SMALL, DEVICE.name, DEVICE.num_sms).config != bad  # type: ignore[union-attr]
    statuses = [t.status for t in bench.trials() if t.config == bad]
    assert statuses == ["ok", "faulted"]


def test_compilers_that_crash_or_refuse_cost_one_candidate(
    bench: Bench, use_space: UseSpace
) -> None:
    use_space(SPACE[:8])
    behaviours = {str(SPACE[0]): "abort", str(SPACE[1]): "fail"}
    report = bench.tune(lines(SMALL), fake_builder={"behaviours": behaviours}, trials=6)
    found = {t.config: t for t in bench.trials()}
    assert found[SPACE[0]].status == found[SPACE[1]].status == "compile_failed"
    assert "SIGABRT" in found[SPACE[0]].reason
    # What was never on the GPU does not use up a trial.
    assert report.problems[0].by_status == {"ok": 6, "compile_failed": 2}
    assert len(bench.told(WorkerReplaced)) == 1


def test_what_the_templates_refuse_costs_one_candidate(bench: Bench, use_space: UseSpace) -> None:
    """There is no key for it either: the record goes without, and is known the next time."""
    use_space(SPACE[:4])
    builder = {"behaviours": {str(SPACE[0]): "unrenderable"}}
    for _ in range(2):
        report = bench.tune(lines(SMALL), fake_builder=builder, trials=10, finalists=1)
        assert report.problems[0].by_status == {"ok": 3, "compile_failed": 1}
    (row,) = [t for t in bench.trials() if t.config == SPACE[0]]
    assert (row.status, row.cubin_key) == ("compile_failed", "")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CompileError("spill"), "compile_failed"),
        (WrongResult("tile"), "wrong"),
        (ImplausibleTime("below the floor"), "wrong"),
        (MeasureError("no event of the call"), "launch_failed"),
        (WorkerTimeout("20 s"), "timeout"),
        (WorkerDied("SIGSEGV"), "faulted"),
        (DriverError("illegal address", 700, fatal=True), "faulted"),
        (DriverError("invalid value", 1), "launch_failed"),
        (LaunchError("image"), "launch_failed"),
    ],
)
def test_every_failure_of_a_candidate_has_its_status(error: KgenError, status: str) -> None:
    assert status_of(error) == status


def test_what_is_no_candidates_fault_ends_the_run(bench: Bench, use_space: UseSpace) -> None:
    with pytest.raises(CompilerMissing):
        status_of(CompilerMissing("none"))
    use_space()
    with pytest.raises(RuntimeError, match="a bug in the backend"):
        bench.tune(lines(SMALL), {"behaviours": {str(SPACE[0]): "bug"}}, trials=5)
    assert [run.state for run in bench.db.runs()] == ["failed"]
    assert [t.status for t in bench.trials()] == ["ok"]  # what was finished is kept


# -- problems ----------------------------------------------------------------------------------


def test_a_problem_too_big_is_untunable_and_others_go_on(bench: Bench, use_space: UseSpace) -> None:
    use_space(SPACE[:5])
    report = bench.tune(lines(SMALL, BIG, TINY), {"untunable": (str(BIG),)}, trials=4)
    assert [p.outcome for p in report.problems] == ["tuned", "untunable", "tuned"]
    assert "needs 900 GiB" in report.problems[1].reason
    assert report.exit_code == 1
    (outcome,) = bench.db.outcomes(BIG)
    assert outcome.outcome == "untunable"
    assert bench.trials(BIG) == []


def test_a_problem_without_valid_configurations_says_which_rules(
    bench: Bench, use_space: UseSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_space(SPACE[:5])
    monkeypatch.setattr(
        kgen.search.session, "valid_configs", lambda p, d, s: () if p == BIG else SPACE[:5]
    )
    report = bench.tune(lines(BIG, SMALL), trials=3)
    assert [p.outcome for p in report.problems] == ["untunable", "tuned"]
    assert "no valid configuration" in report.problems[0].reason
    assert "smem_bytes 9" in report.problems[0].reason
    assert report.problems[0].invalid_by_rule == {"smem_bytes": 9}


def test_a_problem_all_of_whose_candidates_fail_is_given_up(
    bench: Bench, use_space: UseSpace
) -> None:
    use_space()
    gpu = {"behaviours": {str(c): "wrong" for c in SPACE}}
    report = bench.tune(lines(SMALL), gpu, trials=100)
    (problem,) = report.problems
    assert problem.outcome == "untunable"
    assert problem.num_trials == kgen.search.plan.GIVE_UP_TRIALS < len(SPACE)
    assert "wrong 16" in problem.reason
    assert "tile (3, 1)" in problem.reason


def test_a_small_space_is_measured_once_and_the_run_ends(bench: Bench, use_space: UseSpace) -> None:
    use_space(SPACE[:4])
    report = bench.tune(lines(SMALL), trials=100)
    assert report.problems[0].num_trials == 4
    assert Counter(line for line in bench.journal if "verify" in line) == {
        f"verify {c}": 1 for c in SPACE[:4]
    }
    again = bench.tune(lines(SMALL), trials=100)
    assert again.problems[0].skipped


def test_the_default_is_first_and_the_finals_are_recorded(
    bench: Bench, use_space: UseSpace
) -> None:
    use_space()
    report = bench.tune(lines(SMALL), trials=8, finalists=3)
    rows = bench.trials()
    assert rows[0].config == SPACE[3]
    finals = [t for t in rows if t.provenance["stage"] == "final"]
    search = [t for t in rows if t.provenance["stage"] == "search"]
    ranked = sorted((t.config for t in search), key=lambda c: time_us(SMALL, c))
    assert {t.config for t in finals} == {*ranked[:3], SPACE[3]}
    (problem,) = report.problems
    assert problem.default_us == time_us(SMALL, SPACE[3])
    best = bench.db.best(SMALL, DEVICE.name, DEVICE.num_sms)
    assert best is not None
    assert (problem.config, problem.median_us) == (best.config, best.median_us)
    assert rows[0].provenance["compiler"] == "fake-1.0"
    assert rows[0].provenance["driver"] == "580.1"
    assert rows[0].predicted_us > 0
    told = bench.told(TrialFinished)
    assert [(e.config, e.stage, e.median_us, e.p90_us, e.error) for e in told] == [
        (t.config, t.provenance["stage"], t.median_us, t.p90_us, t.error) for t in rows
    ]
    busy = [e.gpu_busy_s for e in told]
    assert busy == sorted(busy)
    assert 0 < busy[-1] < report.seconds
    assert len(bench.told(ProblemFinished)) == 1


# -- going on ----------------------------------------------------------------------------------


def test_more_trials_go_on_from_what_is_known(bench: Bench, use_space: UseSpace) -> None:
    use_space()
    bad = {"behaviours": {str(SPACE[0]): "segv"}}
    bench.tune(lines(SMALL, TINY), bad, trials=5, finalists=1)
    before = len(bench.journal)
    report = bench.tune(lines(SMALL, TINY), bad, trials=9, finalists=1)
    searched = [t for t in bench.trials() if t.provenance.get("stage") != "final"]
    assert len({t.config for t in searched}) == len(searched) == 9
    assert report.problems[0].num_trials == 9
    assert report.problems[0].num_new_trials == 4
    assert f"verify {SPACE[0]}" not in bench.journal[before:]  # it killed its child: once is enough


def test_the_same_command_again_does_nothing(bench: Bench, use_space: UseSpace) -> None:
    use_space()
    first = bench.tune(lines(SMALL, TINY), trials=5)
    before = (len(bench.journal), len(bench.trials()))
    again = bench.tune(lines(SMALL, TINY), trials=5)
    assert (len(bench.journal), len(bench.trials())) == before
    assert all(p.skipped for p in again.problems)
    assert [p.config for p in again.problems] == [p.config for p in first.problems]
    assert again.exit_code == 0


def test_times_of_another_cubin_do_not_count(bench: Bench, use_space: UseSpace) -> None:
    use_space(SPACE[:6])
    bench.tune(lines(SMALL), trials=6)
    report = bench.tune(lines(SMALL), fake_builder={"version": "2"}, trials=6)
    assert not report.problems[0].skipped
    assert report.problems[0].num_new_trials == 6


SCRIPT = """
import sys
from itertools import pairwise
from pathlib import Path
import tempfile
tempfile.tempdir = sys.argv[1]
from tests.unit.test_tune import *
report = Bench(Path(sys.argv[1])).tune(lines(SMALL, TINY), {"trial_s": 0.05}, trials=12)
print(report.interrupted, report.exit_code, sum(p.num_trials for p in report.problems))
sys.exit(report.exit_code)
"""


def start(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def wait_for_trials(bench: Bench, number: int) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if (bench.folder / "tuning.db").exists():
            try:
                if bench.db.counts()["ok"] >= number:
                    return
            except KgenError:
                pass  # the schema is being made
        time.sleep(0.05)
    pytest.fail("the run recorded nothing")


def test_after_a_kill_the_run_goes_on_where_it_stopped(bench: Bench) -> None:
    with start(bench.folder) as process:
        wait_for_trials(bench, 5)
        process.kill()
    done = {t.config for t in bench.trials()}
    assert 5 <= len(done) <= 12
    report = bench.tune(lines(SMALL, TINY), trials=12)
    assert [run.state for run in bench.db.runs()] == ["killed", "finished"]
    assert [p.num_trials for p in report.problems] == [12, 12]
    verified = Counter(line for line in bench.journal if line.startswith("verify"))
    searched = [t for t in bench.trials() if t.provenance["stage"] == "search"]
    assert len({t.config for t in searched}) == len(searched) == 12
    assert sum(verified.values()) >= 24


def test_ctrl_c_keeps_what_is_finished_and_ends_at_once(bench: Bench) -> None:
    with start(bench.folder) as process:
        wait_for_trials(bench, 4)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=20)
    assert time.monotonic() - began < 5
    assert process.returncode == 1
    assert output.split()[:2] == [b"True", b"1"]
    assert [run.state for run in bench.db.runs()] == ["interrupted"]
    assert len(bench.trials()) >= 4


def test_stop_ends_a_run_in_a_thread(bench: Bench, use_space: UseSpace) -> None:
    use_space()
    stop = StopFlag()

    def stop_after_three() -> None:
        wait_for_trials(bench, 3)
        stop.set()

    thread = threading.Thread(target=stop_after_three)
    thread.start()
    report = bench.tune(lines(SMALL), {"trial_s": 0.2}, stop=stop, trials=1000)
    thread.join()
    assert report.interrupted
    assert report.exit_code == 1
    assert report.problems[0].outcome == "tuned"  # by what was measured until then


def test_without_a_gpu_a_stop_leaves_problems_unfinished(bench: Bench, use_space: UseSpace) -> None:
    use_space()
    stop = StopFlag()
    threading.Timer(1.0, stop.set).start()
    behaviours = {str(config): "hang" for config in SPACE}
    report = bench.tune(
        lines(SMALL, BIG), backend=NO_GPU, fake_builder={"behaviours": behaviours}, stop=stop
    )
    assert report.interrupted
    assert [p.outcome for p in report.problems] == ["unfinished"] * 2
    again = bench.tune(lines(SMALL, BIG), backend=NO_GPU)
    assert [p.outcome for p in again.problems] == ["predicted"] * 2
    assert [run.state for run in bench.db.runs()] == ["interrupted", "finished"]


def test_a_stop_before_the_work_begins_is_an_interruption(bench: Bench) -> None:
    stop = StopFlag()
    stop.set()
    with pytest.raises(Interrupted):
        bench.tune(lines(SMALL), stop=stop)
    assert [run.state for run in bench.db.runs()] == ["interrupted"]


def run_record(state: str, seconds: int, options: dict[str, Any]) -> RunRecord:
    date = "2026-11-30T12:00:{:02d}.000+00:00"
    times: dict[str, Any] = {
        "started": date.format(0),
        "heartbeat": date.format(seconds),
        "ended": None,
    }
    return RunRecord(1, "tune", "0", options, "here", 1, "", state=state, **times)


def test_time_of_killed_runs_of_the_same_command_counts() -> None:
    mine, other = {"budget_s": 60.0}, {"budget_s": 90.0}
    runs = [
        run_record("killed", 50, mine),
        run_record("finished", 40, mine),
        run_record("killed", 20, mine),
        run_record("interrupted", 5, mine),
    ]
    assert spent_before(runs, mine) == 25
    assert spent_before([*runs, run_record("killed", 7, other)], mine) == 0
    assert spent_before([], mine) == 0


# -- budgets -----------------------------------------------------------------------------------


def test_a_budget_is_kept_and_every_problem_has_a_winner(bench: Bench, use_space: UseSpace) -> None:
    use_space()
    problems = [GemmProblem("dense", m, 576, 7168) for m in range(1, 7)]
    asked = lines(*problems)
    asked[5] = replace(asked[5], weight=50.0)
    report = bench.tune(asked, {"trial_s": 0.03}, budget_s=4.0)
    assert report.seconds < 5.0
    assert all(p.outcome == "tuned" for p in report.problems)
    trials = [p.num_trials for p in report.problems]
    assert min(trials) >= 4
    assert trials[5] == max(trials)
    assert trials[5] > min(trials)
    # The same budget again: it was spent. A larger one: there is something left to do.
    again = bench.tune(asked, {"trial_s": 0.03}, budget_s=4.0)
    assert all(p.skipped for p in again.problems)


def test_a_budget_too_short_leaves_problems_unfinished(bench: Bench, use_space: UseSpace) -> None:
    use_space()
    problems = [GemmProblem("dense", m, 576, 7168) for m in range(1, 30)]
    report = bench.tune(lines(*problems), {"trial_s": 0.2}, budget_s=4)
    assert report.seconds < 8
    outcomes = Counter(p.outcome for p in report.problems)
    assert set(outcomes) == {"tuned", "unfinished"}
    assert report.exit_code == 1


def test_a_problem_keeps_to_its_own_budget(bench: Bench, use_space: UseSpace) -> None:
    use_space()
    report = bench.tune(lines(SMALL, TINY), {"trial_s": 0.1}, budget_per_problem_s=0.6)
    assert all(1 <= p.num_trials <= 8 for p in report.problems)
    assert all(p.outcome == "tuned" for p in report.problems)


# -- one GPU, two runs -------------------------------------------------------------------------


def test_two_runs_take_turns_on_one_gpu(bench: Bench, use_space: UseSpace, tmp_path: Path) -> None:
    use_space()
    benches = [bench, Bench(tmp_path / "other")]
    benches[1].folder.mkdir()
    shared = {"spans": str(tmp_path / "spans"), "trial_s": 0.02}
    threads = [
        threading.Thread(target=b.tune, args=(lines(SMALL), shared), kwargs={"trials": 6})
        for b in benches
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = sorted(
        tuple(float(t) for t in line.split())
        for line in (tmp_path / "spans").read_text().splitlines()
    )
    assert len(spans) >= 12
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


# -- no GPU ------------------------------------------------------------------------------------


def test_without_a_gpu_leading_candidates_are_compiled_and_predicted(
    bench: Bench, use_space: UseSpace
) -> None:
    use_space()
    report = bench.tune(lines(SMALL, BIG), backend=NO_GPU, leading=3)
    assert not report.measured
    assert "no CUDA driver" in report.reason
    assert report.exit_code == 0
    (begun,) = bench.told(RunStarted)
    assert not begun.measured
    rows = bench.trials()
    assert {t.config for t in rows} == {SPACE[3], *SPACE[:2]}
    for row in rows:
        assert (row.status, row.source, row.verified) == ("compiled", "predicted", False)
        assert row.median_us is None
        assert row.predicted_us > 0
        assert row.registers == 168
    problem = report.problems[0]
    assert (problem.outcome, problem.median_us) == ("predicted", None)
    assert problem.predicted_us == min(t.predicted_us for t in rows)
    assert [o.outcome for o in bench.db.outcomes(SMALL)] == ["predicted"]
    # Cubins serve every problem of their class: six candidates, three compiles.
    assert (report.num_compiles, report.num_cache_hits) == (3, 0)
    again = bench.tune(lines(SMALL, BIG), backend=NO_GPU, leading=3)
    assert again.num_compiles == 0
    assert again.problems[0].predicted_us == problem.predicted_us


def test_a_run_on_a_gpu_starts_from_the_predictions(bench: Bench, use_space: UseSpace) -> None:
    use_space(SPACE[:8])
    bench.tune(lines(SMALL), backend=NO_GPU, leading=3)
    report = bench.tune(lines(SMALL), trials=4)
    timed = [t for t in bench.trials() if t.status == "ok" and t.provenance["stage"] == "search"]
    assert {t.config for t in timed[:3]} == {SPACE[3], *SPACE[:2]}
    assert report.problems[0].outcome == "tuned"


def test_the_gpu_is_left_out_on_request(bench: Bench, use_space: UseSpace) -> None:
    use_space()
    report = bench.tune(lines(SMALL), leading=1, gpu=False)
    assert not report.measured


def test_without_a_gpu_failed_builds_are_made_good_for(bench: Bench, use_space: UseSpace) -> None:
    use_space()
    behaviours = {str(c): "fail" for c in SPACE[:3]}
    report = bench.tune(
        lines(SMALL), backend=NO_GPU, leading=2, fake_builder={"behaviours": behaviours}
    )
    assert report.problems[0].by_status == {"compiled": 2, "compile_failed": 3}
    use_space(SPACE[:3], default=0)
    report = bench.tune(
        lines(BIG), backend=NO_GPU, leading=2, fake_builder={"behaviours": behaviours}
    )
    assert report.problems[0].outcome == "untunable"
    assert "spilled" in report.problems[0].reason
