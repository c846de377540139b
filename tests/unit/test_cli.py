"""The command line: help, exit codes, what goes to stdout and what to stderr."""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kgen
from kgen.cli import arguments, output
from kgen.cli.board import Board
from kgen.cli.main import build_parser, main
from kgen.cli.progress import Display, PlainLines, duration, outcome_of, status_line
from kgen.config import GemmConfig
from kgen.device import H200
from kgen.errors import DriverError
from kgen.problem import GemmProblem
from kgen.search.events import (
    DEFAULT_TRIALS,
    Notice,
    ProblemFinished,
    ProblemReport,
    ProblemStarted,
    RunStarted,
    TrialFinished,
    TuneOptions,
    TuneReport,
    WorkerReplaced,
)
from kgen.settings import Settings

ROOT = Path(__file__).parents[2]
PROBLEM = GemmProblem("dense", 64, 2112, 7168)
LINE = "dense m=64 n=2112 k=7168"
COMMANDS = (
    *("tune", "dispatch-table", "best", "show", "explain", "render"),
    *("run-trial", "race", "profile"),
    *("bench", "plot", "shapes", "misses", "replay", "db", "doctor"),
)
#: Options whose help has no default to state: they choose what is done, or are needed.
NO_DEFAULT = {"--shapes", "--source", "--ptx", "--sass", "--config", "--help"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setenv("KGEN_CACHE_DIR", str(cache))
    return cache


def parser_of(command: str) -> argparse.ArgumentParser:
    choices = next(a.choices for a in build_parser()._actions if isinstance(a.choices, dict))
    parser = choices[command]
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def exit_code_of(*words: str) -> int:
    """The exit code, also where argparse leaves by itself."""
    try:
        return main(words)
    except SystemExit as left:
        return int(left.code or 0)


# ---- help


def test_commands_are_these() -> None:
    choices = next(a.choices for a in build_parser()._actions if isinstance(a.choices, dict))
    assert tuple(choices) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_it_does(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(command, "--help") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: kgen {command}")
    assert len(parser_of(command).description or "") > 100


@pytest.mark.parametrize("command", COMMANDS)
def test_help_states_every_default(command: str) -> None:
    for action in parser_of(command)._actions:
        for name in action.option_strings[-1:]:
            assert action.help
            assert "default: " in action.help or name in NO_DEFAULT, f"{command} {name}"


def test_defaults_in_help_are_the_real_ones() -> None:
    text = " ".join(parser_of("tune").format_help().split())
    options = TuneOptions()
    assert f"(default: {options.sampler})" in text
    assert f"(default: {DEFAULT_TRIALS}, or no limit" in text
    args = build_parser().parse_args(["tune", LINE])
    assert (args.sampler, args.finalists, args.seed) == ("model", options.finalists, options.seed)
    assert arguments.settings_of(args) == Settings.from_env()


def test_samplers_named_are_the_real_ones() -> None:
    from kgen.cli import replay, tune
    from kgen.search.replay import SEARCHES
    from kgen.search.strategies import SAMPLERS

    assert tune.SAMPLERS == SAMPLERS
    assert replay.SEARCHES == SEARCHES


def test_main_help_names_exit_codes_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("--help") == 0
    out = capsys.readouterr().out
    assert "0 all done, 1 some failed, 2 wrong usage" in out
    assert all(command in out for command in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("--version") == 0
    assert capsys.readouterr().out == f"kgen {kgen.__version__}\n"


def test_help_is_quick() -> None:
    """By the CPU's time: other work on the machine adds little to it."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "kgen.cli.main", "--help"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.5


# ---- usage


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("fly",),
        ("tune",),
        ("bench",),
        ("tune", LINE, "--sampler", "guess"),
        ("tune", LINE, "--trials", "0"),
        ("tune", LINE, "--trials", "many"),
        ("tune", LINE, "--budget", "-1"),
        ("tune", LINE, "--budget", "nan"),
        ("tune", LINE, "--budget", "inf"),
        ("tune", LINE, "--budget-per-problem", "inf"),
        ("tune", LINE, "--policy", "warm"),
        ("tune", LINE, "--cache", "~nobody-of-that-name/cache"),
        ("tune", LINE, "--compiler", "gcc"),
        ("tune", "dense m=sixty n=2112 k=7168"),
        ("tune", "--shapes", "no_such_file.txt"),
        ("tune", "--shapes", "."),
        ("show", "dense m=1,2 n=2112 k=7168"),
        ("show", LINE, "--ptx", "--sass"),
        ("render",),
        ("render", "sparse m=1 n=8 k=16"),
        ("render", LINE, "--set", "block_n"),
        ("render", LINE, "--set", "block_n=wide"),
        ("render", LINE, "--set", "block_q=8"),
        ("render", LINE, "--set", "block_n=12"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_why(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], own_cache: Path
) -> None:
    assert exit_code_of(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip()) > 10
    assert "Traceback" not in captured.err
    assert not own_cache.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tune", *LINE.split()), f'in quotes: "{LINE}"'),
        (("show", *LINE.split()), f'in quotes: "{LINE}"'),
        (("render", *LINE.split()), f'in quotes: "{LINE}"'),
        (("render", "--set", "block_n=152", LINE), "0 problems given; expected one, before"),
        (("render", LINE, LINE), "2 problems given"),
        (("render", "dense m=1 n=7 k=16"), "'dense m=1 n=7 k=16': n=7: "),
        (("tune", LINE, "--trials", "many"), "many: expected a whole number from 1"),
        (("tune", LINE, "--budget", "soon"), "soon: expected a number of seconds above 0"),
    ],
)
def test_slips_are_explained(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(*words) == 2
    assert said in capsys.readouterr().err


def test_bad_shapes_line_is_named_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], own_cache: Path
) -> None:
    shapes = tmp_path / "s.txt"
    shapes.write_text("dense m=1 n=2112 k=7168\n\ndense m=1 n=2113 k=7168\n")
    assert main(["tune", "--shapes", str(shapes)]) == 2
    err = capsys.readouterr().err
    assert f"{shapes}:3" in err
    assert "2113" in err
    assert not own_cache.exists()


def test_bad_environment_is_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KGEN_JOBS", "some")
    assert main(["doctor"]) == 2
    assert "KGEN_JOBS" in capsys.readouterr().err


def test_options_go_before_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KGEN_DB", "/from/env.db")
    words = ["tune", LINE, "--cache", str(tmp_path), "--db", "/given.db", "--jobs", "3"]
    settings = arguments.settings_of(build_parser().parse_args([*words, "--compiler", "nvrtc"]))
    assert settings.cache_dir == tmp_path
    assert settings.db_url == "sqlite:////given.db"
    assert (settings.jobs, settings.compiler) == (3, "nvrtc")


# ---- render


def test_render_prints_the_source_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", LINE, "--set", "block_n=152", "raster_along=n"]) == 0
    out, err = capsys.readouterr()
    assert "__global__" in out
    assert "// block_n = 152" in out
    assert "// raster_along = n" in out
    assert err == ""


def test_render_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", LINE, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["problem"] == str(PROBLEM)
    assert GemmConfig.from_dict(value["config"])
    assert value["body_sha256"] in value["source"]


def test_render_needs_neither_torch_nor_cuda() -> None:
    code = (
        "import sys; from kgen.cli.main import main; "
        f"code = main(['render', {LINE!r}]); "
        "heavy = {'torch', 'cuda.bindings', 'optuna', 'sqlalchemy'} & {*sys.modules}; "
        "sys.exit(code or bool(heavy))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "kgen_dense_block_to_bf16_" in done.stdout


def test_a_reader_that_leaves_is_no_error() -> None:
    command = (
        f"{sys.executable} -m kgen.cli.main render '{LINE}' | head -1; echo ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0", done.stderr
    assert done.stderr == ""


def test_a_full_disk_is_an_error_without_a_traceback() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kgen.cli.main", "render", LINE],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("kgen: error: standard output can not be written: No space left")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_narrow_encoding_is_no_error(database: Path, encoding: str) -> None:
    """µ and – stand in tables; Latin-1 has the first only."""
    done = subprocess.run(
        [sys.executable, "-m", "kgen.cli.main", "best", "--db", str(database)],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"12.50" in done.stdout
    assert b"?" in done.stdout


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_no_error(database: Path, closed: str) -> None:
    command = f"{sys.executable} -m kgen.cli.main best --db {database} {closed}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_reader_of_the_progress_that_leaves_stops_no_work(
    fake_tune: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any, **__: Any) -> None:
        raise BrokenPipeError

    fake_tune.append(report_of(tuned()))
    monkeypatch.setattr(sys.stderr, "write", gone)
    assert main(["tune", LINE]) == 0
    assert "12.50" in capsys.readouterr().out


# ---- tune: the report and the events


def tuned(**fields: Any) -> ProblemReport:
    values: dict[str, Any] = {
        "config": GemmConfig(),
        "median_us": 12.5,
        "p10_us": 12.0,
        "p90_us": 13.0,
    }
    values |= {"error": 1.7e-3, "default_us": 15.0, "predicted_us": 11.0, "num_trials": 9}
    return ProblemReport(PROBLEM, 1.0, "tuned", **(values | fields))


def report_of(*problems: ProblemReport, **fields: Any) -> TuneReport:
    values: dict[str, Any] = {"device": H200, "measured": True, "reason": "", "run_id": 1}
    values["seconds"] = 3.0
    return TuneReport(problems=problems, **(values | fields))


@pytest.fixture
def fake_tune(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces the tuning loop: what it was called with, and then what it gives."""
    import kgen.search.tune as loop

    calls: list[Any] = []

    def tune(lines: Any, settings: Any, options: Any, on_event: Any) -> TuneReport:
        calls[1:] = [lines, settings, options]
        on_event(RunStarted(H200, calls[0].measured, calls[0].reason, len(lines), 2))
        for problem in calls[0].problems:
            on_event(ProblemFinished(problem))
        report = calls[0]
        assert isinstance(report, TuneReport)
        return report

    monkeypatch.setattr(loop, "tune", tune)
    return calls


def test_tune_prints_a_table_and_passes_its_options(
    fake_tune: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_tune.append(report_of(tuned()))
    words = ["tune", LINE, LINE, "--trials", "7", "--budget", "420", "--sampler", "random"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    header, row = out.splitlines()
    assert header.split()[:2] == ["problem", "outcome"]
    assert all(text in row for text in (str(PROBLEM), "12.50", "1.20x", "1.7e-03"))
    assert "tuned once" in err
    assert "[1/1]" in err
    (lines, _, options) = fake_tune[1:]
    assert [(line.problem, line.weight) for line in lines] == [(PROBLEM, 2.0)]
    assert (options.trials, options.budget_s, options.sampler) == (7, 420.0, "random")
    assert options.gpu
    assert options.policy == TuneOptions().policy  # by another name it would know no earlier time


def test_tune_without_a_gpu_says_predicted_and_exits_with_0(
    fake_tune: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    predicted = tuned(median_us=None, p10_us=None, p90_us=None, error=None, default_us=None)
    predicted = replace(predicted, outcome="predicted")
    fake_tune.append(report_of(predicted, measured=False, reason="no CUDA driver"))
    assert main(["tune", LINE]) == 0
    out, err = capsys.readouterr()
    assert "not measured" in out
    assert "predicted µs" in out
    assert "no CUDA driver" in err
    assert "predicted" in err


def test_tune_exit_codes(fake_tune: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    bad = tuned(config=None, median_us=None, p10_us=None, default_us=None, error=None)
    bad = replace(bad, outcome="untunable", reason="no candidate passed")
    fake_tune.append(report_of(tuned(), bad))
    assert main(["tune", LINE]) == 1
    assert "untunable: no candidate passed" in capsys.readouterr().err
    fake_tune[0] = report_of(tuned(), interrupted=True)
    assert main(["tune", LINE]) == 130
    assert "finished trials are kept" in capsys.readouterr().err


def test_tune_json_is_json_and_nothing_else(
    fake_tune: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_tune.append(report_of(tuned()))
    assert main(["tune", LINE, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["problems"][0]["problem"] == str(PROBLEM)
    assert value["problems"][0]["config"] == GemmConfig().to_dict()
    assert value["measured"] is True
    assert value["command"] == f"kgen tune '{LINE}' --json"


def test_tune_makes_its_cache_or_says_that_it_can_not(
    fake_tune: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path, own_cache: Path
) -> None:
    fake_tune.append(report_of(tuned()))
    assert main(["tune", LINE]) == 0
    assert own_cache.is_dir()
    assert "not kept" not in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["tune", LINE, "--cache", str(tmp_path / "file" / "cache")]) == 0
    assert "compiled kernels are not kept" in capsys.readouterr().err


EVENTS = (
    RunStarted(H200, True, "", 2, 4),
    ProblemStarted(PROBLEM, 1, 800, 0, {}),
    TrialFinished(PROBLEM, GemmConfig(), "ok", "", 12.5, 11.0, 12.5, 1),
    TrialFinished(PROBLEM, GemmConfig(), "wrong", "strip 3", None, 11.0, 12.5, 2),
    WorkerReplaced("gpu", "timed out after 20 s [busy]"),
    Notice("another run holds the GPU [pid 7]"),
    ProblemFinished(tuned()),
)


def test_plain_progress_is_lines_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    lines = PlainLines(Board(TuneOptions()))
    for event in EVENTS:
        lines(event)
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 4
    assert all(line.startswith("kgen: ") for line in err.splitlines())
    assert "[1/2]" in err
    assert "[pid 7]" in err


def test_a_terminal_shows_the_same_and_the_best_so_far() -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(force_terminal=True, width=100, record=True)
    with Live(console=console, auto_refresh=False) as live:
        display = Display(live, Board(TuneOptions()))
        for event in EVENTS[:-1]:
            display(event)
        console.print(display)
        before = console.export_text(clear=False)
        display(EVENTS[-1])
    text = console.export_text()
    assert "[pid 7]" in text
    assert "[busy]" in text
    assert re.search(rf"{LINE} +2 +12\.50\n0 of 2 problems, 2 trials", before)
    assert "1 of 2 problems" in status_line(display._board)


@pytest.fixture
def board() -> tuple[Board, list[float]]:
    """A board and its clock."""
    now = [100.0]
    return Board(TuneOptions(trials=10), clock=lambda: now[0]), now


def trial(problem: GemmProblem, number: int, best_us: float | None, busy_s: float) -> TrialFinished:
    values = (problem, GemmConfig(), "ok", "", best_us, 11.0, best_us, number)
    return TrialFinished(*values, gpu_busy_s=busy_s)


def test_figures_of_a_run(board: tuple[Board, list[float]]) -> None:
    """Two trials a second, a GPU that waits half the time, 16 trials of two problems to go."""
    figures, now = board
    other = replace(PROBLEM, m=128)
    figures(RunStarted(H200, True, "", 2, 4))
    figures(ProblemStarted(PROBLEM, 1, 800, 0, {}))
    assert (figures.trials_per_s, figures.gpu_idle, figures.left_s) == (None, None, None)
    for number in range(1, 5):
        now[0] += 0.5
        figures(trial(PROBLEM, number, 20.0 - number, number * 0.25))
    assert figures.trials_per_s == 2.0
    assert figures.gpu_idle == 0.5
    assert figures.left_s == (6 + 10) / 2.0
    assert figures.standings[PROBLEM].best_us == 16.0
    figures(ProblemStarted(other, 2, 3, 0, {}))  # of a space of three
    assert figures.left_s == (6 + 3) / 2.0
    figures(ProblemFinished(tuned()))
    assert figures.left_s == 3 / 2.0
    assert list(figures.standings) == [other, PROBLEM]
    assert status_line(figures) == (
        "1 of 2 problems, 4 trials, 2.0 a second, GPU idle 50%, 0:02 gone, 0:02 left"
    )


def test_a_budget_bounds_the_time_left() -> None:
    now = [0.0]
    figures = Board(TuneOptions(budget_s=100.0), clock=lambda: now[0])
    figures(RunStarted(H200, True, "", 50, 4))
    now[0] = 40.0
    assert figures.left_s == 60.0
    assert Board(TuneOptions(budget_per_problem_s=1.0)).left_s is None


def test_predictions_have_a_best_too(board: tuple[Board, list[float]]) -> None:
    figures, now = board
    figures(RunStarted(H200, False, "no GPU", 1, 4))
    figures(ProblemStarted(PROBLEM, 1, 800, 0, {}))
    for number, predicted_us in enumerate((12.0, 11.0, 13.0), 1):
        now[0] += 1.0
        figures(
            TrialFinished(PROBLEM, GemmConfig(), "compiled", "", None, predicted_us, None, number)
        )
    assert figures.standings[PROBLEM].best_us == 11.0
    assert figures.gpu_idle is None
    assert figures.left_s == 1.0, "four are compiled where there is no GPU, one a second"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (125, "2:05"), (3725, "1:02:05")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_plain_progress_tells_of_the_run_once_a_minute(
    board: tuple[Board, list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    figures, now = board
    lines = PlainLines(figures)
    lines(RunStarted(H200, True, "", 1, 4))
    capsys.readouterr()
    for number in range(1, 10):
        now[0] += 20.0
        lines(trial(PROBLEM, number, 12.5, 1.0))
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3
    assert told[0].startswith("kgen: 0 of 1 problem, 3 trials, ")


def test_outcome_of_a_problem_known_before() -> None:
    assert outcome_of(tuned(skipped=True)).endswith("(known before)")


@pytest.mark.parametrize(("width", "num_tables"), [(80, 2), (160, 1)])
def test_tables_fit_the_terminal(
    width: int,
    num_tables: int,
    fake_tune: list[Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    config = GemmConfig(block_n=152, num_accumulators=2, raster_along="n", split_k=2)
    fake_tune.append(report_of(tuned(config=config)))
    assert main(["tune", LINE]) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.startswith("problem") for line in lines) == num_tables
    assert [word for word in str(config).split() if word not in " ".join(lines).split()] == []


# ---- bench


@pytest.fixture
def fake_bench(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the timing of rows; gives what it was called with."""
    import kgen.bench.run as bench
    from kgen.measure import Timing

    called: dict[str, Any] = {}

    def run_bench(problems: Any, settings: Settings, on_row: Any, **rest: Any) -> Any:
        called.update(rest, problems=problems)
        times = {"kgen": 10.0, "torch blockwise": 20.0}
        timings = {name: Timing("cold", t, t - 1, t + 1, (t,)) for name, t in times.items()}
        details = {"kgen": {"short": "128x152", "origin": "database"}}
        errors = dict.fromkeys(timings, 1.7e-3)
        rows = [
            bench.Row(problems[0], timings, errors, details),
            bench.Row(problems[-1], notes={"kgen": "the fallback would answer"}),
        ][: len(problems)]
        for row in rows:
            on_row(row)
        names = ("kgen", "torch blockwise")
        return bench.BenchReport({"command": rest["command"]}, names, (), tuple(rows))

    monkeypatch.setattr(bench, "run_bench", run_bench)
    return called


def test_bench_prints_times_and_ratios(
    fake_bench: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", LINE, "--against", "torch", "--policy", "hot"]) == 0
    header, row, _, _, mean, small, _, worst = capsys.readouterr().out.splitlines()
    assert "torch blockwise µs  speedup" in header
    assert all(text in row for text in ("10.00", "9.00–11.00", "20.00", "2.00x", "128x152"))
    assert " ".join(mean.split()) == "speedup over torch blockwise all 1 2.00x 2.00x 2.00x"
    assert " ".join(small.split()) == "speedup over torch blockwise M ≤ 128 1 2.00x 2.00x 2.00x"
    assert worst.endswith(f"{LINE}, 2.000x torch blockwise; too few rounds for an interval")
    assert fake_bench["problems"] == [PROBLEM]
    assert (fake_bench["against"], fake_bench["policy"]) == (["torch"], "hot")
    assert fake_bench["command"] == f"kgen bench '{LINE}' --against torch --policy hot"


def test_bench_prints_floor_best_peer_and_what_is_missing(
    fake_bench: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    import kgen.bench.run as bench
    from kgen.bench.floor import Bound, Floor
    from kgen.measure import Timing

    def timing(us: float) -> Timing:
        return Timing("cold", us, us, us, (us,) * 16)

    def run_bench(problems: Any, settings: Settings, on_row: Any, **rest: Any) -> Any:
        fake_bench.update(rest)
        times = {"kgen": 10.0, "torch tensorwise": 9.0, "v1": 12.0, "v2": 11.0}
        timings = {name: timing(us) for name, us in times.items()}
        row = bench.Row(
            problems[0], timings, dict.fromkeys(times, 1e-3), floor=Bound(8.0, "stream")
        )
        on_row(row)
        rest["on_missing"]("triton", "not installed")
        floor = Floor({(2112, 7168): timing(6.5)}, {(2112, 7168): (16384, 12)}, timing(13e3), 132)
        easier = ("torch tensorwise",)
        return bench.BenchReport(
            {}, tuple(times), easier, (row,), {"triton": "not installed"}, floor
        )

    monkeypatch.setattr(bench, "run_bench", run_bench)
    pytest.importorskip("matplotlib")
    peers = ["--against", "torch,triton", "--against", "v1=/a,v2=/b"]
    assert main(["bench", LINE, *peers, "--plot", str(tmp_path / "x.png")]) == 0
    out, err = capsys.readouterr()
    header, row, *_ = out.splitlines()
    columns = " ".join(header.split()).split("error ")[1].split(" configuration")[0]
    assert columns == (
        "floor µs over floor torch tensorwise (easier) µs v1 µs v2 µs best peer speedup"
    )
    assert all(text in row for text in ("8.00", "1.25x", "12.00", "11.00", "v2", "1.10x"))
    assert "1.100x v2; 98% interval of paired rounds 1.100 to 1.100" in out
    assert out.splitlines()[-1] == "missing: triton, not installed"
    assert "triton is missing: not installed" in err
    assert "floor 8.00 µs" in err
    assert fake_bench["floor"] is True
    assert fake_bench["against"] == ["torch,triton", "v1=/a,v2=/b"]
    assert (tmp_path / "x.svg").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--against", "torhc"], "expected torch, triton, or NAME=DIR"),
        (["--plot", "/no/such/folder/x"], "in a folder that is there"),
    ],
)
def test_bench_refuses_before_it_times(
    fake_bench: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    reason: str,
) -> None:
    assert main(["bench", LINE, *words]) == 2
    assert reason in capsys.readouterr().err
    assert fake_bench == {}


def test_an_interrupted_bench_prints_what_it_has(
    fake_bench: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import kgen.bench.run as bench

    whole = bench.run_bench

    def run_bench(*args: Any, **rest: Any) -> Any:
        return replace(whole(*args, **rest), not_reached=("dense m=8 n=8 k=128",))

    monkeypatch.setattr(bench, "run_bench", run_bench)
    assert main(["bench", LINE, "--json"]) == 130
    out, err = capsys.readouterr()
    assert json.loads(out)["not_reached"] == ["dense m=8 n=8 k=128"]
    assert "interrupted: 1 problem not reached" in err


def test_bench_prints_host_costs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kgen.bench import host

    def run_host_bench(problem: GemmProblem) -> host.HostReport:
        costs = {"kgen.gemm_fp8_nt": host.HostCost(5.0, 6.25)}
        return host.HostReport(str(problem), 64, {"device": "NVIDIA H200"}, costs)

    monkeypatch.setattr(host, "run_host_bench", run_host_bench)
    assert main(["bench", "--host"]) == 0
    title, heading, row = capsys.readouterr().out.splitlines()
    assert title == f"host cost of {host.DEFAULT_PROBLEM}"
    assert " ".join(heading.split()) == "call µs µs, 64 sets in turn"
    assert row.split() == ["kgen.gemm_fp8_nt", "5.00", "6.25"]
    assert main(["bench", LINE, "--host", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["problem"] == LINE
    assert report["costs"]["kgen.gemm_fp8_nt"]["rotating_us"] == 6.25


def test_bench_fails_where_the_fallback_would_answer(
    fake_bench: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", LINE, "dense m=1 n=2112 k=7168", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["rows"][1]["providers"] == {
        "kgen": {"note": "the fallback would answer"}
    }
    assert "m=1 n=2112 k=7168: kgen: the fallback would answer" in err


def test_bench_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import kgen.bench.gpu as bench

    def none(ordinal: int) -> Any:
        raise DriverError("no CUDA driver")

    monkeypatch.setattr(bench, "device_facts", none)
    assert main(["bench", LINE]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "needs a Hopper GPU: no CUDA driver" in err


@pytest.mark.parametrize("command", ["tune", "bench"])
def test_policies_named_in_the_help_are_the_real_ones(command: str) -> None:
    from kgen.measure import DEFAULT_POLICY, POLICIES

    text = " ".join(parser_of(command).format_help().split())
    assert tuple(POLICIES) == arguments.POLICIES
    *first, last = POLICIES
    assert f"{', '.join(first)} or {last} (default: {DEFAULT_POLICY}," in text


# ---- best, show, doctor without a database


def test_best_without_a_database(capsys: pytest.CaptureFixture[str], own_cache: Path) -> None:
    assert main(["best"]) == 1
    assert "kgen tune" in capsys.readouterr().err
    assert not own_cache.exists()


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A database with one timed and one predicted problem."""
    from kgen.cache.db import TuningDatabase
    from kgen.cache.records import TrialRecord, provenance

    path = tmp_path / "t.db"
    db = TuningDatabase.open(path)
    origin = provenance(
        H200,
        driver="580",
        cuda="13.0",
        compiler="nvrtc-13.0.88",
        template_hash="t",
        generator="kgen",
        clocks={},
    )
    common: dict[str, Any] = {"device_name": H200.name, "num_sms": 132, "cubin_key": "c"}
    db.record(
        TrialRecord(
            problem=PROBLEM,
            config=GemmConfig(block_n=152),
            status="ok",
            verified=True,
            error=1.7e-3,
            median_us=12.5,
            p10_us=12.0,
            p90_us=13.0,
            samples_us=[12.5],
            policy="default",
            provenance=origin,
            **common,
        )
    )
    for block_n, predicted_us in ((64, 9.0), (96, 8.0)):
        record = TrialRecord(
            problem=PROBLEM.with_m(128),
            config=GemmConfig(block_n=block_n),
            status="compiled",
            source="predicted",
            predicted_us=predicted_us,
            **common,
        )
        db.record(record)
    db.close()
    return path


def test_best_tells_measured_from_predicted(
    database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["best", "--db", str(database)]) == 0
    device, header, first, second = capsys.readouterr().out.splitlines()
    assert device == "NVIDIA H200, 132 SMs"
    assert "configuration" in header
    assert all(text in first for text in (str(PROBLEM), "measured", "12.50", "128x152"))
    assert all(text in second for text in ("m=128", "predicted", "8.00", "128x96"))


def test_best_of_some_problems(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["best", "dense m=128 n=2112 k=7168", "dense m=1 n=2112 k=7168"]
    assert main([*words, "--db", str(database), "--json"]) == 1
    out, err = capsys.readouterr()
    (row,) = json.loads(out)
    assert (row["shape"], row["measured"]) == ("dense m=128 n=2112 k=7168", False)
    assert "dense m=1 n=2112 k=7168: nothing known" in err


def test_show_takes_the_database_first(
    database: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kgen.cli.show.device_at_hand", lambda: (H200, "none"))
    assert main(["show", LINE, "--db", str(database)]) == 0
    out, err = capsys.readouterr()
    assert "12.50 µs" in out
    assert "verified and timed on NVIDIA H200" in out
    assert err == ""
    assert main(["show", LINE, "--db", str(database), "--config"]) == 0
    assert "block_n=152" in capsys.readouterr().out.splitlines()
    assert main(["show", LINE, "--db", str(database), "--source"]) == 0
    assert "// block_n = 152" in capsys.readouterr().out


def test_show_without_a_database_takes_the_model(
    capsys: pytest.CaptureFixture[str], own_cache: Path
) -> None:
    assert main(["show", LINE, "--json"]) == 0
    out, err = capsys.readouterr()
    value = json.loads(out)
    assert value["trial"] is None
    assert GemmConfig.from_dict(value["config"])
    assert "analytic model" in err
    assert not own_cache.exists()


@pytest.mark.parametrize("visible", ["", "-1", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "1,0"])
def test_doctor_answers_whatever_is_visible(
    visible: str, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": visible}
    done = subprocess.run(
        [sys.executable, "-m", "kgen.cli.main", "doctor", "--json"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    found = {finding["name"]: finding["state"] for finding in json.loads(done.stdout)}
    assert found["gpu"] in ("found", "absent")
    assert found["compiler used"] == "found"
    assert not own_cache.exists()


def test_doctor_raises_nothing_where_a_name_can_not_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Stands for a folder that may not be entered too, which a test run by root can not have."""
    assert exit_code_of("doctor", "--cache", str(tmp_path / ("x" * 300))) in {0, 1}
    assert "database" in capsys.readouterr().out


def test_doctor_names_a_cache_and_a_database_that_can_not_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("not a database\n" * 100)
    assert main(["doctor", "--cache", str(file), "--db", str(file)]) == 1
    out, err = capsys.readouterr()
    assert f"{file} is not a folder" in out
    assert "broken: database" in err


def test_microseconds() -> None:
    texts = [output.microseconds(value) for value in (None, 3.456, 99.0, 665.04)]
    assert texts == ["–", "3.46", "99.00", "665.0"]
