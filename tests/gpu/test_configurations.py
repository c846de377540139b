"""Every value of every axis and pairs of them, through kgen.verify and on a part of the grid."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kgen.cases import Case
from kgen.config import GemmConfig
from kgen.device import Device
from kgen.errors import KgenError, WrongResult
from kgen.problem import GemmProblem
from kgen.space import AXES
from kgen.validity import why_invalid
from kgen.verify import verify
from tests.gpu.bed import Batch, Kernels, case_of, covering, report

#: Two M tiles and a bit, partial last scale blocks, and room for any split of K.
VERIFIED = GemmProblem("dense", m=257, n=2112, k=1168)
ROWS = (1, 15, 64, 130, 1025)
#: (N, K) of kernels that take any: the least, three scale blocks touched, a long K.
SIZES = ((8, 16), (392, 144), (2112, 1152), (200, 7168))


@pytest.fixture(scope="module")
def configs(device: Device, kernels: Kernels) -> list[GemmConfig]:
    """The covering configurations, all being compiled."""
    chosen = [c for c in covering(device) if why_invalid(VERIFIED, c, device) is None]
    kernels.prefetch((VERIFIED, config) for config in chosen)
    return chosen


def test_every_value_is_covered(configs: list[GemmConfig], device: Device) -> None:
    """No value of an axis is left out, but what no dense kernel can have."""
    for name, values in AXES.items():
        if name == "sass_pass":
            continue
        seen = {getattr(config, name) for config in configs}
        left_out = [value for value in values if value not in seen]
        if name == "block_n":
            left_out = [width for width in left_out if _fits(width, device)]
        if name == "d_staging":
            left_out = [v for v in left_out if not why_invalid(VERIFIED, _stage(v), device)]
        assert not left_out, name


def _stage(d_staging: str) -> GemmConfig:
    return GemmConfig(d_staging=d_staging)


def _fits(block_n: int, device: Device) -> bool:
    tiles = [(m, w) for m in AXES["block_m"] for w in AXES["num_math_warpgroups"]]
    plain = GemmConfig(num_stages=2, block_n=block_n)
    return any(
        why_invalid(VERIFIED, replace(plain, block_m=m, num_math_warpgroups=w), device) is None
        for m, w in tiles
    )


def test_verified(configs: list[GemmConfig], kernels: Kernels) -> None:
    """Each is right at M, M-1 and M+1, exact in the exact case, and keeps its precision in K."""
    case = Case(VERIFIED)
    failures = []
    for config in configs:
        try:
            kernel = kernels.get(VERIFIED, config)
            verified = verify(kernel, case, any_nk=config.baked_dims == "none")
            assert verified.growth > 0
        except KgenError as error:
            failures.append(f"[{config}] {type(error).__name__}: {error}")
    assert not failures, report(failures)


def test_part_of_the_grid(configs: list[GemmConfig], kernels: Kernels) -> None:
    """Sizes far from the one they were chosen for, idle clusters included."""
    failures = []
    for config in configs:
        if config.baked_dims == "none":
            failures += _on_sizes(config, kernels)
    assert not failures, report(failures)


def _on_sizes(config: GemmConfig, kernels: Kernels) -> list[str]:
    failures = []
    for n, k in SIZES:
        if config.split_k > GemmProblem("dense", 1, n, k).num_k_blocks:
            continue
        kernel = kernels.get(VERIFIED, config)
        batch = Batch(case_of(n, k))
        for m in ROWS:
            batch.run(f"[{config}] m={m} n={n} k={k}", kernel, m)
        failures += batch.failures()
    return failures


def test_same_bits_every_time(configs: list[GemmConfig], kernels: Kernels) -> None:
    """Nothing depends on timing: a second launch gives the same bits."""
    case = case_of(2112, 1168)
    differing = []
    for config in configs:
        kernel = kernels.get(VERIFIED, config)
        first, second = (case.output.poisoned(257).clone() for _ in range(2))
        for d in (first, second):
            kernel(*case.inputs(257), d)
        if not bool((first == second).all()):
            differing.append(str(config))
    assert not differing, report(differing)


def test_check_sees_real_kernels_fail(configs: list[GemmConfig], kernels: Kernels) -> None:
    """Against the CPU's mutations: a real kernel fed another scale, a row less, is called wrong."""
    case = Case(VERIFIED)
    kernel = kernels.get(VERIFIED, configs[0])

    def wrong_scale(*tensors: torch.Tensor) -> None:
        a, sfa, b, sfb, d = tensors
        kernel(a, sfa, b, sfb.roll(1, 0).contiguous(), d)

    def one_row_less(*tensors: torch.Tensor) -> None:
        a, sfa, b, sfb, d = tensors
        kernel(a[:-1], sfa[:-1], b, sfb, d[:-1])

    with pytest.raises(WrongResult, match="tiles off"):
        verify(wrong_scale, case)
    with pytest.raises(WrongResult, match="not written"):
        verify(one_row_less, case)
