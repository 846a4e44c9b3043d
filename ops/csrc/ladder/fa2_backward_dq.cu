// Stage 6, fa2: FlashAttention-2, backward, dQ in a kernel of its own, which is deterministic.
//
// Idea. As in the forward, a block handles BR queries and each warp whole rows. It loops over the keys, recomputes P
// and dS, and sums dQ += dS K in registers, where dS is already in the layout of the left operand. There are no
// atomics and no accumulator in global memory, but S and dP are computed twice, here and for dK and dV
// (fa2_backward.cu without ATOMIC).
// HBM traffic. Q, dO and dQ once, K and V once per query tile, mostly from L2.
// The host also defines BR, BC, WARPS, BLOCKS, ALIGNED, SCALE_BEFORE_MAX as for fa2.cu.
#include "kept_tiles.cuh"
#include "scores.cuh"

#define THREADS (WARPS * 32)
#define ROW_TILES (BR / WARPS / 16)
#define TILE_BYTES (BC * ROW_BYTES)

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
tilegpt_fa2_backward_dq(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char memory[];  // Q, dO, then two K and V
    int tile, batch_head;
    scheduled_tile(p, blockIdx.x, p.batch * p.heads, HAS_RIGHT, tile, batch_head);
    const int b = batch_head / p.heads, h = batch_head % p.heads, i0 = tile * BR, warp = threadIdx.x / 32;
    const int keys = keys_of(p, b), i_first = i0 + warp * ROW_TILES * 16;
    const unsigned q_tile = shared_address(memory), do_tile = q_tile + BR * ROW_BYTES;
    const unsigned k_tile = do_tile + BR * ROW_BYTES, v_tile = k_tile + 2 * TILE_BYTES;
    const unsigned warp_bytes = warp * ROW_TILES * 16 * ROW_BYTES;
    const Range range = key_range(p, i0, min_of(BR, p.tq - i0), keys, keys - p.tq, BC, documents_of(p, b, tile));
#if BLOCK_MASK
    BlockMaskTiles<1> kept(p, b, h, tile);
#endif
    Loader<BC, THREADS> next_k(matrix_of(p.k, p.k_stride, b, h / HEADS_PER_KV), p.k_stride.t, LOADER_ORIGIN);
    Loader<BC, THREADS> next_v(matrix_of(p.v, p.v_stride, b, h / HEADS_PER_KV), p.v_stride.t, LOADER_ORIGIN);
    auto load = [&](int start, int buffer) {
        next_k.load_next(k_tile + buffer * TILE_BYTES, p.k_stride.t, start, keys);
        next_v.load_next(v_tile + buffer * TILE_BYTES, p.v_stride.t, start, keys);
    };
    if (LOOP_HAS_TILES) {  // else Q would land, unwaited for, where dQ goes out
        const element *q = matrix_of(p.q, p.q_stride, b, h), *dout = matrix_of(p.dout, p.dout_stride, b, h);
        Loader<BR, THREADS>(q, p.q_stride.t, i0).load(q_tile, p.q_stride.t, p.tq - i0);
        Loader<BR, THREADS>(dout, p.dout_stride.t, i0).load(do_tile, p.dout_stride.t, p.tq - i0);
        load(LOOP_FIRST, 0);
    }
    cp_async_commit_group();
    const LdmatrixLanes<PADDED_D> as_stored(AS_STORED), transposed(TRANSPOSED);
    const long long row = (long long)batch_head * p.padded_tq + i_first;
    Accumulator<ROW_TILES, D_STEPS> dq;
    dq.clear();
    for (int start = LOOP_ENTER, buffer = 0; LOOP_IS_TILE(start); LOOP_ADVANCE(start, BC), buffer ^= 1) {
        cp_async_wait_group<0>();
        __syncthreads();  // this tile has landed, and all warps are done with the other buffer
        if (LOOP_HAS_NEXT(start, BC)) load(LOOP_NEXT(start, BC), buffer ^ 1);
        cp_async_commit_group();
        LOOP_PREFETCH;
        Accumulator<ROW_TILES, BC / 16> s, dp;
        s.clear(), dp.clear();
        add_product<D_STEPS, AS_STORED, TRANSPOSED>(s, as_stored, q_tile + warp_bytes, transposed,
                                                    k_tile + buffer * TILE_BYTES);
        add_product<D_STEPS, AS_STORED, TRANSPOSED>(dp, as_stored, do_tile + warp_bytes, transposed,
                                                    v_tile + buffer * TILE_BYTES);
        const bool needs_mask = LOOP_NEEDS_MASK(start < range.full_lo || start >= range.full_hi);
        compute_p_and_ds(p, s, dp, p.lse_log2 + row, p.delta + row, i_first, start, keys, b, h, needs_mask);
        add_product(dq, dp, as_stored, k_tile + buffer * TILE_BYTES);  // dQ += dS K
    }
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int n = 0; n < PADDED_D / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) dq.c[t][n][e] *= p.scale;
    // A warp's rows of Q are its own: dQ goes out over them.
    element *to = matrix_of(p.dq, p.dq_stride, b, h) + (long long)i_first * p.dq_stride.t;
    store_rows<ROW_TILES>(q_tile + warp_bytes, to, p.dq_stride.t, p.tq - i_first, dq);
}
