
__device__ __forceinline__ uint4 load_shared_uint4(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

// Up to 64 staged rows of D from row `first` on, as far as they are the group's own, 16 bytes a lane at a
// time: a TMA store can not stop at a row. N is a multiple of 8, D's address and pitches multiples of 16
// bytes: no piece is cut or unaligned.
__device__ __forceinline__ void store_rows(const GroupedArgs& args, const Work& work, u32 n, u32 base, u32 first,
                                           u32 lane) {
    constexpr u32 pieces = kBlockN * kDBytes / 16;
    unsigned char* d = static_cast<unsigned char*>(args.d);
    if (kMasked) d += work.group * args.d_stride_g * static_cast<i64>(kDBytes);
    const bool ask = work.m_end == kAskRows;
    const u32 end = ask ? args.m : work.m_end;
    const u32 rows = end > first ? min(kDBoxRows, end - first) : 0;
#pragma unroll 2
    for (u32 i = lane; i < rows * pieces; i += 32) {
        const u32 row = i / pieces, byte_column = i % pieces * 16;
        const u32 column = work.n0 + byte_column / kDBytes;
        if (column >= n || (ask && args.layout[first + row] < 0)) continue;
        const i64 at = (first + row) * args.d_stride_m + column;
        *reinterpret_cast<uint4*>(d + at * static_cast<i64>(kDBytes)) =
            load_shared_uint4(d_address(base, row, byte_column));
    }
}

// One warp finds this CTA's tiles and stores them, as that of dense kernels does. It is kQueueSlots - 1
// tiles ahead with finding, which all readers of a slot are done with once a tile is stored.
__device__ __forceinline__ void find_and_store_tiles(const GroupedArgs& args, const Extent& extent, u32 n, u32 smem,
                                                     u32 rank, u32 lane) {
    TileFinder finder(args, extent, smem, rank, lane);
    TileQueue<false> own(extent, smem);
    Work work;
    for (u32 i = 0; i + 1 < kQueueSlots; ++i) finder.find();
    while (own.peek(work)) {
        finder.find();
        if (lane == 0) tma_store_wait_read();
        __syncwarp();
        for (u32 i = 0; i < kNumMathWarpgroups; ++i) named_arrive(free_barrier(i), kStoreThreads);
        for (u32 i = 0; i < kNumMathWarpgroups; ++i) {
            named_sync(staged_barrier(i), kStoreThreads);
#pragma unroll 1
            for (u32 wave = 0; wave < kNumWaves; ++wave) {
                const u32 base = smem + kDOffset + (i * kNumWaves + wave) * kNumDBoxes * kDBoxBytes;
                const u32 first = work.m0 + i * kWarpgroupM + wave * 64;
                if (!work.is_whole()) {
                    store_rows(args, work, n, base, first, lane);
                } else if (lane == 0) {
                    for (u32 box = 0; box < kNumDBoxes; ++box) {
                        const u32 source = base + box * kDBoxBytes, column = work.n0 + box * kDBoxColumns;
                        if (kMasked) tma_store(&args.map_d, source, column, first, work.group);
                        else tma_store(&args.map_d, source, column, first);
                    }
                }
            }
            if (lane == 0) tma_store_commit();
            __syncwarp();
        }
    }
    if (lane == 0) tma_store_wait_read();  // they still read shared memory
}
