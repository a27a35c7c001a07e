/* oracle_rules.c - what is true of objects and memory, read off everything that happened before, again for every
 * question: an epoch is the number of folds, a slot is live if its last acquire has no release behind it, a byte is
 * written if somebody wrote it since it was handed out. */
#include "oracle/oracle_inside.h"

/* ---- Verdict ---- */

void oracle_note(oracle *o, int rule, uint32_t object, int refuses) {
    oracle_verdict *v = &o->verdict;
    if (v->rule == QE_RULE_NONE || rule < v->rule) v->rule = rule;
    for (int i = 0; i < v->count; i++) {
        if (v->breach[i].rule != rule || v->breach[i].object != object) continue;
        v->breach[i].refuses |= refuses;
        return;
    }
    if (v->count < ORACLE_BREACHES_MAX) v->breach[v->count++] = (oracle_breach){rule, object, refuses};
}

static void refuse(oracle *o, int rule, const qe_effect *e) { oracle_note(o, rule, e->object, 1); }

int oracle_is_refused(const oracle *o, uint32_t object) {
    for (int i = 0; i < o->verdict.count; i++)
        if (o->verdict.breach[i].refuses && o->verdict.breach[i].object == object) return 1;
    return 0;
}

/* ---- What happened so far ---- */

/* The last deed of one of two kinds on an object, or NULL. */
static const deed *last_of(const oracle *o, uint32_t object, int kind, int or_kind) {
    for (uint32_t i = o->deed_count; i-- > 0;) {
        const deed *d = &o->deeds[i];
        if (d->recording == 0 && d->effect.object == object && (d->effect.kind == kind || d->effect.kind == or_kind))
            return d;
    }
    return NULL;
}

/* How often it happened in this step. */
static uint64_t now(const oracle *o, uint32_t object, int kind) {
    uint64_t times = 0;
    for (uint32_t i = 0; i < o->deed_count; i++) {
        const deed *d = &o->deeds[i];
        times += d->recording == 0 && d->step == o->step && d->effect.object == object && d->effect.kind == kind;
    }
    return times;
}

/* Epoch, generation, version, offset or seal: what it began with, and everything that moved it on. In a recording, what
 * that recording says counts, too. */
uint64_t oracle_counter_in(const oracle *o, uint32_t object, int recording) {
    uint64_t counter = object_of(o, object)->counter;
    for (uint32_t i = 0; i < o->deed_count; i++) {
        const deed *d = &o->deeds[i];
        if (d->effect.object != object || (d->recording != 0 && d->recording != recording)) continue;
        switch ((qe_effect_kind)d->effect.kind) {
        case QE_EFFECT_SCALE_FOLD:
        case QE_EFFECT_SLOT_ACQUIRE:
        case QE_EFFECT_WEIGHT_COMMIT:
        case QE_EFFECT_GRAPH_CAPTURE: counter++; break;
        case QE_EFFECT_RNG_DRAW: counter += d->effect.write ? 0 : d->effect.end; break;
        default: break;
        }
    }
    return counter;
}
static uint64_t counter(const oracle *o, uint32_t object) { return oracle_counter_in(o, object, 0); }

/* Versions of a cache are those of its weight and its scale; the others' are their own; a buffer has none. */
static uint32_t version_owner(const oracle *o, const qe_effect *e) {
    const qe_object *object = object_of(o, e->object);
    if (object->kind == QE_OBJECT_BUFFER) return QE_NONE;
    return object->kind == QE_OBJECT_CACHE ? object->weight : e->object;
}
static uint32_t epoch_owner(const oracle *o, const qe_effect *e) {
    const qe_object *object = object_of(o, e->object);
    return object->kind == QE_OBJECT_CACHE ? object->scale : QE_NONE;
}

/* A program's versions count from its objects' first counters. */
qe_effect oracle_absolute(const oracle *o, qe_effect e) {
    uint32_t version = version_owner(o, &e), epoch = epoch_owner(o, &e);
    if (version != QE_NONE) e.version += object_of(o, version)->counter;
    if (epoch != QE_NONE) e.epoch += object_of(o, epoch)->counter;
    return e;
}

/* What a recording keeps: how far a version is from what the counter would then be. A launch adds what it is now. */
qe_effect oracle_recorded(const oracle *o, qe_effect e, int recording) {
    uint32_t version = version_owner(o, &e), epoch = epoch_owner(o, &e);
    if (version != QE_NONE) e.version -= oracle_counter_in(o, version, recording);
    if (epoch != QE_NONE) e.epoch -= oracle_counter_in(o, epoch, recording);
    return e;
}

/* A launch for a microbatch puts that in the place of the recorded one. */
qe_effect oracle_launched(const oracle *o, qe_effect e, uint32_t microbatch) {
    uint32_t version = version_owner(o, &e), epoch = epoch_owner(o, &e);
    qe_object_kind kind = object_of(o, e.object)->kind;
    int has = kind == QE_OBJECT_SLOT || kind == QE_OBJECT_RNG || e.kind == QE_EFFECT_GRAD_DEPOSIT;
    if (has && e.microbatch != QE_NONE && microbatch != QE_NONE) e.microbatch = microbatch;
    if (version != QE_NONE) e.version += counter(o, version);
    if (epoch != QE_NONE) e.epoch += counter(o, epoch);
    return e;
}

/* ---- Objects: one function for each kind, one line for each rule ---- */

static void judge_scale(oracle *o, const qe_effect *e) {
    int folds = e->kind == QE_EFFECT_SCALE_FOLD;
    if (folds && now(o, e->object, QE_EFFECT_SCALE_FOLD) > 0) {
        refuse(o, QE_RULE_SCALE_TWICE, e);
        return;
    }
    if (e->version != counter(o, e->object)) refuse(o, QE_RULE_SCALE_EPOCH, e);
    if (folds && now(o, e->object, QE_EFFECT_SCALE_RECORD) < object_of(o, e->object)->due)
        refuse(o, QE_RULE_SCALE_BUSY, e);
}

/* The acquire whose generation is live, or NULL. */
static const deed *tenant(const oracle *o, uint32_t slot) {
    const deed *last = last_of(o, slot, QE_EFFECT_SLOT_ACQUIRE, QE_EFFECT_SLOT_RELEASE);
    return last != NULL && last->effect.kind == QE_EFFECT_SLOT_ACQUIRE ? last : NULL;
}

static void judge_slot(oracle *o, const qe_effect *e) {
    const deed *live = tenant(o, e->object);
    uint64_t generation = counter(o, e->object), ended = live ? generation - 1 : generation;
    if (e->kind == QE_EFFECT_SLOT_ACQUIRE) {
        if (live) refuse(o, QE_RULE_SLOT_LIVE, e);
        else if (e->version != generation + 1) refuse(o, QE_RULE_SLOT_STALE, e);
    } else if (e->kind == QE_EFFECT_SLOT_RELEASE && ended > 0 && e->version == ended) {
        refuse(o, QE_RULE_SLOT_TWICE, e);
    } else if (!live) {
        refuse(o, QE_RULE_SLOT_EMPTY, e);
    } else if (e->version != generation) {
        refuse(o, QE_RULE_SLOT_STALE, e);
    } else if (e->stage != live->effect.stage || e->microbatch != live->effect.microbatch) {
        refuse(o, QE_RULE_SLOT_OWNER, e);
    }
}

static void judge_weight(oracle *o, const qe_effect *e) {
    int commits = e->kind == QE_EFFECT_WEIGHT_COMMIT;
    if (commits && now(o, e->object, QE_EFFECT_WEIGHT_COMMIT) > 0) {
        refuse(o, QE_RULE_WEIGHT_TWICE, e);
        return;
    }
    if (e->version != counter(o, e->object)) refuse(o, QE_RULE_WEIGHT_VERSION, e);
    for (uint32_t g = 0; commits && g < o->program->object_count; g++) {
        const qe_object *grad = object_of(o, g);
        if (grad->kind == QE_OBJECT_GRAD && grad->weight == e->object && now(o, g, QE_EFFECT_GRAD_TAKE) == 0)
            refuse(o, QE_RULE_WEIGHT_UNTAKEN, e);
    }
}

/* What a cache holds: the key of its last fill, and the layouts of the fills that are one unit with it. */
typedef struct key {
    int filled;
    uint64_t version, epoch;
    uint8_t recipe, layouts;
} key;

static key held(const oracle *o, uint32_t cache) {
    const qe_object *object = object_of(o, cache);
    key k = {object->layouts != 0, object->key_version, object->key_epoch, object->recipe, object->layouts};
    int step = -1;
    for (uint32_t i = 0; i < o->deed_count; i++) {
        const deed *d = &o->deeds[i];
        const qe_effect *e = &d->effect;
        if (d->recording != 0 || e->object != cache || e->kind != QE_EFFECT_CACHE_FILL) continue;
        int one_unit = step == d->step && k.version == e->version && k.epoch == e->epoch && k.recipe == e->recipe;
        k = (key){1, e->version, e->epoch, e->recipe, (uint8_t)(e->layouts | (one_unit ? k.layouts : 0))};
        step = d->step;
    }
    return k;
}

static void judge_cache(oracle *o, const qe_effect *e) {
    const qe_object *cache = object_of(o, e->object);
    uint64_t version = counter(o, cache->weight);
    if (e->kind == QE_EFFECT_CACHE_FILL) {
        if (e->version != version) refuse(o, QE_RULE_CACHE_STALE, e);
        if (cache->scale != QE_NONE && e->epoch != counter(o, cache->scale)) refuse(o, QE_RULE_CACHE_SCALE, e);
        return;
    }
    key k = held(o, e->object);
    if (!k.filled) {
        refuse(o, QE_RULE_CACHE_EMPTY, e);
        return;
    }
    if (k.version != version || k.version != e->version) refuse(o, QE_RULE_CACHE_STALE, e);
    if (k.epoch != e->epoch) refuse(o, QE_RULE_CACHE_SCALE, e);
    if (k.recipe != e->recipe) refuse(o, QE_RULE_CACHE_RECIPE, e);
    if ((e->layouts & ~k.layouts) != 0) refuse(o, QE_RULE_CACHE_LAYOUT, e);
}

/* The contribution that a declared order has at a place, each counted where it stands first; NULL behind the last. */
static const qe_deposit *due_at(const oracle *o, uint32_t grad, uint64_t at) {
    const qe_deposit *all = o->program->deposits;
    for (uint32_t i = 0; i < o->program->deposit_count; i++) {
        int first = all[i].object == grad;
        for (uint32_t k = 0; k < i && first; k++)
            first = all[k].object != grad || all[k].microbatch != all[i].microbatch || all[k].use != all[i].use;
        if (first && at-- == 0) return &all[i];
    }
    return NULL;
}

static int is_in_order(const oracle *o, const qe_effect *e, uint64_t deposits) {
    const qe_deposit *due = due_at(o, e->object, deposits);
    if (due_at(o, e->object, 0) != NULL) return due && due->microbatch == e->microbatch && due->use == e->use;
    uint32_t most = object_of(o, e->object)->due;
    const deed *last = last_of(o, e->object, QE_EFFECT_GRAD_DEPOSIT, QE_EFFECT_GRAD_DEPOSIT);
    return (most == 0 || deposits < most) && (deposits == 0 || e->microbatch >= last->effect.microbatch);
}

static int is_deposited(const oracle *o, const qe_effect *e) {
    for (uint32_t i = 0; i < o->deed_count; i++) {
        const deed *d = &o->deeds[i];
        if (d->recording == 0 && d->step == o->step && d->effect.object == e->object &&
            d->effect.kind == QE_EFFECT_GRAD_DEPOSIT && d->effect.microbatch == e->microbatch &&
            d->effect.use == e->use)
            return 1;
    }
    return 0;
}

static void judge_grad(oracle *o, const qe_effect *e) {
    uint64_t deposits = now(o, e->object, QE_EFFECT_GRAD_DEPOSIT);
    if (now(o, e->object, QE_EFFECT_GRAD_TAKE) > 0) {
        refuse(o, QE_RULE_GRAD_TAKEN, e);
    } else if (e->kind == QE_EFFECT_GRAD_TAKE) {
        if (deposits < object_of(o, e->object)->due) refuse(o, QE_RULE_GRAD_MISSING, e);
    } else if (is_deposited(o, e)) {
        refuse(o, QE_RULE_GRAD_TWICE, e);
    } else {
        if (!is_in_order(o, e, deposits)) refuse(o, QE_RULE_GRAD_ORDER, e);
        if ((e->write != 0) != (deposits == 0)) refuse(o, QE_RULE_GRAD_SET, e);
    }
}

static int is_drawn(const oracle *o, const qe_effect *e) {
    for (uint32_t i = 0; i < o->deed_count; i++) {
        const deed *d = &o->deeds[i];
        if (d->recording == 0 && d->step == o->step && d->effect.object == e->object && !d->effect.write &&
            d->effect.version == e->version && d->effect.end == e->end && d->effect.microbatch == e->microbatch)
            return 1;
    }
    return 0;
}

static void judge_rng(oracle *o, const qe_effect *e) {
    if (e->write && !is_drawn(o, e)) refuse(o, QE_RULE_RNG_SPLIT, e);
    if (!e->write && e->version != counter(o, e->object)) refuse(o, QE_RULE_RNG_FROZEN, e);
}

static void judge_graph(oracle *o, const qe_effect *e) {
    uint64_t seal = counter(o, e->object);
    if (e->kind == QE_EFFECT_GRAPH_CAPTURE && e->version != seal + 1) refuse(o, QE_RULE_GRAPH_STALE, e);
    if (e->kind != QE_EFFECT_GRAPH_LAUNCH) return;
    if (seal == 0) refuse(o, QE_RULE_GRAPH_EMPTY, e);
    else if (e->version != seal) refuse(o, QE_RULE_GRAPH_STALE, e);
    else if (e->use == QE_FROZEN_MODE && e->begin != e->end) refuse(o, QE_RULE_GRAPH_MODE, e);
    else if (e->use == QE_FROZEN_ADDRESS && e->begin != e->end) refuse(o, QE_RULE_GRAPH_ADDRESS, e);
    else if (e->use == QE_FROZEN_CONSTANT && e->begin != e->end) refuse(o, QE_RULE_GRAPH_CONSTANT, e);
}

/* ---- Memory ---- */

static int holds(const qe_object *b, uint32_t index, place p) {
    if (!is_placed(b)) return p.space == index && p.at < b->bytes;
    return p.space == ADDRESSES && p.at >= b->address && p.at - b->address < b->bytes;
}

int oracle_covers(const oracle *o, const qe_effect *e, place p) {
    const qe_object *b = object_of(o, e->object);
    if (b->kind != QE_OBJECT_BUFFER) return p.space == e->object;
    if (p.space != (is_placed(b) ? ADDRESSES : e->object)) return 0;
    uint64_t base = is_placed(b) ? b->address : 0;
    for (uint32_t row = 0; row < rows_of(e); row++) {
        uint64_t by = base + row * (row > 0 ? e->pitch : 0);
        if (p.at >= e->begin + by && p.at < e->end + by) return 1;
    }
    return 0;
}

static int is_there(const oracle *o, uint32_t buffer) {
    for (uint32_t i = o->deed_count; i-- > 0;) {
        const deed *d = &o->deeds[i];
        if (d->recording != 0 || d->effect.object != buffer) continue;
        if (begins_life(&d->effect)) return 1;
        if (ends_life(&d->effect)) return 0;
    }
    return object_of(o, buffer)->counter != QE_BUFFER_ABSENT;
}

/* The item that allocated it last; -1: it was there from the beginning. */
int oracle_born(const oracle *o, uint32_t buffer) {
    const deed *d = last_of(o, buffer, QE_EFFECT_BUFFER_ALLOC, QE_EFFECT_BUFFER_TAKE);
    return d ? d->item : -1;
}

/* Whose byte it is: who was allocated there last; at the beginning the widest buffer. */
static uint32_t owner_of(const oracle *o, place p) {
    uint32_t owner = QE_NONE;
    for (uint32_t i = o->deed_count; i-- > 0;) {
        const qe_effect *e = &o->deeds[i].effect;
        if (o->deeds[i].recording != 0 || o->deeds[i].hollow || !oracle_covers(o, e, p)) continue;
        if (!begins_life(e) && !ends_life(e)) continue;
        return begins_life(e) ? e->object : QE_NONE;
    }
    for (uint32_t i = 0; i < o->program->object_count; i++) {
        const qe_object *b = object_of(o, i);
        if (b->kind != QE_OBJECT_BUFFER || b->counter == QE_BUFFER_ABSENT || !holds(b, i, p)) continue;
        if (owner == QE_NONE || b->bytes > object_of(o, owner)->bytes) owner = i;
    }
    return owner;
}

/* Was the byte written since it was handed out, and how often in this step? */
static int is_written(const oracle *o, place p, uint64_t *writes_out) {
    int written = 0;
    *writes_out = 0;
    for (uint32_t i = o->deed_count; i-- > 0;) {
        const deed *d = &o->deeds[i];
        if (d->recording != 0 || d->hollow || !oracle_covers(o, &d->effect, p)) continue;
        if (begins_life(&d->effect)) return written;
        if (d->effect.kind != QE_EFFECT_BUFFER_WRITE) continue;
        written = 1;
        *writes_out += d->step == o->step;
    }
    for (uint32_t i = 0; i < o->program->object_count; i++) {
        const qe_object *b = object_of(o, i);
        if (b->kind == QE_OBJECT_BUFFER && b->counter == QE_BUFFER_WRITTEN && holds(b, i, p)) written = 1;
    }
    return written;
}

static int share_bytes(const qe_object *a, const qe_object *b) {
    if (!is_placed(a) || !is_placed(b)) return 0;
    return a->address < b->address + b->bytes && b->address < a->address + a->bytes;
}

int oracle_is_in_bounds(const qe_effect *e, uint64_t bytes) {
    if (e->begin > e->end || e->end > bytes) return 0;
    if (e->begin == e->end || rows_of(e) == 1) return 1;
    return e->pitch <= (bytes - e->end) / (rows_of(e) - 1);
}

/* What is true of an effect whenever it happens. */
void oracle_judge_range(oracle *o, const qe_effect *e) {
    const qe_object *b = object_of(o, e->object);
    for (uint32_t i = 0; i < o->program->object_count; i++) {
        if (object_of(o, i)->kind != QE_OBJECT_SLOT || !share_bytes(b, object_of(o, i))) continue;
        refuse(o, QE_RULE_SLOT_ALIAS, e);
        return;
    }
    if (!oracle_is_in_bounds(e, b->bytes)) refuse(o, QE_RULE_BUFFER_BOUNDS, e);
}

static void judge_buffer(oracle *o, const qe_effect *e) {
    oracle_judge_range(o, e);
    if (oracle_is_refused(o, e->object)) return;
    if (begins_life(e) && is_there(o, e->object)) refuse(o, QE_RULE_BUFFER_LIVE, e);
    if (!begins_life(e) && !is_there(o, e->object)) refuse(o, QE_RULE_BUFFER_FREED, e);
}

/* The rule of memory that an effect breaks with one byte. */
int oracle_judge_byte(const oracle *o, const qe_effect *e, place p) {
    uint64_t writes;
    uint32_t owner = owner_of(o, p);
    if (begins_life(e)) return owner != QE_NONE && owner != e->object ? QE_RULE_BUFFER_LIVE : QE_RULE_NONE;
    if (e->kind != QE_EFFECT_BUFFER_READ) return QE_RULE_NONE;
    if (!is_written(o, p, &writes)) return QE_RULE_BUFFER_UNWRITTEN;
    return e->version != 0 && e->version != writes ? QE_RULE_BUFFER_VERSION : QE_RULE_NONE;
}

void oracle_judge_state(oracle *o, const qe_effect *e) {
    switch (object_of(o, e->object)->kind) {
    case QE_OBJECT_SCALE: judge_scale(o, e); break;
    case QE_OBJECT_SLOT: judge_slot(o, e); break;
    case QE_OBJECT_WEIGHT: judge_weight(o, e); break;
    case QE_OBJECT_CACHE: judge_cache(o, e); break;
    case QE_OBJECT_GRAD: judge_grad(o, e); break;
    case QE_OBJECT_BUFFER: judge_buffer(o, e); break;
    case QE_OBJECT_GRAPH: judge_graph(o, e); break;
    case QE_OBJECT_RNG: judge_rng(o, e); break;
    case QE_OBJECT_KINDS: break;
    }
}

/* What a step owes at its end. */
void oracle_judge_end(oracle *o) {
    for (uint32_t i = 0; i < o->program->object_count; i++) {
        const qe_object *object = object_of(o, i);
        uint64_t records = now(o, i, QE_EFFECT_SCALE_RECORD), deposits = now(o, i, QE_EFFECT_GRAD_DEPOSIT);
        const deed *last = last_of(o, i, QE_EFFECT_SCALE_RECORD, QE_EFFECT_SCALE_FOLD);
        if (object->kind == QE_OBJECT_SLOT && tenant(o, i)) oracle_note(o, QE_RULE_SLOT_LEAK, i, 0);
        int untaken = object->kind == QE_OBJECT_GRAD && now(o, i, QE_EFFECT_GRAD_TAKE) == 0;
        if (untaken && (deposits > 0 || object->due > 0)) oracle_note(o, QE_RULE_GRAD_MISSING, i, 0);
        if (records > 0 && records < object->due) oracle_note(o, QE_RULE_SCALE_LOST, i, 0);
        else if (records > 0 && last->effect.kind == QE_EFFECT_SCALE_RECORD)
            oracle_note(o, QE_RULE_SCALE_UNFOLDED, i, 0);
    }
}
