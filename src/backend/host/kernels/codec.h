/* codec.h - the 8-bit formats and bf16 without branches, so that loops over them vectorize. Bit for bit
 * qe_fp8_encode, qe_fp8_decode, qe_bf16_encode. `format` is a compile-time constant wherever these are inlined. */
#ifndef QE_HOST_KERNELS_CODEC_H
#define QE_HOST_KERNELS_CODEC_H

#include "backend/host/kernels/level.h"
#include "qeffect/recipe.h"

/* Magnitudes are signed integers: they are below 2^31, and vectors compare signed numbers faster. */
#define FLOAT_MAGNITUDE 0x7FFFFFFF
#define FLOAT_INFINITE 0x7F800000
#define FLOAT_QUIET 0x7FC00000u
#define FLOAT_SIGN 0x80000000u

/* Mantissa bits dropped from a float. */
KERNEL_INLINE int32_t fp8_drop(qe_format format) { return format == QE_FORMAT_E4M3 ? 20 : 21; }
/* What a float's exponent is above the format's, at its place in a float. */
KERNEL_INLINE int32_t fp8_rebias(qe_format format) { return (format == QE_FORMAT_E4M3 ? 120 : 112) << 23; }
KERNEL_INLINE int32_t fp8_largest(qe_format format) { return format == QE_FORMAT_E4M3 ? 0x43E00000 : 0x47600000; }
KERNEL_INLINE int32_t magnitude_of(float value) { return (int32_t)bits_of(value) & FLOAT_MAGNITUDE; }

/* Rounds one value. The code, and the value that it stands for (NaN: the quiet NaN).
 * `step` is the power of two whose last mantissa bit is worth one unit of the code at this magnitude (below the
 * smallest normal, one subnormal unit): adding it rounds to nearest even, and the unit count stands in the low bits.
 * A normal number's count begins at one binade's worth of codes, as do the subnormals' when their exponent is taken
 * for the smallest normal's; so one formula serves both. */
KERNEL_INLINE uint32_t fp8_round(qe_format format, float value, float *rounded_out) {
    const int32_t drop = fp8_drop(format), lowest = fp8_rebias(format) + (1 << 23);
    const int32_t magnitude = magnitude_of(value);
    const uint32_t sign = bits_of(value) & FLOAT_SIGN;
    const int32_t clamped = magnitude < fp8_largest(format) ? magnitude : fp8_largest(format);
    const int32_t own = clamped & FLOAT_INFINITE, exponent = own > lowest ? own : lowest;
    const int32_t step = exponent + (drop << 23);
    const float sum = float_of((uint32_t)clamped) + float_of((uint32_t)step);
    const int32_t units = (int32_t)bits_of(sum) - step;
    const int32_t code = ((exponent - lowest) >> drop) + units;
    const uint32_t rounded = bits_of(sum - float_of((uint32_t)step)) | sign;
    const int is_nan = magnitude > FLOAT_INFINITE;
    *rounded_out = float_of(is_nan ? FLOAT_QUIET : rounded);
    return is_nan ? 0x7Fu : (uint32_t)code | sign >> 24;
}

KERNEL_INLINE float fp8_value(qe_format format, uint32_t code) {
    const int32_t magnitude = (int32_t)(code & 0x7F), lowest = fp8_rebias(format) + (1 << 23);
    const uint32_t sign = (code & 0x80) << 24;
    const int32_t shifted = (magnitude << fp8_drop(format)) + fp8_rebias(format);
    /* A subnormal is read as if it had the hidden bit of the smallest normal, which is then taken away: exact, and no
     * slow denormal float on the way. */
    const float small = float_of((uint32_t)shifted + (1u << 23)) - float_of((uint32_t)lowest);
    const uint32_t finite = shifted < lowest ? bits_of(small) : (uint32_t)shifted;
    const uint32_t infinite = format == QE_FORMAT_E5M2 && magnitude == 0x7C ? FLOAT_INFINITE : FLOAT_QUIET;
    const int is_finite = magnitude <= (format == QE_FORMAT_E4M3 ? 0x7E : 0x7B);
    return float_of(sign | (is_finite ? finite : infinite));
}

/* The upper half of a float, rounded. */
KERNEL_INLINE uint32_t bf16_round(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return magnitude_of(value) > FLOAT_INFINITE ? (bits >> 16 | 0x40) : rounded;
}

KERNEL_INLINE float bf16_value(uint32_t code) { return float_of(code << 16); }

/* |x| as bits, 0 for NaN: the largest of them is the amax, in any order. */
KERNEL_INLINE int32_t amax_bits(float x) {
    const int32_t magnitude = magnitude_of(x);
    return magnitude & -(magnitude <= FLOAT_INFINITE);
}

#endif
