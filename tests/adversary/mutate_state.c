/* mutate_state.c - one effect is another one than it was, or is not there, or is there twice. Each operator says which
 * rule that breaks first and at which entry, from what the right step does and from nothing else. */
#include "adversary/adversary.h"

#define SET(a) bit_of(QE_EFFECT_##a)
#define USES_OF_SLOT (SET(SLOT_ACQUIRE) | SET(SLOT_BORROW) | SET(SLOT_RELEASE))

/* Chooses an effect to change; NULL where the step has none. */
static qe_effect *change(mutant *m, qe_effect_kind kind, place *at) {
    if (!pick_effect(m, kind, at)) return NULL;
    m->list.entries[at->entry].changed = 1;
    return effect_at(&m->list, *at);
}

static const qe_object *object_of(const mutant *m, const qe_effect *effect) {
    return &m->step->program.objects[effect->object];
}

static uint64_t off_by(mutant *m) { return m->kind == FAULT_STALE ? (uint64_t)0 - 1 - dice_below(m->dice, 2) : 1; }

static qe_effect_kind one_of(mutant *m, const uint8_t *kinds, uint32_t count) {
    return (qe_effect_kind)kinds[dice_below(m->dice, count)];
}
#define ONE_OF(m, ...) one_of(m, (const uint8_t[]){__VA_ARGS__}, sizeof((const uint8_t[]){__VA_ARGS__}))

/* ---- another version ---- */

static int other_version(mutant *m, qe_effect_kind kind, qe_rule rule) {
    place at;
    qe_effect *effect = change(m, kind, &at);
    if (effect == NULL) return 0;
    effect->version += off_by(m);
    return predict(m, at.entry, bit_of(rule));
}

static int scale_version(mutant *m) {
    return other_version(m, ONE_OF(m, QE_EFFECT_SCALE_USE, QE_EFFECT_SCALE_RECORD, QE_EFFECT_SCALE_FOLD),
                         QE_RULE_SCALE_EPOCH);
}
static int slot_version(mutant *m) {
    return other_version(m, ONE_OF(m, QE_EFFECT_SLOT_ACQUIRE, QE_EFFECT_SLOT_BORROW), QE_RULE_SLOT_STALE);
}
static int weight_version(mutant *m) {
    return other_version(m, ONE_OF(m, QE_EFFECT_WEIGHT_READ, QE_EFFECT_WEIGHT_COMMIT), QE_RULE_WEIGHT_VERSION);
}
static int cache_version(mutant *m) {
    return other_version(m, ONE_OF(m, QE_EFFECT_CACHE_USE, QE_EFFECT_CACHE_FILL), QE_RULE_CACHE_STALE);
}
static int graph_version(mutant *m) {
    return other_version(m, ONE_OF(m, QE_EFFECT_GRAPH_CAPTURE, QE_EFFECT_GRAPH_LAUNCH), QE_RULE_GRAPH_STALE);
}

/* The generation before the live one was released last, so its handle is released twice; older ones, and generation 0,
 * which never was, are stale. */
static int release_version(mutant *m) {
    place at;
    qe_effect *effect = change(m, QE_EFFECT_SLOT_RELEASE, &at);
    if (effect == NULL) return 0;
    uint64_t live = counter_at(m, effect->object) + effect->version, by = off_by(m);
    effect->version += by;
    int twice = by == (uint64_t)0 - 1 && live > 1;
    return predict(m, at.entry, bit_of(twice ? QE_RULE_SLOT_TWICE : QE_RULE_SLOT_STALE));
}

static int cache_epoch(mutant *m) {
    place at;
    qe_effect *effect = change(m, ONE_OF(m, QE_EFFECT_CACHE_USE, QE_EFFECT_CACHE_FILL), &at);
    if (effect == NULL) return 0;
    /* a fill with no scale may name any epoch; then its next use is the one that does not fit */
    if (effect->kind == QE_EFFECT_CACHE_FILL && object_of(m, effect)->scale == QE_NONE) return 0;
    effect->epoch += off_by(m);
    return predict(m, at.entry, bit_of(QE_RULE_CACHE_SCALE));
}

static int read_version(mutant *m) {
    place at;
    qe_effect *effect = change(m, QE_EFFECT_BUFFER_READ, &at);
    if (effect == NULL || effect->version == 0) return 0;
    effect->version += m->kind == FAULT_FUTURE ? 1 : effect->version > 1 ? (uint64_t)0 - 1 : 1;
    return 1; /* precedence.c knows what the bytes are */
}

/* ---- another owner ---- */

static int slot_owner(mutant *m) {
    place at, next;
    qe_effect_kind kind = ONE_OF(m, QE_EFFECT_SLOT_ACQUIRE, QE_EFFECT_SLOT_BORROW, QE_EFFECT_SLOT_RELEASE);
    qe_effect *effect = change(m, kind, &at);
    if (effect == NULL) return 0;
    switch (dice_below(m->dice, 3)) {
    case 0: effect->microbatch++; break;
    case 1: effect->stage++; break;
    default: effect->microbatch = effect->microbatch == QE_NONE ? 0 : QE_NONE;
    }
    if (effect->kind != QE_EFFECT_SLOT_ACQUIRE) return predict(m, at.entry, bit_of(QE_RULE_SLOT_OWNER));
    if (!find_next(&m->list, at, effect->object, USES_OF_SLOT, &next)) return 0;
    return predict(m, next.entry, bit_of(QE_RULE_SLOT_OWNER));
}

/* The slot of somebody else, by its right handle. */
static int other_slot(mutant *m) {
    place at, last;
    qe_effect *effect = change(m, QE_EFFECT_SLOT_BORROW, &at);
    if (effect == NULL) return 0;
    uint32_t own = effect->object, first = dice_below(m->dice, m->step->program.object_count);
    for (uint32_t i = 0; i < m->step->program.object_count; i++) {
        uint32_t slot = (first + i) % m->step->program.object_count;
        if (slot == own || m->step->program.objects[slot].kind != QE_OBJECT_SLOT) continue;
        if (!find_previous(&m->list, at, slot, USES_OF_SLOT, &last)) continue;
        const qe_effect *live = effect_at(&m->list, last);
        if (live->kind == QE_EFFECT_SLOT_RELEASE) continue;
        if (live->stage == effect->stage && live->microbatch == effect->microbatch) continue;
        effect->object = slot;
        effect->version = live->version;
        return predict(m, at.entry, bit_of(QE_RULE_SLOT_OWNER));
    }
    return 0;
}

static int is_due(const mutant *m, const qe_effect *effect, place before) {
    const item_list *right = &m->step->right;
    place at = before;
    while (find_previous(right, at, effect->object, SET(GRAD_DEPOSIT), &at)) {
        const qe_effect *other = effect_at(right, at);
        if (other->microbatch == effect->microbatch && other->use == effect->use) return 0;
    }
    return 1;
}

/* A contribution that is in already is there twice; one that is not due now, or never, is out of order. */
static int deposit_owner(mutant *m) {
    place at;
    qe_effect *effect = change(m, QE_EFFECT_GRAD_DEPOSIT, &at);
    if (effect == NULL) return 0;
    uint32_t kept = effect->microbatch;
    if (dice_one_in(m->dice, 3)) effect->use++;
    else effect->microbatch = kept > 0 && dice_one_in(m->dice, 2) ? kept - 1 : kept + 1;
    return predict(m, at.entry, bit_of(is_due(m, effect, at) ? QE_RULE_GRAD_ORDER : QE_RULE_GRAD_TWICE));
}

static int deposit_sets(mutant *m) {
    place at;
    qe_effect *effect = change(m, QE_EFFECT_GRAD_DEPOSIT, &at);
    if (effect == NULL) return 0;
    effect->write = !effect->write;
    return predict(m, at.entry, bit_of(QE_RULE_GRAD_SET));
}

/* ---- another recipe, layout, constant, address, range ---- */

static int use_recipe(mutant *m) {
    place at;
    qe_effect *effect = change(m, QE_EFFECT_CACHE_USE, &at);
    if (effect == NULL) return 0;
    effect->recipe = (uint8_t)(effect->recipe + 1 + dice_below(m->dice, 4));
    return predict(m, at.entry, bit_of(QE_RULE_CACHE_RECIPE));
}

static int use_layout(mutant *m) {
    place at;
    qe_effect *effect = change(m, QE_EFFECT_CACHE_USE, &at);
    if (effect == NULL) return 0;
    effect->layouts = (uint8_t)(effect->layouts | 4u << dice_below(m->dice, 6)); /* no plan fills these */
    return predict(m, at.entry, bit_of(QE_RULE_CACHE_LAYOUT));
}

/* The next effect on a cache behind a fill that has nothing before it in the step, if it is a use. */
static int first_use_behind(mutant *m, place fill, place *use) {
    uint32_t cache = effect_at(&m->step->right, fill)->object;
    place other;
    if (find_previous(&m->step->right, fill, cache, SET(CACHE_FILL), &other)) return 0;
    if (!find_next(&m->step->right, fill, cache, SET(CACHE_FILL) | SET(CACHE_USE), use)) return 0;
    return effect_at(&m->step->right, *use)->kind == QE_EFFECT_CACHE_USE;
}

static int fill_recipe(mutant *m) {
    place at, use;
    qe_effect *effect = change(m, QE_EFFECT_CACHE_FILL, &at);
    if (effect == NULL || !first_use_behind(m, at, &use)) return 0;
    effect->recipe++;
    return predict(m, use.entry, bit_of(QE_RULE_CACHE_RECIPE));
}

static int fill_layout(mutant *m) {
    place at, use;
    qe_effect *effect = change(m, QE_EFFECT_CACHE_FILL, &at);
    if (effect == NULL || !first_use_behind(m, at, &use)) return 0;
    effect->layouts = (uint8_t)(effect->layouts & ~effect_at(&m->step->right, use)->layouts);
    return predict(m, use.entry, bit_of(QE_RULE_CACHE_LAYOUT));
}

static int frozen(mutant *m, qe_frozen what, qe_rule rule) {
    place at;
    qe_effect *effect = change(m, QE_EFFECT_GRAPH_LAUNCH, &at);
    if (effect == NULL) return 0;
    effect->use = (uint16_t)what;
    effect->begin = dice_next(m->dice) >> dice_below(m->dice, 60);
    effect->end = effect->begin + 1 + dice_below(m->dice, 1000);
    return predict(m, at.entry, bit_of(rule));
}
static int frozen_mode(mutant *m) { return frozen(m, QE_FROZEN_MODE, QE_RULE_GRAPH_MODE); }
static int frozen_address(mutant *m) { return frozen(m, QE_FROZEN_ADDRESS, QE_RULE_GRAPH_ADDRESS); }
static int frozen_constant(mutant *m) { return frozen(m, QE_FROZEN_CONSTANT, QE_RULE_GRAPH_CONSTANT); }

static int frozen_the_same(mutant *m) {
    if (!frozen(m, (qe_frozen)(1 + dice_below(m->dice, 3)), QE_RULE_NONE)) return 0;
    qe_effect *effect = NULL;
    for (uint32_t i = 0; i < m->list.count; i++)
        for (uint32_t k = 0; m->list.entries[i].changed && k < m->list.entries[i].item.effect_count; k++)
            if (m->list.entries[i].effects[k].kind == QE_EFFECT_GRAPH_LAUNCH) effect = &m->list.entries[i].effects[k];
    MUST(effect != NULL);
    effect->end = effect->begin;
    return predict(m, NOWHERE, 0);
}

static int out_of_bounds(mutant *m) {
    place at;
    qe_effect *effect = change(m, ONE_OF(m, QE_EFFECT_BUFFER_READ, QE_EFFECT_BUFFER_WRITE), &at);
    if (effect == NULL) return 0;
    uint64_t bytes = object_of(m, effect)->bytes;
    if (dice_one_in(m->dice, 3)) effect->begin = effect->end + 1;
    else effect->end = bytes + 1 + dice_below(m->dice, 64);
    return predict(m, at.entry, bit_of(QE_RULE_BUFFER_BOUNDS));
}

/* Fewer bytes are written than are read later; or more. precedence.c has every byte. */
static int other_range(mutant *m) {
    place at;
    qe_effect *effect = change(m, ONE_OF(m, QE_EFFECT_BUFFER_READ, QE_EFFECT_BUFFER_WRITE), &at);
    if (effect == NULL || effect->end - effect->begin < 2) return 0;
    uint64_t half = effect->begin + (effect->end - effect->begin) / 2;
    if (dice_one_in(m->dice, 2)) effect->end = half;
    else effect->begin = half;
    return 1;
}

/* The buffer lies on a slot. Its first user is refused, whatever it does. */
static int buffer_on_slot(mutant *m) {
    place at, first;
    const qe_program *p = &m->step->program;
    uint32_t slot = dice_below(m->dice, p->object_count);
    if (m->step->prelude.count > 0) return 0; /* then recordings are refused, before any step */
    if (!pick_effect(m, ONE_OF(m, QE_EFFECT_BUFFER_READ, QE_EFFECT_BUFFER_WRITE), &at)) return 0;
    uint32_t buffer = effect_at(&m->list, at)->object;
    if (p->objects[slot].kind != QE_OBJECT_SLOT || p->objects[buffer].address != 0) return 0;
    first = (place){0, 0};
    if (effect_at(&m->list, first)->object != buffer || m->list.entries[0].item.effect_count == 0)
        if (!find_next(&m->list, first, buffer, SET(BUFFER_READ) | SET(BUFFER_WRITE), &first)) return 0;
    m->objects[buffer].address = 1 << 20;
    m->objects[slot].bytes = 64;
    int alias = !dice_one_in(m->dice, 4); /* or just beside it */
    m->objects[slot].address = (1 << 20) + p->objects[buffer].bytes - (uint64_t)alias;
    return alias ? predict(m, first.entry, bit_of(QE_RULE_SLOT_ALIAS)) : predict(m, NOWHERE, 0);
}

/* ---- dropped ---- */

static int drop(mutant *m, qe_effect_kind kind, place *at, qe_effect *dropped) {
    if (!pick_effect(m, kind, at)) return 0;
    *dropped = *effect_at(&m->list, *at);
    sequence_drop_effect(&m->list, at->entry, at->effect);
    return 1;
}

/* Behind it in the right step; entries are the same ones in the list. */
static int behind(const mutant *m, place at, uint32_t object, uint64_t kinds, place *out) {
    return find_next(&m->step->right, at, object, kinds, out);
}

static int drop_record(mutant *m) {
    place at, fold;
    qe_effect dropped;
    if (!drop(m, QE_EFFECT_SCALE_RECORD, &at, &dropped)) return 0;
    uint32_t due = object_of(m, &dropped)->due;
    if (due == 0) return predict(m, NOWHERE, 0); /* nobody said how many are due */
    if (count_effects(&m->step->right, dropped.object, QE_EFFECT_SCALE_RECORD) != due) return 0;
    if (!behind(m, at, dropped.object, SET(SCALE_FOLD), &fold)) return 0;
    return predict(m, fold.entry, bit_of(QE_RULE_SCALE_BUSY));
}

/* Where commits fill ahead, they use the epoch that the fold makes. */
static int drop_fold(mutant *m) {
    place at, use;
    qe_effect dropped;
    if (!drop(m, QE_EFFECT_SCALE_FOLD, &at, &dropped)) return 0;
    if (behind(m, at, dropped.object, SET(SCALE_USE) | SET(SCALE_RECORD), &use))
        return predict(m, use.entry, bit_of(QE_RULE_SCALE_EPOCH));
    if (count_effects(&m->step->right, dropped.object, QE_EFFECT_SCALE_RECORD) == 0) return 0;
    return predict(m, AT_END, bit_of(QE_RULE_SCALE_UNFOLDED));
}

static int drop_acquire(mutant *m) {
    place at, next;
    qe_effect dropped;
    if (!drop(m, QE_EFFECT_SLOT_ACQUIRE, &at, &dropped)) return 0;
    if (!behind(m, at, dropped.object, USES_OF_SLOT, &next)) return predict(m, NOWHERE, 0);
    return predict(m, next.entry, bit_of(QE_RULE_SLOT_EMPTY));
}

static int drop_release(mutant *m) {
    place at, next;
    qe_effect dropped;
    if (!drop(m, QE_EFFECT_SLOT_RELEASE, &at, &dropped)) return 0;
    if (!behind(m, at, dropped.object, USES_OF_SLOT, &next)) return predict(m, AT_END, bit_of(QE_RULE_SLOT_LEAK));
    return predict(m, next.entry, bit_of(QE_RULE_SLOT_LIVE));
}

/* In the next step of a trace, whose versions are absolute, the weight is a version behind. */
static int drop_commit(mutant *m) {
    place at;
    qe_effect dropped;
    if (!drop(m, QE_EFFECT_WEIGHT_COMMIT, &at, &dropped)) return 0;
    if (!m->in_trace) return predict(m, NOWHERE, 0);
    const item_list *right = &m->step->right;
    for (uint32_t i = 0; i < right->count; i++) {
        uint64_t rules = 0;
        for (uint32_t k = 0; k < right->entries[i].item.effect_count; k++) {
            const qe_effect *effect = &right->entries[i].effects[k];
            if (effect->object == dropped.object) rules |= bit_of(QE_RULE_WEIGHT_VERSION);
            const qe_object *object = object_of(m, effect);
            if (object->kind == QE_OBJECT_CACHE && object->weight == dropped.object)
                rules |= bit_of(QE_RULE_CACHE_STALE);
        }
        m->later = 1;
        if (rules != 0) return predict(m, i, rules & (0 - rules));
    }
    return 0;
}

/* Did the step before leave just what the fill makes? A recorded commit does: it fills with the key of the next step.
 * Returns its layouts, or 0. */
static uint8_t filled_ahead(const mutant *m, place at, uint32_t cache) {
    const qe_object *object = &m->step->program.objects[cache];
    const qe_effect *fill = effect_at(&m->step->right, at);
    place last;
    place end = {m->step->right.count, 0};
    if (m->at_step == 0 || !find_previous(&m->step->right, end, cache, SET(CACHE_FILL), &last)) return 0;
    const qe_effect *ahead = effect_at(&m->step->right, last);
    uint64_t epochs = object->scale != QE_NONE ? m->step->delta[object->scale] : 0;
    int same = ahead->version == fill->version + m->step->delta[object->weight] &&
               ahead->epoch == fill->epoch + epochs && ahead->recipe == fill->recipe;
    return same ? ahead->layouts : 0;
}

/* What is in the cache then: nothing, what an earlier step filled, or what was filled before in this one. */
static int without_fill(mutant *m, place at, uint32_t cache) {
    const qe_object *object = &m->step->program.objects[cache];
    place use, other;
    if (find_previous(&m->step->right, at, cache, SET(CACHE_FILL), &other)) {
        const qe_effect *fill = effect_at(&m->step->right, at), *before = effect_at(&m->step->right, other);
        if (fill->layouts & ~before->layouts) return 0;
        return predict(m, NOWHERE, 0);
    }
    if (!behind(m, at, cache, SET(CACHE_FILL) | SET(CACHE_USE), &use)) return predict(m, NOWHERE, 0);
    if (effect_at(&m->step->right, use)->kind == QE_EFFECT_CACHE_FILL) return predict(m, NOWHERE, 0);
    if (m->at_step == 0) return predict(m, use.entry, bit_of(QE_RULE_CACHE_EMPTY));
    uint8_t ahead = filled_ahead(m, at, cache);
    if (ahead != 0 && (effect_at(&m->step->right, at)->layouts & ~ahead) != 0) return 0;
    if (ahead != 0) return predict(m, NOWHERE, 0);
    if (m->step->delta[object->weight] > 0) return predict(m, use.entry, bit_of(QE_RULE_CACHE_STALE));
    if (object->scale != QE_NONE && m->step->delta[object->scale] > 0)
        return predict(m, use.entry, bit_of(QE_RULE_CACHE_SCALE));
    return predict(m, NOWHERE, 0); /* an evaluation: the weights stay */
}

static int drop_fill(mutant *m) {
    place at;
    qe_effect dropped;
    if (!drop(m, QE_EFFECT_CACHE_FILL, &at, &dropped)) return 0;
    return without_fill(m, at, dropped.object);
}

static int drop_deposit(mutant *m) {
    place at, next;
    qe_effect dropped;
    if (!drop(m, QE_EFFECT_GRAD_DEPOSIT, &at, &dropped)) return 0;
    if (!behind(m, at, dropped.object, SET(GRAD_DEPOSIT) | SET(GRAD_TAKE), &next)) return 0;
    int deposit = effect_at(&m->step->right, next)->kind == QE_EFFECT_GRAD_DEPOSIT;
    return predict(m, next.entry, bit_of(deposit ? QE_RULE_GRAD_ORDER : QE_RULE_GRAD_MISSING));
}

static int drop_take(mutant *m) {
    place at, commit;
    qe_effect dropped;
    if (!drop(m, QE_EFFECT_GRAD_TAKE, &at, &dropped)) return 0;
    uint32_t weight = object_of(m, &dropped)->weight;
    if (weight != QE_NONE && behind(m, at, weight, SET(WEIGHT_COMMIT), &commit))
        return predict(m, commit.entry, bit_of(QE_RULE_WEIGHT_UNTAKEN));
    return predict(m, AT_END, bit_of(QE_RULE_GRAD_MISSING));
}

static int drop_capture(mutant *m) {
    place at, next;
    qe_effect dropped;
    if (!drop(m, QE_EFFECT_GRAPH_CAPTURE, &at, &dropped)) return 0;
    if (m->in_trace) return 0; /* then the launch is recorded: another fault */
    if (!behind(m, at, dropped.object, SET(GRAPH_LAUNCH), &next)) return 0;
    int none = counter_at(m, dropped.object) == 0;
    return predict(m, next.entry, bit_of(none ? QE_RULE_GRAPH_EMPTY : QE_RULE_GRAPH_STALE));
}

/* Nobody misses it at once; precedence.c knows who reads these bytes. */
static int drop_write(mutant *m) {
    place at;
    qe_effect dropped;
    return drop(m, QE_EFFECT_BUFFER_WRITE, &at, &dropped);
}

/* What only looked and is not declared any more breaks nothing. */
static int drop_read(mutant *m) {
    place at;
    qe_effect dropped;
    return drop(m, ONE_OF(m, QE_EFFECT_SCALE_USE, QE_EFFECT_SLOT_BORROW, QE_EFFECT_WEIGHT_READ, QE_EFFECT_CACHE_USE,
                          QE_EFFECT_BUFFER_READ, QE_EFFECT_GRAPH_LAUNCH), &at, &dropped);
}

/* ---- duplicated, right behind itself ---- */

static int duplicate(mutant *m, qe_effect_kind kind, qe_rule rule) {
    place at;
    if (!pick_effect(m, kind, &at)) return 0;
    insert_effect(m, at.entry + 1, at, effect_at(&m->step->right, at));
    return rule == QE_RULE_NONE ? predict(m, NOWHERE, 0) : predict(m, at.entry + 1, bit_of(rule));
}
static int fold_again(mutant *m) { return duplicate(m, QE_EFFECT_SCALE_FOLD, QE_RULE_SCALE_TWICE); }
static int acquire_again(mutant *m) { return duplicate(m, QE_EFFECT_SLOT_ACQUIRE, QE_RULE_SLOT_LIVE); }
static int release_again(mutant *m) { return duplicate(m, QE_EFFECT_SLOT_RELEASE, QE_RULE_SLOT_TWICE); }
static int commit_again(mutant *m) { return duplicate(m, QE_EFFECT_WEIGHT_COMMIT, QE_RULE_WEIGHT_TWICE); }
static int deposit_again(mutant *m) { return duplicate(m, QE_EFFECT_GRAD_DEPOSIT, QE_RULE_GRAD_TWICE); }
static int take_again(mutant *m) { return duplicate(m, QE_EFFECT_GRAD_TAKE, QE_RULE_GRAD_TAKEN); }
static int capture_again(mutant *m) { return duplicate(m, QE_EFFECT_GRAPH_CAPTURE, QE_RULE_GRAPH_STALE); }
static int write_again(mutant *m) { return duplicate(m, QE_EFFECT_BUFFER_WRITE, QE_RULE_NONE); }

static int read_again(mutant *m) {
    place at, other;
    qe_effect_kind kind = ONE_OF(m, QE_EFFECT_SCALE_USE, QE_EFFECT_SLOT_BORROW, QE_EFFECT_WEIGHT_READ,
                                 QE_EFFECT_CACHE_USE, QE_EFFECT_BUFFER_READ, QE_EFFECT_GRAPH_LAUNCH,
                                 QE_EFFECT_SCALE_RECORD, QE_EFFECT_CACHE_FILL);
    if (!pick_effect(m, kind, &at)) return 0;
    const qe_effect *effect = effect_at(&m->step->right, at);
    uint64_t ends = SET(SLOT_RELEASE) | SET(SCALE_FOLD) | SET(WEIGHT_COMMIT) | SET(BUFFER_WRITE);
    if (find_next(&m->step->right, at, effect->object, ends, &other) && other.entry == at.entry) return 0;
    insert_effect(m, at.entry + 1, at, effect);
    return predict(m, NOWHERE, 0);
}

const fault_operator state_operators[] = {
    {"scale named by another epoch", FAULT_STALE, scale_version, 0},
    {"scale named by a later epoch", FAULT_FUTURE, scale_version, 0},
    {"slot named by an old handle", FAULT_STALE, slot_version, 0},
    {"slot named by a later handle", FAULT_FUTURE, slot_version, 0},
    {"slot released by an old handle", FAULT_STALE, release_version, 0},
    {"slot released by a later handle", FAULT_FUTURE, release_version, 0},
    {"weight named by an old version", FAULT_STALE, weight_version, 0},
    {"weight named by a later version", FAULT_FUTURE, weight_version, 0},
    {"cache named by an old version", FAULT_STALE, cache_version, 0},
    {"cache named by a later version", FAULT_FUTURE, cache_version, 0},
    {"cache named by an old epoch", FAULT_STALE, cache_epoch, 0},
    {"cache named by a later epoch", FAULT_FUTURE, cache_epoch, 0},
    {"graph named by an old seal", FAULT_STALE, graph_version, 0},
    {"graph named by a later seal", FAULT_FUTURE, graph_version, 0},
    {"read of an earlier write", FAULT_STALE, read_version, 0},
    {"read of a later write", FAULT_FUTURE, read_version, 0},
    {"slot of another owner", FAULT_OWNER, slot_owner, 0},
    {"slot of somebody else", FAULT_OWNER, other_slot, 0},
    {"contribution of another microbatch", FAULT_OWNER, deposit_owner, 0},
    {"contribution that sets or adds wrongly", FAULT_CONSTANT, deposit_sets, 0},
    {"cache used for another recipe", FAULT_CONSTANT, use_recipe, 0},
    {"cache used in a layout that nobody filled", FAULT_CONSTANT, use_layout, 0},
    {"cache filled for another recipe", FAULT_CONSTANT, fill_recipe, 0},
    {"cache filled without a layout", FAULT_CONSTANT, fill_layout, 0},
    {"graph launched in another mode", FAULT_CONSTANT, frozen_mode, 0},
    {"graph launched with a moved address", FAULT_ADDRESS, frozen_address, 0},
    {"graph launched with a changed constant", FAULT_CONSTANT, frozen_constant, 0},
    {"graph launched with all as it was", FAULT_HARMLESS, frozen_the_same, 0},
    {"range out of its buffer", FAULT_RANGE, out_of_bounds, 0},
    {"half of a range", FAULT_RANGE, other_range, 0},
    {"buffer on or beside a slot", FAULT_ADDRESS, buffer_on_slot, 0},
    {"record dropped", FAULT_DROP, drop_record, 0},
    {"fold dropped", FAULT_DROP, drop_fold, 0},
    {"acquire dropped", FAULT_DROP, drop_acquire, 0},
    {"release dropped", FAULT_DROP, drop_release, 0},
    {"commit dropped", FAULT_DROP, drop_commit, 0},
    {"fill dropped", FAULT_DROP, drop_fill, 0},
    {"deposit dropped", FAULT_DROP, drop_deposit, 0},
    {"take dropped", FAULT_DROP, drop_take, 0},
    {"capture dropped", FAULT_DROP, drop_capture, 0},
    {"write dropped", FAULT_DROP, drop_write, 0},
    {"read dropped", FAULT_HARMLESS, drop_read, 0},
    {"fold duplicated", FAULT_DUPLICATE, fold_again, 0},
    {"acquire duplicated", FAULT_DUPLICATE, acquire_again, 0},
    {"release duplicated", FAULT_DUPLICATE, release_again, 0},
    {"commit duplicated", FAULT_DUPLICATE, commit_again, 0},
    {"deposit duplicated", FAULT_DUPLICATE, deposit_again, 0},
    {"take duplicated", FAULT_DUPLICATE, take_again, 0},
    {"capture duplicated", FAULT_DUPLICATE, capture_again, 0},
    {"write duplicated", FAULT_DUPLICATE, write_again, 0},
    {"read duplicated", FAULT_HARMLESS, read_again, 0},
};
const uint32_t state_operator_count = sizeof state_operators / sizeof *state_operators;
