/* ledger_space.c - buffers whose addresses are told share the bytes in which they overlap: a block that is split, two
 * that are merged, a view. Those that are connected by overlaps are one space with one history of its bytes. A buffer
 * without an address is a space of its own. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "core/ledger_state.h"

typedef struct placed {
    uint64_t address, end;
    uint32_t object;
} placed;

static int by_address(const void *a, const void *b) {
    const placed *first = a, *second = b;
    if (first->address != second->address) return first->address > second->address ? 1 : -1;
    return (first->object > second->object) - (first->object < second->object);
}

static int is_placed(const qe_object *object) {
    return object->kind == QE_OBJECT_BUFFER && object->address > 0 && object->bytes > 0;
}

/* One sweep over the buffers in the order of their addresses; a gap ends a space. */
static void join_overlapping(qe_ledger *ledger, const placed *all, uint32_t count) {
    for (uint32_t i = 0, first = 0; i < count; i++) {
        uint32_t space = all[first].object;
        qe_range_list *list = &ledger->ranges[space];
        if (i > first && all[i].address - all[first].address >= list->bytes) {
            first = i;
            space = all[i].object;
            list = &ledger->ranges[space];
        }
        uint64_t reach = all[i].end - all[first].address;
        if (i == first || reach > list->bytes) list->bytes = reach;
        ledger->space[all[i].object] = space;
        ledger->shift[all[i].object] = all[i].address - all[first].address;
    }
}

static int share_bytes(const qe_object *a, const qe_object *b) {
    if (a->address == 0 || b->address == 0 || a->bytes == 0 || b->bytes == 0) return 0;
    return a->address <= b->address ? b->address - a->address < a->bytes : a->address - b->address < b->bytes;
}

/* A slot that each buffer shares bytes with. Slots whose places are told are few, and a plan tells none. */
static void link_aliases(qe_ledger *ledger) {
    const qe_object *objects = ledger->program->objects;
    for (uint32_t i = 0; i < ledger->object_count; i++) ledger->alias[i] = QE_NONE;
    for (uint32_t slot = ledger->object_count; slot-- > 0;) {
        if (objects[slot].kind != QE_OBJECT_SLOT || objects[slot].address == 0) continue;
        for (uint32_t i = 0; i < ledger->object_count; i++)
            if (objects[i].kind == QE_OBJECT_BUFFER && share_bytes(&objects[i], &objects[slot]))
                ledger->alias[i] = slot;
    }
}

static qe_status no_memory(qe_error *error_out) {
    return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for the places of buffers");
}

qe_status qe_space_open(qe_ledger *ledger, qe_error *error_out) {
    const qe_object *objects = ledger->program->objects;
    size_t room = (size_t)ledger->object_count + 1;
    ledger->space = calloc(room, sizeof *ledger->space);
    ledger->shift = calloc(room, sizeof *ledger->shift);
    if (ledger->space == NULL || ledger->shift == NULL) return no_memory(error_out);
    uint32_t count = 0;
    link_aliases(ledger);
    for (uint32_t i = 0; i < ledger->object_count; i++) {
        ledger->space[i] = i;
        if (objects[i].kind == QE_OBJECT_BUFFER) ledger->ranges[i].bytes = objects[i].bytes;
        count += is_placed(&objects[i]) != 0;
    }
    if (count == 0) return QE_OK;
    placed *all = malloc(count * sizeof *all);
    if (all == NULL) return no_memory(error_out);
    uint32_t next = 0;
    for (uint32_t i = 0; i < ledger->object_count; i++) {
        uint64_t address = objects[i].address;
        if (is_placed(&objects[i])) all[next++] = (placed){address, address + objects[i].bytes, i};
    }
    QE_ASSERT(next == count);
    qsort(all, count, sizeof *all, by_address);
    join_overlapping(ledger, all, count);
    for (uint32_t i = 0; i < count; i++)
        if (ledger->space[all[i].object] != all[i].object) ledger->ranges[all[i].object].bytes = 0;
    free(all);
    return QE_OK;
}

void qe_space_close(qe_ledger *ledger) {
    free(ledger->space);
    free(ledger->shift);
}
