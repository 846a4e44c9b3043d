// Stage 3, tiled: dK and dV in fp32 on tensor cores, with the same bits each time.
//
// Idea. As tiled_backward.cu: a kernel for dK and dV and one for dQ (split_fp16_backward_dq.cu), seven products, no
// atomics; each product is the three of terms that split_products.cuh tells. The scores are transposed here, rows are
// keys, so that P^T and dS^T are at once left operands and never pass through shared memory as such. Warps work in
// pairs on the same keys: the first has K, makes S^T = K Q^T and P^T and sums dV += P^T dO; the second has V, makes
// dP^T = V dO^T, gets P^T through shared memory, as the registers lie, and sums dK += dS^T Q. The queries of a whole
// group run past a tile of keys, so that GQA needs no further sum.
//
// q, k, v and dout are terms, (B, H, T, 2, PADDED_D) fp16, contiguous (split_fp16.cu); padded_lse is a natural log.
// HBM traffic: 4 bytes a number of q, k, v and dout, once as long as the heads at work fit in the L2; dK and dV once.
// From L2: Q and dO for every OWN_TILE keys.
// The host defines what split_fp16_backward.cuh says.
#include "split_fp16_backward.cuh"

// s = <k_j, q_i>, a row for each key, becomes P, and p_dsoftcap what probability_of says. lse begins at query
// i_first.
__device__ __forceinline__ void compute_p_transposed(const Params &p, Scores &s, Scores &p_dsoftcap,
                                                     const float *lse, int i_first, int j_first, int keys,
                                                     int b, int h, float undo, bool needs_mask) {
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    const float slope = ALIBI ? p.alibi_slopes[h] : 0.0f;
    const unsigned key = DROPOUT ? dropout_head_key(p, b, h) : 0;
#pragma unroll
    for (int n = 0; n < 2 * N_STEPS; n++)
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
            const int at = n * 8 + column + parity;
            const float shift = lse[at];
            const unsigned row_key = row_key_of(key, i_first + at);
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
                for (int e = parity; e < 4; e += 2) {
                    const int j = j_first + t * 16 + e / 2 * 8 + row;
                    float &x = s.c[t][n][e];
                    float &dx = p_dsoftcap.c[t][n][e];
                    x = probability_of(p, x * undo, i_first + at, j, keys - p.tq, slope, shift, row_key, dx);
                }
        }
    if (!needs_mask) return;  // a branch of its own: see scores.cuh
    int ids[ROW_TILES][2];
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) ids[t][half] = id_of_key(p, b, j_first + t * 16 + half * 8 + row);
#pragma unroll
    for (int n = 0; n < 2 * N_STEPS; n++)
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
            const int i = i_first + n * 8 + column + parity, id = id_of_query(p, b, i);
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
                for (int e = parity; e < 4; e += 2)
                    if (!is_visible(p, i, j_first + t * 16 + e / 2 * 8 + row, keys, keys - p.tq, id, ids[t][e / 2]))
                        s.c[t][n][e] = p_dsoftcap.c[t][n][e] = 0.0f;
        }
}

// dp = <v_j, dout_i> becomes dS, but for its scale. delta begins at the first query.
__device__ __forceinline__ void compute_ds_transposed(const Params &p, Scores &dp, const Scores &p_dsoftcap,
                                                      const float *delta, float factor) {
#pragma unroll
    for (int n = 0; n < 2 * N_STEPS; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float mean = delta[n * 8 + threadIdx.x % 4 * 2 + e % 2] * factor;
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++)
                dp.c[t][n][e] = ds_of(p, p_dsoftcap.c[t][n][e], dp.c[t][n][e], mean);
        }
}

// dK and dV of OWN_TILE keys of one key head. Grid: B * Hkv * n_tiles.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
tilegpt_split_fp16_dkdv(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char memory[];  // the rest of K and V, what is traded, then the stages
    int tile, batch_head;
    scheduled_tile(p, blockIdx.x, p.batch * p.kv_heads, false, tile, batch_head);
    const int b = batch_head / p.kv_heads, kv_head = batch_head % p.kv_heads, j0 = tile * OWN_TILE;
    const int warp = threadIdx.x / 32;
    const int pair = warp % (WARPS / 2), j_first = j0 + pair * OWN_ROWS;
    const int keys = keys_of(p, b), causal_offset = keys - p.tq;
    const bool computes_dp = warp >= WARPS / 2;
    const unsigned rest = shared_address(memory), stages = rest + 2 * REST * OWN_BYTES + WARPS / 2 * TRADED_BYTES;
    float4 *traded = (float4 *)(memory + 2 * REST * OWN_BYTES + pair * TRADED_BYTES);
    const int valid_keys = min_of(OWN_TILE, keys - j0);  // of the keys
    Range range = {0, 0, 0, 0};
    if (valid_keys > 0) range = query_range(p, j0, valid_keys, causal_offset, OTHER_TILE, documents_of(p, b, tile));
    if (valid_keys < OWN_TILE) range.full_lo = range.hi;  // every tile masks the keys that are not there

    // Q, dO and what their rows need, tile after tile; then back to the first tile, of the next head.
    const long long first_row = (long long)(b * p.heads + kv_head * HEADS_PER_KV) * p.tq;
    const int n_rows = ceil_div(range.hi - range.lo, OTHER_TILE) * OTHER_TILE;
    TwoLoader next((const mma_element *)p.q + first_row * ROW, range.lo);
    const long long apart = (const mma_element *)p.dout - (const mma_element *)p.q;
    // The first OTHER_TILE / 4 threads copy lse, the next OTHER_TILE / 4 delta.
    const float *statistic = (threadIdx.x < OTHER_TILE / 4 ? p.padded_lse : p.delta - OTHER_TILE) + threadIdx.x * 4;
    auto load = [&](int stage, int g, int i) {
        const unsigned to = stages + stage * STAGE_BYTES;
        next.load(to, apart, p.tq - i);
        if (threadIdx.x < OTHER_TILE / 2)
            cp_async_16(to + 2 * TILE_BYTES + 16 * threadIdx.x,
                        statistic + (long long)(b * p.heads + kv_head * HEADS_PER_KV + g) * p.padded_tq + i, true);
        if (HEADS_PER_KV > 1 && i + OTHER_TILE >= range.hi) next.next.loader.from += (long long)(p.tq - n_rows) * ROW;
    };
    const mma_element *k = (const mma_element *)p.k + (long long)batch_head * p.tk * ROW;
    const mma_element *v = (const mma_element *)p.v + (long long)batch_head * p.tk * ROW;
    load_rest(k, j0, keys, rest);
    load_rest(v, j0, keys, rest + REST * OWN_BYTES);
    if (range.lo < range.hi) load(0, 0, range.lo);
    cp_async_commit_group();

    const OwnRows own(computes_dp ? v : k, j_first, keys,
                      rest + computes_dp * REST * OWN_BYTES + pair * OWN_ROWS * ROW_BYTES);
    const LdmatrixLanes<PADDED_D> as_stored(AS_STORED), transposed(TRANSPOSED);
    const Powers powers(p, b, kv_head);
    const float undo = powers.score_factor(), delta_factor = powers.delta_factor() / p.keep_scale;
    Gradient sums;  // dV, or dK where it computes dP
    sums.clear();
    for (int g = 0, stage = 0; g < HEADS_PER_KV; g++)
        for (int i0 = range.lo; i0 < range.hi; i0 += OTHER_TILE) {
            cp_async_wait_group<0>();
            __syncthreads();  // this stage has landed, and all warps are done with the other and with what was traded
            const bool last_of_head = i0 + OTHER_TILE >= range.hi, more = !last_of_head || g + 1 < HEADS_PER_KV;
            if (STAGES == 2 && more) load(stage ^ 1, g + last_of_head, last_of_head ? range.lo : i0 + OTHER_TILE);
            if (STAGES == 2) cp_async_commit_group();
            const unsigned q_tile = stages + stage * STAGE_BYTES, do_tile = q_tile + TILE_BYTES;
            const float *lse = (const float *)(memory + (q_tile - rest) + 2 * TILE_BYTES);
            const bool needs_mask = i0 < range.full_lo || ((HAS_LEFT || DOCUMENT_IDS) && i0 + OTHER_TILE > range.full_hi);
#pragma unroll 1
            for (int part = 0; part < OTHER_TILE; part += AT_ONCE) {
                Scores s, p_dsoftcap;
                multiply_own(s, own, as_stored, transposed, (computes_dp ? do_tile : q_tile) + part * ROW_BYTES);
                float4 *to = traded + part * OWN_ROWS / 4;
                if (!computes_dp) {
                    compute_p_transposed(p, s, p_dsoftcap, lse + part, i0 + part, j_first, keys, b,
                                         kv_head * HEADS_PER_KV + g, undo, needs_mask);
                    send(to, p_dsoftcap);
                }
                meet_in_pair(pair);
                if (computes_dp) {
                    receive(to, p_dsoftcap);
                    compute_ds_transposed(p, s, p_dsoftcap, lse + OTHER_TILE + part, delta_factor);
                }
                add_split_product(sums, s, as_stored, (computes_dp ? q_tile : do_tile) + part * ROW_BYTES,
                                  OTHER_TILE * ROW_BYTES);
            }
            if (STAGES == 1) {
                __syncthreads();  // all warps are done with Q and dO
                if (more) load(0, g + last_of_head, last_of_head ? range.lo : i0 + OTHER_TILE);
                cp_async_commit_group();
            }
            stage ^= STAGES - 1;
        }
    cp_async_wait_group<0>();
    const Strides &stride = computes_dp ? p.dk_stride : p.dv_stride;
    float *to = matrix_of(computes_dp ? p.dk : p.dv, stride, b, kv_head) + j_first * stride.t;
    const int power = computes_dp ? powers.ds_power() - powers.q : -powers.dout - P_POWER;
    store_sums(sums, (computes_dp ? p.scale : 1.0f) * p.keep_scale, power, to, stride.t, p.tk - j_first, 0);
}
