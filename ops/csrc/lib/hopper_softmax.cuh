// What a warp group of Hopper does to its 64 rows of scores and of O beside the softmax (softmax.cuh): mask, rounding to
// the left operand of P V, rescaling. Tiles have BC keys.
#pragma once
#include "hopper.cuh"
#include "softmax.cuh"

typedef Accumulator<1, BC / 16> Scores;
typedef Accumulator<1, USED_D / 16> Output;

template <int N_STEPS> __device__ __forceinline__ float (&flat(Accumulator<1, N_STEPS> &sums))[8 * N_STEPS] {
    return reinterpret_cast<float (&)[8 * N_STEPS]>(sums.c);
}

// -inf in the place of what is not seen, where that is keys outside of one interval a row, which lies within that of
// the documents: a comparison of a register with a number, where `apply_mask` has four registers a column.
__device__ __forceinline__ void apply_interval_mask(const Params &p, Scores &s, int i_first, int j_first, int keys,
                                                    const DocumentBounds &documents) {
    const int column = j_first + threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int diagonal_key = i_first + threadIdx.x % 32 / 4 + half * 8 + keys - p.tq;
        int end = (HAS_RIGHT ? min_of(keys, diagonal_key + p.window_right + 1) : keys) - column;
        int begin = HAS_LEFT ? diagonal_key - p.window_left - column : 0;
        if (DOCUMENT_IDS) begin = max_of(begin, documents.first - column), end = min_of(end, documents.end - column);
#pragma unroll
        for (int n = 0; n < BC / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (n * 8 + e >= end || ((HAS_LEFT || DOCUMENT_IDS) && n * 8 + e < begin))
                    s.c[0][n][2 * half + e] = -INFINITE;
    }
}

__device__ __forceinline__ void round_p(unsigned (&rounded_p)[BC / WGMMA_K][4], const Scores &s) {
#pragma unroll
    for (int step = 0; step < BC / WGMMA_K; step++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int half = e % 2 * 2;
#if OPERANDS_8BIT
            const float(&c)[4] = s.c[0][4 * step + e / 2 * 2], (&next)[4] = s.c[0][4 * step + e / 2 * 2 + 1];
            rounded_p[step][e] = pack_e4m3(c[half], c[half + 1], next[half], next[half + 1]);  // V's order: fp8.cu
#else
            const float(&c)[4] = s.c[0][2 * step + e / 2];
            rounded_p[step][e] = pack(c[half], c[half + 1]);
#endif
        }
}

__device__ __forceinline__ void rescale_output(Output &o, const float (&rescale)[2]) {
#pragma unroll
    for (int n = 0; n < USED_D / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) o.c[0][n][e] *= rescale[e / 2];
}
