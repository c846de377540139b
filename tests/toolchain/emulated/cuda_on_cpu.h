// Enough of CUDA C++ to run kgen's small kernels on a CPU, thread by thread: each CUDA thread is a fiber, a
// barrier is where fibers take turns. CTAs run one after the other, so shared memory may be static.
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short u16;
typedef unsigned char u8;

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))

struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using std::min;

struct Dim { u32 x; };
static Dim threadIdx, blockIdx, gridDim;
static u8 dynamic_shared[1 << 20] __attribute__((aligned(128)));

// ---- fibers.
struct Fiber {
    ucontext_t context;
    std::vector<u8> stack;
    bool done;
    u32 parity;
};
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static u32 current;

struct Barrier { u32 waiting = 0; u64 generation = 0; };
static Barrier of_cta, of_warp[32];
static u32 slots[2][1024];
static int votes[2][64];

static void yield_fiber() {
    const u32 self = current;
    swapcontext(&fibers[self].context, &scheduler);
}

static void wait_at(Barrier& barrier, u32 count) {
    const u64 generation = barrier.generation;
    if (++barrier.waiting == count) {
        barrier.waiting = 0;
        ++barrier.generation;
        return;
    }
    while (barrier.generation == generation) yield_fiber();
}

inline void __syncthreads() { wait_at(of_cta, fibers.size()); }
inline void __syncwarp() { wait_at(of_warp[current / 32], 32); }

// What a lane gives, kept apart from what it gives next: one barrier an exchange is enough.
static u32* exchange_slots(u32 bits) {
    Fiber& fiber = fibers[current];
    u32* row = slots[fiber.parity ^= 1];
    row[current] = bits;
    __syncwarp();
    return row + current / 32 * 32;
}

template <class T>
static T from_lane(T value, u32 lane) {
    u32 bits;
    memcpy(&bits, &value, 4);
    bits = exchange_slots(bits)[lane % 32];
    memcpy(&value, &bits, 4);
    return value;
}
template <class T> T __shfl_xor_sync(u32, T value, u32 mask) { return from_lane(value, current % 32 ^ mask); }
template <class T> T __shfl_sync(u32, T value, u32 lane) { return from_lane(value, lane); }
template <class T> T __shfl_up_sync(u32, T value, u32 delta) {
    const u32 lane = current % 32;
    return from_lane(value, lane >= delta ? lane - delta : lane);
}
inline bool __any_sync(u32, bool vote) {
    const u32* row = exchange_slots(vote);
    for (u32 i = 0; i < 32; ++i) if (row[i]) return true;
    return false;
}
inline u32 __match_any_sync(u32, u32 value) {
    const u32* row = exchange_slots(value);
    u32 same = 0;
    for (u32 i = 0; i < 32; ++i) same |= static_cast<u32>(row[i] == value) << i;
    return same;
}
inline bool __syncthreads_or(bool vote) {
    static bool any[2];
    static u32 turn;  // of the CTA: all threads meet here as often
    __syncthreads();
    const u32 mine = turn % 2;
    if (vote) any[mine] = true;
    __syncthreads();
    const bool result = any[mine];
    __syncthreads();
    if (current == 0) any[mine] = false, ++turn;
    __syncthreads();
    return result;
}

// ---- arithmetic.
inline float __uint_as_float(u32 bits) { float v; memcpy(&v, &bits, 4); return v; }
inline u32 __float_as_uint(float v) { u32 bits; memcpy(&bits, &v, 4); return bits; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
    const u64 bytes = u64(high) << 32 | low;
    u32 result = 0;
    for (u32 i = 0; i < 4; ++i) result |= u32(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return result;
}
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline int atomicMax(int* place, int value) { const int old = *place; if (value > old) *place = value; return old; }

// ---- in place of casts/device.cuh.
constexpr u32 kAllLanes = 0xffffffff;
inline uint4 load_16(const void* source) {
    if (reinterpret_cast<uintptr_t>(source) % 16) abort();
    uint4 v;
    memcpy(&v, source, 16);
    return v;
}
inline float bits_float(u32 bits) { return __uint_as_float(bits); }
inline u32 float_bits(float value) { return __float_as_uint(value); }

// A number of one sign, `exponents` bits and `mantissas` bits, IEEE-like, to nearest even; saturating if it
// has no infinity to go to.
inline u32 round_to(float v, int exponents, int mantissas, double largest, bool saturate) {
    const u32 sign = float_bits(v) >> 31;
    const int bias = (1 << (exponents - 1)) - 1, width = exponents + mantissas;
    double a = fabs(static_cast<double>(v));
    const int exponent = std::max(a > 0 ? ilogb(a) : -1000, 1 - bias);
    const double step = ldexp(1.0, exponent - mantissas);
    a = nearbyint(a / step) * step;
    if (a > largest) {
        if (!saturate) return sign << width | ((1u << exponents) - 1) << mantissas;
        a = largest;
    }
    if (a < ldexp(1.0, 1 - bias)) return sign << width | static_cast<u32>(a / ldexp(1.0, 1 - bias - mantissas));
    const int e = ilogb(a);
    return sign << width | static_cast<u32>(e + bias) << mantissas |
           (static_cast<u32>(a / ldexp(1.0, e - mantissas)) & ((1u << mantissas) - 1));
}
inline u32 fp8(float v, int e, int m, double largest) { return v != v ? 0x7f : round_to(v, e, m, largest, true); }
inline u32 pack_e4m3(float low, float high) { return fp8(low, 4, 3, 448) | fp8(high, 4, 3, 448) << 8; }
inline u32 pack_e5m2(float low, float high) { return fp8(low, 5, 2, 57344) | fp8(high, 5, 2, 57344) << 8; }
inline u32 pack_fp16(float low, float high) {
    auto one = [](float v) { return v != v ? 0x7fffu : round_to(v, 5, 10, 65504, false); };
    return one(low) | one(high) << 16;
}
inline u32 pack_bf16(float low, float high) {
    auto one = [](float v) { return v != v ? 0x7fffu : round_to(v, 8, 7, 3.3895313892515355e38, false); };
    return one(low) | one(high) << 16;
}
inline float half_float(u32 word) {
    const u32 h = word & 0xffff, exponent = h >> 10 & 31, mantissa = h & 1023;
    const float sign = h >> 15 ? -1.0f : 1.0f;
    if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
    return sign * (exponent ? ldexpf(1024 + mantissa, int(exponent) - 25) : ldexpf(mantissa, -24));
}
inline float max_abs(float a, float b) { b = fabsf(b); return a != a || b != b ? NAN : std::max(a, b); }
inline float exp2_approx(float x) { return exp2f(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }
inline void raise_to(float* place, float value) { if (value > *place) *place = value; }
inline void forget(u32&) {}

// ---- launches.
static void (*body)(const void*);
static const void* body_args;
static void fiber_main() {
    body(body_args);
    fibers[current].done = true;
    while (true) yield_fiber();
}

static void run_kernel(void (*kernel)(const void*), const void* args, u32 grid, u32 threads) {
    body = kernel, body_args = args;
    gridDim.x = grid;
    fibers.resize(threads);
    for (Fiber& fiber : fibers) fiber.stack.resize(64 << 10);
    for (u32 cta = 0; cta < grid; ++cta) {
        blockIdx.x = cta;
        of_cta = Barrier();
        for (Barrier& barrier : of_warp) barrier = Barrier();
        memset(dynamic_shared, 0xa5, sizeof dynamic_shared);
        for (Fiber& fiber : fibers) {
            fiber.done = false, fiber.parity = 0;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, fiber_main, 0);
        }
        for (bool left = true; left;) {
            left = false;
            for (u32 i = 0; i < threads; ++i) {
                if (fibers[i].done) continue;
                left = true;
                current = i, threadIdx.x = i;
                swapcontext(&scheduler, &fibers[i].context);
            }
        }
    }
}
