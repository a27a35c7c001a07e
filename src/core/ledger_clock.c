/* ledger_clock.c - vector clocks: what is ordered before what. One entry per stream; an event freezes the clock of
 * its last record; a wait takes the pointwise maximum; a sync tells the host, and whatever the host submits later
 * is ordered after what the host knew. A stream whose role is HOST is the host itself. */
#include <string.h>

#include "base/assert.h"
#include "core/ledger_state.h"

void qe_clock_merge(qe_clock *into, const qe_clock *from) {
    for (int i = 0; i < QE_STREAMS_MAX; i++)
        if (from->at[i] > into->at[i]) into->at[i] = from->at[i];
}

void qe_clock_reset(qe_ledger *ledger) {
    memset(ledger->stream_clock, 0, sizeof ledger->stream_clock);
    memset(&ledger->host_clock, 0, sizeof ledger->host_clock);
    for (uint32_t i = 0; i < ledger->event_count; i++) {
        memset(&ledger->event_clock[i], 0, sizeof ledger->event_clock[i]);
        ledger->event_recorded[i] = 0;
        ledger->event_recording[i] = 0;
    }
    memset(ledger->stream_recording, 0, sizeof ledger->stream_recording);
}

qe_clock qe_clock_next(const qe_ledger *ledger, uint32_t stream) {
    QE_ASSERT(stream < ledger->stream_count);
    qe_clock clock = ledger->stream_clock[stream];
    qe_clock_merge(&clock, &ledger->host_clock);
    return clock;
}

int qe_clock_finds_unrecorded(const qe_ledger *ledger, const qe_item *item) {
    if (item->kind != QE_ITEM_WAIT && item->kind != QE_ITEM_SYNC_EVENT) return 0;
    QE_ASSERT(item->event < ledger->event_count);
    return !ledger->event_recorded[item->event];
}

int qe_clock_leaves_recording(const qe_ledger *ledger, const qe_item *item) {
    if (item->kind != QE_ITEM_WAIT) return 0;
    uint32_t recording = ledger->stream_recording[item->stream];
    return recording != 0 && ledger->event_recording[item->event] != recording;
}

/* Whoever waits for an event of a recording that still goes on takes part in it. */
static void join_recording(qe_ledger *ledger, const qe_item *wait) {
    uint32_t recording = ledger->event_recording[wait->event];
    for (uint32_t s = 0; recording != 0 && s < ledger->stream_count; s++)
        if (ledger->stream_recording[s] == recording) ledger->stream_recording[wait->stream] = recording;
}

void qe_clock_recordings(qe_ledger *ledger, uint32_t stream, const qe_effect *effect) {
    if (effect->kind == QE_EFFECT_GRAPH_BEGIN) ledger->stream_recording[stream] = ++ledger->recordings;
    uint32_t ended = ledger->stream_recording[stream];
    if (effect->kind != QE_EFFECT_GRAPH_CAPTURE || ended == 0) return;
    for (uint32_t s = 0; s < ledger->stream_count; s++)
        if (ledger->stream_recording[s] == ended) ledger->stream_recording[s] = 0;
}

static void sync_device(qe_ledger *ledger) {
    for (uint32_t i = 0; i < ledger->stream_count; i++) qe_clock_merge(&ledger->host_clock, &ledger->stream_clock[i]);
}

void qe_clock_apply(qe_ledger *ledger, const qe_item *item) {
    switch ((qe_item_kind)item->kind) {
    case QE_ITEM_RECORD:
        QE_ASSERT(item->event < ledger->event_count);
        ledger->event_clock[item->event] = qe_clock_next(ledger, item->stream);
        ledger->event_recorded[item->event] = 1;
        ledger->event_recording[item->event] = ledger->stream_recording[item->stream];
        break;
    case QE_ITEM_WAIT: {
        QE_ASSERT(ledger->event_recorded[item->event]);
        qe_clock clock = qe_clock_next(ledger, item->stream);
        qe_clock_merge(&clock, &ledger->event_clock[item->event]);
        ledger->stream_clock[item->stream] = clock;
        join_recording(ledger, item);
        if (ledger->program->streams[item->stream].role == QE_STREAM_HOST) ledger->host_clock = clock;
        break;
    }
    case QE_ITEM_SYNC_EVENT:
        QE_ASSERT(ledger->event_recorded[item->event]);
        qe_clock_merge(&ledger->host_clock, &ledger->event_clock[item->event]);
        break;
    case QE_ITEM_SYNC_STREAM:
        QE_ASSERT(item->stream < ledger->stream_count);
        qe_clock_merge(&ledger->host_clock, &ledger->stream_clock[item->stream]);
        break;
    case QE_ITEM_SYNC_DEVICE: sync_device(ledger); break;
    case QE_ITEM_OP:
    case QE_ITEM_STEP_BEGIN:
    case QE_ITEM_STEP_END:
    case QE_ITEM_KINDS: break;
    }
}

void qe_clock_run(qe_ledger *ledger, uint32_t stream, const qe_clock *clock) {
    QE_ASSERT(stream < ledger->stream_count);
    QE_ASSERT(clock->at[stream] > ledger->stream_clock[stream].at[stream]);
    ledger->stream_clock[stream] = *clock;
    if (ledger->program->streams[stream].role == QE_STREAM_HOST) ledger->host_clock = *clock;
}
