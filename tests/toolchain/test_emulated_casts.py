"""The casting and gathering kernels, run on the CPU by an emulation, give the references' bits.

emulated/cuda_on_cpu.h takes the place of PTX; everything else is the source that NVRTC gets. The
GPU tests make the same comparisons on a GPU.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kgen.runtime import cast_launch, moe, routing, swiglu, turn
from kgen.runtime import casts as c
from kgen.runtime.cast_options import CastOptions
from kgen.runtime.plain import KERNELS
from tests.cast_checks import (
    BF16,
    E5M2,
    FP16,
    FP32,
    RECIPES,
    assert_same,
    awkward,
    bits,
    check_cast,
    check_guards,
    check_swiglu_gradients,
    random,
)
from tests.toolchain.emulated.run import COMPILER, EmulatedKernels

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> EmulatedKernels:
    return EmulatedKernels(tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def on(emulated: EmulatedKernels, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    def use(kernels: Any) -> None:
        for module in (cast_launch, moe, routing, swiglu, turn):
            monkeypatch.setattr(module, "KERNELS", kernels)

    return use


@pytest.fixture
def both(
    on: Callable[[Any], None], emulated: EmulatedKernels
) -> Callable[[Callable[[], Any]], tuple[Any, Any]]:
    """What a call gives by kernel and by reference."""

    def call(function: Callable[[], Any]) -> tuple[Any, Any]:
        on(emulated)
        by_kernel = function()
        on(KERNELS)
        return by_kernel, function()

    return call


def test_quotients_round_as_divisions_do(tmp_path: Path) -> None:
    """All pairs (shift 0) were tried once: none is wrong, a sixth with the product alone."""
    program = tmp_path / "quotient"
    options = ["-O2", "-ffp-contract=off", str(HERE / "quotient.c"), "-o", str(program), "-lm"]
    subprocess.run([COMPILER or "", "-x", "c++", *options], check=True)
    done = subprocess.run([program, "7"], check=True, capture_output=True, text=True)
    tried, wrong, one_product = map(int, done.stdout.split())
    assert tried > 6_000_000
    assert wrong == 0
    assert one_product > tried // 10


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("dtype", "shapes"),
    [(BF16, [(130, 272), (144, 1032), (1, 8)]), (FP16, [(33, 100)]), (FP32, [(48, 136)])],
)
def test_casts(
    recipe: str,
    dtype: torch.dtype,
    shapes: list[tuple[int, int]],
    on: Callable[[Any], None],
    emulated: EmulatedKernels,
) -> None:
    """In both directions at once, with amax, over awkward blocks and ordinary ones."""
    on(emulated)
    for m, k in shapes:
        for x in (random(m, k, dtype), awkward(m, k, dtype)):
            check_cast(x, CastOptions(recipe, "both", amax=True))


@pytest.mark.parametrize("recipe", ["token", "row"])
def test_casts_of_rows_alone(
    recipe: str, on: Callable[[Any], None], emulated: EmulatedKernels
) -> None:
    """The kernels for one direction, power-of-two scales, row-major ones, E5M2; long rows."""
    on(emulated)
    for m, k in ((37, 272), (3, 9000 if recipe == "row" else 520)):
        x = awkward(m, k, BF16)
        check_cast(x, CastOptions(recipe, "normal"))
        check_cast(x, CastOptions(recipe, "normal", True, True, True, E5M2))
    check_cast(awkward(33, 100, FP32), CastOptions(recipe, "normal", row_major_scales=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_is_written_beside_the_results(
    recipe: str, on: Callable[[Any], None], emulated: EmulatedKernels
) -> None:
    on(emulated)
    for m, k in ((130, 272), (1, 8)):
        check_guards(random(m, k, BF16), CastOptions(recipe, "both", amax=True))
    if recipe in ("token", "row"):
        check_guards(random(37, 272, BF16), CastOptions(recipe))


def test_strided_rows(on: Callable[[Any], None], emulated: EmulatedKernels) -> None:
    on(emulated)
    base = random(40, 600, BF16)
    for x in (base[:, 8:280], base[::2, 3:131], base[:5].t(), base[:1].expand(7, 600)):
        check_cast(x, CastOptions("token"))


def test_route(both: Callable[..., Any]) -> None:
    """One chunk and several; none, all and unknown experts; with alignment and without."""
    generator = torch.Generator().manual_seed(0)
    for tokens, top_k, experts, alignment in (
        (1, 1, 1, 1),
        (7, 2, 5, 1),
        (64, 8, 256, 128),
        (1500, 8, 33, 1),
        (1025, 4, 16, 128),
        (0, 8, 4, 4),
        (3, 8, 1024, 64),
    ):
        ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=generator)
        for choices in (ids, ids.int()):
            call = partial(moe.route_tokens, choices, experts, alignment=alignment)
            assert_same(*both(call))


@pytest.mark.parametrize(("dtype", "k"), [(BF16, 1032), (FP32, 72), (BF16, 13)])
def test_rows_gathered_and_combined(dtype: torch.dtype, k: int, both: Callable[..., Any]) -> None:
    generator = torch.Generator().manual_seed(k)
    x = random(9, k, dtype)
    rows = torch.randint(-1, 10, (37,), generator=generator, dtype=torch.int32)
    positions = torch.randint(-1, 10, (11, 10), generator=generator, dtype=torch.int32)
    weights = torch.randn(11, 10, generator=generator)
    fp8 = c.per_token_cast_to_fp8(x)
    assert_same(*both(lambda: [moe.gather_rows(x, rows)]))
    assert_same(*both(lambda: moe.gather_scaled_rows(fp8, rows)))
    assert_same(*both(lambda: moe.gather_per_token_cast_to_fp8(x, rows)))
    cast_transposed = partial(moe.gather_per_token_cast_to_fp8, x, transposed=True)
    for length in (37, 32, 1):  # rows of the result in whole vectors, and not
        assert_same(*both(partial(cast_transposed, rows[:length])))
    assert_same(*both(lambda: cast_transposed(rows, pow2_scales=True, row_major_scales=True)))
    assert_same(*both(lambda: [moe.combine_rows(x, positions, weights)]))
    assert_same(*both(lambda: [moe.combine_rows(x, positions, None, FP32)]))


@pytest.mark.parametrize(("groups", "m", "h"), [(3, 70, 256), (40, 33, 136)])
def test_masked_swiglu(groups: int, m: int, h: int, both: Callable[..., Any]) -> None:
    """Rows past a group's count keep what they held, values and scales."""
    x = random(groups * m, 2 * h, BF16).view(groups, m, 2 * h)
    counts = torch.arange(-1, groups - 1, dtype=torch.int32) * (m + 9) // groups

    def call() -> Any:
        values = torch.full((groups, m, h), 0x55, dtype=torch.uint8).view(torch.float8_e4m3fn)
        scales = torch.full((groups, m, -(-h // 128)), 7.0)
        return c.swiglu_per_token_cast_to_fp8(x, counts, out=(values, scales))

    (values, scales), (expected, expected_scales) = both(call)
    assert torch.allclose(scales, expected_scales, rtol=1e-6, atol=0)
    assert int((bits(values).int() - bits(expected).int()).abs().max()) <= 1
    for g, count in enumerate(counts.clamp(0, m).tolist()):
        assert bool((scales[g, count:] == 7).all())
        assert bool((bits(values)[g, count:] == 0x55).all())


@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu_with_weights_of_rows(weighted: bool, both: Callable[..., Any]) -> None:
    x = random(37, 2 * 272, BF16)
    weights = torch.rand(37) - 0.3 if weighted else None
    call = partial(c.swiglu_per_token_cast_to_fp8, x, row_weights=weights)
    (values, scales), (expected, expected_scales) = both(call)
    assert torch.allclose(scales, expected_scales, rtol=1e-6, atol=0)
    assert int((bits(values).int() - bits(expected).int()).abs().max()) <= 1
    grouped = x.view(1, 37, -1)
    of_groups = None if weights is None else weights[None]
    counts = torch.tensor([37], dtype=torch.int32)
    masked, _ = both(lambda: c.swiglu_per_token_cast_to_fp8(grouped, counts, row_weights=of_groups))
    assert_same([t[0] for t in masked], [values, scales], layout=False)


@pytest.mark.parametrize(("m", "h"), [(19, 264), (3, 13), (1, 2048), (9, 8)])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_swiglu_backward(m: int, h: int, dtype: torch.dtype, both: Callable[..., Any]) -> None:
    """Within the rounding of results; the sum for a weight within that of its terms."""
    x, grad = random(m, 2 * h, dtype) * 3, random(m, h, dtype, seed=1)
    for weights in (None, torch.rand(m) - 0.3):
        found, expected = both(partial(c.swiglu_backward, x, grad, weights))
        check_swiglu_gradients(found, expected, dtype)


@pytest.mark.parametrize(
    ("groups", "rows", "alignment"), [(1, 5, 128), (8, 808, 128), (40, 300, 16), (1024, 90, 4)]
)
def test_padded_groups(groups: int, rows: int, alignment: int, both: Callable[..., Any]) -> None:
    """Empty groups, rows in none, offsets that make no sense: the reference's bits."""
    generator = torch.Generator().manual_seed(groups)
    ends = torch.randint(0, rows + 1, (groups,), generator=generator).sort().values.int()
    names = torch.randperm(rows, generator=generator).int()
    good = torch.cat([torch.zeros(1, dtype=torch.int32), ends])
    for offsets in (good, good.flip(0), good * 0, good * 3 - 7):
        for source_rows in (None, names):
            call = partial(
                moe.pad_groups, offsets, rows, alignment=alignment, source_rows=source_rows
            )
            assert_same(*both(call))
    for num_rows in (0, 9000):
        assert_same(*both(partial(moe.pad_groups, good, num_rows, alignment=alignment)))


@pytest.mark.parametrize("shape", [(128, 256), (144, 1032), (130, 13), (1, 1), (3, 200, 136)])
def test_turned_weights(shape: tuple[int, ...], both: Callable[..., Any]) -> None:
    """Bytes and scales moved, by vectors and one by one, of one matrix and of groups."""
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    scales = torch.rand(blocks, generator=generator)
    pair = values.view(torch.float8_e4m3fn), scales
    found, expected = both(lambda: c.transpose_block_cast(pair))
    assert_same(found, expected)
    assert torch.equal(bits(found[0]), values.transpose(-1, -2))
    assert torch.equal(found[1], scales.transpose(-1, -2))
    part = pair[0][..., : shape[-1] // 2 + 1], scales[..., : -(-(shape[-1] // 2 + 1) // 128)]
    assert_same(*both(lambda: c.transpose_block_cast(part)))
