"""Who is timed: kgen's own path and torch's, each verified before it may be.

Takes a case, gives `Ready`: a call to time and what its check has shown. Must not import search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch

from kgen.bench.summary import KGEN, ROW_MAJOR
from kgen.cases import Case
from kgen.errors import LaunchError
from kgen.measure import Call
from kgen.runtime.dispatch import Dispatcher
from kgen.runtime.kernel import Launch, current_stream
from kgen.runtime.lookup import Choice
from kgen.verify import Verified, verify, verify_peer

#: Of BF16 products cuBLAS may round the partial sums of a split K to BF16 before it adds them.
MATMUL_LIMIT: Final = 1e-2
#: With scales by row or by tensor torch may sum all of K in the tensor core, cut to 13 fraction
#: bits.
SCALED_LIMIT: Final = 5e-2


@dataclass(frozen=True)
class Ready:
    """A verified call; `details` says what it runs."""

    verified: Verified
    call: Call
    details: dict[str, Any] = field(default_factory=dict)


class Provider(Protocol):
    """An implementation to time."""

    @property
    def name(self) -> str:
        """What it is called in tables and results."""

    @property
    def reference_only(self) -> bool:
        """Whether it does something easier than the problem asks: shown, not counted as a peer."""

    def ready(self, case: Any) -> Ready:
        """Verify it on the case, a Case, or a GroupedCase where it is for grouped kinds.

        Raises WrongResult, or what it refuses a problem with.
        """


class Kgen:
    """What the runtime would launch for the problem: the database's winner or the default."""

    reference_only = False

    def __init__(self, dispatcher: Dispatcher, row_major: bool = False) -> None:
        """`row_major` scales of A are read as they are: kernels take both layouts."""
        self._dispatcher, self._row_major = dispatcher, row_major
        self.name = KGEN + ROW_MAJOR * row_major

    def ready(self, case: Case) -> Ready:
        """Raises LaunchError where the runtime would fall back to the reference."""
        if self._row_major:
            refuse_without_scales(case)
        plan = self._dispatcher.plan(case.problem)
        if plan.kernel is None or plan.choice is None:
            raise LaunchError(f"{case.problem}: the fallback would answer, because {plan.reason}")
        kernel, choice, num_sms = plan.kernel, plan.choice, case.problem.num_sms

        def launch(*tensors: torch.Tensor) -> None:
            kernel(*tensors, num_sms=num_sms)

        verified = verify(launch, case, any_nk=choice.config.baked_dims == "none")
        m, n = case.problem.m, case.problem.n
        d = torch.empty(m, n, dtype=case.d_dtype, device=case.device)
        tensors = (*case.inputs(m, self._row_major), d, *case.bias)
        prepared = kernel.prepare(*tensors, num_sms=num_sms)
        return kgen_ready(verified, prepared, tensors, choice, self._dispatcher.ordinal)


def kgen_ready(
    verified: Verified,
    prepared: Launch,
    tensors: tuple[torch.Tensor, ...],
    choice: Choice,
    ordinal: int,
) -> Ready:
    """A launch of kgen's own, on the current stream of `cuda:ordinal`; `tensors`: its memory."""

    def call() -> None:
        _ = tensors  # a launch holds addresses only: the memory must live as long as the call
        prepared.run(current_stream(ordinal))

    details = {
        "config": choice.config.to_dict(),
        "short": str(choice.config),
        "origin": choice.origin,
    }
    return Ready(verified, call, details)


class TorchBlockwise:
    """torch._scaled_mm with the problem's own scales: 1x128 for A, 128x128 for B (cuBLASLt)."""

    reference_only = False

    def __init__(self, row_major: bool = False) -> None:
        """From `row_major` scales of A each call converts them first."""
        self._row_major = row_major
        self.name = "torch blockwise" + ROW_MAJOR * row_major

    def ready(self, case: Case) -> Ready:
        """Raises RuntimeError for what cuBLASLt refuses, such as M = 1, ValueError for a recipe."""
        refuse_other_recipes(case, "block")

        def launch(*tensors: torch.Tensor) -> None:
            tensors[4].copy_(self._call(tensors[:4], case)())

        verified = verify_peer(launch, case)
        return Ready(verified, self._call(case.inputs(case.problem.m), case))

    def _call(self, tensors: tuple[torch.Tensor, ...], case: Case) -> Callable[[], torch.Tensor]:
        a, sfa, b, sfb = tensors
        bias, dtype = next(iter(case.bias), None), case.d_dtype
        # torch wants A's scales with M contiguous and no padding, B's with K contiguous.
        scale_a, scale_b = sfa.t().contiguous().t(), sfb.t()
        given = sfa.contiguous()

        def call() -> torch.Tensor:
            if self._row_major:
                scale_a.copy_(given)
            return torch._scaled_mm(
                a, b.t(), scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=dtype
            )

        return call


class TorchRecipe:
    """torch._scaled_mm with the problem's own scales, by row or by tensor, and its fast_accum."""

    reference_only = False

    def __init__(self, recipe: str) -> None:
        self._recipe = recipe
        self.name = f"torch {recipe}"

    def ready(self, case: Case) -> Ready:
        """Raises RuntimeError for what torch refuses, ValueError for another recipe."""
        refuse_other_recipes(case, self._recipe)

        def launch(*tensors: torch.Tensor) -> None:
            tensors[4].copy_(self._call(tensors[:4], case)())

        verified = verify_peer(launch, case, SCALED_LIMIT)
        return Ready(verified, self._call(case.inputs(case.problem.m), case))

    def _call(self, tensors: tuple[torch.Tensor, ...], case: Case) -> Callable[[], torch.Tensor]:
        a, sfa, b, sfb = tensors
        # By row torch wants [M, 1] and [1, N], contiguous; by tensor single values.
        by_row = self._recipe == "row"
        scale_a = sfa.contiguous() if by_row else sfa.view(())
        scale_b = sfb.t().contiguous() if by_row else sfb.view(())
        bias, fast_accum = next(iter(case.bias), None), case.problem.fast_accum

        def call() -> torch.Tensor:
            return torch._scaled_mm(
                a,
                b.t(),
                scale_a=scale_a,
                scale_b=scale_b,
                bias=bias,
                out_dtype=case.d_dtype,
                use_fast_accum=fast_accum,
            )

        return call


def refuse_without_scales(case: Case) -> None:
    """Raises ValueError where there are no scales that could lie in another layout."""
    if case.problem.recipe == "none":
        raise ValueError("BF16 operands have no scales")


class TorchMatmul:
    """torch.matmul on BF16 operands, or torch.addmm with a bias (cuBLAS)."""

    name = "torch matmul"
    reference_only = False

    def ready(self, case: Case) -> Ready:
        """Raises RuntimeError for what torch refuses, ValueError for another recipe or output."""
        refuse_other_recipes(case, "none")
        if case.d_dtype != torch.bfloat16:
            raise ValueError(f"writes bf16, not {case.problem.d_dtype}")

        def launch(*tensors: torch.Tensor) -> None:
            tensors[4].copy_(self._call(tensors[:4], case)())

        verified = verify_peer(launch, case, MATMUL_LIMIT)
        return Ready(verified, self._call(case.inputs(case.problem.m), case))

    @staticmethod
    def _call(tensors: tuple[torch.Tensor, ...], case: Case) -> Callable[[], torch.Tensor]:
        a, _, b, _ = tensors
        d = torch.empty(a.shape[0], b.shape[0], dtype=a.dtype, device=a.device)
        for bias in case.bias:
            return lambda: torch.addmm(bias, a, b.t(), out=d)
        return lambda: torch.matmul(a, b.t(), out=d)


def refuse_other_recipes(case: Case, recipe: str) -> None:
    """Raises ValueError where the problem's recipe is another one."""
    if case.problem.recipe != recipe:
        words = {"none": "BF16 operands without scales"}
        wanted, given = (
            words.get(name, f"scales by {name}") for name in (recipe, case.problem.recipe)
        )
        raise ValueError(f"takes {wanted}, not {given}")


class TorchTensorwise:
    """torch._scaled_mm with one scale per tensor: less than the problem asks, a mark to reach."""

    name = "torch tensorwise"
    reference_only = True

    def ready(self, case: Case) -> Ready:
        """Verified against the same operands with equal scales, with a limit of its own."""
        refuse_other_recipes(case, "block")
        if case.bias:
            raise ValueError("is a mark for problems without a bias")
        plain = Case(case.problem, case.device, unit_scales=True)
        scales = [plain.sfa[0, 0].clone(), plain.sfb[0, 0].clone()]

        def call_on(a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
            return lambda: torch._scaled_mm(
                a,
                b.t(),
                scale_a=scales[0],
                scale_b=scales[1],
                out_dtype=case.d_dtype,
                use_fast_accum=True,
            )

        def launch(*tensors: torch.Tensor) -> None:
            tensors[4].copy_(call_on(tensors[0], tensors[2])())

        verified = verify_peer(launch, plain, SCALED_LIMIT)
        return Ready(verified, call_on(case.a[: case.problem.m], case.b))
