/* test_fused_input_grad.c - input gradients with swiglu's backward behind them that one kernel does: the same bits as
 * the parts one after the other, in every shape that it takes; what it does not take is left to the parts; a race
 * between the two can be run.
 *
 *   test_fused_input_grad   exit status 0, 1 when something does not hold, 77 where there is no GPU */
#include "backend/cuda/kernels.h"
#include "fused_check.h"

/* --- an op's memory ---------------------------------------------------------------------------------------------- */

enum { DY, DY_SCALE, W, W_SCALE, GATE_UP, SCALE, DX, DGATE_UP, AMAX, CODES, CODES_SCALE, TURNED, TURNED_SCALE, PLACES };
enum { RESULTS_FROM = AMAX }; /* dx and dgate_up are scratch: not written where one pass does all */

typedef struct shape {
    uint32_t rows, out, in;
    qe_format format; /* of dy and of the codes */
} shape;

static memory memory_of(shape of) {
    const size_t rows = of.rows, out = of.out, in = of.in;
    const size_t bytes[PLACES] = {rows * out,    4, out * in,      4, rows * in * 4, 4, rows * in * 2, rows * in * 4, 4,
                                  rows * in * 2, 4, rows * in * 2, 4};
    const memory m = memory_place(bytes, PLACES);
    put_random(&m, DY, of.format, rows * out, 1);
    put_random(&m, W, QE_FORMAT_E4M3, out * in, 2);
    put_random(&m, GATE_UP, QE_FORMAT_BF16, rows * in * 2, 3);
    put_float(&m, DY_SCALE, 0.0171f);
    put_float(&m, W_SCALE, 0.0007f);
    put_float(&m, SCALE, 9.7f);
    put_float(&m, AMAX, 0.0f);
    return m;
}

static qe_op op_of(const memory *m, shape of) {
    return (qe_op){
        .kind = QE_OP_LINEAR_INPUT_GRAD,
        .args.linear_input_grad = {
            .dy = codes_at(m, DY, of.format, of.rows, of.out, 0), .w = codes_at(m, W, QE_FORMAT_E4M3, of.out, of.in, 1),
            .dx = m->at[DX], .rows = of.rows, .in = of.in, .out = of.out, .accumulation = QE_ACCUMULATE_SPLIT,
            .gate_up = m->at[GATE_UP], .dgate_up = m->at[DGATE_UP],
            .target = {.recipe = QE_RECIPE_DELAYED, .format = (uint8_t)of.format,
                       .scale = (const float *)m->at[SCALE], .amax = (float *)m->at[AMAX],
                       .operand = codes_at(m, CODES, of.format, of.rows, 2 * of.in, 0),
                       .retained = codes_at(m, TURNED, of.format, of.rows, 2 * of.in, 1)}},
    };
}

static qe_status apart_queue(void *context, const qe_op *op, cudaStream_t stream) {
    qe_op parts[QE_OP_PARTS_MAX];
    assert_int_equal(qe_op_parts(op, parts), 2);
    const qe_status status = qe_cuda_gemm_run(context, &parts[0], stream, NULL);
    return status == QE_OK ? qe_cuda_swiglu_backward_quantize(&parts[1].args.swiglu_backward, stream) : status;
}

/* --- the same bits ----------------------------------------------------------------------------------------------- */

static void change_nothing(qe_op *op) { (void)op; }
static void leave_amax_out(qe_op *op) { op->args.linear_input_grad.target.amax = NULL; }

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

/* Both ways to multiply, whole tiles and such that are cut at both edges; the last as in a layer. */
static void one_kernel_has_the_bits_of_the_parts(void) {
    static const shape shapes[] = {
        {128, 128, 128, QE_FORMAT_E5M2},    {32, 128, 64, QE_FORMAT_E4M3},      {352, 1024, 448, QE_FORMAT_E5M2},
        {2048, 512, 1280, QE_FORMAT_E4M3},  {2048, 2048, 8192, QE_FORMAT_E5M2}, {352, 4096, 448, QE_FORMAT_E4M3},
        {1952, 384, 12352, QE_FORMAT_E4M3}, {96, 5120, 320, QE_FORMAT_E5M2},    {2048, 4096, 14336, QE_FORMAT_E5M2}};
    qe_cuda_gemm *gemm = gemm_open();
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        printf("  %u rows, %u to %u\n", shapes[i].rows, shapes[i].out, shapes[i].in);
        expect_equal(gemm, shapes[i], change_nothing, NULL);
    }
    expect_equal(gemm, shapes[2], leave_amax_out, NULL);
    qe_cuda_gemm_destroy(gemm);
}

/* A row of dy with a NaN, one of zeros, one of the largest codes; gates and ups that are no numbers, or large ones. */
static void what_is_no_number_has_the_same_bits_too(void) {
    enum { OUT = 1024, GATES = 512 };
    static const uint16_t odd[] = {0x7F80, 0xFF80, 0x7FC0, 0xFF81, 0x0000, 0x8000, 0x7F7F, 0xFF7F,
                                   0x0001, 0x42AE, 0xC2AE, 0x42AF, 0xC2AF, 0x3F80, 0xBF80, 0x43C8};
    const shape of = {256, OUT, 256, QE_FORMAT_E5M2};
    unsigned char codes[3 * OUT];
    uint16_t gates[GATES];
    qe_cuda_gemm *gemm = gemm_open();
    memset(codes, 0x38, OUT);
    codes[17] = 0x7F;
    memset(codes + OUT, 0, OUT);
    memset(codes + (size_t)2 * OUT, 0x7B, OUT);
    for (size_t i = 0; i < GATES; i++) gates[i] = odd[i * 7 % (sizeof odd / sizeof *odd)];
    expect_equal(gemm, of, change_nothing, &(given){DY, codes, sizeof codes});
    expect_equal(gemm, of, change_nothing, &(given){GATE_UP, gates, sizeof gates});
    for (size_t i = 0; i < GATES; i++) gates[i] = i % 5 == 0 ? 0xFFC1 : 0x3F80; /* no large one beside a NaN */
    expect_equal(gemm, of, change_nothing, &(given){GATE_UP, gates, sizeof gates});
    qe_cuda_gemm_destroy(gemm);
}

/* --- what is left to the parts ----------------------------------------------------------------------------------- */

#define ARGS(op) ((op)->args.linear_input_grad)
static void be_fast(qe_op *op) { ARGS(op).accumulation = QE_ACCUMULATE_FAST; }
static void be_current(qe_op *op) { ARGS(op).target.recipe = QE_RECIPE_CURRENT; }
static void be_of_another_format(qe_op *op) { ARGS(op).target.format = QE_FORMAT_E4M3; }
static void be_odd(qe_op *op) { ARGS(op).rows -= 16; }
static void be_narrow(qe_op *op) { ARGS(op).in -= 32; }
static void be_in_place(qe_op *op) { ARGS(op).target.operand.codes = ARGS(op).dy.codes; }
static void share_a_scale(qe_op *op) { ARGS(op).target.operand.scale_inv = ARGS(op).dy.scale_inv; }
static void leave_codes_out(qe_op *op) { ARGS(op).target.operand = (qe_qtensor){0}; }
static void have_no_target(qe_op *op) { ARGS(op).target = (qe_quantize_target){0}; }

static void what_no_kernel_takes_stays_apart(void) {
    static void (*const changes[])(qe_op *op) = {be_fast,   be_current,  be_of_another_format, be_odd,
                                                 be_narrow, be_in_place, share_a_scale,        leave_codes_out,
                                                 have_no_target};
    const shape of = {256, 256, 256, QE_FORMAT_E5M2};
    memory m = memory_of(of);
    const qe_op fits = op_of(&m, of);
    expect_apart(&m, &fits, changes, sizeof changes / sizeof *changes);
}

static void a_race_chooses_once(void) {
    const shape of = {2048, 1024, 4096, QE_FORMAT_E5M2};
    memory m = memory_of(of);
    const qe_op op = op_of(&m, of);
    expect_race_alone(&m, &op, apart_queue);
}

int main(void) {
    static void (*const cases[])(void) = {one_kernel_has_the_bits_of_the_parts, what_is_no_number_has_the_same_bits_too,
                                          what_no_kernel_takes_stays_apart, a_race_chooses_once};
    return run_all(cases, sizeof cases / sizeof *cases, "input gradients of two parts");
}
