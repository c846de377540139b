"""What a bundle that nobody vouches for may bring: configurations to try, nothing that counts.

Takes its trials, gives rows of status "compiled" with no cubin, no time and this kgen's own
prediction: `TuningDatabase.suggestions` lists them, "best" and the runtime never see them.
Must not import build, search, runtime or torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields, replace
from typing import Any, Final

from sqlalchemy import Connection, select

from kgen.cache import rows
from kgen.cache.connect import to_json
from kgen.cache.records import TrialRecord
from kgen.cache.schema import trials
from kgen.cache.transfer import COLUMNS, Raw, Receiver
from kgen.config import GemmConfig
from kgen.device import H200, Device
from kgen.errors import BundleError
from kgen.heuristic import predict_us
from kgen.problem import GemmProblem
from kgen.validity import why_invalid

#: Configurations that are suggested of one problem on one device, the fastest ones.
PER_PROBLEM: Final = 8
#: Problems of one bundle, on as many devices.
MAX_PLACES: Final = 20_000
_ROOM: Final = 2 * PER_PROBLEM

_PROBLEM: Final = tuple(f.name for f in fields(GemmProblem))
_CONFIG: Final = tuple(f.name for f in fields(GemmConfig))
_COLUMNS: Final = COLUMNS["trials"]
_PLACE_FROM: Final = _COLUMNS.index(_PROBLEM[0])
_CONFIG_FROM: Final = _COLUMNS.index(_CONFIG[0])
_CONFIG_TO: Final = _CONFIG_FROM + len(_CONFIG)
_MEDIAN: Final = _COLUMNS.index("median_us")
_SOURCE: Final = _COLUMNS.index("source")
_FLAGS: Final = frozenset(f.name for f in fields(GemmProblem) if str(f.type) == "bool")


class Suggester:
    """Collects the configurations that a bundle says were the fastest, then suggests them."""

    def __init__(self, digest: str, where: str) -> None:
        self._digest = digest
        self._where = where
        self._fastest: dict[Raw, dict[Raw, float]] = {}
        self._rows: dict[Raw, list[Raw]] = {}

    def look_at(self, found: Iterable[Raw]) -> None:
        """Note the timed trials of kgen's own kernels.

        Raises BundleError for more problems than a bundle has.
        """
        for row in found:
            if row[_MEDIAN] is None or row[_SOURCE] == "foreign":
                continue
            place, config = row[_PLACE_FROM:_CONFIG_FROM], row[_CONFIG_FROM:_CONFIG_TO]
            times = self._fastest.setdefault(place, {})
            times[config] = min(row[_MEDIAN], times.get(config, row[_MEDIAN]))
            if len(times) > _ROOM:
                self._fastest[place] = dict(_leading(times))
            if len(self._fastest) > MAX_PLACES:
                raise BundleError(
                    f"{self._where}: trials of more than {MAX_PLACES} problems and no trusted "
                    "signature: export fewer at a time, or trust its key"
                )

    def prepare(self) -> int:
        """Make the rows, before a database is locked for them.

        Gives how many configurations were left out because this kgen can not make them.
        """
        skipped = 0
        for place, times in self._fastest.items():
            problem, device_name, num_sms = _problem_of(place)
            device = _device(device_name, num_sms)
            made = self._rows[place] = []
            for values, claimed_us in _leading(times):
                config = GemmConfig(**dict(zip(_CONFIG, values, strict=True)))
                if why_invalid(problem, config, device) is not None:
                    skipped += 1
                    continue
                trial = TrialRecord(
                    problem=problem,
                    config=config,
                    device_name=device_name,
                    num_sms=num_sms,
                    cubin_key="",
                    status="compiled",
                    source="predicted",
                    predicted_us=predict_us(problem, config, device),
                    provenance={"bundle": self._digest, "claimed_us": claimed_us},
                )
                made.append(_raw(trial))
        return skipped

    def suggest(self, connection: Connection, receiver: Receiver) -> None:
        """Append them where the database has no trial of that configuration, problem and device."""
        for place, made in self._rows.items():
            known = _known(connection, place)
            fresh = [row for row in made if row[_CONFIG_FROM:_CONFIG_TO] not in known]
            receiver.counts.known["trials"] += len(made) - len(fresh)
            if fresh:
                receiver.take("trials", fresh)


def _leading(times: dict[Raw, float]) -> Iterator[tuple[Raw, float]]:
    """The fastest few; equals in the order of their values."""
    return iter(sorted(times.items(), key=lambda pair: (pair[1], pair[0]))[:PER_PROBLEM])


def _problem_of(place: Raw) -> tuple[GemmProblem, str, int]:
    named = dict(zip(_PROBLEM, place, strict=False))
    named |= {name: bool(named[name]) for name in _FLAGS}
    return GemmProblem(**named), place[-2], place[-1]


def _device(name: str, num_sms: int) -> Device:
    """What to predict for: the reference device, with as many SMs."""
    if num_sms == H200.num_sms:
        return replace(H200, name=name)
    return replace(H200, name=name, num_sms=num_sms, clusters_by_size=())


def _known(connection: Connection, place: Raw) -> set[Raw]:
    """Configurations of which there is a trial of this problem and device."""
    problem, device_name, num_sms = _problem_of(place)
    here: dict[str, Any] = asdict(problem)
    here |= {"device_name": device_name, "device_num_sms": num_sms}
    query = select(*(trials.c[name] for name in _CONFIG))
    query = query.where(*(trials.c[name] == value for name, value in here.items()))
    return {tuple(row) for row in connection.execute(query)}


def _raw(trial: TrialRecord) -> Raw:
    values = rows.trial_values(trial, None) | {"id": None}
    values["provenance"] = to_json(values["provenance"])
    return tuple(values[name] for name in _COLUMNS)
