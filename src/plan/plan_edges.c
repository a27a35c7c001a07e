/* plan_edges.c - traffic between ranks: one stream per directed edge and end, receives in the sender's order. */
#include <stdio.h>
#include <stdlib.h>
#include "base/assert.h"
#include "plan/build.h"

/* Does this action send, over `backward`, to `to`? */
static int sends_to(const qe_plan *plan, const qe_action *action, int backward, uint32_t to) {
    if (!backward)
        return action->kind == QE_ACTION_F && action->stage + 1u < plan->stages &&
               plan->stage_rank[action->stage + 1] == to;
    return (action->kind == QE_ACTION_I || action->kind == QE_ACTION_B) && action->stage > 0 &&
           plan->stage_rank[action->stage - 1] == to;
}

static qe_status add_stream(qe_build *build, qe_edge *edge) {
    char name[QE_NAME_BYTES];
    if (build->out->program.stream_count == QE_STREAMS_MAX)
        return qe_error_set(build->error, QE_ERROR_LIMIT, NULL, "rank %u needs more than %d streams", build->rank,
                            QE_STREAMS_MAX);
    snprintf(name, sizeof name, "%s_%s%u", edge->outgoing ? "send" : "recv", edge->backward ? "b" : "f", edge->peer);
    return qe_program_add_stream(&build->out->program, name, QE_STREAM_COMM, &edge->stream, build->error);
}

/* Counts, and with messages != NULL lists, what `from` sends to `to`. */
static uint32_t list_messages(const qe_build *build, uint32_t from, uint32_t to, int backward, qe_message *messages) {
    const qe_schedule *schedule = build->schedule;
    uint32_t count = 0;
    for (uint32_t i = schedule->rank_begin[from]; i < schedule->rank_begin[from + 1]; i++) {
        const qe_action *action = &schedule->actions[i];
        if (!sends_to(build->plan, action, backward, to)) continue;
        if (messages != NULL) messages[count] = (qe_message){action->stage, action->microbatch};
        count++;
    }
    return count;
}

static qe_status add_edge(qe_build *build, uint32_t peer, int backward, int outgoing) {
    uint32_t from = outgoing ? build->rank : peer, to = outgoing ? peer : build->rank;
    uint32_t count = list_messages(build, from, to, backward, NULL);
    if (count == 0) return QE_OK;
    if (build->edge_count == QE_STREAMS_MAX)
        return qe_error_set(build->error, QE_ERROR_LIMIT, "use a schedule whose stages talk to fewer ranks",
                            "rank %u talks to more than %d neighbours", build->rank, QE_STREAMS_MAX);
    qe_edge *edge = &build->edges[build->edge_count];
    *edge =
        (qe_edge){.peer = peer, .backward = (uint8_t)backward, .outgoing = (uint8_t)outgoing, .message_count = count};
    if (!outgoing) {
        edge->messages = malloc(count * sizeof *edge->messages);
        if (edge->messages == NULL)
            return qe_error_set(build->error, QE_ERROR_MEMORY, NULL, "no memory for %u messages", count);
        list_messages(build, from, to, backward, edge->messages);
    }
    build->edge_count++;
    return add_stream(build, edge);
}

qe_status qe_build_edges(qe_build *build) {
    for (uint32_t peer = 0; peer < build->plan->ranks; peer++) {
        if (peer == build->rank) continue;
        for (int backward = 0; backward < 2; backward++)
            for (int outgoing = 0; outgoing < 2; outgoing++) QE_TRY(add_edge(build, peer, backward, outgoing));
    }
    return QE_OK;
}

void qe_build_edges_deinit(qe_build *build) {
    for (uint32_t i = 0; i < build->edge_count; i++) free(build->edges[i].messages);
}

qe_edge *qe_build_edge(qe_build *build, uint32_t peer, int backward, int outgoing) {
    for (uint32_t i = 0; i < build->edge_count; i++) {
        qe_edge *edge = &build->edges[i];
        if (edge->peer == peer && edge->backward == backward && edge->outgoing == outgoing) return edge;
    }
    QE_ASSERT(0 && "an edge for every message");
    return NULL;
}
