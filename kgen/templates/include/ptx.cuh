// PTX that CUDA C++ has no words for. Addresses of shared memory are 32-bit offsets.

__device__ __forceinline__ u32 smem_address(const void* pointer) {
    u64 shared;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(shared) : "l"(pointer));
    return static_cast<u32>(shared);
}

// ---- mbarriers: pipeline hand-over between the producer and the math warps.

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the same barrier of another CTA of the cluster. It says that this thread is done reading;
// it does not publish writes (.release.cluster would, by a fence over the whole device).
__device__ __forceinline__ void mbarrier_arrive_remote(u32 barrier, u32 cta) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
        "r"(cta)
        : "memory");
}

__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra WAIT;\n"
        "DONE:\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Whether that phase has ended, without waiting.
__device__ __forceinline__ bool mbarrier_test(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}

// ---- asynchronous copies.

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load(u32 destination, const TensorMap* map, u32 inner, u32 outer,
                                         u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3}], [%4];" ::"r"(destination),
        "l"(map), "r"(inner), "r"(outer), "r"(barrier)
        : "memory");
}

// Writes the same offset of, and signals the same barrier in, each CTA of the mask.
__device__ __forceinline__ void tma_load_multicast(u32 destination, const TensorMap* map, u32 inner,
                                                   u32 outer, u32 barrier, u32 cta_mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
        "l"(map), "r"(inner), "r"(outer), "r"(barrier), "h"(static_cast<u16>(cta_mask))
        : "memory");
}

// B that is read once: L2 gives it up first.
constexpr u64 kEvictFirst = 0x12F0000000000000ull;

__device__ __forceinline__ void tma_load_evict_first(u32 destination, const TensorMap* map, u32 inner,
                                                     u32 outer, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
        "l"(map), "r"(inner), "r"(outer), "r"(barrier), "l"(kEvictFirst)
        : "memory");
}

__device__ __forceinline__ void tma_load_multicast_evict_first(u32 destination, const TensorMap* map,
                                                               u32 inner, u32 outer, u32 barrier,
                                                               u32 cta_mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(destination),
        "l"(map), "r"(inner), "r"(outer), "r"(barrier), "h"(static_cast<u16>(cta_mask)), "l"(kEvictFirst)
        : "memory");
}

__device__ __forceinline__ void prefetch_l2(const void* pointer) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer) : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap* map, u32 source, u32 inner, u32 outer) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(source), "r"(inner), "r"(outer)
                 : "memory");
}

__device__ __forceinline__ void tma_store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until the sources of this thread's stores may be written again.
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Makes ordinary shared-memory writes visible to the copy engine.
__device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Four bytes, or four zero bytes where `valid` is false (the source is then not read).
__device__ __forceinline__ void copy_async_float(u32 destination, const float* source, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source),
                 "r"(valid ? 4u : 0u)
                 : "memory");
}

// The barrier's arrival of this thread, made once its copies so far have landed.
__device__ __forceinline__ void copy_async_arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// ---- WGMMA.

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <u32 kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of the accumulators across a WGMMA fence or wait.
template <u32 kCount>
__device__ __forceinline__ void pin_registers(float (&values)[kCount]) {
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// A K-major operand in 128-byte swizzled rows: 8-row groups 1024 bytes apart.
__device__ __forceinline__ u64 wgmma_descriptor(u32 address) {
    return (1ull << 62) | (64ull << 32) | (1ull << 16) | ((address & 0x3ffff) >> 4);
}

// ---- threads and clusters.

__device__ __forceinline__ void named_sync(u32 barrier, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(u32 barrier, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ u32 cluster_cta_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Orders nothing but what mbarrier_init_fence released: a releasing arrival costs a fence over the whole
// device.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
    asm volatile("barrier.cluster.wait;" ::: "memory");
}

// Shared memory of another CTA of the cluster.
__device__ __forceinline__ u32 cluster_address(u32 address, u32 cta) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(cta));
    return remote;
}

// Sixteen bytes into another CTA of the cluster, counted by a barrier there once they have landed.
__device__ __forceinline__ void send_float4(u32 remote_address, u32 remote_barrier, float x, float y, float z,
                                            float w) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(
            remote_address),
        "r"(remote_barrier), "f"(x), "f"(y), "f"(z), "f"(w)
        : "memory");
}

__device__ __forceinline__ float4 load_shared_float4(u32 address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ float2 load_shared_float2(u32 address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ float load_shared_float(u32 address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ void store_shared_float(u32 address, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

__device__ __forceinline__ void store_shared_float2(u32 address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ void store_matrix_x2(u32 address, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared::cta.b16 [%0], {%1, %2};" ::"r"(address), "r"(a),
                 "r"(b)
                 : "memory");
}

__device__ __forceinline__ void store_matrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
