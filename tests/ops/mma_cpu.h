// Gives g++ what the stages on tensor cores use, by the PTX ISA's words: bf16 or fp16, ldmatrix, mma.sync, cp.async,
// whose copies land when they are waited for and no sooner, and barriers of a team of four warps. For tests/ops/cpu.h.
//
// For fp32 (split_products.cuh) what a GPU is free to do is done at its worst: tensor cores cut off what FMA units
// round, and ex2.approx errs by as much as it may.
#pragma once

#define __align__(bytes)
#define __fdividef(x, y) ((x) / (y))
#define __log2f log2f

struct __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float x) : bits(x == 0.0f ? 0 : 0x7fc0) {}  // zeros alone are made of floats here
    operator float() const { return __int_as_float((int)(bits << 16)); }
};
// What is multiplied: bf16, or of fp32 terms of fp16.
#if ELEMENT_KIND == float_ELEMENT
static inline float float_of(unsigned short bits) {
    _Float16 x;
    memcpy(&x, &bits, sizeof bits);
    return x;
}
static inline unsigned short rounded(float x) {
    const _Float16 half = x;
    unsigned short bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}
#else
static inline float float_of(unsigned short bits) { return __int_as_float((int)(bits << 16)); }
static inline unsigned short rounded(float x) {
    unsigned bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#endif
static inline float unpack(unsigned packed, bool high) { return float_of(high ? packed >> 16 : packed & 0xffff); }

#define __cvta_generic_to_shared(pointer) ((unsigned char *)(pointer) - memory)

namespace cpu {
static struct Teams {
    Barrier barriers[8];
    Teams() {
        for (Barrier &each : barriers) each.expect(128);
    }
} teams;

// What each lane brings, in one place and the other, as in `shuffle`.
template <class T> static T brought[2][most_threads];
template <class T> static T *bring(const T &x) {
    const unsigned self = threadIdx.x, turn = turns[self]++ % 2;
    brought<T>[turn][self] = x;
    warps[self / 32].wait();
    return &brought<T>[turn][self / 32 * 32];
}

struct Copy {
    unsigned to;
    const void *from;
    bool inside;
};
static std::vector<std::vector<Copy>> groups[most_threads];  // the last is open
static std::vector<std::vector<Copy>> &mine() {
    auto &all = groups[threadIdx.x];
    if (all.empty()) all.emplace_back();
    return all;
}

struct Fragments {
    unsigned a[4], b[2];
};
// x in whole multiples of 2^-bits, cut towards zero.
static inline double cut(double x, int bits) { return ldexp(trunc(ldexp(x, bits)), -bits); }
// A product of 16 deep added to c: all terms are cut two bits below the last of 24 of the largest, and so is the sum.
static inline float cut_sum(float c, const double (&products)[16]) {
    double largest = fabs(c), sum = 0.0;
    for (double x : products) largest = fmax(largest, fabs(x));
    if (!(largest > 0.0) || isinf(largest)) {
        for (double x : products) sum += x;
        return c + sum;
    }
    const int bits = 25 - ilogb(largest);
    sum = cut(c, bits);
    for (double x : products) sum += cut(x, bits);
    return sum == 0.0 ? 0.0f : cut(sum, 23 - ilogb(sum));
}
}  // namespace cpu

static inline void cp_async_16(unsigned to, const void *from, bool inside) {
    if (to % 16 || (size_t)from % 16) cpu::fault = "copied 16 bytes that do not begin at a multiple of 16";
    cpu::mine().back().push_back({to, from, inside});
}
static inline void store_shared(unsigned to, unsigned bits) { memcpy(memory + to, &bits, 4); }
static inline uint4 load_shared(unsigned from) {
    uint4 bits;
    memcpy(&bits, memory + from, 16);
    return bits;
}
static inline void cp_async_commit_group() { cpu::mine().emplace_back(); }
template <int N> static inline void cp_async_wait_group() {
    auto &all = cpu::mine();
    for (; all.size() > N + 1; all.erase(all.begin()))
        for (const cpu::Copy &x : all[0])
            if (x.inside)
                memcpy(memory + x.to, x.from, 16);
            else
                memset(memory + x.to, 0, 16);
}
static inline void ldmatrix(unsigned (&r)[4], unsigned address) {
    const unsigned *rows = cpu::bring(address), lane = threadIdx.x % 32;
    for (int x = 0; x < 4; x++) memcpy(&r[x], memory + rows[x * 8 + lane / 4] + lane % 4 * 4, 4);
}
static inline void ldmatrix_trans(unsigned (&r)[4], unsigned address) {
    const unsigned *rows = cpu::bring(address), lane = threadIdx.x % 32;
    for (int x = 0; x < 4; x++)
        for (int e = 0; e < 2; e++)
            memcpy((char *)&r[x] + 2 * e, memory + rows[x * 8 + lane % 4 * 2 + e] + lane / 4 * 2, 2);
}
// c += a b: c[e] is of row lane / 4 + e / 2 * 8 and column lane % 4 * 2 + e % 2.
static inline void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const cpu::Fragments *of = cpu::bring(cpu::Fragments{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    const unsigned lane = threadIdx.x % 32;
    for (int e = 0; e < 4; e++) {
        double products[16];
        for (int k = 0; k < 16; k++)
            products[k] = (double)unpack(of[lane / 4 * 4 + k % 8 / 2].a[e / 2 + k / 8 * 2], k % 2) *
                          unpack(of[(lane % 4 * 2 + e % 2) * 4 + k % 8 / 2].b[k / 8], k % 2);
#if ELEMENT_KIND == float_ELEMENT
        c[e] = cpu::cut_sum(c[e], products);
#else
        for (double x : products) c[e] += (float)x;
#endif
    }
}
static inline unsigned pack(float low, float high) { return rounded(low) | (unsigned)rounded(high) << 16; }
static inline float exp2_of(float x) {
#if ELEMENT_KIND == float_ELEMENT
    int bits;
    memcpy(&bits, &x, sizeof bits);
    return exp2(x) * (1.0 + (bits * 0x9E3779B9u >> 31 ? 0x1p-22 : -0x1p-22));  // two units, up or down
#else
    return exp2f(x);
#endif
}
static inline float __fmul_rn(float x, float y) {
    volatile float rounded = x * y;  // else g++ makes an FMA of it
    return rounded;
}
static inline void team_barrier(int team) { cpu::teams.barriers[team].wait(); }

// c += a b, (16 x 32) (32 x 8) of bytes.
template <bool A_SIGNED, bool B_SIGNED>
static inline void mma_bytes(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const cpu::Fragments *of = cpu::bring(cpu::Fragments{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    const unsigned lane = threadIdx.x % 32;
    for (int e = 0; e < 4; e++)
        for (int k = 0; k < 32; k++) {
            const unsigned left = of[lane / 4 * 4 + k % 16 / 4].a[e / 2 + k / 16 * 2] >> k % 4 * 8 & 0xff;
            const unsigned right = of[(lane % 4 * 2 + e % 2) * 4 + k % 16 / 4].b[k / 16] >> k % 4 * 8 & 0xff;
            c[e] += (A_SIGNED ? (signed char)left : (int)left) * (B_SIGNED ? (signed char)right : (int)right);
        }
}
static inline float larger(float x, float y) { return x != x || y != y ? NAN : fmaxf(x, y); }
