/* te_state.h - the scaling state that Transformer Engine keeps per module, where a file holds it as plain tensors.
 *
 *     <module>.scale_fwd [n]            n = 3 for one GEMM: input, weight, output
 *     <module>.amax_history_fwd [L, n]  row 0 is pending, the newest folded row is the last
 *     <module>.scale_bwd [m]            m = 2: gradient of the output, of the input
 *     <module>.amax_history_bwd [L, m]
 *
 * all F32. Modules with several GEMMs (LayerNormMLP) and `_extra_state`, which is pickled, are not read. */
#ifndef QEFFECT_TE_STATE_H
#define QEFFECT_TE_STATE_H

#include "qeffect/safetensors.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum qe_te_role { QE_TE_INPUT, QE_TE_WEIGHT, QE_TE_GRAD_OUTPUT } qe_te_role;

/* One column of a module's state. The file owns the history. */
typedef struct qe_te_scale {
    float scale;
    float pending;         /* row 0: recorded, not folded */
    uint64_t length;       /* rows, 1 or more */
    const float *history;  /* [length * stride]: this column's row i is history[i * stride] */
    uint64_t stride;
} qe_te_scale;

/* *found_out is 0 where the file has no such state for the module.
 * On failure: QE_ERROR_FORMAT: it has, and not of the dtype and shape above. Thread: any. */
qe_status qe_te_scale_find(const qe_safetensors *file, const char *module, qe_te_role role, qe_te_scale *scale_out,
                           int *found_out, qe_error *error_out);
/* Is the module's state there as a pickle? */
int qe_te_is_pickled(const qe_safetensors *file, const char *module);

#ifdef __cplusplus
}
#endif
#endif
