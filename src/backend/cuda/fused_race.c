/* fused_race.c - see fused_race.h. Each side runs for some 20 ms before the other has its turn: at a chip's limit of
 * power a kernel that draws less runs faster, which no short burst shows. */
#include "backend/cuda/fused_race.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/product.h"
#include "backend/cuda/product_kernels.h"
#include "base/assert.h"

enum {
    SIDES = 2,
    ROUNDS = 5,
    SETS = 2,            /* of operands, by turns: nothing waits in the cache for the next launch */
    PIECES_MAX = 16,     /* addresses of an op */
    ALIGN_BYTES = 1024,
    LAUNCHES_MAX = 512,
};
#define TURN_MILLISECONDS 20.0f
/* Random codes have a deviation of 64: so that results have one of about 1. */
#define CODE_DEVIATION 64.0f
#define RESULT_SCALE 16.0f

/* What an address of the op is given instead. */
typedef struct piece {
    size_t offset;      /* of the address in qe_op */
    uint64_t bytes;
    qe_format format;   /* random, if `is_random`; else a float of `value` */
    int is_random;
    float value;
} piece;

typedef struct pieces {
    piece of[PIECES_MAX];
    uint32_t count;
} pieces;

typedef struct race {
    const qe_fused_apart *sides[SIDES];
    qe_op ops[SETS];
    pieces all;
    char *arena;
    uint64_t set_bytes;
    cudaStream_t stream;
    cudaEvent_t begin, end;
    float samples[SIDES][ROUNDS];
} race;

/* --- operands ---------------------------------------------------------------------------------------------------- */

static void add(pieces *all, size_t offset, piece what) {
    QE_ASSERT(all->count < PIECES_MAX);
    what.offset = offset;
    all->of[all->count++] = what;
}

static void add_codes(pieces *all, size_t tensor, uint64_t bytes, qe_format format) {
    add(all, tensor + offsetof(qe_qtensor, codes), (piece){.bytes = bytes, .format = format, .is_random = 1});
}

static void add_float(pieces *all, size_t offset, float value) {
    add(all, offset, (piece){.bytes = sizeof(float), .value = value});
}

static void add_target(pieces *all, size_t target, const qe_quantize_target *is, uint64_t bytes) {
    add_float(all, target + offsetof(qe_quantize_target, scale), RESULT_SCALE);
    if (is->amax) add_float(all, target + offsetof(qe_quantize_target, amax), 0.0f);
    const size_t tensors[] = {offsetof(qe_quantize_target, operand), offsetof(qe_quantize_target, retained)};
    const qe_qtensor *of[] = {&is->operand, &is->retained};
    for (int i = 0; i < 2; ++i) {
        if (!of[i]->codes) continue;
        add_codes(all, target + tensors[i], bytes, (qe_format)is->format);
        add_float(all, target + tensors[i] + offsetof(qe_qtensor, scale_inv), 1.0f);
    }
}

#define AT(member) (offsetof(qe_op, args) + offsetof(qe_op_args, member))

static void linear_pieces(const qe_args_linear *args, pieces *all) {
    const uint64_t rows = args->rows, in = args->in, out = args->out;
    add_codes(all, AT(linear.x), rows * in, (qe_format)args->x.format);
    add_float(all, AT(linear.x.scale_inv), 1.0f / CODE_DEVIATION);
    add_codes(all, AT(linear.w), out * in, (qe_format)args->w.format);
    add_float(all, AT(linear.w.scale_inv), 1.0f / (CODE_DEVIATION * sqrtf((float)in)));
    add(all, AT(linear.y), (piece){.bytes = rows * out * 2, .format = QE_FORMAT_BF16, .is_random = 1});
    add_target(all, AT(linear.target), &args->target, rows * out / 2);
}

/* What parts write between each other is there for both sides. */
static void input_grad_pieces(const qe_args_linear_input_grad *args, pieces *all) {
    const uint64_t rows = args->rows, in = args->in, out = args->out;
    const piece values = {.bytes = rows * in * 2, .format = QE_FORMAT_BF16, .is_random = 1};
    const piece pairs = {.bytes = rows * in * 4, .format = QE_FORMAT_BF16, .is_random = 1};
    add_codes(all, AT(linear_input_grad.dy), rows * out, (qe_format)args->dy.format);
    add_float(all, AT(linear_input_grad.dy.scale_inv), 1.0f / CODE_DEVIATION);
    add_codes(all, AT(linear_input_grad.w), out * in, (qe_format)args->w.format);
    add_float(all, AT(linear_input_grad.w.scale_inv), 1.0f / (CODE_DEVIATION * sqrtf((float)out)));
    add(all, AT(linear_input_grad.dx), values);
    add(all, AT(linear_input_grad.gate_up), pairs);
    if (args->dgate_up) add(all, AT(linear_input_grad.dgate_up), pairs);
    add_target(all, AT(linear_input_grad.target), &args->target, rows * in * 2);
}

/* Values that are no angles' cosines and sines do as well. */
static void rope_pieces(const qe_args_linear_rope *args, pieces *all) {
    const uint64_t rows = args->rows, in = args->in, out = (args->heads + 2ull * args->kv_heads) * args->head_dim;
    const uint64_t turns = (uint64_t)args->sequence * (args->head_dim / 2);
    const piece table = {.bytes = turns * sizeof(float), .format = QE_FORMAT_FP32, .is_random = 1};
    add_codes(all, AT(linear_rope.x), rows * in, (qe_format)args->x.format);
    add_float(all, AT(linear_rope.x.scale_inv), 1.0f / CODE_DEVIATION);
    add_codes(all, AT(linear_rope.w), out * in, (qe_format)args->w.format);
    add_float(all, AT(linear_rope.w.scale_inv), 1.0f / (CODE_DEVIATION * sqrtf((float)in)));
    add(all, AT(linear_rope.y), (piece){.bytes = rows * out * 2, .format = QE_FORMAT_BF16, .is_random = 1});
    add(all, AT(linear_rope.cosine), table);
    add(all, AT(linear_rope.sine), table);
}

static void pieces_of(const qe_op *op, pieces *all) {
    QE_ASSERT(qe_cuda_fused_is(op->kind));
    switch (op->kind) {
        case QE_OP_LINEAR: linear_pieces(&op->args.linear, all); break;
        case QE_OP_LINEAR_ROPE: rope_pieces(&op->args.linear_rope, all); break;
        default: input_grad_pieces(&op->args.linear_input_grad, all); break;
    }
}

static uint64_t padded(uint64_t bytes) { return (bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES; }

static qe_status piece_fill(const piece *p, void *at, uint64_t seed, cudaStream_t stream) {
    if (p->is_random) return qe_cuda_random(p->format, at, p->bytes / qe_format_bytes(p->format), seed, stream);
    return cudaMemcpyAsync(at, &p->value, sizeof p->value, cudaMemcpyHostToDevice, stream) == cudaSuccess
               ? QE_OK
               : QE_ERROR_DEVICE;
}

static qe_status sets_fill(race *r, const qe_op *op) {
    char *at = r->arena;
    for (int set = 0; set < SETS; ++set) {
        r->ops[set] = *op;
        for (uint32_t i = 0; i < r->all.count; ++i) {
            const piece *p = &r->all.of[i];
            memcpy((char *)&r->ops[set] + p->offset, &at, sizeof at);
            QE_TRY(piece_fill(p, at, (uint64_t)set * PIECES_MAX + i, r->stream));
            at += padded(p->bytes);
        }
    }
    return QE_OK;
}

/* --- turns ------------------------------------------------------------------------------------------------------- */

static qe_status launches(race *r, int side, uint32_t count, float *milliseconds_out) {
    const qe_fused_apart *of = r->sides[side];
    if (cudaEventRecord(r->begin, r->stream) != cudaSuccess) return QE_ERROR_DEVICE;
    for (uint32_t i = 0; i < count; ++i) QE_TRY(of->queue(of->context, &r->ops[i % SETS], r->stream));
    if (cudaEventRecord(r->end, r->stream) != cudaSuccess) return QE_ERROR_DEVICE;
    if (cudaEventSynchronize(r->end) != cudaSuccess) return QE_ERROR_DEVICE;
    return cudaEventElapsedTime(milliseconds_out, r->begin, r->end) == cudaSuccess ? QE_OK : QE_ERROR_DEVICE;
}

static int float_order(const void *left, const void *right) {
    const float a = *(const float *)left, b = *(const float *)right;
    return (a > b) - (a < b);
}

static qe_status turns(race *r, int *is_whole_out) {
    float one = 0.0f;
    for (int side = 0; side < SIDES; ++side) QE_TRY(launches(r, side, SETS, &one)); /* kernels are loaded now */
    QE_TRY(launches(r, 0, SETS, &one));
    const float wanted = one > 0.0f ? TURN_MILLISECONDS / (one / SETS) : (float)LAUNCHES_MAX;
    const uint32_t count = wanted < LAUNCHES_MAX ? (uint32_t)wanted + 1 : LAUNCHES_MAX;
    for (int round = 0; round < ROUNDS; ++round)
        for (int side = 0; side < SIDES; ++side) QE_TRY(launches(r, side, count, &r->samples[side][round]));
    for (int side = 0; side < SIDES; ++side) qsort(r->samples[side], ROUNDS, sizeof(float), float_order);
    *is_whole_out = r->samples[0][ROUNDS / 2] <= r->samples[1][ROUNDS / 2];
    return QE_OK;
}

static qe_status race_run(race *r, const qe_op *op, int *is_whole_out) {
    if (cudaEventCreate(&r->begin) != cudaSuccess || cudaEventCreate(&r->end) != cudaSuccess) return QE_ERROR_DEVICE;
    QE_TRY(sets_fill(r, op));
    return turns(r, is_whole_out);
}

qe_status qe_fused_race(const qe_op *op, const qe_fused_apart *whole, const qe_fused_apart *apart, cudaStream_t stream,
                        int *is_whole_out, qe_error *error_out) {
    race *r = calloc(1, sizeof *r);
    if (!r) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to race a fused product");
    r->sides[0] = whole, r->sides[1] = apart, r->stream = stream;
    pieces_of(op, &r->all);
    for (uint32_t i = 0; i < r->all.count; ++i) r->set_bytes += padded(r->all.of[i].bytes);
    qe_status status = QE_OK;
    if (cudaMalloc((void **)&r->arena, SETS * r->set_bytes) != cudaSuccess) {
        (void)cudaGetLastError();
        *is_whole_out = 1;
    } else {
        status = race_run(r, op, is_whole_out);
        if (status != QE_OK) status = qe_cuda_failure(cudaGetLastError(), "racing a fused product", error_out);
    }
    (void)cudaFree(r->arena);
    if (r->begin) (void)cudaEventDestroy(r->begin);
    if (r->end) (void)cudaEventDestroy(r->end);
    free(r);
    return status;
}
