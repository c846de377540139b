// The ring of pipeline stages: which one is next and which parity its barriers have.
struct Stage {
    u32 index = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++index == kNumStages) {
            index = 0;
            parity ^= 1;
        }
    }
};
