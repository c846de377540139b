// A reader of the queue of tiles: a thread, or a whole warp that arrives as one.
template <bool kIsWarp>
struct TileQueue {
    const u32 smem, k_blocks;
    Ring<kQueueSlots> slot;

    __device__ __forceinline__ TileQueue(const Extent& extent, u32 smem) : smem(smem), k_blocks(extent.k_blocks) {}

    // The next piece of work; false when none is left.
    __device__ __forceinline__ bool next(Work& work) {
        mbarrier_wait(smem + kQueueFullOffset + slot.index * 8, slot.parity);
        const u32 read = smem + kQueueReadOffset + slot.index * 8;
        const bool is_left = peek(work);
        if (kIsWarp) __syncwarp();
        if (!kIsWarp || threadIdx.x % 32 == 0) mbarrier_arrive(read);
        return is_left;
    }

    // The same for the warp that put it there.
    __device__ __forceinline__ bool peek(Work& work) {
        work.load(smem + kQueueOffset + slot.index * kQueueTileBytes, k_blocks);
        slot.advance();
        return work.group != kNoGroup;
    }
};
