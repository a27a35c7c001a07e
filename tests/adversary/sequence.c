/* sequence.c - a program's items as a list of entries that carry their own effects, so that edits are simple. */
#include <stdlib.h>
#include <string.h>

#include "adversary/adversary.h"

void sequence_free(item_list *list) {
    free(list->entries);
    memset(list, 0, sizeof *list);
}

static void reserve(item_list *list, uint32_t count) {
    if (count <= list->capacity) return;
    uint32_t capacity = 2 * count;
    entry *grown = realloc(list->entries, capacity * sizeof *grown);
    MUST(grown != NULL);
    list->entries = grown;
    list->capacity = capacity;
}

void sequence_copy(item_list *into, const item_list *from) {
    reserve(into, from->count);
    if (from->count > 0) memcpy(into->entries, from->entries, from->count * sizeof *from->entries);
    into->count = from->count;
}

void sequence_of(item_list *into, const qe_program *program) {
    into->count = 0;
    reserve(into, program->item_count);
    for (uint32_t i = 0; i < program->item_count; i++) {
        entry *e = &into->entries[into->count++];
        e->item = program->items[i];
        e->source = i;
        e->changed = 0;
        memset(e->effects, 0, sizeof e->effects);
        for (uint32_t k = 0; k < e->item.effect_count; k++) e->effects[k] = program->effects[e->item.first_effect + k];
    }
}

entry *sequence_insert(item_list *list, uint32_t at, const entry *added) {
    entry copy = *added;
    MUST(at <= list->count);
    reserve(list, list->count + 1);
    memmove(&list->entries[at + 1], &list->entries[at], (list->count - at) * sizeof copy);
    list->entries[at] = copy;
    list->count++;
    return &list->entries[at];
}

void sequence_remove(item_list *list, uint32_t at) {
    MUST(at < list->count);
    list->count--;
    memmove(&list->entries[at], &list->entries[at + 1], (list->count - at) * sizeof *list->entries);
}

void sequence_drop_effect(item_list *list, uint32_t at, uint32_t effect) {
    entry *e = &list->entries[at];
    MUST(effect < e->item.effect_count);
    e->item.effect_count--;
    memmove(&e->effects[effect], &e->effects[effect + 1], (e->item.effect_count - effect) * sizeof *e->effects);
    e->changed = 1;
}

void sequence_move(item_list *list, uint32_t from, uint32_t to) {
    entry moved = list->entries[from];
    sequence_remove(list, from);
    sequence_insert(list, to, &moved);
}
