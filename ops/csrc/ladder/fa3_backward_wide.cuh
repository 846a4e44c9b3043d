// A warp group of fa3_backward.cu that computes, for D > 128: registers do not hold dK and dV of 64 keys for each warp
// group, so the warp groups share a block's keys. Each has a part of S and dP, and passes its P and dS through shared
// memory; then it has a part of the columns of dV, dK and dQ. Two of them: fa3_backward_two.cuh; three:
// fa3_backward_three.cuh.
//
//        tensor       [S0 dP0      ][dV0      ][dQ0 dK0         ][S1 dP1 ...
//        group              P share      dS share        dQ out          dQ out
//                                                        (half)          (the other half)
#pragma once
#include "fa3_backward_scores.cuh"

#define OWN_D (PADDED_D / WARP_GROUPS)  // columns of a warp group
#define OWN_BOXES (OWN_D / BOX_COLUMNS)

// What both kinds of products need, and a block's dK and dV (or their transposes) of this group's columns.
struct WideGroup : ScoreGroup {
    const Launch &launch;
    const SharedLayout &layout;
    TileScheduler tiles;
    PipelineState<STAGES> q_pipe;
    PipelineState<DO_STAGES> do_pipe;
    PipelineState<DS_STAGES> exchange_pipe;  // of P and dS
    PipelineState<KV_STAGES> kv_pipe;
    PipelineState<1> dq_pipe;
    // delayed_dq: the part of dQ that is added one tile later.
    float dk[OWN_D * BC / 128], dv[OWN_D * BC / 128], dq[OWN_D / 2], delayed_dq[OWN_D / 4];

    __device__ __forceinline__ WideGroup(const Launch &launch, const SharedLayout &layout, int group)
        : ScoreGroup(launch.p, group), launch(launch), layout(layout), tiles(layout) {}

    __device__ __forceinline__ void arrive(int place) const {
        if (lane == 0) mbarrier_arrive(layout.barrier(place));
    }
};

#if WARP_GROUPS == 3
#include "fa3_backward_three.cuh"
#else
#include "fa3_backward_two.cuh"
#endif

struct Consumer : GroupProducts {
    using GroupProducts::GroupProducts;

    // All products of the tile's keys with the queries that see them.
    __device__ __forceinline__ void loop_over_queries() {
        bool first = true;
#pragma unroll
        for (int x = 0; x < OWN_D * BC / 128; x++) dk[x] = dv[x] = 0.0f;
        begin_queries();
        if (remaining > 0) await_keys(layout, kv_pipe), kv_pipe.next();
        while (remaining > 0) {
            const unsigned q_tile = layout.q + q_pipe.index * Q_BYTES, do_tile = layout.dout + do_pipe.index * Q_BYTES;
            const unsigned offset = DS_STAGES == 1 ? 0 : exchange_pipe.index * DS_BYTES;
            const unsigned p_tile = layout.p + offset, ds_tile = layout.ds + offset;
            mbarrier_wait(layout.barrier(Q_FULL + q_pipe.index), q_pipe.parity);
            read_query_entry(layout, q_pipe.index);
            wgmma_fence();
            multiply_s_or_dp(s, layout.k, q_tile);
            mbarrier_wait(layout.barrier(DO_FULL + do_pipe.index), do_pipe.parity);
            wgmma_fence();
            multiply_s_or_dp(dp, layout.v, do_tile);
            if (!first) hand_over_dq(layout, dq_pipe, delayed_dq);  // of the previous tile
            wgmma_wait_group<1>();
            warpgroup_fence_operand(s);
            compute_p(layout.lse_log2 + q_pipe.index * STATISTIC_BYTES);
            exchange(p16, p_tile, P_FULL, P_EMPTY);
            multiply_dv_or_dk(dv, p_tile, do_tile);
            wgmma_wait_group<1>();
            warpgroup_fence_operand(dp);
            compute_ds(layout.delta + do_pipe.index * STATISTIC_BYTES);
            exchange(ds16, ds_tile, DS_FULL, DS_EMPTY);
            multiply_dq(ds_tile);
            multiply_dv_or_dk(dk, ds_tile, q_tile);
            wgmma_wait_group<2>();
            warpgroup_fence_operand(dv);
            arrive(DO_EMPTY + do_pipe.index);
            if (DS_STAGES == 1) arrive(P_EMPTY);
            wgmma_wait_group<1>();
            warpgroup_fence_operand(dq);
            hand_over_dq(layout, dq_pipe, dq);
            // Copied by an addition: otherwise the compiler assumes that a product may still write these registers, and
            // waits for all products.
#pragma unroll
            for (int x = 0; x < OWN_D / 4; x++) delayed_dq[x] = dq[OWN_D / 4 + x] + 0.0f;
            wgmma_wait_group<0>();
            warpgroup_fence_operand(dk);
            arrive(Q_EMPTY + q_pipe.index);
            if (DS_STAGES == 1) arrive(DS_EMPTY);
            q_pipe.next(), do_pipe.next(), exchange_pipe.next();
            first = false;
            next_queries();
        }
        if (first) return;
        hand_over_dq(layout, dq_pipe, delayed_dq);
        arrive(KV_EMPTY);
    }

    __device__ __forceinline__ void run() {
        for (int index = tiles.next(); index >= 0; index = tiles.next()) {
            tile = tiles.read(p, index);
            loop_over_queries();
            finish();
        }
    }
};
