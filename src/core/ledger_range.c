/* ledger_range.c - byte ranges of buffers. A buffer starts as one range; a read or write that meets part of one
 * splits it, a write joins the ranges it covers. The room for the program's own splits is taken when the ledger is
 * made; other ranges may take more, before anything is changed. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "core/effect.h"
#include "core/ledger_state.h"

enum { SPLITS_PER_EFFECT = 2 }; /* at its begin and at its end */

static qe_access *reads_of(const qe_ledger *ledger, uint32_t id) {
    return &ledger->pool_reads[(size_t)id * ledger->stream_count];
}

static qe_status grow_pool(qe_ledger *ledger, uint32_t capacity) {
    QE_ASSERT(capacity > ledger->pool_capacity);
    uint32_t *pool_free = realloc(ledger->pool_free, (size_t)capacity * sizeof *pool_free);
    if (pool_free == NULL) return QE_ERROR_MEMORY;
    ledger->pool_free = pool_free;
    qe_range *pool = realloc(ledger->pool, (size_t)capacity * sizeof *pool);
    if (pool == NULL) return QE_ERROR_MEMORY;
    ledger->pool = pool;
    size_t reads = (size_t)(ledger->stream_count > 0 ? ledger->stream_count : 1) * capacity;
    qe_access *pool_reads = realloc(ledger->pool_reads, reads * sizeof *pool_reads);
    if (pool_reads == NULL) return QE_ERROR_MEMORY;
    ledger->pool_reads = pool_reads;
    for (uint32_t id = capacity; id > ledger->pool_capacity; id--)
        ledger->pool_free[ledger->pool_free_count++] = id - 1;
    ledger->pool_capacity = capacity;
    return QE_OK;
}

static qe_status reserve_list(qe_range_list *list, uint32_t more) {
    if (list->count + more <= list->capacity) return QE_OK;
    uint32_t capacity = list->capacity * 2 > list->count + more ? list->capacity * 2 : list->count + more;
    uint32_t *ids = realloc(list->ids, (size_t)capacity * sizeof *ids);
    if (ids == NULL) return QE_ERROR_MEMORY;
    list->ids = ids;
    list->capacity = capacity;
    return QE_OK;
}

static qe_status reserve_pool(qe_ledger *ledger, uint32_t more) {
    if (ledger->pool_free_count >= more) return QE_OK;
    uint32_t doubled = ledger->pool_capacity * 2;
    uint32_t wanted = ledger->pool_capacity + more;
    return grow_pool(ledger, doubled > wanted ? doubled : wanted);
}

/* Position of the range that holds byte `at`, or the count when there is none. */
static uint32_t position_of(const qe_ledger *ledger, const qe_range_list *list, uint64_t at) {
    uint32_t low = 0, high = list->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (ledger->pool[list->ids[middle]].end <= at) low = middle + 1;
        else high = middle;
    }
    return low;
}

static int is_border(const qe_ledger *ledger, const qe_range_list *list, uint64_t at) {
    uint32_t position = position_of(ledger, list, at);
    return position == list->count || ledger->pool[list->ids[position]].begin == at;
}

/* Splits that an effect needs; 0 where both its ends are borders already. */
static uint32_t count_splits(const qe_ledger *ledger, const qe_effect *effect) {
    const qe_range_list *list = &ledger->ranges[effect->object];
    if (effect->begin >= effect->end) return 0;
    return (is_border(ledger, list, effect->begin) ? 0u : 1u) + (is_border(ledger, list, effect->end) ? 0u : 1u);
}

qe_status qe_range_reserve(qe_ledger *ledger, const qe_effect *effects, uint32_t count) {
    uint32_t splits = 0;
    for (uint32_t i = 0; i < count; i++)
        if (ledger->program->objects[effects[i].object].kind == QE_OBJECT_BUFFER)
            splits += count_splits(ledger, &effects[i]);
    if (splits == 0) return QE_OK;
    for (uint32_t i = 0; i < count; i++)
        if (ledger->program->objects[effects[i].object].kind == QE_OBJECT_BUFFER)
            QE_TRY(reserve_list(&ledger->ranges[effects[i].object], splits));
    return reserve_pool(ledger, splits);
}

static uint32_t take_range(qe_ledger *ledger) {
    QE_ASSERT(ledger->pool_free_count > 0);
    return ledger->pool_free[--ledger->pool_free_count];
}

/* Makes `at` a border. */
static void split(qe_ledger *ledger, qe_range_list *list, uint64_t at) {
    uint32_t position = position_of(ledger, list, at);
    if (position == list->count) return;
    uint32_t id = list->ids[position];
    QE_ASSERT(ledger->pool[id].begin <= at);
    if (ledger->pool[id].begin == at) return;
    QE_ASSERT(list->count < list->capacity);
    uint32_t right = take_range(ledger);
    ledger->pool[right] = ledger->pool[id];
    ledger->pool[right].begin = at;
    ledger->pool[id].end = at;
    memcpy(reads_of(ledger, right), reads_of(ledger, id), ledger->stream_count * sizeof(qe_access));
    memmove(&list->ids[position + 2], &list->ids[position + 1], (list->count - position - 1) * sizeof *list->ids);
    list->ids[position + 1] = right;
    list->count++;
}

/* A write made [first, end) one history again, except where counts of writes, or what was before the step, differ. */
static void join(qe_ledger *ledger, qe_range_list *list, uint32_t first, uint32_t end) {
    QE_ASSERT(first < end);
    uint32_t kept = first;
    for (uint32_t i = first + 1; i < end; i++) {
        qe_range *left = &ledger->pool[list->ids[kept]];
        const qe_range *right = &ledger->pool[list->ids[i]];
        QE_ASSERT(left->end == right->begin);
        if (qe_range_writes(ledger, left) == qe_range_writes(ledger, right) && left->before == right->before) {
            left->end = right->end;
            ledger->pool_free[ledger->pool_free_count++] = list->ids[i];
        } else {
            list->ids[++kept] = list->ids[i];
        }
    }
    memmove(&list->ids[kept + 1], &list->ids[end], (list->count - end) * sizeof *list->ids);
    list->count -= end - (kept + 1);
}

/* Borders at both ends; the positions between them. Returns 0 for an empty range. */
static int isolate(qe_ledger *ledger, const qe_effect *effect, uint32_t *first_out, uint32_t *end_out) {
    if (effect->begin >= effect->end) return 0;
    qe_range_list *list = &ledger->ranges[effect->object];
    split(ledger, list, effect->begin);
    split(ledger, list, effect->end);
    *first_out = position_of(ledger, list, effect->begin);
    *end_out = position_of(ledger, list, effect->end - 1) + 1;
    QE_ASSERT(*end_out <= list->count);
    return 1;
}

static void count_write(const qe_ledger *ledger, qe_range *range) {
    range->writes = qe_range_writes(ledger, range) + 1;
    range->step = ledger->range_step;
    range->written = 1;
}

void qe_range_apply(qe_ledger *ledger, const qe_judgement *judgement, uint32_t effect_index) {
    const qe_effect *effect = &judgement->effects[effect_index];
    uint32_t stream = judgement->item->stream;
    qe_access access = {judgement->clock.at[stream], judgement->index, stream};
    uint32_t first, end;
    if (!isolate(ledger, effect, &first, &end)) return;
    qe_range_list *list = &ledger->ranges[effect->object];
    for (uint32_t i = first; i < end; i++) {
        qe_range *range = &ledger->pool[list->ids[i]];
        qe_access *reads = reads_of(ledger, list->ids[i]);
        if (effect->kind == QE_EFFECT_BUFFER_READ) {
            reads[stream] = access;
            continue;
        }
        range->write = access;
        count_write(ledger, range);
        memset(reads, 0, ledger->stream_count * sizeof *reads);
    }
    if (effect->kind == QE_EFFECT_BUFFER_WRITE) join(ledger, list, first, end);
}

void qe_range_apply_unordered(qe_ledger *ledger, const qe_effect *effect) {
    uint32_t first, end;
    if (effect->kind != QE_EFFECT_BUFFER_WRITE || !isolate(ledger, effect, &first, &end)) return;
    const qe_range_list *list = &ledger->ranges[effect->object];
    for (uint32_t i = first; i < end; i++) count_write(ledger, &ledger->pool[list->ids[i]]);
}

void qe_range_mark(qe_ledger *ledger, const qe_effect *effect) {
    uint32_t first, end;
    if (!isolate(ledger, effect, &first, &end)) return;
    const qe_range_list *list = &ledger->ranges[effect->object];
    for (uint32_t i = first; i < end; i++) ledger->pool[list->ids[i]].written = 1;
}

/* An op reads what was there before it, or what an earlier effect of its own has written. */
static int writes_itself(const qe_judgement *judgement, uint32_t effect_index) {
    const qe_effect *read = &judgement->effects[effect_index];
    for (uint32_t i = 0; i < effect_index; i++) {
        const qe_effect *effect = &judgement->effects[i];
        if (effect->kind == QE_EFFECT_BUFFER_WRITE && effect->object == read->object && effect->begin <= read->begin &&
            effect->end >= read->end)
            return 1;
    }
    return 0;
}

static void check_read(qe_judgement *judgement, uint32_t effect_index, const qe_range *range) {
    const qe_effect *effect = &judgement->effects[effect_index];
    uint32_t writes = qe_range_writes(judgement->ledger, range);
    if (!range->written) {
        uint64_t at = range->begin > effect->begin ? range->begin : effect->begin;
        qe_judgement_report(judgement, effect_index, &(qe_finding){QE_RULE_BUFFER_UNWRITTEN, at, 0}, NULL);
    } else if (effect->version != 0 && effect->version != writes) {
        qe_finding finding = {QE_RULE_BUFFER_VERSION, effect->version, writes};
        qe_judgement_report(judgement, effect_index, &finding, &range->write);
    }
}

void qe_range_check(qe_judgement *judgement, uint32_t effect_index) {
    const qe_ledger *ledger = judgement->ledger;
    const qe_effect *effect = &judgement->effects[effect_index];
    const qe_range_list *list = &ledger->ranges[effect->object];
    if (effect->begin >= effect->end) return;
    int reads = effect->kind == QE_EFFECT_BUFFER_READ && !writes_itself(judgement, effect_index);
    for (uint32_t i = position_of(ledger, list, effect->begin); i < list->count; i++) {
        const qe_range *range = &ledger->pool[list->ids[i]];
        if (range->begin >= effect->end) break;
        if (reads) check_read(judgement, effect_index, range);
        qe_touches touches = {range->write, reads_of(ledger, list->ids[i])};
        qe_access_judge(judgement, effect_index, &touches);
    }
}

void qe_range_begin_step(qe_ledger *ledger) { ledger->range_step++; }

void qe_range_reset(qe_ledger *ledger) {
    qe_range_begin_step(ledger);
    for (uint32_t object = 0; object < ledger->object_count; object++) {
        const qe_range_list *list = &ledger->ranges[object];
        for (uint32_t i = 0; i < list->count; i++) {
            ledger->pool[list->ids[i]].write = (qe_access){0};
            ledger->pool[list->ids[i]].before = ledger->pool[list->ids[i]].written;
            memset(reads_of(ledger, list->ids[i]), 0, ledger->stream_count * sizeof(qe_access));
        }
    }
}

static qe_status open_list(qe_ledger *ledger, uint32_t object, uint32_t effects) {
    const qe_object *buffer = &ledger->program->objects[object];
    if (buffer->kind != QE_OBJECT_BUFFER || buffer->bytes == 0) return QE_OK;
    qe_range_list *list = &ledger->ranges[object];
    QE_TRY(reserve_list(list, 1 + SPLITS_PER_EFFECT * effects));
    uint32_t id = take_range(ledger);
    ledger->pool[id] = (qe_range){.end = buffer->bytes, .written = buffer->counter > 0};
    memset(reads_of(ledger, id), 0, ledger->stream_count * sizeof(qe_access));
    list->ids[0] = id;
    list->count = 1;
    return QE_OK;
}

/* Effects of each buffer whose range is not the whole: only they split. */
static uint32_t count_partial(const qe_program *program, uint32_t *counts) {
    uint32_t total = 0;
    for (uint32_t i = 0; i < program->effect_count; i++) {
        const qe_effect *effect = &program->effects[i];
        const qe_object *object = &program->objects[effect->object];
        if (object->kind != QE_OBJECT_BUFFER) continue;
        if (effect->begin == 0 && effect->end == object->bytes) continue;
        counts[effect->object]++;
        total++;
    }
    return total;
}

qe_status qe_range_open(qe_ledger *ledger, qe_error *error_out) {
    uint32_t *counts = calloc((size_t)ledger->object_count + 1, sizeof *counts);
    if (counts == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a ledger");
    uint32_t partial = count_partial(ledger->program, counts);
    /* A trace takes what it needs as it goes; a ledger takes the most that its program can split. */
    uint32_t room = ledger->object_count + 1 + (ledger->foreign ? 0 : SPLITS_PER_EFFECT * partial);
    qe_status status = grow_pool(ledger, room);
    for (uint32_t i = 0; i < ledger->object_count && status == QE_OK; i++)
        status = open_list(ledger, i, ledger->foreign ? 0 : counts[i]);
    free(counts);
    if (status == QE_OK) return QE_OK;
    return qe_error_set(error_out, status, NULL, "no memory for the byte ranges of %u objects", ledger->object_count);
}

void qe_range_close(qe_ledger *ledger) {
    if (ledger->ranges != NULL)
        for (uint32_t i = 0; i < ledger->object_count; i++) free(ledger->ranges[i].ids);
    free(ledger->ranges);
    free(ledger->pool);
    free(ledger->pool_reads);
    free(ledger->pool_free);
}
