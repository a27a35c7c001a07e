/* ledger_compile.c - what the certified way compares and stores for an item. It is read off a judged step: every
 * counter relative to the step's beginning, every word as it was. Cells are numbered through the block that holds a
 * zero state, the states now, and the states at the step's beginning. */
#include <stdlib.h>

#include "base/assert.h"
#include "core/ledger_state.h"

enum { CELL_COUNTER, CELL_WORD, CELL_KEY_VERSION, CELL_KEY_EPOCH };
enum { CELL_ZERO = 0, FIRST_CELL_OPS = 1024 };

static uint32_t cell_now(uint32_t object, uint32_t field) { return (1 + object) * QE_STATE_CELLS + field; }

static uint32_t cell_begin(const qe_ledger *ledger, uint32_t object) {
    return (1 + ledger->object_count + object) * QE_STATE_CELLS + CELL_COUNTER;
}

qe_status qe_compile_begin(qe_ledger *ledger, qe_error *error_out) {
    ledger->certified = 0;
    ledger->cell_op_count = 0;
    if (ledger->cell_ops != NULL) return QE_OK;
    ledger->cell_ops = malloc(FIRST_CELL_OPS * sizeof *ledger->cell_ops);
    if (ledger->cell_ops == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to certify");
    ledger->cell_op_capacity = FIRST_CELL_OPS;
    return QE_OK;
}

/* Cell operations of one item at most: per effect, a cache compares its three cells, its weight and its scale. */
enum { OPS_PER_EFFECT = 5, OPS_PER_ITEM = QE_EFFECTS_MAX * OPS_PER_EFFECT };

static qe_status reserve(qe_ledger *ledger, uint32_t more, qe_error *error_out) {
    if (ledger->cell_op_count + more <= ledger->cell_op_capacity) return QE_OK;
    uint32_t capacity = ledger->cell_op_capacity * 2;
    qe_cell_op *grown = realloc(ledger->cell_ops, capacity * sizeof *grown);
    if (grown == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to certify");
    ledger->cell_ops = grown;
    ledger->cell_op_capacity = capacity;
    return QE_OK;
}

static void emit(qe_ledger *ledger, uint32_t cell, uint32_t base, uint64_t value) {
    QE_ASSERT(ledger->cell_op_count < ledger->cell_op_capacity);
    ledger->cell_ops[ledger->cell_op_count++] = (qe_cell_op){cell, base, value};
}

/* `value` of a cell, told from the counter that `object` had at the step's beginning. */
static void emit_from(qe_ledger *ledger, const qe_ledger *judged, uint32_t cell, uint32_t object, uint64_t value) {
    if (object == QE_NONE) emit(ledger, cell, CELL_ZERO, value);
    else emit(ledger, cell, cell_begin(ledger, object), value - judged->begin[object].counter);
}

static void emit_key(qe_ledger *ledger, const qe_ledger *judged, uint32_t object, const qe_object_state *state) {
    const qe_object *cache = &ledger->program->objects[object];
    emit(ledger, cell_now(object, CELL_WORD), CELL_ZERO, state->word);
    emit_from(ledger, judged, cell_now(object, CELL_KEY_VERSION), cache->weight, state->key_version);
    emit_from(ledger, judged, cell_now(object, CELL_KEY_EPOCH), cache->scale, state->key_epoch);
}

/* Counter that an object had before the item: saved with the item's own effects, or untouched by it. */
static uint64_t counter_before(const qe_ledger *judged, const qe_item *item, const qe_object_state *before,
                               uint32_t object) {
    const qe_effect *effects = &judged->program->effects[item->first_effect];
    for (uint32_t i = 0; i < item->effect_count; i++)
        if (effects[i].object == object) return before[i].counter;
    return judged->state[object].counter;
}

/* A use needs the whole key, and both need what the key is made from. */
static void compare_cache(qe_ledger *ledger, const qe_ledger *judged, const qe_item *item, uint32_t first,
                          const qe_object_state *before) {
    const qe_effect *effect = &judged->program->effects[item->first_effect + first];
    const qe_object *cache = &ledger->program->objects[effect->object];
    if (effect->kind == QE_EFFECT_CACHE_USE) emit_key(ledger, judged, effect->object, &before[first]);
    emit_from(ledger, judged, cell_now(cache->weight, CELL_COUNTER), cache->weight,
              counter_before(judged, item, before, cache->weight));
    if (effect->kind == QE_EFFECT_CACHE_FILL && cache->scale != QE_NONE)
        emit_from(ledger, judged, cell_now(cache->scale, CELL_COUNTER), cache->scale,
                  counter_before(judged, item, before, cache->scale));
}

static void compare_object(qe_ledger *ledger, const qe_ledger *judged, const qe_item *item, uint32_t first,
                           const qe_object_state *before) {
    uint32_t object = judged->program->effects[item->first_effect + first].object;
    if (ledger->program->objects[object].kind == QE_OBJECT_CACHE) {
        compare_cache(ledger, judged, item, first, before);
        return;
    }
    emit_from(ledger, judged, cell_now(object, CELL_COUNTER), object, before[first].counter);
    emit(ledger, cell_now(object, CELL_WORD), CELL_ZERO, before[first].word);
}

static void store_object(qe_ledger *ledger, const qe_ledger *judged, const qe_effect *first, int filled,
                         const qe_object_state *before) {
    uint32_t object = first->object;
    const qe_object_state *after = &judged->state[object];
    if (ledger->program->objects[object].kind == QE_OBJECT_CACHE) {
        if (filled) emit_key(ledger, judged, object, after);
        return;
    }
    if (after->counter != before->counter)
        emit_from(ledger, judged, cell_now(object, CELL_COUNTER), object, after->counter);
    if (after->word != before->word) emit(ledger, cell_now(object, CELL_WORD), CELL_ZERO, after->word);
}

static int is_first(const qe_effect *effects, uint32_t index) {
    for (uint32_t i = 0; i < index; i++)
        if (effects[i].object == effects[index].object) return 0;
    return 1;
}

static int fills(const qe_effect *effects, uint32_t count, uint32_t object) {
    for (uint32_t i = 0; i < count; i++)
        if (effects[i].object == object && effects[i].kind == QE_EFFECT_CACHE_FILL) return 1;
    return 0;
}

qe_status qe_compile_item(qe_ledger *ledger, const qe_ledger *judged, uint32_t index, const qe_object_state *before,
                          qe_error *error_out) {
    const qe_item *item = &ledger->program->items[index];
    const qe_effect *effects = item->effect_count > 0 ? &ledger->program->effects[item->first_effect] : NULL;
    QE_TRY(reserve(ledger, 2 * OPS_PER_ITEM, error_out));
    qe_compiled *compiled = &ledger->compiled[index];
    compiled->first = ledger->cell_op_count;
    for (uint32_t i = 0; i < item->effect_count; i++)
        if (is_first(effects, i)) compare_object(ledger, judged, item, i, before);
    compiled->compares = (uint16_t)(ledger->cell_op_count - compiled->first);
    for (uint32_t i = 0; i < item->effect_count; i++) {
        int filled = fills(effects, item->effect_count, effects[i].object);
        if (is_first(effects, i)) store_object(ledger, judged, &effects[i], filled, &before[i]);
    }
    compiled->stores = (uint16_t)(ledger->cell_op_count - compiled->first - compiled->compares);
    return QE_OK;
}
