// A warp group of fa3_backward.cu that computes, for D > 128: registers do not hold dK and dV of 64 keys, so two warp
// groups share them. Each has half of the queries of S and dP, and passes its P and dS through shared memory; then it has
// half of the columns of dV, dK and dQ.
//
//        tensor       [S0 dP0      ][dV0      ][dQ0 dK0         ][S1 dP1 ...
//        group              P share      dS share        dQ out          dQ out
//                                                        (half)          (the other half)
#pragma once
#include "fa3_backward_scores.cuh"

#define HALF_D (PADDED_D / 2)
#define HALF_BOXES (HALF_D / BOX_COLUMNS)

struct Consumer : ScoreTile {
    const Launch &launch;
    const SharedLayout &layout;
    WorkTiles tiles;
    PipelineState<STAGES> stage;
    PipelineState<DO_STAGES> do_stage;
    PipelineState<2> shared;  // of P and dS
    PipelineState<1> kv, dq_stage;
    // delayed_dq: the part of dQ that is added one tile later.
    float dk[HALF_D / 2], dv[HALF_D / 2], dq[HALF_D / 2], delayed_dq[HALF_D / 4];

    __device__ __forceinline__ Consumer(const Launch &launch, const SharedLayout &layout, int group)
        : ScoreTile(launch.p, group), launch(launch), layout(layout), tiles(layout) {}

    __device__ __forceinline__ void release(int empty) const {
        if (lane == 0) mbarrier_arrive(layout.barrier(empty));
    }
    // S^T = K Q^T, or dP^T = V dO^T, issued: all keys, half of the queries.
    __device__ __forceinline__ void multiply_s_or_dp(Scores &to, unsigned keys, unsigned queries) const {
        const SmemDescriptor a(keys), b(queries + group * OWN_QUERIES * BOX_ROW_BYTES);
#pragma unroll
        for (int step = 0; step < PADDED_D / 16; step++)
            Wgmma<OWN_QUERIES>::ss<0, 0>(to, a.offset(step_bytes<BC>(step)), b.offset(step_bytes<BR>(step)), step > 0);
        wgmma_commit_group();
    }
    // dV += P^T dO, or dK += dS^T Q, issued: half of the columns.
    __device__ __forceinline__ void multiply_dv_or_dk(float (&to)[HALF_D / 2], unsigned scores,
                                                      unsigned queries) const {
        const unsigned columns = queries + group * HALF_BOXES * BR * BOX_ROW_BYTES;
        const SmemDescriptor a(scores, 16, 128), b(columns, BR * BOX_ROW_BYTES);
#pragma unroll
        for (int step = 0; step < BR / 16; step++)
            Wgmma<HALF_D>::ss<1, 1>(to, a.offset(step * 16 * 128), b.offset(step * 16 * BOX_ROW_BYTES), 1);
        wgmma_commit_group();
    }
    // dQ = dS K, issued: half of the columns.
    __device__ __forceinline__ void multiply_dq(unsigned scores) {
        const unsigned columns = layout.k + group * HALF_BOXES * BC * BOX_ROW_BYTES;
        const SmemDescriptor a(scores, 16, 128), b(columns, BC * BOX_ROW_BYTES);
#pragma unroll
        for (int step = 0; step < BC / 16; step++)
            Wgmma<HALF_D>::ss<0, 1>(dq, a.offset(step * 32), b.offset(step * 16 * BOX_ROW_BYTES), step > 0);
        wgmma_commit_group();
    }

    // Half of the scores to shared memory, and until the other half is there. Two tiles of each are enough: who shares
    // one has seen that the other group shared the tile before, and was done with all products before that.
    __device__ __forceinline__ void exchange(const Rounded &x, unsigned to, int full) const {
        share(x, to + group * OWN_QUERIES * 128);
        release(full + shared.index);
        mbarrier_wait(layout.barrier(full + shared.index), shared.parity);
        wgmma_fence();
    }

    // All products of the tile's keys with the queries that see them.
    __device__ __forceinline__ void loop_over_queries() {
        bool first = true;
#pragma unroll
        for (int x = 0; x < HALF_D / 2; x++) dk[x] = dv[x] = 0.0f;
        begin_queries();
        if (remaining > 0) await_keys(layout, kv);
        while (remaining > 0) {
            const unsigned q_tile = layout.q + stage.index * Q_BYTES, do_tile = layout.dout + do_stage.index * Q_BYTES;
            const unsigned p_tile = layout.p + shared.index * DS_BYTES;
            const unsigned ds_tile = layout.ds + shared.index * DS_BYTES;
            mbarrier_wait(layout.barrier(Q_FULL + stage.index), stage.parity);
            read_queries(layout, stage.index);
            wgmma_fence();
            multiply_s_or_dp(s, layout.k, q_tile);
            mbarrier_wait(layout.barrier(DO_FULL + do_stage.index), do_stage.parity);
            wgmma_fence();
            multiply_s_or_dp(dp, layout.v, do_tile);
            if (!first) hand_over_dq(layout, dq_stage, delayed_dq);  // of the last tile
            wgmma_wait_group<1>();
            warpgroup_fence_operand(s);
            compute_p(layout.lse_log2 + stage.index * STATISTIC_BYTES);
            exchange(p16, p_tile, P_FULL);
            multiply_dv_or_dk(dv, p_tile, do_tile);
            wgmma_wait_group<1>();
            warpgroup_fence_operand(dp);
            compute_ds(layout.delta + do_stage.index * STATISTIC_BYTES);
            exchange(ds16, ds_tile, DS_FULL);
            multiply_dq(ds_tile);
            multiply_dv_or_dk(dk, ds_tile, q_tile);
            wgmma_wait_group<2>();
            warpgroup_fence_operand(dv);
            release(DO_EMPTY + do_stage.index);
            wgmma_wait_group<1>();
            warpgroup_fence_operand(dq);
            hand_over_dq(layout, dq_stage, dq);
            // Copied by an addition: otherwise the compiler assumes that a product may still write these registers, and
            // waits for all products.
#pragma unroll
            for (int x = 0; x < HALF_D / 4; x++) delayed_dq[x] = dq[HALF_D / 4 + x] + 0.0f;
            wgmma_wait_group<0>();
            warpgroup_fence_operand(dk);
            release(Q_EMPTY + stage.index);
            stage.next(), do_stage.next(), shared.next();
            first = false;
            next_queries();
        }
        if (first) return;
        hand_over_dq(layout, dq_stage, delayed_dq);
        release(KV_EMPTY);
    }

    // Its columns of dK or dV to `to` in shared memory.
    __device__ __forceinline__ void write_tile(const float (&x)[HALF_D / 2], float scale, unsigned to) const {
#pragma unroll
        for (int step = 0; step < HALF_D / 16; step++) {
            const float *y = x + 8 * step;
            const int block = step * 16 / BOX_COLUMNS, chunk = step * 16 % BOX_COLUMNS / 8 + lane / 16;
            stmatrix(to + block * 64 * BOX_ROW_BYTES + swizzled<BOX_COLUMNS>(warp * 16 + lane % 16, chunk),
                     pack(y[0] * scale, y[1] * scale), pack(y[2] * scale, y[3] * scale),
                     pack(y[4] * scale, y[5] * scale), pack(y[6] * scale, y[7] * scale));
        }
    }
    // dV is staged in P's and dS's buffers, dK in dQ's, so that K and V of the next tile are on their way.
    __device__ __forceinline__ void finish() const {
        const unsigned dv_tile = layout.ds + group * 64 * HALF_D * 2, dk_tile = layout.dq + group * DQ_CHUNK_BYTES;
        bar_sync(BARRIER_ALL, COMPUTING);  // the other group has read P and dS
        mbarrier_wait(layout.barrier(DQ_EMPTY + group), dq_stage.parity ^ 1);
        write_tile(dv, DROPOUT ? p.keep_scale : 1.0f, dv_tile);
        write_tile(dk, p.scale, dk_tile);
        fence_proxy_async();
        bar_sync(BARRIER_OWN + group, 128);
        if (threadIdx.x % 128 == 0) {
            for (int block = 0; block < HALF_BOXES; block++) {
                const int d = group * HALF_D + block * BOX_COLUMNS, at = block * 64 * BOX_ROW_BYTES;
                tma_store(launch.dv, dv_tile + at, d, tile.j0, tile.kv_head, tile.b);
                tma_store(launch.dk, dk_tile + at, d, tile.j0, tile.kv_head, tile.b);
            }
            bulk_commit_group();
            bulk_wait_group_read<0>();
        }
        bar_sync(BARRIER_ALL, COMPUTING);  // the other group may write there
    }

    __device__ __forceinline__ void run() {
        for (int index = tiles.next(); index >= 0; index = tiles.next()) {
            tile = WorkTile(p, index);
            loop_over_queries();
            finish();
        }
    }
};
