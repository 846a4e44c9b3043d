// Stage 6, fa2: FlashAttention-2, forward (Dao 2023, algorithm 1), our own implementation.
//
// Idea. A block computes BR queries of one head. It loops over the keys that any of them sees, BC at a time. Each
// warp has whole rows, so that the maximum and the sum of a row stay within four lanes, and warps share only K and V.
// New since fa1. The grid also runs over the sequence. Warps split the queries, not the keys, so no partial sums are
// added in shared memory. O, m and l stay in registers, and O is divided once, at the end. cp.async loads the next K
// and V while the current tile is computed, with one barrier per tile.
// HBM traffic. Q and O once; K and V once per head as long as the heads in flight fit in the L2 (scheduled_tile),
// though they are read Tq / BR times from the L2; lse. No Tq x Tk matrix.
// Limits. 16-bit inputs, D up to 128 in steps of 8, sm_80 and newer.
// The host also defines BR, BC, WARPS, BLOCKS (minimum resident blocks per multiprocessor), ALIGNED (whether all rows
// begin at multiples of 16 bytes), and SCALE_BEFORE_MAX (with softcap, ALiBi, or a scale that is not positive: the scores
// are scaled before their maximum is taken).
// The macros of the loops (LOOP_ENTER, LOOP_ADVANCE ...), which BLOCK_MASK chooses, are those of kept_tiles.cuh.
#include "kept_tiles.cuh"
#include "softmax.cuh"

#define THREADS (WARPS * 32)
#define ROW_TILES (BR / WARPS / 16)  // of 16 rows in a warp
#define TILE_BYTES (BC * ROW_BYTES)
#define Q_IN_REGISTERS (PADDED_D <= 64)  // in registers; at D = 128 too few are left, and Q is read again for each tile

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) tilegpt_fa2_forward(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char memory[];  // Q, then two K and V
    int tile, batch_head;
    scheduled_tile(p, blockIdx.x, p.batch * p.heads, HAS_RIGHT, tile, batch_head);
    const int b = batch_head / p.heads, h = batch_head % p.heads, i0 = tile * BR, warp = threadIdx.x / 32;
    const int keys = keys_of(p, b), causal_offset = keys - p.tq, i_first = i0 + warp * ROW_TILES * 16;
    const unsigned q_tile = shared_address(memory), k_tile = q_tile + BR * ROW_BYTES, v_tile = k_tile + 2 * TILE_BYTES;
    const unsigned q_rows = q_tile + warp * ROW_TILES * 16 * ROW_BYTES;
    const Range range = key_range(p, i0, min_of(BR, p.tq - i0), keys, causal_offset, BC, documents_of(p, b, tile));
    const float scale_log2 = exponent_scale(p);
    const Dropout<ROW_TILES> dropout(p, b, h, i_first);
#if BLOCK_MASK
    BlockMaskTiles<1> kept(p, b, h, tile);
#endif
    Loader<BC, THREADS> next_k(matrix_of(p.k, p.k_stride, b, h / HEADS_PER_KV), p.k_stride.t, LOADER_ORIGIN);
    Loader<BC, THREADS> next_v(matrix_of(p.v, p.v_stride, b, h / HEADS_PER_KV), p.v_stride.t, LOADER_ORIGIN);
    auto load = [&](int start, int buffer) {
        next_k.load_next(k_tile + buffer * TILE_BYTES, p.k_stride.t, start, keys);
        next_v.load_next(v_tile + buffer * TILE_BYTES, p.v_stride.t, start, keys);
    };
    if (LOOP_HAS_TILES) {  // else Q would arrive, without a wait, in the buffer from which O is stored
        const element *q = matrix_of(p.q, p.q_stride, b, h);
        Loader<BR, THREADS>(q, p.q_stride.t, i0).load(q_tile, p.q_stride.t, p.tq - i0);
        load(LOOP_FIRST, 0);
    }
    cp_async_commit_group();
    const LdmatrixLanes<PADDED_D> as_stored(AS_STORED), transposed(TRANSPOSED);
    SoftmaxState<ROW_TILES> softmax;
    softmax.clear();
    Accumulator<ROW_TILES, D_STEPS> o;
    o.clear();
#if Q_IN_REGISTERS
    unsigned q[ROW_TILES][D_STEPS][4];
    cp_async_wait_group<0>();
    __syncthreads();
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int d = 0; d < D_STEPS; d++) ldmatrix(q[t][d], as_stored(q_rows, t * 16, d));
#endif
    for (int start = LOOP_ENTER, buffer = 0; LOOP_IS_TILE(start); LOOP_ADVANCE(start, BC), buffer ^= 1) {
        cp_async_wait_group<0>();
        __syncthreads();  // this tile has arrived, and no warp still reads the other buffer
        if (LOOP_HAS_NEXT(start, BC)) load(LOOP_NEXT(start, BC), buffer ^ 1);
        cp_async_commit_group();
        LOOP_PREFETCH;
        Accumulator<ROW_TILES, BC / 16> s;
        s.clear();
#if Q_IN_REGISTERS
        add_product(s, q, transposed, k_tile + buffer * TILE_BYTES);  // S = Q K^T
#else
        add_product<D_STEPS, AS_STORED, TRANSPOSED>(s, as_stored, q_rows, transposed, k_tile + buffer * TILE_BYTES);
#endif
        const bool needs_mask = LOOP_NEEDS_MASK(start < range.full_lo || start >= range.full_hi);
        if (SCALE_BEFORE_MAX || needs_mask) scale_and_mask(p, s, i_first, start, keys, b, h, needs_mask);
        online_softmax(s, o, softmax, scale_log2);
        dropout.drop(p, s, start);
        add_product(o, s, as_stored, v_tile + buffer * TILE_BYTES);  // O += P V
    }
    finish_rows(p, o, softmax, batch_head, i_first);
    // Only this warp reads its rows of Q, so O is staged in their place.
    element *out = matrix_of(p.out, p.out_stride, b, h) + (long long)i_first * p.out_stride.t;
    store_rows<ROW_TILES>(q_rows, out, p.out_stride.t, p.tq - i_first, o);
}
