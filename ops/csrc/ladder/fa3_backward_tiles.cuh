// What the warp groups of fa3_backward.cu share: the launch, its mbarriers, where tiles lie in shared memory, and the keys
// of a block.
#pragma once
#include "hopper.cuh"
#include "kept_tiles.cuh"
#include "scores.cuh"

#define WIDE (PADDED_D > 128)  // the warp groups share a block's keys (fa3_backward_wide.cuh), else each has 64
#define BC (WARP_GROUPS == 3 ? 96 : WIDE ? 64 : 128)
#define SCORE_COLUMNS (WIDE ? BR / 2 : BR)  // of a warp group's scores (in fa3_backward_three.cuh as many keys)
#define COMPUTING (128 * WARP_GROUPS)  // threads; 128 more copy
#define THREADS (COMPUTING + 128)
#define Q_BYTES (BR * PADDED_D * 2)
#define KV_BYTES (BC * PADDED_D * 2)
#define KV_STAGES (PADDED_D == 64 ? 2 : 1)  // as shared memory allows
#define DK_BYTES (PADDED_D == 128 ? KV_BYTES : 0)  // of dK, where it has room of its own
#define DS_BYTES (BR * BC * 2)
#define DS_STAGES (WARP_GROUPS == 3 ? 1 : 2)  // tiles of dS, and with WIDE of P
#define STATISTIC_BYTES (BR * 4)          // of lse_log2 or delta
// V of a warp group's 64 keys as a left operand from registers: D = 96 1.00 to 1.04x (K: 0.98 to 1.02x). At other D
// registers do not suffice, or 1% is gained (D <= 32).
#define V_IN_REGISTERS (USED_D > 64 && USED_D <= 96)
#define DQ_SPLIT_BY_ROWS (BR == 128)  // a warp group has its share of dQ's rows, or of its columns
#define DQ_COLUMNS (DQ_SPLIT_BY_ROWS ? PADDED_D : PADDED_D / WARP_GROUPS)
#define DQ_GROUP_CHUNKS (WIDE ? 2 : 1)  // in which a warp group writes dQ: shared memory has no space for all of it
#define DQ_CHUNK_COLUMNS (DQ_COLUMNS / DQ_GROUP_CHUNKS)
#define DQ_CHUNK_BYTES (BR * PADDED_D * 4 / WARP_GROUPS / DQ_GROUP_CHUNKS)  // of a warp group's chunk
#define DQ_TILE_CHUNKS (WARP_GROUPS * DQ_GROUP_CHUNKS)  // of a tile of dQ
#define NAMED_ALL 1  // the named barriers of all computing warp groups, of each by itself,
#define NAMED_OWN 2
#define NAMED_BEGIN 4  // and where the second awaits the first

static_assert(!STORES_FIRST_DQ || DQ_GROUP_CHUNKS == 1, "add_dq knows the state of one part ahead");
static_assert(BR == 64 || BR == 128, "a warp group has 64 rows or columns of dQ");
static_assert(LATE_DQ || !LATE_DK, "dS is computed from the rounded P");

struct __align__(64) Launch {
    TensorMap q, k, v, dout, dk, dv;
    Params p;
    int *tile_counter;  // a counter of the tiles beyond each block's first; 0 at the launch
    int *dq_states;  // of each part of dQ's accumulator, with STORES_FIRST_DQ; UNTOUCHED at the launch
};

// With STORES_FIRST_DQ the accumulator is not cleared: the first of dQ that comes to a part of it is stored.
enum { UNTOUCHED, CLAIMED, STORED };

// The indices of the mbarriers. The copying thread arrives when a buffer that it loads is full, and one thread of the
// warp that adds dQ when dQ's buffer is empty. For the others, which warps fill (dQ, dS, P) or read, each warp arrives.
enum { TILE_FULL, K_FULL = TILE_FULL + 2, V_FULL = K_FULL + KV_STAGES, Q_FULL = V_FULL + KV_STAGES,
       DO_FULL = Q_FULL + STAGES, DQ_EMPTY = DO_FULL + DO_STAGES, DQ_FULL = DQ_EMPTY + WARP_GROUPS,
       DS_FULL = DQ_FULL + WARP_GROUPS, P_FULL = DS_FULL + DS_STAGES, KV_EMPTY = P_FULL + WIDE * DS_STAGES,
       Q_EMPTY = KV_EMPTY + KV_STAGES, DO_EMPTY = Q_EMPTY + STAGES,
       P_EMPTY = DO_EMPTY + WIDE * DO_STAGES, DS_EMPTY, TILE_EMPTY, BARRIERS = TILE_EMPTY + 2 };
__device__ __forceinline__ int arrivals(int place) {
    return place < DQ_FULL ? 1 : place < DS_FULL ? 4 : place < TILE_EMPTY ? 4 * WARP_GROUPS : 5 * WARP_GROUPS;
}

#define WORK_TILE_INTS 10

// Keys of a head of dK and dV (with DKV_EXPANSION a query head's), and the queries that see them. (With BLOCK_MASK lists
// have these, not the range.)
struct WorkTile {
    int index;  // negative: there is none
    int has_queries;  // known with BLOCK_MASK
    int b, dkv_head, j0, keys;
    Range range;  // its part without masking is empty if the tile has keys beyond the last
    // The index-th in the grid's order, which takes divisions: the producer works it out and publishes it.
    __device__ __forceinline__ WorkTile(const Params &p, int index) : index(index), has_queries(1) {
        int tile, batch_head;
        scheduled_tile(p, index, p.batch * p.kv_heads, false, tile, batch_head);
        b = batch_head / p.kv_heads, dkv_head = batch_head % p.kv_heads, j0 = tile * BC, keys = keys_of(p, b);
        range.lo = range.full_lo = range.full_hi = range.hi = 0;
        if (valid_keys() > 0) range = query_range(p, j0, valid_keys(), keys - p.tq, BR, documents_of(p, b, tile));
        if (valid_keys() < BC) range.full_hi = range.lo;
    }
    __device__ __forceinline__ int valid_keys() const { return min_of(BC, keys - j0); }
    // As it was published.
    __device__ __forceinline__ WorkTile(const volatile int *slot) {
        int *fields = (int *)this;
#pragma unroll
        for (int x = 0; x < WORK_TILE_INTS; x++) fields[x] = __shfl_sync(~0u, slot[x], 0);
    }
    __device__ __forceinline__ void publish(volatile int *slot) const {
        const int *fields = (const int *)this;
#pragma unroll
        for (int x = 0; x < WORK_TILE_INTS; x++) slot[x] = fields[x];
    }
};
static_assert(sizeof(WorkTile) == 4 * WORK_TILE_INTS, "all of it is published");
#if BLOCK_MASK
#define LOOP_DRAWS(i0, g) (kept.next < 0)  // how far the list goes is not known before
#else
#define LOOP_DRAWS(i0, g) (g == HEADS_PER_KV - 1 && i0 == draws_at(range))
#endif
// At which queries of its last head a block asks for its next tile.
__device__ __forceinline__ int draws_at(const Range &range) {
    return max_of(range.lo, range.lo + ((range.hi - 1 - range.lo) / BR - DRAWN_AHEAD) * BR);
}
__device__ __forceinline__ int total_tiles(const Params &p) { return p.n_tiles * p.batch * p.kv_heads; }

// Where things are in shared memory.
struct SharedLayout {
    unsigned k, v, q, dout, ds, p, dq, dk, lse_log2, delta, barriers;  // p: P, with WIDE
    volatile int *slots;  // of the tiles; with BLOCK_MASK also of each stage's entry and head
    __device__ __forceinline__ SharedLayout(const void *memory, const void *barriers, int *slots)
        : barriers(shared_address(barriers)), slots(slots) {
        k = shared_address(memory), v = k + KV_STAGES * KV_BYTES, q = v + KV_STAGES * KV_BYTES;
        dout = q + STAGES * Q_BYTES;
        ds = dout + DO_STAGES * Q_BYTES, p = ds + DS_STAGES * DS_BYTES, dq = p + (WIDE ? DS_STAGES * DS_BYTES : 0);
        dk = dq + WARP_GROUPS * DQ_CHUNK_BYTES, lse_log2 = dk + DK_BYTES, delta = lse_log2 + STAGES * STATISTIC_BYTES;
    }
    __device__ __forceinline__ unsigned barrier(int place) const { return barriers + 8 * place; }
    __device__ __forceinline__ volatile int *stage_slots(int stage) const { return slots + 2 * WORK_TILE_INTS + 2 * stage; }
};

// The block's tiles, one after the other, for all but who chooses them.
struct TileScheduler {
    const SharedLayout &layout;
    PipelineState<2> tile_pipe;
    int has_queries;  // with WIDE and BLOCK_MASK: whether the next one has
    __device__ __forceinline__ TileScheduler(const SharedLayout &layout) : layout(layout) {}
    __device__ __forceinline__ volatile int *slot() const { return layout.slots + tile_pipe.index * WORK_TILE_INTS; }
    // The next one's index; negative: there is none. Uniform, as are all loops over it.
    __device__ __forceinline__ int next() {
        mbarrier_wait(layout.barrier(TILE_FULL + tile_pipe.index), tile_pipe.parity);
        const int index = __shfl_sync(~0u, slot()[0], 0);
        if (WIDE && BLOCK_MASK) has_queries = __shfl_sync(~0u, slot()[1], 0);
        if (WIDE) release();
        return index;
    }
    // That tile. (With WIDE worked out once more: with all that is read in registers, D = 192 spills 200 bytes instead of
    // 80 and has 0.98x of the speed; if released later, 108 bytes.)
    __device__ __forceinline__ WorkTile read(const Params &p, int index) const {
        if (!WIDE) return WorkTile(slot());
        WorkTile tile(p, index);
        if (BLOCK_MASK) tile.has_queries = has_queries;
        return tile;
    }
    // It will not be read again.
    __device__ __forceinline__ void done() {
        if (!WIDE) release();
    }
    __device__ __forceinline__ void release() {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(layout.barrier(TILE_EMPTY + tile_pipe.index));
        tile_pipe.next();
    }
};
