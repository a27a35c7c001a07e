/* order.c - all memory is one buffer, an address is an offset into it, and the ledger does the rest. Nothing here is
 * planned: every submission is judged the full way. */
#include "qeffect/order.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "qeffect/ledger.h"

enum { MEMORY = 0 };

struct qe_order {
    qe_program program; /* one buffer, the streams, the events; no items */
    qe_ledger *ledger;  /* NULL: to be made, because streams or events came */
    uint32_t host;
};

static qe_status world(qe_order *order, qe_error *error_out) {
    /* written before: what the caller put there is nobody's business here */
    qe_object memory = {.kind = QE_OBJECT_BUFFER, .counter = 1, .weight = QE_NONE, .scale = QE_NONE};
    memory.bytes = UINT64_MAX >> 1;
    snprintf(memory.name, sizeof memory.name, "memory");
    QE_TRY(qe_program_add_object(&order->program, &memory, NULL, error_out));
    QE_TRY(qe_program_add_label(&order->program, "work", NULL, error_out));
    return qe_program_add_stream(&order->program, "host", QE_STREAM_HOST, &order->host, error_out);
}

qe_status qe_order_create(qe_order **order_out, qe_error *error_out) {
    qe_order *order = calloc(1, sizeof *order);
    if (order == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to watch the order of work");
    qe_program_init(&order->program);
    qe_status status = world(order, error_out);
    if (status != QE_OK) {
        qe_order_destroy(order);
        return status;
    }
    *order_out = order;
    return QE_OK;
}

void qe_order_destroy(qe_order *order) {
    if (order == NULL) return;
    qe_ledger_destroy(order->ledger);
    qe_program_deinit(&order->program);
    free(order);
}

/* The ledger knows what its program was when it was made. */
static void forget(qe_order *order) {
    qe_ledger_destroy(order->ledger);
    order->ledger = NULL;
}

qe_status qe_order_add_stream(qe_order *order, const char *name, qe_stream_role role, uint32_t *stream_out,
                              qe_error *error_out) {
    forget(order);
    return qe_program_add_stream(&order->program, name, role, stream_out, error_out);
}

uint32_t qe_order_add_event(qe_order *order) {
    forget(order);
    return qe_program_add_event(&order->program);
}

static qe_status ready(qe_order *order) {
    if (order->ledger != NULL) return QE_OK;
    QE_TRY(qe_ledger_create(&order->program, &order->ledger, NULL));
    qe_ledger_step_begin(order->ledger);
    return QE_OK;
}

static qe_status submit(qe_order *order, const qe_item *item, const qe_effect *effects, qe_violations *found) {
    QE_TRY(ready(order));
    return qe_ledger_submit(order->ledger, item, effects, QE_NONE, found);
}

static qe_item item_of(qe_item_kind kind, uint32_t stream, uint32_t event) {
    return (qe_item){.kind = (uint8_t)kind, .microbatch = QE_NONE, .stream = stream, .event = event};
}

static qe_status breach_of(const qe_order *order, const qe_violation *violation, uint32_t stream, const char *what,
                           const qe_range *range, qe_breach *breach_out) {
    breach_out->rule = violation->rule;
    snprintf(breach_out->object, sizeof breach_out->object, "%s", range->object != NULL ? range->object : "");
    snprintf(breach_out->text, sizeof breach_out->text,
             "%s on stream '%s' %s %s%s%s, which work elsewhere touches too: nothing that was executed orders them",
             what, order->program.streams[stream].name, range->write ? "writes" : "reads",
             range->object != NULL ? range->object : "memory", range->part != NULL ? " " : "",
             range->part != NULL ? range->part : "");
    return QE_CONTRACT;
}

static qe_effect effect_of(const qe_range *range, int write) {
    return (qe_effect){.object = MEMORY,
                       .kind = write ? QE_EFFECT_BUFFER_WRITE : QE_EFFECT_BUFFER_READ,
                       .begin = (uint64_t)(uintptr_t)range->at,
                       .end = (uint64_t)(uintptr_t)range->at + range->bytes};
}

/* A range at a time: the record says which. */
static qe_status access_one(qe_order *order, uint32_t stream, const char *what, const qe_range *range,
                            qe_breach *breach_out) {
    qe_violations found;
    qe_item item = item_of(QE_ITEM_OP, stream, QE_NONE);
    qe_effect effect = effect_of(range, range->write);
    item.effect_count = 1;
    if (range->bytes == 0) return QE_OK;
    qe_status status = submit(order, &item, &effect, &found);
    return status == QE_CONTRACT ? breach_of(order, &found.record[0], stream, what, range, breach_out) : status;
}

qe_status qe_order_access(qe_order *order, uint32_t stream, const char *what, const qe_range *ranges, size_t count,
                          qe_breach *breach_out) {
    uint32_t at = stream == QE_NONE ? order->host : stream;
    for (size_t i = 0; i < count; i++) QE_TRY(access_one(order, at, what, &ranges[i], breach_out));
    return QE_OK;
}

/* Records, waits and syncs break no rule but sync.event, which a wait for an event without a record is: no wait. */
static qe_status mark(qe_order *order, qe_item item) {
    qe_violations found;
    qe_status status = submit(order, &item, NULL, &found);
    return status == QE_CONTRACT ? QE_OK : status;
}

qe_status qe_order_record(qe_order *order, uint32_t stream, uint32_t event) {
    return mark(order, item_of(QE_ITEM_RECORD, stream, event));
}

qe_status qe_order_wait(qe_order *order, uint32_t stream, uint32_t event) {
    return mark(order, item_of(QE_ITEM_WAIT, stream, event));
}

qe_status qe_order_sync(qe_order *order, uint32_t stream) {
    return mark(order, item_of(QE_ITEM_SYNC_STREAM, stream, QE_NONE));
}
