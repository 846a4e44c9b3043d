// The softmax of a row by itself, read three times or two (scripts/measure/studies/softmax_passes.py; no attention calls
// these). The probabilities cannot be written before the row's maximum and sum are known, so one pass is not enough;
// attention gets by with one, as its output is a sum that can be scaled again (ladder/fa2.cu).
//
//   three  max(x)                    then  sum exp(x - max)                       then  write
//   two    max(x) and sum exp(x - max) at once, the sum scaled again where the maximum grows   then  write
//
// A block a row, 16 bytes a thread and load; every pass asks for the row from global memory.
struct Params {
    const float4 *x;  // (rows, columns / 4)
    float4 *y;        // the same
    int columns;      // in units of 16 bytes
};

static_assert(sizeof(Params) == PARAMS_BYTES, "scripts/measure/instruments/softmax.py and struct Params differ");

#define KERNEL(name) extern "C" __global__ void __launch_bounds__(THREADS) tilegpt_softmax_##name(const Params p)
#define THREADS 256
#define INFINITE __int_as_float(0x7f800000)

struct Maximum {
    static __device__ float combine(float a, float b) { return fmaxf(a, b); }
};
struct Sum {
    static __device__ float combine(float a, float b) { return a + b; }
};

// Of all threads of the block, in each of them.
template <class Op> __device__ float over_block(float x) {
    static __shared__ float warps[THREADS / 32];
    for (int lanes = 16; lanes; lanes /= 2) x = Op::combine(x, __shfl_xor_sync(~0u, x, lanes));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = warps[0];
    for (int warp = 1; warp < THREADS / 32; warp++) x = Op::combine(x, warps[warp]);
    __syncthreads();
    return x;
}

__device__ float largest(float4 x) { return fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)); }

__device__ float4 exponentials(float4 x, float max) {
    return {__expf(x.x - max), __expf(x.y - max), __expf(x.z - max), __expf(x.w - max)};
}

__device__ float summed(float4 x) { return (x.x + x.y) + (x.z + x.w); }

// The last pass of both.
__device__ void write(const Params &p, const float4 *row, float max, float sum) {
    float4 *y = p.y + (long long)blockIdx.x * p.columns;
    const float inverse = 1.0f / sum;
    for (int i = threadIdx.x; i < p.columns; i += THREADS) {
        const float4 e = exponentials(row[i], max);
        y[i] = {e.x * inverse, e.y * inverse, e.z * inverse, e.w * inverse};
    }
}

KERNEL(three_passes) {
    const float4 *row = p.x + (long long)blockIdx.x * p.columns;
    float max = -INFINITE, sum = 0.0f;
    for (int i = threadIdx.x; i < p.columns; i += THREADS) max = fmaxf(max, largest(row[i]));
    max = over_block<Maximum>(max);
    for (int i = threadIdx.x; i < p.columns; i += THREADS) sum += summed(exponentials(row[i], max));
    write(p, row, max, over_block<Sum>(sum));
}

KERNEL(two_passes) {
    const float4 *row = p.x + (long long)blockIdx.x * p.columns;
    float max = -INFINITE, sum = 0.0f;
    for (int i = threadIdx.x; i < p.columns; i += THREADS) {
        const float4 x = row[i];
        const float grown = fmaxf(max, largest(x));
        sum = sum * __expf(max - grown) + summed(exponentials(x, grown));
        max = grown;
    }
    const float all = over_block<Maximum>(max);  // a thread that has seen nothing adds 0
    write(p, row, all, over_block<Sum>(sum * __expf(max - all)));
}
