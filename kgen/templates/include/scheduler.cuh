// Walks the tiles of D. A persistent CTA (in whole clusters) takes every num_clusters-th tile of a
// walk in strips: kRasterGroup blocks along one dimension, then on along the other, so that the
// operands of neighbouring tiles are found in L2.
struct TileScheduler {
    u32 blocks_along, blocks_across, total, step, next_tile;

    __device__ __forceinline__ TileScheduler(u32 m_blocks, u32 n_blocks)
        : blocks_along(kRasterAlongM ? m_blocks : n_blocks),
          blocks_across(kRasterAlongM ? n_blocks : m_blocks),
          total(m_blocks * n_blocks),
          step(gridDim.x / kClusterSize),
          next_tile(blockIdx.x / kClusterSize) {}

    // The next tile in units of clusters; false when none is left.
    __device__ __forceinline__ bool next(u32& m_block, u32& n_block) {
        if (next_tile >= total) return false;
        const u32 strip_tiles = kRasterGroup * blocks_across;
        const u32 first = next_tile / strip_tiles * kRasterGroup;
        const u32 within = next_tile % strip_tiles;
        const u32 width = min(kRasterGroup, blocks_along - first);
        const u32 along = first + within % width, across = within / width;
        m_block = kRasterAlongM ? along : across;
        n_block = kRasterAlongM ? across : along;
        next_tile += step;
        return true;
    }
};

// The ring of pipeline stages: which one is next and which parity its barriers have.
struct Stage {
    u32 index = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++index == kNumStages) {
            index = 0;
            parity ^= 1;
        }
    }
};
