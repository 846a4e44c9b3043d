// fp32 products on tensor cores, as exact as fp32 is.
//
// A float is split into two numbers of fp16, its terms: x = x0 + x1 / 2^11, of 11 bits and a sign each, which is x to
// a unit in its last place and in three of four cases to the last bit (Ootomo and Yokota 2022). Of the four products of
// two split numbers three are computed, x0 y0 and x0 y1 + x1 y0; x1 y1 comes to 2^-22 of the product at most, and on
// average, of any sign, to 2^-25, half a unit in fp32's last place.
//
// fp16 has few exponents, so that numbers are multiplied by a power of two before, one for all that a key head and its
// query heads have in a tensor (split_fp16.cu), and results by its inverse. Numbers 2^27 times smaller than the largest
// lose bits, to 2^-49 of it; P does below 2^-20 of 1 in the forward and 2^-25 in the backward, and dS below 2^-28 of
// the largest that it could be, 2 D of the largest v times the largest dout. So errors are small beside the largest of
// a tensor, as they are by FMA, but not beside a row that is so much smaller than others: the gradient of a value at
// which nobody looks, or a head whose dout is 1e-8 of that of another of its group; and a document whose keys are 1e8
// times as large as another's takes its bits, also where they do not see each other. Gradients below 1e-37, the end of
// fp32's normal numbers, are not to be trusted. Infinities become NaN.
//
// Tensor cores cut their sums off where fp32 would round them, by up to a unit in the last place and always towards
// zero, so that a long sum would drift. Hence sums of x0 y0 are no deeper there than one step of 16 of Q K^T, where an
// error counts most, and one tile of what is summed over tiles; FMA units, which round, add these up, and add to Q K^T
// what is cut off on average, 2^-24 of it: that leaves 1.8e-6 (rms, by an imitation in NumPy) as the error of scores of
// 38 at D = 64 where it was 2.6e-6; all of D at once made 4.9e-6, and fp32's FMAs one after the other 4.8e-6. (A score
// of which nothing is cut off, of whole numbers say, comes out a unit too large.) For the other products, 2^11 times
// smaller, it does not matter.
//
// In global memory (split_fp16.cu) a row is its two terms of PADDED_D numbers, one behind the other; in shared memory a
// tile is two swizzled tiles, one behind the other.
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

// Loads tiles of ROWS rows of split numbers: the two terms of a row lie side by side.
template <int ROWS, int THREADS> struct TermLoader {
    Loader<ROWS, THREADS> loader;

    // `matrix`: the (T, TERMS * PADDED_D) terms of a (T, D) matrix.
    __device__ __forceinline__ TermLoader(const mma_element *matrix, long long stride, int first)
        : loader(matrix, stride, first) {}

    // As Loader::load, into two tiles of ROWS * ROW_BYTES from `tile` on.
    __device__ __forceinline__ void load(unsigned tile, long long stride, int limit, int advance = ROWS) {
#pragma unroll
        for (int term = 0; term < TERMS; term++) {
            loader.load(tile + term * ROWS * ROW_BYTES, stride, limit, 0);
            loader.from += PADDED_D;
        }
        loader.from += advance * stride - TERMS * PADDED_D;
    }
};

// Pairs of C tiles that are computed side by side: a product waits for the one before it in the same C tile, and the
// others of 16 * M_TILES rows fill that time.
template <int M_TILES, int N_STEPS> struct Beside {
    static const int N = M_TILES == 1 && N_STEPS % 2 == 0 ? 2 : 1;
};

// Of a b, a of 16 * M_TILES rows, b of 16 * BESIDE columns, 16 deep: x0 y0 is added to `first`, and 2^11 times the rest
// to columns 16 n and on of `rest`.
template <int BESIDE, int M_TILES, int N_STEPS>
__device__ __forceinline__ void add_products(Accumulator<M_TILES, BESIDE> &first, Accumulator<M_TILES, N_STEPS> &rest,
                                             int n, const unsigned (&a)[TERMS][M_TILES][4],
                                             const unsigned (&b)[BESIDE][TERMS][4]) {
#pragma unroll
    for (int product = 0; product < 3; product++)
#pragma unroll
        for (int t = 0; t < M_TILES; t++)
#pragma unroll
            for (int x = 0; x < 2 * BESIDE; x++) {
                const unsigned(&left)[4] = a[product == 2][t], (&right)[4] = b[x / 2][product == 1];
                mma(product ? rest.c[t][2 * n + x] : first.c[t][x], left, right[x % 2 * 2], right[x % 2 * 2 + 1]);
            }
}

// Columns 16 n and on of sums += part * factor.
template <int M_TILES, int N_STEPS, int N>
__device__ __forceinline__ void add_columns(Accumulator<M_TILES, N_STEPS> &sums, int n,
                                            const Accumulator<M_TILES, N> &part, float factor = 1.0f) {
#pragma unroll
    for (int t = 0; t < M_TILES; t++)
#pragma unroll
        for (int x = 0; x < 2 * N; x++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums.c[t][2 * n + x][e] += part.c[t][x][e] * factor;
}

template <int M_TILES, int N_STEPS>
__device__ __forceinline__ void multiply_by(Accumulator<M_TILES, N_STEPS> &sums, float factor) {
#pragma unroll
    for (int t = 0; t < M_TILES; t++)
#pragma unroll
        for (int n = 0; n < 2 * N_STEPS; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums.c[t][n][e] *= factor;
}

// Adds to the last part of a sum, columns 16 n and on, its rest, and what tensor cores have cut off the parts before,
// on average.
template <int BESIDE, int M_TILES, int N_STEPS>
__device__ __forceinline__ void finish_part(Accumulator<M_TILES, BESIDE> &part, const Accumulator<M_TILES, N_STEPS> &sums,
                                            const Accumulator<M_TILES, N_STEPS> &rest, int n) {
#pragma unroll
    for (int t = 0; t < M_TILES; t++)
#pragma unroll
        for (int x = 0; x < 2 * BESIDE; x++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float small = rest.c[t][2 * n + x][e] * (1.0f / LOW);
                part.c[t][x][e] += sums.c[t][2 * n + x][e] * (1.0f / (1 << 24)) + small;
            }
}

// sums += a B^T, a 16 * M_TILES rows of step d along D, in registers, and `rest`, as above: B's rows are rows of split
// tiles. `b`: the first row, in the first term; b_term: bytes from one term to the next.
template <int M_TILES, int N_STEPS>
__device__ __forceinline__ void add_split_step(Accumulator<M_TILES, N_STEPS> &sums, Accumulator<M_TILES, N_STEPS> &rest,
                                               const unsigned (&a)[TERMS][M_TILES][4], int d,
                                               const LdmatrixLanes<PADDED_D> &b_lanes, unsigned b, unsigned b_term) {
    const int BESIDE = Beside<M_TILES, N_STEPS>::N;
#pragma unroll
    for (int n = 0; n < N_STEPS; n += BESIDE) {
        unsigned right[BESIDE][TERMS][4];
#pragma unroll
        for (int x = 0; x < BESIDE; x++)
#pragma unroll
            for (int term = 0; term < TERMS; term++)
                ldmatrix(right[x][term], b_lanes(b + term * b_term, (n + x) * 16, d));
        Accumulator<M_TILES, BESIDE> part;
        part.clear();
        add_products(part, rest, n, a, right);
        if (d == D_STEPS - 1) finish_part(part, sums, rest, n);
        add_columns(sums, n, part);
    }
}

// sums = A B^T over D. The first STAY terms of A are in registers, of the others its rows are rows of split tiles.
// `a`: the warp's first row in the first term that is not held; `b`: as above.
template <int STAY, int M_TILES, int N_STEPS>
__device__ __forceinline__ void multiply_split(Accumulator<M_TILES, N_STEPS> &sums,
                                               const unsigned (&held)[D_STEPS][STAY ? STAY : 1][M_TILES][4],
                                               const LdmatrixLanes<PADDED_D> &a_lanes, unsigned a, unsigned a_term,
                                               const LdmatrixLanes<PADDED_D> &b_lanes, unsigned b, unsigned b_term) {
    Accumulator<M_TILES, N_STEPS> rest;
    sums.clear(), rest.clear();
#pragma unroll
    for (int d = 0; d < D_STEPS; d++) {
        unsigned left[TERMS][M_TILES][4];
#pragma unroll
        for (int term = 0; term < TERMS; term++)
#pragma unroll
            for (int t = 0; t < M_TILES; t++)
                if (term >= STAY)
                    ldmatrix(left[term][t], a_lanes(a + (term - STAY) * a_term, t * 16, d));
                else
#pragma unroll
                    for (int e = 0; e < 4; e++) left[term][t][e] = held[d][STAY ? term % STAY : 0][t][e];
        add_split_step(sums, rest, left, d, b_lanes, b, b_term);
    }
}

// sums += W B: W are the warp's own sums, split here, and B is the split tile at `b`, (16 * N_STEPS) x D.
template <int M_TILES, int N_STEPS>
__device__ __forceinline__ void add_split_product(Accumulator<M_TILES, D_STEPS> &sums,
                                                  const Accumulator<M_TILES, N_STEPS> &w,
                                                  const LdmatrixLanes<PADDED_D> &b_lanes, unsigned b, unsigned b_term) {
    const int BESIDE = Beside<M_TILES, D_STEPS>::N;
    unsigned left[N_STEPS][TERMS][M_TILES][4];
#pragma unroll
    for (int n = 0; n < N_STEPS; n++)
#pragma unroll
        for (int t = 0; t < M_TILES; t++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                split(w.c[t][2 * n + e / 2][e % 2 * 2], w.c[t][2 * n + e / 2][e % 2 * 2 + 1], left[n][0][t][e],
                      left[n][1][t][e]);
#pragma unroll
    for (int d = 0; d < D_STEPS; d += BESIDE) {
        Accumulator<M_TILES, BESIDE> part, rest;
        part.clear(), rest.clear();
#pragma unroll
        for (int n = 0; n < N_STEPS; n++) {
            unsigned right[BESIDE][TERMS][4];
#pragma unroll
            for (int x = 0; x < BESIDE; x++)
#pragma unroll
                for (int term = 0; term < TERMS; term++)
                    ldmatrix_trans(right[x][term], b_lanes(b + term * b_term, n * 16, d + x));
            add_products(part, rest, 0, left[n], right);
        }
        add_columns(sums, d, part);
        add_columns(sums, d, rest, 1.0f / LOW);
    }
}
