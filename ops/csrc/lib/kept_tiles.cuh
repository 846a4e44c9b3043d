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
//     if (LOOP_HAS_TILES) load(LOOP_FIRST);
//     for (int start = LOOP_ENTER; LOOP_IS_TILE(start); LOOP_ADVANCE(start, BC)) {
//         if (LOOP_HAS_NEXT(start, BC)) load(LOOP_NEXT(start, BC));
//         LOOP_PREFETCH;
//         ...
//     }
//
// They read the locals `kept`, a BlockMaskTiles, or `range`, and for a group of heads `last_of_head`. They are macros, as
// with functions in their place ptxas gave the kernels without BLOCK_MASK other registers, and the backward spilled.
#define LOADER_ORIGIN 0                                // the row from which Loaders count
#define LOOP_HAS_TILES (kept.next >= 0)                // before the loop
#define LOOP_FIRST kept.next_start()                   // whose copies start before the loop
#define LOOP_ENTER kept.begin()                        // the first tile of the loop
#define LOOP_IS_TILE(start) (kept.here >= 0)
#define LOOP_HAS_NEXT(start, step) (kept.next >= 0)
#define LOOP_NEXT(start, step) kept.next_start()
#define LOOP_PREFETCH kept.prefetch_entry()            // once the copies of the next tile have started
#define LOOP_ADVANCE(start, step) start = kept.advance()
#define LOOP_NEEDS_MASK(by_range) (kept.here & MASK_FLAG)
// Of a group of heads, of which number g is the turn:
#define LOOP_ENTER_HEAD(g) (g == 0 ? kept.begin() : kept.start())
#define LOOP_IS_TILE_OF_HEAD(start, g) kept.is_in(g)
#define LOOP_IS_LAST_OF_HEAD(start, step) false
#define LOOP_HAS_NEXT_OF_GROUP(g) (kept.next >= 0)
#define LOOP_NEXT_OF_GROUP(start, step) kept.next_start()
#define LOOP_HEAD_OFFSET(stride) (kept.next_head * stride)  // from the group's first head to that of the next tile
#define LOOP_ROW_OFFSET(stride, row) (kept.next_head * stride + row)

#else

// The same of a Range `range`.
#define LOADER_ORIGIN range.lo
#define LOOP_HAS_TILES (range.lo < range.hi)
#define LOOP_FIRST range.lo
#define LOOP_ENTER range.lo
#define LOOP_IS_TILE(start) (start < range.hi)
#define LOOP_HAS_NEXT(start, step) (start + step < range.hi)
#define LOOP_NEXT(start, step) (start + step)
#define LOOP_PREFETCH
#define LOOP_ADVANCE(start, step) start += step
#define LOOP_NEEDS_MASK(by_range) (by_range)
#define LOOP_ENTER_HEAD(g) range.lo
#define LOOP_IS_TILE_OF_HEAD(start, g) (start < range.hi)
#define LOOP_IS_LAST_OF_HEAD(start, step) (start + step >= range.hi)
#define LOOP_HAS_NEXT_OF_GROUP(g) (!last_of_head || g + 1 < HEADS_PER_KV)
#define LOOP_NEXT_OF_GROUP(start, step) (last_of_head ? range.lo : start + step)
#define LOOP_HEAD_OFFSET(stride) 0
#define LOOP_ROW_OFFSET(stride, row) 0
#define START_OF(start) (start)

#endif
