/* check.c - what must hold between values. Each rule names the value to change, and is placed where one of its values
 * was written. What depends on a schedule's file or on the data is judged where those are read. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "config/table.h"

static qe_settings_place place_of(const qe_settings *settings, const char *key) {
    size_t row = qe_settings_row_find(key, strlen(key));
    QE_ASSERT(row < qe_settings_count());
    return settings->place[row];
}

qe_status qe_settings_blame(const qe_settings *settings, const char *const *keys, qe_error *error_out) {
    qe_settings_place written = {QE_SETTINGS_LINE_DEFAULT, 0};
    qe_status status = QE_ERROR_CONFIG;
    for (size_t i = 0; keys[i] != NULL; i++) {
        qe_settings_place place = place_of(settings, keys[i]);
        if (place.line == QE_SETTINGS_LINE_COMMAND) status = QE_ERROR_ARGUMENT;
        if (written.line == QE_SETTINGS_LINE_DEFAULT) written = place;
    }
    if (error_out != NULL) error_out->status = status;
    if (status == QE_ERROR_CONFIG) qe_error_place(error_out, settings->source, written.line, written.column);
    return status;
}

/* Refuses with a message about two keys. */
__attribute__((format(printf, 6, 7)))
static qe_status refuse(const qe_settings *settings, qe_error *error_out, const char *first, const char *second,
                        const char *remedy, const char *format, ...) {
    char message[QE_ERROR_TEXT_BYTES];
    const char *keys[] = {first, second, NULL};
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    qe_error_set(error_out, QE_ERROR_CONFIG, remedy, "%s", message);
    return qe_settings_blame(settings, keys, error_out);
}

static qe_status check_model(const qe_settings *settings, qe_error *error_out) {
    const qe_settings_model *model = &settings->model;
    if (model->hidden % model->heads != 0)
        return refuse(settings, error_out, "model.heads", "model.hidden",
                      "Set model.heads to a divisor of model.hidden.",
                      "model.hidden = %" PRIu32 " is not a multiple of model.heads = %" PRIu32, model->hidden,
                      model->heads);
    if (model->heads % model->kv_heads != 0)
        return refuse(settings, error_out, "model.kv_heads", "model.heads",
                      "Set model.kv_heads to a divisor of model.heads.",
                      "model.heads = %" PRIu32 " is not a multiple of model.kv_heads = %" PRIu32, model->heads,
                      model->kv_heads);
    if (model->hidden / model->heads % 2 != 0)
        return refuse(settings, error_out, "model.heads", "model.hidden",
                      "Choose sizes whose quotient is even: rotary embeddings turn pairs.",
                      "model.hidden / model.heads = %" PRIu32 ", expected an even number",
                      model->hidden / model->heads);
    return QE_OK;
}

static qe_status check_data(const qe_settings *settings, qe_error *error_out) {
    int is_bible = settings->data.path[0] == '\0';
    if (is_bible && settings->data.format == QE_DATA_TOKENS)
        return refuse(settings, error_out, "data.format", "data.path", "Name the token file in data.path.",
                      "data.format is tokens, but data.path is empty, which means the King James Bible, a text");
    if ((is_bible || settings->data.format == QE_DATA_TEXT) && settings->model.vocab < 256)
        return refuse(settings, error_out, "model.vocab", "data.format", "Set model.vocab to 256.",
                      "model.vocab = %" PRIu32 ", expected at least 256: a text's tokens are its bytes",
                      settings->model.vocab);
    return QE_OK;
}

static qe_status check_train(const qe_settings *settings, qe_error *error_out) {
    const qe_settings_train *train = &settings->train;
    if (train->minimum_learning_rate > train->learning_rate)
        return refuse(settings, error_out, "train.minimum_learning_rate", "train.learning_rate",
                      "Set train.minimum_learning_rate to a tenth of train.learning_rate.",
                      "train.minimum_learning_rate = %g is above train.learning_rate = %g",
                      train->minimum_learning_rate,
                      train->learning_rate);
    return QE_OK;
}

static qe_status check_pipeline(const qe_settings *settings, qe_error *error_out) {
    const qe_settings_pipeline *pipeline = &settings->pipeline;
    uint32_t stages = pipeline->ranks * pipeline->chunks; /* at most 64 * 64 */
    if (stages > settings->model.layers)
        return refuse(settings, error_out, pipeline->chunks > 1 ? "pipeline.chunks" : "pipeline.ranks", "model.layers",
                      "Use fewer ranks or chunks, or more layers.",
                      "pipeline.ranks * pipeline.chunks = %" PRIu32 " stages, but model.layers = %" PRIu32
                      ": every stage needs a layer", stages, settings->model.layers);
    if (pipeline->schedule[0] == '\0')
        return refuse(settings, error_out, "pipeline.schedule", "pipeline.schedule", "Set pipeline.schedule to zbh1.",
                      "pipeline.schedule is empty, expected a schedule's name or the path of a CSV");
    return QE_OK;
}

/* Schedule auto. */
static qe_status check_searched(const qe_settings *settings, qe_error *error_out) {
    const qe_settings_pipeline *pipeline = &settings->pipeline;
    int is_linear = pipeline->stages == QE_STAGES_SETTING_LINEAR, is_any = pipeline->stages == QE_STAGES_SETTING_ANY;
    if (pipeline->times[0] == '\0')
        return refuse(settings, error_out, "pipeline.schedule", "pipeline.times",
                      "Set pipeline.times to F,I,W of a rank, or to a file that qeffect bench --json wrote.",
                      "pipeline.schedule is auto, but pipeline.times is empty: there is nothing to search for");
    if (is_any || is_linear == (pipeline->chunks == 1)) return QE_OK;
    return refuse(settings, error_out, "pipeline.stages", "pipeline.chunks",
                  is_linear ? "Set pipeline.chunks to 1, or pipeline.stages to looped or v."
                            : "Set pipeline.chunks to 2, or pipeline.stages to linear.",
                  "pipeline.chunks = %" PRIu32 ", but pipeline.stages = %s on each rank", pipeline->chunks,
                  is_linear                                         ? "linear has 1"
                  : pipeline->stages == QE_STAGES_SETTING_LOOPED ? "looped has several"
                                                                  : "v has several");
}

/* What only a search takes, and what it cannot do without. */
static qe_status check_search(const qe_settings *settings, qe_error *error_out) {
    const qe_settings_pipeline *pipeline = &settings->pipeline;
    if (strcmp(pipeline->schedule, "auto") == 0) return check_searched(settings, error_out);
    const char *key = pipeline->times[0] != '\0'                   ? "pipeline.times"
                      : pipeline->memory_limit_bytes > 0            ? "pipeline.memory_limit"
                      : pipeline->stages != QE_STAGES_SETTING_ANY ? "pipeline.stages"
                                                                  : NULL;
    if (key == NULL) return QE_OK;
    return refuse(settings, error_out, key, "pipeline.schedule",
                  "Leave it out, or set pipeline.schedule to auto. Where a checkpoint brings it along, --set it to its "
                  "default: pipeline.times=, pipeline.memory_limit=0, pipeline.stages=any.",
                  "%s is for schedule auto, but pipeline.schedule is %s", key, pipeline->schedule);
}

static qe_status check_checkpoint(const qe_settings *settings, qe_error *error_out) {
    if (settings->checkpoint.every == 0 || settings->checkpoint.path[0] != '\0') return QE_OK;
    return refuse(settings, error_out, "checkpoint.every", "checkpoint.path",
                  "Set checkpoint.path to a directory, or checkpoint.every to 0.",
                  "checkpoint.every = %" PRIu32 ", but checkpoint.path is empty", settings->checkpoint.every);
}

qe_status qe_settings_check(const qe_settings *settings, qe_error *error_out) {
    QE_TRY(check_model(settings, error_out));
    QE_TRY(check_data(settings, error_out));
    QE_TRY(check_train(settings, error_out));
    QE_TRY(check_pipeline(settings, error_out));
    QE_TRY(check_search(settings, error_out));
    return check_checkpoint(settings, error_out);
}
