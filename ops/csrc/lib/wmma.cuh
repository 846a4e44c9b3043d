// Matrix products of one warp on tensor cores, 16 x 16 x 16, as nvcuda::wmma has them, for wmma.cu.
//
// A fragment is a 16 x 16 matrix in the registers of a warp. Which lane has which element is the hardware's business:
// fragments are loaded from shared memory, multiplied, and stored again. NVRTC lacks <mma.h> here (it includes
// crt/mma.h, which is in no wheel that torch brings along), so its functions are written by the PTX instructions behind
// them. Addresses are multiples of 32 bytes; pitches, in elements from row to row, are multiples of 16 bytes.
#pragma once
#include "attention.cuh"

#ifndef PADDED_D
#define PADDED_D ((HEAD_DIM + 31) / 32 * 32)
#endif

// In PTX. (tests/ops/wmma_cpu.h has the rest of this file for a CPU.)
#if ELEMENT_KIND == bf16_ELEMENT
#define REGISTERS 4
#else
#define REGISTERS 8
#endif

// A left or right operand; what is accumulated is another type, Accumulator.
struct Fragment {
    unsigned x[REGISTERS];
};
struct Accumulator {
    float x[8];
};

__device__ __forceinline__ unsigned address_of(const void *pointer) {
    return (unsigned)__cvta_generic_to_shared(pointer);
}

// Of `operand` a or b, row- or column-major.
#if ELEMENT_KIND == bf16_ELEMENT
#define LOAD(operand, major)                                                                                          \
    asm volatile("wmma.load." operand ".sync.aligned." major ".m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"     \
                 : "=r"(to.x[0]), "=r"(to.x[1]), "=r"(to.x[2]), "=r"(to.x[3])                                         \
                 : "r"(address_of(from)), "r"(pitch)                                                                  \
                 : "memory")
#define MULTIPLY(major)                                                                                               \
    asm volatile("wmma.mma.sync.aligned.row." major ".m16n16k16.f32.bf16.bf16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, " \
                 "{%8, %9, %10, %11}, {%12, %13, %14, %15}, {%0, %1, %2, %3, %4, %5, %6, %7};"                        \
                 : "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3]), "+f"(c.x[4]), "+f"(c.x[5]), "+f"(c.x[6]),  \
                   "+f"(c.x[7])                                                                                       \
                 : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]), "r"(b.x[2]),         \
                   "r"(b.x[3]))
#else
#define LOAD(operand, major)                                                                                          \
    asm volatile("wmma.load." operand ".sync.aligned." major ".m16n16k16.shared.f16 "                                 \
                 "{%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"                                                        \
                 : "=r"(to.x[0]), "=r"(to.x[1]), "=r"(to.x[2]), "=r"(to.x[3]), "=r"(to.x[4]), "=r"(to.x[5]),          \
                   "=r"(to.x[6]), "=r"(to.x[7])                                                                       \
                 : "r"(address_of(from)), "r"(pitch)                                                                  \
                 : "memory")
#define MULTIPLY(major)                                                                                               \
    asm volatile("wmma.mma.sync.aligned.row." major ".m16n16k16.f32.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, "           \
                 "{%8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19, %20, %21, %22, %23}, "                 \
                 "{%0, %1, %2, %3, %4, %5, %6, %7};"                                                                  \
                 : "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3]), "+f"(c.x[4]), "+f"(c.x[5]), "+f"(c.x[6]),  \
                   "+f"(c.x[7])                                                                                       \
                 : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(a.x[4]), "r"(a.x[5]), "r"(a.x[6]),         \
                   "r"(a.x[7]), "r"(b.x[0]), "r"(b.x[1]), "r"(b.x[2]), "r"(b.x[3]), "r"(b.x[4]), "r"(b.x[5]),         \
                   "r"(b.x[6]), "r"(b.x[7]))
#endif

// A left operand; a right one, whose rows lie in memory one after the other; and one whose columns do.
__device__ __forceinline__ void load_a(Fragment &to, const element *from, int pitch) { LOAD("a", "row"); }
__device__ __forceinline__ void load_b_row_major(Fragment &to, const element *from, int pitch) { LOAD("b", "row"); }
__device__ __forceinline__ void load_b_col_major(Fragment &to, const element *from, int pitch) { LOAD("b", "col"); }

// c += a b, where b came by load_b_row_major, or by load_b_col_major.
__device__ __forceinline__ void mma_row_major(Accumulator &c, const Fragment &a, const Fragment &b) { MULTIPLY("row"); }
__device__ __forceinline__ void mma_col_major(Accumulator &c, const Fragment &a, const Fragment &b) { MULTIPLY("col"); }

__device__ __forceinline__ void load_accumulator(Accumulator &to, const float *from, int pitch) {
    asm volatile("wmma.load.c.sync.aligned.row.m16n16k16.shared.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"
                 : "=f"(to.x[0]), "=f"(to.x[1]), "=f"(to.x[2]), "=f"(to.x[3]), "=f"(to.x[4]), "=f"(to.x[5]),
                   "=f"(to.x[6]), "=f"(to.x[7])
                 : "r"(address_of(from)), "r"(pitch)
                 : "memory");
}

__device__ __forceinline__ void store_accumulator(float *to, const Accumulator &from, int pitch) {
    asm volatile("wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%8], {%0, %1, %2, %3, %4, %5, %6, %7}, %9;"
                 ::"f"(from.x[0]), "f"(from.x[1]), "f"(from.x[2]), "f"(from.x[3]), "f"(from.x[4]), "f"(from.x[5]),
                   "f"(from.x[6]), "f"(from.x[7]), "r"(address_of(to)), "r"(pitch)
                 : "memory");
}
