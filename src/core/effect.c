/* effect.c - which effects conflict, and the words for kinds. */
#include "core/effect.h"

#include "base/assert.h"

int qe_effect_writes(const qe_effect *effect) {
    switch ((qe_effect_kind)effect->kind) {
    case QE_EFFECT_SCALE_FOLD:
    case QE_EFFECT_SLOT_ACQUIRE:
    case QE_EFFECT_SLOT_RELEASE:
    case QE_EFFECT_WEIGHT_COMMIT:
    case QE_EFFECT_CACHE_FILL:
    case QE_EFFECT_GRAD_DEPOSIT:
    case QE_EFFECT_GRAD_TAKE:
    case QE_EFFECT_BUFFER_WRITE: return 1;
    case QE_EFFECT_SLOT_BORROW: return effect->write != 0;
    case QE_EFFECT_SCALE_USE:
    case QE_EFFECT_SCALE_RECORD:
    case QE_EFFECT_WEIGHT_READ:
    case QE_EFFECT_CACHE_USE:
    case QE_EFFECT_BUFFER_READ: return 0;
    case QE_EFFECT_KINDS: break;
    }
    QE_ASSERT(effect->kind < QE_EFFECT_KINDS);
    return 1;
}

static int is_buffer(const qe_effect *effect) {
    return effect->kind == QE_EFFECT_BUFFER_READ || effect->kind == QE_EFFECT_BUFFER_WRITE;
}

int qe_effect_conflicts(const qe_effect *a, const qe_effect *b) {
    QE_ASSERT(a != NULL);
    QE_ASSERT(b != NULL);
    if (a->object != b->object) return 0;
    if (!qe_effect_writes(a) && !qe_effect_writes(b)) return 0;
    if (!is_buffer(a)) return 1;
    if (a->begin >= a->end || b->begin >= b->end) return 0; /* an empty range meets nothing */
    return a->begin < b->end && b->begin < a->end;
}

const char *qe_object_kind_name(qe_object_kind kind) {
    static const char *const names[QE_OBJECT_KINDS] = {"scale", "slot", "weight", "cache", "grad", "buffer"};
    return (unsigned)kind < QE_OBJECT_KINDS ? names[kind] : "unknown";
}

const char *qe_effect_kind_name(qe_effect_kind kind) {
    static const char *const names[QE_EFFECT_KINDS] = {
        "scale.use",   "scale.record",  "scale.fold", "slot.acquire", "slot.borrow",  "slot.release", "weight.read",
        "weight.commit", "cache.fill", "cache.use",  "grad.deposit", "grad.take",    "buffer.read",  "buffer.write"};
    return (unsigned)kind < QE_EFFECT_KINDS ? names[kind] : "unknown";
}
