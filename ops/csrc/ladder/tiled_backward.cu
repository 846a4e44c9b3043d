// Stage 3, tiled: the backward, in fp32 and deterministic.
//
// Idea: nothing of size N x N was kept; S and P are recomputed from Q, K and the log-sum-exp (Dao et al. 2022,
// algorithm 4; 2023, section 3.1.2). With delta = rowsum(out * dout) (delta.cu):
//     P = exp(S - lse);  dP = dout V^T;  dS = P * (dP - delta)
//     dV = P^T dout;  dK = scale * dS^T Q;  dQ = scale * dS K
//
// New since the forward: sums over both dimensions of S. dK and dV are sums over queries, dQ is a sum over keys. A
// single kernel would have to accumulate one of them by atomics, in no fixed order. Here there are two kernels, which
// accumulate in registers and both recompute S and dP: 7 products instead of 5. The loop for a tile of keys runs over
// the queries of all heads of the group, so GQA needs no sum afterwards.
// Two warps share the same rows: one computes S and P, the other dP and then dS; P and dS pass through shared memory.
// So each warp holds only one product at a time in registers, and in dkdv only one of dV and dK.
//
// HBM traffic: Q, K, V, dout, dQ, dK and dV once or twice. From L2: Q and dout for every OWN_TILE keys, and K and V
// for every OWN_TILE queries.
//
// Limits: as the forward; shared memory 8 ((OWN_TILE + OTHER_TILE) PADDED_D + OWN_TILE OTHER_TILE) bytes.
#include "tiles.cuh"

#define OWN_TILE (WARP_ROWS * WARPS / 2)  // rows of a block

// The probability of one score: P, and P times the derivative of the softcap, p_dsoftcap. s: <q_i, k_j>.
struct PAndDsoftcap {
    float p, p_dsoftcap;
};

__device__ __forceinline__ PAndDsoftcap probability_of(const Params &p, float s, int b, int i, int j, int keys,
                                                      int causal_offset, float slope, float lse, bool needs_mask) {
    float tanh_score = 0.0f;
    s = score_of(p, s, i, j, causal_offset, slope, tanh_score);
    int q_id = 0, k_id = 0;
#if DOCUMENT_IDS
    q_id = i < p.tq ? p.q_document_ids[(long long)b * p.tq + i] : -1;
    k_id = j < keys ? p.k_document_ids[(long long)b * p.tk + j] : -1;
#endif
    if (needs_mask && !is_visible(p, i, j, keys, causal_offset, q_id, k_id)) s = -INFINITE;
    const float prob = expf(s - lse);  // 0 for queries beyond Tq, whose lse is inf
    PAndDsoftcap both = {prob, SOFTCAP ? prob * (1.0f - tanh_score * tanh_score) : prob};
    return both;
}

// dS from p_dsoftcap, dP and delta.
__device__ __forceinline__ float ds_of(const Params &p, float p_dsoftcap, float dp, float delta, bool is_kept) {
    return p_dsoftcap * ((is_kept ? dp * p.keep_scale : 0.0f) - delta);
}

// dK and dV of OWN_TILE keys of one key head. Rows are keys, columns queries. Grid: B * Hkv * n_tiles.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) tilegpt_tiled_dkdv(const __grid_constant__ Params p) {
    extern __shared__ float4 shared[];
    float *k_tile = reinterpret_cast<float *>(shared), *v_tile = k_tile + OWN_TILE * PADDED_D;
    float *q_tile = v_tile + OWN_TILE * PADDED_D, *dout_tile = q_tile + OTHER_TILE * PADDED_D;
    float *probs = dout_tile + OTHER_TILE * PADDED_D, *ds_tile = probs + OWN_TILE * OTHER_TILE;
    int tile, batch_head;  // b * Hkv + the key head
    scheduled_tile(p, blockIdx.x, p.batch * p.kv_heads, false, tile, batch_head);
    const int b = batch_head / p.kv_heads, j0 = tile * OWN_TILE, warp = threadIdx.x / 32, keys = keys_of(p, b);
    const int row = warp / 2 * WARP_ROWS + lane_row(), col = lane_col(), causal_offset = keys - p.tq;
    const bool computes_dp = warp % 2;  // and dS and dK; the other warp of the pair S, P and dV
    const element *k = p.k + b * p.k_stride.b + batch_head % p.kv_heads * p.k_stride.h;
    const element *v = p.v + b * p.v_stride.b + batch_head % p.kv_heads * p.v_stride.h;
    auto range = query_range(p, j0, min_of(OWN_TILE, p.tk - j0), causal_offset, OTHER_TILE, documents_of(p, b, tile));
    if (j0 >= keys) range.hi = range.lo;

    float4 sums[ROWS][FLOAT4S] = {};
    load_tile<OWN_TILE, SWIZZLE_4_ROWS>(k_tile, k, p.k_stride.t, j0, keys);
    load_tile<OWN_TILE, SWIZZLE_4_ROWS>(v_tile, v, p.v_stride.t, j0, keys);
    for (int g = 0; g < HEADS_PER_KV; ++g) {
        const int h = batch_head % p.kv_heads * HEADS_PER_KV + g;
        const element *q = p.q + b * p.q_stride.b + h * p.q_stride.h;
        const element *dout = p.dout + b * p.dout_stride.b + h * p.dout_stride.h;
        const float *statistic = (computes_dp ? p.delta : p.padded_lse) + ((long long)b * p.heads + h) * p.padded_tq;
        const float slope = ALIBI ? p.alibi_slopes[h] : 0.0f;
#if DROPOUT
        const unsigned dropout_key = dropout_head_key(p, b, h);
#endif
        for (int start = range.lo; start < range.hi; start += OTHER_TILE) {
            __syncthreads();  // nobody still reads the last tiles
            load_tile<OTHER_TILE, SWIZZLE_8_ROWS>(q_tile, q, p.q_stride.t, start, p.tq);
            load_tile<OTHER_TILE, SWIZZLE_8_ROWS>(dout_tile, dout, p.dout_stride.t, start, p.tq);
            wait_for_copies();
            __syncthreads();
            const bool needs_mask = start < range.full_lo || start >= range.full_hi;
            float s_or_dp[ROWS][COLS];
            product(s_or_dp, computes_dp ? v_tile : k_tile, row, computes_dp ? dout_tile : q_tile, col);
            if (!computes_dp) {
                float p_dsoftcap[ROWS][COLS];
#pragma unroll
                for (int c = 0; c < COLS; ++c) {
                    const int i = start + col + 8 * c;
                    const float lse = statistic[i];
#if DROPOUT
                    const unsigned row_key = hash_combine(dropout_key, (unsigned)i);
#endif
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) {
                        const int j = j0 + row + 4 * r;
                        const auto prob =
                            probability_of(p, s_or_dp[r][c], b, i, j, keys, causal_offset, slope, lse, needs_mask);
                        s_or_dp[r][c] = prob.p, p_dsoftcap[r][c] = prob.p_dsoftcap;
#if DROPOUT
                        if (!dropout_keeps(row_key, j, p.dropout_threshold)) s_or_dp[r][c] = 0.0f;
#endif
                    }
                }
                store_scores(probs, row, col, s_or_dp);
                store_scores(ds_tile, row, col, p_dsoftcap);
            }
            __syncthreads();  // P is there for the other warp of the pair
            if (computes_dp) {
                float p_dsoftcap[ROWS][COLS];
                load_scores(ds_tile, row, col, p_dsoftcap);
#pragma unroll
                for (int c = 0; c < COLS; ++c) {
                    const float delta = statistic[start + col + 8 * c];
#if DROPOUT
                    const unsigned row_key = hash_combine(dropout_key, (unsigned)(start + col + 8 * c));
#endif
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) {
                        bool is_kept = true;
#if DROPOUT
                        is_kept = dropout_keeps(row_key, j0 + row + 4 * r, p.dropout_threshold);
#endif
                        s_or_dp[r][c] = ds_of(p, p_dsoftcap[r][c], s_or_dp[r][c], delta, is_kept);
                    }
                }
                store_scores(ds_tile, row, col, s_or_dp);
            }
            __syncwarp();  // from here, a warp reads only P and dS that it wrote itself
            accumulate<ROWS, SWIZZLE_8_ROWS>(sums, computes_dp ? ds_tile : probs, row,
                                             computes_dp ? q_tile : dout_tile, col);
        }
    }
    wait_for_copies();

    element *to = computes_dp ? p.dk : p.dv;
    const Strides stride = computes_dp ? p.dk_stride : p.dv_stride;
    to += b * stride.b + batch_head % p.kv_heads * stride.h;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int j = j0 + row + 4 * r;
        if (j >= p.tk) continue;
        if (j >= keys)  // K is zero there, P is not
#pragma unroll
            for (int n = 0; n < FLOAT4S; ++n) sums[r][n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        store_row(to + j * stride.t, col, sums[r], computes_dp ? p.scale : p.keep_scale);
    }
}

// dQ of OWN_TILE queries of one head. Rows are queries, columns keys. Grid: B * Hq * n_tiles.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) tilegpt_tiled_dq(const __grid_constant__ Params p) {
    extern __shared__ float4 shared[];
    float *q_tile = reinterpret_cast<float *>(shared), *dout_tile = q_tile + OWN_TILE * PADDED_D;
    float *k_tile = dout_tile + OWN_TILE * PADDED_D, *v_tile = k_tile + OTHER_TILE * PADDED_D;
    float *ds_tile = v_tile + OTHER_TILE * PADDED_D;  // p_dsoftcap, then dS
    int tile, batch_head;
    scheduled_tile(p, blockIdx.x, p.batch * p.heads, HAS_RIGHT, tile, batch_head);
    const int b = batch_head / p.heads, h = batch_head % p.heads, i0 = tile * OWN_TILE, warp = threadIdx.x / 32;
    const int row = warp / 2 * WARP_ROWS + lane_row(), col = lane_col();
    const bool computes_dp = warp % 2;  // and dS; the other of the pair S and P. Each has half of their rows of dQ.
    const int keys = keys_of(p, b), causal_offset = keys - p.tq;
    const element *q = p.q + b * p.q_stride.b + h * p.q_stride.h;
    const element *dout = p.dout + b * p.dout_stride.b + h * p.dout_stride.h;
    const element *k = p.k + b * p.k_stride.b + h / HEADS_PER_KV * p.k_stride.h;
    const element *v = p.v + b * p.v_stride.b + h / HEADS_PER_KV * p.v_stride.h;
    const float *statistic = (computes_dp ? p.delta : p.padded_lse) + (long long)batch_head * p.padded_tq + i0 + row;
    const float slope = ALIBI ? p.alibi_slopes[h] : 0.0f;
#if DROPOUT
    const unsigned dropout_key = dropout_head_key(p, b, h);
#endif
    const Range range =
        key_range(p, i0, min_of(OWN_TILE, p.tq - i0), keys, causal_offset, OTHER_TILE, documents_of(p, b, tile));

    float4 sums[ROWS / 2][FLOAT4S] = {};
    load_tile<OWN_TILE, SWIZZLE_4_ROWS>(q_tile, q, p.q_stride.t, i0, p.tq);
    load_tile<OWN_TILE, SWIZZLE_4_ROWS>(dout_tile, dout, p.dout_stride.t, i0, p.tq);
    for (int start = range.lo; start < range.hi; start += OTHER_TILE) {
        __syncthreads();  // nobody still reads the last tiles
        load_tile<OTHER_TILE, SWIZZLE_8_ROWS>(k_tile, k, p.k_stride.t, start, range.hi);
        load_tile<OTHER_TILE, SWIZZLE_8_ROWS>(v_tile, v, p.v_stride.t, start, range.hi);
        wait_for_copies();
        __syncthreads();
        const bool needs_mask = start < range.full_lo || start >= range.full_hi;
        float s_or_dp[ROWS][COLS], p_dsoftcap[ROWS][COLS];
        product(s_or_dp, computes_dp ? dout_tile : q_tile, row, computes_dp ? v_tile : k_tile, col);
        if (!computes_dp) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int c = 0; c < COLS; ++c)
                    s_or_dp[r][c] = probability_of(p, s_or_dp[r][c], b, i0 + row + 4 * r, start + col + 8 * c, keys,
                                                   causal_offset, slope, statistic[4 * r], needs_mask)
                                        .p_dsoftcap;
            store_scores(ds_tile, row, col, s_or_dp);
        }
        __syncthreads();  // P is there
        if (computes_dp) {
            load_scores(ds_tile, row, col, p_dsoftcap);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
#if DROPOUT
                const unsigned row_key = hash_combine(dropout_key, (unsigned)(i0 + row + 4 * r));
#endif
#pragma unroll
                for (int c = 0; c < COLS; ++c) {
                    bool is_kept = true;
#if DROPOUT
                    is_kept = dropout_keeps(row_key, start + col + 8 * c, p.dropout_threshold);
#endif
                    s_or_dp[r][c] = ds_of(p, p_dsoftcap[r][c], s_or_dp[r][c], statistic[4 * r], is_kept);
                }
            }
            store_scores(ds_tile, row, col, s_or_dp);
        }
        __syncthreads();  // dS is there
        accumulate<ROWS / 2, SWIZZLE_8_ROWS>(sums, ds_tile, row + WARP_ROWS / 2 * computes_dp, k_tile, col);
    }
    wait_for_copies();

    element *dq = p.dq + b * p.dq_stride.b + h * p.dq_stride.h;
#pragma unroll
    for (int r = 0; r < ROWS / 2; ++r) {
        const int i = i0 + row + WARP_ROWS / 2 * computes_dp + 4 * r;
        if (i < p.tq) store_row(dq + i * p.dq_stride.t, col, sums[r], p.scale);
    }
}
