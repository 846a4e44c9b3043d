// FlashAttention-3, forward (Shah et al. 2024, algorithm 2), in our own words: for Hopper (sm_90a) alone.
//
// Idea. Who copies does not compute. A warp group that gave its registers away keeps TMA busy; the others, of 64 queries
// each, keep the tensor cores busy, whose products (wgmma) are asynchronous too: one thread's program is a schedule of
// three engines, the copy engine, the tensor cores, and the units of the softmax.
// New since fa2.
//   - TMA: one thread asks for a whole tile, which arrives swizzled, padded with zeros, and announces itself at a mbarrier.
//   - wgmma: 64 x N x 16 by a warp group; K and V are read from shared memory once for 64 queries, where mma.sync reads
//     them for every 32; P is its left operand straight from registers.
//   - Overlap in a warp group: S of the next tile of keys is asked for before P V of this one, and its softmax runs beside
//     P V.
//   - Ping-pong: warp groups take turns with the tensor cores (named barriers), so that one's softmax runs beside the
//     other's products.
//   - Persistent: a block per multiprocessor takes tile after tile of queries from a counter, so that none waits for the
//     longest, and loads the next one's Q, K and V while O goes out.
//
//        copies   Q K0 K1 V0 K2 V1 ...                         Q' K0' ...
//        group 1  [S0]........[S1 PV0]........[S2 PV1]........[PV2] O  [S0'] ...    [ ] its turn with the tensor cores
//                     softmax0        softmax1        softmax2
//        group 2          [S0]........[S1 PV0]........[S2 PV1]........[PV2] O  [S0'] ...
//                             softmax0        softmax1        softmax2
//
// HBM traffic. As fa2: Q and O once, K and V once per head as long as the heads at work fit in the L2; lse.
// Limits. 16-bit inputs, D up to 256 in steps of 8, rows that begin at multiples of 16 bytes.
// The host also defines PAD_D, GROUPS (warp groups that compute; a tile has BR = 64 GROUPS queries), BC, STAGES (of K and
// of V), Q_SLOTS (tiles of Q that there is room for), O_OVER_Q (O has no room of its own), COPY_REGISTERS and
// COMPUTE_REGISTERS of a thread, PINGPONG, OVERLAP, and SCALE_FIRST as for fa2.
#include "hopper.cuh"
#include "softmax.cuh"

#define BR (GROUPS * 64)
#define THREADS ((GROUPS + 1) * 128)
#define KV_BYTES (BC * PAD_D * 2)
#define Q_BYTES (64 * PAD_D * 2)  // of a warp group
#define BARRIER_TURN 1  // the named barriers of the warp groups' turns, and of each by itself
#define BARRIER_OWN (BARRIER_TURN + GROUPS)

static_assert(BARRIER_OWN + GROUPS <= 16, "there are 16 named barriers");
static_assert(64 * (GROUPS - 1) <= BC, "what a group sees begins at most one tile of keys from where the block's ends");

struct __align__(64) Launch {
    TensorMap q, k, v, out;
    Params p;
    int *taken;  // tiles beyond each block's first; 0 between launches
};

// The mbarriers, by their place: full and empty ones of the slots of Q, and of the stages of K and of V.
enum { Q_FULL, Q_EMPTY = Q_FULL + Q_SLOTS, K_FULL = Q_EMPTY + Q_SLOTS, K_EMPTY = K_FULL + STAGES,
       V_FULL = K_EMPTY + STAGES, V_EMPTY = V_FULL + STAGES, BARRIERS = V_EMPTY + STAGES };

// Where a ring of buffers is, and the parity of the phase in which this one is filled.
template <int BUFFERS> struct Ring {
    int at;
    unsigned parity;
    __device__ __forceinline__ Ring() : at(0), parity(0) {}
    __device__ __forceinline__ void next() {
        if (++at == BUFFERS) at = 0, parity ^= 1;
    }
};

// Queries i0 .. i0 + BR of a head, whose keys lie in lo .. hi.
struct Tile {
    int b, h, i0, keys, lo, hi;
#if SEGMENTS
    Documents documents;
#endif

    // The index-th in the grid's order. Only the producer works it out, and leaves it in shared memory for the
    // others: it takes divisions.
    __device__ __forceinline__ Tile(const Params &p, int index) {
        int tile = 0, head = 0;
        unswizzle(p, index, p.batch * p.heads, HAS_RIGHT, tile, head);
        b = head / p.heads, h = head % p.heads, i0 = tile * BR, keys = keys_of(p, b);
#if SEGMENTS
        documents = documents_of(p, b, tile);
#endif
        const Range range = seen(p, i0, BR);
        lo = range.lo, hi = range.hi;
    }
    // As it was left in shared memory; uniform, as are all loops over it.
    __device__ __forceinline__ Tile(const volatile int *slot) {
        int *fields = (int *)this;
#pragma unroll
        for (int x = 0; x < (int)(sizeof(*this) / sizeof(int)); x++) fields[x] = __shfl_sync(~0u, slot[x], 0);
    }
    __device__ __forceinline__ void leave(volatile int *slot) const {
        const int *fields = (const int *)this;
#pragma unroll
        for (int x = 0; x < (int)(sizeof(*this) / sizeof(int)); x++) slot[x] = fields[x];
    }
    // The keys that queries i .. i + rows see.
    __device__ __forceinline__ Range seen(const Params &p, int i, int rows) const {
#if !SEGMENTS
        const Documents documents = documents_of(p, b, 0);
#endif
        return key_range(p, i, min_of(rows, p.tq - i), keys, keys - p.tq, BC, documents);
    }
};
#define TILE_INTS ((int)(sizeof(Tile) / sizeof(int)))

__device__ __forceinline__ int n_tiles(const Params &p) { return p.n_tiles * p.batch * p.heads; }
__device__ __forceinline__ int last_of(int lo, int hi) { return max_of(lo, (hi - 1) / BC * BC); }

// Where the tiles are in shared memory.
struct Room {
    unsigned barriers, q, k, v, o;
    volatile int *slots;  // what tile is in each slot of Q
    __device__ __forceinline__ Room(const void *memory, const void *barriers, int *slots)
        : barriers(shared_address(barriers)), slots(slots) {
        q = shared_address(memory), k = q + Q_SLOTS * GROUPS * Q_BYTES;
        v = k + STAGES * KV_BYTES, o = v + STAGES * KV_BYTES;
    }
    __device__ __forceinline__ unsigned barrier(int place) const { return barriers + 8 * place; }
};

// The output of queries that see no key, by a warp.
__device__ __forceinline__ void write_zeros(const Params &p, const Tile &tile) {
    const int rows = min_of(BR, p.tq - tile.i0);
    element *out = matrix_of(p.out, p.out_stride, tile.b, tile.h) + tile.i0 * p.out_stride.t;
    for (int i = 0; i < rows; i++) {
        for (int d = threadIdx.x; d < HEAD_DIM; d += 32) out[i * p.out_stride.t + d] = element(0.0f);
        if (threadIdx.x == 0) p.lse[(long long)(tile.b * p.heads + tile.h) * p.tq + tile.i0 + i] = -INFINITE;
    }
}

// A warp, whose first thread asks for the copies.
__device__ __forceinline__ void produce(const Launch &launch, const Room &room) {
    const Params &p = launch.p;
    const int n = n_tiles(p);
    const bool asking = threadIdx.x == 0;
    Ring<Q_SLOTS> q;
    Ring<STAGES> k, v;
    auto load = [&](const TensorMap &map, unsigned to, int full, int empty, Ring<STAGES> &ring, const Tile &tile,
                    int start) {
        mbarrier_wait(room.barrier(empty + ring.at), ring.parity ^ 1);
        if (asking) {
            mbarrier_arrive_expect_tx(room.barrier(full + ring.at), KV_BYTES);
            load_tile<BC>(to + ring.at * KV_BYTES, map, room.barrier(full + ring.at), start, tile.h / GROUP, tile.b);
        }
        ring.next();
    };
    int taken = 0;
    for (int index = blockIdx.x; index < n; index = gridDim.x + __shfl_sync(~0u, taken, 0)) {
        const Tile tile(p, index);
        if (tile.lo >= tile.hi) {
            write_zeros(p, tile);
            if (asking) taken = atomicAdd(launch.taken, 1);
        } else {
            const unsigned full = room.barrier(Q_FULL + q.at);
            const int last = last_of(tile.lo, tile.hi);
            mbarrier_wait(room.barrier(Q_EMPTY + q.at), q.parity ^ 1);
            if (asking) {
                tile.leave(room.slots + q.at * TILE_INTS);
                mbarrier_arrive_expect_tx(full, GROUPS * Q_BYTES);
                for (int group = 0; group < GROUPS; group++)
                    load_tile<64>(room.q + (q.at * GROUPS + group) * Q_BYTES, launch.q, full, tile.i0 + group * 64,
                                  tile.h, tile.b);
            }
            q.next();
            load(launch.k, room.k, K_FULL, K_EMPTY, k, tile, last);
            if (asking) taken = atomicAdd(launch.taken, 1);  // looked at behind the loads, by when it is there
            for (int start = last; start >= tile.lo; start -= BC) {
                if (start > tile.lo) load(launch.k, room.k, K_FULL, K_EMPTY, k, tile, start - BC);
                load(launch.v, room.v, V_FULL, V_EMPTY, v, tile, start);
            }
        }
        // Each tile worked on is followed by one atomicAdd, so that a launch makes exactly n; who draws n - 1 is the
        // last, and puts 0 back.
        if (asking && taken == n - 1) *launch.taken = 0;
    }
    mbarrier_wait(room.barrier(Q_EMPTY + q.at), q.parity ^ 1);
    if (!asking) return;
    room.slots[q.at * TILE_INTS] = -1;  // of no batch row: the end
    mbarrier_arrive(room.barrier(Q_FULL + q.at));
}

typedef Sums<1, BC / 16> Scores;
typedef Sums<1, D_STEPS> Output;

template <int PAIRS> __device__ __forceinline__ float (&flat(Sums<1, PAIRS> &sums))[8 * PAIRS] {
    return reinterpret_cast<float (&)[8 * PAIRS]>(sums.c);
}

// -inf in the place of what is not seen, where that is keys outside of one interval a row: a comparison of a register
// with a number, where `hide` has four registers a column.
__device__ __forceinline__ void hide_outside(const Params &p, Scores &s, int i_first, int j_first, int keys) {
    const int column = j_first + threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int diagonal = i_first + threadIdx.x % 32 / 4 + half * 8 + keys - p.tq;
        const int end = (HAS_RIGHT ? min_of(keys, diagonal + p.window_right + 1) : keys) - column;
        const int begin = HAS_LEFT ? diagonal - p.window_left - column : 0;
#pragma unroll
        for (int n = 0; n < BC / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (n * 8 + e >= end || (HAS_LEFT && n * 8 + e < begin)) s.c[0][n][2 * half + e] = -INFINITE;
    }
}

__device__ __forceinline__ void round_weights(unsigned (&weights)[BC / 16][4], const Scores &s) {
#pragma unroll
    for (int step = 0; step < BC / 16; step++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float(&c)[4] = s.c[0][2 * step + e / 2];
            weights[step][e] = pack(c[e % 2 * 2], c[e % 2 * 2 + 1]);
        }
}

// Maxima of the new scores; whether a row's shift grew, by `rescale` (see soften in softmax.cuh: only by more than 2^8).
__device__ __forceinline__ bool shift_rows(const Scores &s, Rows<1> &rows, float (&rescale)[2], float c) {
    float most[2];
    bool grew = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float x = -INFINITE;
#pragma unroll
        for (int n = 0; n < BC / 8; n++) x = fmaxf(x, fmaxf(s.c[0][n][2 * half], s.c[0][n][2 * half + 1]));
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
        most[half] = x, rescale[half] = 1.0f;
        grew |= ABOVE(x, rows.m[0][half]) > 8.0f;
    }
    grew = __any_sync(~0u, grew);
    if (grew)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (!(ABOVE(most[half], rows.m[0][half]) > 8.0f)) continue;
            const float m = __fmul_rn(most[half], c);
            rescale[half] = exp2_of(rows.m[0][half] - m);
            rows.m[0][half] = m, rows.l[0][half] *= rescale[half];
        }
    return grew;
}

__device__ __forceinline__ void exponentiate(Scores &s, Rows<1> &rows, float c) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float shift = rows.m[0][half] == -INFINITE ? 0.0f : rows.m[0][half];
#pragma unroll
        for (int n = 0; n < BC / 8; n++)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; e++) {
                s.c[0][n][e] = exp2_of(ABOVE(s.c[0][n][e], shift));
                rows.l[0][half] += s.c[0][n][e];
            }
    }
}

__device__ __forceinline__ void rescale_output(Output &o, const float (&rescale)[2]) {
#pragma unroll
    for (int n = 0; n < PAD_D / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) o.c[0][n][e] *= rescale[e / 2];
}

// O of a warp to a tile in shared memory, 16 rows of 64.
__device__ __forceinline__ void stage_output(unsigned tile, const Output &o, int warp, int lane) {
    const int row = warp * 16 + lane % 16, half = lane / 16;
#pragma unroll
    for (int step = 0; step < D_STEPS; step++) {
        const float(&x)[4] = o.c[0][2 * step], (&y)[4] = o.c[0][2 * step + 1];
        const int block = step * 16 / BLOCK_D, chunk = step * 16 % BLOCK_D / 8 + half;
        const unsigned to = tile + block * 64 * BLOCK_ROW + swizzled<BLOCK_D>(row, chunk);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pack(x[0], x[1])),
                     "r"(pack(x[2], x[3])), "r"(pack(y[0], y[1])), "r"(pack(y[2], y[3]))
                     : "memory");
    }
}

#if LENGTHS
// Rows of V beyond the last key may hold anything, and 0 times NaN is NaN: zeros over them, by each warp group that is
// about to read them.
__device__ __forceinline__ void clear_rows(unsigned tile, int from, int barrier) {
    const int chunks = BLOCK_ROW / 16;
    for (int x = threadIdx.x % 128; x < BLOCKS_D * BC * chunks; x += 128)
        if (x / chunks % BC >= from)
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(tile + x * 16), "r"(0) : "memory");
    fence_proxy_async();
    bar_sync(barrier, 128);
}
#endif

// A computing warp group.
struct Consumer {
    const Launch &launch;
    const Params &p;
    const Room &room;
    const int group, warp, lane;
    const float c;
    Ring<Q_SLOTS> q;
    Ring<STAGES> k, v;
    Tile tile;
    Range own;  // keys that this warp group's queries see
    int slot;   // of its Q
    Scores s;
    Output o;
    Rows<1> rows;
    float rescale[2];
    bool grew;
    unsigned weights[BC / 16][4];

    __device__ __forceinline__ Consumer(const Launch &launch, const Room &room, int group)
        : launch(launch), p(launch.p), room(room), group(group), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32),
          c(exponent_scale(launch.p)), tile(launch.p, 0) {}

    __device__ __forceinline__ int first_row() const { return tile.i0 + group * 64 + warp * 16; }

    __device__ __forceinline__ void release(int empty) const {
        if (lane == 0) mbarrier_arrive(room.barrier(empty));
    }

    __device__ __forceinline__ void take_turn() const {
        if (PINGPONG) bar_sync(BARRIER_TURN + group, 256);
    }
    __device__ __forceinline__ void give_turn() const {
        if (PINGPONG) bar_arrive(BARRIER_TURN + (group + 1) % GROUPS, 256);
    }

    // The next tile, once its Q is there; false if there is none.
    __device__ __forceinline__ bool next_tile() {
        mbarrier_wait(room.barrier(Q_FULL + q.at), q.parity);
        tile = Tile(room.slots + q.at * TILE_INTS), slot = q.at;
        q.next();
        const int i = min_of(tile.i0 + group * 64, p.tq - 1);
        own = tile.seen(p, i, 64);
        // A group that sees no key computes one tile of keys, all masked, so that l and O are 0.
        own.lo = min_of(own.lo, last_of(tile.lo, tile.hi));
        return tile.b >= 0;
    }

    // S = Q K^T, asked for.
    __device__ __forceinline__ void multiply_qk() {
        const Matrix queries(room.q + (slot * GROUPS + group) * Q_BYTES), keys(room.k + k.at * KV_BYTES);
#pragma unroll
        for (int step = 0; step < D_STEPS; step++)
            Wgmma<BC>::ss<0, 0>(flat(s), queries.at(step_bytes<64>(step)), keys.at(step_bytes<BC>(step)), step > 0);
        wgmma_commit_group();
    }
    // O += P V, asked for.
    __device__ __forceinline__ void multiply_pv() {
        const Matrix values(room.v + v.at * KV_BYTES, BC * BLOCK_ROW);
#pragma unroll
        for (int step = 0; step < BC / 16; step++)
            Wgmma<PAD_D>::rs<1>(flat(o), weights[step], values.at(step * 16 * BLOCK_ROW), 1);
        wgmma_commit_group();
    }

    __device__ __forceinline__ void await_v(int valid) {
        mbarrier_wait(room.barrier(V_FULL + v.at), v.parity);
#if LENGTHS
        if (valid < BC) clear_rows(room.v + v.at * KV_BYTES, valid, BARRIER_OWN + group);
#endif
    }
    __device__ __forceinline__ void done_with_v() { release(V_EMPTY + v.at), v.next(); }

    // The scores of the keys from `start` on, which are there, become weights.
    __device__ __forceinline__ void soften(int start) {
        pin(flat(s));
        release(K_EMPTY + k.at), k.next();
        if (!O_OVER_Q && start == own.lo) release(Q_EMPTY + slot);
        const bool masked = start < own.full_lo || start >= own.full_hi;
        const int i_first = first_row();
        if (SCALE_FIRST || (SEGMENTS && masked))
            finish_scores(p, s, i_first, start, tile.keys, tile.b, tile.h, SEGMENTS && masked);
        if (!SEGMENTS && masked) hide_outside(p, s, i_first, start, tile.keys);
        grew = shift_rows(s, rows, rescale, c);
        exponentiate(s, rows, c);
        if (DROPOUT) Dropout<1>(p, tile.b, tile.h, i_first).drop(p, s, start);
    }

    // A tile of keys that only other warp groups of the block see. Every group takes one turn for each tile of keys of
    // the block, so there is one token, and who holds it waits at most for V, whose slots others free without a turn.
    __device__ __forceinline__ void skip() {
        take_turn();
        give_turn();
        mbarrier_wait(room.barrier(K_FULL + k.at), k.parity);
        release(K_EMPTY + k.at), k.next();
        mbarrier_wait(room.barrier(V_FULL + v.at), v.parity);
        done_with_v();
    }

    // O goes out; then lse: stored before the proxy fence, the fence would wait for the store.
    __device__ __forceinline__ void finish() {
        const unsigned to = O_OVER_Q ? room.q + (slot * GROUPS + group) * Q_BYTES : room.o + group * Q_BYTES;
        const bool storing = warp == 0 && lane == 0;
        const int barrier = BARRIER_OWN + group;
        float divided[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float &l = rows.l[0][half];
            l += __shfl_xor_sync(~0u, l, 1);
            l += __shfl_xor_sync(~0u, l, 2);
            divided[half] = l == 0.0f ? 0.0f : p.keep_scale / l;
        }
        rescale_output(o, divided);
        if (storing) bulk_wait_group_read<0>();  // what was there has left
        bar_sync(barrier, 128);
        stage_output(to, o, warp, lane);
        fence_proxy_async();
        bar_sync(barrier, 128);
        if (storing) {
            store_tile<64>(launch.out, to, tile.i0 + group * 64, tile.h, tile.b);
            bulk_commit_group();
            if (O_OVER_Q) bulk_wait_group_read<0>();
        }
        if (O_OVER_Q) __syncwarp(), release(Q_EMPTY + slot);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = first_row() + half * 8 + lane / 4;
            const float l = rows.l[0][half], lse = (rows.m[0][half] + __log2f(l)) * LN2;
            if (lane % 4 == 0 && i < p.tq)
                p.lse[(long long)(tile.b * p.heads + tile.h) * p.tq + i] = l == 0.0f ? -INFINITE : lse;
        }
    }

    __device__ __forceinline__ void run() {
        if (PINGPONG && group == GROUPS - 1) give_turn();
        while (next_tile()) {
            const int last = last_of(own.lo, own.hi);
            int start = last_of(tile.lo, tile.hi);
            for (; start > last; start -= BC) skip();
            rows.clear();
            o.clear();
            mbarrier_wait(room.barrier(K_FULL + k.at), k.parity);
            take_turn();
            wgmma_fence();
            multiply_qk();
            give_turn();
            wgmma_wait_group<0>();
            soften(start);
            // The wait for P V begins the loop's body, and does not end it: the compiler would put it ahead of the
            // exponentials, and nothing would run beside them.
            while (true) {
                wgmma_wait_group<0>();
                pin(flat(o));
                if (start < last) done_with_v();
                round_weights(weights, s);
                if (grew) rescale_output(o, rescale);
                if (start == own.lo) break;
                const int valid = tile.keys - start;
                start -= BC;
                mbarrier_wait(room.barrier(K_FULL + k.at), k.parity);
                take_turn();
                pin(flat(s)), pin(flat(o));
                wgmma_fence();
                multiply_qk();
                await_v(valid);
                wgmma_fence();
                multiply_pv();
                give_turn();
                wgmma_wait_group<OVERLAP>();
                soften(start);
            }
            await_v(tile.keys - start);
            pin(flat(o));
            wgmma_fence();
            multiply_pv();
            wgmma_wait_group<0>();
            pin(flat(o));
            done_with_v();
            for (start -= BC; start >= tile.lo; start -= BC) skip();
            finish();
        }
        if (warp == 0 && lane == 0) bulk_wait_group_read<0>();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) tilegpt_fa3_forward(const __grid_constant__ Launch launch) {
    extern __shared__ __align__(1024) unsigned char memory[];  // Q, K, V, and O unless it goes over Q
    __shared__ __align__(8) unsigned long long barriers[BARRIERS];
    __shared__ int slots[Q_SLOTS * TILE_INTS];
    const Room room(memory, barriers, slots);
    if (threadIdx.x == 0) {
        for (int place = 0; place < BARRIERS; place++) {
            // What is full one thread announces, what is empty each warp that read it.
            const bool empty = (place >= Q_EMPTY && place < K_FULL) || (place >= K_EMPTY && place < V_FULL) ||
                               place >= V_EMPTY;
            mbarrier_init(room.barrier(place), empty ? 4 * GROUPS : 1);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == 0) {
        setmaxnreg_dec<COPY_REGISTERS>();
        if (threadIdx.x < 32) produce(launch, room);
    } else {
        setmaxnreg_inc<COMPUTE_REGISTERS>();
        Consumer(launch, room, group - 1).run();
    }
}
