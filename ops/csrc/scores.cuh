// What happens to a warp's C tiles of scores, for the kernels on tensor cores: options, mask, and in the backward the
// derivative. With SCALE_FIRST (softcap, ALiBi, a scale that is not positive) the scores are scaled, in units of log2,
// before anything else; without, the scale waits for the exponential, whose FMA has it for nothing.
#pragma once
#include "mma.cuh"

__device__ __forceinline__ float exponent_scale(const Params &p) { return SCALE_FIRST ? 1.0f : p.scale * LOG2E; }

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
__device__ __forceinline__ void finish_scores(const Params &p, Sums<TILES, PAIRS> &s, int i_first, int j_first, int keys,
                                              int b, int h, bool masked) {
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
                    if (SCALE_FIRST) x = score_of(p, x, i, j, keys - p.tq, slope, capped) * LOG2E;
                    if (masked) x = sight.sees(p, b, j) ? x : -INFINITE;
                }
        }
}

// lse2 of a warp's rows, of which the first is lse2[0].
template <int TILES> __device__ __forceinline__ void load_shifts(float (&shifts)[TILES][2], const float *lse2) {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        shifts[t][0] = lse2[t * 16 + threadIdx.x % 32 / 4];
        shifts[t][1] = lse2[t * 16 + 8 + threadIdx.x % 32 / 4];
    }
}

// Part `part` of PARTS of s = <q, k> becomes exp2(c s - lse2), mask or no mask. (Not with SCALE_FIRST: `differentiate`
// then does it all.)
template <int PARTS, int TILES, int PAIRS>
__device__ __forceinline__ void exponentiate(const Params &p, Sums<TILES, PAIRS> &s, const float (&shifts)[TILES][2],
                                             int part) {
    const float c = exponent_scale(p);
    const int all = TILES * 2 * PAIRS, each = (all + PARTS - 1) / PARTS;
#pragma unroll
    for (int x = part * each; x < (part + 1) * each; x++)
        if (!SCALE_FIRST && x < all)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float &y = s.c[x / (2 * PAIRS)][x % (2 * PAIRS)][e];
                y = exp2_of(y * c - shifts[x / (2 * PAIRS)][e / 2]);
            }
}

// s, after `exponentiate`, becomes P and dp = <dout, v> becomes dS, but for its scale. lse2 and delta begin at row i_first.
template <int TILES, int PAIRS>
__device__ __forceinline__ void differentiate(const Params &p, Sums<TILES, PAIRS> &s, Sums<TILES, PAIRS> &dp,
                                              const float *lse2, const float *delta, int i_first, int j_first, int keys,
                                              int b, int h, bool masked) {
    const int lane = threadIdx.x % 32;
    const float slope = ALIBI ? p.alibi_slopes[h] : 0.0f;
#if DROPOUT
    const unsigned of_head = head_key(p, b, h);
#endif
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = t * 16 + half * 8 + lane / 4, i = i_first + row;
            const float shift = lse2[row], mean = delta[row];
            const Sight sight(p, b, i, keys);
#if DROPOUT
            const unsigned row_key = absorb(of_head, (unsigned)i);
#endif
#pragma unroll
            for (int n = 0; n < 2 * PAIRS; n++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) {
                    const int j = j_first + n * 8 + lane % 4 * 2 + e % 2;
                    float &weight = s.c[t][n][e], &gradient = dp.c[t][n][e], capped = 0.0f;
                    if (SCALE_FIRST)
                        weight = exp2_of(score_of(p, weight, i, j, keys - p.tq, slope, capped) * LOG2E - shift);
                    if (masked) weight = sight.sees(p, b, j) ? weight : 0.0f;
#if DROPOUT
                    const bool keep = kept(row_key, j, p.threshold);
                    gradient = keep ? gradient * p.keep_scale : 0.0f;
#endif
                    gradient = weight * (gradient - mean);
#if SOFTCAP
                    gradient *= 1.0f - capped * capped;
#endif
#if DROPOUT
                    weight = keep ? weight : 0.0f;  // keep_scale waits for the end
#endif
                }
        }
}
