"""What tests of casts share, on a CPU, an emulated GPU and a real one: inputs and comparisons."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kgen.runtime.cast_options import CastOptions
from kgen.runtime.casts import run_cast

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = ("token", "block", "channel", "row", "tensor")
DIRECTIONS = ("normal", "transposed", "both")
#: One element, one vector, whole tiles, partial ones, no multiple of a vector, several of each.
SHAPES = ((1, 1), (1, 8), (128, 128), (130, 272), (64, 512), (33, 100), (144, 1032))
ODD_VALUES = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -(2.0**-149), 3e38)


def random(m: int, k: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """Normal values."""
    generator = torch.Generator().manual_seed(seed * 7919 + m * k)
    return torch.randn(m, k, generator=generator).to(dtype).to(device)


def awkward(m: int, k: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Rows of every magnitude; zeros of both signs, subnormals, inf and NaN; whole rows so."""
    generator = torch.Generator().manual_seed(m + k)
    powers = torch.randint(-140, 120, (m, 1), generator=generator).float()
    x = (torch.randn(m, k, generator=generator) * torch.exp2(powers)).to(dtype)
    flat = x.view(-1)
    for i, value in enumerate(ODD_VALUES):
        flat[(i * 977 + 5) % flat.numel()] = value
    for row, value in ((9, 0.0), (11, -0.0), (12, float("inf")), (13, float("nan")), (14, 1e-42)):
        if row < m:
            x[row] = value
    return x.to(device)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers: NaN equals NaN, and -0 is not 0."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(kinds[x.element_size()])


def assert_same(
    found: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None], what: object = ""
) -> None:
    """Same results asked for, same shapes and strides, same bits."""
    assert len(found) == len(expected)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert (one is None) == (other is None), (what, i)
        if one is None or other is None:
            continue
        assert one.shape == other.shape, (what, i)
        assert strides(one) == strides(other), (what, i)
        wrong = (bits(one) != bits(other)).nonzero()
        assert not wrong.numel(), f"{what}: result {i}, {len(wrong)} differ, first {wrong[0]}"


def strides(x: torch.Tensor) -> list[int]:
    """Those that count."""
    return [stride for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1]


def check_cast(x: torch.Tensor, options: CastOptions) -> None:
    """What answers on x's device gives the reference's bits, on a CPU: the reference of all."""
    expected = [None if t is None else t.to(x.device) for t in options.reference(x.cpu())]
    found = run_cast(x, options)
    for one, other in zip(found, expected, strict=True):
        if one is not None and other is not None and one.device.type == "cuda":
            assert strides(one) == strides(other)
    assert_same(found, expected, (options, tuple(x.shape), x.dtype))
