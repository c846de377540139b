// A warp on the CPU: 32 fibers that wait for each other at every warp-wide function. Enough to run the
// device code that finds tiles as it is written, but for its shared memory.
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define __device__
#define __forceinline__ inline
using std::max;
using std::min;

constexpr int kLanes = 32;
static ucontext_t scheduler, fibers[kLanes];
static int lane_now, waiting_at[kLanes];
static bool finished[kLanes];
static long exchanged[2][kLanes];
static int generation[kLanes];

struct Index {
    unsigned x;
};
static Index blockIdx, gridDim;

inline void yield() { swapcontext(&fibers[lane_now], &scheduler); }

// All lanes put a value; every lane then sees all of them. Two buffers: a fast lane may be one ahead.
inline const long* exchange(long value, int line) {
    const int mine = lane_now, slot = generation[mine]++ & 1;
    exchanged[slot][mine] = value;
    waiting_at[mine] = line;
    yield();
    return exchanged[slot];
}

#define __shfl_sync(mask, value, from) (decltype(value + 0))(exchange((long)(value), __LINE__)[(from) & 31])
#define __ballot_sync(mask, value) ballot(exchange((value) ? 1 : 0, __LINE__))
#define __all_sync(mask, value) (ballot(exchange((value) ? 1 : 0, __LINE__)) == 0xffffffffu)
#define __reduce_max_sync(mask, value) (int)largest(exchange((long)(value), __LINE__))
#define __syncwarp() exchange(0, __LINE__)

template <class T>
T shuffle_up(T value, unsigned distance, int line) {
    const int lane = lane_now;
    const long* all = exchange((long)value, line);
    return lane >= (int)distance ? (T)all[lane - distance] : value;
}
#define __shfl_up_sync(mask, value, distance) shuffle_up(value, distance, __LINE__)

inline unsigned ballot(const long* all) {
    unsigned bits = 0;
    for (int i = 0; i < kLanes; ++i) bits |= all[i] ? 1u << i : 0;
    return bits;
}
inline long largest(const long* all) { return *std::max_element(all, all + kLanes); }
inline int __ffs(unsigned bits) { return __builtin_ffs(bits); }

// Runs body() in every lane; ends the program where lanes wait at different functions.
template <void (*body)()>
void run_warp() {
    static std::vector<char> stacks(kLanes * 65536);
    for (int i = 0; i < kLanes; ++i) {
        finished[i] = false;
        generation[i] = 0;
        getcontext(&fibers[i]);
        fibers[i].uc_stack.ss_sp = &stacks[i * 65536];
        fibers[i].uc_stack.ss_size = 65536;
        fibers[i].uc_link = &scheduler;
        makecontext(&fibers[i], (void (*)())(+[] {
            body();
            finished[lane_now] = true;
        }), 0);
    }
    for (bool more = true; more;) {
        more = false;
        for (lane_now = 0; lane_now < kLanes; ++lane_now) {
            if (finished[lane_now]) continue;
            swapcontext(&scheduler, &fibers[lane_now]);
            more |= !finished[lane_now];
        }
        for (int i = 1; i < kLanes; ++i)
            if (finished[i] != finished[0] || (!finished[0] && waiting_at[i] != waiting_at[0])) {
                std::fprintf(stderr, "lanes 0 and %d diverge: lines %d, %d\n", i, waiting_at[0], waiting_at[i]);
                std::exit(3);
            }
    }
}
