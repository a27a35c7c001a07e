/* test_fused_rope.c - a product whose queries and keys are rotated, as one kernel: the same bits as the parts one after
 * the other, in every shape that it takes; which way is run is chosen by a race.
 *
 *   test_fused_rope   exit status 0, 1 when something does not hold, 77 where there is no GPU */
#include <math.h>

#include "backend/cuda/kernels.h"
#include "fused_check.h"

/* --- an op's memory ---------------------------------------------------------------------------------------------- */

enum { X, X_SCALE, W, W_SCALE, COSINE, SINE, Y, PLACES };
enum { RESULTS_FROM = Y };

typedef struct shape {
    uint32_t rows, in, sequence, heads, kv_heads, head_dim;
} shape;

static uint32_t columns_of(shape of) { return (of.heads + 2 * of.kv_heads) * of.head_dim; }

static void put_angles(const memory *m, shape of) {
    const size_t half = of.head_dim / 2, count = of.sequence * half;
    float *cosine = malloc(count * sizeof *cosine), *sine = malloc(count * sizeof *sine);
    assert_non_null(cosine);
    assert_non_null(sine);
    for (size_t i = 0; i < count; i++) {
        const double angle = (double)(i / half) * pow(1e4, -2.0 * (double)(i % half) / of.head_dim);
        cosine[i] = (float)cos(angle), sine[i] = (float)sin(angle);
    }
    give(m, &(given){COSINE, cosine, count * sizeof *cosine});
    give(m, &(given){SINE, sine, count * sizeof *sine});
    free(cosine);
    free(sine);
}

static memory memory_of(shape of) {
    const size_t rows = of.rows, in = of.in, columns = columns_of(of);
    const size_t table = (size_t)of.sequence * (of.head_dim / 2) * sizeof(float);
    const size_t bytes[PLACES] = {rows * in, 4, columns * in, 4, table, table, rows * columns * 2};
    const memory m = memory_place(bytes, PLACES);
    put_random(&m, X, QE_FORMAT_E4M3, rows * in, 1);
    put_random(&m, W, QE_FORMAT_E4M3, columns * in, 2);
    put_float(&m, X_SCALE, 0.0171f);
    put_float(&m, W_SCALE, 0.0007f);
    put_angles(&m, of);
    return m;
}

static qe_op op_of(const memory *m, shape of) {
    return (qe_op){
        .kind = QE_OP_LINEAR_ROPE,
        .args.linear_rope = {.x = codes_at(m, X, QE_FORMAT_E4M3, of.rows, of.in, 0),
                             .w = codes_at(m, W, QE_FORMAT_E4M3, columns_of(of), of.in, 0),
                             .y = m->at[Y], .cosine = (const float *)m->at[COSINE],
                             .sine = (const float *)m->at[SINE], .rows = of.rows, .in = of.in,
                             .sequence = of.sequence, .heads = of.heads, .kv_heads = of.kv_heads,
                             .head_dim = of.head_dim, .accumulation = QE_ACCUMULATE_FAST},
    };
}

static qe_status apart_queue(void *context, const qe_op *op, cudaStream_t stream) {
    qe_op parts[QE_OP_PARTS_MAX];
    assert_int_equal(qe_op_parts(op, parts), 2);
    const qe_status status = qe_cuda_gemm_run(context, &parts[0], stream, NULL);
    return status == QE_OK ? qe_cuda_rope(&parts[1].args.rope, stream) : status;
}

/* --- the same bits ----------------------------------------------------------------------------------------------- */

static void expect_equal(qe_cuda_gemm *gemm, shape of, const given *what) {
    pair both = {.whole = memory_of(of), .apart = memory_of(of), .from = RESULTS_FROM};
    both.one = op_of(&both.whole, of);
    both.two = op_of(&both.apart, of);
    give(&both.whole, what);
    give(&both.apart, what);
    expect_equal_bits(gemm, &both, apart_queue);
}

/* Rows and columns beyond whole tiles, heads beyond whole tiles, fewer and more tiles than blocks, sequences that end
 * within a tile. (cuBLASLt wants whole sixteens of rows.) */
static void one_kernel_has_the_bits_of_the_parts(void) {
    static const shape shapes[] = {
        {128, 1024, 128, 4, 1, 64},    {256, 1024, 256, 4, 1, 128},  {16, 1152, 16, 1, 1, 64},
        {48, 1024, 24, 2, 1, 256},     {1040, 2176, 520, 6, 3, 128}, {2048, 1024, 2048, 16, 16, 64},
        {2048, 2048, 1024, 32, 4, 64}, {4096, 1280, 64, 1, 1, 64},   {2048, 4096, 2048, 32, 8, 128},
        {8192, 1024, 8192, 5, 2, 128},
    };
    qe_cuda_gemm *gemm = gemm_open();
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        printf("  %u rows in sequences of %u, %u to %u/%u heads of %u\n", shapes[i].rows, shapes[i].sequence,
               shapes[i].in, shapes[i].heads, shapes[i].kv_heads, shapes[i].head_dim);
        expect_equal(gemm, shapes[i], NULL);
    }
    qe_cuda_gemm_destroy(gemm);
}

/* A row with a NaN, one of zeros, one of the largest codes; angles that are no numbers. */
static void what_is_no_number_has_the_same_bits_too(void) {
    enum { IN = 1024 };
    const shape of = {256, IN, 256, 4, 2, 128};
    const float angles[] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1e-40f, 3e38f};
    unsigned char codes[3 * IN];
    qe_cuda_gemm *gemm = gemm_open();
    memset(codes, 0x38, IN);
    codes[17] = 0x7F;
    memset(codes + IN, 0, IN);
    memset(codes + (size_t)2 * IN, 0x7E, IN);
    expect_equal(gemm, of, &(given){X, codes, sizeof codes});
    expect_equal(gemm, of, &(given){SINE, angles, sizeof angles});
    qe_cuda_gemm_destroy(gemm);
}

/* --- what is left to the parts ----------------------------------------------------------------------------------- */

#define ARGS(op) ((op)->args.linear_rope)
static void be_split(qe_op *op) { ARGS(op).accumulation = QE_ACCUMULATE_SPLIT; }
static void be_short(qe_op *op) { ARGS(op).in -= 128; }
static void have_narrow_heads(qe_op *op) { ARGS(op).heads *= 4, ARGS(op).kv_heads *= 4, ARGS(op).head_dim /= 4; }
static void be_in_place(qe_op *op) { ARGS(op).y = ARGS(op).x.codes; }
static void be_elsewhere(qe_op *op) { ARGS(op).y = (char *)ARGS(op).y + 2; }

static void what_no_kernel_takes_stays_apart(void) {
    static void (*const changes[])(qe_op *op) = {be_split, be_short, have_narrow_heads, be_in_place, be_elsewhere};
    const shape of = {256, 1024, 256, 4, 1, 128};
    memory m = memory_of(of);
    const qe_op fits = op_of(&m, of);
    expect_apart(&m, &fits, changes, sizeof changes / sizeof *changes);
}

static void a_race_chooses_once(void) {
    const shape of = {2048, 4096, 2048, 32, 8, 128};
    memory m = memory_of(of);
    const qe_op op = op_of(&m, of);
    expect_race_alone(&m, &op, apart_queue);
}

/* A choice is of one width of heads; in a file from before there were widths it is of any. */
static void a_file_is_honoured_for_the_heads_that_it_names(void) {
    static const struct {
        const char *key;
        int names_wide, names_narrow;
    } files[] = {{"fused linear m256 n768 k1024 tn e4m3 e4m3 fast to rope", 1, 1},
                 {"fused linear m256 n768 k1024 tn e4m3 e4m3 fast to rope 128", 1, 0}};
    const shape of = {256, 1024, 256, 4, 1, 128};
    memory m = memory_of(of);
    const qe_op wide = op_of(&m, of), narrow = op_of(&m, (shape){256, 1024, 256, 8, 2, 64});
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        qe_cuda_gemm *gemm = gemm_open();
        qe_cuda_fused *fused = qe_cuda_gemm_fused(gemm);
        qe_cuda_choice apart = {.workspace_bytes = 0};
        const qe_cuda_choice *chosen;
        memcpy(apart.key, files[i].key, strlen(files[i].key));
        assert_int_equal(qe_cuda_fused_choose(fused, &apart, NULL), QE_OK);
        assert_int_equal(qe_cuda_fused_prepare(fused, &wide, NULL, &chosen, NULL), QE_OK);
        assert_int_equal(chosen == NULL, files[i].names_wide);
        assert_int_equal(qe_cuda_fused_takes(fused, &wide), !files[i].names_wide);
        assert_int_equal(qe_cuda_fused_prepare(fused, &narrow, NULL, &chosen, NULL), QE_OK);
        assert_int_equal(chosen == NULL, files[i].names_narrow);
        assert_int_equal(qe_cuda_fused_takes(fused, &narrow), !files[i].names_narrow);
        qe_cuda_gemm_destroy(gemm);
    }
    memory_free(&m);
}

int main(void) {
    static void (*const cases[])(void) = {one_kernel_has_the_bits_of_the_parts, what_is_no_number_has_the_same_bits_too,
                                          what_no_kernel_takes_stays_apart, a_race_chooses_once,
                                          a_file_is_honoured_for_the_heads_that_it_names};
    return run_all(cases, sizeof cases / sizeof *cases, "products with rope");
}
