/* codec.cuh - bf16, codes and scales on the device, bit for bit src/base/fp8.c (but for the bits of a bf16 NaN). */
#ifndef QE_CUDA_CODEC_CUH
#define QE_CUDA_CODEC_CUH

#include "backend/cuda/device.cuh"
#include "qeffect/recipe.h"

enum { FORMAT_NONE = -1 }; /* no codes: only the amax is wanted */

static const uint32_t FLOAT_INFINITE = 0x7F800000u, FLOAT_LARGEST = 0x7F7FFFFFu, FLOAT_QUIET = 0x7FC00000u;

/* A word holds two bf16. */
DEVICE float low_bf16(uint32_t word) {
    return float_of(word << 16);
}
DEVICE float high_bf16(uint32_t word) {
    return float_of(word & 0xFFFF0000u);
}
DEVICE float bf16_value(uint16_t code) {
    return float_of(static_cast<uint32_t>(code) << 16);
}

/* qe_bf16_encode, but that every NaN is 0x7FFF: the instruction drops its sign and payload. */
DEVICE uint32_t bf16_code(float value) {
    return round_bf16_pair(value, 0.0f) & 0xFFFFu;
}

DEVICE void unpack8(uint4 words, float *v) {
    v[0] = low_bf16(words.x), v[1] = high_bf16(words.x);
    v[2] = low_bf16(words.y), v[3] = high_bf16(words.y);
    v[4] = low_bf16(words.z), v[5] = high_bf16(words.z);
    v[6] = low_bf16(words.w), v[7] = high_bf16(words.w);
}

DEVICE uint4 pack8(const float *v) {
    return make_uint4(round_bf16_pair(v[0], v[1]), round_bf16_pair(v[2], v[3]), round_bf16_pair(v[4], v[5]),
                      round_bf16_pair(v[6], v[7]));
}

/* Four codes of v * scale. */
template <int FORMAT>
static __device__ __forceinline__ uint32_t encode4(const float *v, float scale) {
    if (FORMAT == QE_FORMAT_E4M3)
        return encode_e4m3(mul(v[0], scale), mul(v[1], scale), mul(v[2], scale), mul(v[3], scale));
    return encode_e5m2(mul(v[0], scale), mul(v[1], scale), mul(v[2], scale), mul(v[3], scale));
}

DEVICE uint32_t encode1(int format, float value) {
    return (format == QE_FORMAT_E4M3 ? encode_e4m3(value, 0.0f, 0.0f, 0.0f) : encode_e5m2(value, 0.0f, 0.0f, 0.0f)) &
           0xFFu;
}

/* qe_fp8_decode. */
DEVICE float decode1(int format, uint32_t code) {
    const uint32_t drop = format == QE_FORMAT_E4M3 ? 20 : 21, rebias = (format == QE_FORMAT_E4M3 ? 120u : 112u) << 23;
    const uint32_t largest = format == QE_FORMAT_E4M3 ? 0x7Eu : 0x7Bu;
    const uint32_t size = code & 0x7Fu, sign = (code & 0x80u) << 24;
    if (size > largest)
        return float_of(sign | (format == QE_FORMAT_E5M2 && size == 0x7Cu ? FLOAT_INFINITE : FLOAT_QUIET));
    const uint32_t shifted = (size << drop) + rebias, lowest = rebias + (1u << 23);
    if (shifted >= lowest) return float_of(sign | shifted);
    /* A subnormal is read with a hidden bit that is then taken away. */
    return float_of(sign | bits_of(sub(float_of(shifted + (1u << 23)), float_of(lowest))));
}

/* qe_scale_from_amax; the amax is not negative. */
DEVICE float scale_from_amax(float amax, float format_max, bool power_of_two_wanted) {
    if (amax == 0.0f || !(amax <= float_of(FLOAT_LARGEST))) return 1.0f;
    float scale = quotient(format_max, amax);
    if (bits_of(scale) == FLOAT_INFINITE) scale = float_of(FLOAT_LARGEST);
    return power_of_two_wanted ? float_of(bits_of(scale) & 0xFF800000u) : scale;
}

DEVICE float inverse_of(float scale) {
    return quotient(1.0f, scale);
}

DEVICE float format_max_of(int format) {
    return format == QE_FORMAT_E4M3 ? 448.0f : 57344.0f;
}

/* The largest magnitudes of eight, each half by itself, with any sign. */
DEVICE uint32_t largest_bf16_pair(uint4 eight) {
    return larger_bf16_pair(larger_bf16_pair(eight.x, eight.y), larger_bf16_pair(eight.z, eight.w));
}
/* Is sigmoid the same without cutting its exponent, where gates have these magnitudes? A NaN may stand among them: what
 * is made of it is one anyway. */
DEVICE bool is_moderate(uint32_t most) {
    constexpr uint32_t LIMIT = 0x42AEu << 17; /* 87, without a sign */
    return most << 1 < LIMIT && most << 17 < LIMIT;
}

/* 1 / (1 + e^-g) within 4 units in the last place. The exponent is cut at 87, where the result is still a normal
 * number. The product g * log2(e) is taken exactly (what its rounding lost is put back to first order), and the table's
 * reciprocal is improved by one step of Newton. */
template <bool IS_CUT = true>
DEVICE float sigmoid(float g) {
    const float x = IS_CUT ? larger(smaller(-g, 87.0f), -87.0f) : -g;
    const float exponent = mul(x, 1.44269502f);
    const float lost = fused(x, 1.92596303e-8f, fused(x, 1.44269502f, -exponent));
    const float estimate = power_of_two(exponent);
    const float denominator = add(1.0f, fused(estimate, mul(lost, 0.693147182f), estimate));
    const float inverse = reciprocal_estimate(denominator);
    return fused(inverse, fused(-denominator, inverse, 1.0f), inverse);
}

#endif
