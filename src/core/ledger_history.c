/* ledger_history.c - what a ledger saw since its step began, as a program that reproduces the verdict: objects as they
 * were then, the certified items, the departed ones, and the refused one last. */
#include <string.h>

#include "base/assert.h"
#include "core/ledger_state.h"
#include "qeffect/trace.h"

/* By the time of the step. Clocks were built at its first departure; without one nothing can be unwritten. */
static int is_written(const qe_ledger *ledger, uint32_t object, int *partly_out) {
    const qe_range_list *list = &ledger->ranges[ledger->space[object]];
    uint64_t begin = ledger->shift[object], end = begin + ledger->program->objects[object].bytes;
    uint32_t written = 0, count = 0;
    for (uint32_t id = list->bytes > 0 ? list->first : QE_NONE; id != QE_NONE; id = ledger->pool[id].next) {
        const qe_range *range = &ledger->pool[id];
        if (range->end <= begin || range->begin >= end) continue;
        written += range->before;
        count++;
    }
    if (!ledger->order_valid) written = count;
    *partly_out = written > 0 && written < count;
    return written == count;
}

static qe_object object_at_begin(const qe_ledger *ledger, uint32_t index) {
    qe_object object = ledger->program->objects[index];
    const qe_object_state *begin = &ledger->begin[index];
    int partly;
    if (object.kind == QE_OBJECT_BUFFER) {
        object.counter = is_written(ledger, index, &partly) ? QE_BUFFER_WRITTEN : QE_BUFFER_UNWRITTEN;
    } else if (object.kind == QE_OBJECT_CACHE) {
        object.layouts = (uint8_t)(begin->word & 0xff);
        object.recipe = (uint8_t)(begin->word >> 8 & 0xff);
        object.key_version = begin->key_version;
        object.key_epoch = begin->key_epoch;
    } else {
        object.counter = begin->counter;
    }
    return object;
}

static qe_status add_world(const qe_ledger *ledger, qe_program *out, qe_error *error_out) {
    const qe_program *program = ledger->program;
    for (uint32_t i = 0; i < program->object_count; i++) {
        qe_object object = object_at_begin(ledger, i);
        QE_TRY(qe_program_add_object(out, &object, NULL, error_out));
    }
    for (uint32_t i = 0; i < program->stream_count; i++)
        QE_TRY(qe_program_add_stream(out, program->streams[i].name, program->streams[i].role, NULL, error_out));
    for (uint32_t i = 0; i < program->label_count; i++)
        QE_TRY(qe_program_add_label(out, program->labels[i].text, NULL, error_out));
    for (uint32_t i = 0; i < program->event_count; i++) qe_program_add_event(out);
    for (uint32_t i = 0; i < program->object_count; i++) {
        const qe_grad_order *order = &ledger->orders[i];
        for (uint32_t k = 0; k < order->length; k++) {
            const qe_contribution *place = &ledger->contributions[order->first + k];
            qe_deposit deposit = {i, place->microbatch, (uint16_t)place->use};
            QE_TRY(qe_program_add_deposit(out, &deposit, error_out));
        }
    }
    return QE_OK;
}

/* Bytes of partly written buffers, as ops before the step. */
static qe_status add_written(const qe_ledger *ledger, uint32_t object, qe_program *out, qe_error *error_out) {
    const qe_range_list *list = &ledger->ranges[ledger->space[object]];
    uint64_t from = ledger->shift[object], to = from + ledger->program->objects[object].bytes;
    qe_item item = {.kind = QE_ITEM_OP, .microbatch = QE_NONE};
    QE_TRY(qe_program_add_label(out, "written_before", &item.label, error_out));
    for (uint32_t id = list->bytes > 0 ? list->first : QE_NONE; id != QE_NONE; id = ledger->pool[id].next) {
        const qe_range *range = &ledger->pool[id];
        if (!range->before || range->end <= from || range->begin >= to) continue;
        qe_effect effect = {.kind = QE_EFFECT_BUFFER_WRITE, .object = object};
        effect.begin = range->begin > from ? range->begin - from : 0;
        effect.end = (range->end < to ? range->end : to) - from;
        QE_TRY(qe_program_add_item(out, &item, &effect, 1, NULL, error_out));
    }
    return QE_OK;
}

static qe_status add_before(const qe_ledger *ledger, qe_program *out, qe_error *error_out) {
    for (uint32_t i = 0; i < ledger->object_count; i++) {
        int partly = 0;
        if (ledger->program->objects[i].kind == QE_OBJECT_BUFFER) is_written(ledger, i, &partly);
        if (partly) QE_TRY(add_written(ledger, i, out, error_out));
    }
    qe_item sync = {.kind = QE_ITEM_SYNC_DEVICE, .microbatch = QE_NONE};
    if (out->item_count > 0) QE_TRY(qe_program_add_item(out, &sync, NULL, 0, NULL, error_out));
    qe_item begin = {.kind = QE_ITEM_STEP_BEGIN, .microbatch = QE_NONE};
    return qe_program_add_item(out, &begin, NULL, 0, NULL, error_out);
}

static qe_status add_item(qe_program *out, const qe_item *item, const qe_effect *effects, qe_error *error_out) {
    if (item->kind == QE_ITEM_STEP_BEGIN || item->kind == QE_ITEM_STEP_END) return QE_OK; /* the ledger's own count */
    return qe_program_add_item(out, item, effects, item->effect_count, NULL, error_out);
}

static qe_status add_seen(const qe_ledger *ledger, qe_program *out, qe_error *error_out) {
    const qe_program *program = ledger->program;
    for (uint32_t i = 0; i < ledger->cursor; i++) {
        const qe_item *item = &program->items[i];
        const qe_effect *effects = item->effect_count > 0 ? &program->effects[item->first_effect] : NULL;
        QE_TRY(add_item(out, item, effects, error_out));
    }
    for (uint32_t i = 0; i < ledger->log_count; i++)
        QE_TRY(add_item(out, &ledger->log[i].item, &ledger->log_effects[ledger->log[i].first_effect], error_out));
    if (ledger->refused == QE_REFUSED_ITEM)
        return add_item(out, &ledger->refused_item, ledger->refused_effects, error_out);
    qe_item end = {.kind = QE_ITEM_STEP_END, .microbatch = QE_NONE};
    if (ledger->refused == QE_REFUSED_END) return qe_program_add_item(out, &end, NULL, 0, NULL, error_out);
    return QE_OK;
}

qe_status qe_ledger_history(const qe_ledger *ledger, qe_program *program_out, qe_error *error_out) {
    QE_ASSERT(ledger != NULL);
    QE_ASSERT(program_out != NULL);
    QE_ASSERT(program_out->item_count == 0);
    if (ledger->log_lost > 0)
        return qe_error_set(error_out, QE_ERROR_LIMIT, NULL, "%llu departed submissions were not kept",
                            (unsigned long long)ledger->log_lost);
    qe_program history;
    qe_program_init(&history);
    qe_status status = add_world(ledger, &history, error_out);
    if (status == QE_OK) status = add_before(ledger, &history, error_out);
    if (status == QE_OK) status = add_seen(ledger, &history, error_out);
    if (status == QE_OK) *program_out = history;
    else qe_program_deinit(&history);
    return status;
}
