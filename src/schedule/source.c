/* source.c - formulas of named orders: what stands at a place of a row, in constant time. A test holds them against
 * the rows that generate_rows.c writes. */
#include "schedule/source.h"

#include <string.h>

static qe_action action_of(uint32_t rank, qe_action_kind kind, uint32_t microbatch) {
    return (qe_action){.microbatch = microbatch, .stage = (uint16_t)rank, .kind = (uint8_t)kind};
}

static qe_action at_gpipe(const qe_schedule_request *order, uint32_t rank, uint32_t index) {
    if (index < order->microbatches) return action_of(rank, QE_ACTION_F, index);
    return action_of(rank, QE_ACTION_B, index - order->microbatches);
}

/* warmup F, then (microbatches - warmup) pairs F B, then warmup B. */
static qe_action at_1f1b(const qe_schedule_request *order, uint32_t rank, uint32_t index) {
    uint32_t warmup = order->ranks - 1 - rank;
    if (warmup > order->microbatches) warmup = order->microbatches;
    if (index < warmup) return action_of(rank, QE_ACTION_F, index);
    if (index >= 2 * order->microbatches - warmup) return action_of(rank, QE_ACTION_B, index - order->microbatches);
    uint32_t step = (index - warmup) / 2;
    if ((index - warmup) % 2 == 0) return action_of(rank, QE_ACTION_F, warmup + step);
    return action_of(rank, QE_ACTION_B, step);
}

/* warmup F; then per backward b: F where one is left, I b, W of b - rank where there is one; then the remaining W.
 * With at least as many microbatches as ranks, the first W comes before the last F: steps of 2, of 3, of 2, of 1. */
static qe_action at_zbh1(const qe_schedule_request *order, uint32_t rank, uint32_t index) {
    uint32_t microbatches = order->microbatches, warmup = order->ranks - 1 - rank;
    if (index < warmup) return action_of(rank, QE_ACTION_F, index);
    index -= warmup;
    if (index < 2 * rank) {
        if (index % 2 == 0) return action_of(rank, QE_ACTION_F, warmup + index / 2);
        return action_of(rank, QE_ACTION_I, index / 2);
    }
    index -= 2 * rank;
    uint32_t full = microbatches - warmup - rank; /* steps that have F, I and W */
    if (index < 3 * full) {
        uint32_t step = index / 3;
        if (index % 3 == 0) return action_of(rank, QE_ACTION_F, warmup + rank + step);
        if (index % 3 == 1) return action_of(rank, QE_ACTION_I, rank + step);
        return action_of(rank, QE_ACTION_W, step);
    }
    index -= 3 * full;
    if (index >= 2 * warmup) return action_of(rank, QE_ACTION_W, microbatches - rank + index - 2 * warmup);
    if (index % 2 == 0) return action_of(rank, QE_ACTION_I, microbatches - warmup + index / 2);
    return action_of(rank, QE_ACTION_W, microbatches - warmup - rank + index / 2);
}

qe_row_formula qe_source_formula(const char *name, uint32_t *actions_per_pair_out) {
    static const struct {
        const char *name;
        qe_row_formula formula;
        uint32_t actions_per_pair;
    } formulas[] = {{"gpipe", at_gpipe, 2}, {"1f1b", at_1f1b, 2}, {"zbh1", at_zbh1, 3}};
    for (size_t i = 0; name != NULL && i < sizeof formulas / sizeof formulas[0]; i++) {
        if (strcmp(name, formulas[i].name) != 0) continue;
        *actions_per_pair_out = formulas[i].actions_per_pair;
        return formulas[i].formula;
    }
    return NULL;
}

qe_source qe_source_stored(const qe_schedule *schedule) {
    return (qe_source){.ranks = schedule->ranks,
                       .stages = schedule->stages,
                       .microbatches = schedule->microbatches,
                       .actions = schedule->rank_begin[schedule->ranks],
                       .stage_rank = schedule->stage_rank,
                       .reversed = schedule->reversed,
                       .schedule = schedule};
}

qe_cited qe_source_cite(const qe_source *source, uint32_t rank, uint32_t index) {
    return (qe_cited){.action = qe_source_at(source, rank, index), .rank = rank, .index = index};
}
