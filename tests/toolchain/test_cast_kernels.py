"""The kernels beside the GEMM compile with every compiler: no spills, no local memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kgen.build import build_plain
from kgen.cache.artifacts import ArtifactStore
from kgen.compiler import Compiler, compile_source
from kgen.render import render_plain
from kgen.runtime import cast_launch, moe, routing, swiglu, turn
from kgen.runtime import casts as c
from kgen.runtime.cast_options import CastOptions
from kgen.runtime.plain import Spec
from tests.cast_checks import BF16, FP16, FP32, RECIPES

#: An odd size takes the code that reads element by element.
SIZES = ((128, 1024), (100, 1001))


class Asking:
    """In place of KERNELS: keeps what is asked for, and has nothing."""

    def __init__(self) -> None:
        self.specs: dict[Spec, None] = {}
        self.plans: dict[Any, Any] = {}

    def find(self, device: torch.device, *specs: Spec) -> None:
        self.specs |= dict.fromkeys(specs)

    def num_sms(self, device: torch.device) -> int:
        return 132


@pytest.fixture(scope="module")
def specs() -> list[Spec]:
    """Every kernel that calls of the public functions ask for, by type, recipe and direction."""
    asking: Any = Asking()
    with pytest.MonkeyPatch.context() as patch:
        for module in (cast_launch, moe, routing, swiglu, turn):
            patch.setattr(module, "KERNELS", asking)
        for dtype in (BF16, FP16, FP32):
            for m, k in SIZES:
                _ask(torch.zeros(m, k, dtype=dtype))
    return list(asking.specs)


def _ask(x: torch.Tensor) -> None:
    for recipe in RECIPES:
        for direction in ("normal", "transposed", "both"):
            plain = direction == "both" or x.dtype != BF16
            cast_launch.launch_cast(x, CastOptions(recipe, direction, not plain, not plain))
    rows = torch.zeros(4, dtype=torch.int32)
    h = x.shape[1] // 2
    values, scales = c.per_token_cast_to_fp8(x[:, :h])
    weights = torch.ones(x.shape[0])
    for pow2_scales in (False, True):
        moe.gather_per_token_cast_to_fp8(x, rows, pow2_scales=pow2_scales)
        for padded in (128, 130):  # whole vectors along the rows, and not
            moe.gather_per_token_cast_to_fp8(
                x, torch.zeros(padded).int(), transposed=True, pow2_scales=pow2_scales
            )
        cast_launch.launch_rows(x, values, scales, pow2_scales=pow2_scales, swiglu=True)
        cast_launch.launch_rows(
            x, values, scales, pow2_scales=pow2_scales, swiglu=True, row_weights=weights
        )
        for row_weights in (None, weights[None]):
            cast_launch.launch_rows(
                x[None],
                values[None],
                scales[None],
                pow2_scales=pow2_scales,
                swiglu=True,
                masked_m=rows,
                row_weights=row_weights,
            )
    for row_weights in (None, weights):
        c.swiglu_backward(x[:, : 2 * h], x[:, :h], row_weights)
    moe.gather_rows(x, rows)
    moe.gather_scaled_rows((values, scales), rows)
    moe.combine_rows(x, rows[None], torch.ones(1, 4))
    moe.combine_rows(x, rows[None], None, FP32)
    moe.route_tokens(rows[None], 8)
    moe.route_tokens(torch.zeros(5000, 2, dtype=torch.int64), 8)
    moe.pad_groups(rows, 4)
    c.transpose_block_cast(c.per_block_cast_to_fp8(x))
    c.transpose_block_cast(c.per_block_cast_to_fp8(x[:5]))


@pytest.mark.parametrize("part", ["bf16", "fp16", "fp32", ""])
def test_every_kernel(part: str, specs: list[Spec], nvrtc: Compiler) -> None:
    """No spill (a failed build), no stack, and registers for the launch."""
    assert len({spec.template for spec in specs}) == 9
    chosen = [spec for spec in specs if spec.variables.get("in_type", "") == part]
    assert len(chosen) > (10 if part else 5)
    for spec in chosen:
        source = render_plain(spec.template, spec.entry, spec.variables)
        made = compile_source(source.text, nvrtc, entry=spec.entry)
        assert made.spill_bytes == made.stack_bytes == 0, source.name
        assert made.registers * spec.threads <= 65536, source.name
        assert made.smem_static_bytes <= 48 << 10, source.name


def test_each_template_with_every_compiler(specs: list[Spec], compiler: Compiler) -> None:
    for spec in {spec.template: spec for spec in specs}.values():
        source = render_plain(spec.template, spec.entry, spec.variables)
        made = compile_source(source.text, compiler, entry=spec.entry)
        assert made.spill_bytes == made.stack_bytes == 0, source.name


def test_built_once(tmp_path: Path, specs: list[Spec], nvrtc: Compiler) -> None:
    """The store keeps them as it keeps GEMMs."""
    store = ArtifactStore(tmp_path)
    source = render_plain(specs[0].template, specs[0].entry, specs[0].variables)
    first, second = (build_plain(source, nvrtc, store) for _ in range(2))
    assert (first.from_cache, second.from_cache) == (False, True)
    assert first.data == second.data
    assert first.key == second.key
    assert first.registers == second.registers > 0
