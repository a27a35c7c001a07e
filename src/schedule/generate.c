/* generate.c - the named orders. Each is a few loops over one rank's microbatches; docs/schedules.md draws them.
 * Stage = chunk * ranks + rank. Backward is FIFO in all of them. */
#include "schedule/order.h"

#include <string.h>

#include "base/assert.h"

/* Where the next action of one rank goes. */
typedef struct row {
    qe_action *next;
    const qe_schedule_request *request;
    uint32_t rank;
} row;

static void put(row *to, qe_action_kind kind, uint32_t chunk, uint32_t microbatch) {
    if (to->request->forward_only && kind != QE_ACTION_F) return;
    uint32_t stage = chunk * to->request->ranks + to->rank;
    *to->next++ = (qe_action){.microbatch = microbatch, .stage = (uint16_t)stage, .kind = (uint8_t)kind};
}

static uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* One microbatch at a time: F of all stages, then B of all stages in reverse. */
static void put_sequential(row *to) {
    for (uint32_t microbatch = 0; microbatch < to->request->microbatches; microbatch++) {
        for (uint32_t chunk = 0; chunk < to->request->chunks; chunk++) put(to, QE_ACTION_F, chunk, microbatch);
        for (uint32_t chunk = to->request->chunks; chunk-- > 0;) put(to, QE_ACTION_B, chunk, microbatch);
    }
}

static void put_gpipe(row *to) {
    for (uint32_t microbatch = 0; microbatch < to->request->microbatches; microbatch++) {
        put(to, QE_ACTION_F, 0, microbatch);
    }
    for (uint32_t microbatch = 0; microbatch < to->request->microbatches; microbatch++) {
        put(to, QE_ACTION_B, 0, microbatch);
    }
}

static void put_1f1b(row *to) {
    uint32_t microbatches = to->request->microbatches;
    uint32_t warmup = smaller(to->request->ranks - 1 - to->rank, microbatches);
    for (uint32_t forward = 0; forward < warmup; forward++) put(to, QE_ACTION_F, 0, forward);
    for (uint32_t backward = 0; backward < microbatches; backward++) {
        if (warmup + backward < microbatches) put(to, QE_ACTION_F, 0, warmup + backward);
        put(to, QE_ACTION_B, 0, backward);
    }
}

/* 1F1B with each W as many microbatches after its I as the rank's number, so that all ranks keep as much as rank 0. */
static void put_zbh1(row *to) {
    uint32_t microbatches = to->request->microbatches;
    uint32_t warmup = to->request->ranks - 1 - to->rank, delay = to->rank; /* both below microbatches >= ranks */
    for (uint32_t forward = 0; forward < warmup; forward++) put(to, QE_ACTION_F, 0, forward);
    for (uint32_t backward = 0; backward < microbatches; backward++) {
        if (warmup + backward < microbatches) put(to, QE_ACTION_F, 0, warmup + backward);
        put(to, QE_ACTION_I, 0, backward);
        if (backward >= delay) put(to, QE_ACTION_W, 0, backward - delay);
    }
    for (uint32_t weight = microbatches - delay; weight < microbatches; weight++) put(to, QE_ACTION_W, 0, weight);
}

/* PyTorch's rounds: a round takes at least `ranks` microbatches through all chunks. */
static uint32_t interleaved_rounds(uint32_t ranks, uint32_t microbatches) { return microbatches / ranks; }

static int interleaved_fits(uint32_t ranks, uint32_t microbatches) {
    return microbatches >= ranks && microbatches % interleaved_rounds(ranks, microbatches) == 0;
}

/* Virtual step k of the forward: groups of `group` microbatches go through chunk 0, then chunk 1, ... The backward
 * takes the same microbatches through the chunks in reverse. */
static void put_virtual(row *to, qe_action_kind kind, uint32_t group, uint32_t step) {
    uint32_t chunks = to->request->chunks;
    uint32_t chunk = step % (group * chunks) / group;
    uint32_t microbatch = step / (group * chunks) * group + step % group;
    put(to, kind, kind == QE_ACTION_F ? chunk : chunks - 1 - chunk, microbatch);
}

static void put_interleaved(row *to) {
    uint32_t ranks = to->request->ranks, chunks = to->request->chunks, microbatches = to->request->microbatches;
    uint32_t group = microbatches / interleaved_rounds(ranks, microbatches);
    uint32_t steps = microbatches * chunks;
    uint32_t warmup = smaller(steps, 2 * (ranks - 1 - to->rank) + (chunks - 1) * group);
    for (uint32_t forward = 0; forward < warmup; forward++) put_virtual(to, QE_ACTION_F, group, forward);
    for (uint32_t backward = 0; backward < steps; backward++) {
        if (warmup + backward < steps) put_virtual(to, QE_ACTION_F, group, warmup + backward);
        put_virtual(to, QE_ACTION_B, group, backward);
    }
}

typedef struct generator {
    const char *name;
    void (*put_row)(row *to);
    uint32_t chunks_min, chunks_max;
    uint32_t actions_per_pair; /* 2: F B, 3: F I W */
    int fills_pipeline;        /* the order is defined from `ranks` microbatches on */
} generator;

static const generator GENERATORS[] = {
    {"gpipe", put_gpipe, 1, 1, 2, 0},
    {"1f1b", put_1f1b, 1, 1, 2, 0},
    {"interleaved", put_interleaved, 2, QE_CHUNKS_MAX, 2, 1},
    {"zbh1", put_zbh1, 1, 1, 3, 1},
    {"sequential", put_sequential, 1, QE_CHUNKS_MAX, 2, 0},
};
static const size_t GENERATOR_COUNT = sizeof GENERATORS / sizeof GENERATORS[0];

static const generator *find_generator(const char *name) {
    for (size_t i = 0; name != NULL && i < GENERATOR_COUNT; i++) {
        if (strcmp(name, GENERATORS[i].name) == 0) return &GENERATORS[i];
    }
    return NULL;
}

const char *qe_schedule_name(uint32_t index) { return index < GENERATOR_COUNT ? GENERATORS[index].name : NULL; }

static qe_status check_range(const char *what, uint32_t value, uint32_t most, qe_error *error_out) {
    if (value == 0) {
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "%s is 0; expected 1 to %u", what, most);
    }
    if (value > most) {
        return qe_error_set(error_out, QE_ERROR_LIMIT, NULL, "%s is %u; expected 1 to %u", what, value, most);
    }
    return QE_OK;
}

static qe_status check_chunks(const generator *order, uint32_t chunks, qe_error *error_out) {
    if (chunks < order->chunks_min) {
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "use 2 or more chunks, or 1f1b, the same order for one chunk",
                            "%s needs at least %u chunks per rank, found %u", order->name, order->chunks_min, chunks);
    }
    if (chunks > order->chunks_max) {
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "use 1 chunk, or interleaved for several chunks per rank",
                            "%s is defined for one stage per rank, found %u chunks", order->name, chunks);
    }
    return QE_OK;
}

/* Multiples of `ranks` always fit, so the search ends within `ranks` steps. */
static uint32_t interleaved_nearest(uint32_t ranks, uint32_t microbatches) {
    for (uint32_t distance = 0;; distance++) {
        QE_ASSERT(distance <= ranks);
        uint32_t above = microbatches + distance;
        if (above <= QE_MICROBATCHES_MAX && interleaved_fits(ranks, above)) return above;
        if (distance < microbatches && interleaved_fits(ranks, microbatches - distance)) return microbatches - distance;
    }
}

/* gpipe, 1f1b and sequential are defined for any number of microbatches; the others fill the pipeline first. */
static qe_status check_filling(const generator *order, uint32_t ranks, uint32_t microbatches, qe_error *error_out) {
    if (!order->fills_pipeline || microbatches >= ranks) return QE_OK;
    char remedy[96];
    (void)snprintf(remedy, sizeof remedy, "the nearest number of microbatches that fits is %u, or use 1f1b", ranks);
    return qe_error_set(error_out, QE_ERROR_ARGUMENT, remedy,
                        "%s needs at least as many microbatches as ranks (%u), found %u", order->name, ranks,
                        microbatches);
}

static qe_status check_rounds(uint32_t ranks, uint32_t microbatches, qe_error *error_out) {
    if (interleaved_fits(ranks, microbatches)) return QE_OK;
    char remedy[96];
    (void)snprintf(remedy, sizeof remedy, "the nearest number of microbatches that fits is %u",
                   interleaved_nearest(ranks, microbatches));
    uint32_t rounds = interleaved_rounds(ranks, microbatches);
    return qe_error_set(error_out, QE_ERROR_ARGUMENT, remedy,
                        "interleaved runs on %u ranks in %u equal rounds, and %u microbatches are not divisible by %u",
                        ranks, rounds, microbatches, rounds);
}

static uint64_t count_actions(const generator *order, const qe_schedule_request *request) {
    uint64_t pairs = (uint64_t)request->ranks * request->chunks * request->microbatches;
    return pairs * (request->forward_only ? 1 : order->actions_per_pair);
}

static qe_status check_request(const generator *order, const qe_schedule_request *request, qe_error *error_out) {
    if (order == NULL) {
        return qe_error_set(error_out, QE_ERROR_ARGUMENT,
                            "use gpipe, 1f1b, interleaved, zbh1 or sequential, or a CSV file of your own",
                            "no schedule is named \"%.64s\"", request->name == NULL ? "" : request->name);
    }
    QE_TRY(check_range("ranks", request->ranks, QE_RANKS_MAX, error_out));
    QE_TRY(check_range("chunks", request->chunks, QE_CHUNKS_MAX, error_out));
    QE_TRY(check_range("microbatches", request->microbatches, QE_MICROBATCHES_MAX, error_out));
    QE_TRY(check_chunks(order, request->chunks, error_out));
    QE_TRY(check_filling(order, request->ranks, request->microbatches, error_out));
    if (order->put_row == put_interleaved) QE_TRY(check_rounds(request->ranks, request->microbatches, error_out));
    uint64_t actions = count_actions(order, request);
    if (actions > QE_SCHEDULE_ACTIONS_MAX) {
        return qe_error_set(error_out, QE_ERROR_LIMIT, "use fewer microbatches, chunks or ranks",
                            "this schedule has %llu actions; at most %d are taken", (unsigned long long)actions,
                            QE_SCHEDULE_ACTIONS_MAX);
    }
    return QE_OK;
}

qe_status qe_schedule_generate(const qe_schedule_request *request, qe_schedule *schedule_out, qe_error *error_out) {
    const generator *order = find_generator(request->name);
    QE_TRY(check_request(order, request, error_out));
    uint32_t action_count = (uint32_t)count_actions(order, request), row_count = action_count / request->ranks;
    qe_schedule schedule = {.ranks = request->ranks,
                            .stages = request->ranks * request->chunks,
                            .microbatches = request->microbatches};
    QE_TRY(qe_schedule_allocate(&schedule, action_count, &schedule, error_out));
    for (uint32_t rank = 0; rank < schedule.ranks; rank++) {
        row to = {.next = schedule.actions + (size_t)rank * row_count, .request = request, .rank = rank};
        order->put_row(&to);
        schedule.rank_begin[rank + 1] = (rank + 1) * row_count;
        QE_ASSERT(to.next == schedule.actions + schedule.rank_begin[rank + 1]);
    }
    for (uint32_t stage = 0; stage < schedule.stages; stage++) schedule.stage_rank[stage] = stage % schedule.ranks;
    *schedule_out = schedule;
    return QE_OK;
}
