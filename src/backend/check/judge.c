/* judge.c - did it touch only what it declared?
 *
 *   before = memory; run; after = memory       a change outside the declared writes is an undeclared write
 *   memory = before, poison where it may not   the declared writes differ from `after`: an undeclared read;
 *     read; run; again = memory                anything else changed: a write of what was there already
 *   memory = before, declared writes of after  as if it had run once, and had written what it declared
 *
 * Bytes that an op only writes are poisoned too: a gradient that is set must not depend on what was there. */
#include <stdio.h>
#include <string.h>

#include "backend/check/check.h"
#include "base/assert.h"

typedef enum copy_kind { COPY_BEFORE, COPY_AFTER, COPY_AGAIN } copy_kind;

enum { NAME_BYTES = 200 };

static char *copy_at(const check_span *span, copy_kind kind) {
    char *copy = kind == COPY_BEFORE  ? span->region->before
                 : kind == COPY_AFTER ? span->region->after
                                      : span->region->again;
    return copy + span->begin;
}

static size_t bytes_of(const check_span *span) { return (size_t)(span->end - span->begin); }

/* What a transfer has now is not looked at: not even read. */
static qe_status keep_copy(qe_device *device, copy_kind kind, qe_error *error_out) {
    for (uint32_t i = 0; i < device->span_count; ++i) {
        const check_span *span = &device->spans[i];
        if (span->access & ACCESS_FOREIGN) continue;
        QE_TRY(device->inner_backend->memory->read(device->inner, copy_at(span, kind), span->region->base + span->begin,
                                                   bytes_of(span), error_out));
    }
    return QE_OK;
}

static qe_status put_back(qe_device *device, const check_span *span, copy_kind kind, qe_error *error_out) {
    return device->inner_backend->memory->write(device->inner, span->region->base + span->begin, copy_at(span, kind),
                                                bytes_of(span), error_out);
}

/* Spans [first, last); of each the bytes [begin, end), or all where `end` is 0. */
typedef struct poisoned {
    uint32_t first, last;
    uint64_t begin, end;
} poisoned;

/* Memory as it was before, but poison where it may not be read. COPY_AGAIN is the image. */
static qe_status poison(qe_device *device, const poisoned *where, qe_error *error_out) {
    for (uint32_t i = 0; i < device->span_count; ++i) {
        const check_span *span = &device->spans[i];
        if (span->access & ACCESS_FOREIGN) continue;
        char *image = copy_at(span, COPY_AGAIN);
        memcpy(image, copy_at(span, COPY_BEFORE), bytes_of(span));
        if (i >= where->first && i < where->last && !(span->access & ACCESS_READ)) {
            const uint64_t end = where->end > 0 ? where->end : bytes_of(span);
            memset(image + where->begin, CHECK_POISON, end - where->begin);
        }
        QE_TRY(put_back(device, span, COPY_AGAIN, error_out));
    }
    return QE_OK;
}

static qe_status settle(qe_device *device, qe_error *error_out) {
    for (uint32_t i = 0; i < device->span_count; ++i) {
        const check_span *span = &device->spans[i];
        if (span->access & ACCESS_FOREIGN) continue;
        QE_TRY(put_back(device, span, span->access & ACCESS_WRITE ? COPY_AFTER : COPY_BEFORE, error_out));
    }
    return QE_OK;
}

static void name_byte(const qe_device *device, const check_span *span, uint64_t at, char text_out[NAME_BYTES]) {
    qe_check_name(device, span->region, span->begin + at, text_out, NAME_BYTES);
}

/* "linear (layer 2)" */
static void name_run(const check_run *run, char text_out[NAME_BYTES]) {
    const qe_op *op = run->op ? run->op : run->graph->all.op;
    char graph[NAME_BYTES / 4] = "";
    if (!run->op)
        snprintf(graph, sizeof graph, "a graph of %u ops%s",
                 run->device->inner_backend->graph->info(run->graph->inner).ops, op ? " that begins with " : "");
    snprintf(text_out, NAME_BYTES, "%s%s", graph, op ? qe_op_name(op->kind) : "");
    const size_t length = strlen(text_out);
    if (op) snprintf(text_out + length, NAME_BYTES - length, " (layer %u)", op->layer);
}

static const char *const remedy = "declare the effect where the op is lowered, or correct the kernel or its arguments";

static qe_status wrote(const check_run *run, const check_span *span, uint64_t at, qe_error *error_out) {
    char who[NAME_BYTES], where[NAME_BYTES];
    name_run(run, who);
    name_byte(run->device, span, at, where);
    return qe_error_set(error_out, QE_ERROR_DEVICE, remedy, "%s wrote what it did not declare to write: %s", who,
                        where);
}

/* First byte in which two pieces of memory differ; `bytes` where they do not. */
static size_t first_difference(const char *a, const char *b, size_t bytes) {
    if (memcmp(a, b, bytes) == 0) return bytes;
    size_t at = 0;
    while (a[at] == b[at]) ++at;
    return at;
}

/* After the first run: everything that is not a declared write is as before. */
static qe_status judge_writes(const check_run *run, qe_error *error_out) {
    for (uint32_t i = 0; i < run->device->span_count; ++i) {
        const check_span *span = &run->device->spans[i];
        if (span->access & (ACCESS_WRITE | ACCESS_FOREIGN)) continue;
        const size_t at = first_difference(copy_at(span, COPY_BEFORE), copy_at(span, COPY_AFTER), bytes_of(span));
        if (at < bytes_of(span)) return wrote(run, span, at, error_out);
    }
    return QE_OK;
}

/* A byte that the op may write and did not is poison still, and was left alone in the first run as well. */
static size_t first_other_result(const check_span *span) {
    const char *before = copy_at(span, COPY_BEFORE), *after = copy_at(span, COPY_AFTER);
    const char *again = copy_at(span, COPY_AGAIN);
    const size_t bytes = bytes_of(span);
    size_t at = first_difference(after, again, bytes);
    for (; at < bytes; ++at) {
        const int left_alone =
            !(span->access & ACCESS_READ) && before[at] == after[at] && (unsigned char)again[at] == CHECK_POISON;
        if (after[at] != again[at] && !left_alone) return at;
    }
    return bytes;
}

/* The span whose declared result differs after a run on poison, or NULL. */
static const check_span *other_result(const qe_device *device, uint64_t *at_out) {
    for (uint32_t i = 0; i < device->span_count; ++i) {
        const check_span *span = &device->spans[i];
        if (!(span->access & ACCESS_WRITE) || (span->access & ACCESS_FOREIGN)) continue;
        *at_out = first_other_result(span);
        if (*at_out < bytes_of(span)) return span;
    }
    return NULL;
}

/* Does a declared result change when only this is poison? */
static int depends_on(const check_run *run, poisoned where) {
    uint64_t at;
    qe_error ignored;
    if (poison(run->device, &where, &ignored) != QE_OK) return 0;
    if (run->run(run, &ignored) != QE_OK || keep_copy(run->device, COPY_AGAIN, &ignored) != QE_OK) return 0;
    return other_result(run->device, &at) != NULL;
}

/* The span that was read, by halves; span_count where no half alone changes anything. */
static uint32_t find_span(const check_run *run) {
    uint32_t first = 0, last = run->device->span_count;
    while (last - first > 1) {
        const uint32_t middle = first + (last - first) / 2;
        if (depends_on(run, (poisoned){first, middle, 0, 0}))
            last = middle;
        else if (depends_on(run, (poisoned){middle, last, 0, 0}))
            first = middle;
        else
            return run->device->span_count;
    }
    return first;
}

/* The first byte of the span that matters, by halves. */
static uint64_t find_byte(const check_run *run, uint32_t span) {
    uint64_t begin = 0, end = bytes_of(&run->device->spans[span]);
    while (end - begin > 1) {
        const uint64_t middle = begin + (end - begin) / 2;
        if (depends_on(run, (poisoned){span, span + 1, begin, middle}))
            end = middle;
        else if (depends_on(run, (poisoned){span, span + 1, middle, end}))
            begin = middle;
        else
            break;
    }
    return begin;
}

static qe_status read_from(const check_run *run, const check_span *result, uint64_t at, qe_error *error_out) {
    char who[NAME_BYTES], what[NAME_BYTES], where[NAME_BYTES];
    name_run(run, who);
    name_byte(run->device, result, at, what);
    const uint32_t span = find_span(run);
    if (span == run->device->span_count)
        return qe_error_set(error_out, QE_ERROR_DEVICE, remedy,
                            "%s read what it did not declare to read, in more than one place, or gives another result "
                            "every time: %s changes",
                            who, what);
    name_byte(run->device, &run->device->spans[span], find_byte(run, span), where);
    return qe_error_set(error_out, QE_ERROR_DEVICE, remedy,
                        "%s read what it did not declare to read: %s; it changes %s", who, where, what);
}

/* All bytes are the first one where each equals its neighbour: memcmp is many times a loop. */
static size_t first_unpoisoned(const char *bytes_at, size_t bytes) {
    size_t at = 0;
    if ((unsigned char)bytes_at[0] == CHECK_POISON && memcmp(bytes_at, bytes_at + 1, bytes - 1) == 0) return bytes;
    while (at < bytes && (unsigned char)bytes_at[at] == CHECK_POISON) ++at;
    return at;
}

/* After the run on poison: outside the declared writes all is as it was put there. */
static qe_status judge_silent_writes(const check_run *run, qe_error *error_out) {
    for (uint32_t i = 0; i < run->device->span_count; ++i) {
        const check_span *span = &run->device->spans[i];
        if (span->access & (ACCESS_WRITE | ACCESS_FOREIGN)) continue;
        const char *again = copy_at(span, COPY_AGAIN), *before = copy_at(span, COPY_BEFORE);
        size_t at = 0;
        if (span->access & ACCESS_READ)
            at = first_difference(before, again, bytes_of(span));
        else
            at = first_unpoisoned(again, bytes_of(span));
        if (at < bytes_of(span)) return wrote(run, span, at, error_out);
    }
    return QE_OK;
}

static qe_status judge_poisoned(const check_run *run, qe_error *error_out) {
    const poisoned everywhere = {.first = 0, .last = run->device->span_count};
    QE_TRY(poison(run->device, &everywhere, error_out));
    QE_TRY(run->run(run, error_out));
    QE_TRY(keep_copy(run->device, COPY_AGAIN, error_out));
    QE_TRY(judge_silent_writes(run, error_out));
    uint64_t at;
    const check_span *changed = other_result(run->device, &at);
    return changed ? read_from(run, changed, at, error_out) : QE_OK;
}

qe_status qe_check_judge(const check_run *run, const check_declaration *declared, qe_error *error_out) {
    qe_device *device = run->device;
    QE_TRY(qe_check_cut(device, declared, error_out));
    QE_TRY(keep_copy(device, COPY_BEFORE, error_out));
    QE_TRY(run->run(run, error_out));
    QE_TRY(keep_copy(device, COPY_AFTER, error_out));
    qe_status status = judge_writes(run, error_out);
    if (status == QE_OK) status = judge_poisoned(run, error_out);
    const qe_status settled = settle(device, status == QE_OK ? error_out : NULL);
    return status != QE_OK ? status : settled;
}
