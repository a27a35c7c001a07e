/* safetensors_read.c - reads a file that anybody may have written. The header is judged whole before a byte of data is
 * read: the tensors must tile the data section exactly, so that no byte belongs to two tensors or to none. */
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/arena.h"
#include "base/assert.h"
#include "qeffect/limits.h"
#include "store/file.h"
#include "store/json.h"
#include "store/tensor.h"

struct qe_safetensors {
    json_t *header;     /* owns names and metadata */
    qe_tensor *tensors; /* [count], in the order of their data */
    size_t count;
    void *block;        /* every tensor at a multiple of QE_ALIGN_BYTES */
};

/* A tensor with its place in the data section. */
typedef struct entry {
    qe_tensor tensor;
    uint64_t begin, end;
} entry;

typedef struct source {
    int descriptor;
    const char *path;
    uint64_t data_bytes; /* behind the header */
    qe_hash *hash;       /* of all bytes so far; NULL: nobody asks */
    qe_error *error_out;
} source;

/* The next bytes of the file. Nothing is read twice or passed over, so the hash is that of the file. */
static qe_status take(const source *from, void *bytes, uint64_t size_bytes) {
    QE_TRY(qe_store_read(from->descriptor, from->path, bytes, size_bytes, from->error_out));
    if (from->hash != NULL) qe_hash_update(from->hash, bytes, (size_t)size_bytes);
    return QE_OK;
}

static const char remedy[] = "Write the file anew with a safetensors library; this one is damaged or was cut short.";

#define REFUSE(from, ...) qe_store_refuse((from)->error_out, QE_ERROR_FORMAT, (from)->path, remedy, __VA_ARGS__)

static qe_status read_shape(const source *from, const char *name, const json_t *shape, qe_tensor *tensor) {
    if (!json_is_array(shape)) return REFUSE(from, "tensor \"%.64s\": shape is not a list", name);
    if (json_array_size(shape) > QE_TENSOR_RANK_MAX)
        return qe_store_refuse(from->error_out, QE_ERROR_LIMIT, from->path, "Reshape the tensor.",
                               "tensor \"%.64s\" has %zu dimensions, expected at most %d", name, json_array_size(shape),
                               QE_TENSOR_RANK_MAX);
    tensor->rank = (uint32_t)json_array_size(shape);
    for (uint32_t i = 0; i < tensor->rank; i++) {
        const json_t *size = json_array_get(shape, i);
        if (!json_is_integer(size) || json_integer_value(size) < 0)
            return REFUSE(from, "tensor \"%.64s\": dimension %" PRIu32 " is not a size", name, i);
        tensor->shape[i] = (uint64_t)json_integer_value(size);
    }
    if (qe_tensor_measure(tensor->dtype, tensor->rank, tensor->shape, &tensor->bytes) != 0)
        return REFUSE(from, "tensor \"%.64s\": the product of its shape is too large", name);
    return QE_OK;
}

static qe_status read_offsets(const source *from, const char *name, const json_t *offsets, entry *to) {
    const json_t *begin = json_array_get(offsets, 0), *end = json_array_get(offsets, 1);
    if (!json_is_array(offsets) || json_array_size(offsets) != 2 || !json_is_integer(begin) || !json_is_integer(end))
        return REFUSE(from, "tensor \"%.64s\": data_offsets is not a pair of whole numbers", name);
    json_int_t first = json_integer_value(begin), last = json_integer_value(end);
    if (first < 0 || last < first || (uint64_t)last > from->data_bytes)
        return REFUSE(from, "tensor \"%.64s\" lies at %" JSON_INTEGER_FORMAT " to %" JSON_INTEGER_FORMAT
                      ", outside the data of %" PRIu64 " bytes", name, first, last, from->data_bytes);
    to->begin = (uint64_t)first;
    to->end = (uint64_t)last;
    if (to->end - to->begin != to->tensor.bytes)
        return REFUSE(from, "tensor \"%.64s\" has %" PRIu64 " bytes of data, its shape means %" PRIu64, name,
                      to->end - to->begin, to->tensor.bytes);
    return QE_OK;
}

static qe_status read_entry(const source *from, const char *name, const json_t *value, entry *to) {
    const char *dtype = json_string_value(json_object_get(value, "dtype"));
    *to = (entry){.tensor = {.name = name}};
    if (!json_is_object(value)) return REFUSE(from, "tensor \"%.64s\" is not described by an object", name);
    if (dtype == NULL || qe_dtype_from_name(dtype, &to->tensor.dtype) != 0)
        return REFUSE(from, "tensor \"%.64s\": unknown dtype \"%.16s\"", name, dtype ? dtype : "");
    QE_TRY(read_shape(from, name, json_object_get(value, "shape"), &to->tensor));
    return read_offsets(from, name, json_object_get(value, "data_offsets"), to);
}

static qe_status check_metadata(const source *from, const json_t *header) {
    json_t *metadata = json_object_get(header, "__metadata__"), *value;
    const char *key;
    if (metadata == NULL) return QE_OK;
    if (!json_is_object(metadata)) return REFUSE(from, "__metadata__ is not an object");
    json_object_foreach(metadata, key, value)
        if (!json_is_string(value)) return REFUSE(from, "__metadata__: \"%.64s\" is not text", key);
    return QE_OK;
}

static int order(const void *left, const void *right) {
    const entry *one = left, *two = right;
    if (one->begin != two->begin) return one->begin < two->begin ? -1 : 1;
    if (one->end != two->end) return one->end < two->end ? -1 : 1; /* empty ones before what follows them */
    return strcmp(one->tensor.name, two->tensor.name);
}

static qe_status check_tiling(const source *from, const entry *entries, size_t count) {
    uint64_t end = 0;
    for (size_t i = 0; i < count; end = entries[i].end, i++) {
        if (entries[i].begin < end)
            return REFUSE(from, "tensors \"%.64s\" and \"%.64s\" overlap", entries[i - 1].tensor.name,
                          entries[i].tensor.name);
        if (entries[i].begin > end)
            return REFUSE(from, "%" PRIu64 " bytes before tensor \"%.64s\" belong to no tensor",
                          entries[i].begin - end, entries[i].tensor.name);
    }
    if (end != from->data_bytes)
        return REFUSE(from, "%" PRIu64 " bytes at the end belong to no tensor", from->data_bytes - end);
    return QE_OK;
}

/* Every tensor of the header, judged and sorted. Owns: the caller frees *entries_out. */
static qe_status read_entries(const source *from, json_t *header, entry **entries_out, size_t *count_out) {
    QE_TRY(check_metadata(from, header));
    entry *entries = calloc(json_object_size(header) + 1, sizeof *entries);
    if (entries == NULL) return qe_store_refuse_errno(from->error_out, from->path, "read", ENOMEM);
    size_t count = 0;
    qe_status status = QE_OK;
    const char *name;
    json_t *value;
    json_object_foreach(header, name, value) {
        if (strcmp(name, "__metadata__") == 0) continue;
        status = read_entry(from, name, value, &entries[count++]);
        if (status != QE_OK) break;
    }
    if (status == QE_OK) {
        qsort(entries, count, sizeof *entries, order);
        status = check_tiling(from, entries, count);
    }
    if (status != QE_OK) {
        free(entries);
        return status;
    }
    *entries_out = entries;
    *count_out = count;
    return QE_OK;
}

/* Reads the tensors' data, each to an aligned place of one block. */
static qe_status read_data(const source *from, const entry *entries, qe_safetensors *file) {
    qe_arena arena = {0};
    file->tensors = calloc(file->count + 1, sizeof *file->tensors);
    if (file->tensors == NULL) return qe_store_refuse_errno(from->error_out, from->path, "read", ENOMEM);
    for (size_t i = 0; i < file->count; i++)
        qe_arena_add(&arena, (size_t)entries[i].tensor.bytes, QE_ALIGN_BYTES);
    if (arena.total_bytes > 0 || arena.overflowed) QE_TRY(qe_arena_allocate(&arena, &file->block, from->error_out));
    qe_arena placed = {0};
    for (size_t i = 0; i < file->count; i++) {
        size_t offset = qe_arena_add(&placed, (size_t)entries[i].tensor.bytes, QE_ALIGN_BYTES);
        file->tensors[i] = entries[i].tensor;
        if (entries[i].tensor.bytes == 0) continue;
        void *data = (char *)file->block + offset;
        file->tensors[i].data = data;
        QE_TRY(take(from, data, entries[i].tensor.bytes));
    }
    QE_ASSERT(placed.total_bytes == arena.total_bytes);
    return QE_OK;
}

static qe_status parse_header(const source *from, char *text, uint64_t length, json_t **header_out) {
    json_error_t error;
    QE_TRY(take(from, text, length));
    /* The format wants `{` first; spaces may follow the object. */
    if (text[0] != '{') return REFUSE(from, "the header does not begin with {");
    int is_memory_out = 0;
    json_t *header = qe_json_parse(text, (size_t)length, &error, &is_memory_out);
    if (is_memory_out) return qe_store_refuse_errno(from->error_out, from->path, "read", ENOMEM);
    if (header == NULL) return REFUSE(from, "the header is not JSON, at byte %d: %s", error.position, error.text);
    QE_ASSERT(json_is_object(header));
    *header_out = header;
    return QE_OK;
}

static qe_status read_header(source *from, uint64_t file_bytes, json_t **header_out) {
    uint8_t prefix[8];
    uint64_t length = 0;
    if (file_bytes < sizeof prefix)
        return REFUSE(from, "the file has %" PRIu64 " bytes, expected at least 8", file_bytes);
    QE_TRY(take(from, prefix, sizeof prefix));
    for (int i = 0; i < 8; i++) length |= (uint64_t)prefix[i] << 8 * i;
    if (length < 2 || length > file_bytes - sizeof prefix)
        return REFUSE(from, "the header is said to have %" PRIu64 " bytes, the file has %" PRIu64, length, file_bytes);
    if (length > QE_SAFETENSORS_HEADER_BYTES_MAX)
        return qe_store_refuse(from->error_out, QE_ERROR_LIMIT, from->path, "Split the file.",
                               "the header has %" PRIu64 " bytes, expected at most %d", length,
                               QE_SAFETENSORS_HEADER_BYTES_MAX);
    from->data_bytes = file_bytes - sizeof prefix - length;
    char *text = malloc((size_t)length);
    if (text == NULL) return qe_store_refuse_errno(from->error_out, from->path, "read", ENOMEM);
    qe_status status = parse_header(from, text, length, header_out);
    free(text);
    return status;
}

static qe_status read_file(source *from, uint64_t file_bytes, qe_safetensors *file) {
    entry *entries = NULL;
    QE_TRY(read_header(from, file_bytes, &file->header));
    QE_TRY(read_entries(from, file->header, &entries, &file->count));
    qe_status status = read_data(from, entries, file);
    free(entries);
    return status;
}

qe_status qe_safetensors_read(int descriptor, uint64_t file_bytes, const char *path, qe_safetensors **file_out,
                              qe_hash128 *digest_out, qe_error *error_out) {
    qe_hash hash;
    source from = {.descriptor = descriptor, .path = path, .error_out = error_out};
    if (digest_out != NULL) from.hash = &hash;
    qe_hash_init(&hash);
    qe_safetensors *file = calloc(1, sizeof *file);
    qe_status status = file ? read_file(&from, file_bytes, file)
                            : qe_store_refuse_errno(error_out, path, "read", ENOMEM);
    if (status != QE_OK) {
        qe_safetensors_close(file);
        return status;
    }
    if (digest_out != NULL) *digest_out = qe_hash_digest(&hash);
    *file_out = file;
    return QE_OK;
}

qe_status qe_safetensors_open(const char *path, qe_safetensors **file_out, qe_error *error_out) {
    int descriptor = -1;
    uint64_t file_bytes = 0;
    QE_TRY(qe_store_open(path, &descriptor, &file_bytes, error_out));
    qe_status status = qe_safetensors_read(descriptor, file_bytes, path, file_out, NULL, error_out);
    close(descriptor);
    return status;
}

void qe_safetensors_close(qe_safetensors *file) {
    if (file == NULL) return;
    json_decref(file->header);
    free(file->tensors);
    free(file->block);
    free(file);
}

size_t qe_safetensors_count(const qe_safetensors *file) {
    return file->count;
}

const qe_tensor *qe_safetensors_at(const qe_safetensors *file, size_t index) {
    QE_ASSERT(index < file->count);
    return &file->tensors[index];
}

const qe_tensor *qe_safetensors_find(const qe_safetensors *file, const char *name) {
    for (size_t i = 0; i < file->count; i++)
        if (strcmp(file->tensors[i].name, name) == 0) return &file->tensors[i];
    return NULL;
}

const char *qe_safetensors_metadata(const qe_safetensors *file, const char *key) {
    return json_string_value(json_object_get(json_object_get(file->header, "__metadata__"), key));
}
