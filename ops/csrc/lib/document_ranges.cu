// For packed documents: which keys a tile of queries can see at all, so that whole tiles between documents are skipped.
//
// Per tile of TILE queries the first and the end of the keys whose ids lie within those of the tile, and whether the
// tile and all keys from first to end are of one document, so that nobody needs to compare ids (without such keys it
// says nothing); (B, n_tiles, 3). Where documents follow each other these are exactly the keys of the tile's documents;
// in any other order it is a superset, and the comparison of ids decides. For tiles of keys, as dK and dV have them,
// the host swaps (q_document_ids, tq) and (k_document_ids, tk).
//
// HBM traffic: Tk ids a tile, from the L2 mostly, and those of the tile's documents again. Grid: B * n_tiles.
#include "attention.cuh"

#define THREADS 512
#define LEAST (-2147483647 - 1)
#define GREATEST 2147483647

// (the least of a, the greatest of b) over the block, in every thread.
__device__ __forceinline__ void extent(int &a, int &b) {
    static __shared__ int least[THREADS / 32], greatest[THREADS / 32];
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        a = min_of(a, __shfl_xor_sync(0xffffffffu, a, lanes));
        b = max_of(b, __shfl_xor_sync(0xffffffffu, b, lanes));
    }
    __syncthreads();  // nobody still reads those of the last call
    if (threadIdx.x % 32 == 0) least[threadIdx.x / 32] = a, greatest[threadIdx.x / 32] = b;
    __syncthreads();
    for (int warp = 0; warp < THREADS / 32; ++warp) {
        a = min_of(a, least[warp]);
        b = max_of(b, greatest[warp]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) tilegpt_document_ranges(const __grid_constant__ Params p) {
    const int b = blockIdx.x / p.n_tiles, first = blockIdx.x % p.n_tiles * TILE;
    const int *own = p.q_document_ids + (long long)b * p.tq, *other = p.k_document_ids + (long long)b * p.tk;
    int least = GREATEST, greatest = LEAST;
    for (int i = first + threadIdx.x; i < min_of(first + TILE, p.tq); i += THREADS) {
        least = min_of(least, own[i]);
        greatest = max_of(greatest, own[i]);
    }
    extent(least, greatest);
    int lo = p.tk, end = 0;
#pragma unroll 8  // as many loads under way: at T = 16k a thread has 32
    for (int j = threadIdx.x; j < p.tk; j += THREADS)
        if (least <= other[j] && other[j] <= greatest) {
            lo = min_of(lo, j);
            end = j + 1;
        }
    extent(lo, end);
    int whole = least == greatest, ignored = 0;
#pragma unroll 8
    for (int j = lo + threadIdx.x; j < end; j += THREADS) whole = whole && other[j] == least;
    extent(whole, ignored);
    if (threadIdx.x == 0) {
        int *range = const_cast<int *>(p.document_bounds) + blockIdx.x * 3ll;
        range[0] = lo, range[1] = end, range[2] = whole;
    }
}
