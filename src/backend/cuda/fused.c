/* fused.c - see fused.h. */
#include "backend/cuda/fused.h"

#include <stdlib.h>
#include <string.h>

#include "backend/cuda/choices.h"
#include "backend/cuda/fused_choice.h"
#include "backend/cuda/fused_race.h"
#include "backend/cuda/input_grad_swiglu.h"
#include "backend/cuda/linear_rope.h"
#include "backend/cuda/linear_swiglu.h"
#include "base/assert.h"

enum { WAYS_FIRST = 8 };

typedef struct way {
    qe_fused_shape shape;
    qe_fused_way is;
} way;

struct qe_cuda_fused {
    cudaStream_t aside;
    qe_product_device linear, input_grad, rope;
    way *ways;               /* [count], choices [count] beside them */
    qe_cuda_choice *choices;
    uint32_t count, capacity;
};

qe_status qe_cuda_fused_create(cudaStream_t aside, qe_cuda_fused **fused_out, qe_error *error_out) {
    qe_cuda_fused *fused = calloc(1, sizeof *fused);
    if (!fused) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for fused products");
    fused->aside = aside;
    /* A device that has not what they need runs all ops as their parts. */
    if (qe_linear_swiglu_open(&fused->linear) != QE_OK) fused->linear.encode = NULL;
    if (qe_input_grad_swiglu_open(&fused->input_grad) != QE_OK) fused->input_grad.encode = NULL;
    if (qe_linear_rope_open(&fused->rope) != QE_OK) fused->rope.encode = NULL;
    *fused_out = fused;
    return QE_OK;
}

void qe_cuda_fused_destroy(qe_cuda_fused *fused) {
    if (!fused) return;
    free(fused->ways);
    free(fused->choices);
    free(fused);
}

/* --- what kernels take ------------------------------------------------------------------------------------------- */

int qe_cuda_fused_is(qe_op_kind kind) {
    return kind == QE_OP_LINEAR || kind == QE_OP_LINEAR_INPUT_GRAD || kind == QE_OP_LINEAR_ROPE;
}

int qe_cuda_fused_fits(const qe_cuda_fused *fused, const qe_op *op) {
    switch (op->kind) {
        case QE_OP_LINEAR: return fused->linear.encode && qe_linear_swiglu_fits(&op->args.linear);
        case QE_OP_LINEAR_INPUT_GRAD:
            return fused->input_grad.encode && qe_input_grad_swiglu_fits(&op->args.linear_input_grad);
        case QE_OP_LINEAR_ROPE: return fused->rope.encode && qe_linear_rope_fits(&op->args.linear_rope);
        default: return 0;
    }
}

static qe_status whole_queue(const qe_cuda_fused *fused, const qe_op *op, cudaStream_t stream) {
    switch (op->kind) {
        case QE_OP_LINEAR: return qe_linear_swiglu_run(&fused->linear, &op->args.linear, stream);
        case QE_OP_LINEAR_ROPE: return qe_linear_rope_run(&fused->rope, &op->args.linear_rope, stream);
        default: break;
    }
    QE_ASSERT(op->kind == QE_OP_LINEAR_INPUT_GRAD);
    return qe_input_grad_swiglu_run(&fused->input_grad, &op->args.linear_input_grad, stream);
}

/* --- ways -------------------------------------------------------------------------------------------------------- */

static way *way_of(const qe_cuda_fused *fused, const qe_fused_shape *shape) {
    for (uint32_t i = 0; i < fused->count; ++i)
        if (memcmp(&fused->ways[i].shape, shape, sizeof *shape) == 0) return &fused->ways[i];
    return NULL;
}

/* A file that does not say how wide heads are means any. */
static way *way_find(const qe_cuda_fused *fused, const qe_fused_shape *shape) {
    qe_fused_shape any = *shape;
    any.head_dim = 0;
    way *found = way_of(fused, shape);
    return found ? found : way_of(fused, &any);
}

static qe_status room_for_one(qe_cuda_fused *fused, qe_error *error_out) {
    if (fused->count < fused->capacity) return QE_OK;
    const uint32_t capacity = fused->capacity ? 2 * fused->capacity : WAYS_FIRST;
    way *ways = realloc(fused->ways, capacity * sizeof *ways);
    if (ways) fused->ways = ways;
    qe_cuda_choice *choices = ways ? realloc(fused->choices, capacity * sizeof *choices) : NULL;
    if (!choices) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for choices of fused products");
    fused->choices = choices;
    fused->capacity = capacity;
    return QE_OK;
}

/* The caller has made room. */
static const qe_cuda_choice *way_add(qe_cuda_fused *fused, const qe_fused_shape *shape, qe_fused_way is) {
    QE_ASSERT(fused->count < fused->capacity);
    fused->ways[fused->count] = (way){*shape, is};
    qe_fused_choice_make(shape, is, &fused->choices[fused->count]);
    return &fused->choices[fused->count++];
}

/* Of an op that a kernel takes; 0 for others. */
static int shape_of(const qe_cuda_fused *fused, const qe_op *op, qe_fused_shape *shape_out) {
    qe_product product;
    qe_op parts[QE_OP_PARTS_MAX];
    if (qe_op_parts(op, parts) == 1 || !qe_cuda_fused_fits(fused, op)) return 0;
    if (qe_product_of(&parts[0], &product, NULL) != QE_OK) return 0;
    qe_fused_shape_of(op, &product, shape_out);
    return 1;
}

int qe_cuda_fused_takes(const qe_cuda_fused *fused, const qe_op *op) {
    qe_fused_shape shape;
    if (!shape_of(fused, op, &shape)) return 0;
    const way *chosen = way_find(fused, &shape);
    return chosen != NULL && chosen->is == QE_FUSED_WHOLE;
}

qe_status qe_cuda_fused_run(const qe_cuda_fused *fused, const qe_op *op, cudaStream_t stream, qe_error *error_out) {
    QE_ASSERT(qe_cuda_fused_takes(fused, op));
    const qe_status status = whole_queue(fused, op, stream);
    if (status == QE_OK) return QE_OK;
    return qe_cuda_own_refused(status, cudaGetLastError(), qe_op_title(op), error_out);
}

/* What a race needs to know of this object. */
static qe_status race_whole(void *context, const qe_op *op, cudaStream_t stream) {
    return whole_queue(context, op, stream);
}

qe_status qe_cuda_fused_prepare(qe_cuda_fused *fused, const qe_op *op, const qe_fused_apart *apart,
                                const qe_cuda_choice **chosen_out, qe_error *error_out) {
    qe_fused_shape shape;
    int is_whole = 1;
    *chosen_out = NULL;
    if (!shape_of(fused, op, &shape) || way_find(fused, &shape)) return QE_OK;
    QE_TRY(room_for_one(fused, error_out));
    if (apart) {
        const qe_fused_apart whole = {race_whole, fused};
        QE_TRY(qe_fused_race(op, &whole, apart, fused->aside, &is_whole, error_out));
    }
    *chosen_out = way_add(fused, &shape, is_whole ? QE_FUSED_WHOLE : QE_FUSED_APART);
    return QE_OK;
}

/* --- choices ----------------------------------------------------------------------------------------------------- */

uint32_t qe_cuda_fused_choices(const qe_cuda_fused *fused, const qe_cuda_choice **choices_out) {
    *choices_out = fused->choices;
    return fused->count;
}

/* Whole, a shape that no kernel takes would be run as its parts, and not as the file says. */
static int can_be_whole(const qe_cuda_fused *fused, const qe_fused_shape *shape) {
    qe_op op;
    qe_fused_op_of(shape, &op);
    return qe_cuda_fused_fits(fused, &op);
}

qe_status qe_cuda_fused_choose(qe_cuda_fused *fused, const qe_cuda_choice *choice, qe_error *error_out) {
    qe_fused_shape shape;
    qe_fused_way is;
    QE_TRY(qe_fused_choice_parse(choice, &shape, &is, error_out));
    const way *chosen = way_find(fused, &shape);
    if (chosen && chosen->is == is) return QE_OK;
    if (chosen)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "read the file before anything is prepared",
                            "%s has another algorithm already", choice->key);
    if (is == QE_FUSED_WHOLE && !can_be_whole(fused, &shape))
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED,
                            "choose anew with this build on this machine: leave the file of choices out",
                            "%s cannot be one kernel in this build on this device", choice->key);
    QE_TRY(room_for_one(fused, error_out));
    (void)way_add(fused, &shape, is);
    return QE_OK;
}

void qe_cuda_fused_keep(qe_cuda_fused *fused, uint32_t count) {
    if (fused->count > count) fused->count = count;
}
