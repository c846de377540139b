"""The analytic model corrected by what was measured: `ModelStrategy`, a Gaussian process.

Takes the problem, its device, the valid configurations and lessons (results of other problems);
gives configurations as `strategy` has it. Learned is the logarithm of a time over the model's
figure. Errors of configurations that are alike, by the distances of `kgen.space`, are alike, and
those of problems that are alike; each problem has an offset of its own, so that a device that is
faster than the model says teaches nothing wrong. Next comes the configuration of the largest
expected improvement; those on their way count as if they had come out as expected. Formulas: Jones,
Schonlau, Welch, "Efficient global optimization of expensive black-box functions", 1998; Rasmussen,
Williams, "Gaussian Processes for Machine Learning", 2006, chapter 2. Must not import build, verify,
measure, cache or torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kgen.config import GemmConfig
from kgen.device import Device
from kgen.heuristic import predict_us
from kgen.problem import GemmProblem
from kgen.search.strategy import Strategy
from kgen.space import coordinates

Array = NDArray[np.float64]

#: Standard deviations of logarithms: of the model's errors within a problem, of a problem's offset,
#: and of what a configuration has for itself, noise of the measurement included.
SPREAD: Final = 0.08
OFFSET_SPREAD: Final = 0.15
NOISE: Final = 0.015
#: Distance of configurations, and of problems in factors of two of M, N and K, at which errors are
#: alike to a third.
CONFIG_DISTANCE: Final = 1.5
PROBLEM_DISTANCE: Final = 3.0
#: What a failure counts as: so much slower than the model says. Where one fails others may.
FAILURE: Final = 0.3
#: Results of other problems that are learned from, the nearest problems' first.
MAX_LESSONS: Final = 256
#: And of one of them.
PER_PROBLEM: Final = 48
#: Results of the problem itself that are learned from, the first ones: each makes the next dearer.
MAX_ROWS: Final = 512
_NOT_KIND: Final = frozenset({"m", "n", "k", "groups", "batch_invariant", "num_sms"})
#: Rows by which the factors grow: a run has a process for each of its problems in memory.
_STEP: Final = 64


@dataclass(frozen=True)
class Lesson:
    """What came of a configuration for another problem on this device; `median_us` as always."""

    problem: GemmProblem
    config: GemmConfig
    median_us: float | None


class ModelStrategy(Strategy):
    """The first `num_seeds` seeds, then the largest expected improvement."""

    def __init__(
        self,
        problem: GemmProblem,
        device: Device,
        valid: Iterable[GemmConfig],
        seeds: Iterable[GemmConfig],
        lessons: Sequence[Lesson] = (),
    ) -> None:
        super().__init__(valid, seeds)
        self._configs = list(self._open)
        self._index = {config: i for i, config in enumerate(self._configs)}
        self._points = _points(self._configs)
        self._log_model = np.array(
            [math.log(predict_us(problem, c, device)) for c in self._configs]
        )
        self._is_open = np.ones(len(self._configs), bool)
        self._errors: list[float] = []  # by row, NaN of those on their way
        self._row_of: dict[GemmConfig, int] = {}
        self._process = _Process(len(self._configs))
        self._learn_lessons(_nearest(lessons, problem), problem, device)

    def _learn_lessons(
        self, lessons: Sequence[Lesson], problem: GemmProblem, device: Device
    ) -> None:
        if not lessons:
            return
        points = _points([lesson.config for lesson in lessons])
        problems = [lesson.problem for lesson in lessons]
        sizes = np.array([_sizes(p) for p in problems])
        likeness = np.exp(-_distances(sizes, np.array([_sizes(problem)]))[:, 0] / PROBLEM_DISTANCE)
        among = np.exp(-_distances(sizes, sizes) / PROBLEM_DISTANCE)
        number = np.unique(np.array([str(p) for p in problems]), return_inverse=True)[1]
        own_offset = OFFSET_SPREAD**2 * (number[:, None] == number[None, :])
        between = SPREAD**2 * among * _alike(points, points) + own_offset
        self._process.begin(
            between + NOISE**2 * np.eye(len(lessons)),
            SPREAD**2 * likeness[:, None] * _alike(points, self._points),
            np.array([_lesson_error(lesson, device) for lesson in lessons]),
        )

    def _choose(self) -> GemmConfig:
        gain, expected = self._gains()
        # Far from anything that could be better all gains are 0: then the fastest expected.
        order = np.lexsort((expected, -gain))
        return self._configs[int(order[0])]

    def expected_gain(self) -> float | None:
        """The largest expected improvement, of logarithms; None before there is a time."""
        if not self._open:
            return 0.0
        if all(math.isnan(error) for error in self._errors):
            return None
        return float(self._gains()[0].max())

    def _gains(self) -> tuple[Array, Array]:
        """Expected improvement, -inf of what is not open, and expected time, as logarithms."""
        expected, deviation = self._process.predict(self._errors)
        expected = expected + self._log_model
        known = [float(expected[self._index[config]]) for config in self._row_of]
        best = min(known, default=float(expected[self._is_open].min()))
        gain = expected_improvement(expected, deviation, best)
        gain[~self._is_open] = -np.inf
        return gain, expected

    def ask(self) -> GemmConfig | None:
        """As `Strategy`; what is asked for counts as known from now on."""
        config = super().ask()
        if config is not None:
            self._add(config, math.nan)
        return config

    def _learn(self, config: GemmConfig, median_us: float | None) -> None:
        index = self._index.get(config)
        if index is not None:  # else of an earlier space
            self._add(config, _error(median_us, float(self._log_model[index])))

    def _add(self, config: GemmConfig, error: float) -> None:
        """A row of the process for the configuration, or its error in the row that it has."""
        index = self._index[config]
        self._is_open[index] = False
        if config in self._row_of:
            self._errors[self._row_of[config]] = error
            return
        if len(self._errors) >= MAX_ROWS:
            return
        self._row_of[config] = len(self._errors)
        self._errors.append(error)
        alike = _alike(self._points[index : index + 1], self._points)[0]
        self._process.add(index, SPREAD**2 * alike + OFFSET_SPREAD**2, NOISE**2)


class _Process:
    """Posterior of a Gaussian process at a fixed set of places, grown by one observation a time.

    With L the Cholesky factor of the observations' covariance and C their covariance with the
    places, V = L^-1 C is kept: mean = V^T L^-1 y, variance = prior - sum of V^2.
    """

    def __init__(self, num_places: int) -> None:
        prior = SPREAD**2 + OFFSET_SPREAD**2
        self._variance = np.full(num_places, prior)
        self._factors = np.zeros((0, num_places), np.float32)
        self._first_solved = np.zeros(0)  # L^-1 y of the observations to begin with
        self._rows: list[Array] = []  # of L, up to the diagonal, of those that came later
        self._count = 0

    def begin(self, covariance: Array, with_places: Array, values: Array) -> None:
        """The first observations, all at once: covariance [n, n], with the places [n, places]."""
        lower = np.linalg.cholesky(covariance)
        self._first_solved = np.linalg.solve(lower, values)
        self._append(np.linalg.solve(lower, with_places))

    def add(self, place: int, with_places: Array, noise: float) -> None:
        """An observation at one of the places; `with_places` is its covariance with all."""
        row = self._factors[: self._count, place]
        pivot = math.sqrt(max(with_places[place] + noise - float(row @ row), noise))
        new = (with_places - row @ self._factors[: self._count]) / pivot
        self._rows.append(np.append(row, pivot))
        self._append(new[None, :])

    def _append(self, factors: Array) -> None:
        needed = self._count + len(factors)
        if needed > len(self._factors):
            grown = np.zeros((needed + _STEP, self._factors.shape[1]), np.float32)
            grown[: self._count] = self._factors[: self._count]
            self._factors = grown
        self._factors[self._count : needed] = factors
        self._count = needed
        self._variance -= (factors**2).sum(0)

    def predict(self, values: Sequence[float]) -> tuple[Array, Array]:
        """Mean and standard deviation at all places, from the values of what was added.

        One that is NaN is taken as it was expected.
        """
        first = len(self._first_solved)
        solved = np.zeros(self._count)
        solved[:first] = self._first_solved
        for i, (row, value) in enumerate(zip(self._rows, values, strict=True), first):
            # A value as expected adds nothing to what the rows before it say.
            if not math.isnan(value):
                solved[i] = (value - float(row[:i] @ solved[:i])) / row[i]
        mean = solved @ self._factors[: self._count]
        return mean, np.sqrt(np.maximum(self._variance, 1e-12))


def expected_improvement(expected: Array, deviation: Array, best: float) -> Array:
    """E[max(0, best - x)] of normal x: how much below `best` each is expected to come out."""
    z = (best - expected) / deviation
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    return np.asarray(deviation * (z * _below(z) + density))


def _below(z: Array) -> Array:
    """The normal distribution function, within 1e-7: Abramowitz, Stegun, formula 26.2.17."""
    t = 1 / (1 + 0.2316419 * np.abs(z))
    poly = t * (
        0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429)))
    )
    tail = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * poly
    return np.where(z > 0, 1 - tail, tail)


def _error(median_us: float | None, log_model: float) -> float:
    """By how much, in logarithms, a time is above the model's."""
    return FAILURE if median_us is None else math.log(median_us) - log_model


def _lesson_error(lesson: Lesson, device: Device) -> float:
    return _error(lesson.median_us, math.log(predict_us(lesson.problem, lesson.config, device)))


def away(problem: GemmProblem, other: GemmProblem) -> float | None:
    """How far apart two problems are, in factors of two; None where kernels differ in kind."""
    if _kind(problem) != _kind(other):
        return None
    return sum(abs(a - b) for a, b in zip(_sizes(problem), _sizes(other), strict=True))


def _kind(problem: GemmProblem) -> tuple[Any, ...]:
    """What decides about the kernels of a problem, its sizes apart."""
    return tuple(value for name, value in vars(problem).items() if name not in _NOT_KIND)


def _nearest(lessons: Sequence[Lesson], problem: GemmProblem) -> list[Lesson]:
    """The lessons to be learned: none of the problem itself, the nearest problems first."""
    by_problem: dict[GemmProblem, list[Lesson]] = {}
    for lesson in lessons:
        by_problem.setdefault(lesson.problem, []).append(lesson)
    apart = {p: far for p in by_problem if p != problem and (far := away(problem, p)) is not None}
    found = [
        lesson for p in sorted(apart, key=apart.__getitem__) for lesson in _some(by_problem[p])
    ]
    return found[:MAX_LESSONS]


def _some(lessons: list[Lesson]) -> list[Lesson]:
    """PER_PROBLEM lessons of one problem: half of them the fastest, half spread over the rest."""
    ordered = sorted(lessons, key=lambda lesson: lesson.median_us or math.inf)
    fastest, rest = ordered[: PER_PROBLEM // 2], ordered[PER_PROBLEM // 2 :]
    step = max(1, math.ceil(len(rest) / (PER_PROBLEM - len(fastest) or 1)))
    return [*fastest, *rest[::step]]


def _sizes(problem: GemmProblem) -> tuple[float, ...]:
    return tuple(math.log2(x) for x in (problem.m, problem.n, problem.k, problem.groups))


def _points(configs: Sequence[GemmConfig]) -> Array:
    return np.array([coordinates(config) for config in configs])


def _alike(a: Array, b: Array) -> Array:
    """How alike the errors of configurations are, 0 to 1: [len(a), len(b)]."""
    return np.exp(-_distances(a, b) / CONFIG_DISTANCE)


def _distances(a: Array, b: Array) -> Array:
    """Sums of absolute differences, [len(a), len(b)]."""
    found = np.zeros((len(a), len(b)))
    for axis in range(a.shape[1]):
        found += np.abs(a[:, axis, None] - b[None, :, axis])
    return found
