// What a cast is handed. Strides count elements; `_m` from row to row of what is scaled, `_k` from block to
// block along it, `_g` from group to group. `qt` and `sft` belong to the transposed result, whose rows are
// the columns of x.
struct CastArgs {
    const void* x;
    u8* q;
    float* sf;
    u8* qt;
    float* sft;
    float* amax;         // the largest finite magnitude, raised
    float* row_amax;     // of each row and column: one pass leaves them for the next
    float* column_amax;
    const int* rows;     // gather: the row of x that a row of q comes from; out of range: none
    const int* counts;   // masked: rows of each group
    i64 x_stride, q_stride, qt_stride;
    i64 sf_stride_m, sf_stride_k, sft_stride_m, sft_stride_k;
    i64 x_stride_g, q_stride_g, sf_stride_g;
    u32 m, k, x_rows, groups;
    const float* weights;  // SwiGLU: of each row, [groups][m]
};
static_assert(sizeof(CastArgs) == 184, "the host packs 184 bytes");
