/* ledger_valid.c - the truths of a ledger, asserted on transitions in debug builds; and its image for tests. */
#include <string.h>

#include "base/assert.h"
#include "core/ledger_state.h"

static void assert_object(const qe_ledger *ledger, uint32_t index) {
    const qe_object *object = &ledger->program->objects[index];
    const qe_object_state *state = &ledger->state[index], *begin = &ledger->begin[index];
    int open = ledger->phase == QE_LEDGER_OPEN;
    switch (object->kind) {
    case QE_OBJECT_SCALE:
        if (open) QE_ASSERT(state->counter == begin->counter + ((state->word & QE_SCALE_FOLDED) ? 1 : 0));
        break;
    case QE_OBJECT_SLOT:
        if (!open) QE_ASSERT(!(state->word & QE_SLOT_LIVE));
        QE_ASSERT((state->word & QE_SLOT_LIVE) || state->word == 0);
        QE_ASSERT(state->counter >= begin->counter);
        break;
    case QE_OBJECT_WEIGHT:
        QE_ASSERT(state->word <= QE_WEIGHT_COMMITTED);
        QE_ASSERT(state->counter >= begin->counter);
        break;
    case QE_OBJECT_CACHE:
        if (state->word != 0) QE_ASSERT(state->word & QE_CACHE_FILLED);
        if (!(state->word & QE_CACHE_FILLED)) QE_ASSERT(state->key_version == 0);
        break;
    case QE_OBJECT_GRAD:
        QE_ASSERT((state->word & QE_LOW32) <= ledger->orders[index].length);
        break;
    case QE_OBJECT_GRAPH:
        QE_ASSERT(state->counter >= begin->counter);
        break;
    case QE_OBJECT_RNG:
    case QE_OBJECT_BUFFER:
    case QE_OBJECT_KINDS: break;
    }
}

static void assert_ranges(const qe_ledger *ledger, uint32_t object) {
    const qe_range_list *list = &ledger->ranges[object];
    uint64_t end = 0;
    for (uint32_t id = list->bytes > 0 ? list->first : QE_NONE; id != QE_NONE; id = ledger->pool[id].next) {
        QE_ASSERT(id < ledger->pool_capacity);
        const qe_range *range = &ledger->pool[id];
        QE_ASSERT(range->begin == end);
        QE_ASSERT(range->begin < range->end);
        if (qe_range_writes(ledger, range) > 0) QE_ASSERT(range->written);
        end = range->end;
    }
    if (ledger->program->objects[object].kind == QE_OBJECT_BUFFER) QE_ASSERT(end == list->bytes);
}

/* Nobody knows more of a stream than the stream has done. */
static void assert_clocks(const qe_ledger *ledger) {
    for (uint32_t s = 0; s < ledger->stream_count; s++) {
        for (uint32_t rank = 0; rank < QE_RANKS_MAX; rank++)
            QE_ASSERT(ledger->host_clock[rank].at[s] <= ledger->stream_clock[s].at[s]);
        for (uint32_t t = 0; t < ledger->stream_count; t++)
            QE_ASSERT(ledger->stream_clock[t].at[s] <= ledger->stream_clock[s].at[s]);
    }
}

void qe_ledger_assert_valid(const qe_ledger *ledger) {
    QE_ASSERT(ledger != NULL);
    QE_ASSERT(ledger->cursor <= ledger->program->item_count);
    QE_ASSERT(ledger->certified_count <= ledger->program->item_count);
    QE_ASSERT(ledger->marked_items <= ledger->unmarked_items);
    QE_ASSERT(ledger->log_count <= ledger->log_capacity);
    QE_ASSERT(ledger->log_effect_count <= ledger->log_effect_capacity);
    QE_ASSERT(ledger->pool_free_count <= ledger->pool_capacity);
    if (ledger->departed) QE_ASSERT(ledger->order_valid);
    if (ledger->order_valid) QE_ASSERT(ledger->order_items <= ledger->cursor);
    for (uint32_t i = 0; i < ledger->object_count; i++) {
        assert_object(ledger, i);
        assert_ranges(ledger, i);
    }
    if (ledger->order_valid) assert_clocks(ledger);
}

typedef struct image {
    unsigned char *bytes;
    size_t capacity, length;
} image;

static void put(image *into, const void *bytes, size_t count) {
    if (into->length <= into->capacity && count <= into->capacity - into->length && count > 0)
        memcpy(into->bytes + into->length, bytes, count);
    into->length += count;
}

static void put_ranges(image *into, const qe_ledger *ledger) {
    for (uint32_t object = 0; object < ledger->object_count; object++) {
        const qe_range_list *list = &ledger->ranges[object];
        for (uint32_t id = list->bytes > 0 ? list->first : QE_NONE; id != QE_NONE; id = ledger->pool[id].next) {
            const qe_range *range = &ledger->pool[id];
            uint64_t words[] = {range->begin, range->end, range->write.clock, range->write.item, range->write.stream,
                                qe_range_writes(ledger, range), range->written};
            put(into, words, sizeof words);
            put(into, &ledger->pool_reads[(size_t)id * ledger->stream_count],
                ledger->stream_count * sizeof(qe_access));
        }
    }
}

/* The order layer counts only after a departure: before it, it is built from the items when it is needed. */
size_t qe_ledger_image(const qe_ledger *ledger, unsigned char *bytes_out, size_t capacity) {
    image into = {bytes_out, capacity, 0};
    uint64_t words[] = {ledger->phase, ledger->departed, ledger->cursor, ledger->certified_count, ledger->judged_count,
                        ledger->log_count, ledger->log_effect_count, ledger->log_lost};
    put(&into, words, sizeof words);
    put(&into, ledger->state, ledger->object_count * sizeof *ledger->state);
    put(&into, ledger->begin, ledger->object_count * sizeof *ledger->begin);
    if (!ledger->departed) return into.length;
    put(&into, ledger->stream_clock, sizeof ledger->stream_clock);
    put(&into, ledger->host_clock, sizeof ledger->host_clock);
    put(&into, ledger->event_clocks, (size_t)ledger->event_count * ledger->stream_count * sizeof(uint32_t));
    put(&into, ledger->event_recorded, ledger->event_count * sizeof *ledger->event_recorded);
    put(&into, ledger->event_recording, ledger->event_count * sizeof *ledger->event_recording);
    put(&into, ledger->stream_recording, sizeof ledger->stream_recording);
    put(&into, ledger->writes, ledger->object_count * sizeof *ledger->writes);
    put(&into, ledger->reads, (size_t)ledger->object_count * ledger->stream_count * sizeof *ledger->reads);
    put_ranges(&into, ledger);
    return into.length;
}
