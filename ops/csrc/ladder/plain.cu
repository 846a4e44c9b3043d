// Stage 0, plain: softmax(Q K^T) V and its gradients by their formulas, one thread per element of each matrix.
//
// Idea: a thread computes one element of S, O, dQ, dK or dV as a sum in a loop. Threads share nothing: there is no
// shared memory, no value is loaded once for two products, and no load is wider than an element. Read this attention
// first; every later stage is compared with it.
//
// HBM traffic, with N = Tq = Tk: the first kernel writes S, the softmax reads it three times and writes it, the last
// kernel reads it: at least 24 N^2 bytes per head. The actual traffic is higher, as neighbouring threads of the
// softmax read addresses that are N elements apart. The time goes into loads through the L1 cache: two for each multiplication.
//
// Limits: the forward allocates 4 N^2 bytes per head, the backward 8 N^2. Any head dim; with or without a causal
// mask, Tq different from Tk, grouped heads, lse. scratch: in the forward S, then P; in the backward P, then dS: each
// (B, Hq, Tq, Tk) float.
#include "plain.cuh"

#define THREADS 256

// Element [b, h, row, column] of a tensor (B, heads, rows, columns), the n-th in memory; each thread of the grid computes
// one.
struct Position {
    int b, h, row, column;
    long long n;
};

__device__ __forceinline__ Position own_position(int heads, int rows, int columns) {
    const long long n = (long long)blockIdx.x * THREADS + threadIdx.x, row = n / columns, batch_head = row / rows;
    return {(int)(batch_head / heads), (int)(batch_head % heads), (int)(row % rows), (int)(n % columns), n};
}

template <typename T> __device__ __forceinline__ T *row_of(T *x, const Strides &stride, int b, int h, int i) {
    return matrix_of(x, stride, b, h) + i * stride.t;
}

// term(0) + ... + term(n - 1), added in groups of 16 terms: one query on 239 keys has half the error of groups of 32.
template <typename Term> __device__ __forceinline__ float sum(int n, const Term &term) {
    float total = 0.0f;
    for (int first = 0; first < n; first += 16) {
        float part = 0.0f;
        for (int x = first; x < min_of(first + 16, n); x++) part += term(x);
        total += part;
    }
    return total;
}

// <q_i, k_j> * scale, -inf where query i does not see key j.
__device__ __forceinline__ float score(const Params &p, const Position &at) {
    if (!is_visible(p, at.row, at.column, p.tk, p.tk - p.tq, 0, 0)) return -INFINITE;
    const element *q = row_of(p.q, p.q_stride, at.b, at.h, at.row);
    const element *k = row_of(p.k, p.k_stride, at.b, at.h / HEADS_PER_KV, at.column);
    return p.scale * sum(HEAD_DIM, [&](int d) { return to_float(q[d]) * to_float(k[d]); });
}

// S. One thread per score.
extern "C" __global__ void __launch_bounds__(THREADS) tilegpt_plain_scores(const __grid_constant__ Params p) {
    const Position at = own_position(p.heads, p.tq, p.tk);
    if (at.b < p.batch) p.scratch[at.n] = score(p, at);
}

// P = softmax(S), in place, and lse. One thread per row. A row that sees no key has the sum 0, and P = 0.
extern "C" __global__ void __launch_bounds__(THREADS) tilegpt_plain_softmax(const __grid_constant__ Params p) {
    const Position at = own_position(p.heads, p.tq, 1);
    if (at.b >= p.batch) return;
    float *s = p.scratch + at.n * p.tk, m = Max::identity;
    for (int j = 0; j < p.tk; j++) m = fmaxf(m, s[j]);
    const float l = sum(p.tk, [&](int j) { return expf(s[j] - m); });
    for (int j = 0; j < p.tk; j++) s[j] = l > 0.0f ? expf(s[j] - m) / l : 0.0f;
    p.lse[at.n] = l > 0.0f ? m + logf(l) : -INFINITE;
}

// O = P V. One thread per element of O, in column at.column.
extern "C" __global__ void __launch_bounds__(THREADS) tilegpt_plain_output(const __grid_constant__ Params p) {
    const Position at = own_position(p.heads, p.tq, HEAD_DIM);
    if (at.b >= p.batch) return;
    const float *probs = p.scratch + at.n / HEAD_DIM * p.tk;
    const element *v = matrix_of(p.v, p.v_stride, at.b, at.h / HEADS_PER_KV) + at.column;
    const float o = sum(p.tk, [&](int j) { return probs[j] * to_float(v[j * p.v_stride.t]); });
    row_of(p.out, p.out_stride, at.b, at.h, at.row)[at.column] = to_element(o);
}

// P again, from lse, and dS = P (dP - delta) * scale, with dP = dO V^T; delta, and padded_lse, which is lse, or inf for
// a row that sees no key, are those of delta.cu. One thread per score.
extern "C" __global__ void __launch_bounds__(THREADS) tilegpt_plain_dscores(const __grid_constant__ Params p) {
    const Position at = own_position(p.heads, p.tq, p.tk);
    if (at.b >= p.batch) return;
    const long long row = ((long long)at.b * p.heads + at.h) * p.padded_tq + at.row;
    const element *dout = row_of(p.dout, p.dout_stride, at.b, at.h, at.row);
    const element *v = row_of(p.v, p.v_stride, at.b, at.h / HEADS_PER_KV, at.column);
    const float prob = expf(score(p, at) - p.padded_lse[row]);
    const float dprob = sum(HEAD_DIM, [&](int d) { return to_float(dout[d]) * to_float(v[d]); });
    p.scratch[at.n] = prob;
    p.scratch[(long long)p.batch * p.heads * p.tq * p.tk + at.n] = prob * (dprob - p.delta[row]) * p.scale;
}

// dQ = dS K. One thread per element of dQ.
extern "C" __global__ void __launch_bounds__(THREADS) tilegpt_plain_dq(const __grid_constant__ Params p) {
    const Position at = own_position(p.heads, p.tq, HEAD_DIM);
    if (at.b >= p.batch) return;
    const float *ds = p.scratch + ((long long)p.batch * p.heads * p.tq + at.n / HEAD_DIM) * p.tk;
    const element *k = matrix_of(p.k, p.k_stride, at.b, at.h / HEADS_PER_KV) + at.column;
    const float dq = sum(p.tk, [&](int j) { return ds[j] * to_float(k[j * p.k_stride.t]); });
    row_of(p.dq, p.dq_stride, at.b, at.h, at.row)[at.column] = to_element(dq);
}

// dV = P^T dO and dK = dS^T Q, over the queries of all heads that share the key head. One thread per element.
// At least four blocks per multiprocessor: without this bound, the compiler uses 48 registers on sm_80 and spills.
extern "C" __global__ void __launch_bounds__(THREADS, 4) tilegpt_plain_dkdv(const __grid_constant__ Params p) {
    const Position at = own_position(p.kv_heads, p.tk, HEAD_DIM);
    if (at.b >= p.batch) return;
    const int first_head = at.h * HEADS_PER_KV, queries = HEADS_PER_KV * p.tq;
    const float *probs = p.scratch + ((long long)at.b * p.heads + first_head) * p.tq * p.tk + at.row;
    const float *ds = probs + (long long)p.batch * p.heads * p.tq * p.tk;
    auto element_of = [&](const element *x, const Strides &stride, int n) {
        return to_float(row_of(x, stride, at.b, first_head + n / p.tq, n % p.tq)[at.column]);
    };
    const float dv = sum(queries, [&](long long n) { return probs[n * p.tk] * element_of(p.dout, p.dout_stride, n); });
    const float dk = sum(queries, [&](long long n) { return ds[n * p.tk] * element_of(p.q, p.q_stride, n); });
    row_of(p.dv, p.dv_stride, at.b, at.h, at.row)[at.column] = to_element(dv);
    row_of(p.dk, p.dk_stride, at.b, at.h, at.row)[at.column] = to_element(dk);
}
