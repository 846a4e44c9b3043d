// What happens to a warp's C tiles of scores, for the kernels on tensor cores: options, mask, and in the backward the
// derivative. With SCALE_FIRST (softcap, ALiBi, a scale that is not positive) the scores are scaled before anything
// else; without, the scale waits for the exponential, whose FMA has it for nothing, as it has log2(e).
#pragma once
#include "mma.cuh"

__device__ __forceinline__ float exponent_scale(const Params &p) { return SCALE_FIRST ? LOG2E : p.scale * LOG2E; }

// What a row of queries needs to know of keys: they are seen from `left` to `right`.
struct Sight {
    int right, left, id;
    __device__ __forceinline__ Sight(const Params &p, int b, int i, int keys) {
        right = keys - 1, left = 0, id = 0;
#if HAS_RIGHT
        right = min_of(right, i + keys - p.tq + p.window_right);
#endif
#if HAS_LEFT
        left = i + keys - p.tq - p.window_left;
#endif
#if SEGMENTS
        id = i < p.tq ? p.q_segments[(long long)b * p.tq + i] : 0;
#endif
    }
    __device__ __forceinline__ bool sees(const Params &p, int b, int j) const {
        bool seen = j <= right && j >= left;
#if SEGMENTS
        seen = seen && p.k_segments[(long long)b * p.tk + min_of(j, p.tk - 1)] == id;
#endif
        return seen;
    }
};

// Scores of a tile that is not seen in full, or that takes more than a scale: -inf where unseen.
template <int TILES, int PAIRS>
__device__ __forceinline__ void finish_scores(const Params &p, Sums<TILES, PAIRS> &s, int i_first, int j_first,
                                              int keys, int b, int h, bool masked) {
    const int lane = threadIdx.x % 32;
    const float slope = ALIBI ? p.alibi_slopes[h] : 0.0f;
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = i_first + t * 16 + half * 8 + lane / 4;
            const Sight sight(p, b, i, keys);
#pragma unroll
            for (int n = 0; n < 2 * PAIRS; n++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) {
                    const int j = j_first + n * 8 + lane % 4 * 2 + e % 2;
                    float &x = s.c[t][n][e], capped;
                    if (SCALE_FIRST) x = score_of(p, x, i, j, keys - p.tq, slope, capped);
                    if (masked) x = sight.sees(p, b, j) ? x : -INFINITE;
                }
        }
}

// s = <q, k> becomes P and dp = <dout, v> becomes dS, but for its scale. lse2 and delta begin at row i_first. In three
// passes, so that the mask is a branch of its own: within one, the compiler made selections of it that every tile paid.
template <int TILES, int PAIRS>
__device__ __forceinline__ void differentiate(const Params &p, Sums<TILES, PAIRS> &s, Sums<TILES, PAIRS> &dp,
                                              const float *lse2, const float *delta, int i_first, int j_first, int keys,
                                              int b, int h, bool masked) {
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    const float c = exponent_scale(p), slope = ALIBI ? p.alibi_slopes[h] : 0.0f;
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int at = t * 16 + half * 8 + row;
            const float shift = lse2[at], mean = delta[at];
#if DROPOUT
            const unsigned row_key = absorb(head_key(p, b, h), (unsigned)(i_first + at));
#endif
#pragma unroll
            for (int n = 0; n < 2 * PAIRS; n++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) {
                    const int j = j_first + n * 8 + column + e % 2;
                    float &weight = s.c[t][n][e], &gradient = dp.c[t][n][e], capped = 0.0f;
                    if (SCALE_FIRST) weight = score_of(p, weight, i_first + at, j, keys - p.tq, slope, capped);
                    weight = exp2_of(weight * c - shift);
#if DROPOUT
                    const bool keep = kept(row_key, j, p.threshold);
                    gradient = keep ? gradient * p.keep_scale : 0.0f;
                    weight = keep ? weight : -weight;  // for dS it counts, for dV not
#endif
                    gradient -= mean;
#if SOFTCAP
                    gradient *= 1.0f - capped * capped;
#endif
                }
        }
    if (masked)
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const Sight sight(p, b, i_first + t * 16 + half * 8 + row, keys);
#pragma unroll
                for (int n = 0; n < 2 * PAIRS; n++)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; e++)
                        if (!sight.sees(p, b, j_first + n * 8 + column + e % 2)) s.c[t][n][e] = 0.0f;
            }
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int n = 0; n < 2 * PAIRS; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                dp.c[t][n][e] *= fabsf(s.c[t][n][e]);
                if (DROPOUT && s.c[t][n][e] < 0.0f) s.c[t][n][e] = 0.0f;  // keep_scale waits for the end
            }
}
