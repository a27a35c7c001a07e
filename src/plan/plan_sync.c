/* plan_sync.c - finds the event edges that conflicting ops on different streams need, and writes the program.
 *
 * Each op of another stream that must come first is marked with an event right behind it, so that nobody waits for
 * more than he needs. Clocks as in the ledger tell which edges follow from others and are left out; the ledger then
 * certifies the result on its own. */
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "plan/build.h"

typedef struct object_access {
    uint32_t write_stream, write_position; /* position 0: none */
    uint32_t read_position[QE_STREAMS_MAX]; /* last read on each stream since the write */
} object_access;

typedef struct sync_state {
    qe_build *build;
    object_access *objects;
    uint32_t position[QE_STREAMS_MAX];
    uint32_t clock[QE_STREAMS_MAX][QE_STREAMS_MAX]; /* [stream][other]: what stream knows to be done */
    uint32_t (*after)[QE_STREAMS_MAX]; /* [drafts] the stream's clock behind the draft */
    uint32_t *drafts_by_stream[QE_STREAMS_MAX]; /* draft at position - 1 */
} sync_state;

static int is_read(const qe_effect *effect) {
    switch ((qe_effect_kind)effect->kind) {
        case QE_EFFECT_SCALE_USE:
        case QE_EFFECT_SCALE_RECORD: /* commute */
        case QE_EFFECT_WEIGHT_READ:
        case QE_EFFECT_CACHE_USE:
        case QE_EFFECT_BUFFER_READ: return 1;
        case QE_EFFECT_SLOT_BORROW: return !effect->write;
        default: return 0;
    }
}

static void need(uint32_t *needed, const sync_state *state, uint32_t stream, uint32_t other, uint32_t position) {
    if (other == stream || position <= state->clock[stream][other]) return;
    if (position > needed[other]) needed[other] = position;
}

static void collect(const sync_state *state, const qe_draft *draft, uint32_t *needed) {
    for (uint32_t i = 0; i < draft->effect_count; i++) {
        const qe_effect *effect = &state->build->effects[draft->first_effect + i];
        const object_access *access = &state->objects[effect->object];
        if (access->write_position > 0)
            need(needed, state, draft->item.stream, access->write_stream, access->write_position);
        if (is_read(effect)) continue;
        for (uint32_t other = 0; other < QE_STREAMS_MAX; other++)
            need(needed, state, draft->item.stream, other, access->read_position[other]);
    }
}

static qe_status wait_for(sync_state *state, qe_draft *draft, uint32_t other, uint32_t position) {
    qe_build *build = state->build;
    uint32_t producer = state->drafts_by_stream[other][position - 1];
    if (build->drafts[producer].event == QE_NONE)
        build->drafts[producer].event = qe_program_add_event(&build->out->program);
    if (qe_build_grow((void **)&build->waits, build->wait_count, &build->wait_capacity, sizeof *build->waits) != 0)
        return qe_error_set(build->error, QE_ERROR_MEMORY, NULL, "no memory for the event edges of rank %u",
                            build->rank);
    build->waits[build->wait_count++] = build->drafts[producer].event;
    draft->wait_count++;
    uint32_t *mine = state->clock[draft->item.stream];
    for (uint32_t s = 0; s < QE_STREAMS_MAX; s++)
        if (state->after[producer][s] > mine[s]) mine[s] = state->after[producer][s];
    return QE_OK;
}

static void note_accesses(sync_state *state, const qe_draft *draft) {
    for (uint32_t i = 0; i < draft->effect_count; i++) {
        const qe_effect *effect = &state->build->effects[draft->first_effect + i];
        object_access *access = &state->objects[effect->object];
        if (is_read(effect)) {
            access->read_position[draft->item.stream] = state->position[draft->item.stream];
            continue;
        }
        memset(access->read_position, 0, sizeof access->read_position);
        access->write_stream = draft->item.stream;
        access->write_position = state->position[draft->item.stream];
    }
}

static qe_status order_draft(sync_state *state, uint32_t index) {
    qe_draft *draft = &state->build->drafts[index];
    uint32_t stream = draft->item.stream, needed[QE_STREAMS_MAX] = {0};
    collect(state, draft, needed);
    draft->first_wait = state->build->wait_count;
    for (uint32_t other = 0; other < QE_STREAMS_MAX; other++)
        if (needed[other] > state->clock[stream][other]) QE_TRY(wait_for(state, draft, other, needed[other]));
    state->drafts_by_stream[stream][state->position[stream]] = index;
    state->position[stream]++;
    state->clock[stream][stream] = state->position[stream];
    memcpy(state->after[index], state->clock[stream], sizeof state->after[index]);
    note_accesses(state, draft);
    return QE_OK;
}

static int state_init(sync_state *state, qe_build *build) {
    memset(state, 0, sizeof *state);
    state->build = build;
    uint32_t drafts = build->draft_count + 1;
    state->objects = calloc(build->out->program.object_count, sizeof *state->objects);
    state->after = calloc(drafts, sizeof *state->after);
    int failed = state->objects == NULL || state->after == NULL;
    for (uint32_t s = 0; s < build->out->program.stream_count; s++) {
        state->drafts_by_stream[s] = malloc(drafts * sizeof **state->drafts_by_stream);
        failed |= state->drafts_by_stream[s] == NULL;
    }
    return failed;
}

static void state_deinit(sync_state *state) {
    free(state->objects);
    free(state->after);
    for (uint32_t s = 0; s < QE_STREAMS_MAX; s++) free(state->drafts_by_stream[s]);
}

static qe_status add_item(qe_build *build, const qe_item *item, const qe_effect *effects, uint32_t count, uint32_t op,
                          uint32_t unit) {
    uint32_t index;
    QE_TRY(qe_program_add_item(&build->out->program, item, effects, count, &index, build->error));
    build->out->item_op[index] = op;
    build->out->item_unit[index] = unit;
    return QE_OK;
}

static qe_status write_draft(qe_build *build, const qe_draft *draft) {
    qe_item edge = {.stream = draft->item.stream, .stage = draft->item.stage, .microbatch = draft->item.microbatch};
    for (uint32_t i = 0; i < draft->wait_count; i++) {
        edge.kind = QE_ITEM_WAIT;
        edge.event = build->waits[draft->first_wait + i];
        QE_TRY(add_item(build, &edge, NULL, 0, QE_NONE, draft->unit));
    }
    QE_TRY(add_item(build, &draft->item, &build->effects[draft->first_effect], draft->effect_count, draft->op,
                    draft->unit));
    if (draft->event == QE_NONE) return QE_OK;
    edge.kind = QE_ITEM_RECORD;
    edge.event = draft->event;
    return add_item(build, &edge, NULL, 0, QE_NONE, draft->unit);
}

static void note_phase(qe_build *build, uint32_t draft) {
    uint32_t item = build->out->program.item_count;
    if (draft == build->take_begin) build->out->take_begin = item;
    if (draft == build->commit_begin) build->out->commit_begin = item;
    if (draft == build->exit_begin) build->out->exit_begin = item;
}

static qe_status write_program(qe_build *build) {
    uint32_t most = 2 * build->draft_count + build->wait_count + 1;
    build->out->item_op = malloc(most * sizeof *build->out->item_op);
    build->out->item_unit = malloc(most * sizeof *build->out->item_unit);
    if (build->out->item_op == NULL || build->out->item_unit == NULL)
        return qe_error_set(build->error, QE_ERROR_MEMORY, NULL, "no memory for the program of rank %u", build->rank);
    for (uint32_t i = 0; i < build->draft_count; i++) {
        note_phase(build, i);
        QE_TRY(write_draft(build, &build->drafts[i]));
    }
    note_phase(build, build->draft_count);
    return QE_OK;
}

qe_status qe_build_program(qe_build *build) {
    sync_state state;
    qe_status status = QE_OK;
    QE_ASSERT(build->out->program.stream_count <= QE_STREAMS_MAX);
    if (state_init(&state, build) != 0)
        status = qe_error_set(build->error, QE_ERROR_MEMORY, NULL, "no memory to order %u ops", build->draft_count);
    for (uint32_t i = 0; status == QE_OK && i < build->draft_count; i++) status = order_draft(&state, i);
    state_deinit(&state);
    return status == QE_OK ? write_program(build) : status;
}
