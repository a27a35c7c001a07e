/* sm90.cuh - what Hopper's matrix unit and copy engine are told, one function an instruction: barriers in shared memory
 * that count arrivals and bytes, boxes copied through tensor maps, additions on the way back, products of 64 rows.
 * Barriers are of one block: forms that order a cluster cost a fence of the whole chip each time. */
#ifndef QE_CUDA_SM90_CUH
#define QE_CUDA_SM90_CUH

#include <cuda.h>

#include "backend/cuda/device.cuh"

namespace sm90 {

constexpr uint32_t GROUP_THREADS = 128; /* four warps multiply together */

/* --- barriers ---------------------------------------------------------------------------------------------------- */

DEVICE void barrier_init(uint64_t *barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
/* The copy engine sees what was initialised. */
DEVICE void barriers_publish() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
/* Arrives, and has the barrier wait for so many bytes besides. */
DEVICE void barrier_expect(uint64_t *barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
DEVICE void barrier_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
/* Where block `rank` of the cluster has what lies at `at` here. */
DEVICE uint32_t peer_address(const void *at, uint32_t rank) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(at)), "r"(rank));
    return there;
}
/* At the barrier of block `rank` of the cluster. */
DEVICE void barrier_arrive_at(uint64_t *barrier, uint32_t rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(peer_address(barrier, rank)) : "memory");
}
/* Into a block's shared memory, counted in its barrier. */
DEVICE void peer_send(uint32_t to, uint32_t barrier, const float *four) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(to),
                 "r"(barrier), "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3])
                 : "memory");
}
/* Named barrier `id` (1 to 15) of so many threads. */
DEVICE void threads_sync(uint32_t id, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* --- copies ------------------------------------------------------------------------------------------------------ */

/* A box at (column, row, plane); what lies outside is zeros. */
DEVICE void box_load(void *to, const CUtensorMap *map, uint32_t column, uint32_t row, uint32_t plane,
                     uint64_t *barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
            "r"(shared_address(to)),
        "l"(map), "r"(column), "r"(row), "r"(plane), "r"(shared_address(barrier))
        : "memory");
}
DEVICE void bytes_load(void *to, const void *from, uint32_t bytes, uint64_t *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
/* Adds where it goes, in the cache; nothing comes back. */
DEVICE void pair_add(uint64_t *to, uint64_t value) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
/* What this thread stored in shared memory is seen by the copy engine and the matrix unit. */
DEVICE void shared_publish() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <uint32_t COUNT>
DEVICE void registers_lower() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <uint32_t COUNT>
DEVICE void registers_raise() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/* --- products ---------------------------------------------------------------------------------------------------- */

/* An operand in shared memory: rows of 128 bytes in the 128-byte swizzle, eight rows in 1024 bytes. `apart`: bytes from
 * 64 columns to the next 64, where the operand is taken across its rows. Offsets are in units of 16 bytes. */
DEVICE uint64_t operand(const void *at, uint32_t apart) {
    return static_cast<uint64_t>((shared_address(at) & 0x3FFFF) >> 4) | static_cast<uint64_t>(apart >> 4) << 16 |
           static_cast<uint64_t>(1024 >> 4) << 32 | static_cast<uint64_t>(1) << 62;
}
DEVICE void mma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DEVICE void mma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N>
DEVICE void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/* Neither reads nor writes of these registers move across. */
template <uint32_t COUNT>
DEVICE void registers_pin(float (&registers)[COUNT]) {
#pragma unroll
    for (uint32_t i = 0; i < COUNT; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <uint32_t COUNT>
DEVICE void registers_pin(uint32_t (&registers)[COUNT]) {
#pragma unroll
    for (uint32_t i = 0; i < COUNT; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

#define SUMS_8(s, at)                                                                                         \
    "+f"(s[at]), "+f"(s[at + 1]), "+f"(s[at + 2]), "+f"(s[at + 3]), "+f"(s[at + 4]), "+f"(s[at + 5]), "+f"(s[at + 6]), \
        "+f"(s[at + 7])
#define SUMS_32(s, at) SUMS_8(s, at), SUMS_8(s, at + 8), SUMS_8(s, at + 16), SUMS_8(s, at + 24)
#define NAMES_32                                                                                              \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64                                                                                              \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "   \
             "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

/* sums [64, 2 COUNT] (+)= first [64, 16] second [16, 2 COUNT] of bf16. ACROSS: an operand's rows are the 16 terms, not
 * its rows or columns of the product. */
template <bool FIRST_ACROSS, bool SECOND_ACROSS>
DEVICE void mma(float (&s)[32], uint64_t first, uint64_t second, bool adds) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "}, %32, %33, p, 1, 1, %35, %36;\n}"
                 : SUMS_32(s, 0)
                 : "l"(first), "l"(second), "r"(static_cast<int>(adds)), "n"(FIRST_ACROSS), "n"(SECOND_ACROSS));
}
template <bool FIRST_ACROSS, bool SECOND_ACROSS>
DEVICE void mma(float (&s)[64], uint64_t first, uint64_t second, bool adds) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64 "}, %64, %65, p, 1, 1, %67, %68;\n}"
                 : SUMS_32(s, 0), SUMS_32(s, 32)
                 : "l"(first), "l"(second), "r"(static_cast<int>(adds)), "n"(FIRST_ACROSS), "n"(SECOND_ACROSS));
}
/* The first operand's 64 x 16 from registers, as sums lie: two neighbours of a row, of the row eight below, then the
 * same eight columns on. Always adds. */
template <bool SECOND_ACROSS>
DEVICE void mma(float (&s)[32], const uint32_t *first, uint64_t second) {
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1, %37;\n}"
                 : SUMS_32(s, 0)
                 : "r"(first[0]), "r"(first[1]), "r"(first[2]), "r"(first[3]), "l"(second), "n"(SECOND_ACROSS));
}
template <bool SECOND_ACROSS>
DEVICE void mma(float (&s)[64], const uint32_t *first, uint64_t second) {
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64
                 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %69;\n}"
                 : SUMS_32(s, 0), SUMS_32(s, 32)
                 : "r"(first[0]), "r"(first[1]), "r"(first[2]), "r"(first[3]), "l"(second), "n"(SECOND_ACROSS));
}

/* Four 8 x 8 of bf16 as sums lie; each lane names where one row of 16 bytes goes. */
DEVICE void squares_store(uint32_t at, const uint32_t *pairs) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(pairs[0]),
                 "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                 : "memory");
}

/* The same out of shared memory, as the first operand lies in registers. */
DEVICE void squares_load(uint32_t at, uint32_t *pairs) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                 : "r"(at)
                 : "memory");
}
DEVICE void pair_store(uint32_t at, float low, float high) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(low), "f"(high) : "memory");
}
/* Stays where it is among loads. */
DEVICE float2 pair_load(uint32_t at) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
    return v;
}

} // namespace sm90

#endif
