"""What tests of casts share, on a CPU, an emulated GPU and a real one: inputs and comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from kgen.runtime.cast_options import CastOptions, CastResult
from kgen.runtime.casts import SwigluGradients, run_cast

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
    found: Sequence[torch.Tensor | None],
    expected: Sequence[torch.Tensor | None],
    what: object = "",
    *,
    layout: bool = True,
) -> None:
    """Same results asked for, same shapes and (with `layout`) strides, same bits."""
    assert len(found) == len(expected)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert (one is None) == (other is None), (what, i)
        if one is None or other is None:
            continue
        assert one.shape == other.shape, (what, i)
        assert not layout or strides(one) == strides(other), (what, i)
        wrong = (bits(one) != bits(other)).nonzero()
        assert not wrong.numel(), f"{what}: result {i}, {len(wrong)} differ, first {wrong[0]}"


def strides(x: torch.Tensor) -> list[int]:
    """Those that count."""
    return [stride for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1]


def check_cast(x: torch.Tensor, options: CastOptions) -> None:
    """What answers on x's device gives the reference's bits, on a CPU: the reference of all."""
    found, expected = run_cast(x, options), options.reference(x.cpu())
    what = (options, tuple(x.shape), x.dtype)
    for one, other in zip(found, options.allocate(x.cpu()), strict=True):
        assert one is None or other is None or strides(one) == strides(other), what
    on_cpu = [None if one is None else one.cpu() for one in found]
    assert_same(on_cpu, expected, what, layout=False)


GUARD = 0x5A
_GUARD_BYTES = 512


class GuardedOptions(CastOptions):
    """Options whose results lie between bytes that nobody may write."""

    buffers: ClassVar[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def allocate(self, x: torch.Tensor, m: int | None = None) -> CastResult:
        """As CastOptions.allocate, with guards; `amax`, a scalar, excepted."""
        plain = super().allocate(x, m)
        return plain._replace(
            **{
                name: self._guard(tensor)
                for name, tensor in plain._asdict().items()
                if tensor is not None and tensor.dim()
            }
        )

    def _guard(self, like: torch.Tensor) -> torch.Tensor:
        buffer, view = guarded(like)
        self.buffers.append((buffer, view))
        return view


def guarded(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer of guard bytes, and in it a view of the shape, type and strides of `like`."""
    size = like.element_size()
    pairs = zip(like.shape, like.stride(), strict=True)
    span = size * (1 + sum(max(n - 1, 0) * step for n, step in pairs))
    size_of_all = span + 2 * _GUARD_BYTES
    buffer = torch.full((size_of_all,), GUARD, dtype=torch.uint8, device=like.device)
    offset = _GUARD_BYTES // size
    return buffer, buffer.view(like.dtype).as_strided(like.shape, like.stride(), offset)


def written_outside(buffer: torch.Tensor, view: torch.Tensor) -> int:
    """Bytes of a guarded buffer outside the view that changed; the view's values are lost."""
    size = view.element_size()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    whole = buffer.view(kind)
    filler = int.from_bytes(bytes([GUARD] * size), "little", signed=False)
    whole.as_strided(view.shape, view.stride(), _GUARD_BYTES // size).fill_(filler)
    return int((buffer != GUARD).sum())


def check_guards(x: torch.Tensor, options: CastOptions) -> None:
    """Nothing is written beside the results, nor between columns of aligned scales."""
    GuardedOptions.buffers.clear()
    run_cast(x, GuardedOptions(**vars(options)))
    assert GuardedOptions.buffers
    for buffer, view in GuardedOptions.buffers:
        assert written_outside(buffer, view) == 0, (options, tuple(x.shape), tuple(view.shape))
    GuardedOptions.buffers.clear()


def check_swiglu_gradients(
    found: SwigluGradients, expected: SwigluGradients, dtype: torch.dtype
) -> None:
    """A kernel's gradients and the reference's: neighbours once rounded, close in FP32."""
    step = {BF16: 2.0**-7, FP16: 2.0**-10, FP32: 2.0**-20}[dtype]
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert one.dtype == other.dtype == dtype
        # 1 + gate (1 - s) may cancel: what is lost there is in units of the terms, ones or so.
        scale = other.float().abs() + (1.0 if dtype == FP32 else 2.0**-8)
        off = (one.float() - other.float()).abs() / scale
        assert not off.numel() or float(off.max()) <= step, float(off.max())
    weights, expected_weights = found[2], expected[2]
    assert (weights is None) == (expected_weights is None)
    if weights is not None and expected_weights is not None:
        assert weights.dtype == FP32
        torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-4)
