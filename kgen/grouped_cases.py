"""What a grouped kernel is checked on: groupings of one problem, with inputs and references.

Takes a problem of a grouped kind and a torch device, gives `GroupedCase`; all results stay on the
device until somebody asks. Must not import runtime, build, search or cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import torch

from kgen.cases import (
    TILE,
    ExactCase,
    GuardedOutput,
    bits_of,
    column_major,
    random_operand,
    random_scales,
    strip_sums,
    tile_sums,
)
from kgen.problem import GROUP_ALIGNMENT, SCALE_BLOCK, GemmProblem, ceil_div, round_up
from kgen.quant import get_col_major_tma_aligned_tensor
from kgen.reference import (
    TORCH_D_DTYPES,
    TORCH_OPERAND_DTYPES,
    dequantize_a,
    dequantize_b,
    full_fp32,
)

#: Computes D in place on the current stream, as `runtime.grouped_kernel` takes its tensors:
#: launch((a, sfa, b, sfb, d, layout), by_index).
GroupedLaunch = Callable[[tuple[torch.Tensor, ...], bool], None]

#: Rows of groups in turn: none, one, around a tile's end, several tiles.
UNEVEN: Final = (0, 1, 63, 64, 65, 130, 7, 128, 0, 200)
#: Rows of a group that is alone.
ALONE: Final = 257
#: Rows behind the last group's, or behind the most that a masked group has.
_ROWS_BEHIND: Final = 19
#: The exact case's groups differ by 2 to the power of their number modulo this.
_GROUP_CYCLE: Final = 3
#: NaN by bytes of an element: E4M3, BF16.
_NAN: Final = {1: 0x7F, 2: 0x7FFF}


@dataclass(frozen=True)
class Grouping:
    """Which rows belong to which group, and the tensor that says so.

    `rows` are the places of the rows that count, group after group, `sizes` how many each group
    has. `shape` is that of D without its columns: [M], or [G, max M].
    """

    name: str
    layout: torch.Tensor
    by_index: bool
    rows: torch.Tensor
    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Rows of D, counting or not."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class GroupedRun:
    """A grouping with its inputs; `reference` [rows that count, N] is FP32."""

    grouping: Grouping
    a: torch.Tensor
    sfa: torch.Tensor
    reference: torch.Tensor

    def errors(self, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Relative errors of D's rows that count: tiles of 128 x 128 and strips of 128 x 8.

        As in `kgen.cases.Case`; empty where no row counts. NaN where d is NaN.
        """
        if not self.reference.numel():
            return (self.reference.new_empty(0, 0),) * 2
        found = d.flatten(0, -2)[self.grouping.rows]
        norms = strip_sums(self.reference.square())
        strips = strip_sums(torch.sub(found, self.reference).square_())
        tile_norms = tile_sums(norms)
        average = tile_norms / tile_sums(torch.ones_like(norms[:1]))
        floor = average.repeat_interleave(TILE // 8, 1)[:, : norms.shape[1]]
        tiles = (tile_sums(strips) / tile_norms).sqrt()
        return tiles, (strips / torch.maximum(norms, floor)).sqrt()


class GroupedCase:
    """Inputs and references of one problem, made once, used for every candidate.

    `full` has every group full: what is timed, told by indices where they can tell it, which is
    what others take; `by_offset` the same by offsets. Rows that do not count hold NaN in A and in
    its scales.
    """

    def __init__(
        self, problem: GemmProblem, device: torch.device | str = "cuda", seed: int = 0
    ) -> None:
        self.problem = problem
        self.device = torch.device(device)
        self.d_dtype = TORCH_D_DTYPES[problem.d_dtype]
        self._generator = torch.Generator(self.device).manual_seed(seed)
        p, kb = problem, problem.num_k_blocks
        self._dtype = TORCH_OPERAND_DTYPES[problem.a_dtype]
        b = random_operand(p.groups * p.n, p.k, self._generator, self._dtype)
        self.b = b.view(p.groups, p.n, p.k)
        self.sfb = torch.empty(0, 0, device=self.device)
        if p.recipe != "none":
            blocks = ceil_div(p.n, SCALE_BLOCK)
            sfb = random_scales(p.groups * blocks, kb, 1.0, self._generator)
            self.sfb = sfb.view(p.groups, blocks, kb)
        self.by_offset = self._run(self.grouping("full", [p.m] * p.groups, p.m, 0))
        self.full = self._aligned(self.by_offset)
        uneven = [UNEVEN[i % len(UNEVEN)] for i in range(p.groups)] if p.groups > 1 else [65]
        alone = [0] * (p.groups - 1) + [ALONE]
        self.runs = [self.by_offset, *([self.full] if self.full is not self.by_offset else [])]
        for name, sizes in (("uneven", uneven), ("one alone", alone), ("empty", [0] * p.groups)):
            self.runs.append(self._run(self.grouping(name, sizes, max(sizes), _ROWS_BEHIND)))
            if p.kind == "contiguous":
                self.runs.append(self._run(indexed(name, sizes, self.device)))

    def grouping(self, name: str, sizes: Sequence[int], most: int, behind: int) -> Grouping:
        """Groups of these sizes; `behind`: rows behind all of them, or behind `most` of each."""
        if self.problem.kind == "masked":
            return masked(name, sizes, most + behind, self.device)
        return offset(name, sizes, behind, self.device)

    @cached_property
    def output(self) -> GuardedOutput:
        """Room for the D of any run between guards."""
        rows = max(run.grouping.num_rows for run in [*self.runs, self.exact.run])
        return GuardedOutput(rows, self.problem.n, self.d_dtype, self.device)

    @cached_property
    def exact(self) -> GroupedExact:
        """The inputs of the exact check."""
        return GroupedExact(self)

    def poisoned(self, grouping: Grouping) -> torch.Tensor:
        """D of a grouping with NaN in and around it."""
        d = self.output.poisoned(grouping.num_rows)
        return _unflat(d, grouping.shape)

    def empty(self, run: GroupedRun) -> torch.Tensor:
        """A D of a run without guards."""
        shape = (*run.grouping.shape, self.problem.n)
        return torch.empty(shape, dtype=self.d_dtype, device=self.device)

    def inputs(self, run: GroupedRun, row_major: bool = False) -> tuple[torch.Tensor, ...]:
        """a, sfa, b, sfb of a run; sfa row-major where asked."""
        return run.a, run.sfa.contiguous() if row_major else run.sfa, self.b, self.sfb

    def constants(self) -> Iterator[torch.Tensor]:
        """What every candidate is judged by, and none may write to."""
        yield from (self.b, self.sfb, self.exact.b, self.exact.sfb)
        for run in self.runs:
            yield from (run.a, run.sfa, run.reference, run.grouping.layout)

    def _aligned(self, run: GroupedRun) -> GroupedRun:
        """The same told by indices, where groups start on multiples of 128 rows."""
        p = self.problem
        if p.kind != "contiguous" or p.m % GROUP_ALIGNMENT:
            return run
        groups = torch.arange(p.groups, dtype=torch.int32, device=self.device)
        layout = groups.repeat_interleave(p.m)
        own = replace(run.grouping, name="full, m_indices", layout=layout, by_index=True)
        return replace(run, grouping=own)

    def _run(self, grouping: Grouping) -> GroupedRun:
        p = self.problem
        count = len(grouping.rows)
        some = random_operand(count, p.k, self._generator, self._dtype)
        scales = self.sfb
        if p.recipe != "none":
            scales = random_scales(count, p.num_k_blocks, 1.0, self._generator)
        a, sfa = _spread(grouping, some, scales)
        reference = torch.empty(count, p.n, device=self.device)
        start = 0
        for group, size in enumerate(grouping.sizes):
            part = slice(start, start + size)
            start += size
            if size:
                sfb = self.sfb if p.recipe == "none" else self.sfb[group]
                wide = dequantize_b(self.b[group], sfb, p.recipe).T
                with full_fp32():
                    reference[part] = dequantize_a(some[part], scales[part], p.recipe) @ wide
        return _shaped(GroupedRun(grouping, a, sfa, reference))


class GroupedExact:
    """`kgen.cases.ExactCase` over uneven groups: group g's results are 2^-(g % 3) times its own."""

    def __init__(self, case: GroupedCase) -> None:
        p, device = case.problem, case.device
        sizes = [UNEVEN[i % len(UNEVEN)] for i in range(min(p.groups, len(UNEVEN)))]
        sizes += [1] * (p.groups - len(sizes))
        sizes[-1] = ALONE
        self._grouping = case.grouping("exact", sizes, max(sizes), _ROWS_BEHIND)
        count = len(self._grouping.rows)
        self._exact = ExactCase(replace(p, kind="dense", m=count, groups=1), device)
        self.num_passes = self._exact.num_passes
        group = torch.arange(p.groups, device=device) % _GROUP_CYCLE
        factors = 0.5**group
        b = self._exact.b
        self.b = bits_of(b).repeat(p.groups, 1, 1).view(b.dtype)
        self.sfb = self._exact.sfb
        if p.recipe == "none":
            self.b.mul_(factors[:, None, None])
        else:
            self.sfb = self.sfb * factors[:, None, None]
        each = torch.tensor(sizes, device=device)
        self._factors = factors.repeat_interleave(each)[:, None]
        self.run = self._make(0)

    def _make(self, number: int) -> GroupedRun:
        a, sfa, _, _ = self._exact.inputs(number)
        whole, scales = _spread(self._grouping, a, sfa)
        expected = self._exact.expected(number, 0, len(a), self._factors) * self._factors[: len(a)]
        return _shaped(GroupedRun(self._grouping, whole, scales, expected))

    def passes(self) -> Iterator[GroupedRun]:
        """Each pass with its exact result as the reference."""
        return (self._make(number) for number in range(self.num_passes))


def offset(name: str, sizes: Sequence[int], behind: int, device: torch.device) -> Grouping:
    """Groups one after another with nothing between, `behind` rows behind the last."""
    ends = torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0)
    layout, total = ends.to(device, torch.int32), int(ends[-1])
    rows = torch.arange(total, device=device)
    return Grouping(f"{name}, m_offsets", layout, False, rows, tuple(sizes), (total + behind,))


def indexed(name: str, sizes: Sequence[int], device: torch.device) -> Grouping:
    """Groups that start at multiples of 128 rows, a skipped block before them, and holes.

    Every 7th row is skipped as well, of which a caller may have dropped the token.
    """
    index = [-1] * GROUP_ALIGNMENT
    kept = []
    for group, size in enumerate(sizes):
        own = [-1 if i % 7 == 3 else group for i in range(size)]
        kept.append(size - own.count(-1))
        index += own + [-1] * (round_up(size, GROUP_ALIGNMENT) - size)
    layout = torch.tensor(index, dtype=torch.int32, device=device)
    rows = (layout >= 0).nonzero().flatten()
    return Grouping(f"{name}, m_indices", layout, True, rows, tuple(kept), (len(index),))


def masked(name: str, sizes: Sequence[int], most: int, device: torch.device) -> Grouping:
    """Groups with room for `most` rows each."""
    layout = torch.tensor(sizes, dtype=torch.int32, device=device)
    places = torch.arange(most, device=device)
    rows = (places < layout[:, None]).flatten().nonzero().flatten()
    return Grouping(f"{name}, masked_m", layout, False, rows, tuple(sizes), (len(sizes), most))


def _spread(
    grouping: Grouping, a: torch.Tensor, sfa: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of A and of its scales, if any, at the first places that count; NaN at all others."""
    rows = grouping.rows[: len(a)]
    whole = torch.empty(grouping.num_rows, a.shape[1], dtype=a.dtype, device=a.device)
    bits_of(whole).fill_(_NAN[a.itemsize])
    bits_of(whole)[rows] = bits_of(a)
    if a.dtype == torch.bfloat16:
        return whole, sfa
    scales = torch.full((grouping.num_rows, sfa.shape[1]), torch.nan, device=a.device)
    scales[rows] = sfa
    return whole, scales


def _shaped(run: GroupedRun) -> GroupedRun:
    """Inputs in the shape of the grouping, scales as TMA takes them."""
    shape = run.grouping.shape
    a, sfa = run.a, run.sfa
    if len(shape) == 1:
        return replace(run, sfa=column_major(sfa))
    if a.dtype == torch.bfloat16:
        return replace(run, a=_unflat(a, shape))
    sfa = get_col_major_tma_aligned_tensor(_unflat(sfa, shape))
    return replace(run, a=_unflat(a, shape), sfa=sfa)


def _unflat(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Rows of x, which may have a pitch, in the shape of a grouping."""
    outer = [x.stride(0) * torch.Size(shape[i + 1 :]).numel() for i in range(len(shape))]
    return x.as_strided((*shape, x.shape[1]), (*outer, 1))
