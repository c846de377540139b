"""From records to rows and back, and what follows from several rows: medians, rankings, hints.

Takes records or row mappings, gives values for an INSERT, records, or lists of them in order.
Knows no SQL and no database.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any, Final

from kgen.cache.records import (
    DispatchEntry,
    DispatchTable,
    ProblemOutcome,
    RunRecord,
    Suggestion,
    TrialRecord,
    TrialRow,
)
from kgen.config import GemmConfig
from kgen.problem import GemmProblem

_PROBLEM: Final = tuple(f.name for f in fields(GemmProblem))
_CONFIG: Final = tuple(f.name for f in fields(GemmConfig))
#: Fields of a trial that are a column of the same name and need no conversion.
_PLAIN: Final = (
    "device_name",
    "cubin_key",
    "status",
    "reason",
    "source",
    "verified",
    "error",
    "median_us",
    "p10_us",
    "p90_us",
    "predicted_us",
    "policy",
    "registers",
)
#: After one of these no time of the same cubin counts: it may go wrong, or hang, now and then.
_DISQUALIFYING: Final = frozenset({"wrong", "faulted", "timeout"})


def now() -> str:
    """The present, UTC, ISO 8601 to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def trial_values(trial: TrialRecord, run_id: int | None) -> dict[str, Any]:
    """Column values of a new row."""
    return {
        **asdict(trial.problem),
        **trial.config.to_dict(),
        **{name: getattr(trial, name) for name in _PLAIN},
        "device_num_sms": trial.num_sms,
        "samples_us": list(trial.samples_us) or None,
        "provenance": dict(trial.provenance),
        "run_id": run_id,
        "date": now(),
    }


def trial_row(row: Mapping[str, Any]) -> TrialRow:
    """The trial that a row of `trials` holds."""
    return TrialRow(
        problem=_problem(row),
        config=GemmConfig(**{name: row[name] for name in _CONFIG}),
        num_sms=row["device_num_sms"],
        samples_us=tuple(row["samples_us"] or ()),
        provenance=row["provenance"],
        id=row["id"],
        run_id=row["run_id"],
        date=row["date"],
        **{name: row[name] for name in _PLAIN},
    )


def outcome_values(outcome: ProblemOutcome, run_id: int | None) -> dict[str, Any]:
    """Column values of a new row."""
    return {
        **asdict(outcome.problem),
        "device_name": outcome.device_name,
        "device_num_sms": outcome.num_sms,
        "outcome": outcome.outcome,
        "reason": outcome.reason,
        "num_trials": outcome.num_trials,
        "invalid_by_rule": dict(outcome.invalid_by_rule),
        "details": dict(outcome.details),
        "run_id": run_id,
        "date": now(),
    }


def outcome_row(row: Mapping[str, Any]) -> ProblemOutcome:
    """The outcome that a row of `outcomes` holds."""
    names = ("device_name", "outcome", "reason", "num_trials", "invalid_by_rule", "details")
    return ProblemOutcome(
        problem=_problem(row),
        num_sms=row["device_num_sms"],
        run_id=row["run_id"],
        date=row["date"],
        **{name: row[name] for name in names},
    )


def table_values(table: DispatchTable, run_id: int | None) -> dict[str, Any]:
    """Column values of a new row."""
    problem = asdict(table.problem)
    del problem["m"]
    kept = table.to_dict()
    names = ("device_name", "policy", "bound", "worst", "points", "entries")
    return {
        **problem,
        **{name: kept[name] for name in names},
        "device_num_sms": table.num_sms,
        "run_id": run_id,
        "date": now(),
    }


def table_row(row: Mapping[str, Any]) -> DispatchTable:
    """The table that a row of `dispatch_tables` holds; its problem has M = 1."""
    names = ("device_name", "policy", "bound", "worst", "run_id", "date")
    entries = tuple(
        DispatchEntry(int(e["up_to"]), GemmConfig.from_dict(e["config"]), str(e["cubin_key"]))
        for e in row["entries"]
    )
    return DispatchTable(
        problem=_problem({**row, "m": 1}),
        num_sms=row["device_num_sms"],
        points=tuple(row["points"]),
        entries=entries,
        **{name: row[name] for name in names},
    )


def run_row(row: Mapping[str, Any]) -> RunRecord:
    """The run that a row of `runs` holds."""
    return RunRecord(**{f.name: row[f.name] for f in fields(RunRecord)})


def _problem(row: Mapping[str, Any]) -> GemmProblem:
    return GemmProblem(**{name: row[name] for name in _PROBLEM})


def ranking(
    rows: Iterable[TrialRow], policy: str | None = None, *, foreign: bool = False
) -> list[TrialRow]:
    """One row for each cubin timed, fastest first; all rows are of one problem and one device.

    Times of different policies are never mixed: None takes the policy most cubins were timed
    under, the latest of equals. A cubin that ever was wrong, faulted or hung is left out; so are
    those of sources by hand unless `foreign`.
    """
    rows = [row for row in rows if foreign or not row.is_foreign]
    bad = {row.cubin_key for row in rows if row.status in _DISQUALIFYING}
    good = [row for row in rows if row.status == "ok" and row.cubin_key not in bad]
    if policy is None:
        policy = _main_policy(good)
    groups: dict[tuple[str, GemmConfig], list[TrialRow]] = {}
    for row in good:
        if row.policy == policy:
            groups.setdefault((row.cubin_key, row.config), []).append(row)
    # Ties go to the configuration, so that machines agree on a winner.
    return _settle(sorted(map(_merge, groups.values()), key=lambda r: (r.median_us, r.config)))


def _settle(ranked: list[TrialRow]) -> list[TrialRow]:
    """Where the fastest could not be told from others in its last finals, who was chosen is first.

    `kgen.search.finals` says in the provenance which were tied, and who won.
    """
    final = ranked[0].provenance.get("final") if ranked else None
    if not isinstance(final, dict) or not isinstance(final.get("tied"), list):
        return ranked
    if str(ranked[0].config) not in final["tied"]:
        return ranked
    chosen = [row for row in ranked if str(row.config) == final.get("chosen")]
    return [*chosen, *(row for row in ranked if row not in chosen)]


def _main_policy(rows: Sequence[TrialRow]) -> str | None:
    cubins: dict[str, set[str]] = {}
    last: dict[str, int] = {}
    for row in rows:
        cubins.setdefault(row.policy, set()).add(row.cubin_key)
        last[row.policy] = max(row.id, last.get(row.policy, 0))
    return max(cubins, key=lambda name: (len(cubins[name]), last[name]), default=None)


def _merge(rows: Sequence[TrialRow]) -> TrialRow:
    """The newest row with the median of all their times, from the lowest p10 to the highest p90.

    What its last finals decided stays, though it was timed alone since.
    """
    times = sorted(row.median_us for row in rows if row.median_us is not None)
    newest = max(rows, key=lambda row: row.id)
    p10 = min(row.p10_us for row in rows if row.p10_us is not None)
    p90 = max(row.p90_us for row in rows if row.p90_us is not None)
    finals = [row.provenance["final"] for row in rows if "final" in row.provenance]
    return replace(
        newest,
        median_us=median(times),
        p10_us=p10,
        p90_us=p90,
        num_rows=len(rows),
        provenance={**newest.provenance, **({"final": finals[-1]} if finals else {})},
    )


def by_problem_and_device(
    rows: Iterable[TrialRow],
) -> dict[tuple[GemmProblem, str, int], list[TrialRow]]:
    """The rows of each problem on each device, in the order they first came."""
    groups: dict[tuple[GemmProblem, str, int], list[TrialRow]] = {}
    for row in rows:
        groups.setdefault((row.problem, row.device_name, row.num_sms), []).append(row)
    return groups


def suggestions(
    rows: Iterable[TrialRow], device_name: str | None, num_sms: int | None
) -> list[Suggestion]:
    """What other devices and predictions say about one problem, most telling first.

    Winners of other devices come first (the same model before others, near SM counts before
    far), then predictions by their time. What already ran here is no suggestion.
    """
    rows = list(rows)
    groups = by_problem_and_device(rows)
    here = [key for key in groups if key[1:] == (device_name, num_sms)]
    settled = {
        row.config
        for key in here
        for row in groups.pop(key)
        if row.status != "compiled" and not row.is_foreign
    }
    found: dict[GemmConfig, Suggestion] = {}
    winners = [ranked[0] for group in groups.values() if (ranked := ranking(group))]
    winners.sort(key=lambda row: _strangeness(row, device_name, num_sms))
    for row in winners:
        origin = f"measured on {row.device_name} with {row.num_sms} SMs, not here"
        found.setdefault(row.config, Suggestion(row.config, origin, row))
    predicted = [r for r in rows if r.status == "compiled" and r.predicted_us is not None]
    for row in sorted(predicted, key=lambda row: (row.predicted_us, row.config)):
        found.setdefault(row.config, Suggestion(row.config, "predicted, never run", row))
    return [hint for config, hint in found.items() if config not in settled]


def _strangeness(
    row: TrialRow, device_name: str | None, num_sms: int | None
) -> tuple[bool, int, str, int]:
    far = abs(row.num_sms - num_sms) if num_sms else 0
    return row.device_name != device_name, far, row.device_name, row.num_sms
