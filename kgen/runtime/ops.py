"""kgen's operations as PyTorch operators, `torch.ops.kgen.*`, for torch.compile, export and fx.

    gemm_fp8_nt(a, a_scales, b, b_scales, Tensor(a!) out, *, bias, recipe, fast_accum) -> ()
    mm_fp8_nt(a, a_scales, b, b_scales, out_dtype, *, bias, recipe, fast_accum) -> Tensor
    per_token_cast_to_fp8(x, pow2_scales=False, row_major_scales=False) -> (Tensor, Tensor)
    per_block_cast_to_fp8(x, pow2_scales=False) -> (Tensor, Tensor)
    cast_to_fp8(x, recipe, direction, amax, pow2_scales, row_major_scales, dtype) -> Tensor[]
    get_col_major_tma_aligned_tensor(x) -> Tensor, always a copy

Shapes and types as in the functions of the same names in `kgen.runtime.gemm` and
`kgen.runtime.casts`; `cast_to_fp8` leaves out of its list what was not asked for. Takes the
functions that run a GEMM and a cast; gives the operators, with stand-in implementations in which
every size may be symbolic. Imports torch, quant, operands and cast_options; touches no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch.compiler import is_dynamo_compiling

from kgen import quant
from kgen.errors import UnsupportedInput
from kgen.reference import D_DTYPE_NAMES, FP8_DTYPES
from kgen.runtime.cast_options import CastOptions, CastResult
from kgen.runtime.operands import Inputs

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
#: gemm((a, a_scales), (b, b_scales), out, bias=, recipe=, fast_accum=)
Gemm = Callable[..., None]
Cast = Callable[[Tensor, CastOptions], CastResult]

#: How many TorchDispatchModes watch what is done with tensors, such as make_fx's on real ones: they
#: see operators, no launch of ours. 0.05 us.
dispatch_modes: Final[Callable[[], int]] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)

_OPERANDS: Final = "Tensor a, Tensor a_scales, Tensor b, Tensor b_scales"
_OPTIONS: Final = "*, Tensor? bias=None, str? recipe=None, bool fast_accum=False"
_SCHEMAS: Final = {
    "gemm_fp8_nt": f"({_OPERANDS}, Tensor(a!) out, {_OPTIONS}) -> ()",
    "mm_fp8_nt": f"({_OPERANDS}, ScalarType out_dtype, {_OPTIONS}) -> Tensor",
    "per_token_cast_to_fp8": (
        "(Tensor x, bool pow2_scales=False, bool row_major_scales=False) -> (Tensor, Tensor)"
    ),
    "per_block_cast_to_fp8": "(Tensor x, bool pow2_scales=False) -> (Tensor, Tensor)",
    "cast_to_fp8": (
        "(Tensor x, str recipe, str direction, bool amax, bool pow2_scales, "
        "bool row_major_scales, ScalarType dtype) -> Tensor[]"
    ),
    "get_col_major_tma_aligned_tensor": "(Tensor x) -> Tensor",
}
#: Keeps the registrations alive, also if this module is loaded again: they end with their Library.
_libraries: list[torch.library.Library] = globals().get("_libraries", [])


def register(gemm: Gemm) -> None:
    """Define the GEMM's operators, once a process; `gemm` is what runs one."""
    kernels: dict[str, Callable[..., Any]] = {
        "gemm_fp8_nt": lambda a, sfa, b, sfb, out, **options: gemm(
            (a, sfa), (b, sfb), out, **options
        ),
        "mm_fp8_nt": _allocating(gemm),
        "get_col_major_tma_aligned_tensor": quant.col_major_tma_aligned_copy,
    }
    define(_SCHEMAS, kernels, _FAKES)


def register_casts(cast: Cast) -> None:
    """Define the casts' operators, once a process; `cast(x, options)` runs one."""
    define(_SCHEMAS, {name: partial(made, cast) for name, made in _CASTS.items()}, _FAKES)


def define(
    schemas: Mapping[str, str],
    kernels: Mapping[str, Callable[..., Any]],
    fakes: Mapping[str, Callable[..., Any]],
) -> None:
    """Define the operators that `kernels` names, once a process, with schemas and stand-ins."""
    if hasattr(torch.ops.kgen, next(iter(kernels))):
        return
    library: Any = torch.library.Library("kgen", "FRAGMENT")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    for name, kernel in kernels.items():
        library.define(name + schemas[name])
        for key in ("CPU", "CUDA"):
            library.impl(name, kernel, key)
        library.impl(name, without_gradient(name), "Autograd")
        torch.library.register_fake(f"kgen::{name}", fakes[name], lib=library)


def call_gemm(x: Inputs) -> None:
    """The GEMM through its operator, for tensors that stand for others."""
    if not x.has_scales:
        torch.ops.kgen.bf16_gemm_nt(x.a, x.b, x.out, bias=x.bias)
        return
    options = {"bias": x.bias, "recipe": x.recipe, "fast_accum": x.fast_accum}
    torch.ops.kgen.gemm_fp8_nt(x.a, x.sfa, x.b, x.sfb, x.out, **options)


def call_cast(x: Tensor, options: CastOptions) -> CastResult:
    """The cast through its operator, for tensors that stand for others."""
    o = options
    given: list[Tensor | None] = list(
        torch.ops.kgen.cast_to_fp8(
            x, o.recipe, o.direction, o.amax, o.pow2_scales, o.row_major_scales, o.dtype
        )
    )
    there = (o.normal, o.normal, o.transposed, o.transposed, o.amax)
    return CastResult(*(given.pop(0) if asked else None for asked in there))


def stand_for_others(x: Inputs) -> bool:
    """Whether PyTorch must see the call: a tracer's tensors, or subclasses that wrap tensors."""
    return any(stands_for_another(tensor) for tensor in x.tensors())


def stands_for_another(x: Tensor) -> bool:
    """Whether PyTorch must see what is done with a tensor."""
    return type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def any_stands_for_another(*tensors: Tensor | None) -> bool:
    """Whether PyTorch must see what is done with one of the tensors, or with any at all."""
    if not is_dynamo_compiling() and dispatch_modes():
        return True
    return any(tensor is not None and stands_for_another(tensor) for tensor in tensors)


def is_traced(*tensors: Tensor | None) -> bool:
    """Whether a call with these tensors is to be an operator: a compiler or a tracer looks on."""
    return is_dynamo_compiling() or any_stands_for_another(*tensors)


def get_col_major_tma_aligned_tensor(x: Tensor) -> Tensor:
    """`kgen.quant.get_col_major_tma_aligned_tensor`, its operator where PyTorch traces.

    There the copy is always made: a compiler knows no addresses.
    """
    if torch.compiler.is_compiling() or (isinstance(x, Tensor) and stands_for_another(x)):
        copy: Tensor = torch.ops.kgen.get_col_major_tma_aligned_tensor(x)
        return copy
    return quant.get_col_major_tma_aligned_tensor(x)


def refuse_gradient(name: str, tensors: tuple[Any, ...]) -> None:
    """Raise UnsupportedInput where autograd would expect a gradient of an operation with none."""
    if not torch.is_grad_enabled():
        return
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise UnsupportedInput(
                f"{name} has no gradient, and a tensor given to it requires one: pass x.detach(), "
                "call it under torch.no_grad(), or inside a torch.autograd.Function with a "
                "backward of its own"
            )


def _allocating(gemm: Gemm) -> Callable[..., Tensor]:
    def mm_fp8_nt(
        a: Tensor,
        sfa: Tensor,
        b: Tensor,
        sfb: Tensor,
        out_dtype: torch.dtype,
        **options: Any,
    ) -> Tensor:
        out = a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)
        gemm((a, sfa), (b, sfb), out, **options)
        return out

    return mm_fp8_nt


def without_gradient(name: str) -> Callable[..., Any]:
    """The operator's kernel for autograd: refuses what requires a gradient, passes on the rest."""

    full_name, operator = f"kgen::{name}", getattr(torch.ops.kgen, name).default

    def below_autograd(*args: Any, **options: Any) -> Any:
        refuse_gradient(full_name, (*args, options.get("bias")))
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args, **options)

    return below_autograd


# ---------------------------------------------------------------------------- stand-ins


def _fake_gemm(a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, out: Tensor, **options: Any) -> None:
    _check_operands(a, sfa, b, sfb)
    check_bias(options.get("bias"), b, out.dtype)
    check(out.dim() == 2 and out.dtype in D_DTYPE_NAMES, "out", out, "BF16, FP16 or FP32 [M, N]")
    fits = out.shape[0] == a.shape[0] and out.shape[1] == b.shape[0]
    check(fits, "out", out, f"[{a.shape[0]}, {b.shape[0]}]")


def _fake_mm(
    a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, out_dtype: torch.dtype, **options: Any
) -> Tensor:
    _check_operands(a, sfa, b, sfb)
    check_bias(options.get("bias"), b, out_dtype)
    if out_dtype not in D_DTYPE_NAMES:
        raise UnsupportedInput(f"out_dtype={out_dtype}: expected bfloat16, float16 or float32")
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


def _per_token(cast: Cast, x: Tensor, pow2: bool = False, row_major: bool = False) -> Any:
    return cast(x, _options(x, CastOptions(pow2_scales=pow2, row_major_scales=row_major)))[:2]


def _per_block(cast: Cast, x: Tensor, pow2: bool = False) -> Any:
    return cast(x, _options(x, CastOptions("block", pow2_scales=pow2)))[:2]


def _any_cast(cast: Cast, x: Tensor, *choices: Any) -> list[Tensor]:
    result = cast(x, _options(x, CastOptions(*choices)))
    return [tensor for tensor in result if tensor is not None]


def _options(x: Tensor, options: CastOptions) -> CastOptions:
    options.check(x)
    return options


def _fake_cast(x: Tensor, options: CastOptions) -> CastResult:
    return options.allocate(x)


#: An operator's kernel, once it is given what casts.
_CASTS: Final[dict[str, Callable[..., Any]]] = {
    "cast_to_fp8": _any_cast,
    "per_token_cast_to_fp8": _per_token,
    "per_block_cast_to_fp8": _per_block,
}


def _check_operands(a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor) -> None:
    for name, tensor in (("a", a), ("b", b)):
        good = tensor.dim() == 2 and tensor.dtype in FP8_DTYPES
        check(good, name, tensor, "float8_e4m3fn or float8_e5m2 [rows, K]")
    check(b.shape[1] == a.shape[1], "b", b, f"[N, {a.shape[1]}], as a is {list(a.shape)}")
    for name, scales in (("a_scales", sfa), ("b_scales", sfb)):
        good = scales.dim() <= 2 and scales.dtype == torch.float32
        check(good, name, scales, "float32 with two dimensions at most")


def check_bias(bias: Tensor | None, b: Tensor, dtype: torch.dtype) -> None:
    """Raise UnsupportedInput unless a bias, if there is one, is [N] of this type, for b [N, K]."""
    if bias is not None:
        good = bias.dim() == 1 and bias.dtype == dtype and bias.shape[0] == b.shape[0]
        check(good, "bias", bias, f"{dtype}[{b.shape[0]}]")


def check(good: Any, name: str, tensor: Tensor, expected: str) -> None:
    """Raise UnsupportedInput, for a stand-in, unless `good`."""
    # What is compared may be symbolic: asking becomes a guard of the compiled code.
    if not good:
        raise UnsupportedInput(
            f"{name} is {tensor.dtype}{list(tensor.shape)}: expected {expected}".replace(
                "torch.", ""
            )
        )


_FAKES: Final[dict[str, Callable[..., Any]]] = {
    "gemm_fp8_nt": _fake_gemm,
    "mm_fp8_nt": _fake_mm,
    **{name: partial(made, _fake_cast) for name, made in _CASTS.items()},
    "get_col_major_tma_aligned_tensor": quant.empty_col_major,
}
