// Stage 1, naive: softmax(Q K^T) V, one kernel for each of the three steps; each loaded number is used several
// times.
//
// Idea: as in `plain`, every head has a matrix of scores S (Tq x Tk) in memory. One kernel computes S, one applies the
// softmax to its rows, one multiplies the probabilities by V. New: each thread computes a strip of STRIP queries, so
// that a value of K or V that it loads is used in STRIP multiplications instead of one. Stores are coalesced, and so
// are loads where possible; data that several warps of a block read comes from L1. One block computes a row of the
// softmax. Nothing is skipped: under a causal mask, half of the scores are computed and then discarded.
//
// HBM traffic: N = Tq = Tk. S is written, read and written again by the softmax (its further passes over a row hit the
// L1), and read by the last step: 16 N^2 bytes per head, and 8 N D to 16 N D bytes for Q, K, V and out. At N = 4096,
// D = 128 these are 268 MB and 8 MB: nearly all of the traffic is that of the matrix.
//
// Limits: 4 N^2 bytes of memory per head: 8.6 GB for 32 heads at N = 8192. Any head dim. Causal or not, Tq different
// from Tk, GQA, lse; forward only. scratch: S, (B, Hq, Tq, Tk) float.
#include "plain.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
// The host defines STRIP. Four elements of a row of V for each of the threads that share a strip.
#define ROW_THREADS ((HEAD_DIM + 3) / 4)
#define STRIPS_AT_ONCE (THREADS / ROW_THREADS)

// S = scale * Q K^T, -inf where a query does not see a key. Grid: B * Hq * tiles of queries * n_tiles. A tile of queries
// is 8 strips, one per warp; n_tiles counts tiles of 32 keys, one per lane. Heads are computed one after another, so
// that K of a head, which every tile of queries reads again, stays in the L2.
extern "C" __global__ void __launch_bounds__(THREADS) tilegpt_naive_scores(const __grid_constant__ Params p) {
    const int query_tiles = ceil_div(p.tq, WARPS * STRIP), query_tile = blockIdx.x / p.n_tiles;
    const int batch_head = query_tile / query_tiles, b = batch_head / p.heads, h = batch_head % p.heads;
    const int j = blockIdx.x % p.n_tiles * 32 + threadIdx.x % 32;
    const int i0 = (query_tile % query_tiles * WARPS + threadIdx.x / 32) * STRIP;
    if (i0 >= p.tq || j >= p.tk) return;
    const int keys = keys_of(p, b), causal_offset = keys - p.tq;
    const element *q = p.q + b * p.q_stride.b + h * p.q_stride.h;
    const element *k = p.k + b * p.k_stride.b + h / HEADS_PER_KV * p.k_stride.h + j * p.k_stride.t;

    // Every lane reads its own key, 16 bytes per step, so that a load touches 32 lines of memory, which are in the L1
    // for the next steps. The queries are the same for all lanes. Four sums, of every fourth product each, have less
    // rounding error than one.
    float4 sums[STRIP] = {};
    for (int d = 0; d < HEAD_DIM; d += 4) {
        const float4 x = load4(k, d);
#pragma unroll
        for (int r = 0; r < STRIP; ++r) {
            const float4 y = load4(q + min_of(i0 + r, p.tq - 1) * p.q_stride.t, d);
            sums[r].x += x.x * y.x, sums[r].y += x.y * y.y, sums[r].z += x.z * y.z, sums[r].w += x.w * y.w;
        }
    }
    float *s = p.scratch + ((long long)batch_head * p.tq + i0) * p.tk + j;
    for (int r = 0; r < STRIP && i0 + r < p.tq; ++r) {
        float tanh_score;
        const float dot = (sums[r].x + sums[r].y) + (sums[r].z + sums[r].w);
        const float score = score_of(p, dot, i0 + r, j, causal_offset, 0.0f, tanh_score);
        s[(long long)r * p.tk] = is_visible(p, i0 + r, j, keys, causal_offset, 0, 0) ? score : -INFINITE;
    }
}

// P = softmax(S), in place, and lse. Grid: B * Hq * Tq, one block per row.
extern "C" __global__ void __launch_bounds__(THREADS) tilegpt_naive_softmax(const __grid_constant__ Params p) {
    float *s = p.scratch + (long long)blockIdx.x * p.tk;
    float m = Max::identity;
    for (int j = threadIdx.x; j < p.tk; j += THREADS) m = fmaxf(m, s[j]);
    m = reduce_block<Max, WARPS>(m);
    float l = 0.0f;
    for (int j = threadIdx.x; j < p.tk; j += THREADS) l += expf(s[j] - m);
    l = reduce_block<Sum, WARPS>(l);
    // A row that sees no key: every exponential is 0, and so are l and out.
    const float inverse = l > 0.0f ? 1.0f / l : 0.0f;
    for (int j = threadIdx.x; j < p.tk; j += THREADS) s[j] = expf(s[j] - m) * inverse;
    if (threadIdx.x == 0) p.lse[blockIdx.x] = l > 0.0f ? m + logf(l) : -INFINITE;
}

// out = P V. Grid: B * Hq * tiles of STRIPS_AT_ONCE strips, one head after another. Neighbouring threads
// compute neighbouring columns.
extern "C" __global__ void __launch_bounds__(THREADS) tilegpt_naive_output(const __grid_constant__ Params p) {
    const int tiles = ceil_div(p.tq, STRIPS_AT_ONCE * STRIP);
    const int batch_head = blockIdx.x / tiles, b = batch_head / p.heads, h = batch_head % p.heads;
    const int d = threadIdx.x % ROW_THREADS * 4, strip = threadIdx.x / ROW_THREADS;
    const int i0 = (blockIdx.x % tiles * STRIPS_AT_ONCE + strip) * STRIP;
    if (strip >= STRIPS_AT_ONCE || i0 >= p.tq) return;
    const element *v = p.v + b * p.v_stride.b + h / HEADS_PER_KV * p.v_stride.h;
    const float *probs = p.scratch + ((long long)batch_head * p.tq + i0) * p.tk;

    // Sums over 32 keys each have less rounding error than one sum over all.
    float4 sums[STRIP] = {};
    for (int first = 0; first < p.tk; first += 32) {
        float4 part[STRIP] = {};
        for (int j = first; j < min_of(first + 32, p.tk); ++j) {
            const float4 x = load4(v + j * p.v_stride.t, d);
#pragma unroll
            for (int r = 0; r < STRIP; ++r) {
                const float w = probs[(long long)min_of(r, p.tq - 1 - i0) * p.tk + j];
                part[r].x += w * x.x, part[r].y += w * x.y, part[r].z += w * x.z, part[r].w += w * x.w;
            }
        }
#pragma unroll
        for (int r = 0; r < STRIP; ++r)
            sums[r].x += part[r].x, sums[r].y += part[r].y, sums[r].z += part[r].z, sums[r].w += part[r].w;
    }
    element *out = p.out + b * p.out_stride.b + h * p.out_stride.h;
#pragma unroll
    for (int r = 0; r < STRIP; ++r)
        if (i0 + r < p.tq) store4(out + (i0 + r) * p.out_stride.t, d, sums[r]);
}
