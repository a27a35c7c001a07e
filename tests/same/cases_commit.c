/* cases_commit.c - a weight's step with what the next step's products take of it, and the fill that finds it done. */
#include <stdlib.h>

#include "same.h"

typedef struct commit_case {
    uint32_t rows, columns;
    int fault; /* 0: not asked; 1: has not fired; 2: has fired */
} commit_case;

enum { GRAD, WEIGHT, MOMENT1, MOMENT2, ARRAYS };
static const char *const names[ARRAYS] = {"gradient", "weight", "moment 1", "moment 2"};

typedef struct commit_places {
    same_buffer *array[ARRAYS], *step, *version, *epoch, *key, *fault;
} commit_places;

static qe_op commit_op(const commit_places *places, const same_target *target, same_side side) {
    qe_op op = {.kind = QE_OP_ADAMW};
    op.args.adamw = (qe_args_adamw){.weight = same_at(places->array[WEIGHT], side),
                                    .grad = same_at(places->array[GRAD], side),
                                    .moment1 = same_at(places->array[MOMENT1], side),
                                    .moment2 = same_at(places->array[MOMENT2], side),
                                    .count = (uint64_t)target->rows * target->columns,
                                    .step = same_at(places->step, side),
                                    .decay = 1,
                                    .witness = same_at(places->version, side),
                                    .fault = same_at(places->fault, side),
                                    .rows = target->rows,
                                    .columns = target->columns,
                                    .target = target->side[side],
                                    .scale_epoch = same_at(places->epoch, side),
                                    .key = same_at(places->key, side)};
    op.args.adamw.target.amax = NULL;
    return op;
}

static void make_arrays(same_world *world, commit_places *places, size_t count) {
    static const float widths[ARRAYS] = {1e-3f, 0.02f, 1e-3f, 1e-3f};
    for (int i = 0; i < ARRAYS; ++i) {
        float *values = normals(count, widths[i], (uint64_t)i + 1);
        for (size_t k = 0; i == MOMENT2 && k < count; ++k) values[k] *= values[k];
        places->array[i] = world_bytes(world, count * sizeof *values, values);
        free(values);
    }
}

static void commit_of(commit_case c) {
    const qe_adamw step = {3e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.271f, 0.142625f, 0.37f};
    const qe_guard_fault fault = {.fired = c.fault == 2};
    const uint64_t version = 6, epoch = 31, key[QE_KEY_WORDS] = {6, 30, 0, 0};
    const size_t count = (size_t)c.rows * c.columns;
    same_world world;
    same_target target;
    world_begin(&world, "commit %ux%u, fault %d", c.rows, c.columns, c.fault);
    commit_places places = {.step = world_bytes(&world, sizeof step, &step),
                            .version = world_bytes(&world, sizeof version, &version),
                            .epoch = world_bytes(&world, sizeof epoch, &epoch),
                            .key = world_bytes(&world, sizeof key, key),
                            .fault = c.fault ? world_bytes(&world, sizeof fault, &fault) : NULL};
    make_arrays(&world, &places, count);
    target_make(&world, &target, QE_RECIPE_DELAYED, QE_FORMAT_E4M3, c.rows, c.columns, 1, SAME_ALL, 1234.5f);
    const qe_op host = commit_op(&places, &target, SAME_HOST), device = commit_op(&places, &target, SAME_DEVICE);
    if (world_run(&world, &host, &device)) {
        for (int i = 0; i < ARRAYS; ++i)
            same_numbers(&world, names[i], places.array[i]->host, places.array[i]->fetched, count);
        same_bits(&world, "version", places.version);
        if (c.fault != 2) target_exact(&world, &target);
        if (c.fault != 2) same_bits(&world, "key", places.key);
    }
    world_end(&world);
}

/* The fill behind it writes nothing: its memory is poison, and only the amax and the key are looked at. */
static void sealed_of(uint32_t rows, uint32_t columns, float remembered) {
    const uint64_t version = 7, epoch = 31;
    const uint64_t key[QE_KEY_WORDS] = {7, 31, QE_KEY_SEALED | bits_from(remembered), 0};
    float *values = normals((size_t)rows * columns, 0.02f, 9);
    same_world world;
    same_target target;
    world_begin(&world, "fill of a sealed cache %ux%u, amax %g", rows, columns, (double)remembered);
    const same_buffer *at = world_bytes(&world, (size_t)rows * columns * sizeof *values, values);
    const same_buffer *at_version = world_bytes(&world, sizeof version, &version);
    const same_buffer *at_epoch = world_bytes(&world, sizeof epoch, &epoch);
    same_buffer *at_key = world_bytes(&world, sizeof key, key);
    target_make(&world, &target, QE_RECIPE_DELAYED, QE_FORMAT_E4M3, rows, columns, 1, SAME_ALL, 1234.5f);
    qe_op op[2] = {{.kind = QE_OP_QUANTIZE_WEIGHT}, {.kind = QE_OP_QUANTIZE_WEIGHT}};
    for (int side = 0; side < 2; ++side)
        op[side].args.quantize_weight = (qe_args_quantize_weight){.w = same_at(at, (same_side)side),
                                                                  .rows = rows,
                                                                  .columns = columns,
                                                                  .target = target.side[side],
                                                                  .weight_witness = same_at(at_version,
                                                                                            (same_side)side),
                                                                  .scale_epoch = same_at(at_epoch, (same_side)side),
                                                                  .key = same_at(at_key, (same_side)side)};
    if (world_run(&world, &op[0], &op[1])) {
        same_bits(&world, "amax", target.amax);
        same_bits(&world, "key", at_key);
    }
    world_end(&world);
    free(values);
}

void case_commit(void) {
    static const commit_case cases[] = {{16, 16, 0},     {48, 80, 0},      {256, 512, 1}, {2048, 2048, 0},
                                        {4096, 1040, 1}, {2064, 1552, 0},  {19, 130, 0},  {17, 16, 1},
                                        {256, 512, 2},   {2048, 2048, 2},  {1024, 6144, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) commit_of(cases[i]);
    sealed_of(256, 512, 0.75f);
    sealed_of(2048, 2048, 0.125f);
    sealed_of(19, 130, 0.75f);
}
