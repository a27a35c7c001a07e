/* session_files.c - weights in safetensors files, settings from the command line, and what a breach leaves behind. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <jansson.h>
#include "base/assert.h"
#include "cli/session.h"

typedef struct weights_copy {
    qe_tensor *tensors;
    float **values;
    uint32_t count;
} weights_copy;

static void copy_release(weights_copy *copy) {
    for (uint32_t i = 0; copy->values != NULL && i < copy->count; i++) free(copy->values[i]);
    free(copy->values);
    free(copy->tensors);
}

static qe_status copy_one(qe_session *session, weights_copy *copy, uint32_t index, qe_error *error_out) {
    const qe_parameter *parameter = qe_model_parameter(session->model, index);
    size_t count = (size_t)parameter->rows * parameter->columns;
    copy->values[index] = malloc(count * sizeof(float));
    if (copy->values[index] == NULL)
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to copy %s", parameter->name);
    QE_TRY(qe_team_parameter_read(session->team, index, copy->values[index], error_out));
    uint64_t matrix[2] = {parameter->rows, parameter->columns}, vector[1] = {parameter->columns};
    copy->tensors[index] = qe_tensor_make(parameter->name, QE_DTYPE_F32, parameter->vector ? 1 : 2,
                                          parameter->vector ? vector : matrix, copy->values[index]);
    return QE_OK;
}

static qe_status copy_weights(qe_session *session, weights_copy *copy, qe_error *error_out) {
    copy->count = qe_model_parameter_count(session->model);
    copy->tensors = calloc(copy->count, sizeof *copy->tensors);
    copy->values = calloc(copy->count, sizeof *copy->values);
    if (copy->tensors == NULL || copy->values == NULL)
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to copy the weights");
    for (uint32_t i = 0; i < copy->count; i++) QE_TRY(copy_one(session, copy, i, error_out));
    return QE_OK;
}

static const qe_metadata format_metadata = {"format", "pt"}; /* transformers asks for it */

qe_store_model qe_session_store_model(const qe_session *session) {
    const qe_settings_model *m = &session->settings.model;
    return (qe_store_model){.layers = m->layers,
                            .hidden = m->hidden,
                            .heads = m->heads,
                            .kv_heads = m->kv_heads,
                            .ffn = m->ffn,
                            .vocab = m->vocab,
                            .sequence = m->sequence,
                            .rope_theta = m->rope_theta,
                            .norm_epsilon = m->norm_epsilon};
}

qe_status qe_session_save(qe_session *session, const char *directory, qe_error *error_out) {
    qe_store_model model = qe_session_store_model(session);
    weights_copy copy = {0};
    qe_status status = copy_weights(session, &copy, error_out);
    if (status == QE_OK)
        status = qe_store_write_model(directory, &model, copy.tensors, copy.count, &format_metadata, 1, error_out);
    copy_release(&copy);
    return status;
}

qe_status qe_session_save_file(qe_session *session, const char *path, qe_error *error_out) {
    weights_copy copy = {0};
    qe_status status = copy_weights(session, &copy, error_out);
    if (status == QE_OK) status = qe_safetensors_write(path, copy.tensors, copy.count, &format_metadata, 1, error_out);
    copy_release(&copy);
    return status;
}

static qe_status load_one(qe_session *session, const qe_safetensors *file, uint32_t index, const char *path,
                          qe_error *error_out) {
    const qe_parameter *parameter = qe_model_parameter(session->model, index);
    const qe_tensor *tensor = qe_safetensors_find(file, parameter->name);
    uint64_t rows = parameter->vector ? parameter->columns : parameter->rows;
    int fits = tensor != NULL && tensor->dtype == QE_DTYPE_F32 && tensor->rank == (parameter->vector ? 1u : 2u) &&
               tensor->shape[0] == rows && (parameter->vector || tensor->shape[1] == parameter->columns);
    if (fits) return qe_team_parameter_write(session->team, index, tensor->data, error_out);
    qe_error_set(error_out, QE_ERROR_FORMAT, "give a model that `qeffect train` wrote, with its own config.json",
                 tensor == NULL ? "%s is missing" : "%s is not F32 of the shape that config.json asks for",
                 parameter->name);
    return qe_error_place(error_out, path, 0, 0);
}

qe_status qe_session_load(qe_session *session, const char *path, qe_error *error_out) {
    qe_safetensors *file;
    QE_TRY(qe_safetensors_open(path, &file, error_out));
    qe_status status = QE_OK;
    for (uint32_t i = 0; status == QE_OK && i < qe_model_parameter_count(session->model); i++)
        status = load_one(session, file, i, path, error_out);
    qe_safetensors_close(file);
    return status;
}

/* An option that is short for a setting. */
static qe_status set_from(qe_cli *cli, const char *option, const char *key, qe_settings *settings, qe_error *error) {
    char assignment[QE_SETTINGS_TEXT_BYTES + 64];
    const char *value = qe_cli_value(cli, option);
    if (value == NULL) return QE_OK;
    snprintf(assignment, sizeof assignment, "%s=%s", key, value);
    return qe_settings_set(settings, assignment, error);
}

static qe_status all_settings(qe_cli *cli, const char *path, const qe_settings *base, qe_settings *settings,
                              qe_error *error) {
    if (base != NULL && path == NULL) *settings = *base;
    else qe_settings_default(settings);
    if (path != NULL) QE_TRY(qe_settings_load(path, settings, error));
    for (int i = 0; i < cli->option_count; i++)
        if (strcmp(cli->given[i].option->name, "set") == 0)
            QE_TRY(qe_settings_set(settings, cli->given[i].value, error));
    QE_TRY(set_from(cli, "mode", "train.mode", settings, error));
    QE_TRY(set_from(cli, "contracts", "contracts.mode", settings, error));
    QE_TRY(set_from(cli, "placement", "pipeline.placement", settings, error));
    QE_TRY(set_from(cli, "memory-limit", "train.memory_limit", settings, error));
    return qe_settings_check(settings, error);
}

int qe_session_settings(qe_cli *cli, const char *path, const qe_settings *base, qe_settings *settings_out) {
    qe_error error = {0};
    return all_settings(cli, path, base, settings_out, &error) == QE_OK ? QE_EXIT_OK : qe_cli_error(cli, &error);
}

void qe_session_unused_print(const qe_settings *settings) {
    int is_delayed = settings->recipe.kind == QE_RECIPE_DELAYED, validates = settings->data.validation > 0;
    int is_baseline = settings->train.mode == QE_TRAIN_BASELINE;
    const struct {
        const char *key, *whom;
        int is_used;
    } keys[] = {
        {"train.capture", "train.mode captured", settings->train.mode == QE_TRAIN_CAPTURED},
        {"train.evaluate_every", "data.validation above 0", validates || settings->train.evaluate_every == 0},
        {"train.evaluate_sequences", "data.validation and train.evaluate_every above 0",
         validates && settings->train.evaluate_every > 0},
        {"recipe.history", "recipe.name delayed", is_delayed},
        {"recipe.margin", "recipe.name delayed", is_delayed},
        {"recipe.amax", "recipe.name delayed", is_delayed},
        {"pipeline.cache_weights", "train.mode eager and captured", !is_baseline},
        {"pipeline.placement", "train.mode eager and captured", !is_baseline},
        {"contracts.trace", "contracts.mode trap and observe",
         settings->contracts.mode != QE_CONTRACTS_SETTING_OFF || settings->contracts.trace[0] == 0},
        {"checkpoint.keep", "checkpoint.every above 0", settings->checkpoint.every > 0},
    };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (!keys[i].is_used && !qe_settings_is_default(settings, keys[i].key))
            fprintf(stderr, "%s is for %s; in this run it does nothing\n", keys[i].key, keys[i].whom);
}

int qe_session_write_trace(qe_session *session, const qe_program *history, qe_error *error_out) {
    const char *path = session->settings.contracts.trace;
    char *text = NULL;
    size_t bytes = 0;
    if (path[0] == 0) return -1;
    FILE *memory = open_memstream(&text, &bytes);
    qe_status status = memory == NULL ? qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for the trace")
                                      : qe_trace_write(history, memory, error_out);
    if (memory != NULL && fclose(memory) != 0 && status == QE_OK)
        status = qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for the trace");
    if (status == QE_OK) status = qe_store_write_text_atomic(path, text, bytes, error_out);
    free(text);
    return status == QE_OK ? 0 : -1;
}

static int write_refused(qe_session *session, uint32_t rank, qe_error *error_out) {
    qe_program history;
    qe_program_init(&history);
    if (qe_team_history(session->team, rank, &history, error_out) != QE_OK) return -1;
    int written = qe_session_write_trace(session, &history, error_out);
    qe_program_deinit(&history);
    return written;
}

static json_t *violation_json(const qe_violation *violation, const qe_program *program) {
    json_t *fields = qe_cli_violation_json(violation, program);
    if (violation->item != QE_NONE && violation->item < program->item_count)
        json_object_set_new(fields, "item", json_integer(violation->item));
    return fields;
}

void qe_session_report_breach(qe_session *session, const char *program_name, const qe_step_result *result,
                              struct json_t **document_out) {
    const qe_program *program = qe_team_program(session->team, result->violation_rank);
    qe_error error = {0};
    json_t *list = json_array();
    for (uint32_t i = 0; i < result->violations.count; i++) {
        char text[QE_ERROR_TEXT_BYTES];
        qe_violation_text(&result->violations.record[i], program, text, sizeof text);
        fprintf(stderr, "rank %u: %s\n", result->violation_rank, text);
        json_array_append_new(list, violation_json(&result->violations.record[i], program));
    }
    int traced = write_refused(session, result->violation_rank, &error) == 0;
    if (traced)
        fprintf(stderr, "the refused step is in %s; `%s trace check %s` gives the same verdict\n",
                session->settings.contracts.trace, program_name, session->settings.contracts.trace);
    else if (error.status != QE_OK)
        fprintf(stderr, "no trace was written to %s: %s\n", session->settings.contracts.trace, error.message);
    if (document_out == NULL) {
        json_decref(list);
        return;
    }
    *document_out = json_pack("{s:i, s:o}", "rank", (int)result->violation_rank, "violations", list);
    if (traced) json_object_set_new(*document_out, "trace", qe_cli_json_text(session->settings.contracts.trace));
}

json_t *qe_cli_memory_json(const qe_memory_ledger *ledger) {
    json_t *fields = json_object();
    for (int kind = 0; kind < QE_MEMORY_KINDS; kind++) {
        char key[48];
        snprintf(key, sizeof key, "%s_bytes", qe_memory_kind_name((qe_memory_kind)kind));
        json_object_set_new(fields, key, json_integer((json_int_t)ledger->bytes[kind]));
    }
    json_object_set_new(fields, "total_bytes", json_integer((json_int_t)qe_memory_ledger_total(ledger)));
    return fields;
}
