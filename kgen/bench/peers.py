"""Peers that are not torch's: our plain Triton kernel, and packages in folders.

Takes what `--against` asks for, gives providers, and the reason for each that can not be had.
A package is recognised by the call it offers. Must not import search.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Final

import torch

from kgen.bench.against import Against
from kgen.bench.package import import_as
from kgen.bench.providers import (
    Provider,
    Ready,
    TorchBlockwise,
    TorchMatmul,
    TorchRecipe,
    TorchTensorwise,
    refuse_other_recipes,
    refuse_without_scales,
)
from kgen.bench.summary import ROW_MAJOR
from kgen.cases import Case, Launch, column_major
from kgen.errors import KgenError
from kgen.verify import verify_peer

log = logging.getLogger(__name__)

#: How the packages known here call themselves, whatever their folder is named.
OWN_NAME: Final = "deep_gemm"


@dataclass(frozen=True)
class FunctionPeer:
    """Functions that write D in place, given contiguous operands and TMA-aligned scales.

    `function` is for scales by block, `bf16` for BF16 operands; a package may have either. They see
    A's scales with rows contiguous and their pitch the least multiple of 4, so that no library has
    to convert them inside its time; with `row_major` each call makes that layout first.
    """

    name: str
    function: Launch | None
    d_dtypes: frozenset[str] = frozenset({"bf16"})
    details: dict[str, Any] = field(default_factory=dict)
    reference_only: bool = False
    row_major: bool = False
    bf16: Launch | None = None

    def from_row_major(self) -> FunctionPeer:
        """The same, from row-major scales, under a name that says so."""
        return replace(self, name=self.name + ROW_MAJOR, row_major=True)

    def ready(self, case: Case) -> Ready:
        """As in Provider; whatever the function raises becomes a RuntimeError with its name."""
        problem = case.problem
        if problem.d_dtype not in self.d_dtypes:
            raise ValueError(f"no {problem.d_dtype} output; it has {', '.join(self.d_dtypes)}")
        if self.row_major:
            refuse_without_scales(case)
        is_bf16 = problem.recipe == "none"
        function = self.bf16 if is_bf16 else self.function
        if function is None:
            raise ValueError(
                "has a call for BF16 operands only" if self.bf16 else "no BF16 operands"
            )
        if not is_bf16:
            refuse_other_recipes(case, "block")
        if problem.bias or "e5m2" in (problem.a_dtype, problem.b_dtype):
            raise ValueError("takes E4M3 or BF16 operands and no bias")
        if problem.num_sms:
            raise ValueError("takes every SM: a budget of SMs is not passed on")

        def launch(*tensors: torch.Tensor) -> None:
            # The guarded D has a pitch of its own, which not every library takes.
            # New memory may hold another provider's right result.
            plain = torch.full_like(tensors[4], float("nan"), memory_format=torch.contiguous_format)
            self._bind(function, *tensors[:4], plain)()
            tensors[4].copy_(plain)

        try:
            verified = verify_peer(launch, case)
            d = torch.empty(problem.m, problem.n, dtype=case.d_dtype, device=case.device)
            call = self._bind(function, *case.inputs(problem.m), d)
            return Ready(verified, call, self.details)
        except (KgenError, RuntimeError):
            raise
        except Exception as error:
            raise RuntimeError(words(error)) from error

    def _bind(self, function: Launch, *tensors: torch.Tensor) -> Callable[[], None]:
        a, sfa, b, sfb, d = tensors
        aligned, given = column_major(sfa), sfa.contiguous()

        def call() -> None:
            if self.row_major:
                aligned.copy_(given)
            function(a, aligned, b, sfb, d)

        return call


def providers_against(
    asked: Sequence[Against],
    row_major: bool = False,
    recipes: Sequence[str] = ("block",),
) -> tuple[list[Provider], dict[str, str]]:
    """Providers for what can be had, and the reason for each peer that can not.

    Of torch's there are those for `recipes`. With `row_major` each that takes A's scales comes a
    second time, from row-major ones.
    """
    return made_for_each(asked, lambda one: _providers(one, row_major, recipes))


def made_for_each(
    asked: Sequence[Against], make: Callable[[Against], list[Provider]]
) -> tuple[list[Provider], dict[str, str]]:
    """What `make` gives for each peer, and the reason for each where it raises."""
    found: list[Provider] = []
    missing: dict[str, str] = {}
    for one in asked:
        try:
            found += make(one)
        # A package's own import may fail in any way, down to a loader's complaint.
        except (Exception, SystemExit) as error:
            missing[one.name] = str(error) if isinstance(error, KgenError) else words(error)
            log.debug("%s can not be had", one.name, exc_info=error)
    return found, missing


def _providers(asked: Against, row_major: bool, recipes: Sequence[str]) -> list[Provider]:
    if asked.name == "torch":
        found: list[Provider] = []
        if "block" in recipes:
            found += [TorchBlockwise(), *([TorchBlockwise(row_major=True)] if row_major else [])]
            found.append(TorchTensorwise())
        found += [TorchRecipe(recipe) for recipe in ("row", "tensor") if recipe in recipes]
        return found + [TorchMatmul()] * ("none" in recipes)
    if asked.folder is not None:
        peer = package_peer(asked.name, import_as(asked.folder, asked.alias, OWN_NAME))
    else:
        from kgen.bench.triton_gemm import gemm

        peer = FunctionPeer("triton", gemm)
    return [peer, peer.from_row_major()] if row_major else [peer]


def package_peer(name: str, module: ModuleType) -> FunctionPeer:
    """The peer that a package is, by the first call in CALLS that it has, and BF16_CALL.

    Raises LookupError that names what was looked for.
    """
    there = [call for call in (*CALLS, BF16_CALL) if callable(getattr(module, call, None))]
    if not there:
        names = ", ".join((*CALLS, BF16_CALL))
        raise LookupError(f"the package in {module.__file__} has none of {names}")
    forbid_overlap(module)
    details = {"call": there[0], "version": version_of(module)}
    function, bf16 = None, None
    if there[0] in CALLS:
        function = CALLS[there[0]](getattr(module, there[0]))
    if BF16_CALL in there:
        bf16 = _without_scales(getattr(module, BF16_CALL))
        details["call_bf16"] = BF16_CALL
    return FunctionPeer(name, function, details=details, bf16=bf16)


def forbid_overlap(module: ModuleType) -> None:
    """From now on no launch of the package's begins before the one before it has ended."""
    if callable(pdl := getattr(module, "set_pdl", None)):
        pdl(False)  # a launch must not begin inside the flush before it


def version_of(module: ModuleType) -> str:
    """What the package says of itself."""
    return str(getattr(module, "__version__", "unknown"))


def _scales_as_they_are(function: Callable[..., object]) -> Launch:
    """Told not to round the scales to powers of two, as it does by default on newer GPUs."""

    def launch(*tensors: torch.Tensor) -> None:
        a, sfa, b, sfb, d = tensors
        function((a, sfa), (b, sfb), d, disable_ue8m0_cast=True)

    return launch


def _pairs(function: Callable[..., object]) -> Launch:
    def launch(*tensors: torch.Tensor) -> None:
        a, sfa, b, sfb, d = tensors
        function((a, sfa), (b, sfb), d)

    return launch


def _without_scales(function: Callable[..., object]) -> Launch:
    def launch(*tensors: torch.Tensor) -> None:
        a, _, b, _, d = tensors
        function(a, b, d)

    return launch


#: The call for BF16 operands, which takes plain matrices.
BF16_CALL: Final = "bf16_gemm_nt"
#: By the name of the call, newest first: how it is made. Both take pairs of matrix and scales.
CALLS: Final[dict[str, Callable[[Callable[..., object]], Launch]]] = {
    "fp8_gemm_nt": _scales_as_they_are,
    "gemm_fp8_fp8_bf16_nt": _pairs,
}


def words(error: BaseException) -> str:
    """An error of somebody else's as one text, with its name."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
