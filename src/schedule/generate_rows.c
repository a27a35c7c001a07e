/* generate_rows.c - the named orders. Each is a few loops over one rank's microbatches; docs/schedules.md draws them.
 * I and B go first in first out in all of them but looped-bfs, W in all. */
#include "schedule/generate.h"

/* Microbatches behind the last, and all but F of an evaluation, are left out: the order of the rest stays. */
static void put(qe_row *to, qe_action_kind kind, uint32_t chunk, uint32_t microbatch) {
    if (to->request->forward_only && kind != QE_ACTION_F) return;
    if (microbatch >= to->request->microbatches) return;
    *to->next++ = (qe_action){
        .microbatch = microbatch, .stage = (uint16_t)qe_row_stage(to, chunk), .kind = (uint8_t)kind};
}

static uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }
static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* One microbatch at a time: F of all stages, then B of all stages in reverse. */
void qe_row_sequential(qe_row *to) {
    for (uint32_t microbatch = 0; microbatch < to->request->microbatches; microbatch++) {
        for (uint32_t chunk = 0; chunk < to->request->chunks; chunk++) put(to, QE_ACTION_F, chunk, microbatch);
        for (uint32_t chunk = to->request->chunks; chunk-- > 0;) put(to, QE_ACTION_B, chunk, microbatch);
    }
}

void qe_row_gpipe(qe_row *to) {
    uint32_t microbatches = to->request->microbatches;
    for (uint32_t microbatch = 0; microbatch < microbatches; microbatch++) put(to, QE_ACTION_F, 0, microbatch);
    for (uint32_t microbatch = 0; microbatch < microbatches; microbatch++) put(to, QE_ACTION_B, 0, microbatch);
}

/* All microbatches through one chunk, then through the next; back the same way, the last microbatch first. */
void qe_row_looped_bfs(qe_row *to) {
    uint32_t microbatches = to->request->microbatches;
    for (uint32_t chunk = 0; chunk < to->request->chunks; chunk++) {
        for (uint32_t microbatch = 0; microbatch < microbatches; microbatch++) put(to, QE_ACTION_F, chunk, microbatch);
    }
    for (uint32_t chunk = to->request->chunks; chunk-- > 0;) {
        for (uint32_t microbatch = microbatches; microbatch-- > 0;) put(to, QE_ACTION_B, chunk, microbatch);
    }
}

void qe_row_1f1b(qe_row *to) {
    uint32_t microbatches = to->request->microbatches;
    uint32_t warmup = smaller(to->request->ranks - 1 - to->rank, microbatches);
    for (uint32_t forward = 0; forward < warmup; forward++) put(to, QE_ACTION_F, 0, forward);
    for (uint32_t backward = 0; backward < microbatches; backward++) {
        put(to, QE_ACTION_F, 0, warmup + backward);
        put(to, QE_ACTION_B, 0, backward);
    }
}

/* 1F1B with each W as many microbatches after its I as the rank's number, so that all ranks keep as much as rank 0. */
void qe_row_zbh1(qe_row *to) {
    uint32_t microbatches = to->request->microbatches;
    uint32_t warmup = to->request->ranks - 1 - to->rank, delay = to->rank; /* both below microbatches >= ranks */
    for (uint32_t forward = 0; forward < warmup; forward++) put(to, QE_ACTION_F, 0, forward);
    for (uint32_t backward = 0; backward < microbatches; backward++) {
        put(to, QE_ACTION_F, 0, warmup + backward);
        put(to, QE_ACTION_I, 0, backward);
        if (backward >= delay) put(to, QE_ACTION_W, 0, backward - delay);
    }
    for (uint32_t weight = microbatches - delay; weight < microbatches; weight++) put(to, QE_ACTION_W, 0, weight);
}

/* Twice the forwards of zbh1 ahead: the first I of every rank meets no gap, at twice the memory. */
void qe_row_zbh2(qe_row *to) {
    uint32_t microbatches = to->request->microbatches, delay = 2 * to->rank, weight = 0;
    uint32_t warmup = smaller(2 * (to->request->ranks - to->rank) - 1, microbatches);
    for (uint32_t forward = 0; forward < warmup; forward++) put(to, QE_ACTION_F, 0, forward);
    for (uint32_t backward = 0; backward < microbatches; backward++) {
        put(to, QE_ACTION_I, 0, backward);
        if (backward >= delay) put(to, QE_ACTION_W, 0, weight++);
        put(to, QE_ACTION_F, 0, warmup + backward);
    }
    while (weight < microbatches) put(to, QE_ACTION_W, 0, weight++);
}

/* Virtual step k of the forward: groups of `group` microbatches go through chunk 0, then chunk 1, ... The backward
 * takes the same microbatches through the chunks in reverse. */
static void put_virtual(qe_row *to, qe_action_kind kind, uint32_t group, uint32_t step) {
    uint32_t chunks = to->request->chunks;
    uint32_t chunk = step % (group * chunks) / group;
    uint32_t microbatch = step / (group * chunks) * group + step % group;
    put(to, kind, kind == QE_ACTION_F ? chunk : chunks - 1 - chunk, microbatch);
}

static uint32_t group_of(const qe_schedule_request *request) {
    return request->microbatches / qe_schedule_rounds(request->ranks, request->microbatches);
}

void qe_row_interleaved(qe_row *to) {
    uint32_t chunks = to->request->chunks, group = group_of(to->request), steps = to->request->microbatches * chunks;
    uint32_t warmup = smaller(steps, 2 * (to->request->ranks - 1 - to->rank) + (chunks - 1) * group);
    for (uint32_t forward = 0; forward < warmup; forward++) put_virtual(to, QE_ACTION_F, group, forward);
    for (uint32_t backward = 0; backward < steps; backward++) {
        if (warmup + backward < steps) put_virtual(to, QE_ACTION_F, group, warmup + backward);
        put_virtual(to, QE_ACTION_B, group, backward);
    }
}

/* Over virtual steps what zbh1 is over microbatches; with one hop ahead per rank where interleaved has two, since an
 * I alone is as long as a F. */
void qe_row_interleaved_zb(qe_row *to) {
    uint32_t chunks = to->request->chunks, group = group_of(to->request), steps = to->request->microbatches * chunks;
    uint32_t warmup = smaller(steps, to->request->ranks - 1 - to->rank + (chunks - 1) * group), weight = 0;
    for (uint32_t forward = 0; forward < warmup; forward++) put_virtual(to, QE_ACTION_F, group, forward);
    for (uint32_t backward = 0; backward < steps; backward++) {
        if (warmup + backward < steps) put_virtual(to, QE_ACTION_F, group, warmup + backward);
        put_virtual(to, QE_ACTION_I, group, backward);
        if (backward >= to->rank) put_virtual(to, QE_ACTION_W, group, weight++);
    }
    while (weight < steps) put_virtual(to, QE_ACTION_W, group, weight++);
}

/* The next microbatch of every kind on the two stages of a rank. */
typedef struct turns {
    uint32_t next[2][QE_ACTION_KINDS];
} turns;

static void put_next(qe_row *to, turns *turn, uint32_t chunk, qe_action_kind kind) {
    put(to, kind, chunk, turn->next[chunk][kind]++);
}

static void put_next_all(qe_row *to, turns *turn, uint32_t chunk) {
    put_next(to, turn, chunk, QE_ACTION_F);
    put_next(to, turn, chunk, QE_ACTION_I);
    put_next(to, turn, chunk, QE_ACTION_W);
}

/* Fills the V: both stages of every rank have work without a gap when this ends. */
static void put_zbv_warmup(qe_row *to, turns *turn) {
    uint32_t ahead = to->request->ranks - to->rank;
    for (uint32_t i = 0; i < 2 * ahead - 1; i++) put_next(to, turn, 0, QE_ACTION_F);
    for (uint32_t i = 0; i < to->rank; i++) {
        put_next(to, turn, 1, QE_ACTION_F);
        put_next(to, turn, 0, QE_ACTION_F);
    }
    for (uint32_t i = 0; i < ahead; i++) put_next_all(to, turn, 1);
}

/* Empties it: the I that other ranks wait for come first, the W fill the gaps. */
static void put_zbv_drain(qe_row *to, turns *turn) {
    for (uint32_t i = 0; i < to->rank; i++) {
        put_next(to, turn, 0, QE_ACTION_I);
        put_next(to, turn, 1, QE_ACTION_I);
    }
    for (uint32_t i = to->rank; i < to->request->ranks; i++) {
        put_next(to, turn, 0, QE_ACTION_I);
        put_next(to, turn, 0, QE_ACTION_W);
    }
    for (uint32_t chunk = 2; chunk-- > 0;) {
        while (turn->next[chunk][QE_ACTION_W] < turn->next[chunk][QE_ACTION_I]) put_next(to, turn, chunk, QE_ACTION_W);
    }
}

/* The hand schedule is drawn for 2 * ranks - 1 microbatches or more; for fewer, the ones that are not there are left
 * out of it. */
void qe_row_zbv(qe_row *to) {
    uint32_t microbatches = larger(2 * to->request->ranks - 1, to->request->microbatches);
    turns turn = {0};
    put_zbv_warmup(to, &turn);
    while (turn.next[1][QE_ACTION_F] < microbatches) {
        if (turn.next[0][QE_ACTION_F] < microbatches) put_next(to, &turn, 0, QE_ACTION_F);
        put_next(to, &turn, 0, QE_ACTION_I);
        put_next(to, &turn, 0, QE_ACTION_W);
        put_next_all(to, &turn, 1);
    }
    put_zbv_drain(to, &turn);
}
