/* choices.c - see choices.h. */
#include "backend/cuda/choices.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/cuda/attention_choice.h"
#include "backend/cuda/fused.h"
#include "backend/cuda/fused_choice.h"
#include "base/assert.h"
#include "base/text.h"

static const char TITLE[] = "qeffect choices 1";
enum { FIELDS = 5, WORDS = 8, WORD_DIGITS = 16 };

/* --- a line ----------------------------------------------------------------------------------------------------- */

/* Whose algorithm it is. */
static const char *library_of(const qe_choice_maker *maker, const char *key) {
    return qe_attention_choice_is(key) ? maker->attention : maker->library;
}

void qe_choice_format(const qe_choice_maker *maker, const qe_cuda_choice *choice, char line[QE_CHOICE_LINE_BYTES]) {
    const int length =
        snprintf(line, QE_CHOICE_LINE_BYTES, "%s\t%s\t%s\t%llu\t", library_of(maker, choice->key), maker->device,
                 choice->key, (unsigned long long)choice->workspace_bytes);
    QE_ASSERT(length > 0 && (size_t)length + WORDS * (WORD_DIGITS + 1) < QE_CHOICE_LINE_BYTES);
    char *at = line + length;
    for (int i = 0; i < WORDS; ++i) {
        const char end = i + 1 < WORDS ? ' ' : '\n';
        (void)snprintf(at, WORD_DIGITS + 2, "%016llx%c", (unsigned long long)choice->words[i], end);
        at += WORD_DIGITS + 1;
    }
}

/* Cuts the line at its tabs. */
static int fields_cut(char *line, char *fields[FIELDS]) {
    int count = 0;
    for (char *at = line;; ++at) {
        if (count == FIELDS) return 0;
        fields[count++] = at;
        at = strchr(at, '\t');
        if (!at) return count == FIELDS;
        *at = '\0';
    }
}

static int word_scan(const char *text, uint64_t *word_out) {
    uint64_t word = 0;
    for (int i = 0; i < WORD_DIGITS; ++i) {
        const char *const digits = "0123456789abcdef", *digit = text[i] ? strchr(digits, text[i]) : NULL;
        if (!digit) return 0;
        word = word << 4 | (uint64_t)(digit - digits);
    }
    *word_out = word;
    return 1;
}

static int words_scan(const char *text, uint64_t words[WORDS]) {
    if (strlen(text) != WORDS * (WORD_DIGITS + 1) - 1) return 0;
    for (int i = 0; i < WORDS; ++i) {
        if (!word_scan(text, &words[i])) return 0;
        text += WORD_DIGITS;
        if (i + 1 < WORDS && *text++ != ' ') return 0;
    }
    return 1;
}

static qe_status maker_check(const qe_choice_maker *maker, char *const fields[FIELDS], qe_error *error_out) {
    const char *library = library_of(maker, fields[2]);
    if (strcmp(fields[0], library) == 0 && strcmp(fields[1], maker->device) == 0) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_UNSUPPORTED,
                        "run with that library on that device, or leave the file out and have choices made anew",
                        "an algorithm chosen with %s on %s; here are %s and %s", fields[0], fields[1], library,
                        maker->device);
}

qe_status qe_choice_parse(const qe_choice_maker *maker, char *line, qe_cuda_choice *choice_out, qe_error *error_out) {
    char *fields[FIELDS];
    qe_cuda_choice choice = {0};
    if (!fields_cut(line, fields) || strlen(fields[2]) >= sizeof choice.key ||
        !qe_text_to_u64(fields[3], &choice.workspace_bytes) || !words_scan(fields[4], choice.words))
        return qe_error_set(error_out, QE_ERROR_CONFIG, "have the file written anew",
                            "not a choice: library, device, product, workspace bytes and eight words, apart by tabs");
    QE_TRY(maker_check(maker, fields, error_out));
    memcpy(choice.key, fields[2], strlen(fields[2]));
    *choice_out = choice;
    return QE_OK;
}

/* --- the file --------------------------------------------------------------------------------------------------- */

static qe_status io_error(const char *path, const char *verb, int code, qe_error *error_out) {
    (void)qe_error_set(error_out, QE_ERROR_IO, "name another file with --set train.algorithms=FILE", "cannot %s: %s",
                       verb, strerror(code));
    return error_out ? qe_error_place(error_out, path, 0, 0) : QE_ERROR_IO;
}

/* The next line without its end; 0 at the end of the file, -1 where it is cut short or too long. */
static int line_next(FILE *file, char line[QE_CHOICE_LINE_BYTES]) {
    if (!fgets(line, QE_CHOICE_LINE_BYTES, file)) return 0;
    char *end = strchr(line, '\n');
    if (!end) return -1;
    *end = '\0';
    return 1;
}

static qe_status title_check(FILE *file, const char *path, qe_error *error_out) {
    char line[QE_CHOICE_LINE_BYTES];
    errno = 0;
    if (line_next(file, line) == 1 && strcmp(line, TITLE) == 0) return QE_OK;
    if (ferror(file)) return io_error(path, "read", errno, error_out); /* a folder opens, too */
    return qe_error_set(error_out, QE_ERROR_CONFIG, "have the file written anew",
                        "not a file of choices: its first line is not \"%s\"", TITLE);
}

/* What a line says is the file's: no mistake of who reads it, whatever takes it thinks of its arguments. */
static qe_status line_refused(qe_status status, const char *path, uint32_t number, qe_error *error_out) {
    static const char remedy[] = "take the line out, or leave the file out and have choices made anew";
    const qe_status ours = status == QE_ERROR_ARGUMENT ? QE_ERROR_CONFIG : status;
    if (error_out == NULL) return ours;
    if (status == QE_ERROR_ARGUMENT || error_out->remedy[0] == '\0') memcpy(error_out->remedy, remedy, sizeof remedy);
    error_out->status = ours;
    return qe_error_place(error_out, path, number, 1);
}

qe_status qe_choices_scan(const char *path, const qe_choice_maker *maker,
                          qe_status (*take)(void *context, const qe_cuda_choice *choice, qe_error *error_out),
                          void *context, qe_error *error_out) {
    char line[QE_CHOICE_LINE_BYTES];
    qe_cuda_choice choice;
    uint32_t number = 1;
    FILE *file = fopen(path, "re");
    if (!file) return io_error(path, "read", errno, error_out);
    qe_status status = title_check(file, path, error_out);
    for (int got; status == QE_OK && (got = line_next(file, line)) != 0;) {
        ++number;
        if (got < 0) /* parsing finds nothing that it could take */
            line[0] = '\0';
        status = qe_choice_parse(maker, line, &choice, error_out);
        if (status == QE_OK) status = take(context, &choice, error_out);
    }
    if (ferror(file)) /* what was read may be half a line; the first says why by itself */
        status = status == QE_ERROR_IO ? status : io_error(path, "read", EIO, error_out);
    else if (status != QE_OK)
        status = line_refused(status, path, number, error_out);
    (void)fclose(file);
    return status;
}

/* What reads a file; without attention its lines are refused. */
typedef struct readers {
    qe_cuda_gemm *gemm;
    qe_cuda_attention *attention;
} readers;

static qe_status maker_of(const qe_cuda_gemm *gemm, const qe_cuda_attention *attention,
                          struct cudaDeviceProp *properties, qe_choice_maker *maker_out, qe_error *error_out) {
    int device;
    if (cudaGetDevice(&device) != cudaSuccess || cudaGetDeviceProperties(properties, device) != cudaSuccess)
        return qe_error_set(error_out, QE_ERROR_DEVICE, NULL, "asking for the device's name: %s",
                            cudaGetErrorString(cudaGetLastError()));
    *maker_out = (qe_choice_maker){qe_cuda_gemm_identity(gemm), properties->name,
                                   attention ? qe_cuda_attention_identity(attention) : "no attention"};
    return QE_OK;
}

static qe_status choice_take(void *context, const qe_cuda_choice *choice, qe_error *error_out) {
    const readers *of = context;
    if (qe_attention_choice_is(choice->key)) return qe_cuda_attention_choose(of->attention, choice, error_out);
    if (qe_fused_choice_is(choice->key))
        return qe_cuda_fused_choose(qe_cuda_gemm_fused(of->gemm), choice, error_out);
    return qe_cuda_gemm_choose(of->gemm, choice, error_out);
}

qe_status qe_cuda_choices_read(qe_cuda_gemm *gemm, qe_cuda_attention *attention, const char *path,
                               qe_error *error_out) {
    struct cudaDeviceProp properties;
    qe_choice_maker maker;
    const qe_cuda_choice *before;
    readers of = {gemm, attention};
    const uint32_t count = qe_cuda_gemm_choices(gemm, &before);
    const uint32_t fused_count = qe_cuda_fused_choices(qe_cuda_gemm_fused(gemm), &before);
    const uint32_t attention_count = attention ? qe_cuda_attention_choices(attention, &before) : 0;
    QE_TRY(maker_of(gemm, attention, &properties, &maker, error_out));
    const qe_status status = qe_choices_scan(path, &maker, choice_take, &of, error_out);
    if (status == QE_OK) return QE_OK;
    qe_cuda_gemm_keep(gemm, count);
    qe_cuda_fused_keep(qe_cuda_gemm_fused(gemm), fused_count);
    if (attention) qe_cuda_attention_keep(attention, attention_count);
    return status;
}

/* Choices of products, of those that may be fused, then of attention. */
enum { KINDS = 3 };
typedef struct choices {
    const qe_cuda_choice *of[KINDS];
    uint32_t count[KINDS];
} choices;

/* Returns an errno. */
static int choices_put(FILE *file, const qe_choice_maker *maker, const choices *all) {
    char line[QE_CHOICE_LINE_BYTES];
    if (fprintf(file, "%s\n", TITLE) < 0) return errno;
    for (int kind = 0; kind < KINDS; ++kind)
        for (uint32_t i = 0; i < all->count[kind]; ++i) {
            qe_choice_format(maker, &all->of[kind][i], line);
            if (fputs(line, file) == EOF) return errno;
        }
    if (fflush(file) != 0 || fsync(fileno(file)) != 0) return errno;
    return 0;
}

static int beside_write(const char *beside, const char *path, const qe_choice_maker *maker, const choices *all) {
    FILE *file = fopen(beside, "we");
    if (!file) return errno;
    int code = choices_put(file, maker, all);
    if (fclose(file) != 0 && code == 0) code = errno;
    if (code == 0 && rename(beside, path) != 0) code = errno;
    if (code != 0) (void)unlink(beside);
    return code;
}

qe_status qe_cuda_choices_write(const qe_cuda_gemm *gemm, const qe_cuda_attention *attention, const char *path,
                                qe_error *error_out) {
    struct cudaDeviceProp properties;
    qe_choice_maker maker;
    choices all = {{NULL, NULL, NULL}, {0, 0, 0}};
    all.count[0] = qe_cuda_gemm_choices(gemm, &all.of[0]);
    all.count[1] = qe_cuda_fused_choices(qe_cuda_gemm_fused(gemm), &all.of[1]);
    if (attention) all.count[2] = qe_cuda_attention_choices(attention, &all.of[2]);
    QE_TRY(maker_of(gemm, attention, &properties, &maker, error_out));
    qe_text_builder beside = {0};
    qe_text_builder_append(&beside, "%s.%ld", path, (long)getpid());
    char *name = qe_text_builder_take(&beside);
    if (!name) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to write the file of choices");
    const int code = beside_write(name, path, &maker, &all);
    free(name);
    return code == 0 ? QE_OK : io_error(path, "write", code, error_out);
}
