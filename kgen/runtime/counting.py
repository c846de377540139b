"""Kernels and launches that count their runs, where calls are recorded (`kgen.runtime.record`).

Takes a loaded kernel, gives one that does the same and counts. Where nothing is recorded a kernel
stays as it is, so that a prepared call pays nothing. Must not import cache, build or search.
"""

from __future__ import annotations

from typing import Any

from kgen.problem import GemmProblem
from kgen.runtime.grouped_kernel import GroupedKernel
from kgen.runtime.kernel import Kernel, Launch
from kgen.runtime.operands import Sizes
from kgen.runtime.record import RECORDER
from kgen.runtime.wgrad_kernel import KGroupedKernel, WgradKernel


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


class CountedKernel(Kernel):
    """A kernel whose launches count their runs; it shares everything with the one it is made of."""

    def __init__(self, kernel: Kernel, cell: list[int]) -> None:
        vars(self).update(vars(kernel))
        self._cell = cell

    def prepare(self, *tensors: Any, **options: Any) -> Launch:
        """As in Kernel."""
        return CountedLaunch(super().prepare(*tensors, **options), self._cell)


class CountedGroupedKernel(GroupedKernel):
    """The same of a grouped kind."""

    def __init__(self, kernel: GroupedKernel, cell: list[int]) -> None:
        vars(self).update(vars(kernel))
        self.kind = kernel.kind  # type: ignore[misc]  # of this object, not of the class
        self._cell = cell

    def prepare_grouped(self, *args: Any, **options: Any) -> Launch:
        """As in GroupedKernel."""
        return CountedLaunch(super().prepare_grouped(*args, **options), self._cell)


class CountedWgradKernel(WgradKernel):
    """The same of kind wgrad."""

    def __init__(self, kernel: WgradKernel, cell: list[int]) -> None:
        vars(self).update(vars(kernel))
        self._cell = cell

    def prepare(self, *tensors: Any, **options: Any) -> Launch:
        """As in WgradKernel."""
        return CountedLaunch(super().prepare(*tensors, **options), self._cell)


class CountedKGroupedKernel(KGroupedKernel):
    """The same of kind k_grouped."""

    def __init__(self, kernel: KGroupedKernel, cell: list[int]) -> None:
        vars(self).update(vars(kernel))
        self._cell = cell

    def prepare_k_grouped(self, *args: Any, **options: Any) -> Launch:
        """As in KGroupedKernel."""
        return CountedLaunch(super().prepare_k_grouped(*args, **options), self._cell)


def counted(kernel: Kernel, problem: GemmProblem, guessed: bool) -> Kernel:
    """The kernel for calls of a problem: one that counts them, or itself where none are recorded.

    `guessed`: it was not tuned for this problem.
    """
    cell = RECORDER.cell(problem, guessed)
    if cell is None:
        return kernel
    if isinstance(kernel, GroupedKernel):
        return CountedGroupedKernel(kernel, cell)
    if isinstance(kernel, KGroupedKernel):
        return CountedKGroupedKernel(kernel, cell)
    if isinstance(kernel, WgradKernel):
        return CountedWgradKernel(kernel, cell)
    return CountedKernel(kernel, cell)


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
