/* verify_rows.c - which rows the parity matrix has.
 *
 * full: executions x schedules x stages for `delayed`, each; then rows until every combination of three levels of all
 * factors is there. short: rows until every pair is there. Both: a baseline per numeric configuration, baselines cut
 * into stages, the default in new processes, and the schedule that adds gradients in an order of its own, held against
 * itself. */
#include <string.h>
#include "base/assert.h"
#include "cli/verify.h"
#include "qeffect/schedule.h"

/* Factors of the covering array. Mode and capture unit are one factor, recipe and history another: a unit without
 * captured, or a history without `delayed`, would be a level that does nothing. */
enum { EXECUTION, SCHEDULE, STAGES, NUMERIC, LAYERS, CACHE, PLACEMENT, CONTRACTS, FACTORS };

enum { ZBH1 = 2, ONE_STAGE = 0, UNEVEN = 1 };
/* Those that keep the order of microbatches; the last ones have two stages on each rank. */
static const char *const schedules[] = {"gpipe", "1f1b",   "zbh1",  "zbh2",   "interleaved", "interleaved-zb",
                                        "zbv",   "v-half", "v-min", "1f1b-v", "dualpipev"};
static const uint32_t stages[] = {1, 2, 4};
static const char own_order[] = "looped-bfs";

typedef struct numeric {
    qe_recipe_kind recipe;
    uint32_t history;
} numeric;
static const numeric numerics[] = {
    {QE_RECIPE_DELAYED, 4}, {QE_RECIPE_DELAYED, 1}, {QE_RECIPE_DELAYED, 2}, {QE_RECIPE_CURRENT, 0},
    {QE_RECIPE_BLOCK, 0},   {QE_RECIPE_BF16, 0},    {QE_RECIPE_FP32, 0},
};

#define COUNT(array) ((uint8_t)(sizeof(array) / sizeof *(array)))
enum { EXECUTIONS = QE_VERIFY_BASELINE };

/* One stage is less than two on each rank, and has no neighbour with other layers. */
static int allowed(const uint8_t *row) {
    int folded = row[SCHEDULE] != QE_COVER_ANY && qe_schedule_usual_chunks(schedules[row[SCHEDULE]]) > 1;
    return row[STAGES] != ONE_STAGE || (!folded && row[LAYERS] != UNEVEN);
}

static const qe_cover cover = {
    .factors = FACTORS,
    .levels = {EXECUTIONS, COUNT(schedules), COUNT(stages), COUNT(numerics), 2, 2, 2, 2},
    .allowed = allowed,
};

/* A multiple of four layers is even on 1, 2 and 4 stages; one more is uneven on 2 and 4. */
static uint32_t layers_of(uint32_t configured, int uneven) {
    return (configured + 3) / 4 * 4 + (uneven != 0);
}

static qe_verify_row row_of(const uint8_t *levels, const qe_settings *configured) {
    qe_verify_row row = {
        .execution = (qe_verify_execution)levels[EXECUTION],
        .schedule = schedules[levels[SCHEDULE]],
        .chunks = qe_schedule_usual_chunks(schedules[levels[SCHEDULE]]),
        .layers = layers_of(configured->model.layers, levels[LAYERS] == UNEVEN),
        .recipe = numerics[levels[NUMERIC]].recipe,
        .history = numerics[levels[NUMERIC]].history,
        .cache = levels[CACHE] == 0,
        .copy = levels[PLACEMENT] == 1,
        .contracts = levels[CONTRACTS] == 1 ? QE_CONTRACTS_SETTING_OFF : configured->contracts.mode,
    };
    row.ranks = stages[levels[STAGES]] / row.chunks;
    return row;
}

static int same_numerics(const qe_verify_row *a, const qe_verify_row *b) {
    return a->layers == b->layers && a->recipe == b->recipe && a->history == b->history &&
           (strcmp(a->schedule, own_order) == 0) == (strcmp(b->schedule, own_order) == 0);
}

static uint32_t append(qe_verify_rows *rows, const qe_verify_row *row, uint32_t baseline) {
    QE_ASSERT(rows->count < QE_VERIFY_ROWS_MAX);
    uint32_t index = rows->count++;
    rows->row[index] = *row;
    rows->row[index].number = index + 1;
    rows->row[index].baseline = baseline;
    return index;
}

static qe_verify_row baseline_like(const qe_verify_row *row, uint32_t chunks, const qe_settings *configured) {
    return (qe_verify_row){.execution = QE_VERIFY_BASELINE, .schedule = "sequential", .ranks = 1, .chunks = chunks,
                           .layers = row->layers, .recipe = row->recipe, .history = row->history, .copy = 1,
                           .contracts = configured->contracts.mode};
}

/* Appends a row behind its baseline. */
static void append_compared(qe_verify_rows *rows, const qe_verify_row *row, const qe_settings *configured) {
    uint32_t baseline = 0;
    while (baseline < rows->count &&
           (rows->row[baseline].baseline != baseline || !same_numerics(&rows->row[baseline], row)))
        baseline++;
    if (baseline == rows->count) {
        qe_verify_row plain = baseline_like(row, 1, configured);
        append(rows, &plain, baseline);
    }
    append(rows, row, baseline);
}

/* The default as baseline, eager and captured, in processes that share nothing with this one but the program; and
 * baselines whose stages are cut. */
static void append_special(qe_verify_rows *rows, const qe_settings *configured) {
    static const uint8_t plain[FACTORS] = {[SCHEDULE] = ZBH1, [STAGES] = 1};
    qe_verify_row row = row_of(plain, configured);
    for (uint32_t chunks = 1; chunks <= 4; chunks *= 2) {
        qe_verify_row cut = baseline_like(&row, chunks, configured);
        cut.fresh = chunks == 1;
        append_compared(rows, &cut, configured);
    }
    row.fresh = 1;
    for (int execution = 0; execution < EXECUTIONS; execution++) {
        row.execution = (qe_verify_execution)execution;
        append_compared(rows, &row, configured);
    }
}

/* An order of its own has no baseline: its rows are held against the plainest of them. */
static void append_own_order(qe_verify_rows *rows, uint32_t numeric_count, const qe_settings *configured) {
    for (uint32_t n = 0; n < numeric_count; n++) {
        qe_verify_row row = {.execution = QE_VERIFY_EAGER, .schedule = own_order, .ranks = 1, .chunks = 1,
                             .layers = layers_of(configured->model.layers, 0), .recipe = numerics[n].recipe,
                             .history = numerics[n].history, .copy = 1, .contracts = configured->contracts.mode};
        uint32_t plainest = append(rows, &row, rows->count);
        for (int execution = 0; execution < EXECUTIONS; execution++) {
            row.execution = (qe_verify_execution)execution;
            row.ranks = execution == QE_VERIFY_STEP ? 4 : 2;
            row.chunks = 4 / row.ranks;
            row.cache = execution != QE_VERIFY_LAYER;
            row.copy = execution == QE_VERIFY_ACTION;
            append(rows, &row, plainest);
        }
    }
}

/* Executions x schedules x stages, the other factors at their first level. */
static uint32_t full_product(uint8_t (*levels)[QE_COVER_FACTORS_MAX]) {
    uint32_t count = 0;
    for (uint8_t s = 0; s < COUNT(schedules); s++)
        for (uint8_t p = 0; p < COUNT(stages); p++)
            for (uint8_t e = 0; e < EXECUTIONS; e++) {
                uint8_t row[QE_COVER_FACTORS_MAX] = {[EXECUTION] = e, [SCHEDULE] = s, [STAGES] = p};
                if (allowed(row)) memcpy(levels[count++], row, sizeof row);
            }
    return count;
}

qe_status qe_verify_rows_make(qe_verify_rows *rows_out, int full, const qe_settings *configured, qe_error *error_out) {
    enum { CAPACITY = QE_VERIFY_ROWS_MAX / 2 }; /* leaves room for baselines and special rows */
    uint8_t levels[CAPACITY][QE_COVER_FACTORS_MAX];
    uint32_t count = full ? full_product(levels) : 0;
    rows_out->count = 0;
    QE_TRY(qe_cover_extend(&cover, full ? 3 : 2, levels, CAPACITY, &count, error_out));
    append_special(rows_out, configured);
    for (uint32_t i = 0; i < count; i++) {
        qe_verify_row row = row_of(levels[i], configured);
        append_compared(rows_out, &row, configured);
    }
    append_own_order(rows_out, full ? COUNT(numerics) : 1, configured);
    return QE_OK;
}

const char *qe_verify_execution_name(qe_verify_execution execution) {
    static const char *const names[] = {"eager", "captured layer", "captured action", "captured step", "baseline"};
    return names[execution];
}

const char *qe_verify_contracts_name(qe_contracts_setting contracts) {
    static const char *const names[] = {"trap", "observe", "off"};
    return names[contracts];
}

void qe_verify_row_words(const qe_verify_row *row, char *text, size_t capacity) {
    char recipe[24];
    if (row->history > 0) snprintf(recipe, sizeof recipe, "%s %u", qe_recipe_name(row->recipe), row->history);
    else snprintf(recipe, sizeof recipe, "%s", qe_recipe_name(row->recipe));
    snprintf(text, capacity, "%-15s %-11s %ux%u L%-2u %-9s %-5s %-6s %-7s %-5s",
             qe_verify_execution_name(row->execution), row->schedule, row->ranks, row->chunks, row->layers, recipe,
             row->cache ? "cache" : "-", row->copy ? "copy" : "direct", qe_verify_contracts_name(row->contracts),
             row->fresh ? "fresh" : "here");
}

void qe_verify_row_settings(const qe_verify_row *row, const qe_settings *configured, qe_settings *settings_out) {
    static const qe_capture_unit units[] = {[QE_VERIFY_LAYER] = QE_CAPTURE_UNIT_LAYER,
                                            [QE_VERIFY_ACTION] = QE_CAPTURE_UNIT_ACTION,
                                            [QE_VERIFY_STEP] = QE_CAPTURE_UNIT_STEP};
    qe_settings *s = settings_out;
    *s = *configured;
    int captured = row->execution != QE_VERIFY_EAGER && row->execution != QE_VERIFY_BASELINE;
    s->train.mode = row->execution == QE_VERIFY_BASELINE ? QE_TRAIN_BASELINE
                    : captured                           ? QE_TRAIN_CAPTURED
                                                         : QE_TRAIN_EAGER;
    if (captured) s->train.capture = units[row->execution];
    s->train.steps = QE_VERIFY_STEPS;
    s->model.layers = row->layers;
    /* The baseline takes the stages of a schedule and runs them in its own order. */
    const char *schedule = row->execution != QE_VERIFY_BASELINE ? row->schedule
                           : row->chunks == 1                   ? "1f1b"
                                                                : "interleaved";
    snprintf(s->pipeline.schedule, sizeof s->pipeline.schedule, "%s", schedule);
    s->pipeline.ranks = row->ranks;
    s->pipeline.chunks = row->chunks;
    s->pipeline.cache_weights = row->cache != 0;
    s->pipeline.placement = row->copy ? QE_PLACEMENT_COPY : QE_PLACEMENT_DIRECT;
    s->recipe.kind = row->recipe;
    if (row->history > 0) s->recipe.history_length = row->history;
    s->contracts.mode = row->contracts;
    s->contracts.trace[0] = 0; /* a refused step is told in its row; nothing is left on disk */
    s->checkpoint.path[0] = 0;
}
