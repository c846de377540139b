// ---- grouped kinds: what a launch hands over beside GemmArgs, and how the tiles are found on the device.

// `layout` by kind: contiguous: offsets [groups + 1] of the groups' first rows, or with `by_index` the
// group of each row [m], negative ones to be skipped; masked: rows that count of each group [groups].
struct alignas(64) GroupedArgs : GemmArgs {
    const int* layout;
    i64 sfa_stride_g, sfb_stride_g, d_stride_g;
    u32 groups, by_index;
};
static_assert(sizeof(GroupedArgs) == sizeof(GemmArgs) + 64, "the host packs 64 bytes more");

__device__ __forceinline__ const GroupedArgs& grouped(const GemmArgs& args) {
    return static_cast<const GroupedArgs&>(args);
}

// Copies with a third coordinate, the group.
__device__ __forceinline__ void tma_load(u32 destination, const TensorMap* map, u32 inner, u32 outer, u32 group,
                                         u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(destination),
        "l"(map), "r"(inner), "r"(outer), "r"(group), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void tma_load_multicast(u32 destination, const TensorMap* map, u32 inner, u32 outer,
                                                   u32 group, u32 barrier, u32 cta_mask) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(destination),
        "l"(map), "r"(inner), "r"(outer), "r"(group), "r"(barrier), "h"(static_cast<u16>(cta_mask))
        : "memory");
}

__device__ __forceinline__ void tma_load_evict_first(u32 destination, const TensorMap* map, u32 inner, u32 outer,
                                                     u32 group, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(destination),
        "l"(map), "r"(inner), "r"(outer), "r"(group), "r"(barrier), "l"(kEvictFirst)
        : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap* map, u32 source, u32 inner, u32 outer, u32 group) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(source), "r"(inner), "r"(outer), "r"(group)
                 : "memory");
}

// Sizes of a launch in blocks. Along M the groups decide.
struct Extent {
    u32 n_clusters, k_blocks, b_scale_rows;

    __device__ __forceinline__ Extent(u32 m, u32 n, u32 k)
        : n_clusters((n + kBlockN * kClusterN - 1) / (kBlockN * kClusterN)),
          k_blocks((k + kBlockK - 1) / kBlockK),
          b_scale_rows((n + 127) / 128) {}
};

// What a CTA does at a time: the first row and column of a tile of D, its group, the row to stop before
// (kAskRows: `layout` tells it row by row), and all K blocks. Rows count from the group's first where
// groups are masked, from the first of all where they are contiguous.
struct Work {
    u32 m0, n0, group, m_end, k_begin, k_end;

    // The row that its scales of A are loaded from: TMA reads from multiples of 16 bytes only, and a
    // contiguous group may start anywhere.
    __device__ __forceinline__ u32 sfa_m0() const { return kMasked ? m0 : m0 & ~3u; }

    // Whether every row of the tile is stored.
    __device__ __forceinline__ bool is_whole() const { return m_end >= m0 + kBlockM; }

    // From a slot of the queue, {m0, n0, group, m_end}.
    __device__ __forceinline__ void load(u32 slot, u32 k_blocks) {
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m0), "=r"(n0), "=r"(group), "=r"(m_end)
                     : "r"(slot)
                     : "memory");
        k_begin = 0;
        k_end = k_blocks;
    }
};
constexpr u32 kAskRows = 0, kNoGroup = 0xffffffff;

// The scales of the operands that a piece of work belongs to.
__device__ __forceinline__ const float* sfa_of(const GemmArgs& args, const Work& work) {
    return args.sfa + (kMasked ? work.group * grouped(args).sfa_stride_g : 0);
}
__device__ __forceinline__ const float* sfb_of(const GemmArgs& args, const Work& work) {
    return args.sfb + work.group * grouped(args).sfb_stride_g;
}

// Row counts of 32 * kWindows groups at a time, a lane for each of kWindows groups, and the running sum
// of their blocks along M.
struct GroupWalk {
    static constexpr u32 kWindows = 4;
    const GroupedArgs& args;
    const u32 lane;
    u32 base, before, past;    // first group held; blocks of the groups before it, and up to the last one held
    u32 blocks_up_to[kWindows];

    // Before the first group.
    __device__ __forceinline__ GroupWalk(const GroupedArgs& args, u32 lane)
        : args(args), lane(lane), base(0 - 32 * kWindows), before(0), past(0) {}

    __device__ __forceinline__ u32 first_row(u32 group) const {
        return kMasked ? 0 : static_cast<u32>(args.layout[group]);
    }

    // One past a group's last row: never past the rows there are, whatever `layout` says.
    __device__ __forceinline__ u32 end_row(u32 group) const {
        const int end = args.layout[kMasked ? group : group + 1];
        return min(static_cast<u32>(max(end, 0)), args.m);
    }

    // Reads whatever `group` is, so that the reads of all windows are under way at once.
    __device__ __forceinline__ u32 blocks_of(u32 group) const {
        const u32 there = min(group, args.groups - 1), first = first_row(there), end = end_row(there);
        return group < args.groups && end > first ? (end - first + kBlockM - 1) / kBlockM : 0;
    }

    __device__ __forceinline__ void hold(u32 group, u32 blocks_before) {
        base = group;
        before = past = blocks_before;
#pragma unroll
        for (u32 i = 0; i < kWindows; ++i) blocks_up_to[i] = blocks_of(base + i * 32 + lane);
#pragma unroll
        for (u32 i = 0; i < kWindows; ++i) {
#pragma unroll
            for (u32 distance = 1; distance < 32; distance *= 2) {
                const u32 left = __shfl_up_sync(0xffffffff, blocks_up_to[i], distance);
                if (lane >= distance) blocks_up_to[i] += left;
            }
            blocks_up_to[i] += past;
            past = __shfl_sync(0xffffffff, blocks_up_to[i], 31);
        }
    }

    // The group that a block along M belongs to, with its first block and their number; false past the
    // last group. Blocks are asked for in ascending order.
    __device__ __forceinline__ bool find(u32 block, u32& group, u32& first, u32& count) {
        while (block >= past) {
            if (base + 32 * kWindows >= args.groups) return false;
            hold(base + 32 * kWindows, past);
        }
        u32 left = before;
#pragma unroll
        for (u32 i = 0; i < kWindows; ++i) {
            const u32 right = __shfl_sync(0xffffffff, blocks_up_to[i], 31);
            const u32 later = __ballot_sync(0xffffffff, block < blocks_up_to[i]);
            if (block < right && block >= left) {
                const u32 at = __ffs(later) - 1;
                const u32 previous = __shfl_sync(0xffffffff, blocks_up_to[i], at ? at - 1 : 0);
                group = base + i * 32 + at;
                first = at ? previous : left;
                count = __shfl_sync(0xffffffff, blocks_up_to[i], at) - first;
            }
            left = right;
        }
        return true;
    }
};

// What finds this CTA's tiles, by a whole warp: every step-th of a walk over the groups, each in strips of
// kRasterGroup blocks along one dimension. CTAs of a cluster find the same ones, side by side along N.
struct TileFinder {
    const GroupedArgs& args;
    const u32 smem, n_clusters, rank, lane;
    GroupWalk groups;
    Ring<kQueueSlots> slot;
    u32 tile;
    bool is_done = false;

    __device__ __forceinline__ TileFinder(const GroupedArgs& args, const Extent& extent, u32 smem, u32 rank, u32 lane)
        : args(args),
          smem(smem),
          n_clusters(extent.n_clusters),
          rank(rank),
          lane(lane),
          groups(args, lane),
          tile(blockIdx.x / kClusterSize) {}

    // Finds one more tile, or the end, and puts it into the queue; nothing after the end.
    __device__ __forceinline__ void find() {
        if (is_done) return;
        u32 m0 = 0, n0 = 0, group = kNoGroup, m_end = 0;
        is_done = !(!kMasked && args.by_index ? find_by_row(m0, n0, group, m_end) : find_by_group(m0, n0, group, m_end));
        put(m0, n0, is_done ? kNoGroup : group, m_end);
    }

    __device__ __forceinline__ void put(u32 m0, u32 n0, u32 group, u32 m_end) {
        mbarrier_wait(smem + kQueueReadOffset + slot.index * 8, slot.parity ^ 1);
        if (lane == 0) {
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(smem + kQueueOffset + slot.index * kQueueTileBytes),
                         "r"(m0), "r"(n0), "r"(group), "r"(m_end)
                         : "memory");
            mbarrier_arrive(smem + kQueueFullOffset + slot.index * 8);
        }
        __syncwarp();
        slot.advance();
    }

    // Which of m_blocks x n_clusters blocks comes `within`-th.
    __device__ __forceinline__ void locate(u32 within, u32 m_blocks, u32& m_block, u32& n0) const {
        const u32 along = kRasterAlongM ? m_blocks : n_clusters, across = kRasterAlongM ? n_clusters : m_blocks;
        const u32 strip = within / (kRasterGroup * across), rest = within % (kRasterGroup * across);
        const u32 width = min(kRasterGroup, along - strip * kRasterGroup);
        const u32 at_along = strip * kRasterGroup + rest % width, at_across = rest / width;
        m_block = kRasterAlongM ? at_along : at_across;
        n0 = ((kRasterAlongM ? at_across : at_along) * kClusterN + rank) * kBlockN;
    }

    // Groups told by their rows: offsets or counts.
    __device__ __forceinline__ bool find_by_group(u32& m0, u32& n0, u32& group, u32& m_end) {
        u32 first, count, m_block;
        if (!groups.find(tile / n_clusters, group, first, count)) return false;
        locate(tile - first * n_clusters, count, m_block, n0);
        m0 = groups.first_row(group) + m_block * kBlockM;
        m_end = groups.end_row(group);
        tile += gridDim.x / kClusterSize;
        return true;
    }

    // Groups told row by row: a tile belongs to the group of its rows that are not to be skipped.
    __device__ __forceinline__ bool find_by_row(u32& m0, u32& n0, u32& group, u32& m_end) {
        const u32 m_blocks = (args.m + kBlockM - 1) / kBlockM;
        while (tile < m_blocks * n_clusters) {
            u32 m_block;
            locate(tile, m_blocks, m_block, n0);
            tile += gridDim.x / kClusterSize;
            m0 = m_block * kBlockM;
            int highest = -1;
            bool all = true;
#pragma unroll
            for (u32 i = 0; i < kBlockM; i += 32) {
                const u32 row = m0 + i + lane;
                const int index = i + lane < kBlockM && row < args.m ? args.layout[row] : -1;
                if (i + lane < kBlockM) all = all && index >= 0;
                highest = max(highest, index);
            }
            highest = __reduce_max_sync(0xffffffff, highest);
            all = __all_sync(0xffffffff, all);
            if (highest < 0 || highest >= static_cast<int>(args.groups)) continue;
            group = highest;
            m_end = all ? m0 + kBlockM : kAskRows;
            return true;
        }
        return false;
    }
};
