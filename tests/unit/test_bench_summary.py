"""Best peers, means, intervals and the plot, from rows made by hand."""

from __future__ import annotations

import json
import sys
from math import comb
from pathlib import Path
from typing import Any

import pytest

from kgen.bench.plot import outputs, plot
from kgen.bench.summary import (
    best_peer,
    interval,
    means,
    over_floor,
    peers_of,
    speedup,
    summarise,
    worst,
)
from kgen.errors import KgenError, UsageError
from kgen.intervals import median_interval
from tools.plot_results import main as draw

ROUNDS = 16


def provider(us: float, samples: list[float] | None = None) -> dict[str, Any]:
    return {"median_us": us, "samples_us": samples or [us] * ROUNDS}


def row(m: int, floor: float | None = None, n: int = 576, **times: float) -> dict[str, Any]:
    made: dict[str, Any] = {
        "shape": f"dense m={m} n={n} k=7168",
        "problem": {"m": m, "n": n, "k": 7168},
        "providers": {name: provider(us) for name, us in times.items()},
    }
    return made | ({"floor": {"us": floor, "limit": "stream"}} if floor else {})


def report(*rows: dict[str, Any], providers: str = "kgen old new easy") -> dict[str, Any]:
    return {
        "providers": providers.split(),
        "reference_only": ["easy"],
        "rows": list(rows),
        "device": {"name": "NVIDIA H200"},
        "date": "2026-11-30T12:00:00",
    }


def test_best_peer_is_the_fastest_on_the_same_problem() -> None:
    """Not the easier one, and not one without a time in that row."""
    one = row(1, kgen=8.0, old=10.0, new=9.0, easy=2.0)
    peers = peers_of(report(one))
    assert peers == ["old", "new"]
    best = best_peer(one, peers)
    assert best is not None
    assert (best.name, best.ratio) == ("new", 9 / 8)
    refused = row(1, kgen=8.0, old=10.0, easy=2.0)
    refused["providers"]["new"] = {"note": "refuses M=1"}
    best = best_peer(refused, peers)
    assert best is not None
    assert (best.name, best.ratio) == ("old", 1.25)
    assert best.interval == pytest.approx((1.25, 1.25, 0.979), abs=1e-3)
    assert best_peer(row(1, kgen=8.0, easy=2.0), peers) is None
    assert best_peer(row(1, old=8.0), peers) is None
    assert speedup(row(1, old=8.0), "old") is None


def test_interval_is_of_paired_rounds() -> None:
    """A drift that hits both in a round cancels; unequal rounds are no pairs."""
    drift = [1.0 + 0.1 * i for i in range(ROUNDS)]
    one = row(1)
    one["providers"] = {
        "kgen": provider(10, [10 * x for x in drift]),
        "old": provider(12, [12 * x for x in drift]),
    }
    found = interval(one, "old")
    assert found is not None
    assert (found.low, found.high) == pytest.approx((1.2, 1.2))
    one["providers"]["old"]["samples_us"].pop()
    assert interval(one, "old") is None
    del one["providers"]["old"]["samples_us"]
    assert interval(one, "old") is None


@pytest.mark.parametrize("count", [6, 9, 16, 17, 40])
def test_interval_covers_the_median_as_often_as_it_says(count: int) -> None:
    """By the binomial distribution; the next narrower pair of values would not do."""
    found = median_interval([float(i) for i in range(1, count + 1)])
    assert found is not None
    k = int(found.low)
    assert found.high == count + 1 - k

    def covers(rank: int) -> float:
        return sum(comb(count, i) for i in range(rank, count - rank + 1)) / 2.0**count

    assert found.coverage == pytest.approx(covers(k))
    assert covers(k) >= 0.95 > covers(k + 1)


def test_too_few_rounds_have_no_interval() -> None:
    """All of five values enclose the median in 94 of 100 cases only."""
    assert median_interval([1.0] * 5) is None
    assert median_interval([]) is None


def test_means_by_class_of_m() -> None:
    """Geometric, each peer for itself, the best by row, the floor, and small M by (N, K)."""
    rows = (
        row(1, 4.0, kgen=8.0, old=8.0, new=16.0, easy=4.0),
        row(64, 5.0, kgen=10.0, old=40.0, new=20.0, easy=10.0),
        row(512, None, n=2112, kgen=10.0, old=5.0),
        row(4096, 50.0, n=2112, kgen=100.0, old=150.0, new=125.0),
    )
    found = {(mean.what, mean.rows): mean for mean in means(report(*rows))}
    best = found["speedup over best peer", "all"]
    assert (best.count, best.least, best.most) == (4, 0.5, 2.0)
    assert best.mean == pytest.approx((1 * 2 * 0.5 * 1.25) ** 0.25)
    assert found["speedup over old", "128 < M < 4096"].mean == pytest.approx(0.5)
    assert found["speedup over easy", "M ≤ 128"].mean == pytest.approx((0.5 * 1.0) ** 0.5)
    assert found["kgen over floor", "all"].count == 3
    assert found["kgen over floor", "M ≤ 128"].mean == pytest.approx(2.0)
    assert found["best peer over floor", "M ≤ 128"].mean == pytest.approx((2.0 * 4.0) ** 0.5)
    assert found["best peer over floor", "M ≥ 4096"].mean == pytest.approx(2.5)
    assert found["kgen over floor, N=576 K=7168", "M ≤ 128"].count == 2
    assert not [what for what, _ in found if "N=2112" in what]


def test_one_peer_is_no_best_of_several() -> None:
    """Its own lines say it all."""
    found = means(report(row(1, kgen=1.0, old=2.0), providers="kgen old easy"))
    assert {mean.what for mean in found} == {"speedup over old"}
    assert means(report(row(1, kgen=1.0), providers="kgen")) == []


def test_worst_row_and_its_json() -> None:
    """Least against its best peer, with the interval and how it was taken."""
    data = report(row(1, kgen=8.0, old=9.0, new=20.0), row(64, kgen=10.0, old=20.0, new=9.9))
    low = worst(data)
    assert low is not None
    assert (low.shape, low.peer, low.ratio) == ("dense m=64 n=576 k=7168", "new", 0.99)
    summary = json.loads(json.dumps(summarise(data)))
    assert summary["worst"]["interval"] == {
        "low": 0.99,
        "high": 0.99,
        "coverage": pytest.approx(0.979, abs=1e-3),
    }
    assert "binomial" in summary["worst"]["method"]
    assert worst(report(row(1, kgen=1.0))) is None
    assert "worst" not in summarise(report(row(1, kgen=1.0)))


def test_row_major_stands_against_row_major() -> None:
    """It is no best peer; kgen's own row-major time against kgen is the price of the layout."""
    one = row(1, kgen=8.0, old=10.0)
    times = {"kgen row-major": 9.0, "old row-major": 13.5}
    one["providers"] |= {name: provider(us) for name, us in times.items()}
    data = report(one, providers="kgen old") | {"reference_only": []}
    data["providers"] += [*times]
    assert peers_of(data) == ["old"]
    found = {mean.what: mean.mean for mean in means(data) if mean.rows == "all"}
    assert found["speedup over old"] == pytest.approx(1.25)
    assert found["speedup over old row-major"] == pytest.approx(1.5)
    assert found["speedup over kgen row-major"] == pytest.approx(1.125)
    price = interval(one, "kgen row-major")
    assert price is not None
    assert price.low == 1.125


def test_over_floor_needs_both() -> None:
    """A row of an older file has no floor."""
    assert over_floor(row(1, 4.0, kgen=5.0)) == 1.25
    assert over_floor(row(1, kgen=5.0)) is None
    assert over_floor(row(1, 4.0, kgen=5.0), "old") is None


# ---- plot


def test_plot_writes_png_and_svg(tmp_path: Path) -> None:
    """Every provider is in the legend, every (N, K) above its rows."""
    pytest.importorskip("matplotlib")
    data = report(
        row(64, 5.0, kgen=10.0, old=40.0, new=20.0, easy=10.0),
        row(1, 4.0, kgen=8.0, old=8.0),
        row(16, 30.0, n=32768, kgen=33.0, new=40.0),
        row(16, None, n=4096, kgen=33.0),
    )
    files = plot(data, tmp_path / "dense.png")
    assert files == [tmp_path / "dense.png", tmp_path / "dense.svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    svg = files[1].read_text()
    for text in ("kgen", "old", "new", "easy (easier)", "32768", "time / floor", "NVIDIA H200"):
        assert f"<!-- {text}" in svg
    assert "<!-- 4096" not in svg, "a row without a floor is not there"


def test_plot_from_a_result_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine with matplotlib; a file without floors says what to do."""
    pytest.importorskip("matplotlib")
    results = tmp_path / "r.json"
    results.write_text(json.dumps(report(row(1, 4.0, kgen=8.0))))
    assert draw([str(results), str(tmp_path / "x")]) == 0
    assert (tmp_path / "x.svg").exists()
    results.write_text(json.dumps(report(row(1, kgen=8.0))))
    assert draw([str(results), str(tmp_path / "y")]) == 1
    assert "run kgen bench with --floor" in capsys.readouterr().out


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The extra is named, and the way around."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(KgenError, match=r"pip install 'kgen\[plot\]'.*tools/plot_results.py"):
        plot(report(row(1, 4.0, kgen=8.0)), tmp_path / "x")


def test_plot_names(tmp_path: Path) -> None:
    """With or without an ending, dots in the name kept; the folder must be there."""
    assert outputs(tmp_path / "a") == outputs(tmp_path / "a.svg")
    assert outputs(tmp_path / "a.b") == [tmp_path / "a.b.png", tmp_path / "a.b.svg"]
    with pytest.raises(UsageError, match="in a folder that is there"):
        outputs(tmp_path / "no" / "a")
