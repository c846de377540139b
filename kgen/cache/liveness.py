"""Whether the process that began a run still lives, told from its host, id and start.

Takes nothing, gives strings to keep beside a process id. Standard library only.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_START_FIELD: Final = 19  # start time in clock ticks since boot, counted after the command's ")"


def this_host() -> str:
    """Names the machine and, in a container, its own world of process ids."""
    try:
        world = os.readlink(_PROC / "self/ns/pid")
    except OSError:
        world = ""
    return f"{platform.node()} {world}".strip()


def process_token(pid: int) -> str | None:
    """Tells a process from a later one of the same id: boot and start time; None when it is gone.

    Empty where the system does not say (no /proc): then an id is all there is.
    """
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "" if _exists(pid) else None
    after_name = stat.rpartition(")")[2].split()
    if after_name[0] in ("Z", "X"):  # killed, and its parent has not asked yet
        return None
    return f"{boot} {after_name[_START_FIELD]}"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
