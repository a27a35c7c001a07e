/* sm90_stream.cuh - what persistent products in clusters of blocks are told, beside sm90.cuh: boxes that several blocks
 * get, stores that the copy engine makes, barriers of other blocks. Addresses in shared memory are words here. */
#ifndef QE_CUDA_SM90_STREAM_CUH
#define QE_CUDA_SM90_STREAM_CUH

#include "backend/cuda/sm90.cuh"

namespace sm90 {

/* --- barriers ---------------------------------------------------------------------------------------------------- */

DEVICE void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/* At the barrier that block `rank` of the cluster has at this address. Orders no memory between blocks. */
DEVICE void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}
/* The same in two steps: where the other block has what lies at this address here, and the arrival there. */
DEVICE uint32_t address_at(uint32_t at, uint32_t rank) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}
DEVICE void barrier_arrive_there(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
/* All threads of the cluster. */
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

/* --- boxes ------------------------------------------------------------------------------------------------------- */

DEVICE void box_load(uint32_t to, const CUtensorMap *map, uint32_t column, uint32_t row, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            to),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}
/* To this address in each block of `mask`; each block's barrier counts what it gets. */
DEVICE void box_load_many(uint32_t to, const CUtensorMap *map, uint32_t column, uint32_t row, uint32_t barrier,
                          uint16_t mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(mask)
        : "memory");
}
/* The same of a map of five axes: columns, three whose boxes are all of them, rows of those. */
DEVICE void box_load_many_5(uint32_t to, const CUtensorMap *map, uint32_t column, uint32_t row, uint32_t barrier,
                            uint16_t mask) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %6, %6, %6, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(mask), "r"(0)
        : "memory");
}
DEVICE void box_store(const CUtensorMap *map, uint32_t from, uint32_t column, uint32_t row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
                 "r"(column), "r"(row), "r"(from)
                 : "memory");
}
DEVICE void box_store(const CUtensorMap *map, uint32_t from, uint32_t column, uint32_t plane, uint32_t row) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
                 "r"(column), "r"(plane), "r"(row), "r"(from)
                 : "memory");
}
/* Adds fp32 to what lies there: the cache does. */
DEVICE void box_add(const CUtensorMap *map, uint32_t from, uint32_t column, uint32_t row) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group "
                 "[%0, {%1, %2}], [%3];" ::"l"(map),
                 "r"(column), "r"(row), "r"(from)
                 : "memory");
}
/* Into the second cache only. */
DEVICE void box_ahead(const CUtensorMap *map, uint32_t column, uint32_t row) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(column), "r"(row)
                 : "memory");
}
/* What this thread stored until here is one group of stores. */
DEVICE void stores_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/* Until shared memory was read for all of this thread's groups; until they are done. */
DEVICE void stores_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
DEVICE void stores_wait() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* --- products ---------------------------------------------------------------------------------------------------- */

/* An operand whose rows lie along the terms: rows of 128 bytes in the 128-byte swizzle. */
DEVICE uint64_t operand(uint32_t at) {
    return static_cast<uint64_t>(at >> 4 | 1u << 16) | static_cast<uint64_t>(1024u >> 4 | 1u << 30) << 32;
}

#define NAMES_80 NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"

/* sums [64, 160] (+)= first [64, 32] second [160, 32]' of E4M3. */
DEVICE void mma_e4m3(float (&s)[80], uint64_t first, uint64_t second, bool adds) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %82, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n160k32.f32.e4m3.e4m3 {" NAMES_80 "}, %80, %81, p, 1, 1;\n}"
                 : SUMS_32(s, 0), SUMS_32(s, 32), SUMS_8(s, 64), SUMS_8(s, 72)
                 : "l"(first), "l"(second), "r"(static_cast<int>(adds)));
}

/* sums [64, 128] (+)= first [64, 32] second [128, 32]': of E4M3, or E5M2 and E4M3. */
DEVICE void mma_e4m3(float (&s)[64], uint64_t first, uint64_t second, bool adds) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" NAMES_64 "}, %64, %65, p, 1, 1;\n}"
                 : SUMS_32(s, 0), SUMS_32(s, 32)
                 : "l"(first), "l"(second), "r"(static_cast<int>(adds)));
}
DEVICE void mma_e5m2_e4m3(float (&s)[64], uint64_t first, uint64_t second, bool adds) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e5m2.e4m3 {" NAMES_64 "}, %64, %65, p, 1, 1;\n}"
                 : SUMS_32(s, 0), SUMS_32(s, 32)
                 : "l"(first), "l"(second), "r"(static_cast<int>(adds)));
}

#define NAMES_96                                                                                              \
    NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_128                                                                                             \
    NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
             "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

/* sums [64, 256] (+)= first [64, 32] second [256, 32]' of E4M3. */
DEVICE void mma_e4m3(float (&s)[128], uint64_t first, uint64_t second, bool adds) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" NAMES_128 "}, %128, %129, p, 1, 1;\n}"
                 : SUMS_32(s, 0), SUMS_32(s, 32), SUMS_32(s, 64), SUMS_32(s, 96)
                 : "l"(first), "l"(second), "r"(static_cast<int>(adds)));
}
} // namespace sm90

#endif
