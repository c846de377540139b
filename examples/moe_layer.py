"""A mixture-of-experts layer, forward and backward, on kgen's public calls, beside BF16 PyTorch.

Eight experts, each an MLP with SwiGLU, are given 64 to 144 rows. Both layers get the same BF16
weights and tokens; their results are compared with the same layer in FP32, then both are timed and
their memory is counted. `--device cpu` runs it anywhere, by kgen's references, at any size.

    python3 examples/moe_layer.py
    python3 examples/moe_layer.py --device cpu --counts 5,0,130,17 --hidden 256 --intermediate 128

`docs/moe.md` walks through `forward` and `backward`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

import kgen.runtime.casts as c
import kgen.runtime.gemm as g
from kgen.runtime import moe

COUNTS = (64, 128, 96, 112, 88, 144, 72, 104)
Pair = tuple[torch.Tensor, torch.Tensor]


# ------------------------------------------------------------------------ the layer, with kgen


@dataclass(frozen=True)
class Fp8Weights:
    """Experts' weights cast once a step, for the forward pass and, transposed, for gradients."""

    gate_up: Pair  # [experts, 2 · intermediate, hidden]
    down: Pair  # [experts, hidden, intermediate]
    gate_up_t: Pair
    down_t: Pair


def cast_weights(gate_up: torch.Tensor, down: torch.Tensor) -> Fp8Weights:
    """The second direction is the first one turned: the same numbers, rounded once."""
    first, second = c.per_block_cast_to_fp8(gate_up), c.per_block_cast_to_fp8(down)
    turned = c.transpose_block_cast(first), c.transpose_block_cast(second)
    return Fp8Weights(first, second, *turned)


@dataclass(frozen=True)
class Saved:
    """What the backward pass needs of the forward pass."""

    x: torch.Tensor
    weights: Fp8Weights
    routing: moe.Routing
    row_weights: torch.Tensor
    hidden: torch.Tensor


def forward(
    x: torch.Tensor, weights: Fp8Weights, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> tuple[torch.Tensor, Saved]:
    """x [tokens, hidden] and the router's choices to the layer's output. Nothing waits."""
    routing = moe.route_tokens(topk_ids, weights.down[0].shape[0])
    rows = routing.source_rows.numel()
    lhs = moe.gather_per_token_cast_to_fp8(x, routing.source_rows)
    hidden = x.new_empty(rows, weights.gate_up[0].shape[1])
    g.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(
        lhs, weights.gate_up, hidden, m_offsets=routing.m_offsets
    )
    # The router's weights go in before the down projection, where they cost nothing.
    row_weights = moe.weights_of_rows(topk_weights, routing.positions, rows)
    lhs = c.swiglu_per_token_cast_to_fp8(hidden, row_weights=row_weights)
    out = x.new_empty(rows, x.shape[1])
    g.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(lhs, weights.down, out, m_offsets=routing.m_offsets)
    y = moe.combine_rows(out, routing.positions)
    return y, Saved(x, weights, routing, row_weights, hidden)


def backward(saved: Saved, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of tokens and router's weights in BF16 and FP32, of experts' weights in FP32."""
    x, routing, weights = saved.x, saved.routing, saved.weights
    rows = routing.source_rows.numel()
    # Through the down projection, SwiGLU and the first projection, by weights transposed.
    grad = moe.gather_per_token_cast_to_fp8(dy, routing.source_rows)
    grad_hidden = x.new_empty(rows, weights.down[0].shape[2])
    g.m_grouped_dgrad_gemm_fp8_fp8_bf16_nt_contiguous(
        grad, weights.down_t, grad_hidden, m_offsets=routing.m_offsets
    )
    of_swiglu = c.swiglu_backward(saved.hidden, grad_hidden, saved.row_weights)
    grad = c.per_token_cast_to_fp8(of_swiglu.grad_x)
    grad_rows = x.new_empty(rows, x.shape[1])
    g.m_grouped_dgrad_gemm_fp8_fp8_bf16_nt_contiguous(
        grad, weights.gate_up_t, grad_rows, m_offsets=routing.m_offsets
    )
    grads = {"x": moe.combine_rows(grad_rows, routing.positions)}
    assert of_swiglu.grad_weights is not None
    of_choices = moe.gather_rows(of_swiglu.grad_weights[:, None], routing.positions.flatten())
    grads["topk_weights"] = of_choices.view(routing.positions.shape)
    # Weight gradients sum over rows, in blocks of 128 of one expert each.
    own = moe.pad_groups(routing.m_offsets, rows)
    tokens = moe.pad_groups(routing.m_offsets, rows, source_rows=routing.source_rows)
    grads["gate_up"] = weight_gradient(columns(of_swiglu.grad_x, own), columns(x, tokens), own.ks)
    grads["down"] = weight_gradient(columns(dy, tokens), columns(of_swiglu.hidden, own), own.ks)
    return grads


def columns(x: torch.Tensor, padded: moe.PaddedGroups) -> Pair:
    """The rows of x in their padded places, cast transposed."""
    return moe.gather_per_token_cast_to_fp8(x, padded.source_rows, transposed=True)


def weight_gradient(lhs: Pair, rhs: Pair, ks: torch.Tensor) -> torch.Tensor:
    """Σ over each expert's rows of lhs · rhsᵀ, FP32 [experts, M, N]. The call adds to `out`."""
    out = torch.zeros(
        ks.shape[0], lhs[0].shape[0], rhs[0].shape[0], dtype=torch.float32, device=ks.device
    )
    g.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(lhs, rhs, out, ks)
    return out


# --------------------------------------------------------------------- the layer, with PyTorch


def plain_layer(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    topk_weights: torch.Tensor,
    chosen: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """The same layer expert by expert; `chosen` has each one's tokens and places among choices.

    That the host knows them spares this layer the wait for the device that others would need.
    """
    y = torch.zeros_like(x)
    for expert, (tokens, places) in enumerate(chosen):
        gate, up = (x[tokens] @ gate_up[expert].t()).chunk(2, dim=-1)
        hidden = torch.nn.functional.silu(gate) * up
        scale = topk_weights.flatten()[places][:, None].to(x.dtype)
        y = y.index_add(0, tokens, (hidden @ down[expert].t()) * scale)
    return y


# ------------------------------------------------------------------------------ the comparison


@dataclass(frozen=True)
class Layer:
    """Tokens, parameters, choices and the gradient that comes from behind."""

    x: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    dy: torch.Tensor

    def chosen(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each expert's tokens and the places of their choices."""
        flat = self.topk_ids.flatten()
        places = [(flat == e).nonzero().flatten() for e in range(self.down.shape[0])]
        return [(place // self.topk_ids.shape[1], place) for place in places]


def make_layer(
    counts: Sequence[int], hidden: int, intermediate: int, top_k: int, device: torch.device
) -> Layer:
    """A layer whose experts are chosen as often as `counts` says, by any token once at most."""
    if sum(counts) % top_k or max(counts) * top_k > sum(counts):
        raise SystemExit(
            f"counts {list(counts)} with top_k={top_k}: expected a sum that top_k divides, and no "
            "expert chosen by more than every token"
        )
    generator = torch.Generator().manual_seed(0)
    tokens, experts = sum(counts) // top_k, len(counts)
    flat = torch.repeat_interleave(torch.arange(experts), torch.tensor(counts))
    ids = flat.view(top_k, tokens).t()[torch.randperm(tokens, generator=generator)]
    weights = torch.rand(tokens, top_k, generator=generator).softmax(dim=-1)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator) * scale
        return values.to(device, torch.bfloat16)

    return Layer(
        normal(tokens, hidden),
        normal(experts, 2 * intermediate, hidden, scale=hidden**-0.5),
        normal(experts, hidden, intermediate, scale=intermediate**-0.5),
        ids.contiguous().to(device),
        weights.to(device),
        normal(tokens, hidden),
    )


def with_kgen(layer: Layer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Results, and costs: milliseconds, bytes."""
    weights = cast_weights(layer.gate_up, layer.down)
    choices = layer.topk_ids, layer.topk_weights

    def step() -> dict[str, torch.Tensor]:
        y, saved = forward(layer.x, weights, *choices)
        return {"y": y, **backward(saved, layer.dy)}

    results, device = step(), layer.x.device
    costs: dict[str, Any] = {
        "weights_bytes": sum(
            t.numel() * t.element_size() for pair in vars(weights).values() for t in pair
        ),
        "step_bytes": peak_bytes(step, device),
        "casts_of_weights_ms": milliseconds(
            lambda: cast_weights(layer.gate_up, layer.down), device
        ),
        "forward_ms": milliseconds(lambda: forward(layer.x, weights, *choices), device),
    }
    _, saved = forward(layer.x, weights, *choices)
    costs["backward_ms"] = milliseconds(lambda: backward(saved, layer.dy), device)
    return results, costs


def with_pytorch(
    layer: Layer, dtype: torch.dtype, measured: bool = True
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The same of the plain layer in `dtype`; no costs unless `measured`."""
    x, gate_up, down = (
        t.to(dtype).detach().requires_grad_() for t in (layer.x, layer.gate_up, layer.down)
    )
    topk_weights = layer.topk_weights.clone().requires_grad_()
    inputs = {"x": x, "topk_weights": topk_weights, "gate_up": gate_up, "down": down}
    dy, chosen, device = layer.dy.to(dtype), layer.chosen(), layer.x.device

    def forward() -> torch.Tensor:
        return plain_layer(x, gate_up, down, topk_weights, chosen)

    def backward(y: torch.Tensor) -> dict[str, torch.Tensor]:
        grads = torch.autograd.grad(y, list(inputs.values()), dy, retain_graph=True)
        return dict(zip(inputs, grads, strict=True))

    def step() -> dict[str, torch.Tensor]:
        y = forward()
        return {"y": y.detach(), **backward(y)}

    results = step()
    if not measured:
        return results, {}
    costs: dict[str, Any] = {
        "weights_bytes": sum(t.numel() * t.element_size() for t in (gate_up, down)),
        "step_bytes": peak_bytes(step, device),
        "forward_ms": milliseconds(forward, device),
    }
    y = forward()
    costs["backward_ms"] = milliseconds(lambda: backward(y), device)
    return results, costs


def milliseconds(call: Callable[[], object], device: torch.device, times: int = 30) -> float:
    """The median of a call's time, host and device together, after a few that are not counted."""
    times = times if device.type == "cuda" else 3
    taken = []
    for i in range(times + 3):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i >= 3 or device.type != "cuda":
            taken.append(time.perf_counter() - start)
    return 1e3 * median(taken)


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Device memory that a call takes at most, beside what was there; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|, by the sum of squares."""
    off = torch.linalg.vector_norm(found.double() - expected.double())
    return float(off / torch.linalg.vector_norm(expected.double()))


def compare(
    counts: Sequence[int], hidden: int, intermediate: int, top_k: int, device: torch.device
) -> dict[str, Any]:
    """Errors against FP32 and costs of both layers, as plain values."""
    layer = make_layer(counts, hidden, intermediate, top_k, device)
    expected, _ = with_pytorch(layer, torch.float32, measured=False)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "counts": list(counts),
        "hidden": hidden,
        "intermediate": intermediate,
        "top_k": top_k,
    }
    for name in ("pytorch_bf16", "kgen_fp8"):
        is_plain = name == "pytorch_bf16"
        results, costs = with_pytorch(layer, torch.bfloat16) if is_plain else with_kgen(layer)
        errors = {key: relative_error(results[key], value) for key, value in expected.items()}
        report[name] = {**costs, "errors": errors}
    report["answered_by"] = g.last_path()
    return report


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    plain, ours = report["pytorch_bf16"], report["kgen_fp8"]
    rows: list[tuple[str, ...]] = [("", "PyTorch BF16", "kgen FP8")]
    for key, title, unit, digits in (
        ("forward_ms", "forward, ms", 1.0, 3),
        ("backward_ms", "backward, ms", 1.0, 3),
        ("casts_of_weights_ms", "casts of weights, ms", 1.0, 3),
        ("step_bytes", "memory of a step, MB", 1e6, 1),
        ("weights_bytes", "weights, MB", 1e6, 1),
    ):
        cells = [_number(side.get(key), unit, digits) for side in (plain, ours)]
        rows.append((title, *cells))
    for key in ours["errors"]:
        title = "error of y" if key == "y" else f"error of the gradient of {key}"
        rows.append((title, *(f"{side['errors'][key]:.4f}" for side in (plain, ours))))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        f"{len(report['counts'])} experts, rows {report['counts']}, hidden {report['hidden']}, "
        f"intermediate {report['intermediate']}, top {report['top_k']}, {report['device']}, "
        f"answered by {report['answered_by']}"
    ]
    for title, *cells in rows:
        right = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([title.ljust(widths[0]), *right]))
    return "\n".join(lines)


def _number(value: float | None, unit: float, digits: int) -> str:
    return "–" if value is None else f"{value / unit:.{digits}f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, compare, print; exit code 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--counts",
        type=lambda text: [int(part) for part in text.split(",")],
        default=COUNTS,
        help="rows of each expert, by commas (default: %(default)s)",
    )
    parser.add_argument("--hidden", type=int, default=2048, help="default: %(default)s")
    parser.add_argument("--intermediate", type=int, default=1408, help="default: %(default)s")
    parser.add_argument("--top-k", type=int, default=2, help="experts of a token: %(default)s")
    where = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=where, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="all of it, for programs")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    report = compare(args.counts, args.hidden, args.intermediate, args.top_k, device)
    print(json.dumps(report, indent=2) if args.json else table(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
