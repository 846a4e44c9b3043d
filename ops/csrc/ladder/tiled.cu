// Stage 3, tiled: FlashAttention in fp32. Tiles of queries and keys in shared memory, an online softmax, products in
// registers; exact fp32 (FMA units, no TF32).
//
// Idea: a block computes BR queries, WARP_ROWS per warp, in a loop over tiles of OTHER_TILE keys. The softmax of
// a row needs its final maximum m and sum l only at the end; until then, whenever a tile has a larger maximum, the
// accumulated l and O are rescaled (Milakov and Gimelshein 2018; Dao et al. 2022, algorithm 1):
//     m' = max(m, rowmax S);  P = exp(S - m');  l = l e^(m - m') + rowsum P;  O = O e^(m - m') + P V
//
// New since `rowwise`: a tile of K or V is used by all queries of the block, and a value in a register is used for a
// whole column of a thread's ROWS x COLS scores (tiles.cuh). Copies to shared memory overlap with the products
// (cp.async): V is copied during S = Q K^T, and the next K during P V, with two barriers per tile. A warp computes
// whole rows, so a row's maximum is reduced over 8 lanes, and P needs no barrier. Fully masked tiles are skipped; fully
// visible tiles are not masked.
//
// HBM traffic: Q, K, V and out once. From L2, K and V for every tile of queries: 8 N^2 D / BR bytes per head,
// BR times less than `rowwise`. At BR / 2 FLOPs per byte, the FMA units limit the speed.
//
// Limits: shared memory, 4 (BR (PADDED_D + OTHER_TILE) + 2 OTHER_TILE PADDED_D) bytes, and registers, ROWS PADDED_D /
// 8 for O: head dims up to 128. All options except biases, a block mask and ALiBi slopes per batch row. The backward is
// in tiled_backward.cu.
#include "tiles.cuh"

#define BR (WARP_ROWS * WARPS)

// -inf where query i, i + 4, ... of batch row b does not see key j, j + 8, ...
__device__ __forceinline__ void mask(const Params &p, float (&s)[ROWS][COLS], int b, int i, int j, int keys,
                                     int causal_offset) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLS; ++c) {
            const int query = i + 4 * r, key = j + 8 * c;
            int q_id = 0, k_id = 0;
#if DOCUMENT_IDS
            q_id = query < p.tq ? p.q_document_ids[(long long)b * p.tq + query] : -1;
            k_id = key < keys ? p.k_document_ids[(long long)b * p.tk + key] : -1;
#endif
            if (!is_visible(p, query, key, keys, causal_offset, q_id, k_id)) s[r][c] = -INFINITE;
        }
}

// out and lse. Grid: B * Hq * n_tiles; BLOCKS: the minimum of resident blocks per multiprocessor.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) tilegpt_tiled_forward(const __grid_constant__ Params p) {
    extern __shared__ float4 shared[];
    float *q_tile = reinterpret_cast<float *>(shared), *k_tile = q_tile + BR * PADDED_D;
    float *v_tile = k_tile + OTHER_TILE * PADDED_D, *probs = v_tile + OTHER_TILE * PADDED_D;
    int tile, batch_head;
    scheduled_tile(p, blockIdx.x, p.batch * p.heads, HAS_RIGHT, tile, batch_head);
    const int b = batch_head / p.heads, h = batch_head % p.heads, i0 = tile * BR;
    const int row = threadIdx.x / 32 * WARP_ROWS + lane_row(), col = lane_col();  // this thread's first of each
    const int keys = keys_of(p, b), causal_offset = keys - p.tq;
    const element *q = p.q + b * p.q_stride.b + h * p.q_stride.h;
    const element *k = p.k + b * p.k_stride.b + h / HEADS_PER_KV * p.k_stride.h;
    const element *v = p.v + b * p.v_stride.b + h / HEADS_PER_KV * p.v_stride.h;
    float slope = 0.0f;
#if ALIBI
    slope = p.alibi_slopes[h];
#endif
#if DROPOUT
    const unsigned dropout_key = dropout_head_key(p, b, h);
#endif
    const Range range =
        key_range(p, i0, min_of(BR, p.tq - i0), keys, causal_offset, OTHER_TILE, documents_of(p, b, tile));

    // Of the rows that eight lanes share, each lane keeps m and l of one: r = lane_col.
    float m = Max::identity, l = 0.0f;
    float4 o[ROWS][FLOAT4S] = {};
    load_tile<BR, SWIZZLE_4_ROWS>(q_tile, q, p.q_stride.t, i0, p.tq);
    load_tile<OTHER_TILE, SWIZZLE_8_ROWS>(k_tile, k, p.k_stride.t, range.lo, range.hi);
    for (int start = range.lo; start < range.hi; start += OTHER_TILE) {
        wait_for_copies();
        __syncthreads();  // K has arrived, and no warp still reads the last V
        load_tile<OTHER_TILE, 0>(v_tile, v, p.v_stride.t, start, range.hi);
        float s[ROWS][COLS];
        product(s, q_tile, row, k_tile, col);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < COLS; ++c) {
                float tanh_score;
                s[r][c] = score_of(p, s[r][c], i0 + row + 4 * r, start + col + 8 * c, causal_offset, slope, tanh_score);
            }
        if (start < range.full_lo || start >= range.full_hi) mask(p, s, b, i0 + row, start + col, keys, causal_offset);
        float rescale[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            // m begins at the most negative finite number, not at -inf, so that exp(-inf - m) is 0, not NaN.
            const float before = from_column(m, r);
            float largest = before, sum = 0.0f;
#pragma unroll
            for (int c = 0; c < COLS; ++c) largest = fmaxf(largest, s[r][c]);
            largest = reduce_row<Max>(largest);
            rescale[r] = expf(before - largest);
#if DROPOUT
            const unsigned row_key = hash_combine(dropout_key, (unsigned)(i0 + row + 4 * r));
#endif
#pragma unroll
            for (int c = 0; c < COLS; ++c) {
                s[r][c] = expf(s[r][c] - largest);
                sum += s[r][c];
#if DROPOUT
                if (!dropout_keeps(row_key, start + col + 8 * c, p.dropout_threshold)) s[r][c] = 0.0f;
#endif
            }
            sum = reduce_row<Sum>(sum);
            if (col == r) m = largest, l = l * rescale[r] + sum;
        }
        store_scores(probs, row, col, s);
        wait_for_copies();
        __syncthreads();  // V and P have arrived, and no warp still reads K
        if (start + OTHER_TILE < range.hi)
            load_tile<OTHER_TILE, SWIZZLE_8_ROWS>(k_tile, k, p.k_stride.t, start + OTHER_TILE, range.hi);
        // Separate sums per tile take no more instructions; one sum over 239 keys had 2.4 times the error of PyTorch's.
        float4 tile_sums[ROWS][FLOAT4S] = {};
        accumulate<ROWS, 0>(tile_sums, probs, row, v_tile, col);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int n = 0; n < FLOAT4S; ++n) {
                float4 &acc = o[r][n], &more = tile_sums[r][n];
                acc.x = acc.x * rescale[r] + more.x, acc.y = acc.y * rescale[r] + more.y;
                acc.z = acc.z * rescale[r] + more.z, acc.w = acc.w * rescale[r] + more.w;
            }
    }
    wait_for_copies();

    element *out = p.out + b * p.out_stride.b + h * p.out_stride.h;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int i = i0 + row + 4 * r;
        const float sum = from_column(l, r), largest = from_column(m, r);
        if (i >= p.tq) continue;
        store_row(out + i * p.out_stride.t, col, o[r], sum > 0.0f ? p.keep_scale / sum : 0.0f);
        if (col == 0) p.lse[(long long)batch_head * p.tq + i] = sum > 0.0f ? largest + logf(sum) : -INFINITE;
    }
}
