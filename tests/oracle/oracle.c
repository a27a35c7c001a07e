/* oracle.c - goes through a program item by item, and stops at the first that breaks a rule. There are no counters, no
 * clocks and no ranges: every byte at which somebody's range begins or ends is asked for itself. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "oracle/oracle_inside.h"

/* ---- Ops ---- */

static void *grow(void *array, uint32_t count, uint32_t *capacity, size_t bytes) {
    if (count < *capacity) return array;
    *capacity = *capacity > 0 ? 2 * *capacity : 64;
    void *grown = realloc(array, *capacity * bytes);
    if (grown == NULL) {
        fprintf(stderr, "no memory for the oracle\n");
        exit(1);
    }
    return grown;
}

static void add_point(oracle *o, place p) {
    for (uint32_t i = 0; i < o->point_count; i++)
        if (o->points[i].space == p.space && o->points[i].at == p.at) return;
    o->points = grow(o->points, o->point_count, &o->points_max, sizeof *o->points);
    o->points[o->point_count++] = p;
}

static void add_points(oracle *o, const qe_effect *e) {
    const qe_object *b = object_of(o, e->object);
    if (b->kind != QE_OBJECT_BUFFER || !oracle_is_in_bounds(e, b->bytes)) return;
    uint64_t base = is_placed(b) ? b->address : 0;
    for (uint32_t row = 0; row < rows_of(e); row++) {
        uint64_t by = base + row * (row > 0 ? e->pitch : 0);
        add_point(o, (place){is_placed(b) ? ADDRESSES : e->object, e->begin + by});
        add_point(o, (place){is_placed(b) ? ADDRESSES : e->object, e->end + by});
    }
}

static deed *add_deed(oracle *o, const qe_effect *e, int item, int recording) {
    o->deeds = grow(o->deeds, o->deed_count, &o->deeds_max, sizeof *o->deeds);
    deed *d = &o->deeds[o->deed_count++];
    *d = (deed){.effect = *e, .item = item, .stream = (int)item_of(o, item)->stream, .step = o->step};
    d->recording = recording;
    return d;
}

/* The streams that pledged since the last drop, and what each was given by now. */
static void keep_pledges(const oracle *o, deed *drop) {
    memset(drop->given, -1, sizeof drop->given);
    for (const deed *d = o->deeds; d < drop; d++) {
        if (d->recording != 0 || d->effect.object != drop->effect.object) continue;
        if (d->effect.kind == QE_EFFECT_BUFFER_DROP) memset(drop->given, -1, sizeof drop->given);
        if (d->effect.kind == QE_EFFECT_BUFFER_PLEDGE)
            drop->given[d->stream] = oracle_last_on(o, d->stream, drop->item, 0);
    }
}

/* An effect happens now. What is refused does not; the order of an op on a versioned object is asked all the same. */
static void happen(oracle *o, const qe_effect *e, int item) {
    int buffer = object_of(o, e->object)->kind == QE_OBJECT_BUFFER;
    if (!oracle_is_refused(o, e->object)) oracle_judge_state(o, e);
    int refused = oracle_is_refused(o, e->object), raced = 0, wrong = 0;
    if (refused && buffer) return;
    for (uint32_t i = 0; i < o->point_count; i++) {
        if (!oracle_covers(o, e, o->points[i])) continue;
        int rule = buffer ? oracle_judge_byte(o, e, o->points[i]) : QE_RULE_NONE;
        if (rule != QE_RULE_NONE) oracle_note(o, rule, e->object, 0);
        wrong |= rule != QE_RULE_NONE;
        if (oracle_touches(e)) raced |= oracle_judge_order(o, e, item, 0, o->points[i]);
    }
    if (refused) return;
    deed *d = add_deed(o, e, item, 0);
    d->unordered = (raced & RACED) || (wrong && raced == 0);
    d->hollow = wrong && raced == 0;
    d->takes_over = raced == RACED_BEFORE;
    if (e->kind == QE_EFFECT_BUFFER_DROP) keep_pledges(o, d);
}

/* An effect is recorded: only its range, and its order among what is recorded with it, are asked. */
static void keep(oracle *o, const qe_effect *e, int item, int recording) {
    int buffer = object_of(o, e->object)->kind == QE_OBJECT_BUFFER;
    if (buffer && !oracle_is_refused(o, e->object)) oracle_judge_range(o, e);
    if (oracle_is_refused(o, e->object)) return;
    int raced = 0;
    for (uint32_t i = 0; i < o->point_count && oracle_touches(e); i++)
        if (oracle_covers(o, e, o->points[i])) raced |= oracle_judge_order(o, e, item, recording, o->points[i]);
    add_deed(o, e, item, recording)->unordered = raced;
}

/* The recording that a graph holds; 0: nobody told what is in it. */
static int content_of(const oracle *o, uint32_t graph, int item) {
    int content = 0;
    for (uint32_t i = 0; i < o->deed_count && o->deeds[i].item < item; i++)
        if (o->deeds[i].effect.kind == QE_EFFECT_GRAPH_CAPTURE && o->deeds[i].effect.object == graph)
            content = o->deeds[i].sealed;
    return content;
}

/* Everything that was recorded happens, in the order of the recording; or is recorded again, in another one. */
static void replay(oracle *o, const qe_effect *launch, int item, int recording) {
    int content = content_of(o, launch->object, item);
    uint32_t stop = o->deed_count;
    for (uint32_t i = 0; i < stop && content != 0; i++) {
        if (o->deeds[i].recording != content) continue;
        qe_effect e = o->deeds[i].effect;
        if (recording != 0) {
            keep(o, &e, item, recording);
            continue;
        }
        e = oracle_launched(o, e, item_of(o, item)->microbatch);
        happen(o, &e, item);
    }
}

static int is_graphs(const oracle *o, const qe_effect *e) { return object_of(o, e->object)->kind == QE_OBJECT_GRAPH; }

/* A recording is begun on a stream that records nothing and that CUDA can record. */
static void judge_begin(oracle *o, const qe_effect *e, int stream) {
    const qe_stream_info *info = stream_of(o, stream);
    if (o->recording[stream] != 0 || info->role == QE_STREAM_HOST || info->order == QE_STREAM_LEGACY)
        oracle_note(o, QE_RULE_SYNC_CAPTURE, e->object, 0);
}

/* Recordings are numbered by the op that began them, and which of its begins that was. */
static int begun_by(int recording) { return (recording - 1) / QE_EFFECTS_MAX; }

/* It is ended where it began, behind every op that is part of it. */
static void judge_joined(oracle *o, const qe_effect *e, int item, int recording) {
    int joined = item_of(o, item)->stream == item_of(o, begun_by(recording))->stream;
    for (int i = 0; i < item; i++)
        if (item_of(o, i)->kind == QE_ITEM_OP && o->part_of[i] == recording && !is_before(o, i, item)) joined = 0;
    if (!joined) oracle_note(o, QE_RULE_GRAPH_UNJOINED, e->object, 0);
}

static void judge_effect(oracle *o, const qe_effect *relative, int item, int recording) {
    qe_effect e = oracle_absolute(o, *relative);
    if (recording != 0 && !is_graphs(o, &e)) {
        e = oracle_recorded(o, e, recording);
        keep(o, &e, item, recording);
        return;
    }
    if (e.kind == QE_EFFECT_GRAPH_BEGIN) judge_begin(o, &e, (int)item_of(o, item)->stream);
    if (e.kind == QE_EFFECT_GRAPH_CAPTURE && recording != 0) judge_joined(o, &e, item, recording);
    happen(o, &e, item);
    if (e.kind == QE_EFFECT_GRAPH_LAUNCH && !oracle_is_refused(o, e.object)) replay(o, &e, item, recording);
}

/* While a blocking stream records, CUDA's default stream is not used. */
static int disturbs_recording(const oracle *o, int stream) {
    if (stream_of(o, stream)->order != QE_STREAM_LEGACY) return 0;
    for (int t = 0; t < (int)o->program->stream_count; t++)
        if (oracle_are_related(o, stream, t) && o->recording[t] != 0) return 1;
    return 0;
}

static void end_recording(oracle *o, int recording) {
    for (uint32_t s = 0; s < o->program->stream_count; s++)
        if (o->recording[s] == recording) o->recording[s] = 0;
}

/* Launches of one graph follow each other by themselves. */
static void add_launch_edges(oracle *o, const qe_effect *e, int item) {
    for (uint32_t i = 0; i < o->deed_count; i++) {
        const deed *d = &o->deeds[i];
        if (d->effect.kind == QE_EFFECT_GRAPH_LAUNCH && d->effect.object == e->object && o->part_of[d->item] == 0)
            oracle_add_edge(o, d->item, item);
    }
}

static void judge_op(oracle *o, int item) {
    const qe_item *op = item_of(o, item);
    int recording = o->part_of[item], begun = 0;
    const qe_effect *effects = &o->program->effects[op->first_effect];
    oracle_add_stream_edges(o, item);
    for (int i = 0; i < op->effect_count; i++) add_points(o, &effects[i]);
    for (int i = 0; i < op->effect_count && recording == 0; i++)
        if (effects[i].kind == QE_EFFECT_GRAPH_LAUNCH) add_launch_edges(o, &effects[i], item);
    if (disturbs_recording(o, (int)op->stream)) oracle_note(o, QE_RULE_SYNC_CAPTURE, QE_NONE, 0);
    for (int i = 0; i < op->effect_count; i++) judge_effect(o, &effects[i], item, recording);
    for (uint32_t i = 0; i < o->deed_count; i++) {
        deed *d = &o->deeds[i];
        if (d->item != item) continue;
        if (d->effect.kind == QE_EFFECT_GRAPH_BEGIN) o->recording[op->stream] = item * QE_EFFECTS_MAX + ++begun;
        if (d->effect.kind != QE_EFFECT_GRAPH_CAPTURE) continue;
        d->sealed = o->recording[op->stream];
        if (d->sealed != 0) end_recording(o, d->sealed);
    }
}

/* ---- Other items ---- */

static int goes_on(const oracle *o, int recording) {
    for (uint32_t s = 0; s < o->program->stream_count; s++)
        if (o->recording[s] == recording) return 1;
    return 0;
}

static void judge_wait(oracle *o, int item) {
    const qe_item *wait = item_of(o, item);
    const qe_stream_info *stream = stream_of(o, (int)wait->stream);
    int record = oracle_record_of(o, wait->event, item);
    if (record < 0) {
        oracle_note(o, QE_RULE_SYNC_EVENT, QE_NONE, 0);
        return;
    }
    int own = o->recording[wait->stream], of_event = o->part_of[record];
    int can_join = goes_on(o, of_event) && stream->role != QE_STREAM_HOST && stream->order != QE_STREAM_LEGACY;
    if (own != 0 ? of_event != own : of_event != 0 && !can_join) oracle_note(o, QE_RULE_SYNC_CAPTURE, QE_NONE, 0);
    if (disturbs_recording(o, (int)wait->stream)) oracle_note(o, QE_RULE_SYNC_CAPTURE, QE_NONE, 0);
    if (own == 0) o->recording[wait->stream] = o->part_of[item] = of_event; /* it takes part from here on */
    oracle_add_stream_edges(o, item);
    oracle_add_edge(o, record, item);
}

static void judge_record(oracle *o, int item) {
    if (disturbs_recording(o, (int)item_of(o, item)->stream)) oracle_note(o, QE_RULE_SYNC_CAPTURE, QE_NONE, 0);
    oracle_add_stream_edges(o, item);
}

static void judge_sync(oracle *o, int item) {
    const qe_item *sync = item_of(o, item);
    int rank = sync->kind == QE_ITEM_SYNC_STREAM ? stream_of(o, (int)sync->stream)->rank : sync->rank;
    int record = sync->kind == QE_ITEM_SYNC_EVENT ? oracle_record_of(o, sync->event, item) : -1;
    if (sync->kind == QE_ITEM_SYNC_EVENT && record < 0) {
        oracle_note(o, QE_RULE_SYNC_EVENT, QE_NONE, 0);
        return;
    }
    if (record >= 0 && o->part_of[record] != 0) oracle_note(o, QE_RULE_SYNC_CAPTURE, QE_NONE, 0);
    oracle_add_edge(o, oracle_last_of_host(o, rank, item), item);
    oracle_add_edge(o, record, item);
    for (int s = 0; s < (int)o->program->stream_count; s++) {
        int device = sync->kind == QE_ITEM_SYNC_DEVICE && stream_of(o, s)->rank == rank;
        int of_stream = s == (int)sync->stream || oracle_are_related(o, s, (int)sync->stream);
        if (!device && (sync->kind != QE_ITEM_SYNC_STREAM || !of_stream)) continue;
        if (o->recording[s] != 0) oracle_note(o, QE_RULE_SYNC_CAPTURE, QE_NONE, 0);
        oracle_add_edge(o, oracle_last_on(o, s, item, 0), item);
    }
}

const oracle_verdict *oracle_next(oracle *o) {
    int item = (int)o->count;
    const qe_item *x = item_of(o, item);
    o->verdict.rule = QE_RULE_NONE;
    o->verdict.count = 0;
    memset(row_of(o, item), 0, o->items_max);
    o->part_of[item] = is_on_stream(x) ? o->recording[x->stream] : 0;
    switch ((qe_item_kind)x->kind) {
    case QE_ITEM_OP: judge_op(o, item); break;
    case QE_ITEM_RECORD: judge_record(o, item); break;
    case QE_ITEM_WAIT: judge_wait(o, item); break;
    case QE_ITEM_SYNC_EVENT:
    case QE_ITEM_SYNC_STREAM:
    case QE_ITEM_SYNC_DEVICE: judge_sync(o, item); break;
    case QE_ITEM_STEP_END: oracle_judge_end(o); /* fall through */
    case QE_ITEM_STEP_BEGIN: o->step++; break;
    case QE_ITEM_DESTROY:
    case QE_ITEM_KINDS: break;
    }
    o->count++;
    return &o->verdict;
}

/* ---- From outside ---- */

static void add_object_points(oracle *o, uint32_t index) {
    const qe_object *object = object_of(o, index);
    uint32_t space = object->kind == QE_OBJECT_BUFFER && is_placed(object) ? ADDRESSES : index;
    uint64_t base = space == ADDRESSES ? object->address : 0;
    add_point(o, (place){space, base});
    if (object->kind == QE_OBJECT_BUFFER) add_point(o, (place){space, base + object->bytes});
}

oracle *oracle_open(const qe_program *program, uint32_t items_max) {
    oracle *o = calloc(1, sizeof *o);
    size_t room = items_max > 0 ? items_max : 1;
    if (o != NULL) {
        o->before = calloc(room * room, sizeof *o->before);
        o->part_of = calloc(room, sizeof *o->part_of);
    }
    if (o == NULL || o->before == NULL || o->part_of == NULL) {
        fprintf(stderr, "no memory for the oracle\n");
        exit(1);
    }
    o->program = program;
    o->items_max = items_max;
    for (uint32_t i = 0; i < program->object_count; i++) add_object_points(o, i);
    return o;
}

void oracle_close(oracle *o) {
    free(o->before);
    free(o->part_of);
    free(o->deeds);
    free(o->points);
    free(o);
}

oracle_mark oracle_here(const oracle *o) {
    oracle_mark mark = {o->count, o->deed_count, o->point_count, o->step, {0}};
    memcpy(mark.recording, o->recording, sizeof mark.recording);
    return mark;
}

void oracle_back(oracle *o, const oracle_mark *mark) {
    o->count = mark->count;
    o->deed_count = mark->deeds;
    o->point_count = mark->points;
    o->step = mark->step;
    memcpy(o->recording, mark->recording, sizeof o->recording);
}

uint64_t oracle_counter(const oracle *o, uint32_t object, uint32_t stream) {
    return oracle_counter_in(o, object, o->recording[stream]);
}

uint32_t oracle_judge(const qe_program *program, oracle_verdict *verdict_out) {
    oracle *o = oracle_open(program, program->item_count);
    uint32_t item = 0;
    memset(verdict_out, 0, sizeof *verdict_out);
    for (; item < program->item_count && verdict_out->rule == QE_RULE_NONE; item++) *verdict_out = *oracle_next(o);
    oracle_close(o);
    return verdict_out->rule == QE_RULE_NONE ? item : item - 1;
}
