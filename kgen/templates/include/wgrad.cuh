// ---- weight gradients: what a launch hands over beside GemmArgs, and how D is added to.

// `map_sfb`: the scales of B under recipe "vector", unless args.sfa_direct says that both operands' scales
// are read through their strides. Kind k_grouped: `ks` [groups] has the columns of each group in device
// memory, or is null: then own_ks has them. `maps` has a tensor map of A and one of B for each group whose
// columns lie in matrices of their own; null: they lie side by side in one.
constexpr u32 kOwnKs = 128;
struct alignas(64) WgradArgs : GemmArgs {
    TensorMap map_sfb;
    const int* ks;
    const TensorMap* maps;
    i64 d_stride_g;
    u32 groups, unused[9];
    int own_ks[kOwnKs];
};
static_assert(sizeof(WgradArgs) == sizeof(GemmArgs) + 192 + 4 * kOwnKs, "the host packs as many bytes more");

__device__ __forceinline__ const WgradArgs& wgrad(const GemmArgs& args) {
    return static_cast<const WgradArgs&>(args);
}

// A box of FP32 is added to what D holds there. Each element of D is in one box of a launch, so that the
// sum does not depend on any order.
__device__ __forceinline__ void tma_add(const TensorMap* map, u32 source, u32 inner, u32 outer) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
        "r"(source), "r"(inner), "r"(outer)
        : "memory");
}

// Boxes with a third coordinate, the group.
__device__ __forceinline__ void tma_add(const TensorMap* map, u32 source, u32 inner, u32 outer, u32 group) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
        "r"(source), "r"(inner), "r"(outer), "r"(group)
        : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap* map, u32 source, u32 inner, u32 outer, u32 group) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(source), "r"(inner), "r"(outer), "r"(group)
                 : "memory");
}

// Two neighbouring columns of D, where `valid`; a predicate, since the compiler makes a branch of an if.
__device__ __forceinline__ void add_pair(float* d, float x, float y, bool valid = true) {
    asm volatile(
        "{\n.reg .pred valid;\nsetp.ne.u32 valid, %3, 0;\n"
        "@valid red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};\n}" ::"l"(d),
        "f"(x), "f"(y), "r"(static_cast<u32>(valid))
        : "memory");
}

__device__ __forceinline__ void write_pair(float* d, float x, float y, bool valid) {
    asm volatile(
        "{\n.reg .pred valid;\nsetp.ne.u32 valid, %3, 0;\n"
        "@valid st.global.v2.f32 [%0], {%1, %2};\n}" ::"l"(d),
        "f"(x), "f"(y), "r"(static_cast<u32>(valid))
        : "memory");
}
