"""What the database has learned of a device, in few columns: `lessons`, for searches to begin with.

Takes a database and a device, gives the latest results of each problem's configurations. Must not
import build, search, runtime or torch.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from sqlalchemy import select

from kgen.cache.db import TuningDatabase
from kgen.cache.schema import trials
from kgen.config import GemmConfig
from kgen.problem import GemmProblem

#: Rows that are read, the newest ones: more would take seconds, and teach nothing new.
MOST_ROWS: Final = 20_000
#: Failures on the GPU, which a kernel that is like it may share.
FAILED_ON_GPU: Final = ("wrong", "faulted", "timeout", "launch_failed")

_PROBLEM: Final = tuple(f.name for f in fields(GemmProblem))
_CONFIG: Final = tuple(f.name for f in fields(GemmConfig))


def lessons(
    database: TuningDatabase, device_name: str, num_sms: int, policy: str
) -> dict[GemmProblem, dict[GemmConfig, float | None]]:
    """For each problem its configurations' newest times, microseconds, and None for failures.

    Of any kernel generation: a template that changed makes times wrong for a problem of its own; to
    rank configurations of others they do. Times of other policies and
    of sources by hand are left out.
    """
    columns = [trials.c[name] for name in (*_PROBLEM, *_CONFIG, "median_us")]
    query = (
        select(*columns)
        .where(
            trials.c.device_name == device_name,
            trials.c.device_num_sms == num_sms,
            trials.c.status.in_(("ok", *FAILED_ON_GPU)),
            trials.c.policy.in_(("", policy)),
            trials.c.source != "foreign",
        )
        .order_by(trials.c.id.desc())
        .limit(MOST_ROWS)
    )
    found: dict[GemmProblem, dict[GemmConfig, float | None]] = {}
    problems: dict[tuple[object, ...], GemmProblem] = {}
    end = len(_PROBLEM) + len(_CONFIG)
    for row in reversed(database.read(lambda connection: connection.execute(query).all())):
        values = tuple(row[: len(_PROBLEM)])
        if values not in problems:
            problems[values] = GemmProblem(**dict(zip(_PROBLEM, values, strict=True)))
        config = GemmConfig(**dict(zip(_CONFIG, row[len(_PROBLEM) : end], strict=True)))
        found.setdefault(problems[values], {})[config] = row[end]
    return found
