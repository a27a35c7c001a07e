/* target.c - where a quantized tensor goes on each side, and whether both put the same there. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "same.h"

static int is_fp8(qe_recipe_kind recipe) {
    return recipe == QE_RECIPE_DELAYED || recipe == QE_RECIPE_CURRENT;
}

qe_format target_format(qe_recipe_kind recipe, int is_gradient) {
    switch (recipe) {
        case QE_RECIPE_BF16: return QE_FORMAT_BF16;
        case QE_RECIPE_FP32: return QE_FORMAT_FP32;
        case QE_RECIPE_BLOCK: return QE_FORMAT_E4M3;
        default: return is_gradient ? QE_FORMAT_E5M2 : QE_FORMAT_E4M3;
    }
}

static size_t blocks_of(uint32_t count) {
    return (count + QE_BLOCK - 1) / QE_BLOCK;
}

/* Inverse scales of what is retained. */
static size_t scale_count(qe_recipe_kind recipe, uint32_t rows, uint32_t columns, int is_weight) {
    if (is_fp8(recipe)) return 1;
    if (recipe != QE_RECIPE_BLOCK) return 0;
    return is_weight ? blocks_of(rows) * blocks_of(columns) : blocks_of(rows) * columns;
}

static qe_qtensor tensor_of(const same_target *target, const same_buffer *codes, same_side side, qe_format format,
                            int with_scale) {
    return (qe_qtensor){.codes = same_at(codes, side),
                        .scale_inv = with_scale ? same_at(target->scale_inv, side) : NULL,
                        .rows = target->rows,
                        .columns = target->columns,
                        .format = (uint8_t)format};
}

static void host_side(same_target *target, qe_recipe_kind recipe, qe_format format) {
    qe_quantize_target *side = &target->side[SAME_HOST];
    side->operand = tensor_of(target, target->operand, SAME_HOST, QE_FORMAT_FP32, 0);
    side->retained = tensor_of(target, target->retained, SAME_HOST, format, 1);
    if (recipe == QE_RECIPE_BLOCK) side->retained.blocking = target->is_weight ? QE_BLOCKING_TILE : QE_BLOCKING_COLUMN;
}

static void device_side(same_target *target, qe_recipe_kind recipe, qe_format format) {
    qe_quantize_target *side = &target->side[SAME_DEVICE];
    const qe_format values = recipe == QE_RECIPE_BLOCK ? QE_FORMAT_BF16 : format;
    side->operand = tensor_of(target, target->operand, SAME_DEVICE, values, is_fp8(recipe));
    side->retained = tensor_of(target, target->retained, SAME_DEVICE, format, 1);
    side->retained.transposed = (uint8_t)is_fp8(recipe);
    if (recipe == QE_RECIPE_BLOCK) side->retained.blocking = target->is_weight ? QE_BLOCKING_TILE : QE_BLOCKING_COLUMN;
}

void target_make(same_world *world, same_target *target, qe_recipe_kind recipe, qe_format format, uint32_t rows,
                 uint32_t columns, int is_weight, same_parts parts, float scale) {
    const size_t count = (size_t)rows * columns, scales = scale_count(recipe, rows, columns, is_weight);
    const int retains = parts != SAME_EVALUATION;
    const int device_retains = retains && (!is_weight || is_fp8(recipe));
    const qe_format values = recipe == QE_RECIPE_BLOCK ? QE_FORMAT_BF16 : format;
    *target = (same_target){.rows = rows, .columns = columns, .is_weight = is_weight};
    target->operand = parts == SAME_RETAINED
                          ? NULL
                          : world_pair(world, count * sizeof(float), NULL, count * qe_format_bytes(values), NULL);
    target->retained = world_pair(world, retains ? count * qe_format_bytes(format) : 0, NULL,
                                  device_retains ? count * qe_format_bytes(format) : 0, NULL);
    target->scale_inv = world_pair(world, retains ? scales * sizeof(float) : 0, NULL,
                                   device_retains || is_fp8(recipe) ? scales * sizeof(float) : 0, NULL);
    if (recipe == QE_RECIPE_DELAYED) {
        const float already = 0.25f; /* recorded before: stays where the tensor is smaller */
        target->scale = world_bytes(world, sizeof scale, &scale);
        if (parts != SAME_EVALUATION) target->amax = world_bytes(world, sizeof already, &already);
    }
    for (int side = SAME_HOST; side <= SAME_DEVICE; ++side)
        target->side[side] = (qe_quantize_target){.recipe = (uint8_t)recipe,
                                                  .format = (uint8_t)format,
                                                  .scale = same_at(target->scale, (same_side)side),
                                                  .amax = same_at(target->amax, (same_side)side)};
    host_side(target, recipe, format);
    device_side(target, recipe, format);
}

/* --- What lies there, as numbers by rows --- */

static float number_of(const void *codes, size_t i, uint8_t format) {
    switch (format) {
        case QE_FORMAT_BF16: return qe_bf16_decode(((const uint16_t *)codes)[i]);
        case QE_FORMAT_FP32: return ((const float *)codes)[i];
        default: return qe_fp8_decode((qe_format)format, ((const uint8_t *)codes)[i]);
    }
}

static float inverse_of(const qe_qtensor *tensor, const float *scale_inv, size_t row, size_t column) {
    if (scale_inv == NULL || tensor->format == QE_FORMAT_BF16 || tensor->format == QE_FORMAT_FP32) return 1.0f;
    switch (tensor->blocking) {
        case QE_BLOCKING_COLUMN: return scale_inv[row / QE_BLOCK * tensor->columns + column];
        case QE_BLOCKING_TILE: return scale_inv[row / QE_BLOCK * blocks_of(tensor->columns) + column / QE_BLOCK];
        default: return scale_inv[0];
    }
}

/* value * scale_inv of every element; codes and scale_inv lie on the host. The caller frees. */
static float *numbers_of(const qe_qtensor *tensor, const void *codes, const float *scale_inv) {
    const size_t rows = tensor->rows, columns = tensor->columns;
    float *values = room(rows * columns * sizeof *values);
    for (size_t row = 0; row < rows; ++row)
        for (size_t column = 0; column < columns; ++column) {
            const size_t at = tensor->transposed ? column * rows + row : row * columns + column;
            const float inverse = inverse_of(tensor, scale_inv, row, column);
            values[row * columns + column] = number_of(codes, at, tensor->format) * inverse;
        }
    return values;
}

/* The numbers of the device's operand or of what it retained; NULL where it made none. */
static float *device_numbers(const same_target *target, int retained) {
    const qe_quantize_target *side = &target->side[SAME_DEVICE];
    const same_buffer *buffer = retained ? target->retained : target->operand;
    const qe_qtensor *tensor = retained ? &side->retained : &side->operand;
    if (tensor->codes == NULL) return NULL;
    return numbers_of(tensor, buffer->fetched, tensor->scale_inv != NULL ? target->scale_inv->fetched : NULL);
}

static float *host_numbers(const same_target *target, int retained) {
    const qe_quantize_target *side = &target->side[SAME_HOST];
    const qe_qtensor *tensor = retained ? &side->retained : &side->operand;
    if (tensor->codes == NULL) return NULL;
    return numbers_of(tensor, tensor->codes, tensor->scale_inv);
}

/* Codes of the device by rows, as the host keeps them. */
static void codes_exact(const same_world *world, const same_target *target) {
    const qe_qtensor *tensor = &target->side[SAME_DEVICE].retained;
    if (tensor->codes == NULL || target->side[SAME_HOST].retained.codes == NULL) return;
    const size_t rows = target->rows, columns = target->columns, bytes = qe_format_bytes((qe_format)tensor->format);
    const char *from = target->retained->fetched;
    char *by_rows = room(rows * columns * bytes);
    for (size_t row = 0; row < rows; ++row)
        for (size_t column = 0; column < columns; ++column)
            memcpy(by_rows + (row * columns + column) * bytes,
                   from + (tensor->transposed ? column * rows + row : row * columns + column) * bytes, bytes);
    if (bytes == sizeof(float))
        same_numbers(world, "retained values", target->retained->host, (const float *)(const void *)by_rows,
                     rows * columns);
    else if (bytes == 1) /* a NaN of bf16 has many patterns, a NaN of FP8 one */
        same_memory(world, "retained codes", target->retained->host, by_rows, rows * columns);
    free(by_rows);
    if (target->scale_inv->host_bytes > 0 && target->scale_inv->host_bytes == target->scale_inv->device_bytes)
        same_bits(world, "inverse scales", target->scale_inv);
}

/* Block scaling undone is bf16; a value of the format times a power of two is such a number, or below bf16's range. */
static void numbers_exact(const same_world *world, const same_target *target, int retained) {
    float *host = host_numbers(target, retained), *device = device_numbers(target, retained);
    const size_t count = (size_t)target->rows * target->columns;
    const int is_bf16 = target->side[SAME_DEVICE].operand.format == QE_FORMAT_BF16 && !retained;
    for (size_t i = 0; is_bf16 && host != NULL && i < count; ++i) host[i] = bf16_round(host[i]);
    if (host != NULL && device != NULL)
        same_numbers(world, retained ? "retained numbers" : "operand", host, device, count);
    free(host);
    free(device);
}

void target_exact(const same_world *world, const same_target *target) {
    codes_exact(world, target);
    numbers_exact(world, target, 0);
    numbers_exact(world, target, 1);
    if (target->amax != NULL) same_bits(world, "amax", target->amax);
}

/* --- Close --- */

/* From a number to its neighbour, at most: of its own size, and near zero. */
static double step_of(uint8_t format, double value, double inverse) {
    switch (format) {
        case QE_FORMAT_E4M3: return fmax(value * 0x1p-3, inverse * 0x1p-9);
        case QE_FORMAT_E5M2: return fmax(value * 0x1p-2, inverse * 0x1p-16);
        case QE_FORMAT_BF16: return value * 0x1p-7;
        default: return 0.0;
    }
}

/* The format that the numbers were rounded to, and the largest inverse scale. */
static void steps_close(const same_world *world, const same_target *target, same_tolerance *tolerance,
                        const float *host, const float *device, double inverse) {
    const size_t count = (size_t)target->rows * target->columns;
    const uint8_t format = target->side[SAME_HOST].format;
    const double vanishing = tolerance->of_largest * same_largest(host, count);
    size_t others = 0, beyond = 0, first = 0;
    for (size_t i = count; i-- > 0;) {
        const double a = (double)host[i], b = (double)device[i], apart = fabs(a - b);
        if (a == b || (isnan(a) && isnan(b)) || apart <= tolerance->relative * fabs(a) + vanishing) continue;
        others++;
        if (!(apart <= 1.01 * step_of(format, fmax(fabs(a), fabs(b)), inverse))) beyond++, first = i;
    }
    const double allowed = tolerance->others * (double)count + 2.0;
    if ((double)others / allowed > tolerance->worst) tolerance->worst = (double)others / allowed;
    tolerance->compared += count;
    if (beyond > 0)
        world_fail(world, "%s: %zu of %zu are no neighbours, first %zu: host %.9g, device %.9g", tolerance->what,
                   beyond, count, first, (double)host[first], (double)device[first]);
    if ((double)others > allowed)
        world_fail(world, "%s: %zu of %zu are not the same number, at most %.0f may", tolerance->what, others, count,
                   allowed);
}

static double largest_inverse(const same_target *target) {
    double largest = 0.0;
    const size_t count = target->scale_inv->device_bytes / sizeof(float);
    const float *inverse = target->scale_inv->fetched;
    for (size_t i = 0; i < count; ++i) largest = fmax(largest, (double)inverse[i]);
    return count > 0 ? largest : 1.0;
}

void target_close(const same_world *world, const same_target *target, same_tolerance *value, same_tolerance *amax) {
    for (int retained = 0; retained < 2; ++retained) {
        float *host = host_numbers(target, retained), *device = device_numbers(target, retained);
        if (host != NULL && device != NULL)
            steps_close(world, target, value, host, device, largest_inverse(target));
        free(host);
        free(device);
    }
    if (target->amax != NULL) same_close_to(world, amax, target->amax->host, target->amax->fetched, 1);
}
