/* safetensors_write.c - header first, then the tensors one after another without gaps. */
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "store/file.h"
#include "store/json.h"
#include "store/tensor.h"

static qe_status judge_tensor(const char *path, const qe_tensor *tensor, qe_error *error_out) {
    static const char remedy[] = "Describe the tensor with qe_tensor_make.";
    uint64_t bytes = 0;
    if (tensor->name == NULL || (unsigned)tensor->dtype >= QE_DTYPES || tensor->rank > QE_TENSOR_RANK_MAX)
        return qe_store_refuse(error_out, QE_ERROR_ARGUMENT, path, remedy,
                               "tensor \"%s\" has no name, no known dtype or more than %d dimensions",
                               tensor->name ? tensor->name : "", QE_TENSOR_RANK_MAX);
    if (qe_tensor_measure(tensor->dtype, tensor->rank, tensor->shape, &bytes) != 0 || bytes != tensor->bytes)
        return qe_store_refuse(error_out, QE_ERROR_ARGUMENT, path, remedy,
                               "tensor \"%s\" has %" PRIu64 " bytes, its shape means %" PRIu64, tensor->name,
                               tensor->bytes, bytes);
    if (tensor->data == NULL && bytes > 0)
        return qe_store_refuse(error_out, QE_ERROR_ARGUMENT, path, remedy, "tensor \"%s\" has no data", tensor->name);
    return QE_OK;
}

/* jansson says only "no": memory that ran out shows in errno, which is cleared before; else the text was not UTF-8. */
static qe_status refuse_text(const char *path, const char *what, size_t index, qe_error *error_out) {
    if (errno == ENOMEM) return qe_store_refuse_errno(error_out, path, "describe", ENOMEM);
    return qe_store_refuse(error_out, QE_ERROR_ARGUMENT, path, "Write names and metadata in UTF-8.",
                           "%s %zu is not UTF-8", what, index);
}

/* {"dtype":...,"shape":[...],"data_offsets":[begin,end]}, or NULL when memory is out. */
static json_t *describe(const qe_tensor *tensor, uint64_t begin) {
    json_t *shape = json_array();
    for (uint32_t i = 0; i < tensor->rank; i++)
        if (json_array_append_new(shape, json_integer((json_int_t)tensor->shape[i])) != 0) break;
    if (shape != NULL && json_array_size(shape) != tensor->rank) {
        json_decref(shape);
        return NULL;
    }
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", qe_dtype_name(tensor->dtype), "shape", shape, "data_offsets",
                     (json_int_t)begin, (json_int_t)(begin + tensor->bytes));
}

static qe_status add_metadata(json_t *header, const char *path, const qe_metadata *metadata, size_t count,
                              qe_error *error_out) {
    if (count == 0) return QE_OK;
    json_t *object = json_object();
    if (json_object_set_new(header, "__metadata__", object) != 0)
        return qe_store_refuse_errno(error_out, path, "describe", ENOMEM);
    errno = 0;
    for (size_t i = 0; i < count; i++)
        if (json_object_set_new(object, metadata[i].key, json_string(metadata[i].value)) != 0)
            return refuse_text(path, "metadata entry", i, error_out);
    return QE_OK;
}

static qe_status add_tensors(json_t *header, const char *path, const qe_tensor *tensors, size_t count,
                             qe_error *error_out) {
    uint64_t begin = 0, end = 0;
    for (size_t i = 0; i < count; i++, begin = end) {
        const qe_tensor *tensor = &tensors[i];
        QE_TRY(judge_tensor(path, tensor, error_out));
        if (__builtin_add_overflow(begin, tensor->bytes, &end) || end > INT64_MAX)
            return qe_store_refuse(error_out, QE_ERROR_ARGUMENT, path, "Write several files.",
                                   "the tensors are larger than a file can be");
        if (strcmp(tensor->name, "__metadata__") == 0 || json_object_get(header, tensor->name) != NULL)
            return qe_store_refuse(error_out, QE_ERROR_ARGUMENT, path, "Give every tensor a name of its own.",
                                   "the name \"%s\" is taken", tensor->name);
        errno = 0;
        if (json_object_set_new(header, tensor->name, describe(tensor, begin)) != 0)
            return refuse_text(path, "the name of tensor", i, error_out);
    }
    return QE_OK;
}

/* The header as it lies in the file: padded with spaces, so that data begins at a multiple of 8. */
static qe_status make_header(const char *path, const qe_tensor *tensors, size_t count, const qe_metadata *metadata,
                             size_t metadata_count, char **text_out, qe_error *error_out) {
    json_t *header = json_object();
    qe_status status = header ? QE_OK : qe_store_refuse_errno(error_out, path, "describe", ENOMEM);
    if (status == QE_OK) status = add_metadata(header, path, metadata, metadata_count, error_out);
    if (status == QE_OK) status = add_tensors(header, path, tensors, count, error_out);
    char *text = status == QE_OK ? qe_json_text(header, JSON_COMPACT) : NULL;
    json_decref(header);
    if (status != QE_OK) return status;
    size_t length = text ? strlen(text) : 0, padded = (length + 7) / 8 * 8;
    char *roomy = text ? realloc(text, padded + 1) : NULL;
    if (roomy == NULL) {
        free(text);
        return qe_store_refuse_errno(error_out, path, "describe", ENOMEM);
    }
    memset(roomy + length, ' ', padded - length);
    roomy[padded] = '\0';
    *text_out = roomy;
    return QE_OK;
}

static qe_status emit_all(const qe_byte_sink *sink, const char *header, const qe_tensor *tensors, size_t count,
                          qe_error *error_out) {
    uint64_t length = strlen(header);
    uint8_t prefix[8];
    for (int i = 0; i < 8; i++) prefix[i] = (uint8_t)(length >> 8 * i);
    QE_TRY(sink->write(sink->context, prefix, sizeof prefix, error_out));
    QE_TRY(sink->write(sink->context, header, length, error_out));
    for (size_t i = 0; i < count; i++)
        QE_TRY(sink->write(sink->context, tensors[i].data, tensors[i].bytes, error_out));
    return QE_OK;
}

qe_status qe_safetensors_emit(const char *path, const qe_tensor *tensors, size_t count, const qe_metadata *metadata,
                              size_t metadata_count, const qe_byte_sink *sink, qe_error *error_out) {
    char *header = NULL;
    QE_TRY(make_header(path, tensors, count, metadata, metadata_count, &header, error_out));
    qe_status status = QE_OK;
    if (strlen(header) > QE_SAFETENSORS_HEADER_BYTES_MAX)
        status = qe_store_refuse(error_out, QE_ERROR_LIMIT, path, "Write several files.",
                                 "the header needs %zu bytes, expected at most %d", strlen(header),
                                 QE_SAFETENSORS_HEADER_BYTES_MAX);
    if (status == QE_OK) status = emit_all(sink, header, tensors, count, error_out);
    free(header);
    return status;
}

/* Nothing is created before the first bytes: tensors that are refused leave no file. */
typedef struct atomic_sink {
    const char *path;
    qe_atomic_file file;
    int begun;
} atomic_sink;

static qe_status write_atomic(void *context, const void *bytes, uint64_t size_bytes, qe_error *error_out) {
    atomic_sink *to = context;
    if (!to->begun) QE_TRY(qe_atomic_file_begin(to->path, &to->file, error_out));
    to->begun = 1;
    return qe_atomic_file_write(&to->file, bytes, size_bytes, error_out);
}

qe_status qe_safetensors_write(const char *path, const qe_tensor *tensors, size_t count, const qe_metadata *metadata,
                               size_t metadata_count, qe_error *error_out) {
    atomic_sink to = {.path = path};
    qe_byte_sink sink = {.context = &to, .write = write_atomic};
    qe_status status = qe_safetensors_emit(path, tensors, count, metadata, metadata_count, &sink, error_out);
    if (status == QE_OK) return qe_atomic_file_commit(&to.file, error_out);
    if (to.begun) qe_atomic_file_abort(&to.file);
    return status;
}
