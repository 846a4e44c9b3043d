// A warp group of fa3_backward.cu that computes: dK and dV of 64 keys, and its part of dQ.
#pragma once
#include "fa3_backward_tiles.cuh"

// S^T of a thread: keys g and g + 8 of its warp's 16, queries 8 n + 2 c and the next: [4 n + 2 half + e].
typedef float Scores[BR / 2];
typedef unsigned Rounded[BR / 16][4];

__device__ __forceinline__ void round_step(unsigned (&to)[4], const float *s) {
#pragma unroll
    for (int e = 0; e < 4; e++) to[e] = pack(s[2 * e], s[2 * e + 1]);
}

// 0 in the place of what is not seen.
__device__ __forceinline__ void apply_mask(const Params &p, Scores &s, int key, int i_first, int keys) {
    const int column = i_first + threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int j = key + half * 8, diagonal = keys - p.tq;
        const int begin = j >= keys ? BR : HAS_RIGHT ? j - diagonal - p.window_right - column : -column;
        const int end = HAS_LEFT ? j - diagonal + p.window_left + 1 - column : BR;
#pragma unroll
        for (int n = 0; n < BR / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (n * 8 + e < begin || (HAS_LEFT && n * 8 + e >= end)) s[n * 4 + half * 2 + e] = 0.0f;
    }
}

// A computing warp group.
struct Consumer {
    const Launch &launch;
    const Params &p;
    const Room &room;
    const int group, warp, lane;
    Tiles tiles;
    Tile tile;
    Ring<STAGES> at;
    Ring<2> ds;
    Ring<1> kv, dq_slot;
    float dk[PAD_D / 2], dv[PAD_D / 2], dq[32];
    Scores s, dp;
    Rounded weights, gradients;

    __device__ __forceinline__ Consumer(const Launch &launch, const Room &room, int group)
        : launch(launch), p(launch.p), room(room), group(group), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32),
          tiles(room), tile(launch.p, 0) {}

    // S^T = K Q^T, or dP^T = V dO^T, asked for.
    __device__ __forceinline__ void multiply_rows(Scores &to, unsigned keys, unsigned queries) const {
        const Matrix a(keys + group * 64 * BLOCK_ROW), b(queries);
#pragma unroll
        for (int step = 0; step < D_STEPS; step++)
            Wgmma<BR>::ss<0, 0>(to, a.at(step_bytes<BC>(step)), b.at(step_bytes<BR>(step)), step > 0);
        wgmma_commit_group();
    }
    // dV += P^T dO, or dK += dS^T Q, asked for.
    __device__ __forceinline__ void multiply_columns(float (&to)[PAD_D / 2], const Rounded &a, unsigned queries) const {
        const Matrix b(queries, BR * BLOCK_ROW);
#pragma unroll
        for (int step = 0; step < BR / 16; step++)
            Wgmma<PAD_D>::rs<1>(to, a[step], b.at(step * 16 * BLOCK_ROW), 1);
        wgmma_commit_group();
    }
    // dQ = dS K, asked for: 64 queries, or 64 columns.
    __device__ __forceinline__ void multiply_dq(int slot) {
        const Matrix a(room.ds + slot * DS_BYTES + (PAD_D == 64 ? group * 64 * 128 : 0));
        const Matrix b(room.k + (PAD_D == 64 ? 0 : group * BC * BLOCK_ROW));
#pragma unroll
        for (int step = 0; step < BC / 16; step++)
            Wgmma<64>::ss<0, 1>(dq, a.at(step_bytes<BR>(step)), b.at(step * 16 * BLOCK_ROW), step > 0);
        wgmma_commit_group();
    }

    // dS^T to shared memory as dS: a block of 64 keys for each warp group, a row a query. Two tiles of dS are enough:
    // who shares one has seen that the other group shared the tile before, and was done with the dQ before that.
    __device__ __forceinline__ void share() const {
        const unsigned to = room.ds + ds.at * DS_BYTES + group * BR * 128;
        const int row = lane / 16 * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
#pragma unroll
        for (int step = 0; step < BR / 16; step++)
            store_transposed(to + swizzled<64>(step * 16 + row, chunk), gradients[step]);
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(room.barrier(DS_FULL + ds.at));
    }
    // Until both warp groups have shared the tile, with LATE_DQ the one before.
    __device__ __forceinline__ void await_ds() const {
        const int slot = LATE_DQ ? ds.at ^ 1 : ds.at;
        mbarrier_wait(room.barrier(DS_FULL + slot), LATE_DQ && slot ? ds.parity ^ 1 : ds.parity);
    }
    // dQ, as the registers lie, for the warp that adds it.
    __device__ __forceinline__ void leave_dq() {
        mbarrier_wait(room.barrier(DQ_EMPTY + group), dq_slot.parity ^ 1);
        dq_slot.next();
        const unsigned to = room.dq + group * PART_BYTES + threadIdx.x % 128 * 16;
#pragma unroll
        for (int n = 0; n < 8; n++) store_four(to + n * 2048, &dq[4 * n]);
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(room.barrier(DQ_FULL + group));
    }

    // S becomes P, which is rounded too.
    __device__ __forceinline__ void weigh(int i0) {
        const unsigned rows = room.lse2 + at.at * ROWS_BYTES + lane % 4 * 8;
        const float c = exponent_scale(p);
#pragma unroll
        for (int n = 0; n < BR / 8; n++) {
            const float2 lse2 = load_pair(rows + n * 32);
#pragma unroll
            for (int e = 0; e < 4; e++) s[4 * n + e] = exp2_of(s[4 * n + e] * c - (e % 2 ? lse2.y : lse2.x));
        }
        if (tile.real < BC || i0 < tile.range.full_lo || i0 + BR > tile.range.full_hi)
            apply_mask(p, s, tile.j0 + group * 64 + warp * 16 + lane / 4, i0, tile.keys);
#pragma unroll
        for (int step = 0; step < BR / 16; step++) round_step(weights[step], s + 8 * step);
    }
    // dP becomes dS, which is rounded too.
    __device__ __forceinline__ void differentiate() {
        const unsigned rows = room.delta + at.at * ROWS_BYTES + lane % 4 * 8;
#pragma unroll
        for (int step = 0; step < BR / 16; step++) {
            const float2 delta[2] = {load_pair(rows + step * 64), load_pair(rows + step * 64 + 32)};
#pragma unroll
            for (int e = 0; e < 8; e++) {
                float &gradient = dp[8 * step + e];
                const float weight = LATE_DQ ? unpack(weights[step][e / 2], e % 2) : s[8 * step + e];
                gradient = weight * (gradient - (e % 2 ? delta[e / 4].y : delta[e / 4].x));
            }
            round_step(gradients[step], dp + 8 * step);
        }
    }

    // dK += dS^T Q, and dS for dQ, which with LATE_DQ is the last tile's and on its way.
    __device__ __forceinline__ void add_ds(unsigned q_tile, bool first) {
        if (LATE_DQ) {
            multiply_columns(dk, gradients, q_tile);
            wgmma_wait_group<1>();
            pin(dq), pin(dv);
            share();
            if (!first) leave_dq();
        } else {
            share();
            await_ds();
            wgmma_fence();
            multiply_dq(ds.at);
            multiply_columns(dk, gradients, q_tile);
            wgmma_wait_group<1>();
            pin(dq), pin(dv);
            leave_dq();
        }
    }

    // All products of the tile's keys with the queries that see them.
    __device__ __forceinline__ void walk() {
        int i0 = tile.range.lo, left = ceil_div(tile.range.hi - i0, BR) * GROUP;
        bool first = true;
#pragma unroll
        for (int x = 0; x < PAD_D / 2; x++) dk[x] = dv[x] = 0.0f;
        // (A return here where no query is, and the compiler keeps dK and dV in local memory.)
        if (left > 0) {
            mbarrier_wait(room.barrier(K_FULL), kv.parity), mbarrier_wait(room.barrier(V_FULL), kv.parity);
            kv.next();
        }
        for (; left > 0; left--) {
            const unsigned q_tile = room.q + at.at * Q_BYTES, do_tile = room.dout + at.at * Q_BYTES;
            mbarrier_wait(room.barrier(Q_FULL + at.at), at.parity);
            wgmma_fence();
            multiply_rows(s, room.k, q_tile);
            mbarrier_wait(room.barrier(DO_FULL + at.at), at.parity);
            wgmma_fence();
            multiply_rows(dp, room.v, do_tile);
            wgmma_wait_group<1>();
            pin(s);
            weigh(i0);
            wgmma_fence();
            multiply_columns(dv, weights, do_tile);
            if (LATE_DQ) {
                if (!first) await_ds();
                wgmma_fence();
                multiply_dq(ds.at ^ 1);  // at first of whatever is there, and nobody looks at it: no branch is free
            }
            wgmma_wait_group<LATE_DQ ? 2 : 1>();
            pin(dp);
            differentiate();
            wgmma_fence();
            add_ds(q_tile, first);
            wgmma_wait_group<0>();
            pin(dk), pin(dv);
            if (lane == 0) mbarrier_arrive(room.barrier(Q_EMPTY + at.at));
            at.next(), ds.next();
            first = false;
            i0 += BR;
            if (i0 >= tile.range.hi) i0 = tile.range.lo;  // of the group's next head
        }
        if (first) return;
        if (LATE_DQ) {
            await_ds();
            wgmma_fence();
            multiply_dq(ds.at ^ 1);
            wgmma_wait_group<0>();
            pin(dq);
            leave_dq();
        }
        if (lane == 0) mbarrier_arrive(room.barrier(KV_EMPTY));
    }

    // A block of 64 columns of dK or dV, of this group's keys, to `to` in shared memory.
    __device__ __forceinline__ void stage(const float *x, float scale, unsigned to) const {
#pragma unroll
        for (int step = 0; step < 4; step++) {
            const float *y = x + 8 * step;
            store_matrices(to + swizzled<64>(warp * 16 + lane % 16, 2 * step + lane / 16),
                           pack(y[0] * scale, y[1] * scale), pack(y[2] * scale, y[3] * scale),
                           pack(y[4] * scale, y[5] * scale), pack(y[6] * scale, y[7] * scale));
        }
    }
    // dV goes out over this group's part of dS, and dK behind it or over its part of dQ, so that K and V of the next tile
    // are on their way.
    __device__ __forceinline__ void finish() const {
        const unsigned of_ds = room.ds + group * BR * 128;
        const unsigned of_dk = PAD_D == 64 ? of_ds + DS_BYTES : room.dq + group * PART_BYTES;
        bar_sync(BARRIER_ALL, 256);  // the other group has read dS
        mbarrier_wait(room.barrier(DQ_EMPTY + group), dq_slot.parity ^ 1);
#pragma unroll
        for (int block = 0; block < BLOCKS_D; block++) {
            stage(dv + 32 * block, DROPOUT ? p.keep_scale : 1.0f, of_ds + block * DS_BYTES);
            stage(dk + 32 * block, p.scale, of_dk + block * 64 * BLOCK_ROW);
        }
        fence_proxy_async();
        bar_sync(BARRIER_OWN + group, 128);
        if (threadIdx.x % 128 == 0) {
            for (int block = 0; block < BLOCKS_D; block++) {
                const int d = block * 64, j = tile.j0 + group * 64;
                tma_store(launch.dv, of_ds + block * DS_BYTES, d, j, tile.kv_head, tile.b);
                tma_store(launch.dk, of_dk + block * 64 * BLOCK_ROW, d, j, tile.kv_head, tile.b);
            }
            bulk_commit_group();
            bulk_wait_group_read<0>();
        }
        bar_sync(BARRIER_OWN + group, 128);
    }

    __device__ __forceinline__ void run() {
        for (int index = tiles.next(); index >= 0; index = tiles.next()) {
            tile = Tile(p, index);
            walk();
            finish();
        }
    }
};
