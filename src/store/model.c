/* model.c - a trained model as Hugging Face transformers' LlamaForCausalLM reads it: config.json beside
 * model.safetensors. What our decoder cannot be (biases, tied embeddings, scaled RoPE) is refused on reading. */
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/assert.h"
#include "qeffect/safetensors.h"
#include "store/file.h"
#include "store/json.h"
#include "store/manifest.h"

enum { CONFIG_BYTES_MAX = 1 << 20 }; /* real ones have about 1 KiB */

static qe_status join(const char *directory, const char *name, char path[PATH_MAX], qe_error *error_out) {
    int length = snprintf(path, PATH_MAX, "%s/%s", directory, name);
    if (length > 0 && length < PATH_MAX) return QE_OK;
    return qe_store_refuse_errno(error_out, directory, "name", ENAMETOOLONG);
}

static json_t *make_config(const qe_store_model *model) {
    return json_pack("{s:[s], s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:n, s:s, s:b, s:b, s:b, s:s,"
                     " s:n, s:n, s:n}",
                     "architectures", "LlamaForCausalLM", "model_type", "llama",
                     "hidden_size", (json_int_t)model->hidden, "intermediate_size", (json_int_t)model->ffn,
                     "num_hidden_layers", (json_int_t)model->layers, "num_attention_heads", (json_int_t)model->heads,
                     "num_key_value_heads", (json_int_t)model->kv_heads,
                     "head_dim", (json_int_t)(model->hidden / model->heads),
                     "vocab_size", (json_int_t)model->vocab, "max_position_embeddings", (json_int_t)model->sequence,
                     "rms_norm_eps", model->norm_epsilon, "rope_theta", model->rope_theta, "rope_scaling",
                     "hidden_act", "silu", "tie_word_embeddings", 0, "attention_bias", 0, "mlp_bias", 0,
                     "torch_dtype", "float32", "bos_token_id", "eos_token_id", "pad_token_id");
}

/* As few digits as read back to the same numbers. */
static char *print_config(const json_t *config) {
    for (size_t digits = 1; digits <= 17; digits++) {
        char *text = qe_json_text(config, JSON_INDENT(2) | JSON_REAL_PRECISION(digits));
        json_error_t error;
        int is_memory_out = 0;
        json_t *back = text ? qe_json_parse(text, strlen(text), &error, &is_memory_out) : NULL;
        int is_same = back != NULL && json_equal(config, back);
        json_decref(back);
        if (is_same || digits == 17) return text;
        free(text);
    }
    return NULL;
}

qe_status qe_store_model_text(const char *path, const qe_store_model *model, char **text_out, size_t *bytes_out,
                              qe_error *error_out) {
    json_t *config = make_config(model);
    char *text = config ? print_config(config) : NULL;
    json_decref(config);
    if (text == NULL) return qe_store_refuse_errno(error_out, path, "describe", ENOMEM);
    size_t length = strlen(text);
    text[length] = '\n'; /* in place of the terminator */
    *text_out = text;
    *bytes_out = length + 1;
    return QE_OK;
}

static qe_status write_config(const char *path, const qe_store_model *model, qe_error *error_out) {
    char *text = NULL;
    size_t bytes = 0;
    QE_TRY(qe_store_model_text(path, model, &text, &bytes, error_out));
    qe_status status = qe_store_write_text_atomic(path, text, bytes, error_out);
    free(text);
    return status;
}

/* Whoever made the directory does not choose where else is written: a link is not followed, and not replaced either. */
static qe_status judge_place(const char *path, qe_error *error_out) {
    struct stat kind;
    if (lstat(path, &kind) != 0 || S_ISREG(kind.st_mode)) return QE_OK; /* what else is wrong, writing tells */
    return qe_store_refuse(error_out, QE_ERROR_IO, path, "Name another directory, or move what is there.",
                           "cannot write the file: it is %s", S_ISLNK(kind.st_mode)  ? "a link"
                                                              : S_ISDIR(kind.st_mode) ? "a directory"
                                                                                      : "a device or a pipe");
}

/* A complete checkpoint stays as it was saved. */
static qe_status judge_directory(const char *directory, qe_error *error_out) {
    char manifest[PATH_MAX];
    struct stat kind;
    QE_TRY(join(directory, QE_MANIFEST_NAME, manifest, error_out));
    if (lstat(manifest, &kind) != 0) return QE_OK;
    return qe_store_refuse(error_out, QE_ERROR_IO, directory, "Name another directory.",
                           "weights written here would destroy the checkpoint that it is");
}

/* The paths of a model's two files, where both may be written. */
static qe_status place_model(const char *directory, char weights[PATH_MAX], char config[PATH_MAX],
                             qe_error *error_out) {
    QE_TRY(judge_directory(directory, error_out));
    QE_TRY(join(directory, "model.safetensors", weights, error_out));
    QE_TRY(join(directory, "config.json", config, error_out));
    QE_TRY(judge_place(weights, error_out));
    return judge_place(config, error_out);
}

qe_status qe_store_try_model(const char *directory, qe_error *error_out) {
    char weights[PATH_MAX], config[PATH_MAX];
    QE_TRY(qe_store_try_directory(directory, error_out));
    return place_model(directory, weights, config, error_out);
}

qe_status qe_store_write_model(const char *directory, const qe_store_model *model, const qe_tensor *tensors,
                               size_t count, const qe_metadata *metadata, size_t metadata_count, qe_error *error_out) {
    char weights[PATH_MAX], config[PATH_MAX];
    if (model->heads == 0 || model->hidden % model->heads != 0)
        return qe_store_refuse(error_out, QE_ERROR_ARGUMENT, directory, "Choose heads that divide hidden.",
                               "hidden = %" PRIu32 " is not a multiple of heads = %" PRIu32, model->hidden,
                               model->heads);
    QE_TRY(place_model(directory, weights, config, error_out));
    QE_TRY(qe_store_make_directory(directory, error_out));
    QE_TRY(qe_safetensors_write(weights, tensors, count, metadata, metadata_count, error_out));
    return write_config(config, model, error_out);
}

static qe_status load_json(const char *path, json_t **config_out, qe_error *error_out) {
    int descriptor = -1;
    uint64_t size_bytes = 0;
    json_error_t error;
    QE_TRY(qe_store_open(path, &descriptor, &size_bytes, error_out));
    char *text = size_bytes <= CONFIG_BYTES_MAX ? malloc((size_t)size_bytes + 1) : NULL;
    qe_status status = QE_OK;
    if (size_bytes > CONFIG_BYTES_MAX)
        status = qe_store_refuse(error_out, QE_ERROR_FORMAT, path, "Name the directory of a model.",
                                 "the file has %" PRIu64 " bytes, expected at most %d", size_bytes, CONFIG_BYTES_MAX);
    else if (text == NULL) status = qe_store_refuse_errno(error_out, path, "read", ENOMEM);
    else status = qe_store_read(descriptor, path, text, size_bytes, error_out);
    close(descriptor);
    int is_memory_out = 0;
    json_t *config = status == QE_OK ? qe_json_parse(text, (size_t)size_bytes, &error, &is_memory_out) : NULL;
    free(text);
    if (status != QE_OK) return status;
    if (is_memory_out) return qe_store_refuse_errno(error_out, path, "read", ENOMEM);
    if (config == NULL) {
        qe_store_refuse(error_out, QE_ERROR_FORMAT, path, "Write the model anew.", "not JSON: %s", error.text);
        qe_error_place(error_out, path, error.line > 0 ? (uint32_t)error.line : 0,
                       error.column > 0 ? (uint32_t)error.column : 0);
        return QE_ERROR_FORMAT;
    }
    *config_out = config;
    return QE_OK;
}

typedef struct reading {
    const json_t *config;
    const char *path;
    qe_error *error_out;
} reading;

/* A whole number of 1 or more; `fallback` of 0: the key must be there. */
static qe_status read_size(const reading *from, const char *key, uint32_t fallback, uint32_t *size_out) {
    const json_t *value = json_object_get(from->config, key);
    if ((value == NULL || json_is_null(value)) && fallback > 0) return *size_out = fallback, QE_OK;
    json_int_t size = json_integer_value(value);
    if (!json_is_integer(value) || size < 1 || size > UINT32_MAX)
        return qe_store_refuse(from->error_out, QE_ERROR_FORMAT, from->path, "Write the model anew.",
                               "%s is %s, expected a whole number of 1 or more", key,
                               value == NULL ? "missing" : "something else");
    *size_out = (uint32_t)size;
    return QE_OK;
}

static qe_status read_real(const reading *from, const json_t *object, const char *key, double fallback, double *out) {
    const json_t *value = json_object_get(object, key);
    double number = value == NULL || json_is_null(value) ? fallback : json_number_value(value);
    if (!(number > 0))
        return qe_store_refuse(from->error_out, QE_ERROR_FORMAT, from->path, "Write the model anew.",
                               "%s is not a number above 0", key);
    *out = number;
    return QE_OK;
}

/* What differs from our decoder in kind, not in size. */
static qe_status check_kind(const reading *from) {
    static const char *const off[] = {"tie_word_embeddings", "attention_bias", "mlp_bias"};
    const char *type = json_string_value(json_object_get(from->config, "model_type"));
    const json_t *act = json_object_get(from->config, "hidden_act");
    const json_t *scaling = json_object_get(from->config, "rope_scaling");
    static const char way_out[] = "Use a Llama model with untied head, no biases and plain RoPE.";
    if (type == NULL || strcmp(type, "llama") != 0)
        return qe_store_refuse(from->error_out, QE_ERROR_UNSUPPORTED, from->path, way_out,
                               "model_type is \"%.32s\", expected \"llama\"", type ? type : "");
    for (size_t i = 0; i < sizeof off / sizeof *off; i++)
        if (json_is_true(json_object_get(from->config, off[i])))
            return qe_store_refuse(from->error_out, QE_ERROR_UNSUPPORTED, from->path, way_out, "%s is true", off[i]);
    if (act != NULL && (!json_is_string(act) || strcmp(json_string_value(act), "silu") != 0))
        return qe_store_refuse(from->error_out, QE_ERROR_UNSUPPORTED, from->path, way_out, "hidden_act is not silu");
    if (scaling != NULL && !json_is_null(scaling))
        return qe_store_refuse(from->error_out, QE_ERROR_UNSUPPORTED, from->path, way_out, "rope_scaling is set");
    return QE_OK;
}

static qe_status read_sizes(const reading *from, qe_store_model *model) {
    uint32_t head_dim = 0;
    /* transformers 5 moves rope_theta into rope_parameters. */
    const json_t *rope = json_object_get(from->config, "rope_parameters");
    if (!json_is_object(rope)) rope = from->config;
    QE_TRY(read_size(from, "num_hidden_layers", 0, &model->layers));
    QE_TRY(read_size(from, "hidden_size", 0, &model->hidden));
    QE_TRY(read_size(from, "num_attention_heads", 0, &model->heads));
    QE_TRY(read_size(from, "num_key_value_heads", model->heads, &model->kv_heads));
    QE_TRY(read_size(from, "intermediate_size", 0, &model->ffn));
    QE_TRY(read_size(from, "vocab_size", 0, &model->vocab));
    QE_TRY(read_size(from, "max_position_embeddings", 0, &model->sequence));
    QE_TRY(read_real(from, from->config, "rms_norm_eps", 1e-6, &model->norm_epsilon));
    QE_TRY(read_real(from, rope, "rope_theta", 10000, &model->rope_theta));
    if (model->hidden % model->heads != 0 || model->heads % model->kv_heads != 0)
        return qe_store_refuse(from->error_out, QE_ERROR_FORMAT, from->path, "Write the model anew.",
                               "hidden_size, num_attention_heads and num_key_value_heads do not divide each other");
    QE_TRY(read_size(from, "head_dim", model->hidden / model->heads, &head_dim));
    if (head_dim == model->hidden / model->heads) return QE_OK;
    return qe_store_refuse(from->error_out, QE_ERROR_UNSUPPORTED, from->path,
                           "Use a model whose heads share hidden_size.",
                           "head_dim is %" PRIu32 ", expected hidden_size / num_attention_heads = %" PRIu32, head_dim,
                           model->hidden / model->heads);
}

qe_status qe_store_read_model_config(const char *directory, qe_store_model *model_out, qe_error *error_out) {
    char path[PATH_MAX];
    json_t *config = NULL;
    qe_store_model model = {0};
    QE_TRY(join(directory, "config.json", path, error_out));
    QE_TRY(load_json(path, &config, error_out));
    reading from = {config, path, error_out};
    qe_status status = check_kind(&from);
    if (status == QE_OK) status = read_sizes(&from, &model);
    json_decref(config);
    if (status == QE_OK) *model_out = model;
    return status;
}
