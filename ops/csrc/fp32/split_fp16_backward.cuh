// What the two kernels of the backward on terms share (split_fp16_backward.cu, split_fp16_backward_dq.cu).
//
// Two things decide their form. Registers: the terms of a left operand, the scores and the sums of one gradient are as
// much as a warp can hold, so warps work in pairs on the same rows, and each makes one of S and dP. Shared memory: an
// ldmatrix takes it for as long as tensor cores take for three products, so a warp's own rows (K or V, Q or dO), which
// are the same in all tiles, stay in registers as far as there is room, straight from global memory.
//
// The host defines ROW_TILES (of 16 rows of a pair), OTHER_TILE (queries or keys of a tile), AT_ONCE (of them; a tile is
// walked in one part or two), WARPS, BLOCKS (that are to share a multiprocessor), STAGES (of tiles), OWN_TERMS (of the
// own rows that stay in registers; the others are read from shared memory each time), EVEN (two numbers of a gradient
// can be written at once).
#pragma once
#include "split_products.cuh"

#define THREADS (WARPS * 32)
#define OWN_ROWS (ROW_TILES * 16)          // of a pair of warps
#define OWN_TILE (WARPS / 2 * OWN_ROWS)  // of a block
#define N_STEPS (AT_ONCE / 16)
#define ROW (TERMS * PADDED_D)              // numbers of a row
#define OWN_BYTES (OWN_TILE * ROW_BYTES)  // of one term
#define REST (TERMS - OWN_TERMS)            // terms of own rows in shared memory
#define TILE_BYTES (TERMS * OTHER_TILE * ROW_BYTES)
#define STAGE_BYTES (2 * TILE_BYTES + 2 * OTHER_TILE * 4)  // two tensors, lse, delta
#define TRADED_BYTES (OWN_ROWS * OTHER_TILE * 4)           // what a pair has for each other

static_assert(WARPS % 2 == 0 && AT_ONCE % 16 == 0 && OTHER_TILE % AT_ONCE == 0, "whole pairs and tiles");
static_assert(WARPS / 2 < 16, "a named barrier for each pair");

typedef Accumulator<ROW_TILES, N_STEPS> Scores;
typedef Accumulator<ROW_TILES, D_STEPS> Gradient;

// For the 64 threads of a pair: what one wrote before is there for the other behind it. Both by one instruction, or
// compute-sanitizer's synccheck says that they diverge; and where the one who only writes goes on by bar.arrive, its
// racecheck finds races.
__device__ __forceinline__ void meet_in_pair(int pair) {
    asm volatile("bar.sync %0, 64;" ::"r"(pair + 1) : "memory");
}

// The rows that are a warp's own, as left operands.
struct OwnRows {
    unsigned held[OWN_TERMS ? OWN_TERMS : 1][ROW_TILES][D_STEPS][4], rest;

    // `matrix`: the terms of a (T, D) matrix; `rest`: where the terms that are not held will be, in shared memory.
    __device__ __forceinline__ OwnRows(const mma_element *matrix, int first, int end, unsigned rest) : rest(rest) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int term = 0; term < OWN_TERMS; term++)
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
                for (int d = 0; d < D_STEPS; d++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int row = first + t * 16 + e % 2 * 8 + lane / 4;
                        const int column = term * PADDED_D + d * 16 + e / 2 * 8 + lane % 4 * 2;
                        const mma_element *at = matrix + (long long)row * ROW + column;
                        held[term][t][d][e] = row < end ? *(const unsigned *)at : 0;
                    }
    }

    __device__ __forceinline__ void get(unsigned (&left)[TERMS][ROW_TILES][4], const LdmatrixLanes<PADDED_D> &lanes,
                                        int d) const {
#pragma unroll
        for (int term = 0; term < TERMS; term++)
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++)
                if (term < OWN_TERMS)
#pragma unroll
                    for (int e = 0; e < 4; e++) left[term][t][e] = held[term < OWN_TERMS ? term : 0][t][d][e];
                else
                    ldmatrix(left[term][t], lanes(rest + (term - OWN_TERMS) * OWN_BYTES, t * 16, d));
    }
};

// Loads the tiles of two tensors of one shape, the second `apart` numbers behind the first.
struct TwoLoader {
    TermLoader<OTHER_TILE, THREADS> next;
    __device__ __forceinline__ TwoLoader(const mma_element *matrix, int first) : next(matrix, ROW, first) {}
    __device__ __forceinline__ void load(unsigned tile, long long apart, int limit) {
        next.load(tile, ROW, limit, 0);
        next.loader.from += apart;
        next.load(tile + TILE_BYTES, ROW, limit);
        next.loader.from -= apart;
    }
};

// The terms that no warp holds of the block's own rows, into shared memory.
__device__ __forceinline__ void load_rest(const mma_element *matrix, int first, int end, unsigned to) {
#pragma unroll
    for (int term = 0; term < REST; term++)
        Loader<OWN_TILE, THREADS>(matrix + (OWN_TERMS + term) * PADDED_D, ROW, first)
            .load(to + term * OWN_BYTES, ROW, end - first);
}

// s = A B^T over D: A is the warp's own, B's rows those of the split tile at `b`.
__device__ __forceinline__ void multiply_own(Scores &s, const OwnRows &own, const LdmatrixLanes<PADDED_D> &a_lanes,
                                             const LdmatrixLanes<PADDED_D> &b_lanes, unsigned b) {
    Scores rest;
    s.clear(), rest.clear();
#pragma unroll
    for (int d = 0; d < D_STEPS; d++) {
        unsigned left[TERMS][ROW_TILES][4];
        own.get(left, a_lanes, d);
        add_split_step(s, rest, left, d, b_lanes, b, OTHER_TILE * ROW_BYTES);
    }
}

// A warp's sums, or its part of them, to or from the pair's place in shared memory, as the registers lie.
template <int N> __device__ __forceinline__ void send(float4 *to, const Accumulator<ROW_TILES, N> &sums) {
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int n = 0; n < 2 * N; n++) {
            const float(&c)[4] = sums.c[t][n];
            to[(t * 2 * N + n) * 32 + threadIdx.x % 32] = make_float4(c[0], c[1], c[2], c[3]);
        }
}

template <int N> __device__ __forceinline__ void receive(const float4 *from, Accumulator<ROW_TILES, N> &sums) {
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int n = 0; n < 2 * N; n++) {
            const float4 x = from[(t * 2 * N + n) * 32 + threadIdx.x % 32];
            float(&c)[4] = sums.c[t][n];
            c[0] = x.x, c[1] = x.y, c[2] = x.z, c[3] = x.w;
        }
}

// The half of a warp's columns.
template <int N>
__device__ __forceinline__ Accumulator<ROW_TILES, N> half_of(const Accumulator<ROW_TILES, 2 * N> &sums, int half) {
    Accumulator<ROW_TILES, N> part;
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int n = 0; n < 2 * N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) part.c[t][n][e] = sums.c[t][half * 2 * N + n][e];
    return part;
}

// Of a pair each keeps one half of its columns, the first warp the first, and gets the other's same half. `place`: as
// much shared memory as one warp's sums.
template <int N>
__device__ __forceinline__ void trade(const Accumulator<ROW_TILES, 2 * N> &sums, bool second_half, float4 *place,
                                      int pair, Accumulator<ROW_TILES, N> &kept, Accumulator<ROW_TILES, N> &got) {
    const int half = ROW_TILES * N * 64;
    if (second_half)
        send(place, half_of<N>(sums, 0)), kept = half_of<N>(sums, 1);
    else
        send(place + half, half_of<N>(sums, 1)), kept = half_of<N>(sums, 0);
    meet_in_pair(pair);
    receive(place + (second_half ? half : 0), got);
}

// What little room fp16 has for P and dS. P, which may be a little more than 1 where scores are so large that lse is
// rounded by more than that, is multiplied by 2^12. Of dS all that is known is that it is below 2^29 D, as dP is a sum
// of D products below 2^28 and so is delta, keep_scale left out of both; it is divided by 2^DS_SHIFT.
#define P_POWER 12
#define P_FACTOR ((float)(1 << P_POWER))
#define DS_SHIFT (PADDED_D > 64 ? 21 : PADDED_D > 32 ? 20 : 19)

// The powers of two that a block's numbers have been multiplied by (split.cuh), and the
// factors and the power that undo them: of a score, of delta beside dP, of dS.
struct Powers {
    int q, k, v, dout;
    __device__ __forceinline__ Powers(const Params &p, int b, int kv_head)
        : q(exponent_of(p, OF_Q, b, kv_head)), k(exponent_of(p, OF_K, b, kv_head)), v(exponent_of(p, OF_V, b, kv_head)),
          dout(exponent_of(p, OF_DOUT, b, kv_head)) {}
    __device__ __forceinline__ float score_factor() const { return power_of_two(-q - k); }
    __device__ __forceinline__ float delta_factor() const { return power_of_two(v + dout - DS_SHIFT); }
    __device__ __forceinline__ int ds_power() const { return DS_SHIFT - v - dout; }
};

// P times P_FACTOR, of dot = <q_i, k_j>, before the mask. p_dsoftcap: P times the derivative of the softcap,
// for dS; negative where dropout drops P. The exponent is s - lse before it is in units of log2, as both are
// large where P is not small.
__device__ __forceinline__ float probability_of(const Params &p, float dot, int i, int j, int causal_offset,
                                                float slope, float lse, unsigned row_key, float &p_dsoftcap) {
    float tanh_score = 0.0f;
    const float s = score_of(p, dot, i, j, causal_offset, slope, tanh_score), prob = exp2_of((s - lse) * LOG2E);
    p_dsoftcap = SOFTCAP ? prob * (1.0f - tanh_score * tanh_score) : prob;
#if DROPOUT
    if (!dropout_keeps(row_key, j, p.dropout_threshold)) {
        p_dsoftcap = -p_dsoftcap;
        return 0.0f;
    }
#endif
    return prob * P_FACTOR;
}

// dS, but for its scale and keep_scale: of dp, and of delta as delta_factor has it, by keep_scale.
__device__ __forceinline__ float ds_of(const Params &p, float p_dsoftcap, float dp, float delta) {
#if DROPOUT
    return fabsf(p_dsoftcap) * ((signbit(p_dsoftcap) ? 0.0f : dp * (1.0f / (1 << DS_SHIFT))) - delta);
#else
    return p_dsoftcap * (dp * (1.0f / (1 << DS_SHIFT)) - delta);
#endif
}

__device__ __forceinline__ unsigned row_key_of(unsigned key, int i) {
    return DROPOUT ? hash_combine(key, (unsigned)i) : 0;
}

// A warp's rows times scale and 2^power to global memory from `column` on, those of `rows` that exist.
template <int N>
__device__ __forceinline__ void store_sums(Accumulator<ROW_TILES, N> &sums, float scale, int power, float *to,
                                           long long stride, int rows, int column) {
    const int lane = threadIdx.x % 32;
    multiply_by(sums, power_of_two(power / 2)), multiply_by(sums, power_of_two(power - power / 2));
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = t * 16 + half * 8 + lane / 4;
            if (row >= rows) continue;
#pragma unroll
            for (int n = 0; n < 2 * N; n++) {
                const float *c = &sums.c[t][n][2 * half];
                write_two(to + row * stride, column + n * 8 + lane % 4 * 2, c[0] * scale, c[1] * scale);
            }
        }
}
