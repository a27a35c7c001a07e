/* ledger.c - steps of a ledger: begin, end, abort, and what changes between them.
 *
 *   IDLE --step_begin--> OPEN --step_end--> IDLE      slots are free in IDLE
 *                         '-----step_abort--> IDLE                                                            */
#include <string.h>

#include "base/assert.h"
#include "core/ledger_state.h"

void qe_ledger_step_begin(qe_ledger *ledger) {
    QE_ASSERT(ledger != NULL);
    QE_ASSERT(ledger->phase == QE_LEDGER_IDLE);
    qe_state_begin_step(ledger);
    if (ledger->object_count > 0) memcpy(ledger->begin, ledger->state, ledger->object_count * sizeof *ledger->state);
    ledger->phase = QE_LEDGER_OPEN;
    ledger->departed = 0;
    ledger->observed = 0;
    ledger->refused = QE_REFUSED_NONE;
    ledger->order_valid = 0;
    ledger->cursor = 0;
    ledger->certified_count = 0;
    ledger->judged_count = 0;
    ledger->log_count = 0;
    ledger->log_effect_count = 0;
    ledger->log_lost = 0;
    QE_LEDGER_VALID(ledger);
}

/* What certified items wrote stays written, also when their step was given up. */
static void close_step(qe_ledger *ledger) {
    if (ledger->cursor > ledger->unmarked_items) ledger->unmarked_items = ledger->cursor;
    ledger->phase = QE_LEDGER_IDLE;
    QE_LEDGER_VALID(ledger);
}

qe_status qe_ledger_step_check(qe_ledger *ledger, qe_violations *violations_out) {
    QE_ASSERT(ledger != NULL);
    QE_ASSERT(ledger->phase == QE_LEDGER_OPEN);
    QE_ASSERT(violations_out != NULL);
    violations_out->count = 0;
    violations_out->total = 0;
    qe_ledger_judge_end(ledger, QE_NONE, violations_out);
    if (violations_out->total > 0) {
        ledger->refused = QE_REFUSED_END;
        return QE_CONTRACT;
    }
    return QE_OK;
}

/* What was refused was done all the same, so nobody knows what a cache or a weight of this step was made from. */
static void close_object(qe_ledger *ledger, uint32_t index) {
    qe_object_state *state = &ledger->state[index];
    switch (ledger->program->objects[index].kind) {
    case QE_OBJECT_SLOT: state->word = 0; break;
    case QE_OBJECT_WEIGHT:
        if (!(state->word & QE_WEIGHT_COMMITTED)) state->counter++;
        break;
    case QE_OBJECT_CACHE: *state = (qe_object_state){0}; break;
    case QE_OBJECT_SCALE:
    case QE_OBJECT_GRAD:
    case QE_OBJECT_BUFFER:
    case QE_OBJECT_GRAPH:
    case QE_OBJECT_RNG:
    case QE_OBJECT_KINDS: break;
    }
}

static qe_status close_observed(qe_ledger *ledger, const qe_violations *violations) {
    int broken = ledger->observed > 0 || violations->total > 0;
    for (uint32_t i = 0; broken && i < ledger->object_count; i++) close_object(ledger, i);
    close_step(ledger);
    ledger->refused = QE_REFUSED_END; /* the end belongs to what this step was */
    return violations->total > 0 ? QE_CONTRACT : QE_OK;
}

qe_status qe_ledger_step_end(qe_ledger *ledger, qe_violations *violations_out) {
    qe_status status = qe_ledger_step_check(ledger, violations_out);
    if (ledger->observes) return close_observed(ledger, violations_out);
    if (status != QE_OK) return status;
    close_step(ledger);
    return QE_OK;
}

void qe_ledger_observe(qe_ledger *ledger) {
    QE_ASSERT(ledger != NULL);
    QE_ASSERT(ledger->phase == QE_LEDGER_IDLE);
    ledger->observes = 1;
}

uint64_t qe_ledger_observed(const qe_ledger *ledger) {
    QE_ASSERT(ledger != NULL);
    return ledger->observed;
}

static void abort_object(qe_ledger *ledger, uint32_t index) {
    qe_object_state *state = &ledger->state[index];
    switch (ledger->program->objects[index].kind) {
    case QE_OBJECT_SCALE:
    case QE_OBJECT_GRAD: *state = (qe_object_state){.counter = ledger->begin[index].counter}; break;
    case QE_OBJECT_SLOT: state->word = 0; break; /* the generation stays: old handles must not fit again */
    case QE_OBJECT_WEIGHT:
        if (state->word & QE_WEIGHT_COMMITTED) state->counter++; /* rolled back: a version of its own */
        state->word = 0;
        break;
    case QE_OBJECT_CACHE: *state = (qe_object_state){0}; break;
    case QE_OBJECT_BUFFER: state->word = 0; break;
    case QE_OBJECT_GRAPH: /* recordings are no work of a step: they stay */
    case QE_OBJECT_RNG:
    case QE_OBJECT_KINDS: break;
    }
}

void qe_ledger_step_abort(qe_ledger *ledger) {
    QE_ASSERT(ledger != NULL);
    QE_ASSERT(ledger->phase == QE_LEDGER_OPEN);
    for (uint32_t i = 0; i < ledger->object_count; i++) abort_object(ledger, i);
    close_step(ledger);
}

uint64_t qe_ledger_counter(const qe_ledger *ledger, uint32_t object) {
    QE_ASSERT(ledger != NULL);
    QE_ASSERT(object < ledger->object_count);
    return ledger->state[object].counter;
}

static void empty_caches_of(qe_ledger *ledger, uint32_t object) {
    for (uint32_t i = 0; i < ledger->object_count; i++) {
        const qe_object *cache = &ledger->program->objects[i];
        if (cache->kind != QE_OBJECT_CACHE) continue;
        if (cache->weight == object || cache->scale == object || i == object) ledger->state[i] = (qe_object_state){0};
    }
}

void qe_ledger_touch(qe_ledger *ledger, uint32_t object, uint64_t counter) {
    QE_ASSERT(ledger != NULL);
    QE_ASSERT(ledger->phase == QE_LEDGER_IDLE);
    QE_ASSERT(object < ledger->object_count);
    qe_object_state *state = &ledger->state[object];
    qe_object_kind kind = ledger->program->objects[object].kind;
    uint64_t bytes = ledger->program->objects[object].bytes;
    if (kind == QE_OBJECT_WEIGHT) state->counter = counter > state->counter ? counter : state->counter + 1;
    int rises = kind == QE_OBJECT_SLOT || kind == QE_OBJECT_GRAPH;
    if (rises && counter > state->counter) state->counter = counter;
    if (kind == QE_OBJECT_SCALE || kind == QE_OBJECT_GRAD) state->counter = counter;
    if (kind == QE_OBJECT_BUFFER) qe_range_mark(ledger, &(qe_effect){.object = object, .end = bytes});
    empty_caches_of(ledger, object);
    QE_LEDGER_VALID(ledger);
}

void qe_ledger_counts(const qe_ledger *ledger, uint64_t *certified_out, uint64_t *judged_out) {
    QE_ASSERT(ledger != NULL);
    *certified_out = ledger->certified_count;
    *judged_out = ledger->judged_count;
}
