/* schedule.h - pure order: which rank does which action when. No byte counts, no streams (those are the plan's).
 * Words and text form are PyTorch's: `2F0`, `2I0`, `2W0`, `2B0`; CSV has one row per rank, one action per cell. */
#ifndef QEFFECT_SCHEDULE_H
#define QEFFECT_SCHEDULE_H

#include <stdio.h>
#include "qeffect/limits.h"
#include "qeffect/rule.h"
#include "qeffect/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    /* Actions of all ranks: 64 ranks x 65536 microbatches x 4 chunks x (F, B). With it the order takes 0.5 GiB and
     * judging it 0.7 GiB; anything larger is a slip of the pen, refused before memory is. */
    QE_SCHEDULE_ACTIONS_MAX = 1 << 25,
};

typedef enum qe_action_kind {
    QE_ACTION_F, /* forward */
    QE_ACTION_I, /* input gradient */
    QE_ACTION_W, /* weight gradient */
    QE_ACTION_B, /* full backward = I then W */
    QE_ACTION_KINDS
} qe_action_kind;

typedef struct qe_action {
    uint32_t microbatch;
    uint16_t stage;
    uint8_t kind;    /* qe_action_kind */
    uint8_t paired;  /* 1: it runs overlapped with the next action of its row (OVERLAP_F_B) */
    uint32_t row, column; /* 1-based place in a CSV; 0 when generated */
} qe_action;

typedef struct qe_schedule {
    uint32_t ranks, stages, microbatches; /* stages = ranks * chunks for generated ones */
    uint32_t *rank_begin;  /* [ranks + 1]: rank r's actions are actions[rank_begin[r] .. rank_begin[r+1]) */
    uint32_t *stage_rank;  /* [stages]: the rank a stage lives on; QE_NONE when no action names it */
    qe_action *actions;
    /* So many microbatches, the last ones, run the other way (dualpipe): their stage s lives on the rank of stage
     * stages-1-s, so that every stage is on two ranks, each with weights of its own. Else 0. */
    uint32_t reversed;
} qe_schedule;

/* The rank where a microbatch meets a stage. Requires: stage < stages. */
static inline uint32_t qe_schedule_rank(const qe_schedule *schedule, uint32_t stage, uint32_t microbatch) {
    int reversed = schedule->reversed > 0 && microbatch >= schedule->microbatches - schedule->reversed;
    return schedule->stage_rank[reversed ? schedule->stages - 1 - stage : stage];
}

/* The names that generate knows, for texts. */
#define QE_SCHEDULE_NAMES_BEGIN \
    "gpipe, looped-bfs, 1f1b, interleaved, zbh1, zbh2, interleaved-zb, zbv, v-half, v-min, 1f1b-v, "
#define QE_SCHEDULE_NAMES QE_SCHEDULE_NAMES_BEGIN "dualpipe, dualpipev or sequential"
/* Those that a plan can be made of: dualpipe has every weight twice. */
#define QE_SCHEDULE_NAMES_PLANNED QE_SCHEDULE_NAMES_BEGIN "dualpipev or sequential"

typedef struct qe_schedule_request {
    const char *name;   /* one of QE_SCHEDULE_NAMES */
    uint32_t ranks, chunks, microbatches;
    int forward_only;   /* evaluation: only the F actions, in the same order */
} qe_schedule_request;

/* Generates a named schedule. Refusals (QE_ERROR_ARGUMENT) say which condition fails and the nearest value that fits.
 * Owns: the caller frees with qe_schedule_deinit. Thread: any. */
qe_status qe_schedule_generate(const qe_schedule_request *request, qe_schedule *schedule_out, qe_error *error_out);
/* The names that generate knows, in the order of docs/schedules.md; NULL behind the last. Thread: any. */
const char *qe_schedule_name(uint32_t index);
/* Chunks per rank where nobody says a number: 2 for orders made for several, else 1. Thread: any. */
uint32_t qe_schedule_usual_chunks(const char *name);
/* Reads PyTorch's CSV, compute-only or with communication: ranks = rows, stages and microbatches = largest index + 1,
 * a stage's rank = the row that names it first. Empty cells are bubbles and are skipped. Order and counts of F, I, W
 * and B are not judged here; those of SEND, RECV, UNSHARD, RESHARD and REDUCE_GRAD are, where there are any and the
 * rest is valid, and then they are dropped: they follow from the order.
 * On failure: QE_ERROR_FORMAT with file, row (line), column (cell number), the text found and what was expected;
 *             QE_CONTRACT with the place, the action of communication and the rule it breaks;
 *             QE_ERROR_LIMIT, QE_ERROR_IO, QE_ERROR_MEMORY. Owns: the caller frees with qe_schedule_deinit. */
qe_status qe_schedule_read_csv(FILE *file, const char *path, qe_schedule *schedule_out, qe_error *error_out);
/* One row per rank, no bubbles; the file is flushed, so that a full disk is QE_ERROR_IO here and not later. */
qe_status qe_schedule_write_csv(const qe_schedule *schedule, FILE *file, qe_error *error_out);
/* The same with the communication that PyTorch would add to it ("compute_comms"). On failure: also what
 * qe_schedule_check says; QE_CONTRACT where the schedule stops because pairs send at their end; QE_ERROR_MEMORY. */
qe_status qe_schedule_write_csv_comms(const qe_schedule *schedule, FILE *file, qe_error *error_out);
/* The cell that begins with an action: "2F0", or "(2F0;3B1)OVERLAP_F_B" for a pair. Returns how many actions it holds.
 * Requires: index below the schedule's actions, and not that of a pair's second. */
uint32_t qe_schedule_cell_text(const qe_schedule *schedule, uint32_t index, char *text, size_t capacity);
/* Deinit of a zeroed schedule is a no-op. */
void qe_schedule_deinit(qe_schedule *schedule);

/* What one rank keeps at once, at most, counted in (stage, microbatch) pairs; divide by the rank's stages for units
 * of a whole microbatch. A pair counts from the start of its first action to the end of its last. */
typedef struct qe_schedule_peak {
    uint32_t activation; /* F until I or B: what a forward keeps for the input gradient */
    uint32_t weight;     /* I until W: what a postponed weight gradient keeps; 0 where B does both */
    uint32_t live;       /* F until W or B: either of them */
} qe_schedule_peak;

/* Requires: qe_schedule_check said QE_OK; peaks_out has room for schedule->ranks. A forward-only schedule keeps 1. */
void qe_schedule_peaks(const qe_schedule *schedule, qe_schedule_peak *peaks_out);

/* What a step of a counterexample is: the action itself, or the send of its result, or the receive of its input. */
typedef enum qe_part { QE_PART_RUN, QE_PART_SEND, QE_PART_RECEIVE } qe_part;

/* Why something waits for the next thing of a cycle: each is a constraint of the schedule or of the transport. */
typedef enum qe_wait {
    QE_WAIT_NONE,
    QE_WAIT_ROW,    /* it stands behind it in the row of its rank */
    QE_WAIT_RESULT, /* it needs its result */
    QE_WAIT_PAIR,   /* the action that it overlaps with (OVERLAP_F_B) needs its result */
    QE_WAIT_SEND,   /* a send leaves when its action has run */
    QE_WAIT_QUEUE,  /* it stands behind it on a communicator */
    QE_WAIT_BATCH,  /* the batch in front of it holds it */
    QE_WAIT_POST,   /* the receive is posted when that has run */
    QE_WAIT_BUFFER, /* its buffer is free when that has run */
} qe_wait;

/* An action that a counterexample names, with its place. */
typedef struct qe_cited {
    qe_action action;
    uint32_t rank, index; /* index in the row of the rank, from 0 */
    uint8_t part;         /* qe_part; other than RUN in cycles only */
    uint8_t wait;         /* qe_wait: why it waits for the next one, the last one for the first; cycles only */
} qe_cited;

/* A proof that a schedule cannot run, or not within what is asked: an inclusion-minimal set of facts. Without any one
 * of them the others can hold. `cited` by rule:
 *   schedule.place      {an action of the stage on its rank, the action elsewhere}; {the action} where an index is out
 *                       of range; empty where `missing.stage` is on no rank
 *   schedule.duplicate  {the action, the one that repeats it}; B repeats I and W
 *   schedule.missing    empty; `missing` is due (B stands for B, or I and W)
 *   schedule.order      {the action that comes too early, the one it needs}
 *   schedule.cycle      a shortest cycle through the first stuck action, each waiting for the next, the last for the
 *                       first
 *   schedule.memory     the forwards that are kept at once; the last one is one too many
 *   scale.busy          {the action after which the stage's scales fold, the stage's first action behind it}
 *   cache.empty         {the action that uses the stage's weight cache, the one before which it is filled}
 *   grad.order          {the action that adds its gradient too early, the one that is due before it} */
typedef struct qe_counterexample {
    qe_rule rule;
    uint32_t cited_count;
    qe_cited *cited;      /* owned */
    qe_action missing;    /* schedule.missing: the action that is due */
    /* place: ranks, or bound and index; duplicate, missing: counts; cycle: 0, stuck ones; memory: pairs that may be
     * kept, pairs that are */
    uint64_t expected, found;
    uint32_t ranks, stages, microbatches; /* of the schedule */
    uint64_t actions;     /* of the schedule */
} qe_counterexample;

/* Judges placement, counts, order and freedom from deadlock, in this order; certificate.h judges more. The rules
 * are those of the step: single rendezvous sends, a communicator per directed edge, halves of a pair one behind the
 * other. A schedule with no backward action at all is an evaluation: only F is due.
 * Ensures:    QE_OK: every F, I and W (or B) of every (stage, microbatch) happens once, on the stage's rank, in an
 *             order that can run.
 * On failure: QE_CONTRACT and *counterexample_out (may be NULL) filled, to be freed with deinit: the first breach in
 *             row order of the first broken rule. QE_ERROR_ARGUMENT, _LIMIT: not a schedule at all; QE_ERROR_MEMORY.
 * Cost: linear in actions. Thread: any. */
qe_status qe_schedule_check(const qe_schedule *schedule, qe_counterexample *counterexample_out, qe_error *error_out);
void qe_counterexample_deinit(qe_counterexample *counterexample);
/* As a paragraph for people; snprintf's conventions. */
int qe_counterexample_text(const qe_counterexample *counterexample, char *text, size_t capacity);

/* "2F0" into text; returns its length. */
int qe_action_text(const qe_action *action, char *text, size_t capacity);

#ifdef __cplusplus
}
#endif
#endif
