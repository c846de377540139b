"""Loaded kernels of the grouped kinds: `load_kernel` takes a cubin, `prepare_grouped` tensors.

Takes cubins and torch tensors that the kernel can read as they are; gives launches as
`kgen.runtime.kernel` does. Packs GroupedArgs, which kgen/templates/include/scheduler_grouped.cuh
declares: GemmArgs and 64 bytes more. Must not import cache, build or search.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import ClassVar, Final

import torch

from kgen.config import GemmConfig, grid_of
from kgen.errors import UnsupportedInput
from kgen.problem import SCALE_BLOCK, GemmProblem, ceil_div, round_up
from kgen.reference import TORCH_D_DTYPES, TORCH_OPERAND_DTYPES
from kgen.runtime.driver import AlignedBuffer
from kgen.runtime.kernel import (
    ARGS_BYTES,
    MAP_A,
    MAP_B,
    MAP_D,
    MAP_SFA,
    TAIL,
    Kernel,
    Launch,
    current_stream,
)
from kgen.runtime.tma import DATA_TYPES, TensorMap

GROUPED_ARGS_BYTES: Final = ARGS_BYTES + 64
#: The fields of GemmArgs that grouped kernels read: sfa, sfb, sfa_stride_m, sfa_stride_k,
#: sfb_stride_n, sfb_stride_k, m, n, k, sfa_direct, d, d_stride_m.
_TAIL: Final = struct.Struct("<2Q4q4IQq")
#: layout, sfa_stride_g, sfb_stride_g, d_stride_g, groups, by_index
_GROUPED_TAIL: Final = struct.Struct("<Q3q2I")
#: a, sfa, b, sfb, d, and what tells the groups.
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class GroupedKernel(Kernel):
    """A cubin of a grouped kind, loaded on one device, for every M and number of groups."""

    args_bytes: ClassVar[int] = GROUPED_ARGS_BYTES

    def prepare_grouped(
        self, tensors: Tensors, *, by_index: bool = False, num_sms: int = 0
    ) -> Launch:
        """Pack the arguments for (a, sfa, b, sfb, d, layout), on at most `num_sms` SMs (0: all).

        Kind contiguous: a [M, K], sfa [M, ceil(K/128)], d [M, N], layout [G+1] the groups' first
        rows and the end of the last, or with `by_index` [M] the group of each row, -1 for rows
        to skip. Kind masked: a [G, max M, K], sfa [G, max M, ceil(K/128)], d [G, max M, N],
        layout [G] the rows of each group. b [G, N, K], sfb [G, ceil(N/128), ceil(K/128)]; under
        recipe "none" sfa and sfb are empty, [0, 0]. Types as in `kgen.runtime.kernel.operands`,
        layout int32, N as there. Pitches of a, b and d are multiples of 16 bytes. Raises
        UnsupportedInput for other tensors. Reads no element.
        """
        a, sfa, b, sfb, d, layout = tensors
        self._check(tensors, by_index)
        args = AlignedBuffer(self.args_bytes)
        groups, m = b.shape[0], a.shape[-2]
        if not groups or not m:
            return self._launch(args, 0)
        direct = self.problem.recipe == "none" or _is_direct(sfa)
        for offset, tensor_map in self._maps(tensors, direct).items():
            tensor_map.encode_into(args.address + offset)
        strides = (*sfa.stride()[-2:], *sfb.stride()[-2:])
        sizes = (m, d.shape[-1], a.shape[-1] * a.element_size(), int(direct))
        tail = (sfa.data_ptr(), sfb.data_ptr(), *strides, *sizes, d.data_ptr(), d.stride(-2))
        args.write(TAIL, _TAIL.pack(*tail))
        pitches = [t.stride(0) if t.dim() == 3 else 0 for t in (sfa, sfb, d)]
        more = _GROUPED_TAIL.pack(layout.data_ptr(), *pitches, groups, int(by_index))
        args.write(ARGS_BYTES, more)
        n, k = d.shape[-1], a.shape[-1]
        problem = replace(self.problem, m=m, n=n, k=k, groups=groups, num_sms=num_sms)
        m_blocks = most_blocks(problem, self.config, by_index)
        return self._launch(args, grid_of(m_blocks, problem, self.config, self.device))

    def run_grouped(self, tensors: Tensors, *, by_index: bool = False, num_sms: int = 0) -> None:
        """Prepare and run on the current stream of the kernel's device."""
        launch = self.prepare_grouped(tensors, by_index=by_index, num_sms=num_sms)
        with torch.cuda.device(self.ordinal):
            launch.run(current_stream(self.ordinal))

    def _check(self, tensors: Tensors, by_index: bool) -> None:
        a, _, b, _, _, _ = tensors
        dims = 3 if self.kind == "masked" else 2
        if a.dim() != dims or b.dim() != 3:
            shapes = f"a is {list(a.shape)}, b is {list(b.shape)}"
            raise UnsupportedInput(f"{shapes}: expected {dims} and 3 dimensions for {self.kind}")
        (*outer, m, k), (groups, n, _) = a.shape, b.shape
        outer = [groups] * len(outer)
        blocks, fp32 = ceil_div(k, SCALE_BLOCK), torch.float32
        of_a, of_b = [*outer, m, blocks], [groups, ceil_div(n, SCALE_BLOCK), blocks]
        if self.problem.recipe == "none":
            of_a, of_b = [0, 0], [0, 0]
        operand = TORCH_OPERAND_DTYPES[self.problem.a_dtype]
        layout_shape = [m] if by_index else [groups + (self.kind == "contiguous")]
        expected = (
            ("a", operand, [*outer, m, k]),
            ("sfa", fp32, of_a),
            ("b", operand, [groups, n, k]),
            ("sfb", fp32, of_b),
            ("d", TORCH_D_DTYPES[self.problem.d_dtype], [*outer, m, round_up(n, 8)]),
            ("layout", torch.int32, layout_shape),
        )
        for tensor, (name, dtype, shape) in zip(tensors, expected, strict=True):
            if tensor.dtype != dtype or list(tensor.shape) != shape:
                given = f"{tensor.dtype}{list(tensor.shape)}"
                raise UnsupportedInput(f"{name} is {given}: expected {dtype}{shape}")
            if name in ("a", "b", "d", "layout") and tensor.stride(-1) != 1 and shape[-1] > 1:
                raise UnsupportedInput(f"{name} has column stride {tensor.stride(-1)}: expected 1")

    def _maps(self, tensors: Tensors, direct: bool) -> dict[int, TensorMap]:
        """Byte offset in GemmArgs to the tensor map that goes there."""
        a, sfa, b, _, d, _ = tensors
        r = self.resources
        maps = {
            MAP_A: map_of("uint8", a, r.a_box, 128),
            MAP_B: map_of("uint8", b, r.b_box, 128),
            MAP_D: map_of(self.problem.d_dtype, d, r.d_box, r.d_swizzle_bytes),
        }
        if not direct:
            maps[MAP_SFA] = map_of("fp32", sfa.transpose(-1, -2), r.sfa_box, 0)
        return maps


class ContiguousKernel(GroupedKernel):
    """For problems of kind contiguous."""

    kind: ClassVar[str] = "contiguous"


class MaskedKernel(GroupedKernel):
    """For problems of kind masked."""

    kind: ClassVar[str] = "masked"


def most_blocks(problem: GemmProblem, config: GemmConfig, by_index: bool) -> int:
    """Blocks along M that a launch can come to; m of a contiguous problem counts all rows here."""
    m, block_m = problem.m, config.block_m
    if problem.kind == "masked":
        return problem.groups * ceil_div(m, block_m)
    return ceil_div(m, block_m) if by_index else min(m, m // block_m + problem.groups)


def _is_direct(sfa: torch.Tensor) -> bool:
    """Whether the kernel reads A's scales itself, because TMA can not take their layout."""
    rows, blocks = sfa.shape[-2:]
    row_stride, pitch = sfa.stride()[-2:]
    pitches = [pitch] * (blocks > 1) + [sfa.stride(0)] * (sfa.dim() == 3 and sfa.shape[0] > 1)
    is_contiguous = row_stride == 1 or rows == 1
    return not is_contiguous or sfa.data_ptr() % 16 != 0 or any(p % 4 or p <= 0 for p in pitches)


def map_of(data_type: str, x: torch.Tensor, box: tuple[int, int], swizzle_bytes: int) -> TensorMap:
    """Of [rows, columns], or of [groups, rows, columns] with a third dimension.

    As "uint8" columns count bytes, whatever the elements.
    """
    size = x.element_size()
    rows, cols = x.shape[-2], x.shape[-1] * size // DATA_TYPES[data_type][1]
    # Strides of extents of one are open: then what TMA likes best.
    pitch = x.stride(-2) * size if rows > 1 else round_up(x.shape[-1] * size, 16)
    groups = x.shape[0] if x.dim() == 3 else 0
    group_pitch = x.stride(0) * size if groups > 1 else rows * pitch
    dims = (cols, rows)
    return TensorMap(
        data_type, x.data_ptr(), dims, pitch, box, swizzle_bytes, groups, group_pitch * bool(groups)
    )
