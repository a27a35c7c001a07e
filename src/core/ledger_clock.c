/* ledger_clock.c - vector clocks: what is ordered before what. One entry per stream; an event freezes the clock of
 * its last record; a wait takes the pointwise maximum; a sync tells the host of a rank, and whatever that host submits
 * later is ordered after what it knew. A stream whose role is HOST is the host itself. A stream with CUDA's implicit
 * order takes what its partners were given before each of its items. */
#include <string.h>

#include "base/assert.h"
#include "core/ledger_state.h"

QE_STATIC_ASSERT(QE_PROGRAM_STREAMS_MAX <= 64, "a bit per stream");

void qe_clock_merge(qe_clock *into, const qe_clock *from) {
    for (int i = 0; i < QE_PROGRAM_STREAMS_MAX; i++)
        if (from->at[i] > into->at[i]) into->at[i] = from->at[i];
}

static uint32_t *event_clock(const qe_ledger *ledger, uint32_t event) {
    return &ledger->event_clocks[(size_t)event * ledger->stream_count];
}

static void merge_event(const qe_ledger *ledger, uint32_t event, qe_clock *into) {
    const uint32_t *from = event_clock(ledger, event);
    for (uint32_t i = 0; i < ledger->stream_count; i++)
        if (from[i] > into->at[i]) into->at[i] = from[i];
}

static uint32_t rank_of(const qe_ledger *ledger, uint32_t stream) { return ledger->program->streams[stream].rank; }

/* Streams that are ordered with this one by themselves. */
static uint64_t partners_of(const qe_program *program, uint32_t stream) {
    const qe_stream_info *one = &program->streams[stream];
    uint64_t partners = 0;
    for (uint32_t s = 0; s < program->stream_count && one->order != QE_STREAM_SEPARATE; s++) {
        const qe_stream_info *other = &program->streams[s];
        int legacy = one->order == QE_STREAM_LEGACY || other->order == QE_STREAM_LEGACY;
        if (s != stream && legacy && other->order != QE_STREAM_SEPARATE && other->rank == one->rank)
            partners |= (uint64_t)1 << s;
    }
    return partners;
}

void qe_clock_reset(qe_ledger *ledger) {
    memset(ledger->stream_clock, 0, sizeof ledger->stream_clock);
    memset(ledger->host_clock, 0, sizeof ledger->host_clock);
    memset(ledger->event_clocks, 0, (size_t)ledger->event_count * ledger->stream_count * sizeof(uint32_t));
    memset(ledger->event_recorded, 0, ledger->event_count);
    memset(ledger->event_recording, 0, ledger->event_count * sizeof *ledger->event_recording);
    memset(ledger->stream_recording, 0, sizeof ledger->stream_recording);
    for (uint32_t s = 0; s < ledger->stream_count; s++) ledger->partners[s] = partners_of(ledger->program, s);
}

const qe_clock *qe_clock_given(const qe_ledger *ledger, uint32_t stream) {
    int records = ledger->stream_recording[stream] != 0;
    return records ? &ledger->stream_before[stream] : &ledger->stream_clock[stream];
}

qe_clock qe_clock_next(const qe_ledger *ledger, uint32_t stream) {
    QE_ASSERT(stream < ledger->stream_count);
    qe_clock clock = ledger->stream_clock[stream];
    qe_clock_merge(&clock, &ledger->host_clock[rank_of(ledger, stream)]);
    for (uint64_t left = ledger->partners[stream]; left != 0; left &= left - 1)
        qe_clock_merge(&clock, qe_clock_given(ledger, (uint32_t)__builtin_ctzll(left)));
    return clock;
}

int qe_clock_finds_unrecorded(const qe_ledger *ledger, const qe_item *item) {
    if (item->kind != QE_ITEM_WAIT && item->kind != QE_ITEM_SYNC_EVENT) return 0;
    QE_ASSERT(item->event < ledger->event_count);
    return !ledger->event_recorded[item->event];
}

static int goes_on(const qe_ledger *ledger, uint32_t recording) {
    for (uint32_t s = 0; s < ledger->stream_count; s++)
        if (ledger->stream_recording[s] == recording) return 1;
    return 0;
}

/* A stream of the rank that records, or QE_NONE. */
static uint32_t recording_of_rank(const qe_ledger *ledger, uint32_t rank) {
    for (uint32_t s = 0; s < ledger->stream_count; s++)
        if (ledger->stream_recording[s] != 0 && rank_of(ledger, s) == rank) return s;
    return QE_NONE;
}

/* The legacy stream would wait for a stream that only records: which one, or QE_NONE. */
static uint32_t recording_disturbed(const qe_ledger *ledger, uint32_t stream) {
    if (ledger->program->streams[stream].order != QE_STREAM_LEGACY) return QE_NONE;
    for (uint64_t left = ledger->partners[stream]; left != 0; left &= left - 1)
        if (ledger->stream_recording[__builtin_ctzll(left)] != 0) return (uint32_t)__builtin_ctzll(left);
    return QE_NONE;
}

int qe_clock_can_record(const qe_ledger *ledger, uint32_t stream) {
    const qe_stream_info *info = &ledger->program->streams[stream];
    return info->role != QE_STREAM_HOST && info->order != QE_STREAM_LEGACY;
}

/* Is the event of a recording that the stream neither takes part in nor can join? Or the stream of one, and not it? */
static int is_foreign_event(const qe_ledger *ledger, uint32_t stream, uint32_t event) {
    uint32_t recording = ledger->stream_recording[stream], of_event = ledger->event_recording[event];
    if (recording != 0 || of_event == 0) return of_event != recording;
    return !goes_on(ledger, of_event) || !qe_clock_can_record(ledger, stream);
}

int qe_clock_leaves_recording(const qe_ledger *ledger, const qe_item *item, qe_access *across_out) {
    uint32_t other = QE_NONE;
    int of_event = 0;
    *across_out = (qe_access){0};
    switch ((qe_item_kind)item->kind) {
    case QE_ITEM_WAIT:
        other = recording_disturbed(ledger, item->stream);
        of_event = is_foreign_event(ledger, item->stream, item->event);
        break;
    case QE_ITEM_SYNC_EVENT: of_event = ledger->event_recording[item->event] != 0; break;
    case QE_ITEM_SYNC_STREAM:
        other = recording_disturbed(ledger, item->stream);
        if (ledger->stream_recording[item->stream] != 0) other = item->stream;
        break;
    case QE_ITEM_SYNC_DEVICE: other = recording_of_rank(ledger, item->rank); break;
    case QE_ITEM_OP:
    case QE_ITEM_RECORD: other = recording_disturbed(ledger, item->stream); break;
    case QE_ITEM_STEP_BEGIN:
    case QE_ITEM_STEP_END:
    case QE_ITEM_DESTROY:
    case QE_ITEM_KINDS: break;
    }
    if (of_event) *across_out = (qe_access){1, ledger->event_item[item->event], item->stream};
    else if (other != QE_NONE) *across_out = ledger->stream_last[other];
    return of_event || other != QE_NONE;
}

static void begin_recording(qe_ledger *ledger, uint32_t stream, uint32_t recording, uint32_t origin) {
    ledger->stream_recording[stream] = recording;
    ledger->stream_origin[stream] = origin;
    ledger->stream_before[stream] = ledger->stream_clock[stream];
}

/* Whoever waits for an event of a recording that still goes on takes part in it. */
static void join_recording(qe_ledger *ledger, const qe_item *wait) {
    uint32_t recording = ledger->event_recording[wait->event];
    if (recording == 0 || ledger->stream_recording[wait->stream] == recording || !goes_on(ledger, recording)) return;
    for (uint32_t s = 0; s < ledger->stream_count; s++)
        if (ledger->stream_recording[s] == recording)
            begin_recording(ledger, wait->stream, recording, ledger->stream_origin[s]);
}

/* What was recorded did not run. Where a program is judged on its own, a stream knows after a recording what it knew
 * before it; a ledger's launches are told by the ops that they stand for, so there the order of these is kept. */
static void end_recording(qe_ledger *ledger, uint32_t stream) {
    ledger->stream_recording[stream] = 0;
    if (!ledger->foreign) return;
    uint32_t own = ledger->stream_clock[stream].at[stream];
    ledger->stream_clock[stream] = ledger->stream_before[stream];
    ledger->stream_clock[stream].at[stream] = own;
}

void qe_clock_recordings(qe_ledger *ledger, uint32_t stream, const qe_effect *effect) {
    if (effect->kind == QE_EFFECT_GRAPH_BEGIN) begin_recording(ledger, stream, ++ledger->recordings, stream);
    uint32_t ended = ledger->stream_recording[stream];
    if (effect->kind != QE_EFFECT_GRAPH_CAPTURE || ended == 0) return;
    for (uint32_t s = 0; s < ledger->stream_count; s++)
        if (ledger->stream_recording[s] == ended) end_recording(ledger, s);
}

uint32_t qe_clock_unjoined(const qe_ledger *ledger, uint32_t stream, const qe_clock *clock) {
    uint32_t recording = ledger->stream_recording[stream];
    if (recording != 0 && ledger->stream_origin[stream] != stream) return ledger->stream_origin[stream];
    for (uint32_t s = 0; recording != 0 && s < ledger->stream_count; s++) {
        if (s == stream || ledger->stream_recording[s] != recording) continue;
        uint32_t own = ledger->stream_clock[s].at[s];
        if (own > ledger->stream_before[s].at[s] && clock->at[s] < own) return s;
    }
    return QE_NONE;
}

static void sync_device(qe_ledger *ledger, uint32_t rank) {
    for (uint32_t i = 0; i < ledger->stream_count; i++)
        if (rank_of(ledger, i) == rank) qe_clock_merge(&ledger->host_clock[rank], &ledger->stream_clock[i]);
}

/* As for an event that is recorded there now: of CUDA's default streams it also awaits what the stream waits for. */
static void sync_stream(qe_ledger *ledger, uint32_t stream) {
    qe_clock clock = qe_clock_next(ledger, stream);
    qe_clock_merge(&ledger->host_clock[rank_of(ledger, stream)], &clock);
}

static void record(qe_ledger *ledger, const qe_item *item, uint32_t index) {
    QE_ASSERT(item->event < ledger->event_count);
    qe_clock clock = qe_clock_next(ledger, item->stream);
    memcpy(event_clock(ledger, item->event), clock.at, ledger->stream_count * sizeof(uint32_t));
    ledger->event_recorded[item->event] = 1;
    ledger->event_item[item->event] = index;
    ledger->event_recording[item->event] = ledger->stream_recording[item->stream];
    ledger->stream_clock[item->stream] = clock; /* a record is work, too: it comes after what its host knew */
}

static void wait(qe_ledger *ledger, const qe_item *item) {
    QE_ASSERT(ledger->event_recorded[item->event]);
    join_recording(ledger, item);
    qe_clock clock = qe_clock_next(ledger, item->stream);
    merge_event(ledger, item->event, &clock);
    ledger->stream_clock[item->stream] = clock;
    if (ledger->program->streams[item->stream].role == QE_STREAM_HOST)
        ledger->host_clock[rank_of(ledger, item->stream)] = clock;
}

void qe_clock_apply(qe_ledger *ledger, const qe_item *item, uint32_t index) {
    switch ((qe_item_kind)item->kind) {
    case QE_ITEM_RECORD: record(ledger, item, index); break;
    case QE_ITEM_WAIT: wait(ledger, item); break;
    case QE_ITEM_SYNC_EVENT:
        QE_ASSERT(ledger->event_recorded[item->event]);
        merge_event(ledger, item->event, &ledger->host_clock[item->rank]);
        break;
    case QE_ITEM_SYNC_STREAM: sync_stream(ledger, item->stream); break;
    case QE_ITEM_SYNC_DEVICE: sync_device(ledger, item->rank); break;
    case QE_ITEM_DESTROY:
        ledger->event_recorded[item->event] = 0;
        ledger->event_recording[item->event] = 0;
        break;
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
    if (ledger->program->streams[stream].role == QE_STREAM_HOST) ledger->host_clock[rank_of(ledger, stream)] = *clock;
}
