/* retain.c - follows each row once and keeps book of what it keeps: F until I or B, I until W, the pair until the
 * last of them. The same walk sees where a stage's scales fold and its caches are filled, and in which order its
 * gradients are added. Nothing here looks at another rank. */
#include "schedule/retain.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "schedule/order.h"

typedef struct keep {
    uint32_t activation, weight; /* kept now */
} keep;

static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* An action holds what it consumes until its end, so the peak is taken before anything is given back; of a pair, before
 * either of them gives anything back. */
static void follow_unit(keep *now, const qe_action *unit, uint32_t count, qe_schedule_peak *peak) {
    for (uint32_t i = 0; i < count; i++) now->activation += unit[i].kind == QE_ACTION_F;
    /* The pair of an I is one live pair on both sides of the hand-over, hence `live` is taken before it. */
    peak->live = larger(peak->live, now->activation + now->weight);
    for (uint32_t i = 0; i < count; i++) now->weight += unit[i].kind == QE_ACTION_I;
    peak->activation = larger(peak->activation, now->activation);
    peak->weight = larger(peak->weight, now->weight);
    for (uint32_t i = 0; i < count; i++) {
        now->activation -= unit[i].kind == QE_ACTION_I || unit[i].kind == QE_ACTION_B;
        now->weight -= unit[i].kind == QE_ACTION_W;
    }
}

/* What one stage is doing. */
typedef struct stage_state {
    uint32_t fold;        /* row index of the action behind which it folded; QE_NONE: not yet */
    uint32_t added;       /* row index of the latest action that added its gradient; QE_NONE */
    uint32_t added_microbatch;
    uint8_t filled;
} stage_state;

/* The first breach of one rule. */
typedef struct breach {
    uint32_t rank, first, second; /* row indices; rank QE_NONE: none */
} breach;

typedef struct judge {
    const qe_source *source;
    const qe_certificate_request *request;
    qe_certificate *certificate;
    stage_state *stage;  /* [2 * stages] by qe_source_turned: weights of the other way are others */
    uint8_t *life;       /* computed rows: [microbatches] parts done; these orders have a stage per rank */
    int training;
    breach memory, busy, empty, order;
} judge;

static void note(breach *found, uint32_t rank, uint32_t first, uint32_t second) {
    if (found->rank == QE_NONE) *found = (breach){rank, first, second};
}

/* Of those that meet the same weights. */
static uint32_t first_microbatch(const qe_source *source, const qe_action *action) {
    return qe_source_turned(source, action->microbatch) ? source->microbatches - source->reversed : 0;
}

static uint32_t last_microbatch(const qe_source *source, const qe_action *action) {
    uint32_t turned = qe_source_turned(source, action->microbatch) ? 0 : source->reversed;
    return source->microbatches - turned - 1;
}

static void follow_fold(judge *on, stage_state *stage, const qe_action *action, uint32_t rank, uint32_t index) {
    if (on->request->fold == QE_FOLD_STEP || !on->training) return;
    if (stage->fold != QE_NONE) note(&on->busy, rank, stage->fold, index);
    int backward = action->kind == QE_ACTION_I || action->kind == QE_ACTION_B;
    if (backward && action->microbatch == last_microbatch(on->source, action)) stage->fold = index;
}

static uint32_t find_fill(const judge *on, uint32_t rank, uint32_t index, const qe_action *user) {
    uint32_t first = first_microbatch(on->source, user);
    for (;; index++) {
        QE_ASSERT(index < qe_source_row_count(on->source, rank)); /* every microbatch has its F */
        qe_action action = qe_source_at(on->source, rank, index);
        if (action.kind == QE_ACTION_F && action.microbatch == first && action.stage == user->stage) return index;
    }
}

static void follow_fill(judge *on, stage_state *stage, const qe_action *action, uint32_t rank, uint32_t index) {
    if (on->request->fill == QE_FILL_STEP || stage->filled) return;
    stage->filled = 1;
    if (action->microbatch == first_microbatch(on->source, action)) return;
    note(&on->empty, rank, index, find_fill(on, rank, index, action));
}

static void follow_gradient(judge *on, stage_state *stage, const qe_action *action, uint32_t rank, uint32_t index) {
    if (action->kind != QE_ACTION_W && action->kind != QE_ACTION_B) return;
    if (stage->added != QE_NONE && stage->added_microbatch > action->microbatch) {
        on->certificate->rank[rank].gradient_order = on->certificate->gradient_order = QE_GRADIENTS_OWN;
        if (on->request->gradients == QE_GRADIENTS_ASCENDING) note(&on->order, rank, stage->added, index);
    }
    stage->added = index;
    stage->added_microbatch = action->microbatch;
}

/* Formulas are our own: what they lack or repeat is our bug. */
static void follow_life(judge *on, const qe_action *action, uint32_t rank) {
    static const uint8_t before[QE_ACTION_KINDS] = {0, 1, 3, 1}, after[QE_ACTION_KINDS] = {1, 3, 7, 7};
    QE_ASSERT(action->kind < QE_ACTION_KINDS);
    QE_ASSERT(action->stage == rank);
    QE_ASSERT(action->microbatch < on->source->microbatches);
    QE_ASSERT(on->life[action->microbatch] == before[action->kind]);
    on->life[action->microbatch] = after[action->kind];
}

static void follow_action(judge *on, const qe_action *action, uint32_t rank, uint32_t index) {
    int turned = qe_source_turned(on->source, action->microbatch);
    stage_state *stage = &on->stage[action->stage + (turned ? on->source->stages : 0)];
    if (on->life != NULL) follow_life(on, action, rank);
    follow_fold(on, stage, action, rank, index);
    follow_fill(on, stage, action, rank, index);
    follow_gradient(on, stage, action, rank, index);
}

/* (stage, microbatch) pairs that the limit admits; it is counted in microbatches of a whole rank. */
static uint64_t pairs_allowed(const judge *on, uint32_t rank) {
    double pairs = on->request->memory_limit * on->certificate->rank[rank].stages;
    if (on->request->memory_limit <= 0.0 || pairs >= UINT32_MAX) return UINT64_MAX;
    return (uint64_t)(pairs + 1e-9); /* a third of three is one */
}

static void follow_row(judge *on, uint32_t rank) {
    uint32_t count = qe_source_row_count(on->source, rank), used = 0;
    uint64_t allowed = pairs_allowed(on, rank);
    qe_schedule_peak *peak = &on->certificate->rank[rank].peak;
    keep now = {0};
    for (uint32_t index = 0; index < count; index += used) {
        qe_action unit[2] = {qe_source_at(on->source, rank, index)};
        used = qe_source_unit_count(on->source, rank, index, &unit[0]);
        if (used == 2) unit[1] = qe_source_at(on->source, rank, index + 1);
        for (uint32_t i = 0; i < used; i++) follow_action(on, &unit[i], rank, index + i);
        follow_unit(&now, unit, used, peak);
        if (peak->live > allowed) note(&on->memory, rank, index, index + used);
        if (!on->training) now.activation -= used; /* nothing is kept for a backward that never comes */
    }
    QE_ASSERT(now.activation == 0);
    QE_ASSERT(now.weight == 0);
}

static uint64_t pair_key(const qe_action *action) { return (uint64_t)action->stage << 32 | action->microbatch; }

static int by_key(const void *left, const void *right) {
    const uint64_t *a = left, *b = right;
    return *a < *b ? -1 : *a > *b;
}

/* The forwards kept at the unit [memory.first, memory.second), in row order; as many as are one too many. */
static uint32_t cite_kept(const judge *on, uint64_t *ended, qe_cited *cited, uint64_t most) {
    uint32_t ended_count = 0, kept = 0, rank = on->memory.rank;
    for (uint32_t i = 0; i < on->memory.first; i++) {
        qe_action action = qe_source_at(on->source, rank, i);
        if (action.kind == QE_ACTION_W || action.kind == QE_ACTION_B) ended[ended_count++] = pair_key(&action);
    }
    qsort(ended, ended_count, sizeof *ended, by_key);
    for (uint32_t i = on->memory.second; i-- > 0 && kept < most;) { /* from behind: the newest are one too many */
        qe_action action = qe_source_at(on->source, rank, i);
        uint64_t key = pair_key(&action);
        if (action.kind != QE_ACTION_F || bsearch(&key, ended, ended_count, sizeof key, by_key) != NULL) continue;
        cited[kept++] = qe_source_cite(on->source, rank, i);
    }
    for (uint32_t i = 0; i < kept / 2; i++) {
        qe_cited swapped = cited[i];
        cited[i] = cited[kept - 1 - i];
        cited[kept - 1 - i] = swapped;
    }
    return kept;
}

static qe_counterexample facts_of(const judge *on, qe_rule rule) {
    return (qe_counterexample){.rule = rule,
                               .ranks = on->source->ranks,
                               .stages = on->source->stages,
                               .microbatches = on->source->microbatches,
                               .actions = on->source->actions};
}

static qe_status refuse_memory(const judge *on, qe_counterexample *counterexample_out, qe_error *error_out) {
    size_t actions = on->memory.second;
    uint64_t allowed = pairs_allowed(on, on->memory.rank), *ended = malloc(actions * sizeof *ended);
    qe_cited *cited = malloc(actions * sizeof *cited);
    qe_status status;
    if (ended == NULL || cited == NULL) {
        status = qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a counterexample");
    } else {
        qe_counterexample facts = facts_of(on, QE_RULE_SCHEDULE_MEMORY);
        uint32_t kept = cite_kept(on, ended, cited, allowed + 1);
        QE_ASSERT(kept == allowed + 1);
        facts.expected = allowed;
        facts.found = kept;
        status = qe_counterexample_set(counterexample_out, &facts, cited, kept, error_out);
    }
    free(ended);
    free(cited);
    return status;
}

static qe_status refuse_two(const judge *on, qe_rule rule, const breach *found, qe_counterexample *counterexample_out,
                            qe_error *error_out) {
    qe_counterexample facts = facts_of(on, rule);
    qe_cited both[2] = {qe_source_cite(on->source, found->rank, found->first),
                        qe_source_cite(on->source, found->rank, found->second)};
    return qe_counterexample_set(counterexample_out, &facts, both, 2, error_out);
}

static qe_status verdict(const judge *on, qe_counterexample *counterexample_out, qe_error *error_out) {
    if (on->memory.rank != QE_NONE) return refuse_memory(on, counterexample_out, error_out);
    const struct {
        qe_rule rule;
        const breach *found;
    } rules[] = {{QE_RULE_SCALE_BUSY, &on->busy}, {QE_RULE_CACHE_EMPTY, &on->empty}, {QE_RULE_GRAD_ORDER, &on->order}};
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        if (rules[i].found->rank == QE_NONE) continue;
        return refuse_two(on, rules[i].rule, rules[i].found, counterexample_out, error_out);
    }
    return QE_OK;
}

static int has_backward(const qe_source *source) {
    for (uint32_t rank = 0; rank < source->ranks; rank++) {
        for (uint32_t i = 0; i < qe_source_row_count(source, rank); i++) {
            if (qe_source_at(source, rank, i).kind != QE_ACTION_F) return 1;
        }
    }
    return 0;
}

static void judge_rank(judge *on, uint32_t rank) {
    qe_certificate_rank *certified = &on->certificate->rank[rank];
    certified->actions = qe_source_row_count(on->source, rank);
    if (on->life != NULL) memset(on->life, 0, on->source->microbatches);
    follow_row(on, rank);
    for (uint32_t m = 0; on->life != NULL && m < on->source->microbatches; m++) QE_ASSERT(on->life[m] == 7);
    double activation = certified->stages == 0 ? 0.0 : (double)certified->peak.live / certified->stages;
    if (activation > on->certificate->peak_activation) on->certificate->peak_activation = activation;
}

qe_status qe_retain_judge(const qe_source *source, const qe_certificate_request *request, qe_certificate *certificate,
                          qe_counterexample *counterexample_out, qe_error *error_out) {
    static const breach none = {.rank = QE_NONE};
    judge on = {.source = source, .request = request, .certificate = certificate, .training = has_backward(source),
                .memory = none, .busy = none, .empty = none, .order = none};
    size_t life = source->schedule == NULL ? source->microbatches : 0;
    on.stage = malloc(2 * (size_t)source->stages * sizeof *on.stage + life);
    if (on.stage == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to check a schedule");
    if (life > 0) on.life = (uint8_t *)(on.stage + 2 * (size_t)source->stages);
    for (uint32_t stage = 0; stage < source->stages; stage++) {
        on.stage[stage] = on.stage[source->stages + stage] = (stage_state){.fold = QE_NONE, .added = QE_NONE};
        certificate->rank[source->stage_rank[stage]].stages++;
    }
    for (uint32_t rank = 0; rank < source->ranks; rank++) judge_rank(&on, rank);
    qe_status status = verdict(&on, counterexample_out, error_out);
    free(on.stage);
    return status;
}

void qe_schedule_peaks(const qe_schedule *schedule, qe_schedule_peak *peaks_out) {
    qe_source source = qe_source_stored(schedule);
    int training = has_backward(&source);
    for (uint32_t rank = 0; rank < schedule->ranks; rank++) {
        keep now = {0};
        peaks_out[rank] = (qe_schedule_peak){0};
        uint32_t used = 0;
        const qe_action *row = &schedule->actions[schedule->rank_begin[rank]];
        for (uint32_t i = 0; i < qe_source_row_count(&source, rank); i += used) {
            used = qe_source_unit_count(&source, rank, i, &row[i]);
            follow_unit(&now, &row[i], used, &peaks_out[rank]);
            if (!training) now.activation -= used;
        }
        QE_ASSERT(now.activation == 0);
        QE_ASSERT(now.weight == 0);
    }
}
