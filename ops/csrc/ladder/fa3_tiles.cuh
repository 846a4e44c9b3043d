// What the warp groups of fa3.cu share: the launch, its mbarriers, where tiles lie in shared memory, and which tile of
// queries is next.
#pragma once
#include "fp8_scales.cuh"
#include "hopper.cuh"
#include "kept_tiles.cuh"
#include "scores.cuh"

#define BR (WARP_GROUPS * 64)
#define THREADS ((WARP_GROUPS + 1) * 128)
#define KV_BYTES (BC * PADDED_D * OPERAND_BYTES)
#define Q_GROUP_BYTES (64 * PADDED_D * OPERAND_BYTES)  // of a warp group
#define V_BLOCK (BC % 128 ? 64 : 128)  // keys in a row of transposed 8-bit V, one byte each
#define O_GROUP_BYTES (64 * PADDED_D * 2)
#define P_BOX_BYTES (64 * 128)  // 64 keys; with P_IN_SHARED
#define P_GROUP_BYTES (BC / 64 * P_BOX_BYTES)  // of a warp group
#define NAMED_TURN 1  // the named barriers of the warp groups' turns, and of each by itself
#define NAMED_OWN (NAMED_TURN + WARP_GROUPS)

static_assert(NAMED_OWN + WARP_GROUPS <= 16, "there are 16 named barriers");
static_assert(!OPERANDS_8BIT || BC % V_BLOCK == 0, "V in 8 bits, transposed, lies in whole blocks of keys");
static_assert(64 * (WARP_GROUPS - 1) <= BC,
              "the last key tile that a group sees is at most one before the block's last");
static_assert(!(INT8 && SCALE_BEFORE_MAX), "scores that begin at INT8_MAGIC are scaled with their exponents");
static_assert(!BLOCK_MASK || BC % 64 == 0, "flags beside where a tile begins");
static_assert(!P_IN_SHARED || (BC % 64 == 0 && !OPERANDS_8BIT), "P lies in whole boxes of 16-bit numbers");

struct __align__(64) Launch {
    TensorMap q, k, v, out;
    Params p;
    int *tile_counter;  // a counter of the tiles beyond each block's first; 0 at the launch
};

// The mbarriers, by their place: full and empty ones of the stages of Q, of K and of V.
enum { Q_FULL, Q_EMPTY = Q_FULL + Q_STAGES, K_FULL = Q_EMPTY + Q_STAGES, K_EMPTY = K_FULL + STAGES,
       V_FULL = K_EMPTY + STAGES, V_EMPTY = V_FULL + STAGES, BARRIERS = V_EMPTY + STAGES };

// Queries i0 .. i0 + BR of a head, whose keys lie in lo .. hi. (With BLOCK_MASK a list has them, not lo and hi.)
struct WorkTile {
    int b, h, i0, keys, lo, hi;
#if DOCUMENT_IDS
    DocumentBounds documents;
#endif

    // The index-th in the grid's order. Only the producer works it out, and publishes it in shared memory for
    // the others: it takes divisions.
    __device__ __forceinline__ WorkTile(const Params &p, int index) {
        int tile = 0, batch_head = 0;
        scheduled_tile(p, index, p.batch * p.heads, HAS_RIGHT, tile, batch_head);
        b = batch_head / p.heads, h = batch_head % p.heads, i0 = tile * BR, keys = keys_of(p, b);
#if DOCUMENT_IDS
        documents = documents_of(p, b, tile);
#endif
        const Range range = seen(p, i0, BR);
        lo = range.lo, hi = range.hi;
    }
    // As it was published; uniform, as are all loops over it.
    __device__ __forceinline__ WorkTile(const volatile int *slot) {
        int *fields = (int *)this;
#pragma unroll
        for (int x = 0; x < (int)(sizeof(*this) / sizeof(int)); x++) fields[x] = __shfl_sync(~0u, slot[x], 0);
    }
    __device__ __forceinline__ void publish(volatile int *slot) const {
        const int *fields = (const int *)this;
#pragma unroll
        for (int x = 0; x < (int)(sizeof(*this) / sizeof(int)); x++) slot[x] = fields[x];
    }
    // The keys that queries i .. i + rows see.
    __device__ __forceinline__ Range seen(const Params &p, int i, int rows) const {
#if !DOCUMENT_IDS
        const DocumentBounds documents = documents_of(p, b, 0);
#endif
        return key_range(p, i, min_of(rows, p.tq - i), keys, keys - p.tq, BC, documents);
    }
};
#define WORK_TILE_INTS ((int)(sizeof(WorkTile) / sizeof(int)))

__device__ __forceinline__ int total_tiles(const Params &p) { return p.n_tiles * p.batch * p.heads; }
// Where the highest tile of the keys lo .. hi begins: the first of a walk, which goes down.
__device__ __forceinline__ int highest_tile(int lo, int hi) { return max_of(lo, (hi - 1) / BC * BC); }

// Where the tiles are in shared memory.
struct SharedLayout {
    unsigned barriers, q, k, v, o, p;
    volatile int *slots;  // what tile is in each slot of Q, and with BLOCK_MASK in each stage of K
    __device__ __forceinline__ SharedLayout(const void *memory, const void *barriers, int *slots)
        : barriers(shared_address(barriers)), slots(slots) {
        q = shared_address(memory), k = q + Q_STAGES * WARP_GROUPS * Q_GROUP_BYTES;
        v = k + STAGES * KV_BYTES, o = v + STAGES * KV_BYTES;
        p = o + !O_OVER_Q * WARP_GROUPS * O_GROUP_BYTES;
    }
    __device__ __forceinline__ unsigned barrier(int place) const { return barriers + 8 * place; }
    __device__ __forceinline__ volatile int &key_entry(int stage) const {
        return slots[Q_STAGES * WORK_TILE_INTS + stage];
    }
};
