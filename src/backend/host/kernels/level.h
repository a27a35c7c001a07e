/* level.h - kernels are compiled once per instruction level; this gives each copy its own names, and the tools that
 * all of them use: loops that vectorize, and reductions over 16 lanes in one order at every level. */
#ifndef QE_HOST_KERNELS_LEVEL_H
#define QE_HOST_KERNELS_LEVEL_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LEVEL_JOIN_TEXT(name, level) qe_host_##name##_##level
#define LEVEL_JOIN(name, level) LEVEL_JOIN_TEXT(name, level)
/* KERNEL(norm) is qe_host_norm_avx512 in that copy. */
#define KERNEL(name) LEVEL_JOIN(name, QE_LEVEL)
#define KERNEL_INLINE static inline __attribute__((always_inline))

/* The iterations of the next loop are independent even where two of its arrays are the same one (in-place work). */
#ifdef __clang__
#define KERNEL_VECTOR _Pragma("clang loop vectorize(assume_safety)")
#else
#define KERNEL_VECTOR _Pragma("GCC ivdep")
#endif

KERNEL_INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

KERNEL_INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* 16 running sums, whatever the width of a register. */
enum { LANES = 16 };
#if defined(QE_LEVEL_avx512)
enum { LANE_PART = 16 };
#elif defined(QE_LEVEL_avx2)
enum { LANE_PART = 8 };
#else
enum { LANE_PART = 4 };
#endif
enum { LANE_PARTS = LANES / LANE_PART };
typedef float lane_part __attribute__((vector_size(LANE_PART * 4)));
typedef float lane_part_at __attribute__((vector_size(LANE_PART * 4), aligned(4), may_alias)); /* anywhere in memory */
typedef int32_t lane_mask __attribute__((vector_size(LANE_PART * 4)));

typedef struct lanes {
    lane_part part[LANE_PARTS];
} lanes;

KERNEL_INLINE lanes lanes_zero(void) {
    lanes zero;
    memset(&zero, 0, sizeof zero);
    return zero;
}

KERNEL_INLINE lane_part lane_load(const float *at, int part) { return *(const lane_part_at *)(at + part * LANE_PART); }

/* The last `count` < 16 values of a row, behind them zeros. */
KERNEL_INLINE void lanes_tail(const float *at, size_t count, float tail_out[LANES]) {
    memset(tail_out, 0, LANES * sizeof(float));
    memcpy(tail_out, at, count * sizeof(float));
}

/* ((0+8)+(4+12)) + ...: halves are added until one is left. */
KERNEL_INLINE float lanes_sum(lanes sums) {
    float at[LANES];
    memcpy(at, &sums, sizeof at);
    for (int i = 0; i < 8; ++i) at[i] += at[i + 8];
    for (int i = 0; i < 4; ++i) at[i] += at[i + 4];
    return (at[0] + at[2]) + (at[1] + at[3]);
}

KERNEL_INLINE float row_sum(const float *x, size_t count) {
    lanes sums = lanes_zero();
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int part = 0; part < LANE_PARTS; ++part) sums.part[part] += lane_load(x + i, part);
    if (i < count) {
        float tail[LANES];
        lanes_tail(x + i, count - i, tail);
        for (int part = 0; part < LANE_PARTS; ++part) sums.part[part] += lane_load(tail, part);
    }
    return lanes_sum(sums);
}

KERNEL_INLINE float row_dot(const float *x, const float *y, size_t count) {
    lanes sums = lanes_zero();
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int part = 0; part < LANE_PARTS; ++part)
            sums.part[part] += lane_load(x + i, part) * lane_load(y + i, part);
    if (i < count) {
        float tail_x[LANES], tail_y[LANES];
        lanes_tail(x + i, count - i, tail_x);
        lanes_tail(y + i, count - i, tail_y);
        for (int part = 0; part < LANE_PARTS; ++part)
            sums.part[part] += lane_load(tail_x, part) * lane_load(tail_y, part);
    }
    return lanes_sum(sums);
}

/* sum of x * y * z, each product (x*y)*z. */
KERNEL_INLINE float row_dot3(const float *x, const float *y, const float *z, size_t count) {
    lanes sums = lanes_zero();
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int part = 0; part < LANE_PARTS; ++part)
            sums.part[part] += lane_load(x + i, part) * lane_load(y + i, part) * lane_load(z + i, part);
    if (i < count) {
        float tail_x[LANES], tail_y[LANES], tail_z[LANES];
        lanes_tail(x + i, count - i, tail_x);
        lanes_tail(y + i, count - i, tail_y);
        lanes_tail(z + i, count - i, tail_z);
        for (int part = 0; part < LANE_PARTS; ++part)
            sums.part[part] += lane_load(tail_x, part) * lane_load(tail_y, part) * lane_load(tail_z, part);
    }
    return lanes_sum(sums);
}

KERNEL_INLINE float larger(float a, float b) { return a > b ? a : b; }

KERNEL_INLINE lane_part lane_larger(lane_part a, lane_part b) {
    const lane_mask keep = (lane_mask)(a > b);
    return (lane_part)(((lane_mask)a & keep) | ((lane_mask)b & ~keep));
}

/* Keeps the first `count` of 16 values, 1 to 16; the others become `fill`. */
KERNEL_INLINE void lanes_keep(float at[LANES], size_t count, float fill) {
    static const int32_t keep[2 * LANES] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    const lane_mask other = (lane_mask){0} + (int32_t)bits_of(fill);
    for (int part = 0; part < LANE_PARTS; ++part) {
        lane_mask mask, value;
        memcpy(&mask, keep + LANES - count + part * LANE_PART, sizeof mask);
        memcpy(&value, at + part * LANE_PART, sizeof value);
        value = (value & mask) | (other & ~mask);
        memcpy(at + part * LANE_PART, &value, sizeof value);
    }
}

/* The largest value; which of several equal zeros, and what becomes of NaN, is the same at every level.
 * Requires: count > 0. */
KERNEL_INLINE float row_max(const float *x, size_t count) {
    const float lowest = float_of(0xFF800000);
    lanes most;
    for (int part = 0; part < LANE_PARTS; ++part) most.part[part] = (lane_part){0} + lowest;
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int part = 0; part < LANE_PARTS; ++part)
            most.part[part] = lane_larger(most.part[part], lane_load(x + i, part));
    if (i < count) {
        float tail[LANES];
        lanes_tail(x + i, count - i, tail);
        lanes_keep(tail, count - i, lowest);
        for (int part = 0; part < LANE_PARTS; ++part)
            most.part[part] = lane_larger(most.part[part], lane_load(tail, part));
    }
    float at[LANES];
    memcpy(at, &most, sizeof at);
    for (int lane = 0; lane < 8; ++lane) at[lane] = larger(at[lane], at[lane + 8]);
    for (int lane = 0; lane < 4; ++lane) at[lane] = larger(at[lane], at[lane + 4]);
    return larger(larger(at[0], at[2]), larger(at[1], at[3]));
}

/* e^x within 2 units in the last place, NaN stays NaN. Arguments are clamped to [-87.3, 88.3], where the result is a
 * normal number: below that a probability is 1e-38 instead of 0. Cephes's polynomial on |r| <= ln(2)/2, no fused
 * multiply-add. Vectorizes. */
KERNEL_INLINE float exp_lane(float x) {
    const float to_integer = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer that stands in the low bits */
    float clamped = x < -87.3f ? -87.3f : x;
    clamped = clamped > 88.3f ? 88.3f : clamped;
    const float shifted = clamped * 1.44269504088896341f + to_integer;
    const float power = shifted - to_integer;
    float r = clamped - power * 0.693359375f;
    r = r - power * -2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    const float scaled = float_of(bits_of(y) + ((bits_of(shifted) - bits_of(to_integer)) << 23));
    return x != x ? x : scaled;
}

#endif
