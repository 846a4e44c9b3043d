// FlashAttention-2, forward (Dao 2023, algorithm 1), in our own words.
//
// Idea. A block owns BR queries of one head and walks the keys that any of them sees, BC at a time; each warp owns
// whole rows, so maximum and sum of a row stay inside four lanes and warps share nothing but K and V.
// New since fa1. The grid runs over the sequence too; queries are split over the warps, not keys, so no partial sums
// meet in shared memory; O, m and l stay in registers and O is divided once, at the end; the next K and V arrive by
// cp.async while this tile is computed, with one barrier a tile; tiles are swizzled, so that ldmatrix has no conflicts.
// HBM traffic. Q and O once; K and V once per head as long as the heads at work fit in the L2 (unswizzle), though Tq /
// BR times from there; lse. Nothing of size Tq x Tk.
// Limits. 16-bit inputs, D up to 128 in steps of 8, sm_80 and newer.
// The host also defines BR, BC, WARPS, BLOCKS (of an SM, at least), ALIGNED (all rows begin at 16 bytes), and
// SCALE_FIRST (where the maximum of the scaled scores is not the scaled maximum).
#include "scores.cuh"

#define THREADS (WARPS * 32)
#define TILES (BR / WARPS / 16)  // of 16 rows in a warp
#define TILE_BYTES (BC * ROW_BYTES)
#define Q_STAYS (PAD_D <= 64)  // in registers; at D = 128 there is no room, and it is read again for each tile

struct Rows {
    float m[TILES][2], l[TILES][2];  // of rows g and g + 8; l is the lane's own part
};

// Online softmax: s becomes exp2(c s - c m) and l goes on. A row's m follows its maximum only when that has grown by
// more than 2^8 (the division at the end absorbs what m is), so that o is rescaled in the first tiles and then hardly
// ever: D multiplications a tile and thread, an eighth of all instructions at D = 128.
__device__ __forceinline__ void soften(Sums<TILES, BC / 16> &s, Sums<TILES, D_STEPS> &o, Rows &rows, float c) {
    float most[TILES][2];
    bool grew = false;
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float &x = most[t][half];
            x = rows.m[t][half];
#pragma unroll
            for (int n = 0; n < BC / 8; n++) x = fmaxf(x, fmaxf(s.c[t][n][2 * half], s.c[t][n][2 * half + 1]));
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
            grew |= (x - rows.m[t][half]) * c > 8.0f;
        }
    if (__any_sync(~0u, grew)) {
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                // Row by row: a row's bits depend on no other row.
                const float growth = (most[t][half] - rows.m[t][half]) * c;
                if (!(growth > 8.0f)) continue;
                const float rescale = exp2_of(-growth);
                rows.m[t][half] = most[t][half], rows.l[t][half] *= rescale;
#pragma unroll
                for (int n = 0; n < PAD_D / 8; n++) o.c[t][n][2 * half] *= rescale, o.c[t][n][2 * half + 1] *= rescale;
            }
    }
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            // A row that has seen no key yet is shifted by 0: exp2(-inf) is 0, and not NaN.
            const float shift = rows.m[t][half] == -INFINITE ? 0.0f : rows.m[t][half] * c;
#pragma unroll
            for (int n = 0; n < BC / 8; n++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) {
                    s.c[t][n][e] = exp2_of(s.c[t][n][e] * c - shift);
                    rows.l[t][half] += s.c[t][n][e];
                }
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) tilegpt_fa2_forward(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char memory[];  // Q, then two K and V
    int tile, head;
    unswizzle(p, blockIdx.x, p.batch * p.heads, HAS_RIGHT, tile, head);
    const int b = head / p.heads, h = head % p.heads, i0 = tile * BR, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int keys = keys_of(p, b), diagonal = keys - p.tq, i_first = i0 + warp * TILES * 16;
    const unsigned q_tile = shared_address(memory), k_tile = q_tile + BR * ROW_BYTES, v_tile = k_tile + 2 * TILE_BYTES;
    const unsigned q_rows = q_tile + warp * TILES * 16 * ROW_BYTES;
    int first = 0, end = 0;
#if SEGMENTS
    first = p.ranges[(b * p.n_tiles + tile) * 2], end = p.ranges[(b * p.n_tiles + tile) * 2 + 1];
#endif
    const Range range = key_range(p, i0, min_of(BR, p.tq - i0), keys, diagonal, BC, first, end);
    const float c = exponent_scale(p);
#if DROPOUT
    unsigned row_key[TILES][2], of_head = head_key(p, b, h);
#pragma unroll
    for (int t = 0; t < TILES; t++)
        for (int half = 0; half < 2; half++)
            row_key[t][half] = absorb(of_head, (unsigned)(i_first + t * 16 + half * 8 + lane / 4));
#endif
    Loader<BC, THREADS> next_k(matrix_of(p.k, p.k_stride, b, h / GROUP), p.k_stride.t, range.lo);
    Loader<BC, THREADS> next_v(matrix_of(p.v, p.v_stride, b, h / GROUP), p.v_stride.t, range.lo);
    auto load = [&](int start, int odd) {
        next_k.load(k_tile + odd * TILE_BYTES, p.k_stride.t, keys - start);
        next_v.load(v_tile + odd * TILE_BYTES, p.v_stride.t, keys - start);
    };
    if (range.lo < range.hi) {  // else Q would land, unwaited for, where O goes out
        const element *q = matrix_of(p.q, p.q_stride, b, h);
        Loader<BR, THREADS>(q, p.q_stride.t, i0).load(q_tile, p.q_stride.t, p.tq - i0);
        load(range.lo, 0);
    }
    commit();
    const LaneRows<PAD_D> rows_first(true), columns_first(false);
    Rows rows;
    Sums<TILES, D_STEPS> o;
    o.clear();
#pragma unroll
    for (int t = 0; t < TILES; t++)
        rows.m[t][0] = rows.m[t][1] = -INFINITE, rows.l[t][0] = rows.l[t][1] = 0.0f;
#if Q_STAYS
    unsigned q[TILES][D_STEPS][4];
    wait_for_all_but<0>();
    __syncthreads();
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int d = 0; d < D_STEPS; d++) load_matrices(q[t][d], rows_first(q_rows, t * 16, d));
#endif
    for (int start = range.lo, odd = 0; start < range.hi; start += BC, odd ^= 1) {
        wait_for_all_but<0>();
        __syncthreads();  // this tile has landed, and all warps are done with the other buffer
        if (start + BC < range.hi) load(start + BC, odd ^ 1);
        commit();
        Sums<TILES, BC / 16> s;
        s.clear();
#if Q_STAYS
        multiply(s, q, columns_first, k_tile + odd * TILE_BYTES);  // S = Q K^T
#else
        multiply<D_STEPS, false, false>(s, rows_first, q_rows, columns_first, k_tile + odd * TILE_BYTES);
#endif
        const bool masked = start < range.full_lo || start >= range.full_hi;
        if (SCALE_FIRST || masked) finish_scores(p, s, i_first, start, keys, b, h, masked);
        soften(s, o, rows, c);
#if DROPOUT
#pragma unroll
        for (int t = 0; t < TILES; t++)
            for (int n = 0; n < BC / 8; n++)
                for (int e = 0; e < 4; e++) {
                    const int j = start + n * 8 + lane % 4 * 2 + e % 2;
                    if (!kept(row_key[t][e / 2], j, p.threshold)) s.c[t][n][e] = 0.0f;
                }
#endif
        add_product(o, s, rows_first, v_tile + odd * TILE_BYTES);  // O += P V
    }
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float l = rows.l[t][half];
            l += __shfl_xor_sync(~0u, l, 1);
            l += __shfl_xor_sync(~0u, l, 2);
            const float divided = l == 0.0f ? 0.0f : p.keep_scale / l;
            const int i = i_first + t * 16 + half * 8 + lane / 4;
            if (lane % 4 == 0 && i < p.tq)
                p.lse[(long long)head * p.tq + i] = l == 0.0f ? -INFINITE : (rows.m[t][half] * c + __log2f(l)) * LN2;
#pragma unroll
            for (int n = 0; n < PAD_D / 8; n++) o.c[t][n][2 * half] *= divided, o.c[t][n][2 * half + 1] *= divided;
        }
    // A warp's rows of Q are its own: O goes out over them.
    element *out = matrix_of(p.out, p.out_stride, b, h) + (long long)i_first * p.out_stride.t;
    store_rows<TILES>(q_rows, out, p.out_stride.t, p.tq - i_first, o);
}
