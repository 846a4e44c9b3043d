// What the warp groups of fa3.cu share: the launch, its mbarriers, where tiles lie in shared memory, and which tile of
// queries is next.
#pragma once
#include "fp8_scales.cuh"
#include "hopper.cuh"
#include "kept_tiles.cuh"
#include "scores.cuh"

#define BR (WARP_GROUPS * 64)  // of a team
#define THREADS ((TEAMS * WARP_GROUPS + 1) * 128)
#define KV_BYTES (BC * PADDED_D * OPERAND_BYTES)
#define Q_GROUP_BYTES (64 * PADDED_D * OPERAND_BYTES)  // of a warp group
#define V_BLOCK (BC % 128 ? 64 : 128)  // keys in a row of transposed 8-bit V, one byte each
#define O_GROUP_BYTES (64 * PADDED_D * 2)
#define NAMED_TURN 1  // the named barriers of the warp groups' turns, and of each by itself
#define NAMED_OWN (NAMED_TURN + TEAMS * WARP_GROUPS)
#define TEAM_BYTES /* of shared memory */ \
    (WARP_GROUPS * (Q_STAGES * Q_GROUP_BYTES + !O_OVER_Q * O_GROUP_BYTES) + 2 * STAGES * KV_BYTES)

static_assert(TEAMS <= 4, "the copying warp group has four warps, one for each team");
static_assert(NAMED_OWN + TEAMS * WARP_GROUPS <= 16, "there are 16 named barriers");
static_assert(!OPERANDS_8BIT || BC % V_BLOCK == 0, "V in 8 bits, transposed, lies in whole blocks of keys");
static_assert(!(INT8 && SCALE_BEFORE_MAX), "scores that begin at INT8_MAGIC are scaled with their exponents");
static_assert(!BLOCK_MASK || BC % 64 == 0, "flags beside where a tile begins");

struct __align__(64) Launch {
    TensorMap q, k, v, out;
    Params p;
    int *tile_counter;  // a counter of the tiles beyond the teams' first; 0 at the launch
};

// The mbarriers of a team, by their place: full and empty ones of the stages of Q, of K and of V.
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
#define SLOT_INTS (Q_STAGES * WORK_TILE_INTS + BLOCK_MASK * STAGES)  // of a team

__device__ __forceinline__ int total_tiles(const Params &p) { return p.n_tiles * p.batch * p.heads; }
// What a warp's first thread has drawn from the counter: a tile behind those that the teams begin with.
__device__ __forceinline__ int drawn_tile(int drawn) { return TEAMS * gridDim.x + __shfl_sync(~0u, drawn, 0); }
// Where the highest tile of the keys lo .. hi begins: the first of a walk, which goes down.
__device__ __forceinline__ int highest_tile(int lo, int hi) { return max_of(lo, (hi - 1) / BC * BC); }

// Where the tiles of a team are in shared memory.
struct SharedLayout {
    unsigned barriers, q, k, v, o;
    volatile int *slots;  // what tile is in each slot of Q, and with BLOCK_MASK in each stage of K
    __device__ __forceinline__ SharedLayout(const void *memory, const void *barriers, int *slots, int team)
        : barriers(shared_address(barriers) + team * 8 * BARRIERS), slots(slots + team * SLOT_INTS) {
        q = shared_address(memory) + team * TEAM_BYTES, k = q + Q_STAGES * WARP_GROUPS * Q_GROUP_BYTES;
        v = k + STAGES * KV_BYTES, o = v + STAGES * KV_BYTES;
    }
    __device__ __forceinline__ unsigned barrier(int place) const { return barriers + 8 * place; }
    __device__ __forceinline__ volatile int &key_entry(int stage) const {
        return slots[Q_STAGES * WORK_TILE_INTS + stage];
    }
};
