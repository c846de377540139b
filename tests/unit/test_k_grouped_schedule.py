"""The device code that finds tiles of groups along K, run on the CPU as it is written.

g++ compiles kgen/templates/include/scheduler_k_grouped.cuh against tests/unit/warp_emulation.h, in
which 32 fibers stand for a warp's lanes; only the stores to shared memory are replaced.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

INCLUDE = Path(__file__).parents[2] / "kgen" / "templates" / "include"
_STORE = re.compile(r'asm volatile\("st\.shared\..*?"memory"\);', re.DOTALL)
GRID = 12
#: First row, first column, group, first K block and the one past the last.
Tile = tuple[int, int, int, int, int]

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")

_SHUFFLE_XOR = """
template <class T>
T shuffle_xor(T value, unsigned mask, int line) {
    const int lane = lane_now;
    return (T)exchange((long)value, line)[lane ^ mask];
}
#define __shfl_xor_sync(mask, value, distance) shuffle_xor(value, distance, __LINE__)
#define __popc(bits) (u32)__builtin_popcount(bits)
"""
_MAIN = """
static WgradArgs args;
static unsigned rank_now;
static void body() {
    const Extent extent(args.m, args.n, args.k);
    TileFinder finder(args, extent, 0, rank_now, lane_now);
    while (!finder.is_done) finder.find();
}
int main() {
    unsigned grid, in_memory;
    unsigned* numbers[] = {&grid, &args.m, &args.n, &args.k, &args.groups, &in_memory};
    for (unsigned* number : numbers)
        if (std::scanf("%u", number) != 1) return 2;
    std::vector<int> ks(args.groups);
    for (int& value : ks)
        if (std::scanf("%d", &value) != 1) return 2;
    if (in_memory) args.ks = ks.data();
    else std::copy(ks.begin(), ks.end(), args.own_ks);
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
        rank_now = blockIdx.x % kClusterSize;
        run_warp<body>();
    }
}
"""


@dataclass(frozen=True)
class Finder:
    """A compiled program for one kernel's constants."""

    program: Path
    accumulates: bool
    block_m: int
    block_n: int
    cluster_m: int
    cluster_n: int

    def tiles(self, ks: Sequence[int], m: int, n: int, k: int, in_memory: bool) -> list[list[Tile]]:
        """By CTA, in the order found, without the end's mark."""
        words = [GRID, m, n, k, len(ks), int(in_memory), *ks]
        done = subprocess.run(
            [self.program],
            input=" ".join(map(str, words)),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        ctas: list[list[Tile]] = [[]]
        for line in done.stdout.splitlines():
            m0, n0, group, begin, end = map(int, line.split())
            if group == 0xFFFFFFFF:
                ctas.append([])
            else:
                ctas[-1].append((m0, n0, group, begin, end))
        assert len(ctas) == GRID + 1, "each CTA ends with one mark"
        assert not ctas.pop()
        return ctas

    def expected(self, ks: Sequence[int], m: int, n: int) -> Counter[Tile]:
        """Every tile of every group, those that a cluster has past M or N included."""
        found: Counter[Tile] = Counter()
        rows, columns = self.block_m * self.cluster_m, self.block_n * self.cluster_n
        begin = 0
        for group, k in enumerate(ks):
            end = begin + k // 128
            for m0 in range(0, -(-m // rows) * rows, self.block_m):
                for n0 in range(0, -(-n // columns) * columns, self.block_n):
                    if k or not self.accumulates:
                        found[m0, n0, group, begin, end] += 1
            begin = end
        return found


#: accumulates, block_m, block_n, cluster_m, cluster_n, along m, raster_group.
VARIANTS = (
    (True, 64, 72, 1, 1, "true", 4),
    (False, 128, 128, 1, 2, "false", 8),
    (True, 192, 40, 2, 1, "false", 4),
    (False, 16, 128, 2, 1, "true", 8),
)


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda v: "-".join(map(str, v)))
def finder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finder:
    accumulates, block_m, block_n, cluster_m, cluster_n, along_m, group = request.param
    constants = {
        "kBlockM": block_m,
        "kBlockN": block_n,
        "kBlockK": 128,
        "kClusterM": cluster_m,
        "kClusterN": cluster_n,
        "kClusterSize": cluster_m * cluster_n,
        "kRasterGroup": group,
        "kQueueOffset": 0,
        "kQueueSlots": 4,
        "kQueueTileBytes": 32,
        "kQueueFullOffset": 0,
        "kQueueReadOffset": 0,
    }
    scheduler = (INCLUDE / "scheduler_k_grouped.cuh").read_text()
    names = ", ".join(f"work.{name}" for name in ("m0", "n0", "group", "k_begin", "k_end"))
    put = rf'std::printf("%u %u %u %u %u\n", {names});'
    puts = iter(["", put])
    scheduler, replaced = _STORE.subn(lambda _: next(puts), scheduler)
    assert replaced == 2
    gradient = (INCLUDE / "wgrad.cuh").read_text()
    parts = [
        f'#include "{Path(__file__).with_name("warp_emulation.h")}"',
        (INCLUDE / "types.cuh").read_text(),
        *(f"constexpr u32 {name} = {value};" for name, value in constants.items()),
        f"constexpr bool kAccumulates = {'true' if accumulates else 'false'};",
        f"constexpr bool kRasterAlongM = {along_m};",
        "#define threadIdx (Index{(unsigned)lane_now})",
        "inline void mbarrier_wait(u32, u32) {}",
        "inline void mbarrier_arrive(u32) {}",
        _SHUFFLE_XOR,
        gradient[: gradient.index("// A box of FP32")],
        (INCLUDE / "ring.cuh").read_text(),
        scheduler,
        _MAIN,
    ]
    folder = tmp_path_factory.mktemp("finder")
    source, program = folder / "finder.cpp", folder / "finder"
    source.write_text("\n".join(parts))
    command = ["g++", "-std=c++20", "-O1", "-w", str(source), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Finder(program, accumulates, block_m, block_n, cluster_m, cluster_n)


def groupings() -> Iterator[list[int]]:
    """K blocks of groups: adversarial ones first, then random ones."""
    yield [0]
    yield [1]
    yield [0, 0, 0]
    yield [3, 1, 2, 2, 3]
    yield [0] * 31 + [7]
    yield [0] * 32 + [7]
    yield [7] + [0] * 63
    yield [0] * 127 + [3]
    yield [*range(40)]
    yield [1] * 128
    draw = random.Random(0)
    for count in (2, 32, 33, 64, 100, 128):
        yield [draw.choice((0, 0, 1, 2, 8, 30)) for _ in range(count)]


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("blocks", list(groupings()), ids=lambda b: f"{len(b)}x{sum(b)}")
def test_every_tile_is_found_once(blocks: list[int], in_memory: bool, finder: Finder) -> None:
    m, n = 3 * finder.block_m - 5, 3 * finder.block_n - 8
    ks = [128 * number for number in blocks]
    ctas = finder.tiles(ks, m, n, sum(ks) + 256, in_memory)
    assert Counter(tile for cta in ctas for tile in cta) == finder.expected(ks, m, n)
    counts = [len(cta) for cta in ctas]
    assert max(counts) - min(counts) <= 1, "the work is shared out evenly"
    size = finder.cluster_m * finder.cluster_n
    for first in range(0, GRID, size):  # the CTAs of a cluster work side by side, at one group
        for beside in zip(*ctas[first : first + size], strict=True):
            assert len({tile[2:] for tile in beside}) == 1
            assert [(m0 - beside[0][0], n0 - beside[0][1]) for m0, n0, *_ in beside] == [
                (finder.block_m * (i % finder.cluster_m), finder.block_n * (i // finder.cluster_m))
                for i in range(size)
            ]
    for cta in ctas:  # of 32 groups the longest come first
        keys = [(group // 32, begin - end) for _, _, group, begin, end in cta]
        assert keys == sorted(keys)


def test_more_groups_than_go_with_a_launch(finder: Finder) -> None:
    draw = random.Random(1)
    ks = [128 * draw.choice((0, 1, 5)) for _ in range(300)]
    ctas = finder.tiles(ks, 10, 8, sum(ks), in_memory=True)
    assert Counter(tile for cta in ctas for tile in cta) == finder.expected(ks, 10, 8)


def test_nonsense_stays_within_the_columns_there_are(finder: Finder) -> None:
    """Without KGEN_CHECK nobody looks: results are wrong then, but nothing else is touched."""
    draw = random.Random(2)
    for _ in range(30):
        columns = 128 * draw.randrange(1, 40)
        choices = (-(2**31), -128, -1, 0, 1, 100, 128, 300, 4000, 2**31 - 1)
        ks = [draw.choice(choices) for _ in range(draw.randrange(1, 90))]
        ctas = finder.tiles(ks, finder.block_m, finder.block_n, columns, in_memory=True)
        for _, _, group, begin, end in (tile for cta in ctas for tile in cta):
            assert 0 <= group < len(ks)
            assert 0 <= begin <= end <= columns // 128
