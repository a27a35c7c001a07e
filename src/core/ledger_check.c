/* ledger_check.c - the state layer: what one effect may find, and what it leaves behind. Checks are pure. An effect
 * is told its one fault; what only follows from it (a handle that is old because the slot is live) is not repeated. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "core/effect.h"
#include "core/ledger_state.h"

static uint32_t find(qe_finding *findings_out, uint32_t count, qe_rule rule, uint64_t expected, uint64_t found) {
    QE_ASSERT(count < QE_FINDINGS_MAX);
    findings_out[count] = (qe_finding){rule, expected, found};
    return count + 1;
}

static uint32_t check_scale(const qe_ledger *ledger, const qe_effect *effect, qe_finding *out) {
    const qe_object_state *state = &ledger->state[effect->object];
    const qe_object *object = &ledger->program->objects[effect->object];
    uint64_t epoch = qe_version_of(ledger, effect->object, effect->version);
    uint64_t records = state->word & QE_LOW32;
    if (effect->kind == QE_EFFECT_SCALE_FOLD && (state->word & QE_SCALE_FOLDED))
        return find(out, 0, QE_RULE_SCALE_TWICE, 1, 2);
    uint32_t count = 0;
    if (epoch != state->counter) count = find(out, count, QE_RULE_SCALE_EPOCH, epoch, state->counter);
    if (effect->kind == QE_EFFECT_SCALE_FOLD && object->due > 0 && records < object->due)
        count = find(out, count, QE_RULE_SCALE_BUSY, object->due, records);
    return count;
}

static uint64_t owner_word(const qe_effect *effect) {
    return QE_SLOT_LIVE | (uint64_t)effect->stage << 32 | effect->microbatch;
}

static uint32_t check_acquire(const qe_object_state *state, uint64_t generation, qe_finding *out) {
    if (state->word & QE_SLOT_LIVE) return find(out, 0, QE_RULE_SLOT_LIVE, generation, state->counter);
    if (generation != state->counter + 1) return find(out, 0, QE_RULE_SLOT_STALE, generation, state->counter + 1);
    return 0;
}

static uint32_t check_slot(const qe_ledger *ledger, const qe_effect *effect, qe_finding *out) {
    const qe_object_state *state = &ledger->state[effect->object];
    uint64_t generation = qe_version_of(ledger, effect->object, effect->version);
    if (effect->kind == QE_EFFECT_SLOT_ACQUIRE) return check_acquire(state, generation, out);
    /* Generations are released in the order in which they are acquired, so the last one released is known. */
    int live = (state->word & QE_SLOT_LIVE) != 0;
    uint64_t released = live ? state->counter - 1 : state->counter;
    if (effect->kind == QE_EFFECT_SLOT_RELEASE && released != 0 && generation == released)
        return find(out, 0, QE_RULE_SLOT_TWICE, generation, state->counter);
    if (!live) return find(out, 0, QE_RULE_SLOT_EMPTY, generation, state->counter);
    if (generation != state->counter) return find(out, 0, QE_RULE_SLOT_STALE, generation, state->counter);
    if (state->word != owner_word(effect))
        return find(out, 0, QE_RULE_SLOT_OWNER, owner_word(effect) & ~QE_SLOT_LIVE, state->word & ~QE_SLOT_LIVE);
    return 0;
}

/* Is every gradient of the weight taken in this step? A weight without gradients is free. */
static int is_taken(const qe_ledger *ledger, uint32_t weight) {
    for (uint32_t grad = ledger->weight_grad[weight]; grad != QE_NONE; grad = ledger->weight_grad[grad])
        if (!(ledger->state[grad].word & QE_GRAD_TAKEN)) return 0;
    return 1;
}

static uint32_t check_weight(const qe_ledger *ledger, const qe_effect *effect, qe_finding *out) {
    const qe_object_state *state = &ledger->state[effect->object];
    uint64_t version = qe_version_of(ledger, effect->object, effect->version);
    int commits = effect->kind == QE_EFFECT_WEIGHT_COMMIT;
    if (commits && (state->word & QE_WEIGHT_COMMITTED)) return find(out, 0, QE_RULE_WEIGHT_TWICE, 1, 2);
    uint32_t count = 0;
    if (version != state->counter) count = find(out, count, QE_RULE_WEIGHT_VERSION, version, state->counter);
    if (commits && !is_taken(ledger, effect->object)) count = find(out, count, QE_RULE_WEIGHT_UNTAKEN, 1, 0);
    return count;
}

static uint64_t epoch_of(const qe_ledger *ledger, const qe_object *cache, uint64_t epoch) {
    return cache->scale == QE_NONE ? epoch : qe_version_of(ledger, cache->scale, epoch);
}

/* A fill makes its key true, so it may name only what is current. */
static uint32_t check_fill(const qe_ledger *ledger, const qe_effect *effect, qe_finding *out) {
    const qe_object *cache = &ledger->program->objects[effect->object];
    uint64_t version = qe_version_of(ledger, cache->weight, effect->version);
    uint64_t current = ledger->state[cache->weight].counter;
    uint32_t count = 0;
    if (version != current) count = find(out, count, QE_RULE_CACHE_STALE, version, current);
    if (cache->scale == QE_NONE) return count;
    uint64_t epoch = epoch_of(ledger, cache, effect->epoch);
    if (epoch != ledger->state[cache->scale].counter)
        count = find(out, count, QE_RULE_CACHE_SCALE, epoch, ledger->state[cache->scale].counter);
    return count;
}

static uint32_t check_cache(const qe_ledger *ledger, const qe_effect *effect, qe_finding *out) {
    if (effect->kind == QE_EFFECT_CACHE_FILL) return check_fill(ledger, effect, out);
    const qe_object *cache = &ledger->program->objects[effect->object];
    const qe_object_state *state = &ledger->state[effect->object];
    if (!(state->word & QE_CACHE_FILLED)) return find(out, 0, QE_RULE_CACHE_EMPTY, 1, 0);
    uint64_t version = qe_version_of(ledger, cache->weight, effect->version);
    uint64_t current = ledger->state[cache->weight].counter;
    uint64_t epoch = epoch_of(ledger, cache, effect->epoch);
    uint64_t recipe = state->word >> 8 & 0xff;
    uint64_t layouts = state->word & 0xff;
    uint32_t count = 0;
    if (state->key_version != current) count = find(out, count, QE_RULE_CACHE_STALE, current, state->key_version);
    else if (state->key_version != version) count = find(out, count, QE_RULE_CACHE_STALE, version, state->key_version);
    if (state->key_epoch != epoch) count = find(out, count, QE_RULE_CACHE_SCALE, epoch, state->key_epoch);
    if (recipe != effect->recipe) count = find(out, count, QE_RULE_CACHE_RECIPE, effect->recipe, recipe);
    if (effect->layouts & ~layouts) count = find(out, count, QE_RULE_CACHE_LAYOUT, effect->layouts, layouts);
    return count;
}

/* Is the contribution in already? Orders hold each once and ascend mostly, so the search is for departures. */
static int is_in(const qe_grad_order *order, const qe_contribution *list, uint32_t deposits, const qe_effect *effect) {
    if (deposits == 0) return 0;
    if (!order->ordered && effect->microbatch > list[deposits - 1].microbatch) return 0;
    if (order->ordered && deposits < order->length && list[deposits].microbatch == effect->microbatch &&
        list[deposits].use == effect->use)
        return 0;
    for (uint32_t i = 0; i < deposits; i++)
        if (list[i].microbatch == effect->microbatch && list[i].use == effect->use) return 1;
    return 0;
}

/* As records tell it: the use above the microbatch. */
static uint64_t contribution_word(uint32_t microbatch, uint32_t use) { return (uint64_t)use << 32 | microbatch; }

/* The next contribution due, or that it lies before the last one where only the microbatches give an order. */
static uint32_t check_order(const qe_ledger *ledger, const qe_effect *effect, uint32_t deposits, qe_finding *out) {
    const qe_grad_order *order = &ledger->orders[effect->object];
    const qe_contribution *list = &ledger->contributions[order->first];
    if (order->ordered) {
        uint64_t came = contribution_word(effect->microbatch, effect->use);
        if (deposits >= order->length) return find(out, 0, QE_RULE_GRAD_ORDER, QE_NONE, came);
        const qe_contribution *next = &list[deposits];
        if (next->microbatch == effect->microbatch && next->use == effect->use) return 0;
        return find(out, 0, QE_RULE_GRAD_ORDER, contribution_word(next->microbatch, next->use), came);
    }
    uint32_t due = ledger->program->objects[effect->object].due;
    if (due > 0 && deposits >= due) return find(out, 0, QE_RULE_GRAD_ORDER, QE_NONE, effect->microbatch);
    if (deposits == 0 || effect->microbatch >= list[deposits - 1].microbatch) return 0;
    return find(out, 0, QE_RULE_GRAD_ORDER, list[deposits - 1].microbatch, effect->microbatch);
}

static uint32_t check_deposit(const qe_ledger *ledger, const qe_effect *effect, qe_finding *out) {
    uint64_t word = ledger->state[effect->object].word;
    uint32_t deposits = (uint32_t)(word & QE_LOW32);
    if (word & QE_GRAD_TAKEN) return find(out, 0, QE_RULE_GRAD_TAKEN, effect->microbatch, deposits);
    const qe_grad_order *order = &ledger->orders[effect->object];
    if (is_in(order, &ledger->contributions[order->first], deposits, effect))
        return find(out, 0, QE_RULE_GRAD_TWICE, effect->microbatch, effect->use);
    uint32_t count = check_order(ledger, effect, deposits, out);
    if ((effect->write != 0) != (deposits == 0))
        count = find(out, count, QE_RULE_GRAD_SET, deposits == 0, effect->write);
    return count;
}

static uint32_t check_grad(const qe_ledger *ledger, const qe_effect *effect, qe_finding *out) {
    if (effect->kind == QE_EFFECT_GRAD_DEPOSIT) return check_deposit(ledger, effect, out);
    uint64_t word = ledger->state[effect->object].word;
    uint32_t due = ledger->program->objects[effect->object].due;
    if (word & QE_GRAD_TAKEN) return find(out, 0, QE_RULE_GRAD_TAKEN, due, word & QE_LOW32);
    if ((word & QE_LOW32) < due) return find(out, 0, QE_RULE_GRAD_MISSING, due, word & QE_LOW32);
    return 0;
}

uint32_t qe_state_check_range(const qe_ledger *ledger, const qe_effect *effect, qe_finding *out) {
    uint64_t bytes = ledger->program->objects[effect->object].bytes;
    uint32_t slot = ledger->alias[effect->object];
    if (slot != QE_NONE)
        return find(out, 0, QE_RULE_SLOT_ALIAS, ledger->program->objects[slot].address,
                    ledger->program->objects[effect->object].address);
    if (effect->end > bytes) return find(out, 0, QE_RULE_BUFFER_BOUNDS, bytes, effect->end);
    if (effect->begin > effect->end) return find(out, 0, QE_RULE_BUFFER_BOUNDS, effect->end, effect->begin);
    uint64_t reach = qe_effect_reach(effect);
    return reach > bytes ? find(out, 0, QE_RULE_BUFFER_BOUNDS, bytes, reach) : 0;
}

static uint32_t check_buffer(const qe_ledger *ledger, const qe_effect *effect, qe_finding *out) {
    uint32_t count = qe_state_check_range(ledger, effect, out);
    if (count > 0) return count;
    int absent = ledger->state[effect->object].key_version != 0;
    int begins = effect->kind == QE_EFFECT_BUFFER_ALLOC || effect->kind == QE_EFFECT_BUFFER_TAKE;
    if (begins == absent) return 0;
    uint64_t address = ledger->program->objects[effect->object].address;
    return find(out, 0, begins ? QE_RULE_BUFFER_LIVE : QE_RULE_BUFFER_FREED, address, address);
}

/* The draw of this step that began at `offset`, or the first one behind it. Draws ascend. */
static uint32_t draw_at(const qe_ledger *ledger, uint32_t object, uint64_t offset) {
    const qe_draw *draws = &ledger->draws[ledger->orders[object].first];
    uint32_t low = 0, high = (uint32_t)(ledger->state[object].word & QE_LOW32);
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (draws[middle].offset < offset) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* A recompute draws what its forward drew: the same numbers, for the same microbatch, in the same step. */
static int is_drawn(const qe_ledger *ledger, const qe_effect *effect, uint64_t offset) {
    const qe_draw *draws = &ledger->draws[ledger->orders[effect->object].first];
    uint32_t count = (uint32_t)(ledger->state[effect->object].word & QE_LOW32);
    for (uint32_t i = draw_at(ledger, effect->object, offset); i < count && draws[i].offset == offset; i++)
        if (draws[i].count == effect->end && draws[i].microbatch == effect->microbatch) return 1;
    return 0;
}

static uint32_t check_rng(const qe_ledger *ledger, const qe_effect *effect, qe_finding *out) {
    uint64_t offset = qe_version_of(ledger, effect->object, effect->version);
    uint64_t next = ledger->state[effect->object].counter;
    if (effect->write) return is_drawn(ledger, effect, offset) ? 0 : find(out, 0, QE_RULE_RNG_SPLIT, offset, next);
    return offset == next ? 0 : find(out, 0, QE_RULE_RNG_FROZEN, next, offset);
}

static void apply_draw(qe_ledger *ledger, const qe_effect *effect, qe_object_state *state) {
    const qe_grad_order *order = &ledger->orders[effect->object];
    uint32_t count = (uint32_t)(state->word & QE_LOW32);
    if (effect->write) return;
    QE_ASSERT(count < order->length);
    ledger->draws[order->first + count] = (qe_draw){state->counter, effect->end, effect->microbatch};
    state->word++;
    state->counter += effect->end;
}

static uint32_t check_graph(const qe_ledger *ledger, const qe_effect *effect, qe_finding *out) {
    static const qe_rule rules[QE_FROZEN_KINDS] = {[QE_FROZEN_MODE] = QE_RULE_GRAPH_MODE,
                                                   [QE_FROZEN_ADDRESS] = QE_RULE_GRAPH_ADDRESS,
                                                   [QE_FROZEN_CONSTANT] = QE_RULE_GRAPH_CONSTANT};
    uint64_t current = ledger->state[effect->object].counter;
    uint64_t seal = qe_version_of(ledger, effect->object, effect->version);
    if (effect->kind == QE_EFFECT_GRAPH_BEGIN) return 0;
    if (effect->kind == QE_EFFECT_GRAPH_CAPTURE)
        return seal == current + 1 ? 0 : find(out, 0, QE_RULE_GRAPH_STALE, seal, current + 1);
    QE_ASSERT(effect->use < QE_FROZEN_KINDS);
    if (current == 0) return find(out, 0, QE_RULE_GRAPH_EMPTY, seal, 0);
    if (seal != current) return find(out, 0, QE_RULE_GRAPH_STALE, seal, current);
    if (effect->use == QE_FROZEN_NOTHING || effect->begin == effect->end) return 0;
    return find(out, 0, rules[effect->use], effect->begin, effect->end);
}

uint32_t qe_state_check(const qe_ledger *ledger, const qe_effect *effect, qe_finding *findings_out) {
    QE_ASSERT(effect->object < ledger->object_count);
    switch (ledger->program->objects[effect->object].kind) {
    case QE_OBJECT_SCALE: return check_scale(ledger, effect, findings_out);
    case QE_OBJECT_SLOT: return check_slot(ledger, effect, findings_out);
    case QE_OBJECT_WEIGHT: return check_weight(ledger, effect, findings_out);
    case QE_OBJECT_CACHE: return check_cache(ledger, effect, findings_out);
    case QE_OBJECT_GRAD: return check_grad(ledger, effect, findings_out);
    case QE_OBJECT_BUFFER: return check_buffer(ledger, effect, findings_out);
    case QE_OBJECT_GRAPH: return check_graph(ledger, effect, findings_out);
    case QE_OBJECT_RNG: return check_rng(ledger, effect, findings_out);
    case QE_OBJECT_KINDS: break;
    }
    return 0;
}

static void apply_fill(const qe_ledger *ledger, const qe_effect *effect, qe_object_state *state) {
    const qe_object *cache = &ledger->program->objects[effect->object];
    uint64_t version = qe_version_of(ledger, cache->weight, effect->version);
    uint64_t epoch = epoch_of(ledger, cache, effect->epoch);
    uint64_t word = QE_CACHE_FILLED | QE_CACHE_FRESH | (uint64_t)effect->recipe << 8 | effect->layouts;
    /* Layouts that were filled in this step under the same key are one unit with the new ones; older ones are not. */
    int same = (state->word & QE_CACHE_FRESH) && state->key_version == version && state->key_epoch == epoch &&
               (state->word >> 8 & 0xff) == effect->recipe;
    if (same) word |= state->word & 0xff;
    state->word = word;
    state->key_version = version;
    state->key_epoch = epoch;
}

/* A list moves behind the others when it is full, with twice the room. */
static qe_status grow_list(void *array, uint32_t *capacity, uint32_t end, size_t bytes, qe_grad_order *list) {
    uint32_t room = list->length > 0 ? 2 * list->length : 4;
    if (list->length > QE_PROGRAM_MAX / 2 || end > QE_PROGRAM_MAX - room) return QE_ERROR_LIMIT;
    unsigned char *old;
    memcpy(&old, array, sizeof old);
    if (end + room > *capacity) {
        uint32_t wanted = 2 * (end + room);
        old = realloc(old, wanted * bytes);
        if (old == NULL) return QE_ERROR_MEMORY;
        memcpy(array, &old, sizeof old);
        *capacity = wanted;
    }
    memcpy(old + end * bytes, old + list->first * bytes, list->length * bytes);
    list->first = end;
    list->length = room;
    return QE_OK;
}

qe_status qe_state_reserve(qe_ledger *ledger, const qe_effect *effect) {
    int draws = effect->kind == QE_EFFECT_RNG_DRAW && !effect->write;
    qe_grad_order *list = &ledger->orders[effect->object];
    if (!draws && (effect->kind != QE_EFFECT_GRAD_DEPOSIT || list->ordered)) return QE_OK;
    if ((ledger->state[effect->object].word & QE_LOW32) < list->length) return QE_OK;
    uint32_t end = ledger->contribution_count;
    qe_status status = draws ? grow_list(&ledger->draws, &ledger->draw_capacity, end, sizeof *ledger->draws, list)
                             : grow_list(&ledger->contributions, &ledger->contribution_capacity, end,
                                         sizeof *ledger->contributions, list);
    if (status == QE_OK) ledger->contribution_count += list->length;
    return status;
}

static void apply_deposit(qe_ledger *ledger, const qe_effect *effect, qe_object_state *state) {
    const qe_grad_order *order = &ledger->orders[effect->object];
    uint32_t deposits = (uint32_t)(state->word & QE_LOW32);
    QE_ASSERT(deposits < order->length);
    if (!order->ordered)
        ledger->contributions[order->first + deposits] = (qe_contribution){effect->microbatch, effect->use};
    state->word++;
}

void qe_state_apply(qe_ledger *ledger, const qe_effect *effect) {
    QE_ASSERT(effect->object < ledger->object_count);
    qe_object_state *state = &ledger->state[effect->object];
    if (ledger->foreign) qe_state_touch(ledger, effect->object);
    switch ((qe_effect_kind)effect->kind) {
    case QE_EFFECT_SCALE_RECORD: state->word = (state->word + 1) | QE_SCALE_PENDING; break;
    case QE_EFFECT_SCALE_FOLD:
        state->counter++;
        state->word = (state->word & ~QE_SCALE_PENDING) | QE_SCALE_FOLDED;
        break;
    case QE_EFFECT_SLOT_ACQUIRE:
        state->counter++;
        state->word = owner_word(effect);
        break;
    case QE_EFFECT_SLOT_RELEASE: state->word = 0; break;
    case QE_EFFECT_WEIGHT_COMMIT:
        state->counter++;
        state->word |= QE_WEIGHT_COMMITTED;
        break;
    case QE_EFFECT_CACHE_FILL: apply_fill(ledger, effect, state); break;
    case QE_EFFECT_GRAD_DEPOSIT: apply_deposit(ledger, effect, state); break;
    case QE_EFFECT_GRAD_TAKE:
        state->counter++;
        state->word |= QE_GRAD_TAKEN;
        break;
    case QE_EFFECT_BUFFER_WRITE: state->word++; break;
    case QE_EFFECT_GRAPH_CAPTURE: state->counter++; break;
    case QE_EFFECT_BUFFER_ALLOC:
    case QE_EFFECT_BUFFER_TAKE: state->key_version = 0; break;
    case QE_EFFECT_BUFFER_FREE:
    case QE_EFFECT_BUFFER_DROP: state->key_version = 1; break;
    case QE_EFFECT_RNG_DRAW: apply_draw(ledger, effect, state); break;
    case QE_EFFECT_BUFFER_PLEDGE:
    case QE_EFFECT_SCALE_USE:
    case QE_EFFECT_SLOT_BORROW:
    case QE_EFFECT_WEIGHT_READ:
    case QE_EFFECT_CACHE_USE:
    case QE_EFFECT_BUFFER_READ:
    case QE_EFFECT_GRAPH_BEGIN:
    case QE_EFFECT_GRAPH_LAUNCH:
    case QE_EFFECT_KINDS: break;
    }
}

static uint32_t check_scale_end(const qe_object *object, uint64_t word, qe_finding *out) {
    uint64_t records = word & QE_LOW32;
    /* With records missing, no fold was allowed: that there is none only follows. */
    if (records > 0 && records < object->due) return find(out, 0, QE_RULE_SCALE_LOST, object->due, records);
    if (word & QE_SCALE_PENDING) return find(out, 0, QE_RULE_SCALE_UNFOLDED, 1, 0);
    return 0;
}

static uint32_t check_grad_end(const qe_object *object, uint64_t word, qe_finding *out) {
    uint64_t deposits = word & QE_LOW32;
    if (word & QE_GRAD_TAKEN) return 0;
    if (deposits == 0 && object->due == 0) return 0;
    return find(out, 0, QE_RULE_GRAD_MISSING, object->due, deposits);
}

uint32_t qe_state_check_end(const qe_ledger *ledger, uint32_t object, qe_finding *findings_out) {
    QE_ASSERT(object < ledger->object_count);
    const qe_object *described = &ledger->program->objects[object];
    const qe_object_state *state = &ledger->state[object];
    if (described->kind == QE_OBJECT_SCALE) return check_scale_end(described, state->word, findings_out);
    if (described->kind == QE_OBJECT_GRAD) return check_grad_end(described, state->word, findings_out);
    if (described->kind != QE_OBJECT_SLOT || !(state->word & QE_SLOT_LIVE)) return 0;
    return find(findings_out, 0, QE_RULE_SLOT_LEAK, 0, state->counter);
}

static void begin_object(qe_ledger *ledger, uint32_t object) {
    qe_object_state *state = &ledger->state[object];
    qe_object_kind kind = ledger->program->objects[object].kind;
    if (kind == QE_OBJECT_CACHE) state->word &= ~QE_CACHE_FRESH;
    else if (kind != QE_OBJECT_SLOT) state->word = 0; /* a trace may begin a step with live slots */
}

void qe_state_touch(qe_ledger *ledger, uint32_t object) {
    QE_ASSERT(ledger->foreign);
    if (ledger->is_touched[object]) return;
    QE_ASSERT(ledger->touched_count < ledger->object_count);
    ledger->is_touched[object] = 1;
    ledger->touched[ledger->touched_count++] = object;
}

/* Is the object looked at in the next step, touched or not? */
static int stays_touched(const qe_ledger *ledger, uint32_t object) {
    const qe_object *described = &ledger->program->objects[object];
    if (described->kind == QE_OBJECT_GRAD) return described->due > 0;
    return described->kind == QE_OBJECT_SLOT && (ledger->state[object].word & QE_SLOT_LIVE);
}

static void begin_touched(qe_ledger *ledger) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < ledger->touched_count; i++) {
        uint32_t object = ledger->touched[i];
        begin_object(ledger, object);
        ledger->is_touched[object] = (uint8_t)stays_touched(ledger, object);
        if (ledger->is_touched[object]) ledger->touched[kept++] = object;
    }
    ledger->touched_count = kept;
}

void qe_state_begin_step(qe_ledger *ledger) {
    if (ledger->foreign) begin_touched(ledger);
    else
        for (uint32_t i = 0; i < ledger->object_count; i++) begin_object(ledger, i);
}
