/* fp8.h - the two 8-bit formats and bf16, one value at a time: the reference that every kernel is held against.
 * Round to nearest even, saturating: |x| > max and Inf become max with their sign; NaN becomes 0x7F, sign dropped. */
#ifndef QEFFECT_FP8_H
#define QEFFECT_FP8_H

#include <stdint.h>
#include "qeffect/recipe.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Requires: format is QE_FORMAT_E4M3 or QE_FORMAT_E5M2. Thread: any. */
uint8_t qe_fp8_encode(qe_format format, float value);
float qe_fp8_decode(qe_format format, uint8_t code);
/* Round to nearest even; NaN stays a quiet NaN, Inf stays Inf. */
uint16_t qe_bf16_encode(float value);
float qe_bf16_decode(uint16_t code);

/* scale_inv = correctly rounded 1/scale; belongs to the quantized tensor. */
float qe_scale_inverse(float scale);
/* Scale of one tensor or block from its amax, Transformer Engine's compute_scale_from_amax: 0, Inf and NaN give 1,
 * an infinite quotient becomes FLT_MAX; power_of_two clears the mantissa. */
float qe_scale_from_amax(float amax, float format_max, int power_of_two);

#ifdef __cplusplus
}
#endif
#endif
