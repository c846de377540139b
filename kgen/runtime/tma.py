"""Tensor maps: what the kernel's TMA unit needs to know of a matrix in device memory.

Takes addresses, extents, pitches and boxes; gives the 128 bytes of a CUtensorMap, or writes them
in place. Reads no device memory.
Must not import torch, cache, build or search.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

from kgen.errors import UnsupportedInput
from kgen.problem import MAX_EXTENT, TMA_ALIGN_BYTES
from kgen.runtime import driver
from kgen.runtime.driver import TENSOR_MAP_ALIGN, TENSOR_MAP_BYTES, AlignedBuffer

#: CUtensorMapDataType of cuda.h, and the bytes of one element.
DATA_TYPES: Final = {"uint8": (0, 1), "fp16": (6, 2), "fp32": (7, 4), "bf16": (9, 2)}
#: CUtensorMapSwizzle of cuda.h by the width of the pattern in bytes.
SWIZZLES: Final = {0: 0, 32: 1, 64: 2, 128: 3}
_INTERLEAVE_NONE: Final = 0
_L2_PROMOTION_256B: Final = 3
_OOB_FILL_ZERO: Final = 0
_MAX_BOX: Final = 256
_MAX_PITCH_BYTES: Final = 2**40

_Extents = ctypes.c_uint64 * 3
_Pitches = ctypes.c_uint64 * 2
_Box = ctypes.c_uint32 * 3
_UNIT_STRIDES = _Box(1, 1, 1)
_UNIT_STRIDES_AT: Final = ctypes.addressof(_UNIT_STRIDES)


@dataclass(frozen=True)
class TensorMap:
    """A row-pitched matrix as TMA walks it, box by box; or `groups` of them, a third dimension.

    `dims` and `box` are (inner, outer) in elements, `pitch_bytes` is from row to row,
    `group_pitch_bytes` from matrix to matrix; `groups` = 0 stands for one matrix and two
    dimensions. Elements outside a matrix read as zero and are not written.
    """

    data_type: str
    address: int
    dims: tuple[int, int]
    pitch_bytes: int
    box: tuple[int, int]
    swizzle_bytes: int = 0
    groups: int = 0
    group_pitch_bytes: int = 0

    def why_not(self) -> str | None:
        """Why TMA can not address this matrix, or None when it can (cuda.h, rank 2 and 3)."""
        row_bytes = self.box[0] * DATA_TYPES[self.data_type][1]
        if self.address % TMA_ALIGN_BYTES or not self.address:
            return f"address {self.address:#x}: expected a multiple of {TMA_ALIGN_BYTES}"
        if self.pitch_bytes % TMA_ALIGN_BYTES or not 0 < self.pitch_bytes < _MAX_PITCH_BYTES:
            return (
                f"row pitch of {self.pitch_bytes} bytes: "
                f"expected a multiple of {TMA_ALIGN_BYTES} below 2^40"
            )
        pitch = self.group_pitch_bytes
        if self.groups and (pitch % TMA_ALIGN_BYTES or not 0 < pitch < _MAX_PITCH_BYTES):
            return (
                f"group pitch of {pitch} bytes: expected a multiple of {TMA_ALIGN_BYTES} below 2^40"
            )
        if not all(1 <= extent <= MAX_EXTENT for extent in (*self.dims, self.groups or 1)):
            return f"extents {self.dims}: expected 1 to {MAX_EXTENT}"
        if not all(1 <= extent <= _MAX_BOX for extent in self.box):
            return f"box {self.box}: expected 1 to {_MAX_BOX} elements each way"
        if row_bytes % TMA_ALIGN_BYTES or row_bytes > (self.swizzle_bytes or row_bytes):
            return f"box row of {row_bytes} bytes with a swizzle of {self.swizzle_bytes}"
        return None

    def encode_into(self, target: int) -> None:
        """Write the CUtensorMap to host address `target`, a multiple of 64.

        Raises UnsupportedInput when TMA can not address the matrix, DriverError when the driver
        refuses it all the same.
        """
        reason = self.why_not()
        if reason:
            shape = [*([self.groups] if self.groups else []), *self.dims[::-1]]
            raise UnsupportedInput(f"no tensor map for {self.data_type}{shape}: {reason}")
        if target % TENSOR_MAP_ALIGN:
            raise ValueError(f"map at {target:#x}: expected a multiple of {TENSOR_MAP_ALIGN}")
        dims, box = _Extents(*self.dims, self.groups), _Box(*self.box, 1)
        pitches = _Pitches(self.pitch_bytes, self.group_pitch_bytes)
        code = driver.encode_tensor_map()(
            target,
            DATA_TYPES[self.data_type][0],
            3 if self.groups else 2,
            self.address,
            ctypes.addressof(dims),
            ctypes.addressof(pitches),
            ctypes.addressof(box),
            _UNIT_STRIDES_AT,
            _INTERLEAVE_NONE,
            SWIZZLES[self.swizzle_bytes],
            _L2_PROMOTION_256B,
            _OOB_FILL_ZERO,
        )
        if code:
            driver.raise_for(code, f"cuTensorMapEncodeTiled of {self}")


def encode_2d(tensor_map: TensorMap) -> bytes:
    """The 128 bytes that `encode_into` writes; same errors."""
    buffer = AlignedBuffer(TENSOR_MAP_BYTES)
    tensor_map.encode_into(buffer.address)
    return bytes(buffer)
