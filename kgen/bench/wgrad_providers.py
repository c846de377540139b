"""Who is timed on weight gradients: kgen's own path, torch's scaled product, packages.

Takes a case of `kgen.cases` (kind wgrad) or `kgen.wgrad_cases` (k_grouped), gives `Ready`. A
package is recognised by the calls it offers, those of both generations of DeepGEMM. Must not import
search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final

import torch

from kgen.bench.against import Against
from kgen.bench.package import import_as
from kgen.bench.peers import OWN_NAME, forbid_overlap, made_for_each, version_of, words
from kgen.bench.providers import Provider, Ready, kgen_ready
from kgen.bench.summary import KGEN
from kgen.cases import Case, column_major
from kgen.errors import KgenError, LaunchError, UsageError
from kgen.runtime.dispatch import Dispatcher
from kgen.runtime.wgrad_kernel import KGroupedKernel, WgradKernel
from kgen.verify import MAX_ERROR, Verified, verify_peer
from kgen.wgrad_cases import KGroupedCase, accumulating
from kgen.wgrad_verify import check_k_grouped, verify_k_grouped, verify_wgrad

WgradCase = Case | KGroupedCase


class WgradKgen:
    """What the runtime would launch for the problem: the database's winner or the default."""

    name = KGEN
    reference_only = False

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def ready(self, case: WgradCase) -> Ready:
        """Raises LaunchError where the runtime would fall back to the reference."""
        problem = case.problem
        plan = self._dispatcher.plan(problem)
        kernel, choice, num_sms = plan.kernel, plan.choice, problem.num_sms
        if choice is None or not isinstance(kernel, WgradKernel | KGroupedKernel):
            raise LaunchError(f"{problem}: the fallback would answer, because {plan.reason}")
        if isinstance(case, KGroupedCase):
            assert isinstance(kernel, KGroupedKernel), "the case's kind"
            verified = verify_k_grouped(
                lambda tensors, ks: kernel.run_k_grouped(tensors, ks, num_sms=num_sms),  # type: ignore[arg-type]
                case,
            )
            run = case.full
            tensors = (*run.inputs(), case.empty(run))
            prepared = kernel.prepare_k_grouped(tensors, run.ks, num_sms=num_sms)  # type: ignore[arg-type]
        else:

            def launch(*tensors: torch.Tensor) -> None:
                kernel(*tensors, num_sms=num_sms)

            verified = verify_wgrad(launch, case, any_nk=choice.config.baked_dims == "none")
            tensors = (*case.inputs(problem.m), _zeros(case))
            prepared = kernel.prepare(*tensors, num_sms=num_sms)
        return kgen_ready(verified, prepared, tensors, choice, self._dispatcher.ordinal)


class TorchVector:
    """torch._scaled_mm with scales of 1x128 on both sides, into new memory.

    It adds to nothing: less than an accumulating problem asks, so a mark and no peer.
    """

    name = "torch vector"
    reference_only = True

    def ready(self, case: WgradCase) -> Ready:
        """Raises RuntimeError for what torch refuses, ValueError for another kind or recipe."""
        problem = case.problem
        if isinstance(case, KGroupedCase) or problem.recipe != "vector":
            raise ValueError("takes one product, with scales by vector")
        reasons = []
        for dtype in (torch.float32, torch.bfloat16):
            try:
                return self._ready(case, dtype)
            except RuntimeError as error:
                reasons.append(str(error))
        raise RuntimeError(reasons[0])

    def _ready(self, case: Case, dtype: torch.dtype) -> Ready:
        def bound(
            a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor
        ) -> Callable[[], torch.Tensor]:
            # torch wants scales with the rows of their operand contiguous and no padding.
            scale_a, scale_b = sfa.t().contiguous().t(), sfb.t().contiguous()
            return lambda: torch._scaled_mm(
                a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype
            )

        def launch(*tensors: torch.Tensor) -> None:
            tensors[4].copy_(bound(*tensors[:4])())

        verified = verify_peer(launch, case, MAX_ERROR)
        details = {"call": "torch._scaled_mm", "d_dtype": str(dtype).removeprefix("torch.")}
        return Ready(verified, bound(*case.inputs(case.problem.m)), details)


@dataclass(frozen=True)
class WgradPeer:
    """A package with calls for weight gradients, by kind; see `wgrad_peer`.

    `functions`: of kind wgrad function(a, sfa, b, sfb, d); of k_grouped the same with flat a and b,
    scales [K/128, rows] and ks, as numbers and on the device, behind d. All add to d.
    """

    name: str
    functions: dict[str, Callable[..., object]]
    details: dict[str, Any] = field(default_factory=dict)
    reference_only: bool = False

    def ready(self, case: WgradCase) -> Ready:
        """As in Provider; whatever the function raises becomes a RuntimeError with its name."""
        problem = case.problem
        function = self.functions.get(problem.kind)
        if function is None:
            raise ValueError(f"the package has no call for kind {problem.kind}")
        if problem.recipe != "vector" or not problem.accumulate or problem.num_sms:
            raise ValueError("adds to D, with scales by vector, on every SM")
        if (problem.a_dtype, problem.b_dtype) != ("e4m3", "e4m3"):
            raise ValueError("takes E4M3 operands")
        try:
            if isinstance(case, KGroupedCase):
                return self._ready_of_groups(function, case)
            return self._ready_of_one(function, case)
        except (KgenError, RuntimeError):
            raise
        except Exception as error:
            raise RuntimeError(words(error)) from error

    def _ready_of_one(self, function: Callable[..., object], case: Case) -> Ready:
        def bound(*tensors: torch.Tensor) -> Callable[[], object]:
            a, sfa, b, sfb, d = tensors
            scales = column_major(sfa), column_major(sfb)
            return lambda: function(a, scales[0], b, scales[1], d)

        def launch(*tensors: torch.Tensor) -> None:
            plain = tensors[4].contiguous()  # not every library takes a pitch
            bound(*tensors[:4], plain)()
            tensors[4].copy_(plain)

        verified = verify_peer(accumulating(launch), case)
        return Ready(verified, bound(*case.inputs(case.problem.m), _zeros(case)), self.details)

    def _ready_of_groups(self, function: Callable[..., object], case: KGroupedCase) -> Ready:
        run = case.full
        a, sfa, b, sfb = run.inputs()
        flat = [_flat(x, run.ks) for x in (a, b)]
        scales = [x.t().contiguous() for x in (sfa, sfb)]
        ks, on_device, d = list(run.ks), run.ks_on_device(), case.empty(run)

        def call() -> object:
            return function(flat[0], scales[0], flat[1], scales[1], d, ks, on_device)

        def launch(tensors: tuple[torch.Tensor, ...], _: Any) -> None:
            d.copy_(tensors[4])
            call()
            tensors[4].copy_(d)

        found = check_k_grouped(launch, case, [(run, False)], limit=MAX_ERROR, on_host=(True,))
        d.zero_()
        return Ready(Verified(case.problem, *found), call, self.details)


def _flat(x: torch.Tensor, ks: Sequence[int]) -> torch.Tensor:
    """Each group's columns as a matrix of their own, one after another."""
    parts = torch.split(x.view(torch.uint8), list(ks), dim=1)
    return torch.cat([part.flatten() for part in parts]).view(x.dtype)


def _zeros(case: Case) -> torch.Tensor:
    """A D to time: added to again and again."""
    return torch.zeros(case.problem.m, case.problem.n, device=case.device)


def wgrad_against(asked: Sequence[Against]) -> tuple[list[Provider], dict[str, str]]:
    """Providers for what can be had, and the reason for each peer that can not."""

    def make(one: Against) -> list[Provider]:
        if one.name == "torch":
            return [TorchVector()]
        if one.folder is None:
            raise UsageError("has no kernel for weight gradients")
        return [wgrad_peer(one.name, import_as(one.folder, one.alias, OWN_NAME))]

    return made_for_each(asked, make)


def wgrad_peer(name: str, module: ModuleType) -> WgradPeer:
    """The peer that a package is, by the first call in CALLS that it has for each kind.

    Raises LookupError that names what was looked for.
    """
    found: dict[str, Callable[..., object]] = {}
    details: dict[str, Any] = {"version": version_of(module)}
    for kind, calls in CALLS.items():
        for call, adapt in calls.items():
            function = getattr(module, call, None)
            if callable(function):
                found[kind] = adapt(function)
                details[f"call_{kind}"] = call
                break
    if not found:
        names = ", ".join(call for calls in CALLS.values() for call in calls)
        raise LookupError(f"the package in {module.__file__} has none of {names}")
    forbid_overlap(module)
    return WgradPeer(name, found, details)


def _added_in_place(function: Callable[..., object]) -> Callable[..., object]:
    """D is told as the summand too; scales are taken as they are, not rounded."""

    def launch(*arguments: Any) -> object:
        a, sfa, b, sfb, d = arguments
        scales: dict[str, Any] = {"recipe": (1, 1, 128), "disable_ue8m0_cast": True}
        return function((a, sfa), (b, sfb), d, c=d, **scales)

    return launch


def _pairs(function: Callable[..., object]) -> Callable[..., object]:
    def launch(*arguments: Any) -> object:
        a, sfa, b, sfb, d = arguments
        return function((a, sfa), (b, sfb), d)

    return launch


def _groups_added_in_place(function: Callable[..., object]) -> Callable[..., object]:
    def launch(*arguments: Any) -> object:
        a, sfa, b, sfb, d, ks, on_device = arguments
        return function((a, sfa), (b, sfb), d, ks, on_device, c=d)

    return launch


def _groups(function: Callable[..., object]) -> Callable[..., object]:
    def launch(*arguments: Any) -> object:
        a, sfa, b, sfb, d, ks, _ = arguments
        return function((a, sfa), (b, sfb), d, ks)

    return launch


#: By kind and name of the call, newest first: how it is made.
CALLS: Final[dict[str, dict[str, Callable[..., Callable[..., object]]]]] = {
    "wgrad": {"fp8_gemm_nt": _added_in_place, "wgrad_gemm_fp8_fp8_fp32_nt": _pairs},
    "k_grouped": {
        "k_grouped_fp8_gemm_nt_contiguous": _groups_added_in_place,
        "k_grouped_wgrad_gemm_fp8_fp8_fp32_nt": _groups,
    },
}
