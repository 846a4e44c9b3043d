// A float as two numbers of fp16 (split_products.cuh).
#pragma once
#include "mma.cuh"

#define TERMS 2
#define LOW 2048.0f  // 2^11: what a number of the second term is to be divided by

// The terms of two floats, `low` in the lower halves.
__device__ __forceinline__ void split(float low, float high, unsigned &p0, unsigned &p1) {
    p0 = pack(low, high);
    p1 = pack((low - unpack(p0, false)) * LOW, (high - unpack(p0, true)) * LOW);
}

// 2^n, as far as it is a normal number.
__device__ __forceinline__ float power_of_two(int n) {
    return __int_as_float((min_of(max_of(n, -126), 127) + 127) << 23);
}

// What p.scratch knows of (split_fp16.cu).
#define OF_Q 0
#define OF_K 1
#define OF_V 2
#define OF_DOUT 3

// n, where 2^n is what brings the numbers that a key head and its query heads have in one of the tensors below 2^14,
// and the largest of them, unless it is below 2^-113, not below 2^13; -114 .. 126.
__device__ __forceinline__ int exponent_of(const Params &p, int which, int b, int kv_head) {
    const int bits = ((const int *)p.scratch)[(which * p.batch + b) * p.kv_heads + kv_head];
    return 140 - max_of(bits >> 23, 14);
}
