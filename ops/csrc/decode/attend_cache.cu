// One query a row against a cache of int8 or int4 (ops/cache_view.py): a split of the keys, for the combining kernel of
// ops/triton/decode.py.
//
// The numbers go to tensor cores as they are stored, as integers. What they are multiplied by, q and the weights
// p * scale of V, are integers of 16 bits relative to their row's largest, of the weights that of a tile of BC keys:
// two products of 8 bits, whose sums are exact. The rows of an A tile are the high halves of up to 8 query heads, then
// their low halves. Compared with products of 16 bits, nothing is converted: V's bytes change places (a permutation for
// 4 of them), and of int4 the nibbles are parted.
//
// A warp copies its own tiles into its own ring of STAGES tiles, so that no barrier is in the loop.
//
// HBM traffic: the cache once. Limit: bytes in flight, 132 multiprocessors x BLOCKS x WARPS x (STAGES - 1) tiles.
//
// Defines beside attention.cuh's: BITS 8 or 4, PAGE tokens of a block (a multiple of 16; 0: no table), BC (a multiple
// of 32), WARPS, STAGES, BLOCKS.
#include "bytes.cuh"

#define PARTS (BITS == 4 ? 2 : 1)
#define ROW (HEAD_DIM * BITS / 8)  // bytes of a token
#define SIDE (BC * ROW)            // bytes of a tile of K, or of V
#define SCALES (2 * BC)            // bytes of the scales of a part
#define STAGE (2 * (SIDE + PARTS * SCALES))
#define CHUNKS (ROW / 16)          // that a lane copies a row in
#define STEPS (HEAD_DIM / 32)
#define LARGEST_Q 32639.0f  // 127 * 256 + 127
#define LARGEST_P 65535.0f
#define UNSEEN -1e30f  // the maximum of no scores, finite, so that differences are
static_assert(ROW == 64 || ROW == 128, "rows of 64 or 128 bytes are swizzled");
static_assert(BC % 32 == 0 && BC <= 128, "sums in int32 hold so many");
static_assert(PAGE % 16 == 0, "16 tokens lie in one block");
static_assert(HEADS_PER_KV <= 8, "an A tile has 8 rows for high halves");
static_assert(STAGE % 128 == 0 && STAGES >= 2, "what is swizzled begins at a multiple of 128 bytes");
static_assert(4 * HEADS_PER_KV * (HEAD_DIM + 2) <= STAGES * STAGE, "sums go over the rings");

// ops/cuda/attend_cache.py mirrors it. K and V have one layout, their scales another; strides in elements.
struct Launch {
    const element *q;                   // (B, Hq, 1, D)
    const unsigned char *k, *v;         // (N, Hkv, block, ROW)
    const unsigned short *k_scale, *v_scale;  // (N, Hkv, PARTS, block), bf16
    const int *table, *lengths;         // (B, n), (B,)
    float *parts, *statistics;          // (splits, B, Hq, D); (2, splits, B, Hq): maxima, sums
    long long q_b, q_h, k_n, k_h, k_t, scale_n, scale_h, scale_p, table_b;
    int kv_heads, splits, window_left;
    float scale;
};

// The chunks of 16 bytes that a lane copies of each tile.
struct Tiles {
    const unsigned char *k, *v;    // the lane's chunk of a row's first tile, or with a table of a block
    const unsigned short *scales;  // those of the lane's chunk of them
    const int *table;
    long long scale_n;
    int limit, t_stride, block;  // `block`: of 16 tokens of the next tile, by lane
    unsigned n_stride, at;       // `at`: where that block begins; both in 16 bytes

    __device__ __forceinline__ Tiles(const Launch &p, int b, int head, int keys) : limit(keys), block(b) {
        const int lane = threadIdx.x % 32, part = lane / (BC / 8);  // K's, then V's
        const long long own = head * p.k_h + lane / CHUNKS * p.k_t + lane % CHUNKS * 16 + (PAGE ? 0 : b * p.k_n);
        k = p.k + own, v = p.v + own, n_stride = (unsigned)(p.k_n / 16), t_stride = (int)p.k_t, scale_n = p.scale_n;
        scales = (part < PARTS ? p.k_scale : p.v_scale) + head * p.scale_h + part % PARTS * p.scale_p;
        table = PAGE ? p.table + b * p.table_b : nullptr;
    }

    // Looks up the blocks of a tile, which is then copied next.
    __device__ __forceinline__ void look_up(int tile) {
        const int j = tile * BC + threadIdx.x % (BC / 16) * 16;
        if (PAGE) block = table[(unsigned)max_of(min_of(j, limit - 1), 0) / (PAGE ? PAGE : 1)], at = block * n_stride;
    }

    __device__ __forceinline__ void copy(int tile, unsigned to) const {
        const int lane = threadIdx.x % 32, start = tile * BC;
#pragma unroll
        for (int x = 0; x < BC; x += 32 / CHUNKS) {  // as many rows lie in one block
            const int row = x + lane / CHUNKS;
            const long long begins = PAGE ? __shfl_sync(~0u, at, x / 16) * 16LL : 0;
            const int token = PAGE ? (unsigned)(start + x) % (PAGE ? PAGE : 1) : start + x;
            const long long from = begins + (long long)t_stride * token;
            const unsigned there = to + swizzled<ROW / 2>(row, lane % CHUNKS);
            cp_async_16(there, k + from, start + row < limit);
            cp_async_16(there + SIDE, v + from, start + row < limit);
        }
#pragma unroll
        for (int x = 0; x < 2 * PARTS * BC / 8; x += 32) {
            const int j = start + lane % (BC / 8) * 8;
            const long long of = PAGE ? __shfl_sync(~0u, block, lane % (BC / 8) / 2) : block;
            const unsigned short *from = scales + of * scale_n + (PAGE ? j % (PAGE ? PAGE : 1) : j);
            if (lane < 2 * PARTS * BC / 8) cp_async_16(to + 2 * SIDE + lane * 16, from, j < limit);
        }
    }
};
static_assert(2 * PARTS * BC / 8 <= 32, "a lane copies one chunk of scales");

// Integers of 8 bits from bytes as stored: themselves, or of int4 the low nibbles, or 16 times the high ones.
__device__ __forceinline__ unsigned numbers(unsigned bytes, int part) {
    return BITS == 8 ? bytes : bytes & (part ? 0xf0f0f0f0u : 0x0f0f0f0fu);
}

// What these are multiplied by for their values.
__device__ __forceinline__ float unit_of(int part) { return part ? 1.0f / 16 : 1.0f; }

// Nibbles are stored plus 8: sums of products with N left operands begin at -8 times the sums of these rows.
template <bool SIGNED, int N>
__device__ __forceinline__ void begin(int (&sums)[PARTS][4], const unsigned (&left)[N][4], int first, int part) {
    sums[part][0] = sums[part][1] = sums[part][2] = sums[part][3] = 0;
    const unsigned minus = part ? 0x80808080u : 0xf8f8f8f8u;
    if (BITS == 4)
#pragma unroll
        for (int x = 0; x < N / (SIGNED ? 2 : 1); x++)
            mma_bytes<SIGNED, true>(sums[part], left[first + x], minus, minus);
}

// Scales of two keys, neighbours from `at` on in shared memory.
__device__ __forceinline__ float2 two_scales(const unsigned char *at) {
    const unsigned both = *(const unsigned *)at;
    return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
}

// Over the four lanes of a row.
__device__ __forceinline__ float row_largest(float x) {
    x = larger(x, __shfl_xor_sync(~0u, x, 1));
    return larger(x, __shfl_xor_sync(~0u, x, 2));
}

// q of the key head's g-th query head as integers; gives what a product with them is multiplied by, with log2(e) and
// the scale.
__device__ __forceinline__ float load_q(const Launch &p, int b, int head, unsigned (&q)[STEPS][4]) {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    float x[STEPS][8], largest = 0.0f;
#pragma unroll
    for (int t = 0; t < STEPS; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const long long at = b * p.q_b + (head * HEADS_PER_KV + g) * p.q_h + 32 * t + 16 * half + 4 * c;
            const uint2 bits = g < HEADS_PER_KV ? *(const uint2 *)(p.q + at) : uint2{0, 0};
#pragma unroll
            for (int e = 0; e < 4; e++) {
                x[t][4 * half + e] = unpack(e < 2 ? bits.x : bits.y, e % 2);
                largest = larger(largest, fabsf(x[t][4 * half + e]));
            }
        }
    largest = row_largest(largest);
    const float inverse = largest > 1e-30f ? LARGEST_Q / largest : 0.0f;
#pragma unroll
    for (int t = 0; t < STEPS; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            unsigned n[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int i = (int)rintf(x[t][4 * half + e] * inverse);
                n[e] = i + ((i & 128) << 1);  // its low half is signed
            }
            halves(n[0], n[1], n[2], n[3], q[t][2 * half], q[t][2 * half + 1]);
        }
    return largest / LARGEST_Q * p.scale * LOG2E;
}

// Scores of a tile in powers of 2, of keys 8n + 2c, 8n + 2c + 1 and head g.
__device__ __forceinline__ void score(const unsigned char *tile, const unsigned (&q)[STEPS][4],
                                      const int (&zero)[PARTS][4], float factor, float (&s)[BC / 8][2]) {
    const int lane = threadIdx.x % 32;
    const unsigned rows = shared_address(tile) + swizzled<ROW / 2>(lane % 8, lane / 8);
#pragma unroll
    for (int n = 0; n < BC / 8; n++) {
        int dots[PARTS][4];
#pragma unroll
        for (int x = 0; x < PARTS * 4; x++) dots[x / 4][x % 4] = zero[x / 4][x % 4];
#pragma unroll
        for (int half = 0; half < ROW / 64; half++) {
            unsigned bytes[4];
            ldmatrix(bytes, (rows ^ half * 64) + n * 8 * ROW);
#pragma unroll
            for (int part = 0; part < PARTS; part++)
#pragma unroll
                for (int x = 0; x < 2; x++)
                    mma_bytes<true, BITS == 8>(dots[part], q[part * STEPS / PARTS + 2 * half + x],
                                               numbers(bytes[2 * x], part), numbers(bytes[2 * x + 1], part));
        }
        s[n][0] = s[n][1] = 0.0f;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const float2 scale = two_scales(tile + 2 * SIDE + part * SCALES + (8 * n + 2 * (lane % 4)) * 2);
            s[n][0] += (float)(dots[part][0] * 256 + dots[part][2]) * (scale.x * (factor * unit_of(part)));
            s[n][1] += (float)(dots[part][1] * 256 + dots[part][3]) * (scale.y * (factor * unit_of(part)));
        }
    }
}

// Weights p times the scales of V as integers relative to the row's largest, by part: (16 x 32) A tiles. `unit`: what a
// product with them is multiplied by.
__device__ __forceinline__ void weigh(const unsigned char *tile, const float (&p)[BC / 8][2],
                                      unsigned (&w)[PARTS][BC / 32][4], float (&unit)[PARTS]) {
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        float x[BC / 8][2], largest = 0.0f;
#pragma unroll
        for (int n = 0; n < BC / 8; n++) {
            const unsigned char *at = tile + 2 * SIDE + (PARTS + part) * SCALES;
            const float2 scale = two_scales(at + (8 * n + 2 * (threadIdx.x % 4)) * 2);
            // beyond the last key a scale may be anything
            x[n][0] = p[n][0] > 0.0f ? p[n][0] * scale.x : 0.0f;
            x[n][1] = p[n][1] > 0.0f ? p[n][1] * scale.y : 0.0f;
            largest = larger(largest, larger(x[n][0], x[n][1]));
        }
        largest = row_largest(largest);
        const float inverse = largest > 1e-30f ? LARGEST_P / largest : 0.0f;
        unit[part] = largest * (unit_of(part) / LARGEST_P);
#pragma unroll
        for (int n = 0; n < BC / 8; n += 2) {
            unsigned i[4];  // added to 2^23, a float's last bits are its integer
#pragma unroll
            for (int e = 0; e < 4; e++) i[e] = __float_as_uint(x[n + e / 2][e % 2] * inverse + 8388608.0f);
            halves(i[0], i[1], i[2], i[3], w[part][n / 4][n % 4], w[part][n / 4][n % 4 + 1]);
        }
    }
}

// sums = sums * rescale + unit * w V. Of a chunk of 16 channels a lane has 4c .. 4c + 3.
__device__ __forceinline__ void add_values(const unsigned char *tile, const unsigned (&w)[PARTS][BC / 32][4],
                                           const float (&unit)[PARTS], float rescale,
                                           float (&sums)[PARTS][ROW / 16][4]) {
    const unsigned rows = shared_address(tile) + SIDE + swizzled<ROW / 2>(threadIdx.x % 32, 0);
    int zero[PARTS][4];
#pragma unroll
    for (int part = 0; part < PARTS; part++) begin<false>(zero, w[part], 0, part);
#pragma unroll
    for (int chunk = 0; chunk < ROW / 16; chunk++) {
        int dots[2][PARTS][4];  // of even and of odd channels
#pragma unroll
        for (int x = 0; x < 2 * PARTS * 4; x++) dots[x % 2][x / 8][x / 2 % 4] = zero[x / 8][x / 2 % 4];
#pragma unroll
        for (int k = 0; k < BC / 32; k++) {
            unsigned pairs[4];  // two channels of each of two keys
            ldmatrix_trans(pairs, (rows ^ chunk << 4) + k * 32 * ROW);
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                const unsigned order = odd ? 0x7531 : 0x6420;
                const unsigned low = __byte_perm(pairs[0], pairs[1], order);
                const unsigned high = __byte_perm(pairs[2], pairs[3], order);
#pragma unroll
                for (int part = 0; part < PARTS; part++)
                    mma_bytes<false, BITS == 8>(dots[odd][part], w[part][k], numbers(low, part), numbers(high, part));
            }
        }
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int(&of)[4] = dots[e % 2][part];
                float &sum = sums[part][chunk][e];
                sum = sum * rescale + (float)(of[e / 2] * 256 + of[e / 2 + 2]) * unit[part];
            }
    }
}

// The warps' sums to one, and to global memory.
__device__ __forceinline__ void store(const Launch &p, unsigned char *room, int split, int kv_row, float m, float total,
                                      const float (&sums)[PARTS][ROW / 16][4]) {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4, warp = threadIdx.x / 32;
    float *const parts = (float *)room, *const maxima = parts + WARPS * HEADS_PER_KV * HEAD_DIM;
    float *const totals = maxima + WARPS * HEADS_PER_KV;
    if (g < HEADS_PER_KV) {
        const int row = warp * HEADS_PER_KV + g;
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
            for (int chunk = 0; chunk < ROW / 16; chunk++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    parts[row * HEAD_DIM + part * ROW + chunk * 16 + 4 * c + e] = sums[part][chunk][e];
        if (c == 0) maxima[row] = m, totals[row] = total;
    }
    __syncthreads();
    const int kv_rows = gridDim.x / p.splits;
    const long long first = ((long long)split * kv_rows + kv_row) * HEADS_PER_KV;
    const long long all = (long long)gridDim.x * HEADS_PER_KV;
    for (int x = threadIdx.x; x < HEADS_PER_KV * HEAD_DIM; x += WARPS * 32) {
        const int head = x / HEAD_DIM;
        float row_max = UNSEEN, sum = 0.0f, weight = 0.0f;
        for (int w = 0; w < WARPS; w++) row_max = larger(row_max, maxima[w * HEADS_PER_KV + head]);
        for (int w = 0; w < WARPS; w++) {
            const float factor = exp2_of(maxima[w * HEADS_PER_KV + head] - row_max);
            sum += parts[w * HEADS_PER_KV * HEAD_DIM + x] * factor, weight += totals[w * HEADS_PER_KV + head] * factor;
        }
        p.parts[first * HEAD_DIM + x] = sum;
        if (x % HEAD_DIM == 0) {
            p.statistics[first + head] = row_max <= UNSEEN ? -INFINITE : row_max * LN2;
            p.statistics[all + first + head] = weight;
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)
    tilegpt_attend_bytes(const __grid_constant__ Launch p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int split = blockIdx.x % p.splits, kv_row = blockIdx.x / p.splits;
    const int b = kv_row / p.kv_heads, head = kv_row % p.kv_heads, limit = p.lengths[b];
    const int edge = HAS_LEFT ? max_of(0, limit - 1 - p.window_left) : 0;  // the first key that is seen
    const int lo = edge / BC, n_tiles = ceil_div(limit, BC) - lo;
    const int first = lo + (int)((long long)split * n_tiles / p.splits) + warp;
    const int last = lo + (int)((split + 1LL) * n_tiles / p.splits);
    unsigned char *const ring = memory + warp * STAGES * STAGE;
    griddepcontrol_launch_dependents();

    Tiles tiles(p, b, head, limit);
    int next = first;
    tiles.look_up(next);
    for (int stage = 0; stage < STAGES - 1; stage++, next += WARPS) {
        if (next < last) tiles.copy(next, shared_address(ring) + stage * STAGE);
        tiles.look_up(next + WARPS);
        cp_async_commit_group();
    }
    unsigned q[STEPS][4];
    const float factor = load_q(p, b, head, q);
    int zero[PARTS][4];
#pragma unroll
    for (int part = 0; part < PARTS; part++) begin<true>(zero, q, part * STEPS / PARTS, part);
    float m = UNSEEN, total = 0.0f, sums[PARTS][ROW / 16][4] = {};
    for (int tile = first, stage = 0; tile < last; tile += WARPS, next += WARPS) {
        cp_async_wait_group<STAGES - 2>();
        __syncwarp();
        if (next < last) tiles.copy(next, shared_address(ring) + (stage ? stage - 1 : STAGES - 1) * STAGE);
        tiles.look_up(next + WARPS);
        cp_async_commit_group();
        const unsigned char *const here = ring + stage * STAGE;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        float s[BC / 8][2], row_max = m;
        score(here, q, zero, factor, s);
        if (tile * BC + BC > limit || tile * BC < edge)
#pragma unroll
            for (int x = 0; x < BC / 4; x++) {
                const int j = tile * BC + x / 2 * 8 + lane % 4 * 2 + x % 2;
                if (j >= limit || j < edge) s[x / 2][x % 2] = -INFINITE;
            }
#pragma unroll
        for (int x = 0; x < BC / 4; x++) row_max = larger(row_max, s[x / 2][x % 2]);
        row_max = row_largest(row_max);
        const float rescale = exp2_of(m - row_max);
        total *= rescale, m = row_max;
#pragma unroll
        for (int x = 0; x < BC / 4; x++) total += s[x / 2][x % 2] = exp2_of(s[x / 2][x % 2] - m);
        unsigned w[PARTS][BC / 32][4];
        float unit[PARTS];
        weigh(here, s, w, unit);
        add_values(here, w, unit, rescale, sums);
    }
    cp_async_wait_group<0>();
    __syncthreads();
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    store(p, memory, split, kv_row, m, total, sums);
}
