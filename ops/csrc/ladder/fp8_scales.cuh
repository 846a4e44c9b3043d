// Where the scales of q, k and v in fp8 lie (fp8.cu): Params.scratch.
#pragma once
#include "attention.cuh"

#define FP8_QUERIES 64  // that share a scale, as a warp group of fa3.cu has them; BC keys share one, a tile of them

struct Fp8Scales {
    int q_blocks, k_blocks;  // of a head
    float *q, *k, *v;
    __device__ __forceinline__ Fp8Scales(const Params &p)
        : q_blocks(BC / FP8_QUERIES * ceil_div(p.tq, BC)), k_blocks(ceil_div(p.tk, BC)), q(p.scratch),
          k(q + (long long)p.batch * p.heads * q_blocks), v(k + (long long)p.batch * p.kv_heads * k_blocks) {}
    // The largest number of each BC keys of V, of a head.
    __device__ __forceinline__ float *amax_v(const Params &p, int batch_head) const {
        return v + p.batch * p.kv_heads + (long long)batch_head * k_blocks;
    }
};
