/* mutate.c - draws an operator and keeps what it plants; and what operators share. */
#include <string.h>

#include "adversary/adversary.h"

const char *const fault_words[FAULT_KINDS] = {
    [FAULT_DROP] = "dropped",           [FAULT_DUPLICATE] = "duplicated",     [FAULT_EARLY] = "early",
    [FAULT_LATE] = "late",              [FAULT_SWAP] = "swapped",             [FAULT_STALE] = "stale handle",
    [FAULT_FUTURE] = "future handle",   [FAULT_OWNER] = "wrong owner",        [FAULT_CONSTANT] = "changed constant",
    [FAULT_ADDRESS] = "moved address",  [FAULT_RANGE] = "wrong range",        [FAULT_FORGET] = "lost work",
    [FAULT_REUSE] = "used after",       [FAULT_EDGE] = "missing edge",        [FAULT_STREAM] = "wrong stream",
    [FAULT_HOST] = "host access",       [FAULT_RECORDING] = "broken capture", [FAULT_HARMLESS] = "harmless change",
};

int pick_effect(mutant *m, qe_effect_kind kind, place *out) {
    const item_list *right = &m->step->right;
    uint32_t seen = 0;
    for (uint32_t i = 0; i < right->count; i++)
        for (uint32_t k = 0; k < right->entries[i].item.effect_count; k++)
            if (right->entries[i].effects[k].kind == kind && dice_one_in(m->dice, ++seen)) *out = (place){i, k};
    return seen > 0;
}

int pick_item(mutant *m, qe_item_kind kind, uint32_t *out) {
    const item_list *right = &m->step->right;
    uint32_t seen = 0;
    for (uint32_t i = 0; i < right->count; i++)
        if (right->entries[i].item.kind == kind && dice_one_in(m->dice, ++seen)) *out = i;
    return seen > 0;
}

static int fits(const qe_effect *effect, uint32_t object, uint64_t kinds) {
    return effect->object == object && (kinds >> effect->kind & 1);
}

int find_next(const item_list *list, place from, uint32_t object, uint64_t kinds, place *out) {
    for (uint32_t i = from.entry; i < list->count; i++)
        for (uint32_t k = i == from.entry ? from.effect + 1 : 0; k < list->entries[i].item.effect_count; k++)
            if (fits(&list->entries[i].effects[k], object, kinds)) {
                *out = (place){i, k};
                return 1;
            }
    return 0;
}

int find_previous(const item_list *list, place from, uint32_t object, uint64_t kinds, place *out) {
    for (uint32_t i = from.entry + 1; i-- > 0;)
        for (uint32_t k = i == from.entry ? from.effect : list->entries[i].item.effect_count; k-- > 0;)
            if (fits(&list->entries[i].effects[k], object, kinds)) {
                *out = (place){i, k};
                return 1;
            }
    return 0;
}

uint32_t count_effects(const item_list *list, uint32_t object, qe_effect_kind kind) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < list->count; i++)
        for (uint32_t k = 0; k < list->entries[i].item.effect_count; k++)
            if (fits(&list->entries[i].effects[k], object, bit_of((unsigned)kind))) count++;
    return count;
}

uint64_t counter_at(const mutant *m, uint32_t object) {
    return m->step->program.objects[object].counter + m->at_step * m->step->delta[object];
}

void insert_effect(mutant *m, uint32_t at, place like, const qe_effect *effect) {
    entry added = m->step->right.entries[like.entry];
    memset(added.effects, 0, sizeof added.effects);
    added.effects[0] = *effect;
    added.item.effect_count = 1;
    added.source = QE_NONE;
    added.changed = 1;
    sequence_insert(&m->list, at, &added);
}

void mutant_free(mutant *m) { sequence_free(&m->list); }

static const fault_operator *const tables[] = {state_operators, move_operators, order_operators, memory_operators};

static uint32_t table_count(uint32_t table) {
    const uint32_t counts[] = {state_operator_count, move_operator_count, order_operator_count,
                               memory_operator_count};
    return counts[table];
}

static const fault_operator *operator_at(uint32_t index) {
    for (uint32_t table = 0; table < sizeof tables / sizeof *tables; table++) {
        if (index < table_count(table)) return &tables[table][index];
        index -= table_count(table);
    }
    return NULL;
}

uint32_t operator_count(void) {
    uint32_t count = 0;
    for (uint32_t table = 0; table < sizeof tables / sizeof *tables; table++) count += table_count(table);
    return count;
}

const char *operator_name(uint32_t index) { return operator_at(index)->name; }

int mutate(mutant *m) {
    enum { TRIES = 50 };
    for (int i = 0; i < TRIES; i++) {
        const fault_operator *op = operator_at(dice_below(m->dice, operator_count()));
        if (op->traces_only && !m->in_trace) continue;
        sequence_copy(&m->list, &m->step->right);
        m->where = NOWHERE;
        m->later = 0;
        m->rules = 0;
        m->kind = op->kind;
        m->operator_name = op->name;
        if (op->plant(m)) return 1;
    }
    return 0;
}
