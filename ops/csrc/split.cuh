// A float as three numbers of bf16 (planes.cuh).
#pragma once
#include "mma.cuh"

#define PLANES 3

// The planes of two floats, `low` in the lower halves.
__device__ __forceinline__ void split(float low, float high, unsigned &p0, unsigned &p1, unsigned &p2) {
    p0 = pack(low, high);
    low -= __int_as_float((int)(p0 << 16)), high -= __int_as_float((int)(p0 & 0xffff0000u));
    p1 = pack(low, high);
    low -= __int_as_float((int)(p1 << 16)), high -= __int_as_float((int)(p1 & 0xffff0000u));
    p2 = pack(low, high);
}
