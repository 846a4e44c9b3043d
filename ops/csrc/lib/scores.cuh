// What happens to a warp's C tiles of scores, for the kernels on tensor cores: options, mask, and in the backward the
// derivative. With SCALE_BEFORE_MAX (softcap, ALiBi, a scale that is not positive) the scores are scaled before anything
// else; without, the scale waits for the exponential, whose FMA has it for nothing, as it has log2(e).
#pragma once
#include "mma.cuh"

__device__ __forceinline__ float exponent_scale(const Params &p) { return SCALE_BEFORE_MAX ? LOG2E : p.scale * LOG2E; }

// The document of query i, and of key j; anything without DOCUMENT_IDS.
__device__ __forceinline__ int id_of_query(const Params &p, int b, int i) {
#if DOCUMENT_IDS
    return i < p.tq ? p.q_document_ids[(long long)b * p.tq + i] : 0;
#else
    return 0;
#endif
}
__device__ __forceinline__ int id_of_key(const Params &p, int b, int j) {
#if DOCUMENT_IDS
    return p.k_document_ids[(long long)b * p.tk + min_of(j, p.tk - 1)];
#else
    return 0;
#endif
}

// `hidden` in the place of what is not seen of a tile. Keys outside, rows inside: two keys' ids are alive at a time.
// (Rows outside, all ids of the tile were, and 584 bytes a thread spilled.)
template <int M_TILES, int N_STEPS>
__device__ __forceinline__ void apply_mask(const Params &p, Accumulator<M_TILES, N_STEPS> &s, float hidden, int i_first,
                                           int j_first, int keys, int b) {
    const int row = i_first + threadIdx.x % 32 / 4, column = j_first + threadIdx.x % 4 * 2;
    int ids[2 * M_TILES];
#pragma unroll
    for (int r = 0; r < 2 * M_TILES; r++) ids[r] = id_of_query(p, b, row + r * 8);
#pragma unroll
    for (int n = 0; n < 2 * N_STEPS; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int j = column + n * 8 + e, id = id_of_key(p, b, j);
#pragma unroll
            for (int r = 0; r < 2 * M_TILES; r++) {  // by what they are beyond `row`: fewer numbers to keep
                const bool seen = is_visible(p, r * 8, j - row, keys - row, keys - p.tq, ids[r], id);
                if (!seen) s.c[r / 2][n][r % 2 * 2 + e] = hidden;
            }
        }
}

// Scores of a tile that is not seen in full, or that takes more than a scale: -inf where unseen.
template <int M_TILES, int N_STEPS>
__device__ __forceinline__ void scale_and_mask(const Params &p, Accumulator<M_TILES, N_STEPS> &s, int i_first,
                                               int j_first, int keys, int b, int h, bool needs_mask) {
    const int row = i_first + threadIdx.x % 32 / 4, column = j_first + threadIdx.x % 4 * 2;
    const float slope = ALIBI ? p.alibi_slopes[h] : 0.0f;
    if (SCALE_BEFORE_MAX)
#pragma unroll
        for (int t = 0; t < M_TILES; t++)
#pragma unroll
            for (int n = 0; n < 2 * N_STEPS; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float &x = s.c[t][n][e], tanh_score;
                    const int i = row + t * 16 + e / 2 * 8, j = column + n * 8 + e % 2;
                    x = score_of(p, x, i, j, keys - p.tq, slope, tanh_score);
                }
    if (needs_mask) apply_mask(p, s, -INFINITE, i_first, j_first, keys, b);
}

// s = <q, k> becomes P and dp = <dout, v> becomes dS, but for its scale. lse_log2 and delta begin at row i_first. In
// three passes, so that the mask is a branch of its own: within one, the compiler made selections of it that every tile
// paid. Dropout is drawn ahead, into a bit for each column: kept as signs of P, it spilled 300 to 664 bytes.
template <int M_TILES, int N_STEPS>
__device__ __forceinline__ void compute_p_and_ds(const Params &p, Accumulator<M_TILES, N_STEPS> &s,
                                                 Accumulator<M_TILES, N_STEPS> &dp, const float *lse_log2,
                                                 const float *delta, int i_first, int j_first, int keys,
                                                 int b, int h, bool needs_mask) {
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    const float scale_log2 = exponent_scale(p), slope = ALIBI ? p.alibi_slopes[h] : 0.0f;
#if DROPOUT
    static_assert(N_STEPS <= 8, "a bit for each column of a row");
    unsigned dropped[M_TILES][2];
#endif
#pragma unroll
    for (int t = 0; t < M_TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int at = t * 16 + half * 8 + row;
            const float lse_i = lse_log2[at], delta_i = delta[at];
#if DROPOUT
            const unsigned row_key = hash_combine(dropout_head_key(p, b, h), (unsigned)(i_first + at));
            dropped[t][half] = 0;
#pragma unroll
            for (int n = 0; n < 2 * N_STEPS; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const bool is_kept = dropout_keeps(row_key, j_first + n * 8 + column + e, p.dropout_threshold);
                    float &gradient = dp.c[t][n][2 * half + e];
                    gradient = is_kept ? gradient * p.keep_scale : 0.0f;
                    if (!is_kept) dropped[t][half] |= 1u << (2 * n + e);
                }
#endif
#pragma unroll
            for (int n = 0; n < 2 * N_STEPS; n++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) {
                    const int j = j_first + n * 8 + column + e % 2;
                    float &prob = s.c[t][n][e], &gradient = dp.c[t][n][e], tanh_score = 0.0f;
                    if (SCALE_BEFORE_MAX) prob = score_of(p, prob, i_first + at, j, keys - p.tq, slope, tanh_score);
                    prob = exp2_of(prob * scale_log2 - lse_i);
                    gradient -= delta_i;
#if SOFTCAP
                    gradient *= 1.0f - tanh_score * tanh_score;
#endif
                }
        }
    if (needs_mask) apply_mask(p, s, 0.0f, i_first, j_first, keys, b);
#pragma unroll
    for (int t = 0; t < M_TILES; t++)
#pragma unroll
        for (int n = 0; n < 2 * N_STEPS; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                dp.c[t][n][e] *= s.c[t][n][e];
#if DROPOUT
                if (dropped[t][e / 2] >> (2 * n + e % 2) & 1) s.c[t][n][e] = 0.0f;  // keep_scale waits for the end
#endif
            }
}
