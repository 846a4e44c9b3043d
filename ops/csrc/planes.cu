// Splits fp32 into planes of bf16 for the products of planes.cuh.
//
// Reads a (B, H, T, D) tensor, p.q by p.q_stride, T = p.tq, H = p.heads; writes p.scratch as (B, H, T, 3, PAD_D) bf16,
// contiguous, zeros beyond D. A thread takes four numbers of a row.
//
// HBM traffic: 4 bytes a number read, 6 written. The reader reads 6 where it would have read 4.
#include "split.cuh"

#define CHUNKS (PAD_D / 4)  // of four numbers in a row

extern "C" __global__ void __launch_bounds__(256) tilegpt_planes(const __grid_constant__ Params p) {
    const long long index = (long long)blockIdx.x * 256 + threadIdx.x;
    const int row = index / CHUNKS, d = index % CHUNKS * 4, head = row / p.tq, t = row % p.tq;
    if (head >= p.batch * p.heads) return;
    const float *from = matrix_of(p.q, p.q_stride, head / p.heads, head % p.heads) + t * p.q_stride.t + d;
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = d + e < HEAD_DIM ? from[e] : 0.0f;
    unsigned low[PLANES], high[PLANES];
    split(x[0], x[1], low[0], low[1], low[2]);
    split(x[2], x[3], high[0], high[1], high[2]);
    uint2 *to = (uint2 *)((operand *)p.scratch + (long long)row * PLANES * PAD_D + d);
#pragma unroll
    for (int plane = 0; plane < PLANES; plane++) to[plane * PAD_D / 4] = make_uint2(low[plane], high[plane]);
}
