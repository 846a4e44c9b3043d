// What the stages without tensor cores share, plain to tiled: elements as floats, and reductions over a warp and a
// block.
//
// The host also defines VECTOR: whether four elements are read and written at once, which needs rows of q, k, v and
// out that begin at multiples of four elements.
#pragma once
#include "attention.cuh"

__device__ __forceinline__ float to_float(element x) {
#if ELEMENT_KIND == bf16_ELEMENT
    return __bfloat162float(x);
#elif ELEMENT_KIND == f16_ELEMENT
    return __half2float(x);
#else
    return x;
#endif
}

__device__ __forceinline__ element to_element(float x) {
#if ELEMENT_KIND == bf16_ELEMENT
    return __float2bfloat16(x);
#elif ELEMENT_KIND == f16_ELEMENT
    return __float2half(x);
#else
    return x;
#endif
}

// Four elements, as wide as a load or store can be.
struct alignas(4 * sizeof(element)) Elements4 {
    element x, y, z, w;
};

// Elements d .. d + 4 of a row of q, k, v or dout, zeros beyond HEAD_DIM.
__device__ __forceinline__ float4 load4(const element *row, int d) {
#if VECTOR
    Elements4 four = *reinterpret_cast<const Elements4 *>(row + d);
    return make_float4(to_float(four.x), to_float(four.y), to_float(four.z), to_float(four.w));
#else
    return make_float4(d < HEAD_DIM ? to_float(row[d]) : 0.0f, d + 1 < HEAD_DIM ? to_float(row[d + 1]) : 0.0f,
                       d + 2 < HEAD_DIM ? to_float(row[d + 2]) : 0.0f,
                       d + 3 < HEAD_DIM ? to_float(row[d + 3]) : 0.0f);
#endif
}

// The way back: what lies beyond HEAD_DIM is dropped.
__device__ __forceinline__ void store4(element *row, int d, float4 x) {
#if VECTOR
    Elements4 four = {to_element(x.x), to_element(x.y), to_element(x.z), to_element(x.w)};
    if (d < HEAD_DIM) *reinterpret_cast<Elements4 *>(row + d) = four;
#else
    if (d < HEAD_DIM) row[d] = to_element(x.x);
    if (d + 1 < HEAD_DIM) row[d + 1] = to_element(x.y);
    if (d + 2 < HEAD_DIM) row[d + 2] = to_element(x.z);
    if (d + 3 < HEAD_DIM) row[d + 3] = to_element(x.w);
#endif
}

struct Sum {
    static constexpr float identity = 0.0f;
    __device__ static float combine(float a, float b) { return a + b; }
};

struct Max {
    static constexpr float identity = -3.402823466e38f;
    __device__ static float combine(float a, float b) { return fmaxf(a, b); }
};

// In every lane.
template <class Op>
__device__ __forceinline__ float reduce_warp(float x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x = Op::combine(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
}

// In every thread of a block of N_WARPS warps. All of them have to come.
template <class Op, int N_WARPS>
__device__ __forceinline__ float reduce_block(float x) {
    static __shared__ float partial[N_WARPS];
    x = reduce_warp<Op>(x);
    __syncthreads();  // nobody still reads the last reduction's
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    x = partial[0];
    for (int warp = 1; warp < N_WARPS; ++warp) x = Op::combine(x, partial[warp]);
    return x;
}
