/* suggest.c - what the writer of an unknown name may have meant. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "config/table.h"

enum { GROUP_BYTES = 32 };

static const char *short_name(size_t index) {
    const qe_settings_row *row = qe_settings_row_at(index);
    return row->key + qe_settings_row_group_length(row) + 1;
}

static bool is_in_group(size_t index, const char *group) {
    const qe_settings_row *row = qe_settings_row_at(index);
    size_t length = qe_settings_row_group_length(row);
    return strlen(group) == length && memcmp(row->key, group, length) == 0;
}

/* The groups' names in the order of the table. Returns how many. */
static size_t list_groups(char groups[][GROUP_BYTES]) {
    size_t count = 0;
    for (size_t i = 0; i < qe_settings_count(); i++) {
        if (count > 0 && is_in_group(i, groups[count - 1])) continue;
        const qe_settings_row *row = qe_settings_row_at(i);
        snprintf(groups[count++], GROUP_BYTES, "%.*s", (int)qe_settings_row_group_length(row), row->key);
    }
    return count;
}

static void finish(qe_text_builder *text, char *remedy_out, size_t capacity) {
    char *whole = qe_text_builder_take(text);
    snprintf(remedy_out, capacity, "%s", whole ? whole : "");
    free(whole);
}

void qe_settings_suggest_group(const char *name, char *remedy_out, size_t capacity) {
    char groups[QE_SETTINGS_KEYS_MAX][GROUP_BYTES];
    const char *list[QE_SETTINGS_KEYS_MAX];
    qe_text_builder text = {0};
    size_t count = list_groups(groups);
    for (size_t i = 0; i < count; i++) list[i] = groups[i];
    const char *nearest = qe_text_nearest(name, list, count);
    size_t whole = qe_settings_row_find(name, strlen(name));
    if (whole < qe_settings_count()) {
        int length = (int)qe_settings_row_group_length(qe_settings_row_at(whole));
        qe_text_builder_append(&text, "Write two lines: \"%.*s:\" and, indented below it, \"%s: ...\". ", length, name,
                               short_name(whole));
    } else if (nearest != NULL) qe_text_builder_append(&text, "Did you mean \"%s\"? ", nearest);
    for (size_t i = 0; i < qe_settings_count() && whole == qe_settings_count(); i++)
        if (strcmp(short_name(i), name) == 0)
            qe_text_builder_append(&text, "Did you mean %s? ", qe_settings_row_at(i)->key);
    qe_text_builder_append(&text, "The groups are");
    for (size_t i = 0; i < count; i++) qe_text_builder_append(&text, "%s %s", i ? "," : "", list[i]);
    qe_text_builder_append(&text, ".");
    finish(&text, remedy_out, capacity);
}

/* The whole key that `group.name` may have been meant to be, or NULL. */
static const char *nearest_key(const char *group, const char *name) {
    const char *list[QE_SETTINGS_KEYS_MAX];
    size_t rows[QE_SETTINGS_KEYS_MAX], count = 0, total = qe_settings_count();
    char whole[2 * QE_SHOWN_BYTES];
    for (size_t i = 0; i < total; i++)
        if (strcmp(short_name(i), name) == 0) return qe_settings_row_at(i)->key; /* right name, wrong group */
    for (size_t i = 0; i < total; i++)
        if (is_in_group(i, group)) rows[count] = i, list[count++] = short_name(i);
    const char *nearest = qe_text_nearest(name, list, count);
    for (size_t i = 0; nearest != NULL && i < count; i++)
        if (list[i] == nearest) return qe_settings_row_at(rows[i])->key;
    for (size_t i = 0; i < total; i++) list[i] = qe_settings_row_at(i)->key;
    snprintf(whole, sizeof whole, "%s.%s", group, name);
    return qe_text_nearest(whole, list, total);
}

void qe_settings_suggest_key(const char *group, const char *name, char *remedy_out, size_t capacity) {
    qe_text_builder text = {0};
    const char *nearest = nearest_key(group, name);
    if (nearest != NULL) qe_text_builder_append(&text, "Did you mean %s? ", nearest);
    size_t listed = 0;
    for (size_t i = 0; i < qe_settings_count(); i++) {
        if (!is_in_group(i, group)) continue;
        if (listed == 0) qe_text_builder_append(&text, "The keys of %s are", group);
        qe_text_builder_append(&text, "%s %s", listed++ ? "," : "", short_name(i));
    }
    if (listed > 0) qe_text_builder_append(&text, ".");
    if (listed > 0 || nearest != NULL) {
        finish(&text, remedy_out, capacity);
        return;
    }
    qe_text_builder_deinit(&text);
    qe_settings_suggest_group(group, remedy_out, capacity);
}
