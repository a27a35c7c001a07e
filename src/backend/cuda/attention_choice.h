/* attention_choice.h - what names an attention, forward or backward, in a file of choices, and the algorithms that it
 * may have. Touches no device. */
#ifndef QE_CUDA_ATTENTION_CHOICE_H
#define QE_CUDA_ATTENTION_CHOICE_H

#include "backend/cuda/products.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised when our kernels change what they compute, so that files of choices made before are refused. */
enum { QE_ATTENTION_OWN_REVISION = 2, QE_ATTENTION_FORWARD_REVISION = 1 };

typedef enum qe_attention_algorithm { QE_ATTENTION_CUDNN, QE_ATTENTION_OWN } qe_attention_algorithm;

/* "attention s1 t2048 h32 kv8 d128 fixed", or "attention_backward" and in the end "any": any order; and the algorithm's
 * words. `op` is one of these two; its addresses and its target say nothing. */
void qe_attention_choice_make(const qe_op *op, qe_attention_algorithm algorithm, qe_cuda_choice *choice_out);
/* Does this key name attention, and not a product? */
int qe_attention_choice_is(const char *key);
/* The reverse; addresses are NULL.
 * On failure: QE_ERROR_FORMAT: no such key; QE_ERROR_UNSUPPORTED: an algorithm that this build does not have. */
qe_status qe_attention_choice_parse(const qe_cuda_choice *choice, qe_op *op_out, qe_attention_algorithm *algorithm_out,
                                    qe_error *error_out);

#ifdef __cplusplus
}
#endif
#endif
