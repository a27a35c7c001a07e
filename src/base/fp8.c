/* fp8.c - the codec by bit arithmetic, one value at a time. Every quantizing kernel is held against it; it is itself
 * held against plain double-precision arithmetic in tests/unit/base/test_fp8.c. */
#include "qeffect/fp8.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "base/assert.h"

enum {
    FLOAT_MANTISSA_BITS = 23,
    FLOAT_BIAS = 127,
    FLOAT_INFINITY = 0x7F800000,  /* bits; anything above it, sign aside, is a NaN */
    FLOAT_SIGN_SHIFT = 24,        /* bit 31 of a float becomes bit 7 of a code */
    CODE_NAN = 0x7F,
};

/* An 8-bit format: sign, exponent, `mantissa_bits`. Its subnormals are multiples of 2^(1 - bias - mantissa_bits). */
typedef struct layout {
    uint32_t mantissa_bits;
    uint32_t bias;
    uint32_t code_max; /* code of the largest finite value */
    float max;
} layout;

static const layout e4m3 = {.mantissa_bits = 3, .bias = 7, .code_max = 0x7E, .max = 448.0F};
static const layout e5m2 = {.mantissa_bits = 2, .bias = 15, .code_max = 0x7B, .max = 57344.0F};

static const layout *layout_of(qe_format format) {
    QE_ASSERT(format == QE_FORMAT_E4M3 || format == QE_FORMAT_E5M2);
    return format == QE_FORMAT_E4M3 ? &e4m3 : &e5m2;
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Drops the low `drop` bits of a float's bits, to nearest, ties to even. A carry runs into the exponent, which is
 * the right neighbour. */
static uint32_t round_bits(uint32_t bits, uint32_t drop) {
    uint32_t odd = (bits >> drop) & 1U;
    uint32_t below_half = (1U << (drop - 1U)) - 1U;
    return (bits + below_half + odd) >> drop;
}

/* Magnitude below the smallest normal. Adding a number whose last bit is worth one subnormal step makes the
 * processor round to that step, to nearest even; what is left above the number's own bits is the code. */
static uint32_t encode_subnormal(const layout *to, float magnitude) {
    uint32_t exponent = FLOAT_MANTISSA_BITS + 1U - to->bias - to->mantissa_bits + FLOAT_BIAS;
    uint32_t step_bits = exponent << FLOAT_MANTISSA_BITS;
    return bits_of(magnitude + float_of(step_bits)) - step_bits;
}

static uint32_t encode_magnitude(const layout *to, uint32_t magnitude) {
    uint32_t exponent_shift = FLOAT_BIAS - to->bias;
    uint32_t normal_min = (exponent_shift + 1U) << FLOAT_MANTISSA_BITS;
    if (magnitude >= bits_of(to->max)) return to->code_max;
    if (magnitude < normal_min) return encode_subnormal(to, float_of(magnitude));
    return round_bits(magnitude, FLOAT_MANTISSA_BITS - to->mantissa_bits) - (exponent_shift << to->mantissa_bits);
}

uint8_t qe_fp8_encode(qe_format format, float value) {
    uint32_t bits = bits_of(value);
    uint32_t magnitude = bits & 0x7FFFFFFFU;
    if (magnitude > FLOAT_INFINITY) return CODE_NAN;
    uint32_t sign = (bits >> FLOAT_SIGN_SHIFT) & 0x80U;
    return (uint8_t)(sign | encode_magnitude(layout_of(format), magnitude));
}

float qe_fp8_decode(qe_format format, uint8_t code) {
    const layout *from = layout_of(format);
    uint32_t magnitude = code & 0x7FU;
    uint32_t sign = (uint32_t)(code & 0x80U) << FLOAT_SIGN_SHIFT;
    uint32_t mantissa_shift = FLOAT_MANTISSA_BITS - from->mantissa_bits;
    if (magnitude > from->code_max) {
        /* E5M2 keeps IEEE's Inf just above its largest value; all else up there is NaN. */
        int is_infinite = format == QE_FORMAT_E5M2 && magnitude == from->code_max + 1U;
        return float_of(sign | FLOAT_INFINITY | (is_infinite ? 0U : 0x00400000U));
    }
    if (magnitude >> from->mantissa_bits == 0) {
        float step = float_of((FLOAT_BIAS + 1U - from->bias - from->mantissa_bits) << FLOAT_MANTISSA_BITS);
        float value = (float)magnitude * step;
        return sign == 0 ? value : -value;
    }
    uint32_t rebias = (FLOAT_BIAS - from->bias) << FLOAT_MANTISSA_BITS;
    return float_of(sign | ((magnitude << mantissa_shift) + rebias));
}

uint16_t qe_bf16_encode(float value) {
    uint32_t bits = bits_of(value);
    if ((bits & 0x7FFFFFFFU) > FLOAT_INFINITY) return (uint16_t)((bits >> 16U) | 0x0040U); /* made quiet */
    return (uint16_t)round_bits(bits, 16U);
}

float qe_bf16_decode(uint16_t code) {
    return float_of((uint32_t)code << 16U);
}

float qe_scale_inverse(float scale) {
    return 1.0F / scale;
}

float qe_scale_from_amax(float amax, float format_max, int power_of_two) {
    if (amax == 0.0F || !isfinite(amax)) return 1.0F;
    float scale = format_max / amax;
    if (isinf(scale)) scale = FLT_MAX;
    return power_of_two ? float_of(bits_of(scale) & 0xFF800000U) : scale;
}

float qe_format_max(qe_format format) {
    if (format == QE_FORMAT_E4M3) return e4m3.max;
    return format == QE_FORMAT_E5M2 ? e5m2.max : 0.0F;
}

uint32_t qe_format_bytes(qe_format format) {
    switch (format) {
    case QE_FORMAT_E4M3:
    case QE_FORMAT_E5M2: return 1;
    case QE_FORMAT_BF16: return 2;
    case QE_FORMAT_FP32: break;
    }
    return 4;
}
