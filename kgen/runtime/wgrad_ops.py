"""Weight gradients as PyTorch operators, for torch.compile, export and fx.

    wgrad_gemm_fp8_fp8_fp32_nt(a, a_scales, b, b_scales, Tensor(a!) out, bool accumulate) -> ()
    k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(a, a_scales, b, b_scales, Tensor(a!) out,
                                         SymInt[]? ks, Tensor? ks_on_device, bool accumulate) -> ()

Shapes and types as in the functions of the same names in `kgen.runtime.wgrad`; exactly one of `ks`
and `ks_on_device` is given. Takes the functions that run them. Imports torch and operands; touches
no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from kgen.errors import UnsupportedInput
from kgen.reference import FP8_DTYPES
from kgen.runtime.ops import without_gradient
from kgen.runtime.wgrad_operands import WgradInputs

Tensor = torch.Tensor

#: The public call, and the operator, of each kind.
NAMES: Final = {
    "wgrad": "wgrad_gemm_fp8_fp8_fp32_nt",
    "k_grouped": "k_grouped_wgrad_gemm_fp8_fp8_fp32_nt",
}
_OPERANDS: Final = "Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, Tensor(a!) out"
_SCHEMAS: Final = {
    "wgrad": f"({_OPERANDS}, bool accumulate) -> ()",
    "k_grouped": f"({_OPERANDS}, SymInt[]? ks, Tensor? ks_on_device, bool accumulate) -> ()",
}
#: Keeps the registrations alive, also if this module is loaded again: they end with their Library.
_libraries: list[torch.library.Library] = globals().get("_libraries", [])


def register(wgrad: Callable[..., None], k_grouped: Callable[..., None]) -> None:
    """Define the operators, once a process, by the functions that run them."""
    if hasattr(torch.ops.kgen, NAMES["wgrad"]):
        return
    library: Any = torch.library.Library("kgen", "FRAGMENT")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    kernels: dict[str, Callable[..., None]] = {
        "wgrad": lambda a, sfa, b, sfb, out, accumulate: wgrad(
            (a, sfa), (b, sfb), out, accumulate=accumulate
        ),
        "k_grouped": lambda a, sfa, b, sfb, out, ks, on_device, accumulate: k_grouped(
            (a, sfa), (b, sfb), out, on_device if ks is None else list(ks), accumulate=accumulate
        ),
    }
    fakes: dict[str, Callable[..., None]] = {"wgrad": _fake_wgrad, "k_grouped": _fake_k_grouped}
    for kind, name in NAMES.items():
        library.define(name + _SCHEMAS[kind])
        for key in ("CPU", "CUDA"):
            library.impl(name, kernels[kind], key)
        library.impl(name, without_gradient(name), "Autograd")
        torch.library.register_fake(f"kgen::{name}", fakes[kind], lib=library)


def call(x: WgradInputs) -> None:
    """The call through its operator, for tensors that stand for others."""
    operands = (x.a, x.sfa, x.b, x.sfb, x.out)
    if x.ks is None:
        torch.ops.kgen.wgrad_gemm_fp8_fp8_fp32_nt(*operands, x.accumulate)
        return
    ks = (None, x.ks) if isinstance(x.ks, torch.Tensor) else (list(x.ks), None)
    torch.ops.kgen.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(*operands, *ks, x.accumulate)


def _fake_wgrad(  # noqa: PLR0917, the operator's arguments
    a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, out: Tensor, accumulate: bool
) -> None:
    _check_types(a, sfa, b, sfb, out)
    _check(a.dim() == 2, "a", a, "[M, K]")
    _check(b.dim() == 2 and b.shape[1] == a.shape[1], "b", b, f"[N, {a.shape[1]}]")
    good = out.dim() == 2 and out.shape[0] == a.shape[0] and out.shape[1] == b.shape[0]
    _check(good, "out", out, f"[{a.shape[0]}, {b.shape[0]}]")


def _fake_k_grouped(  # noqa: PLR0917, the operator's arguments
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    out: Tensor,
    ks: Sequence[int] | None,
    ks_on_device: Tensor | None,
    accumulate: bool,
) -> None:
    _check_types(a, sfa, b, sfb, out)
    _check(a.dim() in (1, 2) and a.dim() == b.dim(), "a", a, "[M, K], or one dimension as b")
    _check(out.dim() == 3, "out", out, "[G, M, N]")
    if ks_on_device is not None:
        good = ks_on_device.dim() == 1 and ks_on_device.dtype == torch.int32
        _check(good, "ks", ks_on_device, "int32 [G]")


def _check_types(a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, out: Tensor) -> None:
    for name, tensor in (("a", a), ("b", b)):
        good = tensor.dtype in FP8_DTYPES
        _check(good, name, tensor, "float8_e4m3fn or float8_e5m2")
    for name, tensor in (("a_scales", sfa), ("b_scales", sfb)):
        good = tensor.dim() == 2 and tensor.dtype == torch.float32
        _check(good, name, tensor, "float32 with 2 dimensions")
    _check(out.dtype == torch.float32, "out", out, "float32")


def _check(good: Any, name: str, tensor: Tensor, expected: str) -> None:
    # What is compared may be symbolic: asking becomes a guard of the compiled code.
    if not good:
        given = f"{name} is {tensor.dtype}{list(tensor.shape)}: expected {expected}"
        raise UnsupportedInput(given.replace("torch.", ""))
