/* checkpoint_files.h - for tests: a folder, a small checkpoint in it, and hands that damage files. */
#ifndef QE_TESTS_CHECKPOINT_FILES_H
#define QE_TESTS_CHECKPOINT_FILES_H

#include <dirent.h>
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/hash.h"
#include "qeffect/checkpoint.h"

#define assert_says(text, part) \
    do { if (strstr((text), (part)) == NULL) fail_msg("\"%s\" does not say \"%s\"", (text), (part)); } while (0)

enum { FOLDER_BYTES = 64, PLACE_BYTES = 256 };
#define RUN_A "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
#define RUN_B "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"

typedef struct scene {
    char folder[FOLDER_BYTES];
    qe_error error;
    qe_rule rule;
} scene;

static inline int scene_setup(void **state) {
    scene *s = calloc(1, sizeof *s);
    if (s == NULL) return -1;
    snprintf(s->folder, sizeof s->folder, "/tmp/qe-checkpoint-XXXXXX");
    if (mkdtemp(s->folder) == NULL) return -1;
    *state = s;
    return 0;
}

/* Removes a folder and all below it; returns how many entries there were. */
static inline int scene_clear(const char *folder) {
    int count = 0;
    DIR *directory = opendir(folder);
    if (directory == NULL) return 0;
    for (struct dirent *one = readdir(directory); one != NULL; one = readdir(directory)) {
        char path[1024];
        struct stat kind;
        if (strcmp(one->d_name, ".") == 0 || strcmp(one->d_name, "..") == 0) continue;
        int length = snprintf(path, sizeof path, "%s/%s", folder, one->d_name);
        if (length < 0 || (size_t)length >= sizeof path) continue;
        count++;
        if (lstat(path, &kind) == 0 && S_ISDIR(kind.st_mode)) count += scene_clear(path);
        else unlink(path);
    }
    closedir(directory);
    rmdir(folder);
    return count;
}

static inline int scene_teardown(void **state) {
    scene *s = *state;
    scene_clear(s->folder);
    free(s);
    return 0;
}

/* Entries of the folder, hidden ones too. */
static inline int scene_entries(const scene *s) {
    int count = -2;
    DIR *directory = opendir(s->folder);
    assert_non_null(directory);
    while (readdir(directory) != NULL) count++;
    closedir(directory);
    return count;
}

static inline void scene_place(const scene *s, const char *name, char place[PLACE_BYTES]) {
    int length = snprintf(place, PLACE_BYTES, "%s/%s", s->folder, name);
    assert_true(length > 0 && length < PLACE_BYTES);
}

/* The bytes of a file of the folder, one more for a terminator. The caller frees. */
static inline char *scene_read(const scene *s, const char *name, size_t *bytes_out) {
    char place[PLACE_BYTES];
    scene_place(s, name, place);
    FILE *file = fopen(place, "rb");
    if (file == NULL) fail_msg("no %s", place);
    fseek(file, 0, SEEK_END);
    long bytes = ftell(file);
    rewind(file);
    char *content = calloc((size_t)bytes + 1, 1);
    assert_non_null(content);
    assert_int_equal(fread(content, 1, (size_t)bytes, file), bytes);
    fclose(file);
    *bytes_out = (size_t)bytes;
    return content;
}

static inline void scene_write(const scene *s, const char *name, const void *content, size_t bytes) {
    char place[PLACE_BYTES];
    scene_place(s, name, place);
    unlink(place);
    FILE *file = fopen(place, "wb");
    if (file == NULL) fail_msg("%s: %s", place, strerror(errno));
    assert_int_equal(fwrite(content, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

/* Replaces a text in a manifest and gives it a right hash again: what somebody does who knows how. */
static inline void scene_forge(const scene *s, const char *name, const char *old_text, const char *new_text) {
    static const char seal[] = ",\n \"manifest_xxh3_128\": \"";
    size_t bytes = 0;
    char *text = scene_read(s, name, &bytes), digest[QE_HASH_TEXT_BYTES];
    char *end = strstr(text, seal);
    assert_non_null(end);
    *end = 0;
    char *at = strstr(text, old_text);
    if (at == NULL) fail_msg("%s has no %s", name, old_text);
    size_t room = strlen(text) + strlen(new_text) + 128;
    char *forged = calloc(room, 1);
    assert_non_null(forged);
    snprintf(forged, room, "%.*s%s%s", (int)(at - text), text, new_text, at + strlen(old_text));
    size_t length = strlen(forged);
    qe_hash_text(qe_hash_bytes(forged, length), digest);
    snprintf(forged + length, room - length, "%s%s\"\n}\n", seal, digest);
    scene_write(s, name, forged, strlen(forged));
    free(forged);
    free(text);
}

static inline void scene_must(scene *s, qe_status status, const char *what) {
    if (status != QE_OK) fail_msg("%s: %s: %s", what, qe_status_name(status), s->error.message);
}

#endif
