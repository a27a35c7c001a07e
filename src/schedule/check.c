/* check.c - is a schedule complete, and is each row in order? Placement, counts and order on each rank here; certify.c
 * puts it together with freedom from deadlock and the rest. Everything is linear in the actions, however sparse the
 * indices are: actions are sorted by (stage, microbatch) with two counting passes; a table of all pairs is made,
 * elsewhere, only once every pair is known to be there. */
#include "schedule/order.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

static uint32_t action_count(const qe_schedule *schedule) { return schedule->rank_begin[schedule->ranks]; }

qe_status qe_counterexample_set(qe_counterexample *counterexample_out, const qe_counterexample *facts,
                                const qe_cited *cited, uint32_t cited_count, qe_error *error_out) {
    qe_counterexample set = *facts;
    set.cited_count = cited_count;
    set.cited = malloc((cited_count == 0 ? 1 : cited_count) * sizeof *set.cited);
    if (set.cited == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a counterexample");
    if (cited_count > 0) memcpy(set.cited, cited, cited_count * sizeof *cited);
    *counterexample_out = set;
    return QE_CONTRACT;
}

void qe_counterexample_deinit(qe_counterexample *counterexample) {
    free(counterexample->cited);
    *counterexample = (qe_counterexample){0};
}

/* As qe_counterexample_set, with the actions of a stored schedule at these indices. */
static qe_status refuse(const qe_schedule *schedule, const qe_counterexample *facts, const uint32_t *actions,
                        uint32_t cited_count, qe_counterexample *counterexample_out, qe_error *error_out) {
    qe_counterexample sized = *facts;
    qe_cited cited[2];
    QE_ASSERT(cited_count <= 2);
    for (uint32_t i = 0; i < cited_count; i++) {
        uint32_t rank = qe_schedule_action_rank(schedule, actions[i]);
        cited[i] = (qe_cited){.action = schedule->actions[actions[i]],
                              .rank = rank,
                              .index = actions[i] - schedule->rank_begin[rank]};
    }
    sized.ranks = schedule->ranks;
    sized.stages = schedule->stages;
    sized.microbatches = schedule->microbatches;
    sized.actions = action_count(schedule);
    return qe_counterexample_set(counterexample_out, &sized, cited, cited_count, error_out);
}

/* A pair has a second action, which begins no other pair. */
static qe_status check_overlaps(const qe_schedule *schedule, qe_error *error_out) {
    for (uint32_t rank = 0; rank < schedule->ranks; rank++) {
        uint32_t end = schedule->rank_begin[rank + 1];
        for (uint32_t i = schedule->rank_begin[rank]; i < end; i++) {
            if (!schedule->actions[i].paired) continue;
            if (i + 1 < end && !schedule->actions[i + 1].paired) continue;
            return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "action %u overlaps with no single next one", i);
        }
    }
    return QE_OK;
}

/* What the caller's own structure must hold before its indices may be followed. */
static qe_status check_shape(const qe_schedule *schedule, qe_error *error_out) {
    if (schedule->ranks == 0 || schedule->stages == 0 || schedule->microbatches == 0) {
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "a schedule has at least one rank, stage, microbatch");
    }
    if (schedule->ranks > QE_SCHEDULE_RANKS_MAX || schedule->stages > QE_STAGES_MAX ||
        schedule->microbatches > QE_MICROBATCHES_MAX ||
        schedule->rank_begin[schedule->ranks] > QE_SCHEDULE_ACTIONS_MAX) {
        return qe_error_set(error_out, QE_ERROR_LIMIT, NULL, "%u ranks, %u stages, %u microbatches: over the limits",
                            schedule->ranks, schedule->stages, schedule->microbatches);
    }
    if (schedule->reversed > schedule->microbatches) {
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "more microbatches are reversed than there are");
    }
    for (uint32_t rank = 0; rank < schedule->ranks; rank++) {
        if (schedule->rank_begin[rank] > schedule->rank_begin[rank + 1]) {
            return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "rank %u's row ends before it begins", rank);
        }
    }
    for (uint32_t i = schedule->rank_begin[0]; i < schedule->rank_begin[schedule->ranks]; i++) {
        if (schedule->actions[i].kind >= QE_ACTION_KINDS) {
            return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "action %u is none of F, I, W, B", i);
        }
    }
    QE_TRY(check_overlaps(schedule, error_out));
    if (schedule->rank_begin[0] == 0) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "the first row does not begin with the first action");
}

static qe_status refuse_range(const qe_schedule *schedule, uint32_t action, uint32_t bound, uint32_t index,
                              qe_counterexample *counterexample_out, qe_error *error_out) {
    qe_counterexample facts = {.rule = QE_RULE_SCHEDULE_PLACE, .expected = bound, .found = index};
    return refuse(schedule, &facts, &action, 1, counterexample_out, error_out);
}

/* Action `index` stands on `rank`, its stage does not live there. */
static qe_status refuse_rank(const qe_schedule *schedule, uint32_t index, uint32_t rank,
                             qe_counterexample *counterexample_out, qe_error *error_out) {
    uint16_t stage = schedule->actions[index].stage;
    uint32_t home = qe_schedule_rank(schedule, stage, schedule->actions[index].microbatch);
    qe_counterexample facts = {.rule = QE_RULE_SCHEDULE_PLACE, .expected = home, .found = rank};
    if (home >= schedule->ranks) return refuse(schedule, &facts, &index, 1, counterexample_out, error_out);
    for (uint32_t i = schedule->rank_begin[home]; i < schedule->rank_begin[home + 1]; i++) {
        uint32_t both[2] = {i, index};
        if (schedule->actions[i].stage != stage) continue;
        return refuse(schedule, &facts, both, 2, counterexample_out, error_out);
    }
    return refuse(schedule, &facts, &index, 1, counterexample_out, error_out);
}

static qe_status check_action_place(const qe_schedule *schedule, uint32_t index, uint32_t rank,
                                    qe_counterexample *counterexample_out, qe_error *error_out) {
    const qe_action *action = &schedule->actions[index];
    if (action->stage >= schedule->stages) {
        return refuse_range(schedule, index, schedule->stages, action->stage, counterexample_out, error_out);
    }
    if (action->microbatch >= schedule->microbatches) {
        return refuse_range(schedule, index, schedule->microbatches, action->microbatch, counterexample_out, error_out);
    }
    if (qe_schedule_rank(schedule, action->stage, action->microbatch) == rank) return QE_OK;
    return refuse_rank(schedule, index, rank, counterexample_out, error_out);
}

static qe_status check_place(const qe_schedule *schedule, qe_counterexample *counterexample_out, qe_error *error_out) {
    for (uint32_t rank = 0; rank < schedule->ranks; rank++) {
        for (uint32_t i = schedule->rank_begin[rank]; i < schedule->rank_begin[rank + 1]; i++) {
            QE_TRY(check_action_place(schedule, i, rank, counterexample_out, error_out));
        }
    }
    for (uint32_t stage = 0; stage < schedule->stages; stage++) {
        qe_counterexample facts = {.rule = QE_RULE_SCHEDULE_PLACE, .missing = {.stage = (uint16_t)stage},
                                   .expected = schedule->ranks, .found = QE_NONE};
        if (schedule->stage_rank[stage] < schedule->ranks) continue;
        return refuse(schedule, &facts, NULL, 0, counterexample_out, error_out);
    }
    return QE_OK;
}

/* One stable counting pass: to[] becomes from[] (or 0, 1, 2, ... without it) in the order of the keys. */
static void sort_pass(const qe_schedule *schedule, int by_stage, const uint32_t *from, uint32_t *to, uint32_t *count) {
    uint32_t actions = action_count(schedule), keys = by_stage ? schedule->stages : schedule->microbatches, begin = 0;
    memset(count, 0, keys * sizeof *count);
    for (uint32_t i = 0; i < actions; i++) {
        count[by_stage ? schedule->actions[i].stage : schedule->actions[i].microbatch]++;
    }
    for (uint32_t key = 0; key < keys; key++) {
        uint32_t next = begin + count[key];
        count[key] = begin;
        begin = next;
    }
    for (uint32_t i = 0; i < actions; i++) {
        uint32_t index = from == NULL ? i : from[i];
        const qe_action *action = &schedule->actions[index];
        to[count[by_stage ? action->stage : action->microbatch]++] = index;
    }
}

/* The first breach of each rule in row order; QE_NONE where there is none. */
typedef struct findings {
    int backward_due;                    /* no: an evaluation */
    uint32_t repeated, repeated_before;  /* the action that repeats, the one before it */
    uint32_t early, early_needs;         /* the action before what it needs */
    uint64_t due_pair;                   /* stage * microbatches + microbatch of the next pair that must appear */
    int missing_found;
    qe_action missing;
} findings;

/* Actions of one (stage, microbatch), by part of the work: B does the parts I and W. */
typedef struct pair {
    uint32_t part[3]; /* indexed by QE_ACTION_F, _I, _W */
} pair;

static void note_repeat(findings *found, uint32_t before, uint32_t repeated) {
    if (found->repeated != QE_NONE && found->repeated <= repeated) return;
    found->repeated = repeated;
    found->repeated_before = before;
}

static void note_early(findings *found, uint32_t early, uint32_t needs) {
    if (early == QE_NONE || needs == QE_NONE || early >= needs) return;
    if (found->early != QE_NONE && found->early <= early) return;
    found->early = early;
    found->early_needs = needs;
}

static void note_missing(findings *found, uint32_t stage, uint32_t microbatch, qe_action_kind kind) {
    if (found->missing_found) return;
    found->missing_found = 1;
    found->missing = (qe_action){.microbatch = microbatch, .stage = (uint16_t)stage, .kind = (uint8_t)kind};
}

static void place_part(findings *found, pair *parts, qe_action_kind part, uint32_t index) {
    if (parts->part[part] == QE_NONE) parts->part[part] = index;
    else note_repeat(found, parts->part[part], index);
}

static void place_action(findings *found, pair *parts, uint8_t kind, uint32_t index) {
    if (kind != QE_ACTION_B) {
        place_part(found, parts, (qe_action_kind)kind, index);
        return;
    }
    place_part(found, parts, QE_ACTION_I, index);
    place_part(found, parts, QE_ACTION_W, index);
}

static void judge_pair(findings *found, const pair *parts, const qe_action *of) {
    uint32_t input = parts->part[QE_ACTION_I], weight = parts->part[QE_ACTION_W];
    if (parts->part[QE_ACTION_F] == QE_NONE) note_missing(found, of->stage, of->microbatch, QE_ACTION_F);
    if (found->backward_due && input == QE_NONE) {
        note_missing(found, of->stage, of->microbatch, weight == QE_NONE ? QE_ACTION_B : QE_ACTION_I);
    }
    if (found->backward_due && weight == QE_NONE) note_missing(found, of->stage, of->microbatch, QE_ACTION_W);
    note_early(found, input, parts->part[QE_ACTION_F]);
    note_early(found, weight, input);
    note_early(found, weight, parts->part[QE_ACTION_F]);
}

/* The sorted actions from `begin` that belong to one pair; returns where the next pair begins. */
static uint32_t gather_pair(const qe_schedule *schedule, const uint32_t *order, uint32_t begin, findings *found,
                            pair *parts_out) {
    const qe_action *of = &schedule->actions[order[begin]];
    uint32_t end = begin;
    *parts_out = (pair){{QE_NONE, QE_NONE, QE_NONE}};
    for (; end < action_count(schedule); end++) {
        const qe_action *action = &schedule->actions[order[end]];
        if (action->stage != of->stage || action->microbatch != of->microbatch) break;
        place_action(found, parts_out, action->kind, order[end]);
    }
    return end;
}

static void judge_pairs(const qe_schedule *schedule, const uint32_t *order, findings *found) {
    uint64_t microbatches = schedule->microbatches;
    for (uint32_t next = 0; next < action_count(schedule);) {
        const qe_action *of = &schedule->actions[order[next]];
        pair parts;
        if (of->stage * microbatches + of->microbatch != found->due_pair) {
            note_missing(found, (uint32_t)(found->due_pair / microbatches), (uint32_t)(found->due_pair % microbatches),
                         QE_ACTION_F);
        }
        next = gather_pair(schedule, order, next, found, &parts);
        judge_pair(found, &parts, of);
        found->due_pair = of->stage * microbatches + of->microbatch + 1;
    }
    if (found->due_pair < schedule->stages * microbatches) {
        note_missing(found, (uint32_t)(found->due_pair / microbatches), (uint32_t)(found->due_pair % microbatches),
                     QE_ACTION_F);
    }
}

static qe_status refuse_findings(const qe_schedule *schedule, const findings *found,
                                 qe_counterexample *counterexample_out, qe_error *error_out) {
    if (found->repeated != QE_NONE) {
        qe_counterexample facts = {.rule = QE_RULE_SCHEDULE_DUPLICATE, .expected = 1, .found = 2};
        uint32_t both[2] = {found->repeated_before, found->repeated};
        return refuse(schedule, &facts, both, 2, counterexample_out, error_out);
    }
    if (found->missing_found) {
        qe_counterexample facts = {.rule = QE_RULE_SCHEDULE_MISSING, .missing = found->missing, .expected = 1};
        return refuse(schedule, &facts, NULL, 0, counterexample_out, error_out);
    }
    if (found->early != QE_NONE) {
        qe_counterexample facts = {.rule = QE_RULE_SCHEDULE_ORDER};
        uint32_t both[2] = {found->early, found->early_needs};
        return refuse(schedule, &facts, both, 2, counterexample_out, error_out);
    }
    return QE_OK;
}

static int has_backward(const qe_schedule *schedule) {
    for (uint32_t i = 0; i < action_count(schedule); i++) {
        if (schedule->actions[i].kind != QE_ACTION_F) return 1;
    }
    return 0;
}

/* Requires: placement holds, so that indices are in range. */
static qe_status check_pairs(const qe_schedule *schedule, qe_counterexample *counterexample_out, qe_error *error_out) {
    findings found = {.backward_due = has_backward(schedule), .repeated = QE_NONE, .early = QE_NONE};
    uint32_t keys = schedule->stages > schedule->microbatches ? schedule->stages : schedule->microbatches;
    size_t actions = action_count(schedule);
    uint32_t *memory = malloc((2 * actions + keys) * sizeof *memory);
    if (memory == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to check a schedule");
    uint32_t *by_microbatch = memory, *order = memory + actions, *count = memory + 2 * actions;
    sort_pass(schedule, 0, NULL, by_microbatch, count);
    sort_pass(schedule, 1, by_microbatch, order, count);
    judge_pairs(schedule, order, &found);
    free(memory);
    return refuse_findings(schedule, &found, counterexample_out, error_out);
}

qe_status qe_schedule_check_rows(const qe_schedule *schedule, qe_counterexample *counterexample_out,
                                 qe_error *error_out) {
    QE_TRY(check_shape(schedule, error_out));
    QE_TRY(check_place(schedule, counterexample_out, error_out));
    return check_pairs(schedule, counterexample_out, error_out);
}
