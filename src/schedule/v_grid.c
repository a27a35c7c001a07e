/* v_grid.c - the slots of a V: memory, gaps, and rows. */
#include "schedule/v_grid.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

void qe_v_grid_close(qe_v_grid *grid) {
    free(grid->slot);
    free(grid->held);
    free(grid->end);
    free(grid->placed);
    *grid = (qe_v_grid){0};
}

qe_status qe_v_grid_open(const qe_schedule_request *request, uint32_t length, qe_v_grid *grid_out,
                         qe_error *error_out) {
    qe_v_grid grid = {.ranks = request->ranks, .microbatches = request->microbatches, .length = length};
    size_t slots = (size_t)grid.ranks * length, kinds = (size_t)grid.ranks * QE_V_KINDS;
    grid.slot = malloc(slots);
    grid.held = calloc(slots, sizeof *grid.held);
    grid.end = calloc(kinds * grid.microbatches, sizeof *grid.end);
    grid.placed = calloc(kinds, sizeof *grid.placed);
    if (grid.slot == NULL || grid.held == NULL || grid.end == NULL || grid.placed == NULL) {
        qe_v_grid_close(&grid);
        return qe_error_set(error_out, QE_ERROR_MEMORY, "use fewer microbatches, or free memory",
                            "no memory to arrange %s", request->name);
    }
    memset(grid.slot, EMPTY, slots);
    *grid_out = grid;
    return QE_OK;
}

void qe_v_grid_repeat(qe_v_grid *grid, uint32_t rank, qe_v_kind kind, uint32_t first) {
    for (uint32_t microbatch = 0; microbatch < grid->microbatches; microbatch++) {
        uint32_t at = first + QE_V_PERIOD * microbatch;
        QE_ASSERT(at < grid->length);
        qe_v_grid_slots(grid, rank)[at] = (uint8_t)kind;
    }
}

void qe_v_grid_hold(qe_v_grid *grid) {
    grid->peak = 0;
    for (uint32_t rank = 0; rank < grid->ranks; rank++) {
        const uint8_t *slot = qe_v_grid_slots(grid, rank);
        uint32_t *held = qe_v_grid_held(grid, rank), now = 0;
        for (uint32_t at = 0; at < grid->length; at++) {
            if (slot[at] == F0 || slot[at] == F1) now++;
            if (slot[at] == W1 || slot[at] == W0) now--;
            held[at] = now;
            if (now > grid->peak) grid->peak = now;
        }
    }
}

uint32_t qe_v_grid_gap(const qe_v_grid *grid, uint32_t rank, uint32_t from, uint32_t at, int two) {
    const uint8_t *slot = qe_v_grid_slots(grid, rank);
    while (from < at && (slot[from] != EMPTY || (two && slot[from + 1] != EMPTY))) from++;
    return from;
}

uint32_t qe_v_grid_forward_gap(const qe_v_grid *grid, uint32_t rank, uint32_t from, uint32_t at) {
    const uint32_t *held = qe_v_grid_held(grid, rank);
    uint32_t place = at;
    while (place > from && held[place - 1] < grid->peak) place--;
    return qe_v_grid_gap(grid, rank, place, at, 0);
}

void qe_v_grid_write(const qe_v_grid *grid, const uint8_t kinds[static QE_V_KINDS], int forward_only, qe_action *next) {
    for (uint32_t rank = 0; rank < grid->ranks; rank++) {
        const uint8_t *slot = qe_v_grid_slots(grid, rank);
        uint32_t microbatch[QE_V_KINDS] = {0};
        for (uint32_t at = 0; at < grid->length; at++) {
            uint8_t kind = slot[at];
            if (kind == EMPTY || kinds[kind] == QE_ACTION_KINDS) continue;
            if (forward_only && kinds[kind] != QE_ACTION_F) continue;
            uint32_t stage = kind == F0 || kind == I0 || kind == W0 ? rank : 2 * grid->ranks - 1 - rank;
            *next++ = (qe_action){.microbatch = microbatch[kind]++, .stage = (uint16_t)stage, .kind = kinds[kind]};
        }
    }
}
