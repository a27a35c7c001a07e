/* step.c - one right step: what it moves, in which other orders it may stand, and how it looks as a trace. */
#include <stdlib.h>
#include <string.h>

#include "adversary/adversary.h"

void step_init(step *s) {
    memset(s, 0, sizeof *s);
    qe_program_init(&s->program);
}

void step_free(step *s) {
    qe_program_deinit(&s->program);
    sequence_free(&s->right);
    sequence_free(&s->prelude);
    free(s->delta);
    memset(s, 0, sizeof *s);
}

uint64_t effect_moves(const qe_effect *effect) {
    switch (effect->kind) {
    case QE_EFFECT_SCALE_FOLD:
    case QE_EFFECT_SLOT_ACQUIRE:
    case QE_EFFECT_WEIGHT_COMMIT:
    case QE_EFFECT_GRAPH_CAPTURE: return 1;
    case QE_EFFECT_RNG_DRAW: return effect->write ? 0 : effect->end;
    default: return 0;
    }
}

void step_seal(step *s) {
    /* graphs may come behind: at most one for each entry */
    s->delta = calloc(s->program.object_count + s->right.count + 1u, sizeof *s->delta);
    MUST(s->delta != NULL);
    for (uint32_t i = 0; i < s->right.count; i++) {
        entry *e = &s->right.entries[i];
        e->source = i;
        for (uint32_t k = 0; k < e->item.effect_count; k++) {
            const qe_effect *effect = &e->effects[k];
            s->delta[effect->object] += effect_moves(effect);
            if (effect->kind != QE_EFFECT_GRAD_DEPOSIT) continue;
            qe_deposit deposit = {effect->object, effect->microbatch, effect->use};
            MUST(qe_program_add_deposit(&s->program, &deposit, NULL) == QE_OK);
        }
    }
}

void step_number(step *s) {
    for (uint32_t i = 0; i < s->right.count; i++) s->right.entries[i].source = i;
}

int effect_is(const qe_effect *effect, qe_object_kind kind) {
    static const uint8_t last[] = {
        [QE_OBJECT_SCALE] = QE_EFFECT_SCALE_FOLD,    [QE_OBJECT_SLOT] = QE_EFFECT_SLOT_RELEASE,
        [QE_OBJECT_WEIGHT] = QE_EFFECT_WEIGHT_COMMIT, [QE_OBJECT_CACHE] = QE_EFFECT_CACHE_USE,
        [QE_OBJECT_GRAD] = QE_EFFECT_GRAD_TAKE,      [QE_OBJECT_BUFFER] = QE_EFFECT_BUFFER_WRITE,
        [QE_OBJECT_GRAPH] = QE_EFFECT_GRAPH_LAUNCH};
    if (effect->kind == QE_EFFECT_RNG_DRAW) return kind == QE_OBJECT_RNG;
    if (effect->kind >= QE_EFFECT_BUFFER_ALLOC) return kind == QE_OBJECT_BUFFER;
    int found = 0;
    while (effect->kind > last[found]) found++;
    return found == (int)kind;
}

/* docs/rules.md: acquire, release, fold, commit, fill, deposit and take are writes; uses and records commute. */
int effect_writes(const qe_effect *effect) {
    switch (effect->kind) {
    case QE_EFFECT_SCALE_FOLD:
    case QE_EFFECT_SLOT_ACQUIRE:
    case QE_EFFECT_SLOT_RELEASE:
    case QE_EFFECT_WEIGHT_COMMIT:
    case QE_EFFECT_CACHE_FILL:
    case QE_EFFECT_GRAD_DEPOSIT:
    case QE_EFFECT_GRAD_TAKE:
    case QE_EFFECT_BUFFER_WRITE:
    case QE_EFFECT_BUFFER_ALLOC:
    case QE_EFFECT_BUFFER_FREE: return 1;
    case QE_EFFECT_SLOT_BORROW: return effect->write != 0;
    case QE_EFFECT_RNG_DRAW: return effect->write == 0;
    default: return 0;
    }
}

int effects_conflict(const qe_effect *a, const qe_effect *b) {
    if (a->object != b->object) return 0;
    if (!effect_writes(a) && !effect_writes(b)) return 0;
    if (!effect_is(a, QE_OBJECT_BUFFER)) return 1;
    return a->begin < b->end && b->begin < a->end;
}

/* Effects that have to stay in their order though streams do not order them: keys, seals and memory. */
static int keeps_order(const step *s, const qe_effect *a, const qe_effect *b) {
    if (effects_conflict(a, b)) return 1;
    if (effect_is(a, QE_OBJECT_GRAPH) || effect_is(b, QE_OBJECT_GRAPH)) return 1;
    if (a->kind >= QE_EFFECT_BUFFER_ALLOC || b->kind >= QE_EFFECT_BUFFER_ALLOC) return 1;
    const qe_object *x = &s->program.objects[a->object], *y = &s->program.objects[b->object];
    if (x->kind == QE_OBJECT_CACHE && (x->weight == b->object || x->scale == b->object)) return effect_writes(b);
    if (y->kind == QE_OBJECT_CACHE && (y->weight == a->object || y->scale == a->object)) return effect_writes(a);
    if (x->kind == QE_OBJECT_WEIGHT && y->kind == QE_OBJECT_GRAD) return effect_writes(a) && y->weight == a->object;
    if (y->kind == QE_OBJECT_WEIGHT && x->kind == QE_OBJECT_GRAD) return effect_writes(b) && x->weight == b->object;
    return 0;
}

static int neighbours_commute(const step *s, const entry *a, const entry *b) {
    uint8_t first = a->item.kind, second = b->item.kind;
    if (first >= QE_ITEM_SYNC_EVENT || second >= QE_ITEM_SYNC_EVENT) return 0;
    if (a->item.stream == b->item.stream) return 0;
    if (s->program.streams[a->item.stream].role == QE_STREAM_HOST) return 0; /* what the host knows, all know */
    if (s->program.streams[b->item.stream].role == QE_STREAM_HOST) return 0;
    if (first != QE_ITEM_OP && second != QE_ITEM_OP && a->item.event == b->item.event)
        return first == QE_ITEM_WAIT && second == QE_ITEM_WAIT;
    for (uint32_t i = 0; i < a->item.effect_count; i++)
        for (uint32_t k = 0; k < b->item.effect_count; k++)
            if (keeps_order(s, &a->effects[i], &b->effects[k])) return 0;
    return 1;
}

void step_shuffle(step *s, dice *d, uint32_t tries) {
    if (s->traces_only || s->right.count < 2) return; /* implicit order hangs on the order of submission */
    for (uint32_t i = 0; i < tries; i++) {
        entry *at = &s->right.entries[dice_below(d, s->right.count - 1)];
        if (!neighbours_commute(s, &at[0], &at[1])) continue;
        entry kept = at[0];
        at[0] = at[1];
        at[1] = kept;
    }
}

static uint64_t shift(const step *s, uint32_t object, uint32_t steps) {
    return object == QE_NONE || steps == 0 ? 0 : steps * s->delta[object]; /* the first step moves nothing */
}

static void add_entry(const step *s, const entry *e, uint32_t steps, qe_program *out) {
    qe_effect effects[QE_EFFECTS_MAX];
    for (uint32_t k = 0; k < e->item.effect_count; k++) {
        qe_effect *effect = &effects[k];
        *effect = e->effects[k];
        const qe_object *object = &s->program.objects[effect->object];
        if (object->kind == QE_OBJECT_CACHE) {
            effect->version += shift(s, object->weight, steps);
            effect->epoch += shift(s, object->scale, steps);
        } else if (object->kind != QE_OBJECT_BUFFER && object->kind != QE_OBJECT_GRAD) {
            effect->version += shift(s, effect->object, steps);
        }
    }
    MUST(qe_program_add_item(out, &e->item, effects, e->item.effect_count, NULL, NULL) == QE_OK);
}

static void add_plain(qe_program *out, qe_item_kind kind, uint32_t event, uint16_t rank) {
    qe_item item = {.kind = (uint8_t)kind, .microbatch = QE_NONE, .event = event, .rank = rank};
    MUST(qe_program_add_item(out, &item, NULL, 0, NULL, NULL) == QE_OK);
}

static void add_border(const step *s, int apart, qe_program *out) {
    uint16_t ranks = 0;
    for (uint32_t i = 0; i < s->program.stream_count; i++)
        if (s->program.streams[i].rank > ranks) ranks = s->program.streams[i].rank;
    for (uint16_t rank = 0; rank <= ranks; rank++) add_plain(out, QE_ITEM_SYNC_DEVICE, 0, rank);
    for (uint32_t e = 0; apart && e < s->program.event_count; e++) add_plain(out, QE_ITEM_DESTROY, e, 0);
}

void unroll(const step *s, const item_list *edited, uint32_t at, uint32_t count, int apart, qe_program *out,
            uint32_t *starts) {
    qe_program_init(out);
    MUST(qe_program_copy(&s->program, out, NULL) == QE_OK);
    out->item_count = 0;
    out->effect_count = 0;
    for (uint32_t i = 0; i < s->prelude.count; i++) add_entry(s, &s->prelude.entries[i], 0, out);
    for (uint32_t n = 0; n < count; n++) {
        const item_list *list = edited != NULL && n == at ? edited : &s->right;
        add_plain(out, QE_ITEM_STEP_BEGIN, 0, 0);
        starts[n] = out->item_count;
        for (uint32_t i = 0; i < list->count; i++) add_entry(s, &list->entries[i], n, out);
        add_border(s, apart, out);
        add_plain(out, QE_ITEM_STEP_END, 0, 0);
    }
    starts[count] = out->item_count;
}
