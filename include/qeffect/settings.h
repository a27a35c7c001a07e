/* settings.h - what a person may configure, as one typed struct. It owns nothing and may be copied.
 *
 * One table (src/config/table.c) drives parsing, --set, --help and docs/config.md. Paths are taken as the operating
 * system does: relative to the working directory. */
#ifndef QEFFECT_SETTINGS_H
#define QEFFECT_SETTINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "qeffect/data_format.h"
#include "qeffect/recipe.h"
#include "qeffect/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    QE_SETTINGS_TEXT_BYTES = 512,       /* a path or a name, terminator included; as QE_ERROR_PATH_BYTES */
    QE_SETTINGS_VALUE_BYTES = 6 * QE_SETTINGS_TEXT_BYTES, /* any value as it is written: \u00ff for a byte, quotes */
    QE_SETTINGS_KEYS_MAX = 64,          /* keys of the table; its end is checked by a test */
    QE_SETTINGS_FILE_BYTES_MAX = 1 << 20, /* a configuration is typed by a person; larger is the wrong file */
};

/* Where a value came from when it is not a line of the file. */
#define QE_SETTINGS_LINE_DEFAULT 0u
#define QE_SETTINGS_LINE_COMMAND UINT32_MAX /* --set */

typedef enum qe_train_mode { QE_TRAIN_EAGER, QE_TRAIN_BASELINE, QE_TRAIN_CAPTURED } qe_train_mode;
typedef enum qe_capture_unit { QE_CAPTURE_UNIT_LAYER, QE_CAPTURE_UNIT_ACTION, QE_CAPTURE_UNIT_STEP } qe_capture_unit;
typedef enum qe_nonfinite { QE_NONFINITE_TRAP, QE_NONFINITE_SKIP } qe_nonfinite;
typedef enum qe_placement_policy {
    QE_PLACEMENT_DIRECT, /* the weight gradient's product accumulates onto the main gradient */
    QE_PLACEMENT_COPY    /* the gradient is moved to scratch, accumulated there, moved back */
} qe_placement_policy;
/* As qe_contracts of ledger.h, which this room does not know; same order. */
typedef enum qe_contracts_setting {
    QE_CONTRACTS_SETTING_TRAP, QE_CONTRACTS_SETTING_OBSERVE, QE_CONTRACTS_SETTING_OFF
} qe_contracts_setting;

typedef struct qe_settings_model {
    uint32_t layers, hidden, heads, kv_heads, ffn, vocab;
    uint32_t sequence; /* tokens of one training window */
    double rope_theta, norm_epsilon;
} qe_settings_model;

typedef struct qe_settings_data {
    char path[QE_SETTINGS_TEXT_BYTES]; /* empty: the King James Bible of Debian's bible-kjv */
    qe_data_format format;
    double validation; /* fraction of the tokens, from the end; 0: none */
} qe_settings_data;

typedef struct qe_settings_train {
    uint32_t steps;
    uint64_t seed;
    qe_train_mode mode;
    qe_capture_unit capture; /* mode captured: what one graph covers */
    uint32_t sequences; /* windows per microbatch */
    double learning_rate, minimum_learning_rate; /* at the end of warmup, and of the cosine */
    uint32_t warmup;    /* steps */
    double beta1, beta2, epsilon, weight_decay;
    double gradient_clip; /* global norm; 0: no clipping */
    qe_nonfinite nonfinite;
    uint32_t evaluate_every;     /* steps; 0: only after the last */
    uint32_t evaluate_sequences; /* windows per evaluation, from the first; 0: all */
    char algorithms[QE_SETTINGS_TEXT_BYTES]; /* device: file of chosen algorithms; empty: the libraries' own choice */
    bool deterministic; /* device: attention adds up in a fixed order */
    bool nvtx;          /* device: a range around every op */
    uint64_t memory_limit_bytes; /* most that a rank may take of its device; 0: no limit */
    char timeline[QE_SETTINGS_TEXT_BYTES]; /* device: Chrome timeline of the last steps; empty: none */
} qe_settings_train;

/* As qe_search_placement of search.h, which this room does not know; same order. */
typedef enum qe_stages_setting {
    QE_STAGES_SETTING_ANY, QE_STAGES_SETTING_LINEAR, QE_STAGES_SETTING_LOOPED, QE_STAGES_SETTING_V
} qe_stages_setting;

typedef struct qe_settings_pipeline {
    char schedule[QE_SETTINGS_TEXT_BYTES]; /* a name, auto, or the path of a CSV */
    char times[QE_SETTINGS_TEXT_BYTES];    /* auto: F,I,W[,C] or a file of times; else empty */
    uint64_t memory_limit_bytes;           /* auto: most that a rank's slots may take; 0: no limit */
    qe_stages_setting stages;              /* auto: where they live */
    uint32_t ranks, chunks, microbatches;
    bool cache_weights; /* quantize a weight once per step instead of before every use */
    qe_placement_policy placement;
} qe_settings_pipeline;

typedef struct qe_settings_contracts {
    qe_contracts_setting mode;
    bool order; /* device: what streams are really given is judged too */
    char trace[QE_SETTINGS_TEXT_BYTES]; /* where a trap leaves its trace; empty: nowhere */
} qe_settings_contracts;

typedef struct qe_settings_checkpoint {
    char path[QE_SETTINGS_TEXT_BYTES]; /* directory of the final weights; empty: they are not kept */
    uint32_t every; /* steps between checkpoints; 0: none */
    uint32_t keep;  /* newest checkpoints kept; 0: all */
} qe_settings_checkpoint;

typedef struct qe_settings_place { uint32_t line, column; } qe_settings_place;

/* How products of 8-bit codes add up, by kind; as qe_accumulation of op.h. */
typedef enum qe_accumulate_setting { QE_ACCUMULATE_SETTING_FAST, QE_ACCUMULATE_SETTING_SPLIT } qe_accumulate_setting;
typedef struct qe_settings_products {
    qe_accumulate_setting forward, input_grad, weight_grad;
} qe_settings_products;

typedef struct qe_settings {
    qe_settings_model model;
    qe_settings_data data;
    qe_settings_train train;
    qe_settings_pipeline pipeline;
    qe_recipe recipe;
    qe_settings_products products;
    qe_settings_contracts contracts;
    qe_settings_checkpoint checkpoint;
    char source[QE_SETTINGS_TEXT_BYTES];           /* the file they were loaded from; may be empty */
    qe_settings_place place[QE_SETTINGS_KEYS_MAX]; /* by table index: where each value was written */
} qe_settings;

/* One row of the table, as text for --help and docs/config.md. Lives as long as the program. */
typedef struct qe_settings_description {
    const char *key;     /* "model.layers" */
    const char *kind;    /* "whole number", "number", "true or false", "text", or the words joined by "|" */
    const char *initial; /* the default, as it would be written */
    const char *help;    /* one line */
} qe_settings_description;

/* The defaults: the quickstart. Thread: any. */
void qe_settings_default(qe_settings *settings_out);
/* Reads a YAML file over the defaults. Values alone are judged here; qe_settings_check judges them together.
 * On failure: QE_ERROR_CONFIG (a key, a type, a value), QE_ERROR_FORMAT (not YAML, or YAML we refuse: anchors, aliases,
 *             tags, several documents), QE_ERROR_IO, with file, line and column; *settings_out is unchanged. */
qe_status qe_settings_load(const char *path, qe_settings *settings_out, qe_error *error_out);
/* One `key.sub=value` of the command line. The value is read like a plain scalar of the file.
 * On failure: QE_ERROR_ARGUMENT; *settings is unchanged. */
qe_status qe_settings_set(qe_settings *settings, const char *assignment, qe_error *error_out);
/* Judges the values together: divisibility, stages against layers, limits.
 * On failure: QE_ERROR_CONFIG with the place in the file, or QE_ERROR_ARGUMENT when the value came from --set. */
qe_status qe_settings_check(const qe_settings *settings, qe_error *error_out);

/* Whose fault it is that values of `keys` (NULL behind the last) cannot be had: where --set gave one of them,
 * QE_ERROR_ARGUMENT; else QE_ERROR_CONFIG, at the first of them that the file has. Returns which.
 * Requires: qe_error_set filled *error_out, or it is NULL. Thread: any. */
qe_status qe_settings_blame(const qe_settings *settings, const char *const *keys, qe_error *error_out);

/* The table. Thread: any. */
size_t qe_settings_count(void);
qe_settings_description qe_settings_describe(size_t index);
/* The value that settings hold for row `index`, as it would be written in a file; snprintf's conventions.
 * QE_SETTINGS_VALUE_BYTES hold any. */
int qe_settings_value_text(const qe_settings *settings, size_t index, char *text, size_t capacity);
/* Does a key have the value that it has where nobody gives it one? Requires: it is a key. Thread: any. */
int qe_settings_is_default(const qe_settings *settings, const char *key);

#ifdef __cplusplus
}
#endif
#endif
