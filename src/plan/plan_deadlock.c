/* plan_deadlock.c - can the streams of all ranks finish together? Every stream runs its items in order; a wait needs
 * its event recorded, a transfer needs its other end. What the schedule check cannot see is the number of slots. */
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "plan/build.h"

typedef struct stream_walk {
    uint32_t *items; /* item indices of the stream, in order */
    uint32_t count, next;
} stream_walk;

typedef struct rank_walk {
    const qe_rank_plan *plan;
    stream_walk streams[QE_STREAMS_MAX];
    uint8_t *recorded; /* [event_count] */
} rank_walk;

static const qe_unit *unit_at(const rank_walk *rank, uint32_t item) {
    return &rank->plan->units[rank->plan->item_unit[item]];
}

static int walk_init(rank_walk *walk, const qe_rank_plan *plan) {
    const qe_program *program = &plan->program;
    walk->plan = plan;
    walk->recorded = calloc(program->event_count + 1u, 1);
    if (walk->recorded == NULL) return -1;
    for (uint32_t s = 0; s < program->stream_count; s++) {
        walk->streams[s].items = malloc((program->item_count + 1u) * sizeof(uint32_t));
        if (walk->streams[s].items == NULL) return -1;
    }
    for (uint32_t i = 0; i < program->item_count; i++) {
        stream_walk *stream = &walk->streams[program->items[i].stream];
        stream->items[stream->count++] = i;
    }
    return 0;
}

static void walk_deinit(rank_walk *walk) {
    free(walk->recorded);
    for (uint32_t s = 0; s < QE_STREAMS_MAX; s++) free(walk->streams[s].items);
}

/* The op that moves the bytes: the last of its unit. */
static int is_transfer(const rank_walk *rank, uint32_t item) {
    const qe_unit *unit = unit_at(rank, item);
    if (unit->kind < QE_UNIT_SEND_F || unit->kind > QE_UNIT_RECV_B) return 0;
    return rank->plan->item_op[item] == unit->first_op + unit->op_count - 1;
}

static int is_backward(const qe_unit *unit) {
    return unit->kind == QE_UNIT_SEND_B || unit->kind == QE_UNIT_RECV_B;
}

static int is_receive(const qe_unit *unit) {
    return unit->kind == QE_UNIT_RECV_F || unit->kind == QE_UNIT_RECV_B;
}

/* The stream on `peer` that stands at the other end of this transfer, or NULL while it is not there. */
static stream_walk *other_end(rank_walk *ranks, uint32_t rank, const qe_unit *unit) {
    rank_walk *peer = &ranks[unit->peer];
    for (uint32_t s = 0; s < peer->plan->program.stream_count; s++) {
        stream_walk *stream = &peer->streams[s];
        if (stream->next == stream->count) continue;
        uint32_t item = stream->items[stream->next];
        if (peer->plan->program.items[item].kind != QE_ITEM_OP) continue;
        if (!is_transfer(peer, item)) continue;
        const qe_unit *other = unit_at(peer, item);
        if (other->peer != rank || is_receive(other) == is_receive(unit)) continue;
        if (is_backward(other) == is_backward(unit) && other->microbatch == unit->microbatch) return stream;
    }
    return NULL;
}

/* Runs what can run on one stream; returns how many items. */
static uint32_t advance(rank_walk *ranks, uint32_t rank, stream_walk *stream) {
    rank_walk *walk = &ranks[rank];
    uint32_t done = 0;
    for (; stream->next < stream->count; done++) {
        uint32_t index = stream->items[stream->next];
        const qe_item *item = &walk->plan->program.items[index];
        if (item->kind == QE_ITEM_WAIT && !walk->recorded[item->event]) break;
        if (item->kind == QE_ITEM_RECORD) walk->recorded[item->event] = 1;
        if (item->kind == QE_ITEM_OP && is_transfer(walk, index)) {
            stream_walk *other = other_end(ranks, rank, unit_at(walk, index));
            if (other == NULL) break;
            other->next++;
        }
        stream->next++;
    }
    return done;
}

static uint32_t pass(rank_walk *ranks, uint32_t rank_count) {
    uint32_t done = 0;
    for (uint32_t rank = 0; rank < rank_count; rank++)
        for (uint32_t s = 0; s < ranks[rank].plan->program.stream_count; s++)
            done += advance(ranks, rank, &ranks[rank].streams[s]);
    return done;
}

static qe_status verdict(const rank_walk *ranks, uint32_t rank_count, qe_error *error_out) {
    for (uint32_t rank = 0; rank < rank_count; rank++)
        for (uint32_t s = 0; s < ranks[rank].plan->program.stream_count; s++) {
            const stream_walk *stream = &ranks[rank].streams[s];
            if (stream->next == stream->count) continue;
            const qe_unit *unit = unit_at(&ranks[rank], stream->items[stream->next]);
            return qe_error_set(error_out, QE_CONTRACT, NULL,
                                "streams wait for each other: rank %u, stream %s stops at stage %u, microbatch %u",
                                rank, ranks[rank].plan->program.streams[s].name, unit->stage, unit->microbatch);
        }
    return QE_OK;
}

qe_status qe_plan_deadlock_check(const qe_plan *plan, qe_error *error_out) {
    rank_walk *ranks = calloc(plan->ranks, sizeof *ranks);
    int failed = ranks == NULL;
    for (uint32_t rank = 0; !failed && rank < plan->ranks; rank++)
        failed = walk_init(&ranks[rank], &plan->rank[rank]) != 0;
    qe_status status = QE_OK;
    if (failed)
        status =
            qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to check %u ranks for deadlock", plan->ranks);
    else {
        while (pass(ranks, plan->ranks) > 0) continue;
        status = verdict(ranks, plan->ranks, error_out);
    }
    for (uint32_t rank = 0; ranks != NULL && rank < plan->ranks; rank++) walk_deinit(&ranks[rank]);
    free(ranks);
    return status;
}
