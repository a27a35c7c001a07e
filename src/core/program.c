/* program.c - growable arrays of submitted work. Every reference is checked where it is added, so whoever reads a
 * program (ledger, trace) may index without asking again. */
#include "qeffect/program.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "core/effect.h"

enum { FIRST_CAPACITY = 16 };

void qe_program_init(qe_program *program) {
    QE_ASSERT(program != NULL);
    memset(program, 0, sizeof *program);
}

void qe_program_deinit(qe_program *program) {
    QE_ASSERT(program != NULL);
    free(program->objects);
    free(program->streams);
    free(program->labels);
    free(program->items);
    free(program->effects);
    free(program->deposits);
    qe_program_init(program);
}

/* A copy of `count` elements; a copy of none takes nothing. Returns 0 without memory. */
static int copy_array(const void *from, uint32_t count, size_t element_bytes, void *to, uint32_t *capacity) {
    if (count == 0) return 1;
    void *copy = malloc((size_t)count * element_bytes);
    if (copy == NULL) return 0;
    memcpy(copy, from, (size_t)count * element_bytes);
    memcpy(to, &copy, sizeof copy);
    *capacity = count;
    return 1;
}

qe_status qe_program_copy(const qe_program *program, qe_program *copy_out, qe_error *error_out) {
    QE_ASSERT(program != NULL);
    QE_ASSERT(copy_out->object_capacity == 0);
    qe_program copy;
    qe_program_init(&copy);
#define COPY(array, kind) \
    copy_array(program->array, program->kind##_count, sizeof *copy.array, &copy.array, &copy.kind##_capacity)
    int copied = COPY(objects, object) && COPY(streams, stream) && COPY(labels, label) && COPY(items, item) &&
                 COPY(effects, effect) && COPY(deposits, deposit);
#undef COPY
    if (!copied) {
        qe_program_deinit(&copy);
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to copy a program");
    }
    copy.object_count = program->object_count;
    copy.stream_count = program->stream_count;
    copy.label_count = program->label_count;
    copy.item_count = program->item_count;
    copy.effect_count = program->effect_count;
    copy.deposit_count = program->deposit_count;
    copy.event_count = program->event_count;
    *copy_out = copy;
    return QE_OK;
}

/* Makes room for `more` behind `count`. `array` is the address of a pointer to elements of `element_bytes`. */
static qe_status grow(void *array, uint32_t *capacity, uint32_t count, uint32_t more, size_t element_bytes,
                      qe_error *error_out) {
    QE_ASSERT(count <= *capacity);
    if (more > QE_PROGRAM_MAX - count)
        return qe_error_set(error_out, QE_ERROR_LIMIT, "split the program",
                            "more than %u things of one kind in a program", (unsigned)QE_PROGRAM_MAX);
    if (count + more <= *capacity) return QE_OK;
    uint32_t wanted = *capacity ? *capacity : FIRST_CAPACITY;
    while (wanted < count + more) wanted *= 2;
    void *old;
    memcpy(&old, array, sizeof old);
    void *grown = realloc(old, (size_t)wanted * element_bytes);
    if (grown == NULL)
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a program of %u things", (unsigned)wanted);
    memcpy(array, &grown, sizeof grown);
    *capacity = wanted;
    return QE_OK;
}

static int is_name(const char *name) {
    if (name == NULL) return 0;
    size_t length = strnlen(name, QE_NAME_BYTES);
    return length > 0 && length < QE_NAME_BYTES;
}

static qe_status refuse_name(qe_error *error_out) {
    return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "a name must have 1 to %d bytes", QE_NAME_BYTES - 1);
}

static int is_kind(const qe_program *program, uint32_t object, qe_object_kind kind) {
    return object < program->object_count && program->objects[object].kind == kind;
}

static qe_status check_object(const qe_program *program, const qe_object *object, qe_error *error_out) {
    if (!is_name(object->name)) return refuse_name(error_out);
    if ((unsigned)object->kind >= QE_OBJECT_KINDS)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "object %s: kind %d does not exist", object->name,
                            (int)object->kind);
    if (object->kind == QE_OBJECT_BUFFER && object->counter > QE_BUFFER_ABSENT)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "buffer %s: beginning %llu does not exist",
                            object->name, (unsigned long long)object->counter);
    if (object->address > UINT64_MAX - object->bytes)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "object %s reaches past the last address",
                            object->name);
    int owes_weight = object->kind == QE_OBJECT_CACHE;
    if (object->kind == QE_OBJECT_GRAD && object->weight != QE_NONE) owes_weight = 1;
    if (owes_weight && !is_kind(program, object->weight, QE_OBJECT_WEIGHT))
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "add the weight first", "%s %s: object %u is not a weight",
                            qe_object_kind_name(object->kind), object->name, object->weight);
    int owes_scale = object->kind == QE_OBJECT_CACHE && object->scale != QE_NONE;
    if (owes_scale && !is_kind(program, object->scale, QE_OBJECT_SCALE))
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "add the scale first", "cache %s: object %u is not a scale",
                            object->name, object->scale);
    return QE_OK;
}

qe_status qe_program_add_object(qe_program *program, const qe_object *object, uint32_t *index_out,
                                qe_error *error_out) {
    QE_ASSERT(program != NULL);
    QE_ASSERT(object != NULL);
    QE_TRY(check_object(program, object, error_out));
    QE_TRY(grow(&program->objects, &program->object_capacity, program->object_count, 1, sizeof *object, error_out));
    program->objects[program->object_count] = *object;
    if (index_out != NULL) *index_out = program->object_count;
    program->object_count++;
    return QE_OK;
}

qe_status qe_program_add_stream(qe_program *program, const char *name, qe_stream_role role, uint32_t *index_out,
                                qe_error *error_out) {
    QE_ASSERT(program != NULL);
    if (!is_name(name)) return refuse_name(error_out);
    if ((unsigned)role > QE_STREAM_HOST)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "stream %s: role %d does not exist", name, (int)role);
    if (program->stream_count == QE_PROGRAM_STREAMS_MAX)
        return qe_error_set(error_out, QE_ERROR_LIMIT, NULL, "stream %s: a program has at most %d streams", name,
                            QE_PROGRAM_STREAMS_MAX);
    QE_TRY(grow(&program->streams, &program->stream_capacity, program->stream_count, 1, sizeof *program->streams,
                error_out));
    qe_stream_info *stream = &program->streams[program->stream_count];
    memset(stream, 0, sizeof *stream);
    memcpy(stream->name, name, strlen(name));
    stream->role = role;
    if (index_out != NULL) *index_out = program->stream_count;
    program->stream_count++;
    return QE_OK;
}

static uint32_t find_label(const qe_program *program, const char *text) {
    for (uint32_t i = 0; i < program->label_count; i++)
        if (strcmp(program->labels[i].text, text) == 0) return i;
    return QE_NONE;
}

qe_status qe_program_add_label(qe_program *program, const char *text, uint32_t *index_out, qe_error *error_out) {
    QE_ASSERT(program != NULL);
    if (!is_name(text)) return refuse_name(error_out);
    uint32_t found = find_label(program, text);
    if (found == QE_NONE) {
        if (program->label_count == QE_LABELS_MAX)
            return qe_error_set(error_out, QE_ERROR_LIMIT, NULL, "label %s: a program has at most %d labels", text,
                                QE_LABELS_MAX);
        QE_TRY(grow(&program->labels, &program->label_capacity, program->label_count, 1, sizeof *program->labels,
                    error_out));
        found = program->label_count++;
        memset(&program->labels[found], 0, sizeof program->labels[found]);
        memcpy(program->labels[found].text, text, strlen(text));
    }
    QE_ASSERT(found < program->label_count);
    if (index_out != NULL) *index_out = found;
    return QE_OK;
}

static qe_status check_effect(const qe_program *program, const qe_effect *effect, qe_error *error_out) {
    if (effect->kind >= QE_EFFECT_KINDS)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "effect kind %u does not exist", effect->kind);
    if (!is_kind(program, effect->object, qe_effect_object_kind(effect->kind)))
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "effect %s: object %u is not a %s",
                            qe_effect_kind_name((qe_effect_kind)effect->kind), effect->object,
                            qe_object_kind_name(qe_effect_object_kind(effect->kind)));
    if (effect->kind == QE_EFFECT_GRAPH_LAUNCH && effect->use >= QE_FROZEN_KINDS)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "graph.launch: nothing of kind %u is frozen",
                            effect->use);
    if (qe_effect_has_rows(effect) && effect->rows > QE_ROWS_MAX)
        return qe_error_set(error_out, QE_ERROR_LIMIT, "name the bytes from the first to the last",
                            "a range of %u rows; it has at most %d", effect->rows, QE_ROWS_MAX);
    return QE_OK;
}

static int has_stream(uint8_t kind) {
    return kind == QE_ITEM_OP || kind == QE_ITEM_RECORD || kind == QE_ITEM_WAIT || kind == QE_ITEM_SYNC_STREAM;
}

static int has_event(uint8_t kind) {
    return kind == QE_ITEM_RECORD || kind == QE_ITEM_WAIT || kind == QE_ITEM_SYNC_EVENT ||
           kind == QE_ITEM_DESTROY;
}

qe_status qe_program_check_item(const qe_program *program, const qe_item *item, const qe_effect *effects,
                                uint32_t count, qe_error *error_out) {
    QE_ASSERT(program != NULL);
    QE_ASSERT(item != NULL);
    if (item->kind >= QE_ITEM_KINDS)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "item kind %u does not exist", item->kind);
    if (has_stream(item->kind) && item->stream >= program->stream_count)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "stream %u does not exist", item->stream);
    if (has_event(item->kind) && item->event >= program->event_count)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "event %u does not exist", item->event);
    if (item->rank >= QE_RANKS_MAX)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "rank %u does not exist", item->rank);
    if (item->kind == QE_ITEM_OP && item->label >= program->label_count)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "label %u does not exist", item->label);
    if (item->kind != QE_ITEM_OP && count > 0)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "only an op has effects");
    if (count > QE_EFFECTS_MAX)
        return qe_error_set(error_out, QE_ERROR_LIMIT, "split the op", "%u effects; an op has at most %d", count,
                            QE_EFFECTS_MAX);
    QE_ASSERT(count == 0 || effects != NULL);
    for (uint32_t i = 0; i < count; i++) QE_TRY(check_effect(program, &effects[i], error_out));
    return QE_OK;
}

qe_status qe_program_add_item(qe_program *program, const qe_item *item, const qe_effect *effects, uint32_t count,
                              uint32_t *index_out, qe_error *error_out) {
    QE_TRY(qe_program_check_item(program, item, effects, count, error_out));
    QE_TRY(grow(&program->items, &program->item_capacity, program->item_count, 1, sizeof *item, error_out));
    QE_TRY(grow(&program->effects, &program->effect_capacity, program->effect_count, count, sizeof *effects,
                error_out));
    qe_item *added = &program->items[program->item_count];
    *added = *item;
    added->first_effect = program->effect_count;
    added->effect_count = (uint8_t)count;
    if (count > 0) memcpy(&program->effects[program->effect_count], effects, count * sizeof *effects);
    program->effect_count += count;
    if (index_out != NULL) *index_out = program->item_count;
    program->item_count++;
    return QE_OK;
}

qe_status qe_program_add_deposit(qe_program *program, const qe_deposit *deposit, qe_error *error_out) {
    QE_ASSERT(program != NULL);
    QE_ASSERT(deposit != NULL);
    if (!is_kind(program, deposit->object, QE_OBJECT_GRAD))
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "object %u is not a grad", deposit->object);
    QE_TRY(grow(&program->deposits, &program->deposit_capacity, program->deposit_count, 1, sizeof *deposit,
                error_out));
    program->deposits[program->deposit_count++] = *deposit;
    return QE_OK;
}

uint32_t qe_program_add_event(qe_program *program) {
    QE_ASSERT(program != NULL);
    QE_ASSERT(program->event_count < QE_PROGRAM_MAX);
    return program->event_count++;
}
