"""Ranges on a profiler's timeline: `nvtx_range`, through torch's binding of NVTX.

Takes a text. Costs about a microsecond; where torch was built without CUDA nothing is marked. Must
not import cache, build or search.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@cache
def can_mark() -> bool:
    """Whether torch has NVTX here."""
    return torch.version.cuda is not None and torch.cuda.is_available()


@contextmanager
def nvtx_range(text: str) -> Iterator[None]:
    """Name what runs inside on this thread's timeline."""
    if not can_mark():
        yield
        return
    push(text)
    try:
        yield
    finally:
        pop()


def push(text: str) -> None:
    """Open a range; needs `can_mark`."""
    torch.cuda.nvtx.range_push(text)  # type: ignore[no-untyped-call]


def pop() -> None:
    """Close the innermost range of this thread."""
    torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
