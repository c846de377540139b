"""What kernels of weight gradients are checked on: D that holds something, and groups along K.

Takes problems of the kinds wgrad and k_grouped and a torch device. Of kind wgrad `kgen.cases.Case`
has inputs and references, and `accumulating` lets a kernel that adds be checked as one that
writes; `KGroupedCase` has groupings. All results stay on the device until somebody asks. Must not
import runtime, build, search or cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final

import torch

from kgen.cases import (
    LIVE_BLOCKS,
    STRIP,
    TILE,
    ExactCase,
    GuardedOutput,
    Launch,
    column_major,
    random_operand,
    random_scales,
    strip_sums,
    tile_sums,
)
from kgen.problem import SCALE_BLOCK, GemmProblem
from kgen.reference import TORCH_OPERAND_DTYPES, dequantize_a, full_fp32

#: Computes D in place on the current stream, as `runtime.wgrad_kernel` takes its tensors:
#: launch((a, sfa, b, sfb, d), ks), ks numbers or an int32 tensor.
KGroupedLaunch = Callable[[tuple[torch.Tensor, ...], Sequence[int] | torch.Tensor], None]

#: K blocks of groups in turn: none, one, more than a ring is deep, few.
UNEVEN: Final = (0, 3, 1, 19, 0, 2, 8)
#: K blocks of a group that is alone.
ALONE: Final = 9
#: Most rows and columns where groups are uneven: a partial tile of every size, several tiles.
UNEVEN_M: Final = 456
UNEVEN_N: Final = 392
#: K blocks behind the last group's, and rows of D that belong to no group between two.
_BLOCKS_BEHIND: Final = 2
_ROWS_BETWEEN: Final = 3
_NAN: Final = 0x7F


def held_before(d: torch.Tensor) -> torch.Tensor:
    """What D holds before a product is added to it: 1 to 5, another in each neighbour.

    FP32 adds them exactly to the results of an exact case, of 8 bits from 2^-20 to 2^16.
    """
    rows = torch.arange(d.shape[-2], device=d.device, dtype=torch.int32)
    columns = torch.arange(d.shape[-1], device=d.device, dtype=torch.int32)
    return ((rows[:, None] * 7 + columns * 3) % 5 + 1).float()


def accumulating(launch: Launch) -> Launch:
    """A launch that writes the product, made of one that adds it to what D holds."""

    def call(*tensors: torch.Tensor) -> None:
        d = tensors[4]
        before = held_before(d)
        d.copy_(before)
        launch(*tensors)
        d.sub_(before)

    return call


@dataclass(frozen=True)
class KGroupedRun:
    """Groups of `ks` columns, and the inputs: a [M, K], sfa [M, K/128], b and sfb alike.

    `references` [M, N] FP32 of each group; None stands for zeros. Columns behind the last group's
    hold NaN, their scales as well.
    """

    name: str
    ks: tuple[int, ...]
    a: torch.Tensor
    sfa: torch.Tensor
    b: torch.Tensor
    sfb: torch.Tensor
    references: tuple[torch.Tensor | None, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of D: groups, M, N."""
        return len(self.ks), self.a.shape[0], self.b.shape[0]

    def inputs(self, row_major: bool = False) -> tuple[torch.Tensor, ...]:
        """a, sfa, b, sfb; scales row-major where asked."""
        if row_major:
            return self.a, self.sfa.contiguous(), self.b, self.sfb.contiguous()
        return self.a, self.sfa, self.b, self.sfb

    def ks_on_device(self) -> torch.Tensor:
        """ks as kernels read them from memory."""
        return torch.tensor(self.ks, dtype=torch.int32, device=self.a.device)

    def errors(self, d: torch.Tensor) -> torch.Tensor:
        """The largest relative error of a tile of 128 x 128 and of a strip of 128 x 8 columns.

        FP32 [2], on the device; NaN where d is. Of groups without columns 0 where D is 0, else 1.
        """
        found = d.new_zeros(2)
        for group, reference in enumerate(self.references):
            if reference is None:
                wrong = (torch.count_nonzero(d[group]) > 0).float().expand(2)
            else:
                wrong = _worst(d[group], reference)
            found = torch.maximum(found, wrong)
        return found


def _worst(d: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    # As in kgen.cases.Case: a strip counts as its tile's average at least.
    norms = strip_sums(reference.square())
    strips = strip_sums(torch.sub(d, reference).square_())
    tile_norms = tile_sums(norms)
    average = tile_norms / tile_sums(torch.ones_like(norms[:1]))
    floor = average.repeat_interleave(TILE // STRIP, 1)[:, : norms.shape[1]]
    tiles = (tile_sums(strips) / tile_norms).sqrt()
    return torch.stack([tiles.amax(), (strips / torch.maximum(norms, floor)).sqrt().amax()])


class KGroupedCase:
    """Inputs and references of one problem, made once, used for every candidate.

    `full` has every group at the problem's K, M and N: what is timed. The others have unequal
    groups, some without columns, one alone and none at all, on a smaller M and N.
    """

    def __init__(
        self, problem: GemmProblem, device: torch.device | str = "cuda", seed: int = 0
    ) -> None:
        self.problem = problem
        self.device = torch.device(device)
        self._generator = torch.Generator(self.device).manual_seed(seed)
        p, g = problem, problem.groups
        self.full = self.run("full", [p.k] * g, p.m, p.n, behind=0)
        m, n = min(p.m, UNEVEN_M), min(p.n, UNEVEN_N)
        uneven = [UNEVEN[i % len(UNEVEN)] * SCALE_BLOCK for i in range(g)]
        alone = [0] * (g - 1) + [ALONE * SCALE_BLOCK]
        self.runs = [self.full]
        for name, ks in (("uneven", uneven), ("one alone", alone), ("empty", [0] * g)):
            self.runs.append(self.run(name, ks, m, n))

    def run(
        self, name: str, ks: Sequence[int], m: int, n: int, behind: int = _BLOCKS_BEHIND
    ) -> KGroupedRun:
        """Groups of these columns, with `behind` K blocks of NaN behind the last."""
        used = sum(ks)
        a, sfa = self._operand(m, used, behind, self.problem.a_dtype)
        b, sfb = self._operand(n, used, behind, self.problem.b_dtype)
        references: list[torch.Tensor | None] = []
        for end, k in zip(accumulate(ks), ks, strict=True):
            columns, blocks = (
                slice(end - k, end),
                slice((end - k) // SCALE_BLOCK, end // SCALE_BLOCK),
            )
            if not k:
                references.append(None)
                continue
            wide = dequantize_a(b[:, columns], sfb[:, blocks])
            with full_fp32():
                references.append(dequantize_a(a[:, columns], sfa[:, blocks]) @ wide.T)
        return KGroupedRun(name, tuple(ks), a, sfa, b, sfb, tuple(references))

    def _operand(
        self, rows: int, used: int, behind: int, dtype: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        fp8 = TORCH_OPERAND_DTYPES[dtype]
        columns = used + behind * SCALE_BLOCK
        x = torch.full((rows, columns), _NAN, dtype=torch.uint8, device=self.device)
        scales = torch.full((rows, columns // SCALE_BLOCK), torch.nan, device=self.device)
        if used:
            some = random_operand(rows, used, self._generator, fp8)
            x[:, :used] = some.view(torch.uint8)
            scales[:, : used // SCALE_BLOCK] = random_scales(
                rows, used // SCALE_BLOCK, 1.0, self._generator
            )
        return x.view(fp8), column_major(scales)

    @cached_property
    def output(self) -> GuardedOutput:
        """Room for the D of any run between guards."""
        shapes = [run.shape for run in [*self.runs, self.exact.run]]
        rows = max(groups * (m + _ROWS_BETWEEN) for groups, m, _ in shapes)
        n = max(n for _, _, n in shapes)
        return GuardedOutput(rows, n, torch.float32, self.device)

    @cached_property
    def exact(self) -> KGroupedExact:
        """The inputs of the exact check."""
        return KGroupedExact(self)

    def poisoned(self, run: KGroupedRun) -> torch.Tensor:
        """D [G, M, N] of a run with NaN in it, around it and between its groups."""
        groups, m, n = run.shape
        d = self.output.poisoned(groups * (m + _ROWS_BETWEEN))
        pitch = d.stride(0)
        strides = ((m + _ROWS_BETWEEN) * pitch, pitch, 1)
        return d.as_strided((groups, m, n), strides, d.storage_offset())

    def empty(self, run: KGroupedRun) -> torch.Tensor:
        """A D of a run without guards, zero: what is timed adds to it again and again."""
        return torch.zeros(run.shape, device=self.device)

    def constants(self) -> Iterator[torch.Tensor]:
        """What every candidate is judged by, and none may write to."""
        for run in self.runs:
            yield from (run.a, run.b)
            yield from (scales for scales in (run.sfa, run.sfb) if scales.numel())
            yield from (reference for reference in run.references if reference is not None)
        yield from (self.exact.run.b, self.exact.run.sfa, self.exact.run.sfb)


class KGroupedExact:
    """`kgen.cases.ExactCase` over the columns of uneven groups: each has its own blocks' bits."""

    def __init__(self, case: KGroupedCase) -> None:
        p = case.problem
        blocks = [UNEVEN[(i + 1) % len(UNEVEN)] for i in range(p.groups)]
        self.ks = [block * SCALE_BLOCK for block in blocks]
        k = max(sum(self.ks), SCALE_BLOCK)
        m, n = min(p.m, UNEVEN_M), min(p.n, UNEVEN_N)
        dtypes = {"a_dtype": p.a_dtype, "b_dtype": p.b_dtype}
        self._exact = ExactCase(GemmProblem.of("wgrad", m, n, k, **dtypes), case.device)
        self.num_passes = self._exact.num_passes
        self.run = self._make(0)

    def _make(self, number: int) -> KGroupedRun:
        a, sfa, b, sfb = self._exact.inputs(number)
        zeros = a.new_zeros(a.shape[0], b.shape[0], dtype=torch.float32)
        whole = self._exact.expected(number, 0, a.shape[0], zeros)
        first, num_blocks = LIVE_BLOCKS * number, self._exact.problem.num_k_blocks
        all_bits = 2 ** min(LIVE_BLOCKS, num_blocks - first) - 1
        references: list[torch.Tensor | None] = []
        for end, k in zip(accumulate(self.ks), self.ks, strict=True):
            own = range((end - k) // SCALE_BLOCK, end // SCALE_BLOCK)
            bits = sum(2 ** (i - first) for i in own if first <= i < first + LIVE_BLOCKS)
            # The quotient is a number of few bits: exact.
            references.append(whole / all_bits * bits if bits else None)
        return KGroupedRun("exact", tuple(self.ks), a, sfa, b, sfb, tuple(references))

    def passes(self) -> Iterator[KGroupedRun]:
        """Each pass with its exact result as the reference; the next reuses a's memory."""
        return (self._make(number) for number in range(self.num_passes))
