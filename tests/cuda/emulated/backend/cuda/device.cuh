/* device.cuh - the emulated twin of src/backend/cuda/device.cuh: the same functions in C++. */
#ifndef QE_CUDA_DEVICE_CUH
#define QE_CUDA_DEVICE_CUH

#include <cuda_runtime_api.h>
#include <math.h>
#include <string.h>
#include <vector_functions.h>

#include "emulator.h"
#include "qeffect/fp8.h"

#undef __global__
#undef __device__
#undef __launch_bounds__
#undef __grid_constant__
#define __device__
#define __launch_bounds__(...)
#define __grid_constant__
#define DEVICE static inline __attribute__((unused))
#define METHOD inline
#define KERNEL static
#define threadIdx (emulator_self().thread)
#define blockIdx (emulator_self().block)
#define blockDim (emulator_self().block_dim)
#define gridDim (emulator_self().grid_dim)

DEVICE uint4 load_once(const void *at) {
    if (reinterpret_cast<uintptr_t>(at) % 16 != 0) abort();
    uint4 v;
    memcpy(&v, at, sizeof v);
    return v;
}
DEVICE void store_late(void *at, uint4 v) {
    if (reinterpret_cast<uintptr_t>(at) % 16 != 0) abort();
    memcpy(at, &v, sizeof v);
}
DEVICE void store_late(void *at, uint2 v) {
    if (reinterpret_cast<uintptr_t>(at) % 8 != 0) abort();
    memcpy(at, &v, sizeof v);
}
DEVICE void store_whole(void *at, uint4 v) {
    store_late(at, v);
}
DEVICE void store_whole(void *at, uint2 v) {
    store_late(at, v);
}
DEVICE void forget(uint4 &) {
}
DEVICE float4 load_table(const float *at) {
    if (reinterpret_cast<uintptr_t>(at) % 16 != 0) abort();
    float4 v;
    memcpy(&v, at, sizeof v);
    return v;
}
DEVICE float4 load_here(const float *at) {
    return load_table(at);
}
DEVICE float __ldg(const float *at) {
    return *at;
}
DEVICE void prefetch(const void *) {
}
DEVICE void copy_ahead(void *to, const void *from) {
    if (reinterpret_cast<uintptr_t>(from) % 16 != 0 || reinterpret_cast<uintptr_t>(to) % 16 != 0) abort();
    emulator_copy(to, from);
}
DEVICE void copy_ahead(void *to, const void *from, bool) {
    copy_ahead(to, from);
}
DEVICE void copies_wait() {
    emulator_copies_wait();
}
DEVICE void copies_close() {
    emulator_copies_close();
}
DEVICE void copies_wait_but(uint32_t left) {
    emulator_copies_wait(left);
}
DEVICE int32_t load_shared_word(const int32_t *at) {
    return *at;
}
DEVICE void raise_word(int32_t *at, int32_t value) {
    *at = *at > value ? *at : value;
}
DEVICE uint64_t add_to_word(uint64_t *at, uint64_t more) {
    const uint64_t before = *at;
    *at += more;
    return before;
}
DEVICE uint64_t word_now(const uint64_t *at) {
    return *at;
}
DEVICE void device_fence() {}

DEVICE float mul(float a, float b) {
    return a * b;
}
DEVICE float add(float a, float b) {
    return a + b;
}
DEVICE float sub(float a, float b) {
    return a - b;
}
DEVICE float quotient(float a, float b) {
    return a / b;
}
DEVICE float root(float a) {
    return sqrtf(a);
}
DEVICE float fused(float a, float b, float c) {
    return fmaf(a, b, c);
}
/* Not fmaxf: it returns a NaN for a signalling one. */
DEVICE float larger(float a, float b) {
    return a != a ? b : (b != b || a > b ? a : b);
}
DEVICE float smaller(float a, float b) {
    return a != a ? b : (b != b || a < b ? a : b);
}
DEVICE float magnitude(float a) {
    return fabsf(a);
}
DEVICE uint32_t bits_of(float a) {
    uint32_t bits;
    memcpy(&bits, &a, sizeof bits);
    return bits;
}
DEVICE float float_of(uint32_t a) {
    float value;
    memcpy(&value, &a, sizeof value);
    return value;
}
DEVICE float power_of_two(float x) {
    return exp2f(x);
}
DEVICE float reciprocal_estimate(float x) {
    return float_of(bits_of(1.0f / x) ^ 1u);
} /* an estimate, as there */

DEVICE uint32_t larger_bf16_pair(uint32_t a, uint32_t b) {
    const float low = larger(magnitude(float_of(a << 16)), magnitude(float_of(b << 16)));
    const float high = larger(magnitude(float_of(a & 0xFFFF0000u)), magnitude(float_of(b & 0xFFFF0000u)));
    return bits_of(high) | bits_of(low) >> 16;
}
DEVICE uint32_t bytes_of(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t both = low | static_cast<uint64_t>(high) << 32;
    uint32_t bytes = 0;
    for (int i = 0; i < 4; ++i) bytes |= static_cast<uint32_t>(both >> ((selector >> 4 * i & 7) * 8) & 0xFF) << 8 * i;
    return bytes;
}
DEVICE uint32_t encode_four(qe_format format, float a, float b, float c, float d) {
    return static_cast<uint32_t>(qe_fp8_encode(format, a)) | static_cast<uint32_t>(qe_fp8_encode(format, b)) << 8 |
           static_cast<uint32_t>(qe_fp8_encode(format, c)) << 16 |
           static_cast<uint32_t>(qe_fp8_encode(format, d)) << 24;
}
DEVICE uint32_t encode_e4m3(float a, float b, float c, float d) {
    return encode_four(QE_FORMAT_E4M3, a, b, c, d);
}
DEVICE uint32_t encode_e5m2(float a, float b, float c, float d) {
    return encode_four(QE_FORMAT_E5M2, a, b, c, d);
}
DEVICE uint32_t round_bf16_pair(float a, float b) {
    const uint32_t low = a != a ? 0x7FFFu : qe_bf16_encode(a), high = b != b ? 0x7FFFu : qe_bf16_encode(b);
    return low | high << 16;
}

DEVICE int lane_here() {
    return static_cast<int>(threadIdx.x % 32);
}
DEVICE float shuffle(float value, int lane) {
    return float_of(static_cast<uint32_t>(emulator_exchange(bits_of(value), lane)));
}
DEVICE uint32_t shuffle(uint32_t value, int lane) {
    return static_cast<uint32_t>(emulator_exchange(value, lane));
}
DEVICE float shuffle_xor(float value, int mask) {
    return shuffle(value, lane_here() ^ mask);
}
DEVICE int32_t warp_largest(int32_t value) {
    for (int step = 16; step > 0; step /= 2) {
        const int32_t other = static_cast<int32_t>(emulator_exchange(static_cast<uint32_t>(value), lane_here() ^ step));
        value = value > other ? value : other;
    }
    return value;
}
DEVICE uint32_t warp_ballot(bool vote) {
    uint64_t all[32];
    emulator_gather(vote, all);
    uint32_t mask = 0;
    for (int lane = 0; lane < 32; ++lane) mask |= static_cast<uint32_t>(all[lane]) << lane;
    return mask;
}
DEVICE uint32_t warp_match(uint32_t value) {
    uint64_t all[32];
    emulator_gather(value, all);
    uint32_t mask = 0;
    for (int lane = 0; lane < 32; ++lane) mask |= static_cast<uint32_t>(all[lane] == value) << lane;
    return mask;
}
DEVICE uint32_t bits_in(uint32_t word) {
    return static_cast<uint32_t>(__builtin_popcount(word));
}
DEVICE uint32_t lowest_bit(uint32_t word) {
    if (word == 0) abort();
    return static_cast<uint32_t>(__builtin_ctz(word));
}
DEVICE void warp_barrier(uint32_t mask) {
    emulator_warp_barrier(mask);
}
DEVICE void block_barrier() {
    emulator_block_barrier();
}
DEVICE void some_barrier(uint32_t id, uint32_t threads) {
    emulator_some_barrier(id, threads);
}

template <typename T>
static inline T &shared_object() {
    static const char key = 0;
    return *static_cast<T *>(emulator_shared(&key, sizeof(T)));
}
template <typename T>
static inline T &shared_large_object() {
    return shared_object<T>();
}
struct block_vote {
    uint32_t any;
};
DEVICE bool block_any(bool vote) {
    uint32_t &any = shared_object<block_vote>().any;
    any = 0;
    emulator_block_barrier();
    any |= vote;
    emulator_block_barrier();
    const bool answer = any != 0;
    emulator_block_barrier(); /* before the next vote begins */
    return answer;
}

DEVICE uint32_t cluster_size() {
    return emulator_cluster_size();
}
DEVICE uint32_t cluster_rank() {
    return emulator_cluster_rank();
}
DEVICE void cluster_arrive() {
    emulator_cluster_arrive();
}
DEVICE void cluster_wait() {
    emulator_cluster_wait();
}

struct mailbox {
    int32_t bytes; /* still to come */
    uint16_t is_armed, uses;
};
DEVICE void mailbox_check(mailbox *box) {
    if (box->is_armed && box->bytes == 0) box->is_armed = 0, ++box->uses;
}
DEVICE void mailbox_open(mailbox *box) {
    *box = mailbox();
}
DEVICE void mailbox_arm(mailbox *box, uint32_t bytes) {
    box->bytes += static_cast<int32_t>(bytes), box->is_armed = 1;
    mailbox_check(box);
}
DEVICE void mailbox_send(float *at, mailbox *box, uint32_t rank, float value) {
    *static_cast<float *>(emulator_remote(at, rank)) = value;
    mailbox *theirs = static_cast<mailbox *>(emulator_remote(box, rank));
    theirs->bytes -= 4;
    mailbox_check(theirs);
}
DEVICE void mailbox_wait(mailbox *box, uint32_t use) {
    while (box->uses <= use) emulator_yield();
}

#endif
