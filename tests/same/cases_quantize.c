/* cases_quantize.c - rounding to a format, from activations and from weights: bit for bit. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/kernels.h"
#include "same.h"

typedef struct shape {
    uint32_t rows, columns;
} shape;

/* FP8 products want whole sixteens; the other recipes take anything. */
static const shape sixteens[] = {{16, 16}, {16, 128}, {128, 16}, {48, 144}, {144, 80}, {128, 128}, {272, 400},
                                 {2048, 1024}, {64, 4096}};
static const shape any_shapes[] = {{1, 1}, {1, 7}, {7, 1}, {3, 129}, {129, 3}, {33, 77}, {127, 255}, {128, 128},
                                   {200, 136}, {257, 384}, {1024, 1024}};
enum { SIXTEENS = sizeof sixteens / sizeof *sixteens, ANY_SHAPES = sizeof any_shapes / sizeof *any_shapes };

static int takes_sixteens(qe_recipe_kind recipe) {
    return recipe == QE_RECIPE_DELAYED || recipe == QE_RECIPE_CURRENT;
}

static const shape *shapes_of(qe_recipe_kind recipe, uint32_t *count_out) {
    *count_out = takes_sixteens(recipe) ? (uint32_t)SIXTEENS : (uint32_t)ANY_SHAPES;
    return takes_sixteens(recipe) ? sixteens : any_shapes;
}

static qe_op quantize_op(const same_buffer *x, const same_target *target, same_side side) {
    qe_op op = {.kind = QE_OP_QUANTIZE};
    op.args.quantize = (qe_args_quantize){.x = same_at(x, side),
                                          .rows = target->rows,
                                          .columns = target->columns,
                                          .target = target->side[side]};
    return op;
}

static void quantize_run(same_world *world, qe_recipe_kind recipe, qe_format format, uint32_t rows, uint32_t columns,
                         const float *values, same_parts parts, float scale) {
    same_target target;
    const same_buffer *x = world_activation(world, (size_t)rows * columns, values);
    target_make(world, &target, recipe, format, rows, columns, 0, parts, scale);
    const qe_op host = quantize_op(x, &target, SAME_HOST), device = quantize_op(x, &target, SAME_DEVICE);
    if (world_run(world, &host, &device)) target_exact(world, &target);
    world_end(world);
}

/* Every number that an activation can be, in every format, at scales that saturate, underflow and are no power of
 * two. */
static void codec_of(qe_recipe_kind recipe, qe_format format, float scale, int finite) {
    enum { SIDE = 256, ALL = SIDE * SIDE };
    float *values = room(ALL * sizeof *values);
    for (uint32_t i = 0; i < ALL; ++i) {
        values[i] = qe_bf16_decode((uint16_t)i);
        if (finite && !isfinite(values[i])) values[i] = 0.0f;
    }
    same_world world;
    world_begin(&world, "all bf16 numbers, %s %s, scale %g%s", qe_recipe_name(recipe),
                format == QE_FORMAT_E5M2 ? "e5m2" : "e4m3", (double)scale, finite ? ", finite" : "");
    quantize_run(&world, recipe, format, SIDE, SIDE, values, SAME_ALL, scale);
    free(values);
}

void case_codec(void) {
    static const float scales[] = {1.0f, 128.0f, 0.0117f, 3.0e38f, 1.0e-30f, 0x1p-127f};
    for (qe_format format = QE_FORMAT_E4M3; format <= QE_FORMAT_E5M2; ++format) {
        for (size_t i = 0; i < sizeof scales / sizeof *scales; ++i) codec_of(QE_RECIPE_DELAYED, format, scales[i], 0);
        codec_of(QE_RECIPE_CURRENT, format, 1.0f, 0);
        codec_of(QE_RECIPE_CURRENT, format, 1.0f, 1);
    }
    codec_of(QE_RECIPE_BLOCK, QE_FORMAT_E4M3, 1.0f, 0);
    codec_of(QE_RECIPE_BLOCK, QE_FORMAT_E4M3, 1.0f, 1);
    codec_of(QE_RECIPE_BF16, QE_FORMAT_BF16, 1.0f, 0);
    codec_of(QE_RECIPE_FP32, QE_FORMAT_FP32, 1.0f, 0);
}

/* Rows of very different sizes, a stretch of zeros, and one of what is not a number. */
static void spoil(float *values, uint32_t rows, uint32_t columns, int what) {
    static const float odd[] = {NAN, INFINITY, -INFINITY, 1e-40f, -1e-40f, 3.3e38f, -0.0f, 448.0f, 57344.0f};
    const size_t count = (size_t)rows * columns;
    for (size_t i = 0; i < count; ++i) {
        const size_t row = i / columns;
        if (what == 1) values[i] *= ldexpf(1.0f, (int)(row % 40) - 20);
        if (what == 2) values[i] = 0.0f;
        if (what == 3 && i % 61 == 0) values[i] = odd[i / 61 % (sizeof odd / sizeof *odd)];
        if (what == 4) values[i] *= 1e-38f;
        if (what == 5) values[i] *= 1e37f;
    }
}

static void quantize_shapes(qe_recipe_kind recipe, int is_gradient) {
    static const char *const parts_names[] = {"", ", evaluation", ", retained only"};
    static const char *const spoilt[] = {"", ", mixed sizes", ", zeros", ", odd numbers", ", tiny", ", huge"};
    uint32_t count;
    const shape *shapes = shapes_of(recipe, &count);
    for (uint32_t s = 0; s < count; ++s)
        for (int what = 0; what < 6; ++what)
            for (same_parts parts = SAME_ALL; parts <= SAME_RETAINED; ++parts) {
                if (what > 0 && parts != SAME_ALL) continue;
                const shape at = shapes[s];
                float *values = normals((size_t)at.rows * at.columns, 1.0f, s * 10 + (uint32_t)what);
                spoil(values, at.rows, at.columns, what);
                same_world world;
                world_begin(&world, "quantize %s%s %ux%u%s%s", qe_recipe_name(recipe), is_gradient ? " gradient" : "",
                            at.rows, at.columns, spoilt[what], parts_names[parts]);
                quantize_run(&world, recipe, target_format(recipe, is_gradient), at.rows, at.columns, values, parts,
                             37.3f);
                free(values);
            }
}

void case_quantize(void) {
    for (qe_recipe_kind recipe = QE_RECIPE_DELAYED; recipe <= QE_RECIPE_FP32; ++recipe) {
        quantize_shapes(recipe, 0);
        if (takes_sixteens(recipe)) quantize_shapes(recipe, 1);
    }
}

/* --- Weights: any fp32 number, and the key that travels with the cache --- */

typedef struct weight_places {
    const same_buffer *w, *witness, *epoch;
    same_buffer *key;
} weight_places;

static qe_op weight_op(const weight_places *places, const same_target *target, same_side side) {
    qe_op op = {.kind = QE_OP_QUANTIZE_WEIGHT};
    op.args.quantize_weight = (qe_args_quantize_weight){.w = same_at(places->w, side),
                                                        .rows = target->rows,
                                                        .columns = target->columns,
                                                        .target = target->side[side],
                                                        .weight_witness = same_at(places->witness, side),
                                                        .scale_epoch = same_at(places->epoch, side),
                                                        .key = same_at(places->key, side)};
    return op;
}

static void weight_run(same_world *world, qe_recipe_kind recipe, qe_format format, shape at, const float *values,
                       int with_key, float scale) {
    const uint64_t witness = UINT64_C(0x123456789A), epoch = 77, unsealed[QE_KEY_WORDS] = {5, 6, QE_KEY_SEALED, 0};
    same_target target;
    weight_places places = {.w = world_bytes(world, (size_t)at.rows * at.columns * sizeof(float), values)};
    if (with_key) {
        places.witness = world_bytes(world, sizeof witness, &witness);
        if (recipe == QE_RECIPE_DELAYED) places.epoch = world_bytes(world, sizeof epoch, &epoch);
        places.key = world_bytes(world, sizeof unsealed, unsealed);
    }
    target_make(world, &target, recipe, format, at.rows, at.columns, 1, SAME_ALL, scale);
    const qe_op host = weight_op(&places, &target, SAME_HOST), device = weight_op(&places, &target, SAME_DEVICE);
    if (world_run(world, &host, &device)) {
        target_exact(world, &target);
        if (with_key) same_bits(world, "key", places.key);
    }
    world_end(world);
}

static void any_pattern(qe_format format, float scale) {
    const shape at = {1024, 1024};
    float *values = room((size_t)at.rows * at.columns * sizeof *values);
    same_random random = {99};
    for (size_t i = 0; i < (size_t)at.rows * at.columns; ++i) values[i] = float_from(random_bits(&random));
    same_world world;
    world_begin(&world, "a million random fp32 patterns, %s, scale %g", format == QE_FORMAT_E5M2 ? "e5m2" : "e4m3",
                (double)scale);
    weight_run(&world, QE_RECIPE_DELAYED, format, at, values, 0, scale);
    free(values);
}

/* Halfway between two codes, and the two numbers beside it: where rounding shows. */
static void midpoints(qe_format format) {
    const shape at = {16, 48};
    float values[16 * 48] = {0};
    for (uint32_t code = 0; code < 0x7F; ++code) {
        const float low = qe_fp8_decode(format, (uint8_t)code), high = qe_fp8_decode(format, (uint8_t)(code + 1));
        const float middle = isfinite(high) ? 0.5f * low + 0.5f * high : low;
        values[code * 6] = middle, values[code * 6 + 1] = nextafterf(middle, INFINITY);
        values[code * 6 + 2] = nextafterf(middle, -INFINITY);
        for (int i = 3; i < 6; ++i) values[code * 6 + (uint32_t)i] = -values[code * 6 + (uint32_t)i - 3];
    }
    same_world world;
    world_begin(&world, "midpoints of %s", format == QE_FORMAT_E5M2 ? "e5m2" : "e4m3");
    weight_run(&world, QE_RECIPE_DELAYED, format, at, values, 0, 1.0f);
}

void case_quantize_weight(void) {
    for (qe_format format = QE_FORMAT_E4M3; format <= QE_FORMAT_E5M2; ++format) {
        any_pattern(format, 1.0f);
        any_pattern(format, 0.37f);
        midpoints(format);
    }
    for (qe_recipe_kind recipe = QE_RECIPE_DELAYED; recipe <= QE_RECIPE_FP32; ++recipe) {
        uint32_t count;
        const shape *shapes = shapes_of(recipe, &count);
        for (uint32_t s = 0; s < count; ++s)
            for (int what = 0; what < 4; ++what) {
                const shape at = shapes[s];
                float *values = normals((size_t)at.rows * at.columns, 0.02f, 1000 + s);
                spoil(values, at.rows, at.columns, what);
                same_world world;
                world_begin(&world, "quantize_weight %s %ux%u, values %d", qe_recipe_name(recipe), at.rows, at.columns,
                            what);
                weight_run(&world, recipe, target_format(recipe, 0), at, values, what != 1, 1234.5f);
                free(values);
            }
    }
}

/* --- Retained codes of block scaling back into bf16 --- */

typedef struct decode_call {
    qe_qtensor tensor;
    void *values;
} decode_call;

static qe_status decode_launch(const void *context, void *stream) {
    const decode_call *call = context;
    return qe_cuda_decode(&call->tensor, call->values, stream);
}

static void decode_of(shape at) {
    const size_t count = (size_t)at.rows * at.columns;
    const size_t scales = (size_t)((at.rows + QE_BLOCK - 1) / QE_BLOCK) * at.columns;
    uint8_t *codes = room(count);
    float *inverse = room(scales * sizeof *inverse), *wanted = room(count * sizeof *wanted);
    same_random random = {at.rows * 7 + at.columns};
    for (size_t i = 0; i < count; ++i) codes[i] = (uint8_t)random_bits(&random);
    for (size_t i = 0; i < scales; ++i) inverse[i] = ldexpf(1.0f, (int)(random_bits(&random) % 40) - 20);
    for (size_t i = 0; i < count; ++i)
        wanted[i] = bf16_round(qe_fp8_decode(QE_FORMAT_E4M3, codes[i]) *
                               inverse[i / at.columns / QE_BLOCK * at.columns + i % at.columns]);
    same_world world;
    world_begin(&world, "decode %ux%u", at.rows, at.columns);
    same_buffer *on_codes = world_bytes(&world, count, codes);
    same_buffer *on_inverse = world_bytes(&world, scales * sizeof *inverse, inverse);
    same_buffer *values = world_activation(&world, count, NULL);
    const decode_call call = {.tensor = {.codes = on_codes->device,
                                         .scale_inv = on_inverse->device,
                                         .rows = at.rows,
                                         .columns = at.columns,
                                         .format = QE_FORMAT_E4M3,
                                         .blocking = QE_BLOCKING_COLUMN},
                              .values = values->device};
    if (world_launch(&world, decode_launch, &call)) {
        float *device = same_floats(values);
        same_numbers(&world, "values", wanted, device, count);
        free(device);
    }
    world_end(&world);
    free(codes), free(inverse), free(wanted);
}

void case_decode(void) {
    for (size_t s = 0; s < ANY_SHAPES; ++s) decode_of(any_shapes[s]);
}
