"""What a kernel runs on: `Device`, plain facts about one GPU.

Nothing here queries anything; `runtime.driver` fills a `Device` from the GPU at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Device:
    """Facts of one GPU, as the heuristic, the validity rule and the database need them.

    Bandwidth in GB/s, clock in MHz, rate in TFLOPS (dense FP8, a multiply-add counted as two).
    `measured` tells facts read from the device from the reference figures below.
    """

    name: str
    arch: str
    num_sms: int
    smem_per_block: int
    l2_bytes: int
    dram_gbps: float
    sm_clock_mhz: float
    fp8_tflops: float
    driver_version: str = ""
    measured: bool = False
    clusters_by_size: tuple[tuple[int, int], ...] = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Device:
        """The device that a trial's provenance keeps; raises ValueError where it is not whole."""
        try:
            sizes = tuple((int(size), int(n)) for size, n in values["clusters_by_size"])
            return cls(**{**values, "clusters_by_size": sizes})
        except (KeyError, TypeError) as error:
            raise ValueError(f"no facts of a device: {error}") from error

    def max_clusters(self, size: int) -> int:
        """Clusters of `size` CTAs, one CTA an SM, that can be resident at a time.

        A cluster must fit one GPC, and GPCs differ in how many SMs are left on: where the count was
        not asked of the driver, clusters above 2 find the share of SMs that they find on an H200
        (120 of 132).
        """
        usable = self.num_sms if size <= 2 else self.num_sms * 10 // 11
        return dict(self.clusters_by_size).get(size, max(1, usable // size))

    @property
    def is_hopper(self) -> bool:
        """Whether sm_90a cubins run here (compute capability 9.0 exactly)."""
        return self.arch == "sm_90a"


#: Figures of one H200 SXM: SM count, shared memory and L2 as the driver reports them, bandwidth
#: and FP8 rate as measured on it (docs: baselines of 2026-11-30, random data, 13 ms runs).
H200 = Device(
    name="NVIDIA H200",
    arch="sm_90a",
    num_sms=132,
    smem_per_block=232448,
    l2_bytes=62914560,
    dram_gbps=4000.0,
    sm_clock_mhz=1755.0,
    fp8_tflops=1702.0,
    clusters_by_size=((1, 132), (2, 66), (4, 30), (8, 15)),
)
