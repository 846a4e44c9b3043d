// Stage 4, wmma: tensor cores with fragments of 16 x 16, loaded from shared memory and stored there.
//
// Idea. The loops of `tiled`: a block computes BR queries in a loop over tiles of BC keys. A warp handles 16 of
// the queries and multiplies 16 x 16 x 16 at a time. CUDA does not say which lane holds which element of a fragment, so
// operations on rows cannot work on fragments: S is stored to shared memory for the softmax, and P is loaded from
// there. O is kept there too: it is rescaled by rows, loaded as the accumulator of P V, and stored again.
//
//     Q, K --fragments--> [ S ]  shared, fp32  --two lanes per row---> [ P ]  shared, 16 bits
//                                                                        |
//                         [ O ]  shared, fp32  --load, + P V, store------+-- V
//
// New since `tiled`. Products of 16-bit numbers on tensor cores, summed in fp32. Rows in shared memory are 16 bytes
// longer than the data, so that the rows of a fragment begin in different banks.
// HBM traffic: Q, K, V and out once. From L2, K and V for every tile of queries: 4 N^2 D / BR bytes per head.
// Limits. Shared-memory traffic: each score is stored in 4 bytes, loaded by the softmax, and stored and loaded again as P
// in 2; each number of O is loaded and stored for every tile of keys, and once more where it is rescaled. Copies are synchronous: K and V share one buffer
// in turn. 16-bit inputs, D up to 128 in steps of 8, sm_80 and newer; forward only.
// The host also defines WARPS, BC, BLOCKS (minimum resident blocks per multiprocessor), ALIGNED (whether rows begin
// at multiples of 16 bytes) and VECTOR (plain.cuh).
#include "wmma.cuh"

#include "plain.cuh"

#define THREADS (32 * WARPS)
#define BR (16 * WARPS)
#define PITCH (PADDED_D + 8)    // elements from row to row of Q, K and V,
#define P_PITCH (BC + 8)        // and of P
#define S_PITCH (BC + 4)        // floats of S,
#define O_PITCH (PADDED_D + 4)  // and of O
#define D_STEPS (PADDED_D / 16)
#define KEY_STEPS (BC / 16)

// Rows first .. first + ROWS of x into a tile; zeros from row `end` on, and beyond HEAD_DIM.
template <int ROWS>
__device__ __forceinline__ void load_tile(element *tile, const element *x, long long stride, int first, int end) {
#pragma unroll 4
    for (int at = threadIdx.x * 8; at < ROWS * PADDED_D; at += THREADS * 8) {
        const int row = at / PADDED_D, d = at % PADDED_D;
        const bool inside = first + row < end && d < HEAD_DIM;
        const element *from = x + (first + row) * stride + d;
        element *to = tile + row * PITCH + d;
#if ALIGNED
        uint4 eight = {0, 0, 0, 0};
        if (inside) eight = *(const uint4 *)from;
        *(uint4 *)to = eight;
#else
        for (int e = 0; e < 8; ++e) to[e] = inside ? from[e] : to_element(0.0f);
#endif
    }
}

// S = Q K^T of the warp's 16 queries.
__device__ __forceinline__ void multiply_keys(float *s_rows, const element *q_rows, const element *k_tile) {
    Accumulator s[KEY_STEPS] = {};
#pragma unroll
    for (int d = 0; d < D_STEPS; ++d) {
        Fragment q, k;
        load_a(q, q_rows + d * 16, PITCH);
#pragma unroll
        for (int n = 0; n < KEY_STEPS; ++n) {
            load_b_col_major(k, k_tile + n * 16 * PITCH + d * 16, PITCH);
            mma_col_major(s[n], q, k);
        }
    }
#pragma unroll
    for (int n = 0; n < KEY_STEPS; ++n) store_accumulator(s_rows + n * 16, s[n], S_PITCH);
}

// O += P V of the warp's 16 queries.
__device__ __forceinline__ void add_values(float *o_rows, const element *p_rows, const element *v_tile) {
    Fragment probs[KEY_STEPS], v;
#pragma unroll
    for (int n = 0; n < KEY_STEPS; ++n) load_a(probs[n], p_rows + n * 16, P_PITCH);
#pragma unroll
    for (int d = 0; d < D_STEPS; ++d) {
        Accumulator o;
        load_accumulator(o, o_rows + d * 16, O_PITCH);
#pragma unroll
        for (int n = 0; n < KEY_STEPS; ++n) {
            load_b_row_major(v, v_tile + n * 16 * PITCH + d * 16, PITCH);
            mma_row_major(o, probs[n], v);
        }
        store_accumulator(o_rows + d * 16, o, O_PITCH);
    }
}

// A lane's columns of its row of S or O. Two lanes have a row, every other column each; those of the rows 8 and on take
// pairs of columns in another order, so that 32 lanes read 32 banks.
__device__ __forceinline__ int column_of(int n) {
    const int row = threadIdx.x % 32 / 2;
    return 2 * (n ^ row / 8) + threadIdx.x % 2;
}

// P = exp2(scale_log2 S - m) of the warp's rows, where m, in units of scale_log2 S, and l go on over these keys, and O
// is rescaled. `s`, `probs` and `o` begin at the lane's row. query: the row's; start: the first key.
__device__ __forceinline__ void online_softmax(const Params &p, const float *s, element *probs, float *o, float &m,
                                               float &l, int query, int start, int keys, bool needs_mask) {
    const float scale_log2 = p.scale * LOG2E;
    float x[BC / 2], row_max = m, sum = 0.0f;
#pragma unroll
    for (int n = 0; n < BC / 2; ++n) {
        x[n] = s[column_of(n)] * scale_log2;
        if (needs_mask && !is_visible(p, query, start + column_of(n), keys, keys - p.tq, 0, 0)) x[n] = -INFINITE;
        row_max = fmaxf(row_max, x[n]);
    }
    row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 1));
    // A row that has seen no key yet is shifted by 0: exp2(-inf) is 0, and not NaN.
    const float shift = row_max == -INFINITE ? 0.0f : row_max, factor = exp2f(m - shift);
#pragma unroll
    for (int n = 0; n < BC / 2; ++n) {
        x[n] = exp2f(x[n] - shift);
        sum += x[n];
        probs[column_of(n)] = to_element(x[n]);
    }
    l = l * factor + sum + __shfl_xor_sync(~0u, sum, 1);
    if (__any_sync(~0u, row_max > m))
#pragma unroll
        for (int n = 0; n < PADDED_D / 2; ++n) o[column_of(n)] *= factor;
    m = row_max;
}

// out and lse. Grid: B * Hq * n_tiles.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) tilegpt_wmma_forward(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    element *q_tile = (element *)memory, *kv_tile = q_tile + BR * PITCH, *p_tile = kv_tile + BC * PITCH;
    float *s_tile = (float *)(p_tile + BR * P_PITCH), *o_tile = s_tile + BR * S_PITCH;
    int tile, batch_head;
    scheduled_tile(p, blockIdx.x, p.batch * p.heads, HAS_RIGHT, tile, batch_head);
    const int b = batch_head / p.heads, h = batch_head % p.heads, lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * 16, row = warp_row + lane / 2;  // the warp's first, and the lane's
    const int i0 = tile * BR, keys = keys_of(p, b);
    const element *k = matrix_of(p.k, p.k_stride, b, h / HEADS_PER_KV);
    const element *v = matrix_of(p.v, p.v_stride, b, h / HEADS_PER_KV);
    const Range range = key_range(p, i0, min_of(BR, p.tq - i0), keys, keys - p.tq, BC, {});

    load_tile<BR>(q_tile, matrix_of(p.q, p.q_stride, b, h), p.q_stride.t, i0, p.tq);
    float *o_row = o_tile + row * O_PITCH, m = -INFINITE, l = 0.0f;
    for (int n = 0; n < PADDED_D / 2; ++n) o_row[column_of(n)] = 0.0f;
    for (int start = range.lo; start < range.hi; start += BC) {
        __syncthreads();  // all have read the last V
        load_tile<BC>(kv_tile, k, p.k_stride.t, start, keys);
        __syncthreads();  // K is there
        multiply_keys(s_tile + warp_row * S_PITCH, q_tile + warp_row * PITCH, kv_tile);
        __syncthreads();  // all have read K, and stored S
        load_tile<BC>(kv_tile, v, p.v_stride.t, start, keys);
        online_softmax(p, s_tile + row * S_PITCH, p_tile + row * P_PITCH, o_row, m, l, i0 + row, start, keys,
                       start < range.full_lo || start >= range.full_hi);
        __syncthreads();  // V and P are there, and O is rescaled
        add_values(o_tile + warp_row * O_PITCH, p_tile + warp_row * P_PITCH, kv_tile);
        __syncwarp();  // O is stored
    }
    __syncwarp();  // if the tile sees no key, the loop did not run: the zeros of O are stored

    element *out = matrix_of(p.out, p.out_stride, b, h);
    for (int r = 0; r < 16; ++r) {
        const int i = i0 + warp_row + r;
        const float sum = __shfl_sync(~0u, l, 2 * r), inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
        if (i >= p.tq) continue;
        for (int d = lane * 4; d < HEAD_DIM; d += 128) {
            const float *o = o_tile + (warp_row + r) * O_PITCH + d;
            store4(out + i * p.out_stride.t, d,
                   make_float4(o[0] * inverse, o[1] * inverse, o[2] * inverse, o[3] * inverse));
        }
    }
    if (lane % 2 == 0 && i0 + row < p.tq)
        p.lse[(long long)batch_head * p.tq + i0 + row] = l > 0.0f ? (m + log2f(l)) * LN2 : -INFINITE;
}
