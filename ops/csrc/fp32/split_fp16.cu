// Splits fp32 into terms of fp16 for the products of split_products.cuh.
//
// fp16 has few exponents, so that first comes how large the numbers are, for each key head and its query heads.
// HBM traffic: 4 bytes a number read twice, 4 written.
#include "split.cuh"

#define CHUNKS (PADDED_D / 4)  // of four numbers in a row
#define ROWS 64                // of a block of tilegpt_largest; ops/cuda/split_fp16.py has it too

// The largest finite magnitude in q, k, v and, where the grid is four high, dout: (4, B, Hkv) as bits, in p.scratch,
// which is zeros before. What lies beyond kv_lengths does not count: it may be anything. Grid: B * Hq * ROWS of the
// longer of Tq and Tk, 3 or 4.
extern "C" __global__ void __launch_bounds__(256) tilegpt_largest(const __grid_constant__ Params p) {
    const int which = blockIdx.y, parts = ceil_div(max_of(p.tq, p.tk), ROWS);
    const bool of_keys = which == OF_K || which == OF_V;
    const int heads = of_keys ? p.kv_heads : p.heads, head = blockIdx.x / parts, b = head / heads, h = head % heads;
    if (b >= p.batch) return;
    const float *from = which == OF_Q ? p.q : which == OF_K ? p.k : which == OF_V ? p.v : p.dout;
    const Strides &stride = which == OF_Q ? p.q_stride : which == OF_K ? p.k_stride
                          : which == OF_V ? p.v_stride : p.dout_stride;
    from = matrix_of(from, stride, b, h);
    const int first = blockIdx.x % parts * ROWS, end = min_of(first + ROWS, of_keys ? keys_of(p, b) : p.tq);
    int largest = 0;
#pragma unroll 8
    for (int index = threadIdx.x; index < ROWS * PADDED_D; index += 256) {
        const int t = first + index / PADDED_D, d = index % PADDED_D;
        const int bits = t < end && d < HEAD_DIM ? __float_as_int(from[t * stride.t + d]) & 0x7fffffff : 0;
        if (bits < 0x7f800000) largest = max_of(largest, bits);
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) largest = max_of(largest, __shfl_xor_sync(~0u, largest, lanes));
    if (threadIdx.x % 32 == 0 && largest)
        atomicMax((int *)p.scratch + (which * p.batch + b) * p.kv_heads + h / (heads / p.kv_heads), largest);
}

// Reads a (B, H, T, D) tensor, p.q by p.q_stride, T = p.tq, H = p.heads; writes p.out as (B, H, T, 2, PADDED_D) fp16,
// contiguous, zeros beyond D. p.scratch begins at that tensor's magnitudes. A thread takes four numbers of a row.
extern "C" __global__ void __launch_bounds__(256) tilegpt_split_fp16(const __grid_constant__ Params p) {
    const long long index = (long long)blockIdx.x * 256 + threadIdx.x;
    const int row = index / CHUNKS, d = index % CHUNKS * 4, head = row / p.tq, t = row % p.tq;
    if (head >= p.batch * p.heads) return;
    const int b = head / p.heads, h = head % p.heads;
    const float *from = matrix_of(p.q, p.q_stride, b, h) + t * p.q_stride.t + d;
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = d + e < HEAD_DIM ? from[e] : 0.0f;
    const float factor = power_of_two(exponent_of(p, 0, b, h / (p.heads / p.kv_heads)));
    unsigned low[TERMS], high[TERMS];
    split(x[0] * factor, x[1] * factor, low[0], low[1]);
    split(x[2] * factor, x[3] * factor, high[0], high[1]);
    uint2 *to = (uint2 *)((mma_element *)p.out + (long long)row * TERMS * PADDED_D + d);
#pragma unroll
    for (int term = 0; term < TERMS; term++) to[term * PADDED_D / 4] = make_uint2(low[term], high[term]);
}
