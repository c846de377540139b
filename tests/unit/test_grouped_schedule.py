"""The device code that finds tiles, run on the CPU as it is written: every tile once, no other.

g++ compiles kgen/templates/include/scheduler_grouped.cuh against tests/unit/warp_emulation.h, in
which 32 fibers stand for a warp's lanes; only the store to shared memory is replaced.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

INCLUDE = Path(__file__).parents[2] / "kgen" / "templates" / "include"
_STORE = re.compile(r'asm volatile\("st\.shared\.v4.*?"memory"\);', re.DOTALL)

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")

_MAIN = """
static GroupedArgs args;
static unsigned rank_now, n_now;
static void body() {
    const Extent extent(args.m, n_now, 128);
    TileFinder finder(args, extent, 0, rank_now, lane_now);
    while (!finder.is_done) finder.find();
}
int main() {
    unsigned grid, count;
    unsigned* numbers[] = {&grid, &args.m, &n_now, &args.groups, &args.by_index, &count};
    for (unsigned* number : numbers)
        if (std::scanf("%u", number) != 1) return 2;
    std::vector<int> layout(count);
    for (int& value : layout)
        if (std::scanf("%d", &value) != 1) return 2;
    args.layout = layout.data();
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
    masked: bool
    block_m: int
    block_n: int
    cluster_n: int

    def tiles(
        self, layout: list[int], m: int, n: int, groups: int, *, by_index: bool = False
    ) -> list[list[tuple[int, int, int, int]]]:
        """By CTA: (m0, n0, group, m_end) in the order found, without the end's mark."""
        grid = 12
        words = [grid, m, n, groups, int(by_index), len(layout), *layout]
        done = subprocess.run(
            [self.program],
            input=" ".join(map(str, words)),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        ctas: list[list[tuple[int, int, int, int]]] = [[]]
        for line in done.stdout.splitlines():
            m0, n0, group, m_end = map(int, line.split())
            if group == 0xFFFFFFFF:
                ctas.append([])
            else:
                ctas[-1].append((m0, n0, group, m_end))
        assert len(ctas) == grid + 1, "each CTA ends with one mark"
        assert not ctas.pop()
        return ctas

    def columns(self, n: int) -> list[int]:
        """First columns of all tiles, those that a cluster has past N included."""
        step = self.block_n * self.cluster_n
        return list(range(0, -(-n // step) * step, self.block_n))


#: masked, block_m, block_n, cluster_n, along m, raster_group.
VARIANTS = (
    (False, 64, 72, 1, "true", 4),
    (False, 128, 128, 2, "false", 8),
    (True, 16, 40, 1, "false", 4),
    (True, 192, 128, 2, "true", 8),
)


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda v: "-".join(map(str, v)))
def finder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finder:
    masked, block_m, block_n, cluster_n, along_m, group = request.param
    constants = {
        "kBlockM": block_m,
        "kBlockN": block_n,
        "kBlockK": 128,
        "kClusterN": cluster_n,
        "kClusterSize": cluster_n,
        "kRasterGroup": group,
        "kQueueOffset": 0,
        "kQueueSlots": 4,
        "kQueueTileBytes": 16,
        "kQueueFullOffset": 0,
        "kQueueReadOffset": 0,
    }
    scheduler = (INCLUDE / "scheduler_grouped.cuh").read_text()
    put = r'std::printf("%u %u %u %u\n", m0, n0, group, m_end);'
    scheduler, replaced = _STORE.subn(lambda _: put, scheduler)
    assert replaced == 1
    types = (INCLUDE / "types.cuh").read_text()
    parts = [
        f'#include "{Path(__file__).with_name("warp_emulation.h")}"',
        types,
        *(f"constexpr u32 {name} = {value};" for name, value in constants.items()),
        f"constexpr bool kMasked = {'true' if masked else 'false'}, kRasterAlongM = {along_m};",
        "#define threadIdx (Index{(unsigned)lane_now})",
        "constexpr u64 kEvictFirst = 0;",
        "inline void mbarrier_wait(u32, u32) {}",
        "inline void mbarrier_arrive(u32) {}",
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
    return Finder(program, masked, block_m, block_n, cluster_n)


def groupings() -> Iterator[list[int]]:
    """Rows of groups: adversarial ones first, then random ones."""
    yield [0]
    yield [1]
    yield [700]
    yield [0, 0, 0]
    yield [0] * 127 + [33]
    yield [33] + [0] * 127
    yield [0] * 128 + [1]
    yield [0] * 300 + [65, 0, 64, 63, 0, 1]
    yield [1] * 131
    yield [63, 64, 65, 0, 127, 128, 129, 0, 0, 191, 192, 193]
    draw = random.Random(0)
    for count in (3, 32, 33, 127, 128, 129, 256, 384):
        yield [draw.choice((0, 0, 1, 17, 64, 100, 300)) for _ in range(count)]


def expected(finder: Finder, sizes: list[int], n: int) -> Counter[tuple[int, int, int, int]]:
    """Every tile of every group."""
    found: Counter[tuple[int, int, int, int]] = Counter()
    first = 0
    for group, size in enumerate(sizes):
        start = 0 if finder.masked else first
        for m0 in range(start, start + size, finder.block_m):
            for n0 in finder.columns(n):
                found[m0, n0, group, start + size] += 1
        first += size
    return found


@pytest.mark.parametrize("sizes", list(groupings()), ids=lambda s: f"{len(s)}x{sum(s)}")
def test_every_tile_is_found_once(sizes: list[int], finder: Finder) -> None:
    n = 3 * finder.block_n - 8
    if finder.masked:
        layout, m = sizes, max(*sizes, 1)
    else:
        layout = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        m = layout[-1] + 5
    ctas = finder.tiles(layout, m, n, len(sizes))
    assert Counter(tile for cta in ctas for tile in cta) == expected(finder, sizes, n)
    counts = [len(cta) for cta in ctas]
    assert max(counts) - min(counts) <= 1, "the work is shared out evenly"
    for first in range(0, len(ctas), finder.cluster_n):  # the CTAs of a cluster work side by side
        cluster = ctas[first : first + finder.cluster_n]
        for beside in zip(*cluster, strict=True):
            assert len({(m0, group) for m0, _, group, _ in beside}) == 1
            assert [n0 - beside[0][1] for _, n0, _, _ in beside] == [
                finder.block_n * i for i in range(finder.cluster_n)
            ]


def test_rows_tell_their_groups(finder: Finder) -> None:
    if finder.masked:
        pytest.skip("contiguous only")
    draw = random.Random(1)
    for blocks in (1, 2, 7, 40):
        index: list[int] = []
        for _ in range(blocks):
            group, size = draw.randrange(6), draw.choice((0, 1, 63, 64, 65, 127, 128))
            own = [group if draw.random() < 0.8 else -1 for _ in range(size)]
            index += own + [-1] * (128 - size)
        index = index[: len(index) - draw.choice((0, 30))]
        m, n = len(index), 2 * finder.block_n
        wanted: Counter[tuple[int, int, int, int]] = Counter()
        for m0 in range(0, m, finder.block_m):
            rows = index[m0 : m0 + finder.block_m]
            if max(rows) >= 0:
                whole = len(rows) == finder.block_m and min(rows) >= 0
                end = m0 + finder.block_m if whole else 0
                wanted.update((m0, n0, max(rows), end) for n0 in finder.columns(n))
        ctas = finder.tiles(index, m, n, 6, by_index=True)
        assert Counter(tile for cta in ctas for tile in cta) == wanted


def test_nonsense_stays_within_the_rows_there_are(finder: Finder) -> None:
    """Without KGEN_CHECK nobody looks: results are wrong then, but nothing else is touched."""
    draw = random.Random(2)
    for _ in range(20):
        groups, m = draw.randrange(1, 9), draw.choice((1, 100, 500))
        values = [draw.randrange(-300, 900) for _ in range(groups + (not finder.masked))]
        for cta in finder.tiles(values, m, finder.block_n, groups):
            for _, _, group, m_end in cta:
                assert 0 <= group < groups
                assert m_end <= m
        if not finder.masked:
            index = [draw.choice((-7, -1, 0, groups, 99)) for _ in range(m)]
            for cta in finder.tiles(index, m, finder.block_n, groups, by_index=True):
                assert all(0 <= group < groups for _, _, group, _ in cta)
