"""Cubins as ELF files: sections, kernels, and the resource facts the compiler left in them.

Takes cubin bytes, gives plain values. Knows neither compilers nor instructions.
Must not import anything but the standard library and kgen.errors.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Final

from kgen.errors import SassError

#: e_machine of CUDA cubins.
EM_CUDA: Final = 190
_SHT_PROGBITS: Final = 1
_SHT_SYMTAB: Final = 2
_SHT_NOBITS: Final = 8
#: Name of a code section, before the kernel's.
TEXT: Final = ".text."
_HEADER: Final = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
#: Attributes of .nv.info (format 4: a size and a payload). Registers and frame stand in the common
#: section as (symbol, value), the launch bound in the kernel's own as three extents.
_EIFMT_SVAL: Final = 4
_EIATTR_MAX_THREADS: Final = 0x05
_EIATTR_FRAME_SIZE: Final = 0x11
_EIATTR_REGCOUNT: Final = 0x2F
#: Start of every block's shared memory, kept by the system on sm_90; sections count it.
_RESERVED_SMEM_BYTES: Final = 1024
#: What following offsets of a corrupt file can raise.
_UNREADABLE: Final = (struct.error, IndexError, ValueError, OverflowError)


@dataclass(frozen=True)
class Section:
    """One ELF section: where its bytes lie in the file (`size` 0 in the file for NOBITS)."""

    name: str
    kind: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True)
class KernelFacts:
    """What a cubin says of one kernel: registers a thread, bytes of stack a thread, and bytes of
    static shared memory a block."""

    registers: int
    stack_bytes: int
    smem_static_bytes: int


def sections(cubin: bytes) -> list[Section]:
    """All sections of a cubin, in file order; raises SassError for anything that is not one."""
    try:
        return _read_sections(cubin)
    except _UNREADABLE as error:
        raise SassError(f"cubin of {len(cubin)} bytes: cut off or corrupt ({error})") from error


def _read_sections(cubin: bytes) -> list[Section]:
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise SassError(f"not a 64-bit little-endian ELF file: it starts with {cubin[:6]!r}")
    head = _HEADER.unpack_from(cubin)
    machine, table, entry_bytes, count, names_index = head[2], head[6], head[11], head[12], head[13]
    if machine != EM_CUDA or entry_bytes != _SECTION.size:
        raise SassError(f"not a cubin: ELF machine {machine} (expected {EM_CUDA})")
    raw = [_SECTION.unpack_from(cubin, table + i * entry_bytes) for i in range(count)]
    names_offset = raw[names_index][4]
    found = [Section(_c_string(cubin, names_offset + r[0]), r[1], r[4], r[5], r[6]) for r in raw]
    for s in found:
        if s.kind != _SHT_NOBITS and s.offset + s.size > len(cubin):
            raise SassError(f"section {s.name}: ends at {s.offset + s.size}, past the file's end")
    return found


def _c_string(data: bytes, offset: int) -> str:
    return data[offset : data.index(b"\0", offset)].decode("utf-8")


def code_sections(cubin: bytes) -> list[Section]:
    """The sections that hold kernels; raises SassError when there is none."""
    found = [s for s in sections(cubin) if s.name.startswith(TEXT) and s.kind == _SHT_PROGBITS]
    if not found:
        raise SassError("the cubin has no code")
    return found


def kernel_facts(cubin: bytes, entry: str) -> KernelFacts:
    """Resources of the kernel named `entry`; raises SassError when the cubin has no such kernel."""
    found = {s.name: s for s in sections(cubin)}
    if TEXT + entry not in found:
        have = [name.removeprefix(TEXT) for name in found if name.startswith(TEXT)]
        raise SassError(f"no kernel {entry!r} in the cubin: it has {', '.join(have) or 'none'}")
    try:
        values = _values_of(entry, cubin, found)
    except _UNREADABLE as error:
        raise SassError(f"cubin of {len(cubin)} bytes: corrupt .nv.info ({error})") from error
    if _EIATTR_REGCOUNT not in values:
        raise SassError(f"kernel {entry!r}: the cubin does not state its registers")
    shared = found.get(f".nv.shared.{entry}")
    static = shared.size - _RESERVED_SMEM_BYTES if shared else 0
    return KernelFacts(
        registers=values[_EIATTR_REGCOUNT],
        stack_bytes=values.get(_EIATTR_FRAME_SIZE, 0),
        smem_static_bytes=max(0, static),
    )


def launch_bound(cubin: bytes, entry: str) -> int:
    """The most threads a block of this kernel may have; 0 where the source set no bound."""
    found = {s.name: s for s in sections(cubin)}
    try:
        for attribute, payload in _attributes(cubin, found.get(f".nv.info.{entry}")):
            if attribute == _EIATTR_MAX_THREADS:
                return prod(struct.unpack("<3I", payload))
    except _UNREADABLE as error:
        raise SassError(f"kernel {entry!r}: corrupt .nv.info ({error})") from error
    return 0


def _attributes(cubin: bytes, info: Section | None) -> Iterator[tuple[int, bytes]]:
    """(attribute, payload) of an .nv.info section, of those that have a sized payload."""
    offset, end = (info.offset, info.offset + info.size) if info else (0, 0)
    while offset < end:
        fmt, attribute, size = struct.unpack_from("<BBH", cubin, offset)
        offset += 4
        if fmt == _EIFMT_SVAL:
            yield attribute, cubin[offset : offset + size]
            offset += size


def _values_of(entry: str, cubin: bytes, found: dict[str, Section]) -> dict[int, int]:
    """Attribute -> value, of the (symbol, value) pairs in .nv.info that name `entry`."""
    names = _symbol_names(cubin, found)
    values: dict[int, int] = {}
    for attribute, payload in _attributes(cubin, found.get(".nv.info")):
        if len(payload) == 8:
            symbol, value = struct.unpack("<II", payload)
            if names[symbol] == entry:
                values[attribute] = value
    return values


def _symbol_names(cubin: bytes, found: dict[str, Section]) -> list[str]:
    table = next((s for s in found.values() if s.kind == _SHT_SYMTAB), None)
    strings = found.get(".strtab")
    if table is None or strings is None:
        raise SassError("the cubin has no symbol table")
    starts = range(table.offset, table.offset + table.size, _SYMBOL.size)
    return [_c_string(cubin, strings.offset + _SYMBOL.unpack_from(cubin, at)[0]) for at in starts]
