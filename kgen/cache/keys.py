"""The key of a cubin: the hash of everything that can change its bytes.

Takes plain strings, gives a hex digest. Must not import anything but the standard library and
`errors`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Final, ParamSpec

from kgen.errors import RenderError

P = ParamSpec("P")

#: Raised when the meaning of an entry changes; older entries are then never found again.
KEY_VERSION: Final = 1


def cubin_key(
    body: str, flags: tuple[str, ...], compiler_id: str, sass_pass: str, sass_version: str
) -> str:
    """SHA-256, in hex, of a source's body (or its hash), the compiler's options and identity, and
    the SASS pass with the hash of its code; raises TypeError for anything that is not text."""
    parts = [body, *flags, compiler_id, sass_pass, sass_version]
    if not all(isinstance(part, str) for part in parts):
        raise TypeError(f"a cubin's key is made of text; given {[type(p).__name__ for p in parts]}")
    named = {
        "version": KEY_VERSION,
        "body": body,
        "flags": flags,
        "compiler": compiler_id,
        "sass_pass": sass_pass,
        "sass_version": sass_version,
    }
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def or_nothing(key_of: Callable[P, str]) -> Callable[P, str]:
    """The same, giving "" for what the templates refuse now: that has no cubin."""

    def key(*args: P.args, **kwargs: P.kwargs) -> str:
        try:
            return key_of(*args, **kwargs)
        except RenderError:
            return ""

    return key
