"""Passes over the machine code of a cubin: bytes in, bytes of the same length out.

Takes a cubin and a pass name, gives the patched cubin and how many instructions changed. Knows
instructions of sm_90, not what the kernel computes. Must not import anything of kgen but elf and
errors.
"""

from __future__ import annotations

import hashlib
import inspect
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from kgen import elf
from kgen.errors import SassError

INSTRUCTION_BYTES: Final = 16
#: Low 12 bits of the low word: FFMA with register operands only.
FFMA: Final = 0x223
_OPCODE_MASK: Final = 0xFFF
#: Control field, in the high word. Yield is active low: 0 lets the scheduler switch warps after
#: the instruction, and voids the operand cache that the reuse bits (one an operand) ask for.
STAY: Final = 1 << 45
REUSE: Final = 0xF << 58
#: Shorter runs are address or epilogue arithmetic, not promotion.
MIN_RUN: Final = 8
#: Up to this launch bound one math warpgroup runs at a time: nobody to yield to. ptxas from 12.9
#: on draws the same line when it interleaves by itself.
MAX_UNSHARED_THREADS: Final = 256

_WORDS: Final = struct.Struct("<QQ")


@dataclass(frozen=True)
class Patched:
    """A cubin after a pass, and how many instructions the pass changed."""

    cubin: bytes
    sites_changed: int


@dataclass(frozen=True)
class Instruction:
    """One instruction and its place in the file."""

    offset: int
    low: int
    high: int

    @property
    def opcode(self) -> int:
        """The operation and the form of its operands."""
        return self.low & _OPCODE_MASK

    @property
    def reuses(self) -> bool:
        """Whether an operand is kept for the next instruction."""
        return bool(self.high & REUSE) and bool(self.high & STAY)


@dataclass(frozen=True)
class Kernel:
    """The code of one kernel; `launch_bound` in threads a block, 0 where the source sets none."""

    name: str
    launch_bound: int
    code: tuple[Instruction, ...]


def patch(cubin: bytes, pass_name: str) -> Patched:
    """Run one pass over every kernel of a cubin.

    Raises SassError for an unknown pass and for bytes that are not a whole cubin.
    """
    if pass_name == "none":
        return Patched(cubin, 0)
    if pass_name not in _PASSES:
        expected = ", ".join(("none", *_PASSES))
        raise SassError(f"SASS pass {pass_name!r}: expected one of {expected}")
    edits = [edit for kernel in kernels(cubin) for edit in _PASSES[pass_name](kernel)]
    patched = bytearray(cubin)
    for edit in edits:
        _WORDS.pack_into(patched, edit.offset, edit.low, edit.high)
    return Patched(bytes(patched), len(edits))


def pass_version(pass_name: str) -> str:
    """What a cache key must hold of a pass beside its name: the hash of the code that runs it."""
    if pass_name == "none":
        return ""
    source = inspect.getsource(sys.modules[__name__]) + inspect.getsource(elf)
    return hashlib.sha256(source.encode()).hexdigest()


def kernels(cubin: bytes) -> Iterator[Kernel]:
    """The kernels of a cubin, their instructions in order; raises SassError."""
    for section in elf.code_sections(cubin):
        if section.size % INSTRUCTION_BYTES:
            raise SassError(f"{section.name}: {section.size} bytes are no whole instructions")
        offsets = range(section.offset, section.offset + section.size, INSTRUCTION_BYTES)
        code = tuple(Instruction(offset, *_WORDS.unpack_from(cubin, offset)) for offset in offsets)
        name = section.name.removeprefix(elf.TEXT)
        yield Kernel(name, elf.launch_bound(cubin, name), code)


def interleave(kernel: Kernel) -> Iterator[Instruction]:
    """Let every second FFMA of a run yield instead of reuse, where ptxas let none.

    ptxas up to 12.8 asks for operand reuse on nearly all of them, so that one warp holds the
    issue slot through its whole promotion while others could feed the tensor cores. From 12.9 on
    it alternates by itself: no two neighbours reuse, and this pass finds nothing to change.
    Giving up a reuse is always right: the operand is read from its register again.
    """
    if kernel.launch_bound <= MAX_UNSHARED_THREADS:
        return
    for run in _runs(kernel.code, FFMA):
        before_reuses = False
        for ffma in run if len(run) >= MIN_RUN else ():
            if ffma.reuses and before_reuses:
                yield Instruction(ffma.offset, ffma.low, ffma.high & ~(REUSE | STAY))
                before_reuses = False
            else:
                before_reuses = ffma.reuses


def _runs(code: Iterable[Instruction], opcode: int) -> Iterator[list[Instruction]]:
    """Stretches of neighbouring instructions with this opcode."""
    run: list[Instruction] = []
    for instruction in code:
        if instruction.opcode == opcode:
            run.append(instruction)
        elif run:
            yield run
            run = []
    if run:
        yield run


_PASSES: Final[dict[str, Callable[[Kernel], Iterator[Instruction]]]] = {
    "interleave": interleave,
}
