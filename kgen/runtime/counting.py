"""Kernels and launches that count their runs, where calls are recorded (`kgen.runtime.record`), or
mark them for profilers.

Takes a loaded kernel, gives one that does the same and counts or marks. Where neither is asked for
a kernel stays as it is: a prepared call pays nothing. Must not import cache, build or search.
"""

from __future__ import annotations

from typing import Any, Final

from kgen.problem import GemmProblem
from kgen.runtime import nvtx
from kgen.runtime.kernel import Kernel, Launch
from kgen.runtime.kernels import KERNELS
from kgen.runtime.operands import Sizes
from kgen.runtime.record import RECORDER


class CountedLaunch(Launch):
    """A launch that counts its runs in the one item of a list, which others may share."""

    __slots__ = ("_cell",)

    def __init__(self, launch: Launch, cell: list[int]) -> None:
        for name in Launch.__slots__:
            setattr(self, name, getattr(launch, name))
        self._cell = cell

    def run(self, stream: int) -> None:
        """As in Launch, and count it."""
        # Between the bytecodes of this line no other thread runs: it needs no lock.
        self._cell[0] += 1
        super().run(stream)


class MarkedLaunch(Launch):
    """A launch whose runs stand in a range of the given text on a profiler's timeline."""

    __slots__ = ("_inner", "_text")

    def __init__(self, launch: Launch, text: str) -> None:
        for name in Launch.__slots__:
            setattr(self, name, getattr(launch, name))
        self._inner = launch
        self._text = text

    def run(self, stream: int) -> None:
        """As in Launch, in a range."""
        nvtx.push(self._text)
        try:
            self._inner.run(stream)
        finally:
            nvtx.pop()


class _Counting(Kernel):
    """Mixed into a class of kernels: their launches count or mark their runs."""

    _cell: list[int] | None
    _mark: str

    def _launch(self, *args: Any) -> Launch:
        launch = super()._launch(*args)
        if self._cell is not None:
            launch = CountedLaunch(launch, self._cell)
        return MarkedLaunch(launch, self._mark) if self._mark else launch


#: By kind of problem, as KERNELS.
_COUNTING: Final[dict[str, type[_Counting]]] = {
    kind: type(f"Counting{kernel.__name__}", (_Counting, kernel), {})
    for kind, kernel in KERNELS.items()
}


def counted(kernel: Kernel, problem: GemmProblem, guessed: bool, *, marked: bool = False) -> Kernel:
    """The kernel for calls of a problem: one that counts them where calls are recorded, and marks
    them if `marked`; else itself.

    `guessed`: it was not tuned for this problem.
    """
    cell = RECORDER.cell(problem, guessed)
    mark = f"kgen {problem}" if marked and nvtx.can_mark() else ""
    if cell is None and not mark:
        return kernel
    counting = _COUNTING[kernel.kind]
    made = counting.__new__(counting)
    vars(made).update(
        vars(kernel), _cell=cell, _mark=mark
    )  # it shares everything with the one it is made of
    return made


def count_reference(sizes: Sizes, num_sms: int, batch_invariant: bool = False) -> None:
    """Count a call that the reference answers; no size is 0."""
    if RECORDER.is_on:
        count_problem(sizes.problem(num_sms, batch_invariant))


def count_problem(problem: GemmProblem) -> None:
    """Count a call of a problem that the reference answers."""
    if RECORDER.is_on:
        cell = RECORDER.cell(problem, guessed=False)
        if cell is not None:
            cell[0] += 1
