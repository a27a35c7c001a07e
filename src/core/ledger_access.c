/* ledger_access.c - the order layer: who touched an object last, and whether that is ordered before who touches it
 * now. As FastTrack: the last write, and the reads since, one per stream. A write is checked against the reads since
 * the last write (they are ordered after it), or against that write where there are none. */
#include <string.h>

#include "base/assert.h"
#include "core/effect.h"
#include "core/ledger_state.h"

static qe_rule rule_between(qe_stream_role earlier, qe_stream_role later) {
    if (earlier == QE_STREAM_HOST || later == QE_STREAM_HOST) return QE_RULE_SYNC_HOST;
    if (earlier == QE_STREAM_CALLER && later != QE_STREAM_CALLER) return QE_RULE_SYNC_ENTER;
    if (earlier != QE_STREAM_CALLER && later == QE_STREAM_CALLER) return QE_RULE_SYNC_EXIT;
    return QE_RULE_SYNC_SIDE;
}

/* Did the access come before the buffer was allocated where it lies? */
static int is_earlier_user(const qe_judgement *judgement, uint32_t effect_index, const qe_access *other) {
    const qe_effect *effect = &judgement->effects[effect_index];
    if (qe_effect_object_kind(effect->kind) != QE_OBJECT_BUFFER || other->item == QE_NONE) return 0;
    if (judgement->recording != 0) return 0; /* nothing that is recorded has happened */
    return other->item + 1 < judgement->ledger->state[effect->object].key_epoch;
}

static void judge_access(qe_judgement *judgement, uint32_t effect_index, const qe_access *other) {
    if (other->clock == 0) return;
    QE_ASSERT(other->stream < judgement->ledger->stream_count);
    uint32_t seen = judgement->clock.at[other->stream];
    if (seen >= other->clock) return;
    const qe_stream_info *streams = judgement->ledger->program->streams;
    QE_ASSERT(other->stream != judgement->item->stream);
    qe_finding finding = {rule_between(streams[other->stream].role, streams[judgement->item->stream].role),
                          other->clock, seen};
    if (is_earlier_user(judgement, effect_index, other)) {
        finding.rule = QE_RULE_SYNC_REUSE;
        judgement->reused |= 1u << effect_index;
    } else {
        judgement->unordered |= 1u << effect_index;
    }
    qe_judgement_report(judgement, effect_index, &finding, other);
}

void qe_access_judge(qe_judgement *judgement, uint32_t effect_index, const qe_touches *touches) {
    uint32_t reads = 0;
    if (qe_effect_writes(&judgement->effects[effect_index])) {
        for (uint32_t i = 0; i < judgement->ledger->stream_count; i++) {
            if (touches->reads[i].clock == 0) continue;
            judge_access(judgement, effect_index, &touches->reads[i]);
            reads++;
        }
    }
    /* Readers come after the write that they read; earlier users of handed out memory are told all. */
    if (reads == 0 || is_earlier_user(judgement, effect_index, &touches->write))
        judge_access(judgement, effect_index, &touches->write);
}

/* Where the history of an object is: in the world, or in a recording, as the one range of its list. */
static qe_access *write_of(const qe_ledger *ledger, uint32_t object, uint32_t recording, qe_access **reads_out) {
    if (recording == 0) {
        *reads_out = &ledger->reads[(size_t)object * ledger->stream_count];
        return &ledger->writes[object];
    }
    uint32_t id = qe_graph_list(ledger, recording, object)->first;
    *reads_out = &ledger->pool_reads[(size_t)id * ledger->stream_count];
    return &ledger->pool[id].write;
}

void qe_access_check(qe_judgement *judgement, uint32_t effect_index) {
    const qe_ledger *ledger = judgement->ledger;
    uint32_t object = judgement->effects[effect_index].object;
    QE_ASSERT(object < ledger->object_count);
    qe_touches touches;
    touches.write = *write_of(ledger, object, judgement->recording, &touches.reads);
    qe_access_judge(judgement, effect_index, &touches);
}

void qe_access_apply(qe_ledger *ledger, const qe_judgement *judgement, uint32_t effect_index) {
    const qe_effect *effect = &judgement->effects[effect_index];
    uint32_t stream = judgement->item->stream;
    qe_access access = {judgement->clock.at[stream], judgement->index, stream};
    qe_access *reads, *write = write_of(ledger, effect->object, judgement->recording, &reads);
    QE_ASSERT(access.clock > 0);
    if (!qe_effect_writes(effect)) {
        reads[stream] = access;
        return;
    }
    *write = access;
    memset(reads, 0, ledger->stream_count * sizeof *reads);
}

void qe_access_reset(qe_ledger *ledger) {
    size_t reads = (size_t)ledger->object_count * ledger->stream_count;
    if (ledger->object_count > 0) memset(ledger->writes, 0, ledger->object_count * sizeof *ledger->writes);
    if (reads > 0) memset(ledger->reads, 0, reads * sizeof *ledger->reads);
}

/* An item that is known to be right: only its order is taken over. */
static void replay(qe_ledger *ledger, uint32_t index) {
    const qe_item *item = &ledger->program->items[index];
    if (item->kind != QE_ITEM_OP) {
        qe_clock_apply(ledger, item, index);
        return;
    }
    qe_judgement judgement = {.ledger = ledger, .item = item, .index = index, .count = item->effect_count};
    judgement.effects = item->effect_count > 0 ? &ledger->program->effects[item->first_effect] : NULL;
    judgement.clock = qe_clock_next(ledger, item->stream);
    judgement.clock.at[item->stream]++;
    for (uint32_t i = 0; i < judgement.count; i++) {
        if (ledger->program->objects[judgement.effects[i].object].kind == QE_OBJECT_BUFFER)
            qe_range_apply(ledger, &judgement, i);
        else
            qe_access_apply(ledger, &judgement, i);
    }
    qe_clock_run(ledger, item->stream, &judgement.clock);
    for (uint32_t i = 0; i < judgement.count; i++) qe_clock_recordings(ledger, item->stream, &judgement.effects[i]);
}

static void mark_item(qe_ledger *ledger, const qe_item *item) {
    for (uint32_t i = 0; i < item->effect_count; i++) {
        const qe_effect *effect = &ledger->program->effects[item->first_effect + i];
        if (effect->kind == QE_EFFECT_BUFFER_WRITE) qe_range_mark(ledger, effect);
    }
}

void qe_ledger_order_build(qe_ledger *ledger) {
    QE_ASSERT(!ledger->foreign);
    QE_ASSERT(!ledger->departed);
    if (!ledger->order_valid) {
        for (; ledger->marked_items < ledger->unmarked_items; ledger->marked_items++)
            mark_item(ledger, &ledger->program->items[ledger->marked_items]);
        qe_clock_reset(ledger);
        qe_access_reset(ledger);
        qe_range_reset(ledger);
        ledger->order_valid = 1;
        ledger->order_items = 0;
    }
    QE_ASSERT(ledger->order_items <= ledger->cursor);
    for (; ledger->order_items < ledger->cursor; ledger->order_items++) replay(ledger, ledger->order_items);
}
