/* ledger_graph.c - recordings and what they hold, where a program is judged on its own. What an op of a recording does
 * is kept; it happens when the graph is launched, as part of the launching op. Versions are kept as the distance from
 * what the counter would be by then, so that each launch has versions of its own. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "core/effect.h"
#include "core/ledger_state.h"

enum {
    FIRST_CAPACITY = 16, /* a power of two, as all later sizes */
    ROOM_KEPT = 4096,    /* effects: a graph that is captured in every step takes no memory after its second time */
};

qe_status qe_graph_open(qe_ledger *ledger, qe_error *error_out) {
    if (!ledger->foreign) return QE_OK;
    uint32_t count = 0;
    for (uint32_t i = 0; i < ledger->object_count; i++)
        count += ledger->program->objects[i].kind == QE_OBJECT_GRAPH;
    ledger->graphs = calloc(count > 0 ? count : 1, sizeof *ledger->graphs);
    if (ledger->graphs == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for %u graphs", count);
    for (uint32_t i = 0; i < ledger->object_count; i++)
        if (ledger->program->objects[i].kind == QE_OBJECT_GRAPH) ledger->graphs[ledger->graph_count++].object = i;
    return QE_OK;
}

void qe_graph_close(qe_ledger *ledger) {
    for (uint32_t i = 0; i < ledger->graph_count; i++) free(ledger->graphs[i].sealed.effects);
    for (uint32_t s = 0; s < ledger->stream_count; s++) free(ledger->records[s].effects);
    free(ledger->graphs);
    free(ledger->recorded);
}

static uint32_t graph_index(const qe_ledger *ledger, uint32_t object) {
    uint32_t low = 0, high = ledger->graph_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (ledger->graphs[middle].object < object) low = middle + 1;
        else high = middle;
    }
    QE_ASSERT(low < ledger->graph_count);
    QE_ASSERT(ledger->graphs[low].object == object);
    return low;
}

/* The entry of (recording, space), or the free one where it belongs. Requires: not all are taken. */
static qe_recorded_space *entry_of(const qe_ledger *ledger, uint32_t recording, uint32_t space) {
    uint32_t mask = ledger->recorded_capacity - 1;
    uint64_t hash = ((uint64_t)recording << 32 | space) * 0x9e3779b97f4a7c15u;
    for (uint32_t at = (uint32_t)(hash >> 32) & mask;; at = (at + 1) & mask) {
        qe_recorded_space *entry = &ledger->recorded[at];
        if (entry->recording == 0 || (entry->recording == recording && entry->space == space)) return entry;
    }
}

qe_range_list *qe_graph_list(const qe_ledger *ledger, uint32_t recording, uint32_t space) {
    QE_ASSERT(ledger->recorded_capacity > 0);
    qe_recorded_space *entry = entry_of(ledger, recording, space);
    QE_ASSERT(entry->recording == recording);
    return &entry->list;
}

static qe_status grow_table(qe_ledger *ledger) {
    if (2 * (ledger->recorded_count + 1) <= ledger->recorded_capacity) return QE_OK;
    uint32_t before = ledger->recorded_capacity;
    qe_recorded_space *old = ledger->recorded;
    uint32_t capacity = before > 0 ? before * 2 : FIRST_CAPACITY;
    qe_recorded_space *grown = calloc(capacity, sizeof *grown);
    if (grown == NULL) return QE_ERROR_MEMORY;
    ledger->recorded = grown;
    ledger->recorded_capacity = capacity;
    for (uint32_t i = 0; i < before; i++)
        if (old[i].recording != 0) *entry_of(ledger, old[i].recording, old[i].space) = old[i];
    free(old);
    return QE_OK;
}

qe_status qe_graph_reserve_list(qe_ledger *ledger, uint32_t recording, uint32_t space) {
    QE_TRY(grow_table(ledger));
    qe_recorded_space *entry = entry_of(ledger, recording, space);
    if (entry->recording != 0) return QE_OK;
    int buffer = ledger->program->objects[space].kind == QE_OBJECT_BUFFER;
    QE_TRY(qe_range_list_open(ledger, &entry->list, buffer ? ledger->ranges[space].bytes : 1));
    entry->recording = recording;
    entry->space = space;
    entry->advanced = 0;
    ledger->recorded_count++;
    return QE_OK;
}

/* Recordings end all together as a rule; then the table is empty again. */
static void forget_lists(qe_ledger *ledger) {
    for (uint32_t s = 0; s < ledger->stream_count; s++)
        if (ledger->stream_recording[s] != 0 && ledger->stream_recording[s] != ledger->ended_recording) return;
    for (uint32_t i = 0; i < ledger->recorded_capacity && ledger->recorded_count > 0; i++) {
        if (ledger->recorded[i].recording == 0) continue;
        qe_range_list_close(ledger, &ledger->recorded[i].list);
        ledger->recorded[i] = (qe_recorded_space){0};
        ledger->recorded_count--;
    }
    QE_ASSERT(ledger->recorded_count == 0);
}

/* How far what is recorded has moved an object's counter. */
static uint64_t advanced(const qe_ledger *ledger, uint32_t recording, uint32_t object) {
    if (ledger->recorded_capacity == 0) return 0;
    const qe_recorded_space *entry = entry_of(ledger, recording, object);
    return entry->recording == recording ? entry->advanced : 0;
}

static uint64_t moved_by(const qe_ledger *ledger, uint32_t object) {
    return ledger->state[object].counter - ledger->begin[object].counter;
}

/* Whose counter an effect's version is told from: a cache's weight; a buffer has none. */
static uint32_t version_owner(const qe_ledger *ledger, const qe_effect *effect) {
    const qe_object *object = &ledger->program->objects[effect->object];
    if (object->kind == QE_OBJECT_BUFFER) return QE_NONE;
    return object->kind == QE_OBJECT_CACHE ? object->weight : effect->object;
}

static uint32_t epoch_owner(const qe_ledger *ledger, const qe_effect *effect) {
    const qe_object *object = &ledger->program->objects[effect->object];
    return object->kind == QE_OBJECT_CACHE ? object->scale : QE_NONE;
}

void qe_graph_relative(const qe_ledger *ledger, uint32_t recording, qe_effect *effect) {
    uint32_t version = version_owner(ledger, effect), epoch = epoch_owner(ledger, effect);
    if (version != QE_NONE) effect->version -= moved_by(ledger, version) + advanced(ledger, recording, version);
    if (epoch != QE_NONE) effect->epoch -= moved_by(ledger, epoch) + advanced(ledger, recording, epoch);
}

qe_effect qe_graph_launched(const qe_ledger *ledger, const qe_effect *recorded, uint32_t microbatch) {
    qe_effect effect = *recorded;
    uint32_t version = version_owner(ledger, recorded), epoch = epoch_owner(ledger, recorded);
    qe_object_kind kind = qe_effect_object_kind(effect.kind);
    int has = kind == QE_OBJECT_SLOT || kind == QE_OBJECT_RNG || effect.kind == QE_EFFECT_GRAD_DEPOSIT;
    if (has && effect.microbatch != QE_NONE && microbatch != QE_NONE) effect.microbatch = microbatch;
    if (version != QE_NONE) effect.version += moved_by(ledger, version);
    if (epoch != QE_NONE) effect.epoch += moved_by(ledger, epoch);
    return effect;
}

static uint64_t advance_of(const qe_effect *effect) {
    if (effect->kind == QE_EFFECT_RNG_DRAW) return effect->write ? 0 : effect->end;
    return effect->kind == QE_EFFECT_SCALE_FOLD || effect->kind == QE_EFFECT_SLOT_ACQUIRE ||
           effect->kind == QE_EFFECT_WEIGHT_COMMIT;
}

static void count_copies(qe_ledger *ledger, qe_recorded *record, uint32_t copied) {
    ledger->copied += copied;
    ledger->copied -= record->copied;
    record->copied = copied;
}

static void empty(qe_ledger *ledger, qe_recorded *record) {
    count_copies(ledger, record, 0);
    record->count = 0;
}

qe_status qe_graph_keep(qe_ledger *ledger, uint32_t stream, const qe_effect *effect, int copied) {
    qe_recorded *record = &ledger->records[ledger->stream_origin[stream]];
    int copies = copied && ledger->copied == (uint64_t)QE_GRAPH_COPIES_MAX + ledger->program->effect_count;
    ledger->excess = copies ? QE_EXCESS_COPIES : QE_EXCESS_GRAPH;
    if (copies || record->count == QE_GRAPH_EFFECTS_MAX) return QE_ERROR_LIMIT;
    if (copied) count_copies(ledger, record, record->copied + 1);
    if (record->count == record->capacity) {
        uint32_t capacity = record->capacity > 0 ? 2 * record->capacity : FIRST_CAPACITY;
        qe_effect *grown = realloc(record->effects, (size_t)capacity * sizeof *grown);
        if (grown == NULL) return QE_ERROR_MEMORY;
        record->effects = grown;
        record->capacity = capacity;
    }
    record->effects[record->count++] = *effect;
    if (advance_of(effect) > 0)
        entry_of(ledger, ledger->stream_recording[stream], effect->object)->advanced += advance_of(effect);
    return QE_OK;
}

const qe_recorded *qe_graph_content(const qe_ledger *ledger, uint32_t graph) {
    return &ledger->graphs[graph_index(ledger, graph)].sealed;
}

void qe_graph_await(qe_judgement *judgement) {
    const qe_ledger *ledger = judgement->ledger;
    for (uint32_t i = 0; i < judgement->count && judgement->recording == 0; i++) {
        if (judgement->effects[i].kind != QE_EFFECT_GRAPH_LAUNCH) continue;
        qe_clock_merge(&judgement->clock, &ledger->graphs[graph_index(ledger, judgement->effects[i].object)].launched);
    }
}

/* What was recorded becomes what launches replay. Both keep their room, where it is not a large one. */
static void seal(qe_ledger *ledger, uint32_t stream, uint32_t index) {
    qe_recorded *record = &ledger->records[ledger->stream_origin[stream]];
    qe_recorded before = ledger->graphs[index].sealed;
    ledger->graphs[index].sealed = *record;
    *record = before;
    empty(ledger, record);
    if (record->capacity > ROOM_KEPT) {
        free(record->effects);
        *record = (qe_recorded){0};
    }
    ledger->ended_recording = ledger->stream_recording[stream];
    forget_lists(ledger);
}

void qe_graph_finish(qe_judgement *judgement) {
    qe_ledger *ledger = judgement->ledger;
    uint32_t stream = judgement->item->stream;
    for (uint32_t i = 0; i < judgement->count; i++) {
        const qe_effect *effect = &judgement->effects[i];
        if (qe_effect_object_kind(effect->kind) != QE_OBJECT_GRAPH) continue;
        qe_graph_record *graph = &ledger->graphs[graph_index(ledger, effect->object)];
        int captures = effect->kind == QE_EFFECT_GRAPH_CAPTURE, runs = judgement->recording == 0;
        if (effect->kind == QE_EFFECT_GRAPH_LAUNCH && runs) graph->launched = judgement->clock;
        if (captures && !runs) seal(ledger, stream, graph_index(ledger, effect->object));
        else if (captures) empty(ledger, &graph->sealed); /* handed over whole: nobody told what is in it */
        if (effect->kind == QE_EFFECT_GRAPH_BEGIN && runs) empty(ledger, &ledger->records[stream]);
    }
}
