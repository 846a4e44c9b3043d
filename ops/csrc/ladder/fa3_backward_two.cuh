// What a warp group of fa3_backward_wide.cuh multiplies where there are two: each has half of the queries of S^T and dP^T of
// 64 keys, and then half of the columns of dV, dK and dQ.
#pragma once

struct GroupProducts : WideGroup {
    using WideGroup::WideGroup;

    // S^T = K Q^T, or dP^T = V dO^T, issued: all keys, half of the queries.
    __device__ __forceinline__ void multiply_s_or_dp(Scores &to, unsigned k_or_v, unsigned q_or_do) const {
        const SmemDescriptor a(k_or_v), b(q_or_do + group * SCORE_COLUMNS * BOX_ROW_BYTES);
#pragma unroll
        for (int step = 0; step < PADDED_D / 16; step++)
            Wgmma<SCORE_COLUMNS>::ss<0, 0>(to, a.offset(step_bytes<BC>(step)), b.offset(step_bytes<BR>(step)), step > 0);
        wgmma_commit_group();
    }
    // dV += P^T dO, or dK += dS^T Q, issued: half of the columns.
    __device__ __forceinline__ void multiply_dv_or_dk(float (&to)[OWN_D * BC / 128], unsigned p_or_ds,
                                                      unsigned q_or_do) const {
        const unsigned columns = q_or_do + group * OWN_BOXES * BR * BOX_ROW_BYTES;
        const SmemDescriptor a(p_or_ds, 16, 128), b(columns, BR * BOX_ROW_BYTES);
#pragma unroll
        for (int step = 0; step < BR / 16; step++)
            Wgmma<OWN_D>::ss<1, 1>(to, a.offset(step * 16 * 128), b.offset(step * 16 * BOX_ROW_BYTES), 1);
        wgmma_commit_group();
    }
    // dQ = dS K, issued: half of the columns.
    __device__ __forceinline__ void multiply_dq(unsigned ds_tile) {
        const unsigned columns = layout.k + group * OWN_BOXES * BC * BOX_ROW_BYTES;
        const SmemDescriptor a(ds_tile, 16, 128), b(columns, BC * BOX_ROW_BYTES);
#pragma unroll
        for (int step = 0; step < BC / 16; step++)
            Wgmma<OWN_D>::ss<0, 1>(dq, a.offset(step * 32), b.offset(step * 16 * BOX_ROW_BYTES), step > 0);
        wgmma_commit_group();
    }

    // Half of the scores to shared memory, and until the other half is there. Two tiles of each are enough: who shares
    // one has seen that the other group shared the tile before, and was done with all products before that.
    __device__ __forceinline__ void exchange(const Rounded &x, unsigned to, int full, int) const {
        share(x, to + group * SCORE_COLUMNS * 128);
        fence_warp();
        arrive(full + exchange_pipe.index);
        mbarrier_wait(layout.barrier(full + exchange_pipe.index), exchange_pipe.parity);
        wgmma_fence();
    }

    // Its columns of dK or dV to `to` in shared memory.
    __device__ __forceinline__ void write_tile(const float (&x)[OWN_D * BC / 128], float scale, unsigned to) const {
#pragma unroll
        for (int step = 0; step < OWN_D / 16; step++) {
            const float *y = x + 8 * step;
            const int box = step * 16 / BOX_COLUMNS, chunk = step * 16 % BOX_COLUMNS / 8 + lane / 16;
            stmatrix(to + box * 64 * BOX_ROW_BYTES + swizzled<BOX_COLUMNS>(warp * 16 + lane % 16, chunk),
                     pack(y[0] * scale, y[1] * scale), pack(y[2] * scale, y[3] * scale),
                     pack(y[4] * scale, y[5] * scale), pack(y[6] * scale, y[7] * scale));
        }
    }
    // dV is staged in P's and dS's buffers, dK in dQ's, so that K and V of the next tile are on their way.
    __device__ __forceinline__ void finish() const {
        const unsigned dv_tile = layout.ds + group * 64 * OWN_D * 2, dk_tile = layout.dq + group * DQ_CHUNK_BYTES;
        bar_sync(NAMED_ALL, COMPUTING);  // the other group has read P and dS
        mbarrier_wait(layout.barrier(DQ_EMPTY + group), dq_pipe.parity ^ 1);
        write_tile(dv, DROPOUT ? p.keep_scale : 1.0f, dv_tile);
        write_tile(dk, p.scale, dk_tile);
        fence_proxy_async();
        bar_sync(NAMED_OWN + group, 128);
        if (threadIdx.x % 128 == 0) {
            for (int box = 0; box < OWN_BOXES; box++) {
                const int d = group * OWN_D + box * BOX_COLUMNS, at = box * 64 * BOX_ROW_BYTES;
                tma_store(launch.dv, dv_tile + at, d, tile.j0, tile.dkv_head, tile.b);
                tma_store(launch.dk, dk_tile + at, d, tile.j0, tile.dkv_head, tile.b);
            }
            bulk_commit_group();
            bulk_wait_group_read<0>();
        }
        bar_sync(NAMED_ALL, COMPUTING);  // the other group may write there
    }
};
