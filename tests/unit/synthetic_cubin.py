"""Cubins made here, byte by byte, for tests that need no compiler."""

from __future__ import annotations

import struct
from dataclasses import dataclass

NOP = (0x7918, 0x000FC000_00000000)


def ffma(*, stay: bool = True, reuse: int = 1, stall: int = 1) -> tuple[int, int]:
    """FFMA R1, R2, R3, R1 with these control bits; `reuse` holds one bit an operand."""
    low = 0x223 | 0x7 << 12 | 1 << 16 | 2 << 24 | 3 << 32
    control = stall << 41 | int(stay) << 45 | 7 << 46 | 7 << 49 | reuse << 58
    return low, 1 | control


@dataclass(frozen=True)
class Kernel:
    """What one kernel's sections shall say; `smem_bytes` counts the system's 1024."""

    name: str
    code: tuple[tuple[int, int], ...]
    registers: int = 40
    frame_bytes: int = 0
    smem_bytes: int = 1024
    launch_bound: tuple[int, int, int] | None = (384, 1, 1)


def cubin(*kernels: Kernel, machine: int = 190) -> bytes:
    """An ELF file with the sections of a cubin that kgen reads."""
    names = [b"", *(k.name.encode() for k in kernels)]
    strtab, name_at = _strings(names)
    symbols = b"".join(struct.pack("<IBBHQQ", at, 0x12, 0x10, 0, 0, 0) for at in name_at)
    info = b"".join(
        struct.pack("<BBHII", 4, attribute, 8, index, value)
        for index, k in enumerate(kernels, 1)
        for attribute, value in ((0x11, k.frame_bytes), (0x2F, k.registers))
    )
    bodies: list[tuple[str, int, bytes, int]] = [
        (".strtab", 3, strtab, 0),
        (".symtab", 2, symbols, 0),
        # A two-byte attribute without payload, as real ones have, stands before the pairs.
        (".nv.info", 0x70000000, struct.pack("<BBH", 3, 0x1B, 0xFF) + info, 0),
    ]
    for k in kernels:
        code = b"".join(struct.pack("<QQ", *words) for words in k.code)
        bodies.append((f".text.{k.name}", 1, code, 0))
        bodies.append((f".nv.shared.{k.name}", 8, b"", k.smem_bytes))
        bound = struct.pack("<BBH3I", 4, 5, 12, *k.launch_bound) if k.launch_bound else b""
        bodies.append((f".nv.info.{k.name}", 0x70000000, bound, 0))
    return _elf(bodies, machine)


def _strings(names: list[bytes]) -> tuple[bytes, list[int]]:
    data, at = b"", []
    for name in names:
        at.append(len(data))
        data += name + b"\0"
    return data, at


def _elf(bodies: list[tuple[str, int, bytes, int]], machine: int) -> bytes:
    names, name_at = _strings([b"", b".shstrtab", *(b[0].encode() for b in bodies)])
    everything = [(".shstrtab", 3, names, 0), *bodies]
    data, sections = b"", [struct.pack("<IIQQQQIIQQ", *([0] * 10))]
    for at, (_, kind, body, nobits) in zip(name_at[1:], everything, strict=True):
        data += b"\0" * (-len(data) % 16)
        head = (at, kind, 0, 0, 64 + len(data), len(body) or nobits, 0, 0, 16, 0)
        sections.append(struct.pack("<IIQQQQIIQQ", *head))
        data += body
    table_at = 64 + len(data)
    ident = b"\x7fELF\x02\x01\x01\x33\x07" + b"\0" * 7
    head_rest = (2, machine, 1, 0, 0, table_at, 0x5A055A, 64, 56, 0, 64, len(sections), 1)
    return struct.pack("<16sHHIQQQIHHHHHH", ident, *head_rest) + data + b"".join(sections)
