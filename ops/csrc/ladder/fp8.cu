// Attention in fp8 (Shah et al. 2024, section 3.3): what makes q, k and v of 16 bits e4m3 for fa3.cu with FP8, whose
// products then have twice the rate, and half the bytes.
//
// Idea. e4m3 has 3 bits behind the point and ends at 448, so a scale goes with each block of tokens: 64 queries or a
// tile of keys of a head share one, and V of a head has one. What is left is the error of outliers, beside which the
// block's other numbers lose bits. With HADAMARD ("incoherent processing") q and k are first multiplied by the orthogonal matrix
// H S / sqrt(D), Sylvester's H with signs S that stay the same: <q, k> does not change, and an outlier is spread over D
// numbers. With INT8 q and k then are integers of 8 bits, not e4m3: with no outliers left, 255 even steps are finer.
// V. wgmma takes operands of 8 bits along the reduction alone, which for P V is the keys: V is written transposed. And
// a thread that holds S of keys 2c, 2c + 1, 2c + 8, 2c + 9 is to hold P of 4c .. 4c + 3: in V 16 keys lie in the order
// that makes both the same, so that P stays in registers as it is.
//
// HBM traffic. q and k read once and written in half the bytes; V read twice, written once.
// Params: q, k and v in 8 bits, with PAD_D numbers a row, lie where a backward has dq, dk and dv. scratch: the scales,
// of (B, Hq, queries / 64 in whole blocks), (B, Hkv, keys / BC), (B, Hkv) and, before the last is known, what
// it is the largest of, (B, Hkv, keys / BC). With GIVEN the scales of q and k are there already.
#include "fp8_scales.cuh"
#include "hopper.cuh"

#define ROWS_EACH (2048 / PAD_D)  // of a warp, so that a thread has 64 numbers
// of which 32 are of row 8 * ROW_OF(half) + lane / 4, in 128 columns from COLUMN_OF(half) on
#define ROW_OF(half) (PAD_D == 128 ? 8 * (half) : 0)
#define COLUMN_OF(half) (PAD_D == 128 ? 0 : 128 * (half))
#define WARPS (BC / ROWS_EACH)
#define VALUES 64  // keys that a block transposes
#define E4M3_MOST 448.0f
#define MOST (INT8 ? 127.0f : E4M3_MOST)  // of q and k
// The largest number that a scale is made of is at least this: a score that a mask has made -inf is multiplied by the
// scales of q and k, which must not be 0, nor their product; and 448 over that of V must not be inf.
#define LEAST 1e-12f
#define LEAST_OF_V 1e-30f

// Four numbers of q or k in 8 bits, the first lowest.
__device__ __forceinline__ unsigned round_four(const float *x, float factor) {
#if INT8
    unsigned packed = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)  // the sum rounds to whole numbers, whose low bits are the last of its own
        packed |= ((unsigned)__float_as_int(fmaf(x[i], factor, INT8_ORIGIN)) & 255) << 8 * i;
    return packed;
#else
    return pack_e4m3(x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor);
#endif
}

__device__ __forceinline__ void add_and_subtract(float &x, float &y) {
    const float sum = x + y;
    y = x - y, x = sum;
}

// Rows of a warp as they lie in memory, and times S and H, as the product of H of 16, by mma, and one of PAD_D / 16 within a
// thread. Column 32 j + 8 c + 4 i + 2 t + e is among the 16 bytes that lane 4 g + c has loaded. To mma it is column
// 8 t + 2 c + e of A (mma.cuh), whose rows g and g + 8 are the halves: no lane needs another's. What is left is H of i, j
// and, at D = 256, the halves.
__device__ __forceinline__ void transform(float (&x)[2][4][8], const uint4 (&rows)[2][4]) {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    const unsigned h = pack(__popc(2 * c & g) & 1 ? -1.0f : 1.0f, __popc((2 * c + 1) & g) & 1 ? -1.0f : 1.0f);
    unsigned signs[2];  // of a half's words, two of each, 16 bits apart
#pragma unroll
    for (int of = 0; of < 4; of++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            unsigned bits = 0;
#pragma unroll
            for (int word = 0; word < 16; word++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int column = COLUMN_OF(half) + word / 4 * 32 + 8 * of + word % 4 * 2 + e;
                    bits |= (absorb(0u, column) & 1) << (word + 16 * e);
                }
            if (c == of) signs[half] = bits;
        }
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            unsigned a[4];
#pragma unroll
            for (int x = 0; x < 4; x++) {
                const int half = x % 2, t = x / 2;
                const uint4 &row = rows[half][j];
                const unsigned two = i ? (t ? row.w : row.z) : (t ? row.y : row.x);
                a[x] = two ^ (signs[half] << (15 - (4 * j + 2 * i + t)) & 0x80008000u);
            }
#pragma unroll
            for (int n = 0; n < 2; n++) {
                float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                mma(sums, a, h, n ? h ^ 0x80008000u : h);
#pragma unroll
                for (int e = 0; e < 4; e++) x[e / 2][j][4 * i + 2 * n + e % 2] = sums[e];
            }
        }
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int step = 4; step < 32; step *= 2)  // 4: i; 8 and 16: j
#pragma unroll
            for (int n = 0; n < 32; n++)
                if (!(n & step)) add_and_subtract(x[half][n / 8][n % 8], x[half][(n + step) / 8][(n + step) % 8]);
    if (PAD_D == 256)
#pragma unroll
        for (int n = 0; n < 32; n++) add_and_subtract(x[0][n / 8][n % 8], x[1][n / 8][n % 8]);
}

// N numbers of a row, from column N * part on; zeros beyond D, and where the row is not `inside`.
template <int N> __device__ __forceinline__ void load_part(float (&x)[N], const element *row, bool inside, int part) {
#pragma unroll
    for (int e = 0; e < N; e += 8) {
        alignas(16) element a[8];
        const bool here = inside && part * N + e < HEAD_DIM;
        if (here) *(uint4 *)a = *(const uint4 *)(row + part * N + e);
#pragma unroll
        for (int i = 0; i < 8; i++) x[e + i] = here ? (float)a[i] : 0.0f;
    }
}

// A block of BC rows of a head of q (blockIdx.y < Hq), of k (the next Hkv), or, for their largest number, of v.
extern "C" __global__ void __launch_bounds__(32 * WARPS, PAD_D == 128 ? 2 : 1)
    tilegpt_fp8_rows(const __grid_constant__ Params p) {
    static __shared__ float largest[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * BC, b = blockIdx.z;
    const bool of_q = (int)blockIdx.y < p.heads, of_v = (int)blockIdx.y >= p.heads + p.kv_heads;
    const int heads = of_q ? p.heads : p.kv_heads, tokens = of_q ? p.tq : p.tk;
    const int h = blockIdx.y - (of_q ? 0 : of_v ? p.heads + p.kv_heads : p.heads);
    if (first >= tokens) return;
    const element *x = of_q ? matrix_of(p.q, p.q_stride, b, h) : of_v ? matrix_of(p.v, p.v_stride, b, h)
                                                                      : matrix_of(p.k, p.k_stride, b, h);
    const long long stride = of_q ? p.q_stride.t : of_v ? p.v_stride.t : p.k_stride.t;
    const int token = first + warp * ROWS_EACH + lane / 4;
    uint4 rows[2][4];
    float values[2][4][8], most = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int at = token + ROW_OF(half), column = COLUMN_OF(half) + 32 * j + lane % 4 * 8;
            const bool inside = at < tokens && column < HEAD_DIM;
            rows[half][j] = inside ? *(const uint4 *)(x + at * stride + column) : uint4{0, 0, 0, 0};
        }
    if (HADAMARD && !of_v)
        transform(values, rows);
    else
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const uint4 &row = rows[j / 4][j % 4];
            const unsigned words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
            for (int e = 0; e < 8; e++) values[j / 4][j % 4][e] = unpack(words[e / 2], e % 2);
        }
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int e = 0; e < 8; e++) most = fmaxf(most, fabsf(values[j / 4][j % 4][e]));
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
    if (lane == 0) largest[warp] = most;
    __syncthreads();
    const int warps = (of_q ? FP8_QUERIES : BC) / ROWS_EACH, from = warp / warps * warps;  // that share a scale
    for (int other = from; other < from + warps; other++) most = fmaxf(most, largest[other]);
    const int head = b * heads + h;
    const Fp8Scales scales(p);
    if (of_v) {
        if (threadIdx.x == 0) scales.largest_v(p, head)[blockIdx.x] = most;
        return;
    }
    most = fmaxf(most, LEAST);
    // The matrix is H S, and its 1 / sqrt(D) goes with the scale.
    const float norm = HADAMARD ? 1.0f / sqrtf((float)PAD_D) : 1.0f;
    float *scale = of_q ? scales.q + (long long)head * scales.q_blocks + (first + from * ROWS_EACH) / FP8_QUERIES
                        : scales.k + (long long)head * scales.k_blocks + blockIdx.x;
    if (GIVEN)
        most = *scale / norm * MOST;
    else if (lane == 0 && warp == from)
        *scale = most * norm / MOST;
    const float inverse = MOST / most;
    unsigned *to = (unsigned *)(of_q ? p.dq : p.dk) + (long long)head * tokens * (PAD_D / 4);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int at = token + ROW_OF(half);
        if (at >= tokens) break;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int column = COLUMN_OF(half) + 32 * j + lane % 4 * 8;
            *(uint2 *)(to + ((long long)at * PAD_D + column) / 4) =
                uint2{round_four(values[half][j], inverse), round_four(values[half][j] + 4, inverse)};
        }
    }
}

// VALUES keys of a head of V, transposed: (B, Hkv, PAD_D, Tk rounded up to VALUES).
extern "C" __global__ void __launch_bounds__(256) tilegpt_fp8_values(const __grid_constant__ Params p) {
    static __shared__ unsigned turned[PAD_D][VALUES / 4 + 2];  // a row's 8th follower is 16 banks on
    static __shared__ float largest[8];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * VALUES;
    const int head = blockIdx.z * p.kv_heads + blockIdx.y;
    const Fp8Scales scales(p);
    float most = 0.0f;
    for (int block = threadIdx.x; block < scales.k_blocks; block += 256)
        most = fmaxf(most, scales.largest_v(p, head)[block]);
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
    if (lane == 0) largest[warp] = most;
    __syncthreads();
    for (int other = 0; other < 8; other++) most = fmaxf(most, largest[other]);
    most = fmaxf(most, LEAST_OF_V);
    if (blockIdx.x == 0 && threadIdx.x == 0) scales.v[head] = most / E4M3_MOST;
    const float inverse = E4M3_MOST / most;
    const element *v = matrix_of(p.v, p.v_stride, blockIdx.z, blockIdx.y);
    for (int x = threadIdx.x; x < PAD_D / 8 * (VALUES / 4); x += 256) {
        const int word = x % (VALUES / 4), part = x / (VALUES / 4), token = first + word / 4 * 16 + word % 4 * 2;
        float four[4][8];  // of the keys whose places are 4 word and on
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int at = token + n / 2 * 8 + n % 2;
            load_part(four[n], v + at * p.v_stride.t, at < p.tk, part);
        }
#pragma unroll
        for (int e = 0; e < 8; e++)
            turned[part * 8 + e][word] =
                pack_e4m3(four[0][e] * inverse, four[1][e] * inverse, four[2][e] * inverse, four[3][e] * inverse);
    }
    __syncthreads();
    const long long row = ceil_div(p.tk, VALUES) * (VALUES / 4);  // in words
    unsigned *to = (unsigned *)p.dv + head * PAD_D * row + first / 4;
    for (int x = threadIdx.x; x < PAD_D * (VALUES / 4); x += 256)
        to[x / (VALUES / 4) * row + x % (VALUES / 4)] = turned[x / (VALUES / 4)][x % (VALUES / 4)];
}
