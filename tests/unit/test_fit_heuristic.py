"""Recorded trials: exported, the model's constants fitted to them, and how well it chooses.

`tests/data/trials_h200_dense.csv.gz` holds the times of a tuning run over 42 problems; its header
says where they come from. The figures asserted are over the configurations that were recorded.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kgen.cache.records import TrialRow
from kgen.config import GemmConfig
from kgen.device import H200
from kgen.heuristic import predict_us
from kgen.model import FIT, Fit
from kgen.problem import GemmProblem
from kgen.search.tables import TimingTable, read, write
from kgen.validity import why_invalid
from tools.export_trials import ORIGIN, collect
from tools.fit_heuristic import (
    NUM_SEEDS,
    PRIORS,
    Data,
    fit,
    left_out,
    mean_first,
    predicted_us,
    score,
    written,
)

FILE = Path(__file__).parents[1] / "data" / "trials_h200_dense.csv.gz"
SMALL = GemmProblem("dense", 16, 576, 7168)
LARGE = GemmProblem("dense", 512, 7168, 2048)


@cache
def recorded() -> TimingTable:
    return read(FILE)


@cache
def data() -> Data:
    return Data.of(recorded().times(), recorded().device)


# The shipped constants on the shipped times.


def test_the_file_says_where_it_comes_from_and_is_small() -> None:
    header = recorded().header
    assert {"commit", "policy", "dates", "device", *ORIGIN} <= set(header)
    assert header["policy"] == "cold"
    assert recorded().device.num_sms == H200.num_sms
    assert len(data().problems) == 42
    assert FILE.stat().st_size < 300_000


def test_the_first_choice_is_nearly_the_best() -> None:
    scores = score(data(), FIT)
    assert mean_first(scores) <= 1.05
    assert max(s.first for s in scores) <= 1.25
    assert sum(s.among_8 <= 1.02 for s in scores) >= 0.75 * len(scores)
    assert sum(s.among_seeds <= 1.02 for s in scores) >= 0.9 * len(scores)
    assert np.mean([s.correlation for s in scores]) > 0.85
    assert max(abs(s.offset) for s in scores) < 0.2


def test_so_it_is_for_products_that_the_fit_never_saw() -> None:
    scores = left_out(data(), iterations=4)  # enough; the tool takes more
    assert [s.problem for s in scores] == list(data().problems)
    assert mean_first(scores) <= 1.08
    assert max(s.first for s in scores) <= 1.25
    assert sum(s.among_seeds <= 1.02 for s in scores) >= 0.9 * len(scores)


def test_the_constants_are_those_of_the_fit() -> None:
    again = fit(data())
    for name in PRIORS:
        assert getattr(again, name) == pytest.approx(getattr(FIT, name), rel=0.05), name


def test_the_priors_alone_choose_worse() -> None:
    priors = replace(Fit(), **{name: value for name, (value, _, _) in PRIORS.items()})
    assert mean_first(score(data(), FIT)) < mean_first(score(data(), priors))


def test_arrays_and_numbers_take_the_same_arithmetic() -> None:
    found = predicted_us(data(), FIT)
    for j in range(0, len(data().configs), 401):
        problem = data().problems[data().index[j]]
        one = predict_us(problem, data().configs[j], data().device)
        assert found[j] == pytest.approx(one, rel=1e-9)


# The fit's tools.


def test_the_fit_finds_constants_again() -> None:
    some = data().of_problems(lambda p: p.n == 2112)
    truth = replace(FIT, fill_us=2.0, reduce_us=0.9, select_us=0.004)
    made = replace(some, times_us=predicted_us(some, truth))
    errors = np.log(predicted_us(some, fit(made)) / made.times_us)
    assert np.abs(errors).mean() < 0.02
    assert np.abs(np.log(predicted_us(some, FIT) / made.times_us)).mean() > 0.03


def test_figures_of_a_choice() -> None:
    configs = [GemmConfig(16, 64, stages, 1) for stages in (4, 5, 6)]
    by_model = sorted(configs, key=lambda c: predict_us(SMALL, c, H200))
    times = dict(zip(by_model, (12.0, 10.0, 11.0), strict=True))
    (found,) = score(Data.of({SMALL: times}, H200), FIT)
    assert (found.chosen, found.best) == (by_model[0], by_model[1])
    assert found.first == pytest.approx(1.2)
    assert found.among_8 == found.among_seeds == 1.0
    assert found.correlation == pytest.approx(-0.5)
    assert NUM_SEEDS >= 8


def test_constants_are_written_in_place() -> None:
    text = (Path(__file__).parents[2] / "kgen" / "model.py").read_text()
    assert written(text, FIT) == text
    changed = written(text, replace(FIT, sm_gbps=12.34567))
    assert "    sm_gbps: float = 12.35\n" in changed
    assert len(changed.splitlines()) == len(text.splitlines())
    with pytest.raises(ValueError, match="sm_gbps: 0 places"):
        written(text.replace("sm_gbps: float", "gone: float"), FIT)


# The export.


def row(config: GemmConfig, median_us: float | None, **changes: Any) -> TrialRow:
    origin: dict[str, Any] = dict.fromkeys(ORIGIN, "x") | {"template_hash": "new", "clocks": {}}
    origin["device"] = {**vars(H200), "clusters_by_size": [[2, 66]]}
    values: dict[str, Any] = {
        "id": 1,
        "run_id": None,
        "date": "2026-11-30T17:00:00.000+00:00",
        "problem": SMALL,
        "config": config,
        "device_name": H200.name,
        "num_sms": H200.num_sms,
        "cubin_key": "k",
        "status": "ok" if median_us else "wrong",
        "verified": bool(median_us),
        "error": 0.01 if median_us else None,
        "median_us": median_us,
        "p10_us": median_us,
        "p90_us": median_us,
        "samples_us": [median_us] if median_us else [],
        "policy": "cold" if median_us else "",
        "provenance": origin,
    }
    return TrialRow(**(values | changes))


A, B, C = (GemmConfig(16, 64, stages, 1) for stages in (4, 5, 6))


def test_an_export_has_medians_failures_and_one_generation(tmp_path: Path) -> None:
    old = dict(row(A, 1.0).provenance, template_hash="old")
    rows = [
        row(A, 5.0, provenance=old),
        row(A, 10.0),
        row(B, 9.0),
        row(A, 12.0),
        row(B, None),
        row(C, 7.0, policy="warm"),
        row(C, 8.0, device_name="another"),
        row(C, 11.0, problem=LARGE),
    ]
    export = collect(rows, "abc123")
    found = [(t.problem, t.config, t.status, t.num_rows, t.median_us) for t in export.rows]
    assert found == [
        (SMALL, A, "ok", 2, 11.0),
        (SMALL, B, "wrong", 2, None),
        (LARGE, C, "ok", 1, 11.0),
    ]
    assert export.device == replace(H200, clusters_by_size=((2, 66),))
    assert export.header["commit"] == "abc123"
    assert collect(rows, "abc123", "old").times() == {SMALL: {A: 5.0}}
    path = tmp_path / "out.csv.gz"
    write(export, path)
    assert read(path) == export
    first = path.read_bytes()
    write(export, path)
    assert path.read_bytes() == first


def test_an_export_of_nothing_says_so() -> None:
    with pytest.raises(ValueError, match="no timed trial"):
        collect([row(A, None)], "abc123")


def test_what_is_recorded_can_still_be_built() -> None:
    """Replays need configurations that are valid today; a rule that forbids many makes it stale."""
    trials = [t for t in recorded().rows if t.status == "ok"]
    stale = [t for t in trials if why_invalid(t.problem, t.config, recorded().device)]
    assert len(stale) < 0.05 * len(trials)
