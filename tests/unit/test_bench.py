"""The bench's loop with made-up providers on the CPU: who is timed, who is noted, what fails."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from kgen.bench import gpu
from kgen.bench import run as bench_run
from kgen.bench.floor import Floor
from kgen.bench.providers import Kgen, Ready
from kgen.bench.run import BenchReport, Row, bench_problem, git_commit, provenance_of
from kgen.cases import Case
from kgen.config import GemmConfig
from kgen.device import H200, Device
from kgen.errors import DriverError, GpuMissing, LaunchError, MeasureError, UsageError, WrongResult
from kgen.measure import POLICIES, Call, Policy, Timing
from kgen.problem import GemmProblem
from kgen.runtime.dispatch import Plan
from kgen.settings import Settings
from kgen.verify import Verified, verify_peer
from tests.unit.simulated import Simulated

PROBLEM = GemmProblem("dense", m=5, n=16, k=128)
COLD = POLICIES["cold"]


@dataclass
class Made:
    """A provider that computes on the CPU, takes `median_us`, or raises."""

    name: str
    median_us: float = 1.0
    raises: Exception | None = None
    reference_only: bool = False

    def ready(self, case: Case) -> Ready:
        if self.raises:
            raise self.raises
        return Ready(verify_peer(Simulated(), case), lambda: self.median_us, {"config": self.name})


@pytest.fixture(autouse=True)
def _timed_by_what_calls_return(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_many(
        calls: Mapping[str, tuple[Verified, Call]], policy: Policy, device: Device
    ) -> dict[str, Timing]:
        times = {name: float(str(call())) for name, (_, call) in calls.items()}
        if min(times.values()) < 0:
            raise MeasureError("below the floor")
        return {name: Timing(policy.name, t, t, t, (t, t)) for name, t in times.items()}

    monkeypatch.setattr(bench_run, "measure_many", measure_many)


def row_of(*providers: Made) -> Row:
    return bench_problem(PROBLEM, providers, COLD, H200, where="cpu")


def test_everybody_verified_is_timed_together() -> None:
    """Times, errors, details and the ratio in kgen's favour."""
    row = row_of(Made("kgen", 8.0), Made("torch blockwise", 10.0))
    assert not row.failed
    assert row.speedup("torch blockwise") == pytest.approx(1.25)
    assert row.speedup("somebody") is None
    assert 0 < row.errors["kgen"] < 4e-3
    assert row.details["kgen"] == {"config": "kgen"}
    assert row.notes == {}


@pytest.mark.parametrize(
    "refusal",
    [WrongResult("off by 3"), RuntimeError("cuBLAS refuses M=1\nlong trace"), ValueError("no")],
)
def test_a_peer_that_refuses_or_is_wrong_is_noted(refusal: Exception) -> None:
    """It has no time, everybody else has; the note is its first line."""
    row = row_of(Made("kgen", 8.0), Made("peer", raises=refusal))
    assert set(row.timings) == {"kgen"}
    assert row.notes == {"peer": str(refusal).splitlines()[0]}
    assert row.to_dict()["providers"]["peer"] == {"note": row.notes["peer"]}


def test_kgen_without_a_kernel_fails_the_bench() -> None:
    """A fallback that would answer is not timed, and the report has failed."""
    row = row_of(Made("kgen", raises=LaunchError("the fallback would answer")), Made("peer"))
    assert row.failed
    assert set(row.timings) == {"peer"}
    assert report_of(row).failed
    assert not report_of(row_of(Made("kgen"))).failed


def test_a_time_that_can_not_be_true_is_no_time() -> None:
    """Nobody of that problem is believed."""
    row = row_of(Made("kgen", 8.0), Made("peer", -1.0))
    assert row.failed
    assert row.notes == dict.fromkeys(("kgen", "peer"), "below the floor")


def test_a_peer_that_fails_while_timed_costs_one_problem() -> None:
    """Verified, then an error of its own: the bench goes on."""

    class Late(Made):
        def ready(self, case: Case) -> Ready:
            def call() -> float:
                raise RuntimeError("out of resources")

            return replace(super().ready(case), call=call)

    row = row_of(Made("kgen", 8.0), Late("peer"))
    assert row.failed
    assert row.notes == dict.fromkeys(("kgen", "peer"), "out of resources")


def test_a_lost_context_ends_the_bench() -> None:
    """Nothing measured after it would mean anything."""
    with pytest.raises(DriverError):
        row_of(Made("kgen", raises=DriverError("gone", 700, fatal=True)))


def test_kgen_refuses_to_time_the_fallback() -> None:
    """The provider asks the dispatcher and believes its plan."""

    class NoKernel:
        ordinal = 0

        def plan(self, problem: GemmProblem) -> Plan:
            return Plan(None, None, "no compiler was found")

    provider = Kgen(NoKernel())  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match="fallback would answer, because no compiler"):
        provider.ready(Case(PROBLEM, "cpu"))


def report_of(*rows: Row) -> BenchReport:
    provenance = provenance_of(H200, COLD, "kgen bench --shapes x", commit="abc")
    return BenchReport(provenance, ("kgen", "peer"), (), rows)


def test_report_as_json() -> None:
    """Device, driver, commit, command and every sample are in it, as plain values."""
    report = report_of(row_of(Made("kgen", 8.0), Made("peer", raises=WrongResult("no"))))
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["command"] == "kgen bench --shapes x"
    assert data["commit"] == "abc"
    assert data["device"]["name"] == "NVIDIA H200"
    assert data["torch"] == torch.__version__
    assert data["policy"]["flush_l2"] is True
    assert {"driver", "date", "cuda", "kgen"} <= set(data)
    (row,) = data["rows"]
    assert row["shape"] == "dense m=5 n=16 k=128"
    assert row["providers"]["kgen"]["samples_us"] == [8.0, 8.0]


def test_floor_and_peers_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The floor of every row, measured once; what is missing is told at once and kept."""
    told: list[tuple[str, str]] = []
    asked: list[tuple[int, int]] = []
    one = Timing("cold", 6.5, 6.5, 6.5, (6.5,))

    def measure_floor(weights: list[tuple[int, int]], *rest: object, **_: object) -> Floor:
        asked.extend(weights)
        return Floor(dict.fromkeys(weights, one), dict.fromkeys(weights, (16384, 12)), one, 132)

    replaced = {
        "hopper_device": lambda *_: H200,
        "Kgen": lambda dispatcher, row_major=False: Made(
            "kgen" + " row-major" * row_major, 8.5 if row_major else 8.0
        ),
        "Dispatcher": lambda *rest: None,
        "StoredBuilder": lambda settings: None,
        "default_compiler": lambda *rest: None,
        "driver_version": lambda: (13, 0),
        "providers_against": lambda asked, row_major, recipes: (
            [Made("peer", 9.0)],
            {"gone": "no such folder"},
        ),
        "Case": lambda problem, where: Case(problem, "cpu"),
        "measure_floor": measure_floor,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(bench_run, name, value)
    report = bench_run.run_bench(
        [PROBLEM, PROBLEM.with_m(7)],
        Settings.from_env(),
        against=["torch"],
        floor=True,
        on_missing=lambda *reason: told.append(reason),
    )
    assert asked == [(16, 128)] * 2
    assert told == [("gone", "no such folder")]
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["missing"] == {"gone": "no such folder"}
    assert data["providers"] == ["kgen", "peer"]
    first, second = data["rows"]
    assert first["floor"]["limit"] == "stream"
    assert second["floor"]["us"] > first["floor"]["us"] > 6.5
    assert first["best_peer"] == {"name": "peer", "ratio": 1.125, "interval": None}
    assert data["floor"]["streams"][0]["samples_us"] == [6.5]
    assert data["summary"]["worst"]["ratio"] == 1.125


@pytest.mark.parametrize("row_major", [False, True])
def test_kgen_is_timed_in_the_layout_asked_for(row_major: bool) -> None:
    """Verified all the same; what is prepared for timing has row-major scales or not."""
    prepared: list[torch.Tensor] = []

    class Loaded:
        def prepare(self, *tensors: torch.Tensor, num_sms: int) -> None:
            prepared.append(tensors[1])

        def __call__(self, *tensors: torch.Tensor, num_sms: int) -> None:
            Simulated()(*tensors)

    class Dispatched:
        ordinal = 0

        def plan(self, problem: GemmProblem) -> SimpleNamespace:
            choice = SimpleNamespace(config=GemmConfig(baked_dims="nk"), origin="tuned")
            return SimpleNamespace(kernel=Loaded(), choice=choice)

    provider = Kgen(Dispatched(), row_major)  # type: ignore[arg-type]
    provider.ready(Case(GemmProblem("dense", m=5, n=16, k=256), "cpu"))
    assert provider.name == ("kgen row-major" if row_major else "kgen")
    assert prepared[0].is_contiguous() is row_major


def test_an_interrupted_run_keeps_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says what it did not come to."""
    done = row_of(Made("kgen", 8.0))
    monkeypatch.setattr(bench_run, "hopper_device", lambda *_: H200)
    for name in ("Dispatcher", "StoredBuilder"):
        monkeypatch.setattr(bench_run, name, lambda *rest: None)
    answers = iter([done])

    def bench_problem(*rest: object) -> Row:
        for answer in answers:
            return answer
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_run, "bench_problem", bench_problem)
    problems = [PROBLEM, PROBLEM.with_m(7), PROBLEM.with_m(8)]
    report = bench_run.run_bench(problems, Settings.from_env())
    assert report.rows == (done,)
    assert report.to_dict()["not_reached"] == ["dense m=7 n=16 k=128", "dense m=8 n=16 k=128"]


def test_words_that_name_no_peer_end_it_at_once() -> None:
    """Before the GPU is looked for."""
    with pytest.raises(UsageError, match="'x': expected torch"):
        bench_run.run_bench([PROBLEM], Settings.from_env(), against=["x"])


def test_commit_is_a_hash_or_unknown() -> None:
    """Whether or not the sources are a git checkout."""
    head = git_commit().removesuffix("-dirty")
    assert head == "unknown" or (len(head) == 40 and int(head, 16) >= 0)


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any work; another GPU is named."""

    def none(ordinal: int) -> Device:
        raise DriverError("no CUDA driver on this machine")

    monkeypatch.setattr(gpu, "device_facts", none)
    with pytest.raises(GpuMissing, match="needs a Hopper GPU: no CUDA driver"):
        bench_run.run_bench([PROBLEM], Settings.from_env())
    monkeypatch.setattr(gpu, "device_facts", lambda ordinal: H200)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(GpuMissing, match="that torch"):
        bench_run.run_bench([PROBLEM], Settings.from_env())
