"""The class of loaded kernels for each kind of problem: `KERNELS`.

Must not import cache, build or search.
"""

from __future__ import annotations

from typing import Final

from kgen.runtime.grouped_kernel import ContiguousKernel, MaskedKernel
from kgen.runtime.kernel import Kernel
from kgen.runtime.wgrad_kernel import KGroupedKernel, WgradKernel

KERNELS: Final[dict[str, type[Kernel]]] = {
    kernel.kind: kernel
    for kernel in (Kernel, ContiguousKernel, MaskedKernel, WgradKernel, KGroupedKernel)
}
