/* test_product_own.c - products of codes by kernels of ours: the bits of cuBLASLt's, in every shape, weight gradients
 * added and put there; a file's word for one is honoured, and for one that is not there refused.
 *
 *   test_product_own   exit status 0, 1 when something does not hold, 77 where there is no GPU */
#include "backend/cuda/algorithm.h"
#include "fused_check.h"

enum { FIRST, FIRST_SCALE, SECOND, SECOND_SCALE, RESULT, PLACES };

/* [rows, terms] by [columns, terms]' */
typedef struct shape {
    uint32_t rows, columns, terms;
} shape;

typedef struct form {
    qe_op_kind kind;
    qe_format format; /* of the first operand */
    uint8_t accumulation;
    int adds; /* to what lies there */
} form;

static int is_in_place(form as) { return as.kind == QE_OP_LINEAR_WEIGHT_GRAD; }

static memory memory_of(shape of, form as) {
    const size_t rows = of.rows, columns = of.columns, terms = of.terms;
    const size_t bytes = rows * columns * (is_in_place(as) ? 4 : 2);
    const size_t places[PLACES] = {rows * terms, 4, columns * terms, 4, bytes};
    const memory m = memory_place(places, PLACES);
    put_random(&m, FIRST, as.format, rows * terms, 1);
    put_random(&m, SECOND, QE_FORMAT_E4M3, columns * terms, 2);
    if (is_in_place(as)) put_random(&m, RESULT, QE_FORMAT_FP32, rows * columns, 3);
    put_float(&m, FIRST_SCALE, 0.0171f);
    put_float(&m, SECOND_SCALE, 0.0007f);
    return m;
}

static qe_op op_of(const memory *m, shape of, form as) {
    qe_op op = {.kind = as.kind};
    if (is_in_place(as))
        op.args.linear_weight_grad =
            (qe_args_linear_weight_grad){.dy = codes_at(m, FIRST, as.format, of.terms, of.rows, 1),
                                         .x = codes_at(m, SECOND, QE_FORMAT_E4M3, of.terms, of.columns, 1),
                                         .grad = (float *)m->at[RESULT], .rows = of.terms, .in = of.columns,
                                         .out = of.rows, .set = !as.adds, .accumulation = as.accumulation};
    else if (as.kind == QE_OP_LINEAR)
        op.args.linear = (qe_args_linear){.x = codes_at(m, FIRST, as.format, of.rows, of.terms, 0),
                                          .w = codes_at(m, SECOND, QE_FORMAT_E4M3, of.columns, of.terms, 0),
                                          .y = m->at[RESULT], .residual = as.adds ? m->at[RESULT] : NULL,
                                          .rows = of.rows, .in = of.terms, .out = of.columns,
                                          .accumulation = as.accumulation};
    else
        op.args.linear_input_grad =
            (qe_args_linear_input_grad){.dy = codes_at(m, FIRST, as.format, of.rows, of.terms, 0),
                                        .w = codes_at(m, SECOND, QE_FORMAT_E4M3, of.terms, of.columns, 1),
                                        .dx = m->at[RESULT], .rows = of.rows, .in = of.columns, .out = of.terms,
                                        .accumulation = as.accumulation};
    return op;
}

/* --- a kernel of ours -------------------------------------------------------------------------------------------- */

static qe_cuda_choice choice_of(const qe_op *op) {
    qe_algorithm all[QE_FURTHER_CANDIDATES_MAX];
    qe_product product;
    qe_cuda_choice choice = {.workspace_bytes = 0};
    assert_int_equal(qe_product_of(op, &product, NULL), QE_OK);
    const uint32_t count = qe_further_candidates(&product, all);
    for (uint32_t i = 0; i < count; i++) {
        char name[QE_FURTHER_NAME_BYTES];
        qe_further_name(&all[i], name);
        if (strncmp(name, "ours ", 5) == 0) {
            qe_product_key(&product, choice.key);
            memcpy(choice.words, all[i].words, sizeof choice.words);
        }
    }
    return choice;
}

static void expect_equal(shape of, form as, const given *what, int count) {
    memory theirs = memory_of(of, as), ours = memory_of(of, as);
    const qe_op one = op_of(&theirs, of, as), two = op_of(&ours, of, as);
    const qe_cuda_choice choice = choice_of(&two);
    qe_cuda_gemm *library = gemm_open(), *own = gemm_open();
    printf("  %s\n", choice.key);
    assert_true(choice.key[0] != '\0');
    for (int i = 0; i < count; i++) give(&theirs, &what[i]), give(&ours, &what[i]);
    qe_cuda_gemm_lt_only(library);
    assert_int_equal(qe_cuda_gemm_prepare(library, &one, 0, NULL), QE_OK);
    assert_int_equal(qe_cuda_gemm_choose(own, &choice, NULL), QE_OK);
    assert_int_equal(qe_cuda_gemm_prepare(own, &two, 0, NULL), QE_OK);
    settle();
    for (int turn = 0; turn < 3; turn++) {
        assert_int_equal(qe_cuda_gemm_run(library, &one, aside, NULL), QE_OK);
        assert_int_equal(qe_cuda_gemm_run(own, &two, aside, NULL), QE_OK);
        assert_int_equal(cudaStreamSynchronize(aside), cudaSuccess);
        results_equal(&theirs, &ours, FIRST);
    }
    guards_hold(&ours);
    qe_cuda_gemm_destroy(library);
    qe_cuda_gemm_destroy(own);
    memory_free(&theirs);
    memory_free(&ours);
}

static const form FORMS[] = {{QE_OP_LINEAR_INPUT_GRAD, QE_FORMAT_E5M2, QE_ACCUMULATE_SPLIT, 0},
                             {QE_OP_LINEAR_INPUT_GRAD, QE_FORMAT_E4M3, QE_ACCUMULATE_SPLIT, 0},
                             {QE_OP_LINEAR, QE_FORMAT_E4M3, QE_ACCUMULATE_SPLIT, 0},
                             {QE_OP_LINEAR_WEIGHT_GRAD, QE_FORMAT_E5M2, QE_ACCUMULATE_SPLIT, 1},
                             {QE_OP_LINEAR_WEIGHT_GRAD, QE_FORMAT_E5M2, QE_ACCUMULATE_SPLIT, 0},
                             {QE_OP_LINEAR_WEIGHT_GRAD, QE_FORMAT_E4M3, QE_ACCUMULATE_SPLIT, 1}};
enum { FORM_COUNT = sizeof FORMS / sizeof FORMS[0] };

/* Whole tiles and such that are cut at every edge; few tiles and several for a block; whole batches and others. */
static void the_bits_are_cublaslts(void) {
    static const shape shapes[] = {{128, 128, 128},   {16, 16, 16},       {144, 176, 1024},  {368, 4112, 2064},
                                   {2048, 4096, 512}, {2064, 8208, 1040}, {2048, 4096, 4096}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int as = 0; as < FORM_COUNT; as++) expect_equal(shapes[i], FORMS[as], NULL, 0);
}

/* A row with a NaN, one of zeros, one of the largest codes; NaN, infinities and zeros of both signs that are added. */
static void what_is_no_number_has_the_same_bits_too(void) {
    enum { TERMS = 1024 };
    static const uint32_t odd[] = {0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFC12345, 0x00000000,
                                   0x80000000, 0x7F7FFFFF, 0xFF7FFFFF, 0x00800000};
    const shape of = {256, 256, TERMS};
    unsigned char codes[3 * TERMS];
    memset(codes, 0x38, TERMS);
    codes[17] = 0x7F;
    memset(codes + TERMS, 0, TERMS);
    for (int as = 0; as < FORM_COUNT; as++) {
        memset(codes + (size_t)2 * TERMS, FORMS[as].format == QE_FORMAT_E4M3 ? 0x7E : 0x7B, TERMS);
        expect_equal(of, FORMS[as], &(given){FIRST, codes, sizeof codes}, 1);
        if (FORMS[as].adds) expect_equal(of, FORMS[as], &(given){RESULT, odd, sizeof odd}, 1);
    }
}

/* Products around the smallest normal number, added to such numbers; in two rows zeros, so that denormals that lie
 * there are results as they are; and a scale that is denormal itself. */
static void what_is_small_is_kept_or_flushed_alike(void) {
    enum { ROWS = 256, COLUMNS = 256, TERMS = 1024, ZEROS = 2, CODE_MAX = 7 };
    static unsigned char codes[ROWS * TERMS];
    static uint32_t old[ROWS * COLUMNS];
    static const float scales[][2] = {{0x1p-63f, 0x1p-62f}, {0x1p-70f, 0x1p-69f}, {1.0f, 0x1.8p-140f}};
    for (uint32_t i = 0, state = 1; i < ROWS * TERMS; i++) {
        state = state * 1664525u + 1013904223u;
        const unsigned char code = (unsigned char)((state >> 24 & 0x80) | (state >> 16) % (CODE_MAX + 1));
        const uint32_t below = state * 2654435761u & 0x00FFFFFFu; /* 2^-125 */
        codes[i] = i < ZEROS * TERMS ? 0 : code;
        if (i < ROWS * COLUMNS) old[i] = (state & 0x80000000u) | below;
    }
    for (int as = 0; as < FORM_COUNT; as++)
        for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
            const given what[] = {{FIRST, codes, sizeof codes},
                                  {FIRST_SCALE, &scales[i][0], sizeof(float)},
                                  {SECOND_SCALE, &scales[i][1], sizeof(float)},
                                  {RESULT, old, sizeof old}};
            expect_equal((shape){ROWS, COLUMNS, TERMS}, FORMS[as], what, FORMS[as].adds ? 4 : 3);
        }
}

/* Of another maker, version, tile or schedule; of another product. */
static void what_is_not_there_is_refused(void) {
    const shape of = {256, 256, 256};
    memory m = memory_of(of, FORMS[0]);
    const qe_op op = op_of(&m, of, FORMS[0]);
    for (int word = 0; word < 5; word++) {
        qe_cuda_gemm *gemm = gemm_open();
        qe_cuda_choice choice = choice_of(&op);
        qe_error error = {0};
        if (word < 4)
            choice.words[word] += 3;
        else
            (void)snprintf(choice.key, sizeof choice.key, "linear m256 n256 k256 tn e4m3 e4m3 fast");
        assert_int_equal(qe_cuda_gemm_choose(gemm, &choice, &error), QE_ERROR_UNSUPPORTED);
        assert_true(error.message[0] != '\0');
        qe_cuda_gemm_destroy(gemm);
    }
    memory_free(&m);
}

/* Other forms have none. */
static void what_no_kernel_takes_is_left_to_others(void) {
    static const form others[] = {{QE_OP_LINEAR_INPUT_GRAD, QE_FORMAT_E5M2, QE_ACCUMULATE_FAST, 0},
                                  {QE_OP_LINEAR, QE_FORMAT_E4M3, QE_ACCUMULATE_FAST, 0},
                                  {QE_OP_LINEAR, QE_FORMAT_E4M3, QE_ACCUMULATE_SPLIT, 1}};
    const shape of = {256, 256, 256};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        memory m = memory_of(of, others[i]);
        const qe_op op = op_of(&m, of, others[i]);
        assert_true(choice_of(&op).key[0] == '\0');
        memory_free(&m);
    }
}

int main(void) {
    static void (*const cases[])(void) = {the_bits_are_cublaslts, what_is_no_number_has_the_same_bits_too,
                                          what_is_small_is_kept_or_flushed_alike, what_is_not_there_is_refused,
                                          what_no_kernel_takes_is_left_to_others};
    return run_all(cases, sizeof cases / sizeof *cases, "products of ours");
}
