// Stage 6, fa2: FlashAttention-2, backward (Dao 2023, algorithm 2), our own implementation.
//
// Idea. P is recomputed from lse; nothing of size Tq x Tk was kept. A block handles BC keys of one key head,
// accumulates their dK and dV in registers, and loops over the queries of every head of the group, BR at a time (so
// grouped heads need no copy and no sum afterwards). A tile takes five products: S = Q K^T and dP = dO V^T; then, with
// P and dS = P (dP - delta) passed through shared memory, dV += P^T dO, dK += dS^T Q and dQ = dS K.
// dQ. Many blocks contribute to a tile of queries. Each adds its part by atomics to an fp32 accumulator in global
// memory (four numbers at a time where the GPU can), in the layout of the registers, so that a warp adds 512 contiguous
// bytes; a last kernel rounds it. Without ATOMIC, fa2_backward_dq.cu computes dQ in a separate pass: seven products in
// all, but the results are deterministic.
// HBM traffic. Q and dO once per key tile, mostly from L2; K, V, dK, dV once; with ATOMIC also the fp32 dQ, written
// and read, and Tk / BC additions to each of its numbers in the L2.
// The host also defines BR, BC, WARPS, ALIGNED, SCALE_BEFORE_MAX as for fa2.cu, STAGES (of Q and dO), ATOMIC, and the
// warps along the rows of a product: S_ROW_WARPS (of S, dP), DKV_ROW_WARPS (of dK, dV), DQ_ROW_WARPS (of dQ).
// The macros of the loops (LOOP_ENTER, LOOP_ADVANCE ...), which BLOCK_MASK chooses, are those of kept_tiles.cuh.
#include "kept_tiles.cuh"
#include "scores.cuh"

#define THREADS (WARPS * 32)
#define S_TILES (BR / S_ROW_WARPS / 16)
#define S_COLUMNS (BC / (WARPS / S_ROW_WARPS))
#define DKV_TILES (BC / DKV_ROW_WARPS / 16)
#define DKV_COLUMNS (PADDED_D / (WARPS / DKV_ROW_WARPS))
#define DQ_TILES (BR / DQ_ROW_WARPS / 16)
#define DQ_COLUMNS (PADDED_D / (WARPS / DQ_ROW_WARPS))
#define Q_BYTES (BR * ROW_BYTES)
#define KV_BYTES (BC * ROW_BYTES)
#define SCORE_BYTES (BR * BC * 2)
#define STAGE_BYTES (2 * Q_BYTES + 2 * BR * 4)  // Q, dO, lse_log2, delta

static_assert(S_TILES * 16 * S_ROW_WARPS == BR && DKV_TILES * 16 * DKV_ROW_WARPS == BC &&
                  DQ_TILES * 16 * DQ_ROW_WARPS == BR && S_COLUMNS % 16 == 0 && DKV_COLUMNS % 16 == 0 &&
                  DQ_COLUMNS % 16 == 0,
              "whole tiles for every warp");

typedef Accumulator<S_TILES, S_COLUMNS / 16> Scores;

// A warp's scores as 16 bits into the (BR, BC) tile of shared memory, from `row` and `column` on.
__device__ __forceinline__ void store_scores(const Scores &s, unsigned tile, int row, int column) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < S_TILES; t++)
#pragma unroll
        for (int n = 0; n < S_COLUMNS / 8; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                unsigned to = tile + swizzled<BC>(row + t * 16 + half * 8 + lane / 4, column / 8 + n) + lane % 4 * 4;
                store_shared(to, pack(s.c[t][n][2 * half], s.c[t][n][2 * half + 1]));
            }
}

// dK or dV of the block's keys: registers -> the tile in shared memory -> global memory.
__device__ __forceinline__ void store_gradient(const Accumulator<DKV_TILES, DKV_COLUMNS / 16> &sums, float scale,
                                               unsigned tile, int row, int column, element *to, long long stride,
                                               int rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < DKV_TILES; t++)
#pragma unroll
        for (int n = 0; n < DKV_COLUMNS / 8; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float *c = &sums.c[t][n][2 * half];
                unsigned at = swizzled<PADDED_D>(row + t * 16 + half * 8 + lane / 4, column / 8 + n) + lane % 4 * 4;
                store_shared(tile + at, pack(c[0] * scale, c[1] * scale));
            }
    __syncthreads();
    copy_rows<BC, THREADS>(tile, threadIdx.x, to, stride, rows);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) tilegpt_fa2_backward(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char memory[];  // K, V, P, dS, then the stages
    int tile, batch_head;
    scheduled_tile(p, blockIdx.x, p.batch * p.kv_heads, false, tile, batch_head);
    const int b = batch_head / p.kv_heads, kv_head = batch_head % p.kv_heads, j0 = tile * BC, warp = threadIdx.x / 32;
    const int keys = keys_of(p, b), causal_offset = keys - p.tq, lane = threadIdx.x % 32;
    const unsigned k_tile = shared_address(memory), v_tile = k_tile + KV_BYTES;
    const unsigned p_tile = v_tile + KV_BYTES, ds_tile = p_tile + SCORE_BYTES, stages = ds_tile + SCORE_BYTES;
    const int valid_keys = min_of(BC, keys - j0);  // of this tile
    Range range = {0, 0, 0, 0};
    if (valid_keys > 0) range = query_range(p, j0, valid_keys, causal_offset, BR, documents_of(p, b, tile));

    Loader<BC, THREADS>(matrix_of(p.k, p.k_stride, b, kv_head), p.k_stride.t, j0).load(k_tile, p.k_stride.t, keys - j0);
    Loader<BC, THREADS>(matrix_of(p.v, p.v_stride, b, kv_head), p.v_stride.t, j0).load(v_tile, p.v_stride.t, keys - j0);
    // Q, dO and what their rows need, tile after tile; then back to the first tile, of the next head.
    const int first_head = kv_head * HEADS_PER_KV, n_rows = ceil_div(range.hi - range.lo, BR) * BR;
#if BLOCK_MASK
    BlockMaskTiles<HEADS_PER_KV> kept(p, b, first_head, tile);
#endif
    Loader<BR, THREADS> next_q(matrix_of(p.q, p.q_stride, b, first_head), p.q_stride.t, LOADER_ORIGIN);
    Loader<BR, THREADS> next_do(matrix_of(p.dout, p.dout_stride, b, first_head), p.dout_stride.t, LOADER_ORIGIN);
    const long long first_row = (long long)(b * p.heads + first_head) * p.padded_tq + LOADER_ORIGIN;
    const float *next_lse_log2 = p.lse_log2 + first_row + threadIdx.x * 4;
    const long long lse_to_delta = p.delta - p.lse_log2 - BR;  // less BR: thread BR / 4 copies delta's first
    auto load = [&](int stage, int i) {
        const unsigned to = stages + stage * STAGE_BYTES;
        next_q.load_next(to, p.q_stride.t, i, p.tq, LOOP_HEAD_OFFSET(p.q_stride.h));
        next_do.load_next(to + Q_BYTES, p.dout_stride.t, i, p.tq, LOOP_HEAD_OFFSET(p.dout_stride.h));
        const float *lse_log2 = next_lse_log2 + LOOP_ROW_OFFSET(p.padded_tq, i);
        if (threadIdx.x < BR / 2)
            cp_async_16(to + 2 * Q_BYTES + 16 * threadIdx.x, lse_log2 + (threadIdx.x < BR / 4 ? 0 : lse_to_delta),
                        true);
        if (BLOCK_MASK) return;
        next_lse_log2 += BR;
        if (HEADS_PER_KV > 1 && i + BR >= range.hi) {
            next_q.from += p.q_stride.h - n_rows * p.q_stride.t;
            next_do.from += p.dout_stride.h - n_rows * p.dout_stride.t;
            next_lse_log2 += p.padded_tq - n_rows;
        }
    };
    if (LOOP_HAS_TILES) load(0, LOOP_FIRST);
    cp_async_commit_group();

    const int s_row = warp % S_ROW_WARPS * S_TILES * 16, s_column = warp / S_ROW_WARPS * S_COLUMNS;
    const int dkv_row = warp % DKV_ROW_WARPS * DKV_TILES * 16, dkv_column = warp / DKV_ROW_WARPS * DKV_COLUMNS;
    const int dq_row = warp % DQ_ROW_WARPS * DQ_TILES * 16, dq_column = warp / DQ_ROW_WARPS * DQ_COLUMNS;
    const LdmatrixLanes<PADDED_D> as_stored(AS_STORED), transposed(TRANSPOSED);
    const LdmatrixLanes<PADDED_D> dkv_lanes(AS_STORED, dkv_column), dq_lanes(AS_STORED, dq_column);
    const LdmatrixLanes<BC> scores_transposed(TRANSPOSED, dkv_row), ds_as_stored(AS_STORED);
    Accumulator<DKV_TILES, DKV_COLUMNS / 16> dk, dv;
    dk.clear(), dv.clear();
    for (int g = 0, stage = 0; g < HEADS_PER_KV; g++)
        for (int i0 = LOOP_ENTER_HEAD(g); LOOP_IS_TILE_OF_HEAD(i0, g); LOOP_ADVANCE(i0, BR)) {
            const int h = kv_head * HEADS_PER_KV + g;
            cp_async_wait_group<0>();
            __syncthreads();  // this stage has landed, and all warps are done with the other, with P and with dS
            const bool last_of_head = LOOP_IS_LAST_OF_HEAD(i0, BR), more = LOOP_HAS_NEXT_OF_GROUP(g);
            if (STAGES == 2 && more) load(stage ^ 1, LOOP_NEXT_OF_GROUP(i0, BR));
            if (STAGES == 2) cp_async_commit_group();
            LOOP_PREFETCH;
            const unsigned q_tile = stages + stage * STAGE_BYTES, do_tile = q_tile + Q_BYTES;
            const float *lse_log2 = (const float *)(memory + (q_tile - k_tile) + 2 * Q_BYTES) + s_row;
            Scores s, dp;
            s.clear(), dp.clear();
            add_product<D_STEPS, AS_STORED, TRANSPOSED>(s, as_stored, q_tile + s_row * ROW_BYTES, transposed,
                                                        k_tile + s_column * ROW_BYTES);
            add_product<D_STEPS, AS_STORED, TRANSPOSED>(dp, as_stored, do_tile + s_row * ROW_BYTES, transposed,
                                                        v_tile + s_column * ROW_BYTES);
            const bool needs_mask = LOOP_NEEDS_MASK(valid_keys < BC || i0 < range.full_lo || i0 + BR > range.full_hi);
            compute_p_and_ds(p, s, dp, lse_log2, lse_log2 + BR, i0 + s_row, j0 + s_column, keys, b, h, needs_mask);
            store_scores(s, p_tile, s_row, s_column);
            store_scores(dp, ds_tile, s_row, s_column);
            __syncthreads();  // P and dS are whole
            add_product<BR / 16, TRANSPOSED, AS_STORED>(dv, scores_transposed, p_tile, dkv_lanes, do_tile);
#if ATOMIC
            Accumulator<DQ_TILES, DQ_COLUMNS / 16> dq;
            dq.clear();
            add_product<BC / 16, AS_STORED, AS_STORED>(dq, ds_as_stored, ds_tile + dq_row * BC * 2, dq_lanes, k_tile);
            float *to = p.scratch + ((long long)(b * p.heads + h) * p.padded_tq + i0 + dq_row) * PADDED_D + lane * 4;
#pragma unroll
            for (int t = 0; t < DQ_TILES; t++)
#pragma unroll
                for (int n = 0; n < DQ_COLUMNS / 8; n++)
                    add_four(to + (t * 2 * D_STEPS + dq_column / 8 + n) * 128, &dq.c[t][n][0], &dq.c[t][n][2]);
#endif
            add_product<BR / 16, TRANSPOSED, AS_STORED>(dk, scores_transposed, ds_tile, dkv_lanes, q_tile);
            if (STAGES == 1) {
                __syncthreads();  // all warps are done with Q and dO
                if (more) load(0, LOOP_NEXT_OF_GROUP(i0, BR));
                cp_async_commit_group();
            }
            stage ^= STAGES - 1;
        }
    cp_async_wait_group<0>();
    __syncthreads();  // K and V have been read: dK and dV go out over them
    store_gradient(dk, p.scale, k_tile, dkv_row, dkv_column,
                   matrix_of(p.dk, p.dk_stride, b, kv_head) + j0 * p.dk_stride.t, p.dk_stride.t, p.tk - j0);
    store_gradient(dv, DROPOUT ? p.keep_scale : 1.0f, v_tile, dkv_row, dkv_column,
                   matrix_of(p.dv, p.dv_stride, b, kv_head) + j0 * p.dv_stride.t, p.dv_stride.t, p.tk - j0);
}

#if ATOMIC
#define PITCH (PADDED_D + 8)  // of a row in shared memory: no two lanes store to one bank

// After: dQ from its accumulator, through shared memory, so that rows are written in chunks of 16 bytes. A warp takes 16
// rows; a block 8 warps.
extern "C" __global__ void __launch_bounds__(256) tilegpt_fa2_backward_finish(const __grid_constant__ Params p) {
    static __shared__ __align__(16) element rows[8][16 * PITCH];
    const long long first = ((long long)blockIdx.x * 8 + threadIdx.x / 32) * 16;
    if (first >= (long long)p.batch * p.heads * p.padded_tq) return;
    const int batch_head = first / p.padded_tq, lane = threadIdx.x % 32, i0 = first % p.padded_tq;
    const float4 *from = (const float4 *)(p.scratch + first * PADDED_D) + lane;
    element *own = rows[threadIdx.x / 32], *at = own + lane / 4 * PITCH + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < PADDED_D / 8; n++) {
        const float4 x = from[n * 32];
        *(unsigned *)(at + n * 8) = pack(x.x * p.scale, x.y * p.scale);
        *(unsigned *)(at + 8 * PITCH + n * 8) = pack(x.z * p.scale, x.w * p.scale);
    }
    __syncwarp();
    element *to = matrix_of(p.dq, p.dq_stride, batch_head / p.heads, batch_head % p.heads);
#pragma unroll
    for (int chunk = lane; chunk < 2 * PADDED_D; chunk += 32) {
        const int row = chunk / (PADDED_D / 8), column = chunk % (PADDED_D / 8) * 8;
        if (i0 + row < p.tq && column < HEAD_DIM)
            *(uint4 *)(to + (i0 + row) * p.dq_stride.t + column) = *(const uint4 *)(own + row * PITCH + column);
    }
}
#endif
