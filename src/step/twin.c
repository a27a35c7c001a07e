/* twin.c - see twin.h. */
#include "step/twin.h"

#include <stdlib.h>
#include "base/align.h"
#include "base/assert.h"

/* Counted first, then laid out. */
typedef struct twin_layout {
    qe_keep_range *ranges; /* NULL: only counted */
    char *memory;
    size_t count;
    uint64_t bytes;
} twin_layout;

static void twin_add(twin_layout *layout, const void *from, uint64_t bytes) {
    if (from == NULL || bytes == 0) return;
    if (layout->ranges != NULL)
        layout->ranges[layout->count] =
            (qe_keep_range){.from = from, .to = layout->memory + layout->bytes, .bytes = bytes};
    layout->count++;
    layout->bytes += qe_aligned(bytes);
}

static void twin_lay(const qe_rank *rank, twin_layout *layout) {
    const qe_plan *plan = rank->team->plan;
    const uint64_t scales = plan->weight_count * (uint64_t)QE_SCALE_ROLES;
    for (uint32_t weight = 0; weight < plan->weight_count; weight++) {
        const qe_weight_info *info = plan->model_ops->weight(plan->model, weight);
        const uint64_t bytes = (uint64_t)info->rows * info->columns * sizeof(float);
        if (!qe_rank_owns(rank, weight)) continue;
        twin_add(layout, rank->places[weight].master, bytes);
        twin_add(layout, rank->moment1[weight], bytes);
        twin_add(layout, rank->moment2[weight], bytes);
    }
    twin_add(layout, rank->scales, scales * sizeof *rank->scales);
    twin_add(layout, rank->histories,
             scales * plan->model_ops->recipe(plan->model)->history_length * sizeof *rank->histories);
}

static qe_status twin_init(qe_twin *twin, qe_rank *rank) {
    twin_layout counted = {0};
    twin->rank = rank;
    twin_lay(rank, &counted);
    twin->ranges = calloc(counted.count + 1, sizeof *twin->ranges);
    if (twin->ranges == NULL) return QE_ERROR_MEMORY;
    twin->memory = qe_rank_alloc(rank, QE_MEMORY_SNAPSHOT, counted.bytes + QE_ALIGN_BYTES, NULL);
    if (twin->memory == NULL) return QE_ERROR_MEMORY;
    twin_layout placed = {.ranges = twin->ranges, .memory = twin->memory};
    twin_lay(rank, &placed);
    QE_ASSERT(placed.count == counted.count && placed.bytes == counted.bytes);
    twin->count = placed.count;
    return QE_OK;
}

qe_twin *qe_twins_create(qe_team *team) {
    const qe_memory_ops *memory = team->options.backend->memory;
    if (memory->keep == NULL || memory->fetch == NULL) return NULL;
    qe_twin *twins = calloc(team->rank_count, sizeof *twins);
    if (twins == NULL) return NULL;
    for (uint32_t i = 0; i < team->rank_count; i++)
        /* kept once now: what that needs for itself is taken before the first step */
        if (twin_init(&twins[i], &team->ranks[i]) != QE_OK || qe_twin_keep(&twins[i], NULL) != QE_OK) {
            qe_twins_destroy(twins, i + 1);
            return NULL;
        }
    return twins;
}

void qe_twins_destroy(qe_twin *twins, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        qe_rank_free(twins[i].rank, twins[i].memory);
        free(twins[i].ranges);
    }
    free(twins);
}

qe_status qe_twin_keep(const qe_twin *twin, qe_error *error_out) {
    return twin->rank->team->options.backend->memory->keep(twin->rank->device, twin->ranges, twin->count, error_out);
}

qe_status qe_twin_read(const qe_twin *twin, void *to_host, const void *from, size_t bytes, qe_error *error_out) {
    const uintptr_t wanted = (uintptr_t)from;
    for (size_t i = 0; i < twin->count; i++) {
        const qe_keep_range *range = &twin->ranges[i];
        const uintptr_t begin = (uintptr_t)range->from;
        if (wanted < begin || wanted + bytes > begin + range->bytes) continue;
        const void *kept = (const char *)range->to + (wanted - begin);
        return twin->rank->team->options.backend->memory->fetch(twin->rank->device, to_host, kept, bytes, error_out);
    }
    QE_ASSERT(0 && "what is read is kept");
    return QE_ERROR_DEVICE;
}
