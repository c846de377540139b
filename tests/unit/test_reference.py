"""kgen.reference: the right product, in full FP32, whatever torch's switches say."""

from __future__ import annotations

import threading

import pytest
import torch

from kgen import reference
from kgen.quant import per_block_cast_to_fp8, per_token_cast_to_fp8
from kgen.reference import full_fp32, gemm_reference, gemm_reference_into

Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def operands(m: int, n: int, k: int) -> Four:
    generator = torch.Generator().manual_seed(m * n + k)
    a = torch.randn(m, k, generator=generator)
    b = torch.randn(n, k, generator=generator)
    return (*per_token_cast_to_fp8(a), *per_block_cast_to_fp8(b))


def by_hand(a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor) -> torch.Tensor:
    """The sum over K blocks of scale · scale · product, in FP64."""
    n = b.shape[0]
    d = torch.zeros(a.shape[0], n, dtype=torch.float64)
    rows = torch.arange(n) // 128
    for j in range(sfa.shape[1]):
        block = slice(j * 128, (j + 1) * 128)
        product = a[:, block].double() @ b[:, block].double().t()
        d += product * sfa[:, j, None].double() * sfb[rows, j].double()
    return d


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 8, 16), (130, 264, 272), (5, 128, 128), (64, 136, 1152)]
)
def test_the_product_is_right(m: int, n: int, k: int) -> None:
    x = operands(m, n, k)
    exact = by_hand(*x)
    d = gemm_reference(*x)
    assert d.dtype == torch.float32
    assert d.shape == (m, n)
    assert (d - exact).norm() <= 1e-6 * exact.norm()
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(gemm_reference(*x, out_dtype=dtype), d.to(dtype))


def test_closed_form_with_distinct_scales() -> None:
    m, n, k = 3, 264, 256
    ones = torch.ones(max(m, n), k).to(torch.float8_e4m3fn)
    sfa = 2.0 ** torch.arange(m * 2).view(m, 2)
    sfb = 2.0 ** -torch.arange(6.0).view(3, 2)
    d = gemm_reference(ones[:m], sfa, ones[:n], sfb)
    block = torch.arange(n) // 128
    assert torch.equal(d, 128 * (sfa @ sfb.t())[:, block])


def test_pieces_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = operands(70, 400, 272)
    whole = gemm_reference(*x)
    monkeypatch.setattr(reference, "_MAX_ELEMENTS", 272 * 32)
    assert torch.allclose(gemm_reference(*x), whole, rtol=1e-5, atol=1e-4)
    base = torch.full((70, 500), -1.0)
    gemm_reference_into(base[:, :400], *x)
    assert torch.allclose(base[:, :400], whole, rtol=1e-5, atol=1e-4)
    assert (base[:, 400:] == -1).all()


def test_strided_operands_and_scales() -> None:
    a, sfa, b, sfb = operands(20, 136, 256)
    wide = torch.zeros(20, 512).to(torch.float8_e4m3fn)
    wide[:, :256] = a
    d = gemm_reference(wide[:, :256], sfa.t().contiguous().t(), b, sfb.t().contiguous().t())
    assert torch.equal(d, gemm_reference(a, sfa, b, sfb))


def test_no_rows_no_columns() -> None:
    a, sfa, b, sfb = operands(4, 8, 16)
    assert gemm_reference(a[:0], sfa[:0], b, sfb).shape == (0, 8)
    assert gemm_reference(a, sfa, b[:0], sfb[:0]).shape == (4, 0)


def test_zero_scales_of_zero_blocks_and_nan_stay_in_their_row() -> None:
    a, sfa, b, sfb = operands(4, 8, 256)
    a[1, :128], sfa[1, 0] = 0, 0.0
    sfa[2, 1] = float("nan")
    d = gemm_reference(a, sfa, b, sfb)
    assert torch.isnan(d[2]).all()
    assert torch.isfinite(d[[0, 1, 3]]).all()


def settings() -> tuple[object, ...]:
    try:
        legacy: object = torch.get_float32_matmul_precision()
    except RuntimeError:
        legacy = "refused"
    cuda, cpu = reference._new_switches()
    return legacy, cuda.fp32_precision, cpu.fp32_precision


def test_the_users_precision_comes_back() -> None:
    before = settings()
    try:
        for legacy in ("medium", "high", "highest"):
            torch.set_float32_matmul_precision(legacy)
            chosen = settings()
            with full_fp32(), full_fp32():
                assert settings()[0] == "highest"
                assert settings()[1] in ("ieee", "none")
            assert settings() == chosen
    finally:
        torch.set_float32_matmul_precision("highest")
        reference._new_switches()[0].fp32_precision = before[1]
        reference._new_switches()[1].fp32_precision = before[2]


def test_the_new_switch_works_too() -> None:
    cuda, cpu = reference._new_switches()
    before = cuda.fp32_precision, cpu.fp32_precision
    try:
        cuda.fp32_precision, cpu.fp32_precision = "tf32", "bf16"
        with full_fp32():
            assert (cuda.fp32_precision, cpu.fp32_precision) == ("ieee", "ieee")
        assert (cuda.fp32_precision, cpu.fp32_precision) == ("tf32", "bf16")
    finally:
        cuda.fp32_precision, cpu.fp32_precision = before


def test_the_last_thread_out_restores() -> None:
    torch.set_float32_matmul_precision("high")
    chosen = settings()
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with full_fp32():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    try:
        thread.start()
        assert inside.wait(10)
        with full_fp32():
            pass
        assert settings()[0] == "highest"
        leave.set()
        thread.join()
        assert settings() == chosen
    finally:
        leave.set()
        thread.join()
        torch.set_float32_matmul_precision("highest")
