// Sizes of a launch in blocks.
struct Extent {
    u32 m_clusters, n_clusters, k_blocks, b_scale_rows;

    __device__ __forceinline__ Extent(u32 m, u32 n, u32 k)
        : m_clusters((m + kBlockM * kClusterM - 1) / (kBlockM * kClusterM)),
          n_clusters((n + kBlockN * kClusterN - 1) / (kBlockN * kClusterN)),
          k_blocks((k + kBlockK - 1) / kBlockK),
          b_scale_rows((n + 127) / 128) {}
};

// What a CTA does at a time: the first row and column of a tile of D, and the K blocks that it adds up.
struct Work {
    u32 m0, n0, k_begin, k_end;

    // The row that its scales of A are loaded from.
    __device__ __forceinline__ u32 sfa_m0() const { return m0; }
};

// The scales of the operands that a piece of work belongs to.
__device__ __forceinline__ const float* sfa_of(const GemmArgs& args, const Work&) { return args.sfa; }
__device__ __forceinline__ const float* sfb_of(const GemmArgs& args, const Work&) { return args.sfb; }

// Walks the tiles of D. A persistent CTA (in whole clusters) takes every step-th tile of a walk in
// strips: kRasterGroup blocks along one dimension, then on along the other, so that the operands of
// neighbouring tiles are found in L2.
// A split along K gives each CTA of a cluster a share of every tile's K blocks.
struct TileScheduler {
    const u32 blocks_along, blocks_across, total, k_blocks, rank_m, rank_n, split_rank, step;
    u32 next_tile;

    __device__ __forceinline__ TileScheduler(const Extent& extent, u32 rank)
        : blocks_along(kRasterAlongM ? extent.m_clusters : extent.n_clusters),
          blocks_across(kRasterAlongM ? extent.n_clusters : extent.m_clusters),
          total(extent.m_clusters * extent.n_clusters),
          k_blocks(extent.k_blocks),
          rank_m(kSplitK > 1 ? 0 : rank % kClusterM),
          rank_n(kSplitK > 1 ? 0 : rank / kClusterM),
          split_rank(kSplitK > 1 ? rank : 0),
          step(gridDim.x / kClusterSize),
          next_tile(blockIdx.x / kClusterSize) {}

    // The next piece of work; false when none is left.
    __device__ __forceinline__ bool next(Work& work) {
        if (next_tile >= total) return false;
        locate(next_tile, work);
        work.k_begin = kSplitK == 1 ? 0 : k_blocks * split_rank / kSplitK;
        work.k_end = kSplitK == 1 ? k_blocks : k_blocks * (split_rank + 1) / kSplitK;
        next_tile += step;
        return true;
    }

    __device__ __forceinline__ void locate(u32 tile, Work& work) const {
        const u32 strip_tiles = kRasterGroup * blocks_across;
        const u32 first = tile / strip_tiles * kRasterGroup;
        const u32 within = tile % strip_tiles;
        const u32 width = min(kRasterGroup, blocks_along - first);
        const u32 along = first + within % width, across = within / width;
        work.m0 = ((kRasterAlongM ? along : across) * kClusterM + rank_m) * kBlockM;
        work.n0 = ((kRasterAlongM ? across : along) * kClusterN + rank_n) * kBlockN;
    }
};
