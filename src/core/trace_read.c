/* trace_read.c - a trace, line by line, into a program. Nothing is taken from the text without asking: a line has a
 * longest length, a number a largest value, a name must have been declared. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "core/trace_state.h"

typedef qe_status (*statement_reader)(qe_trace_reader *reader);

/* A new name in `space`, with the place where it stands. */
static qe_status read_new_name(qe_trace_reader *reader, uint32_t space, char *name_out, char **at_out) {
    char expected[64];
    (void)qe_trace_at_end(reader);
    *at_out = reader->at;
    snprintf(expected, sizeof expected, "a name for the %s", qe_trace_space_name(space));
    QE_TRY(qe_trace_name(reader, expected, name_out));
    if (qe_names_find(&reader->names, space, name_out) == QE_NONE) return qe_trace_parted(reader);
    reader->at = *at_out;
    snprintf(expected, sizeof expected, "a name that no other %s has", qe_trace_space_name(space));
    return qe_trace_expected(reader, expected);
}

static qe_status keep_name(qe_trace_reader *reader, uint32_t space, const char *name, uint32_t index) {
    if (qe_names_add(&reader->names, space, name, index) == QE_OK) return QE_OK;
    return qe_error_set(reader->error_out, QE_ERROR_MEMORY, NULL, "no memory for the names of a trace");
}

/* `=NUMBER` behind a word. */
static qe_status read_value(qe_trace_reader *reader, uint64_t most, uint64_t *value_out) {
    char expected[64];
    if (!qe_trace_takes(reader, '=')) return qe_trace_expected(reader, "`=` and a number");
    snprintf(expected, sizeof expected, "a number up to %llu", (unsigned long long)most);
    return qe_trace_number(reader, most, expected, value_out);
}

static qe_status read_reference(qe_trace_reader *reader, uint32_t space, uint32_t *object_out) {
    if (!qe_trace_takes(reader, '=')) return qe_trace_expected(reader, "`=` and a name");
    return qe_trace_known(reader, space, object_out);
}

static qe_status read_recipe(qe_trace_reader *reader, uint8_t *recipe_out) {
    if (!qe_trace_takes(reader, '=')) return qe_trace_expected(reader, "`=` and a recipe");
    return qe_trace_recipe(reader, recipe_out);
}

/* What may be said of each kind of object, for people. */
static const char *settings_of(qe_object_kind kind) {
    static const char *const settings[QE_OBJECT_KINDS] = {
        "counter=N, due=N or the end of the line", "counter=N, bytes=N, at=N or the end of the line",
        "counter=N or the end of the line", "weight=NAME, scale=NAME, layouts=N, version=N, epoch=N or recipe=NAME",
        "weight=NAME, counter=N, due=N or the end of the line", "bytes=N, at=N, written, absent or the end of the line",
        "counter=N or the end of the line", "counter=N or the end of the line"};
    QE_ASSERT((unsigned)kind < QE_OBJECT_KINDS);
    return settings[kind];
}

static int is_one_of(qe_object_kind kind, unsigned kinds) { return (kinds >> kind & 1u) != 0; }

static qe_status read_object_setting(qe_trace_reader *reader, qe_said *said, qe_object *object) {
    enum {
        COUNTED = 1 << QE_OBJECT_SCALE | 1 << QE_OBJECT_SLOT | 1 << QE_OBJECT_WEIGHT | 1 << QE_OBJECT_GRAD |
                  1 << QE_OBJECT_GRAPH | 1 << QE_OBJECT_RNG,
        PLACED = 1 << QE_OBJECT_SLOT | 1 << QE_OBJECT_BUFFER,
        OWED = 1 << QE_OBJECT_SCALE | 1 << QE_OBJECT_GRAD,
        OF_WEIGHT = 1 << QE_OBJECT_CACHE | 1 << QE_OBJECT_GRAD,
    };
    char word[QE_NAME_BYTES];
    char *before = reader->at;
    uint64_t value = 0;
    int cache = object->kind == QE_OBJECT_CACHE, buffer = object->kind == QE_OBJECT_BUFFER;
    QE_TRY(qe_trace_word(reader, settings_of(object->kind), word));
    QE_TRY(qe_trace_once(reader, said, before));
    if (is_one_of(object->kind, COUNTED) && strcmp(word, "counter") == 0)
        return read_value(reader, UINT64_MAX, &object->counter);
    if (is_one_of(object->kind, OF_WEIGHT) && strcmp(word, "weight") == 0)
        return read_reference(reader, QE_OBJECT_WEIGHT, &object->weight);
    if (cache && strcmp(word, "scale") == 0) return read_reference(reader, QE_OBJECT_SCALE, &object->scale);
    if (cache && strcmp(word, "version") == 0) return read_value(reader, UINT64_MAX, &object->key_version);
    if (cache && strcmp(word, "epoch") == 0) return read_value(reader, UINT64_MAX, &object->key_epoch);
    if (cache && strcmp(word, "recipe") == 0) return read_recipe(reader, &object->recipe);
    if (is_one_of(object->kind, PLACED) && strcmp(word, "bytes") == 0)
        return read_value(reader, UINT64_MAX, &object->bytes);
    if (is_one_of(object->kind, PLACED) && strcmp(word, "at") == 0)
        return read_value(reader, UINT64_MAX, &object->address);
    int told = object->counter != QE_BUFFER_UNWRITTEN; /* of a buffer: written, or absent; it is not both */
    if (buffer && !told && strcmp(word, "written") == 0) {
        object->counter = QE_BUFFER_WRITTEN;
    } else if (buffer && !told && strcmp(word, "absent") == 0) {
        object->counter = QE_BUFFER_ABSENT;
    } else if (is_one_of(object->kind, OWED) && strcmp(word, "due") == 0) {
        QE_TRY(read_value(reader, UINT32_MAX, &value));
        object->due = (uint32_t)value;
    } else if (cache && strcmp(word, "layouts") == 0) {
        QE_TRY(read_value(reader, UINT8_MAX, &value));
        object->layouts = (uint8_t)value;
    } else {
        reader->at = before;
        return qe_trace_expected(reader, settings_of(object->kind));
    }
    return QE_OK;
}

static qe_status read_object_settings(qe_trace_reader *reader, qe_object *object) {
    qe_said said = {0};
    int sized = 0;
    while (!qe_trace_at_end(reader)) {
        sized = sized || strncmp(reader->at, "bytes", 5) == 0;
        QE_TRY(read_object_setting(reader, &said, object));
        QE_TRY(qe_trace_parted(reader));
    }
    if (object->kind == QE_OBJECT_CACHE && object->weight == QE_NONE)
        return qe_trace_expected(reader, "weight=NAME, what the cache is made from");
    if (object->kind == QE_OBJECT_BUFFER && !sized)
        return qe_trace_expected(reader, "bytes=N, the size of the buffer");
    return QE_OK;
}

static qe_status read_object(qe_trace_reader *reader, qe_object_kind kind) {
    qe_object object = {.kind = kind, .weight = QE_NONE, .scale = QE_NONE};
    char *at;
    uint32_t index;
    QE_TRY(read_new_name(reader, (uint32_t)kind, object.name, &at));
    QE_TRY(read_object_settings(reader, &object));
    qe_status status = qe_program_add_object(reader->program, &object, &index, reader->error_out);
    if (status != QE_OK) return qe_trace_refused(reader, at, status);
    return keep_name(reader, (uint32_t)kind, object.name, index);
}

static qe_status read_scale(qe_trace_reader *reader) { return read_object(reader, QE_OBJECT_SCALE); }
static qe_status read_slot(qe_trace_reader *reader) { return read_object(reader, QE_OBJECT_SLOT); }
static qe_status read_weight(qe_trace_reader *reader) { return read_object(reader, QE_OBJECT_WEIGHT); }
static qe_status read_cache(qe_trace_reader *reader) { return read_object(reader, QE_OBJECT_CACHE); }
static qe_status read_grad(qe_trace_reader *reader) { return read_object(reader, QE_OBJECT_GRAD); }
static qe_status read_buffer(qe_trace_reader *reader) { return read_object(reader, QE_OBJECT_BUFFER); }
static qe_status read_graph(qe_trace_reader *reader) { return read_object(reader, QE_OBJECT_GRAPH); }

static qe_status read_rng(qe_trace_reader *reader) { return read_object(reader, QE_OBJECT_RNG); }

/* `rank=N`, where one may stand. */
static qe_status read_rank(qe_trace_reader *reader, uint16_t *rank_out) {
    uint64_t rank;
    QE_TRY(read_value(reader, QE_RANKS_MAX - 1, &rank));
    *rank_out = (uint16_t)rank;
    return QE_OK;
}

/* `blocking` or `legacy`, and `rank=N`, of a stream. The host is no stream of CUDA's. */
static qe_status read_stream_settings(qe_trace_reader *reader, qe_stream_info *stream) {
    static const char expected[] = "blocking, legacy, rank=N or the end of the line";
    qe_said said = {0};
    while (!qe_trace_at_end(reader)) {
        char word[QE_NAME_BYTES];
        char *before = reader->at;
        QE_TRY(qe_trace_word(reader, expected, word));
        QE_TRY(qe_trace_once(reader, &said, before));
        int free = stream->order == QE_STREAM_SEPARATE && stream->role != QE_STREAM_HOST;
        if (free && strcmp(word, "blocking") == 0) stream->order = QE_STREAM_BLOCKING;
        else if (free && strcmp(word, "legacy") == 0) stream->order = QE_STREAM_LEGACY;
        else if (strcmp(word, "rank") == 0) QE_TRY(read_rank(reader, &stream->rank));
        else {
            reader->at = before;
            return qe_trace_expected(reader, expected);
        }
        QE_TRY(qe_trace_parted(reader));
    }
    return QE_OK;
}

static qe_status read_stream(qe_trace_reader *reader) {
    static const char *const roles[] = {"compute", "comm", "caller", "host"};
    char name[QE_NAME_BYTES], role[QE_NAME_BYTES];
    char *at;
    uint32_t index;
    QE_TRY(read_new_name(reader, QE_NAMES_STREAM, name, &at));
    (void)qe_trace_at_end(reader);
    char *before = reader->at;
    QE_TRY(qe_trace_word(reader, "compute, comm, caller or host", role));
    for (int i = 0; i <= QE_STREAM_HOST; i++) {
        if (strcmp(role, roles[i]) != 0) continue;
        QE_TRY(qe_trace_parted(reader));
        qe_status status = qe_program_add_stream(reader->program, name, (qe_stream_role)i, &index, reader->error_out);
        if (status != QE_OK) return qe_trace_refused(reader, at, status);
        QE_TRY(read_stream_settings(reader, &reader->program->streams[index]));
        return keep_name(reader, QE_NAMES_STREAM, name, index);
    }
    reader->at = before;
    return qe_trace_expected(reader, "compute, comm, caller or host");
}

static qe_status read_event(qe_trace_reader *reader) {
    char name[QE_NAME_BYTES];
    char *at;
    QE_TRY(read_new_name(reader, QE_NAMES_EVENT, name, &at));
    if (reader->program->event_count == QE_PROGRAM_MAX) return qe_trace_expected(reader, "fewer events");
    return keep_name(reader, QE_NAMES_EVENT, name, qe_program_add_event(reader->program));
}

/* A declared name as a word of its own. */
static qe_status read_known(qe_trace_reader *reader, uint32_t space, uint32_t *index_out) {
    QE_TRY(qe_trace_known(reader, space, index_out));
    return qe_trace_parted(reader);
}

static qe_status read_order(qe_trace_reader *reader) {
    qe_deposit deposit = {0};
    QE_TRY(read_known(reader, QE_OBJECT_GRAD, &deposit.object));
    do {
        uint64_t number;
        (void)qe_trace_at_end(reader);
        char *at = reader->at;
        QE_TRY(qe_trace_number(reader, UINT32_MAX, "a contribution such as 3 or 3/1 (microbatch/use)", &number));
        deposit.microbatch = (uint32_t)number;
        deposit.use = 0;
        if (qe_trace_takes(reader, '/')) {
            QE_TRY(qe_trace_number(reader, UINT16_MAX, "a use below 65536", &number));
            deposit.use = (uint16_t)number;
        }
        qe_status status = qe_program_add_deposit(reader->program, &deposit, reader->error_out);
        if (status != QE_OK) return qe_trace_refused(reader, at, status);
        QE_TRY(qe_trace_parted(reader));
    } while (!qe_trace_at_end(reader));
    return QE_OK;
}

/* `stage=S` and `mb=M`, up to the end or the effects; `rank=R` of a sync. */
static qe_status read_place(qe_trace_reader *reader, qe_item *item) {
    static const char expected[] = "stage=N, mb=N, rank=N of a sync, or `:` and the effects of an op";
    int of_host = item->kind == QE_ITEM_SYNC_EVENT || item->kind == QE_ITEM_SYNC_DEVICE;
    qe_said said = {0};
    while (!qe_trace_at_end(reader) && *reader->at != ':') {
        char word[QE_NAME_BYTES];
        char *before = reader->at;
        uint64_t value = 0;
        QE_TRY(qe_trace_word(reader, expected, word));
        QE_TRY(qe_trace_once(reader, &said, before));
        if (strcmp(word, "stage") == 0) {
            QE_TRY(read_value(reader, UINT16_MAX, &value));
            item->stage = (uint16_t)value;
        } else if (strcmp(word, "mb") == 0) {
            QE_TRY(read_value(reader, QE_NONE - 1, &value));
            item->microbatch = (uint32_t)value;
        } else if (of_host && strcmp(word, "rank") == 0) {
            QE_TRY(read_rank(reader, &item->rank));
        } else {
            reader->at = before;
            return qe_trace_expected(reader, expected);
        }
        QE_TRY(qe_trace_parted(reader));
    }
    return QE_OK;
}

static qe_status read_keyword(qe_trace_reader *reader, const char *keyword, const char *expected) {
    char word[QE_NAME_BYTES];
    (void)qe_trace_at_end(reader);
    char *before = reader->at;
    QE_TRY(qe_trace_word(reader, expected, word));
    if (strcmp(word, keyword) == 0) return qe_trace_parted(reader);
    reader->at = before;
    return qe_trace_expected(reader, expected);
}

static qe_status add_item(qe_trace_reader *reader, qe_item *item, const qe_effect *effects, uint32_t count) {
    item->line = reader->line_number;
    qe_status status = qe_program_add_item(reader->program, item, effects, count, NULL, reader->error_out);
    return status == QE_OK ? QE_OK : qe_trace_refused(reader, reader->line, status);
}

static qe_status read_label(qe_trace_reader *reader, uint32_t *label_out) {
    char text[QE_NAME_BYTES];
    (void)qe_trace_at_end(reader);
    char *at = reader->at;
    QE_TRY(qe_trace_name(reader, "what the op is, such as norm_quantize", text));
    QE_TRY(qe_trace_parted(reader));
    *label_out = qe_names_find(&reader->names, QE_NAMES_LABEL, text);
    if (*label_out != QE_NONE) return QE_OK;
    qe_status status = qe_program_add_label(reader->program, text, label_out, reader->error_out);
    if (status != QE_OK) return qe_trace_refused(reader, at, status);
    return keep_name(reader, QE_NAMES_LABEL, text, *label_out);
}

static qe_status read_op(qe_trace_reader *reader) {
    qe_item item = {.kind = QE_ITEM_OP, .microbatch = QE_NONE};
    qe_effect effects[QE_EFFECTS_MAX];
    uint32_t count = 0;
    QE_TRY(read_label(reader, &item.label));
    QE_TRY(read_keyword(reader, "on", "`on` and a stream"));
    QE_TRY(read_known(reader, QE_NAMES_STREAM, &item.stream));
    QE_TRY(read_place(reader, &item));
    if (qe_trace_takes(reader, ':')) QE_TRY(qe_trace_parted(reader));
    for (; !qe_trace_at_end(reader); count++) {
        if (count == QE_EFFECTS_MAX) return qe_trace_expected(reader, "at most 16 effects of one op");
        QE_TRY(qe_trace_effect(reader, &item, &effects[count]));
    }
    return add_item(reader, &item, effects, count);
}

static qe_status read_edge(qe_trace_reader *reader, qe_item_kind kind) {
    qe_item item = {.kind = (uint8_t)kind, .microbatch = QE_NONE};
    QE_TRY(read_known(reader, QE_NAMES_EVENT, &item.event));
    QE_TRY(read_keyword(reader, "on", "`on` and a stream"));
    QE_TRY(read_known(reader, QE_NAMES_STREAM, &item.stream));
    QE_TRY(read_place(reader, &item));
    return add_item(reader, &item, NULL, 0);
}

static qe_status read_record(qe_trace_reader *reader) { return read_edge(reader, QE_ITEM_RECORD); }
static qe_status read_wait(qe_trace_reader *reader) { return read_edge(reader, QE_ITEM_WAIT); }

static qe_status read_destroy(qe_trace_reader *reader) {
    qe_item item = {.kind = QE_ITEM_DESTROY, .microbatch = QE_NONE};
    QE_TRY(read_known(reader, QE_NAMES_EVENT, &item.event));
    return add_item(reader, &item, NULL, 0);
}

static qe_status read_sync(qe_trace_reader *reader) {
    qe_item item = {.kind = QE_ITEM_SYNC_DEVICE, .microbatch = QE_NONE};
    char word[QE_NAME_BYTES];
    (void)qe_trace_at_end(reader);
    char *before = reader->at;
    QE_TRY(qe_trace_word(reader, "event, stream or device", word));
    if (strcmp(word, "event") == 0) item.kind = QE_ITEM_SYNC_EVENT;
    else if (strcmp(word, "stream") == 0) item.kind = QE_ITEM_SYNC_STREAM;
    else if (strcmp(word, "device") != 0) {
        reader->at = before;
        return qe_trace_expected(reader, "event, stream or device");
    }
    QE_TRY(qe_trace_parted(reader));
    if (item.kind == QE_ITEM_SYNC_EVENT) QE_TRY(read_known(reader, QE_NAMES_EVENT, &item.event));
    if (item.kind == QE_ITEM_SYNC_STREAM) QE_TRY(read_known(reader, QE_NAMES_STREAM, &item.stream));
    QE_TRY(read_place(reader, &item));
    return add_item(reader, &item, NULL, 0);
}

static qe_status read_step(qe_trace_reader *reader) {
    qe_item item = {.kind = QE_ITEM_STEP_BEGIN, .microbatch = QE_NONE};
    char word[QE_NAME_BYTES];
    (void)qe_trace_at_end(reader);
    char *before = reader->at;
    QE_TRY(qe_trace_word(reader, "begin or end", word));
    if (strcmp(word, "end") == 0) item.kind = QE_ITEM_STEP_END;
    else if (strcmp(word, "begin") != 0) {
        reader->at = before;
        return qe_trace_expected(reader, "begin or end");
    }
    return add_item(reader, &item, NULL, 0);
}

typedef struct statement {
    const char *word;
    statement_reader read;
} statement;

static qe_status read_statement(qe_trace_reader *reader) {
    static const statement statements[] = {
        {"op", read_op},         {"record", read_record}, {"wait", read_wait},     {"sync", read_sync},
        {"step", read_step},     {"stream", read_stream}, {"event", read_event},   {"scale", read_scale},
        {"slot", read_slot},     {"weight", read_weight}, {"cache", read_cache},   {"grad", read_grad},
        {"buffer", read_buffer}, {"graph", read_graph},   {"order", read_order},   {"destroy", read_destroy},
        {"rng", read_rng},
    };
    static const char expected[] = "op, record, wait, sync, step, destroy, stream, event, scale, slot, weight, "
                                   "cache, grad, buffer, graph, rng or order";
    char word[QE_NAME_BYTES];
    char *before = reader->at;
    QE_TRY(qe_trace_word(reader, expected, word));
    for (size_t i = 0; i < sizeof statements / sizeof statements[0]; i++) {
        if (strcmp(word, statements[i].word) != 0) continue;
        QE_TRY(qe_trace_parted(reader));
        QE_TRY(statements[i].read(reader));
        return qe_trace_at_end(reader) ? QE_OK : qe_trace_expected(reader, "the end of the line");
    }
    reader->at = before;
    return qe_trace_expected(reader, expected);
}

/* One line without its end, or *end_out at the end of the file. */
static qe_status next_line(qe_trace_reader *reader, int *end_out) {
    size_t length = 0;
    int c;
    *end_out = 0;
    reader->line_number++;
    reader->at = reader->line;
    while ((c = getc(reader->file)) != EOF && c != '\n') {
        if (c == '\0' || length == QE_TRACE_LINE_BYTES - 1) {
            qe_error_set(reader->error_out, QE_ERROR_FORMAT, c ? "break the line" : "a trace is text",
                         c ? "the line is longer than %d bytes" : "found a zero byte", QE_TRACE_LINE_BYTES - 1);
            return qe_trace_refused(reader, reader->line + length, QE_ERROR_FORMAT);
        }
        reader->line[length++] = (char)c;
    }
    if (ferror(reader->file)) {
        qe_error_set(reader->error_out, QE_ERROR_IO, NULL, "cannot read: %s", strerror(errno));
        return qe_trace_refused(reader, reader->line, QE_ERROR_IO);
    }
    if (length > 0 && reader->line[length - 1] == '\r') length--;
    reader->line[length] = '\0';
    *end_out = c == EOF && length == 0;
    return QE_OK;
}

static qe_status read_version(qe_trace_reader *reader) {
    int end;
    do {
        QE_TRY(next_line(reader, &end));
        if (end) return qe_trace_expected(reader, "`qet 1`, the first line of a trace");
    } while (qe_trace_at_end(reader));
    if (strncmp(reader->at, "qet ", 4) != 0) return qe_trace_expected(reader, "`qet 1`, the first line of a trace");
    reader->at += 4;
    if (strcspn(reader->at, " \t#") != 1 || reader->at[0] != '1')
        return qe_trace_expected(reader, "`1`: this is another version of traces");
    reader->at++;
    return qe_trace_at_end(reader) ? QE_OK : qe_trace_expected(reader, "the end of the line");
}

static qe_status read_lines(qe_trace_reader *reader) {
    int end;
    QE_TRY(read_version(reader));
    for (;;) {
        QE_TRY(next_line(reader, &end));
        if (end) return QE_OK;
        if (reader->line_number == UINT32_MAX) return qe_trace_expected(reader, "fewer lines");
        if (!qe_trace_at_end(reader)) QE_TRY(read_statement(reader));
    }
}

qe_status qe_trace_read(FILE *file, const char *path, qe_program *program, qe_error *error_out) {
    QE_ASSERT(file != NULL);
    QE_ASSERT(program != NULL);
    QE_ASSERT(program->object_count == 0);
    QE_ASSERT(program->item_count == 0);
    QE_ASSERT(program->stream_count == 0);
    qe_trace_reader reader = {.file = file, .path = path, .program = program, .error_out = error_out};
    reader.line = malloc(QE_TRACE_LINE_BYTES);
    if (reader.line == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to read a trace");
    qe_status status = read_lines(&reader);
    if (status != QE_OK) qe_program_deinit(program);
    qe_names_deinit(&reader.names);
    free(reader.line);
    return status;
}
