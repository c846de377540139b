"""Small kernels: one for each thing that a compiler does, or must not do, to ours."""

from __future__ import annotations

PLAIN = """
extern "C" __global__ void __launch_bounds__(128) kgen_gemm(const float* in, float* out, int n) {
    __shared__ float tile[100];
    tile[threadIdx.x % 100] = in[threadIdx.x];
    __syncthreads();
    for (int i = 0; i < n; ++i) out[i] = tile[(i + threadIdx.x) % 100] * in[i];
}
"""

STACK = """
extern "C" __global__ void kgen_gemm(const float* in, float* out, int n) {
    float local[64];
    for (int i = 0; i < 64; ++i) local[i] = in[i];
    for (int i = 0; i < n; ++i) local[int(in[i])] += local[i & 63];
    out[n] = local[int(in[3])];
}
"""

SPILL = """
extern "C" __global__ void __launch_bounds__(1024, 1) kgen_gemm(
    const volatile float* in, float* out) {
    float v[96];
#pragma unroll
    for (int i = 0; i < 96; ++i) v[i] = in[i];
#pragma unroll
    for (int i = 0; i < 96; ++i) out[i] = v[95 - i] * in[i] + v[i];
}
"""

SETMAXNREG_IGNORED = """
extern "C" __global__ void kgen_gemm(float* out) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    out[threadIdx.x] = 1;
}
"""

_WGMMA = """
using u64 = unsigned long long;
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int n> __device__ __forceinline__ void wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
}
__device__ __forceinline__ void mma(float* d, u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 "
                 "{%0, %1, %2, %3}, %4, %5, 1, 1, 1;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
}
"""
_HEAD = (
    'extern "C" __global__ void __launch_bounds__(128) kgen_gemm(float* p, u64 a, u64 b, int n) {'
)
_TAIL = "p[threadIdx.x] = d[0] + d[1] + d[2] + d[3]; }"

WGMMA = f"""{_WGMMA}{_HEAD}
    float d[4] = {{0, 0, 0, 0}};
    fence(); mma(d, a, b); commit(); wait<0>();
{_TAIL}"""

#: By the code of ptxas' message: kernels that make it appear.
SERIALISED = {
    "C7510": f"""{_WGMMA}
__device__ __noinline__ void far(float* d, u64 a, u64 b) {{ mma(d, a, b); }}
{_HEAD}
    float d[4] = {{0, 0, 0, 0}};
    fence(); far(d, a, b); commit(); wait<0>();
{_TAIL}""",
    "C7511": f"""{_WGMMA}{_HEAD}
    float d[4] = {{0, 0, 0, 0}};
    fence(); mma(d, a, b); d[0] += p[0]; mma(d, a, b); commit(); wait<0>();
{_TAIL}""",
    "C7514": f"""{_WGMMA}{_HEAD}
    float even[4] = {{}}, odd[4] = {{}}, d[4] = {{}};
    fence(); mma(even, a, b); commit();
    for (int i = 0; i < n; ++i) {{
        fence(); mma(odd, a, b); commit(); wait<1>();
        for (int j = 0; j < 4; ++j) d[j] += even[j] * p[i];
        fence(); mma(even, a, b); commit(); wait<1>();
        for (int j = 0; j < 4; ++j) d[j] += odd[j] * p[i];
    }}
    wait<0>();
{_TAIL}""",
    "C7515": f"""{_WGMMA}{_HEAD}
    float d[4] = {{0, 0, 0, 0}};
    fence(); mma(d, a, b);
    if (n > p[0]) d[1] = p[1];
    commit(); wait<0>();
{_TAIL}""",
}

_REGISTERS = 64
_DECLARED = ", ".join(f"%{i}" for i in range(_REGISTERS))
_BOUND = ", ".join(f'"+f"(d[{i}])' for i in range(_REGISTERS))

#: A promotion loop: WGMMA of 64x128 into `d`, then 64 FFMAs a thread with one scale.
PROMOTION = f"""{_WGMMA}{_HEAD.replace("(128)", "(384)")}
    float sum[{_REGISTERS}] = {{}};
    for (int k = 0; k < n; ++k) {{
        float d[{_REGISTERS}];
        const float scale = p[k];
        fence();
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {{{_DECLARED}}}, "
                     "%{_REGISTERS}, %{_REGISTERS + 1}, 0, 1, 1;" : {_BOUND} : "l"(a), "l"(b));
        commit(); wait<0>();
#pragma unroll
        for (int i = 0; i < {_REGISTERS}; ++i) sum[i] += scale * d[i];
    }}
#pragma unroll
    for (int i = 0; i < {_REGISTERS}; ++i) p[i * 128 + threadIdx.x] = sum[i];
}}"""


def slow(statements: int) -> str:
    """A kernel that takes an optimiser long: every statement depends on all before it."""
    body = "\n".join(f"x = x * in[{i}] + in[(int)x & {i}];" for i in range(statements))
    head = 'extern "C" __global__ void kgen_gemm(float* in) { float x = in[threadIdx.x];'
    return f"{head}\n{body}\nin[threadIdx.x] = x; }}"
