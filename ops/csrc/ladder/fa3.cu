// Stage 7, fa3: FlashAttention-3, forward (Shah et al. 2024, algorithm 2), our own implementation; only for
// Hopper (sm_90a).
//
// Idea. Warp specialisation: copying and computing are done by different warp groups. The copying group releases most of
// its registers and keeps TMA busy; the others, with 64 queries each, keep the tensor cores busy. The products (wgmma) are
// asynchronous too, so the program schedules three units: the copy engine, the tensor cores, and those of the softmax.
// New since fa2.
//   - TMA: one thread starts the copy of a whole tile, which is swizzled and padded with zeros; an mbarrier signals its end.
//   - wgmma: 64 x N x 16 by a warp group; K and V are read from shared memory once for 64 queries, where mma.sync reads
//     them for every 32; P is its left operand straight from registers.
//   - Overlap in a warp group: S of the next tile of keys is issued before P V of this one, so that its softmax overlaps
//     with P V.
//   - Ping-pong: warp groups take turns with the tensor cores (named barriers), so that the softmax of one overlaps with
//     the products of the other.
//   - Persistent: there is one block per multiprocessor, whose teams of warp groups take tiles of queries from a counter
//     until none are left, which balances the load, and load Q, K and V of the next tile while they store O.
//
//        copies   Q K0 K1 V0 K2 V1 ...                         Q' K0' ...
//        group 1  [S0]........[S1 PV0]........[S2 PV1]........[PV2] O  [S0'] ...    [ ] products on the tensor cores
//                     softmax0        softmax1        softmax2
//        group 2          [S0]........[S1 PV0]........[S2 PV1]........[PV2] O  [S0'] ...
//                             softmax0        softmax1        softmax2
//
// HBM traffic. As fa2: Q and O once, K and V once per head as long as the heads in flight fit in the L2; lse.
// With BLOCK_MASK a team's copying warp reads a list of tiles and publishes each with its K (kept_tiles.cuh has the macros).
// Limits. 16-bit inputs, D up to 256 in steps of 8, rows that begin at multiples of 16 bytes.
// The host also defines PADDED_D, USED_D (columns that are multiplied, a multiple of 16; with D > 128 PADDED_D),
// TEAMS (of warp groups; each takes tiles of its own, so that one computes while another begins or ends a tile),
// WARP_GROUPS (those of a team that compute; a tile has BR = 64 WARP_GROUPS queries), BC, STAGES (of K and of V), Q_STAGES
// (tiles of Q that there is space for), O_OVER_Q (O has no shared memory of its own), PRODUCER_REGISTERS and
// CONSUMER_REGISTERS of a thread, PINGPONG, INTRA_GROUP_OVERLAP, PERSISTENT (0: it launches a block for each tile),
// EARLY_LAUNCH (attention.cuh: griddepcontrol), and SCALE_BEFORE_MAX as for fa2.
#include "fa3_consumer.cuh"
#include "fa3_producer.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) tilegpt_fa3_forward(const __grid_constant__ Launch launch) {
    extern __shared__ __align__(1024) unsigned char memory[];  // of each team Q, K, V and, unless it goes over Q, O
    static __shared__ __align__(8) unsigned long long barriers[TEAMS * BARRIERS];
    static __shared__ int slots[TEAMS * SLOT_INTS];
    if (threadIdx.x == 0) {
        const SharedLayout first(memory, barriers, slots, 0);
        for (int x = 0; x < TEAMS * BARRIERS; x++) {
            const int place = x % BARRIERS;
            // A full barrier expects one arrival (the copying thread's), an empty one an arrival of each reading warp.
            const bool empty = (place >= Q_EMPTY && place < K_FULL) || (place >= K_EMPTY && place < V_FULL) ||
                               place >= V_EMPTY;
            mbarrier_init(first.barrier(x), empty ? 4 * WARP_GROUPS : 1);
        }
        fence_mbarrier_init();
    }
    if (EARLY_LAUNCH) griddepcontrol_wait();
    __syncthreads();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4 - 1;
    if (group < 0) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp < TEAMS) producer(launch, SharedLayout(memory, barriers, slots, warp), warp);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        const int team = group / WARP_GROUPS;
        Consumer(launch, SharedLayout(memory, barriers, slots, team), group % WARP_GROUPS, team).run();
    }
}
