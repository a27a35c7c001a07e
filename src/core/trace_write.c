/* trace_write.c - a program as the text that trace_read.c takes. Versions are written absolute. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "core/effect.h"
#include "core/trace_state.h"
#include "qeffect/recipe.h"

typedef struct trace_writer {
    const qe_program *program;
    FILE *file;
    uint8_t *is_twin; /* [object_count + stream_count] an earlier one of its kind has the same name */
} trace_writer;

enum { ORDER_LINE_COUNT = 16 }; /* contributions of one `order` line */

static int needs_quotes(const char *name) {
    for (const char *at = name; *at; at++)
        if (!qe_trace_is_bare(*at)) return 1;
    return 0;
}

static void put_name(FILE *file, const char *name) {
    if (!needs_quotes(name)) {
        fputs(name, file);
        return;
    }
    fputc('"', file);
    for (const char *at = name; *at; at++) {
        unsigned char c = (unsigned char)*at;
        if (c == '"' || c == '\\') fprintf(file, "\\%c", c);
        else if (c < 0x20 || c >= 0x7f) fprintf(file, "\\x%02x", c);
        else fputc(c, file);
    }
    fputc('"', file);
}

/* Names need not differ in a program, but they do in a trace: a twin gets its number. */
static void put_unique(const trace_writer *writer, const char *name, uint32_t index, uint8_t is_twin) {
    char numbered[QE_NAME_BYTES];
    if (!is_twin) {
        put_name(writer->file, name);
        return;
    }
    snprintf(numbered, sizeof numbered, "%.80s#%u", name, index);
    put_name(writer->file, numbered);
}

static void put_object(const trace_writer *writer, uint32_t object) {
    QE_ASSERT(object < writer->program->object_count);
    put_unique(writer, writer->program->objects[object].name, object, writer->is_twin[object]);
}

static void put_stream(const trace_writer *writer, uint32_t stream) {
    const qe_program *program = writer->program;
    QE_ASSERT(stream < program->stream_count);
    put_unique(writer, program->streams[stream].name, stream, writer->is_twin[program->object_count + stream]);
}

static void put_number(const trace_writer *writer, const char *before, uint64_t number) {
    fprintf(writer->file, "%s%llu", before, (unsigned long long)number);
}

static void put_recipe(const trace_writer *writer, const char *before, uint8_t recipe) {
    if (recipe <= QE_RECIPE_FP32) fprintf(writer->file, "%s%s", before, qe_recipe_name((qe_recipe_kind)recipe));
    else put_number(writer, before, recipe);
}

static void write_key(const trace_writer *writer, const qe_object *object) {
    fputs(" weight=", writer->file);
    put_object(writer, object->weight);
    if (object->scale != QE_NONE) {
        fputs(" scale=", writer->file);
        put_object(writer, object->scale);
    }
    if (object->layouts == 0) return;
    put_number(writer, " layouts=", object->layouts);
    put_number(writer, " version=", object->key_version);
    put_number(writer, " epoch=", object->key_epoch);
    put_recipe(writer, " recipe=", object->recipe);
}

static void write_object(const trace_writer *writer, uint32_t index) {
    const qe_object *object = &writer->program->objects[index];
    fprintf(writer->file, "%s ", qe_object_kind_name(object->kind));
    put_object(writer, index);
    if (object->kind == QE_OBJECT_CACHE) write_key(writer, object);
    if (object->kind == QE_OBJECT_GRAD && object->weight != QE_NONE) {
        fputs(" weight=", writer->file);
        put_object(writer, object->weight);
    }
    if (object->kind == QE_OBJECT_SLOT && object->bytes > 0) put_number(writer, " bytes=", object->bytes);
    if (object->kind == QE_OBJECT_SLOT && object->address > 0) put_number(writer, " at=", object->address);
    if (object->kind == QE_OBJECT_BUFFER) {
        put_number(writer, " bytes=", object->bytes);
        if (object->address > 0) put_number(writer, " at=", object->address);
        if (object->counter == QE_BUFFER_WRITTEN) fputs(" written", writer->file);
        if (object->counter == QE_BUFFER_ABSENT) fputs(" absent", writer->file);
    } else if (object->kind != QE_OBJECT_CACHE && object->counter > 0) {
        put_number(writer, " counter=", object->counter);
    }
    if ((object->kind == QE_OBJECT_SCALE || object->kind == QE_OBJECT_GRAD) && object->due > 0)
        put_number(writer, " due=", object->due);
    fputc('\n', writer->file);
}

static void write_world(const trace_writer *writer) {
    static const char *const roles[] = {"compute", "comm", "caller", "host"};
    const qe_program *program = writer->program;
    for (uint32_t i = 0; i < program->stream_count; i++) {
        fputs("stream ", writer->file);
        put_stream(writer, i);
        fprintf(writer->file, " %s", roles[program->streams[i].role]);
        if (program->streams[i].order == QE_STREAM_BLOCKING) fputs(" blocking", writer->file);
        if (program->streams[i].order == QE_STREAM_LEGACY) fputs(" legacy", writer->file);
        if (program->streams[i].rank > 0) put_number(writer, " rank=", program->streams[i].rank);
        fputc('\n', writer->file);
    }
    for (uint32_t i = 0; i < program->event_count; i++) fprintf(writer->file, "event e%u\n", i);
    for (uint32_t i = 0; i < program->object_count; i++) write_object(writer, i);
}

static void write_orders(const trace_writer *writer) {
    const qe_program *program = writer->program;
    uint32_t on_line = 0;
    for (uint32_t i = 0; i < program->deposit_count; i++) {
        const qe_deposit *deposit = &program->deposits[i];
        int same = i > 0 && program->deposits[i - 1].object == deposit->object && on_line < ORDER_LINE_COUNT;
        if (!same) {
            fputs(i > 0 ? "\norder " : "order ", writer->file);
            put_object(writer, deposit->object);
            on_line = 0;
        }
        put_number(writer, " ", deposit->microbatch);
        if (deposit->use > 0) put_number(writer, "/", deposit->use);
        on_line++;
    }
    if (program->deposit_count > 0) fputc('\n', writer->file);
}

static void put_microbatch(const trace_writer *writer, uint32_t microbatch, uint32_t usual) {
    if (microbatch == usual) return;
    if (microbatch == QE_NONE) fputs(",mb=none", writer->file);
    else put_number(writer, ",mb=", microbatch);
}

static void write_cache_effect(const trace_writer *writer, const qe_effect *effect, const qe_object *object) {
    const qe_object *objects = writer->program->objects;
    uint64_t epoch = effect->epoch + (object->scale == QE_NONE ? 0 : objects[object->scale].counter);
    put_number(writer, "@", effect->version + objects[object->weight].counter);
    put_number(writer, ",epoch=", epoch);
    put_number(writer, ",layouts=", effect->layouts);
    put_recipe(writer, ",recipe=", effect->recipe);
}

static void write_slot_effect(const trace_writer *writer, const qe_effect *effect, const qe_item *item) {
    put_number(writer, "@", effect->version + writer->program->objects[effect->object].counter);
    if (effect->kind == QE_EFFECT_SLOT_BORROW && effect->write) fputs(",write", writer->file);
    if (effect->stage != item->stage) put_number(writer, ",stage=", effect->stage);
    put_microbatch(writer, effect->microbatch, item->microbatch);
}

static void write_buffer_effect(const trace_writer *writer, const qe_effect *effect) {
    if (effect->kind != QE_EFFECT_BUFFER_READ && effect->kind != QE_EFFECT_BUFFER_WRITE) return;
    put_number(writer, "[", effect->begin);
    put_number(writer, ",", effect->end);
    fputc(')', writer->file);
    if (effect->rows > 1) {
        put_number(writer, "*", effect->rows);
        put_number(writer, "/", effect->pitch);
    }
    if (effect->version > 0) put_number(writer, "@", effect->version);
}

static void write_deposit(const trace_writer *writer, const qe_effect *effect, const qe_item *item) {
    if (effect->write) fputs(",set", writer->file);
    if (effect->use > 0) put_number(writer, ",use=", effect->use);
    put_microbatch(writer, effect->microbatch, item->microbatch);
}

static void write_graph_effect(const trace_writer *writer, const qe_effect *effect, const qe_object *object) {
    if (effect->kind == QE_EFFECT_GRAPH_BEGIN) return;
    put_number(writer, "@", effect->version + object->counter);
    if (effect->kind != QE_EFFECT_GRAPH_LAUNCH || effect->use == QE_FROZEN_NOTHING) return;
    fprintf(writer->file, ",%s", qe_frozen_name((qe_frozen)effect->use));
    put_number(writer, "=", effect->begin);
    put_number(writer, "/", effect->end);
}

static void write_draw(const trace_writer *writer, const qe_effect *effect, const qe_item *item,
                       const qe_object *object) {
    put_number(writer, "@", effect->version + object->counter);
    if (effect->end != 1) put_number(writer, ",count=", effect->end);
    if (effect->write) fputs(",again", writer->file);
    put_microbatch(writer, effect->microbatch, item->microbatch);
}

static void write_effect(const trace_writer *writer, const qe_effect *effect, const qe_item *item) {
    const qe_object *object = &writer->program->objects[effect->object];
    fprintf(writer->file, " %s ", qe_effect_kind_name((qe_effect_kind)effect->kind));
    put_object(writer, effect->object);
    switch (object->kind) {
    case QE_OBJECT_SCALE:
    case QE_OBJECT_WEIGHT: put_number(writer, "@", effect->version + object->counter); break;
    case QE_OBJECT_SLOT: write_slot_effect(writer, effect, item); break;
    case QE_OBJECT_CACHE: write_cache_effect(writer, effect, object); break;
    case QE_OBJECT_GRAD:
        if (effect->kind == QE_EFFECT_GRAD_DEPOSIT) write_deposit(writer, effect, item);
        break;
    case QE_OBJECT_BUFFER: write_buffer_effect(writer, effect); break;
    case QE_OBJECT_GRAPH: write_graph_effect(writer, effect, object); break;
    case QE_OBJECT_RNG: write_draw(writer, effect, item, object); break;
    case QE_OBJECT_KINDS: break;
    }
}

static void put_place(const trace_writer *writer, const qe_item *item) {
    if (item->stage > 0) put_number(writer, " stage=", item->stage);
    if (item->microbatch != QE_NONE) put_number(writer, " mb=", item->microbatch);
}

static void write_op(const trace_writer *writer, const qe_item *item) {
    fputs("op ", writer->file);
    put_name(writer->file, writer->program->labels[item->label].text);
    fputs(" on ", writer->file);
    put_stream(writer, item->stream);
    put_place(writer, item);
    if (item->effect_count > 0) fputs(" :", writer->file);
    for (uint32_t i = 0; i < item->effect_count; i++)
        write_effect(writer, &writer->program->effects[item->first_effect + i], item);
}

static void write_item(const trace_writer *writer, const qe_item *item) {
    switch ((qe_item_kind)item->kind) {
    case QE_ITEM_OP: write_op(writer, item); break;
    case QE_ITEM_RECORD:
    case QE_ITEM_WAIT:
        fprintf(writer->file, "%s e%u on ", item->kind == QE_ITEM_RECORD ? "record" : "wait", item->event);
        put_stream(writer, item->stream);
        put_place(writer, item);
        break;
    case QE_ITEM_SYNC_EVENT:
        fprintf(writer->file, "sync event e%u", item->event);
        if (item->rank > 0) put_number(writer, " rank=", item->rank);
        put_place(writer, item);
        break;
    case QE_ITEM_SYNC_STREAM:
        fputs("sync stream ", writer->file);
        put_stream(writer, item->stream);
        put_place(writer, item);
        break;
    case QE_ITEM_SYNC_DEVICE:
        fputs("sync device", writer->file);
        if (item->rank > 0) put_number(writer, " rank=", item->rank);
        put_place(writer, item);
        break;
    case QE_ITEM_STEP_BEGIN: fputs("step begin", writer->file); break;
    case QE_ITEM_STEP_END: fputs("step end", writer->file); break;
    case QE_ITEM_DESTROY: fprintf(writer->file, "destroy e%u", item->event); break;
    case QE_ITEM_KINDS: break;
    }
    fputc('\n', writer->file);
}

static qe_status find_twin(qe_names *names, uint32_t space, const char *name, uint32_t index, uint8_t *is_twin_out) {
    *is_twin_out = qe_names_find(names, space, name) != QE_NONE;
    return *is_twin_out ? QE_OK : qe_names_add(names, space, name, index);
}

static qe_status find_twins(const qe_program *program, uint8_t *is_twin) {
    qe_names names = {0};
    qe_status status = QE_OK;
    for (uint32_t i = 0; i < program->object_count && status == QE_OK; i++)
        status = find_twin(&names, (uint32_t)program->objects[i].kind, program->objects[i].name, i, &is_twin[i]);
    for (uint32_t i = 0; i < program->stream_count && status == QE_OK; i++)
        status = find_twin(&names, QE_NAMES_STREAM, program->streams[i].name, i, &is_twin[program->object_count + i]);
    qe_names_deinit(&names);
    return status;
}

qe_status qe_trace_write(const qe_program *program, FILE *file, qe_error *error_out) {
    QE_ASSERT(program != NULL);
    QE_ASSERT(file != NULL);
    trace_writer writer = {program, file, calloc((size_t)program->object_count + program->stream_count + 1, 1)};
    if (writer.is_twin == NULL || find_twins(program, writer.is_twin) != QE_OK) {
        free(writer.is_twin);
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to write a trace");
    }
    fputs("qet 1\n", file);
    write_world(&writer);
    write_orders(&writer);
    for (uint32_t i = 0; i < program->item_count; i++) write_item(&writer, &program->items[i]);
    free(writer.is_twin);
    if (fflush(file) == 0 && !ferror(file)) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_IO, NULL, "cannot write the trace: %s", strerror(errno));
}
