// Gives g++ the warp's products that lib/wmma.cuh writes in PTX, beside mma_cpu.h. A lane has all of an operand, and of
// sums every 32nd element.
#pragma once

static inline float __bfloat162float(__nv_bfloat16 x) { return x; }
static inline __nv_bfloat16 __float2bfloat16(float x) {
    __nv_bfloat16 made;
    made.bits = rounded(x);
    return made;
}

struct Fragment {
    float x[16][16];
};
struct Accumulator {
    float x[8];
};

static inline void check_place(const void *at, int pitch, int bytes) {
    if (((const unsigned char *)at - memory) % 32 || pitch * bytes % 16)
        cpu::fault = "loaded or stored a fragment that does not begin at 32 bytes, with rows at 16";
}
static inline void load_b_row_major(Fragment &to, const element *from, int pitch) {
    check_place(from, pitch, 2);
    for (int r = 0; r < 16; r++)
        for (int c = 0; c < 16; c++) to.x[r][c] = from[r * pitch + c];
}
static inline void load_a(Fragment &to, const element *from, int pitch) { load_b_row_major(to, from, pitch); }
static inline void load_b_col_major(Fragment &to, const element *from, int pitch) {
    check_place(from, pitch, 2);
    for (int c = 0; c < 16; c++)
        for (int r = 0; r < 16; r++) to.x[r][c] = from[c * pitch + r];
}
static inline void mma_row_major(Accumulator &c, const Fragment &a, const Fragment &b) {
    for (int e = 0; e < 8; e++) {
        const int at = e * 32 + threadIdx.x % 32;
        for (int k = 0; k < 16; k++) c.x[e] += a.x[at / 16][k] * b.x[k][at % 16];
    }
}
static inline void mma_col_major(Accumulator &c, const Fragment &a, const Fragment &b) { mma_row_major(c, a, b); }
static inline void load_accumulator(Accumulator &to, const float *from, int pitch) {
    check_place(from, pitch, 4);
    for (int e = 0; e < 8; e++) {
        const int at = e * 32 + threadIdx.x % 32;
        to.x[e] = from[at / 16 * pitch + at % 16];
    }
}
static inline void store_accumulator(float *to, const Accumulator &from, int pitch) {
    check_place(to, pitch, 4);
    for (int e = 0; e < 8; e++) {
        const int at = e * 32 + threadIdx.x % 32;
        to[at / 16 * pitch + at % 16] = from.x[e];
    }
}
