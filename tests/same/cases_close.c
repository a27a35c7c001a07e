/* cases_close.c - ops whose sums run in another order, or whose exp is another, on the two sides: close, each within
 * its row of the table. docs/numerics.md, "Host and device", says where the numbers come from. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "same.h"

/* 2^-8 is half a unit in the last place of bf16, as a part of the number; a little more, because what is rounded
 * differs too. */
#define OF_BF16 3.93e-3

static same_tolerance norm_y = {"norm: y", OF_BF16, 1e-5, 0, 0, 0};
static same_tolerance norm_rstd = {"norm: rstd", 4e-6, 0, 0, 0, 0};
static same_tolerance norm_value = {"norm_quantize: value", 1e-5, 0, 2e-3, 0, 0};
static same_tolerance norm_amax = {"norm_quantize: amax", 1e-5, 0, 0, 0, 0};
static same_tolerance back_dx = {"norm_backward: dx", OF_BF16, 1e-5, 0, 0, 0};
static same_tolerance back_gain = {"norm_backward: gain gradient", 1e-5, 1e-5, 0, 0, 0};
static same_tolerance rope_value = {"rope: q and k", OF_BF16, 1e-6, 0, 0, 0};
static same_tolerance rope_back_value = {"rope_backward_quantize: value", 1e-5, 0, 2e-3, 0, 0};
static same_tolerance rope_back_amax = {"rope_backward_quantize: amax", 1e-5, 0, 0, 0, 0};
/* The host's exp ends at 88.3: what is left of a gate below -87 is 1e-36 on one side and 0 on the other. */
static same_tolerance swiglu_value = {"swiglu_quantize: value", 1e-5, 1e-30, 2e-3, 0, 0};
static same_tolerance swiglu_amax = {"swiglu_quantize: amax", 1e-5, 0, 0, 0, 0};
/* The gate's gradient crosses zero near -1.28, as a difference of numbers of like size. */
static same_tolerance swiglu_back_value = {"swiglu_backward_quantize: value", 1e-5, 1e-7, 2e-3, 0, 0};
static same_tolerance swiglu_back_amax = {"swiglu_backward_quantize: amax", 1e-5, 0, 0, 0, 0};
static same_tolerance loss_sum = {"cross_entropy: loss", 1e-5, 0, 0, 0, 0};
static same_tolerance loss_gradient = {"cross_entropy: gradient", OF_BF16, 1e-6, 0, 0, 0};
static same_tolerance norm_sum = {"grad_norm: sum of squares", 1e-12, 0, 0, 0, 0};

static same_tolerance *const tolerances[] = {
    &norm_y,      &norm_rstd,         &norm_value,       &norm_amax, &back_dx,       &back_gain,
    &rope_value,  &rope_back_value,   &rope_back_amax,   &swiglu_value, &swiglu_amax, &swiglu_back_value,
    &swiglu_back_amax, &loss_sum,     &loss_gradient,    &norm_sum};

void tolerances_print(void) {
    printf("%-32s %10s %10s %8s %12s %8s\n", "what", "relative", "of largest", "others", "compared", "worst");
    for (size_t i = 0; i < sizeof tolerances / sizeof *tolerances; ++i) {
        if (tolerances[i]->compared > 0) tolerance_print(tolerances[i]);
    }
}

static const qe_recipe_kind last_recipe = QE_RECIPE_FP32;

/* Whole sixteens for FP8, in the other recipes one less of each. */
static uint32_t size_for(qe_recipe_kind recipe, uint32_t size) {
    return recipe == QE_RECIPE_DELAYED || recipe == QE_RECIPE_CURRENT ? size : size - 1;
}

static void close_to(const same_world *world, same_tolerance *tolerance, const same_buffer *buffer) {
    float *device = same_floats(buffer);
    same_close_to(world, tolerance, buffer->host, device, buffer->host_bytes / sizeof(float));
    free(device);
}

/* --- Sum of squares --- */

static void grad_norm_of(uint64_t count, uint32_t shift, double *sum_out) {
    const size_t all = count + shift;
    float *grad = normals(all, 1.0f, count);
    for (size_t i = 0; shift > 0 && i < count; ++i) grad[all - 1 - i] = grad[all - 1 - i - shift];
    same_world world;
    world_begin(&world, "grad_norm %llu, shift %u", (unsigned long long)count, shift);
    same_buffer *at = world_bytes(&world, all * sizeof *grad, grad), *sum = world_bytes(&world, sizeof(double), NULL);
    same_buffer *partials = world_bytes(&world, QE_NORM_PARTIALS * sizeof(double), NULL);
    qe_op op[2] = {{.kind = QE_OP_GRAD_NORM}, {.kind = QE_OP_GRAD_NORM}};
    for (int side = 0; side < 2; ++side)
        op[side].args.grad_norm = (qe_args_grad_norm){.grad = (float *)same_at(at, (same_side)side) + shift,
                                                      .count = count,
                                                      .sum = same_at(sum, (same_side)side),
                                                      .partials = side ? same_at(partials, SAME_DEVICE) : NULL};
    if (world_run(&world, &op[0], &op[1])) {
        same_double(&world, &norm_sum, *(double *)sum->host, *(double *)sum->fetched);
        if (shift > 0 && *sum_out != *(double *)sum->fetched)
            world_fail(&world, "the sum depends on where the gradient lies: %.17g and %.17g", *sum_out,
                       *(double *)sum->fetched);
        *sum_out = *(double *)sum->fetched;
    }
    world_end(&world);
    free(grad);
}

void case_grad_norm(void) {
    static const uint64_t counts[] = {0, 1, 3, 4, 1000, 4096, 4097, 65541, 1000003, 16777216};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; ++i) {
        double sum = 0.0;
        grad_norm_of(counts[i], 0, &sum);
        if (counts[i] <= 1000003) grad_norm_of(counts[i], 1, &sum); /* same numbers, elsewhere: same bits */
    }
}

/* --- Cross-entropy --- */

static void cross_entropy_of(uint32_t rows, uint32_t vocab, int backward, float width) {
    float *logits = normals((size_t)rows * vocab, width, vocab);
    int32_t *targets = room(rows * sizeof *targets);
    same_random random = {rows};
    for (uint32_t r = 0; r < rows; ++r) targets[r] = (int32_t)(random_bits(&random) % vocab);
    if (rows > 3) {
        targets[1] = -1, targets[2] = (int32_t)vocab - 1;
        for (uint32_t i = 0; i < vocab; ++i) logits[3 * (size_t)vocab + i] = i < vocab - 1 ? -INFINITY : 2.0f;
        targets[3] = (int32_t)vocab - 1; /* the others are masked: a sure thing */
    }
    same_world world;
    world_begin(&world, "cross_entropy %ux%u%s, logits %g", rows, vocab, backward ? ", backward" : "", (double)width);
    same_buffer *at = world_activation(&world, (size_t)rows * vocab, logits);
    same_buffer *at_targets = world_bytes(&world, rows * sizeof *targets, targets);
    same_buffer *loss = world_bytes(&world, sizeof(double), NULL);
    same_buffer *row_losses = world_bytes(&world, rows * sizeof(double), NULL);
    qe_op op[2] = {{.kind = QE_OP_CROSS_ENTROPY}, {.kind = QE_OP_CROSS_ENTROPY}};
    for (int side = 0; side < 2; ++side)
        op[side].args.cross_entropy =
            (qe_args_cross_entropy){.logits = same_at(at, (same_side)side),
                                    .targets = same_at(at_targets, (same_side)side),
                                    .loss = same_at(loss, (same_side)side),
                                    .row_losses = side == SAME_DEVICE ? same_at(row_losses, SAME_DEVICE) : NULL,
                                    .gradient_scale = 1.0f / (float)(rows ? rows : 1),
                                    .rows = rows,
                                    .vocab = vocab,
                                    .backward = (uint8_t)backward};
    if (world_run(&world, &op[0], &op[1])) {
        same_double(&world, &loss_sum, *(double *)loss->host, *(double *)loss->fetched);
        if (backward) close_to(&world, &loss_gradient, at);
        else if (memcmp(at->begin, at->fetched, at->device_bytes) != 0) world_fail(&world, "the logits changed");
    }
    world_end(&world);
    free(logits), free(targets);
}

void case_cross_entropy(void) {
    static const uint32_t vocabs[] = {8,    256,   264,   1000,  1001,  1024,  1032,  2048,   2056,   2080,  5000,
                                      8200, 16384, 20480, 20488, 32000, 57344, 57352, 115712, 115720, 128256};
    for (size_t i = 0; i < sizeof vocabs / sizeof *vocabs; ++i)
        for (int backward = 0; backward < 2; ++backward) cross_entropy_of(37, vocabs[i], backward, 3.0f);
    cross_entropy_of(1, 1, 1, 1.0f);
    cross_entropy_of(2, 3, 1, 1.0f);
    cross_entropy_of(3000, 256, 1, 1.0f);
    cross_entropy_of(64, 1024, 1, 60.0f); /* most probabilities vanish */
    cross_entropy_of(0, 16, 1, 1.0f);
}

/* --- RMSNorm --- */

typedef struct norm_places {
    const same_buffer *x, *gain;
    same_buffer *rstd, *y;
} norm_places;

/* A row of zeros and a large one among the others. */
static float *norm_input(uint32_t rows, uint32_t hidden) {
    float *x = normals((size_t)rows * hidden, 1.0f, rows + hidden);
    for (uint32_t i = 0; rows > 2 && i < hidden; ++i) x[hidden + i] = 0.0f, x[2 * hidden + i] *= 1e6f;
    return x;
}

static norm_places norm_make(same_world *world, uint32_t rows, uint32_t hidden, int with_y) {
    float *x = norm_input(rows, hidden), *gain = normals(hidden, 0.3f, 8);
    for (uint32_t i = 0; i < hidden; ++i) gain[i] += 1.0f;
    norm_places places = {.x = world_activation(world, (size_t)rows * hidden, x),
                          .gain = world_bytes(world, hidden * sizeof *gain, gain),
                          .rstd = world_bytes(world, rows * sizeof(float), NULL)};
    if (with_y) places.y = world_activation(world, (size_t)rows * hidden, NULL);
    free(x), free(gain);
    return places;
}

static qe_op norm_op(const norm_places *places, uint32_t rows, uint32_t hidden, const same_target *target,
                     same_side side) {
    qe_op op = {.kind = target != NULL ? QE_OP_NORM_QUANTIZE : QE_OP_NORM};
    op.args.norm = (qe_args_norm){.x = same_at(places->x, side),
                                  .gain = same_at(places->gain, side),
                                  .rstd = same_at(places->rstd, side),
                                  .y = same_at(places->y, side),
                                  .epsilon = 1e-5f,
                                  .rows = rows,
                                  .hidden = hidden};
    if (target != NULL) op.args.norm.target = target->side[side];
    return op;
}

void case_norm(void) {
    static const uint32_t sizes[][2] = {{1, 1},       {3, 7},     {5, 128},   {64, 1000},
                                        {129, 1024}, {32, 4096}, {7, 16384}, {9, 20002}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
        const uint32_t rows = sizes[i][0], hidden = sizes[i][1];
        same_world world;
        world_begin(&world, "norm %ux%u", rows, hidden);
        norm_places places = norm_make(&world, rows, hidden, 1);
        const qe_op host = norm_op(&places, rows, hidden, NULL, SAME_HOST);
        const qe_op device = norm_op(&places, rows, hidden, NULL, SAME_DEVICE);
        if (world_run(&world, &host, &device)) {
            close_to(&world, &norm_y, places.y);
            close_to(&world, &norm_rstd, places.rstd);
        }
        world_end(&world);
    }
}

static void norm_quantize_of(qe_recipe_kind recipe, uint32_t rows, uint32_t hidden, same_parts parts) {
    same_world world;
    same_target target;
    world_begin(&world, "norm_quantize %s %ux%u%s", qe_recipe_name(recipe), rows, hidden,
                parts == SAME_EVALUATION ? ", evaluation" : "");
    norm_places places = norm_make(&world, rows, hidden, 0);
    target_make(&world, &target, recipe, target_format(recipe, 0), rows, hidden, 0, parts, 61.7f);
    const qe_op host = norm_op(&places, rows, hidden, &target, SAME_HOST);
    const qe_op device = norm_op(&places, rows, hidden, &target, SAME_DEVICE);
    if (world_run(&world, &host, &device)) {
        close_to(&world, &norm_rstd, places.rstd);
        target_close(&world, &target, &norm_value, &norm_amax);
    }
    world_end(&world);
}

void case_norm_quantize(void) {
    static const uint32_t sizes[][2] = {{16, 16},    {16, 128},   {48, 144},  {128, 1024},
                                        {272, 2048}, {144, 4096}, {32, 16384}};
    for (qe_recipe_kind recipe = QE_RECIPE_DELAYED; recipe <= last_recipe; ++recipe)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
            norm_quantize_of(recipe, sizes[i][0], sizes[i][1], SAME_ALL);
            norm_quantize_of(recipe, size_for(recipe, sizes[i][0]), size_for(recipe, sizes[i][1]), SAME_EVALUATION);
            if (size_for(recipe, 16) != 16)
                norm_quantize_of(recipe, size_for(recipe, sizes[i][0]), size_for(recipe, sizes[i][1]), SAME_ALL);
        }
}

/* --- Its gradient --- */

typedef struct back_case {
    uint32_t rows, hidden;
    int with_residual, in_place /* dx over the residual */, with_gain, set;
} back_case;

typedef struct back_places {
    same_buffer *dy, *x, *rstd, *gain, *residual, *dx, *gain_grad, *partials;
} back_places;

static back_places back_make(same_world *world, const back_case *c) {
    const size_t count = (size_t)c->rows * c->hidden;
    float *x = norm_input(c->rows, c->hidden), *dy = normals(count, 0.01f, 21), *gain = normals(c->hidden, 0.3f, 22);
    float *residual = normals(count, 0.01f, 23), *rstd = room(c->rows * sizeof *rstd);
    for (uint32_t row = 0; row < c->rows; ++row) {
        double squares = 0.0;
        for (uint32_t i = 0; i < c->hidden; ++i) {
            const double value = (double)bf16_round(x[(size_t)row * c->hidden + i]);
            squares += value * value;
        }
        rstd[row] = (float)(1.0 / sqrt(squares / c->hidden + 1e-5));
    }
    back_places at = {.dy = world_activation(world, count, dy),
                      .x = world_activation(world, count, x),
                      .rstd = world_bytes(world, c->rows * sizeof *rstd, rstd),
                      .gain = world_bytes(world, c->hidden * sizeof *gain, gain)};
    if (c->with_residual) at.residual = world_activation(world, count, residual);
    at.dx = c->in_place ? at.residual : world_activation(world, count, NULL);
    if (c->with_gain) at.gain_grad = world_bytes(world, c->hidden * sizeof *gain, gain);
    at.partials = world_pair(world, 0, NULL, (size_t)QE_GAIN_PARTIALS * c->hidden * sizeof(float), NULL);
    free(x), free(dy), free(gain), free(residual), free(rstd);
    return at;
}

static qe_op back_op(const back_places *at, const back_case *c, const same_target *target, same_side side) {
    qe_op op = {.kind = QE_OP_NORM_BACKWARD};
    op.args.norm_backward = (qe_args_norm_backward){.dy = same_at(at->dy, side),
                                                    .x = same_at(at->x, side),
                                                    .rstd = same_at(at->rstd, side),
                                                    .gain = same_at(at->gain, side),
                                                    .residual = same_at(at->residual, side),
                                                    .dx = same_at(at->dx, side),
                                                    .gain_grad = same_at(at->gain_grad, side),
                                                    .partials = same_at(at->partials, side),
                                                    .rows = c->rows,
                                                    .hidden = c->hidden,
                                                    .set = (uint8_t)c->set};
    if (target != NULL) op.args.norm_backward.target = target->side[side];
    return op;
}

static void back_compare(const same_world *world, const back_places *at) {
    close_to(world, &back_dx, at->dx);
    if (at->gain_grad != NULL) close_to(world, &back_gain, at->gain_grad);
}

/* Partial sums are scratch: what they hold behind the op is nobody's business, but repeats must agree all the same. */
static void back_plain(back_case c) {
    same_world world;
    world_begin(&world, "norm_backward %ux%u%s%s%s%s", c.rows, c.hidden, c.with_residual ? ", residual" : "",
                c.in_place ? " in place" : "", c.with_gain ? ", gain" : "", c.set ? " set" : "");
    const back_places at = back_make(&world, &c);
    const qe_op host = back_op(&at, &c, NULL, SAME_HOST), device = back_op(&at, &c, NULL, SAME_DEVICE);
    if (world_run(&world, &host, &device)) back_compare(&world, &at);
    world_end(&world);
}

/* The quantized dx must be what QE_OP_QUANTIZE makes of the dx that was written, bit for bit: a gradient that crosses
 * stages is quantized from its bf16 form. So the host quantizes the device's own dx. */
static void back_quantized(qe_recipe_kind recipe, back_case c) {
    same_world world, again;
    same_target target, wanted;
    world_begin(&world, "norm_backward %ux%u, quantized %s", c.rows, c.hidden, qe_recipe_name(recipe));
    const back_places at = back_make(&world, &c);
    target_make(&world, &target, recipe, target_format(recipe, 1), c.rows, c.hidden, 0, SAME_ALL, 900.0f);
    const qe_op host = back_op(&at, &c, &target, SAME_HOST), device = back_op(&at, &c, &target, SAME_DEVICE);
    if (world_run(&world, &host, &device)) {
        back_compare(&world, &at);
        float *dx = same_floats(at.dx);
        world_begin(&again, "norm_backward %ux%u, quantized %s: its dx", c.rows, c.hidden, qe_recipe_name(recipe));
        same_buffer *x = world_activation(&again, (size_t)c.rows * c.hidden, dx);
        target_make(&again, &wanted, recipe, target_format(recipe, 1), c.rows, c.hidden, 0, SAME_ALL, 900.0f);
        qe_op op[2] = {{.kind = QE_OP_QUANTIZE}, {.kind = QE_OP_QUANTIZE}};
        for (int side = 0; side < 2; ++side)
            op[side].args.quantize =
                (qe_args_quantize){same_at(x, (same_side)side), c.rows, c.hidden, wanted.side[side]};
        if (world_run(&again, &op[0], &op[1])) { /* the fused op's bytes beside the plain op's */
            same_memory(&again, "operand", wanted.operand->fetched, target.operand->fetched,
                        target.operand->device_bytes);
            same_memory(&again, "retained", wanted.retained->fetched, target.retained->fetched,
                        target.retained->device_bytes);
            same_memory(&again, "inverse scales", wanted.scale_inv->fetched, target.scale_inv->fetched,
                        target.scale_inv->device_bytes);
            if (target.amax != NULL)
                same_memory(&again, "amax", wanted.amax->fetched, target.amax->fetched, sizeof(float));
        }
        world_end(&again);
        free(dx);
    }
    world_end(&world);
}

void case_norm_backward(void) {
    static const uint32_t sizes[][2] = {{16, 16}, {48, 144}, {128, 1024}, {1040, 512}, {272, 4096}, {32, 16384}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
        const uint32_t rows = sizes[i][0], hidden = sizes[i][1];
        back_plain((back_case){rows, hidden, 0, 0, 1, 1});
        back_plain((back_case){rows, hidden, 1, 1, 1, 0});
        back_plain((back_case){rows - 1, hidden - 1, 1, 0, 0, 0});
        for (qe_recipe_kind recipe = QE_RECIPE_DELAYED; recipe <= last_recipe; ++recipe)
            back_quantized(recipe, (back_case){rows, hidden, 1, 0, 1, 0});
    }
    back_plain((back_case){1, 1, 0, 0, 1, 1});
    back_plain((back_case){600, 40, 1, 0, 1, 1}); /* more rows than partial sums */
}

/* --- Rotary positions --- */

typedef struct rope_shape {
    uint32_t sequences, sequence, heads, kv_heads, head_dim;
} rope_shape;

static const rope_shape rope_shapes[] = {{1, 16, 1, 1, 16}, {2, 16, 4, 2, 16}, {3, 48, 2, 1, 64}, {1, 256, 16, 16, 64},
                                         {2, 128, 8, 2, 128}, {1, 64, 32, 8, 128}, {1, 32, 5, 1, 32}};
enum { ROPE_SHAPES = sizeof rope_shapes / sizeof *rope_shapes };

static qe_op rope_op(const rope_shape *s, const same_buffer *qkv, const same_buffer *turn, const same_target *target,
                     same_side side) {
    qe_op op = {.kind = target != NULL ? QE_OP_ROPE_BACKWARD_QUANTIZE : QE_OP_ROPE};
    const float *cosine = same_at(turn, side);
    op.args.rope = (qe_args_rope){.qkv = same_at(qkv, side),
                                  .cosine = cosine,
                                  .sine = cosine + s->sequence * (s->head_dim / 2),
                                  .rows = s->sequences * s->sequence,
                                  .sequence = s->sequence,
                                  .heads = s->heads,
                                  .kv_heads = s->kv_heads,
                                  .head_dim = s->head_dim};
    if (target != NULL) op.args.rope.target = target->side[side];
    return op;
}

static void rope_run(const rope_shape *s, const qe_recipe_kind *recipe) {
    const uint32_t rows = s->sequences * s->sequence, columns = (s->heads + 2 * s->kv_heads) * s->head_dim;
    const size_t turn_bytes = (size_t)2 * s->sequence * (s->head_dim / 2) * sizeof(float);
    float *qkv = normals((size_t)rows * columns, 1.0f, columns), *turns = turns_of(s->sequence, s->head_dim);
    same_world world;
    same_target target;
    world_begin(&world, "%s %s %ux%u, heads %u/%u of %u", recipe ? "rope_backward_quantize" : "rope",
                recipe ? qe_recipe_name(*recipe) : "", rows, columns, s->heads, s->kv_heads, s->head_dim);
    same_buffer *at = world_activation(&world, (size_t)rows * columns, qkv);
    same_buffer *turn = world_bytes(&world, turn_bytes, turns);
    if (recipe) target_make(&world, &target, *recipe, target_format(*recipe, 1), rows, columns, 0, SAME_ALL, 100.0f);
    const qe_op host = rope_op(s, at, turn, recipe ? &target : NULL, SAME_HOST);
    const qe_op device = rope_op(s, at, turn, recipe ? &target : NULL, SAME_DEVICE);
    if (world_run(&world, &host, &device)) {
        if (recipe) target_close(&world, &target, &rope_back_value, &rope_back_amax);
        else close_to(&world, &rope_value, at);
    }
    world_end(&world);
    free(qkv), free(turns);
}

void case_rope(void) {
    for (size_t i = 0; i < ROPE_SHAPES; ++i) rope_run(&rope_shapes[i], NULL);
    rope_run(&(rope_shape){3, 7, 3, 1, 6}, NULL);
    rope_run(&(rope_shape){1, 1, 1, 1, 2}, NULL);
}

void case_rope_backward_quantize(void) {
    for (qe_recipe_kind recipe = QE_RECIPE_DELAYED; recipe <= last_recipe; ++recipe) {
        for (size_t i = 0; i < ROPE_SHAPES; ++i) rope_run(&rope_shapes[i], &recipe);
        if (size_for(recipe, 16) != 16) rope_run(&(rope_shape){3, 7, 3, 1, 6}, &recipe);
    }
}

/* --- SwiGLU --- */

/* Gates from far below zero, where exp is large, to far above. */
static float *gates_of(uint32_t rows, uint32_t ffn) {
    float *gate_up = normals((size_t)rows * 2 * ffn, 1.5f, rows + ffn);
    static const float odd[] = {-100.0f, 100.0f, 0.0f, -0.0f, 30.0f, -30.0f, 1e-30f, -88.0f};
    for (size_t i = 0; i < (size_t)rows * 2 * ffn; i += 53) gate_up[i] = odd[i / 53 % (sizeof odd / sizeof *odd)];
    return gate_up;
}

static void swiglu_of(qe_recipe_kind recipe, uint32_t rows, uint32_t ffn, same_parts parts) {
    float *gate_up = gates_of(rows, ffn);
    same_world world;
    same_target target;
    world_begin(&world, "swiglu_quantize %s %ux%u%s", qe_recipe_name(recipe), rows, ffn,
                parts == SAME_ALL ? "" : ", a part");
    same_buffer *at = world_activation(&world, (size_t)rows * 2 * ffn, gate_up);
    same_buffer *scratch = world_pair(&world, (size_t)rows * ffn * sizeof(float), NULL, 0, NULL);
    target_make(&world, &target, recipe, target_format(recipe, 0), rows, ffn, 0, parts, 55.0f);
    qe_op op[2] = {{.kind = QE_OP_SWIGLU_QUANTIZE}, {.kind = QE_OP_SWIGLU_QUANTIZE}};
    for (int side = 0; side < 2; ++side)
        op[side].args.swiglu = (qe_args_swiglu){.gate_up = same_at(at, (same_side)side),
                                                .rows = rows,
                                                .ffn = ffn,
                                                .decoded_scratch = same_at(scratch, (same_side)side),
                                                .target = target.side[side]};
    if (world_run(&world, &op[0], &op[1])) target_close(&world, &target, &swiglu_value, &swiglu_amax);
    world_end(&world);
    free(gate_up);
}

static void swiglu_backward_of(qe_recipe_kind recipe, uint32_t rows, uint32_t ffn) {
    const size_t count = (size_t)rows * ffn;
    float *gate_up = gates_of(rows, ffn), *dy = normals(count, 0.01f, 31);
    same_world world;
    same_target target;
    world_begin(&world, "swiglu_backward_quantize %s %ux%u", qe_recipe_name(recipe), rows, ffn);
    same_buffer *at = world_activation(&world, 2 * count, gate_up), *at_dy = world_activation(&world, count, dy);
    same_buffer *scratch = world_pair(&world, 2 * count * sizeof(float), NULL, 2 * count * sizeof(uint16_t), NULL);
    target_make(&world, &target, recipe, target_format(recipe, 1), rows, 2 * ffn, 0, SAME_ALL, 700.0f);
    qe_op op[2] = {{.kind = QE_OP_SWIGLU_BACKWARD_QUANTIZE}, {.kind = QE_OP_SWIGLU_BACKWARD_QUANTIZE}};
    for (int side = 0; side < 2; ++side)
        op[side].args.swiglu_backward = (qe_args_swiglu_backward){.gate_up = same_at(at, (same_side)side),
                                                                  .dy = same_at(at_dy, (same_side)side),
                                                                  .dgate_up = same_at(scratch, (same_side)side),
                                                                  .rows = rows,
                                                                  .ffn = ffn,
                                                                  .target = target.side[side]};
    if (world_run(&world, &op[0], &op[1])) target_close(&world, &target, &swiglu_back_value, &swiglu_back_amax);
    world_end(&world);
    free(gate_up), free(dy);
}

static const uint32_t swiglu_sizes[][2] = {{16, 16}, {48, 144}, {144, 80}, {128, 1024}, {272, 1408}, {64, 4096}};
enum { SWIGLU_SIZES = sizeof swiglu_sizes / sizeof *swiglu_sizes };

void case_swiglu_quantize(void) {
    for (qe_recipe_kind recipe = QE_RECIPE_DELAYED; recipe <= last_recipe; ++recipe)
        for (size_t i = 0; i < SWIGLU_SIZES; ++i) {
            swiglu_of(recipe, swiglu_sizes[i][0], swiglu_sizes[i][1], SAME_ALL);
            swiglu_of(recipe, size_for(recipe, swiglu_sizes[i][0]), size_for(recipe, swiglu_sizes[i][1]),
                      SAME_EVALUATION);
            swiglu_of(recipe, size_for(recipe, swiglu_sizes[i][0]), size_for(recipe, swiglu_sizes[i][1]),
                      SAME_RETAINED);
        }
}

void case_swiglu_backward_quantize(void) {
    for (qe_recipe_kind recipe = QE_RECIPE_DELAYED; recipe <= last_recipe; ++recipe)
        for (size_t i = 0; i < SWIGLU_SIZES; ++i)
            swiglu_backward_of(recipe, size_for(recipe, swiglu_sizes[i][0]), size_for(recipe, swiglu_sizes[i][1]));
}
