/* region.c - which memory a device has, what ops may touch of it, and how to name a byte of it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/check/check.h"
#include "base/assert.h"

static qe_status no_memory(qe_error *error_out, const char *what) {
    return qe_error_set(error_out, QE_ERROR_MEMORY, "use a smaller model: check holds memory four times",
                        "no memory for %s", what);
}

/* Room for one more element. */
static int grow(void **array, uint32_t count, uint32_t *capacity, size_t element_bytes) {
    if (count < *capacity) return 1;
    const uint32_t wanted = *capacity ? 2 * *capacity : 64;
    void *grown = realloc(*array, wanted * element_bytes);
    if (!grown) return 0;
    *array = grown;
    *capacity = wanted;
    return 1;
}

static void region_free(check_region *region) {
    if (!region) return;
    free(region->before);
    free(region->after);
    free(region->again);
    free(region);
}

static check_region *region_make(char *base, uint64_t bytes, uint64_t guard_bytes) {
    check_region *region = calloc(1, sizeof *region);
    if (!region) return NULL;
    *region = (check_region){.base = base, .bytes = bytes, .guard_bytes = guard_bytes};
    region->before = malloc(bytes);
    region->after = malloc(bytes);
    region->again = malloc(bytes);
    if (region->before && region->after && region->again) return region;
    region_free(region);
    return NULL;
}

/* The first region that ends behind `at`. */
static uint32_t region_index(const qe_device *device, const char *at) {
    uint32_t low = 0, high = device->region_count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        const check_region *region = device->regions[middle];
        if ((uintptr_t)region->base + region->bytes <= (uintptr_t)at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

qe_status qe_check_region_add(qe_device *device, char *base, uint64_t bytes, uint64_t guard_bytes,
                              qe_error *error_out) {
    if (!grow((void **)&device->regions, device->region_count, &device->region_capacity, sizeof *device->regions))
        return no_memory(error_out, "the table of allocations");
    check_region *region = region_make(base, bytes, guard_bytes);
    if (!region) return no_memory(error_out, "copies of an allocation");
    const uint32_t at = region_index(device, base);
    memmove(&device->regions[at + 1], &device->regions[at], (device->region_count - at) * sizeof *device->regions);
    device->regions[at] = region;
    device->region_count++;
    return QE_OK;
}

void qe_check_region_remove(qe_device *device, const char *base) {
    const uint32_t at = region_index(device, base);
    QE_ASSERT(at < device->region_count);
    QE_ASSERT(device->regions[at]->base == base);
    region_free(device->regions[at]);
    device->region_count--;
    memmove(&device->regions[at], &device->regions[at + 1], (device->region_count - at) * sizeof *device->regions);
}

/* A range belongs to the region that holds all of it, or to none and then becomes one. */
static qe_status place_range(qe_device *device, const qe_range *range, qe_error *error_out) {
    const uint32_t at = region_index(device, range->at);
    const uintptr_t begin = (uintptr_t)range->at, end = begin + range->bytes;
    if (range->bytes == 0) return QE_OK;
    if (at < device->region_count) {
        const check_region *region = device->regions[at];
        const uintptr_t first = (uintptr_t)region->base + region->guard_bytes;
        const uintptr_t last = (uintptr_t)region->base + region->bytes - region->guard_bytes;
        if (begin >= first && end <= last) return QE_OK;
        if (end > (uintptr_t)region->base)
            return qe_error_set(error_out, QE_ERROR_ARGUMENT, "declare bytes of one allocation",
                                "%llu bytes of %s leave the %llu bytes that were allocated there",
                                (unsigned long long)range->bytes, range->object, (unsigned long long)(last - first));
    }
    return qe_check_region_add(device, range->at, range->bytes, 0, error_out);
}

static int same_bytes(const qe_range *a, const qe_range *b) { return a->at == b->at && a->bytes == b->bytes; }

qe_status qe_check_declaration_join(check_declaration *all, const qe_range *ranges, size_t count,
                                    qe_error *error_out) {
    qe_range *grown = realloc(all->ranges, (all->count + count + 1) * sizeof *grown);
    if (!grown) return no_memory(error_out, "a declaration");
    all->ranges = grown;
    for (size_t i = 0; i < count; ++i) {
        uint32_t at = 0;
        while (at < all->count && !same_bytes(&grown[at], &ranges[i])) ++at;
        if (at == all->count) grown[all->count++] = ranges[i];
        grown[at].read |= ranges[i].read;
        grown[at].write |= ranges[i].write;
    }
    return QE_OK;
}

/* The first declaration of `op` or of an op behind it. */
static uint32_t declaration_index(const qe_device *device, const qe_op *op) {
    uint32_t low = 0, high = device->declaration_count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if ((uintptr_t)device->declarations[middle].op < (uintptr_t)op)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

const check_declaration *qe_check_find(const qe_device *device, const qe_op *op) {
    const uint32_t at = declaration_index(device, op);
    if (at == device->declaration_count || device->declarations[at].op != op) return NULL;
    return &device->declarations[at];
}

/* Offsets in `region` at which `range` begins and ends; 0 where they do not meet. */
static int meets(const check_region *region, const qe_range *range, uint64_t *begin_out, uint64_t *end_out) {
    const uintptr_t base = (uintptr_t)region->base, at = (uintptr_t)range->at;
    if (range->bytes == 0 || at >= base + region->bytes || at + range->bytes <= base) return 0;
    *begin_out = at > base ? at - base : 0;
    *end_out = at + range->bytes < base + region->bytes ? at + range->bytes - base : region->bytes;
    return 1;
}

/* Memory of the host is looked at as long as a declaration names it. */
static int is_named(const qe_device *device, const check_region *region) {
    uint64_t begin, end;
    if (region->guard_bytes > 0) return 1;
    for (uint32_t d = 0; d < device->declaration_count; ++d)
        for (uint32_t i = 0; i < device->declarations[d].count; ++i)
            if (meets(region, &device->declarations[d].ranges[i], &begin, &end)) return 1;
    return 0;
}

static void forget(qe_device *device, const qe_op *op) {
    const uint32_t at = declaration_index(device, op);
    if (at == device->declaration_count || device->declarations[at].op != op) return;
    free(device->declarations[at].ranges);
    device->declaration_count--;
    memmove(&device->declarations[at], &device->declarations[at + 1],
            (device->declaration_count - at) * sizeof *device->declarations);
    for (uint32_t r = device->region_count; r-- > 0;)
        if (!is_named(device, device->regions[r])) qe_check_region_remove(device, device->regions[r]->base);
}

qe_status qe_check_declare(qe_device *device, const qe_op *op, const qe_range *ranges, size_t count,
                           qe_error *error_out) {
    forget(device, op);
    if (count == 0) return QE_OK;
    for (size_t i = 0; i < count; ++i) QE_TRY(place_range(device, &ranges[i], error_out));
    check_declaration made = {.op = op};
    QE_TRY(qe_check_declaration_join(&made, ranges, count, error_out));
    if (!grow((void **)&device->declarations, device->declaration_count, &device->declaration_capacity,
              sizeof *device->declarations)) {
        free(made.ranges);
        return no_memory(error_out, "the table of declarations");
    }
    const uint32_t at = declaration_index(device, op);
    memmove(&device->declarations[at + 1], &device->declarations[at],
            (device->declaration_count - at) * sizeof *device->declarations);
    device->declarations[at] = made;
    device->declaration_count++;
    return QE_OK;
}

/* The declared ranges, then what transfers have now. */
static const qe_range *next_range(const check_declaration *declared, uint32_t *index, qe_stream **flying,
                                  int *access_out) {
    if (*index < declared->count) {
        const qe_range *range = &declared->ranges[(*index)++];
        *access_out = (range->read ? ACCESS_READ : 0) | (range->write ? ACCESS_WRITE : 0);
        return range;
    }
    if (!*flying) return NULL;
    const qe_range *range = &(*flying)->flying;
    *flying = (*flying)->next;
    *access_out = ACCESS_FOREIGN;
    return range;
}

/* How byte `at` is declared, and where that may change next. */
static int access_at(const qe_device *device, const check_region *region, const check_declaration *declared,
                     uint64_t at, uint64_t *next_out) {
    uint32_t index = 0;
    qe_stream *flying = device->streams;
    int access = 0, one = 0;
    uint64_t next = region->bytes, begin = 0, end = 0;
    for (const qe_range *range; (range = next_range(declared, &index, &flying, &one)) != NULL;) {
        if (!meets(region, range, &begin, &end)) continue;
        if (begin <= at && at < end) access |= one;
        if (begin > at && begin < next) next = begin;
        if (end > at && end < next) next = end;
    }
    *next_out = next;
    return access;
}

qe_status qe_check_cut(qe_device *device, const check_declaration *declared, qe_error *error_out) {
    device->span_count = 0;
    for (uint32_t r = 0; r < device->region_count; ++r) {
        check_region *region = device->regions[r];
        for (uint64_t at = 0, next = 0; at < region->bytes; at = next) {
            if (!grow((void **)&device->spans, device->span_count, &device->span_capacity, sizeof *device->spans))
                return no_memory(error_out, "the spans of an op");
            const int access = access_at(device, region, declared, at, &next);
            device->spans[device->span_count++] =
                (check_span){.region = region, .begin = at, .end = next, .access = access};
        }
    }
    return QE_OK;
}

/* How far a byte is from a range: 0 inside. */
static uint64_t distance(const qe_range *range, const char *at) {
    const uintptr_t begin = (uintptr_t)range->at, end = begin + range->bytes, here = (uintptr_t)at;
    return here < begin ? begin - here : here >= end ? here - end + 1 : 0;
}

/* The range of any op in the same region that holds the byte or is nearest to it; the smallest of those. */
static const qe_range *owner_of(const qe_device *device, const check_region *region, const char *at) {
    const qe_range *best = NULL;
    uint64_t begin, end;
    for (uint32_t d = 0; d < device->declaration_count; ++d)
        for (uint32_t i = 0; i < device->declarations[d].count; ++i) {
            const qe_range *range = &device->declarations[d].ranges[i];
            if (!meets(region, range, &begin, &end)) continue;
            const uint64_t old = best ? distance(best, at) : UINT64_MAX, now = distance(range, at);
            if (now < old || (now == old && range->bytes < best->bytes)) best = range;
        }
    return best;
}

void qe_check_name(const qe_device *device, const check_region *region, uint64_t byte, char *text_out, size_t bytes) {
    const char *at = region->base + byte;
    const qe_range *range = owner_of(device, region, at);
    if (!range) {
        snprintf(text_out, bytes, "byte %lld of an allocation of %llu bytes that no op declares",
                 (long long)byte - (long long)region->guard_bytes,
                 (unsigned long long)(region->bytes - 2 * region->guard_bytes));
        return;
    }
    const char *begin = range->at;
    const int in_front = (uintptr_t)at < (uintptr_t)begin, behind = !in_front && distance(range, at) > 0;
    const uint64_t away = in_front ? distance(range, at) : behind ? distance(range, at) - 1 : (uint64_t)(at - begin);
    snprintf(text_out, bytes, "byte %llu %s %s%s%s%s", (unsigned long long)away,
             in_front ? "before"
             : behind ? "behind the end of"
                      : "of",
             range->object, range->part ? " (" : "", range->part ? range->part : "", range->part ? ")" : "");
}
