"""The GPU tests' own tools: configurations that cover, batches that notice. No GPU."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from kgen.cases import Case
from kgen.device import H200
from kgen.problem import GemmProblem
from kgen.space import AXES
from kgen.validity import why_invalid
from tests.gpu.bed import WIDE, Batch, covering, traits
from tests.unit.simulated import Simulated


def test_covering_configurations() -> None:
    """All valid, every value of the narrow axes, most pairs of traits, not too many."""
    configs = covering(H200)
    assert configs == covering(H200)
    assert len(configs) == len(set(configs)) < 150
    assert all(why_invalid(WIDE, config, H200) is None for config in configs)
    for name, values in AXES.items():
        if name not in ("block_n", "d_staging", "sass_pass"):
            assert {getattr(config, name) for config in configs} == set(values), name
    assert {config.d_staging for config in configs} == {"own"}
    gradient = covering(H200, GemmProblem.of("wgrad", 1040, 2112, 7168))
    assert {config.d_staging for config in gradient} == {"own", "direct"}
    pairs = {pair for config in configs for pair in combinations(traits(config).items(), 2)}
    for block_m, clusters in (((16, 1), 2), ((64, 2), 1), ((192, 3), 2), ((256, 2), 2)):
        assert (("block_m", block_m[0]), ("cluster_m", clusters)) in pairs
    assert len({traits(config)["block_n"] for config in configs}) >= 6


def test_batch_names_what_is_wrong() -> None:
    """Of three launches the one that left a row out, and the one that wrote too much."""
    case = Case(GemmProblem("dense", m=9, n=16, k=128), "cpu")
    batch = Batch(case)
    right = Simulated()

    def one_less(*tensors: torch.Tensor) -> None:
        a, sfa, b, sfb, d = tensors
        right(a[:-1], sfa[:-1], b, sfb, d[:-1])

    batch.run("right", right, 5)
    batch.run("one less", one_less, 5)
    batch.run("right again", right, 9, row_major=True)
    (failure,) = batch.failures()
    assert failure.startswith("one less: tile nan")
    assert failure.endswith("-16 elements written")


def test_empty_batch_shows_nothing() -> None:
    """A loop that never ran must not pass."""
    batch = Batch(Case(GemmProblem("dense", m=1, n=8, k=16), "cpu"))
    with pytest.raises(AssertionError, match="ran nothing"):
        batch.failures()
