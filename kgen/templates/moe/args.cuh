// What the kernels that sort, gather and add up rows are handed.
struct RouteArgs {
    const void* ids;     // [count], expert of each choice; out of range: dropped
    int* source_rows;    // [capacity], -1 where no row is
    int* positions;      // [count], -1 where dropped
    int* offsets;        // [experts + 1]
    int* row_experts;    // [capacity], -1 where no row is
    int* counts;         // [experts]
    int* chunk_counts;   // [chunks][experts], then their sums over the chunks before
    u32 count, experts, top_k, alignment, capacity, chunks;
};
static_assert(sizeof(RouteArgs) == 80, "the host packs 80 bytes");

struct RowsArgs {
    const u8* x;             // rows to gather, or to add up
    const int* rows;         // gather: [m] row of x; combine: [m][top_k]
    u8* out;
    const float* scales;     // gather: of x; combine: weights [m][top_k]
    float* out_scales;
    i64 x_stride, out_stride;  // bytes
    i64 scales_stride_m, scales_stride_k, out_scales_stride_m, out_scales_stride_k;
    u32 m, width, x_rows, blocks;  // width: bytes of a row (gather), columns (combine)
    u32 top_k, unused;
};
static_assert(sizeof(RowsArgs) == 112, "the host packs 112 bytes");
