"""What configurations of a problem take, recorded once: `TimingTable`, to replay searches with.

Takes rows and where they come from, gives a compressed file and reads it back: lines that begin
with # say on what and how the times were taken, then CSV, one line a problem and configuration.
The same table is the same bytes. Times of a launch are in microseconds, those of work in seconds.
Must not import torch, CUDA, optuna, numpy or the database.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from kgen.config import GemmConfig
from kgen.device import Device
from kgen.errors import UsageError
from kgen.problem import GemmProblem

PROBLEM_COLUMNS: Final = tuple(f.name for f in fields(GemmProblem))
CONFIG_COLUMNS: Final = tuple(f.name for f in fields(GemmConfig))


@dataclass(frozen=True)
class TableRow:
    """What came of one configuration for one problem.

    status      ok, or why there is no time: one of `kgen.cache.records.STATUSES`
    num_rows    measurements that `median_us` is the median of, 0 of a failure that never ran
    median_us, p10_us, p90_us   None for a failure; the spread is None where it was not kept
    rounds      calls that were timed in the measurement; 0: not kept
    verified    every check of `kgen.verify` passed; False: at most the first one, or not kept
    compile_s, check_s, verify_s, time_s   seconds that each step took; None: not done, or not kept
    """

    problem: GemmProblem
    config: GemmConfig
    status: str
    num_rows: int
    median_us: float | None
    p10_us: float | None = None
    p90_us: float | None = None
    rounds: int = 0
    verified: bool = False
    compile_s: float | None = None
    check_s: float | None = None
    verify_s: float | None = None
    time_s: float | None = None


_OWN: Final = tuple(f for f in fields(TableRow) if f.name not in ("problem", "config"))
COLUMNS: Final = (*PROBLEM_COLUMNS, *CONFIG_COLUMNS, *(f.name for f in _OWN))


@dataclass(frozen=True)
class TimingTable:
    """Rows of one device, measuring policy and kernel generation; `header` says which.

    header    JSON-able; at least `device` (the facts of `kgen.device.Device`) and `policy`
    """

    header: dict[str, Any]
    device: Device
    rows: tuple[TableRow, ...]

    def by_problem(self) -> dict[GemmProblem, list[TableRow]]:
        """The rows of each problem, in the order of the file."""
        found: dict[GemmProblem, list[TableRow]] = {}
        for row in self.rows:
            found.setdefault(row.problem, []).append(row)
        return found

    def times(self) -> dict[GemmProblem, dict[GemmConfig, float]]:
        """For each problem its timed configurations, microseconds."""
        return {
            problem: timed
            for problem, rows in self.by_problem().items()
            if (timed := {r.config: r.median_us for r in rows if r.median_us is not None})
        }


def write(table: TimingTable, path: Path) -> None:
    """Write the table to `path`, compressed; whole or not at all."""
    text = io.StringIO()
    for name, value in table.header.items():
        text.write(f"# {name}: {json.dumps(value)}\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in table.rows:
        problem = [getattr(row.problem, name) for name in PROBLEM_COLUMNS]
        config = [getattr(row.config, name) for name in CONFIG_COLUMNS]
        writer.writerow([*problem, *config, *(_text(getattr(row, f.name)) for f in _OWN)])
    # No date and no file name inside: the same rows are the same bytes.
    data = gzip.compress(text.getvalue().encode(), compresslevel=9, mtime=0)
    new = path.with_name(path.name + ".new")
    new.write_bytes(data)
    new.replace(path)


def _text(value: Any) -> Any:
    """A float to a nanosecond or a tenth of a millisecond; nothing for None."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) and value < 1 else _rounded(value)


def _rounded(value: Any) -> Any:
    return f"{value:.3f}" if isinstance(value, float) else value


def read(path: Path) -> TimingTable:
    """What `write` wrote, by an older kgen too. Raises UsageError for another file."""
    try:
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        notes = [line[2:].split(": ", 1) for line in lines if line.startswith("# ")]
        header = {name: json.loads(value) for name, value in notes}
        records = csv.DictReader(line for line in lines if not line.startswith("#"))
        rows = tuple(map(_parse, records))
        return TimingTable(header, device_of(header["device"]), rows)
    except OSError as error:
        raise UsageError(f"timing table {path}: {error.strerror or error}") from error
    except (EOFError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"timing table {path}: {type(error).__name__}: {error}; expected what "
            "tools/record_table.py or tools/export_trials.py writes"
        ) from error


def device_of(facts: Mapping[str, Any]) -> Device:
    """The device whose facts JSON holds."""
    clusters = tuple((size, count) for size, count in facts["clusters_by_size"])
    return Device(**{**facts, "clusters_by_size": clusters})


def _parse(record: dict[str, str]) -> TableRow:
    problem = GemmProblem(**_typed(record, PROBLEM_COLUMNS, GemmProblem))
    config = GemmConfig(**_typed(record, CONFIG_COLUMNS, GemmConfig))
    own = _typed(record, tuple(f.name for f in _OWN), TableRow)
    return TableRow(problem, config, **own)


def _typed(record: dict[str, str], names: tuple[str, ...], kind: Any) -> dict[str, Any]:
    """Values by their fields' types. A newer kgen may have fields that the file does not know."""
    readers: dict[str, Callable[[str], Any]] = {
        "int": int,
        "str": str,
        "bool": "True".__eq__,
        "float | None": lambda text: float(text) if text else None,
    }
    kinds = {f.name: str(f.type) for f in fields(kind)}
    return {name: readers[kinds[name]](record[name]) for name in names if name in record}
