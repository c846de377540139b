"""The interleaving pass on code made here: what changes, and that nothing else does."""

from __future__ import annotations

import struct

import pytest

from kgen import elf, sass
from kgen.errors import SassError
from tests.unit.synthetic_cubin import NOP, Kernel, cubin, ffma

Code = tuple[tuple[int, int], ...]
STAYS, YIELDS = ffma(), ffma(stay=False, reuse=0)


def patched(code: Code) -> tuple[Code, int]:
    """A kernel's code after the pass, and the number of changes it reports."""
    before = cubin(Kernel("k", code))
    result = sass.patch(before, "interleave")
    (section,) = elf.code_sections(result.cubin)
    words = struct.iter_unpack("<QQ", result.cubin[section.offset : section.offset + section.size])
    outside_before = before[: section.offset] + before[section.offset + section.size :]
    outside_after = result.cubin[: section.offset] + result.cubin[section.offset + section.size :]
    assert outside_before == outside_after
    return tuple((low, high) for low, high in words), result.sites_changed


def test_every_second_of_a_run_yields_instead_of_reusing() -> None:
    after, changed = patched((NOP, *(STAYS,) * 9, NOP))
    assert after == (NOP, *(STAYS, YIELDS) * 4, STAYS, NOP)
    assert changed == 4


def test_the_bits_are_those_of_yield_and_reuse_and_no_others() -> None:
    low, high = ffma(reuse=0b111, stall=5)
    after, _ = patched(((low, high),) * 8)
    assert after[1] == (low, high & ~(1 << 45 | 0b1111 << 58))
    assert after[1][1] >> 41 & 0xF == 5


def test_a_run_starts_anew_after_an_instruction_that_reuses_nothing() -> None:
    plain = ffma(reuse=0)
    after, changed = patched((STAYS, STAYS, STAYS, plain, STAYS, STAYS, STAYS, STAYS))
    assert after == (STAYS, YIELDS, STAYS, plain, STAYS, YIELDS, STAYS, YIELDS)
    assert changed == 3


@pytest.mark.parametrize(
    "code",
    [
        (STAYS,) * 7,
        (*(STAYS,) * 7, NOP, *(STAYS,) * 7),
        (STAYS, YIELDS) * 16,
        (ffma(reuse=0), ffma(reuse=2)) * 16,
        (ffma(stay=False, reuse=1),) * 16,
        (NOP,) * 16,
        (),
    ],
    ids=["short", "two short", "yields", "alternates", "void reuse", "no FFMA", "empty"],
)
def test_what_needs_no_interleaving_stays(code: Code) -> None:
    assert patched(code) == (code, 0)


@pytest.mark.parametrize(
    ("bound", "changed"),
    [((256, 1, 1), 0), ((257, 1, 1), 4), ((64, 8, 1), 4), (None, 0)],
)
def test_a_kernel_of_one_math_warpgroup_has_nobody_to_yield_to(
    bound: tuple[int, int, int] | None, changed: int
) -> None:
    code = cubin(Kernel("k", (STAYS,) * 8, launch_bound=bound))
    assert sass.patch(code, "interleave").sites_changed == changed


def test_a_second_pass_finds_nothing() -> None:
    once = sass.patch(cubin(Kernel("k", (STAYS,) * 64)), "interleave")
    assert once.sites_changed == 32
    assert sass.patch(once.cubin, "interleave") == sass.Patched(once.cubin, 0)


def test_every_kernel_of_a_cubin_is_patched_and_runs_do_not_join_across_them() -> None:
    both = cubin(Kernel("a", (NOP, *(STAYS,) * 8)), Kernel("b", (*(STAYS,) * 8, NOP)))
    assert sass.patch(both, "interleave").sites_changed == 8
    apart = cubin(Kernel("a", (NOP, *(STAYS,) * 4)), Kernel("b", (*(STAYS,) * 4, NOP)))
    assert sass.patch(apart, "interleave").sites_changed == 0


def test_no_pass_means_no_reading() -> None:
    assert sass.patch(b"not even a cubin", "none") == sass.Patched(b"not even a cubin", 0)


def test_refusals_name_what_is_wrong() -> None:
    with pytest.raises(SassError, match="'swap': expected one of none, interleave"):
        sass.patch(cubin(Kernel("k", (NOP,))), "swap")
    with pytest.raises(SassError, match="not a 64-bit"):
        sass.patch(b"text", "interleave")


def test_the_version_of_a_pass_is_the_hash_of_its_code() -> None:
    assert sass.pass_version("none") == ""
    assert len(sass.pass_version("interleave")) == 64
