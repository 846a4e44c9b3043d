// What a GPU gives at most: each kernel keeps one unit busy and nothing else, so that the stages of the ladder can be
// held against it (scripts/measure/instruments/ceilings.py; no attention calls these).
//
// A kernel does the same `steps` times over. `cycles` gets the clocks of each block, which tell the rate per clock
// apart from what the clock was. What is computed is stored only where it cannot be, for the compiler not to drop it.
struct Params {
    const uint4 *data;       // what the memory kernels read
    long long *cycles;       // (blocks,)
    float *sink;             // (1,), never written
    long long size;          // of data, in units of 16 bytes
    int steps;
    float a, b;              // numbers that the compiler does not know
};

static_assert(sizeof(Params) == PARAMS_BYTES, "scripts/measure/instruments/ceilings.py and struct Params differ");

#define KERNEL(name, threads) \
    extern "C" __global__ void __launch_bounds__(threads) tilegpt_ceiling_##name(const __grid_constant__ Params p)
#define THREADS 256
#define CHAINS 8             // independent results of a thread, to hide the latency of each
#define SHARED_BYTES 32768   // of the shared-memory kernels

__device__ __forceinline__ unsigned shared_address(const void *x) { return (unsigned)__cvta_generic_to_shared(x); }

__device__ __forceinline__ void finish(const Params &p, long long began, float x) {
    __syncthreads();
    if (threadIdx.x == 0) p.cycles[blockIdx.x] = clock64() - began;
    if (x == p.b * 1.2345e38f) *p.sink = x;
}

// Tensor cores: mma.sync, 16 x 8 x 16 in bf16, 4,096 FLOPs a warp, CHAINS sums side by side.
KERNEL(mma, THREADS) {
    unsigned a[4], b[2];
    // bf16 pairs in [1, 2) of either sign: zeros would cost less power
    for (int i = 0; i < 4; i++) a[i] = (threadIdx.x * 2654435761u + i * 40503u) & 0x807f807fu | 0x3f803f80u;
    for (int i = 0; i < 2; i++) b[i] = (threadIdx.x * 40503u + i * 2654435761u) & 0x807f807fu | 0x3f803f80u;
    float c[CHAINS][4] = {};
    const long long began = clock64();
    for (int step = 0; step < p.steps; step++)
#pragma unroll
        for (int i = 0; i < CHAINS; i++)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                         "{%0,%1,%2,%3};\n"
                         : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    float sum = 0.0f;
    for (int i = 0; i < CHAINS; i++) sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
    finish(p, began, sum);
}

// FMA in fp32: 2 FLOPs a thread and chain.
KERNEL(fma, THREADS) {
    float x[CHAINS];
    for (int i = 0; i < CHAINS; i++) x[i] = threadIdx.x + i;
    const long long began = clock64();
    for (int step = 0; step < p.steps; step++)
#pragma unroll
        for (int i = 0; i < CHAINS; i++) x[i] = x[i] * p.a + p.b;
    float sum = 0.0f;
    for (int i = 0; i < CHAINS; i++) sum += x[i];
    finish(p, began, sum);
}

// exp2, one a thread and chain.
KERNEL(exp2, THREADS) {
    float x[CHAINS];
    for (int i = 0; i < CHAINS; i++) x[i] = -1.0f - (threadIdx.x + i) * 1e-3f;
    const long long began = clock64();
    for (int step = 0; step < p.steps; step++)
#pragma unroll
        for (int i = 0; i < CHAINS; i++) asm volatile("ex2.approx.ftz.f32 %0, %0;\n" : "+f"(x[i]));
    float sum = 0.0f;
    for (int i = 0; i < CHAINS; i++) sum += x[i];
    finish(p, began, sum);
}

// Reads `data`, all blocks together, `steps` times: DRAM's bandwidth where it exceeds the L2, else the L2's. Loads pass
// by the L1 (.cg), CHAINS of them in flight; `size` is a multiple of what the grid loads at once.
KERNEL(read, THREADS) {
    const long long first = (long long)blockIdx.x * THREADS + threadIdx.x, at_once = (long long)gridDim.x * THREADS;
    unsigned sum = 0;
    const long long began = clock64();
    for (int step = 0; step < p.steps; step++)
        for (long long i = first; i < p.size; i += CHAINS * at_once) {
            uint4 x[CHAINS];
#pragma unroll
            for (int n = 0; n < CHAINS; n++)
                asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];\n"
                             : "=r"(x[n].x), "=r"(x[n].y), "=r"(x[n].z), "=r"(x[n].w)
                             : "l"(p.data + i + n * at_once));
#pragma unroll
            for (int n = 0; n < CHAINS; n++) sum ^= x[n].x ^ x[n].y ^ x[n].z ^ x[n].w;
        }
    finish(p, began, __uint_as_float(sum & 0x7fffffffu));
}

// Reads shared memory without conflicts, 16 bytes a thread and chain. Volatile in PTX too: ptxas reads what nobody
// writes once for four steps.
KERNEL(shared, THREADS) {
    __shared__ uint4 tile[SHARED_BYTES / 16];
    for (int i = threadIdx.x; i < SHARED_BYTES / 16; i += THREADS) tile[i] = make_uint4(i, p.steps, i, i);
    __syncthreads();
    unsigned sum = 0;
    const unsigned from = shared_address(tile + threadIdx.x);
    const long long began = clock64();
    for (int step = 0; step < p.steps; step++) {
        uint4 x[CHAINS];
#pragma unroll
        for (int n = 0; n < CHAINS; n++)
            asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n"
                         : "=r"(x[n].x), "=r"(x[n].y), "=r"(x[n].z), "=r"(x[n].w)
                         : "r"(from + n * THREADS * 16));
#pragma unroll
        for (int n = 0; n < CHAINS; n++) sum ^= x[n].x ^ x[n].y ^ x[n].z ^ x[n].w;
    }
    finish(p, began, __uint_as_float(sum & 0x7fffffffu));
}

// One thread follows a chain of addresses that begins at `data`. A load waits for the one before, so a step is a
// latency: the L2's or DRAM's, by how much memory the chain goes through.
KERNEL(chase, 1) {
    const uint4 *at = p.data;
    const long long began = clock64();
    for (int step = 0; step < p.steps; step++) asm volatile("ld.global.cg.u64 %0, [%0];\n" : "+l"(at));
    finish(p, began, __uint_as_float((unsigned)(unsigned long long)at));
}

// The same in shared memory.
KERNEL(chase_shared, 1) {
    __shared__ unsigned chain[1024];
    const unsigned base = shared_address(chain);
    for (int i = 0; i < 1024; i++) chain[i] = base + (i * 4 + 132) % 4096;
    __syncthreads();  // asm is not to come before the stores
    unsigned at = base;
    const long long began = clock64();
    for (int step = 0; step < p.steps; step++) asm volatile("ld.shared.u32 %0, [%0];\n" : "+r"(at));
    finish(p, began, __uint_as_float(at));
}
