/* table.c - every key, its type, its bounds, its default, its meaning. Defaults are the quickstart. */
#include "config/table.h"

#include <string.h>

#include "base/assert.h"
#include "qeffect/limits.h"

#define AT(member) .offset = offsetof(qe_settings, member)
/* Bounds are written once: the text is made of the same characters. */
#define WHOLE(row_type, low, high) \
    .type = row_type, .whole_minimum = low, .whole_maximum = high, .kind = "whole number, " #low " to " #high
#define REAL(low, high, low_open, high_open, text) \
    .type = QE_ROW_REAL, .real_minimum = low, .real_maximum = high, .is_minimum_open = low_open, \
    .is_maximum_open = high_open, .kind = text
#define REAL_FROM_TO(low, high) REAL(low, high, false, false, "number, " #low " to " #high)
#define REAL_FROM_BELOW(low, high) REAL(low, high, false, true, "number, " #low " to below " #high)
#define REAL_ABOVE_TO(low, high) REAL(low, high, true, false, "number, above " #low " to " #high)
#define WORD(words) .type = QE_ROW_WORD, .kind = words
#define BOOLEAN .type = QE_ROW_BOOL, .kind = "true or false"
#define TEXT .type = QE_ROW_TEXT, .kind = "text"

static const qe_settings_row rows[] = {
    {.key = "model.layers", AT(model.layers), WHOLE(QE_ROW_U32, 1, 4096), .initial = "4",
     .help = "Decoder layers; at least one per pipeline stage."},
    {.key = "model.hidden", AT(model.hidden), WHOLE(QE_ROW_U32, 2, 65536), .initial = "128",
     .help = "Width of the residual stream; a multiple of heads."},
    {.key = "model.heads", AT(model.heads), WHOLE(QE_ROW_U32, 1, 1024), .initial = "4",
     .help = "Query heads; hidden / heads must be even."},
    {.key = "model.kv_heads", AT(model.kv_heads), WHOLE(QE_ROW_U32, 1, 1024), .initial = "2",
     .help = "Key and value heads; heads is a multiple of it."},
    {.key = "model.ffn", AT(model.ffn), WHOLE(QE_ROW_U32, 1, 262144), .initial = "384",
     .help = "Width of the SwiGLU feed-forward layer."},
    {.key = "model.vocab", AT(model.vocab), WHOLE(QE_ROW_U32, 1, 65536), .initial = "256",
     .help = "Token values; 256 or more for text, whose tokens are its bytes."},
    {.key = "model.sequence", AT(model.sequence), WHOLE(QE_ROW_U32, 1, 65536), .initial = "128",
     .help = "Tokens of one training window."},
    {.key = "model.rope_theta", AT(model.rope_theta), REAL_ABOVE_TO(0, 1e9), .initial = "10000",
     .help = "Base of the rotary position embedding."},
    {.key = "model.norm_epsilon", AT(model.norm_epsilon), REAL_ABOVE_TO(0, 1), .initial = "1e-5",
     .help = "Added to the mean square inside RMSNorm."},

    {.key = "data.path", AT(data.path), TEXT, .initial = "\"\"",
     .help = "A UTF-8 text or a token file; empty: the King James Bible (Debian's bible-kjv)."},
    {.key = "data.format", AT(data.format), WORD("auto|text|tokens"), .initial = "auto",
     .help = "auto tells by the first bytes; text: bytes are tokens; tokens: llm.c's header, then uint16."},
    {.key = "data.validation", AT(data.validation), REAL_FROM_BELOW(0, 1), .initial = "0.05",
     .help = "Fraction of the tokens, from the end, kept for validation; 0: none."},

    {.key = "train.steps", AT(train.steps), WHOLE(QE_ROW_U32, 1, 1000000000), .initial = "900",
     .help = "Optimizer steps."},
    {.key = "train.seed", AT(train.seed), WHOLE(QE_ROW_U64, 0, 9223372036854775807), .initial = "1",
     .help = "Decides the initial weights and the order of windows."},
    {.key = "train.mode", AT(train.mode), WORD("eager|baseline|captured"), .initial = "eager",
     .help = "eager: op by op; captured: the same ops as graphs; baseline: one microbatch at a time, no reuse."},
    {.key = "train.capture", AT(train.capture), WORD("layer|action|step"), .initial = "action",
     .help = "Mode captured: what one graph covers: a layer of an action, an action, or a rank's whole step."},
    {.key = "train.sequences", AT(train.sequences), WHOLE(QE_ROW_U32, 1, 1024), .initial = "2",
     .help = "Windows per microbatch."},
    {.key = "train.learning_rate", AT(train.learning_rate), REAL_ABOVE_TO(0, 10), .initial = "3e-3",
     .help = "Learning rate at the end of the warmup."},
    {.key = "train.minimum_learning_rate", AT(train.minimum_learning_rate), REAL_FROM_TO(0, 10), .initial = "3e-4",
     .help = "Learning rate at the last step, where the cosine ends."},
    {.key = "train.warmup", AT(train.warmup), WHOLE(QE_ROW_U32, 0, 1000000000), .initial = "50",
     .help = "Steps in which the learning rate rises from 0, in a straight line; may be more than steps."},
    {.key = "train.beta1", AT(train.beta1), REAL_FROM_BELOW(0, 1), .initial = "0.9",
     .help = "AdamW: decay of the first moment."},
    {.key = "train.beta2", AT(train.beta2), REAL_FROM_BELOW(0, 1), .initial = "0.95",
     .help = "AdamW: decay of the second moment."},
    {.key = "train.epsilon", AT(train.epsilon), REAL_ABOVE_TO(0, 1), .initial = "1e-8",
     .help = "AdamW: added to the root of the second moment."},
    {.key = "train.weight_decay", AT(train.weight_decay), REAL_FROM_TO(0, 10), .initial = "0.1",
     .help = "AdamW: decoupled decay of matrices; gains do not decay."},
    {.key = "train.gradient_clip", AT(train.gradient_clip), REAL_FROM_TO(0, 1e9), .initial = "1.0",
     .help = "Largest global gradient norm; 0: no clipping."},
    {.key = "train.nonfinite", AT(train.nonfinite), WORD("trap|skip"), .initial = "trap",
     .help = "What a non-finite loss or gradient norm does: stop (step.nonfinite), or skip the step and count."},
    {.key = "train.evaluate_every", AT(train.evaluate_every), WHOLE(QE_ROW_U32, 0, 1000000000), .initial = "100",
     .help = "Steps between validation losses; 0: only after the last step."},
    {.key = "train.evaluate_sequences", AT(train.evaluate_sequences), WHOLE(QE_ROW_U32, 0, 1000000000),
     .initial = "256", .help = "Validation windows of one evaluation, from the first; 0: all, as after the last step."},

    {.key = "train.algorithms", AT(train.algorithms), TEXT, .initial = "\"\"",
     .help = "Device: file of choices (docs/device.md), honoured or refused; made by timing all where it is not there; "
             "empty: nothing is timed, and products take the library's first choice."},
    {.key = "train.deterministic", AT(train.deterministic), BOOLEAN, .initial = "true",
     .help = "Device: attention's backward has the same bits each time; false: sums in any order may be taken."},
    {.key = "train.nvtx", AT(train.nvtx), BOOLEAN, .initial = "false",
     .help = "Device: an NVTX range around every op that is submitted."},
    {.key = "train.memory_limit", AT(train.memory_limit_bytes), WHOLE(QE_ROW_U64, 0, 9223372036854775807),
     .initial = "0",
     .help = "Bytes that a rank may take, of all kinds, told before anything runs: more is refused, and schedule auto "
             "keeps below it; 0: no limit."},
    {.key = "train.timeline", AT(train.timeline), TEXT, .initial = "\"\"",
     .help = "Device: file for a Chrome timeline of the last ops and graphs of the run, of rank 0; FILE.1 and so on "
             "have those of further ranks; empty: none."},

    {.key = "pipeline.schedule", AT(pipeline.schedule), TEXT, .initial = "zbh1",
     .help = "A schedule's name (gpipe, looped-bfs, 1f1b, interleaved, zbh1, zbh2, interleaved-zb, zbv, v-half, "
             "v-min, 1f1b-v, dualpipev, sequential), auto, or the path of a PyTorch CSV."},
    {.key = "pipeline.times", AT(pipeline.times), TEXT, .initial = "\"\"",
     .help = "Schedule auto: F,I,W[,C] of a whole rank, or a file of times as bench --json writes it."},
    {.key = "pipeline.memory_limit", AT(pipeline.memory_limit_bytes), WHOLE(QE_ROW_U64, 0, 9223372036854775807),
     .initial = "0", .help = "Schedule auto: bytes that the slots of a rank may take; 0: no limit."},
    {.key = "pipeline.stages", AT(pipeline.stages), WORD("any|linear|looped|v"), .initial = "any",
     .help = "Schedule auto: where stages live; looped and v need chunks."},
    {.key = "pipeline.ranks", AT(pipeline.ranks), WHOLE(QE_ROW_U32, 1, 64), .initial = "2",
     .help = "Pipeline ranks; each computes on its own thread."},
    {.key = "pipeline.chunks", AT(pipeline.chunks), WHOLE(QE_ROW_U32, 1, 64), .initial = "1",
     .help = "Stages on each rank; ranks * chunks stages share the layers."},
    {.key = "pipeline.microbatches", AT(pipeline.microbatches), WHOLE(QE_ROW_U32, 1, 65536), .initial = "8",
     .help = "Microbatches of one step."},
    {.key = "pipeline.cache_weights", AT(pipeline.cache_weights), BOOLEAN, .initial = "true",
     .help = "Quantize a weight once per step; false: before every use. Same bits."},
    {.key = "pipeline.placement", AT(pipeline.placement), WORD("direct|copy"), .initial = "direct",
     .help = "Where weight gradients accumulate: in place, or in scratch and copied back. Same bits."},

    {.key = "recipe.name", AT(recipe.kind), WORD("delayed|current|block|bf16|fp32"), .initial = "delayed",
     .help = "How the operands of linear layers are quantized."},
    {.key = "recipe.history", AT(recipe.history_length), WHOLE(QE_ROW_U32, 1, 65536), .initial = "4",
     .help = "delayed: steps of amax history."},
    {.key = "recipe.margin", AT(recipe.margin), WHOLE(QE_ROW_I32, -64, 64), .initial = "0",
     .help = "delayed: scales are divided by 2 to this power."},
    {.key = "recipe.amax", AT(recipe.amax_algorithm), WORD("max|most_recent"), .initial = "max",
     .help = "delayed: which amax of the history makes the next scale."},

    {.key = "recipe.forward", AT(products.forward), WORD("fast|split"), .initial = "fast",
     .help = "Device: how forward products of FP8 add up: in the matrix unit, or promoted to fp32 in between."},
    {.key = "recipe.input_grad", AT(products.input_grad), WORD("fast|split"), .initial = "split",
     .help = "Device: the same of input gradients."},
    {.key = "recipe.weight_grad", AT(products.weight_grad), WORD("fast|split"), .initial = "split",
     .help = "Device: the same of weight gradients."},

    {.key = "contracts.mode", AT(contracts.mode), WORD("trap|observe|off"), .initial = "trap",
     .help = "What a broken rule does: stop the step, be recorded, or go unchecked."},
    {.key = "contracts.order", AT(contracts.order), BOOLEAN, .initial = "false",
     .help = "Device: judge what streams are really given, call by call, beside what was declared."},
    {.key = "contracts.trace", AT(contracts.trace), TEXT, .initial = "\"qeffect-trap.qet\"",
     .help = "Where a trap, or the first step observed to break a rule, leaves its trace; empty: nowhere."},

    {.key = "checkpoint.path", AT(checkpoint.path), TEXT, .initial = "\"run/quickstart\"",
     .help = "Directory of the final weights (model.safetensors, config.json), replaced, and of checkpoints; "
             "empty: none."},
    {.key = "checkpoint.every", AT(checkpoint.every), WHOLE(QE_ROW_U32, 0, 1000000000), .initial = "0",
     .help = "Steps between checkpoints (step-...) to go on from; and after the last step; 0: none."},
    {.key = "checkpoint.keep", AT(checkpoint.keep), WHOLE(QE_ROW_U32, 0, 1000000000), .initial = "3",
     .help = "Newest checkpoints that stay; 0: all."},
};

enum { ROWS = sizeof rows / sizeof *rows };

QE_STATIC_ASSERT((int)ROWS <= (int)QE_SETTINGS_KEYS_MAX, "qe_settings.place has an entry for every row");
/* Bounds above are literals, because their text is part of the row. */
QE_STATIC_ASSERT(QE_STAGES_MAX == 4096 && QE_RANKS_MAX == 64 && QE_CHUNKS_MAX == 64, "bounds of layers, ranks, chunks");
QE_STATIC_ASSERT(QE_MICROBATCHES_MAX == 65536 && QE_HISTORY_MAX == 65536, "bounds of microbatches and history");
/* Words are stored through unsigned, in the order of their enum. */
QE_STATIC_ASSERT(sizeof(qe_data_format) == sizeof(unsigned), "an enum is as large as unsigned");
QE_STATIC_ASSERT(QE_DATA_TOKENS == 2 && QE_TRAIN_BASELINE == 1 && QE_NONFINITE_SKIP == 1, "order of words");
QE_STATIC_ASSERT(QE_PLACEMENT_COPY == 1 && QE_AMAX_MOST_RECENT == 1 && QE_CONTRACTS_SETTING_OFF == 2, "order of words");
QE_STATIC_ASSERT(QE_RECIPE_DELAYED == 0 && QE_RECIPE_CURRENT == 1 && QE_RECIPE_BLOCK == 2, "order of words");
QE_STATIC_ASSERT(QE_RECIPE_BF16 == 3 && QE_RECIPE_FP32 == 4, "order of words");

size_t qe_settings_count(void) {
    return ROWS;
}

const qe_settings_row *qe_settings_row_at(size_t index) {
    QE_ASSERT(index < ROWS);
    return &rows[index];
}

size_t qe_settings_row_find(const char *key, size_t length) {
    for (size_t i = 0; i < ROWS; i++)
        if (strlen(rows[i].key) == length && memcmp(rows[i].key, key, length) == 0) return i;
    return ROWS;
}

size_t qe_settings_row_group_length(const qe_settings_row *row) {
    const char *point = strchr(row->key, '.');
    QE_ASSERT(point != NULL);
    return (size_t)(point - row->key);
}

qe_settings_description qe_settings_describe(size_t index) {
    const qe_settings_row *row = qe_settings_row_at(index);
    return (qe_settings_description){row->key, row->kind, row->initial, row->help};
}

static qe_scalar initial_scalar(const qe_settings_row *row, char text[QE_SETTINGS_TEXT_BYTES]) {
    size_t length = strlen(row->initial);
    bool is_quoted = row->initial[0] == '"';
    QE_ASSERT(length < QE_SETTINGS_TEXT_BYTES);
    if (is_quoted) length -= 2;
    memcpy(text, row->initial + is_quoted, length);
    text[length] = '\0';
    return (qe_scalar){text, length, is_quoted};
}

void qe_settings_default(qe_settings *settings_out) {
    qe_settings settings = {0};
    char text[QE_SETTINGS_TEXT_BYTES];
    for (size_t i = 0; i < ROWS; i++) {
        qe_scalar scalar = initial_scalar(&rows[i], text);
        qe_status status = qe_settings_assign(&settings, i, &scalar, QE_ERROR_CONFIG, NULL);
        QE_ASSERT(status == QE_OK);
    }
    *settings_out = settings;
}
