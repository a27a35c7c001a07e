/* attention_choice.c - see attention_choice.h. Words of cuDNN's way are zeros: a version has one, and lines name the
 * version. Ours say who they are and what they compute. */
#include "backend/cuda/attention_choice.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"

static const char PREFIX[] = "attention_backward ";
/* "QATTNOWN" */
static const uint64_t TAG = 0x514154544E4F574Eu;

static void key_format(const qe_args_attention_backward *args, char *key, size_t bytes) {
    const int length = snprintf(key, bytes, "%ss%" PRIu32 " t%" PRIu32 " h%" PRIu32 " kv%" PRIu32 " d%" PRIu32 " %s",
                                PREFIX, args->sequences, args->sequence, args->heads, args->kv_heads, args->head_dim,
                                args->deterministic ? "fixed" : "any");
    QE_ASSERT(length > 0 && (size_t)length < bytes);
}

static void words_make(qe_attention_algorithm algorithm, uint64_t words[8]) {
    memset(words, 0, 8 * sizeof *words);
    if (algorithm != QE_ATTENTION_OWN) return;
    words[0] = TAG;
    words[1] = QE_ATTENTION_OWN_REVISION;
}

void qe_attention_choice_make(const qe_args_attention_backward *args, qe_attention_algorithm algorithm,
                              qe_cuda_choice *choice_out) {
    memset(choice_out, 0, sizeof *choice_out);
    key_format(args, choice_out->key, sizeof choice_out->key);
    words_make(algorithm, choice_out->words);
}

int qe_attention_choice_is(const char *key) { return strncmp(key, PREFIX, sizeof PREFIX - 1) == 0; }

/* What is read is written again: the key has to be the very same. */
static int key_parse(const char *key, qe_args_attention_backward *args_out) {
    char order[8] = "", again[sizeof((qe_cuda_choice *)0)->key];
    qe_args_attention_backward args = {0};
    if (!qe_attention_choice_is(key)) return 0;
    const int got = sscanf(key + sizeof PREFIX - 1,
                           "s%" SCNu32 " t%" SCNu32 " h%" SCNu32 " kv%" SCNu32 " d%" SCNu32 " %7s", &args.sequences,
                           &args.sequence, &args.heads, &args.kv_heads, &args.head_dim, order);
    args.deterministic = strcmp(order, "fixed") == 0;
    if (got != 6) return 0;
    key_format(&args, again, sizeof again);
    *args_out = args;
    return strcmp(key, again) == 0;
}

qe_status qe_attention_choice_parse(const qe_cuda_choice *choice, qe_args_attention_backward *args_out,
                                    qe_attention_algorithm *algorithm_out, qe_error *error_out) {
    if (!key_parse(choice->key, args_out))
        return qe_error_set(error_out, QE_ERROR_FORMAT, "have the file written anew", "\"%s\" names no attention",
                            choice->key);
    for (int i = QE_ATTENTION_CUDNN; i <= QE_ATTENTION_OWN; ++i) {
        uint64_t words[8];
        words_make((qe_attention_algorithm)i, words);
        if (memcmp(words, choice->words, sizeof words) != 0) continue;
        *algorithm_out = (qe_attention_algorithm)i;
        return QE_OK;
    }
    return qe_error_set(error_out, QE_ERROR_UNSUPPORTED,
                        "choose anew with this build on this machine: leave the file of choices out",
                        "this build has no such algorithm for %s", choice->key);
}
