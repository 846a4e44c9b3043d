// How a warp group of fa3_backward.cu computes P from S and dS from dP in registers, with the options of a call.
// Indices and other values that a tile needs are recomputed for each tile: when the loop kept them in counters, each
// option spilled 36 to 1,392 bytes per thread.
#pragma once
#include "fa3_backward_tiles.cuh"

// S^T of a thread: keys g and g + 8 of its warp's 16, queries 8 n + 2 c and the next: [4 n + 2 half + e]. (S in
// fa3_backward_three.cuh, where keys and queries change places.)
typedef float Scores[SCORE_COLUMNS / 2];
typedef unsigned Rounded[SCORE_COLUMNS / 16][4];

__device__ __forceinline__ void round_step(unsigned (&to)[4], const float *s) {
#pragma unroll
    for (int e = 0; e < 4; e++) to[e] = pack(s[2 * e], s[2 * e + 1]);
}

// Evaluates `predicate` for each query of a thread. It gets the query's offset from the thread's first query,
// and returns a bit for each of the thread's two keys; the bit for query 8 n + 2 c + e becomes bit 2 n + e of
// bits[key].
// Not fully unrolled: with all document ids or dropout keys in registers at once, hundreds of bytes spill.
template <typename Predicate>
__device__ __forceinline__ void pack_bits(unsigned (&bits)[2], const Predicate &predicate) {
    bits[0] = bits[1] = 0;
#pragma unroll 2
    for (int x = 0; x < SCORE_COLUMNS / 4; x++) {
        const unsigned both = predicate(x / 2 * 8 + x % 2);
        bits[0] |= (both & 1) << x, bits[1] |= (both >> 1) << x;
    }
}

// A warp group's part of a tile: 64 keys, SCORE_COLUMNS queries.
struct ScoreGroup {
    const Params &p;
    const int group, warp, lane;
    WorkTile tile;
    // The tile's first query (with BLOCK_MASK its entry: START_OF(i0) is the query, the rest are flags), and its head;
    // tiles of queries to come, this one included.
    int i0, h, remaining;
    Scores s, dp;
    Rounded p16, ds16;    // P and dS in 16 bits, as left operands
    unsigned dropped[2];  // see `pack_bits`
    unsigned dropout_key;   // the head's key of dropout
    float slope;          // of ALiBi, in units of log2

    __device__ __forceinline__ ScoreGroup(const Params &p, int group)
        : p(p), group(group), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32), tile(p, 0) {}

    // What depends on the head.
    __device__ __forceinline__ void begin_head(int h) {
        if (DROPOUT) dropout_key = dropout_head_key(p, tile.b, h);
        if (ALIBI) slope = p.alibi_slopes[h] * LOG2E;
    }
    // The tiles of queries, one after the other, of all query heads of the key head: `remaining` of them. With
    // BLOCK_MASK each is published with its Q, and `remaining` says whether another follows.
    __device__ __forceinline__ void begin_queries() {
#if BLOCK_MASK
        remaining = tile.has_queries;
#else
        i0 = tile.range.lo, h = tile.dkv_head * HEADS_PER_KV;
        remaining = ceil_div(tile.range.hi - i0, BR) * HEADS_PER_KV;
        begin_head(h);
#endif
    }
    __device__ __forceinline__ void read_query_entry(const SharedLayout &layout, int stage) {
#if BLOCK_MASK
        volatile int *slot = layout.stage_slots(stage);
        i0 = __shfl_sync(~0u, slot[0], 0);
        if (DROPOUT || ALIBI) begin_head(__shfl_sync(~0u, slot[1], 0));
#endif
    }
    __device__ __forceinline__ void next_queries() {
#if BLOCK_MASK
        remaining = !(i0 & LAST_FLAG);
#else
        remaining--, i0 += BR;
        if (i0 >= tile.range.hi) {
            i0 = tile.range.lo;  // of the next query head
            if (HEADS_PER_KV > 1 && remaining > 0) begin_head(++h);
        }
#endif
    }
    __device__ __forceinline__ bool needs_masking() const {
#if BLOCK_MASK
        return i0 & MASK_FLAG;
#else
        return i0 < tile.range.full_lo || i0 + BR > tile.range.full_hi;
#endif
    }

    // A thread's first key, and its first query.
    __device__ __forceinline__ int first_key() const {
        return tile.j0 + (WIDE ? 0 : group * 64) + warp * 16 + lane / 4;
    }
    __device__ __forceinline__ int first_query() const {
        return START_OF(i0) + query_offset() + threadIdx.x % 4 * 2;
    }
    __device__ __forceinline__ int query_offset() const { return WIDE ? group * SCORE_COLUMNS : 0; }

    // 0 in the place of P where it is not seen.
    __device__ __forceinline__ void apply_mask() {
        const int key = first_key(), i_first = first_query(), keys = tile.keys;
        unsigned same[2];
#if DOCUMENT_IDS
        const DocumentBounds documents = documents_of(p, tile.b, tile.j0 / BC);
        same[0] = same[1] = ~0u;
        if (!documents.single_document) {  // else its bounds say all
            const int ids[2] = {id_of_key(p, tile.b, key), id_of_key(p, tile.b, key + 8)};
            pack_bits(same, [&](int place) {
                const int id = id_of_query(p, tile.b, i_first + place);
                return (id == ids[0] ? 1u : 0u) | (id == ids[1] ? 2u : 0u);
            });
        }
#endif
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int j = key + half * 8, causal_offset = keys - p.tq;
            int begin = j >= keys   ? SCORE_COLUMNS
                        : HAS_RIGHT ? j - causal_offset - p.window_right - i_first
                                    : -i_first;
            int end = HAS_LEFT ? j - causal_offset + p.window_left + 1 - i_first : SCORE_COLUMNS;
#if DOCUMENT_IDS
            begin = max_of(begin, documents.first - i_first), end = min_of(end, documents.end - i_first);
#endif
#pragma unroll
            for (int n = 0; n < SCORE_COLUMNS / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const bool other = DOCUMENT_IDS && !(same[half] >> (2 * n + e) & 1);
                    const bool beyond = (HAS_LEFT || DOCUMENT_IDS) && n * 8 + e >= end;
                    if (n * 8 + e < begin || beyond || other) clear(4 * n + 2 * half + e, SOFTCAP);
                }
        }
    }
    // Sets element x of P to 0: of the 16-bit P if `rounded`, of the fp32 P if `exact`.
    __device__ __forceinline__ void clear(int x, bool rounded, bool exact = true) {
        if (rounded) p16[x / 8][x % 8 / 2] &= x % 2 ? 0x0000ffffu : 0xffff0000u;
        if (exact) s[x] = 0.0f;
    }

    // Computes P from S, in fp32 and rounded to 16 bits. With a softcap, P is rounded before it is masked, and the fp32
    // P is multiplied by the derivative of the softcap, which only dS needs.
    __device__ __forceinline__ void compute_p(unsigned lse_log2) {
        const unsigned rows = lse_log2 + query_offset() * 4 + lane % 4 * 8;
        const float scale_log2 = (SOFTCAP ? p.softcap : p.scale) * LOG2E;
        const float softcap_scale = SOFTCAP ? p.scale / p.softcap : 0.0f;
        const float distance = ALIBI ? (float)(first_key() - (tile.keys - p.tq) - first_query()) : 0.0f;
#pragma unroll
        for (int n = 0; n < SCORE_COLUMNS / 8; n++) {
            const float2 shift = load_pair(rows + n * 32);
#if SOFTCAP
            float factor[4];
#endif
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float &x = s[4 * n + e];
#if SOFTCAP
                x = tanh_of(x, softcap_scale), factor[e] = 1.0f - x * x;
#endif
                float exponent = x * scale_log2 - (e % 2 ? shift.y : shift.x);
                if (ALIBI) exponent -= slope * fabsf(distance + (float)(e / 2 * 8 - n * 8 - e % 2));
                x = exp2_of(exponent);
            }
#if SOFTCAP
#pragma unroll
            for (int e = 0; e < 4; e += 2) p16[n / 2][n % 2 * 2 + e / 2] = pack(s[4 * n + e], s[4 * n + e + 1]);
#pragma unroll
            for (int e = 0; e < 4; e++) s[4 * n + e] *= factor[e];
#endif
        }
        if (needs_masking()) apply_mask();
#pragma unroll
        for (int step = 0; step < SCORE_COLUMNS / 16 && !SOFTCAP; step++) round_step(p16[step], s + 8 * step);
#if DROPOUT
        const int key = first_key(), i_first = first_query();
        pack_bits(dropped, [&](int place) {
            const unsigned row = hash_combine(dropout_key, (unsigned)(i_first + place));
            return (dropout_keeps(row, key, p.dropout_threshold) ? 0u : 1u) |
                   (dropout_keeps(row, key + 8, p.dropout_threshold) ? 0u : 2u);
        });
#pragma unroll
        for (int x = 0; x < SCORE_COLUMNS / 2; x++)
            if (is_dropped(x)) clear(x, true, false);
#endif
    }
    __device__ __forceinline__ bool is_dropped(int x) const { return dropped[x / 2 % 2] >> (x / 4 * 2 + x % 2) & 1; }

    // dP becomes dS, which is rounded too.
    __device__ __forceinline__ void compute_ds(unsigned deltas) {
        const unsigned rows = deltas + query_offset() * 4 + lane % 4 * 8;
#pragma unroll
        for (int step = 0; step < SCORE_COLUMNS / 16; step++) {
            const float2 delta[2] = {load_pair(rows + step * 64), load_pair(rows + step * 64 + 32)};
#pragma unroll
            for (int e = 0; e < 8; e++) {
                float &gradient = dp[8 * step + e];
                const float prob = LATE_DQ ? unpack(p16[step][e / 2], e % 2) : s[8 * step + e];
                if (DROPOUT) gradient = is_dropped(8 * step + e) ? 0.0f : gradient * p.keep_scale;
                gradient = prob * (gradient - (e % 2 ? delta[e / 4].y : delta[e / 4].x));
            }
            round_step(ds16[step], dp + 8 * step);
        }
    }

    // P^T or dS^T to shared memory as P or dS: a row a query, 64 keys. `fence_warp` is to follow, and an arrival.
    __device__ __forceinline__ void share(const Rounded &x, unsigned to) const {
        const int row = lane / 16 * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
#pragma unroll
        for (int step = 0; step < SCORE_COLUMNS / 16; step++)
            stmatrix_trans(to + swizzled<64>(step * 16 + row, chunk), x[step]);
    }
    // This group's chunk of dQ, as the registers lie, to shared memory. `fence_warp` is to follow, and an arrival at
    // DQ_FULL.
    __device__ __forceinline__ void stage_dq(const SharedLayout &layout, PipelineState<1> &dq_pipe,
                                             const float *chunk) const {
        mbarrier_wait(layout.barrier(DQ_EMPTY + group), dq_pipe.parity ^ 1);
        dq_pipe.next();
        const unsigned to = layout.dq + group * DQ_CHUNK_BYTES + threadIdx.x % 128 * 16;
#pragma unroll
        for (int n = 0; n < DQ_CHUNK_BYTES / 2048; n++) store_four(to + n * 2048, chunk + 4 * n);
    }
    // What the warp has written to shared memory, before products and copies that read it.
    __device__ __forceinline__ void fence_warp() const { fence_proxy_async(), __syncwarp(); }
    // A chunk of dQ for the warp that adds it.
    __device__ __forceinline__ void hand_over_dq(const SharedLayout &layout, PipelineState<1> &dq_pipe,
                                                 const float *chunk) const {
        stage_dq(layout, dq_pipe, chunk);
        fence_warp();
        if (lane == 0) mbarrier_arrive(layout.barrier(DQ_FULL + group));
    }
    // Until the tile's K and V are there.
    __device__ __forceinline__ void await_keys(const SharedLayout &layout, const PipelineState<KV_STAGES> &kv_pipe) const {
        mbarrier_wait(layout.barrier(K_FULL + kv_pipe.index), kv_pipe.parity);
        mbarrier_wait(layout.barrier(V_FULL + kv_pipe.index), kv_pipe.parity);
#if LENGTHS
        if (tile.valid_keys() < BC) {  // beyond the last key they may hold anything, and 0 times NaN is NaN
            clear_rows<BC>(layout.k + kv_pipe.index * KV_BYTES, tile.valid_keys());
            clear_rows<BC>(layout.v + kv_pipe.index * KV_BYTES, tile.valid_keys());
            fence_proxy_async();
            bar_sync(NAMED_ALL, COMPUTING);
        }
#endif
    }
};
