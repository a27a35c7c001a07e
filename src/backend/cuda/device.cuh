/* device.cuh - the instructions of the chip that C++ has no word for, one function each. Everything else in the kernels
 * is plain C++, so that tests/cuda/emulated can put its own version of this file in front and run the kernels on a
 * processor, thread by thread. */
#ifndef QE_CUDA_DEVICE_CUH
#define QE_CUDA_DEVICE_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#define DEVICE static __device__ __forceinline__
#define METHOD __device__ __forceinline__
#define KERNEL static __global__

/* 16 bytes that are read once: they go past the first cache. Not through the read-only path, whose loads the assembler
 * moves across warp_barrier; so this very thread may write there later. */
#ifdef QE_LOAD_EVICT_FIRST
DEVICE uint4 load_once(const void *at) {
    uint4 v;
    asm volatile(
        "{\n.reg .b64 policy;\n"
        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], policy;\n}"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(at)
        : "memory");
    return v;
}
#else
DEVICE uint4 load_once(const void *at) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}
#endif

/* What nobody reads soon: the second cache gives it up first. */
DEVICE void store_late(void *at, uint4 v) {
    __stcs(static_cast<uint4 *>(at), v);
}
DEVICE void store_late(void *at, uint2 v) {
    __stcs(static_cast<uint2 *>(at), v);
}

/* One store, whatever registers there are: short of them, the compiler cuts a plain store of 16 bytes into four. */
DEVICE void store_whole(void *at, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
DEVICE void store_whole(void *at, uint2 v) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(v.x), "r"(v.y) : "memory");
}

/* 16 bytes, asked for where it stands, as in front of a branch that may make them needless. */
DEVICE float4 load_here(const float *at) {
    float4 v;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

/* The compiler forgets what it made of these words: it unpacks them again rather than keep both in registers. */
DEVICE void forget(uint4 &v) {
    asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
}

DEVICE float4 load_table(const float *at) {
    return __ldg(reinterpret_cast<const float4 *>(at));
}

DEVICE void prefetch(const void *at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

/* What others may raise meanwhile. */
DEVICE int32_t load_shared_word(const int32_t *at) {
    int32_t v;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}
DEVICE void raise_word(int32_t *at, int32_t value) {
    atomicMax(at, value);
}
/* Returns what the word was. */
DEVICE uint64_t add_to_word(uint64_t *at, uint64_t more) {
    return atomicAdd(reinterpret_cast<unsigned long long *>(at), static_cast<unsigned long long>(more));
}
/* As it is in memory now. */
DEVICE uint64_t word_now(const uint64_t *at) {
    return *reinterpret_cast<const volatile uint64_t *>(at);
}
/* What this thread did before is seen before what it does behind. */
DEVICE void device_fence() {
    __threadfence();
}

/* Rounded one by one: no fused multiply-add unless it is asked for, whatever the compiler's options. */
DEVICE float mul(float a, float b) {
    return __fmul_rn(a, b);
}
DEVICE float add(float a, float b) {
    return __fadd_rn(a, b);
}
DEVICE float sub(float a, float b) {
    return __fsub_rn(a, b);
}
DEVICE float quotient(float a, float b) {
    return __fdiv_rn(a, b);
}
DEVICE float root(float a) {
    return __fsqrt_rn(a);
}
DEVICE float fused(float a, float b, float c) {
    return __fmaf_rn(a, b, c);
}
/* The one that is no NaN, where the other is. */
DEVICE float larger(float a, float b) {
    return fmaxf(a, b);
}
DEVICE float smaller(float a, float b) {
    return fminf(a, b);
}
DEVICE float magnitude(float a) {
    return fabsf(a);
}
DEVICE uint32_t bits_of(float a) {
    return __float_as_uint(a);
}
DEVICE float float_of(uint32_t a) {
    return __uint_as_float(a);
}

/* 2^x and 1/x from the table unit, about 2 units in the last place; subnormals are 0. */
DEVICE float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float reciprocal_estimate(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE uint32_t bytes_of(uint32_t low, uint32_t high, uint32_t selector) {
    return __byte_perm(low, high, selector);
}

/* Four codes, the first in the lowest byte: round to nearest even, saturating, NaN is 0x7F. */
DEVICE uint32_t encode_e4m3(float a, float b, float c, float d) {
    uint32_t codes;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(codes)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return codes;
}
DEVICE uint32_t encode_e5m2(float a, float b, float c, float d) {
    uint32_t codes;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(codes)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return codes;
}

/* Two bf16, the first in the lower half; every NaN is 0x7FFF. */
DEVICE uint32_t round_bf16_pair(float a, float b) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
    return pair;
}

/* The larger of two magnitudes in each half, with any sign; a NaN gives way. */
DEVICE uint32_t larger_bf16_pair(uint32_t a, uint32_t b) {
    uint32_t pair;
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}

DEVICE float shuffle_xor(float value, int mask) {
    return __shfl_xor_sync(0xFFFFFFFFu, value, mask);
}
DEVICE float shuffle(float value, int lane) {
    return __shfl_sync(0xFFFFFFFFu, value, lane);
}
DEVICE uint32_t shuffle(uint32_t value, int lane) {
    return __shfl_sync(0xFFFFFFFFu, value, lane);
}
DEVICE int32_t warp_largest(int32_t value) {
    return __reduce_max_sync(0xFFFFFFFFu, value);
}
DEVICE uint32_t warp_ballot(bool vote) {
    return __ballot_sync(0xFFFFFFFFu, vote);
}
/* The lanes that call with the same value. */
DEVICE uint32_t warp_match(uint32_t value) {
    return __match_any_sync(0xFFFFFFFFu, value);
}
DEVICE uint32_t bits_in(uint32_t word) {
    return static_cast<uint32_t>(__popc(word));
}
/* Its number, from 0. word: not 0. */
DEVICE uint32_t lowest_bit(uint32_t word) {
    return static_cast<uint32_t>(__ffs(word)) - 1;
}
/* The lanes of `mask`, all of which come here. No access to memory moves across it, so loads before it are all under
 * way before the loads and stores behind it; without it the assembler puts each next to its use to save registers. */
DEVICE void warp_barrier(uint32_t mask) {
    asm volatile("bar.warp.sync %0;" ::"r"(mask) : "memory");
}
DEVICE void block_barrier() {
    __syncthreads();
}
/* block_barrier, and whether a thread votes for it. */
DEVICE bool block_any(bool vote) {
    return __syncthreads_or(vote) != 0;
}
/* So many threads of the block, whole warps, that name the same `id` (1 to 15). */
DEVICE void some_barrier(uint32_t id, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Memory that the threads of a block share: one object per type and kernel. */
template <typename T>
static __device__ __forceinline__ T &shared_object() {
    __shared__ __align__(16) T object; /* words may be read by fours */
    return object;
}
/* The same for more than 48 KiB, sized at the launch: one object per kernel. */
template <typename T>
static __device__ __forceinline__ T &shared_large_object() {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    return *reinterpret_cast<T *>(shared_bytes);
}

DEVICE uint32_t shared_address(const void *at) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

/* 16 bytes into shared memory, without a register; there when this thread has waited for all that it asked for. */
DEVICE void copy_ahead(void *to, const void *from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
/* is_last_use: the second cache gives these bytes up before others. */
DEVICE void copy_ahead(void *to, const void *from, bool is_last_use) {
    if (!is_last_use) return copy_ahead(to, from);
    asm volatile(
        "{\n.reg .b64 policy;\n"
        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, policy;\n}" ::"r"(shared_address(to)),
        "l"(from)
        : "memory");
}
DEVICE void copies_wait() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}
/* What was asked for since the last call is a group. */
DEVICE void copies_close() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* Until at most `left` groups, the last ones, are still on their way. left: known where it is compiled. */
DEVICE void copies_wait_but(uint32_t left) {
    if (left == 0) asm volatile("cp.async.wait_group 0;" ::: "memory");
    if (left == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
    if (left == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
    if (left == 3) asm volatile("cp.async.wait_group 3;" ::: "memory");
    if (left == 7) asm volatile("cp.async.wait_group 7;" ::: "memory");
}

DEVICE uint32_t cluster_size() {
    uint32_t size;
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
    return size;
}
DEVICE uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(rank));
    return rank;
}
/* Half a barrier of the cluster each. Nothing written before arriving is thereby seen by others. */
DEVICE void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
DEVICE void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* A mailbox counts bytes that other blocks of the cluster send into this block's shared memory. One thread opens it and
 * arms it before each use; blocks meet at the cluster's barrier before the first byte is sent to an armed mailbox. */
struct mailbox {
    uint64_t word;
};
DEVICE void mailbox_open(mailbox *box) {
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;\n"
        "fence.mbarrier_init.release.cluster;" ::"r"(shared_address(box))
        : "memory");
}
DEVICE void mailbox_arm(mailbox *box, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(box)), "r"(bytes)
                 : "memory");
}
/* Writes where block `rank` has what lies at `at` here, and counts four bytes in its mailbox. */
DEVICE void mailbox_send(float *at, mailbox *box, uint32_t rank, float value) {
    asm volatile(
        "{\n.reg .b32 remote, counter;\n"
        "mapa.shared::cluster.u32 remote, %0, %2;\n"
        "mapa.shared::cluster.u32 counter, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [remote], %3, [counter];\n}" ::"r"(
            shared_address(at)),
        "r"(shared_address(box)), "r"(rank), "f"(value)
        : "memory");
}
/* The same of two that lie side by side: eight bytes. */
DEVICE void mailbox_send(float2 *at, mailbox *box, uint32_t rank, float2 value) {
    asm volatile(
        "{\n.reg .b32 remote, counter;\n"
        "mapa.shared::cluster.u32 remote, %0, %2;\n"
        "mapa.shared::cluster.u32 counter, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [remote], {%3, %4}, [counter];\n}" ::"r"(
            shared_address(at)),
        "r"(shared_address(box)), "r"(rank), "f"(value.x), "f"(value.y)
        : "memory");
}
/* Until the phase of this parity of a barrier in shared memory is over. */
DEVICE void phase_wait(uint64_t *barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}
/* Until all bytes of use number `use` (from 0) are there. */
DEVICE void mailbox_wait(mailbox *box, uint32_t use) {
    phase_wait(&box->word, use & 1u);
}

#endif
