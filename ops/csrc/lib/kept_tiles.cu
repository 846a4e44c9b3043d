// For a block mask: which tiles of keys a tile of queries visits, as a list, so that nothing else is looked at.
//
// Per tile of OWN_TILE queries the tiles of OTHER_TILE keys that are in a kept block of MASK_BLOCK x MASK_BLOCK and
// that some of the queries see by all other masks (key_range), in order: where each begins, plus MASK_FLAG where it
// needs a mask; then END_OF_LIST. (B or 1, H or 1, n_tiles, 1 + Tk / OTHER_TILE) integers, Hq / H heads of a call
// sharing a list. TRANSPOSED: for tiles of OWN_TILE keys the tiles of OTHER_TILE queries, as dK and dV have them. With
// p.scratch, a zero there: the counter of the kernel that follows.
//
// HBM traffic: a byte a block of the mask; 4 bytes an entry, written here and read once by each head (T = 16k, tiles of
// 128 x 64: 131 KB where all entries are kept). Grid: a block a list.
#include "kept_tiles.cuh"

#define THREADS 256

static_assert(MASK_BLOCK % OWN_TILE == 0 && MASK_BLOCK % OTHER_TILE == 0 && OTHER_TILE % 2 == 0,
              "whole tiles; a bit for MASK_FLAG");

extern "C" __global__ void __launch_bounds__(THREADS) tilegpt_kept_tiles(const __grid_constant__ Params p) {
    griddepcontrol_launch_dependents();
    static __shared__ unsigned kept_lanes[THREADS / 32];
    const int tile = blockIdx.x % p.n_tiles, batch_head = blockIdx.x / p.n_tiles;
    const int b = batch_head / p.heads, h = batch_head % p.heads;
    const int keys = keys_of(p, b), own = tile * OWN_TILE, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const DocumentBounds documents = documents_of(p, b, tile);
#if TRANSPOSED
    const int valid_keys = min_of(OWN_TILE, keys - own);
    Range range = {0, 0, 0, 0};
    if (valid_keys > 0) range = query_range(p, own, valid_keys, keys - p.tq, OTHER_TILE, documents);
    const bool is_partial = valid_keys < OWN_TILE;
#else
    const Range range = key_range(p, own, min_of(OWN_TILE, p.tq - own), keys, keys - p.tq, OTHER_TILE, documents);
    const bool is_partial = false;
#endif
    const unsigned char *mask = matrix_of(p.block_mask, p.block_mask_stride, b, h);
    int *list = const_cast<int *>(matrix_of(p.kept, p.kept_stride, b, h)) + tile * p.kept_stride.t;
    for (int first = range.lo; first < range.hi; first += THREADS * OTHER_TILE) {
        const int start = first + threadIdx.x * OTHER_TILE;
        const int row = (TRANSPOSED ? start : own) / MASK_BLOCK, column = (TRANSPOSED ? own : start) / MASK_BLOCK;
        const bool kept = start < range.hi && mask[row * p.block_mask_stride.t + column];
        unsigned lanes = kept ? 1u << lane : 0;
        for (int other = 16; other > 0; other /= 2) lanes |= __shfl_xor_sync(0xffffffffu, lanes, other);
        __syncthreads();  // all threads have read those of the last round
        if (lane == 0) kept_lanes[warp] = lanes;
        __syncthreads();
        int before = __popc(lanes & ((1u << lane) - 1)), all = 0;
        for (int other = 0; other < THREADS / 32; ++other) {
            const int count = __popc(kept_lanes[other]);
            all += count;
            if (other < warp) before += count;
        }
        const bool needs_mask = is_partial || start < range.full_lo || start >= range.full_hi;
        if (kept) list[before] = start + (needs_mask ? MASK_FLAG : 0);
        list += all;
    }
    if (threadIdx.x == 0) *list = END_OF_LIST;
    if (p.scratch && blockIdx.x == 0 && threadIdx.x == 0) *(int *)p.scratch = 0;
    griddepcontrol_wait();  // launched early: the kernel that follows waits for this one only, not for the one before
}
