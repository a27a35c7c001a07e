/* codec.h - the 8-bit formats and bf16 without branches, so that loops over them vectorize. Bit for bit
 * qe_fp8_encode, qe_fp8_decode, qe_bf16_encode. `format` is a compile-time constant wherever these are inlined. */
#ifndef QE_HOST_KERNELS_CODEC_H
#define QE_HOST_KERNELS_CODEC_H

#include "backend/host/kernels/level.h"
#include "qeffect/recipe.h"

#define FLOAT_MAGNITUDE 0x7FFFFFFFu
#define FLOAT_INFINITE 0x7F800000u
#define FLOAT_QUIET 0x7FC00000u

/* Mantissa bits dropped from a float. */
KERNEL_INLINE uint32_t fp8_drop(qe_format format) { return format == QE_FORMAT_E4M3 ? 20u : 21u; }
/* What a float's exponent is above the format's, at its place in a float. */
KERNEL_INLINE uint32_t fp8_rebias(qe_format format) { return (format == QE_FORMAT_E4M3 ? 120u : 112u) << 23; }
KERNEL_INLINE uint32_t fp8_largest(qe_format format) { return format == QE_FORMAT_E4M3 ? 0x43E00000u : 0x47600000u; }
/* A number whose last mantissa bit is worth one subnormal step (2^-9, 2^-16): 2^14, 2^7. */
KERNEL_INLINE float fp8_step(qe_format format) { return format == QE_FORMAT_E4M3 ? 16384.0f : 128.0f; }

/* Rounds one value. The code, and the value that it stands for (NaN: the quiet NaN). */
KERNEL_INLINE uint32_t fp8_round(qe_format format, float value, float *rounded_out) {
    const uint32_t drop = fp8_drop(format), bits = bits_of(value), sign = bits & ~FLOAT_MAGNITUDE;
    const uint32_t magnitude = bits & FLOAT_MAGNITUDE;
    const uint32_t clamped = magnitude < fp8_largest(format) ? magnitude : fp8_largest(format);
    const uint32_t normal = (clamped + ((1u << (drop - 1)) - 1) + ((clamped >> drop) & 1)) & ~((1u << drop) - 1);
    const float stepped = float_of(clamped) + fp8_step(format);
    const uint32_t normal_code = (normal - fp8_rebias(format)) >> drop;
    const uint32_t small_code = bits_of(stepped) - bits_of(fp8_step(format));
    const int is_small = clamped < fp8_rebias(format) + (1u << 23);
    const uint32_t code = (is_small ? small_code : normal_code) | sign >> 24;
    const uint32_t rounded = (is_small ? bits_of(stepped - fp8_step(format)) : normal) | sign;
    const int is_nan = magnitude > FLOAT_INFINITE;
    *rounded_out = float_of(is_nan ? FLOAT_QUIET : rounded);
    return is_nan ? 0x7Fu : code;
}

KERNEL_INLINE float fp8_value(qe_format format, uint32_t code) {
    const uint32_t magnitude = code & 0x7F, sign = (code & 0x80) << 24;
    const uint32_t shifted = (magnitude << fp8_drop(format)) + fp8_rebias(format);
    /* A subnormal is read as if it had the hidden bit of the smallest normal, which is then taken away: exact, and no
     * slow denormal float on the way. */
    const uint32_t lowest = fp8_rebias(format) + (1u << 23);
    const uint32_t small = bits_of(float_of(shifted + (1u << 23)) - float_of(lowest));
    const uint32_t finite = shifted < lowest ? small : shifted;
    const uint32_t infinite = format == QE_FORMAT_E5M2 && magnitude == 0x7C ? FLOAT_INFINITE : FLOAT_QUIET;
    const int is_finite = magnitude <= (format == QE_FORMAT_E4M3 ? 0x7Eu : 0x7Bu);
    return float_of(sign | (is_finite ? finite : infinite));
}

/* The upper half of a float, rounded. */
KERNEL_INLINE uint32_t bf16_round(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return (bits & FLOAT_MAGNITUDE) > FLOAT_INFINITE ? (bits >> 16 | 0x40) : rounded;
}

KERNEL_INLINE float bf16_value(uint32_t code) { return float_of(code << 16); }

/* |x| as bits, 0 for NaN: the largest of them is the amax, in any order. */
KERNEL_INLINE uint32_t amax_bits(float x) {
    const uint32_t magnitude = bits_of(x) & FLOAT_MAGNITUDE;
    return magnitude & (0u - (uint32_t)(magnitude <= FLOAT_INFINITE));
}

#endif
