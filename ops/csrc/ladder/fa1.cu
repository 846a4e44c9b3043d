// Stage 5, fa1: FlashAttention-1, forward (Dao et al. 2022, algorithm 1), our own implementation.
//
// Idea. The outer loop is over keys and values, the inner loop over queries. A block computes a whole head: it holds BC
// keys and values in shared memory and loops over the queries that see any of them, BR at a time. The running state of
// a row (output O, maximum m and sum l over the keys so far) is kept in HBM. Every pair of tiles reads it, rescales it
// and writes it back, with O normalised each time; the first pair reads nothing, and the last writes out and lse
// instead. The four warps of a team split the keys of a tile: each computes S and P of all BR rows for a quarter of the
// keys, so the maxima and sums of a row, and the four partial sums of P V, are reduced in shared memory. The teams take
// query tiles in turn.
// New since `tiled`. Tensor cores (16-bit products, fp32 sums); tiles swizzled, so that ldmatrix has no conflicts; P
// goes from one product to the next in registers; cp.async copies the next Q, 16 bytes at a time, while this one is
// used.
// HBM traffic. K and V once for each query head; Q Tk / BC times, and reads and writes of O (fp32), m and l, one
// fewer each: about (10 D + 16) Tq Tk / BC bytes per head, half of this if causal. O stays in the L2 if that of all
// heads fits: 50 MB on an H200.
// Limits. A grid over batch and heads only: with fewer of them than multiprocessors (132 on an H200) the others idle.
// Partial sums through shared memory. 16-bit inputs, D up to 128 in steps of 8, sm_80 and newer; forward only.
// Scratch, of N = B * Hq * padded_tq rows: O (N, PADDED_D), in blocks of 16 rows, in the order of the registers
// (`output_fragment`); m (N); l (N).
// The host also defines BR, BC, WARPS, BLOCKS, ALIGNED and SCALE_BEFORE_MAX as for fa2.cu.
#include "scores.cuh"

#define THREADS (WARPS * 32)
#define TEAM_WARPS 4  // that split the keys of a tile
#define TEAMS (WARPS / TEAM_WARPS)
#define ROW_TILES (BR / 16)
#define WARP_KEYS (BC / TEAM_WARPS)  // keys of a warp
#define D_TILES (PADDED_D / 8)  // tiles of 16 x 8 in 16 rows of O
#define OWN_TILES (D_TILES / TEAM_WARPS)  // of these, the ones whose partial sums a warp adds up
#define Q_BYTES (BR * ROW_BYTES)
#define KV_BYTES (BC * ROW_BYTES)
#define PARTS_BYTES (TEAM_WARPS * (TEAM_WARPS - 1) * OWN_TILES * 512)
// two Q; parts of O, maxima and sums
#define TEAM_BYTES (2 * Q_BYTES + PARTS_BYTES + 2 * BR * TEAM_WARPS * 4)

typedef Accumulator<ROW_TILES, WARP_KEYS / 16> Scores;
typedef Loader<BR, TEAM_WARPS * 32> QLoader;
static_assert(WARPS % TEAM_WARPS == 0 && OWN_TILES * TEAM_WARPS == D_TILES && BR % QLoader::STEP == 0,
              "whole shares for all");

// A barrier of one team. Teams run independently: while one adds partial sums, another multiplies.
__device__ __forceinline__ void team_barrier(int team) {
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(TEAM_WARPS * 32) : "memory");
}

// This lane's part of 16 rows of O in HBM: of C tile n at [n * 32], 512 bytes in a row for the warp.
__device__ __forceinline__ float4 *output_fragment(const Params &p, long long row) {
    return (float4 *)(p.scratch + row * PADDED_D) + threadIdx.x % 32;
}

// A warp's share of 16 rows of O, zeros if no key has been seen. (One branch: `seen ? from[..] : 0` made one a load.)
__device__ __forceinline__ void read_fragment(float4 (&o)[OWN_TILES], const float4 *from, bool seen) {
#pragma unroll
    for (int n = 0; n < OWN_TILES; n++) o[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (seen)
#pragma unroll
        for (int n = 0; n < OWN_TILES; n++) o[n] = from[n * 32];
}

// The row of a tile that c[t][..][2 * half] is of.
__device__ __forceinline__ int row_of(int t, int half) { return t * 16 + half * 8 + threadIdx.x % 32 / 4; }

// The maxima of the warp's scores to maxima (BR, TEAM_WARPS).
__device__ __forceinline__ void share_maxima(const Scores &s, float *maxima, int warp) {
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x = -INFINITE;
#pragma unroll
            for (int n = 0; n < WARP_KEYS / 8; n++)
                x = fmaxf(x, fmaxf(s.c[t][n][2 * half], s.c[t][n][2 * half + 1]));
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
            if (threadIdx.x % 4 == 0) maxima[row_of(t, half) * TEAM_WARPS + warp] = x;
        }
}

// Replaces s by exp2(scale_log2 (s - m)), where m is the new maximum, row_max, and rescales l, the sum over the previous
// keys, to it. The warp's sums are stored in sums (BR, TEAM_WARPS). The team's first warp writes m back.
__device__ __forceinline__ void online_softmax(Scores &s, const float (&old_m)[ROW_TILES][2],
                                               float (&l)[ROW_TILES][2], float *m_of_rows, const float *maxima,
                                               float *sums, int warp, float scale_log2) {
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = row_of(t, half);
            const float4 x = ((const float4 *)maxima)[row];
            const float row_max = fmaxf(old_m[t][half], fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
            // A row that has seen no key yet is shifted by 0: exp2(-inf) is 0, and not NaN.
            const float shift = row_max == -INFINITE ? 0.0f : row_max * scale_log2;
            l[t][half] *= exp2_of(old_m[t][half] * scale_log2 - shift);
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < WARP_KEYS / 8; n++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++)
                    sum += s.c[t][n][e] = exp2_of(s.c[t][n][e] * scale_log2 - shift);
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (threadIdx.x % 4 == 0) sums[row * TEAM_WARPS + warp] = sum;
            if (threadIdx.x % 4 == 0 && warp == 0) m_of_rows[row] = row_max;
        }
}

// 16 rows of the warp's O: its own share to o_share, those of the others to their parts.
__device__ __forceinline__ void share_parts(const float (&o)[D_TILES][4], float4 *parts, float4 (&o_share)[OWN_TILES],
                                            int warp) {
#pragma unroll
    for (int x = 0; x < D_TILES; x++) {
        const int owner = x / OWN_TILES, n = x % OWN_TILES;
        const int slot = owner * (TEAM_WARPS - 1) + warp - (warp > owner);
        const float4 part = make_float4(o[x][0], o[x][1], o[x][2], o[x][3]);
        if (owner == warp)
            o_share[n] = part;
        else
            parts[(slot * OWN_TILES + n) * 32] = part;
    }
}

// Adds the team's partial sums of this warp's share of O to the old O, both scaled: the new O is normalised by l.
__device__ __forceinline__ void add_parts(float4 (&o_share)[OWN_TILES], const float4 (&old)[OWN_TILES], const float4 *parts,
                                          const float (&old_scale)[2], const float (&inverse_l)[2], int warp) {
#pragma unroll
    for (int n = 0; n < OWN_TILES; n++) {
        float4 &x = o_share[n], was = old[n];
#pragma unroll
        for (int from = 0; from < TEAM_WARPS - 1; from++) {
            const float4 part = parts[((warp * (TEAM_WARPS - 1) + from) * OWN_TILES + n) * 32];
            x.x += part.x, x.y += part.y, x.z += part.z, x.w += part.w;
        }
        x = make_float4(was.x * old_scale[0] + x.x * inverse_l[0], was.y * old_scale[0] + x.y * inverse_l[0],
                        was.z * old_scale[1] + x.z * inverse_l[1], was.w * old_scale[1] + x.w * inverse_l[1]);
    }
}

// The warp's share of O of 16 rows, and by the first warp their lse: the last keys are in. m: of the head's rows.
__device__ __forceinline__ void write_rows(const Params &p, const float4 (&o_share)[OWN_TILES], const float *m,
                                           const float (&l)[2], int b, int h, int i0, int t, int warp,
                                           float scale_log2) {
    const int lane = threadIdx.x % 32;
    element *out = matrix_of(p.out, p.out_stride, b, h) + lane % 4 * 2;
    float *lse = p.lse + (long long)blockIdx.x * p.tq;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = i0 + row_of(t, half);
        if (i >= p.tq) continue;
        if (warp == 0 && lane % 4 == 0)
            lse[i] = l[half] == 0.0f ? -INFINITE : (m[i] * scale_log2 + __log2f(l[half])) * LN2;
#pragma unroll
        for (int n = 0; n < OWN_TILES; n++) {
            const unsigned two = half ? pack(o_share[n].z, o_share[n].w) : pack(o_share[n].x, o_share[n].y);
            const int column = (warp * OWN_TILES + n) * 8;
            if (column < HEAD_DIM) *(unsigned *)(out + i * p.out_stride.t + column) = two;
        }
    }
}

// Where a team works: the head, places in shared memory, and the head's rows of O, m and l in HBM.
struct Team {
    int number, warp, b, h, keys;
    unsigned k_tile, v_tile, q_tile;  // the block's K and V, the team's two Q
    float4 *parts;                    // this lane's
    float *maxima, *sums;             // (BR, TEAM_WARPS)
    long long first_row;
    float *m, *l;

    __device__ __forceinline__ Team(const Params &p, unsigned char *memory)
        : number(threadIdx.x / 32 / TEAM_WARPS), warp(threadIdx.x / 32 % TEAM_WARPS), b(blockIdx.x / p.heads),
          h(blockIdx.x % p.heads), keys(keys_of(p, b)), k_tile(shared_address(memory)), v_tile(k_tile + KV_BYTES),
          q_tile(v_tile + KV_BYTES + number * TEAM_BYTES), first_row((long long)blockIdx.x * p.padded_tq) {
        const int lane = threadIdx.x % 32;
        const long long n_rows = (long long)p.batch * p.heads * p.padded_tq;
        parts = (float4 *)(memory + (q_tile - k_tile) + 2 * Q_BYTES) + lane;
        maxima = (float *)(parts - lane) + PARTS_BYTES / 4, sums = maxima + BR * TEAM_WARPS;
        m = p.scratch + n_rows * PADDED_D + first_row, l = m + n_rows;
    }
};

// m and l of the rows of a query tile, of the keys before j0.
__device__ __forceinline__ void read_statistics(float (&m_row)[ROW_TILES][2], float (&l_row)[ROW_TILES][2],
                                                const Team &team, int i0, int j0) {
#pragma unroll
    for (int x = 0; x < 2 * ROW_TILES; x++) m_row[x / 2][x % 2] = -INFINITE, l_row[x / 2][x % 2] = 0.0f;
    if (j0)
#pragma unroll
        for (int x = 0; x < 2 * ROW_TILES; x++) {
            m_row[x / 2][x % 2] = team.m[i0 + row_of(x / 2, x % 2)];
            l_row[x / 2][x % 2] = team.l[i0 + row_of(x / 2, x % 2)];
        }
}

// Adds the team's sums to l of 16 rows, and computes the factors of the old O (`old_scale`) and of the new P V
// (`inverse_l`).
__device__ __forceinline__ void add_sums(float (&l)[2], const float *sums, int t, float (&old_scale)[2],
                                         float (&inverse_l)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float4 x = ((const float4 *)sums)[row_of(t, half)];
        const float total = l[half] + ((x.x + x.y) + (x.z + x.w));
        inverse_l[half] = total == 0.0f ? 0.0f : __fdividef(1.0f, total);
        old_scale[half] = l[half] * inverse_l[half];
        l[half] = total;
    }
}

// P V of the team's warps goes into O of the rows from i0 on: back to HBM, or after the last keys to out, with lse.
__device__ __forceinline__ void update_output(const Params &p, const Team &team,
                                              const Accumulator<ROW_TILES, D_STEPS> &o, float4 (&old)[OWN_TILES],
                                              float4 *to, float (&l_row)[ROW_TILES][2], int i0, int j0, bool last,
                                              float scale_log2) {
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++, to += D_TILES * 32) {
        if (t) team_barrier(team.number);  // all have read the parts of the rows before
        float4 o_share[OWN_TILES];
        share_parts(o.c[t], team.parts, o_share, team.warp);
        team_barrier(team.number);  // parts and sums are whole
        float old_scale[2], inverse_l[2];
        add_sums(l_row[t], team.sums, t, old_scale, inverse_l);
        add_parts(o_share, old, team.parts, old_scale, inverse_l, team.warp);
        if (t + 1 < ROW_TILES) read_fragment(old, to + D_TILES * 32, j0);
        if (last) {
            write_rows(p, o_share, team.m, l_row[t], team.b, team.h, i0, t, team.warp, scale_log2);
            continue;
        }
#pragma unroll
        for (int n = 0; n < OWN_TILES; n++) to[n * 32] = o_share[n];
        if (team.warp == 0 && threadIdx.x % 4 == 0)
            for (int half = 0; half < 2; half++) team.l[i0 + row_of(t, half)] = l_row[t][half];
    }
}

// out and lse of the rows that see no key, 0 and -inf. 4 threads a row, two columns of each 8.
__device__ __forceinline__ void write_keyless_rows(const Params &p, const Team &team) {
    const int keys = team.keys, lane = threadIdx.x % 32;
    const int n_keyless = keys ? min_of(query_range(p, 0, BC, keys - p.tq, BR, {}).lo, p.tq) : p.tq;
    element *out = matrix_of(p.out, p.out_stride, team.b, team.h) + lane % 4 * 2;
    for (int i = threadIdx.x / 4; i < n_keyless; i += THREADS / 4) {
        if (lane % 4 == 0) p.lse[(long long)blockIdx.x * p.tq + i] = -INFINITE;
        for (int n = 0; n < HEAD_DIM / 8; n++) *(unsigned *)(out + i * p.out_stride.t + n * 8) = 0;
    }
}

// A block a head. Tiles of keys; for each its queries, tile after tile, by the teams in turn.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) tilegpt_fa1_forward(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char memory[];  // K, V, then what each team has
    const Team team(p, memory);
    const int b = team.b, h = team.h, keys = team.keys;
    const element *q = matrix_of(p.q, p.q_stride, b, h);
    const element *k = matrix_of(p.k, p.k_stride, b, h / HEADS_PER_KV);
    const element *v = matrix_of(p.v, p.v_stride, b, h / HEADS_PER_KV);
    // Loader derives rows from threadIdx.x, which makes the rows of this team's threads too large by `row_offset`.
    const int row_offset = team.number * QLoader::STEP;
    const LdmatrixLanes<PADDED_D> as_stored(AS_STORED), transposed(TRANSPOSED);
    const float scale_log2 = exponent_scale(p);
    for (int j0 = 0; j0 < keys; j0 += BC) {
        const Range range = query_range(p, j0, BC, keys - p.tq, BR, {});
        if (range.lo >= range.hi) break;
        __syncthreads();  // all are done with K and V, and with rows of O, m and l that another team may go on with
        Loader<BC, THREADS>(k, p.k_stride.t, j0).load(team.k_tile, p.k_stride.t, keys - j0);
        Loader<BC, THREADS>(v, p.v_stride.t, j0).load(team.v_tile, p.v_stride.t, keys - j0);
        int i0 = range.lo + team.number * BR;
        QLoader next_q(q, p.q_stride.t, i0 - row_offset);
        auto load = [&](int start, int buffer) {
            const unsigned to = team.q_tile + buffer * Q_BYTES - row_offset * ROW_BYTES;
            if (start < range.hi) next_q.load(to, p.q_stride.t, p.tq - start + row_offset, TEAMS * BR);
            cp_async_commit_group();
        };
        load(i0, 0);
        cp_async_wait_group<0>();
        __syncthreads();  // K and V have landed
        for (int buffer = 0; i0 < range.hi; i0 += TEAMS * BR, buffer ^= 1) {
            float m_row[ROW_TILES][2], l_row[ROW_TILES][2];
            read_statistics(m_row, l_row, team, i0, j0);
            // No query of this tile sees a key of the next.
            const bool last = j0 + BC >= keys || (HAS_RIGHT && j0 + BC > i0 + BR - 1 + keys - p.tq + p.window_right);
            cp_async_wait_group<0>();
            team_barrier(team.number);  // this Q has landed; the team is done with the other, and with parts, maxima, sums
            load(i0 + TEAMS * BR, buffer ^ 1);
            Scores s;
            s.clear();
            add_product<D_STEPS, AS_STORED, TRANSPOSED>(s, as_stored, team.q_tile + buffer * Q_BYTES, transposed,
                                                        team.k_tile + team.warp * WARP_KEYS * ROW_BYTES);  // S = Q K^T
            const bool needs_mask = i0 < range.full_lo || i0 >= range.full_hi || j0 + BC > keys;
            if (SCALE_BEFORE_MAX || needs_mask)
                scale_and_mask(p, s, i0, j0 + team.warp * WARP_KEYS, keys, b, h, needs_mask);
            share_maxima(s, team.maxima, team.warp);
            team_barrier(team.number);  // maxima are whole, and all have read m
            online_softmax(s, m_row, l_row, team.m + i0, team.maxima, team.sums, team.warp, scale_log2);
            float4 *to = output_fragment(p, team.first_row + i0) + team.warp * OWN_TILES * 32, old[OWN_TILES];
            read_fragment(old, to, j0);
            Accumulator<ROW_TILES, D_STEPS> o;
            o.clear();
            // P V of this warp's keys
            add_product(o, s, as_stored, team.v_tile + team.warp * WARP_KEYS * ROW_BYTES);
            update_output(p, team, o, old, to, l_row, i0, j0, last, scale_log2);
        }
    }
    write_keyless_rows(p, team);
}
