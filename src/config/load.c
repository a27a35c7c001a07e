/* load.c - YAML events to settings. The shape is fixed: a map of groups, each a map of keys to scalars; so there is no
 * tree, no recursion, and the first event that does not fit is the error. Anchors, aliases, tags, directives and
 * further documents are refused: they say things that settings do not mean. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <yaml.h>

#include "base/assert.h"
#include "config/table.h"

typedef struct reader {
    yaml_parser_t parser;
    yaml_event_t event; /* the current one; zeroed when there is none */
    const char *path;
    const unsigned char *bytes;
    size_t size_bytes;
    qe_settings settings;
    uint32_t group_line[QE_SETTINGS_KEYS_MAX]; /* by the first row of the group; 0: not seen */
    qe_error *error_out;
} reader;

static qe_settings_place place_of(const yaml_mark_t *mark) {
    /* Files are at most 1 MiB, so both fit. */
    return (qe_settings_place){(uint32_t)mark->line + 1, (uint32_t)mark->column + 1};
}

/* Places an error that qe_error_set filled at the current event. */
static qe_status place(reader *from, qe_status status) {
    qe_settings_place at = place_of(&from->event.start_mark);
    qe_error_place(from->error_out, from->path, at.line, at.column);
    return status;
}

static qe_status refuse_memory(qe_error *error_out) {
    return qe_error_set(error_out, QE_ERROR_MEMORY, "Free some memory.", "no memory to read the configuration");
}

/* libyaml's own refusal. Encoding errors carry an offset instead of a mark. */
static qe_status refuse_syntax(reader *from) {
    const yaml_parser_t *parser = &from->parser;
    qe_settings_place at = place_of(&parser->problem_mark);
    if (parser->error == YAML_MEMORY_ERROR)
        return refuse_memory(from->error_out);
    if (parser->error == YAML_READER_ERROR) {
        at = (qe_settings_place){1, 1};
        for (size_t i = 0; i < parser->problem_offset && i < from->size_bytes; i++) {
            at.column++;
            if (from->bytes[i] == '\n') at = (qe_settings_place){at.line + 1, 1};
        }
    }
    qe_error_set(from->error_out, QE_ERROR_FORMAT,
                 "Compare with examples/quickstart.yaml: groups such as \"model:\", keys indented by two spaces.",
                 "not YAML: %s%s%s", parser->problem ? parser->problem : "unreadable", parser->context ? " " : "",
                 parser->context ? parser->context : "");
    qe_error_place(from->error_out, from->path, at.line, at.column);
    return QE_ERROR_FORMAT;
}

static qe_status refuse_extra(reader *from, const char *what) {
    return place(from, qe_error_set(from->error_out, QE_ERROR_FORMAT, "Write the value out, without it.",
                                    "found %s, expected plain keys and values", what));
}

/* Anchors, aliases and tags, wherever they stand. */
static qe_status judge_extras(reader *from) {
    const yaml_event_t *event = &from->event;
    const yaml_char_t *anchor = NULL, *tag = NULL;
    if (event->type == YAML_ALIAS_EVENT) return refuse_extra(from, "an alias (*)");
    if (event->type == YAML_SCALAR_EVENT) anchor = event->data.scalar.anchor, tag = event->data.scalar.tag;
    if (event->type == YAML_MAPPING_START_EVENT)
        anchor = event->data.mapping_start.anchor, tag = event->data.mapping_start.tag;
    if (event->type == YAML_SEQUENCE_START_EVENT)
        anchor = event->data.sequence_start.anchor, tag = event->data.sequence_start.tag;
    if (anchor != NULL) return refuse_extra(from, "an anchor (&)");
    if (tag != NULL) return refuse_extra(from, "a tag (!)");
    return QE_OK;
}

static qe_status next(reader *from) {
    yaml_event_delete(&from->event);
    memset(&from->event, 0, sizeof from->event);
    if (!yaml_parser_parse(&from->parser, &from->event)) return refuse_syntax(from);
    return judge_extras(from);
}

/* The current event in words, for "found ...". */
static void describe(const reader *from, char text[QE_SHOWN_BYTES + 16]) {
    const yaml_event_t *event = &from->event;
    char shown[QE_SHOWN_BYTES];
    if (event->type == YAML_MAPPING_START_EVENT) snprintf(text, QE_SHOWN_BYTES + 16, "a map");
    else if (event->type == YAML_SEQUENCE_START_EVENT) snprintf(text, QE_SHOWN_BYTES + 16, "a list");
    else if (event->type == YAML_SCALAR_EVENT && event->data.scalar.length > 0) {
        qe_settings_show((const char *)event->data.scalar.value, event->data.scalar.length, shown);
        snprintf(text, QE_SHOWN_BYTES + 16, "\"%s\"", shown);
    } else snprintf(text, QE_SHOWN_BYTES + 16, "nothing");
}

static qe_status refuse_empty(reader *from) {
    qe_error_set(from->error_out, QE_ERROR_CONFIG, "Start from examples/quickstart.yaml.",
                 "the configuration is empty, expected groups such as \"model:\"");
    qe_error_place(from->error_out, from->path, 0, 0);
    return QE_ERROR_CONFIG;
}

static qe_status refuse_shape(reader *from, const char *expected, const char *remedy) {
    char found[QE_SHOWN_BYTES + 16];
    describe(from, found);
    return place(from, qe_error_set(from->error_out, QE_ERROR_CONFIG, remedy, "found %s, expected %s", found,
                                    expected));
}

static qe_status refuse_twice(reader *from, const char *key, uint32_t first_line) {
    return place(from, qe_error_set(from->error_out, QE_ERROR_CONFIG, "Keep one of them.",
                                    "%s is set a second time; the first is in line %u", key, (unsigned)first_line));
}

static qe_status refuse_key(reader *from, const char *group, const char *name) {
    char remedy[QE_ERROR_TEXT_BYTES];
    qe_settings_suggest_key(group, name, remedy, sizeof remedy);
    return place(from, qe_error_set(from->error_out, QE_ERROR_CONFIG, remedy, "unknown key %s.%s", group, name));
}

/* The value of a row: the next event must be a scalar it takes. */
static qe_status read_value(reader *from, size_t row) {
    const qe_settings_row *about = qe_settings_row_at(row);
    QE_TRY(next(from));
    if (from->event.type != YAML_SCALAR_EVENT) {
        char found[QE_SHOWN_BYTES + 16], remedy[QE_SHOWN_BYTES + 64];
        describe(from, found);
        snprintf(remedy, sizeof remedy, "The default is %s.", about->initial);
        return place(from, qe_error_set(from->error_out, QE_ERROR_CONFIG, remedy, "%s: found %s, expected %s%s",
                                        about->key, found, about->type == QE_ROW_WORD ? "one of " : "", about->kind));
    }
    qe_scalar scalar = {(const char *)from->event.data.scalar.value, from->event.data.scalar.length,
                        from->event.data.scalar.style != YAML_PLAIN_SCALAR_STYLE};
    qe_status status = qe_settings_assign(&from->settings, row, &scalar, QE_ERROR_CONFIG, from->error_out);
    return status == QE_OK ? QE_OK : place(from, status);
}

/* The current event is a key of the group. */
static qe_status read_key(reader *from, const char *group) {
    char name[QE_SHOWN_BYTES], key[2 * QE_SHOWN_BYTES];
    if (from->event.type != YAML_SCALAR_EVENT) return refuse_shape(from, "a key", "Write \"key: value\".");
    qe_settings_show((const char *)from->event.data.scalar.value, from->event.data.scalar.length, name);
    int length = snprintf(key, sizeof key, "%s.%s", group, name);
    size_t row = qe_settings_row_find(key, (size_t)length);
    if (row == qe_settings_count()) return refuse_key(from, group, name);
    qe_settings_place *at = &from->settings.place[row];
    if (at->line != QE_SETTINGS_LINE_DEFAULT) return refuse_twice(from, key, at->line);
    *at = place_of(&from->event.start_mark);
    return read_value(from, row);
}

/* The first row of a group, or qe_settings_count(). */
static size_t find_group(const char *name) {
    size_t length = strlen(name), count = qe_settings_count();
    for (size_t i = 0; i < count; i++) {
        const qe_settings_row *row = qe_settings_row_at(i);
        if (qe_settings_row_group_length(row) == length && memcmp(row->key, name, length) == 0) return i;
    }
    return count;
}

/* The current event is the name of a group. */
static qe_status read_group(reader *from) {
    char name[QE_SHOWN_BYTES], remedy[QE_ERROR_TEXT_BYTES];
    if (from->event.type != YAML_SCALAR_EVENT)
        return refuse_shape(from, "the name of a group", "Write a line such as \"model:\".");
    qe_settings_show((const char *)from->event.data.scalar.value, from->event.data.scalar.length, name);
    size_t group = find_group(name);
    if (group == qe_settings_count()) {
        qe_settings_suggest_group(name, remedy, sizeof remedy);
        return place(from, qe_error_set(from->error_out, QE_ERROR_CONFIG, remedy, "unknown key %s", name));
    }
    if (from->group_line[group] != 0) return refuse_twice(from, name, from->group_line[group]);
    from->group_line[group] = place_of(&from->event.start_mark).line;
    QE_TRY(next(from));
    snprintf(remedy, sizeof remedy, "Indent the keys of %s below it, or remove the line.", name);
    if (from->event.type != YAML_MAPPING_START_EVENT) return refuse_shape(from, "keys and values of the group", remedy);
    for (;;) {
        QE_TRY(next(from));
        if (from->event.type == YAML_MAPPING_END_EVENT) return QE_OK;
        QE_TRY(read_key(from, name));
    }
}

static qe_status read_top(reader *from) {
    size_t groups = 0;
    if (from->event.type == YAML_SCALAR_EVENT && from->event.data.scalar.length == 0) return refuse_empty(from);
    if (from->event.type != YAML_MAPPING_START_EVENT)
        return refuse_shape(from, "groups such as \"model:\"", "Start from examples/quickstart.yaml.");
    for (;; groups++) {
        QE_TRY(next(from));
        if (from->event.type == YAML_MAPPING_END_EVENT) return groups > 0 ? QE_OK : refuse_empty(from);
        QE_TRY(read_group(from));
    }
}

static qe_status read_stream(reader *from) {
    QE_TRY(next(from));
    QE_ASSERT(from->event.type == YAML_STREAM_START_EVENT);
    QE_TRY(next(from));
    if (from->event.type == YAML_STREAM_END_EVENT) return refuse_empty(from);
    if (from->event.data.document_start.version_directive != NULL
        || from->event.data.document_start.tag_directives.start != from->event.data.document_start.tag_directives.end)
        return refuse_extra(from, "a directive (%)");
    QE_TRY(next(from));
    QE_TRY(read_top(from));
    QE_TRY(next(from));
    QE_ASSERT(from->event.type == YAML_DOCUMENT_END_EVENT);
    QE_TRY(next(from));
    if (from->event.type == YAML_STREAM_END_EVENT) return QE_OK;
    return place(from, qe_error_set(from->error_out, QE_ERROR_FORMAT, "Keep one document in a file.",
                                    "found a second document (---), expected the end of the file"));
}

static qe_status refuse_file(qe_error *error_out, const char *path, const char *remedy, const char *what) {
    qe_error_set(error_out, QE_ERROR_IO, remedy, "cannot read the configuration: %s", what);
    qe_error_place(error_out, path, 0, 0);
    return QE_ERROR_IO;
}

/* Reads up to the limit and one byte more. */
static qe_status read_bytes(int descriptor, const char *path, unsigned char *bytes, size_t *size_out,
                            qe_error *error_out) {
    struct stat kind;
    static const char remedy[] = "Name a YAML file, such as examples/quickstart.yaml.";
    if (fstat(descriptor, &kind) != 0) return refuse_file(error_out, path, remedy, strerror(errno));
    if (S_ISDIR(kind.st_mode)) return refuse_file(error_out, path, remedy, "it is a directory");
    if (!S_ISREG(kind.st_mode)) return refuse_file(error_out, path, remedy, "it is not a regular file");
    size_t done = 0;
    while (done <= QE_SETTINGS_FILE_BYTES_MAX) {
        ssize_t got = read(descriptor, bytes + done, QE_SETTINGS_FILE_BYTES_MAX + 1 - done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return refuse_file(error_out, path, remedy, strerror(errno));
        if (got == 0) return *size_out = done, QE_OK;
        done += (size_t)got;
    }
    return refuse_file(error_out, path, remedy, "it is larger than 1 MiB, which no configuration is");
}

static qe_status parse(const char *path, const unsigned char *bytes, size_t size_bytes, qe_settings *settings_out,
                       qe_error *error_out) {
    reader from = {.path = path, .bytes = bytes, .size_bytes = size_bytes, .error_out = error_out};
    if (strlen(path) >= QE_SETTINGS_TEXT_BYTES)
        return refuse_file(error_out, path, "Use a shorter path.", "its path is too long");
    if (!yaml_parser_initialize(&from.parser)) return refuse_memory(error_out);
    yaml_parser_set_input_string(&from.parser, bytes, size_bytes);
    qe_settings_default(&from.settings);
    snprintf(from.settings.source, sizeof from.settings.source, "%s", path);
    qe_status status = read_stream(&from);
    yaml_event_delete(&from.event);
    yaml_parser_delete(&from.parser);
    if (status == QE_OK) *settings_out = from.settings;
    return status;
}

qe_status qe_settings_load(const char *path, qe_settings *settings_out, qe_error *error_out) {
    /* O_NONBLOCK: opening a pipe must not wait for a writer. */
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0)
        return refuse_file(error_out, path, errno == EACCES ? "Allow reading it (chmod +r)."
                           : "Name a YAML file, such as examples/quickstart.yaml.", strerror(errno));
    size_t size_bytes = 0;
    unsigned char *bytes = malloc(QE_SETTINGS_FILE_BYTES_MAX + 1);
    qe_status status = bytes ? read_bytes(descriptor, path, bytes, &size_bytes, error_out)
                             : refuse_memory(error_out);
    close(descriptor);
    if (status == QE_OK) status = parse(path, bytes, size_bytes, settings_out, error_out);
    free(bytes);
    return status;
}
