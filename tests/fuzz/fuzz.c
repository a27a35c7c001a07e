/* fuzz.c - the table of readers, and what is asked of all of them. */
#include "fuzz/fuzz.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fuzz/readers.h"
#include "qeffect/program.h"

enum {
    BASE = 4 << 20,                                /* buffers of libraries, tables of a reader */
    ROWS = 3 * (int)(QE_ROWS_MIB_MAX * (1u << 20)), /* that rows may take, and again while their room doubles */
};

/* For each byte of input: what a trace's shortest line makes is the most. */
const fuzz_reader fuzz_readers[] = {
    {"config", fuzz_config, BASE, 256},     {"csv", fuzz_csv, BASE, 4096},
    {"trace", fuzz_trace, BASE + ROWS, 8192},      {"safetensors", fuzz_safetensors, BASE, 256},
    {"manifest", fuzz_manifest, BASE, 256}, {"data", fuzz_data, BASE, 16},
    {"times", fuzz_times, BASE, 256},       {"model", fuzz_model, BASE, 256},
    {"choices", fuzz_choices, BASE, 16},    {NULL, NULL, 0, 0},
};

static const fuzz_reader *under_test;

void fuzz_check(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "reader %s: %s\n", under_test == NULL ? "" : under_test->name, what);
    abort();
}

void fuzz_check_refusal(qe_status status, const qe_error *error) {
    if (status == QE_OK) return;
    fuzz_check(error->status == status, "the error's status is another");
    fuzz_check(error->message[0] != 0, "a refusal without words");
    fuzz_check(status != QE_ERROR_FORMAT || error->remedy[0] != 0, "a malformed file, and no way out");
}

static char folder[64], path[96];

static void clean(void) {
    unlink(path);
    rmdir(folder);
}

const char *fuzz_folder(void) {
    if (folder[0] != 0) return folder;
    const char *parent = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    snprintf(folder, sizeof folder, "%s/qeffect-fuzz-XXXXXX", parent);
    fuzz_check(mkdtemp(folder) != NULL, "no folder");
    snprintf(path, sizeof path, "%s/config.json", folder);
    atexit(clean);
    return folder;
}

const char *fuzz_file(const uint8_t *bytes, size_t count) {
    (void)fuzz_folder();
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    fuzz_check(file >= 0 && write(file, bytes, count) == (ssize_t)count && close(file) == 0, "no file to read");
    return path;
}

void fuzz_one(const fuzz_reader *reader, const uint8_t *bytes, size_t count) {
    under_test = reader;
    fuzz_memory_begin();
    reader->read(bytes, count);
    size_t most = fuzz_memory_most(), due = reader->bytes_base + reader->bytes_per_byte * count;
    if (most > due) fprintf(stderr, "%zu bytes of memory for %zu of input; expected at most %zu\n", most, count, due);
    fuzz_check(most <= due, "memory out of proportion");
}
