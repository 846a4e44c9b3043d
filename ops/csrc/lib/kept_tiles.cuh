// Which tiles of the others a block visits, in order: those of a Range, or with BLOCK_MASK those that a list of
// kept_tiles.cu names. A block of the forward and of dQ visits tiles of keys; one of dK and dV visits tiles of queries,
// of one head of its group after the other.
#pragma once
#include "attention.cuh"

#if BLOCK_MASK

#define END_OF_LIST (-1)
#define MASK_FLAG 1  // in an entry, beside where the tile begins, which is an even number
// In fa3 only the warps that copy, or add to dQ, read lists. The one that copies publishes each entry with its tile, for
// those that compute, with these flags; fa3's tiles begin at multiples of 64.
#define FIRST_FLAG 2
#define LAST_FLAG 4
#define START_OF(entry) ((entry) & -64)

// The tiles that the block mask keeps. Each entry is prefetched two tiles ahead, so that where the next tile begins is
// known by the time its copies start. The lists of HEADS query heads follow each other, and any of them may be empty.
template <int HEADS> struct BlockMaskTiles {
    const Params &p;
    const int *list, *entry;  // of the head of the next tile, and how far that list has been read
    int here, next, after;    // entries; `after` as it was read: it may be the end of a list that another follows
    int head, next_head;      // of the HEADS

    // Of tile number `tile` of p.n_tiles, from head h on: `next` is its first tile.
    __device__ __forceinline__ BlockMaskTiles(const Params &p, int b, int h, int tile)
        : p(p), next(END_OF_LIST), next_head(0) {
        list = entry = matrix_of(p.kept, p.kept_stride, b, h) + tile * p.kept_stride.t;
        after = *entry;
        advance();
    }
    __device__ __forceinline__ void prefetch_entry() { after = next < 0 ? END_OF_LIST : *++entry; }
    __device__ __forceinline__ int advance() {
        here = next, head = next_head, next = after;
        if (HEADS > 1)
            while (next < 0 && next_head + 1 < HEADS) {
                next_head++, list += p.kept_stride.h, entry = list;
                next = *entry;
            }
        return start();
    }
    // To the first tile, whose copies have been started.
    __device__ __forceinline__ int begin() {
        prefetch_entry();
        return advance();
    }
    __device__ __forceinline__ int start() const { return here & ~MASK_FLAG; }
    __device__ __forceinline__ int next_start() const { return next & ~MASK_FLAG; }
    __device__ __forceinline__ bool is_in(int of_head) const { return here >= 0 && (HEADS == 1 || head == of_head); }
};

// The expressions of a kernel's loop over tiles, the copies of the next under way while one is computed:
//
//     if (HAS_TILES) load(FIRST_TILE);
//     for (int start = BEGIN_TILES; IS_TILE(start); ADVANCE(start, BC)) {
//         if (HAS_NEXT(start, BC)) load(NEXT_TILE(start, BC));
//         PREFETCH_ENTRY;
//         ...
//     }
//
// Here they are those of a BlockMaskTiles `kept`. They are macros, as with functions in their place ptxas gave the
// kernels without BLOCK_MASK other registers, and the backward spilled.
#define LOADER_ORIGIN 0                                // the row from which Loaders count
#define HAS_TILES (kept.next >= 0)                     // before the loop
#define FIRST_TILE kept.next_start()                   // whose copies start before the loop
#define BEGIN_TILES kept.begin()                       // the first tile of the loop
#define IS_TILE(start) (kept.here >= 0)
#define HAS_NEXT(start, step) (kept.next >= 0)
#define NEXT_TILE(start, step) kept.next_start()
#define PREFETCH_ENTRY kept.prefetch_entry()           // once the copies of the next tile have started
#define ADVANCE(start, step) start = kept.advance()
#define NEEDS_MASKING(by_range) (kept.here & MASK_FLAG)
// Of a group of heads, of which number g is the turn:
#define BEGIN_TILES_OF(g) (g == 0 ? kept.begin() : kept.start())
#define IS_TILE_OF(start, g) kept.is_in(g)
#define IS_LAST_OF_HEAD(start, step) false
#define HAS_NEXT_OF_GROUP(g) (kept.next >= 0)
#define NEXT_OF_GROUP(start, step) kept.next_start()
#define HEAD_OFFSET(stride) (kept.next_head * stride)  // from the group's first head to that of the next tile
#define ROW_OFFSET(stride, row) (kept.next_head * stride + row)

#else

// The same of a Range `range`.
#define LOADER_ORIGIN range.lo
#define HAS_TILES (range.lo < range.hi)
#define FIRST_TILE range.lo
#define BEGIN_TILES range.lo
#define IS_TILE(start) (start < range.hi)
#define HAS_NEXT(start, step) (start + step < range.hi)
#define NEXT_TILE(start, step) (start + step)
#define PREFETCH_ENTRY
#define ADVANCE(start, step) start += step
#define NEEDS_MASKING(by_range) (by_range)
#define BEGIN_TILES_OF(g) range.lo
#define IS_TILE_OF(start, g) (start < range.hi)
#define IS_LAST_OF_HEAD(start, step) (start + step >= range.hi)
#define HAS_NEXT_OF_GROUP(g) (!last_of_head || g + 1 < HEADS_PER_KV)
#define NEXT_OF_GROUP(start, step) (last_of_head ? range.lo : start + step)
#define HEAD_OFFSET(stride) 0
#define ROW_OFFSET(stride, row) 0
#define START_OF(start) (start)

#endif
