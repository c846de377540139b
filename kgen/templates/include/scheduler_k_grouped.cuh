// ---- kind k_grouped: how the tiles, and the K blocks of each, are found on the device.

// Sizes of a launch in blocks; `k_blocks` of all groups together.
struct Extent {
    u32 m_clusters, n_clusters, k_blocks, b_scale_rows;

    __device__ __forceinline__ Extent(u32 m, u32 n, u32 k)
        : m_clusters((m + kBlockM * kClusterM - 1) / (kBlockM * kClusterM)),
          n_clusters((n + kBlockN * kClusterN - 1) / (kBlockN * kClusterN)),
          k_blocks(k / kBlockK),
          b_scale_rows((n + 127) / 128) {}
};

// What a CTA does at a time: the first row and column of a tile of a group's D, and the K blocks that are
// the group's. Blocks count from the first group's first.
struct Work {
    u32 m0, n0, group, k_begin, k_end;

    // The row that its scales of A are loaded from.
    __device__ __forceinline__ u32 sfa_m0() const { return m0; }

    // From a slot of the queue, {m0, n0, group, k_begin}, {k_end, ...}.
    __device__ __forceinline__ void load(u32 slot) {
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m0), "=r"(n0), "=r"(group), "=r"(k_begin)
                     : "r"(slot)
                     : "memory");
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(k_end) : "r"(slot + 16) : "memory");
    }
};
constexpr u32 kNoGroup = 0xffffffff;

// Groups, 32 at a time, a lane for each, those with the most K blocks first, since the last tiles decide
// when all are done. Groups without columns have no tiles where D is added to.
struct GroupWindow {
    static constexpr u32 kGroups = 32;
    const WgradArgs& args;
    const u32 k_blocks, lane;
    u32 base, past, start;          // first group held; groups with tiles up to the last one held; K blocks so far
    u32 count;                      // groups with tiles in the window
    u32 group, k_begin, num_blocks; // of this lane

    // Before the first group.
    __device__ __forceinline__ GroupWindow(const WgradArgs& args, u32 k_blocks, u32 lane)
        : args(args), k_blocks(k_blocks), lane(lane), base(0 - kGroups), past(0), start(0), count(0) {}

    // The group that comes `place`-th, with its K blocks; false past the last. Asked for in ascending order.
    __device__ __forceinline__ bool find(u32 place, Work& work) {
        while (place >= past) {
            if (base + kGroups >= args.groups) return false;
            hold(base + kGroups);
        }
        const u32 from = place - (past - count);
        work.group = __shfl_sync(0xffffffff, group, from);
        work.k_begin = __shfl_sync(0xffffffff, k_begin, from);
        work.k_end = work.k_begin + __shfl_sync(0xffffffff, num_blocks, from);
        return true;
    }

    // K blocks never pass the columns there are, whatever `ks` says.
    __device__ __forceinline__ void hold(u32 first) {
        base = first;
        const int* ks = args.ks ? args.ks : args.own_ks;
        const u32 own = base + lane;
        u32 blocks = own < args.groups ? static_cast<u32>(max(ks[own], 0)) / kBlockK : 0;
        u32 end = blocks;
#pragma unroll
        for (u32 distance = 1; distance < 32; distance *= 2) {
            const u32 left = __shfl_up_sync(0xffffffff, end, distance);
            if (lane >= distance) end += left;
        }
        u32 begin = min(start + end - blocks, k_blocks);
        blocks = min(blocks, k_blocks - begin);
        start = min(start + __shfl_sync(0xffffffff, end, 31), k_blocks);
        const u32 from = rank_by_length(blocks);
        k_begin = __shfl_sync(0xffffffff, begin, from);
        num_blocks = __shfl_sync(0xffffffff, blocks, from);
        group = base + from;
        count = __popc(__ballot_sync(0xffffffff, group < args.groups && (!kAccumulates || num_blocks)));
        past += count;
    }

    // The lane whose group belongs here when the longest comes first, the lower one of two that are equal
    // (Batcher's bitonic sort over the lanes).
    __device__ __forceinline__ u32 rank_by_length(u32 blocks) const {
        u32 key = blocks * 32 + (31 - lane);
#pragma unroll
        for (u32 run = 2; run <= 32; run *= 2) {
#pragma unroll
            for (u32 distance = run / 2; distance > 0; distance /= 2) {
                const u32 other = __shfl_xor_sync(0xffffffff, key, distance);
                const bool is_lower = !(lane & distance), falls = !(lane & run);
                key = is_lower == falls ? max(key, other) : min(key, other);
            }
        }
        return 31 - key % 32;
    }
};

// What finds this CTA's tiles, by a whole warp: every step-th of a walk over the groups, each in strips of
// kRasterGroup blocks along one dimension. CTAs of a cluster find the same ones, side by side.
struct TileFinder {
    const u32 smem, m_clusters, n_clusters, rank_m, rank_n, lane;
    GroupWindow groups;
    Ring<kQueueSlots> slot;
    u32 tile;
    bool is_done = false;

    __device__ __forceinline__ TileFinder(const WgradArgs& args, const Extent& extent, u32 smem, u32 rank, u32 lane)
        : smem(smem),
          m_clusters(extent.m_clusters),
          n_clusters(extent.n_clusters),
          rank_m(rank % kClusterM),
          rank_n(rank / kClusterM),
          lane(lane),
          groups(args, extent.k_blocks, lane),
          tile(blockIdx.x / kClusterSize) {}

    // Finds one more tile, or the end, and puts it into the queue; nothing after the end.
    __device__ __forceinline__ void find() {
        if (is_done) return;
        const u32 tiles = m_clusters * n_clusters;
        Work work;
        is_done = !groups.find(tile / tiles, work);
        if (is_done) work = {0, 0, kNoGroup, 0, 0};
        else locate(tile % tiles, work);
        tile += gridDim.x / kClusterSize;
        put(work);
    }

    __device__ __forceinline__ void put(const Work& work) {
        mbarrier_wait(smem + kQueueReadOffset + slot.index * 8, slot.parity ^ 1);
        if (lane == 0) {
            const u32 at = smem + kQueueOffset + slot.index * kQueueTileBytes;
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(at + 16), "r"(work.k_end) : "memory");
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(work.m0), "r"(work.n0),
                         "r"(work.group), "r"(work.k_begin)
                         : "memory");
            mbarrier_arrive(smem + kQueueFullOffset + slot.index * 8);
        }
        __syncwarp();
        slot.advance();
    }

    __device__ __forceinline__ void locate(u32 within, Work& work) const {
        const u32 along = kRasterAlongM ? m_clusters : n_clusters, across = kRasterAlongM ? n_clusters : m_clusters;
        const u32 strip = within / (kRasterGroup * across), rest = within % (kRasterGroup * across);
        const u32 width = min(kRasterGroup, along - strip * kRasterGroup);
        const u32 at_along = strip * kRasterGroup + rest % width, at_across = rest / width;
        work.m0 = ((kRasterAlongM ? at_along : at_across) * kClusterM + rank_m) * kBlockM;
        work.n0 = ((kRasterAlongM ? at_across : at_along) * kClusterN + rank_n) * kBlockN;
    }
};
