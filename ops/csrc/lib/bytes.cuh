// Tensor cores on integers of 8 bits: mma.sync m16n8k32 with sums in int32, which are exact.
//
// Who holds what, lane = 4 * g + c (PTX ISA, "Matrix fragments for mma.m16n8k32"), four numbers a register:
//   C (16 x 8)   as of 16 bits (mma.cuh)
//   B (32 x 8)   first register: rows 4c .. 4c + 3 of column g; second: rows + 16
//   A (16 x 32)  [0]: row g, columns 4c .. 4c + 3   [1]: row g + 8   [2], [3]: the same, columns + 16
#pragma once
#include "mma.cuh"

// c += a b, (16 x 32) (32 x 8); a and b are signed (s8) or not (u8).
#define MMA_BYTES(A, B)                                                                                        \
    asm("mma.sync.aligned.m16n8k32.row.col.s32." #A "." #B ".s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
        "{%0, %1, %2, %3};"                                                                                    \
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])                                                       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <bool A_SIGNED, bool B_SIGNED>
__device__ __forceinline__ void mma_bytes(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    if (A_SIGNED && B_SIGNED)
        MMA_BYTES(s8, s8);
    else if (A_SIGNED)
        MMA_BYTES(s8, u8);
    else if (B_SIGNED)
        MMA_BYTES(u8, s8);
    else
        MMA_BYTES(u8, u8);
}

// The larger of two; NaN where one of them is NaN.
__device__ __forceinline__ float larger(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

// The 16-bit integers hi * 256 + lo of four numbers, as bytes: four `hi` and four `lo`.
__device__ __forceinline__ void halves(unsigned a, unsigned b, unsigned c, unsigned d, unsigned &hi, unsigned &lo) {
    const unsigned ab = __byte_perm(a, b, 0x5410), cd = __byte_perm(c, d, 0x5410);
    lo = __byte_perm(ab, cd, 0x6420), hi = __byte_perm(ab, cd, 0x7531);
}
