"""kgen tune --refresh: after a change the stored top few are timed again, and both are kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kgen.search.refresh
from kgen.cache.db import TuningDatabase
from kgen.cli.main import main
from kgen.config import GemmConfig
from kgen.errors import GpuMissing
from kgen.heuristic import default_config
from kgen.intervals import Interval
from kgen.problem import GemmProblem
from kgen.search.events import TuneOptions
from kgen.search.refresh import Refreshed, Stood, refresh
from kgen.settings import Settings
from tests.unit.conftest import MakeTrial
from tests.unit.fake_search import BUILDER, DEVICE, GPU, NO_GPU, FakeBuilder, time_us

PROBLEM = GemmProblem("dense", 64, 2112, 7168)
OTHER = replace(PROBLEM, m=128)
CONFIGS = [GemmConfig(block_n=n) for n in (96, 104, 112, 120, 128)]
DEFAULT = default_config(PROBLEM, DEVICE)
#: What the simulated GPU and compiler say of themselves.
TODAY = {"compiler": "fake-1.0", "template_hash": "f" * 64, "driver": "580.1", "cuda": "13.0"}
HERE = (DEVICE.name, DEVICE.num_sms)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path, jobs=1, trial_timeout_s=10.0)


def options(backend: str = GPU, finalists: int = 2, **fake_gpu: Any) -> TuneOptions:
    return TuneOptions(
        backend=backend, backend_options=fake_gpu, builder=BUILDER, finalists=finalists
    )


def tune(
    settings: Settings,
    make_trial: MakeTrial,
    problem: GemmProblem = PROBLEM,
    old: bool = True,
    changes: dict[str, str] | None = None,
) -> None:
    """Times of five configurations, the first the fastest; `old`: of another compiler."""
    today = dict(TODAY) | ({"compiler": "fake-0.9"} if old else {})
    builder = FakeBuilder(version="0" if old else "1")
    with TuningDatabase.open(settings.db_url) as db:
        for place, config in enumerate(CONFIGS):
            us = 900.0 + 10 * place
            made = make_trial(
                us,
                problem=problem,
                config=config,
                cubin_key=builder.key(problem, config),
                samples_us=tuple(us + i / 8 for i in range(-4, 5)),
                p10_us=us - 0.5,
                p90_us=us + 0.5,
            )
            provenance = {**made.provenance, **today, **(changes or {})}
            db.record(replace(made, provenance=provenance))


def test_only_the_top_few_are_timed_again_and_both_are_kept(
    settings: Settings, make_trial: MakeTrial, tmp_path: Path
) -> None:
    tune(settings, make_trial)
    journal = tmp_path / "journal"
    device, (found,), interrupted = refresh(settings, [PROBLEM], options(journal=str(journal)))
    assert (device.name, interrupted) == (DEVICE.name, False)
    timed = [line for line in journal.read_text().splitlines() if line.startswith("time")]
    assert timed == [f"time {config}" for config in (*CONFIGS[:2], DEFAULT)]
    assert found.outcome == "refreshed"
    assert found.changes == {"compiler": ("fake-0.9", "fake-1.0")}
    assert found.before is not None
    assert (found.before.config, found.before.median_us) == (CONFIGS[0], 900.0)
    assert found.its_time_now is not None
    assert found.its_time_now.median_us == time_us(PROBLEM, CONFIGS[0])
    best = min((*CONFIGS[:2], DEFAULT), key=lambda config: time_us(PROBLEM, config))
    assert found.now is not None
    assert (found.now.config, found.now.median_us) == (best, time_us(PROBLEM, best))
    assert found.ratio == time_us(PROBLEM, best) / 900.0
    with TuningDatabase.open(settings.db_url) as db:
        rows = db.trials(PROBLEM)
        assert len(rows) == len(CONFIGS) + 3
        assert [row.median_us for row in rows[:5]] == [900.0, 910.0, 920.0, 930.0, 940.0]
        assert {row.provenance["stage"] for row in rows[5:]} == {"refresh"}
        assert [run.command for run in db.runs()] == ["refresh"]
    _, (again,), _ = refresh(settings, [PROBLEM], options(journal=str(journal)))
    assert again.outcome == "current", "nothing changed since the refresh"


@pytest.mark.parametrize(
    "changed", [{"template_hash": "a" * 64}, {"driver": "570.0"}, {"cuda": "12.8"}]
)
def test_templates_and_driver_count_as_the_compiler_does(
    settings: Settings, make_trial: MakeTrial, changed: dict[str, str]
) -> None:
    tune(settings, make_trial, old=False, changes=changed)
    _, (found,), _ = refresh(settings, [PROBLEM], options())
    ((name, (was, now)),) = found.changes.items()
    assert ({name: was}, now) == (changed, TODAY[name])
    assert found.outcome == "refreshed"


def test_all_problems_of_this_gpu_where_none_is_named(
    settings: Settings, make_trial: MakeTrial
) -> None:
    tune(settings, make_trial)
    tune(settings, make_trial, OTHER, old=False)
    missing = replace(PROBLEM, m=7)
    told: list[Refreshed] = []
    _, found, _ = refresh(settings, [], options(), told.append)
    assert [(one.problem, one.outcome) for one in found] == [
        (PROBLEM, "refreshed"),
        (OTHER, "current"),
    ]
    assert told == found
    _, (unknown,), _ = refresh(settings, [missing], options())
    assert unknown.outcome == "unknown"


@pytest.mark.parametrize("how", ["wrong", "fault"])
def test_a_kernel_that_fails_now_is_told_and_the_others_are_timed(
    settings: Settings, make_trial: MakeTrial, how: str
) -> None:
    tune(settings, make_trial)
    behaviours = {str(CONFIGS[0]): how}
    _, (found,), _ = refresh(settings, [PROBLEM], options(behaviours=behaviours))
    assert found.outcome == "refreshed"
    assert list(found.failures) == [str(CONFIGS[0])]
    assert found.its_time_now is None
    assert found.now is not None
    assert found.now.config in (CONFIGS[1], DEFAULT)
    with TuningDatabase.open(settings.db_url) as db:
        status = {"wrong": "wrong", "fault": "faulted"}[how]
        assert [row.config for row in db.trials(PROBLEM, statuses=(status,))] == [CONFIGS[0]]


def test_a_kernel_that_does_not_compile_any_more(settings: Settings, make_trial: MakeTrial) -> None:
    tune(settings, make_trial)
    asked = replace(
        options(), builder_options={"behaviours": {str(c): "fail" for c in (*CONFIGS, DEFAULT)}}
    )
    _, (found,), _ = refresh(settings, [PROBLEM], asked)
    assert found.outcome == "failed"
    assert found.reason == "compile_failed: ptxas spilled 16 bytes"
    assert len(found.failures) == 3


def test_a_budget_ends_it(settings: Settings, make_trial: MakeTrial) -> None:
    tune(settings, make_trial)
    tune(settings, make_trial, OTHER)
    asked = replace(options(trial_s=0.2), budget_s=0.3)
    _, found, interrupted = refresh(settings, [PROBLEM, OTHER], asked)
    assert [one.outcome for one in found][-1] == "not reached"
    assert not interrupted
    _, found, _ = refresh(settings, [PROBLEM, OTHER], options())
    assert {one.outcome for one in found} <= {"current", "refreshed"}, "it goes on from there"


def test_what_moved() -> None:
    def stood(config: GemmConfig, us: float, sure: bool = True) -> Stood:
        return Stood(config, us, Interval(us - 0.1, us + 0.1, 0.95) if sure else None)

    def moved(before: Stood, now: Stood) -> str:
        return Refreshed(PROBLEM, "refreshed", before=before, now=now).moved

    a, b = CONFIGS[:2]
    assert moved(stood(a, 10.0), stood(a, 10.1)) == "nothing"
    assert moved(stood(a, 10.0), stood(a, 11.0)) == "slower"
    assert moved(stood(a, 10.0), stood(b, 9.0)) == "another winner, faster"
    assert moved(stood(a, 10.0), stood(b, 10.1)) == "another winner"
    assert moved(stood(a, 10.0, False), stood(a, 5.0)) == "too few samples to tell times apart"
    assert Refreshed(PROBLEM, "current").moved == ""


def test_without_a_gpu(settings: Settings, make_trial: MakeTrial) -> None:
    tune(settings, make_trial)
    with pytest.raises(GpuMissing, match="refresh needs a GPU"):
        refresh(settings, [PROBLEM], options(NO_GPU))


def test_command(
    settings: Settings,
    make_trial: MakeTrial,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tune(settings, make_trial)
    real = refresh

    def fake(s: Settings, problems: Any, o: TuneOptions, *tell: Any) -> Any:
        assert o.finalists == 2
        return real(s, problems, options(), *tell)

    monkeypatch.setattr(kgen.search.refresh, "refresh", fake)
    words = ["tune", "--refresh", "--finalists", "2", "--db", settings.db_url]
    words += ["--cache", str(settings.cache_dir)]
    assert main(words) == 0
    done = capsys.readouterr()
    line = next(line for line in done.out.splitlines() if line.startswith(str(PROBLEM)))
    assert "900.0" in line
    assert "compiler" in line
    assert "compiler fake-0.9 -> fake-1.0" in done.err
    assert "1 problem: 1 moved" in done.err
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["outcome"] for one in told["problems"]] == ["current"]
    assert main([*words, "dense m=7 n=2112 k=7168"]) == 1
    assert "no time is stored for this GPU" in capsys.readouterr().err
    assert main([*words, "--no-gpu"]) == 2
    assert "can not go with --no-gpu" in capsys.readouterr().err
