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
    uint32_t row, column; /* 1-based place in a CSV; 0 when generated */
} qe_action;

typedef struct qe_schedule {
    uint32_t ranks, stages, microbatches; /* stages = ranks * chunks for generated ones */
    uint32_t *rank_begin;  /* [ranks + 1]: rank r's actions are actions[rank_begin[r] .. rank_begin[r+1]) */
    uint32_t *stage_rank;  /* [stages]: the rank a stage lives on; QE_NONE when no action names it */
    qe_action *actions;
} qe_schedule;

typedef struct qe_schedule_request {
    const char *name;   /* gpipe, 1f1b, interleaved, zbh1, sequential */
    uint32_t ranks, chunks, microbatches;
    int forward_only;   /* evaluation: only the F actions, in the same order */
} qe_schedule_request;

/* Generates a named schedule. Refusals (QE_ERROR_ARGUMENT) say which condition fails and the nearest value that fits.
 * Owns: the caller frees with qe_schedule_deinit. Thread: any. */
qe_status qe_schedule_generate(const qe_schedule_request *request, qe_schedule *schedule_out, qe_error *error_out);
/* Reads PyTorch's compute-only CSV. A malformed cell is QE_ERROR_FORMAT with file, row (line), column and the text;
 * order and counts are not judged here. Empty cells are bubbles and are skipped. */
qe_status qe_schedule_read_csv(FILE *file, const char *path, qe_schedule *schedule_out, qe_error *error_out);
qe_status qe_schedule_write_csv(const qe_schedule *schedule, FILE *file, qe_error *error_out);
void qe_schedule_deinit(qe_schedule *schedule);

/* A proof that a schedule cannot run: an inclusion-minimal set of facts. For a cycle, `actions` is a shortest cycle
 * through the first stuck action, each waiting for the next, the last for the first. */
typedef struct qe_counterexample {
    qe_rule rule;
    uint32_t action_count;
    uint32_t *actions;    /* indices into schedule->actions; owned */
    qe_action missing;    /* schedule.missing: the action that is due */
    uint32_t expected, found;
} qe_counterexample;

/* Judges order, counts, duplicates, placement and freedom from deadlock (one communicator per directed edge,
 * rendezvous sends posted right after their producer, receives posted in the sender's order).
 * Ensures:    QE_OK: every F, I and W (or B) of every (stage, microbatch) happens once, in an order that can run.
 * On failure: QE_CONTRACT and *counterexample_out filled (free with deinit). Cost: linear in actions. */
qe_status qe_schedule_check(const qe_schedule *schedule, qe_counterexample *counterexample_out, qe_error *error_out);
void qe_counterexample_deinit(qe_counterexample *counterexample);
/* As a paragraph for people; snprintf's conventions. */
int qe_counterexample_text(const qe_counterexample *counterexample, const qe_schedule *schedule, char *text, size_t capacity);

/* "2F0" into text; returns its length. */
int qe_action_text(const qe_action *action, char *text, size_t capacity);

#ifdef __cplusplus
}
#endif
#endif
