// Gives g++ what the stages for Hopper use, by the PTX ISA's words: mbarriers, TMA, bulk copies, stmatrix, wgmma and its
// descriptors, named barriers. In the place of what is written in PTX in hopper.cuh (see cpu.py).
//
// What is asynchronous is done as late as a GPU may do it: a copy lands when its barrier is asked for, or leaves shared
// memory when it is waited for. The products of one warp group read their operands when they are asked for, those of the
// next when they are waited for. What a thread has written to shared memory, products and copies read only after that
// thread's fence.
#pragma once

#ifndef OPERANDS_8BIT
#define OPERANDS_8BIT 0
#endif
#ifndef INT8
#define INT8 0
#endif

namespace cpu {
static const int depth = OPERANDS_8BIT ? 32 : 16;  // of the reduction, in a product
// e4m3: a sign, 4 bits of exponent, whose bias is 7, and 3 of the number; 0x7f is NaN.
static float float_of_e4m3(unsigned char bits) {
    const int exponent = bits >> 3 & 15, rest = bits & 7;
    float x = exponent ? ldexpf(8 + rest, exponent - 10) : ldexpf(rest, -9);
    if ((bits & 0x7f) == 0x7f) x = NAN;
    return bits & 0x80 ? -x : x;
}
// To the nearest, halves to even; not beyond 448.
static unsigned char e4m3_of(float x) {
    const unsigned char sign = signbit(x) ? 0x80 : 0;
    if (isnan(x)) return 0x7f;
    x = fminf(fabsf(x), 448.0f);
    const int exponent = x < ldexpf(1, -6) ? -6 : ilogbf(x);
    const int eighths = (int)nearbyintf(ldexpf(x, 3 - exponent));  // 16 of them are 8 of the next exponent's
    return sign | (eighths < 8 ? eighths : (exponent + 7 << 3) + (eighths - 8));
}
// An address of shared memory as a pointer: that of a `static` array lies outside of `memory`.
static inline unsigned char *at(unsigned address) { return memory + (int)address; }
// The thread, plus one, whose write of two bytes no fence of its own has followed; and those of each thread.
static unsigned short writer[most_shared / 2];
static std::vector<unsigned> unfenced[most_threads];
static void wrote(unsigned address, unsigned bytes) {
    for (unsigned pair = address / 2; pair < (address + bytes) / 2; pair++)
        writer[pair] = threadIdx.x + 1, unfenced[threadIdx.x].push_back(pair);
}
static void must_be_fenced(unsigned address) {
    if (writer[address / 2]) fault = "a product or a copy reads what a thread has written and not fenced";
}
static void must_be_fenced(unsigned from, unsigned bytes) {
    for (; bytes; from += 2, bytes -= 2) must_be_fenced(from);
}
static unsigned swizzled_address(unsigned address, unsigned row_bytes) {
    return address ^ (address >> 3 & (row_bytes - 16));
}

// What tests have in the place of the driver's 128 bytes.
struct Box {
    unsigned short *data;
    long long sizes[4], steps[3];  // d, t, h, b; of t, h, b, in numbers
    int rows, columns;
};
struct Load {
    unsigned to;
    const void *from;  // of `bytes`, or of the box from `place` on
    unsigned bytes;
    Box box;
    int place[4];
};
static long long idle;  // tests of mbarriers since one went on
struct Phases {
    int expected, lacking, bytes;
    unsigned phase;
    std::vector<Load> loads;
    void settle() {
        if (lacking == 0 && bytes == 0) lacking = expected, phase ^= 1, idle = 0;
    }
};
static std::map<unsigned, Phases> phases;

// A box's rows in shared memory, read or written.
template <class Each> static void over_box(const Box &box, const int *place, unsigned tile, const Each &each) {
    const unsigned row_bytes = 2 * box.columns;
    for (int t = 0; t < box.rows; t++)
        for (int d = 0; d < box.columns; d++) {
            const long long at_d = place[0] + d, at_t = place[1] + t;
            const bool inside = at_d < box.sizes[0] && at_t < box.sizes[1];
            unsigned short *x = box.data + at_d + at_t * box.steps[0] + place[2] * box.steps[1] + place[3] * box.steps[2];
            each((unsigned short *)at(swizzled_address(tile + t * row_bytes + 2 * d, row_bytes)), inside ? x : nullptr);
        }
}
static void land(const Load &load) {
    if (load.from)
        memcpy(at(load.to), load.from, load.bytes);
    else
        over_box(load.box, load.place, load.to, [](unsigned short *to, unsigned short *x) { *to = x ? *x : 0; });
}

struct Leaving {
    unsigned from, bytes;
    float *sums;  // or null: a box
    bool adds;    // to the sums, or replaces them
    Box box;
    int place[4];
};
static std::vector<Leaving> leaving[most_threads];

struct Product {
    float *sums;
    int columns;
    bool from_registers, a_mn, b_mn, add;
    unsigned long long a, b;
    float rows[2][depth];
    bool integers;
};
static std::vector<std::vector<Product>> products[most_threads];  // the last group is open
static std::vector<std::vector<Product>> &of_thread() {
    auto &all = products[threadIdx.x];
    if (all.empty()) all.emplace_back();
    return all;
}
// Number k of row (of A) or column (of B) x of what a descriptor tells.
static float operand(unsigned long long descriptor, bool mn, int x, int k, bool integers) {
    const unsigned start = (descriptor & 0x3fff) << 4, block = (descriptor >> 16 & 0x3fff) << 4;
    const unsigned eight = (descriptor >> 32 & 0x3fff) << 4, row_bytes = 256 >> (descriptor >> 62);
    const unsigned wide = row_bytes / 2;
    const unsigned address = mn ? start + x / wide * block + k / 8 * eight + k % 8 * row_bytes + x % wide * 2
                                : start + x / 8 * eight + x % 8 * row_bytes + k * (OPERANDS_8BIT ? 1 : 2);
    const unsigned place = swizzled_address(address, row_bytes);
    must_be_fenced(place);
    if (OPERANDS_8BIT) {
        const unsigned char bits = *at(place);
        return integers ? (float)(signed char)bits : float_of_e4m3(bits);
    }
    unsigned short bits;
    memcpy(&bits, at(place), 2);
    return float_of(bits);
}
static void multiply(const Product &p) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
    float a[2][depth];
    for (int half = 0; half < 2; half++)
        for (int k = 0; k < depth; k++) a[half][k] = p.from_registers ? p.rows[half][k] : operand(p.a, p.a_mn, row + 8 * half, k, p.integers);
    for (int n = 0; n < p.columns / 8; n++)
        for (int e = 0; e < 2; e++) {
            float b[depth];
            for (int k = 0; k < depth; k++) b[k] = operand(p.b, p.b_mn, n * 8 + lane % 4 * 2 + e, k, p.integers);
            for (int half = 0; half < 2; half++) {
                float &sum = p.sums[4 * n + 2 * half + e];
                if (!p.add) sum = 0.0f;
                for (int k = 0; k < depth; k++) sum += a[half][k] * b[k];
            }
        }
}
struct Named {
    int arrived, generation;
};
static Named named[16];
// All threads wait, and none goes on: the end of the launch.
static void give_up() {
    fault = "waits for an mbarrier at which nobody arrives";
    for (unsigned thread = 0; thread < most_threads; thread++) leaving[thread].clear(), products[thread].clear();
    for (Named &each : named) each.arrived = 0;
    idle = 0, threadIdx.x = n_threads;
    _longjmp(resume[n_threads], 1);
}
}  // namespace cpu

static inline int load_relaxed(const int *flag) { return __atomic_load_n(flag, __ATOMIC_RELAXED); }
static inline int load_acquire(const int *flag) {
    if (cpu::idle++ > 3000000) cpu::give_up();
    cpu::take_turns();
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}
static inline void store_release(int *flag, int value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
static inline int atomicCAS(int *to, int expected, int value) {
    __atomic_compare_exchange_n(to, &expected, value, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
    return expected;
}
static inline int atomicAdd(int *to, int x) { return __atomic_fetch_add(to, x, __ATOMIC_RELAXED); }
static inline void mbarrier_init(unsigned barrier, unsigned arrivals) {
    for (cpu::Named &each : cpu::named) each.arrived = 0;  // a turn that the last block left
    cpu::phases[barrier] = {(int)arrivals, (int)arrivals, 0, 0, {}};
}
static inline void mbarrier_arrive(unsigned barrier) {
    auto &of = cpu::phases.at(barrier);
    of.lacking--, of.settle();
}
static inline void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
    auto &of = cpu::phases.at(barrier);
    of.bytes += bytes, of.lacking--, of.settle();
}
static inline void mbarrier_wait(unsigned barrier, unsigned parity) {
    auto &of = cpu::phases.at(barrier);
    while (true) {
        for (const cpu::Load &load : of.loads) cpu::land(load), of.bytes -= load.bytes;
        of.loads.clear();
        of.settle();
        if ((of.phase & 1) != parity) return;
        if (cpu::idle++ > 3000000) cpu::give_up();
        cpu::take_turns();
    }
}
static inline cpu::Box box_of(const void *map) {
    cpu::Box box;
    memcpy(&box, map, sizeof box);
    return box;
}
template <class Map>
static inline void tma_load(unsigned to, const Map &map, unsigned barrier, int d, int t, int h, int b) {
    const cpu::Box box = box_of(&map);
    cpu::phases.at(barrier).loads.push_back({to, nullptr, (unsigned)(box.rows * box.columns * 2), box, {d, t, h, b}});
}
static inline void bulk_load(unsigned to, const void *from, unsigned bytes, unsigned barrier) {
    cpu::phases.at(barrier).loads.push_back({to, from, bytes, {}, {}});
}
template <class Map> static inline void tma_store(const Map &map, unsigned from, int d, int t, int h, int b) {
    const cpu::Box box = box_of(&map);
    cpu::must_be_fenced(from, box.rows * box.columns * 2);
    cpu::leaving[threadIdx.x].push_back({from, 0, nullptr, false, box, {d, t, h, b}});
}
static inline void bulk_reduce_add(float *to, unsigned from, unsigned bytes) {
    cpu::must_be_fenced(from, bytes);
    cpu::leaving[threadIdx.x].push_back({from, bytes, to, true, {}, {}});
}
static inline void bulk_store(float *to, unsigned from, unsigned bytes) {
    cpu::must_be_fenced(from, bytes);
    cpu::leaving[threadIdx.x].push_back({from, bytes, to, false, {}, {}});
}
static inline void bulk_commit_group() {}
template <int N> static inline void bulk_wait_group_read() {
    static_assert(N == 0, "all");
    for (int turn = 0; turn < 64; turn++) cpu::take_turns();  // who does not wait is far ahead
    for (const cpu::Leaving &x : cpu::leaving[threadIdx.x])
        if (x.sums)
            for (unsigned n = 0; n < x.bytes / 4; n++)
                x.sums[n] = (x.adds ? x.sums[n] : 0) + ((const float *)cpu::at(x.from))[n];
        else
            cpu::over_box(x.box, x.place, x.from, [](unsigned short *from, unsigned short *to) {
                if (to) *to = *from;
            });
    cpu::leaving[threadIdx.x].clear();
}
template <int N> static inline void bulk_wait_group() { bulk_wait_group_read<N>(); }
static inline void fence_proxy_async() {
    auto &mine = cpu::unfenced[threadIdx.x];
    for (unsigned pair : mine)
        if (cpu::writer[pair] == threadIdx.x + 1) cpu::writer[pair] = 0;
    mine.clear();
}
static inline void fence_mbarrier_init() {  // a block begins
    memset(cpu::writer, 0, sizeof cpu::writer);
    for (auto &pairs : cpu::unfenced) pairs.clear();
}

static inline void stmatrix(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
    const unsigned *rows = cpu::bring(to), lane = threadIdx.x % 32, x[4] = {a, b, c, d};
    for (int m = 0; m < 4; m++) {
        const unsigned place = rows[m * 8 + lane / 4] + lane % 4 * 4;
        memcpy(cpu::at(place), &x[m], 4), cpu::wrote(place, 4);
    }
}
static inline void stmatrix_trans(unsigned to, const unsigned (&x)[4]) {
    const unsigned *rows = cpu::bring(to), lane = threadIdx.x % 32;
    for (int m = 0; m < 4; m++)
        for (int e = 0; e < 2; e++) {
            const unsigned place = rows[m * 8 + lane % 4 * 2 + e] + lane / 4 * 2;
            memcpy(cpu::at(place), (const char *)&x[m] + 2 * e, 2), cpu::wrote(place, 2);
        }
}
static inline void store_four(unsigned to, const float *x) { memcpy(cpu::at(to), x, 16), cpu::wrote(to, 16); }
static inline float2 load_pair(unsigned from) {
    float2 x;
    memcpy(&x, cpu::at(from), 8);
    return x;
}
static inline unsigned pack_e4m3(float a, float b, float c, float d) {
    return cpu::e4m3_of(a) | cpu::e4m3_of(b) << 8 | cpu::e4m3_of(c) << 16 | (unsigned)cpu::e4m3_of(d) << 24;
}

static inline float max_nan(float a, float b) { return a != a || b != b ? NAN : fmaxf(a, b); }

static inline void store_zeros(unsigned to) { memset(cpu::at(to), 0, 16), cpu::wrote(to, 16); }

template <int REGISTERS> static inline void setmaxnreg_inc() {}
template <int REGISTERS> static inline void setmaxnreg_dec() {}
static inline void bar_arrive(int barrier, int threads) {
    cpu::Named &of = cpu::named[barrier];
    if (++of.arrived == threads) of.arrived = 0, of.generation++;
}
static inline void bar_sync(int barrier, int threads) {
    const int mine = cpu::named[barrier].generation;
    bar_arrive(barrier, threads);
    while (mine == cpu::named[barrier].generation) cpu::take_turns();
}

static inline void wgmma_fence() {}
static inline void wgmma_commit_group() {
    auto &all = cpu::of_thread();
    if (threadIdx.x / 128 % 2) {  // these at once
        __syncwarp();
        for (const cpu::Product &product : all.back()) cpu::multiply(product);
        all.pop_back();
    }
    all.emplace_back();
    if (threadIdx.x / 128 % 2) all.emplace_back();
}
template <int N> static inline void wgmma_wait_group() {
    auto &all = cpu::of_thread();
    __syncwarp();
    for (; all.size() > N + 1; all.erase(all.begin()))
        for (const cpu::Product &product : all[0]) cpu::multiply(product);
}
// (Floats from 1.5 * 2^23 on: integers of 32 bits up to 2^22, and exact.)
template <int M> static inline void wgmma_int8(float (&d)[M], unsigned long long a, unsigned long long b) {
    cpu::of_thread().back().push_back({d, 2 * M, false, false, false, true, a, b, {}, true});
}
template <int N> static inline void warpgroup_fence_operand(float (&)[N]) {}
template <int N> struct Wgmma {
    template <int A_MN, int B_MN>
    static void ss(float (&d)[N / 2], unsigned long long a, unsigned long long b, int add) {
        cpu::of_thread().back().push_back({d, N, false, A_MN != 0, B_MN != 0, add != 0, a, b, {}});
    }
    template <int B_MN> static void rs(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b, int add) {
        cpu::Product product = {d, N, true, false, B_MN != 0, add != 0, 0, b, {}};
        const cpu::Fragments *of = cpu::bring(cpu::Fragments{{a[0], a[1], a[2], a[3]}, {}});
        const int row = threadIdx.x % 32 / 4 * 4;
        for (int half = 0; half < 2; half++)
            for (int k = 0; k < cpu::depth; k++)
                product.rows[half][k] = OPERANDS_8BIT ? cpu::float_of_e4m3(of[row + k % 16 / 4].a[half + k / 16 * 2] >> 8 * (k % 4))
                                            : unpack(of[row + k % 8 / 2].a[half + k / 8 * 2], k % 2);
        cpu::of_thread().back().push_back(product);
    }
};
