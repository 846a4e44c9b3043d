// Hopper's own instructions under their PTX names, for sm_90a: mbarriers, copies by TMA through tensor maps, wgmma, named
// barriers, registers that move between warp groups.
//
// A tile in shared memory is what TMA writes and wgmma reads: boxes of BOX_COLUMNS columns (128 or 64 bytes a row), one
// after the other, their 16-byte chunks swizzled within groups of 8 rows. All tiles begin at multiples of 1,024 bytes.
#pragma once
#include "mma.cuh"

#ifndef BOX_COLUMNS
#define BOX_COLUMNS (PADDED_D % 64 ? 32 : 64)
#endif
#define BOXES (PADDED_D / BOX_COLUMNS)  // of a tile
#ifndef USED_D
#define USED_D PADDED_D  // columns that are multiplied
#endif
#define BOX_ROW_BYTES (BOX_COLUMNS * 2)

// With OPERANDS_8BIT what is multiplied is e4m3 or int8, which TMA and shared memory have as pairs: PADDED_D / 2 columns
// of 16 bits.
#ifndef OPERANDS_8BIT
#define OPERANDS_8BIT 0
#endif
// With INT8 as well, Q and K are integers of 8 bits, and their sums, from this float on, whose last bit is worth 1,
// are floats too up to 2^22 in absolute value: no instruction converts them. (One that does has the rate of ex2.)
#ifndef INT8
#define INT8 0
#endif
#define INT8_MAGIC 12582912.0f  // 1.5 * 2^23
#define OPERAND_BYTES (OPERANDS_8BIT ? 1 : 2)
#define OPERAND_BOXES (OPERANDS_8BIT ? BOXES / 2 : BOXES)
#define WGMMA_K (OPERANDS_8BIT ? 32 : 16)  // of the reduction, in a wgmma

// 128 bytes that the driver has filled in (cuTensorMapEncodeTiled); a 4-d tensor (D, T, H, B).
struct __align__(64) TensorMap {
    unsigned long long opaque[16];
};

// --- mbarriers

__device__ __forceinline__ void mbarrier_init(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// What was initialised is seen by the copy engine and by the other blocks of a cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ bool mbarrier_try_wait(unsigned barrier, unsigned parity) {
    unsigned done;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done;
}
// Until the phase of this parity is over. A fault in the order of barriers hangs; with BOUNDED_WAITS it traps.
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
#if BOUNDED_WAITS
    for (int tries = 0; !mbarrier_try_wait(barrier, parity); tries++)
        if (tries > BOUNDED_WAITS) asm volatile("trap;");
#else
    while (!mbarrier_try_wait(barrier, parity));
#endif
}

// Where a pipeline is in its ring of buffers, and the parity of the phase in which this one is filled: CUTLASS's
// PipelineState.
template <int BUFFERS> struct PipelineState {
    int index;
    unsigned parity;
    __device__ __forceinline__ PipelineState() : index(0), parity(0) {}
    __device__ __forceinline__ void next() {
        if (++index == BUFFERS) index = 0, parity ^= 1;
    }
};

// --- copies by TMA

// The map's box from (d, t, h, b) on; what lies outside of the tensor arrives as zeros, and counts.
__device__ __forceinline__ void tma_load(unsigned to, const TensorMap &map, unsigned barrier, int d, int t, int h, int b) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
                 "%6}], [%2];" ::"r"(to),
                 "l"(&map), "r"(barrier), "r"(d), "r"(t), "r"(h), "r"(b)
                 : "memory");
}
// What lies outside of the tensor is not written.
__device__ __forceinline__ void tma_store(const TensorMap &map, unsigned from, int d, int t, int h, int b) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(from), "r"(d), "r"(t), "r"(h), "r"(b)
                 : "memory");
}
__device__ __forceinline__ void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until the newest N groups at most still read shared memory.
template <int N> __device__ __forceinline__ void bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
// Until the newest N groups at most are at work.
template <int N> __device__ __forceinline__ void bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
// `bytes`, a multiple of 16 from addresses that are, with no tensor map.
__device__ __forceinline__ void bulk_load(unsigned to, const void *from, unsigned bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void bulk_store(void *to, unsigned from, unsigned bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}
// Floats of global memory += those of shared memory.
__device__ __forceinline__ void bulk_reduce_add(float *to, unsigned from, unsigned bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}
// Ordinary stores to shared memory are seen by TMA and wgmma after this and a barrier.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- flags in global memory, between blocks: what copies have written before a release is seen by copies after an acquire

__device__ __forceinline__ int load_relaxed(const int *flag) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}
__device__ __forceinline__ int load_acquire(const int *flag) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1]; fence.proxy.async;" : "=r"(value) : "l"(flag) : "memory");
    return value;
}
__device__ __forceinline__ void store_release(int *flag, int value) {
    asm volatile("fence.proxy.async; st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// A whole tile of ROWS rows, by one thread.
template <int ROWS>
__device__ __forceinline__ void load_tile(unsigned to, const TensorMap &map, unsigned barrier, int t, int h, int b) {
#pragma unroll
    for (int block = 0; block < OPERAND_BOXES; block++)
        tma_load(to + block * ROWS * BOX_ROW_BYTES, map, barrier, block * BOX_COLUMNS, t, h, b);
}
template <int ROWS>
__device__ __forceinline__ void store_tile(const TensorMap &map, unsigned from, int t, int h, int b) {
#pragma unroll
    for (int block = 0; block < BOXES; block++)
        tma_store(map, from + block * ROWS * BOX_ROW_BYTES, block * BOX_COLUMNS, t, h, b);
}

// --- shared memory by warps

// Four 8 x 8 matrices of 16 bits, as mma.cuh's A lies in registers; a lane's address is that of a row of 16 bytes.
__device__ __forceinline__ void stmatrix(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}
__device__ __forceinline__ void stmatrix_trans(unsigned to, const unsigned (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]),
                 "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}
__device__ __forceinline__ void store_four(unsigned to, const float *x) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}
__device__ __forceinline__ float2 load_pair(unsigned from) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
    return x;
}

__device__ __forceinline__ void store_zeros(unsigned to) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
}
// Zeros over the rows of a tile of ROWS from `from` on, by the 128 threads of a warp group, before a fence and a barrier.
template <int ROWS> __device__ __forceinline__ void clear_rows(unsigned tile, int from) {
    const int chunks = BOX_ROW_BYTES / 16;
    for (int x = threadIdx.x % 128; x < BOXES * ROWS * chunks; x += 128)
        if (x / chunks % ROWS >= from) store_zeros(tile + x * 16);
}

// --- warp groups

template <int REGISTERS> __device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
__device__ __forceinline__ void bar_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void bar_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Four numbers as e4m3, the first lowest; what is beyond 448 becomes that.
__device__ __forceinline__ unsigned pack_e4m3(float a, float b, float c, float d) {
    unsigned packed;
    asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; "
        "mov.b32 %0, {low, high};}"
        : "=r"(packed)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return packed;
}

// The larger number; NaN where one is (fmaxf gives the other).
__device__ __forceinline__ float max_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

// --- wgmma: D (64 x N, fp32, in registers) += A (64 x WGMMA_K) B (WGMMA_K x N)

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most the newest N groups are at work.
template <int N> __device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// The compiler may not move what reads or writes these registers over this point: it does not know that a wgmma that was
// issued writes them until it is waited for. (CUTLASS's word for it.)
template <int N> __device__ __forceinline__ void warpgroup_fence_operand(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

// A tile as wgmma is told of it. The reduction runs along its rows (K-major: Q, and K as K^T), groups of 8 rows one
// after the other; or along its columns (MN-major: V), whose boxes lie `leading_bytes` apart.
struct SmemDescriptor {
    unsigned low, high;
    __device__ __forceinline__ SmemDescriptor(unsigned tile, unsigned leading_bytes = 16,
                                              unsigned swizzle_bytes = BOX_ROW_BYTES)
        : low((tile & 0x3ffff) >> 4 | leading_bytes >> 4 << 16),
          high((swizzle_bytes == 128 ? 1u : 2u) << 30 | 8 * swizzle_bytes >> 4) {}
    // The descriptor of what begins `bytes` further.
    __device__ __forceinline__ unsigned long long offset(unsigned bytes) const {
        return (unsigned long long)high << 32 | (low + (bytes >> 4));
    }
};
// Of 32 bytes of columns, the step-th, of a K-major tile with ROWS rows.
template <int ROWS> __device__ __forceinline__ unsigned step_bytes(int step) {
    const int steps = BOX_COLUMNS / 16;
    return step / steps * ROWS * BOX_ROW_BYTES + step % steps * 32;
}

// MAJOR: which operand is MN-major; one of 8 bits never is.
#if OPERANDS_8BIT
#define WGMMA_TYPES "k32.f32.e4m3.e4m3 "
#define MAJOR(mn) ""
#elif ELEMENT_KIND == bf16_ELEMENT
#define WGMMA_TYPES "k16.f32.bf16.bf16 "
#define MAJOR(mn) ", " mn
#else
#define WGMMA_TYPES "k16.f32.f16.f16 "
#define MAJOR(mn) ", " mn
#endif

#define R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define R1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define R2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define R3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define R4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define R5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define R6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define R7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define R8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define R9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define R10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define R11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define R12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define R13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define R14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define R15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define R_16 R0 ", " R1
#define R_32 R_16 ", " R2 ", " R3
#define R_40 R_32 ", " R4
#define R_48 R_40 ", " R5
#define R_56 R_48 ", " R6
#define R_64 R_56 ", " R7
#define R_80 R_64 ", " R8 ", " R9
#define R_96 R_80 ", " R10 ", " R11
#define R_128 R_96 ", " R12 ", " R13 ", " R14 ", " R15
#define F8(i)                                                                                                          \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),        \
        "+f"(d[i + 7])
#define F_16 F8(0), F8(8)
#define F_32 F_16, F8(16), F8(24)
#define F_40 F_32, F8(32)
#define F_48 F_40, F8(40)
#define F_56 F_48, F8(48)
#define F_64 F_56, F8(56)
#define F_80 F_64, F8(64), F8(72)
#define F_96 F_80, F8(80), F8(88)
#define F_128 F_96, F8(96), F8(104), F8(112), F8(120)

// Of each N that a tile may have: A and B by descriptors (ss), or A from registers and B by descriptor (rs); what a
// descriptor is of is K-major, or with A_MN or B_MN = 1 MN-major. With `add` = 0, D is cleared first. The macro gets
// the M floats of D that a thread has, and the names of the operands after these: in ss X0 to X4 are a, b, add, A_MN
// and B_MN; in rs X0 to X3 are A's registers, and X4 to X6 b, add and B_MN.
template <int N> struct Wgmma;
#define WGMMA(N, M, X0, X1, X2, X3, X4, X5, X6)                                                                         \
    template <> struct Wgmma<N> {                                                                                      \
        template <int A_MN, int B_MN>                                                                                  \
        static __device__ __forceinline__ void ss(float (&d)[M], unsigned long long a, unsigned long long b, int add) { \
            asm volatile("{.reg .pred p; setp.ne.b32 p, " X2 ", 0;\n"                                                  \
                         "wgmma.mma_async.sync.aligned.m64n" #N WGMMA_TYPES "{" R_##M "}, " X0 ", " X1                 \
                         ", p, 1, 1" MAJOR(X3) MAJOR(X4) ";}"                                                          \
                         : F_##M                                                                                       \
                         : "l"(a), "l"(b), "r"(add), "n"(A_MN), "n"(B_MN)                                              \
                         : "memory");                                                                                  \
        }                                                                                                              \
        template <int B_MN>                                                                                            \
        static __device__ __forceinline__ void rs(float (&d)[M], const unsigned (&a)[4], unsigned long long b,         \
                                                  int add) {                                                           \
            asm volatile("{.reg .pred p; setp.ne.b32 p, " X5 ", 0;\n"                                                  \
                         "wgmma.mma_async.sync.aligned.m64n" #N WGMMA_TYPES "{" R_##M "}, {" X0 ", " X1 ", " X2        \
                         ", " X3 "}, " X4 ", p, 1, 1" MAJOR(X6) ";}"                                                   \
                         : F_##M                                                                                       \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(B_MN)                     \
                         : "memory");                                                                                  \
        }                                                                                                              \
    };
WGMMA(32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
WGMMA(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
WGMMA(80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
WGMMA(96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
WGMMA(112, 56, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
WGMMA(160, 80, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
WGMMA(192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
WGMMA(256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

// d += A B of integers, both K-major, by descriptors; d is floats from INT8_MAGIC on.
#define I8(i)                                                                                                          \
    "+r"((int &)d[i]), "+r"((int &)d[i + 1]), "+r"((int &)d[i + 2]), "+r"((int &)d[i + 3]), "+r"((int &)d[i + 4]),     \
        "+r"((int &)d[i + 5]), "+r"((int &)d[i + 6]), "+r"((int &)d[i + 7])
#define I_64 I8(0), I8(8), I8(16), I8(24), I8(32), I8(40), I8(48), I8(56)
#define I_96 I_64, I8(64), I8(72), I8(80), I8(88)
#define WGMMA_INT8(N, M, A, B, ADD)                                                                                     \
    __device__ __forceinline__ void wgmma_int8(float (&d)[M], unsigned long long a, unsigned long long b) {            \
        asm volatile("{.reg .pred p; setp.ne.b32 p, " ADD ", 0;\n"                                                     \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" R_##M "}, " A ", " B ", p;}"             \
                     : I_##M                                                                                           \
                     : "l"(a), "l"(b), "r"(1)                                                                          \
                     : "memory");                                                                                      \
    }
WGMMA_INT8(128, 64, "%64", "%65", "%66")
WGMMA_INT8(192, 96, "%96", "%97", "%98")
