// The first kernel of a backward on tensor cores: delta = rowsum(dout * out) and lse_log2 = lse * log2(e), infinite
// where the row sees no key or does not exist, so that its P is 0 (delta.cu tells why); and with CLEAR the accumulator
// of dQ, PADDED_D floats a row, is cleared; and with TILE_ROWS what is behind it, a counter and TILE_STATES integers for
// each tile of so many rows. All for (B, Hq, padded_tq) rows.
//
// HBM traffic: out and dout once, with CLEAR the accumulator once. A block takes THREADS / LANES rows.
#include "mma.cuh"

#define THREADS 256
#define LANES (PADDED_D <= 32 ? 4 : PADDED_D <= 64 ? 8 : PADDED_D <= 128 ? 16 : 32)  // that share a row, 8 numbers each

extern "C" __global__ void __launch_bounds__(THREADS) tilegpt_backward_prepare(const __grid_constant__ Params p) {
    griddepcontrol_launch_dependents();
    const long long row = (long long)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    const int part = threadIdx.x % LANES, batch_head = row / p.padded_tq, i = row % p.padded_tq;
    if (row >= (long long)p.batch * p.heads * p.padded_tq) return;
    const int b = batch_head / p.heads, h = batch_head % p.heads;
    float sum = 0.0f;
    if (i < p.tq && part * 8 < HEAD_DIM) {
        const element *out = matrix_of(p.out, p.out_stride, b, h) + i * p.out_stride.t + part * 8;
        const element *dout = matrix_of(p.dout, p.dout_stride, b, h) + i * p.dout_stride.t + part * 8;
        alignas(16) element a[8], c[8];
#if ALIGNED
        *(uint4 *)a = *(const uint4 *)out, *(uint4 *)c = *(const uint4 *)dout;
#else
        for (int e = 0; e < 8; e++) a[e] = out[e], c[e] = dout[e];
#endif
#pragma unroll
        for (int e = 0; e < 8; e++) sum += (float)a[e] * (float)c[e];
    }
#pragma unroll
    for (int lanes = LANES / 2; lanes; lanes /= 2) sum += __shfl_xor_sync(__activemask(), sum, lanes);
    if (part == 0) {
        const float lse = i < p.tq ? p.lse[(long long)batch_head * p.tq + i] : -INFINITE;
        p.lse_log2[row] = lse == -INFINITE ? INFINITE : lse * LOG2E;
        p.delta[row] = sum;
#if TILE_ROWS
        int *counter = (int *)(p.scratch + (long long)p.batch * p.heads * p.padded_tq * PADDED_D);
        if (row == 0) *counter = 0;
        if (row % TILE_ROWS == 0)
            for (int x = 0; x < TILE_STATES; x++) counter[1 + row / TILE_ROWS * TILE_STATES + x] = 0;
#endif
    }
#if CLEAR
    float4 *accumulator = (float4 *)(p.scratch + row * PADDED_D);
#pragma unroll
    for (int x = part; x < PADDED_D / 4; x += LANES) accumulator[x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#endif
}
