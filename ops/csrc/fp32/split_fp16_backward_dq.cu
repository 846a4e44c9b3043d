// Stage 3, tiled: dQ in fp32 on tensor cores, with the same bits each time.
//
// Idea. As in the forward a block owns queries and walks the keys; what it is beside dK and dV tells
// split_fp16_backward.cu. Warps work in pairs on the same queries: the first has Q and makes S = Q K^T, the second has
// dO and makes dP = dO V^T. They trade halves, so that each has dS for half of the keys, which is at once a left operand,
// and sums dQ += dS K over these. In the end they trade halves of D and add them up.
//
// HBM traffic: 4 bytes a number of q, k, v and dout, once as long as the heads at work fit in the L2; dQ once. From L2:
// K and V for every OWN_TILE queries. The host defines what split_fp16_backward.cuh says.
#include "split_fp16_backward.cuh"

static_assert(AT_ONCE % 32 == 0, "whole pairs of tiles for each warp of a pair");
typedef Accumulator<ROW_TILES, N_STEPS / 2> HalfScores;

// s = <q_i, k_j> becomes what dS has in the place of P, p_dsoftcap of probability_of. lse begins at query
// i_first.
__device__ __forceinline__ void compute_p_dsoftcap(const Params &p, HalfScores &s, const float *lse,
                                                   int i_first, int j_first, int keys, int b, int h,
                                                   float undo, bool needs_mask) {
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    const float slope = ALIBI ? p.alibi_slopes[h] : 0.0f;
    const unsigned key = DROPOUT ? dropout_head_key(p, b, h) : 0;
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int at = t * 16 + half * 8 + row;
            const float shift = lse[at];
            const unsigned row_key = row_key_of(key, i_first + at);
#pragma unroll
            for (int n = 0; n < N_STEPS; n++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) {
                    const int j = j_first + n * 8 + column + e % 2;
                    float &x = s.c[t][n][e], p_dsoftcap;
                    probability_of(p, x * undo, i_first + at, j, keys - p.tq, slope, shift, row_key,
                                   p_dsoftcap);
                    x = p_dsoftcap;
                }
        }
    if (needs_mask) apply_mask(p, s, 0.0f, i_first, j_first, keys, b);
}

// s becomes dS, but for its scale, from p_dsoftcap in s and dp = <dout_i, v_j>. delta begins at the first
// query.
__device__ __forceinline__ void compute_ds_rows(const Params &p, HalfScores &s, const HalfScores &dp,
                                                const float *delta, float factor) {
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float mean = delta[t * 16 + half * 8 + threadIdx.x % 32 / 4] * factor;
#pragma unroll
            for (int n = 0; n < N_STEPS; n++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++)
                    s.c[t][n][e] = ds_of(p, s.c[t][n][e], dp.c[t][n][e], mean);
        }
}

// dQ of OWN_TILE queries of one head. Grid: B * Hq * n_tiles.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) tilegpt_split_fp16_dq(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char memory[];  // the rest of Q and dO, what is traded, then the stages
    int tile, batch_head;
    scheduled_tile(p, blockIdx.x, p.batch * p.heads, HAS_RIGHT, tile, batch_head);
    const int b = batch_head / p.heads, h = batch_head % p.heads, i0 = tile * OWN_TILE, warp = threadIdx.x / 32;
    const int pair = warp % (WARPS / 2), keys = keys_of(p, b), i_first = i0 + pair * OWN_ROWS;
    const bool computes_dp = warp >= WARPS / 2;
    const unsigned rest = shared_address(memory), stages = rest + 2 * REST * OWN_BYTES + WARPS / 2 * TRADED_BYTES;
    float4 *traded = (float4 *)(memory + 2 * REST * OWN_BYTES + pair * TRADED_BYTES);
    const Range range =
        key_range(p, i0, min_of(OWN_TILE, p.tq - i0), keys, keys - p.tq, OTHER_TILE, documents_of(p, b, tile));

    const long long to_keys = (long long)(b * p.kv_heads + h / HEADS_PER_KV) * p.tk * ROW;
    TwoLoader next((const mma_element *)p.k + to_keys, range.lo);
    const long long apart = (const mma_element *)p.v - (const mma_element *)p.k;
    auto load = [&](int stage, int start) { next.load(stages + stage * STAGE_BYTES, apart, keys - start); };
    const mma_element *q = (const mma_element *)p.q + (long long)batch_head * p.tq * ROW;
    const mma_element *dout = (const mma_element *)p.dout + (long long)batch_head * p.tq * ROW;
    load_rest(q, i0, p.tq, rest);
    load_rest(dout, i0, p.tq, rest + REST * OWN_BYTES);
    if (range.lo < range.hi) load(0, range.lo);
    cp_async_commit_group();

    const OwnRows own(computes_dp ? dout : q, i_first, p.tq,
                      rest + computes_dp * REST * OWN_BYTES + pair * OWN_ROWS * ROW_BYTES);
    const LdmatrixLanes<PADDED_D> as_stored(AS_STORED), transposed(TRANSPOSED);
    const float *lse = p.padded_lse + (long long)batch_head * p.padded_tq + i_first, *delta = lse + (p.delta - p.padded_lse);
    const Powers powers(p, b, h / HEADS_PER_KV);
    const float undo = powers.score_factor(), delta_factor = powers.delta_factor() / p.keep_scale;
    Gradient sums;
    sums.clear();
    for (int start = range.lo, stage = 0; start < range.hi; start += OTHER_TILE) {
        cp_async_wait_group<0>();
        __syncthreads();  // this stage has landed, and all warps are done with the other and with what was traded
        const bool more = start + OTHER_TILE < range.hi;
        if (STAGES == 2 && more) load(stage ^ 1, start + OTHER_TILE);
        if (STAGES == 2) cp_async_commit_group();
        const unsigned k_tile = stages + stage * STAGE_BYTES, v_tile = k_tile + TILE_BYTES;
        const bool needs_mask = ((HAS_LEFT || DOCUMENT_IDS) && start < range.full_lo) || start >= range.full_hi;
#pragma unroll 1
        for (int part = 0; part < OTHER_TILE; part += AT_ONCE) {
            const int mine = part + computes_dp * (AT_ONCE / 2);  // the first of the keys whose dS is this warp's
            Scores product;
            multiply_own(product, own, as_stored, transposed, (computes_dp ? v_tile : k_tile) + part * ROW_BYTES);
            HalfScores kept, got;
            trade(product, computes_dp, traded + part * OWN_ROWS / 4, pair, kept, got);
            HalfScores s, dp;
            if (computes_dp)
                s = got, dp = kept;
            else
                s = kept, dp = got;
            compute_p_dsoftcap(p, s, lse, i_first, start + mine, keys, b, h, undo, needs_mask);
            compute_ds_rows(p, s, dp, delta, delta_factor);
            add_split_product(sums, s, as_stored, k_tile + mine * ROW_BYTES, OTHER_TILE * ROW_BYTES);
        }
        if (STAGES == 1) {
            __syncthreads();  // all warps are done with K and V
            if (more) load(0, start + OTHER_TILE);
            cp_async_commit_group();
        }
        stage ^= STAGES - 1;
    }
    cp_async_wait_group<0>();
    __syncthreads();  // the stages are free: the halves of D go through them, where each is one sum
    const int half_bytes = OWN_ROWS * PADDED_D * 2;
    static_assert(WARPS * half_bytes <= STAGES * STAGE_BYTES, "room for half of every warp's sums");
    Accumulator<ROW_TILES, D_STEPS / 2> mine, theirs;
    trade(sums, computes_dp, (float4 *)(memory + (stages - rest) + 2 * pair * half_bytes), pair, mine, theirs);
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int n = 0; n < D_STEPS; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) mine.c[t][n][e] += theirs.c[t][n][e];
    float *to = matrix_of(p.dq, p.dq_stride, b, h) + i_first * p.dq_stride.t;
    const int power = powers.ds_power() - powers.k;
    store_sums(mine, p.scale * p.keep_scale, power, to, p.dq_stride.t, p.tq - i_first, computes_dp * (PADDED_D / 2));
}
