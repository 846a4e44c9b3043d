// Stage 2, rowwise: one kernel; a row of scores stays in shared memory and is not written to HBM.
//
// Idea: softmax and the product with V need one row of S at a time. A block handles one query: it stores the row's
// scores in shared memory, reduces their maximum and sum over the block, and sums the weighted values.
//
// New since `naive`: fusion. The N x N matrix is gone, memory grows as N; keys beyond the diagonal are not computed;
// loads of K are coalesced, as the lanes of a warp share a key and add their partial sums by shuffles.
//
// HBM traffic: Q, K, V and out once, 16 N D bytes per head, as long as K and V of the heads in flight fit into the L2.
// But every block reads all of K and V: 8 N^2 D bytes per head come from L2, D / 2 times what `naive` moved. Two FLOPs
// per 4-byte load limit the speed of this stage; tiles improve this ratio (tiled.cu).
//
// Limits: the keys that a query may see have to fit into a block's shared memory, 4 bytes each: 57,600 on an H200. Any
// head dim. Causal or not, Tq different from Tk, GQA, lse; forward only.
#include "plain.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define LANE_DIMS ((HEAD_DIM + 31) / 32)
// Keys of a warp at a time, whose loads and shuffles overlap.
#define KEYS_AT_ONCE 4
// Columns of V in one pass of the block, and the number of threads per column, each with every PARTS-th key.
#define COLUMNS (HEAD_DIM < THREADS ? HEAD_DIM : THREADS)
#define PARTS (THREADS / COLUMNS)

// out and lse. Grid: B * Hq * Tq. Shared memory: the scores of the keys that a query sees.
extern "C" __global__ void __launch_bounds__(THREADS) tilegpt_rowwise_forward(const __grid_constant__ Params p) {
    extern __shared__ float scores[];
    static __shared__ float sums[THREADS];
    const int i = blockIdx.x % p.tq, batch_head = blockIdx.x / p.tq, b = batch_head / p.heads, h = batch_head % p.heads;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int keys = keys_of(p, b), causal_offset = keys - p.tq;
    const Range range = key_range(p, i, 1, keys, causal_offset, 1, {0, keys, false});
    const int n = range.hi - range.lo;
    const element *q = p.q + b * p.q_stride.b + h * p.q_stride.h + i * p.q_stride.t;
    const element *k = p.k + b * p.k_stride.b + h / HEADS_PER_KV * p.k_stride.h + range.lo * p.k_stride.t;
    const element *v = p.v + b * p.v_stride.b + h / HEADS_PER_KV * p.v_stride.h + range.lo * p.v_stride.t;

    // Scores: one key per warp, every 32nd element per lane.
    float query[LANE_DIMS];
#pragma unroll
    for (int c = 0; c < LANE_DIMS; ++c) query[c] = lane + 32 * c < HEAD_DIM ? to_float(q[lane + 32 * c]) : 0.0f;
    for (int first = warp * KEYS_AT_ONCE; first < n; first += WARPS * KEYS_AT_ONCE) {
        float dots[KEYS_AT_ONCE] = {};
#pragma unroll
        for (int a = 0; a < KEYS_AT_ONCE; ++a) {
            const element *row = k + min_of(first + a, n - 1) * p.k_stride.t;
#pragma unroll
            for (int c = 0; c < LANE_DIMS; ++c)
                if (lane + 32 * c < HEAD_DIM) dots[a] += query[c] * to_float(row[lane + 32 * c]);
        }
#pragma unroll
        for (int a = 0; a < KEYS_AT_ONCE; ++a) dots[a] = reduce_warp<Sum>(dots[a]);
#pragma unroll
        for (int a = 0; a < KEYS_AT_ONCE; ++a) {
            float tanh_score;
            const float score = score_of(p, dots[a], i, range.lo + first + a, causal_offset, 0.0f, tanh_score);
            if (lane == a && first + a < n) scores[first + a] = score;
        }
    }
    __syncthreads();

    // Softmax, unnormalised: at the end, D numbers are divided by the sum instead of n.
    float m = Max::identity, l = 0.0f;
    for (int j = threadIdx.x; j < n; j += THREADS) m = fmaxf(m, scores[j]);
    m = reduce_block<Max, WARPS>(m);
    for (int j = threadIdx.x; j < n; j += THREADS) {
        scores[j] = expf(scores[j] - m);
        l += scores[j];
    }
    l = reduce_block<Sum, WARPS>(l);  // its barriers also wait for all exponentials

    // Values: PARTS threads per column, which split the keys.
    const float inverse = l > 0.0f ? 1.0f / l : 0.0f;
    element *out = p.out + b * p.out_stride.b + h * p.out_stride.h + i * p.out_stride.t;
    for (int d0 = 0; d0 < HEAD_DIM; d0 += COLUMNS) {
        const int d = d0 + threadIdx.x % COLUMNS, part = threadIdx.x / COLUMNS;
        float sum = 0.0f;
        if (d < HEAD_DIM && part < PARTS) {
#pragma unroll 8
            for (int j = part; j < n; j += PARTS) sum += scores[j] * to_float(v[j * p.v_stride.t + d]);
        }
        __syncthreads();  // no thread still reads the sums of the last pass
        sums[threadIdx.x] = sum;
        __syncthreads();
        if (part == 0 && d < HEAD_DIM) {
            for (int other = 1; other < PARTS; ++other) sum += sums[threadIdx.x + other * COLUMNS];
            out[d] = to_element(sum * inverse);
        }
    }
    if (threadIdx.x == 0) p.lse[blockIdx.x] = l > 0.0f ? m + logf(l) : -INFINITE;
}
