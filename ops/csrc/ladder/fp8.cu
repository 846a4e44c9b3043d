// Stage 8, fp8 (Shah et al. 2024, section 3.3): these kernels convert q, k and v from 16 bits to 8 for fa3.cu
// with OPERANDS_8BIT, whose products then run at twice the rate on half the bytes.
//
// Idea. e4m3 has 3 mantissa bits and a largest value of 448, so each block of tokens has a scale: 64 queries or a tile
// of keys of a head share one, and V of a head has one. What remains is the error due to outliers, next to which the
// block's other numbers lose precision. With HADAMARD ("incoherent processing") q and k are first multiplied by the
// orthogonal matrix H S / sqrt(D), Sylvester's H with signs S that stay the same: <q, k> does not change, and an
// outlier is spread over D numbers. With INT8 q and k then are integers of 8 bits, not e4m3: with no outliers left,
// 255 even steps are finer.
// V. wgmma reads 8-bit operands only along the dimension that is summed over, which for P V is the keys, so V is
// written transposed. A thread holds S of keys 2c, 2c + 1, 2c + 8, 2c + 9, but must supply P of keys 4c .. 4c + 3.
// Therefore each 16 keys of V are stored in the order that makes the two the same, so P stays in registers.
//
// HBM traffic. q and k read once and written in half the bytes; V read twice and written once in half the bytes.
// Params: the 8-bit q, k and v, with PADDED_D numbers per row, are written to the pointers dq, dk and dv of a backward.
// scratch: the scales of q (B, Hq, queries / 64 in whole blocks), of k (B, Hkv, keys / BC) and of v (B, Hkv), then the
// largest magnitudes in each BC keys of v (B, Hkv, keys / BC), from which the scale of v is computed. With SCALES_GIVEN
// the scales of q and k are inputs.
#include "fp8_scales.cuh"
#include "hopper.cuh"

#define ROWS_PER_WARP (2048 / PADDED_D)  // so that a thread has 64 numbers
// of which 32 are of row ROW_OF(half) + lane / 4, in 128 columns from COLUMN_OF(half) on
#define ROW_OF(half) (PADDED_D == 128 ? 8 * (half) : 0)
#define COLUMN_OF(half) (PADDED_D == 128 ? 0 : 128 * (half))
#define WARPS (BC / ROWS_PER_WARP)
#define V_TILE 64  // keys that a block transposes
#define E4M3_MAX 448.0f
#define QK_MAX (INT8 ? 127.0f : E4M3_MAX)  // of q and k
// Lower bounds of the largest magnitude that a scale is computed from. A masked score, -inf, is multiplied by the
// scales of q and k, so neither these nor their product may be 0; and 448 divided by the largest magnitude of V must
// not be inf.
#define MIN_AMAX 1e-12f
#define MIN_AMAX_V 1e-30f

// Four numbers of q or k in 8 bits, the first lowest.
__device__ __forceinline__ unsigned quantise_four(const float *x, float factor) {
#if INT8
    unsigned packed = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)  // the sum is rounded to an integer, whose low 8 bits are those of its bit pattern
        packed |= ((unsigned)__float_as_int(fmaf(x[i], factor, INT8_MAGIC)) & 255) << 8 * i;
    return packed;
#else
    return pack_e4m3(x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor);
#endif
}

__device__ __forceinline__ void add_and_subtract(float &x, float &y) {
    const float sum = x + y;
    y = x - y, x = sum;
}

// Multiplies a warp's rows, as loaded from memory, by S and H. H is applied as the Kronecker product of H_16, by mma,
// and H of order PADDED_D / 16, within a thread. Column 32 j + 8 c + 4 i + 2 t + e is among the 16 bytes that lane
// 4 g + c has loaded. For mma it is column 8 t + 2 c + e of A (mma.cuh), whose rows g and g + 8 are the two halves, so
// that lanes exchange no data. What remains is H over i, j and, at D = 256, the halves.
__device__ __forceinline__ void transform(float (&x)[2][4][8], const uint4 (&rows)[2][4]) {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    const unsigned h = pack(__popc(2 * c & g) & 1 ? -1.0f : 1.0f, __popc((2 * c + 1) & g) & 1 ? -1.0f : 1.0f);
    unsigned signs[2];  // of a half's words, two of each, 16 bits apart
#pragma unroll
    for (int quad_lane = 0; quad_lane < 4; quad_lane++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            unsigned bits = 0;
#pragma unroll
            for (int word = 0; word < 16; word++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int column = COLUMN_OF(half) + word / 4 * 32 + 8 * quad_lane + word % 4 * 2 + e;
                    bits |= (hash_combine(0u, column) & 1) << (word + 16 * e);
                }
            if (c == quad_lane) signs[half] = bits;
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
    if (PADDED_D == 256)
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

// The largest magnitude of a thread's numbers; with KEEP_NAN it is NaN where one of them is.
template <bool KEEP_NAN> __device__ __forceinline__ float amax_of(const float (&values)[2][4][8]) {
    float amax = 0.0f;
#pragma unroll
    for (int n = 0; n < 64; n++) {
        const float x = fabsf(values[n / 32][n / 8 % 4][n % 8]);
        amax = KEEP_NAN ? max_nan(amax, x) : fmaxf(amax, x);
    }
    return amax;
}

// A block of BC rows of a head of q (blockIdx.y < Hq), of k (the next Hkv), or, for their largest number, of v.
extern "C" __global__ void __launch_bounds__(32 * WARPS, PADDED_D == 128 ? 2 : 1)
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
    const int token = first + warp * ROWS_PER_WARP + lane / 4;
    uint4 rows[2][4];
    float values[2][4][8], amax;
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
    // No integer is NaN, so a NaN in q or k makes their scale NaN; e4m3 has a NaN of its own.
    if (INT8 && !of_v)
        amax = amax_of<true>(values);
    else
        amax = amax_of<false>(values);
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) amax = max_nan(amax, __shfl_xor_sync(~0u, amax, lanes));
    if (lane == 0) largest[warp] = amax;
    __syncthreads();
    const int warps = (of_q ? FP8_QUERIES : BC) / ROWS_PER_WARP, first_warp = warp / warps * warps;  // that share a scale
    for (int other = first_warp; other < first_warp + warps; other++) amax = max_nan(amax, largest[other]);
    const int batch_head = b * heads + h;
    const Fp8Scales scales(p);
    if (of_v) {
        if (threadIdx.x == 0) scales.amax_v(p, batch_head)[blockIdx.x] = amax;
        return;
    }
    amax = max_nan(amax, MIN_AMAX);
    // The matrix is H S, and its 1 / sqrt(D) goes with the scale.
    const float norm = HADAMARD ? 1.0f / sqrtf((float)PADDED_D) : 1.0f;
    const int q_block = (first + first_warp * ROWS_PER_WARP) / FP8_QUERIES;
    float *scale = of_q ? scales.q + (long long)batch_head * scales.q_blocks + q_block
                        : scales.k + (long long)batch_head * scales.k_blocks + blockIdx.x;
    if (SCALES_GIVEN)
        amax = *scale / norm * QK_MAX;
    else if (lane == 0 && warp == first_warp)
        *scale = amax * norm / QK_MAX;
    const float inverse = QK_MAX / amax;
    unsigned *q8 = (unsigned *)p.dq, *k8 = (unsigned *)p.dk;  // there is no backward (ops/cuda/fp8.py)
    unsigned *to = (of_q ? q8 : k8) + (long long)batch_head * tokens * (PADDED_D / 4);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int at = token + ROW_OF(half);
        if (at >= tokens) break;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int column = COLUMN_OF(half) + 32 * j + lane % 4 * 8;
            *(uint2 *)(to + ((long long)at * PADDED_D + column) / 4) =
                uint2{quantise_four(values[half][j], inverse), quantise_four(values[half][j] + 4, inverse)};
        }
    }
}

// V_TILE keys of a head of V, transposed: (B, Hkv, PADDED_D, Tk rounded up to V_TILE).
extern "C" __global__ void __launch_bounds__(256) tilegpt_fp8_values(const __grid_constant__ Params p) {
    static __shared__ unsigned transposed[PADDED_D][V_TILE / 4 + 2];  // rows r and r + 8 begin 16 banks apart
    static __shared__ float largest[8];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * V_TILE;
    const int batch_head = blockIdx.z * p.kv_heads + blockIdx.y;
    const Fp8Scales scales(p);
    float amax = 0.0f;
    for (int block = threadIdx.x; block < scales.k_blocks; block += 256)
        amax = fmaxf(amax, scales.amax_v(p, batch_head)[block]);
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, lanes));
    if (lane == 0) largest[warp] = amax;
    __syncthreads();
    for (int other = 0; other < 8; other++) amax = fmaxf(amax, largest[other]);
    amax = fmaxf(amax, MIN_AMAX_V);
    if (blockIdx.x == 0 && threadIdx.x == 0) scales.v[batch_head] = amax / E4M3_MAX;
    const float inverse = E4M3_MAX / amax;
    const element *v = matrix_of(p.v, p.v_stride, blockIdx.z, blockIdx.y);
    for (int x = threadIdx.x; x < PADDED_D / 8 * (V_TILE / 4); x += 256) {
        const int word = x % (V_TILE / 4), part = x / (V_TILE / 4), token = first + word / 4 * 16 + word % 4 * 2;
        float four[4][8];  // of the keys whose places are 4 word and on
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int at = token + n / 2 * 8 + n % 2;
            load_part(four[n], v + at * p.v_stride.t, at < p.tk, part);
        }
#pragma unroll
        for (int e = 0; e < 8; e++)
            transposed[part * 8 + e][word] =
                pack_e4m3(four[0][e] * inverse, four[1][e] * inverse, four[2][e] * inverse, four[3][e] * inverse);
    }
    __syncthreads();
    const long long row = ceil_div(p.tk, V_TILE) * (V_TILE / 4);  // in words
    unsigned *v8 = (unsigned *)p.dv;
    unsigned *to = v8 + batch_head * PADDED_D * row + first / 4;
    for (int x = threadIdx.x; x < PADDED_D * (V_TILE / 4); x += 256)
        to[x / (V_TILE / 4) * row + x % (V_TILE / 4)] = transposed[x / (V_TILE / 4)][x % (V_TILE / 4)];
}
