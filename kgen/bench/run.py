"""`run_bench`: every provider on every problem, verified, then timed alternating in one process.

Takes problems and settings, gives a `BenchReport` of plain values, with the device's floor where
asked. Fails, rather than time it, where kgen's fallback would answer. Must not import search.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import kgen
from kgen.bench.against import Against, parse_against
from kgen.bench.floor import Bound, Floor, measure_floor, weights_of
from kgen.bench.gpu import hopper_device
from kgen.bench.grouped_providers import GroupedKgen, grouped_against
from kgen.bench.peers import providers_against
from kgen.bench.providers import Kgen, Provider, Ready
from kgen.bench.summary import KGEN, best_peer, own_name, peers_of, summarise
from kgen.bench.wgrad_providers import WgradKgen, wgrad_against
from kgen.cases import Case
from kgen.device import Device
from kgen.errors import DriverError, KgenError, UsageError
from kgen.grouped_cases import GroupedCase
from kgen.measure import DEFAULT_POLICY, Policy, Timing, measure_many, policy_named
from kgen.nvml import driver_release
from kgen.problem import GemmProblem
from kgen.runtime.dispatch import Dispatcher, StoredBuilder
from kgen.runtime.driver import driver_version
from kgen.runtime.stats import Stats
from kgen.settings import Settings
from kgen.toolchain import default_compiler
from kgen.wgrad_cases import KGroupedCase


@dataclass(frozen=True)
class Row:
    """One problem: what was timed, with which error, and why somebody was not timed."""

    problem: GemmProblem
    timings: dict[str, Timing] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    details: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    floor: Bound | None = None

    @property
    def failed(self) -> bool:
        """Whether kgen itself has no verified time."""
        return KGEN not in self.timings

    def speedup(self, over: str) -> float | None:
        """The other's time over kgen's: above 1 where kgen is faster; None without both."""
        own = own_name(over)
        if own not in self.timings or over not in self.timings:
            return None
        return self.timings[over].median_us / self.timings[own].median_us

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, one entry per provider."""
        names = [*self.timings, *(name for name in self.notes if name not in self.timings)]
        row: dict[str, Any] = {
            "shape": str(self.problem),
            "problem": asdict(self.problem),
            "providers": {name: self._provider(name) for name in names},
        }
        if self.floor:
            row["floor"] = self.floor._asdict()
        return row

    def _provider(self, name: str) -> dict[str, Any]:
        if name not in self.timings:
            return {"note": self.notes[name]}
        timing = asdict(self.timings[name])
        return timing | {"max_tile_error": self.errors[name], **self.details.get(name, {})}


@dataclass(frozen=True)
class BenchReport:
    """All rows, and where they come from.

    missing        peers that were asked for and can not be had, with the reason
    not_reached    problems that an interrupted run did not come to
    """

    provenance: dict[str, Any]
    providers: tuple[str, ...]
    reference_only: tuple[str, ...]
    rows: tuple[Row, ...]
    missing: dict[str, str] = field(default_factory=dict)
    floor: Floor | None = None
    not_reached: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether a problem has no verified time of kgen's."""
        return any(row.failed for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: raw samples, and what kgen.bench.summary makes of them."""
        report = {
            "schema": 1,
            "kind": "bench",
            **self.provenance,
            "providers": list(self.providers),
            "reference_only": list(self.reference_only),
            "missing": self.missing,
            "not_reached": list(self.not_reached),
            "rows": [row.to_dict() for row in self.rows],
        }
        if self.floor:
            report["floor"] = self.floor.to_dict()
        for row in report["rows"]:
            if best := best_peer(row, peers_of(report)):
                bounds = best.interval._asdict() if best.interval else None
                row["best_peer"] = {**best._asdict(), "interval": bounds}
        return report | {"summary": summarise(report)}


def run_bench(
    problems: Sequence[GemmProblem],
    settings: Settings,
    *,
    against: Sequence[str] = (),
    floor: bool = False,
    row_major: bool = False,
    policy: str = DEFAULT_POLICY,
    command: str = "",
    commit: str = "",
    on_row: Callable[[Row], None] = lambda row: None,
    on_missing: Callable[[str, str], None] = lambda name, reason: None,
) -> BenchReport:
    """Time kgen and the peers of `against` (as in `parse_against`) on `cuda:0`.

    `floor` measures the device's limits first; `row_major` times everybody also from row-major
    scales of A, under a name of its own, any conversion included. `command` and `commit` go into
    the report (default: the commit git tells). `on_row` gets each row as it is done, `on_missing` a
    peer that can not be had. Ctrl-C ends it after the rows so far. Raises UsageError for words of
    `against`, GpuMissing without a Hopper GPU, DriverError when the context is lost, and what
    `measure_floor` raises.
    """
    asked = parse_against(against)
    device = hopper_device("kgen bench needs")
    dispatcher = Dispatcher(0, StoredBuilder(settings), settings.db_url, Stats())
    by_family: dict[str, Sequence[Provider]] = {}
    missing: dict[str, str] = {}
    for family in sorted({family_of(problem) for problem in problems}):
        recipes = tuple(dict.fromkeys(p.recipe for p in problems if family_of(p) == family))
        if family == "grouped":
            by_family[family], reasons = _grouped_providers(dispatcher, asked, recipes)
        elif family == "wgrad":
            by_family[family], reasons = _wgrad_providers(dispatcher, asked)
        else:
            by_family[family], reasons = _dense_providers(dispatcher, asked, row_major, recipes)
        missing |= reasons
    for name, reason in missing.items():
        on_missing(name, reason)
    providers = list(
        {provider.name: provider for some in by_family.values() for provider in some}.values()
    )
    chosen = policy_named(policy)
    if chosen.rotates:
        raise UsageError(
            f"policy {policy}: providers keep their inputs; expected one that does not rotate "
            "them, such as cold or hot"
        )
    limits = _floor(problems, settings, chosen, device) if floor else None
    rows: list[Row] = []
    with suppress(KeyboardInterrupt):  # what is finished is worth its minutes on a GPU
        for problem in problems:
            row = bench_problem(problem, by_family[family_of(problem)], chosen, device)
            rows.append(replace(row, floor=limits.of(problem)) if limits else row)
            on_row(rows[-1])
            torch.cuda.empty_cache()
    return BenchReport(
        provenance=provenance_of(device, chosen, command, commit),
        providers=tuple(provider.name for provider in providers),
        reference_only=tuple(p.name for p in providers if p.reference_only),
        rows=tuple(rows),
        missing=missing,
        floor=limits,
        not_reached=tuple(str(problem) for problem in problems[len(rows) :]),
    )


def family_of(problem: GemmProblem) -> str:
    """Whose calls a problem's kind is timed with: "dense", "grouped" or "wgrad"."""
    return "grouped" if problem.is_grouped else "wgrad" if problem.is_wgrad else "dense"


def case_of(problem: GemmProblem, where: str = "cuda") -> Case | GroupedCase | KGroupedCase:
    """Inputs and references of a problem of any kind."""
    if problem.kind == "k_grouped":
        return KGroupedCase(problem, where)
    return GroupedCase(problem, where) if problem.is_grouped else Case(problem, where)


def _dense_providers(
    dispatcher: Dispatcher, asked: Sequence[Against], row_major: bool, recipes: Sequence[str]
) -> tuple[list[Provider], dict[str, str]]:
    peers, missing = providers_against(asked, row_major, recipes)
    own: list[Provider] = [Kgen(dispatcher)]
    return [*own, *([Kgen(dispatcher, row_major=True)] if row_major else []), *peers], missing


def _grouped_providers(
    dispatcher: Dispatcher, asked: Sequence[Against], recipes: Sequence[str]
) -> tuple[list[Provider], dict[str, str]]:
    """Row-major scales of grouped problems are not timed."""
    peers, missing = grouped_against(asked, recipes)
    own: list[Provider] = [GroupedKgen(dispatcher), GroupedKgen(dispatcher, by_offset=True)]
    return [*own, *peers], missing


def _wgrad_providers(
    dispatcher: Dispatcher, asked: Sequence[Against]
) -> tuple[list[Provider], dict[str, str]]:
    """Row-major scales of weight gradients are not timed."""
    peers, missing = wgrad_against(asked)
    return [WgradKgen(dispatcher), *peers], missing


def _floor(
    problems: Sequence[GemmProblem], settings: Settings, policy: Policy, device: Device
) -> Floor:
    compiler = default_compiler(settings, driver_version())
    weights, with_bf16 = (
        [weights_of(p) for p in problems],
        any(p.recipe == "none" for p in problems),
    )
    return measure_floor(weights, compiler, policy, device, with_bf16=with_bf16)


def bench_problem(
    problem: GemmProblem,
    providers: Sequence[Provider],
    policy: Policy,
    device: Device,
    where: str = "cuda",
) -> Row:
    """One row: whoever passes its check is timed, all together."""
    row = Row(problem)
    ready: dict[str, Ready] = {}
    try:
        case = case_of(problem, where)
        for provider in providers:
            _prepare(provider, case, ready, row.notes)
        timed = {name: (one.verified, one.call) for name, one in ready.items()}
        row.timings.update(measure_many(timed, policy, device) if timed else {})
    except (KgenError, RuntimeError) as error:  # a peer may still fail where it is timed
        _raise_if_lost(error)
        row.notes.update(dict.fromkeys((p.name for p in providers), str(error)))
    for name in row.timings:
        row.errors[name] = ready[name].verified.max_tile_error
        row.details[name] = ready[name].details
    return row


def _prepare(
    provider: Provider,
    case: Case | GroupedCase | KGroupedCase,
    ready: dict[str, Ready],
    notes: dict[str, str],
) -> None:
    """Verify one provider, or note why it is not timed. A peer may refuse in its own way."""
    try:
        ready[provider.name] = provider.ready(case)
    except (KgenError, RuntimeError, ValueError) as error:
        _raise_if_lost(error)
        if isinstance(error, torch.OutOfMemoryError):
            raise
        notes[provider.name] = str(error).strip().splitlines()[0]


def _raise_if_lost(error: Exception) -> None:
    if isinstance(error, DriverError) and error.fatal:
        raise error
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # raises again where a kernel's fault ended the context


def provenance_of(device: Device, policy: Policy, command: str, commit: str) -> dict[str, Any]:
    """Where numbers come from: device, software, commit, command, policy and date."""
    return {
        "command": command,
        "commit": commit or git_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": asdict(device),
        "driver": driver_release() or "unknown",
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kgen": kgen.__version__,
        "policy": asdict(policy),
    }


def git_commit() -> str:
    """The commit of the sources in use, "-dirty" where they differ from it; else "unknown"."""
    folder = Path(kgen.__file__).parent

    def git(*arguments: str) -> str:
        run = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
        return run.stdout.strip()

    try:
        head, changed = git("rev-parse", "HEAD"), git("status", "--porcelain", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head + ("-dirty" if changed else "")
