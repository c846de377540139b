// Types. The source includes nothing, so that NVRTC needs no headers.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short u16;

// A CUtensorMap, opaque to the kernel.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

// Everything a launch hands over, in one block of parameters. `sfa_direct` = 1: the scales of A are
// read through their strides; 0: by TMA through map_sfa. Strides count elements. `bias` is contiguous,
// of D's type; null where the problem has none.
struct alignas(64) GemmArgs {
    TensorMap map_a, map_b, map_d, map_sfa;
    const float* sfa;
    const float* sfb;
    i64 sfa_stride_m, sfa_stride_k;
    i64 sfb_stride_n, sfb_stride_k;
    u32 m, n, k;
    u32 sfa_direct;
    void* d;
    i64 d_stride_m;
    const unsigned char* a;
    const unsigned char* b;
    i64 a_stride_m, b_stride_n;
    const void* bias;
};
static_assert(sizeof(GemmArgs) == 640, "the host packs 640 bytes");
