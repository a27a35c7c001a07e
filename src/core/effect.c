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
    case QE_EFFECT_BUFFER_WRITE:
    case QE_EFFECT_BUFFER_ALLOC:
    case QE_EFFECT_BUFFER_FREE: return 1;
    case QE_EFFECT_SLOT_BORROW: return effect->write != 0;
    case QE_EFFECT_RNG_DRAW: return effect->write == 0; /* one that is made again leaves the generator as it is */
    case QE_EFFECT_SCALE_USE:
    case QE_EFFECT_SCALE_RECORD:
    case QE_EFFECT_WEIGHT_READ:
    case QE_EFFECT_CACHE_USE:
    case QE_EFFECT_BUFFER_READ:
    case QE_EFFECT_BUFFER_TAKE: /* the host's allocator: no place in any order */
    case QE_EFFECT_BUFFER_DROP:
    case QE_EFFECT_BUFFER_PLEDGE:
    case QE_EFFECT_GRAPH_BEGIN: /* recordings are acts of the host, done when it goes on */
    case QE_EFFECT_GRAPH_CAPTURE:
    case QE_EFFECT_GRAPH_LAUNCH: return 0; /* launches of one graph follow each other by themselves */
    case QE_EFFECT_KINDS: break;
    }
    QE_ASSERT(effect->kind < QE_EFFECT_KINDS);
    return 1;
}

static int is_buffer(const qe_effect *effect) { return qe_effect_object_kind(effect->kind) == QE_OBJECT_BUFFER; }

int qe_effect_is_allocators(const qe_effect *effect) {
    return effect->kind == QE_EFFECT_BUFFER_TAKE || effect->kind == QE_EFFECT_BUFFER_DROP ||
           effect->kind == QE_EFFECT_BUFFER_PLEDGE;
}

int qe_effect_has_rows(const qe_effect *effect) {
    int touches = effect->kind == QE_EFFECT_BUFFER_READ || effect->kind == QE_EFFECT_BUFFER_WRITE;
    return touches && effect->rows > 1 && effect->begin < effect->end;
}

/* One behind the last byte, or UINT64_MAX where that is no number. */
uint64_t qe_effect_reach(const qe_effect *effect) {
    uint64_t more = 0, reach = effect->end;
    if (!qe_effect_has_rows(effect)) return reach;
    if (__builtin_mul_overflow((uint64_t)effect->rows - 1, effect->pitch, &more)) return UINT64_MAX;
    return __builtin_add_overflow(reach, more, &reach) ? UINT64_MAX : reach;
}

int qe_effect_conflicts(const qe_effect *a, const qe_effect *b) {
    QE_ASSERT(a != NULL);
    QE_ASSERT(b != NULL);
    if (a->object != b->object) return 0;
    if (!qe_effect_writes(a) && !qe_effect_writes(b)) return 0;
    if (qe_effect_is_allocators(a) || qe_effect_is_allocators(b)) return 0;
    if (!is_buffer(a)) return 1;
    if (a->begin >= a->end || b->begin >= b->end) return 0; /* an empty range meets nothing */
    return a->begin < qe_effect_reach(b) && b->begin < qe_effect_reach(a);
}

qe_object_kind qe_effect_object_kind(uint8_t kind) {
    static const uint8_t kinds[QE_EFFECT_KINDS] = {
        [QE_EFFECT_SCALE_USE] = QE_OBJECT_SCALE,     [QE_EFFECT_SCALE_RECORD] = QE_OBJECT_SCALE,
        [QE_EFFECT_SCALE_FOLD] = QE_OBJECT_SCALE,    [QE_EFFECT_SLOT_ACQUIRE] = QE_OBJECT_SLOT,
        [QE_EFFECT_SLOT_BORROW] = QE_OBJECT_SLOT,    [QE_EFFECT_SLOT_RELEASE] = QE_OBJECT_SLOT,
        [QE_EFFECT_WEIGHT_READ] = QE_OBJECT_WEIGHT,  [QE_EFFECT_WEIGHT_COMMIT] = QE_OBJECT_WEIGHT,
        [QE_EFFECT_CACHE_FILL] = QE_OBJECT_CACHE,    [QE_EFFECT_CACHE_USE] = QE_OBJECT_CACHE,
        [QE_EFFECT_GRAD_DEPOSIT] = QE_OBJECT_GRAD,   [QE_EFFECT_GRAD_TAKE] = QE_OBJECT_GRAD,
        [QE_EFFECT_BUFFER_READ] = QE_OBJECT_BUFFER,  [QE_EFFECT_BUFFER_WRITE] = QE_OBJECT_BUFFER,
        [QE_EFFECT_GRAPH_BEGIN] = QE_OBJECT_GRAPH,   [QE_EFFECT_GRAPH_CAPTURE] = QE_OBJECT_GRAPH,
        [QE_EFFECT_GRAPH_LAUNCH] = QE_OBJECT_GRAPH,  [QE_EFFECT_BUFFER_ALLOC] = QE_OBJECT_BUFFER,
        [QE_EFFECT_BUFFER_FREE] = QE_OBJECT_BUFFER,  [QE_EFFECT_BUFFER_TAKE] = QE_OBJECT_BUFFER,
        [QE_EFFECT_BUFFER_DROP] = QE_OBJECT_BUFFER,  [QE_EFFECT_BUFFER_PLEDGE] = QE_OBJECT_BUFFER,
        [QE_EFFECT_RNG_DRAW] = QE_OBJECT_RNG,
    };
    QE_ASSERT(kind < QE_EFFECT_KINDS);
    return (qe_object_kind)kinds[kind];
}

const char *qe_object_kind_name(qe_object_kind kind) {
    static const char *const names[QE_OBJECT_KINDS] = {"scale", "slot", "weight", "cache", "grad", "buffer",
                                                        "graph", "rng"};
    return (unsigned)kind < QE_OBJECT_KINDS ? names[kind] : "unknown";
}

const char *qe_effect_kind_name(qe_effect_kind kind) {
    static const char *const names[QE_EFFECT_KINDS] = {
        "scale.use",   "scale.record",  "scale.fold", "slot.acquire", "slot.borrow",  "slot.release", "weight.read",
        "weight.commit", "cache.fill", "cache.use",  "grad.deposit", "grad.take",    "buffer.read",  "buffer.write",
        "graph.begin", "graph.capture", "graph.launch", "buffer.alloc", "buffer.free", "buffer.take", "buffer.drop",
        "buffer.pledge", "rng.draw"};
    return (unsigned)kind < QE_EFFECT_KINDS ? names[kind] : "unknown";
}

const char *qe_frozen_name(qe_frozen frozen) {
    static const char *const names[QE_FROZEN_KINDS] = {"nothing", "mode", "address", "constant"};
    QE_ASSERT((unsigned)frozen < QE_FROZEN_KINDS);
    return names[frozen];
}
