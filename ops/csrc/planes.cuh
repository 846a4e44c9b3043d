// fp32 products on tensor cores, as exact as fp32 is.
//
// A float is split into three numbers of bf16, its planes: x = x0 + x1 + x2, of 8 bits each, to the last bit. Of the
// nine products of two split numbers the six with i + j <= 2 are computed, x0 y0, then x0 y1 + x1 y0 and
// x0 y2 + x1 y1 + x2 y0; the other three come to 2^-24 of the product at most, half a unit in fp32's last place, and
// mostly to far less.
//
// bf16 has fp32's exponents, but for the ends: a number below 2^-110 is off by up to 2^-134, and one beyond 3.39e38,
// which bf16 rounds to infinity, becomes NaN, as infinity does (inf - inf), where fp32 may have an infinite result.
//
// Tensor cores cut their sums off where fp32 would round them, by up to a unit in the last place and always towards
// zero, so that a long sum would drift. Hence no sum in the tensor cores is deeper than one step of 16, small products
// first; the steps are added up by FMA units, which round.
//
// In global memory (planes.cu) a row is its three planes of PAD_D numbers, one behind the other; in shared memory a
// tile is three swizzled tiles, one behind the other.
#pragma once
#include "scores.cuh"
#include "split.cuh"

// Two numbers of a row in global memory, `column` even, as far as they are within D. EVEN: they can be written at once.
__device__ __forceinline__ void write_two(float *row, int column, float low, float high) {
#if EVEN
    if (column < HEAD_DIM) *(float2 *)(row + column) = make_float2(low, high);
#else
    if (column < HEAD_DIM) row[column] = low;
    if (column + 1 < HEAD_DIM) row[column + 1] = high;
#endif
}

// Loads tiles of ROWS rows of split numbers: the three planes of a row lie side by side.
template <int ROWS, int THREADS> struct PlaneLoader {
    Loader<ROWS, THREADS> loader;

    // `matrix`: the (T, 3 * PAD_D) planes of a (T, D) matrix.
    __device__ __forceinline__ PlaneLoader(const operand *matrix, long long stride, int first)
        : loader(matrix, stride, first) {}

    // As Loader::load, into three tiles of ROWS * ROW_BYTES from `tile` on.
    __device__ __forceinline__ void load(unsigned tile, long long stride, int limit, int advance = ROWS) {
#pragma unroll
        for (int plane = 0; plane < PLANES; plane++) {
            loader.load(tile + plane * ROWS * ROW_BYTES, stride, limit, 0);
            loader.from += PAD_D;
        }
        loader.from += advance * stride - PLANES * PAD_D;
    }
};

// Whose planes are multiplied by whose, the smallest products first and x0 y0 last.
#define PRODUCTS 6
__device__ __forceinline__ constexpr int left_plane(int product) {
    return product == 0 ? 2 : product == 2 || product == 3 ? 1 : 0;
}
__device__ __forceinline__ constexpr int right_plane(int product) {
    return product == 1 ? 2 : product == 2 || product == 4 ? 1 : 0;
}

// Pairs of C tiles that are computed side by side: a product waits for the one before it in the same C tile, and the
// others of 16 * TILES rows fill that time.
template <int TILES, int PAIRS> struct Beside {
    static const int N = TILES == 1 && PAIRS % 2 == 0 ? 2 : 1;
};

// Columns 16 n .. 16 (n + BESIDE) += a b: a of 16 * TILES rows, b of 16 * BESIDE columns, 16 deep.
template <int BESIDE, int TILES, int PAIRS>
__device__ __forceinline__ void add_products(Sums<TILES, PAIRS> &sums, int n, const unsigned (&a)[PLANES][TILES][4],
                                             const unsigned (&b)[BESIDE][PLANES][4]) {
    Sums<TILES, BESIDE> part;
    part.clear();
#pragma unroll
    for (int product = 0; product < PRODUCTS; product++)
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int x = 0; x < BESIDE; x++) {
                const unsigned(&left)[4] = a[left_plane(product)][t], (&right)[4] = b[x][right_plane(product)];
                mma(part.c[t][2 * x], left, right[0], right[1]);
                mma(part.c[t][2 * x + 1], left, right[2], right[3]);
            }
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int x = 0; x < 2 * BESIDE; x++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums.c[t][2 * n + x][e] += part.c[t][x][e];
}

// sums += a B^T, a 16 * TILES rows of step d along D, in registers: B's rows are rows of split tiles. `b`: the first
// row, in the first plane; b_plane: bytes from one plane to the next.
template <int TILES, int PAIRS>
__device__ __forceinline__ void add_split_step(Sums<TILES, PAIRS> &sums, const unsigned (&a)[PLANES][TILES][4], int d,
                                               const LaneRows<PAD_D> &columns_first, unsigned b, unsigned b_plane) {
    const int BESIDE = Beside<TILES, PAIRS>::N;
#pragma unroll
    for (int n = 0; n < PAIRS; n += BESIDE) {
        unsigned right[BESIDE][PLANES][4];
#pragma unroll
        for (int x = 0; x < BESIDE; x++)
#pragma unroll
            for (int plane = 0; plane < PLANES; plane++)
                load_matrices(right[x][plane], columns_first(b + plane * b_plane, (n + x) * 16, d));
        add_products<BESIDE>(sums, n, a, right);
    }
}

// sums = A B^T over D. The first STAY planes of A are in registers, of the others its rows are rows of split tiles.
// `a`: the warp's first row in the first plane that is not held; `b`: as above.
template <int STAY, int TILES, int PAIRS>
__device__ __forceinline__ void multiply_split(Sums<TILES, PAIRS> &sums,
                                               const unsigned (&held)[D_STEPS][STAY ? STAY : 1][TILES][4],
                                               const LaneRows<PAD_D> &rows_first, unsigned a, unsigned a_plane,
                                               const LaneRows<PAD_D> &columns_first, unsigned b, unsigned b_plane) {
    sums.clear();
#pragma unroll
    for (int d = 0; d < D_STEPS; d++) {
        unsigned left[PLANES][TILES][4];
#pragma unroll
        for (int plane = 0; plane < PLANES; plane++)
#pragma unroll
            for (int t = 0; t < TILES; t++)
                if (plane >= STAY)
                    load_matrices(left[plane][t], rows_first(a + (plane - STAY) * a_plane, t * 16, d));
                else
#pragma unroll
                    for (int e = 0; e < 4; e++) left[plane][t][e] = held[d][STAY ? plane % STAY : 0][t][e];
        add_split_step(sums, left, d, columns_first, b, b_plane);
    }
}

// sums += W B: W are the warp's own sums, split here, and B is the split tile at `b`, (16 * PAIRS) x D.
template <int TILES, int PAIRS>
__device__ __forceinline__ void add_split_product(Sums<TILES, D_STEPS> &sums, const Sums<TILES, PAIRS> &w,
                                                  const LaneRows<PAD_D> &rows_first, unsigned b, unsigned b_plane) {
    const int BESIDE = Beside<TILES, D_STEPS>::N;
#pragma unroll
    for (int n = 0; n < PAIRS; n++) {
        unsigned left[PLANES][TILES][4];
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                split(w.c[t][2 * n + e / 2][e % 2 * 2], w.c[t][2 * n + e / 2][e % 2 * 2 + 1], left[0][t][e],
                      left[1][t][e], left[2][t][e]);
#pragma unroll
        for (int d = 0; d < D_STEPS; d += BESIDE) {
            unsigned right[BESIDE][PLANES][4];
#pragma unroll
            for (int x = 0; x < BESIDE; x++)
#pragma unroll
                for (int plane = 0; plane < PLANES; plane++)
                    load_transposed(right[x][plane], rows_first(b + plane * b_plane, n * 16, d + x));
            add_products<BESIDE>(sums, d, left, right);
        }
    }
}
