/* attention_choice.c - see attention_choice.h. Words of cuDNN's way are zeros: a version has one, and lines name the
 * version. Ours say who they are and what they compute. */
#include "backend/cuda/attention_choice.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"

/* Our kernels' names: "QATTNFWD", "QATTNOWN". */
static const uint64_t TAG_FORWARD = 0x514154544E465744u, TAG_BACKWARD = 0x514154544E4F574Eu;

/* What a key says. */
typedef struct attention_key {
    uint32_t backward; /* else forward */
    uint32_t sequences, sequence, heads, kv_heads, head_dim;
    uint32_t fixed; /* one order of additions; forward has no other */
} attention_key;

static attention_key key_of(const qe_op *op) {
    const qe_args_attention *forward = &op->args.attention;
    const qe_args_attention_backward *back = &op->args.attention_backward;
    if (op->kind == QE_OP_ATTENTION)
        return (attention_key){0, forward->sequences, forward->sequence, forward->heads,
                               forward->kv_heads, forward->head_dim, 1};
    return (attention_key){1, back->sequences, back->sequence, back->heads, back->kv_heads, back->head_dim,
                           back->deterministic != 0};
}

static qe_op op_of(const attention_key *k) {
    qe_op op = {.kind = k->backward ? QE_OP_ATTENTION_BACKWARD : QE_OP_ATTENTION};
    if (k->backward)
        op.args.attention_backward = (qe_args_attention_backward){.sequences = k->sequences,
                                                                  .sequence = k->sequence,
                                                                  .heads = k->heads,
                                                                  .kv_heads = k->kv_heads,
                                                                  .head_dim = k->head_dim,
                                                                  .deterministic = (uint8_t)k->fixed};
    else
        op.args.attention = (qe_args_attention){.sequences = k->sequences,
                                                .sequence = k->sequence,
                                                .heads = k->heads,
                                                .kv_heads = k->kv_heads,
                                                .head_dim = k->head_dim,
                                                .deterministic = 1};
    return op;
}

static void key_format(const attention_key *k, char *key, size_t bytes) {
    const int length = snprintf(key, bytes, "%s s%" PRIu32 " t%" PRIu32 " h%" PRIu32 " kv%" PRIu32 " d%" PRIu32 " %s",
                                k->backward ? "attention_backward" : "attention", k->sequences, k->sequence, k->heads,
                                k->kv_heads, k->head_dim, k->fixed ? "fixed" : "any");
    QE_ASSERT(length > 0 && (size_t)length < bytes);
}

static void words_make(int backward, qe_attention_algorithm algorithm, uint64_t words[8]) {
    memset(words, 0, 8 * sizeof *words);
    if (algorithm != QE_ATTENTION_OWN) return;
    words[0] = backward ? TAG_BACKWARD : TAG_FORWARD;
    words[1] = backward ? QE_ATTENTION_OWN_REVISION : QE_ATTENTION_FORWARD_REVISION;
}

void qe_attention_choice_make(const qe_op *op, qe_attention_algorithm algorithm, qe_cuda_choice *choice_out) {
    const attention_key k = key_of(op);
    memset(choice_out, 0, sizeof *choice_out);
    key_format(&k, choice_out->key, sizeof choice_out->key);
    words_make((int)k.backward, algorithm, choice_out->words);
}

int qe_attention_choice_is(const char *key) {
    return strncmp(key, "attention ", 10) == 0 || strncmp(key, "attention_backward ", 19) == 0;
}

/* What is read is written again: the key has to be the very same. */
static int key_parse(const char *key, attention_key *key_out) {
    char order[8] = "", again[sizeof((qe_cuda_choice *)0)->key];
    attention_key k = {0};
    if (!qe_attention_choice_is(key)) return 0;
    const int got = sscanf(strchr(key, ' '),
                           " s%" SCNu32 " t%" SCNu32 " h%" SCNu32 " kv%" SCNu32 " d%" SCNu32 " %7s", &k.sequences,
                           &k.sequence, &k.heads, &k.kv_heads, &k.head_dim, order);
    k.backward = key[strlen("attention")] == '_';
    k.fixed = !k.backward || strcmp(order, "fixed") == 0;
    if (got != 6) return 0;
    key_format(&k, again, sizeof again);
    *key_out = k;
    return strcmp(key, again) == 0;
}

qe_status qe_attention_choice_parse(const qe_cuda_choice *choice, qe_op *op_out, qe_attention_algorithm *algorithm_out,
                                    qe_error *error_out) {
    attention_key k;
    if (!key_parse(choice->key, &k))
        return qe_error_set(error_out, QE_ERROR_FORMAT, "have the file written anew", "\"%s\" names no attention",
                            choice->key);
    for (int i = QE_ATTENTION_CUDNN; i <= QE_ATTENTION_OWN; ++i) {
        uint64_t words[8];
        words_make((int)k.backward, (qe_attention_algorithm)i, words);
        if (memcmp(words, choice->words, sizeof words) != 0) continue;
        *op_out = op_of(&k);
        *algorithm_out = (qe_attention_algorithm)i;
        return QE_OK;
    }
    return qe_error_set(error_out, QE_ERROR_UNSUPPORTED,
                        "choose anew with this build on this machine: leave the file of choices out",
                        "this build has no such algorithm for %s", choice->key);
}
