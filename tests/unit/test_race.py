"""A source edited by hand: what its header says, and its race on a simulated GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kgen.search.race
from kgen.cache.census import prune
from kgen.cache.db import TuningDatabase
from kgen.cli.main import main
from kgen.config import GemmConfig
from kgen.device import H200
from kgen.errors import GpuMissing, UsageError
from kgen.foreign import ForeignSource, read_foreign
from kgen.heuristic import default_config
from kgen.intervals import Interval
from kgen.problem import GemmProblem
from kgen.render import entry_name, render
from kgen.search.events import TuneOptions
from kgen.search.race import race, verdict
from kgen.search.rerun import rerun
from kgen.settings import Settings
from tests.unit.conftest import MakeTrial
from tests.unit.fake_search import BUILDER, DEVICE, GPU, NO_GPU, FakeBuilder, time_us

PROBLEM = GemmProblem("dense", 64, 2112, 7168)
BASE = GemmConfig(block_m=64, block_n=96, num_stages=8, num_math_warpgroups=1)
TUNED = replace(BASE, block_n=88)
DEFAULT = default_config(PROBLEM, DEVICE)
HERE = (DEVICE.name, DEVICE.num_sms)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path, jobs=1, trial_timeout_s=10.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A source that was edited."""
    path = tmp_path / "mine.cu"
    text = render(PROBLEM, BASE).text
    path.write_text(text.replace("kNumThreads, 1)", "kNumThreads, 1) /* mine */"))
    assert "mine" in path.read_text()
    return path


def options(backend: str = GPU, **fake_gpu: Any) -> TuneOptions:
    return TuneOptions(backend=backend, backend_options=fake_gpu, builder=BUILDER)


def tune(settings: Settings, make_trial: MakeTrial, config: GemmConfig = TUNED) -> None:
    key = FakeBuilder().key(PROBLEM, config)
    with TuningDatabase.open(settings.db_url) as db:
        db.record(make_trial(900.0, problem=PROBLEM, config=config, cubin_key=key))


# ---- the file


def test_header_gives_the_configuration(file: Path) -> None:
    source = read_foreign(file, PROBLEM, H200)
    assert (source.config, source.entry, source.name) == (
        BASE,
        entry_name(PROBLEM, BASE),
        "mine.cu",
    )
    assert source.text == file.read_text()
    other = read_foreign(file, PROBLEM, H200, {"num_stages": 6})
    assert other.config == replace(BASE, num_stages=6)


@pytest.mark.parametrize("kind", ["contiguous", "masked", "k_grouped", "wgrad"])
def test_every_kind_of_source_is_read(kind: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"accumulate": True, "recipe": "vector", "d_dtype": "fp32"}
    if kind in ("contiguous", "masked"):
        fields = {}
    groups = 1 if kind == "wgrad" else 4
    problem = GemmProblem(kind, 256, 512, 512, groups=groups, **fields)
    config = default_config(problem, H200)
    path = tmp_path / "mine.cu"
    path.write_text(render(problem, config).text)
    assert read_foreign(path, problem, H200).config == config


Edit = Callable[[str], str]
BROKEN: dict[str, tuple[Edit, str]] = {
    "no header": (lambda t: t[t.index("\n\n") :], "does not state block_m, block_n"),
    "an axis lost": (lambda t: t.replace("// split_k = 1\n", ""), "does not state split_k: begin"),
    "no number": (lambda t: t.replace("// split_k = 1\n", "// split_k = x\n"), "whole number"),
    "no such axis": (lambda t: "// blok_m = 64\n" + t, "header says blok_m=64: no such axis"),
    "two kernels": (lambda t: t + t[t.index("kgen_dense") :], "2 kernels that take"),
    "no kernel": (lambda t: t.replace("__grid_constant__", ""), "0 kernels"),
    "another class": (lambda t: t.replace("d_dtype=bf16", "d_dtype=fp32"), "problem class"),
    "not launchable": (lambda t: t.replace("// num_stages = 8", "// num_stages = 1"), "2 to 16"),
    "too much memory": (
        lambda t: t.replace("// num_stages = 8", "// num_stages = 16"),
        "bytes of shared memory",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_can_not_be_launched_is_refused(what: str, file: Path) -> None:
    edit, message = BROKEN[what]
    file.write_text(edit(file.read_text()))
    with pytest.raises(UsageError, match=message) as caught:
        read_foreign(file, PROBLEM, H200)
    assert str(file) in str(caught.value)


def test_a_source_by_hand_may_do_with_fewer_registers(file: Path) -> None:
    """Rules that say what spills are about kgen's own kernels; the compiler has the word."""
    wide = {"block_n": 256, "num_stages": 4, "block_m": 128}
    assert read_foreign(file, PROBLEM, H200, wide).config.block_n == 256


def test_files_that_are_no_source(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no\.cu can not be read: No such file"):
        read_foreign(tmp_path / "no.cu", PROBLEM, H200)
    (tmp_path / "bytes.cu").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="no UTF-8 text"):
        read_foreign(tmp_path / "bytes.cu", PROBLEM, H200)


# ---- the race


def read(file: Path) -> ForeignSource:
    return read_foreign(file, PROBLEM, DEVICE)


def test_everybody_is_verified_and_timed_and_kept(
    settings: Settings, make_trial: MakeTrial, file: Path, tmp_path: Path
) -> None:
    tune(settings, make_trial)
    journal = tmp_path / "journal"
    found = race(settings, PROBLEM, read(file), 2, options(journal=str(journal)))
    assert [(one.name, one.config, one.status) for one in found.contestants] == [
        ("foreign", BASE, "ok"),
        ("tuned", TUNED, "ok"),
        ("default", DEFAULT, "ok"),
    ]
    assert [one.median_us for one in found.contestants] == [
        time_us(PROBLEM, config) for config in (BASE, TUNED, DEFAULT)
    ]
    assert all(len(one.samples_us) == 6 for one in found.contestants), "of two rounds, no more"
    calls = journal.read_text().splitlines()
    assert sum(call.startswith("verify") for call in calls) == 3
    ratio = found.ratio(found.contestants[1])
    assert ratio is not None
    assert ratio[0] == pytest.approx(time_us(PROBLEM, BASE) / time_us(PROBLEM, TUNED))
    assert ratio[1] is not None
    with TuningDatabase.open(settings.db_url) as db:
        rows = db.trials(PROBLEM)[1:]
        assert [row.source for row in rows].count("foreign") == 3
        assert {row.provenance["stage"] for row in rows} == {"race"}
        assert all(row.config == BASE for row in rows if row.is_foreign)
        assert BASE not in {row.config for row in db.ranking(PROBLEM, *HERE)}
        foreign = next(row.id for row in rows if row.is_foreign)
        assert prune(db, keep=1).deleted == 0, "two cubins are kept, and what is foreign"
    again = rerun(settings, foreign, options=options())
    assert (again.checked.status, again.checked.stale) == ("ok", False)
    with TuningDatabase.open(settings.db_url) as db:
        last = db.trials(PROBLEM)[-1]
        assert (last.source, last.cubin_key) == ("foreign", again.checked.row.cubin_key)
    gone = replace(options(), builder_options={"behaviours": {again.checked.row.cubin_key: "gone"}})
    assert rerun(settings, foreign, options=gone).checked.status == "invalid"


@pytest.mark.parametrize("how", ["wrong", "fault", "hang"])
def test_a_source_that_fails_is_told_and_stays_out_of_the_way(
    settings: Settings, make_trial: MakeTrial, file: Path, how: str
) -> None:
    tune(settings, make_trial)
    settings = replace(settings, trial_timeout_s=1.0)
    found = race(settings, PROBLEM, read(file), 2, options(behaviours={str(BASE): how}))
    status = {"wrong": "wrong", "fault": "faulted", "hang": "timeout"}[how]
    assert (found.foreign.status, found.foreign.median_us) == (status, None)
    assert found.foreign.reason
    assert [one.status for one in found.contestants[1:]] == ["ok", "ok"]
    assert found.ratio(found.contestants[1]) is None
    with TuningDatabase.open(settings.db_url) as db:
        failed = [row for row in db.trials(PROBLEM) if row.status == status]
        assert [row.source for row in failed] == ["foreign"]
        assert failed[0].cubin_key not in ("", FakeBuilder().key(PROBLEM, BASE))


def test_a_source_that_does_not_compile(
    settings: Settings, make_trial: MakeTrial, file: Path
) -> None:
    tune(settings, make_trial)
    file.write_text(file.read_text() + "\nsyntax error\n")
    found = race(settings, PROBLEM, read(file), 2, options())
    assert found.foreign.status == "compile_failed"
    assert "mine.cu: expected a ';'" in found.foreign.reason
    with TuningDatabase.open(settings.db_url) as db:
        (row,) = db.trials(PROBLEM, statuses=("compile_failed",))
        assert (row.source, row.cubin_key) == ("foreign", "")


def test_stale_or_no_winner_is_noted_and_the_default_is_not_raced_twice(
    settings: Settings, make_trial: MakeTrial, file: Path
) -> None:
    with TuningDatabase.open(settings.db_url) as db:
        db.record(make_trial(900.0, problem=PROBLEM, config=TUNED, cubin_key="0" * 64))
    found = race(settings, PROBLEM, read(file), 1, options())
    assert [one.name for one in found.contestants] == ["foreign", "default"]
    assert "has no tuned kernel of today's" in found.notes[0]
    # That race measured the default, which is the winner now.
    found = race(settings, PROBLEM, read(file), 1, options())
    assert [one.name for one in found.contestants] == ["foreign", "tuned, default"]


def test_verdict_needs_the_whole_interval() -> None:
    assert verdict((0.9, Interval(0.85, 0.95, 0.96))) == "faster"
    assert verdict((1.1, Interval(1.05, 1.15, 0.96))) == "slower"
    assert verdict((0.99, Interval(0.97, 1.01, 0.96))) == "no difference beyond the noise"
    assert verdict((0.5, None)) == "too few rounds to tell"
    assert verdict(None) == "not compared"


def test_command(
    settings: Settings,
    make_trial: MakeTrial,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tune(settings, make_trial)
    real = race
    monkeypatch.setattr(
        kgen.search.race,
        "race",
        lambda s, p, source, rounds, o: real(s, p, source, rounds, options()),
    )
    words = ["race", str(PROBLEM), "--source", str(file), "--db", settings.db_url]
    words += ["--cache", str(settings.cache_dir)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "mine.cu (foreign)" in out
    ratio = time_us(PROBLEM, BASE) / time_us(PROBLEM, TUNED)
    assert f"{ratio:.3f}x" in next(line for line in out.splitlines() if line.startswith("tuned"))
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    # The first race measured the default, which is the fastest now.
    ratio = time_us(PROBLEM, BASE) / time_us(PROBLEM, DEFAULT)
    assert told["foreign_over"]["tuned, default"]["ratio"] == pytest.approx(ratio)
    assert main([*words, "--set", "num_stages=99"]) == 2
    assert "2 to 16" in capsys.readouterr().err


def test_without_a_gpu(settings: Settings, make_trial: MakeTrial, file: Path) -> None:
    tune(settings, make_trial)
    with pytest.raises(GpuMissing, match="race needs a GPU"):
        race(settings, PROBLEM, read(file), 1, options(NO_GPU))
