"""The README's tables: made from result files, checked, never half-made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kgen.bench.floor import Bound, Floor
from kgen.bench.run import BenchReport, Row, provenance_of
from kgen.device import H200
from kgen.measure import POLICIES, Timing
from kgen.problem import GemmProblem
from tools.publish_results import join, merge
from tools.publish_results import main as publish
from tools.readme_tables import ROOT, main, pages, render, update

PAGE = "# x\n\nbefore\n\n<!-- table:dense -->\nold\n<!-- /table -->\n\nafter\n"


def timing(us: float) -> Timing:
    return Timing("cold", us, us - 0.25, us + 0.5, (us, us))


def row(m: int, kgen_us: float | None, torch_us: float | None) -> Row:
    problem = GemmProblem("dense", m=m, n=2112, k=7168)
    made = Row(problem)
    for name, us in (("kgen", kgen_us), ("torch", torch_us)):
        if us is None:
            made.notes[name] = "refused"
        else:
            made.timings[name], made.errors[name] = timing(us), 1.8e-3
    return made


def results(*rows: Row) -> dict[str, Any]:
    """As kgen bench prints it."""
    provenance = provenance_of(H200, POLICIES["cold"], "kgen bench --shapes x", commit="a" * 40)
    report = BenchReport(provenance | {"driver": "580"}, ("kgen", "torch"), ("torch",), rows)
    data: dict[str, Any] = json.loads(json.dumps(report.to_dict()))
    return data


def tuned(outcome: str = "tuned") -> dict[str, Any]:
    """As kgen tune prints it, shortened."""
    problem = {"problem": "dense m=1", "outcome": outcome, "reason": "none left", "num_trials": 31}
    return {"problems": [problem], "seconds": 417.3}


def test_rendered_table() -> None:
    """Rates by hand: 2·64·2112·7168 / 10 us = 194 TFLOPS; 15.89 MB, 1589 GB/s."""
    text = render(results(row(64, 10.0, 12.5), row(1, 8.0, None), row(4096, 100.0, 90.0)))
    lines = text.splitlines()
    assert lines[0].startswith("NVIDIA H200 (132 SMs), driver 580, torch ")
    assert "commit aaaaaaaaaaaa: `kgen bench --shapes x`, cold L2, median of 16" in lines[0]
    assert "| 64 | 2112 | 7168 | **10.00** | 9.75–10.50 | 194 | 1589 | 12.50 | 1.25 |" in lines
    assert any(line.endswith("| – | – |") and line.startswith("| 1 |") for line in lines)
    assert "| torch | all (2) | 1.06 | 0.90 |" in lines
    assert "| torch | M ≤ 128 (1) | 1.25 | 1.25 |" in lines
    assert "\\* torch: an easier problem, as a mark to reach." in lines


def test_several_peers_and_the_floor() -> None:
    """The best peer's name and ratio, times only of the others; floors, missing peers, the worst.

    By hand: floor 8 us, kgen 10, old 12.5, new 11: new is the best, 1.10 times; 1.25 over the
    floor; the lower bound of 16 equal rounds is the ratio itself.
    """
    rows = [row(64, 10.0, 9.0), row(4096, 100.0, 90.0)]
    for one, times in zip(rows, ((12.5, 11.0), (99.0, 120.0)), strict=True):
        for name, us in zip(("old", "new"), times, strict=True):
            one.timings[name], one.errors[name] = timing(us), 1.8e-3
        for name, made in one.timings.items():
            one.timings[name] = replace(made, samples_us=(made.median_us,) * 16)
    floors = [
        replace(one, floor=Bound(us, "stream")) for one, us in zip(rows, (8, 80), strict=True)
    ]
    floor = Floor({(2112, 7168): timing(6.5)}, {(2112, 7168): (16384, 12)}, timing(13e3), 132)
    names = ("kgen", "torch", "old", "new")
    provenance = provenance_of(H200, POLICIES["cold"], "kgen bench", commit="a" * 40)
    missing = {"triton": "not installed"}
    report = BenchReport(provenance, names, ("torch",), tuple(floors), missing, floor)
    data = json.loads(json.dumps(report.to_dict()))
    lines = render(data).splitlines()
    assert (
        "| floor µs | over floor | best peer | speedup | torch* µs | old µs | new µs |" in lines[2]
    )
    assert any(
        line.startswith("| 64 |")
        and line.endswith("| 8.00 | 1.25 | new | **1.10** | 9.00 | 12.50 | 11.00 |")
        for line in lines
    )
    assert "| best peer | all (2) | 1.04 | 0.99 |" in lines
    worst = (
        "Worst against its best peer: dense m=4096 n=2112 k=7168, 0.990 times old (0.990 to 0.990"
    )
    assert any(line.startswith(worst) for line in lines)
    assert "| kgen | M ≤ 128 (1) | 1.25 | 1.25 |" in lines
    assert "Not there: triton." in lines[0]
    assert "A and D at 4 TB/s" in lines[0]
    assert data["rows"][0]["best_peer"]["name"] == "new"
    assert data["summary"]["worst"]["peer"] == "old"
    with pytest.raises(ValueError, match="triton was asked for and missing: not installed"):
        join(data | {"driver": "580"}, None, "", "")
    assert join(data | {"driver": "580"}, None, "", "", ["triton"])["missing"] == missing


def test_update_and_check(tmp_path: Path) -> None:
    """Stale is seen, written, then seen to agree; text around the table stays."""
    page, folder = tmp_path / "README.md", tmp_path / "results"
    page.write_text(PAGE)
    arguments = ["--page", str(page), "--results", str(folder)]
    assert main(["--check", *arguments]) == 1
    assert page.read_text() == PAGE
    assert main(arguments) == 0  # no result file yet: an empty table
    assert "old" not in page.read_text()
    folder.mkdir()
    (folder / "dense.json").write_text(json.dumps(results(row(64, 10.0, 12.5))))
    assert main(["--check", *arguments]) == 1
    assert main(arguments) == 0
    assert main(["--check", *arguments]) == 0
    text = page.read_text()
    assert text.startswith("# x\n\nbefore\n\n<!-- table:dense -->\n\nNVIDIA H200")
    assert text.endswith("\n<!-- /table -->\n\nafter\n")


def test_pages_agree_with_the_results() -> None:
    """What stands in the tables of the README and under docs comes from results/."""
    texts = [page.read_text() for page in pages()]
    assert sum("<!-- table:" in text for text in texts) >= 2
    for text in texts:
        assert update(text, ROOT / "results") == text, "run python tools/readme_tables.py"


def test_published_results_keep_both_runs(tmp_path: Path) -> None:
    """Raw rows, the tune's table with its command, the commit where the machine knew none."""
    bench = results(row(64, 10.0, 12.5)) | {"commit": "unknown"}
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    (tmp_path / "tune.json").write_text(json.dumps(tuned()))
    out = tmp_path / "results" / "dense.json"
    arguments = [str(tmp_path / "bench.json"), str(out), "--tune", str(tmp_path / "tune.json")]
    assert publish([*arguments, "--tune-command", "kgen tune", "--commit", "b" * 40]) == 0
    data = json.loads(out.read_text())
    assert data["commit"] == "b" * 40
    assert data["rows"] == bench["rows"]
    assert data["tune"]["command"] == "kgen tune"
    assert "tuned before by `kgen tune`: 1 problems, 31 trials, 417 s." in render(data)


def test_parts_of_a_bench_become_one(tmp_path: Path) -> None:
    """Rows, commands and the summary of all; what one part did not reach the other may have."""
    first = results(row(64, 10.0, 12.5)) | {"not_reached": ["dense m=1 n=2112 k=7168"]}
    second = results(row(1, 8.0, 8.0)) | {"command": "kgen bench again"}
    for name, part in (("1", first), ("2", second)):
        (tmp_path / name).write_text(json.dumps(part))
    out = tmp_path / "out.json"
    arguments = [str(tmp_path / "1"), str(out)]
    assert publish(arguments) == 1, "an interrupted run is not whole"
    assert publish([*arguments, "--more", str(tmp_path / "2")]) == 0
    data = json.loads(out.read_text())
    assert [one["problem"]["m"] for one in data["rows"]] == [64, 1]
    assert data["not_reached"] == []
    assert data["command"] == "kgen bench --shapes x; kgen bench again"
    assert data["summary"]["means"][0]["count"] == 2


def test_parts_of_other_kinds_are_refused() -> None:
    """Another commit, another device, the same row twice."""
    part = results(row(64, 10.0, 12.5))
    with pytest.raises(ValueError, match="in more than one part: dense m=64"):
        merge([part, part])
    other = results(row(1, 8.0, 8.0)) | {"commit": "b", "torch": "1"}
    with pytest.raises(ValueError, match="other commit, torch"):
        merge([part, other])
    with pytest.raises(ValueError, match="other floor"):
        merge([part, results(row(1, 8.0, 8.0)) | {"floor": {"streams": []}}])


def test_floors_of_parts_are_joined() -> None:
    """Each part streamed its own weights."""
    parts = [results(row(m, 10.0, 12.5)) for m in (1, 2)]
    for place, part in enumerate(parts):
        part["floor"] = {"tflops": 1700.0 + place, "streams": [place]}
    assert merge(parts)["floor"] == {"tflops": 1700.0, "streams": [0, 1]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"commit": "c-dirty"}, "changed after it"),
        ({"commit": "unknown"}, "no commit"),
        ({"command": ""}, "no command"),
    ],
)
def test_results_of_unknown_origin_are_refused(changes: dict[str, str], reason: str) -> None:
    """A number nobody can take again is not published."""
    with pytest.raises(ValueError, match=reason):
        join(results(row(64, 10.0, 12.5)) | changes, None, "", "")


def test_incomplete_runs_are_refused() -> None:
    """A problem without a verified time, or not tuned."""
    with pytest.raises(ValueError, match="m=1 n=2112 k=7168: refused"):
        join(results(row(64, 10.0, 12.5), row(1, None, 9.0)), None, "", "")
    with pytest.raises(ValueError, match="dense m=1: untunable, none left"):
        join(results(row(64, 10.0, 12.5)), tuned("untunable"), "kgen tune", "")
    with pytest.raises(ValueError, match="without --tune-command"):
        join(results(row(64, 10.0, 12.5)), tuned(), "", "")
    with pytest.raises(ValueError, match="the bench ran at commit"):
        join(results(row(64, 10.0, 12.5)), None, "", "d" * 40)
