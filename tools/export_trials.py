"""Recorded trials as a small file, to fit the analytic model on and to replay searches with.

    python tools/export_trials.py tuning.db tests/data/trials_h200_dense.csv.gz --commit 0a300b0

One line a problem and configuration, in the order of their first trial: the median over all rows
of its median times in microseconds, or its failure. Lines that begin with # say where the times
come from. Rows of one device, measuring policy and kernel generation (the templates' hash) are
taken: the latest row's, or those asked for. The same database gives the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Final

from kgen.cache.db import TuningDatabase
from kgen.cache.records import FAILED, TrialRow
from kgen.config import GemmConfig
from kgen.problem import GemmProblem
from kgen.search.tables import TableRow, TimingTable, device_of, write

#: What the header says of the kernels and the machine, beside the commit.
ORIGIN: Final = ("driver", "cuda", "compiler", "generator", "template_hash")


def collect(rows: Iterable[TrialRow], commit: str, template_hash: str | None = None) -> TimingTable:
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
    found = [_row(problem, config, own) for (problem, config), own in by_config.items()]
    return TimingTable(header, device_of(header["device"]), tuple(found))


def _origin(row: TrialRow) -> tuple[str, str]:
    return row.device_name, row.provenance["template_hash"]


def _row(problem: GemmProblem, config: GemmConfig, rows: list[TrialRow]) -> TableRow:
    """A configuration that ever failed has no time: what it is told of it must hold always."""
    failed = [row.status for row in rows if row.status != "ok"]
    if failed:
        return TableRow(problem, config, failed[-1], len(rows), None)
    times = [row.median_us for row in rows if row.median_us is not None]
    return TableRow(problem, config, "ok", len(rows), round(median(times), 3))


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
    print(f"{args.output}: {len(export.rows)} configurations, {size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
