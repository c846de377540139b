"""Verification passes a right kernel and catches each kind of wrong one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kgen.cases import (
    LIVE_BLOCKS,
    Case,
    ExactCase,
    GrowthCase,
    column_major,
    strip_sums,
    tile_sums,
)
from kgen.errors import WrongResult
from kgen.problem import GemmProblem
from kgen.verify import (
    MAX_ERROR,
    MAX_GROWTH,
    Seal,
    Verified,
    check_exact,
    check_growth,
    check_random,
    limit_for,
    verify,
    verify_peer,
)
from tests.unit.simulated import Simulated, beyond

CPU = torch.device("cpu")
#: 2 row tiles, 3 scale blocks of B with a short last one, 10 K blocks with a short last one.
PROBLEM = GemmProblem("dense", m=140, n=328, k=1200)
LAST_BLOCK = PROBLEM.num_k_blocks - 1


@pytest.fixture(scope="module")
def case() -> Case:
    return Case(PROBLEM, CPU)


def neighbours_row_scale(scales: torch.Tensor, block: int) -> torch.Tensor:
    return scales.roll(-1)


def one_rows_neighbour(scales: torch.Tensor, block: int) -> torch.Tensor:
    wrong = scales.clone()
    if len(wrong) > 78 and block == 4:
        wrong[77] = wrong[78]
    return wrong


def next_blocks_strip(scales: torch.Tensor, block: int) -> torch.Tensor:
    wrong = scales.clone()
    wrong[120:128] = wrong[128:136]
    return wrong


def next_blocks_strip_once(scales: torch.Tensor, block: int) -> torch.Tensor:
    return next_blocks_strip(scales, block) if block == 3 else scales


def all_but_last_row(d: torch.Tensor, result: torch.Tensor) -> None:
    d[:-1] = result[:-1]


def one_row_past(d: torch.Tensor, result: torch.Tensor) -> None:
    d.copy_(result)
    beyond(d, 1, 0)[-1] = 1.0


def eight_columns_past(d: torch.Tensor, result: torch.Tensor) -> None:
    d.copy_(result)
    beyond(d, 0, 8)[-1, -8:] = 0.0


def eight_columns_unwritten(d: torch.Tensor, result: torch.Tensor) -> None:
    d[:, :-8] = result[:, :-8]


def packed(d: torch.Tensor, result: torch.Tensor) -> None:
    """As if D's pitch were N."""
    torch.as_strided(d, d.shape, (d.shape[1], 1), d.storage_offset()).copy_(result)


#: Each fault, and what the message must name.
MUTATIONS: dict[str, tuple[Simulated, str]] = {
    "wrong B scale in one 8-column strip": (Simulated(scale_b=next_blocks_strip), "column 120"),
    "the same in one K block": (Simulated(scale_b=next_blocks_strip_once), "column 120"),
    "one missing k32 step": (Simulated(k32=lambda block, step: (block, step) == (5, 2)), "tiles"),
    "missing last k32 step": (
        Simulated(k32=lambda block, step: (block, step) == (LAST_BLOCK, 1)),
        "tiles",
    ),
    "promotion skipped once": (Simulated(promotes=lambda b: "drop" if b == 4 else "add"), "tiles"),
    "promotion late once": (Simulated(promotes=lambda b: "keep" if b == 4 else "add"), "tiles"),
    "last block not promoted": (
        Simulated(promotes=lambda b: "drop" if b == LAST_BLOCK else "add"),
        "tiles",
    ),
    "neighbour's row scale": (Simulated(scale_a=neighbours_row_scale), "tiles"),
    "neighbour's row scale in one row and block": (
        Simulated(scale_a=one_rows_neighbour),
        "3 of 6 tiles",
    ),
    "unwritten last row": (Simulated(store=all_but_last_row), "not written"),
    "unwritten last columns": (Simulated(store=eight_columns_unwritten), "not written"),
    "a write one row past the end": (
        Simulated(store=one_row_past),
        "outside D, the first at row 140, column 0",
    ),
    "a write 8 columns past the end": (
        Simulated(store=eight_columns_past),
        "outside D, the first at row 139, column 328",
    ),
    "D's pitch ignored": (Simulated(store=packed), "outside D"),
}


@pytest.mark.parametrize("d_dtype", ["bf16", "fp16", "fp32"])
def test_right_kernel_passes(d_dtype: str) -> None:
    """The unmutated kernel, in every output type; errors are those of rounding alone."""
    problem = GemmProblem("dense", m=40, n=136, k=656, d_dtype=d_dtype)
    kernel = Simulated()
    verified = verify(kernel, Case(problem, CPU))
    assert verified.problem == problem
    assert verified.exact_passes == 1
    bound = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 1e-5}[d_dtype]
    assert 0 < verified.max_tile_error <= bound
    assert 0 < verified.max_strip_error <= bound
    assert kernel.launches == 4 + 2 + 2


def test_right_kernel_passes_with_partial_everything(case: Case) -> None:
    """The problem that the mutations below run on."""
    verified = verify(Simulated(), case)
    assert verified.max_tile_error < MAX_ERROR / 2
    assert verified.exact_passes == 2
    assert 0.5 < verified.growth < MAX_GROWTH


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name: str, case: Case) -> None:
    """Each fault is called wrong, in words that name it."""
    kernel, words = MUTATIONS[name]
    with pytest.raises(WrongResult, match=words):
        verify(kernel, case)


def through_bf16(d: torch.Tensor, result: torch.Tensor) -> None:
    d.copy_(result.to(torch.bfloat16))


@pytest.mark.parametrize("d_dtype", ["fp16", "fp32"])
def test_a_finer_output_must_not_go_through_bf16(d_dtype: str) -> None:
    """The exact case can not see it, having no digits that BF16 lacks."""
    fine = Case(replace(PROBLEM, d_dtype=d_dtype), CPU)
    check_exact(Simulated(store=through_bf16), fine)
    with pytest.raises(WrongResult, match=r"strips off by more than 0\.0012"):
        verify(Simulated(store=through_bf16), fine)


@pytest.mark.parametrize("d_dtype", ["fp16", "fp32"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 1024), (3, 8, 128), (2, 64, 512)])
def test_a_finer_output_has_room_for_the_tensor_core(m: int, n: int, k: int, d_dtype: str) -> None:
    fine = Case(GemmProblem("dense", m, n, k, d_dtype=d_dtype), CPU)
    assert max(check_random(Simulated(cut=True), fine)) < limit_for(fine) / 2


@pytest.mark.parametrize("name", MUTATIONS)
def test_exact_case_alone_catches(name: str, case: Case) -> None:
    """Every fault shows in the exact case by itself, to the last bit."""
    with pytest.raises(WrongResult, match="exact case"):
        check_exact(MUTATIONS[name][0], case)


def test_exact_case_catches_each_k32_step_of_each_block(case: Case) -> None:
    """BF16 shows a missing step in the least of a pass's blocks as well as in the greatest."""
    for at in itertools.product(range(PROBLEM.num_k_blocks), range(4)):
        if 128 * at[0] + 32 * at[1] >= PROBLEM.k:
            continue
        with pytest.raises(WrongResult, match="exact case"):
            check_exact(Simulated(k32=missing(*at)), case)


def missing(block: int, step: int) -> Callable[[int, int], bool]:
    """Leaves out one k32 step."""
    return lambda b, s: (b, s) == (block, step)


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("side", ["scale_a", "scale_b"])
def test_exact_case_catches_another_k_blocks_scale(side: str, step: int, case: Case) -> None:
    """A stale scale, as from the stage one turn of the pipeline ago."""
    for block in (step, LAST_BLOCK):
        kernel = Stale(side, block, step)
        with pytest.raises(WrongResult, match="exact case"):
            check_exact(kernel, case)


class Stale(Simulated):
    """Takes the scale of A or B from `step` blocks before in one K block."""

    def __init__(self, side: str, block: int, step: int) -> None:
        super().__init__()
        self._side, self._block, self._step = side, block, step

    def _scaled(
        self, partial: torch.Tensor, sfa: torch.Tensor, sfb: torch.Tensor, block: int
    ) -> torch.Tensor:
        if block == self._block:
            wrong = (sfa if self._side == "scale_a" else sfb).clone()
            wrong[:, block] = wrong[:, block - self._step]
            sfa, sfb = (wrong, sfb) if self._side == "scale_a" else (sfa, wrong)
        return super()._scaled(partial, sfa, sfb, block)


@pytest.mark.parametrize("k", [16 * i for i in range(1, 10)] + [640, 784])
def test_exact_case_is_exact_in_the_tensor_core(k: int) -> None:
    """Truncation to 13 fraction bits and every length of the last block leave nothing to round."""
    problem = GemmProblem("dense", m=19, n=136, k=k)
    check_exact(Simulated(cut=True), Case(problem, CPU))


def test_exact_scales_differ_from_all_their_neighbours() -> None:
    """Rows, columns and K blocks: no near scale is equal, all are powers of two."""
    problem = GemmProblem("dense", m=600, n=2048, k=128 * 48)
    exact = ExactCase(problem, CPU)
    sfa, sfb = exact.sfa, exact.sfb
    for scales in (sfa, sfb):
        mantissas, _ = torch.frexp(scales)
        assert bool((mantissas == 0.5).all())
        for blocks in range(1, 18):  # deeper than MAX_STAGES
            assert bool((scales[:, blocks:] != scales[:, :-blocks]).all())
    for rows in (1, 2, 4, 8, 16, 24, 32, 64, 96, 128, 192, 256, 384, 512):
        assert bool((sfa[rows:] != sfa[:-rows]).all())
    for columns in (1, 2, 3, 4, 8):
        assert bool((sfb[columns:] != sfb[:-columns]).all())


def test_exact_passes_make_every_block_live_once() -> None:
    """And no more than 8 at a time, the rest of A zero."""
    problem = GemmProblem("dense", m=1, n=8, k=128 * 20 + 16)
    exact = ExactCase(problem, CPU)
    seen = torch.zeros(problem.num_k_blocks, dtype=torch.int64)
    for number in range(exact.num_passes):
        a = exact.inputs(number)[0].float()[0]
        padded = torch.nn.functional.pad(a, (0, -problem.k % 128)).view(-1, 128)
        live = padded.ne(0).any(1)
        assert 0 < int(live.sum()) <= LIVE_BLOCKS
        assert padded[live].sum(1).tolist() == [128.0] * int(live.sum())
        seen += live
    assert seen.tolist() == [1] * problem.num_k_blocks
    assert exact.inputs(0)[0].float().ne(0).all(1).item() is False


def test_exact_rows_end_in_the_same_partial_tile() -> None:
    """Later passes are shorter but leave the same remainder for every block_m."""
    for m in (1, 767, 1535, 1536, 1537, 4096, 4097, 65535):
        exact = ExactCase(GemmProblem("dense", m=m, n=8, k=128 * 7), CPU)
        assert exact.rows(0) == m
        assert exact.rows(1) <= max(m, 1535)
        for block_m in (16, 32, 64, 128, 192, 256):
            assert exact.rows(1) % block_m == m % block_m
            assert exact.rows(1) >= min(m, block_m)


def test_growth_catches_a_kernel_that_never_promotes() -> None:
    """Sums kept in the tensor core lose bits as K grows; equal scales hide it from the rest."""
    kernel = Simulated(cut=True, promotes=lambda b: "add" if b == 31 else "keep")
    growth = GrowthCase(GemmProblem("dense", 16, 16, 4096), CPU)
    base, full = growth.errors(kernel).tolist()
    assert full > MAX_GROWTH * base
    right = growth.errors(Simulated(cut=True)).tolist()
    assert right[1] <= MAX_GROWTH * right[0]
    assert right[0] < MAX_ERROR


def test_growth_verdict(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratio is judged, NaN included, and K <= 512 has none."""
    for errors, wrong in (
        ((2e-3, 2.9e-3), False),
        ((2e-3, 3.1e-3), True),
        ((2e-3, torch.nan), True),
    ):
        monkeypatch.setattr(GrowthCase, "errors", lambda self, launch, e=errors: torch.tensor(e))
        if wrong:
            with pytest.raises(WrongResult, match="grows from"):
                check_growth(Simulated(), case, any_nk=False)
        else:
            assert check_growth(Simulated(), case, any_nk=False) == pytest.approx(1.45)
    short = Case(GemmProblem("dense", m=1, n=8, k=512), CPU)
    assert check_growth(Simulated(), short, any_nk=False) == 0.0


def test_runs_at_all_rows_and_layouts(case: Case) -> None:
    """M, M-1 and M+1 with column-major scales, M with row-major ones."""
    seen = []

    def launch(a: torch.Tensor, sfa: torch.Tensor, *rest: torch.Tensor) -> None:
        seen.append((a.shape[0], sfa.stride(1) == 1))
        Simulated()(a, sfa, *rest)

    check_random(launch, case)
    assert sorted(seen) == [(139, False), (140, False), (140, True), (141, False)]


def test_fault_at_one_row_count_only(case: Case) -> None:
    """A kernel that is right at M and M+1, wrong at M-1."""

    def store(d: torch.Tensor, result: torch.Tensor) -> None:
        (all_but_last_row if d.shape[0] == 139 else torch.Tensor.copy_)(d, result)

    with pytest.raises(WrongResult, match="139 rows"):
        check_random(Simulated(store=store), case)


def test_single_row_has_no_row_below() -> None:
    """M=1: M-1 is no launch."""
    seen = set()

    def launch(a: torch.Tensor, *rest: torch.Tensor) -> None:
        seen.add(a.shape[0])
        Simulated()(a, *rest)

    verify(launch, Case(GemmProblem("dense", m=1, n=16, k=128), CPU))
    assert seen == {1, 2}


def test_large_references_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past a limit rows of the reference are made when needed, chunk by chunk, to the same end."""
    problem = GemmProblem("dense", m=300, n=40, k=272)
    stored = check_random(Simulated(), Case(problem, CPU))
    monkeypatch.setattr("kgen.cases._STORED_BYTES", 0)
    monkeypatch.setattr("kgen.cases._CHUNK", 128 * 40)
    case = Case(problem, CPU)
    assert check_random(Simulated(), case) == pytest.approx(stored, rel=1e-3)
    with pytest.raises(WrongResult):
        check_random(Simulated(store=all_but_last_row), case)


def test_a_broken_seal_is_seen_wherever_it_is(case: Case) -> None:
    constants = [*case.constants()]
    seal = Seal(constants)
    assert not seal.is_broken()
    verify(Simulated(), case)
    assert not seal.is_broken()
    for tensor in constants:
        bits = tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int32)
        bits[-1, -1] ^= 1
        assert seal.is_broken()
        bits[-1, -1] ^= 1
    assert not seal.is_broken()


def test_sums_of_strips_and_tiles() -> None:
    """Against plain loops, with short last tiles."""
    values = torch.rand(130, 264, dtype=torch.float64)
    strips = strip_sums(values)
    tiles = tile_sums(strips)
    assert strips.shape == (2, 33)
    assert tiles.shape == (2, 3)
    for i, j in itertools.product(range(2), range(33)):
        part = values[128 * i : 128 * (i + 1), 8 * j : 8 * (j + 1)]
        assert float(strips[i, j]) == pytest.approx(float(part.sum()))
    for i, j in itertools.product(range(2), range(3)):
        part = values[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
        assert float(tiles[i, j]) == pytest.approx(float(part.sum()))


def test_column_major_pitch() -> None:
    """Rows contiguous, pitch a multiple of 4, same values."""
    scales = torch.rand(5, 3)
    out = column_major(scales)
    assert out.stride() == (1, 8)
    assert torch.equal(out, scales)


def test_peers_are_checked_at_m_only() -> None:
    """With a limit of their own; unit scales leave operands alone."""
    problem = GemmProblem("dense", m=33, n=64, k=256)
    case = Case(problem, CPU, unit_scales=True)
    assert set(case.sfa.flatten().tolist() + case.sfb.flatten().tolist()) == {1 / 128}
    kernel = Simulated()
    assert isinstance(verify_peer(kernel, case), Verified)
    assert kernel.launches == 1
    noisy = Simulated(store=lambda d, result: (d.copy_(result * 1.01), None)[1])
    with pytest.raises(WrongResult, match=r"off by more than 0\.004"):
        verify_peer(noisy, case)
    assert verify_peer(noisy, case, limit=0.05).max_tile_error == pytest.approx(0.01, rel=0.1)


def test_neighbours_scale_is_far_above_the_limit(case: Case) -> None:
    """The margin of the random check: one strip with a neighbour's scale in every K block."""
    with pytest.raises(WrongResult) as wrong:
        check_random(Simulated(scale_b=next_blocks_strip), case)
    assert _worst(str(wrong.value), "strip") > 10 * MAX_ERROR


def _worst(message: str, what: str) -> float:
    part = next(words for words in message.split(";") if f"{what}s off" in words)
    return float(part.rsplit(" by ", 1)[1])
