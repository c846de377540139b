"""Keys and the list of trusted ones: made once, kept private, never guessed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kgen.cache.trust import SIGNING_KEY, TRUSTED, KeyRing
from kgen.errors import BundleError

KEY = "ed25519:" + "ab" * 32


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing(tmp_path / "keys")


def test_a_key_signs_and_is_trusted(ring: KeyRing) -> None:
    pytest.importorskip("cryptography")
    assert ring.public_key() is None
    key = ring.generate()
    assert ring.public_key() == key
    assert ring.trusted() == {key: "own key"}
    assert (ring.folder / SIGNING_KEY).stat().st_mode & 0o777 == 0o600
    verdict = ring.judge(b"text", ring.sign(b"text"), "x")
    assert (verdict.trusted, verdict.key, verdict.name) == (True, key, "own key")
    with pytest.raises(BundleError, match="exists and stays"):
        ring.generate()
    with pytest.raises(BundleError, match="does not fit"):
        ring.judge(b"texts", ring.sign(b"text"), "x")
    ring.distrust(key)
    assert not ring.judge(b"text", ring.sign(b"text"), "x").trusted


def test_the_list_is_changed_by_key(ring: KeyRing) -> None:
    assert ring.trusted() == {}
    ring.trust(KEY, "Ada")
    ring.trust(KEY, "Ada Lovelace")
    ring.trust(KEY.replace("ab", "cd"))
    assert ring.trusted() == {KEY: "Ada Lovelace", KEY.replace("ab", "cd"): ""}
    ring.distrust(KEY)
    assert KEY not in ring.trusted()
    with pytest.raises(BundleError, match="not on the list"):
        ring.distrust(KEY)


@pytest.mark.parametrize("key", ["", "ab" * 32, KEY[:-1], KEY + "0", KEY.upper(), KEY + "\n"])
def test_what_is_no_key_is_refused(ring: KeyRing, key: str) -> None:
    with pytest.raises(BundleError, match="no key"):
        ring.trust(key)
    with pytest.raises(BundleError, match="printable"):
        ring.trust(KEY, f"x\n{KEY}")


def test_damaged_files_are_refused(ring: KeyRing) -> None:
    ring.folder.mkdir()
    (ring.folder / TRUSTED).write_text(f"{KEY} x\nnonsense\n")
    with pytest.raises(BundleError, match="line 2"):
        ring.trusted()
    (ring.folder / TRUSTED).write_bytes(b"\xff")
    with pytest.raises(BundleError, match="can not be read"):
        ring.trusted()
    pytest.importorskip("cryptography")
    with pytest.raises(BundleError, match="no signing key"):
        ring.sign(b"")
    (ring.folder / SIGNING_KEY).write_text("x")
    with pytest.raises(BundleError, match="holds no key"):
        ring.sign(b"")


def test_without_cryptography_nothing_is_trusted(
    ring: KeyRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring.trust(KEY)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    verdict = ring.judge(b"text", {"key": KEY, "signature": "00" * 64}, "x")
    assert not verdict.trusted
    assert "kgen[sign]" in verdict.words
    with pytest.raises(BundleError, match=r"kgen\[sign\]"):
        ring.generate()
