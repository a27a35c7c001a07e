/* te_state.c - finds columns of Transformer Engine's scaling state by module and role. */
#include "qeffect/te_state.h"

#include <stdio.h>

#include "store/file.h"

enum { FORWARD_SLOTS = 3, BACKWARD_SLOTS = 2 }; /* per GEMM */

static const qe_tensor *part(const qe_safetensors *file, const char *module, const char *name) {
    char whole[512];
    int length = snprintf(whole, sizeof whole, "%s.%s", module, name);
    return length > 0 && length < (int)sizeof whole ? qe_safetensors_find(file, whole) : NULL;
}

static qe_status refuse(const char *module, const char *what, qe_error *error_out) {
    static const char remedy[] = "store scale_fwd [3], amax_history_fwd [L, 3], scale_bwd [2], amax_history_bwd [L, 2]";
    return qe_error_set(error_out, QE_ERROR_FORMAT, remedy,
                        "the Transformer Engine state of %.96s %s", module, what);
}

static int is_scale(const qe_tensor *tensor, uint64_t slots) {
    return tensor->dtype == QE_DTYPE_F32 && tensor->rank == 1 && tensor->shape[0] == slots;
}

static int is_history(const qe_tensor *tensor, uint64_t slots) {
    return tensor->dtype == QE_DTYPE_F32 && tensor->rank == 2 && tensor->shape[0] > 0 && tensor->shape[1] == slots;
}

qe_status qe_te_scale_find(const qe_safetensors *file, const char *module, qe_te_role role, qe_te_scale *scale_out,
                           int *found_out, qe_error *error_out) {
    int is_forward = role != QE_TE_GRAD_OUTPUT;
    uint64_t slots = is_forward ? FORWARD_SLOTS : BACKWARD_SLOTS, slot = role == QE_TE_WEIGHT ? 1 : 0;
    const qe_tensor *scale = part(file, module, is_forward ? "scale_fwd" : "scale_bwd");
    const qe_tensor *history = part(file, module, is_forward ? "amax_history_fwd" : "amax_history_bwd");
    *found_out = 0;
    if (scale == NULL && history == NULL) return QE_OK;
    if (scale == NULL || history == NULL) return refuse(module, "has a scale or a history alone", error_out);
    if (!is_scale(scale, slots) || !is_history(history, slots))
        return refuse(module, "is not F32 of the shapes of one GEMM", error_out);
    const float *rows = (const float *)history->data + slot;
    *scale_out = (qe_te_scale){.scale = ((const float *)scale->data)[slot],
                               .pending = rows[0],
                               .length = history->shape[0],
                               .history = rows,
                               .stride = slots};
    *found_out = 1;
    return QE_OK;
}

int qe_te_is_pickled(const qe_safetensors *file, const char *module) {
    return part(file, module, "_extra_state") != NULL;
}
