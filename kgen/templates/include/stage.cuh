// The ring of pipeline stages: which one is next and which parity its barriers have.
struct Stage {
    u32 index = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++index == kNumStages) {
            index = 0;
            parity ^= 1;
        }
    }

    // As often as there are K blocks.
    __device__ __forceinline__ void skip(u32 blocks) {
        const u32 past = index + blocks;
        index = past % kNumStages;
        parity ^= past / kNumStages & 1;
    }
};
