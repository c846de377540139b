"""What holds a kernel back: `profile`, the hardware's counters through Nsight Compute.

Takes a problem and a built kernel, gives the metrics of one launch. The kernel is verified and runs
in a process that Nsight Compute starts. Must not import torch, CUDA or optuna.
"""

from __future__ import annotations

import csv
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kgen.errors import GpuMissing, KgenError
from kgen.problem import GemmProblem
from kgen.search.events import GPU_BACKEND
from kgen.search.profile_target import ERROR, RANGE, WORK

if TYPE_CHECKING:
    from kgen.build import Cubin

#: Sections of Nsight Compute: speeds of light, memory, pipes, reasons for stalls, launch.
SECTIONS: Final = (
    *("SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis"),
    *("WarpStateStats", "SchedulerStats", "LaunchStats", "Occupancy"),
)
#: Seconds: each pass of the counters runs the kernel once more, and starting takes most of it.
TIMEOUT_S: Final = 300.0
#: Where installers put it, beside PATH and the CUDA toolkit; the last by name is the newest.
INSTALLED: Final = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
_NOT_PERMITTED: Final = "ERR_NVGPUCTRPERM"
#: Reasons for stalls, as the breakdown names them.
_STALL: Final = re.compile(
    r"issue_stalled_([a-z_]+?)(?:_not_issued)?(?:_per_(?:issue|warp)\w*)?(?:\.[\w.]+)?$"
    r"|^Stall (.+)$"
)
#: The tensor cores' use among pipes, whatever a version calls it.
_TENSOR: Final = re.compile(r"tensor", re.IGNORECASE)
_DRAM: Final = re.compile(r"dram", re.IGNORECASE)


@dataclass(frozen=True)
class Metric:
    """One figure of a profile. `value` is None where it is no number: then `text` says it."""

    section: str
    name: str
    unit: str
    text: str

    @property
    def value(self) -> float | None:
        """The number, thousands separators taken out."""
        try:
            return float(self.text.replace(",", ""))
        except ValueError:
            return None

    @property
    def is_dram(self) -> bool:
        """Whether it is about device memory."""
        return bool(_DRAM.search(self.name))

    @property
    def is_tensor(self) -> bool:
        """Whether it is about the tensor cores' pipe."""
        return bool(_TENSOR.search(self.name))

    @property
    def stall(self) -> str:
        """The reason for stalls that it counts, or nothing."""
        found = _STALL.search(self.name)
        return next((word for word in found.groups() if word), "") if found else ""


@dataclass(frozen=True)
class Profile:
    """The metrics of one launch of the kernel called `kernel`."""

    kernel: str
    metrics: tuple[Metric, ...]


def find_ncu(given: str = "", cuda_home: str = "") -> str:
    """The path of Nsight Compute's command; raises KgenError that says where it was looked for."""
    candidates = [given] if given else ["ncu", *([f"{cuda_home}/bin/ncu"] if cuda_home else [])]
    for name in candidates:
        if found := shutil.which(name):
            return found
    if given:
        raise KgenError(f"--ncu {given}: no such program")
    for pattern in INSTALLED:
        root = Path("/")
        if found_here := sorted(root.glob(pattern.lstrip("/"))):
            return str(found_here[-1])
    looked = ", ".join(["PATH", *([f"{cuda_home}/bin"] if cuda_home else []), *INSTALLED])
    raise KgenError(
        f"no Nsight Compute (ncu) found on {looked}: it comes with the CUDA toolkit or from "
        "developer.nvidia.com/nsight-compute; name it with --ncu"
    )


def profile(
    problem: GemmProblem,
    cubin: Cubin,
    ncu: str,
    *,
    export: Path | None = None,
    backend: str = GPU_BACKEND,
    backend_options: dict[str, Any] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Profile:
    """Run a kernel under Nsight Compute, clocks as they are and caches flushed before each pass.

    `export` keeps the whole report for Nsight Compute's window, as PATH.ncu-rep. Raises GpuMissing,
    and KgenError where counters may not be read, the kernel fails, or nothing was profiled.
    """
    with tempfile.TemporaryDirectory(prefix="kgen-profile-") as name:
        folder = Path(name)
        work = (backend, backend_options or {}, problem, cubin)
        (folder / WORK).write_bytes(pickle.dumps(work))
        words = command(ncu, folder, export)
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise KgenError(f"{ncu}: no result after {timeout_s:g} s, given up") from error
        except OSError as error:
            raise KgenError(f"{ncu} can not be run: {error.strerror}") from error
        failure = folder / ERROR
        reason = failure.read_text() if failure.exists() else ""
    if _NOT_PERMITTED in done.stdout + done.stderr:
        raise KgenError(
            f"Nsight Compute may not read the GPU's counters here ({_NOT_PERMITTED}): run as root, "
            "have the driver loaded with NVreg_RestrictProfilingToAdminUsers=0, or, in a "
            "container, start it with --cap-add SYS_ADMIN"
        )
    if reason.startswith("GpuMissing"):
        raise GpuMissing(reason.partition(": ")[2])
    if reason:
        raise KgenError(f"the kernel was not profiled: {reason}")
    found = parse(done.stdout)
    if found is None:
        said = (done.stderr or done.stdout).strip().splitlines()[-5:]
        raise KgenError(f"{ncu} profiled nothing (exit code {done.returncode}): {' | '.join(said)}")
    return found


def command(ncu: str, folder: Path, export: Path | None) -> list[str]:
    """The command line that profiles the target's one range."""
    sections = [word for section in SECTIONS for word in ("--section", section)]
    kept = ["--export", str(export), "--force-overwrite"] if export else []
    return [
        ncu,
        *("--csv", "--page", "details", "--print-details", "all", "--print-units", "base"),
        *("--nvtx", "--nvtx-include", f"{RANGE}/", "--clock-control", "none"),
        *("--target-processes", "application-only"),
        *sections,
        *kept,
        *(sys.executable, "-m", "kgen.search.profile_target", str(folder)),
    ]


def parse(text: str) -> Profile | None:
    """The metrics in what ncu printed as CSV, other lines around it; None where there are none."""
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID","Process ID"')), None)
    if start is None:
        return None
    rows = list(csv.DictReader(StringIO("\n".join(lines[start:]))))
    metrics = tuple(
        Metric(row["Section Name"] or "", name, row["Metric Unit"] or "", row["Metric Value"] or "")
        for row in rows
        if (name := row.get("Metric Name"))
    )
    return Profile(rows[0]["Kernel Name"] or "", metrics) if metrics else None


def leading_stalls(metrics: Iterable[Metric], count: int) -> Sequence[Metric]:
    """The `count` largest reasons for stalls; each reason once."""
    found: dict[str, Metric] = {}
    for metric in metrics:
        if metric.stall and metric.value is not None:
            former = found.get(metric.stall)
            if former is None or metric.value > (former.value or 0.0):
                found[metric.stall] = metric
    return sorted(found.values(), key=lambda metric: -(metric.value or 0.0))[:count]
