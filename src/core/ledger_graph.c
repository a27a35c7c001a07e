/* ledger_graph.c - recordings and their launches, where a program is judged on its own. What an op of a recording does
 * to buffers is judged against the recording alone and kept; it happens when the graph is launched, as one op of the
 * launching stream. Effects on versioned objects stay where they stand: a launch names its own versions. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "core/effect.h"
#include "core/ledger_state.h"

enum { FIRST_CAPACITY = 16 }; /* a power of two, as all later sizes */

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
    for (uint32_t i = 0; i < ledger->graph_count; i++) {
        free(ledger->graphs[i].sealed);
        free(ledger->graphs[i].recorded);
    }
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
    QE_TRY(qe_range_list_open(ledger, &entry->list, ledger->ranges[space].bytes));
    entry->recording = recording;
    entry->space = space;
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

static qe_status reserve_effects(qe_effect **effects, uint32_t *capacity, uint32_t wanted) {
    if (wanted <= *capacity) return QE_OK;
    uint32_t more = *capacity > 0 ? *capacity : FIRST_CAPACITY;
    while (more < wanted) more *= 2;
    qe_effect *grown = realloc(*effects, (size_t)more * sizeof *grown);
    if (grown == NULL) return QE_ERROR_MEMORY;
    *effects = grown;
    *capacity = more;
    return QE_OK;
}

qe_status qe_graph_prepare(qe_judgement *judgement) {
    qe_ledger *ledger = judgement->ledger;
    for (uint32_t i = 0; i < judgement->count; i++) {
        if (judgement->effects[i].kind != QE_EFFECT_GRAPH_LAUNCH) continue;
        qe_clock_merge(&judgement->clock, &ledger->graphs[graph_index(ledger, judgement->effects[i].object)].launched);
    }
    if (judgement->recording == 0) return QE_OK;
    qe_graph_record *graph = &ledger->graphs[ledger->stream_graph[judgement->item->stream]];
    uint32_t more = judgement->count;
    for (uint32_t i = 0; i < judgement->count; i++)
        if (judgement->effects[i].kind == QE_EFFECT_GRAPH_LAUNCH)
            more += ledger->graphs[graph_index(ledger, judgement->effects[i].object)].sealed_count;
    if (more > QE_PROGRAM_MAX - graph->recorded_count) return QE_ERROR_LIMIT;
    return reserve_effects(&graph->recorded, &graph->recorded_capacity, graph->recorded_count + more);
}

/* One recorded effect happens now. */
static qe_status replay_effect(qe_judgement *judgement, const qe_effect *effect) {
    qe_ledger *ledger = judgement->ledger;
    qe_judgement one = *judgement;
    one.effects = effect;
    one.count = 1;
    one.bad = one.unordered = one.reused = one.recording = one.saved_count = 0;
    QE_TRY(qe_range_reserve(ledger, effect, 1, 0));
    qe_finding findings[QE_FINDINGS_MAX];
    uint32_t count = qe_state_check(ledger, effect, findings);
    for (uint32_t i = 0; i < count; i++) qe_judgement_report(&one, 0, &findings[i], &ledger->writes[effect->object]);
    if (count > 0) return QE_OK;
    qe_range_check(&one, 0);
    if (one.unordered) qe_range_apply_unordered(ledger, &one, 0);
    if (!one.bad || (one.reused && !one.unordered)) qe_range_apply(ledger, &one, 0);
    return QE_OK;
}

qe_status qe_graph_replay(qe_judgement *judgement) {
    const qe_ledger *ledger = judgement->ledger;
    for (uint32_t i = 0; i < judgement->count; i++) {
        const qe_effect *launch = &judgement->effects[i];
        if (launch->kind != QE_EFFECT_GRAPH_LAUNCH || judgement->recording != 0) continue;
        const qe_graph_record *graph = &ledger->graphs[graph_index(ledger, launch->object)];
        for (uint32_t k = 0; k < graph->sealed_count; k++) QE_TRY(replay_effect(judgement, &graph->sealed[k]));
    }
    return QE_OK;
}

static void keep_effect(qe_graph_record *graph, const qe_effect *effect) {
    if (effect->kind != QE_EFFECT_BUFFER_READ && effect->kind != QE_EFFECT_BUFFER_WRITE) return;
    QE_ASSERT(graph->recorded_count < graph->recorded_capacity);
    graph->recorded[graph->recorded_count++] = *effect;
}

/* A launch that is recorded is a graph within the graph. */
static void keep_recorded(qe_judgement *judgement) {
    qe_ledger *ledger = judgement->ledger;
    qe_graph_record *graph = &ledger->graphs[ledger->stream_graph[judgement->item->stream]];
    for (uint32_t i = 0; i < judgement->count; i++) {
        const qe_effect *effect = &judgement->effects[i];
        keep_effect(graph, effect);
        if (effect->kind != QE_EFFECT_GRAPH_LAUNCH) continue;
        const qe_graph_record *child = &ledger->graphs[graph_index(ledger, effect->object)];
        for (uint32_t k = 0; k < child->sealed_count; k++) keep_effect(graph, &child->sealed[k]);
    }
}

/* What was recorded becomes what launches replay. */
static void seal(qe_ledger *ledger, uint32_t stream, uint32_t index) {
    qe_graph_record *graph = &ledger->graphs[index];
    qe_graph_record *recorded = &ledger->graphs[ledger->stream_graph[stream]];
    qe_effect *effects = graph->sealed;
    uint32_t capacity = graph->sealed_capacity;
    graph->sealed = recorded->recorded;
    graph->sealed_count = recorded->recorded_count;
    graph->sealed_capacity = recorded->recorded_capacity;
    recorded->recorded = effects;
    recorded->recorded_capacity = capacity;
    recorded->recorded_count = 0;
    ledger->ended_recording = ledger->stream_recording[stream];
    forget_lists(ledger);
}

void qe_graph_finish(qe_judgement *judgement) {
    qe_ledger *ledger = judgement->ledger;
    uint32_t stream = judgement->item->stream;
    if (judgement->recording != 0) keep_recorded(judgement);
    for (uint32_t i = 0; i < judgement->count; i++) {
        const qe_effect *effect = &judgement->effects[i];
        if (qe_effect_object_kind(effect->kind) != QE_OBJECT_GRAPH) continue;
        uint32_t graph = graph_index(ledger, effect->object);
        if (effect->kind == QE_EFFECT_GRAPH_LAUNCH) ledger->graphs[graph].launched = judgement->clock;
        int captures = effect->kind == QE_EFFECT_GRAPH_CAPTURE;
        if (captures && judgement->recording != 0) seal(ledger, stream, graph);
        else if (captures) ledger->graphs[graph].sealed_count = 0; /* handed over whole: nobody told what is in it */
        if (effect->kind != QE_EFFECT_GRAPH_BEGIN) continue;
        ledger->stream_graph[stream] = graph;
        ledger->graphs[graph].recorded_count = 0;
    }
}
