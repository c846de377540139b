"""Cubins are read as what they are, and anything else is refused by name."""

from __future__ import annotations

import pytest

from kgen.elf import KernelFacts, code_sections, kernel_facts, launch_bound, sections
from kgen.errors import SassError
from tests.unit.synthetic_cubin import NOP, Kernel, cubin, ffma

TWO = cubin(
    Kernel("first", (NOP, ffma()), registers=168, frame_bytes=48, smem_bytes=1024 + 400),
    Kernel("second", (NOP,) * 3, registers=24),
)


def test_facts_are_those_of_the_kernel_asked_for() -> None:
    assert kernel_facts(TWO, "first") == KernelFacts(168, 48, 400)
    assert kernel_facts(TWO, "second") == KernelFacts(24, 0, 0)


def test_the_launch_bound_is_a_product_or_not_set() -> None:
    two = cubin(
        Kernel("a", (NOP,), launch_bound=(64, 6, 2)), Kernel("b", (NOP,), launch_bound=None)
    )
    assert (launch_bound(two, "a"), launch_bound(two, "b")) == (768, 0)


def test_sections_lie_where_the_code_is() -> None:
    first, second = code_sections(TWO)
    assert (first.name, first.size, second.name, second.size) == (
        ".text.first",
        32,
        ".text.second",
        48,
    )
    assert TWO[first.offset : first.offset + 8] == NOP[0].to_bytes(8, "little")
    assert {s.name for s in sections(TWO)} >= {".nv.info", ".symtab", ".nv.shared.first"}


def test_an_unknown_kernel_is_answered_with_the_known_ones() -> None:
    with pytest.raises(SassError, match=r"no kernel 'third' in the cubin: it has first, second"):
        kernel_facts(TWO, "third")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a 64-bit little-endian ELF"),
        (b"no cubin at all, but long enough to hold the header of one", "not a 64-bit"),
        (b"\x7fELF\x01\x01" + bytes(100), "not a 64-bit"),
        (cubin(Kernel("k", (NOP,)), machine=62), "ELF machine 62"),
        (TWO[:40], "cut off or corrupt"),
        (TWO[:-1], "cut off or corrupt"),
        (TWO[: len(TWO) // 2], "cut off or corrupt"),
        (cubin(), "no code"),
    ],
)
def test_what_is_no_cubin_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(SassError, match=reason):
        code_sections(data)


def test_any_cut_or_flipped_header_byte_is_refused_or_read_but_never_crashes() -> None:
    for length in range(0, len(TWO), 7):
        with pytest.raises(SassError):
            kernel_facts(TWO[:length], "first")
    for at in range(len(TWO)):
        broken = bytearray(TWO)
        broken[at] ^= 0xFF
        try:
            kernel_facts(bytes(broken), "first")
            launch_bound(bytes(broken), "first")
        except SassError:
            continue
