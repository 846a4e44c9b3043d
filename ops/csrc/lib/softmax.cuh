// The online softmax of a warp that owns whole rows (FlashAttention-2): fa2.cu in 16 bits, tiled_split_fp16.cu in fp32.
#pragma once
#include "scores.cuh"

// Of rows g and g + 8: the shift, in units of log2 (in fp32: of the scores), which is m in the papers, but follows the
// maximum only now and then; and the sum, of which each lane has its own part.
template <int M_TILES> struct SoftmaxState {
    float shift[M_TILES][2], l[M_TILES][2];
    bool as_integers;  // how the largest scores are found; the same in all lanes
    __device__ __forceinline__ void clear() {
        as_integers = false;
#pragma unroll
        for (int t = 0; t < M_TILES; t++) shift[t][0] = shift[t][1] = -INFINITE, l[t][0] = l[t][1] = 0.0f;
    }
};

// EXPONENT: of the exponential exp2 of a score s, shifted by a row's `shift`, m.
#if ELEMENT_KIND == float_ELEMENT
#define EXPONENT(s, m, scale_log2) (((s) - (m)) * (scale_log2))
// Exponentials are up to 2^8 times EXP_FACTOR: small ones are to lose no bits in fp16 (split_products.cuh).
#define EXP_FACTOR 128.0f
#elif INT8
// s begins at INT8_MAGIC (hopper.cuh). Rounding the sum, one for all keys of a tile, moves s by less than 1.
#define EXPONENT(s, m, scale_log2) ((s) * (scale_log2) - ((m) + INT8_MAGIC * (scale_log2)))
#define WITHOUT_MAGIC(s) ((s) - INT8_MAGIC)
#define EXP_FACTOR 1.0f
#else
#define EXPONENT(s, m, scale_log2) ((s) * (scale_log2) - (m))
#define WITHOUT_MAGIC(s) (s)
#define EXP_FACTOR 1.0f
#endif
// How far `shift` is set below a row's maximum. In fp8 it is 5, and it stays until the maximum is more than 8 above it:
// the largest exponential of a row is 2^5 to 2^8, and e4m3, which goes from 2^-9 to 448, has what is at least 2^-14 of it.
#if OPERANDS_8BIT
#define MAX_OFFSET 5.0f
#else
#define MAX_OFFSET 0.0f
#endif

// The largest of a thread's scores in each row. `as_integers`: three at a time (VIMNMX3), half as many instructions; if
// all are negative -inf, as integers have negative floats in reverse order.
template <int M_TILES, int N_STEPS>
__device__ __forceinline__ void largest_scores(float (&largest)[M_TILES][2], const Accumulator<M_TILES, N_STEPS> &s,
                                               bool as_integers) {
#pragma unroll
    for (int t = 0; t < M_TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x = -INFINITE;
            if (as_integers) {
                int y = __float_as_int(x);
#pragma unroll
                for (int n = 0; n < 2 * N_STEPS; n++)
                    y = __vimax3_s32(y, __float_as_int(s.c[t][n][2 * half]), __float_as_int(s.c[t][n][2 * half + 1]));
                x = __int_as_float(y);
            } else {
#pragma unroll
                for (int n = 0; n < 2 * N_STEPS; n++)
                    x = fmaxf(x, fmaxf(s.c[t][n][2 * half], s.c[t][n][2 * half + 1]));
            }
            largest[t][half] = x;
        }
}

// s becomes EXP_FACTOR exp2(scale_log2 s - m), m = `shift`, and l goes on. In fp32 it becomes
// EXP_FACTOR exp2(scale_log2 (s - m)), an instruction more, so that the largest is EXP_FACTOR, and not that times 2 to
// the power of what m was rounded by.
template <int M_TILES, int N_STEPS>
__device__ __forceinline__ void exponentiate(Accumulator<M_TILES, N_STEPS> &s, SoftmaxState<M_TILES> &softmax,
                                             float scale_log2) {
#pragma unroll
    for (int t = 0; t < M_TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            // A row that has seen no key yet is shifted by 0: exp2(-inf) is 0, and not NaN.
            const float shift = softmax.shift[t][half] == -INFINITE ? 0.0f : softmax.shift[t][half];
#if ELEMENT_KIND == float_ELEMENT
            float sum = 0.0f;  // of the tile: l is a sum of few
#else
            float &sum = softmax.l[t][half];
#endif
#pragma unroll
            for (int n = 0; n < 2 * N_STEPS; n++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) {
                    s.c[t][n][e] = EXP_FACTOR * exp2_of(EXPONENT(s.c[t][n][e], shift, scale_log2));
                    sum += s.c[t][n][e];
                }
#if ELEMENT_KIND == float_ELEMENT
            softmax.l[t][half] += sum;
#endif
        }
}

// The same with the m of these scores. A row's m follows its maximum only when that has grown by more than 2^8 (the
// division at the end absorbs what m is), so that o is rescaled in the first tiles and then hardly ever: D multiplications
// a tile and thread, an eighth of all instructions of fa2 at D = 128.
// Where m grows, rescale(t, half, factor) is called for what O has of the row so far. Returns whether any row of the
// warp needed it.
template <int M_TILES, int N_STEPS, typename Rescale>
__device__ __forceinline__ bool online_softmax(Accumulator<M_TILES, N_STEPS> &s, SoftmaxState<M_TILES> &softmax,
                                               float scale_log2, const Rescale &rescale) {
    float largest[M_TILES][2];
    // While no row is shifted by less than -8, a score that exceeds its shift by 8 is above 0, and integers will do.
#if ELEMENT_KIND == float_ELEMENT
    largest_scores(largest, s, false);
#elif INT8
    largest_scores(largest, s, true);
#else
    if (softmax.as_integers)
        largest_scores(largest, s, true);
    else
        largest_scores(largest, s, false);
#endif
    bool needs_rescale = false;
#pragma unroll
    for (int t = 0; t < M_TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            needs_rescale |= EXPONENT(largest[t][half], softmax.shift[t][half], scale_log2) > 8.0f;
    needs_rescale = __any_sync(~0u, needs_rescale);
    if (needs_rescale) {
        bool below = false;
#pragma unroll
        for (int t = 0; t < M_TILES; t++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float &x = largest[t][half], &shift = softmax.shift[t][half];
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
                // Row by row: a row's bits depend on no other row.
                if (EXPONENT(x, shift, scale_log2) > 8.0f) {
#if ELEMENT_KIND == float_ELEMENT
                    const float m = x, factor = exp2_of((shift - m) * scale_log2);
#else
                    // Rounded, as the exponents have it: what came before is off by as much as what comes.
                    const float m = __fmul_rn(WITHOUT_MAGIC(x), scale_log2) - MAX_OFFSET;
                    const float factor = exp2_of(shift - m);
#endif
                    shift = m, softmax.l[t][half] *= factor;
                    rescale(t, half, factor);
                }
                below |= shift < -8.0f;
            }
        softmax.as_integers = !__any_sync(~0u, below);
    }
    exponentiate(s, softmax, scale_log2);
    return needs_rescale;
}

// The same, with o rescaled at once.
template <int M_TILES, int N_STEPS>
__device__ __forceinline__ void online_softmax(Accumulator<M_TILES, N_STEPS> &s, Accumulator<M_TILES, D_STEPS> &o,
                                               SoftmaxState<M_TILES> &softmax, float scale_log2) {
    online_softmax(s, softmax, scale_log2, [&](int t, int half, float factor) {
#pragma unroll
        for (int n = 0; n < PADDED_D / 8; n++) o.c[t][n][2 * half] *= factor, o.c[t][n][2 * half + 1] *= factor;
    });
}

// What dropout leaves of the weights of keys j_first and on.
template <int M_TILES> struct Dropout {
#if DROPOUT
    unsigned row_key[M_TILES][2];
#endif
    __device__ __forceinline__ Dropout(const Params &p, int b, int h, int i_first) {
#if DROPOUT
        const unsigned head_key = dropout_head_key(p, b, h);
#pragma unroll
        for (int t = 0; t < M_TILES; t++)
            for (int half = 0; half < 2; half++)
                row_key[t][half] =
                    hash_combine(head_key, (unsigned)(i_first + t * 16 + half * 8 + threadIdx.x % 32 / 4));
#endif
    }
    template <int N_STEPS>
    __device__ __forceinline__ void drop(const Params &p, Accumulator<M_TILES, N_STEPS> &s, int j_first) const {
#if DROPOUT
#pragma unroll
        for (int t = 0; t < M_TILES; t++)
            for (int n = 0; n < 2 * N_STEPS; n++)
                for (int e = 0; e < 4; e++) {
                    const int j = j_first + n * 8 + threadIdx.x % 4 * 2 + e % 2;
                    if (!dropout_keeps(row_key[t][e / 2], j, p.dropout_threshold)) s.c[t][n][e] = 0.0f;
                }
#endif
    }
};

// Divides o by the sums, and writes lse of the rows from i_first on. scale: of fp32, what the shift is to be multiplied
// by.
template <int M_TILES>
__device__ __forceinline__ void finish_rows(const Params &p, Accumulator<M_TILES, D_STEPS> &o,
                                            const SoftmaxState<M_TILES> &softmax, int batch_head, int i_first,
                                            float scale = 1.0f) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < M_TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float l = softmax.l[t][half];
            l += __shfl_xor_sync(~0u, l, 1);
            l += __shfl_xor_sync(~0u, l, 2);
            const float inverse_l = l == 0.0f ? 0.0f : p.keep_scale / l;
            const int i = i_first + t * 16 + half * 8 + lane / 4;
#if ELEMENT_KIND == float_ELEMENT
            const float lse = softmax.shift[t][half] * scale + logf(l * (1.0f / EXP_FACTOR));
#else
            const float lse = (softmax.shift[t][half] + __log2f(l)) * LN2;
#endif
            if (lane % 4 == 0 && i < p.tq) p.lse[(long long)batch_head * p.tq + i] = l == 0.0f ? -INFINITE : lse;
#pragma unroll
            for (int n = 0; n < PADDED_D / 8; n++)
                o.c[t][n][2 * half] *= inverse_l, o.c[t][n][2 * half + 1] *= inverse_l;
        }
}
