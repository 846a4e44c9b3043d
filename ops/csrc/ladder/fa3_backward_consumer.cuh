// A warp group of fa3_backward.cu that computes: dK and dV of 64 keys, and its part of dQ.
#pragma once
#include "fa3_backward_scores.cuh"

// The first tile of queries may see only the first half of a block's keys, and with a window the last tile only the
// second half. The warp group that has the other half skips that tile, before and behind the loop over queries: a test
// within it made it up to 1.08x slower. So the tiles of one query head alone can be skipped; the last one only where its
// query is known before (no BLOCK_MASK), nothing of the tile before is in flight, and no other option spills for it.
#define SKIPS_FIRST (SKIPS && BR == 64 && HEADS_PER_KV == 1 && HAS_RIGHT)
#define SPILLING_OPTIONS (SOFTCAP || DROPOUT || ALIBI || LENGTHS)
#define SKIPS_LAST (SKIPS && BR == 64 && HEADS_PER_KV == 1 && HAS_LEFT && !LATE_DQ && !BLOCK_MASK && \
                    !SPILLING_OPTIONS)
// Two warp groups that begin a tile together stay together, and ask for the tensor cores at the same time. Where one skips a
// tile of queries they are apart; else the second begins when the first has its first P. At D = 128, no mask, T = 1k, 2k, 4k
// and 16k: 1.03, 1.06, 1.13 and 1.14x; under a causal mask 0.90 to 0.98x, at D <= 96 0.98 to 1.00x (there, by a pause).
#define AWAITS_FIRST_P (BEGINS_LATER && USED_D > 96 && LATE_DK && !HAS_RIGHT)

// A computing warp group.
struct Consumer : ScoreGroup {
    const Launch &launch;
    const SharedLayout &layout;
    TileScheduler tiles;
    PipelineState<STAGES> q_pipe;
    PipelineState<2> ds_pipe;
    PipelineState<KV_STAGES> kv_pipe;
    PipelineState<1> dq_pipe;
    float dk[USED_D / 2], dv[USED_D / 2], dq[DQ_CHUNK_BYTES / 512];
    unsigned own_v[USED_D / 16][4];  // V of this group's keys, with V_IN_REGISTERS

    __device__ __forceinline__ Consumer(const Launch &launch, const SharedLayout &layout, int group)
        : ScoreGroup(launch.p, group), launch(launch), layout(layout), tiles(layout) {}

    // S^T = K Q^T, or dP^T = V dO^T, issued.
    __device__ __forceinline__ void multiply_s_or_dp(Scores &to, unsigned k_or_v, unsigned q_or_do) const {
        const SmemDescriptor a(k_or_v + group * 64 * BOX_ROW_BYTES), b(q_or_do);
#pragma unroll
        for (int step = 0; step < USED_D / 16; step++)
            Wgmma<BR>::ss<0, 0>(to, a.offset(step_bytes<BC>(step)), b.offset(step_bytes<BR>(step)), step > 0);
        wgmma_commit_group();
    }
    // dP^T = V dO^T, issued.
    __device__ __forceinline__ void multiply_dp(unsigned do_tile) {
#if V_IN_REGISTERS
        const SmemDescriptor b(do_tile);
#pragma unroll
        for (int step = 0; step < USED_D / 16; step++)
            Wgmma<BR>::rs<0>(dp, own_v[step], b.offset(step_bytes<BR>(step)), step > 0);
        wgmma_commit_group();
#else
        multiply_s_or_dp(dp, layout.v + kv_pipe.index * KV_BYTES, do_tile);
#endif
    }
    __device__ __forceinline__ void load_own_v() {
#pragma unroll
        for (int step = 0; step < USED_D / 16; step++) {
            const unsigned box = layout.v + kv_pipe.index * KV_BYTES + (step / 4 * BC + group * 64) * BOX_ROW_BYTES;
            ldmatrix(own_v[step], box + swizzled<64>(warp * 16 + lane % 16, step % 4 * 2 + lane / 16));
        }
    }
    // dV += P^T dO, or dK += dS^T Q, issued.
    __device__ __forceinline__ void multiply_dv_or_dk(float (&to)[USED_D / 2], const Rounded &a,
                                                      unsigned q_or_do) const {
        const SmemDescriptor b(q_or_do, BR * BOX_ROW_BYTES);
#pragma unroll
        for (int step = 0; step < BR / 16; step++)
            Wgmma<USED_D>::rs<1>(to, a[step], b.offset(step * 16 * BOX_ROW_BYTES), 1);
        wgmma_commit_group();
    }
    // dQ = dS K, issued: half of the queries, or of the columns, which with PADDED_D = 64 lie side by side in a
    // block.
    __device__ __forceinline__ void multiply_dq(int ds_stage) {
        const SmemDescriptor a(layout.ds + ds_stage * DS_BYTES + (DQ_SPLIT_BY_ROWS ? group * 64 * 128 : 0));
        const SmemDescriptor b(layout.k + kv_pipe.index * KV_BYTES +
                               (DQ_SPLIT_BY_ROWS ? 0 : group * (PADDED_D == 64 ? 64 : BC * BOX_ROW_BYTES)));
#pragma unroll
        for (int step = 0; step < BC / 16; step++)
            Wgmma<DQ_COLUMNS>::ss<0, 1>(dq, a.offset(step_bytes<BR>(step)), b.offset(step * 16 * BOX_ROW_BYTES),
                                        step > 0);
        wgmma_commit_group();
    }

    // Stores dS^T to shared memory as dS: a block of 64 keys for each warp group, one row per query. Two buffers for dS
    // are enough: before a group stores a tile, it has seen that the other group stored the previous tile, and that
    // group had by then finished the product dQ of the tile before that.
    __device__ __forceinline__ void share_ds(bool first) const {
        if (PADDED_D == 64 && first) await_sent();  // dK of the last tile, from where dS comes
        share(ds16, layout.ds + ds_pipe.index * DS_BYTES + group * BR * 128);
        fence_warp();
        if (lane == 0) mbarrier_arrive(layout.barrier(DS_FULL + ds_pipe.index));
    }
    // Until both warp groups have shared the tile, with LATE_DQ the one before.
    __device__ __forceinline__ void await_ds() const {
        const int ds_stage = LATE_DQ ? ds_pipe.index ^ 1 : ds_pipe.index;
        mbarrier_wait(layout.barrier(DS_FULL + ds_stage), LATE_DQ && ds_stage ? ds_pipe.parity ^ 1 : ds_pipe.parity);
    }

    // dQ of the tile at hand, issued.
    __device__ __forceinline__ void share_ds_multiply_dq(bool first) {
        share_ds(first);
        await_ds();
        wgmma_fence();
        multiply_dq(ds_pipe.index);
    }

    // dK += dS^T Q, and dS for dQ, which with LATE_DQ is the previous tile's and on its way.
    __device__ __forceinline__ void accumulate_dk_dq(unsigned q_tile, bool first) {
        if (LATE_DQ) {
            multiply_dv_or_dk(dk, ds16, q_tile);
            wgmma_wait_group<1>();
            warpgroup_fence_operand(dq), warpgroup_fence_operand(dv);
            // One fence for dQ and dS: with two, D = 64, causal, has 0.97x of the speed (T = 4k and 16k).
            if (!first) stage_dq(layout, dq_pipe, dq);
            share_ds(first);
            if (!first && lane == 0) mbarrier_arrive(layout.barrier(DQ_FULL + group));
        } else {
            share_ds_multiply_dq(first);
            multiply_dv_or_dk(dk, ds16, q_tile);
            wgmma_wait_group<1>();
            warpgroup_fence_operand(dq), warpgroup_fence_operand(dv);
            hand_over_dq(layout, dq_pipe, dq);
        }
    }

    // Waits for dK, while up to NEWER products issued after it stay in flight; then releases the buffer of Q,
    // if `releases_q`: a dK was in flight.
    template <int NEWER> __device__ __forceinline__ void finish_dk(bool releases_q, int q_stage) {
        wgmma_wait_group<NEWER>();
        warpgroup_fence_operand(dk), warpgroup_fence_operand(dv);
        if (releases_q && lane == 0) mbarrier_arrive(layout.barrier(Q_EMPTY + q_stage));
    }
    // Whether a causal mask and a window let the queries of a tile, from `first` on, see any of this group's 64 keys. Other
    // masks are not looked at: they only hide more.
    __device__ __forceinline__ bool sees_keys(int first) const {
        const int distance = first + tile.keys - p.tq - tile.j0 - group * 64;  // from the first key to the first query
        return !(HAS_RIGHT && distance + BR <= -p.window_right) && !(HAS_LEFT && distance > p.window_left + 63);
    }
    // A tile whose queries see none of this group's keys: dS is 0, and of the products only dQ is computed. Q and dO are
    // not read, but a phase of their mbarriers that nobody waited for could be taken for a later one.
    __device__ __forceinline__ void skip_queries(bool first) {
        mbarrier_wait(layout.barrier(Q_FULL + q_pipe.index), q_pipe.parity);
        mbarrier_wait(layout.barrier(DO_FULL + q_pipe.index), q_pipe.parity);
#pragma unroll
        for (int x = 0; x < SCORE_COLUMNS / 4; x++) ds16[x / 4][x % 4] = 0;
        if (LATE_DQ) {
            share_ds(first);
        } else {
            share_ds_multiply_dq(first);
            wgmma_wait_group<0>();
            warpgroup_fence_operand(dq);
            hand_over_dq(layout, dq_pipe, dq);
        }
        if (!LATE_DK) finish_dk<0>(true, q_pipe.index);
        q_pipe.next(), ds_pipe.next();
        next_queries();
    }
    // dQ of the last tile of queries where it is late, and beside it dK to where it is staged; then K and V have been read.
    __device__ __forceinline__ void finish_keys() {
        if (LATE_DQ) {
            await_ds();
            wgmma_fence();
            multiply_dq(ds_pipe.index ^ 1);
            write_dk();
            wgmma_wait_group<0>();
            warpgroup_fence_operand(dq);
            hand_over_dq(layout, dq_pipe, dq);
        } else {
            write_dk();
        }
        // dV, from V's buffer. (That is filled again only after the tile's slot is released, which comes later anyway.)
        if (PADDED_D == 64 && threadIdx.x % 128 == 0) bulk_wait_group_read<0>();
        if (lane == 0) mbarrier_arrive(layout.barrier(KV_EMPTY + kv_pipe.index));
        kv_pipe.next();
    }
    // All products of the tile's keys with the queries that see them. Whether there are any.
    __device__ __forceinline__ bool loop_over_queries() {
        bool first = true;
#pragma unroll
        for (int x = 0; x < USED_D / 2; x++) dk[x] = dv[x] = 0.0f;
        begin_queries();
        // (A return here where no query is, and the compiler keeps dK and dV in local memory.)
        if (remaining > 0) await_keys(layout, kv_pipe);
        if (AWAITS_FIRST_P && group == 1 && remaining > 0) bar_sync(NAMED_BEGIN, COMPUTING);
        if (V_IN_REGISTERS && remaining > 0) load_own_v();
        if (SKIPS_FIRST && remaining > 0) {
#if BLOCK_MASK
            mbarrier_wait(layout.barrier(Q_FULL + q_pipe.index), q_pipe.parity);
            read_query_entry(layout, q_pipe.index);
#endif
            if (!sees_keys(START_OF(i0))) skip_queries(first), first = false;
        }
        const bool skips_last = SKIPS_LAST && remaining > 0 && !sees_keys(i0 + (remaining - 1) * BR);
        while (remaining > skips_last) {
            const unsigned q_tile = layout.q + q_pipe.index * Q_BYTES, do_tile = layout.dout + q_pipe.index * Q_BYTES;
            mbarrier_wait(layout.barrier(Q_FULL + q_pipe.index), q_pipe.parity);
            read_query_entry(layout, q_pipe.index);
            wgmma_fence();
            multiply_s_or_dp(s, layout.k + kv_pipe.index * KV_BYTES, q_tile);
            if (LATE_DK) finish_dk<1>(!first, (q_pipe.index + STAGES - 1) % STAGES);
            mbarrier_wait(layout.barrier(DO_FULL + q_pipe.index), q_pipe.parity);
            wgmma_fence();
            multiply_dp(do_tile);
            wgmma_wait_group<1>();
            warpgroup_fence_operand(s);
            compute_p(layout.lse_log2 + q_pipe.index * STATISTIC_BYTES);
            wgmma_fence();
            multiply_dv_or_dk(dv, p16, do_tile);
            if (AWAITS_FIRST_P && group == 0 && first) bar_arrive(NAMED_BEGIN, COMPUTING);
            if (LATE_DQ) {
                if (!first) await_ds();
                wgmma_fence();
                multiply_dq(ds_pipe.index ^ 1);  // for the first tile on unset data, its result unused: a branch costs more
            }
            wgmma_wait_group<LATE_DQ ? 2 : 1>();
            warpgroup_fence_operand(dp);
            compute_ds(layout.delta + q_pipe.index * STATISTIC_BYTES);
            wgmma_fence();
            accumulate_dk_dq(q_tile, first);
            if (!LATE_DK) finish_dk<0>(true, q_pipe.index);
            q_pipe.next(), ds_pipe.next();
            first = false;
            next_queries();
        }
        if (skips_last) skip_queries(first), first = false;
        if (PADDED_D == 64 && !first) write_dv(), send(dv_room(), false);  // beside the last dK
        if (LATE_DK) finish_dk<0>(!first, (q_pipe.index + STAGES - 1) % STAGES);
        if (first) return false;
        finish_keys();
        return true;
    }

    // dK or dV of this group's keys to shared memory, in boxes of 64 columns `box_bytes` apart.
    __device__ __forceinline__ void write(const float (&x)[USED_D / 2], float scale, unsigned to, int box_bytes) const {
#pragma unroll
        for (int step = 0; step < USED_D / 16; step++) {
            const float *y = x + 8 * step;
            stmatrix(to + step / 4 * box_bytes + swizzled<64>(warp * 16 + lane % 16, step % 4 * 2 + lane / 16),
                     pack(y[0] * scale, y[1] * scale), pack(y[2] * scale, y[3] * scale),
                     pack(y[4] * scale, y[5] * scale), pack(y[6] * scale, y[7] * scale));
        }
    }
    // Where dV is staged: with PADDED_D = 64, of which V has two buffers, this group's rows of the tile's V, which only its own
    // products read; else its part of dS's buffers, once the other group has read them.
    __device__ __forceinline__ unsigned dv_room() const {
        return PADDED_D == 64 ? layout.v + kv_pipe.index * KV_BYTES + group * 64 * BOX_ROW_BYTES : layout.ds + group * BR * 128;
    }
    // Where dK is: with PADDED_D = 64 this group's part of that buffer of dS that both groups are done with, since they have
    // shared the last dS; else room of its own.
    __device__ __forceinline__ unsigned dk_room() const {
        return PADDED_D == 64 ? layout.ds + ds_pipe.index * DS_BYTES + group * BR * 128
                              : layout.dk + group * 64 * PADDED_D * 2;
    }
    __device__ __forceinline__ void write_dv() const {
        write(dv, DROPOUT ? p.keep_scale : 1.0f, dv_room(), DS_BYTES);
    }
    __device__ __forceinline__ void write_dk() const { write(dk, p.scale, dk_room(), 64 * BOX_ROW_BYTES); }

    // Until all that this group has sent has been read from shared memory, and all its warps are here.
    __device__ __forceinline__ void await_sent() const {
        if (threadIdx.x % 128 == 0) bulk_wait_group_read<0>();
        bar_sync(NAMED_OWN + group, 128);
    }
    // dV from `dv_from`, unless that is 0, and with `sends_dk` dK, as this group's warps have written them, to global memory;
    // issued.
    __device__ __forceinline__ void send(unsigned dv_from, bool sends_dk) const {
        fence_proxy_async();
        await_sent();
        if (threadIdx.x % 128 > 0) return;
        const volatile WorkTile &read_again = *(const volatile WorkTile *)tiles.slot();  // which saves registers
        const int b = read_again.b, dkv_head = read_again.dkv_head, j = tile.j0 + group * 64;
        for (int box = 0; box < BOXES; box++) {
            if (dv_from) tma_store(launch.dv, dv_from + box * DS_BYTES, box * 64, j, dkv_head, b);
            if (sends_dk) tma_store(launch.dk, dk_room() + box * 64 * BOX_ROW_BYTES, box * 64, j, dkv_head, b);
        }
        bulk_commit_group();
    }
    // What of dK and dV has not been sent yet.
    __device__ __forceinline__ void finish(bool has_queries) const {
        if (!has_queries) await_sent(), write_dk();
        if (PADDED_D == 64) {
            send(has_queries ? 0 : dk_room(), true);  // without queries the same zeros
        } else {
            bar_sync(NAMED_ALL, COMPUTING);  // the other group has read dS
            write_dv();
            send(dv_room(), true);
            await_sent();  // later: 0.94 to 1.01x, as it is beside the copies of the next K and V
        }
    }

    __device__ __forceinline__ void run() {
        for (int index = tiles.next(); index >= 0; index = tiles.next()) {
            tile = tiles.read(p, index);
            finish(loop_over_queries());
            tiles.done();
        }
        if (threadIdx.x % 128 == 0) bulk_wait_group_read<0>();
    }
};
