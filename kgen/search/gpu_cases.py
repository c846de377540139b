"""How a kernel of each kind is checked and launched on its case, in the GPU's child.

Takes a loaded kernel and a case, gives `Verified` values and prepared launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kgen.cases import Case
from kgen.grouped_cases import GroupedCase
from kgen.grouped_verify import check_runs, verify_grouped
from kgen.runtime.grouped_kernel import GroupedKernel
from kgen.runtime.kernel import Kernel, Launch, current_stream
from kgen.runtime.wgrad_kernel import KGroupedKernel
from kgen.verify import Verified, check_random, limit_for, verify
from kgen.wgrad_cases import KGroupedCase, accumulating
from kgen.wgrad_verify import check_k_grouped, verify_k_grouped, verify_wgrad

AnyCase = Case | GroupedCase | KGroupedCase
Operands = tuple[torch.Tensor, ...]
#: What a kernel has shown on a case; raises WrongResult.
Judge = Callable[[Kernel, AnyCase, int], Verified]


def verified_as(kernel: Kernel, case: AnyCase, ordinal: int) -> Verified:
    """Every check of its kind."""
    launch = _launcher(kernel, case, ordinal)
    if isinstance(case, GroupedCase):
        return verify_grouped(launch, case)
    if isinstance(case, KGroupedCase):
        return verify_k_grouped(launch, case)
    check = verify_wgrad if case.problem.is_wgrad else verify
    return check(launch, case, any_nk=kernel.config.baked_dims == "none")


def checked_as(kernel: Kernel, case: AnyCase, ordinal: int) -> Verified:
    """The first of these checks alone: one launch of what will be timed."""
    launch, problem = _launcher(kernel, case, ordinal), case.problem
    if isinstance(case, GroupedCase):
        return Verified(problem, *check_runs(launch, case, [(case.full, False)]))
    if isinstance(case, KGroupedCase):
        return Verified(
            problem, *check_k_grouped(launch, case, [(case.full, False)], on_host=(True,))
        )
    adds = accumulating(launch) if problem.accumulate else launch
    return Verified(problem, *check_random(adds, case, [(problem.m, False)], limit_for(case)))


def _launcher(kernel: Kernel, case: AnyCase, ordinal: int) -> Callable[..., None]:
    """How the checks of the case's kind launch the kernel."""
    num_sms = case.problem.num_sms
    if isinstance(case, GroupedCase):
        assert isinstance(kernel, GroupedKernel), "the case's kind"

        def launch_grouped(tensors: Any, by_index: bool) -> None:
            launch = kernel.prepare_grouped(tensors, by_index=by_index, num_sms=num_sms)
            launch.run(current_stream(ordinal))

        return launch_grouped
    if isinstance(case, KGroupedCase):
        assert isinstance(kernel, KGroupedKernel), "the case's kind"

        def launch_k_grouped(tensors: Any, ks: Any) -> None:
            launch = kernel.prepare_k_grouped(tensors, ks, num_sms=num_sms)
            launch.run(current_stream(ordinal))

        return launch_k_grouped

    def launch(*tensors: torch.Tensor) -> None:
        kernel.prepare(*tensors, num_sms=num_sms).run(current_stream(ordinal))

    return launch


def operands_of(case: AnyCase) -> Operands:
    """a, sfa, b, sfb of the launch that is timed."""
    if isinstance(case, GroupedCase):
        return case.inputs(case.full)
    if isinstance(case, KGroupedCase):
        return case.full.inputs()
    return case.inputs(case.problem.m)


def prepared(kernel: Kernel, case: AnyCase, operands: Operands, d: torch.Tensor) -> Launch:
    """The launch that is timed, on these operands."""
    num_sms = case.problem.num_sms
    if isinstance(case, GroupedCase):
        assert isinstance(kernel, GroupedKernel), "the case's kind"
        grouping = case.full.grouping
        tensors: Any = (*operands, d, grouping.layout)
        return kernel.prepare_grouped(tensors, by_index=grouping.by_index, num_sms=num_sms)
    if isinstance(case, KGroupedCase):
        assert isinstance(kernel, KGroupedKernel), "the case's kind"
        groups: Any = (*operands, d)
        return kernel.prepare_k_grouped(groups, case.full.ks, num_sms=num_sms)
    a, sfa, b, sfb = operands
    return kernel.prepare(a, sfa, b, sfb, d, *case.bias, num_sms=num_sms)


def copy_of(x: torch.Tensor) -> torch.Tensor:
    """The same values in memory of their own, laid out with the same pitch."""
    if not x.numel():
        return x
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    memory = torch.empty(extent, dtype=x.dtype, device=x.device)
    return memory.as_strided(x.shape, x.stride()).copy_(x)
