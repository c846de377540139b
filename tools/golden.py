"""Rendered sources kept as files, so that a change of a template shows as a diff.

python tools/golden.py            compare, exit 1 on a difference
python tools/golden.py --accept   write what the templates give now
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from kgen.config import GemmConfig
from kgen.device import H200
from kgen.problem import BF16_FIELDS, GemmProblem
from kgen.render import render
from kgen.validity import why_invalid

FOLDER = Path(__file__).parent.parent / "tests" / "data" / "golden"

PROBLEM = GemmProblem("dense", 512, 2112, 7168)
FAST_ROW = replace(PROBLEM, recipe="row", fast_accum=True)
BF16 = replace(PROBLEM, **BF16_FIELDS)
_SPLIT = GemmConfig(block_m=16, block_n=64, num_stages=12, num_math_warpgroups=1, split_k=4)
#: One problem and configuration for each branch of the templates.
CASES: dict[str, tuple[GemmConfig, GemmProblem]] = {
    "default": (GemmConfig(), PROBLEM),
    "three_scales_multicast_b": (
        GemmConfig(block_n=152, cluster_m=2),
        replace(PROBLEM, d_dtype="fp16"),
    ),
    "two_accumulators_multicast_a": (GemmConfig(num_accumulators=2, cluster_n=2), PROBLEM),
    "two_waves_baked": (
        GemmConfig(block_m=256, num_stages=3, cluster_m=2, baked_dims="nk", raster_along="n"),
        PROBLEM,
    ),
    "split_k": (_SPLIT, PROBLEM),
    "fp32_three_warpgroups": (
        GemmConfig(block_m=192, num_stages=3, num_math_warpgroups=3),
        replace(PROBLEM, d_dtype="fp32"),
    ),
    "row_fast_two_waves": (GemmConfig(block_m=256, num_stages=3), FAST_ROW),
    "row_bias_split_k": (_SPLIT, replace(PROBLEM, recipe="row", bias=True)),
    "tensor_e5m2_two_accumulators": (
        GemmConfig(num_accumulators=2),
        replace(PROBLEM, recipe="tensor", a_dtype="e5m2", bias=True, d_dtype="fp16"),
    ),
    "tensor_fast": (GemmConfig(), replace(FAST_ROW, recipe="tensor")),
    "bf16_wide": (GemmConfig(block_n=256, num_stages=3, cluster_m=2), BF16),
    "bf16_bias_two_waves": (
        GemmConfig(block_m=256, num_stages=2, baked_dims="nk"),
        replace(BF16, bias=True, d_dtype="fp32"),
    ),
    "bf16_split_k": (_SPLIT, BF16),
    "bias_fp32": (GemmConfig(), replace(PROBLEM, bias=True, d_dtype="fp32")),
}


def _grouped(kind: str) -> GemmProblem:
    return GemmProblem(kind, 512, 2112, 7168, groups=8)


#: The same of grouped kinds.
GROUPED_CASES: dict[str, tuple[GemmConfig, GemmProblem]] = {
    "grouped_contiguous": (GemmConfig(block_n=152), _grouped("contiguous")),
    "grouped_masked": (
        GemmConfig(block_m=64, num_math_warpgroups=1, cluster_n=2),
        _grouped("masked"),
    ),
    "bf16_grouped_contiguous": (
        GemmConfig(block_n=208, cluster_n=2),
        replace(_grouped("contiguous"), **BF16_FIELDS),
    ),
    "bf16_grouped_masked": (
        GemmConfig(block_m=32, block_n=88, num_math_warpgroups=1),
        replace(_grouped("masked"), **BF16_FIELDS),
    ),
}
#: The same of weight gradients.
_GRADIENT = GemmProblem.of("wgrad", 7168, 2112, 4096)
_GROUPS = GemmProblem.of("k_grouped", 7168, 2112, 4096, groups=8)
WGRAD_CASES: dict[str, tuple[GemmConfig, GemmProblem]] = {
    "wgrad_direct": (
        GemmConfig(block_m=192, block_n=112, num_math_warpgroups=3, d_staging="direct"),
        _GRADIENT,
    ),
    "wgrad_two_waves_overwrite": (
        GemmConfig(block_m=256, block_n=96, num_stages=2),
        replace(_GRADIENT, accumulate=False),
    ),
    "wgrad_block_split_k": (_SPLIT, replace(_GRADIENT, recipe="block")),
    "k_grouped_multicast_a": (
        GemmConfig(block_n=96, cluster_n=2),
        _GROUPS,
    ),
    "k_grouped_direct_overwrite": (
        GemmConfig(cluster_m=2, d_staging="direct"),
        replace(_GROUPS, accumulate=False),
    ),
}


def golden_sources() -> dict[str, str]:
    """File name to rendered source, for each case."""
    sources = {}
    for name, (config, problem) in (CASES | GROUPED_CASES | WGRAD_CASES).items():
        assert why_invalid(problem, config, H200) is None, name
        sources[f"{name}.cu"] = render(problem, config).text
    return sources


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accept", action="store_true", help="write the files")
    accept = parser.parse_args().accept
    FOLDER.mkdir(parents=True, exist_ok=True)
    stale = []
    for name, text in golden_sources().items():
        path = FOLDER / name
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if accept:
                path.write_text(text)
    print(f"{'written' if accept else 'different'}: {', '.join(stale) or 'none'}")
    return 1 if stale and not accept else 0


if __name__ == "__main__":
    sys.exit(main())
