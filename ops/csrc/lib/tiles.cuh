// Tiles in shared memory and products of them in registers, for tiled.cu and tiled_backward.cu.
//
// A warp owns 4 ROWS rows of a product. Its lanes stand 4 x 8: a thread has the rows `lane_row` + 4 r and, of a product
// with a tile of keys or queries, the columns `lane_col` + 8 c. For four elements of each it reads ROWS + COLS float4
// and does 4 ROWS COLS multiplications: registers feed the FMA units, at a pace that shared memory can follow.
//
// The host defines WARPS, ROWS and COLS (4 or 8), UNROLL (of a product's loop), and VECTOR (see plain.cuh).
#pragma once
#include "plain.cuh"

#define THREADS (32 * WARPS)
#define WARP_ROWS (4 * ROWS)
#define OTHER_TILE (8 * COLS)                 // columns of a product of two tiles
#define PADDED_D ((HEAD_DIM + 31) / 32 * 32)  // floats in a row of a tile of Q, K, V or dout
#define FLOAT4S (PADDED_D / 32)               // of a row of out, dQ, dK or dV, a thread's

// How rows are swizzled: readers of four rows at once need SWIZZLE_4_ROWS, readers of eight SWIZZLE_8_ROWS.
#define SWIZZLE_4_ROWS 3
#define SWIZZLE_8_ROWS 7

// Products are summed over parts of D, as one query on 239 keys (fp32) is allowed twice the error of PyTorch's: one sum
// of 128 had 1.2 times that, sums of 32 had 1.14 times, sums of 16 have two thirds of what these had.
#define PART 16

#if ELEMENT_KIND == float_ELEMENT && VECTOR && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define COPIES_ASYNC 1
#else
#define COPIES_ASYNC 0
#endif

// Lanes that share a row or a column are 1 or 2 apart, in turn: reads of 16 bytes are then served for 16 lanes at once.
__device__ __forceinline__ int lane_row() { return (threadIdx.x >> 1 & 1) | (threadIdx.x >> 3 & 2); }
__device__ __forceinline__ int lane_col() { return (threadIdx.x & 1) | (threadIdx.x >> 1 & 6); }

// Across the 8 lanes that share rows.
template <class Op>
__device__ __forceinline__ float reduce_row(float x) {
    x = Op::combine(x, __shfl_xor_sync(0xffffffffu, x, 1));
    x = Op::combine(x, __shfl_xor_sync(0xffffffffu, x, 4));
    return Op::combine(x, __shfl_xor_sync(0xffffffffu, x, 8));
}

// What the one of these lanes has whose lane_col is `col`.
__device__ __forceinline__ float from_column(float x, int col) {
    return __shfl_sync(0xffffffffu, x, (threadIdx.x & 18) | (col & 1) | (col & 6) << 1);
}

// The float4 number `chunk` of a row. Rows of 128 bytes and more would meet in the same banks: each has its chunks in
// another order.
template <int WIDTH, int SWIZZLE>
__device__ __forceinline__ float4 &at(float *tile, int row, int chunk) {
    return reinterpret_cast<float4 *>(tile)[row * (WIDTH / 4) + (chunk ^ (row & SWIZZLE))];
}

__device__ __forceinline__ void copy_chunk(float4 &to, const element *row, int d, bool inside) {
#if COPIES_ASYNC
    // 0 of the 16 bytes are read outside, the others are zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"((unsigned)__cvta_generic_to_shared(&to)),
                 "l"(row + d), "r"(inside ? 16 : 0));
#else
    to = inside ? load4(row, d) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#endif
}

// Starts to copy rows first .. first + N of the matrix x; zeros from row `limit` on and beyond HEAD_DIM. Eight threads
// copy 128 bytes of a row side by side.
template <int N, int SWIZZLE>
__device__ __forceinline__ void load_tile(float *tile, const element *x, long long stride, int first, int limit) {
    constexpr int at_once = THREADS / 8;
    static_assert(N % at_once == 0, "a tile is copied in whole passes of the block");
    const int own = threadIdx.x / 8, chunk = threadIdx.x % 8;
    x += (first + own) * stride;
#pragma unroll 4
    for (int n = 0; n < N; n += at_once, x += at_once * stride)
#pragma unroll
        for (int c = chunk; c < PADDED_D / 4; c += 8)
            copy_chunk(at<PADDED_D, SWIZZLE>(tile, own + n, c), x, 4 * c, first + own + n < limit && 4 * c < HEAD_DIM);
}

// What this thread has started to copy is there; a barrier makes it so for all.
__device__ __forceinline__ void wait_for_copies() {
#if COPIES_ASYNC
    asm volatile("cp.async.wait_all;\n" ::: "memory");
#endif
}

// s[r][c] = <row of a, row of b>, where a's rows are row, row + 4, ... (SWIZZLE_4_ROWS), and b's col, col + 8, ...
// (SWIZZLE_8_ROWS).
__device__ __forceinline__ void product(float (&s)[ROWS][COLS], float *a, int row, float *b, int col) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLS; ++c) s[r][c] = 0.0f;
#pragma unroll 1
    for (int first = 0; first < HEAD_DIM; first += PART) {
        float part[ROWS][COLS] = {};
#pragma unroll UNROLL
        for (int chunk = first / 4; chunk < (min_of(first + PART, HEAD_DIM) + 3) / 4; ++chunk) {
            float4 x[ROWS], y[COLS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) x[r] = at<PADDED_D, SWIZZLE_4_ROWS>(a, row + 4 * r, chunk);
#pragma unroll
            for (int c = 0; c < COLS; ++c) y[c] = at<PADDED_D, SWIZZLE_8_ROWS>(b, col + 8 * c, chunk);
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int c = 0; c < COLS; ++c) {
                    part[r][c] += x[r].x * y[c].x;
                    part[r][c] += x[r].y * y[c].y;
                    part[r][c] += x[r].z * y[c].z;
                    part[r][c] += x[r].w * y[c].w;
                }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < COLS; ++c) s[r][c] += part[r][c];
    }
}

// A warp's P or dS (its rows of a product) into shared memory, in the order in which the threads hold them: the columns
// col, col + 8, ... of a thread lie side by side.
__device__ __forceinline__ void store_scores(float *tile, int row, int col, const float (&s)[ROWS][COLS]) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLS; c += 4)
            at<OTHER_TILE, SWIZZLE_4_ROWS>(tile, row + 4 * r, (col * COLS + c) / 4) =
                make_float4(s[r][c], s[r][c + 1], s[r][c + 2], s[r][c + 3]);
}

__device__ __forceinline__ void load_scores(float *tile, int row, int col, float (&s)[ROWS][COLS]) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLS; c += 4) {
            const float4 four = at<OTHER_TILE, SWIZZLE_4_ROWS>(tile, row + 4 * r, (col * COLS + c) / 4);
            s[r][c] = four.x, s[r][c + 1] = four.y, s[r][c + 2] = four.z, s[r][c + 3] = four.w;
        }
}

// sums += left * tile: the rows row, row + 4, ... of `left` with all rows of the tile, at the columns
// 4 (col + 8 n) of the tile.
template <int N, int SWIZZLE>
__device__ __forceinline__ void accumulate(float4 (&sums)[N][FLOAT4S], float *left, int row, float *tile, int col) {
#pragma unroll 1
    for (int t = 0; t < 8; ++t) {
#pragma unroll
        for (int c = 0; c < COLS; c += 4) {
            float l[N][4];
#pragma unroll
            for (int r = 0; r < N; ++r) {
                const float4 four = at<OTHER_TILE, SWIZZLE_4_ROWS>(left, row + 4 * r, (t * COLS + c) / 4);
                l[r][0] = four.x, l[r][1] = four.y, l[r][2] = four.z, l[r][3] = four.w;
            }
#pragma unroll
            for (int e = 0; e < 4; ++e)
#pragma unroll
                for (int n = 0; n < FLOAT4S; ++n) {
                    const float4 x = at<PADDED_D, SWIZZLE>(tile, t + 8 * (c + e), col + 8 * n);
#pragma unroll
                    for (int r = 0; r < N; ++r) {
                        sums[r][n].x += l[r][e] * x.x, sums[r][n].y += l[r][e] * x.y;
                        sums[r][n].z += l[r][e] * x.z, sums[r][n].w += l[r][e] * x.w;
                    }
                }
        }
    }
}

// Row i of a result, scaled: a thread's columns of it.
__device__ __forceinline__ void store_row(element *row, int col, const float4 (&sums)[FLOAT4S], float scale) {
#pragma unroll
    for (int n = 0; n < FLOAT4S; ++n) {
        const float4 x = sums[n];
        store4(row, 4 * (col + 8 * n), make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale));
    }
}
