/* verify.h - what the files of `qeffect verify` share: the rows of the parity matrix, what a row computed, and how two
 * rows are held against each other.
 *
 * A row is one way to train: how it is executed, on which schedule and stages, with which numeric configuration. Rows
 * of the same numeric configuration (recipe, history, layers of the model) must hold the same bits after every step;
 * each such group has a baseline row that the others are compared with. */
#ifndef QE_CLI_VERIFY_H
#define QE_CLI_VERIFY_H

#include "base/hash.h"
#include "cli/session.h"

enum {
    QE_VERIFY_STEPS = 12,     /* enough for the longest history to forget an Inf and go on */
    QE_VERIFY_ROWS_MAX = 1024, /* full has about 450 */
    QE_VERIFY_NAME_BYTES = QE_NAME_BYTES + 16, /* a tensor's name with what it is of its parameter */
    QE_VERIFY_JOBS_MAX = 64
};

/* --- a covering array (verify_cover.c) --- */

enum {
    QE_COVER_FACTORS_MAX = 8,
    QE_COVER_STRENGTH_MAX = 3,
    QE_COVER_ANY = 255 /* a factor whose level is still open */
};

/* Requires: `allowed` judges a row of which some factors are open; whatever it allows can be completed. */
typedef struct qe_cover {
    uint32_t factors;
    uint8_t levels[QE_COVER_FACTORS_MAX];
    int (*allowed)(const uint8_t *row);
} qe_cover;

/* Appends rows to the *count_out already there until every allowed combination of levels of any `strength` factors is
 * in some row. Greedy: each row takes the first combination that is missing and fills up with what covers most.
 * On failure: QE_ERROR_MEMORY, QE_ERROR_LIMIT. */
qe_status qe_cover_extend(const qe_cover *cover, uint32_t strength, uint8_t (*rows)[QE_COVER_FACTORS_MAX],
                          uint32_t capacity, uint32_t *count_out, qe_error *error_out);

/* --- rows (verify_rows.c) --- */

typedef enum qe_verify_execution {
    QE_VERIFY_EAGER,
    QE_VERIFY_LAYER, /* captured, by capture unit */
    QE_VERIFY_ACTION,
    QE_VERIFY_STEP,
    QE_VERIFY_BASELINE
} qe_verify_execution;

typedef struct qe_verify_row {
    uint32_t number; /* from 1 */
    qe_verify_execution execution;
    const char *schedule;
    uint32_t ranks, chunks; /* stages = ranks * chunks */
    uint32_t layers; /* of the model */
    qe_recipe_kind recipe;
    uint32_t history; /* 0: not delayed */
    uint8_t cache, copy;
    qe_contracts_setting contracts;
    uint8_t fresh; /* in a process of its own */
    qe_device_kind device;
    uint32_t baseline; /* index of the row it is compared with; its own: it is one, or the first of an own order */
} qe_verify_row;

typedef struct qe_verify_rows {
    uint32_t count;
    qe_verify_row row[QE_VERIFY_ROWS_MAX];
} qe_verify_rows;

/* All rows of `full` or of the short selection, for about the configured layers. Rows that are checked are checked by
 * the configured contracts. */
qe_status qe_verify_rows_make(qe_verify_rows *rows_out, int full, const qe_settings *configured, qe_error *error_out);
const char *qe_verify_execution_name(qe_verify_execution execution);
const char *qe_verify_contracts_name(qe_contracts_setting contracts);
/* "captured step  interleaved  2x2 ..." in columns. */
void qe_verify_row_words(const qe_verify_row *row, char *text, size_t capacity);
/* The settings of a row over the configured ones. */
void qe_verify_row_settings(const qe_verify_row *row, const qe_settings *configured, qe_settings *settings_out);

/* --- what a row computed (verify_run.c) --- */

typedef struct qe_verify_tensor {
    char name[QE_VERIFY_NAME_BYTES];
    qe_state_kind kind;
    uint8_t hooked; /* scale or history of the tensor whose amax was made Inf */
    uint8_t single; /* a history of one: it never holds what was folded */
    qe_hash128 digest[QE_VERIFY_STEPS]; /* of its bytes after each step */
    float largest[QE_VERIFY_STEPS]; /* scale: its value; history: its largest; after each step */
} qe_verify_tensor;

/* Whether the twelve steps were the test they must be. Filled by a baseline row only. */
typedef struct qe_verify_exercise {
    uint32_t scales, rose, fell; /* hidden scales, and how many of them rose and fell at least once */
    char still[QE_VERIFY_NAME_BYTES]; /* the first that did not do both; empty: none */
    int zero_microbatch; /* its loss was that of logits of zero */
    int infinite_amax; /* the Inf reached this one history, held its scale and left; 1 where nothing is delayed */
} qe_verify_exercise;

typedef struct qe_verify_outcome {
    qe_status status; /* QE_OK: the row ran */
    qe_error error;
    double seconds;
    double loss[QE_VERIFY_STEPS], norm[QE_VERIFY_STEPS];
    char hash[QE_STATE_HASH_BYTES];
    qe_verify_tensor *tensors; /* in the order of the state hash */
    uint32_t tensor_count, tensor_capacity;
    qe_verify_exercise exercise;
    char backend[176];
} qe_verify_outcome;

/* A difference planted on purpose: one bit of one parameter after a step of a row. row 0: none. */
typedef struct qe_verify_plant {
    uint32_t row, step;
} qe_verify_plant;

/* Steps with something special; docs/training.md says why these. */
enum {
    QE_VERIFY_INFINITE_STEP = 4, /* one amax is Inf: in the middle of the longest history */
    QE_VERIFY_ZERO_STEP = 8 /* microbatch 1 is all zero */
};

/* Trains a row in this process. The outcome says how it went. Owns: the caller deinits the outcome. */
void qe_verify_run(const qe_verify_row *row, const qe_settings *configured, const qe_verify_plant *plant,
                   qe_verify_outcome *outcome_out);
void qe_verify_outcome_deinit(qe_verify_outcome *outcome);

/* --- in a new process (verify_fresh.c) --- */

/* The same in a new process of this program, with the words of `cli` and --row. */
void qe_verify_run_fresh(const qe_cli *cli, const qe_verify_row *row, qe_verify_outcome *outcome_out);
/* What the new process prints. */
struct json_t;
struct json_t *qe_verify_outcome_json(const qe_verify_row *row, const qe_verify_outcome *outcome);

/* --- two rows (verify_compare.c) --- */

typedef struct qe_verify_difference {
    uint32_t step; /* from 1; 0: equal */
    char what[QE_VERIFY_NAME_BYTES]; /* what differs first in it: "loss", "gradient norm", or a tensor's name */
    char tensor[QE_VERIFY_NAME_BYTES]; /* the first tensor that differs after it; empty: none */
    uint32_t tensors; /* how many differ after it */
    double expected, found; /* loss or norm */
} qe_verify_difference;

/* The first step in which they part, and the first that differs then: loss, norm, tensors in the order of the hash. */
qe_verify_difference qe_verify_compare(const qe_verify_outcome *baseline, const qe_verify_outcome *outcome);
/* What the steps of a baseline did to its scales; zero_microbatch is not touched. */
void qe_verify_exercise_judge(qe_verify_outcome *baseline);
/* Every scale rose and fell, the zero microbatch was one, the Inf came. */
int qe_verify_exercised(const qe_verify_exercise *exercise);

#endif
