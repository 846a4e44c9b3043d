// Gives g++ what the stages of ops/csrc use of CUDA, so that they run on a CPU, one block after the other; what is of
// tensor cores is in mma_cpu.h.
//
// The threads of a block are fibers, which take turns where they wait for each other; with
// -DTHREADS_OF_THE_SYSTEM they are such threads, for -fsanitize=thread, which reports a missing barrier as a data race.
#pragma once
#include <initializer_list>
#include <map>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <vector>
#ifdef THREADS_OF_THE_SYSTEM
#include <pthread.h>
#define PER_THREAD thread_local
#else
#include <setjmp.h>
#include <ucontext.h>
#define PER_THREAD
#endif

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
// Memory of fixed size is written `static __shared__`, the rest is `extern` and found here.
#define __shared__

struct Index {
    unsigned x, y, z;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static inline float2 make_float2(float x, float y) { return float2{x, y}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return uint2{x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return float4{x, y, z, w}; }
#define __expf expf
static inline float __int_as_float(int bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static inline int __float_as_int(float x) {
    int bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline float __uint_as_float(unsigned bits) { return __int_as_float((int)bits); }
static inline unsigned __float_as_uint(float x) { return (unsigned)__float_as_int(x); }
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned order) {
    const unsigned long long all = x | (unsigned long long)y << 32;
    unsigned taken = 0;
    for (int byte = 0; byte < 4; byte++) taken |= (all >> (order >> 4 * byte & 7) * 8 & 0xff) << 8 * byte;
    return taken;
}
static inline int atomicMax(int *to, int x) {
    int before = __atomic_load_n(to, __ATOMIC_RELAXED);
    while (before < x && !__atomic_compare_exchange_n(to, &before, x, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return before;
}

static PER_THREAD Index threadIdx;
static PER_THREAD Index blockIdx;
static Index gridDim;
// Dynamic shared memory, by the names that kernels have for it.
const unsigned most_shared = 232448;
float4 shared[most_shared / 16];
float scores[most_shared / 4];
alignas(1024) unsigned char memory[most_shared];

namespace cpu {
const unsigned most_threads = 1024;
static unsigned n_threads;
static void (*kernel)();

#ifdef THREADS_OF_THE_SYSTEM
struct Barrier {
    pthread_barrier_t barrier;
    void expect(unsigned n) { pthread_barrier_init(&barrier, nullptr, n); }
    void wait() { pthread_barrier_wait(&barrier); }
};

static void run_threads(void *(*body)(void *)) {
    pthread_t all[most_threads];
    for (size_t t = 0; t < n_threads; ++t) pthread_create(&all[t], nullptr, body, (void *)t);
    for (size_t t = 0; t < n_threads; ++t) pthread_join(all[t], nullptr);
}
#else
// A fiber begins by ucontext and goes on by longjmp, which takes no call of the system.
static ucontext_t begin[most_threads + 1];
static jmp_buf resume[most_threads + 1];
static bool begun[most_threads + 1], finished[most_threads];
static void *stacks[most_threads];
static void *(*work)(void *);

// Lets the next fiber run; number n_threads is the caller, who comes when all have finished.
static void take_turns() {
    const unsigned self = threadIdx.x;
    unsigned next = (self + 1) % n_threads;
    while (finished[next] && next != self) next = (next + 1) % n_threads;
    if (finished[next]) next = n_threads;
    if (next == self || _setjmp(resume[self])) return;
    threadIdx.x = next;
    if (begun[next]) _longjmp(resume[next], 1);
    begun[next] = true;
    setcontext(&begin[next]);
}

struct Barrier {
    unsigned expected, arrived, generation;
    void expect(unsigned n) { expected = n, arrived = 0; }
    void wait() {
        const unsigned mine = generation;
        if (++arrived == expected) arrived = 0, ++generation;
        while (mine == generation) take_turns();
    }
};

static void run_fiber() {
    work((void *)(size_t)threadIdx.x);
    finished[threadIdx.x] = true;
    take_turns();
}

static void run_threads(void *(*body)(void *)) {
    const size_t stack_bytes = 1 << 16;
    work = body;
    for (unsigned t = 0; t < n_threads; ++t) {
        if (!stacks[t]) stacks[t] = malloc(stack_bytes);
        getcontext(&begin[t]);
        begin[t].uc_stack.ss_sp = stacks[t], begin[t].uc_stack.ss_size = stack_bytes;
        makecontext(&begin[t], run_fiber, 0);
        begun[t] = finished[t] = false;
    }
    begun[n_threads] = true;
    threadIdx.x = n_threads;
    if (!_setjmp(resume[n_threads])) threadIdx.x = 0, begun[0] = true, setcontext(&begin[0]);
}
#endif

static Barrier block, warps[most_threads / 32];
// What lanes tell each other, in one place and the other, so that one barrier is enough.
static double values[2][most_threads];
static unsigned turns[most_threads];

template <class T>
T shuffle(T x, unsigned from) {
    const unsigned self = threadIdx.x, turn = turns[self]++ % 2;
    values[turn][self] = x;
    warps[self / 32].wait();
    return (T)values[turn][self / 32 * 32 + from];
}

static Index grid;
static unsigned shared_used;
static const char *fault;  // what a GPU would stop at

// What is read and was not written shows as NaN.
static void forget(unsigned bytes) {
    for (void *array : {(void *)shared, (void *)scores, (void *)memory}) memset(array, 0xff, bytes);
}

static bool kept_within() {
    for (const void *array : {(void *)shared, (void *)scores, (void *)memory})
        for (unsigned at = shared_used; at < most_shared; ++at)
            if (((const unsigned char *)array)[at] != 0xff) return false;
    return true;
}

// Thread number `self`'s part of all blocks.
static void *run_blocks(void *self) {
    threadIdx.x = (unsigned)(size_t)self;
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) {
                blockIdx = {x, y, z};
                if (threadIdx.x == 0) forget(shared_used);
                block.wait();
                kernel();
                block.wait();
            }
    return nullptr;
}

// Gives what the kernel did wrong, or nothing.
static const char *run_grid(void (*body)(), const unsigned *size, unsigned threads, unsigned shared_size) {
    kernel = body, n_threads = threads, grid = gridDim = {size[0], size[1], size[2]}, shared_used = shared_size;
    block.expect(threads);
    for (unsigned warp = 0; warp < threads / 32; ++warp) warps[warp].expect(32);
    fault = nullptr, forget(most_shared);
    run_threads(run_blocks);
    return fault ? fault : kept_within() ? nullptr : "wrote beyond its shared memory";
}
}  // namespace cpu

static inline void __syncthreads() { cpu::block.wait(); }
static inline void __syncwarp() { cpu::warps[threadIdx.x / 32].wait(); }
template <class T>
T __shfl_xor_sync(unsigned, T x, int lanes) {
    return cpu::shuffle(x, (threadIdx.x ^ lanes) % 32);
}
template <class T>
T __shfl_sync(unsigned, T x, int lane) {
    return cpu::shuffle(x, lane);
}
static inline float __fdividef(float a, float b) { return a / b; }
static inline int __vimax3_s32(int a, int b, int c) { return std::max(std::max(a, b), c); }
static inline bool __any_sync(unsigned, bool x) {
    int any = x;
    for (int lanes = 16; lanes; lanes /= 2) any |= cpu::shuffle(any, (threadIdx.x ^ lanes) % 32);
    return any;
}
static inline unsigned __activemask() { return ~0u; }  // warps part as a whole
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline void atomicAdd(float *to, float x) {
    float old, sum;
    __atomic_load(to, &old, __ATOMIC_RELAXED);
    do sum = old + x;
    while (!__atomic_compare_exchange(to, &old, &sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}
