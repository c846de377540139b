"""Recorded trials as a small file, to fit the analytic model on and to replay searches with.

    python tools/export_trials.py tuning.db tests/data/trials_h200_dense.csv.gz --commit 0a300b0

One line a problem and configuration, in the order of their first trial: the median over all rows
of its median times in microseconds, or its failure. Lines that begin with # say where the times
come from. Rows of one device, measuring policy and kernel generation (the templates' hash) are
taken: the latest row's, or those asked for. The same database gives the same bytes.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, Final

from kgen.cache.db import TuningDatabase
from kgen.cache.records import FAILED, TrialRow
from kgen.config import GemmConfig
from kgen.device import Device
from kgen.problem import GemmProblem

PROBLEM_COLUMNS: Final = tuple(f.name for f in fields(GemmProblem))
CONFIG_COLUMNS: Final = tuple(f.name for f in fields(GemmConfig))
COLUMNS: Final = (*PROBLEM_COLUMNS, *CONFIG_COLUMNS, "status", "num_rows", "median_us")
#: What the header says of the kernels and the machine, beside the commit.
ORIGIN: Final = ("driver", "cuda", "compiler", "generator", "template_hash")


@dataclass(frozen=True)
class Trial:
    """What came of one configuration for one problem; `median_us` is None for a failure."""

    problem: GemmProblem
    config: GemmConfig
    status: str
    num_rows: int
    median_us: float | None


@dataclass(frozen=True)
class Export:
    """Trials of one device, policy and kernel generation, in the order of their first rows."""

    header: dict[str, Any]
    device: Device
    trials: tuple[Trial, ...]

    def times(self) -> dict[GemmProblem, dict[GemmConfig, float]]:
        """For each problem its timed configurations, microseconds."""
        found: dict[GemmProblem, dict[GemmConfig, float]] = {}
        for trial in self.trials:
            if trial.median_us is not None:
                found.setdefault(trial.problem, {})[trial.config] = trial.median_us
        return found


def collect(rows: Iterable[TrialRow], commit: str, template_hash: str | None = None) -> Export:
    """The export of a database's rows; raises ValueError when none is of use."""
    tried = [r for r in rows if r.status == "ok" or r.status in FAILED]
    timed = [r for r in tried if r.status == "ok"]
    if template_hash is not None:
        timed = [r for r in timed if r.provenance["template_hash"].startswith(template_hash)]
    if not timed:
        raise ValueError("no timed trial of this kernel generation; run kgen tune on a GPU first")
    last = timed[-1]
    kept = [r for r in tried if _origin(r) == _origin(last) and r.policy in ("", last.policy)]
    by_config: dict[tuple[GemmProblem, GemmConfig], list[TrialRow]] = {}
    for row in kept:
        by_config.setdefault((row.problem, row.config), []).append(row)
    header = {
        "commit": commit,
        **{name: last.provenance[name] for name in ORIGIN},
        "policy": last.policy,
        "dates": sorted({r.date[:10] for r in kept}),
        "num_rows": len(kept),
        "device": last.provenance["device"],
    }
    trials = [_trial(problem, config, rows) for (problem, config), rows in by_config.items()]
    return Export(header, _device(header["device"]), tuple(trials))


def _origin(row: TrialRow) -> tuple[str, str]:
    return row.device_name, row.provenance["template_hash"]


def _trial(problem: GemmProblem, config: GemmConfig, rows: list[TrialRow]) -> Trial:
    """A configuration that ever failed has no time: what it is told of it must hold always."""
    failed = [row.status for row in rows if row.status != "ok"]
    if failed:
        return Trial(problem, config, failed[-1], len(rows), None)
    times = [row.median_us for row in rows if row.median_us is not None]
    return Trial(problem, config, "ok", len(rows), round(median(times), 3))


def _device(facts: dict[str, Any]) -> Device:
    clusters = tuple((size, count) for size, count in facts["clusters_by_size"])
    return Device(**{**facts, "clusters_by_size": clusters})


def write(export: Export, path: Path) -> None:
    """Write the export to `path`, compressed."""
    text = io.StringIO()
    for name, value in export.header.items():
        text.write(f"# {name}: {json.dumps(value)}\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for t in export.trials:
        problem = [getattr(t.problem, name) for name in PROBLEM_COLUMNS]
        config = [getattr(t.config, name) for name in CONFIG_COLUMNS]
        time_us = "" if t.median_us is None else f"{t.median_us:.3f}"
        writer.writerow([*problem, *config, t.status, t.num_rows, time_us])
    # No date and no file name inside: the same trials are the same bytes.
    path.write_bytes(gzip.compress(text.getvalue().encode(), compresslevel=9, mtime=0))


def read(path: Path) -> Export:
    """What `write` wrote."""
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    notes = [line[2:].split(": ", 1) for line in lines if line.startswith("# ")]
    header = {name: json.loads(value) for name, value in notes}
    records = csv.DictReader(line for line in lines if not line.startswith("#"))
    return Export(header, _device(header["device"]), tuple(map(_parse, records)))


def _parse(record: dict[str, str]) -> Trial:
    problem: dict[str, Any] = _typed(record, GemmProblem)
    config: dict[str, Any] = _typed(record, GemmConfig)
    time_us = float(record["median_us"]) if record["median_us"] else None
    return Trial(
        GemmProblem(**problem),
        GemmConfig(**config),
        record["status"],
        int(record["num_rows"]),
        time_us,
    )


def _typed(record: dict[str, str], kind: type[GemmProblem] | type[GemmConfig]) -> dict[str, Any]:
    types: dict[str, Callable[[str], Any]] = {"int": int, "str": str, "bool": "True".__eq__}
    return {
        f.name: types[str(f.type)](record[f.name])
        for f in fields(kind)
        if f.name in record  # a newer kgen may have axes that the file does not know
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("database", help="a tuning database: a path or an SQLAlchemy URL")
    parser.add_argument("output", type=Path, help="the .csv.gz to write")
    parser.add_argument("--commit", required=True, help="the commit that the trials ran at")
    parser.add_argument("--template-hash", help="of these kernels (a prefix), not of the latest")
    args = parser.parse_args()
    with TuningDatabase.open(args.database) as db:
        rows = db.trials()
    try:
        export = collect(rows, args.commit, args.template_hash)
    except ValueError as error:
        sys.exit(f"{args.database}: {error}")
    write(export, args.output)
    size = args.output.stat().st_size
    print(f"{args.output}: {len(export.trials)} configurations, {size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
