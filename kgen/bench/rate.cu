// How fast do the tensor cores multiply? Two warpgroups a CTA, each WGMMA after WGMMA of 64x256 and 32 bytes of
// K on the same 64 KB of shared memory, nothing promoted. With `check` every thread's accumulators are added up.
// The host puts the 128 accumulators in place of ACCUMULATORS (names) and OPERANDS (constraints), and the
// operands' type in place of TYPES (shape along K, types) and LAYOUTS.

extern "C" __global__ void __launch_bounds__(256, 1)
    kgen_rate(const uint4* values, u32 iterations, float* sums, u32 check) {
    extern __shared__ __align__(1024) uint4 operands[];
    for (u32 i = threadIdx.x; i < kOperandBytes / 16; i += 256)
        operands[i] = values[(i + 64 * blockIdx.x) % (kValueBytes / 16)];
    fence_async_proxy();
    __syncthreads();

    // A: 64 rows of 128 columns for each warpgroup; B: 256 rows, shared, after both.
    const u32 shared = smem_address(operands);
    const u64 a = wgmma_descriptor(shared + 8192 * (threadIdx.x / 128));
    const u64 b = wgmma_descriptor(shared + 32768);
    float d[128];
#pragma unroll
    for (u32 i = 0; i < 128; ++i) d[i] = 0;
    wgmma_fence();
    for (u32 iteration = 0; iteration < iterations; ++iteration) {
#pragma unroll
        for (u32 k = 0; k < 4; ++k)
            asm volatile(
                "wgmma.mma_async.sync.aligned.m64n256TYPES {ACCUMULATORS}, %128, %129, 1, 1, 1LAYOUTS;"
                : OPERANDS
                : "l"(a + 2 * k), "l"(b + 2 * k));
        wgmma_commit();
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    float sum = 0;
#pragma unroll
    for (u32 i = 0; i < 128; ++i) sum += d[i];
    // Compared with what no sum is, so that the products are not dropped where nobody checks.
    if (check || sum == 1.2345e30f) sums[256 * blockIdx.x + threadIdx.x] = sum;
}
