// A warp of fa3.cu that copies, of each team one: Q, K and V of tile after tile, by TMA, as far ahead as shared memory allows.
#pragma once
#include "fa3_tiles.cuh"

// The output of queries that see no key, by a warp.
__device__ __forceinline__ void write_zeros(const Params &p, const WorkTile &tile) {
    const int rows = min_of(BR, p.tq - tile.i0), lane = threadIdx.x % 32;
    element *out = matrix_of(p.out, p.out_stride, tile.b, tile.h) + tile.i0 * p.out_stride.t;
    for (int i = 0; i < rows; i++) {
        for (int d = lane; d < HEAD_DIM; d += 32) out[i * p.out_stride.t + d] = element(0.0f);
        if (lane == 0) p.lse[(long long)(tile.b * p.heads + tile.h) * p.tq + tile.i0 + i] = -INFINITE;
    }
}

// Q of all warp groups to the next stage, and what tile it is.
__device__ __forceinline__ void load_q(const Launch &launch, const SharedLayout &layout,
                                       PipelineState<Q_STAGES> &q_pipe, const WorkTile &tile) {
    const unsigned full = layout.barrier(Q_FULL + q_pipe.index);
    mbarrier_wait(layout.barrier(Q_EMPTY + q_pipe.index), q_pipe.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
        tile.publish(layout.slots + q_pipe.index * WORK_TILE_INTS);
        mbarrier_arrive_expect_tx(full, WARP_GROUPS * Q_GROUP_BYTES);
        for (int group = 0; group < WARP_GROUPS; group++)
            load_tile<64>(layout.q + (q_pipe.index * WARP_GROUPS + group) * Q_GROUP_BYTES, launch.q, full,
                          tile.i0 + group * 64, tile.h, tile.b);
    }
    q_pipe.next();
}

// A warp of a team, whose first thread issues the copies.
__device__ __forceinline__ void producer(const Launch &launch, const SharedLayout &layout, int team) {
    const Params &p = launch.p;
    const bool issues_copies = threadIdx.x % 32 == 0;
    PipelineState<Q_STAGES> q_pipe;
    PipelineState<STAGES> k_pipe, v_pipe;
    auto load = [&](const TensorMap &map, unsigned to, int full, int empty, PipelineState<STAGES> &state,
                    const WorkTile &tile, int start) {
        mbarrier_wait(layout.barrier(empty + state.index), state.parity ^ 1);
        if (issues_copies) {
            if (BLOCK_MASK && full == K_FULL) layout.key_entry(state.index) = start;
            start = START_OF(start);
            mbarrier_arrive_expect_tx(layout.barrier(full + state.index), KV_BYTES);
            const unsigned at = to + state.index * KV_BYTES, barrier = layout.barrier(full + state.index);
            if (OPERANDS_8BIT && full == V_FULL)  // transposed: rows of pairs of keys, PADDED_D of them a block
                for (int keys = 0; keys < BC; keys += V_BLOCK)
                    tma_load(at + keys * PADDED_D, map, barrier, (start + keys) / 2, 0, tile.h / HEADS_PER_KV, tile.b);
            else
                load_tile<BC>(at, map, barrier, start, tile.h / HEADS_PER_KV, tile.b);
        }
        state.next();
    };
    int drawn = 0;
    for (int index = blockIdx.x + team * gridDim.x; index < total_tiles(p); index = drawn_tile(drawn)) {
        const WorkTile tile(p, index);
#if BLOCK_MASK
        BlockMaskTiles<1> kept(p, tile.b, tile.h, tile.i0 / BR);
#else
        const WorkTile &range = tile;
#endif
        if (!LOOP_HAS_TILES) {
            write_zeros(p, tile);
            if (issues_copies) drawn = atomicAdd(launch.tile_counter, 1);
            continue;
        }
        load_q(launch, layout, q_pipe, tile);
#if BLOCK_MASK
        int pending_v = 0;  // the tile whose V is next
        for (int start = LOOP_ENTER, flags = FIRST_FLAG; LOOP_IS_TILE(start); LOOP_ADVANCE(start, BC), flags = 0) {
            load(launch.k, layout.k, K_FULL, K_EMPTY, k_pipe, tile, kept.here | flags | (kept.next < 0 ? LAST_FLAG : 0));
            if (!flags) load(launch.v, layout.v, V_FULL, V_EMPTY, v_pipe, tile, pending_v);
            pending_v = start;
            LOOP_PREFETCH;
        }
        if (issues_copies) drawn = atomicAdd(launch.tile_counter, 1);
        load(launch.v, layout.v, V_FULL, V_EMPTY, v_pipe, tile, pending_v);
#else
        const int highest = highest_tile(tile.lo, tile.hi), draw_at = min_of(highest, tile.lo + DRAWN_AHEAD * BC);
        load(launch.k, layout.k, K_FULL, K_EMPTY, k_pipe, tile, highest);
        for (int start = highest; start >= tile.lo; start -= BC) {
            if (start > tile.lo) load(launch.k, layout.k, K_FULL, K_EMPTY, k_pipe, tile, start - BC);
            if (start == draw_at && issues_copies) drawn = atomicAdd(launch.tile_counter, 1);
            load(launch.v, layout.v, V_FULL, V_EMPTY, v_pipe, tile, start);
        }
#endif
    }
    mbarrier_wait(layout.barrier(Q_EMPTY + q_pipe.index), q_pipe.parity ^ 1);
    if (!issues_copies) return;
    layout.slots[q_pipe.index * WORK_TILE_INTS] = -1;  // of no batch row: the end
    mbarrier_arrive(layout.barrier(Q_FULL + q_pipe.index));
}
