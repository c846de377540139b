"""What a kernel is checked on: inputs and references of one problem, and the buffers for its D.

Takes a problem and a torch device, gives `Case`, with `ExactCase` and `GrowthCase` inside; all
results stay on the device until somebody asks. Must not import runtime, build, search or cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Final

import torch

from kgen.problem import (
    BY_K_RECIPES,
    SCALE_BLOCK,
    GemmProblem,
    ceil_div,
    round_up,
    scale_shapes,
)
from kgen.reference import (
    TORCH_D_DTYPES,
    TORCH_OPERAND_DTYPES,
    dequantize_a,
    dequantize_b,
    full_fp32,
)

#: a [m, k] and b [n, k] FP8 or BF16, sfa and sfb FP32 as `GemmProblem.scale_shapes` says.
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
#: Computes D in place on the current stream: launch(a, sfa, b, sfb, d), d [m, n] with a pitch; for
#: a problem with a bias launch(a, sfa, b, sfb, d, bias), bias [n] of d's type.
Launch = Callable[..., None]

GROWTH_BASE_K: Final = 512
#: 6 bits for the live blocks of a pass and 2 for a missing quarter of one: the 8 bits of BF16.
LIVE_BLOCKS: Final = 6
#: Multiple of every block_m, so that a shorter M ends in the same partial tile.
ROW_PERIOD: Final = 768
TILE: Final = 128
STRIP: Final = 8

FP8: Final = torch.float8_e4m3fn
#: A NaN with a payload that no conversion produces.
_SENTINEL: Final = {torch.bfloat16: 0x7FD5, torch.float16: 0x7ED5, torch.float32: 0x7FC05A5A}
#: Guards: columns before D keep it 16-byte aligned; what follows is as large as the largest tile.
_ROWS_BEFORE, _COLUMNS_BEFORE, _GUARD_AFTER = 8, 64, 256
#: Elements that temporaries may hold at a time, and bytes that a stored reference may take.
_CHUNK: Final = 1 << 26
_STORED_BYTES: Final = 4 << 30
#: Values of the 16-byte groups of a partial last K block: they sum to 8, each 32 bytes that one
#: WGMMA takes (two groups) to a quarter of that at least.
_PARTIAL: Final = {
    1: (8,),
    2: (4, 4),
    3: (2, 2, 4),
    4: (2, 2, 2, 2),
    5: (1, 1, 2, 2, 2),
    6: (1, 1, 1, 1, 2, 2),
    7: (1, 1, 1, 1, 1, 1, 2),
}


class GuardedOutput:
    """D between sentinels: rows and columns before and after it that no kernel may write."""

    def __init__(self, rows: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (_ROWS_BEFORE + rows + _GUARD_AFTER, _COLUMNS_BEFORE + n + _GUARD_AFTER)
        self._buffer = torch.empty(shape, dtype=dtype, device=device)
        self._bits = self._buffer.view(torch.int32 if dtype == torch.float32 else torch.int16)
        self._sentinel = _SENTINEL[dtype]
        self.rows, self.n = rows, n

    def poisoned(self, m: int) -> torch.Tensor:
        """D of m rows, a view with a pitch; everything in and around it is NaN."""
        self._bits.fill_(self._sentinel)
        return self._view(self._buffer, m)

    def _view(self, whole: torch.Tensor, m: int) -> torch.Tensor:
        return whole[_ROWS_BEFORE : _ROWS_BEFORE + m, _COLUMNS_BEFORE : _COLUMNS_BEFORE + self.n]

    def num_changed(self) -> torch.Tensor:
        """How many elements of the buffer are no longer the sentinel; int64 on the device."""
        rows, columns = self._bits.shape
        count = torch.zeros((), dtype=torch.int64, device=self._bits.device)
        for start, stop in _chunks(rows, columns):
            count += torch.count_nonzero(self._bits[start:stop] != self._sentinel)
        return count

    def describe_changed(self, m: int) -> str:
        """In words, where the written elements are not the m rows of D. Waits for the device."""
        changed = self._bits != self._sentinel
        inside = self._view(changed, m)
        missing = (~inside).sum(1)
        outside = changed.clone()
        self._view(outside, m).fill_(False)
        words = []
        if int(missing.sum()):
            row = int(missing.nonzero()[0])
            words.append(f"{int(missing.sum())} elements not written, the first in row {row}")
        if int(outside.sum()):
            row, column = (int(x) for x in outside.nonzero()[0])
            where = f"row {row - _ROWS_BEFORE}, column {column - _COLUMNS_BEFORE}"
            words.append(f"{int(outside.sum())} elements written outside D, the first at {where}")
        return " and ".join(words)


class Case:
    """Inputs and references of one problem, made once, used for every candidate.

    `a` [m+1, k], `sfa` of m+1 rows, contiguous along M with a pitch that is a multiple of 4, `b`
    and `sfb` on `device`; `bias` is one tensor [n], or none. `unit_scales` makes all scales one
    power of two, for peers that take one scale.
    """

    def __init__(
        self,
        problem: GemmProblem,
        device: torch.device | str = "cuda",
        seed: int = 0,
        unit_scales: bool = False,
    ) -> None:
        self.problem = problem
        self.device = torch.device(device)
        self.d_dtype = TORCH_D_DTYPES[problem.d_dtype]
        rows = problem.m + 1
        generator = torch.Generator(self.device).manual_seed(seed)
        self.a = random_operand(rows, problem.k, generator, _dtypes(problem)[0])
        self.b = random_operand(problem.n, problem.k, generator, _dtypes(problem)[1])
        spread = 0.0 if unit_scales else 1.0
        of_a, of_b = scale_shapes(problem.recipe, rows, problem.n, problem.k)
        self.sfa = column_major(random_scales(*of_a, spread, generator))
        self.sfb = _as_read(random_scales(*of_b, spread, generator), problem.recipe)
        self.bias: tuple[torch.Tensor, ...] = ()
        if problem.bias:  # of the size of the sums over K columns
            values = torch.randn(problem.n, generator=generator, device=self.device)
            self.bias = (values.mul_(problem.k**0.5).to(self.d_dtype),)
        self._norms: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._stored: torch.Tensor | None = None
        if rows * problem.n * 4 <= _STORED_BYTES:
            chunks = _chunks(rows, problem.n)
            self._stored = torch.cat([self._compute(start, stop) for start, stop in chunks])
            del self._b_full

    @cached_property
    def output(self) -> GuardedOutput:
        """A guarded D of m+1 rows."""
        return GuardedOutput(self.problem.m + 1, self.problem.n, self.d_dtype, self.device)

    @cached_property
    def short_output(self) -> GuardedOutput:
        """A guarded D for the exact passes of fewer rows."""
        return GuardedOutput(self.exact.rows(1), self.problem.n, self.d_dtype, self.device)

    @cached_property
    def exact(self) -> ExactCase:
        """The inputs of the exact check."""
        return ExactCase(self.problem, self.device)

    @cached_property
    def own_growth(self) -> GrowthCase | None:
        """Growth at the problem's own N and K, or None where it is too short or bound to grow."""
        p = self.problem
        if p.k <= GROWTH_BASE_K or p.fast_accum:
            return None
        return GrowthCase(p.with_m(min(p.m, 256)), self.device)

    def constants(self) -> Iterator[torch.Tensor]:
        """What every candidate is judged by, and none may write to."""
        yield from (self.a, self.sfa, self.b, self.sfb, *self.bias)
        if self._stored is not None:
            yield self._stored
        yield from self.exact.constants()
        if self.own_growth:
            yield from self.own_growth.constants()

    def inputs(self, m: int, row_major: bool = False) -> Inputs:
        """a, sfa, b, sfb with m rows; sfa row-major where asked."""
        sfa = _rows_of(self.sfa, m, self.problem.recipe, row_major)
        return self.a[:m], sfa, self.b, self.sfb

    def reference(self, start: int, stop: int) -> torch.Tensor:
        """Rows start to stop of D in FP32, from the dequantised operands, [rows, n]."""
        if self._stored is not None:
            return self._stored[start:stop]
        return self._compute(start, stop)

    @cached_property
    def _b_full(self) -> torch.Tensor:
        return dequantize_b(self.b, self.sfb, self.problem.recipe)

    def _compute(self, start: int, stop: int) -> torch.Tensor:
        recipe = self.problem.recipe
        sfa = self.sfa[start:stop] if recipe in ("block", "row", "vector") else self.sfa
        a = dequantize_a(self.a[start:stop], sfa, recipe)
        with full_fp32():
            product = a @ self._b_full.T
        for bias in self.bias:
            product += bias.float()
        return product

    def norms(self, m: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Squared norms of tiles [m tiles, n tiles] and strips [m tiles, n / 8] of m rows.

        A strip of few rows can happen to be small, while truncation inside a K block does not
        shrink with it: its norm counts as that of its tile's average strip at least.
        """
        if m not in self._norms:
            parts = [
                strip_sums(self.reference(start, stop).square())
                for start, stop in _chunks(m, self.problem.n)
            ]
            strips = torch.cat(parts)
            tiles = tile_sums(strips)
            ones = torch.ones_like(strips[:1])
            average = (tiles / tile_sums(ones)).repeat_interleave(TILE // STRIP, 1)
            self._norms[m] = tiles, torch.maximum(strips, average[:, : strips.shape[1]])
        return self._norms[m]

    def errors(self, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Relative errors of d's tiles [m tiles, n tiles] and strips [m tiles, n / 8].

        NaN where d is NaN. Stays on the device, does not wait.
        """
        m = d.shape[0]
        parts = [
            strip_sums(torch.sub(d[start:stop], self.reference(start, stop)).square_())
            for start, stop in _chunks(m, self.problem.n)
        ]
        strips = torch.cat(parts)
        tile_norms, strip_norms = self.norms(m)
        return (tile_sums(strips) / tile_norms).sqrt(), (strips / strip_norms).sqrt()


class ExactCase:
    """Inputs whose D is known in closed form: D[i, j] = 2^row(i) * 2^column(j) * (2^live - 1).

    A is zero but for the live K blocks of a pass, where its values sum to 128 a block, or to 64 in
    those of BF16, which are that many columns; B is one.
    With s = block % 6 the scales' exponents are row(i) + 2s + t and column(j) - s - t: their sum
    has the 6 bits of a pass, while either side's exponents are distinct in every 18 consecutive
    K blocks (more than any pipeline is deep). row(i) = i % 17 differs from that of every row a
    power of two or three of them away, column(j) = j / 128 % 13 from every near scale block.
    D's exponents, times a quarter for a missing k32 step, stay inside FP16's.

    Under the recipes "row", "tensor" and "none" A's values carry 2^s, which leaves their sums exact
    in the 13 fraction bits of the tensor cores; column(j) = j % 13 under "row", "vector" and
    "none", and under "tensor" row and column are 0. BF16 operands carry row and column themselves.
    A bias is zero but in the last launch, which has one of few bits that FP32 adds to D exactly.
    """

    #: FP16: 63 * 2^(16 + 12) * 2^-18 = 64512, and a quarter of the least bit is 2^-20.
    SHIFT: Final = 18
    ROW_CYCLE: Final = 17
    COLUMN_CYCLE: Final = 13

    def __init__(self, problem: GemmProblem, device: torch.device) -> None:
        self.problem = problem
        self.num_passes = ceil_div(problem.num_k_blocks, LIVE_BLOCKS)
        m, n, k, recipe = problem.m, problem.n, problem.k, problem.recipe
        of_a, of_b = _dtypes(problem)
        columns = _exact_columns(k, problem.k_block, carried=recipe not in BY_K_RECIPES)
        self._pattern = torch.tensor(columns, device=device).to(of_a)
        self._a = torch.empty(m, k, dtype=of_a, device=device)
        self.b = torch.ones(n, k, device=device).to(of_b)
        row = torch.arange(m, device=device) % self.ROW_CYCLE
        column = torch.arange(n, device=device)
        if recipe == "block":
            column = column // SCALE_BLOCK
        column %= self.COLUMN_CYCLE
        if recipe == "tensor":
            row, column = row * 0, column * 0
        self.sfa, self.sfb = self._scales(row, column)
        self._row = _power(row - self.SHIFT)
        self._column = _power(column)
        if recipe == "none":
            self.b.mul_(self._column[:, None] / problem.k_block)
        dtype = TORCH_D_DTYPES[problem.d_dtype]
        turn = torch.arange(n, device=device) % 3 + 1
        lively = (_power(column + 8 - self.SHIFT) * turn).to(dtype)
        self._biases = (torch.zeros_like(lively), lively) if problem.bias else ()

    def _scales(self, row: torch.Tensor, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales of A and B for exponents by row and by column of D."""
        row, column = row[:, None] - self.SHIFT, column[:, None] - 7
        if self.problem.recipe == "tensor":
            return _power(row[:1]), _power(column[:1])
        if self.problem.recipe == "row":
            return _power(row), _power(column)
        if self.problem.recipe == "none":
            none = torch.empty(0, 0, device=row.device)
            return none, none
        block = torch.arange(self.problem.num_k_blocks, device=row.device)
        slot, turn = block % LIVE_BLOCKS, block // LIVE_BLOCKS % 3 * (2 * LIVE_BLOCKS - 1)
        sfa = column_major(_power(row + 2 * slot + turn))
        if self.problem.recipe == "block":
            column = column[::SCALE_BLOCK]
        return sfa, _as_read(_power(column - slot - turn), self.problem.recipe)

    def constants(self) -> Iterator[torch.Tensor]:
        """What no launch may write to; A changes from pass to pass."""
        yield from (self.b, self.sfa, self.sfb, *self._biases)

    def rows(self, number: int) -> int:
        """Rows that pass `number` computes."""
        m = self.problem.m
        return m if number == 0 or m < 2 * ROW_PERIOD else ROW_PERIOD + m % ROW_PERIOD

    def inputs(self, number: int, last: bool = False) -> Inputs:
        """a, sfa, b, sfb of a pass, row-major in the last launch; the next reuses a's memory."""
        m = self.rows(number)
        start, stop = (LIVE_BLOCKS * self.problem.k_block * (number + i) for i in (0, 1))
        live = slice(start, min(stop, self.problem.k))
        a = bits_of(self._a)
        a.zero_()  # all of it: whatever an earlier candidate may have written there
        a[:, live] = bits_of(self._pattern)[live]
        if self.problem.recipe == "none":
            self._a[:, live] *= self._row[:, None].to(self._a.dtype)
        sfa = _rows_of(self.sfa, m, self.problem.recipe, last)
        return self._a[:m], sfa, self.b, self.sfb

    def bias(self, last: bool = False) -> tuple[torch.Tensor, ...]:
        """The bias of a launch, or none."""
        return self._biases[last : last + 1]

    def num_wrong(self, d: torch.Tensor, number: int, last: bool = False) -> torch.Tensor:
        """How many elements of d differ from the closed form; int64 on the device."""
        count = torch.zeros((), dtype=torch.int64, device=d.device)
        for start, stop in _chunks(*d.shape):
            expected = self.expected(number, start, stop, d, last)
            count += torch.count_nonzero(d[start:stop] != expected)
        return count

    def expected(
        self, number: int, start: int, stop: int, like: torch.Tensor, last: bool = False
    ) -> torch.Tensor:
        """Rows start to stop of D in a pass, in the dtype of `like`."""
        live = min(LIVE_BLOCKS, self.problem.num_k_blocks - LIVE_BLOCKS * number)
        rows = self._row[start:stop, None] * float(2**live - 1)
        exact = rows * self._column
        for bias in self.bias(last):
            exact += bias.float()
        return exact.to(like.dtype)

    def describe_wrong(self, d: torch.Tensor, number: int, last: bool = False) -> str:
        """The first wrong element of d in words. Waits for the device."""
        expected = self.expected(number, 0, d.shape[0], d, last)
        wrong = (d != expected).nonzero()
        if not len(wrong):
            return "a second launch was right: the kernel is not deterministic"
        row, column = (int(x) for x in wrong[0])
        got, want = float(d[row, column]), float(expected[row, column])
        return f"{len(wrong)} differ, the first at row {row}, column {column}: {got}, not {want}"


class GrowthCase:
    """All-positive data with equal scales, and references with 512 and with all columns live.

    A bias is zero.
    """

    def __init__(self, problem: GemmProblem, device: torch.device) -> None:
        m, n, self.k = problem.m, problem.n, problem.k
        generator = torch.Generator(device).manual_seed(self.k)
        of_a, of_b = _dtypes(problem)
        self._full = _positive(random_operand(m, self.k, generator, of_a))
        self._base = self._full.clone()
        bits_of(self._base)[:, GROWTH_BASE_K:] = 0
        self._b = _positive(random_operand(n, self.k, generator, of_b))
        # 2^-18 in all keeps sums of 65536 products of up to 448² inside FP16. BF16's data, of
        # deviation 1, needs no scale: 65536 products of 2 / pi on average are inside as well.
        self._scale = 1.0 if problem.recipe == "none" else 2.0**-18
        scales_of_a, scales_of_b = problem.scale_shapes
        self._sfa = column_major(torch.full(scales_of_a, 2.0**-7, device=device))
        self._sfb = _as_read(torch.full(scales_of_b, 2.0**-11, device=device), problem.recipe)
        self._references = [self._product(a) for a in (self._base, self._full)]
        dtype = TORCH_D_DTYPES[problem.d_dtype]
        self._bias = (torch.zeros(n, dtype=dtype, device=device),) if problem.bias else ()
        self._output = GuardedOutput(m, n, dtype, device)

    def constants(self) -> Iterator[torch.Tensor]:
        """Inputs and references."""
        yield from (self._base, self._full, self._b, self._sfa, self._sfb, *self._bias)
        yield from self._references

    def _product(self, a: torch.Tensor) -> torch.Tensor:
        step = max(1, _CHUNK // self.k)
        wide = a.float() * self._scale
        with full_fp32():
            parts = [wide @ part.float().T for part in torch.split(self._b, step)]
        return torch.cat(parts, 1)

    def errors(self, launch: Launch) -> torch.Tensor:
        """Relative errors of the whole D with 512 live columns and with all, on the device."""
        errors = []
        for a, reference in zip((self._base, self._full), self._references, strict=True):
            d = self._output.poisoned(a.shape[0])
            launch(a, self._sfa, self._b, self._sfb, d, *self._bias)
            errors.append(torch.sub(d, reference).norm() / reference.norm())
        return torch.stack(errors)


def random_operand(
    rows: int, columns: int, generator: torch.Generator, dtype: torch.dtype = FP8
) -> torch.Tensor:
    """Normal data [rows, columns]: BF16 of deviation 1, or FP8 as a quantiser leaves it, of
    deviation 128, at most 448."""
    out = torch.empty(rows, columns, dtype=dtype, device=generator.device)
    for start, stop in _chunks(rows, columns):
        part = torch.randn(stop - start, columns, generator=generator, device=generator.device)
        if dtype != torch.bfloat16:
            part.mul_(128.0).clamp_(-448.0, 448.0)
        out[start:stop] = part.to(dtype)
    return out


def _dtypes(problem: GemmProblem) -> tuple[torch.dtype, torch.dtype]:
    """Types of A and of B."""
    return TORCH_OPERAND_DTYPES[problem.a_dtype], TORCH_OPERAND_DTYPES[problem.b_dtype]


def _rows_of(sfa: torch.Tensor, m: int, recipe: str, row_major: bool) -> torch.Tensor:
    """Scales of m rows of A; in the other layout: row-major, or one of two columns side by side."""
    if recipe in ("tensor", "none"):
        return sfa
    if not row_major:
        return sfa[:m]
    return sfa[:m].contiguous() if recipe in BY_K_RECIPES else sfa[:m].repeat(1, 2)[:, :1]


def _as_read(sfb: torch.Tensor, recipe: str) -> torch.Tensor:
    """Scales of B in the layout that kernels read in place."""
    return column_major(sfb) if recipe == "vector" else sfb


def column_major(scales: torch.Tensor) -> torch.Tensor:
    """The same [rows, k blocks] with rows contiguous and their pitch a multiple of 4."""
    rows, kb = scales.shape
    out = torch.zeros(kb, round_up(rows, 4), dtype=scales.dtype, device=scales.device)
    out[:, :rows] = scales.T
    return out[:, :rows].T


def strip_sums(values: torch.Tensor) -> torch.Tensor:
    """Sums over 128 rows x 8 columns of [m, n]: [ceil(m / 128), n / 8]."""
    m, n = values.shape
    sums = values.view(m, n // STRIP, STRIP).sum(2)
    padded = torch.nn.functional.pad(sums, (0, 0, 0, round_up(m, TILE) - m))
    return padded.view(-1, TILE, n // STRIP).sum(1)


def tile_sums(strips: torch.Tensor) -> torch.Tensor:
    """Sums over 16 strips: [m tiles, n / 8] to [m tiles, ceil(n / 128)]."""
    per_tile = TILE // STRIP
    rows, columns = strips.shape
    padded = torch.nn.functional.pad(strips, (0, round_up(columns, per_tile) - columns))
    return padded.view(rows, -1, per_tile).sum(2)


def random_scales(
    rows: int, columns: int, spread: float, generator: torch.Generator
) -> torch.Tensor:
    """FP32 [rows, columns] around 1/128, from 1 - spread/2 to 1 + spread/2 times that."""
    values = torch.rand(rows, columns, generator=generator, device=generator.device)
    return values.sub_(0.5).mul_(spread).add_(1.0).div_(128.0)


def _positive(values: torch.Tensor) -> torch.Tensor:
    bits = bits_of(values)
    return (bits & torch.iinfo(torch.int8 if bits.itemsize == 1 else torch.int16).max).view(
        values.dtype
    )


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers: torch fills and copies no FP8 on some versions."""
    return values.view(torch.uint8 if values.itemsize == 1 else torch.int16)


def _power(exponents: torch.Tensor) -> torch.Tensor:
    """2 to these integers as FP32, made of bits: pow need not be exact on a GPU."""
    return ((exponents + 127) << 23).to(torch.int32).view(torch.float32)


def _chunks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of whole tiles' rows that hold at most _CHUNK elements."""
    step = max(TILE, _CHUNK // columns // TILE * TILE)
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def _exact_columns(k: int, block: int, carried: bool) -> list[float]:
    """One row of A whose K blocks, of `block` columns, each sum to `block`; `carried`: to
    block * 2^(number % 6)."""
    whole, rest = divmod(k, block)
    columns = [1.0] * (whole * block)
    group = block // 8
    for value in _PARTIAL.get(rest // group, ()):
        columns += [float(value)] * group
    if not carried:
        return columns
    return [v * 2.0 ** (i // block % LIVE_BLOCKS) for i, v in enumerate(columns)]
