// The first kernel of every backward: delta = rowsum(out * dout), and the log-sum-exp as the next ones read it.
//
// dS = P * (dP - rowsum(P * dP)), and rowsum(P * dP) = rowsum(out * dout) (Dao et al. 2022, section 3.1): two rows of D
// numbers instead of a pass over all keys. With dropout it holds too, as out and dP have the same mask.
//
// padded_lse: lse * log2(e), for exponentials of base 2; with NATURAL_LOG = 1 lse itself. A row that sees no key, or
// lies beyond Tq, gets +inf, so that exp(s - padded_lse) is 0 for any score. Both are (B, Hq, padded_tq).
//
// HBM traffic: out and dout once. Grid: B * Hq * padded_tq / 8, a warp a row.
#include "plain.cuh"

#define WARPS 8

extern "C" __global__ void __launch_bounds__(32 * WARPS) tilegpt_delta(const __grid_constant__ Params p) {
    const long long row = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, i = row % p.padded_tq;
    const long long batch_head = row / p.padded_tq, b = batch_head / p.heads, h = batch_head % p.heads;
    float sum = 0.0f, lse = -INFINITE;
    if (i < p.tq) {
        const element *out = p.out + b * p.out_stride.b + h * p.out_stride.h + i * p.out_stride.t;
        const element *dout = p.dout + b * p.dout_stride.b + h * p.dout_stride.h + i * p.dout_stride.t;
        for (int d = lane; d < HEAD_DIM; d += 32) sum += to_float(out[d]) * to_float(dout[d]);
        lse = p.lse[batch_head * p.tq + i];
    }
    sum = reduce_warp<Sum>(sum);
    if (lane == 0) {
        p.delta[row] = sum;
        p.padded_lse[row] = lse == -INFINITE ? INFINITE : NATURAL_LOG ? lse : lse * LOG2E;
    }
}
