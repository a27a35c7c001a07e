/* mutate_move.c - the right effect at the wrong time: early, late, swapped, after the end of what it names, or never
 * again. The moved effect becomes an op of its own on the stream of the op that it belongs to. */
#include "adversary/adversary.h"

#define SET(a) bit_of(QE_EFFECT_##a)

/* Moves an effect in front of entry `to` (of the right step). Returns the entry where it stands then. */
static uint32_t move_effect(mutant *m, place from, uint32_t to) {
    qe_effect effect = *effect_at(&m->step->right, from);
    sequence_drop_effect(&m->list, from.entry, from.effect);
    insert_effect(m, to, from, &effect);
    return to;
}

/* A random one of the effects of these kinds on an object, from entry `first` up to `end`. */
static int pick_between(mutant *m, uint32_t object, uint64_t kinds, uint32_t first, uint32_t end, place *out) {
    const item_list *right = &m->step->right;
    uint32_t seen = 0;
    for (uint32_t i = first; i < end; i++)
        for (uint32_t k = 0; k < right->entries[i].item.effect_count; k++) {
            const qe_effect *effect = &right->entries[i].effects[k];
            if (effect->object != object || !(kinds >> effect->kind & 1)) continue;
            if (dice_one_in(m->dice, ++seen)) *out = (place){i, k};
        }
    return seen > 0;
}

static int picked(mutant *m, qe_effect_kind kind, place *at, qe_effect *effect) {
    if (!pick_effect(m, kind, at)) return 0;
    *effect = *effect_at(&m->step->right, *at);
    return 1;
}

static uint32_t end_of(const mutant *m) { return m->step->right.count; }

/* With records due, it is busy at once; else the next one to name the old epoch comes too late. */
static int fold_early(mutant *m) {
    place fold, record;
    qe_effect effect;
    if (!picked(m, QE_EFFECT_SCALE_FOLD, &fold, &effect)) return 0;
    if (!pick_between(m, effect.object, SET(SCALE_RECORD), 0, fold.entry, &record)) return 0;
    uint32_t at = move_effect(m, fold, record.entry);
    if (m->step->program.objects[effect.object].due > 0) return predict(m, at, bit_of(QE_RULE_SCALE_BUSY));
    return predict(m, record.entry + 1, bit_of(QE_RULE_SCALE_EPOCH));
}

static int record_late(mutant *m) {
    place record, fold;
    qe_effect effect;
    if (!picked(m, QE_EFFECT_SCALE_RECORD, &record, &effect)) return 0;
    if (!find_next(&m->step->right, record, effect.object, SET(SCALE_FOLD), &fold)) return 0;
    if (fold.entry == record.entry) return 0;
    uint32_t due = m->step->program.objects[effect.object].due;
    uint32_t at = move_effect(m, record, fold.entry + 1);
    if (due > 0) return predict(m, fold.entry, bit_of(QE_RULE_SCALE_BUSY));
    return predict(m, at, bit_of(QE_RULE_SCALE_EPOCH));
}

static int release_early(mutant *m) {
    place release, acquire, use;
    qe_effect effect;
    if (!picked(m, QE_EFFECT_SLOT_RELEASE, &release, &effect)) return 0;
    if (!find_previous(&m->step->right, release, effect.object, SET(SLOT_ACQUIRE), &acquire)) return 0;
    if (!pick_between(m, effect.object, SET(SLOT_BORROW), acquire.entry + 1, release.entry + 1, &use)) return 0;
    move_effect(m, release, use.entry);
    return predict(m, use.entry + 1, bit_of(QE_RULE_SLOT_EMPTY));
}

static int release_late(mutant *m) {
    place release, acquire;
    qe_effect effect;
    if (!picked(m, QE_EFFECT_SLOT_RELEASE, &release, &effect)) return 0;
    if (!find_next(&m->step->right, release, effect.object, SET(SLOT_ACQUIRE), &acquire)) return 0;
    if (acquire.entry == release.entry) return 0;
    move_effect(m, release, acquire.entry + 1);
    return predict(m, acquire.entry, bit_of(QE_RULE_SLOT_LIVE));
}

static int acquire_early(mutant *m) {
    place acquire, release;
    qe_effect effect;
    if (!picked(m, QE_EFFECT_SLOT_ACQUIRE, &acquire, &effect)) return 0;
    if (!find_previous(&m->step->right, acquire, effect.object, SET(SLOT_RELEASE), &release)) return 0;
    if (acquire.entry == release.entry) return 0;
    return predict(m, move_effect(m, acquire, release.entry), bit_of(QE_RULE_SLOT_LIVE));
}

static int acquire_late(mutant *m) {
    place acquire, next;
    qe_effect effect;
    if (!picked(m, QE_EFFECT_SLOT_ACQUIRE, &acquire, &effect)) return 0;
    if (!find_next(&m->step->right, acquire, effect.object, SET(SLOT_BORROW) | SET(SLOT_RELEASE), &next)) return 0;
    move_effect(m, acquire, next.entry + 1);
    return predict(m, next.entry, bit_of(QE_RULE_SLOT_EMPTY));
}

/* Before its gradient was taken; or, where it has none, before the last that reads its version. */
static int commit_early(mutant *m) {
    place commit, before, take;
    qe_effect effect;
    if (!picked(m, QE_EFFECT_WEIGHT_COMMIT, &commit, &effect)) return 0;
    const qe_program *p = &m->step->program;
    for (uint32_t grad = 0; grad < p->object_count; grad++) {
        if (p->objects[grad].kind != QE_OBJECT_GRAD || p->objects[grad].weight != effect.object) continue;
        if (!find_previous(&m->step->right, commit, grad, SET(GRAD_TAKE), &take)) return 0;
        if (take.entry == commit.entry) return 0;
        return predict(m, move_effect(m, commit, dice_below(m->dice, take.entry + 1)), bit_of(QE_RULE_WEIGHT_UNTAKEN));
    }
    for (uint32_t i = 0; i < p->object_count; i++)
        if (p->objects[i].kind == QE_OBJECT_CACHE && p->objects[i].weight == effect.object) return 0;
    if (!pick_between(m, effect.object, SET(WEIGHT_READ), 0, commit.entry, &before)) return 0;
    move_effect(m, commit, before.entry);
    return predict(m, before.entry + 1, bit_of(QE_RULE_WEIGHT_VERSION));
}

static int take_early(mutant *m) {
    place take, deposit;
    qe_effect effect;
    if (!picked(m, QE_EFFECT_GRAD_TAKE, &take, &effect)) return 0;
    if (!pick_between(m, effect.object, SET(GRAD_DEPOSIT), 0, take.entry, &deposit)) return 0;
    return predict(m, move_effect(m, take, deposit.entry), bit_of(QE_RULE_GRAD_MISSING));
}

static int deposit_late(mutant *m) {
    place deposit, next;
    qe_effect effect;
    if (!picked(m, QE_EFFECT_GRAD_DEPOSIT, &deposit, &effect)) return 0;
    if (!find_next(&m->step->right, deposit, effect.object, SET(GRAD_DEPOSIT) | SET(GRAD_TAKE), &next)) return 0;
    int taken = effect_at(&m->step->right, next)->kind == QE_EFFECT_GRAD_TAKE;
    move_effect(m, deposit, next.entry + 1);
    return predict(m, next.entry, bit_of(taken ? QE_RULE_GRAD_MISSING : QE_RULE_GRAD_ORDER));
}

/* The first use finds what was there before. */
static int fill_late(mutant *m) {
    place fill, use;
    qe_effect effect;
    if (!picked(m, QE_EFFECT_CACHE_FILL, &fill, &effect)) return 0;
    const qe_object *cache = &m->step->program.objects[effect.object];
    if (find_previous(&m->step->right, fill, effect.object, SET(CACHE_FILL), &use)) return 0;
    if (!find_next(&m->step->right, fill, effect.object, SET(CACHE_USE) | SET(CACHE_FILL), &use)) return 0;
    if (effect_at(&m->step->right, use)->kind != QE_EFFECT_CACHE_USE || use.entry == fill.entry) return 0;
    move_effect(m, fill, use.entry + 1);
    if (m->at_step == 0) return predict(m, use.entry, bit_of(QE_RULE_CACHE_EMPTY));
    if (m->step->delta[cache->weight] > 0) return predict(m, use.entry, bit_of(QE_RULE_CACHE_STALE));
    return 0;
}

/* ---- swapped ---- */

static int swap_deposits(mutant *m) {
    place first, second;
    qe_effect effect;
    if (!picked(m, QE_EFFECT_GRAD_DEPOSIT, &first, &effect)) return 0;
    if (!find_next(&m->step->right, first, effect.object, SET(GRAD_DEPOSIT), &second)) return 0;
    qe_effect *a = effect_at(&m->list, first), *b = effect_at(&m->list, second);
    uint32_t microbatch = a->microbatch;
    uint16_t use = a->use;
    if (a->microbatch == b->microbatch && a->use == b->use) return 0;
    a->microbatch = b->microbatch;
    a->use = b->use;
    b->microbatch = microbatch;
    b->use = use;
    m->list.entries[first.entry].changed = m->list.entries[second.entry].changed = 1;
    return predict(m, first.entry, bit_of(QE_RULE_GRAD_ORDER));
}

/* Two generations of one slot change places: the first borrower names what is not there yet. */
static int swap_handles(mutant *m) {
    place first, second;
    qe_effect effect;
    if (!picked(m, QE_EFFECT_SLOT_BORROW, &first, &effect)) return 0;
    if (!find_next(&m->step->right, first, effect.object, SET(SLOT_BORROW), &second)) return 0;
    qe_effect *a = effect_at(&m->list, first), *b = effect_at(&m->list, second);
    if (a->version == b->version) return 0;
    uint64_t version = a->version;
    a->version = b->version;
    b->version = version;
    m->list.entries[first.entry].changed = m->list.entries[second.entry].changed = 1;
    return predict(m, first.entry, bit_of(QE_RULE_SLOT_STALE));
}

/* ---- after its end, before its beginning ---- */

static int use_after_release(mutant *m) {
    place borrow, release, next;
    qe_effect effect;
    if (!picked(m, QE_EFFECT_SLOT_BORROW, &borrow, &effect)) return 0;
    if (!find_next(&m->step->right, borrow, effect.object, SET(SLOT_RELEASE), &release)) return 0;
    int reused = find_next(&m->step->right, release, effect.object, SET(SLOT_ACQUIRE), &next);
    uint32_t last = reused ? next.entry : end_of(m);
    if (last <= release.entry) return 0;
    uint32_t at = release.entry + 1 + dice_below(m->dice, last - release.entry);
    effect.write = 0;
    insert_effect(m, at, borrow, &effect);
    return predict(m, at, bit_of(QE_RULE_SLOT_EMPTY));
}

static int use_of_the_generation_before(mutant *m) {
    place borrow, acquire, release;
    qe_effect effect;
    if (!picked(m, QE_EFFECT_SLOT_BORROW, &borrow, &effect)) return 0;
    if (!find_next(&m->step->right, borrow, effect.object, SET(SLOT_ACQUIRE), &acquire)) return 0;
    if (!find_next(&m->step->right, acquire, effect.object, SET(SLOT_RELEASE), &release)) return 0;
    if (release.entry == acquire.entry) return 0;
    uint32_t at = acquire.entry + 1 + dice_below(m->dice, release.entry - acquire.entry);
    effect.write = 0;
    insert_effect(m, at, borrow, &effect);
    return predict(m, at, bit_of(QE_RULE_SLOT_STALE));
}

static int use_after(mutant *m, qe_effect_kind use, uint32_t ended_by, qe_effect_kind end, qe_rule rule) {
    place at, over;
    qe_effect effect;
    if (!picked(m, use, &at, &effect)) return 0;
    uint32_t object = ended_by == QE_NONE ? effect.object : m->step->program.objects[effect.object].weight;
    if (object == QE_NONE || !find_next(&m->step->right, at, object, bit_of((unsigned)end), &over)) return 0;
    uint32_t to = over.entry + 1 + dice_below(m->dice, end_of(m) - over.entry);
    insert_effect(m, to, at, &effect);
    return predict(m, to, bit_of(rule));
}
static int scale_after_fold(mutant *m) {
    return use_after(m, QE_EFFECT_SCALE_USE, QE_NONE, QE_EFFECT_SCALE_FOLD, QE_RULE_SCALE_EPOCH);
}
static int record_after_fold(mutant *m) {
    return use_after(m, QE_EFFECT_SCALE_RECORD, QE_NONE, QE_EFFECT_SCALE_FOLD, QE_RULE_SCALE_EPOCH);
}
static int weight_after_commit(mutant *m) {
    return use_after(m, QE_EFFECT_WEIGHT_READ, QE_NONE, QE_EFFECT_WEIGHT_COMMIT, QE_RULE_WEIGHT_VERSION);
}
static int cache_after_commit(mutant *m) {
    return use_after(m, QE_EFFECT_CACHE_USE, 0, QE_EFFECT_WEIGHT_COMMIT, QE_RULE_CACHE_STALE);
}
static int deposit_after_take(mutant *m) {
    return use_after(m, QE_EFFECT_GRAD_DEPOSIT, QE_NONE, QE_EFFECT_GRAD_TAKE, QE_RULE_GRAD_TAKEN);
}

static int cache_before_fill(mutant *m) {
    place use, fill;
    qe_effect effect;
    if (!picked(m, QE_EFFECT_CACHE_USE, &use, &effect)) return 0;
    const qe_object *cache = &m->step->program.objects[effect.object];
    place first = use;
    while (find_previous(&m->step->right, first, effect.object, SET(CACHE_FILL), &fill)) first = fill;
    if (first.entry == use.entry) return 0;
    uint32_t at = dice_below(m->dice, first.entry + 1);
    insert_effect(m, at, use, &effect);
    if (m->at_step == 0) return predict(m, at, bit_of(QE_RULE_CACHE_EMPTY));
    if (m->step->delta[cache->weight] > 0) return predict(m, at, bit_of(QE_RULE_CACHE_STALE));
    return 0;
}

static int launch_before_capture(mutant *m) {
    place launch, capture, begin;
    qe_effect effect;
    if (!picked(m, QE_EFFECT_GRAPH_LAUNCH, &launch, &effect)) return 0;
    if (!find_previous(&m->step->right, launch, effect.object, SET(GRAPH_CAPTURE), &capture)) return 0;
    if (!find_previous(&m->step->right, capture, effect.object, SET(GRAPH_BEGIN), &begin)) return 0;
    uint32_t at = dice_below(m->dice, begin.entry + 1);
    int none = counter_at(m, effect.object) == 0;
    insert_effect(m, at, launch, &effect);
    return predict(m, at, bit_of(none ? QE_RULE_GRAPH_EMPTY : QE_RULE_GRAPH_STALE));
}

/* precedence.c knows what is written by then. */
static int read_early(mutant *m) {
    place read;
    qe_effect effect;
    if (!picked(m, QE_EFFECT_BUFFER_READ, &read, &effect)) return 0;
    insert_effect(m, dice_below(m->dice, read.entry + 1), read, &effect);
    return 1;
}
static int write_late(mutant *m) {
    place write;
    qe_effect effect;
    if (!picked(m, QE_EFFECT_BUFFER_WRITE, &write, &effect)) return 0;
    move_effect(m, write, write.entry + 1 + dice_below(m->dice, end_of(m) - write.entry));
    return 1;
}

/* ---- never again ---- */

static void forget(mutant *m, place from, uint32_t object) {
    for (uint32_t i = from.entry; i < m->list.count; i++)
        for (uint32_t k = m->list.entries[i].item.effect_count; k-- > 0;)
            if (m->list.entries[i].effects[k].object == object && (i > from.entry || k >= from.effect))
                sequence_drop_effect(&m->list, i, k);
}

/* From a record on, nobody works on the scale any more: what came is lost. Where nothing came, nothing is. */
static int forget_scale(mutant *m) {
    place at, before;
    qe_effect effect;
    if (!picked(m, QE_EFFECT_SCALE_RECORD, &at, &effect)) return 0;
    uint32_t due = m->step->program.objects[effect.object].due;
    int some = find_previous(&m->step->right, at, effect.object, SET(SCALE_RECORD), &before);
    if (!some && m->in_trace) return 0; /* the next step would miss an epoch: another fault */
    for (uint32_t i = 0; i < m->step->program.object_count; i++)
        if (m->step->program.objects[i].kind == QE_OBJECT_CACHE && m->step->program.objects[i].scale == effect.object)
            return 0;
    forget(m, at, effect.object);
    if (!some) return predict(m, NOWHERE, 0);
    return predict(m, AT_END, bit_of(due > 0 ? QE_RULE_SCALE_LOST : QE_RULE_SCALE_UNFOLDED));
}

/* A gradient that nobody fed, took or used: it was due all the same. */
static int forget_grad(mutant *m) {
    place at;
    qe_effect effect;
    if (!picked(m, QE_EFFECT_GRAD_DEPOSIT, &at, &effect)) return 0;
    const qe_object *grad = &m->step->program.objects[effect.object];
    if (grad->due == 0) return 0;
    forget(m, (place){0, 0}, effect.object);
    for (uint32_t i = 0; i < m->list.count; i++)
        for (uint32_t k = m->list.entries[i].item.effect_count; k-- > 0;)
            if (m->list.entries[i].effects[k].object == grad->weight &&
                m->list.entries[i].effects[k].kind == QE_EFFECT_WEIGHT_COMMIT)
                sequence_drop_effect(&m->list, i, k);
    return predict(m, AT_END, bit_of(QE_RULE_GRAD_MISSING));
}

const fault_operator move_operators[] = {
    {"fold before a record", FAULT_EARLY, fold_early, 0},
    {"record behind the fold", FAULT_LATE, record_late, 0},
    {"release before a use", FAULT_EARLY, release_early, 0},
    {"release behind the next acquire", FAULT_LATE, release_late, 0},
    {"acquire before the release", FAULT_EARLY, acquire_early, 0},
    {"acquire behind the first use", FAULT_LATE, acquire_late, 0},
    {"commit before the take, or a read", FAULT_EARLY, commit_early, 0},
    {"take before a deposit", FAULT_EARLY, take_early, 0},
    {"deposit behind the next, or the take", FAULT_LATE, deposit_late, 0},
    {"fill behind the first use", FAULT_LATE, fill_late, 0},
    {"two deposits swapped", FAULT_SWAP, swap_deposits, 0},
    {"two handles swapped", FAULT_SWAP, swap_handles, 0},
    {"slot used after its release", FAULT_REUSE, use_after_release, 0},
    {"slot used as the generation before", FAULT_REUSE, use_of_the_generation_before, 0},
    {"scale used after its fold", FAULT_REUSE, scale_after_fold, 0},
    {"record after the fold", FAULT_REUSE, record_after_fold, 0},
    {"weight read after its commit", FAULT_REUSE, weight_after_commit, 0},
    {"cache used after the commit", FAULT_REUSE, cache_after_commit, 0},
    {"deposit after the take", FAULT_REUSE, deposit_after_take, 0},
    {"cache used before its fill", FAULT_EARLY, cache_before_fill, 0},
    {"graph launched before its capture", FAULT_EARLY, launch_before_capture, 0},
    {"bytes read early", FAULT_EARLY, read_early, 0},
    {"bytes written late", FAULT_LATE, write_late, 0},
    {"scale forgotten", FAULT_FORGET, forget_scale, 0},
    {"gradient lost", FAULT_FORGET, forget_grad, 0},
};
const uint32_t move_operator_count = sizeof move_operators / sizeof *move_operators;
