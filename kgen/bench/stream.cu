// How long do N x K bytes need into shared memory? Bulk copies of kChunkBytes, kStages in flight a CTA.
// With `check` the landed words are added up: slow, and proof that they came.

__device__ __forceinline__ void bulk_load(u32 destination, const unsigned char* source, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            destination),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ u32 load_shared_word(u32 address) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

extern "C" __global__ void __launch_bounds__(32, 1)
    kgen_stream(const unsigned char* weights, u64 bytes, u32* sum, u32 check) {
    extern __shared__ __align__(128) unsigned char stages[];
    __shared__ __align__(8) u64 barriers[kStages];
    if (threadIdx.x != 0) return;
    const u32 data = smem_address(stages), barrier = smem_address(barriers);
    for (u32 i = 0; i < kStages; ++i) mbarrier_init(barrier + 8 * i, 1);
    mbarrier_init_fence();

    const u64 num_chunks = (bytes + kChunkBytes - 1) / kChunkBytes;
    u64 next = blockIdx.x;
    auto chunk_bytes = [&](u64 chunk) {
        const u64 left = bytes - chunk * kChunkBytes;
        return left < kChunkBytes ? static_cast<u32>(left) : kChunkBytes;
    };
    auto issue = [&](u32 stage) {
        const u32 size = chunk_bytes(next);
        mbarrier_arrive_expect(barrier + 8 * stage, size);
        bulk_load(data + kChunkBytes * stage, weights + next * kChunkBytes, size, barrier + 8 * stage);
        next += gridDim.x;
    };
    for (u32 i = 0; i < kStages && next < num_chunks; ++i) issue(i);

    u32 stage = 0, parity = 0, total = 0;
    for (u64 chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
        mbarrier_wait(barrier + 8 * stage, parity);
        if (check) {
            const u32 size = chunk_bytes(chunk);
            for (u32 i = 0; i < size; i += 4) total += load_shared_word(data + kChunkBytes * stage + i);
            fence_async_proxy();
        }
        if (next < num_chunks) issue(stage);
        if (++stage == kStages) stage = 0, parity ^= 1;
    }
    if (check) atomicAdd(sum, total);
}
