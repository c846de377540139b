// Types, and PTX that CUDA C++ has no words for, of the kernels beside the GEMM. Nothing is included, so
// that NVRTC needs no headers.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short u16;
typedef unsigned char u8;

constexpr u32 kAllLanes = 0xffffffff;

// Sixteen or eight bytes that are read once: they need not stay in L1.
__device__ __forceinline__ uint4 load_16(const void* source) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(source));
    return v;
}

__device__ __forceinline__ float bits_float(u32 bits) { return __uint_as_float(bits); }

__device__ __forceinline__ u32 float_bits(float value) { return __float_as_uint(value); }

// The FP16 number in the low half of a word.
__device__ __forceinline__ float half_float(u32 word) {
    float value;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}" : "=f"(value) : "r"(word));
    return value;
}

// Two numbers as a word of FP16 or BF16, rounded to nearest even.
__device__ __forceinline__ u32 pack_fp16(float low, float high) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// Two numbers as bytes of FP8, to nearest even, NaN as 0x7f.
__device__ __forceinline__ u32 pack_e4m3(float low, float high) {
    u16 bytes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(high), "f"(low));
    return bytes;
}

__device__ __forceinline__ u32 pack_e5m2(float low, float high) {
    u16 bytes;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(high), "f"(low));
    return bytes;
}

// max(a, |b|); NaN if one of them is.
__device__ __forceinline__ float max_abs(float a, float b) {
    float value;
    asm("{\n.reg .f32 magnitude;\nabs.f32 magnitude, %2;\nmax.NaN.f32 %0, %1, magnitude;\n}"
        : "=f"(value)
        : "f"(a), "f"(b));
    return value;
}

// 2^x and 1/x to about two units in the last place.
__device__ __forceinline__ float exp2_approx(float x) {
    float value;
    asm("ex2.approx.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
    float value;
    asm("rcp.approx.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

// The larger of a number that is not negative and what stands there. Most that come find a larger one:
// looking first spares the atomic.
__device__ __forceinline__ void raise_to(float* place, float value) {
    if (value > *reinterpret_cast<volatile float*>(place)) {
        atomicMax(reinterpret_cast<int*>(place), static_cast<int>(float_bits(value)));
    }
}

// The compiler no longer knows what this word holds: what was unpacked from it is unpacked anew, and does not
// lie in registers meanwhile.
__device__ __forceinline__ void forget(u32& word) { asm volatile("" : "+r"(word)); }
