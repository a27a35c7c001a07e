/* test_fused.c - ops of two parts that one kernel does: the same bits as the parts one after the other, in every shape
 * that it takes; which way is run is chosen by a race, written to the file of choices, honoured and refused.
 *
 *   test_fused   exit status 0, 1 when something does not hold, 77 where there is no GPU */
#include <unistd.h>

#include "backend/cuda/fused_choice.h"
#include "backend/cuda/kernels.h"
#include "fused_check.h"

/* --- an op's memory ---------------------------------------------------------------------------------------------- */

enum { X, X_SCALE, W, W_SCALE, Y, SCALE, AMAX, CODES, CODES_SCALE, TURNED, TURNED_SCALE, PLACES };
enum { RESULTS_FROM = Y }; /* what is not read; but for the scale */

typedef struct shape {
    uint32_t rows, in, ffn;
} shape;

static memory memory_of(shape of) {
    const size_t rows = of.rows, in = of.in, ffn = of.ffn;
    const size_t bytes[PLACES] = {rows * in, 4, 2 * ffn * in, 4, rows * ffn * 4, 4, 4, rows * ffn, 4, rows * ffn, 4};
    const memory m = memory_place(bytes, PLACES);
    put_random(&m, X, QE_FORMAT_E4M3, rows * in, 1);
    put_random(&m, W, QE_FORMAT_E4M3, 2 * ffn * in, 2);
    put_float(&m, X_SCALE, 0.0171f);
    put_float(&m, W_SCALE, 0.0007f);
    put_float(&m, SCALE, 9.7f);
    put_float(&m, AMAX, 0.0f);
    return m;
}

static qe_op op_of(const memory *m, shape of) {
    return (qe_op){
        .kind = QE_OP_LINEAR,
        .args.linear = {.x = codes_at(m, X, QE_FORMAT_E4M3, of.rows, of.in, 0),
                        .w = codes_at(m, W, QE_FORMAT_E4M3, 2 * of.ffn, of.in, 0),
                        .y = m->at[Y], .rows = of.rows, .in = of.in, .out = 2 * of.ffn,
                        .accumulation = QE_ACCUMULATE_FAST,
                        .target = {.recipe = QE_RECIPE_DELAYED, .format = QE_FORMAT_E4M3,
                                   .scale = (const float *)m->at[SCALE], .amax = (float *)m->at[AMAX],
                                   .operand = codes_at(m, CODES, QE_FORMAT_E4M3, of.rows, of.ffn, 0),
                                   .retained = codes_at(m, TURNED, QE_FORMAT_E4M3, of.rows, of.ffn, 1)}},
    };
}

static qe_status apart_queue(void *context, const qe_op *op, cudaStream_t stream) {
    qe_op parts[QE_OP_PARTS_MAX];
    assert_int_equal(qe_op_parts(op, parts), 2);
    const qe_status status = qe_cuda_gemm_run(context, &parts[0], stream, NULL);
    return status == QE_OK ? qe_cuda_swiglu_quantize(&parts[1].args.swiglu, stream) : status;
}

/* --- the same bits ----------------------------------------------------------------------------------------------- */

static void change_nothing(qe_op *op) { (void)op; }
static void leave_codes_out(qe_op *op) { op->args.linear.target.operand = (qe_qtensor){0}; }
static void leave_transposed_out(qe_op *op) { op->args.linear.target.retained = (qe_qtensor){0}; }
static void leave_amax_out(qe_op *op) { op->args.linear.target.amax = NULL; }

static void expect_equal(qe_cuda_gemm *gemm, shape of, void (*change)(qe_op *op), const given *what) {
    pair both = {.whole = memory_of(of), .apart = memory_of(of), .from = RESULTS_FROM};
    both.one = op_of(&both.whole, of);
    both.two = op_of(&both.apart, of);
    change(&both.one);
    change(&both.two);
    give(&both.whole, what);
    give(&both.apart, what);
    expect_equal_bits(gemm, &both, apart_queue);
}

static void one_kernel_has_the_bits_of_the_parts(void) {
    static const shape shapes[] = {
        {128, 128, 128}, {256, 256, 128},  {384, 1024, 384},   {2048, 512, 1280},  {16, 128, 16},     {80, 256, 80},
        {144, 384, 176}, {1040, 256, 4112}, {640, 4096, 2560}, {1152, 2048, 2560}, {2048, 128, 8192}, {4096, 256, 96},
    };
    qe_cuda_gemm *gemm = gemm_open();
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        printf("  %u rows, %u to 2 x %u\n", shapes[i].rows, shapes[i].in, shapes[i].ffn);
        expect_equal(gemm, shapes[i], change_nothing, NULL);
    }
    expect_equal(gemm, shapes[2], leave_codes_out, NULL);
    expect_equal(gemm, shapes[2], leave_transposed_out, NULL);
    expect_equal(gemm, shapes[2], leave_amax_out, NULL);
    qe_cuda_gemm_destroy(gemm);
}

/* A row with a NaN, one of zeros, one of the largest codes; gates of some hundreds. */
static void what_is_no_number_has_the_same_bits_too(void) {
    enum { IN = 1024 };
    const shape of = {256, IN, 256};
    unsigned char codes[3 * IN];
    qe_cuda_gemm *gemm = gemm_open();
    memset(codes, 0x38, IN);
    codes[17] = 0x7F;
    memset(codes + IN, 0, IN);
    memset(codes + (size_t)2 * IN, 0x7E, IN);
    expect_equal(gemm, of, change_nothing, &(given){X, codes, sizeof codes});
    expect_equal(gemm, of, change_nothing, &(given){W_SCALE, &(float){0.07f}, sizeof(float)});
    qe_cuda_gemm_destroy(gemm);
}

/* --- what is left to the parts ----------------------------------------------------------------------------------- */

static void be_split(qe_op *op) { op->args.linear.accumulation = QE_ACCUMULATE_SPLIT; }
static void be_current(qe_op *op) { op->args.linear.target.recipe = QE_RECIPE_CURRENT; }
static void be_wide(qe_op *op) { op->args.linear.target.format = QE_FORMAT_E5M2; }
static void add_something(qe_op *op) { op->args.linear.residual = op->args.linear.y; }
static void be_odd(qe_op *op) { op->args.linear.rows -= 8; }
static void be_in_place(qe_op *op) { op->args.linear.target.operand.codes = op->args.linear.x.codes; }
static void share_a_scale(qe_op *op) { op->args.linear.target.operand.scale_inv = op->args.linear.x.scale_inv; }
static void have_no_target(qe_op *op) { op->args.linear.target = (qe_quantize_target){0}; }

static void what_no_kernel_takes_stays_apart(void) {
    static void (*const changes[])(qe_op *op) = {be_split,    be_current,    be_wide,         add_something, be_odd,
                                                 be_in_place, share_a_scale, have_no_target};
    const shape of = {256, 256, 256};
    memory m = memory_of(of);
    const qe_op fits = op_of(&m, of);
    expect_apart(&m, &fits, changes, sizeof changes / sizeof *changes);
}

/* --- the choice -------------------------------------------------------------------------------------------------- */

static void a_race_chooses_once_and_is_written_and_honoured(const char *path) {
    const shape of = {2048, 1024, 4096};
    qe_cuda_gemm *writer = gemm_open(), *reader = gemm_open();
    const qe_cuda_choice *all;
    memory m = memory_of(of);
    const qe_op op = op_of(&m, of);
    const int whole = expect_race(writer, &op, apart_queue);
    assert_int_equal(qe_cuda_choices_write(writer, NULL, path, NULL), QE_OK);
    assert_int_equal(qe_cuda_choices_read(reader, NULL, path, NULL), QE_OK);
    assert_int_equal(qe_cuda_fused_choices(qe_cuda_gemm_fused(reader), &all), 1);
    assert_int_equal(qe_cuda_fused_takes(qe_cuda_gemm_fused(reader), &op), whole);
    memory_free(&m);
    qe_cuda_gemm_destroy(writer);
    qe_cuda_gemm_destroy(reader);
}

/* Whatever a race would say: the file's word is taken, and a second one is refused. */
static void what_is_written_is_taken(void) {
    const shape of = {256, 256, 256};
    qe_cuda_gemm *gemm = gemm_open();
    qe_cuda_fused *fused = qe_cuda_gemm_fused(gemm);
    memory m = memory_of(of);
    const qe_op op = op_of(&m, of);
    const qe_cuda_choice *chosen;
    qe_cuda_choice choice = {.key = "fused linear m256 n512 k256 tn e4m3 e4m3 fast to e4m3"};
    assert_int_equal(qe_cuda_fused_choose(fused, &choice, NULL), QE_OK);
    assert_int_equal(qe_cuda_fused_prepare(fused, &op, NULL, &chosen, NULL), QE_OK);
    assert_null(chosen);
    assert_false(qe_cuda_fused_takes(fused, &op));
    choice.words[0] = 1; /* nobody's */
    assert_int_equal(qe_cuda_fused_choose(fused, &choice, NULL), QE_ERROR_UNSUPPORTED);
    memory_free(&m);
    qe_cuda_gemm_destroy(gemm);
}

/* Run as its parts it would not be what the file says. */
static void a_shape_that_no_kernel_takes_is_not_whole(void) {
    static const char *const keys[] = {"fused linear m256 n512 k256 tn e4m3 e4m3 split to e4m3",
                                       "fused linear m256 n512 k272 tn e4m3 e4m3 fast to e4m3",
                                       "fused linear_input_grad m48 n512 k256 tn e5m2 e4m3 split to e5m2"};
    qe_cuda_gemm *gemm = gemm_open();
    qe_cuda_fused *fused = qe_cuda_gemm_fused(gemm);
    const qe_cuda_choice *choices;
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        qe_cuda_choice choice = {.workspace_bytes = 0};
        qe_fused_shape of;
        qe_fused_way way;
        qe_error error = {0};
        memcpy(choice.key, keys[i], strlen(keys[i]));
        assert_int_equal(qe_fused_choice_parse(&choice, &of, &way, NULL), QE_OK);
        qe_fused_choice_make(&of, QE_FUSED_WHOLE, &choice);
        assert_int_equal(qe_cuda_fused_choose(fused, &choice, &error), QE_ERROR_UNSUPPORTED);
        assert_true(error.message[0] && error.remedy[0]);
        assert_int_equal(qe_cuda_fused_choices(fused, &choices), 0);
        qe_fused_choice_make(&of, QE_FUSED_APART, &choice); /* as it is run */
        assert_int_equal(qe_cuda_fused_choose(fused, &choice, NULL), QE_OK);
        qe_cuda_fused_keep(fused, 0);
    }
    qe_cuda_gemm_destroy(gemm);
}

int main(void) {
    char path[] = "/tmp/test_fused.XXXXXX";
    if (!gpu_open()) return SKIPPED;
    const int file = mkstemp(path);
    assert_true(file >= 0);
    (void)close(file);
    one_kernel_has_the_bits_of_the_parts();
    what_is_no_number_has_the_same_bits_too();
    what_no_kernel_takes_stays_apart();
    a_race_chooses_once_and_is_written_and_honoured(path);
    what_is_written_is_taken();
    a_shape_that_no_kernel_takes_is_not_whole();
    (void)cudaStreamDestroy(aside);
    (void)unlink(path);
    printf("ops of two parts: all holds\n");
    return 0;
}
