/* cases_state.c - what has no rounding of its own: scales, witness words, guards, rows of a table, AdamW: bit for
 * bit. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "same.h"

/* --- Fold --- */

/* The states and their histories on both sides; pointers inside are each side's own. */
typedef struct fold_places {
    same_buffer *states, *histories, *fault;
    const void **tables[2];
    uint32_t count;
} fold_places;

/* Recorded amaxes in the order of docs/numerics.md's table, then random ones. */
static float amax_of(uint32_t state, uint32_t round, same_random *random) {
    static const float odd[] = {0.0f, 1e-40f, INFINITY, NAN, 1.0f, FLT_MAX, FLT_MIN, 448.0f, 0x1p-149f, 3.0f};
    const uint32_t odds = sizeof odd / sizeof *odd;
    if ((state + round) % 3 == 0) return odd[(state / 3 + round * 7) % odds];
    return fabsf(random_normal(random)) * ldexpf(1.0f, (int)(random_bits(random) % 60) - 30);
}

static uint32_t history_of(uint32_t state) {
    static const uint32_t lengths[] = {1, 2, 3, 4, 16, 127, 128, 129, 130, 257, 1024};
    return lengths[state % (sizeof lengths / sizeof *lengths)];
}

/* What each fold begins with: at first scale 1 and empty histories, later what the host's fold before left. */
static void fold_begin(same_world *world, fold_places *places, qe_scale_state *states, float *history,
                       uint32_t round, same_random *random) {
    size_t floats = 0;
    for (uint32_t s = 0; s < places->count; ++s) {
        states[s].amax = amax_of(s, round, random);
        floats += states[s].history_length;
    }
    places->histories = world_bytes(world, floats * sizeof *history, history);
    qe_scale_state *sides[2];
    for (int side = 0; side < 2; ++side) {
        float *at = same_at(places->histories, (same_side)side);
        sides[side] = room(places->count * sizeof *states);
        memcpy(sides[side], states, places->count * sizeof *states);
        for (uint32_t s = 0; s < places->count; at += states[s++].history_length) sides[side][s].history = at;
    }
    const size_t bytes = places->count * sizeof *states;
    places->states = world_pair(world, bytes, sides[0], bytes, sides[1]);
    for (int side = 0; side < 2; ++side) {
        qe_scale_state *at = same_at(places->states, (same_side)side);
        for (uint32_t s = 0; s < places->count; ++s) places->tables[side][s] = at + s;
        free(sides[side]);
    }
}

static qe_op fold_op(const fold_places *places, const qe_recipe *recipe, same_side side) {
    qe_op op = {.kind = QE_OP_FOLD};
    op.args.fold = (qe_args_fold){.states = (qe_scale_state *const *)(const void *)places->tables[side],
                                  .count = places->count,
                                  .recipe = recipe,
                                  .fault = same_at(places->fault, side)};
    return op;
}

static void fold_compare(const same_world *world, const fold_places *places, qe_scale_state *states, float *history) {
    const qe_scale_state *host = places->states->host, *device = places->states->fetched;
    for (uint32_t s = 0; s < places->count; ++s) {
        same_numbers(world, "scale", &host[s].scale, &device[s].scale, 1);
        same_numbers(world, "recorded amax", &host[s].amax, &device[s].amax, 1);
        if (host[s].epoch != device[s].epoch)
            world_fail(world, "epoch of state %u: host %llu, device %llu", s, (unsigned long long)host[s].epoch,
                       (unsigned long long)device[s].epoch);
    }
    same_numbers(world, "histories", places->histories->host, places->histories->fetched,
                 places->histories->host_bytes / sizeof(float));
    memcpy(states, host, places->count * sizeof *states);
    memcpy(history, places->histories->host, places->histories->host_bytes);
}

static void fold_sequence(uint32_t count, uint32_t rounds, int32_t margin, qe_amax_algorithm algorithm, int veto) {
    const qe_recipe recipe = {QE_RECIPE_DELAYED, 16, margin, algorithm};
    qe_scale_state *states = room(count * sizeof *states);
    fold_places places = {.tables = {room(count * sizeof(void *)), room(count * sizeof(void *))}, .count = count};
    same_random random = {count + (uint64_t)margin};
    size_t floats = 0;
    for (uint32_t s = 0; s < count; ++s) {
        states[s] = (qe_scale_state){.scale = 1.0f, .history_length = history_of(s)};
        states[s].format_max = s % 2 ? 57344.0f : 448.0f;
        floats += states[s].history_length;
    }
    float *history = room(floats * sizeof *history);
    for (uint32_t round = 0; round < rounds; ++round) {
        same_world world;
        world_begin(&world, "fold %u of %u states, margin %d, %s%s", round, count, (int)margin,
                    algorithm == QE_AMAX_MAX ? "max" : "most recent", veto ? ", vetoed" : "");
        qe_guard_fault fault = {.fired = veto > 1};
        places.fault = veto ? world_bytes(&world, sizeof fault, &fault) : NULL;
        fold_begin(&world, &places, states, history, round, &random);
        const qe_op host = fold_op(&places, &recipe, SAME_HOST), device = fold_op(&places, &recipe, SAME_DEVICE);
        if (world_run(&world, &host, &device)) fold_compare(&world, &places, states, history);
        world_end(&world);
    }
    free(history), free(states), free(places.tables[0]), free(places.tables[1]);
}

void case_fold(void) {
    for (qe_amax_algorithm algorithm = QE_AMAX_MAX; algorithm <= QE_AMAX_MOST_RECENT; ++algorithm) {
        fold_sequence(1, 12, 0, algorithm, 0);
        fold_sequence(22, 60, 0, algorithm, 0);
        fold_sequence(64, 8, 2, algorithm, 0);
        fold_sequence(65, 8, -64, algorithm, 0);
        fold_sequence(1100, 6, 64, algorithm, 0);
    }
    fold_sequence(12, 3, 0, QE_AMAX_MAX, 1); /* a guard is asked and has not fired */
    fold_sequence(12, 3, 0, QE_AMAX_MAX, 2); /* it has: nothing changes */
}

/* --- Stamp --- */

static void stamp_of(uint32_t count, int twice) {
    const uint64_t words[QE_STAMP_MAX] = {0, 41, UINT64_C(0xFFFFFFFF), UINT64_C(1) << 40};
    same_world world;
    world_begin(&world, "stamp of %u%s", count, twice ? ", one twice" : "");
    same_buffer *at = world_bytes(&world, sizeof words, words);
    qe_op op[2] = {{.kind = QE_OP_STAMP}, {.kind = QE_OP_STAMP}};
    for (int side = 0; side < 2; ++side) {
        uint64_t *first = same_at(at, (same_side)side);
        op[side].args.stamp.count = count;
        for (uint32_t i = 0; i < count; ++i) op[side].args.stamp.words[i] = first + (twice && i == 1 ? 0 : i);
    }
    if (world_run(&world, &op[0], &op[1])) same_bits(&world, "words", at);
    world_end(&world);
}

void case_stamp(void) {
    for (uint32_t count = 0; count <= QE_STAMP_MAX; ++count) stamp_of(count, 0);
    stamp_of(QE_STAMP_MAX, 1);
}

/* --- Tally --- */

static void tally_of(uint32_t count) {
    enum { WORDS = 1500 };
    uint64_t words[WORDS];
    same_world world;
    for (uint32_t i = 0; i < WORDS; ++i) words[i] = i * UINT64_C(0x9e3779b97f4a7c15);
    world_begin(&world, "tally of %u", count);
    same_buffer *at = world_bytes(&world, sizeof words, words);
    qe_op op[2] = {{.kind = QE_OP_TALLY}, {.kind = QE_OP_TALLY}};
    for (int side = 0; side < 2; ++side)
        op[side].args.tally = (qe_args_tally){.words = same_at(at, (same_side)side), .count = count};
    if (world_run(&world, &op[0], &op[1])) same_bits(&world, "words", at);
    world_end(&world);
}

void case_tally(void) {
    static const uint32_t counts[] = {0, 1, 6, 33, 1024, 1500};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; ++i) tally_of(counts[i]);
}

/* --- Accumulate --- */

static void accumulate_of(uint32_t count, uint32_t shift) {
    same_world world;
    float *values = malloc((count + 4u) * sizeof *values);
    if (values == NULL) abort();
    for (uint32_t i = 0; i < count + 4; ++i)
        values[i] = (float)(int32_t)(i * 2654435761u) * 0x1p-20f / (float)(1 + i % 97);
    world_begin(&world, "accumulate %u, shift %u", count, shift);
    same_buffer *from = world_bytes(&world, (count + 4u) * sizeof *values, values);
    values[0] = 0x1p-140f;
    same_buffer *to = world_bytes(&world, (count + 4u) * sizeof *values, values);
    qe_op op[2] = {{.kind = QE_OP_ACCUMULATE}, {.kind = QE_OP_ACCUMULATE}};
    for (int side = 0; side < 2; ++side)
        op[side].args.accumulate = (qe_args_accumulate){.from = (float *)same_at(from, (same_side)side) + shift,
                                                        .to = same_at(to, (same_side)side), .count = count};
    if (world_run(&world, &op[0], &op[1])) same_bits(&world, "sums", to);
    world_end(&world);
    free(values);
}

void case_accumulate(void) {
    static const uint32_t counts[] = {0, 1, 5, 1024, 4099, 1000003};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; ++i)
        for (uint32_t shift = 0; shift < 2; ++shift) accumulate_of(counts[i], shift);
}

/* --- Guard --- */

/* wrong: entries whose word is another than expected, QE_NONE ends them. fired: a guard before has fired. */
static void guard_of(uint32_t count, const uint32_t *wrong, int fired) {
    uint64_t *words = room(count * sizeof *words), *expected = room(count * sizeof *expected);
    const void **tables[2] = {room(count * sizeof(void *)), room(count * sizeof(void *))};
    const uint64_t launch = UINT64_C(0xABCDEF0123);
    const qe_guard_fault fault = fired ? (qe_guard_fault){1, 2, 3, 4, 5} : (qe_guard_fault){0};
    same_random random = {count};
    for (uint32_t i = 0; i < count; ++i) words[i] = expected[i] = (uint64_t)random_bits(&random) << 8 | i;
    for (; *wrong != QE_NONE; ++wrong) words[*wrong] ^= UINT64_C(1) << (*wrong % 64);
    same_world world;
    world_begin(&world, "guard of %u words%s", count, fired ? ", after another" : "");
    same_buffer *at_words = world_bytes(&world, count * sizeof *words, words);
    same_buffer *at_expected = world_bytes(&world, count * sizeof *expected, expected);
    same_buffer *at_launch = world_bytes(&world, sizeof launch, &launch);
    same_buffer *at_fault = world_bytes(&world, sizeof fault, &fault);
    for (int side = 0; side < 2; ++side)
        for (uint32_t i = 0; i < count; ++i) /* in another order than they lie */
            tables[side][i] = (uint64_t *)same_at(at_words, (same_side)side) + i;
    same_buffer *at_table = world_pair(&world, count * sizeof(void *), tables[0], count * sizeof(void *), tables[1]);
    qe_op op[2] = {{.kind = QE_OP_GUARD}, {.kind = QE_OP_GUARD}};
    for (int side = 0; side < 2; ++side)
        op[side].args.guard = (qe_args_guard){.words = same_at(at_table, (same_side)side),
                                              .expected = same_at(at_expected, (same_side)side),
                                              .launch = same_at(at_launch, (same_side)side),
                                              .fault = same_at(at_fault, (same_side)side),
                                              .count = count,
                                              .first_entry = 1000};
    if (world_run(&world, &op[0], &op[1])) same_bits(&world, "fault", at_fault);
    world_end(&world);
    free(words), free(expected), free(tables[0]), free(tables[1]);
}

void case_guard(void) {
    static const uint32_t counts[] = {0, 1, 2, 31, 32, 33, 300, 1024, 1025, 3000};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; ++i) {
        const uint32_t count = counts[i];
        const uint32_t none[] = {QE_NONE}, last[] = {count - 1, QE_NONE}, first[] = {0, QE_NONE};
        const uint32_t many[] = {count / 2, count / 3, count - 1, QE_NONE};
        guard_of(count, none, 0);
        if (count == 0) continue;
        guard_of(count, first, 0);
        guard_of(count, last, 0);
        guard_of(count, count > 2 ? many : last, 0); /* the lowest entry is the one that counts */
        guard_of(count, last, 1);                    /* the first fault is kept */
    }
}

/* --- Embedding --- */

/* Few words are frequent, as in text; spread 1: all alike. */
static int32_t *tokens_of(uint32_t count, uint32_t vocab, int spread, uint64_t seed) {
    same_random random = {seed};
    int32_t *tokens = room(count * sizeof *tokens);
    for (uint32_t i = 0; i < count; ++i) {
        const double u = (double)(random_bits(&random) >> 8) / 16777216.0;
        tokens[i] = (int32_t)(spread ? u * vocab : pow(u, 6.0) * vocab);
    }
    return tokens;
}

static void embed_of(uint32_t count, uint32_t vocab, uint32_t hidden) {
    int32_t *tokens = tokens_of(count, vocab, 1, count + vocab);
    float *table = normals((size_t)vocab * hidden, 1.0f, hidden);
    table[0] = NAN, table[hidden / 2] = 3.39e38f, table[hidden - 1] = 1e-40f;
    same_world world;
    world_begin(&world, "embed %u of %ux%u", count, vocab, hidden);
    same_buffer *at_tokens = world_bytes(&world, count * sizeof *tokens, tokens);
    same_buffer *at_table = world_bytes(&world, (size_t)vocab * hidden * sizeof *table, table);
    same_buffer *y = world_activation(&world, (size_t)count * hidden, NULL);
    qe_op op[2] = {{.kind = QE_OP_EMBED}, {.kind = QE_OP_EMBED}};
    for (int side = 0; side < 2; ++side)
        op[side].args.embed = (qe_args_embed){.tokens = same_at(at_tokens, (same_side)side),
                                              .table = same_at(at_table, (same_side)side),
                                              .y = same_at(y, (same_side)side),
                                              .tokens_count = count,
                                              .hidden = hidden};
    if (world_run(&world, &op[0], &op[1])) {
        float *device = same_floats(y), *host = y->host; /* the host's activations are not rounded, the device's are */
        for (size_t i = 0; i < (size_t)count * hidden; ++i) host[i] = bf16_round(host[i]);
        same_numbers(&world, "y", host, device, (size_t)count * hidden);
        free(device);
    }
    world_end(&world);
    free(tokens), free(table);
}

void case_embed(void) {
    embed_of(1, 1, 1);
    embed_of(5, 3, 7);
    embed_of(128, 256, 128);
    embed_of(777, 1000, 200);
    embed_of(2048, 5000, 1024);
    embed_of(64, 100, 4104);
}

static void embed_backward_of(uint32_t count, uint32_t vocab, uint32_t hidden, int set, int spread) {
    int32_t *tokens = tokens_of(count, vocab, spread, count * 3 + vocab);
    float *dy = normals((size_t)count * hidden, 1.0f, hidden + 1), *grad = normals((size_t)vocab * hidden, 1.0f, 5);
    same_world world;
    world_begin(&world, "embed_backward %u of %ux%u, %s, %s", count, vocab, hidden, set ? "set" : "add",
                spread ? "even" : "few frequent");
    same_buffer *at_tokens = world_bytes(&world, count * sizeof *tokens, tokens);
    same_buffer *at_dy = world_activation(&world, (size_t)count * hidden, dy);
    same_buffer *at_grad = world_bytes(&world, (size_t)vocab * hidden * sizeof *grad, grad);
    qe_op op[2] = {{.kind = QE_OP_EMBED_BACKWARD}, {.kind = QE_OP_EMBED_BACKWARD}};
    for (int side = 0; side < 2; ++side)
        op[side].args.embed_backward = (qe_args_embed_backward){.tokens = same_at(at_tokens, (same_side)side),
                                                                .dy = same_at(at_dy, (same_side)side),
                                                                .grad = same_at(at_grad, (same_side)side),
                                                                .tokens_count = count,
                                                                .hidden = hidden,
                                                                .vocab = vocab,
                                                                .set = (uint8_t)set};
    if (world_run(&world, &op[0], &op[1])) same_bits(&world, "gradient", at_grad);
    world_end(&world);
    free(tokens), free(dy), free(grad);
}

void case_embed_backward(void) {
    for (int set = 0; set < 2; ++set) {
        embed_backward_of(1, 1, 1, set, 1);
        embed_backward_of(9, 5, 7, set, 1);
        embed_backward_of(1024, 16, 128, set, 1); /* one block's rows take all tokens */
        embed_backward_of(1025, 256, 136, set, 0);
        embed_backward_of(2048, 33, 64, set, 0);
        embed_backward_of(4096, 5000, 1024, set, 0);
        embed_backward_of(1000, 40000, 72, set, 0); /* many rows for each block, the last one short */
        embed_backward_of(3000, 700, 1032, set, 1);
        embed_backward_of(1, 100, 8, set, 1);
    }
}

/* --- AdamW --- */

typedef struct adamw_case {
    uint64_t count;
    uint32_t shift; /* floats that all arrays begin behind a multiple of 16 bytes */
    int decay, fault; /* fault 0: not asked; 1: has not fired; 2: has fired */
} adamw_case;

static void adamw_of(adamw_case c) {
    const qe_adamw step = {3e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.271f, 0.142625f, 0.37f};
    const qe_guard_fault fault = {.fired = c.fault == 2};
    const uint64_t version = 6;
    const size_t all = c.count + c.shift, bytes = all * sizeof(float);
    float *grad = normals(all, 1e-3f, 1), *weight = normals(all, 0.02f, 2), *m = normals(all, 1e-3f, 3);
    float *v = normals(all, 1e-3f, 4);
    for (size_t i = 0; i < all; ++i) v[i] *= v[i];
    if (all > 9) v[7] = 1e-40f, grad[8] = INFINITY, grad[9] = NAN;
    same_world world;
    world_begin(&world, "adamw %llu, shift %u, decay %d, fault %d", (unsigned long long)c.count, c.shift, c.decay,
                c.fault);
    same_buffer *at[4] = {world_bytes(&world, bytes, grad), world_bytes(&world, bytes, weight),
                          world_bytes(&world, bytes, m), world_bytes(&world, bytes, v)};
    same_buffer *at_step = world_bytes(&world, sizeof step, &step);
    same_buffer *at_version = world_bytes(&world, sizeof version, &version);
    same_buffer *at_fault = c.fault ? world_bytes(&world, sizeof fault, &fault) : NULL;
    qe_op op[2] = {{.kind = QE_OP_ADAMW}, {.kind = QE_OP_ADAMW}};
    for (int side = 0; side < 2; ++side) {
        float *from[4];
        for (int i = 0; i < 4; ++i) from[i] = (float *)same_at(at[i], (same_side)side) + c.shift;
        op[side].args.adamw = (qe_args_adamw){.weight = from[1],
                                              .grad = from[0],
                                              .moment1 = from[2],
                                              .moment2 = from[3],
                                              .count = c.count,
                                              .step = same_at(at_step, (same_side)side),
                                              .decay = (uint8_t)c.decay,
                                              .witness = same_at(at_version, (same_side)side),
                                              .fault = same_at(at_fault, (same_side)side)};
    }
    if (world_run(&world, &op[0], &op[1])) {
        same_bits(&world, "version", at_version);
        static const char *const names[] = {"gradient", "weight", "moment 1", "moment 2"};
        for (int i = 0; i < 4; ++i) same_numbers(&world, names[i], at[i]->host, at[i]->fetched, all);
    }
    world_end(&world);
    free(grad), free(weight), free(m), free(v);
}

void case_adamw(void) {
    static const uint64_t counts[] = {1, 3, 4, 5, 1023, 2048, 2051, 100003, 3000000};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; ++i)
        for (int decay = 0; decay < 2; ++decay) adamw_of((adamw_case){counts[i], 0, decay, 0});
    adamw_of((adamw_case){100003, 1, 1, 0});
    adamw_of((adamw_case){100000, 0, 1, 1});
    adamw_of((adamw_case){100000, 0, 1, 2});
}
