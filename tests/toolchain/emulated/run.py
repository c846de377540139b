"""Runs kgen's small kernels on the CPU: `EmulatedKernels` stands in for `KERNELS`.

The source is the one that NVRTC gets, but for casts/device.cuh, whose PTX cuda_on_cpu.h replaces.
What it can not show: speed, memory ordering, and that the PTX does what the replacement does.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from kgen.render import render_plain
from kgen.runtime.plain import Spec

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
#: A tenth of an H200: walkers of a masked cast come round more than once.
NUM_SMS = 3


class EmulatedKernel:
    """One kernel as a shared library."""

    def __init__(self, spec: Spec, folder: Path) -> None:
        self._spec = spec
        source = render_plain(spec.template, spec.entry, spec.variables)
        library = folder / f"{source.body_hash}.so"
        if not library.exists():
            assert COMPILER
            text = library.with_suffix(".cpp")
            text.write_text(translated(source.text, spec.entry))
            options = ["-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
            subprocess.run([COMPILER, *options, f"-I{HERE}", text, "-o", library], check=True)
        self._run = ctypes.CDLL(str(library)).run

    def launch(self, grid: int, args: bytes, smem_bytes: int | None = None) -> None:
        """As PlainKernel.launch."""
        if grid:
            self._run(args, ctypes.c_uint32(grid), ctypes.c_uint32(self._spec.threads))


class EmulatedKernels:
    """As PlainKernels, for CPU tensors."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kernels: dict[Spec, EmulatedKernel] = {}
        self.plans: dict[Any, Any] = {}

    def find(self, device: torch.device, *specs: Spec) -> list[Any]:
        """Every kernel there is."""
        for spec in specs:
            if spec not in self._kernels:
                self._kernels[spec] = EmulatedKernel(spec, self._folder)
        return [self._kernels[spec] for spec in specs]

    def num_sms(self, device: torch.device) -> int:
        """Few."""
        return NUM_SMS


def translated(text: str, entry: str) -> str:
    """The source as C++ with an entry `run(args, grid, threads)`."""
    device = (files("kgen") / "templates" / "casts" / "device.cuh").read_text()
    assert device in text
    text = text.replace(device, "")
    text = re.sub(r"extern __shared__ int (\w+)\[\];", r"int* \1 = (int*)dynamic_shared;", text)
    found = re.search(rf"{entry}\(const __grid_constant__ (\w+) args\)", text)
    assert found
    return (
        f'#include "cuda_on_cpu.h"\n{text}\n'
        f"static void entry(const void* args) {{ {entry}(*static_cast<const {found[1]}*>(args)); }}"
        '\nextern "C" void run(const void* args, u32 grid, u32 threads) '
        "{ run_kernel(entry, args, grid, threads); }\n"
    )
