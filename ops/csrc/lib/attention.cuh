// What every stage of the ladder shares: the parameters of a launch, the options of a score, and who sees whom.
//
// One translation unit is one specialisation. The host defines (ops/cuda/call.py):
//   ELEMENT     float, bf16 or f16: the type of q, k, v and out; all sums are float
//   HEAD_DIM    D, as the caller has it; kernels pad it as they need
//   HEADS_PER_KV    query heads that share a key head (1: MHA)
//   HAS_LEFT, HAS_RIGHT    a bound on either side of the diagonal (causal: HAS_RIGHT with window_right = 0)
//   SOFTCAP, ALIBI, DOCUMENT_IDS, LENGTHS, DROPOUT, BLOCK_MASK    0 or 1 (SOFTCAP 2 above 64); what is 0 costs nothing
// and what the stage adds (tile sizes). Only .cuh files of ops/csrc, cuda_bf16.h and cuda_fp16.h are ever
// included. All stages also compile as C++ for the CPU (tests/ops/cpu.h).
#pragma once

#define float_ELEMENT 0
#define bf16_ELEMENT 1
#define f16_ELEMENT 2
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define ELEMENT_KIND JOIN(ELEMENT, _ELEMENT)

#if ELEMENT_KIND == bf16_ELEMENT
#include <cuda_bf16.h>
typedef __nv_bfloat16 element;
#elif ELEMENT_KIND == f16_ELEMENT
#include <cuda_fp16.h>
typedef __half element;
#else
typedef float element;
#endif

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
// Infinity without a header.
#define INFINITE __int_as_float(0x7f800000)

// Elements from one batch row, head or token to the next; the last dimension is contiguous.
struct Strides {
    long long b, h, t;
};

// The one argument of every kernel, packed by the host (ops/cuda/call.py mirrors it, field by field). A kernel reads
// what it needs; what a call does not have is null or 0. Tq, Tk: tq, tk; B: batch; Hq, Hkv: heads, kv_heads.
struct Params {
    const element *q, *k, *v;                 // (B, Hq, Tq, D), (B, Hkv, Tk, D) twice
    element *out;                             // (B, Hq, Tq, D)
    float *lse;                               // (B, Hq, Tq), natural logarithm
    const element *dout;                      // (B, Hq, Tq, D)
    element *dq, *dk, *dv;                    // as q, k, v
    union {                                   // (B, Hq, padded_tq): lse, natural (delta.cu) or in base 2 (prepare.cu)
        float *padded_lse, *lse_log2;
    };
    float *delta;                             // (B, Hq, padded_tq): rowsum(out * dout)
    float *scratch;                           // the stage's own: see its .cu
    const float *alibi_slopes;                // (Hq,)
    const int *q_document_ids, *k_document_ids;  // (B, Tq), (B, Tk)
    const int *document_bounds;               // (B, tiles, 3): see document_ranges.cu
    const int *kv_lengths;                    // (B,)
    const long long *seed;                    // ()
    const unsigned char *block_mask;          // (B or 1, Hq or 1, Tq / 128, Tk / 128), for kept_tiles.cu
    const int *kept;                          // (B, Hq, n_tiles, entries): see kept_tiles.cu
    Strides q_stride, k_stride, v_stride, out_stride, dout_stride, dq_stride, dk_stride, dv_stride;
    Strides block_mask_stride, kept_stride;   // 0 where all batch rows or heads share
    int batch, heads, kv_heads, tq, tk, padded_tq;
    int n_tiles;                              // tiles of one head along the grid's split dimension
    int heads_in_l2;                          // heads that run side by side, so that their K and V share the L2
    int tail;                                 // tiles of a head, the shortest, that are left for the end
    int window_left, window_right;            // read with HAS_LEFT, HAS_RIGHT
    float scale, softcap, keep_scale;         // keep_scale = 1 / (1 - dropout_p)
    unsigned dropout_threshold;               // a probability is kept where its bits are >= dropout_threshold
    int lead;                                 // with BLOCK_MASK: tiles of a head that come before all others
};

static_assert(sizeof(Params) == PARAMS_BYTES, "ops/cuda/call.py and struct Params differ");

__device__ __forceinline__ int min_of(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int max_of(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Programmatic dependent launch: a kernel that is launched `early` (ops/nvrtc.py) may start once all blocks of the kernel
// before it have said so or ended, and waits here until that is complete.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The (T, D) matrix of head h of batch row b.
template <typename T> __device__ __forceinline__ T *matrix_of(T *x, const Strides &stride, int b, int h) {
    return x + b * stride.b + h * stride.h;
}

// Keys that batch row b has: Tk, or its length.
__device__ __forceinline__ int keys_of(const Params &p, int b) {
#if LENGTHS
    return max_of(0, min_of(p.kv_lengths[b], p.tk));
#else
    return p.tk;
#endif
}

#if SOFTCAP
// tanh(x * factor); in 16 bits by one exponential, which goes to 0 or infinity without overflow. It errs by 2e-7, with a
// softcap of 64 by 1e-5 in a score; beyond that the series is taken near 0, where x is small beside 1.
__device__ __forceinline__ float tanh_of(float x, float factor) {
#if ELEMENT_KIND == float_ELEMENT
    return tanhf(x * factor);
#else
    const float y = 1.0f - __fdividef(2.0f, exp2f(x * (factor * (2.0f * LOG2E))) + 1.0f);
    x *= factor;
    return SOFTCAP > 1 && fabsf(x) < 0.05f ? x * (1.0f - x * x * (1.0f / 3.0f)) : y;
#endif
}
#endif

// The score of query i and key j from dot = <q_i, k_j>, before the mask. `causal_offset` = keys - Tq: the distance is
// j - i - causal_offset. `tanh_score` gets tanh(scale * dot / softcap), which the backward needs.
__device__ __forceinline__ float score_of(const Params &p, float dot, int i, int j, int causal_offset, float slope,
                                          float &tanh_score) {
#if SOFTCAP
    tanh_score = tanh_of(dot, p.scale / p.softcap);
    float s = tanh_score * p.softcap;
#else
    float s = dot * p.scale;
#endif
#if ALIBI
    s -= slope * fabsf((float)(j - i - causal_offset));
#endif
    return s;
}

// Whether query i sees key j. `keys` bounds j; ids are document ids (anything without DOCUMENT_IDS).
__device__ __forceinline__ bool is_visible(const Params &p, int i, int j, int keys, int causal_offset, int q_id,
                                           int k_id) {
    bool seen = j < keys;
#if HAS_RIGHT
    seen = seen && j <= i + causal_offset + p.window_right;
#endif
#if HAS_LEFT
    seen = seen && j >= i + causal_offset - p.window_left;
#endif
#if DOCUMENT_IDS
    seen = seen && q_id == k_id;
#endif
    return seen;
}

// The keys that a tile of queries has to visit, or the queries that a tile of keys has: lo .. hi; in the tiles within
// full_lo .. full_hi no mask is needed.
struct Range {
    int lo, full_lo, full_hi, hi;
};

// What document ids leave of the other side of a tile (keys for a tile of queries, queries for a tile of keys): none
// outside of first .. end is of a document of the tile. If `single_document`, the tile and all within are of one document,
// and no ids are compared. Unused without DOCUMENT_IDS. (document_ranges.cu computes them.)
struct DocumentBounds {
    int first, end;
    int single_document;
};

__device__ __forceinline__ DocumentBounds documents_of(const Params &p, int b, int tile) {
    DocumentBounds documents = {0, 0, true};
#if DOCUMENT_IDS
    const int *range = p.document_bounds + (b * p.n_tiles + tile) * 3;
    documents.first = range[0], documents.end = range[1], documents.single_document = range[2];
#endif
    return documents;
}

// Keys that some of the queries i0 .. i0 + rows see, and those that all see. lo, full_lo and full_hi are multiples of
// `tile`.
__device__ __forceinline__ Range key_range(const Params &p, int i0, int rows, int keys, int causal_offset, int tile,
                                           const DocumentBounds &documents) {
    int lo = 0, hi = keys;
#if HAS_LEFT
    lo = max_of(lo, i0 + causal_offset - p.window_left);
#endif
#if HAS_RIGHT
    hi = min_of(hi, i0 + rows + causal_offset + p.window_right);
#endif
#if DOCUMENT_IDS
    lo = max_of(lo, documents.first), hi = min_of(hi, documents.end);
#endif
    lo = lo / tile * tile;
    hi = max_of(hi, lo);
    int full_lo = lo, full_hi = hi;
#if HAS_LEFT
    full_lo = max_of(i0 + rows - 1 + causal_offset - p.window_left, 0);
#endif
#if DOCUMENT_IDS
    full_lo = max_of(full_lo, documents.first);
#endif
#if HAS_LEFT || DOCUMENT_IDS
    full_lo = max_of(min_of(ceil_div(full_lo, tile) * tile, ceil_div(hi, tile) * tile), lo);
#endif
#if HAS_RIGHT
    full_hi = min_of(hi, i0 + 1 + causal_offset + p.window_right);
#endif
    full_hi = max_of(full_hi / tile * tile, full_lo);
#if DOCUMENT_IDS
    if (!documents.single_document) full_hi = full_lo;  // every tile compares ids
#endif
    Range range = {lo, full_lo, full_hi, hi};
    return range;
}

// Queries that see some of the keys j0 .. j0 + cols (j0 is a key), and those that see all. All but hi are multiples of
// `tile`.
__device__ __forceinline__ Range query_range(const Params &p, int j0, int cols, int causal_offset, int tile,
                                             const DocumentBounds &documents) {
    int lo = 0, hi = p.tq;
#if HAS_RIGHT
    lo = max_of(lo, j0 - causal_offset - p.window_right);
#endif
#if HAS_LEFT
    hi = min_of(hi, j0 + cols - causal_offset + p.window_left);
#endif
#if DOCUMENT_IDS
    lo = max_of(lo, documents.first), hi = min_of(hi, documents.end);
#endif
    int full_lo = lo;
    lo = lo / tile * tile;
    hi = max_of(hi, lo);
    const int last = ceil_div(hi, tile) * tile;
    int full_hi = last;
#if HAS_RIGHT
    full_lo = max_of(full_lo, j0 + cols - 1 - causal_offset - p.window_right);
#endif
#if HAS_RIGHT || DOCUMENT_IDS
    full_lo = min_of(ceil_div(full_lo, tile) * tile, last);
#endif
#if HAS_LEFT
    full_hi = min_of(last, max_of(j0 - causal_offset + p.window_left + 1, 0) / tile * tile);
#endif
#if DOCUMENT_IDS
    if (documents.end < p.tq) full_hi = min_of(full_hi, hi / tile * tile);  // (queries beyond the last have no weights)
    if (!documents.single_document) full_lo = last;  // every tile compares ids
#endif
    full_hi = max_of(full_hi, full_lo);
    Range range = {lo, full_lo, full_hi, hi};
    return range;
}

// A persistent block draws its next tile when DRAWN_AHEAD steps of this one are left to copy. When it drew with the first
// step, long tiles were bound to blocks that were late: 1 to 5% of the time at T = 16k with a causal mask. When it drew with
// the last step, the tile came late in calls of T = 1k (2%).
#define DRAWN_AHEAD 8

// The tile and the head (b * heads + h) of block `index`: `heads_in_l2` heads side by side, so that their K and V stay in
// the L2, and within them tile after tile, with `reverse_tiles` from the last, which is the longest under a causal mask;
// `tail` tiles of all heads come in the end, and with BLOCK_MASK `lead` of all heads at the beginning (ops/order.py).
__device__ __forceinline__ void scheduled_tile(const Params &p, int index, int n_batch_heads, bool reverse_tiles,
                                               int &tile, int &batch_head) {
    int before_tail = p.n_tiles - p.tail, first = 0, heads_in_group = n_batch_heads, offset = index, lead = 0;
#if BLOCK_MASK
    if (index < p.lead * n_batch_heads)
        before_tail = 0;
    else
        lead = p.lead, before_tail -= lead, offset = index -= lead * n_batch_heads;
#endif
    if (index < before_tail * n_batch_heads) {
        first = index / (p.heads_in_l2 * before_tail) * p.heads_in_l2;
        heads_in_group = min_of(p.heads_in_l2, n_batch_heads - first), offset = index - first * before_tail;
    }
    tile = lead + offset / heads_in_group;  // of the tail: `offset` counts the tiles before it, of all heads, too
    batch_head = first + offset % heads_in_group;
    if (reverse_tiles) tile = p.n_tiles - 1 - tile;
}

// The dropout mask of ops/dropout.py.
__device__ __forceinline__ unsigned fmix32(unsigned x) {
    x ^= x >> 16, x *= 0x85EBCA6Bu, x ^= x >> 13, x *= 0xC2B2AE35u;
    return x ^ (x >> 16);
}

__device__ __forceinline__ unsigned hash_combine(unsigned key, unsigned x) { return fmix32((key ^ x) + 0x9E3779B9u); }

// The key of the head's rows: one `hash_combine` more gives row i's.
__device__ __forceinline__ unsigned dropout_head_key(const Params &p, int b, int h) {
    unsigned long long seed = (unsigned long long)*p.seed;
    return hash_combine(
        hash_combine(hash_combine(hash_combine(0u, (unsigned)seed), (unsigned)(seed >> 32)), (unsigned)b), (unsigned)h);
}

__device__ __forceinline__ bool dropout_keeps(unsigned row_key, int j, unsigned dropout_threshold) {
    return fmix32(row_key + 0x9E3779B9u * (unsigned)j) >= dropout_threshold;
}
