// A warp group of fa3.cu that computes: S = Q K^T, its softmax and O += P V, of 64 queries of each tile.
#pragma once
#include "fa3_tiles.cuh"
#include "hopper_softmax.cuh"

// Of a tile of keys: whether it is the first of this warp group, whether it is its last, and whether it is masked.
#if BLOCK_MASK
#define IS_FIRST(start) (start & FIRST_FLAG)
#define IS_LAST(start) (start & LAST_FLAG)
#define IS_MASKED(start) (start & MASK_FLAG)
#else
#define IS_FIRST(start) (start >= highest)
#define IS_LAST(start) (start == own.lo)
#define IS_MASKED(start) (start < own.full_lo || start >= own.full_hi)
#endif

// O of a warp to a tile in shared memory, 16 rows of 64.
__device__ __forceinline__ void stage_output(unsigned tile, const Output &o, int warp, int lane) {
    const int row = warp * 16 + lane % 16, half = lane / 16;
#pragma unroll
    for (int step = 0; step < USED_D / 16; step++) {
        const float(&x)[4] = o.c[0][2 * step], (&y)[4] = o.c[0][2 * step + 1];
        const int box = step * 16 / BOX_COLUMNS, chunk = step * 16 % BOX_COLUMNS / 8 + half;
        const unsigned to = tile + box * 64 * BOX_ROW_BYTES + swizzled<BOX_COLUMNS>(row, chunk);
        stmatrix(to, pack(x[0], x[1]), pack(x[2], x[3]), pack(y[0], y[1]), pack(y[2], y[3]));
    }
}

// A computing warp group.
struct Consumer {
    const Launch &launch;
    const Params &p;
    const SharedLayout layout;
    const int group, named, warp, lane;  // group: which of the team's; named: of its named barriers
    float scale_log2;      // softmax scale * log2(e); with OPERANDS_8BIT times the scales of the queries and a tile of keys
    float q_descale_log2;  // without that of the keys
    PipelineState<Q_STAGES> q_pipe;
    PipelineState<STAGES> k_pipe, v_pipe;
    WorkTile tile;
    Range own;  // keys that this warp group's queries see
    int q_stage;   // of its Q
    Scores s;
    Output o;
    SoftmaxState<1> softmax;
    float rescale[2];
    bool needs_rescale;
    unsigned rounded_p[BC / WGMMA_K][4];  // P as the left operand of P V

    __device__ __forceinline__ Consumer(const Launch &launch, const SharedLayout &layout, int group, int team)
        : launch(launch), p(launch.p), layout(layout), group(group), named(team * WARP_GROUPS),
          warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32), scale_log2(exponent_scale(launch.p)), q_descale_log2(0.0f),
          tile(launch.p, 0) {}

    __device__ __forceinline__ int first_row() const { return tile.i0 + group * 64 + warp * 16; }

    __device__ __forceinline__ void release(int empty) const {
        if (lane == 0) mbarrier_arrive(layout.barrier(empty));
    }

    __device__ __forceinline__ void take_turn() const {
        if (PINGPONG) bar_sync(NAMED_TURN + named + group, 256);
    }
    __device__ __forceinline__ void give_turn() const {
        if (PINGPONG) bar_arrive(NAMED_TURN + named + (group + 1) % WARP_GROUPS, 256);
    }

    // The next tile, once its Q is there; false if there is none.
    __device__ __forceinline__ bool await_tile() {
        mbarrier_wait(layout.barrier(Q_FULL + q_pipe.index), q_pipe.parity);
        tile = WorkTile(layout.slots + q_pipe.index * WORK_TILE_INTS), q_stage = q_pipe.index;
        q_pipe.next();
        const int i = min_of(tile.i0 + group * 64, p.tq - 1);
#if !BLOCK_MASK
        own = tile.seen(p, i, 64);
        // A group that sees no key computes one tile of keys, all masked, so that l and O are 0.
        own.lo = min_of(own.lo, highest_tile(tile.lo, tile.hi));
#endif
        if (OPERANDS_8BIT && tile.b >= 0) {
            const Fp8Scales scales(p);
            const int batch_head = tile.b * p.heads + tile.h;
            q_descale_log2 = exponent_scale(p) * scales.q[(long long)batch_head * scales.q_blocks + i / FP8_QUERIES];
        }
        return tile.b >= 0;
    }

    // Until the next tile of keys is there; with BLOCK_MASK sets `start`, which is known before without.
    __device__ __forceinline__ void await_k(int &start) const {
        mbarrier_wait(layout.barrier(K_FULL + k_pipe.index), k_pipe.parity);
        if (BLOCK_MASK) start = __shfl_sync(~0u, layout.key_entry(k_pipe.index), 0);
    }

    // The scale of the keys from `start` on; loaded ahead of the products that it is for.
    __device__ __forceinline__ float k_descale(int start) const {
        if (!OPERANDS_8BIT) return 1.0f;
        const Fp8Scales scales(p);
        const long long batch_head = tile.b * p.kv_heads + tile.h / HEADS_PER_KV;
        return scales.k[batch_head * scales.k_blocks + start / BC];
    }

    // Initialises S; called before the wgmma fence, because the int8 product accumulates onto the initial value.
    __device__ __forceinline__ void begin_scores() {
#if INT8
#pragma unroll
        for (int x = 0; x < BC / 2; x++) flat(s)[x] = INT8_MAGIC;
#endif
        warpgroup_fence_operand(flat(s));
    }
    // S = Q K^T, issued.
    __device__ __forceinline__ void multiply_qk() {
        const SmemDescriptor queries(layout.q + (q_stage * WARP_GROUPS + group) * Q_GROUP_BYTES);
        const SmemDescriptor keys(layout.k + k_pipe.index * KV_BYTES);
#pragma unroll
        for (int step = 0; step < USED_D / WGMMA_K; step++)
#if INT8
            wgmma_int8(flat(s), queries.offset(step_bytes<64>(step)), keys.offset(step_bytes<BC>(step)));
#else
            Wgmma<BC>::ss<0, 0>(flat(s), queries.offset(step_bytes<64>(step)), keys.offset(step_bytes<BC>(step)),
                                step > 0);
#endif
        wgmma_commit_group();
    }
    // O += P V, issued.
    __device__ __forceinline__ void multiply_pv() {
#if OPERANDS_8BIT
        const SmemDescriptor values(layout.v + v_pipe.index * KV_BYTES, 16, V_BLOCK);
#else
        const SmemDescriptor values(layout.v + v_pipe.index * KV_BYTES, BC * BOX_ROW_BYTES);
#endif
#pragma unroll
        for (int step = 0; step < BC / WGMMA_K; step++) {
            const int key = step * WGMMA_K, fp8_offset = key / V_BLOCK * V_BLOCK * PADDED_D + key % V_BLOCK;
            const int offset = OPERANDS_8BIT ? fp8_offset : key * BOX_ROW_BYTES;
            Wgmma<USED_D>::rs<!OPERANDS_8BIT>(flat(o), rounded_p[step], values.offset(offset), 1);
        }
        wgmma_commit_group();
    }

    __device__ __forceinline__ void await_v(int valid_keys) {
        mbarrier_wait(layout.barrier(V_FULL + v_pipe.index), v_pipe.parity);
#if LENGTHS
        if (valid_keys < BC) {  // rows of V beyond the last key may hold anything, and 0 times NaN is NaN
            clear_rows<BC>(layout.v + v_pipe.index * KV_BYTES, valid_keys);
            fence_proxy_async();
            bar_sync(NAMED_OWN + named + group, 128);
        }
#endif
    }
    __device__ __forceinline__ void done_with_v() { release(V_EMPTY + v_pipe.index), v_pipe.next(); }

    // The scores of the keys from `start` on, which are there, become P.
    __device__ __forceinline__ void online_softmax(int start, float k_scale) {
        warpgroup_fence_operand(flat(s));
        if (OPERANDS_8BIT) scale_log2 = q_descale_log2 * k_scale;
        release(K_EMPTY + k_pipe.index), k_pipe.next();
        if (!O_OVER_Q && IS_LAST(start)) release(Q_EMPTY + q_stage);
        const bool needs_mask = IS_MASKED(start);
        const int i_first = first_row();
        start = START_OF(start);
#if DOCUMENT_IDS
        const DocumentBounds &documents = tile.documents;
#else
        const DocumentBounds documents = documents_of(p, tile.b, 0);
#endif
        const bool by_ids = needs_mask && !documents.single_document;
        if (SCALE_BEFORE_MAX || by_ids) scale_and_mask(p, s, i_first, start, tile.keys, tile.b, tile.h, by_ids);
        if (needs_mask && !by_ids) apply_interval_mask(p, s, i_first, start, tile.keys, documents);
        rescale[0] = rescale[1] = 1.0f;
        needs_rescale =
            ::online_softmax(s, softmax, scale_log2, [&](int, int half, float factor) { rescale[half] = factor; });
        if (DROPOUT) Dropout<1>(p, tile.b, tile.h, i_first).drop(p, s, start);
    }

    // The first tile of keys: its scores, and nothing that overlaps with them.
    __device__ __forceinline__ void begin(int &start) {
        softmax.clear();
        o.clear();
        const float k_scale = k_descale(start);
        await_k(start);
        take_turn();
        if (INT8) begin_scores();
        wgmma_fence();
        multiply_qk();
        give_turn();
        wgmma_wait_group<0>();
        online_softmax(start, k_scale);
    }

    // Skips a tile of keys that only other warp groups of the team see. Every group takes one turn for each tile of
    // keys of the team, so there is exactly one token. The group that holds it waits at most for V, whose buffers the
    // other groups release without needing a turn.
    __device__ __forceinline__ void skip() {
        take_turn();
        give_turn();
        mbarrier_wait(layout.barrier(K_FULL + k_pipe.index), k_pipe.parity);
        release(K_EMPTY + k_pipe.index), k_pipe.next();
        mbarrier_wait(layout.barrier(V_FULL + v_pipe.index), v_pipe.parity);
        done_with_v();
    }

    // Stores O, then lse: if lse were stored before the proxy fence, the fence would wait for that store.
    __device__ __forceinline__ void finish() {
        const unsigned over_q = layout.q + (q_stage * WARP_GROUPS + group) * Q_GROUP_BYTES;
        const unsigned to = O_OVER_Q ? over_q : layout.o + group * O_GROUP_BYTES;
        const bool storing = warp == 0 && lane == 0;
        const int barrier = NAMED_OWN + named + group;
        float inverse_l[2], output_scale = p.keep_scale;
        if (OPERANDS_8BIT) output_scale *= Fp8Scales(p).v[tile.b * p.kv_heads + tile.h / HEADS_PER_KV];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float &l = softmax.l[0][half];
            l += __shfl_xor_sync(~0u, l, 1);
            l += __shfl_xor_sync(~0u, l, 2);
            inverse_l[half] = l == 0.0f ? 0.0f : output_scale / l;
        }
        rescale_output(o, inverse_l);
        if (storing) bulk_wait_group_read<0>();  // what was there has left
        bar_sync(barrier, 128);
        stage_output(to, o, warp, lane);
        fence_proxy_async();
        bar_sync(barrier, 128);
        if (storing) {
            store_tile<64>(launch.out, to, tile.i0 + group * 64, tile.h, tile.b);
            bulk_commit_group();
            if (O_OVER_Q) bulk_wait_group_read<0>();
        }
        if (O_OVER_Q) __syncwarp(), release(Q_EMPTY + q_stage);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = first_row() + half * 8 + lane / 4;
            const float l = softmax.l[0][half], lse = (softmax.shift[0][half] + __log2f(l)) * LN2;
            if (lane % 4 == 0 && i < p.tq)
                p.lse[(long long)(tile.b * p.heads + tile.h) * p.tq + i] = l == 0.0f ? -INFINITE : lse;
        }
    }

    __device__ __forceinline__ void run() {
        if (PINGPONG && group == WARP_GROUPS - 1) give_turn();
        // With `while (await_tile())` ptxas does not know the loop to be uniform: it moves each descriptor from registers
        // (R2UR), and D = 64 has 0.97 to 1.00x of the speed, a call with a block mask 0.93 to 0.99x.
        for (bool more = await_tile(); more; more = await_tile()) {
            // A group whose queries are all beyond the last computes nothing. (Two groups do not check this: it would
            // be one of them at most, and only where T % 128 is 1 to 64, and the check spilled registers of the copying
            // warp.)
            const bool beyond = WARP_GROUPS > 2 && tile.i0 + group * 64 >= p.tq;
#if BLOCK_MASK
            int start = 0;
#else
            const int highest = beyond ? tile.lo - BC : highest_tile(own.lo, own.hi);
            int start = highest_tile(tile.lo, tile.hi);
            for (; start > highest; start -= BC) skip();
#endif
            if (beyond) {
                release(Q_EMPTY + q_stage);
                continue;
            }
            begin(start);
            // The wait for P V is at the start of the loop body. If it were at the end, the compiler would move the
            // exponentials, whose asm is not volatile, behind it, and P V would overlap with nothing.
            while (true) {
                wgmma_wait_group<0>();
                warpgroup_fence_operand(flat(o));
                if (!IS_FIRST(start)) done_with_v();
                round_p(rounded_p, s);
                if (needs_rescale) rescale_output(o, rescale);
                if (IS_LAST(start)) break;
                const int valid_keys = tile.keys - START_OF(start);
                start -= BC;
                const float k_scale = k_descale(start);
                await_k(start);
                take_turn();
                begin_scores(), warpgroup_fence_operand(flat(o));
                wgmma_fence();
                multiply_qk();
                await_v(valid_keys);
                wgmma_fence();
                multiply_pv();
                give_turn();
                wgmma_wait_group<INTRA_GROUP_OVERLAP>();
                online_softmax(start, k_scale);
            }
            await_v(tile.keys - START_OF(start));
            warpgroup_fence_operand(flat(o));
            wgmma_fence();
            multiply_pv();
            wgmma_wait_group<0>();
            warpgroup_fence_operand(flat(o));
            done_with_v();
#if !BLOCK_MASK
            for (start -= BC; start >= tile.lo; start -= BC) skip();
#endif
            finish();
        }
        if (warp == 0 && lane == 0) bulk_wait_group_read<0>();
    }
};
