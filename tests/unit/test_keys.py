"""A cubin's key changes with everything that can change its bytes, and with nothing else."""

from __future__ import annotations

import pytest

from kgen.cache import keys
from kgen.cache.keys import cubin_key

BASE = ("body", ("-a", "-b"), "nvrtc-13.0.88", "interleave", "abc")


def test_the_same_parts_give_the_same_key() -> None:
    assert cubin_key(*BASE) == cubin_key(*BASE)
    assert len(cubin_key(*BASE)) == 64
    assert int(cubin_key(*BASE), 16) >= 0


@pytest.mark.parametrize(
    "changed",
    [
        ("Body", *BASE[1:]),
        ("body", ("-b", "-a"), *BASE[2:]),
        ("body", ("-a-b",), *BASE[2:]),
        ("body", ("-a", "-b", ""), *BASE[2:]),
        ("body", (), *BASE[2:]),
        (*BASE[:2], "nvcc-13.0.88", *BASE[3:]),
        (*BASE[:2], "nvrtc-13.0.8", *BASE[3:]),
        (*BASE[:3], "none", "abc"),
        (*BASE[:4], "abd"),
        (*BASE[:3], "interleaveabc", ""),
    ],
)
def test_each_part_counts(changed: tuple[str, tuple[str, ...], str, str, str]) -> None:
    assert cubin_key(*changed) != cubin_key(*BASE)


def test_the_version_of_the_scheme_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cubin_key(*BASE)
    monkeypatch.setattr(keys, "KEY_VERSION", keys.KEY_VERSION + 1)
    assert cubin_key(*BASE) != before


@pytest.mark.parametrize("position", range(5))
def test_what_is_not_text_is_refused(position: int) -> None:
    parts: list[object] = list(BASE)
    parts[position] = (None,) if position == 1 else None
    with pytest.raises(TypeError, match="NoneType"):
        cubin_key(*parts)  # type: ignore[arg-type]
