// Tensor cores by hand, for sm_80 and newer: 16-byte copies that bypass registers (cp.async), tiles in shared memory
// swizzled so that ldmatrix meets no bank conflict, and mma.sync m16n8k16 with fp32 sums.
//
// Who holds what, lane = 4 * g + c (PTX ISA, "Matrix fragments for mma.m16n8k16"):
//   C (16 x 8)   [0], [1]: row g, columns 2c, 2c + 1        [2], [3]: row g + 8
//   B (16 x 8)   first register: rows 2c, 2c + 1 of column g; second: rows + 8
//   A (16 x 16)  [0]: row g, columns 2c, 2c + 1   [1]: row g + 8   [2], [3]: the same, columns + 8
// so two neighbouring C tiles, rounded to 16 bits, are one A tile: P never leaves the registers.
#pragma once
#include "attention.cuh"

// The numbers that tensor cores multiply: the elements, or of fp32 terms of fp16 (split_products.cuh).
#if ELEMENT_KIND == float_ELEMENT
typedef unsigned short mma_element;
static_assert(HEAD_DIM <= 128, "wider rows do not fit into shared memory");
#else
typedef element mma_element;
static_assert(HEAD_DIM % 8 == 0, "rows are copied in chunks of 8 elements");
#endif

#ifndef PADDED_D
#define PADDED_D ((HEAD_DIM + 31) / 32 * 32)
#endif
#define ROW_BYTES (PADDED_D * 2)
#define D_STEPS (PADDED_D / 16)  // of 16 along the head dim

// Where chunk `chunk` of 16 bytes of row `row` lies in a swizzled tile of COLUMNS: chunks trade places within groups of
// 8, or of 4, so that one chunk of 8 rows falls into 8 different groups of banks.
template <int COLUMNS> __device__ __forceinline__ unsigned swizzled(int row, int chunk) {
    static_assert(COLUMNS % 32 == 0, "whole groups of chunks");
    return row * COLUMNS * 2 + ((chunk ^ (COLUMNS % 64 ? (row >> 1) & 3 : row & 7)) << 4);
}

// How a tile in shared memory is an operand of a product A B: its rows are the operand's rows, or its columns. (So A is
// K-major as stored, and B is transposed, as K is in Q K^T.)
enum Layout { AS_STORED, TRANSPOSED };

// A lane's addresses for ldmatrix.x4, 16 x 16 as four 8 x 8, from column `first` on. The swizzle lets one base
// address serve PERIOD steps along the columns by XOR; one period or 16 rows further adds a constant.
template <int COLUMNS> struct LdmatrixLanes {
    static const int PERIOD = COLUMNS % 64 ? 2 : 4;
    static const int BASES = COLUMNS == 96 ? PERIOD : 1;  // of 96 a warp may have 48, and begin within a period
    unsigned at[BASES];
    // With AS_STORED the four matrices go down the rows first, else along the columns. A right operand as stored, and a
    // left one transposed, are loaded by .trans (ldmatrix_trans).
    __device__ __forceinline__ LdmatrixLanes(Layout layout, int first = 0) {
        const int lane = threadIdx.x % 32, low = lane % 8, second = lane / 8 % 2, third = lane / 16;
        const bool rows_first = layout == AS_STORED;
        const int row = low + 8 * (rows_first ? second : third), chunk = first / 8 + (rows_first ? third : second);
#pragma unroll
        for (int step = 0; step < BASES; step++) at[step] = swizzled<COLUMNS>(row, chunk + 2 * step);
    }
    __device__ __forceinline__ unsigned operator()(unsigned tile, int row, int step) const {
        const unsigned here = BASES > 1 ? at[step % BASES] : at[0] ^ (step % PERIOD << 5);
        return tile + here + row * COLUMNS * 2 + step / PERIOD * PERIOD * 32;
    }
};

__device__ __forceinline__ unsigned shared_address(const void *pointer) {
    return (unsigned)__cvta_generic_to_shared(pointer);
}

// 16 bytes from global to shared memory, or 16 zeros.
__device__ __forceinline__ void cp_async_16(unsigned to, const void *from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

__device__ __forceinline__ void store_shared(unsigned to, unsigned bits) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(bits) : "memory");
}

__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all but the newest N groups of copies have landed.
template <int N> __device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void ldmatrix(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_trans(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// M_TILES x 2 * N_STEPS C tiles of a warp: 16 * M_TILES rows, 16 * N_STEPS columns.
template <int M_TILES, int N_STEPS> struct Accumulator {
    float c[M_TILES][2 * N_STEPS][4];
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int t = 0; t < M_TILES; t++)
#pragma unroll
            for (int n = 0; n < 2 * N_STEPS; n++) c[t][n][0] = c[t][n][1] = c[t][n][2] = c[t][n][3] = 0.0f;
    }
};

// c += a b, (16 x 16) (16 x 8)
__device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if ELEMENT_KIND == bf16_ELEMENT
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
#endif
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats as two 16-bit numbers, `low` in the lower half.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned packed;
#if ELEMENT_KIND == bf16_ELEMENT
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
    return packed;
}

// Of two numbers of 16 bits one (in fp32 the terms are fp16), exactly.
__device__ __forceinline__ float unpack(unsigned packed, bool high) {
#if ELEMENT_KIND == bf16_ELEMENT
    return __uint_as_float(high ? packed & 0xffff0000u : packed << 16);
#else
    float x;
    if (high)
        asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high;}" : "=f"(x) : "r"(packed));
    else
        asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}" : "=f"(x) : "r"(packed));
    return x;
#endif
}

__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// What a thread copies of ROWS rows of a (T, D) matrix at a time: a chunk of every STEP-th row. Its addresses are
// worked out once; a tile then takes a comparison, an addition and a copy a chunk (computing them anew took a fifth of
// all instructions of the forward).
template <int ROWS, int THREADS> struct Loader {
    static const int LANES = PADDED_D <= 32 ? 4 : PADDED_D <= 64 ? 8 : 16;  // threads of a row
    static const int STEP = THREADS / LANES;                                // rows
    static_assert(STEP % 8 == 0, "the swizzle of a thread's chunks is the same in all its rows");
    const mma_element *from;
    unsigned to;
    int row;
    bool inside;

    // From row `first` on.
    __device__ __forceinline__ Loader(const mma_element *matrix, long long stride, int first) {
        const int chunk = threadIdx.x % LANES;
        row = threadIdx.x / LANES;
        from = matrix + (first + row) * stride + chunk * 8;
        to = swizzled<PADDED_D>(row, chunk);
        inside = chunk * 8 < PADDED_D;
    }

    // Into a swizzled tile, zeros from the tile's row `limit` on and beyond D; then `advance` rows on. With ALIGNED the
    // copies are one part of the current group, else they are done when it returns.
    __device__ __forceinline__ void load(unsigned tile, long long stride, int limit, int advance = ROWS) {
        const mma_element *at = from;
#pragma unroll
        for (int x = 0; x < (ROWS + STEP - 1) / STEP; x++, at += STEP * stride) {
            if ((LANES * 8 > PADDED_D && !inside) || (ROWS % STEP && row + x * STEP >= ROWS)) continue;
            const bool real = row + x * STEP < limit && (HEAD_DIM == PADDED_D || threadIdx.x % LANES * 8 < HEAD_DIM);
            const unsigned target = tile + to + x * STEP * ROW_BYTES;
#if ALIGNED
            cp_async_16(target, at, real);
#else
            for (int e = 0; e < 8; e += 2) {
                const unsigned low = real ? ((const unsigned short *)at)[e] : 0;
                const unsigned high = real ? ((const unsigned short *)at)[e + 1] : 0;
                store_shared(target + 2 * e, low | high << 16);
            }
#endif
        }
        from += advance * stride;
    }

    // The next tile that a block visits (kept_tiles.cuh), which begins at row `start` of `rows`; with BLOCK_MASK `from` is
    // of row 0 of a first head, and `to_head` elements away from that of the tile.
    __device__ __forceinline__ void load_next(unsigned tile, long long stride, int start, int rows,
                                              long long to_head = 0) {
#if BLOCK_MASK
        Loader there = *this;
        there.from += to_head + start * stride;
        there.load(tile, stride, rows - start);
#else
        load(tile, stride, rows - start);  // where the last one ended
#endif
    }
};

// sums += A B over STEPS of 16, where the tiles `a` and `b` hold A and B as A_LAYOUT and B_LAYOUT say.
template <int STEPS, Layout A_LAYOUT, Layout B_LAYOUT, int M_TILES, int N_STEPS, int COLUMNS>
__device__ __forceinline__ void add_product(Accumulator<M_TILES, N_STEPS> &sums, const LdmatrixLanes<COLUMNS> &a_lanes,
                                            unsigned a, const LdmatrixLanes<PADDED_D> &b_lanes, unsigned b) {
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        unsigned left[M_TILES][4], right[4];
#pragma unroll
        for (int t = 0; t < M_TILES; t++)
            if (A_LAYOUT == TRANSPOSED)
                ldmatrix_trans(left[t], a_lanes(a, step * 16, t));
            else
                ldmatrix(left[t], a_lanes(a, t * 16, step));
#pragma unroll
        for (int n = 0; n < N_STEPS; n++) {
            if (B_LAYOUT == TRANSPOSED)
                ldmatrix(right, b_lanes(b, n * 16, step));
            else
                ldmatrix_trans(right, b_lanes(b, step * 16, n));
#pragma unroll
            for (int t = 0; t < M_TILES; t++) {
                mma(sums.c[t][2 * n], left[t], right[0], right[1]);
                mma(sums.c[t][2 * n + 1], left[t], right[2], right[3]);
            }
        }
    }
}

// sums += A B, where A is in registers, and B's columns are the rows of tile `b`.
template <int M_TILES, int N_STEPS>
__device__ __forceinline__ void add_product(Accumulator<M_TILES, N_STEPS> &sums, const unsigned (&a)[M_TILES][D_STEPS][4],
                                            const LdmatrixLanes<PADDED_D> &b_lanes, unsigned b) {
#pragma unroll
    for (int d = 0; d < D_STEPS; d++) {
        unsigned right[4];
#pragma unroll
        for (int n = 0; n < N_STEPS; n++) {
            ldmatrix(right, b_lanes(b, n * 16, d));
#pragma unroll
            for (int t = 0; t < M_TILES; t++) {
                mma(sums.c[t][2 * n], a[t][d], right[0], right[1]);
                mma(sums.c[t][2 * n + 1], a[t][d], right[2], right[3]);
            }
        }
    }
}

// sums += W B, where W are the warp's own sums, rounded to 16 bits, and B is the tile at `b`, (16 * N_STEPS) x D.
template <int M_TILES, int N_STEPS>
__device__ __forceinline__ void add_product(Accumulator<M_TILES, D_STEPS> &sums, const Accumulator<M_TILES, N_STEPS> &w,
                                            const LdmatrixLanes<PADDED_D> &b_lanes, unsigned b) {
#pragma unroll
    for (int n = 0; n < N_STEPS; n++) {
        unsigned left[M_TILES][4], right[4];
#pragma unroll
        for (int t = 0; t < M_TILES; t++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                left[t][e] = pack(w.c[t][2 * n + e / 2][e % 2 * 2], w.c[t][2 * n + e / 2][e % 2 * 2 + 1]);
#pragma unroll
        for (int d = 0; d < D_STEPS; d++) {
            ldmatrix_trans(right, b_lanes(b, n * 16, d));
#pragma unroll
            for (int t = 0; t < M_TILES; t++) {
                mma(sums.c[t][2 * d], left[t], right[0], right[1]);
                mma(sums.c[t][2 * d + 1], left[t], right[2], right[3]);
            }
        }
    }
}

#if ELEMENT_KIND != float_ELEMENT

// `rows` rows of a swizzled tile that has ROWS to global memory, by THREADS threads, in chunks of 16 bytes.
template <int ROWS, int THREADS>
__device__ __forceinline__ void copy_rows(unsigned tile, int thread, element *to, long long stride, int rows) {
    const int chunks = PADDED_D / 8;
#pragma unroll
    for (int x = thread; x < ROWS * chunks; x += THREADS) {
        int row = x / chunks, chunk = x % chunks;
        if (row < rows && (HEAD_DIM % 32 == 0 || chunk * 8 < HEAD_DIM)) {
            uint4 bits;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                         : "r"(tile + swizzled<PADDED_D>(row, chunk))
                         : "memory");
            *(uint4 *)(to + row * stride + chunk * 8) = bits;
        }
    }
}

// A warp's rows, as 16 bits, over its own rows of a swizzled tile and from there to global memory. `tile`: the warp's
// first row; `to`: that row of the (T, D) matrix, of which `rows` exist.
template <int M_TILES>
__device__ __forceinline__ void store_rows(unsigned tile, element *to, long long stride, int rows,
                                           const Accumulator<M_TILES, D_STEPS> &sums) {
    int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int t = 0; t < M_TILES; t++)
#pragma unroll
        for (int n = 0; n < PADDED_D / 8; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                store_shared(tile + swizzled<PADDED_D>(t * 16 + half * 8 + lane / 4, n) + lane % 4 * 4,
                             pack(sums.c[t][n][2 * half], sums.c[t][n][2 * half + 1]));
    __syncwarp();
    copy_rows<M_TILES * 16, 32>(tile, lane, to, stride, rows);
}

#endif

// Four numbers in a row of global memory += low[0], low[1], high[0], high[1].
__device__ __forceinline__ void add_four(float *to, const float *low, const float *high) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(low[0]), "f"(low[1]), "f"(high[0]),
                 "f"(high[1])
                 : "memory");
#else
    atomicAdd(to, low[0]), atomicAdd(to + 1, low[1]), atomicAdd(to + 2, high[0]), atomicAdd(to + 3, high[1]);
#endif
}
