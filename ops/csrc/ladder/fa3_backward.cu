// Stage 7, fa3: FlashAttention-3, backward, our own implementation; only for Hopper (sm_90a).
//
// Idea. As in fa2_backward.cu, a block computes dK and dV of BC keys and loops over the queries. As in fa3.cu, one warp
// group copies by TMA and two compute by wgmma, with 64 keys each (for D > 128: below); every product is asynchronous.
// New since fa2_backward.
//   - Transposed: a warp group has S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are left operands of dV += P^T dO
//     and dK += dS^T Q straight from registers. Only dS passes through shared memory, for dQ = dS K, of which each
//     warp group computes half: half of the queries where BR = 128, else half of the columns. With V_IN_REGISTERS V is a
//     left operand from registers too, read once a tile of keys.
//   - dQ leaves by the copy engine: a tile in shared memory, as the registers lie, is added to one in global memory
//     (cp.reduce.async.bulk) by a warp of the copying group, and no computing thread waits for it.
//   - Persistent, by a counter, as fa3.cu: the copying warp works out the next tile (with D > 128 the others do too), and
//     loads its K, V, Q and dO while this one ends. With PADDED_D = 64, of which K and V have two buffers, the warp groups
//     do not wait for each other there: dV is staged in V's buffer beside the last dK, and dK in dS's beside the last dQ,
//     if that is late. With 128, dK is staged then in room of its own, and dV in dS's buffers; with more, in those of dS, P
//     and dQ.
//   - P is computed while dP is multiplied, and dS while dV is. With LATE_DQ, dQ is computed one tile later, so that a
//     warp group waits only for the dS that the other one shared a tile ago; that dQ and this dS are written one after the
//     other, and then fenced together. dS is then computed from the rounded P, as there are not enough registers to keep
//     the exact P too. With LATE_DK as well, S of the next tile is issued before dK of this one is complete.
//
//        copies       K Q0 V dO0 Q1 dO1 ...                        Q2 dO2 ...
//        tensor       [S0 dP0       ][dV0      ][dQ0 dK0   ]       [S1 dP1 ...           LATE_DQ = 0
//                     [S1 dP1       ][dV1 dQ0  ][dK1       ]       [S2 dP2 ...           LATE_DQ = 1
//        group                  P          dS   share     dQ out
//        adds                                                 += dQ, beside all that follows
//
// HBM traffic. Q and dO once per key tile, from L2 mostly; K, V, dK, dV once; dQ in fp32 is cleared and read
// once, and receives Tk / BC additions in the L2; with STORES_FIRST_DQ it is not cleared, and receives one less.
// Options. Masks and document ids are applied only in tiles that a boundary of the visible queries crosses. Softcap,
// ALiBi and dropout change P and dS in registers; only dropout keeps state, one bit per score.
// With BLOCK_MASK the copying warp, and those that add dQ, read lists of tiles (kept_tiles.cuh has the macros).
// Query heads that share K and V: a block goes through all of them. Or it handles one, which is faster under a causal mask
// (hopper_tiles.py: by_query_head): then DKV_EXPANSION is the number of query heads of a K/V head, HEADS_PER_KV is 1, dK,
// dV and p.kv_heads have a head for each query head, and the dK and dV of a group are summed afterwards.
// D > 128: there are not enough registers for dK and dV of 64 keys; see fa3_backward_wide.cuh. For D <= 192 with no option
// but a causal mask there is a third computing warp group (WARP_GROUPS).
// Limits. 16-bit inputs, D up to 256 in steps of 8 (padded to 64, 128, 192 or 256); the additions to dQ come in any order.
// The host also defines PADDED_D, USED_D (columns that are multiplied, a multiple of 16; with D > 128 PADDED_D),
// BOX_COLUMNS (of a box of a TMA copy, hopper.cuh), BR (queries of a tile), STAGES (of Q), DO_STAGES (of dO; as many,
// unless D > 192), LATE_DQ, LATE_DK, PERSISTENT (as in fa3.cu), DKV_EXPANSION (1 where a block goes through all heads),
// WARP_GROUPS, PRODUCER_REGISTERS, CONSUMER_REGISTERS, STORES_FIRST_DQ (hopper_tiles.py: stores_first_dq), SKIPS (0: halves
// of tiles that see nothing are computed too), BEGINS_LATER (0: warp groups begin a tile together), EARLY_LAUNCH and
// BOUNDED_WAITS.
#include "fa3_backward_tiles.cuh"
#if WIDE
#include "fa3_backward_wide.cuh"
#else
#include "fa3_backward_consumer.cuh"
#endif

// Q and dO of a tile of head h, with what their rows need; issued.
__device__ __forceinline__ void load_queries(const Launch &launch, const SharedLayout &layout, int stage, int do_stage,
                                             int do_parity, int b, int h, int i0) {
    const Params &p = launch.p;
    const unsigned q_full = layout.barrier(Q_FULL + stage), do_full = layout.barrier(DO_FULL + do_stage);
    const long long row = (long long)(b * p.heads + h) * p.padded_tq + i0;
    mbarrier_arrive_expect_tx(q_full, Q_BYTES + STATISTIC_BYTES);
    load_tile<BR>(layout.q + stage * Q_BYTES, launch.q, q_full, i0, h, b);
    bulk_load(layout.lse_log2 + stage * STATISTIC_BYTES, p.lse_log2 + row, STATISTIC_BYTES, q_full);
    if (WIDE) mbarrier_wait(layout.barrier(DO_EMPTY + do_stage), do_parity ^ 1);  // else dO is released as Q is
    mbarrier_arrive_expect_tx(do_full, Q_BYTES + STATISTIC_BYTES);
    load_tile<BR>(layout.dout + do_stage * Q_BYTES, launch.dout, do_full, i0, h, b);
    bulk_load(layout.delta + do_stage * STATISTIC_BYTES, p.delta + row, STATISTIC_BYTES, do_full);
}

// K and V of a tile; issued.
__device__ __forceinline__ void load_keys(const Launch &launch, const SharedLayout &layout, int stage, const WorkTile &tile) {
    const int kv_head = tile.dkv_head / DKV_EXPANSION;
    const unsigned k_full = layout.barrier(K_FULL + stage), v_full = layout.barrier(V_FULL + stage);
    mbarrier_arrive_expect_tx(k_full, KV_BYTES);
    load_tile<BC>(layout.k + stage * KV_BYTES, launch.k, k_full, tile.j0, kv_head, tile.b);
    mbarrier_arrive_expect_tx(v_full, KV_BYTES);
    load_tile<BC>(layout.v + stage * KV_BYTES, launch.v, v_full, tile.j0, kv_head, tile.b);
}

// The copying warp: its first thread starts the copies, and takes the block's tiles from the counter. Q and dO of the next
// tile are issued before K and V, whose buffers, if one each, are free only when K and V of the last tile have been read.
__device__ __forceinline__ void producer(const Launch &launch, const SharedLayout &layout) {
    const Params &p = launch.p;
    const int n = total_tiles(p);
    const bool issues_copies = threadIdx.x == 0;
    PipelineState<STAGES> q_pipe;
#if WIDE
    PipelineState<DO_STAGES> do_pipe;
#else
    PipelineState<STAGES> &do_pipe = q_pipe;  // which has as many buffers
#endif
    PipelineState<2> tile_pipe;
    PipelineState<KV_STAGES> kv_pipe;
    int drawn = 0, index = blockIdx.x;
    while (true) {
        WorkTile tile(p, min_of(index, n - 1));
        if (index >= n) tile.index = -1;
#if BLOCK_MASK
        BlockMaskTiles<HEADS_PER_KV> kept(p, tile.b, tile.dkv_head * HEADS_PER_KV, tile.j0 / BC);
        tile.has_queries = LOOP_HAS_TILES;
#endif
        mbarrier_wait(layout.barrier(TILE_EMPTY + tile_pipe.index), tile_pipe.parity ^ 1);
        if (issues_copies) {
            tile.publish(layout.slots + tile_pipe.index * WORK_TILE_INTS);
            mbarrier_arrive(layout.barrier(TILE_FULL + tile_pipe.index));
        }
        tile_pipe.next();
        if (index >= n) return;
        const Range &range = tile.range;
        bool first = true;
        for (int g = 0; g < HEADS_PER_KV; g++)
            for (int i0 = LOOP_ENTER_HEAD(g); LOOP_IS_TILE_OF_HEAD(i0, g); LOOP_ADVANCE(i0, BR)) {
                const int h = tile.dkv_head * HEADS_PER_KV + g;
                mbarrier_wait(layout.barrier(Q_EMPTY + q_pipe.index), q_pipe.parity ^ 1);
                if (issues_copies) {
#if BLOCK_MASK
                    volatile int *published = layout.stage_slots(q_pipe.index);
                    published[0] = kept.here | (kept.next < 0 ? LAST_FLAG : 0), published[1] = h;
#endif
                    load_queries(launch, layout, q_pipe.index, do_pipe.index, do_pipe.parity, tile.b, h, i0);
                }
                q_pipe.next();
                if (WIDE) do_pipe.next();
                LOOP_PREFETCH;
                if (first) {
                    first = false;
                    mbarrier_wait(layout.barrier(KV_EMPTY + kv_pipe.index), kv_pipe.parity ^ 1);
                    if (issues_copies) load_keys(launch, layout, kv_pipe.index, tile);
                    kv_pipe.next();
                }
                if (LOOP_DRAWS(i0, g) && issues_copies) drawn = atomicAdd(launch.tile_counter, 1);
            }
        if (first && issues_copies) drawn = atomicAdd(launch.tile_counter, 1);
        index = gridDim.x + __shfl_sync(~0u, drawn, 0);
    }
}

// Adds a part of dQ to its accumulator, or stores it where it is the first; issued. Whether it was added. `known_state`: the
// part's state a while ago. Who comes while the first is being stored waits. A state that was read as STORED needs no
// acquire, which would take a microsecond each time: the addition too is made in the L2, where the store was complete
// before the state was.
__device__ __forceinline__ bool add_or_store(float *to, unsigned from, unsigned bytes, int *state, int known_state) {
    if (known_state == UNTOUCHED) known_state = atomicCAS(state, UNTOUCHED, CLAIMED);
    if (known_state == UNTOUCHED) {
        bulk_store(to, from, bytes);
        return false;
    }
    while (known_state != STORED) known_state = load_acquire(state);
    bulk_reduce_add(to, from, bytes);
    return true;
}

// A warp, whose first thread adds what warp group `group` leaves of dQ to the accumulator: chunk after chunk
// of a tile of queries.
__device__ __forceinline__ void add_dq(const Launch &launch, const SharedLayout &layout, int group) {
    const Params &p = launch.p;
    const bool whole_chunk = DQ_SPLIT_BY_ROWS || WIDE || USED_D == PADDED_D;
    const unsigned bytes = whole_chunk ? DQ_CHUNK_BYTES : min_of(DQ_COLUMNS, USED_D - group * DQ_COLUMNS) * 64 * 4;
    const bool issues = threadIdx.x % 32 == 0;
    TileScheduler tiles(layout);
    PipelineState<1> dq_pipe;
    unsigned prefetched_part = ~0u;
    int prefetched_state = STORED;  // of that part, else of the part at hand
    for (int index = tiles.next(); index >= 0; index = tiles.next()) {
        const WorkTile tile = tiles.read(p, index);
        tiles.done();
        const Range &range = tile.range;
#if BLOCK_MASK
        BlockMaskTiles<HEADS_PER_KV> kept(p, tile.b, tile.dkv_head * HEADS_PER_KV, tile.j0 / BC);
#endif
        for (int g = 0; g < HEADS_PER_KV; g++)
            for (int i0 = LOOP_ENTER_HEAD(g); LOOP_IS_TILE_OF_HEAD(i0, g); LOOP_ADVANCE(i0, BR)) {
                LOOP_PREFETCH;
                const int h = tile.dkv_head * HEADS_PER_KV + g;
                const unsigned query_tile = (tile.b * p.heads + h) * (p.padded_tq / BR) + i0 / BR;
                for (int chunk = 0; chunk < DQ_GROUP_CHUNKS; chunk++) {
                    const unsigned part = query_tile * DQ_TILE_CHUNKS + WARP_GROUPS * chunk + group;
                    float *to = p.scratch + part * (DQ_CHUNK_BYTES / 4ll);
                    int *state = launch.dq_states + part;
                    if (STORES_FIRST_DQ && issues && part != prefetched_part) prefetched_state = load_relaxed(state);
                    mbarrier_wait(layout.barrier(DQ_FULL + group), dq_pipe.parity);
                    if (issues) {
                        const unsigned from = layout.dq + group * DQ_CHUNK_BYTES;
                        const bool added = add_or_store(to, from, bytes, state, prefetched_state);
                        bulk_commit_group();
#if STORES_FIRST_DQ && !BLOCK_MASK  // the next state comes while this part is read
                        if (LOOP_HAS_NEXT(i0, BR)) {
                            prefetched_part = part + (LOOP_NEXT(i0, BR) - i0) / BR * DQ_TILE_CHUNKS;
                            prefetched_state = load_relaxed(launch.dq_states + prefetched_part);
                        }
#endif
                        bulk_wait_group_read<0>();
                        mbarrier_arrive(layout.barrier(DQ_EMPTY + group));
                        if (!added) bulk_wait_group<0>(), store_release(state, STORED);
                    }
                    __syncwarp();
                    dq_pipe.next();
                }
            }
    }
    if (issues) bulk_wait_group<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) tilegpt_fa3_backward(const __grid_constant__ Launch launch) {
    extern __shared__ __align__(1024) unsigned char memory[];
    static __shared__ __align__(8) unsigned long long barriers[BARRIERS];
    static __shared__ int slots[2 * WORK_TILE_INTS + BLOCK_MASK * 2 * STAGES];
    const SharedLayout layout(memory, barriers, slots);
    if (threadIdx.x == 0) {
        for (int place = 0; place < BARRIERS; place++) mbarrier_init(layout.barrier(place), arrivals(place));
        fence_mbarrier_init();
    }
    if (EARLY_LAUNCH) griddepcontrol_wait();
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (group == 0) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == 0)
            producer(launch, layout);
        else if (warp < 1 + WARP_GROUPS)
            add_dq(launch, layout, warp - 1);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        Consumer(launch, layout, group - 1).run();
    }
}

// Runs last: rounds dQ from its accumulator. A block handles one chunk of a tile that one warp group left;
// a thread handles 8 columns of 2 rows.
extern "C" __global__ void __launch_bounds__(DQ_CHUNK_BYTES / 64)
    tilegpt_fa3_backward_finish(const __grid_constant__ Params p) {
    if (EARLY_LAUNCH) griddepcontrol_wait();
    const unsigned query_tile = blockIdx.x / WARP_GROUPS / DQ_GROUP_CHUNKS;
    const int row_threads = DQ_CHUNK_COLUMNS / 8, group = blockIdx.x % WARP_GROUPS;
    const int chunk = blockIdx.x / WARP_GROUPS % DQ_GROUP_CHUNKS;
    const int tiles = p.padded_tq / BR, tile = query_tile % tiles, batch_head = query_tile / tiles;
    const int b = batch_head / p.heads, h = batch_head % p.heads;
    const int n = threadIdx.x % row_threads, row_pair = threadIdx.x / row_threads;
    const int d = (DQ_SPLIT_BY_ROWS ? 0 : group * DQ_COLUMNS) + chunk * DQ_CHUNK_COLUMNS + n * 8;
#if STORES_FIRST_DQ
    const int *dq_states = (const int *)(p.scratch + (long long)p.batch * p.heads * p.padded_tq * PADDED_D) + 1;
    const bool stored = dq_states[blockIdx.x] == STORED;  // else no key is visible, and dQ is 0
#else
    const bool stored = true;
#endif
    uint4 low, high;
    unsigned *lows = &low.x, *highs = &high.x;
    const int g = row_pair % 8, source_warp = row_pair / 8;
    const int i = tile * BR + (DQ_SPLIT_BY_ROWS ? group * 64 : 0) + source_warp * 16 + g;
    const float4 *from =
        (const float4 *)p.scratch + blockIdx.x * (DQ_CHUNK_BYTES / 16ll) + n * 128 + source_warp * 32 + g * 4;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const float4 x = stored ? from[c] : float4{0.0f, 0.0f, 0.0f, 0.0f};
        lows[c] = pack(x.x * p.scale, x.y * p.scale), highs[c] = pack(x.z * p.scale, x.w * p.scale);
    }
    if (d >= HEAD_DIM) return;
    element *to = matrix_of(p.dq, p.dq_stride, b, h) + i * p.dq_stride.t + d;
    if (i < p.tq) *(uint4 *)to = low;
    if (i + 8 < p.tq) *(uint4 *)(to + 8 * p.dq_stride.t) = high;
}
