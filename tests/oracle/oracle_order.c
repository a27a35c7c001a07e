/* oracle_order.c - what is ordered before what: items are nodes, edges come from streams, hosts, events and launches,
 * and one item is before another if a path leads there. Who touches a byte is held against everybody before. */
#include "oracle/oracle_inside.h"

/* An edge, and with it every path that it ends. */
void oracle_add_edge(oracle *o, int from, int to) {
    if (from < 0 || from == to) return;
    row_of(o, to)[from] = 1;
    for (int i = 0; i < from; i++) row_of(o, to)[i] |= row_of(o, from)[i];
}

/* The last item that a stream was given before `item`, of the world or of a recording; -1: none. */
int oracle_last_on(const oracle *o, int stream, int item, int recording) {
    for (int i = item - 1; i >= 0; i--)
        if (is_on_stream(item_of(o, i)) && (int)item_of(o, i)->stream == stream && o->part_of[i] == recording) return i;
    return -1;
}

/* The last thing that a rank's host waited for, or did. */
int oracle_last_of_host(const oracle *o, int rank, int item) {
    for (int i = item - 1; i >= 0; i--) {
        const qe_item *x = item_of(o, i);
        int its = is_on_stream(x) || x->kind == QE_ITEM_SYNC_STREAM ? stream_of(o, (int)x->stream)->rank : x->rank;
        int host = (x->kind == QE_ITEM_OP || x->kind == QE_ITEM_WAIT) &&
                   stream_of(o, (int)x->stream)->role == QE_STREAM_HOST;
        int sync = x->kind == QE_ITEM_SYNC_EVENT || x->kind == QE_ITEM_SYNC_STREAM || x->kind == QE_ITEM_SYNC_DEVICE;
        if ((host || sync) && its == rank && o->part_of[i] == 0) return i;
    }
    return -1;
}

/* The last record of an event, or -1 where it has none, or was destroyed since. */
int oracle_record_of(const oracle *o, uint32_t event, int item) {
    for (int i = item - 1; i >= 0; i--) {
        if (item_of(o, i)->event != event) continue;
        if (item_of(o, i)->kind == QE_ITEM_DESTROY) return -1;
        if (item_of(o, i)->kind == QE_ITEM_RECORD) return i;
    }
    return -1;
}

/* CUDA's default stream: the legacy one and the blocking ones of a rank. */
int oracle_are_related(const oracle *o, int a, int b) {
    const qe_stream_info *one = stream_of(o, a), *other = stream_of(o, b);
    if (a == b || one->rank != other->rank) return 0;
    if (one->order == QE_STREAM_SEPARATE || other->order == QE_STREAM_SEPARATE) return 0;
    return one->order == QE_STREAM_LEGACY || other->order == QE_STREAM_LEGACY;
}

/* What is ordered before an item because of where it is submitted. */
void oracle_add_stream_edges(oracle *o, int item) {
    int stream = (int)item_of(o, item)->stream, recording = o->part_of[item];
    oracle_add_edge(o, oracle_last_on(o, stream, item, 0), item);
    if (recording != 0) oracle_add_edge(o, oracle_last_on(o, stream, item, recording), item);
    oracle_add_edge(o, oracle_last_of_host(o, stream_of(o, stream)->rank, item), item);
    for (int t = 0; t < (int)o->program->stream_count; t++)
        if (oracle_are_related(o, stream, t)) oracle_add_edge(o, oracle_last_on(o, t, item, 0), item);
}

static int writes(const qe_effect *e) {
    switch ((qe_effect_kind)e->kind) {
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
    case QE_EFFECT_SLOT_BORROW: return e->write;
    case QE_EFFECT_RNG_DRAW: return !e->write;
    default: return 0;
    }
}

int oracle_touches(const qe_effect *e) {
    switch ((qe_effect_kind)e->kind) {
    case QE_EFFECT_BUFFER_TAKE:
    case QE_EFFECT_BUFFER_DROP:
    case QE_EFFECT_BUFFER_PLEDGE:
    case QE_EFFECT_GRAPH_BEGIN:
    case QE_EFFECT_GRAPH_CAPTURE:
    case QE_EFFECT_GRAPH_LAUNCH: return 0;
    default: return 1;
    }
}

static int race_rule(const oracle *o, int earlier, int later) {
    qe_stream_role a = stream_of(o, earlier)->role, b = stream_of(o, later)->role;
    if (a == QE_STREAM_HOST || b == QE_STREAM_HOST) return QE_RULE_SYNC_HOST;
    if (a == QE_STREAM_CALLER && b != QE_STREAM_CALLER) return QE_RULE_SYNC_ENTER;
    if (b == QE_STREAM_CALLER && a != QE_STREAM_CALLER) return QE_RULE_SYNC_EXIT;
    return QE_RULE_SYNC_SIDE;
}

/* When the buffer was dropped, the allocator waited for every stream that had pledged. */
static int is_awaited(const oracle *o, const deed *drop, int item) {
    for (uint32_t s = 0; s < o->program->stream_count; s++)
        if (drop->given[s] >= 0 && (drop->given[s] == item || is_before(o, item, drop->given[s]))) return 1;
    return 0;
}

/* Did the allocator, at a drop of this byte behind the deed, wait for it? */
static int is_forgiven(const oracle *o, uint32_t index, place p) {
    for (uint32_t i = index + 1; i < o->deed_count; i++)
        if (o->deeds[i].recording == 0 && o->deeds[i].effect.kind == QE_EFFECT_BUFFER_DROP &&
            oracle_covers(o, &o->deeds[i].effect, p) && is_awaited(o, &o->deeds[i], o->deeds[index].item))
            return 1;
    return 0;
}

/* One byte (or object) against who touched it before: a read against the last write, a write against the reads since,
 * or against that write where there are none: readers come after the write they read. Where the memory was handed out
 * since, all are asked. Tells whether it raced with who has the byte now, or had it before. */
int oracle_judge_order(oracle *o, const qe_effect *e, int item, int recording, place p) {
    int found = 0;
    int reads = 0, stream = (int)item_of(o, item)->stream;
    int birth = recording == 0 && object_of(o, e->object)->kind == QE_OBJECT_BUFFER ? oracle_born(o, e->object) : -1;
    if (recording == 0 && begins_life(e)) birth = item;
    for (uint32_t i = o->deed_count; i-- > 0;) {
        const deed *d = &o->deeds[i];
        if (d->recording != recording || d->unordered) continue;
        if (!oracle_touches(&d->effect) || !oracle_covers(o, &d->effect, p)) continue;
        if (recording == 0 && is_forgiven(o, i, p)) continue;
        int wrote = writes(&d->effect), of_earlier_life = d->item < birth;
        int asked = wrote ? reads == 0 || of_earlier_life : writes(e);
        if (asked && d->item != item && !is_before(o, d->item, item)) {
            oracle_note(o, of_earlier_life ? QE_RULE_SYNC_REUSE : race_rule(o, d->stream, stream), e->object, 0);
            found |= of_earlier_life ? RACED_BEFORE : RACED;
        }
        if (wrote || d->takes_over) break;
        reads += writes(e);
    }
    return found;
}
