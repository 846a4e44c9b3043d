// The first kernel of a backward on tensor cores: delta = rowsum(dout * out) and lse_log2 = lse * log2(e), infinite
// where the row sees no key or does not exist, so that its P is 0 (delta.cu tells why); and with CLEAR the accumulator
// of dQ, PADDED_D floats a row, is cleared; and with TILE_ROWS what is behind it, a counter and TILE_STATES integers for
// each tile of so many rows. All for (B, Hq, padded_tq) rows.
//
// HBM traffic: out and dout once, with CLEAR the accumulator once. A block takes ROWS rows of one head, of which padded_tq
// is a multiple. (Where each thread had one row, and found its head by a division in 64 bits, most instructions were for
// addresses.)
#include "mma.cuh"

#define THREADS 256
#define ROWS 64
#define LANES (PADDED_D <= 32 ? 4 : PADDED_D <= 64 ? 8 : PADDED_D <= 128 ? 16 : 32)  // that share a row, 8 numbers each

extern "C" __global__ void __launch_bounds__(THREADS) tilegpt_backward_prepare(const __grid_constant__ Params p) {
    griddepcontrol_launch_dependents();
    const int blocks = p.padded_tq / ROWS, batch_head = blockIdx.x / blocks, first = blockIdx.x % blocks * ROWS;
    const int b = batch_head / p.heads, h = batch_head % p.heads, part = threadIdx.x % LANES;
    const element *out = matrix_of(p.out, p.out_stride, b, h) + part * 8;
    const element *dout = matrix_of(p.dout, p.dout_stride, b, h) + part * 8;
    const long long before = (long long)batch_head * p.padded_tq;
#if TILE_ROWS
    static_assert(TILE_ROWS % ROWS == 0, "a tile begins with a block");
    int *counter = (int *)(p.scratch + (long long)p.batch * p.heads * p.padded_tq * PADDED_D);
    if (blockIdx.x == 0 && threadIdx.x == 0) *counter = 0;
    if (first % TILE_ROWS == 0 && threadIdx.x < TILE_STATES)
        counter[1 + (before + first) / TILE_ROWS * TILE_STATES + threadIdx.x] = 0;
#endif
#pragma unroll 1
    for (int i = first + threadIdx.x / LANES; i < first + ROWS; i += THREADS / LANES) {
        float sum = 0.0f;
        if (i < p.tq && part * 8 < HEAD_DIM) {
            const element *x = out + i * p.out_stride.t, *y = dout + i * p.dout_stride.t;
            alignas(16) element a[8], c[8];
#if ALIGNED
            *(uint4 *)a = *(const uint4 *)x, *(uint4 *)c = *(const uint4 *)y;
#else
            for (int e = 0; e < 8; e++) a[e] = x[e], c[e] = y[e];
#endif
#pragma unroll
            for (int e = 0; e < 8; e++) sum += (float)a[e] * (float)c[e];
        }
#pragma unroll
        for (int lanes = LANES / 2; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
        if (part == 0) {
            const float lse = i < p.tq ? p.lse[(long long)batch_head * p.tq + i] : -INFINITE;
            p.lse_log2[before + i] = lse == -INFINITE ? INFINITE : lse * LOG2E;
            p.delta[before + i] = sum;
        }
#if CLEAR
        float4 *accumulator = (float4 *)(p.scratch + (before + i) * PADDED_D);
#pragma unroll
        for (int x = part; x < PADDED_D / 4; x += LANES) accumulator[x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#endif
    }
}
