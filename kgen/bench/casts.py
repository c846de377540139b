"""How close do casts and gathers come to copying as many bytes? `run_casts_bench` -> `CastsReport`.

Takes sizes, gives plain values. Each call is compared with its reference before it is timed, under
the tuner's policy, alternating with a copy of the same number of bytes. Must not import search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import torch

import kgen.runtime.casts as c
from kgen import quant
from kgen.bench.gpu import hopper_device
from kgen.device import Device
from kgen.errors import LaunchError, WrongResult
from kgen.measure import Call, Policy, Timing, measure_many, policy_named
from kgen.nvml import driver_release
from kgen.problem import GemmProblem
from kgen.runtime import moe
from kgen.runtime.cast_options import CastOptions, CastResult
from kgen.runtime.plain import KERNELS
from kgen.verify import Verified

#: Rows and columns of x, from the issue's least size on.
DEFAULT_SIZES: Final = ((4096, 7168), (8192, 7168), (16384, 7168))
#: Share of copy speed that issue 4 asks of every cast.
TARGET: Final = 0.8
#: By name: recipe, direction, passes over x.
RECIPES: Final = {
    "token": ("token", "normal", 1),
    "token, transposed": ("token", "transposed", 1),
    "token, both": ("token", "both", 1),
    "block": ("block", "normal", 1),
    "block, transposed": ("block", "transposed", 1),
    "block, both": ("block", "both", 1),
    "channel": ("channel", "normal", 1),
    "channel, both": ("channel", "both", 1),
    "row": ("row", "normal", 1),
    "row, both": ("row", "both", 2),
    "tensor": ("tensor", "normal", 2),
    "tensor, both": ("tensor", "both", 2),
}
TOP_K: Final = 8
_EXPERTS: Final = 256
_GROUPS: Final = 16

Tensors = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Case:
    """One call: what it is compared with, and how many bytes it reads and writes.

    `exact`: bit by bit; else FP8 values may be one step apart, others close, for e^x is not rounded
    to nearest.
    """

    name: str
    call: Callable[[], Tensors]
    reference: Callable[[], Tensors]
    bytes: int
    exact: bool = True


@dataclass(frozen=True)
class Row:
    """Times of one call and of copying as many bytes."""

    name: str
    m: int
    k: int
    bytes: int
    timing: Timing
    copy: Timing

    @property
    def share(self) -> float:
        """Of copy speed."""
        return self.copy.median_us / self.timing.median_us

    def gbps(self, timing: Timing) -> float:
        """Bytes read and written, in GB/s."""
        return self.bytes / timing.median_us / 1e3


@dataclass(frozen=True)
class CastsReport:
    """Rows in the order they were timed, and where they come from."""

    provenance: dict[str, Any]
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with each row's share of copy speed."""
        rows = [{**asdict(row), "share": row.share} for row in self.rows]
        return {"provenance": self.provenance, "rows": rows}


def run_casts_bench(
    sizes: Sequence[tuple[int, int]] = DEFAULT_SIZES,
    policy: str = "cold",
    on_row: Callable[[Row], None] = lambda row: None,
) -> CastsReport:
    """Time every case on BF16 [M, K] of each size, on `cuda:0`.

    Raises GpuMissing without a Hopper GPU, LaunchError where a reference would answer,
    WrongResult for a result that differs from the reference.
    """
    device = hopper_device("casts are timed on")
    chosen = policy_named(policy)
    rows: list[Row] = []
    for m, k in sizes:
        for case in cases(m, k, "cuda"):
            timing, copy = time_case(case, chosen, device)
            rows.append(Row(case.name, m, k, case.bytes, timing, copy))
            on_row(rows[-1])
        torch.cuda.empty_cache()
    provenance = {
        "device": device.name,
        "driver": driver_release() or "unknown",
        "torch": torch.__version__,
        "policy": chosen.name,
    }
    return CastsReport(provenance, tuple(rows))


def time_case(case: Case, policy: Policy, device: Device) -> tuple[Timing, Timing]:
    """The checked call's time, and a copy's of as many bytes, alternating."""
    check(case)
    if KERNELS.failures:
        raise LaunchError(f"{case.name}: the reference answers: {KERNELS.failures[0]}")
    half = case.bytes // 2
    source = torch.empty(half, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    # The least problem there is: no time is judged by a GEMM's bytes.
    verified = Verified(GemmProblem("dense", 1, 8, 16), 0.0, 0.0)
    calls: dict[str, tuple[Verified, Call]] = {
        case.name: (verified, case.call),
        "copy": (verified, lambda: target.copy_(source)),
    }
    timings = measure_many(calls, policy, device)
    return timings[case.name], timings["copy"]


def check(case: Case) -> None:
    """Raise WrongResult unless the call gives what its reference gives."""
    for i, (found, expected) in enumerate(zip(case.call(), case.reference(), strict=True)):
        if found is None or expected is None:
            continue
        if case.exact:
            wrong = int((_bits(found) != _bits(expected)).sum())
        elif found.dtype == torch.float32:
            wrong = int((~torch.isclose(found, expected, rtol=1e-5, atol=0.0)).sum())
        elif found.dtype == torch.bfloat16:
            one, other = found.float(), expected.float()
            wrong = int((~torch.isclose(one, other, rtol=2.0**-7, atol=2.0**-10)).sum())
        else:
            steps = (_bits(found).int() - _bits(expected).int()).abs()
            wrong = int((steps > 1).sum())
        if wrong:
            raise WrongResult(
                f"{case.name}: {wrong} of {found.numel()} elements of result {i} differ"
            )


def cases(m: int, k: int, where: str) -> list[Case]:
    """Every case on one size; k is the model's hidden size, also that of the experts."""
    x = torch.randn(m, k, device=where, dtype=torch.bfloat16)
    found = []
    for name, (recipe, direction, passes) in RECIPES.items():
        options = CastOptions(recipe, direction)
        size = passes * _bytes([x]) + _bytes(options.allocate(x))
        found.append(
            Case(name, partial(_kernel_cast, x, options), partial(options.reference, x), size)
        )
    return found + _moe_cases(x)


def _kernel_cast(x: torch.Tensor, options: CastOptions) -> CastResult:
    return c.run_cast(x, options)


def _moe_cases(x: torch.Tensor) -> list[Case]:
    m, k = x.shape
    gate_up = torch.randn(m, 2 * k, device=x.device, dtype=torch.bfloat16)
    grouped = gate_up.view(_GROUPS, m // _GROUPS, 2 * k)
    counts = torch.randint(0, grouped.shape[1] + 1, (_GROUPS,), device=x.device, dtype=torch.int32)
    share = float(counts.sum()) / m
    values = torch.zeros(*grouped.shape[:2], k, device=x.device, dtype=torch.uint8)
    out = values.view(quant.E4M3), torch.zeros(*grouped.shape[:2], -(-k // 128), device=x.device)
    tokens = max(1, m // TOP_K)
    ids = torch.randint(0, _EXPERTS, (tokens, TOP_K), device=x.device)
    routing = moe.route_tokens(ids, _EXPERTS)
    few = x[:tokens]
    rows, places = routing.source_rows.long(), routing.positions.long()
    weights = torch.rand(tokens, TOP_K, device=x.device)
    fp8 = c.per_token_cast_to_fp8(few)
    gathered = CastOptions().allocate(few.new_empty(rows.shape[0], k))
    # Weights in the other direction after the cast, and what gradients of weights read.
    weight = c.per_block_cast_to_fp8(x)
    ends = torch.arange(_GROUPS + 1, device=x.device, dtype=torch.int32) * m // _GROUPS
    padded = moe.pad_groups((ends - ends % 3).clamp(max=m), m).source_rows
    transposed = CastOptions("token", "transposed")
    of_padded = _bytes([x]) + _bytes(transposed.allocate(x, padded.shape[0]))
    of_swiglu = _bytes([gate_up]) + _bytes(CastOptions().allocate(x))
    sources = _bytes([few])  # each row comes from memory once, then from L2
    return [
        Case(
            "block, turned after the cast",
            lambda: c.transpose_block_cast(weight),
            lambda: (weight[0].view(torch.uint8).t().view(quant.E4M3), weight[1].t()),
            2 * _bytes(weight),
        ),
        Case(
            f"token, transposed, {_GROUPS} padded groups",
            lambda: moe.gather_per_token_cast_to_fp8(x, padded, transposed=True),
            lambda: transposed.reference(_gathered(x, padded))[2:4],
            of_padded,
        ),
        Case(
            "swiglu backward",
            lambda: c.swiglu_backward(gate_up, x),
            lambda: _swiglu_gradients(gate_up, x),
            2 * _bytes([gate_up, x]),
            exact=False,
        ),
        Case(
            "swiglu + token",
            lambda: c.swiglu_per_token_cast_to_fp8(gate_up),
            lambda: quant.cast_to_fp8(quant.swiglu(gate_up), "token"),
            of_swiglu,
            exact=False,
        ),
        Case(
            f"swiglu + token, masked, {share:.0%} of rows",
            lambda: c.swiglu_per_token_cast_to_fp8(grouped, counts, out=out),
            lambda: _masked_reference(grouped, counts, out),
            int(of_swiglu * share),
            exact=False,
        ),
        Case(
            f"gather + token, top {TOP_K}",
            lambda: moe.gather_per_token_cast_to_fp8(few, routing.source_rows),
            lambda: quant.cast_to_fp8(few[rows], "token"),
            sources + _bytes(gathered),
        ),
        Case(
            f"gather of FP8, top {TOP_K}",
            lambda: moe.gather_scaled_rows(fp8, routing.source_rows),
            lambda: (fp8[0].view(torch.uint8)[rows].view(quant.E4M3), fp8[1][rows]),
            _bytes(fp8) + _bytes(gathered),
        ),
        Case(
            f"combine, top {TOP_K}",
            lambda: [moe.combine_rows(x, routing.positions, weights)],
            lambda: [_combined(x, places, weights)],
            _bytes([x, few, weights]),
        ),
    ]


def _gathered(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.where((rows >= 0)[:, None], x[rows.clamp(min=0).long()], 0.0)


def _swiglu_gradients(x: torch.Tensor, grad: torch.Tensor) -> Tensors:
    gate, up = x.float().chunk(2, dim=-1)
    sigmoid, given = torch.sigmoid(gate), grad.float()
    silu = gate * sigmoid
    of_gate = given * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([of_gate, given * silu], -1).to(x.dtype), (silu * up).to(x.dtype), None


def _combined(x: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    sums = torch.zeros(places.shape[0], x.shape[1], device=x.device)
    for j in range(places.shape[1]):
        sums = sums + x[places[:, j]].float() * weights[:, j, None]
    return sums.to(x.dtype)


def _masked_reference(
    x: torch.Tensor, counts: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor]
) -> Tensors:
    values, scales = out[0].view(torch.uint8).clone(), out[1].clone()
    for g, count in enumerate(counts.tolist()):
        q, s = quant.cast_to_fp8(quant.swiglu(x[g, :count]), "token")
        values[g, :count], scales[g, :count] = q.view(torch.uint8), s
    return values.view(quant.E4M3), scales


def _bytes(tensors: Tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers, NaN and all."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return x.contiguous().view(kinds[x.element_size()])
