/* manifest_choices.c - chosen algorithms as facts of a manifest, and the file of choices made of them again. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/assert.h"
#include "cli/checkpoints.h"

static const char choice_name[] = "choice_";

qe_status qe_manifest_choices_add(qe_manifest *manifest, FILE *file, qe_error *error_out) {
    char line[1024], name[32]; /* longer than any line that is written there */
    for (unsigned i = 1; fgets(line, sizeof line, file) != NULL; i++) {
        line[strcspn(line, "\n")] = 0;
        snprintf(name, sizeof name, "%s%u", choice_name, i);
        QE_TRY(qe_facts_add(&manifest->algorithms, name, line, error_out));
    }
    return QE_OK;
}

static int is_choice(const qe_fact *fact) { return strncmp(fact->name, choice_name, sizeof choice_name - 1) == 0; }

/* The file of choices that a manifest was made with, line by line as qe_manifest_choices_add read it. */
static int write_choices(const qe_manifest *manifest, FILE *file) {
    for (size_t i = 0; i < manifest->algorithms.count; i++) {
        const qe_fact *fact = &manifest->algorithms.list[i];
        if (!is_choice(fact)) continue;
        if (fprintf(file, "%s\n", fact->value) < 0) return 0;
    }
    return 1;
}

static int has_choices(const qe_manifest *manifest) {
    return manifest->algorithms.count > 0 && is_choice(&manifest->algorithms.list[0]);
}

qe_status qe_manifest_choices_restore(const qe_manifest *manifest, const char *path, qe_error *error_out) {
    if (path[0] == 0 || !has_choices(manifest)) return QE_OK;
    FILE *file = fopen(path, "wx");
    if (file == NULL && errno == EEXIST) return QE_OK;
    int written = file != NULL && write_choices(manifest, file);
    if (file != NULL && fclose(file) != 0) written = 0;
    if (written) return QE_OK;
    qe_error_set(error_out, QE_ERROR_IO, "name a file that can be written with --set train.algorithms=FILE",
                 "the checkpoint's algorithms cannot be written down: %s", strerror(errno));
    if (file != NULL) (void)unlink(path);
    return qe_error_place(error_out, path, 0, 0);
}
