/* test_attention_choice.c - which of cuDNN's attention and ours is run: chosen by a race, written to the
 * file of choices, honoured when it is read again, and refused where it cannot be.
 *
 *   test_attention_choice   exit status 0, 1 when something does not hold, 77 where there is no GPU or no cuDNN */
#include <cmocka.h>
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "backend/cuda/attention_choice.h"
#include "backend/cuda/products.h"

enum { SKIPPED = 77, TEXT_BYTES = 4096 };

typedef struct pair {
    qe_cuda_gemm *gemm;
    qe_cuda_attention *attention;
} pair;

static cudaStream_t aside;

static pair pair_open(void) {
    pair p = {NULL, NULL};
    qe_error error = {0};
    assert_int_equal(qe_cuda_gemm_create(aside, &p.gemm, &error), QE_OK);
    assert_int_equal(qe_cuda_attention_create(aside, &p.attention, &error), QE_OK);
    return p;
}

static void pair_close(const pair *p) {
    qe_cuda_attention_destroy(p->attention);
    qe_cuda_gemm_destroy(p->gemm);
}

static qe_op backward(uint32_t heads, uint32_t head_dim, int deterministic) {
    qe_op op = {.kind = QE_OP_ATTENTION_BACKWARD};
    op.args.attention_backward.sequences = 1;
    op.args.attention_backward.sequence = 512;
    op.args.attention_backward.heads = heads;
    op.args.attention_backward.kv_heads = 2;
    op.args.attention_backward.head_dim = head_dim;
    op.args.attention_backward.deterministic = (uint8_t)deterministic;
    return op;
}

static qe_op forward(uint32_t heads, uint32_t head_dim) {
    qe_op op = {.kind = QE_OP_ATTENTION};
    op.args.attention.sequences = 1;
    op.args.attention.sequence = 512;
    op.args.attention.heads = heads;
    op.args.attention.kv_heads = 2;
    op.args.attention.head_dim = head_dim;
    op.args.attention.deterministic = 1;
    return op;
}

static qe_attention_algorithm algorithm_of(const qe_cuda_attention *attention, uint32_t index, uint32_t count) {
    const qe_cuda_choice *choices;
    qe_op op;
    qe_attention_algorithm algorithm = QE_ATTENTION_CUDNN;
    assert_int_equal(qe_cuda_attention_choices(attention, &choices), count);
    assert_int_equal(qe_attention_choice_parse(&choices[index], &op, &algorithm, NULL), QE_OK);
    return algorithm;
}

/* Untuned: ours in a fixed order, cuDNN's in any. */
static void without_a_race_ours_is_taken_where_the_order_is_fixed(void) {
    const qe_op fixed = backward(4, 128, 1), any = backward(4, 128, 0), ahead = forward(4, 128), odd = forward(4, 96);
    const pair p = pair_open();
    assert_int_equal(qe_cuda_attention_prepare(p.attention, &fixed, 0, NULL), QE_OK);
    assert_int_equal(qe_cuda_attention_prepare(p.attention, &any, 0, NULL), QE_OK);
    assert_int_equal(qe_cuda_attention_prepare(p.attention, &ahead, 0, NULL), QE_OK);
    assert_int_equal(qe_cuda_attention_prepare(p.attention, &odd, 0, NULL), QE_OK);
    assert_int_equal(algorithm_of(p.attention, 0, 4), QE_ATTENTION_OWN);
    assert_int_equal(algorithm_of(p.attention, 1, 4), QE_ATTENTION_CUDNN);
    assert_int_equal(algorithm_of(p.attention, 2, 4), QE_ATTENTION_OWN);
    assert_int_equal(algorithm_of(p.attention, 3, 4), QE_ATTENTION_CUDNN);
    pair_close(&p);
}

/* A race is run once per shape; heads that ours does not take are cuDNN's. */
static void a_race_chooses_once_and_is_written(const char *path) {
    const qe_op shapes[] = {backward(4, 128, 1), backward(8, 64, 1), backward(4, 128, 0),
                            forward(4, 128),     forward(8, 64),     backward(4, 32, 1)};
    enum { SHAPES = sizeof shapes / sizeof *shapes };
    const pair p = pair_open();
    for (int again = 0; again < 2; again++)
        for (int i = 0; i < SHAPES; i++)
            assert_int_equal(qe_cuda_attention_prepare(p.attention, &shapes[i], 1, NULL), QE_OK);
    assert_int_equal(algorithm_of(p.attention, SHAPES - 1, SHAPES), QE_ATTENTION_CUDNN);
    assert_int_equal(qe_cuda_choices_write(p.gemm, p.attention, path, NULL), QE_OK);
    const qe_cuda_choice *choices;
    assert_int_equal(qe_cuda_attention_choices(p.attention, &choices), SHAPES);
    for (uint32_t i = 0; i < SHAPES; i++)
        printf("  %s: %s\n", choices[i].key,
               algorithm_of(p.attention, i, SHAPES) == QE_ATTENTION_OWN ? "ours" : "cuDNN's");
    pair_close(&p);
}

/* Whatever the race said: the file's word is taken, with the other algorithm too. */
static void what_is_written_is_honoured(const char *path, qe_op op, qe_attention_algorithm algorithm) {
    qe_cuda_choice choice;
    qe_attention_choice_make(&op, algorithm, &choice);
    const pair writer = pair_open(), reader = pair_open();
    assert_int_equal(qe_cuda_attention_choose(writer.attention, &choice, NULL), QE_OK);
    assert_int_equal(qe_cuda_attention_prepare(writer.attention, &op, 1, NULL), QE_OK);
    assert_int_equal(algorithm_of(writer.attention, 0, 1), algorithm);
    assert_int_equal(qe_cuda_choices_write(writer.gemm, writer.attention, path, NULL), QE_OK);
    assert_int_equal(qe_cuda_choices_read(reader.gemm, reader.attention, path, NULL), QE_OK);
    assert_int_equal(qe_cuda_attention_prepare(reader.attention, &op, 1, NULL), QE_OK);
    assert_int_equal(algorithm_of(reader.attention, 0, 1), algorithm);
    pair_close(&writer);
    pair_close(&reader);
}

static void text_replace(const char *path, const char *from, const char *to) {
    char text[TEXT_BYTES] = {0};
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    assert_true(fread(text, 1, sizeof text - 1, file) > 0);
    (void)fclose(file);
    char *at = strstr(text, from);
    assert_non_null(at);
    file = fopen(path, "w");
    assert_non_null(file);
    (void)fprintf(file, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    (void)fclose(file);
}

/* After another algorithm is in use, for another version of ours, for a key of no shape. */
static void what_cannot_be_honoured_is_refused(const char *path) {
    const qe_op op = backward(4, 128, 1);
    const pair busy = pair_open();
    qe_error error = {0};
    what_is_written_is_honoured(path, op, QE_ATTENTION_CUDNN);
    assert_int_equal(qe_cuda_attention_prepare(busy.attention, &op, 0, NULL), QE_OK); /* ours */
    assert_int_equal(qe_cuda_choices_read(busy.gemm, busy.attention, path, &error), QE_ERROR_CONFIG);
    assert_non_null(strstr(error.message, "another algorithm"));
    assert_int_equal(algorithm_of(busy.attention, 0, 1), QE_ATTENTION_OWN);
    pair_close(&busy);
    static const char *const changes[][2] = {{"ours ", "ours 9"}, {" d128 ", " d136 "}};
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        const pair p = pair_open();
        what_is_written_is_honoured(path, op, QE_ATTENTION_OWN);
        text_replace(path, changes[i][0], changes[i][1]);
        assert_int_equal(qe_cuda_choices_read(p.gemm, p.attention, path, &error), QE_ERROR_UNSUPPORTED);
        const qe_cuda_choice *choices;
        assert_int_equal(qe_cuda_attention_choices(p.attention, &choices), 0);
        pair_close(&p);
    }
}

int main(void) {
    char path[] = "/tmp/qeffect_choices_XXXXXX";
    qe_error error = {0};
    qe_cuda_attention *attention = NULL;
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        puts("skipped: no GPU");
        return SKIPPED;
    }
    assert_int_equal(cudaStreamCreateWithFlags(&aside, cudaStreamNonBlocking), cudaSuccess);
    if (qe_cuda_attention_create(aside, &attention, &error) != QE_OK) {
        printf("skipped: %s\n", error.message);
        return SKIPPED;
    }
    qe_cuda_attention_destroy(attention);
    const int file = mkstemp(path);
    assert_true(file >= 0);
    (void)close(file);
    without_a_race_ours_is_taken_where_the_order_is_fixed();
    a_race_chooses_once_and_is_written(path);
    for (int i = QE_ATTENTION_CUDNN; i <= QE_ATTENTION_OWN; i++) {
        what_is_written_is_honoured(path, backward(4, 128, 1), (qe_attention_algorithm)i);
        what_is_written_is_honoured(path, forward(4, 128), (qe_attention_algorithm)i);
    }
    what_cannot_be_honoured_is_refused(path);
    (void)unlink(path);
    puts("choices of attention: raced, written, honoured, refused");
    return 0;
}
