"""Who is timed on grouped problems: kgen's own path, loops over torch's dense call, packages.

Takes a grouped case, gives `Ready`. A package is recognised by the calls it offers, those of both
generations of DeepGEMM. Must not import search.
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
from kgen.errors import KgenError, LaunchError, UsageError
from kgen.grouped_cases import GroupedCase, GroupedRun
from kgen.grouped_verify import check_runs, verify_grouped
from kgen.problem import round_up
from kgen.runtime.dispatch import Dispatcher
from kgen.runtime.grouped_kernel import GroupedKernel
from kgen.verify import Verified

Tensors = tuple[torch.Tensor, ...]
#: DeepGEMM stores whole tiles, of up to so many rows, over whatever stands behind a masked group's
#: rows: its callers leave room for them, and so does the bench.
PEER_ROWS: Final = 128
#: Computes D: function(a, sfa, b, sfb, d, layout, expected rows of a group).
Function = Callable[..., object]


class GroupedKgen:
    """What the runtime would launch for the problem: the database's winner or the default."""

    def __init__(self, dispatcher: Dispatcher, by_offset: bool = False) -> None:
        """`by_offset`: contiguous groups are told by m_offsets, not by m_indices; a time beside."""
        self._dispatcher, self._by_offset = dispatcher, by_offset
        self.name = KGEN + " m_offsets" * by_offset
        self.reference_only = by_offset

    def ready(self, case: GroupedCase) -> Ready:
        """Raises LaunchError where the runtime would fall back to the reference."""
        problem, run = case.problem, case.by_offset if self._by_offset else case.full
        if self._by_offset and problem.kind == "masked":
            raise ValueError("kind masked has no offsets")
        plan = self._dispatcher.plan(problem)
        if not isinstance(plan.kernel, GroupedKernel) or plan.choice is None:
            raise LaunchError(f"{problem}: the fallback would answer, because {plan.reason}")
        kernel, choice = plan.kernel, plan.choice

        def launch(tensors: Any, by_index: bool) -> None:
            kernel.run_grouped(tensors, by_index=by_index, num_sms=problem.num_sms)

        verified = verify_grouped(launch, case)
        by_index = run.grouping.by_index
        tensors = (*case.inputs(run), case.empty(run), run.grouping.layout)
        prepared = kernel.prepare_grouped(
            tensors,  # type: ignore[arg-type]  # six of them
            by_index=by_index,
            num_sms=problem.num_sms,
        )
        ready = kgen_ready(verified, prepared, tensors, choice, self._dispatcher.ordinal)
        ready.details["layout"] = run.grouping.name.rpartition(" ")[2]
        return ready


class TorchLoop:
    """torch._scaled_mm once for each group, whose sizes the host knows: no grouped call of torch's
    takes these scales."""

    name = "torch loop"
    reference_only = False

    def ready(self, case: GroupedCase) -> Ready:
        """Raises RuntimeError for what cuBLASLt refuses, ValueError for BF16 operands."""
        if case.problem.recipe == "none":
            raise ValueError("is for operands with scales")
        run, groups = case.full, case.problem.groups
        a, sfa, b, sfb = case.inputs(run)
        m = case.problem.m
        own = [
            (
                a.reshape(groups, m, -1)[i],
                sfa.reshape(groups, m, -1)[i].t().contiguous().t(),
                b[i].t(),
                sfb[i].t(),
            )
            for i in range(groups)
        ]

        def call() -> list[torch.Tensor]:
            return [
                torch._scaled_mm(x, y, scale_a=sx, scale_b=sy, out_dtype=case.d_dtype)
                for x, sx, y, sy in own
            ]

        def launch(tensors: Any, by_index: bool) -> None:
            tensors[4].copy_(torch.stack(call()).view(tensors[4].shape))

        details = {"call": f"{groups} x torch._scaled_mm"}
        return Ready(_verified(launch, case, run), call, details)


class TorchGroupedMm:
    """torch._grouped_mm on BF16 operands, the groups' ends told on the device."""

    name = "torch grouped_mm"
    reference_only = False

    def ready(self, case: GroupedCase) -> Ready:
        """Raises RuntimeError for what torch refuses or lacks, ValueError for another problem."""
        if case.problem.recipe != "none" or case.problem.kind != "contiguous":
            raise ValueError("is for contiguous groups of BF16 operands")
        function = getattr(torch, "_grouped_mm", None)
        if function is None:
            raise RuntimeError(f"torch {torch.__version__} has no _grouped_mm")
        a, b, ends = case.full.a, case.b.transpose(1, 2), case.by_offset.grouping.layout[1:]
        return _torch_ready(case, lambda: function(a, b, offs=ends), "torch._grouped_mm")


class TorchBmm:
    """torch.bmm on BF16 operands: every row of every group, whatever the counts."""

    name = "torch bmm"
    reference_only = False

    def ready(self, case: GroupedCase) -> Ready:
        """Raises RuntimeError for what torch refuses, ValueError for another problem."""
        if case.problem.recipe != "none" or case.problem.kind != "masked":
            raise ValueError("is for masked groups of BF16 operands")
        a, b = case.full.a, case.b.transpose(1, 2)
        return _torch_ready(case, lambda: torch.bmm(a, b), "torch.bmm")


def _torch_ready(case: GroupedCase, call: Callable[[], torch.Tensor], name: str) -> Ready:
    if case.d_dtype != torch.bfloat16:
        raise ValueError(f"writes bf16, not {case.problem.d_dtype}")

    def launch(tensors: Any, by_index: bool) -> None:
        tensors[4].copy_(call())

    return Ready(_verified(launch, case, case.full), call, {"call": name})


@dataclass(frozen=True)
class GroupedPeer:
    """A package with calls for grouped problems, by kind; see `grouped_peer`.

    `bf16_functions` are those for BF16 operands.
    """

    name: str
    functions: dict[str, Function]
    details: dict[str, Any] = field(default_factory=dict)
    reference_only: bool = False
    bf16_functions: dict[str, Function] = field(default_factory=dict)

    def ready(self, case: GroupedCase) -> Ready:
        """As in Provider; whatever the function raises becomes a RuntimeError with its name."""
        problem, run = case.problem, case.full
        is_bf16 = problem.recipe == "none"
        function = (self.bf16_functions if is_bf16 else self.functions).get(problem.kind)
        if function is None:
            operands = " with BF16 operands" if is_bf16 else ""
            raise ValueError(f"the package has no call for kind {problem.kind}{operands}")
        if problem.d_dtype != "bf16" or problem.num_sms:
            raise ValueError("writes bf16 on every SM")
        if problem.kind == "contiguous" and not run.grouping.by_index:
            raise ValueError(f"m={problem.m}: takes groups of whole 128 rows")
        inputs, layout = case.inputs(run), run.grouping.layout
        d, details = case.empty(run), self.details
        if problem.kind == "masked" and problem.m % PEER_ROWS:
            inputs, d = _with_room(inputs, d)
            details = {**details, "rows_a_group": d.shape[1]}

        def call() -> object:
            return function(*inputs, d, layout, problem.m)

        def launch(tensors: Any, by_index: bool) -> None:
            d.fill_(float("nan"))  # new memory may hold another provider's right result
            call()
            tensors[4].copy_(d[:, : problem.m] if problem.kind == "masked" else d)

        try:
            verified = _verified(launch, case, run)
        except (KgenError, RuntimeError):
            raise
        except Exception as error:
            raise RuntimeError(words(error)) from error
        return Ready(verified, call, details)


def _with_room(inputs: Tensors, d: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """The same with rows behind those of each group, up to a multiple of PEER_ROWS."""
    a, sfa, b, sfb = inputs
    groups, m, k = a.shape
    rows = round_up(m, PEER_ROWS)
    wide = torch.zeros(groups, rows, k, dtype=a.dtype, device=a.device)
    wide[:, :m] = a
    if sfa.dim() == a.dim():  # BF16 operands have none
        scales = torch.ones(groups, sfa.shape[2], rows, device=a.device).transpose(1, 2)
        scales[:, :m] = sfa
        sfa = scales
    return (wide, sfa, b, sfb), d.new_empty(groups, rows, d.shape[2])


def _verified(launch: Any, case: GroupedCase, run: GroupedRun) -> Verified:
    """Somebody else's kernel, checked with every group full only."""
    return Verified(case.problem, *check_runs(launch, case, [(run, False)], untouched=False))


def grouped_against(
    asked: Sequence[Against], recipes: Sequence[str] = ("block",)
) -> tuple[list[Provider], dict[str, str]]:
    """Providers for what can be had, and the reason for each peer that can not.

    Of torch's there are those for `recipes`.
    """

    def make(one: Against) -> list[Provider]:
        if one.name == "torch":
            of_torch: list[Provider] = [TorchLoop()] * ("block" in recipes)
            return of_torch + [TorchGroupedMm(), TorchBmm()] * ("none" in recipes)
        if one.folder is None:
            raise UsageError("has no kernel for grouped problems")
        return [grouped_peer(one.name, import_as(one.folder, one.alias, OWN_NAME))]

    return made_for_each(asked, make)


def grouped_peer(name: str, module: ModuleType) -> GroupedPeer:
    """The peer that a package is, by the first call in CALLS that it has for each kind.

    Raises LookupError that names what was looked for.
    """
    found: dict[str, Function] = {}
    bf16: dict[str, Function] = {}
    details: dict[str, Any] = {"version": version_of(module)}
    for kind, calls in CALLS.items():
        for call, options in calls.items():
            function = getattr(module, call, None)
            if callable(function):
                found[kind] = _adapted(function, kind, options)
                details[f"call_{kind}"] = call
                break
    for kind, call in BF16_CALLS.items():
        function = getattr(module, call, None)
        if callable(function):
            bf16[kind] = _without_scales(function, kind)
            details[f"call_bf16_{kind}"] = call
    if not found and not bf16:
        names = ", ".join([call for calls in CALLS.values() for call in calls])
        raise LookupError(f"the package in {module.__file__} has none of {names}")
    forbid_overlap(module)
    return GroupedPeer(name, found, details, bf16_functions=bf16)


def _adapted(function: Function, kind: str, options: dict[str, Any]) -> Function:
    def launch(*arguments: Any) -> None:
        a, sfa, b, sfb, d, layout, expected_m = arguments
        last = (layout, expected_m) if kind == "masked" else (layout,)
        function((a, sfa), (b, sfb), d, *last, **options)

    return launch


def _without_scales(function: Function, kind: str) -> Function:
    def launch(*arguments: Any) -> None:
        a, _, b, _, d, layout, expected_m = arguments
        function(a, b, d, layout, *((expected_m,) if kind == "masked" else ()))

    return launch


#: Not to round the scales to powers of two, as newer versions do by default on newer GPUs.
_AS_THEY_ARE: Final = {"disable_ue8m0_cast": True}
#: By kind: the call for BF16 operands, which takes plain matrices.
BF16_CALLS: Final = {
    "contiguous": "m_grouped_bf16_gemm_nt_contiguous",
    "masked": "m_grouped_bf16_gemm_nt_masked",
}
#: By kind and name of the call, newest first: what it is given beside the operands.
CALLS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "contiguous": {
        "m_grouped_fp8_gemm_nt_contiguous": _AS_THEY_ARE,
        "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous": {},
    },
    "masked": {
        "m_grouped_fp8_gemm_nt_masked": _AS_THEY_ARE,
        "fp8_m_grouped_gemm_nt_masked": _AS_THEY_ARE,
        "m_grouped_gemm_fp8_fp8_bf16_nt_masked": {},
    },
}
