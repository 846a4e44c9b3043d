// Stage 3, tiled, on tensor cores where there are any: FlashAttention in fp32, each product from three of fp16 terms
// (split_products.cuh tells how, and why that is fp32 still).
//
// Idea: the loop of fa2.cu. What is new is where operands come from: K and V are split once, before (split_fp16.cu), as
// every tile of queries reads them; Q is split here, by the lanes that multiply it; P as it leaves the softmax.
// HBM traffic, 4 bytes a number: Q and O once; Q, K and V once for how large they are; K and V once to be split and, as
// terms, once per head as long as the heads at work fit in the L2; lse.
// Limits: fp32, D up to 128, sm_80 and newer. Every option but a bias. FMA units do the rest (tiled.cu).
// The host also defines BR, BC, WARPS, BLOCKS (of an SM, at least), HELD (terms of Q that stay in registers; the
// others are in shared memory, and read again for each tile), EVEN (rows of q and out begin at multiples of two
// numbers), and SCALE_BEFORE_MAX.
#include "split_products.cuh"
#include "softmax.cuh"

#define THREADS (WARPS * 32)
#define ROW_TILES (BR / WARPS / 16)  // of 16 rows in a warp
#define TERM_BYTES (BC * ROW_BYTES)
#define TILE_BYTES (TERMS * TERM_BYTES)
#define Q_TERM_BYTES (BR * ROW_BYTES)

// Two numbers of a row, `column` even; zeros beyond D.
__device__ __forceinline__ float2 read_two(const float *row, int column) {
    float2 x = {0.0f, 0.0f};
#if EVEN
    if (column < HEAD_DIM) x = *(const float2 *)(row + column);
#else
    if (column < HEAD_DIM) x.x = row[column];
    if (column + 1 < HEAD_DIM) x.y = row[column + 1];
#endif
    return x;
}

// Splits 16 * ROW_TILES rows of Q times `factor`, from `first` on: HELD terms into registers, the others into swizzled
// tiles, of which `rows` is the warp's first row in the first.
__device__ __forceinline__ void split_q(const Params &p, unsigned (&held)[D_STEPS][HELD ? HELD : 1][ROW_TILES][4],
                                        unsigned rows, const float *q, int first, float factor) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int d = 0; d < D_STEPS; d++)
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = t * 16 + e % 2 * 8 + lane / 4, chunk = d * 2 + e / 2;
                float2 x = {0.0f, 0.0f};
                if (first + row < p.tq) x = read_two(q + (first + row) * p.q_stride.t, chunk * 8 + lane % 4 * 2);
                unsigned terms[TERMS];
                split(x.x * factor, x.y * factor, terms[0], terms[1]);
#pragma unroll
                for (int term = 0; term < TERMS; term++)
                    if (term < HELD)
                        held[d][HELD ? term % HELD : 0][t][e] = terms[term];
                    else
                        store_shared(
                            rows + (term - HELD) * Q_TERM_BYTES + swizzled<PADDED_D>(row, chunk) + lane % 4 * 4,
                            terms[term]);
            }
}

// The warp's rows of a (T, D) matrix from row `first` on, of T.
__device__ __forceinline__ void write_rows(float *matrix, long long stride, int first, int rows,
                                           const Accumulator<ROW_TILES, D_STEPS> &sums) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first + t * 16 + half * 8 + lane / 4;
            if (row >= rows) continue;
#pragma unroll
            for (int n = 0; n < PADDED_D / 8; n++) {
                const float *c = &sums.c[t][n][2 * half];
                write_two(matrix + row * stride, n * 8 + lane % 4 * 2, c[0], c[1]);
            }
        }
}

// out and lse; p.k and p.v are terms. Grid: B * Hq * n_tiles.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
tilegpt_tiled_split_fp16_forward(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char memory[];  // what is not held of Q, two K and V
    int tile, batch_head;
    scheduled_tile(p, blockIdx.x, p.batch * p.heads, HAS_RIGHT, tile, batch_head);
    const int b = batch_head / p.heads, h = batch_head % p.heads, i0 = tile * BR, warp = threadIdx.x / 32;
    const int keys = keys_of(p, b), causal_offset = keys - p.tq, i_first = i0 + warp * ROW_TILES * 16;
    const unsigned q_tile = shared_address(memory), q_rows = q_tile + warp * ROW_TILES * 16 * ROW_BYTES;
    const unsigned k_tile = q_tile + (TERMS - HELD) * Q_TERM_BYTES, v_tile = k_tile + 2 * TILE_BYTES;
    const Range range = key_range(p, i0, min_of(BR, p.tq - i0), keys, causal_offset, BC, documents_of(p, b, tile));
    const int kv_head = h / HEADS_PER_KV;
    const int q_exponent = exponent_of(p, OF_Q, b, kv_head), k_exponent = exponent_of(p, OF_K, b, kv_head);
    const float undo = power_of_two(-q_exponent - k_exponent);
    // not 0, as -inf is multiplied by it
    const float scale = SCALE_BEFORE_MAX ? 1.0f : fmaxf(p.scale * undo, 1e-37f);
    const Dropout<ROW_TILES> dropout(p, b, h, i_first);
    const mma_element *k = matrix_of((const mma_element *)p.k, p.k_stride, b, kv_head);
    const mma_element *v = matrix_of((const mma_element *)p.v, p.v_stride, b, kv_head);
    TermLoader<BC, THREADS> next_k(k, p.k_stride.t, range.lo), next_v(v, p.v_stride.t, range.lo);
    auto load = [&](int start, int buffer) {
        next_k.load(k_tile + buffer * TILE_BYTES, p.k_stride.t, keys - start);
        next_v.load(v_tile + buffer * TILE_BYTES, p.v_stride.t, keys - start);
    };
    if (range.lo < range.hi) load(range.lo, 0);
    cp_async_commit_group();
    unsigned q[D_STEPS][HELD ? HELD : 1][ROW_TILES][4];
    split_q(p, q, q_rows, matrix_of(p.q, p.q_stride, b, h), i_first, power_of_two(q_exponent));
    const LdmatrixLanes<PADDED_D> as_stored(AS_STORED), transposed(TRANSPOSED);
    SoftmaxState<ROW_TILES> softmax;
    softmax.clear();
    Accumulator<ROW_TILES, D_STEPS> o;
    o.clear();
    for (int start = range.lo, buffer = 0; start < range.hi; start += BC, buffer ^= 1) {
        cp_async_wait_group<0>();
        __syncthreads();  // this tile has landed, and all warps are done with the other buffer
        if (start + BC < range.hi) load(start + BC, buffer ^ 1);
        cp_async_commit_group();
        Accumulator<ROW_TILES, BC / 16> s;
        const unsigned k_rows = k_tile + buffer * TILE_BYTES, v_rows = v_tile + buffer * TILE_BYTES;
        // S = Q K^T
        multiply_split<HELD>(s, q, as_stored, q_rows, Q_TERM_BYTES, transposed, k_rows, TERM_BYTES);
        const bool needs_mask = start < range.full_lo || start >= range.full_hi;
        if (SCALE_BEFORE_MAX) multiply_by(s, undo);
        if (SCALE_BEFORE_MAX || needs_mask) scale_and_mask(p, s, i_first, start, keys, b, h, needs_mask);
        online_softmax(s, o, softmax, scale * LOG2E);
        dropout.drop(p, s, start);
        add_split_product(o, s, as_stored, v_rows, TERM_BYTES);  // O += P V
    }
    finish_rows(p, o, softmax, batch_head, i_first, scale);
    multiply_by(o, power_of_two(-exponent_of(p, OF_V, b, kv_head)));
    write_rows(matrix_of(p.out, p.out_stride, b, h), p.out_stride.t, i_first, p.tq, o);
}
