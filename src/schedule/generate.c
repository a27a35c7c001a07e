/* generate.c - finds a named order, refuses what it cannot do, and puts its rows together. The orders
 * themselves are in generate_rows.c, generate_v*.c and generate_dualpipe.c. */
#include "schedule/generate.h"
#include "schedule/order.h"

#include <string.h>

#include "base/assert.h"
#include "base/text.h"

/* What an order is like, and what it needs for that. */
enum {
    FILLS_PIPELINE = 1 << 0, /* defined from `ranks` microbatches on */
    IN_ROUNDS = 1 << 1,      /* the microbatches must part into equal rounds */
    FOLDED = 1 << 2,         /* qe_row.folded */
    FILLS_TWICE = 1 << 3,    /* defined from 2 * `ranks` microbatches on */
    BOTH_WAYS = 1 << 4,      /* half of the microbatches run the other way: ranks and microbatches are even */
};

typedef struct generator {
    const char *name;
    void (*put_row)(qe_row *to); /* or NULL, and all rows at once: */
    qe_status (*put_rows)(const qe_schedule_request *request, qe_action *actions, qe_error *error_out);
    uint32_t chunks_min, chunks_max, chunks_usual;
    uint32_t actions_per_pair; /* 2: F B, 3: F I W */
    const char *instead;       /* the order to take for another number of chunks */
    uint32_t traits;
} generator;

static const generator GENERATORS[] = {
    {"gpipe", qe_row_gpipe, NULL, 1, 1, 1, 2, "looped-bfs", 0},
    {"looped-bfs", qe_row_looped_bfs, NULL, 1, QE_CHUNKS_MAX, 2, 2, NULL, 0},
    {"1f1b", qe_row_1f1b, NULL, 1, 1, 1, 2, "interleaved", 0},
    {"interleaved", qe_row_interleaved, NULL, 2, QE_CHUNKS_MAX, 2, 2, "1f1b", FILLS_PIPELINE | IN_ROUNDS},
    {"zbh1", qe_row_zbh1, NULL, 1, 1, 1, 3, "interleaved-zb", FILLS_PIPELINE},
    {"zbh2", qe_row_zbh2, NULL, 1, 1, 1, 3, "interleaved-zb", 0},
    {"interleaved-zb", qe_row_interleaved_zb, NULL, 2, QE_CHUNKS_MAX, 2, 3, "zbh1", FILLS_PIPELINE | IN_ROUNDS},
    {"zbv", qe_row_zbv, NULL, 2, 2, 2, 3, "interleaved-zb", FOLDED},
    {"v-half", NULL, qe_rows_v_half, 2, 2, 2, 3, "interleaved-zb", FOLDED},
    {"v-min", NULL, qe_rows_v_min, 2, 2, 2, 3, "interleaved-zb", FOLDED},
    {"1f1b-v", NULL, qe_rows_1f1b_v, 2, 2, 2, 2, "interleaved", FOLDED},
    {"dualpipe", qe_row_dualpipe, NULL, 1, 1, 1, 3, "dualpipev", FILLS_TWICE | BOTH_WAYS},
    {"dualpipev", qe_row_dualpipev, NULL, 2, 2, 2, 3, "interleaved-zb", FOLDED | FILLS_TWICE},
    {"sequential", qe_row_sequential, NULL, 1, QE_CHUNKS_MAX, 1, 2, NULL, 0},
};
static const size_t GENERATOR_COUNT = sizeof GENERATORS / sizeof GENERATORS[0];

static const generator *find_generator(const char *name) {
    for (size_t i = 0; name != NULL && i < GENERATOR_COUNT; i++) {
        if (strcmp(name, GENERATORS[i].name) == 0) return &GENERATORS[i];
    }
    return NULL;
}

const char *qe_schedule_name(uint32_t index) { return index < GENERATOR_COUNT ? GENERATORS[index].name : NULL; }

uint32_t qe_schedule_usual_chunks(const char *name) {
    const generator *order = find_generator(name);
    return order == NULL ? 1 : order->chunks_usual;
}

static qe_status check_range(const char *what, uint32_t value, uint32_t most, qe_error *error_out) {
    if (value == 0) {
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "%s is 0; expected 1 to %u", what, most);
    }
    if (value > most) {
        return qe_error_set(error_out, QE_ERROR_LIMIT, NULL, "%s is %u; expected 1 to %u", what, value, most);
    }
    return QE_OK;
}

/* The remedy names the order that takes the number asked for, if one does:
 * of an order and its substitute's substitute one takes 1 chunk and one takes several, so the search ends. */
static qe_status check_chunks(const generator *order, uint32_t chunks, qe_error *error_out) {
    if (chunks >= order->chunks_min && chunks <= order->chunks_max) return QE_OK;
    uint32_t nearest = chunks < order->chunks_min ? order->chunks_min : order->chunks_max;
    const generator *instead = find_generator(order->instead);
    char remedy[96], alternative[48] = "";
    while (instead != NULL && (chunks < instead->chunks_min || chunks > instead->chunks_max)) {
        instead = find_generator(instead->instead);
    }
    if (instead != NULL) (void)snprintf(alternative, sizeof alternative, ", or %s for %u", instead->name, chunks);
    (void)snprintf(remedy, sizeof remedy, "use %u%s", nearest, alternative);
    return qe_error_set(error_out, QE_ERROR_ARGUMENT, remedy, "chunks per rank is %u; %s needs %s %u", chunks,
                        order->name, order->chunks_min == order->chunks_max ? "exactly" : "at least", nearest);
}

static int rounds_fit(uint32_t ranks, uint32_t microbatches) {
    return microbatches >= ranks && microbatches % qe_schedule_rounds(ranks, microbatches) == 0;
}

/* Multiples of `ranks` always fit, so the search ends within `ranks` steps. */
static uint32_t rounds_nearest(uint32_t ranks, uint32_t microbatches) {
    for (uint32_t distance = 0;; distance++) {
        QE_ASSERT(distance <= ranks);
        uint32_t above = microbatches + distance;
        if (above <= QE_MICROBATCHES_MAX && rounds_fit(ranks, above)) return above;
        if (distance < microbatches && rounds_fit(ranks, microbatches - distance)) return microbatches - distance;
    }
}

/* Some orders are defined for any number of microbatches; the others fill the pipeline first. */
static qe_status check_filling(const generator *order, uint32_t ranks, uint32_t microbatches, qe_error *error_out) {
    if (!(order->traits & FILLS_PIPELINE) || microbatches >= ranks) return QE_OK;
    char remedy[96];
    (void)snprintf(remedy, sizeof remedy, "the nearest number of microbatches that fits is %u, or use 1f1b", ranks);
    return qe_error_set(error_out, QE_ERROR_ARGUMENT, remedy,
                        "%s needs at least as many microbatches as ranks (%u), found %u", order->name, ranks,
                        microbatches);
}

static qe_status check_rounds(const generator *order, uint32_t ranks, uint32_t microbatches, qe_error *error_out) {
    if (!(order->traits & IN_ROUNDS) || rounds_fit(ranks, microbatches)) return QE_OK;
    char remedy[96];
    (void)snprintf(remedy, sizeof remedy, "the nearest number of microbatches that fits is %u",
                   rounds_nearest(ranks, microbatches));
    uint32_t rounds = qe_schedule_rounds(ranks, microbatches);
    return qe_error_set(error_out, QE_ERROR_ARGUMENT, remedy,
                        "%s runs on %u ranks in %u equal rounds, and %u microbatches are not divisible by %u",
                        order->name, ranks, rounds, microbatches, rounds);
}

static qe_status check_twice(const generator *order, uint32_t ranks, uint32_t microbatches, qe_error *error_out) {
    if (!(order->traits & FILLS_TWICE) || microbatches >= 2 * ranks) return QE_OK;
    char remedy[96];
    (void)snprintf(remedy, sizeof remedy, "the nearest number of microbatches that fits is %u, or use zbv", 2 * ranks);
    return qe_error_set(error_out, QE_ERROR_ARGUMENT, remedy,
                        "%s needs at least twice as many microbatches as ranks (%u), found %u", order->name, 2 * ranks,
                        microbatches);
}

static qe_status check_both_ways(const generator *order, uint32_t ranks, uint32_t microbatches, qe_error *error_out) {
    if (!(order->traits & BOTH_WAYS)) return QE_OK;
    if (ranks % 2 != 0) {
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "use one rank more or less, or dualpipev",
                            "%s needs an even number of ranks, found %u: two ranks share their stages", order->name,
                            ranks);
    }
    if (microbatches % 2 == 0) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_ARGUMENT, "use one microbatch more or less, or dualpipev",
                        "%s needs an even number of microbatches, found %u: half of them enter at each end",
                        order->name, microbatches);
}

/* At most: B does what I and W do. */
static uint64_t count_actions(const generator *order, const qe_schedule_request *request) {
    uint64_t pairs = (uint64_t)request->ranks * request->chunks * request->microbatches;
    return pairs * (request->forward_only ? 1 : order->actions_per_pair);
}

static qe_status refuse_name(const char *name, qe_error *error_out) {
    const char *names[sizeof GENERATORS / sizeof GENERATORS[0]], *word = name == NULL ? "" : name;
    char remedy[QE_ERROR_TEXT_BYTES];
    for (size_t i = 0; i < GENERATOR_COUNT; i++) names[i] = GENERATORS[i].name;
    const char *nearest = qe_text_nearest(word, names, GENERATOR_COUNT);
    (void)snprintf(remedy, sizeof remedy, "%s%s%suse " QE_SCHEDULE_NAMES ", or a CSV file of your own",
                   nearest == NULL ? "" : "did you mean ", nearest == NULL ? "" : nearest, nearest == NULL ? "" : "? ");
    return qe_error_set(error_out, QE_ERROR_ARGUMENT, remedy, "no schedule is named \"%.64s\"", word);
}

static qe_status check_request(const generator *order, const qe_schedule_request *request, qe_error *error_out) {
    if (order == NULL) return refuse_name(request->name, error_out);
    QE_TRY(check_range("ranks", request->ranks, QE_SCHEDULE_RANKS_MAX, error_out));
    /* Orders that are arranged for all ranks at once do it in tables that grow with the square of the ranks. */
    if (order->put_row == NULL && request->ranks > QE_RANKS_MAX) {
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "use fewer ranks, or zbv", "ranks is %u; %s takes 1 to %d",
                            request->ranks, order->name, QE_RANKS_MAX);
    }
    QE_TRY(check_range("chunks", request->chunks, QE_CHUNKS_MAX, error_out));
    QE_TRY(check_range("ranks times chunks", request->ranks * request->chunks, QE_STAGES_MAX, error_out));
    QE_TRY(check_range("microbatches", request->microbatches, QE_MICROBATCHES_MAX, error_out));
    QE_TRY(check_chunks(order, request->chunks, error_out));
    QE_TRY(check_filling(order, request->ranks, request->microbatches, error_out));
    QE_TRY(check_rounds(order, request->ranks, request->microbatches, error_out));
    QE_TRY(check_both_ways(order, request->ranks, request->microbatches, error_out));
    return check_twice(order, request->ranks, request->microbatches, error_out);
}

qe_status qe_schedule_request_check(const qe_schedule_request *request, qe_error *error_out) {
    return check_request(find_generator(request->name), request, error_out);
}

static qe_status check_stored(const generator *order, const qe_schedule_request *request, qe_error *error_out) {
    uint64_t actions = count_actions(order, request);
    if (actions > QE_SCHEDULE_ACTIONS_MAX) {
        return qe_error_set(error_out, QE_ERROR_LIMIT, "use fewer microbatches, chunks or ranks",
                            "this schedule has %llu actions; at most %d are taken", (unsigned long long)actions,
                            QE_SCHEDULE_ACTIONS_MAX);
    }
    return QE_OK;
}

static void place_stages(const qe_row *row, qe_schedule *schedule) {
    for (uint32_t chunk = 0; chunk < row->request->chunks; chunk++) {
        schedule->stage_rank[qe_row_stage(row, chunk)] = row->rank;
    }
}

/* Rows stand one behind the other; those of orders that are arranged for all ranks at once are equally long. */
static qe_status put_actions(const generator *order, const qe_schedule_request *request, qe_schedule *schedule,
                             qe_error *error_out) {
    uint32_t count = (uint32_t)count_actions(order, request);
    qe_row to = {.next = schedule->actions, .request = request, .folded = (order->traits & FOLDED) != 0};
    for (; to.rank < schedule->ranks; to.rank++) {
        place_stages(&to, schedule);
        if (order->put_row != NULL) order->put_row(&to);
        else to.next += count / schedule->ranks;
        QE_ASSERT(to.next <= schedule->actions + count);
        schedule->rank_begin[to.rank + 1] = (uint32_t)(to.next - schedule->actions);
    }
    return order->put_rows == NULL ? QE_OK : order->put_rows(request, schedule->actions, error_out);
}

qe_status qe_schedule_generate(const qe_schedule_request *request, qe_schedule *schedule_out, qe_error *error_out) {
    const generator *order = find_generator(request->name);
    QE_TRY(check_request(order, request, error_out));
    QE_TRY(check_stored(order, request, error_out));
    qe_schedule schedule = {.ranks = request->ranks,
                            .stages = request->ranks * request->chunks,
                            .microbatches = request->microbatches,
                            .reversed = (order->traits & BOTH_WAYS) ? request->microbatches / 2 : 0};
    QE_TRY(qe_schedule_allocate(&schedule, (uint32_t)count_actions(order, request), &schedule, error_out));
    qe_status status = put_actions(order, request, &schedule, error_out);
    if (status != QE_OK) qe_schedule_deinit(&schedule);
    else *schedule_out = schedule;
    return status;
}
