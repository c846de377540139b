"""Who signed a bundle, and whether this user trusts them: Ed25519 keys and a list of trusted ones.

Takes bytes and a folder, gives signatures and verdicts. `cryptography` (extra `sign`) is imported
when a key is first used. Must not import anything of kgen but errors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kgen.errors import BundleError

#: In front of what is signed, so that a signature of something else never fits.
_CONTEXT: Final = b"kgen bundle manifest, version 1\n"
_PREFIX: Final = "ed25519:"
_KEY: Final = re.compile(r"ed25519:[0-9a-f]{64}")
_SIGNATURE: Final = re.compile(r"[0-9a-f]{128}")
_PRIVATE: Final = re.compile(r"[0-9a-f]{64}")
SIGNING_KEY: Final = "signing.key"
TRUSTED: Final = "trusted.keys"
_HEAD: Final = "# Keys whose bundles may bring compiled kernels and times: KEY NAME, one a line.\n"


@dataclass(frozen=True)
class Verdict:
    """What a bundle's signature is worth.

    key        of the signer, "ed25519:" and 64 hexadecimal digits; empty where nobody signed
    name       under which the key stands in the trust list; empty where it does not
    trusted    the signature is good and the key is in the list
    words      all that in words
    """

    key: str
    name: str
    trusted: bool
    words: str


class KeyRing:
    """The keys in one folder: a private one to sign with, and the public ones that are trusted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def trusted(self) -> dict[str, str]:
        """Names by trusted key. Raises BundleError for a list that can not be read."""
        path = self.folder / TRUSTED
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise BundleError(f"{path} can not be read: {error}") from error
        found = {}
        for number, line in enumerate(lines, 1):
            key, _, name = line.strip().partition(" ")
            if not key or key.startswith("#"):
                continue
            if not _KEY.fullmatch(key):
                raise BundleError(f"{path}, line {number}: {key[:80]!r} is no key; {_EXPECTED}")
            found[key] = name.strip()
        return found

    def trust(self, key: str, name: str = "") -> None:
        """Put a key on the list, or give it another name. Raises BundleError for what is no key."""
        if not _KEY.fullmatch(key):
            raise BundleError(f"{key[:80]!r} is no key; {_EXPECTED}")
        if not name.isprintable():
            raise BundleError(f"name {name!r}: expected printable letters")
        self._write(self.trusted() | {key: name})

    def distrust(self, key: str) -> None:
        """Take a key off the list. Raises BundleError where it is not on it."""
        keys = self.trusted()
        if key not in keys:
            raise BundleError(f"{key[:80]!r} is not on the list {self.folder / TRUSTED}")
        del keys[key]
        self._write(keys)

    def _write(self, keys: Mapping[str, str]) -> None:
        path = self.folder / TRUSTED
        new = path.with_suffix(f".{os.getpid()}.new")
        text = _HEAD + "".join(f"{key} {name}".rstrip() + "\n" for key, name in keys.items())
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            new.write_text(text, encoding="utf-8")
            new.replace(path)
        except OSError as error:
            raise BundleError(f"{path} can not be written: {error.strerror}") from error

    def generate(self) -> str:
        """Make the signing key and trust it; gives the public key, for others to trust.

        The file is readable by its owner only. Raises BundleError where there is one already: it
        is never replaced.
        """
        ed25519 = _ed25519()
        private = ed25519.Ed25519PrivateKey.generate()
        path = self.folder / SIGNING_KEY
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(handle, "w", encoding="ascii") as file:
                file.write(private.private_bytes_raw().hex() + "\n")
        except FileExistsError:
            raise BundleError(
                f"{path} exists and stays: move it away to make another key"
            ) from None
        except OSError as error:
            raise BundleError(f"{path} can not be written: {error.strerror}") from error
        key = _public(private)
        self.trust(key, "own key")
        return key

    def public_key(self) -> str | None:
        """The public part of the signing key; None where there is none."""
        if not (self.folder / SIGNING_KEY).exists():
            return None
        return _public(self._private())

    def sign(self, manifest: bytes) -> dict[str, str]:
        """The signature of a manifest, as the bundle keeps it. Raises BundleError without a key."""
        private = self._private()
        key = _public(private)
        return {"key": key, "signature": private.sign(_CONTEXT + manifest).hex()}

    def _private(self) -> Any:
        ed25519 = _ed25519()
        path = self.folder / SIGNING_KEY
        try:
            text = path.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            raise BundleError(f"no signing key at {path}: `kgen db keys generate`") from None
        except (OSError, ValueError) as error:
            raise BundleError(f"{path} can not be read: {error}") from error
        if not _PRIVATE.fullmatch(text):
            raise BundleError(f"{path} holds no key: expected 64 hexadecimal digits")
        return ed25519.Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text))

    def judge(self, manifest: bytes, signature: Mapping[str, Any] | None, name: str) -> Verdict:
        """What the signature of `name`'s manifest is worth.

        Raises BundleError for a signature that does not fit, which only an altered bundle has.
        Where `cryptography` is missing nothing is trusted.
        """
        if signature is None:
            return Verdict("", "", False, "not signed")
        key, text = signature.get("key"), signature.get("signature")
        if not (isinstance(key, str) and _KEY.fullmatch(key)):
            raise BundleError(f"{name}: its signature names no key: it was altered")
        if not (isinstance(text, str) and _SIGNATURE.fullmatch(text)):
            raise BundleError(f"{name}: its signature is none: it was altered")
        try:
            ed25519 = _ed25519()
        except BundleError as error:
            return Verdict(key, "", False, f"signed, but not checked: {error}")
        from cryptography.exceptions import InvalidSignature

        public = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(key[len(_PREFIX) :]))
        try:
            public.verify(bytes.fromhex(text), _CONTEXT + manifest)
        except InvalidSignature:
            raise BundleError(f"{name}: its signature does not fit: it was altered") from None
        known = self.trusted()
        if key not in known:
            return Verdict(key, "", False, f"signed by {key}, which is not trusted here")
        return Verdict(key, known[key], True, f"signed by {known[key] or key}, which is trusted")


_EXPECTED: Final = "expected ed25519: and 64 hexadecimal digits, as `kgen db keys list` prints it"


def _public(private: Any) -> str:
    return f"{_PREFIX}{private.public_key().public_bytes_raw().hex()}"


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise BundleError(
            "signatures need the package cryptography: pip install 'kgen[sign]'"
        ) from error
    return ed25519
