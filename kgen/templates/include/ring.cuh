// A ring of slots, of pipeline stages or of the queue of tiles: which one is next and which parity its
// barriers have.
template <u32 kSlots>
struct Ring {
    u32 index = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++index == kSlots) {
            index = 0;
            parity ^= 1;
        }
    }
};
