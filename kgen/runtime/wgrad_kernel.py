"""Loaded kernels of weight gradients: `prepare` and `prepare_k_grouped` take tensors.

Takes cubins and torch tensors that the kernel can read as they are; gives launches as
`kgen.runtime.kernel` does. Packs WgradArgs, which kgen/templates/include/wgrad.cuh declares:
GemmArgs and 704 bytes more. Must not import cache, build or search.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar, Final

import torch

from kgen.config import Resources, grid_size
from kgen.errors import LaunchError, UnsupportedInput
from kgen.problem import SCALE_BLOCK, GemmProblem
from kgen.runtime.driver import TENSOR_MAP_BYTES, AlignedBuffer
from kgen.runtime.grouped_kernel import map_of
from kgen.runtime.kernel import (
    ARGS_BYTES,
    MAP_D,
    Kernel,
    Launch,
    Operands,
    current_stream,
    is_for_tma,
    map_of_scales,
    operands,
)
from kgen.runtime.tma import TensorMap

MAP_SFB: Final = ARGS_BYTES
#: Groups whose columns are handed over with the launch; of more the kernel reads them from memory.
MAX_OWN_KS: Final = 128
#: ks, maps, d_stride_g, groups, 36 bytes of nothing, own_ks
_MORE: Final = struct.Struct(f"<2QqI36x{MAX_OWN_KS}i")
_MORE_AT: Final = MAP_SFB + TENSOR_MAP_BYTES
WGRAD_ARGS_BYTES: Final = _MORE_AT + _MORE.size
#: a, sfa, b, sfb, d.
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
#: Columns of each group: numbers, or an int32 tensor [G] on the device.
Ks = Sequence[int] | torch.Tensor


class WgradOperands(Operands):
    """Operands of a weight's gradient: scales of B are rows of vectors, as A's are, or blocks."""

    @property
    def has_vectors(self) -> bool:
        """Whether each row of B has scales of its own: recipe "vector"."""
        return self.sfb.rows == self.b.rows

    @property
    def sfa_direct(self) -> bool:
        """Whether the kernel reads the scales of A itself, and under "vector" those of B."""
        return super().sfa_direct or (self.has_vectors and not is_for_tma(self.sfb))

    def maps(self, r: Resources, d_dtype: str) -> dict[int, TensorMap]:
        """As in Operands, with the scales of B."""
        maps = super().maps(r, d_dtype)
        if self.has_vectors and not self.sfa_direct:
            maps[MAP_SFB] = map_of_scales(self.sfb, r.sfb_box)
        return maps


class WgradKernel(Kernel):
    """A cubin of kind wgrad, for every M, N and K.

    `prepare` takes a [M, K], sfa [M, ceil(K/128)], b [N, K], d [M, N] FP32; sfb [N, ceil(K/128)]
    under recipe "vector", [ceil(N/128), ceil(K/128)] under "block"; N a multiple of 8.
    """

    kind: ClassVar[str] = "wgrad"
    args_bytes: ClassVar[int] = WGRAD_ARGS_BYTES

    def _operands(
        self, tensors: tuple[torch.Tensor, ...], bias: torch.Tensor | None
    ) -> WgradOperands:
        return _operands(tensors, self.problem, bias)


class KGroupedKernel(Kernel):
    """A cubin of kind k_grouped, for every M, N, number of groups and columns of each."""

    kind: ClassVar[str] = "k_grouped"
    args_bytes: ClassVar[int] = WGRAD_ARGS_BYTES

    def prepare_k_grouped(
        self, tensors: Tensors, ks: Ks, *, num_sms: int = 0, flat: bool = False
    ) -> Launch:
        """Pack the arguments for (a, sfa, b, sfb, d), on at most `num_sms` SMs (0: all).

        a [M, K], sfa [M, K/128], b [N, K], sfb [N, K/128], d [G, M, N] FP32: the first ks[0]
        columns are those of the first group, and so on; what columns behind the last group's hold
        has no influence. `ks`: G multiples of 128, numbers, or an int32 tensor [G] on the device,
        which is read by the kernel alone. With `flat`, for numbers only, a and b have one
        dimension: each group's [M, ks[g]], and [N, ks[g]], one after another; the scales are as
        before. Addresses and pitches as in `Kernel.prepare`. Raises UnsupportedInput for
        other tensors, LaunchError while a CUDA graph is captured for `flat`, whose tensor maps are
        copied to the device here, and for more than 128 numbers.
        """
        a, sfa, b, sfb, d = tensors
        groups = len(ks)
        if d.dim() != 3 or d.shape[0] != groups:
            raise UnsupportedInput(
                f"d is {list(d.shape)}: expected [{groups}, M, N] for {groups} ks"
            )
        args = AlignedBuffer(self.args_bytes)
        if not d.shape[0] or not d.shape[1]:
            return self._launch(args, 0)
        kept, maps_at, ks_at, own = [], 0, 0, [0] * MAX_OWN_KS
        if flat:
            if isinstance(ks, torch.Tensor):
                raise UnsupportedInput("ks is a tensor: matrices of each group need numbers")
            kept.append(_copied(self._maps_of_groups(a, b, d, ks), a.device))
            maps_at = kept[0].data_ptr()
            # What stands in for them: a matrix of all columns, of which no map is read.
            columns = sum(ks)
            a, b = (x.view(-1, columns) for x in (a, b))
        o = _operands((a, sfa, b, sfb, d[0]), self.problem, None)
        o.pack_into(args, self.resources, self.problem.d_dtype)
        r = self.resources
        map_of(self.problem.d_dtype, d, r.d_box, r.d_swizzle_bytes).encode_into(
            args.address + MAP_D
        )
        if isinstance(ks, torch.Tensor):
            ks_at = ks.data_ptr()
        elif groups > MAX_OWN_KS:
            kept.append(_copied(torch.tensor(ks, dtype=torch.int32), a.device))
            ks_at = kept[-1].data_ptr()
        else:
            own[:groups] = ks
        args.write(_MORE_AT, _MORE.pack(ks_at, maps_at, d.stride(0), groups, *own))
        _, m, n = d.shape
        problem = GemmProblem.of(
            self.kind, m, n, max(o.a.cols, SCALE_BLOCK), groups=groups, num_sms=num_sms
        )
        return self._launch(args, grid_size(problem, self.config, self.device), tuple(kept))

    def run_k_grouped(
        self, tensors: Tensors, ks: Ks, *, num_sms: int = 0, flat: bool = False
    ) -> None:
        """Prepare and run on the current stream of the kernel's device."""
        launch = self.prepare_k_grouped(tensors, ks, num_sms=num_sms, flat=flat)
        with torch.cuda.device(self.ordinal):
            launch.run(current_stream(self.ordinal))

    def _maps_of_groups(
        self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, ks: Sequence[int]
    ) -> torch.Tensor:
        """A tensor map of A and one of B for each group; none where it has no columns."""
        r = self.resources
        host = AlignedBuffer(2 * len(ks) * TENSOR_MAP_BYTES)
        starts = [0, *accumulate(ks)]
        for group, k in enumerate(ks):
            for i, (x, rows, box) in enumerate(
                ((a, d.shape[1], r.a_box), (b, d.shape[2], r.b_box))
            ):
                if k:
                    address = x.data_ptr() + rows * starts[group]
                    at = host.address + (2 * group + i) * TENSOR_MAP_BYTES
                    TensorMap("uint8", address, (k, rows), k, box, 128).encode_into(at)
        return torch.frombuffer(bytearray(bytes(host)), dtype=torch.uint8)


def _copied(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Values on the device, without waiting; raises LaunchError while a CUDA graph is captured."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise LaunchError(
            "flat operands, or more than 128 ks as numbers, while a CUDA graph is captured, which "
            "would copy from memory that is gone at its replay: run the same call once before, or "
            "give a as [M, K], b as [N, K] and ks as a tensor"
        )
    # From pageable memory: the driver has taken the bytes when this returns.
    return host.to(device, non_blocking=True)


def _operands(
    tensors: tuple[torch.Tensor, ...], problem: GemmProblem, bias: torch.Tensor | None
) -> WgradOperands:
    o = operands(tensors, problem, bias)
    return WgradOperands(o.a, o.sfa, o.b, o.sfb, o.d)
