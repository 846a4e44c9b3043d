// What a warp group of fa3_backward_wide.cuh multiplies where there are three, for 128 < D <= 192 with no option but a
// causal mask: each has 32 of the 96 keys of S and dP, and then 64 of the columns of dV, dK and dQ. dQ receives two thirds
// of the additions that tiles of 64 keys (fa3_backward_two.cuh) make, which bound that kernel: a multiprocessor adds about
// 12 bytes a clock.
//
//   - dV and dK are computed transposed, dV^T += dO^T P: a wgmma has 64 rows, and a group 64 columns.
//   - There is space for one tile of P and of dS: who stores the next waits until all groups have read this one.
//   - 160 registers a thread: dK and dV take 96, and dQ and S with dP are not needed at once.
#pragma once

#define OWN_KEYS 32  // of a warp group's scores

static_assert(PADDED_D == 192 && BR == 64 && BOX_COLUMNS == 32, "64 columns and 32 keys a warp group");

struct GroupProducts : WideGroup {
    using WideGroup::WideGroup;

    // S = Q K^T, or dP = dO V^T, issued: all queries, 32 keys.
    __device__ __forceinline__ void multiply_s_or_dp(Scores &to, unsigned k_or_v, unsigned q_or_do) const {
        const SmemDescriptor a(q_or_do), b(k_or_v + group * OWN_KEYS * BOX_ROW_BYTES);
#pragma unroll
        for (int step = 0; step < PADDED_D / 16; step++)
            Wgmma<OWN_KEYS>::ss<0, 0>(to, a.offset(step_bytes<BR>(step)), b.offset(step_bytes<BC>(step)), step > 0);
        wgmma_commit_group();
    }
    // dV^T += dO^T P, or dK^T += Q^T dS, issued: 64 columns, all keys.
    __device__ __forceinline__ void multiply_dv_or_dk(float (&to)[OWN_D * BC / 128], unsigned p_or_ds,
                                                      unsigned q_or_do) const {
        const unsigned columns = q_or_do + group * OWN_BOXES * BR * BOX_ROW_BYTES;
        const SmemDescriptor a(columns, BR * BOX_ROW_BYTES), b(p_or_ds, BR * BOX_ROW_BYTES);
#pragma unroll
        for (int step = 0; step < BR / 16; step++)
            Wgmma<BC>::ss<1, 1>(to, a.offset(step * 16 * BOX_ROW_BYTES), b.offset(step * 16 * BOX_ROW_BYTES), 1);
        wgmma_commit_group();
    }
    // dQ = dS K, issued: 64 columns.
    __device__ __forceinline__ void multiply_dq(unsigned ds_tile) {
        const unsigned columns = layout.k + group * OWN_BOXES * BC * BOX_ROW_BYTES;
        const SmemDescriptor a(ds_tile), b(columns, BC * BOX_ROW_BYTES);
#pragma unroll
        for (int step = 0; step < BC / 16; step++)
            Wgmma<OWN_D>::ss<0, 1>(dq, a.offset(step_bytes<BR>(step)), b.offset(step * 16 * BOX_ROW_BYTES), step > 0);
        wgmma_commit_group();
    }

    // A number of each of a thread's two rows, g and g + 8 of its warp's 16.
    __device__ __forceinline__ float2 of_rows(unsigned statistic) const {
        const unsigned from = statistic + (warp * 16 + lane / 8 * 2) * 4;
        const float2 low = load_pair(from), high = load_pair(from + 32);
        return lane / 4 % 2 ? float2{low.y, high.y} : float2{low.x, high.x};
    }
    // P from S, rounded to 16 bits.
    __device__ __forceinline__ void compute_p(unsigned lse_log2) {
        const float2 shift = of_rows(lse_log2);
        const float scale_log2 = p.scale * LOG2E;
#pragma unroll
        for (int x = 0; x < OWN_KEYS / 2; x++) s[x] = exp2_of(s[x] * scale_log2 - (x / 2 % 2 ? shift.y : shift.x));
        if (needs_masking()) apply_mask();
#pragma unroll
        for (int step = 0; step < OWN_KEYS / 16; step++) round_step(p16[step], s + 8 * step);
    }
    __device__ __forceinline__ void apply_mask() {
        const int column = tile.j0 + group * OWN_KEYS + lane % 4 * 2, keys = tile.keys;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int diagonal_key = i0 + warp * 16 + lane / 4 + half * 8 + keys - p.tq;
            const int end = (HAS_RIGHT ? min_of(keys, diagonal_key + p.window_right + 1) : keys) - column;
#pragma unroll
            for (int n = 0; n < OWN_KEYS / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (n * 8 + e >= end) s[4 * n + 2 * half + e] = 0.0f;
        }
    }
    // dP becomes dS, which is rounded too.
    __device__ __forceinline__ void compute_ds(unsigned deltas) {
        const float2 delta = of_rows(deltas);
#pragma unroll
        for (int x = 0; x < OWN_KEYS / 2; x++) dp[x] = s[x] * (dp[x] - (x / 2 % 2 ? delta.y : delta.x));
#pragma unroll
        for (int step = 0; step < OWN_KEYS / 16; step++) round_step(ds16[step], dp + 8 * step);
    }

    // This group's keys of P or dS to shared memory, a row a query, and until those of the others are there.
    __device__ __forceinline__ void exchange(const Rounded &x, unsigned to, int full, int empty) const {
        mbarrier_wait(layout.barrier(empty), exchange_pipe.parity ^ 1);
#pragma unroll
        for (int step = 0; step < OWN_KEYS / 16; step++)
            stmatrix(to + group * BR * BOX_ROW_BYTES + swizzled<BOX_COLUMNS>(warp * 16 + lane % 16, 2 * step + lane / 16),
                     x[step][0], x[step][1], x[step][2], x[step][3]);
        fence_warp();
        arrive(full);
        mbarrier_wait(layout.barrier(full), exchange_pipe.parity);
        wgmma_fence();
    }

    // Its columns of dK or dV, of which it has the transpose, through shared memory to global memory.
    __device__ __forceinline__ void store(const float (&x)[OWN_D * BC / 128], float scale, const TensorMap &map) const {
        const unsigned own = layout.ds + group * OWN_BOXES * BC * BOX_ROW_BYTES;
        const unsigned box_tile = own + warp / 2 * BC * BOX_ROW_BYTES;
        const int row = lane / 16 * 8 + lane % 8, chunk = warp % 2 * 2 + lane / 8 % 2;
#pragma unroll
        for (int step = 0; step < BC / 16; step++) {
            const float *y = x + 8 * step;
            const unsigned packed[4] = {pack(y[0] * scale, y[1] * scale), pack(y[2] * scale, y[3] * scale),
                                        pack(y[4] * scale, y[5] * scale), pack(y[6] * scale, y[7] * scale)};
            stmatrix_trans(box_tile + swizzled<BOX_COLUMNS>(step * 16 + row, chunk), packed);
        }
        fence_proxy_async();
        bar_sync(NAMED_OWN + group, 128);
        if (threadIdx.x % 128 == 0) {
            for (int box = 0; box < OWN_BOXES; box++)
                tma_store(map, own + box * BC * BOX_ROW_BYTES, group * OWN_D + box * BOX_COLUMNS, tile.j0,
                          tile.dkv_head, tile.b);
            bulk_commit_group();
            bulk_wait_group_read<0>();
        }
        bar_sync(NAMED_OWN + group, 128);
    }
    // dV, then dK are staged in the buffers of dS, P and dQ, so that K and V of the next tile are on their way.
    __device__ __forceinline__ void finish() const {
        mbarrier_wait(layout.barrier(DQ_EMPTY + group), dq_pipe.parity ^ 1);
        bar_sync(NAMED_ALL, COMPUTING);  // all groups have read P and dS, and have no dQ on its way
        store(dv, 1.0f, launch.dv);
        store(dk, p.scale, launch.dk);
        bar_sync(NAMED_ALL, COMPUTING);  // the others may write there
    }
};
