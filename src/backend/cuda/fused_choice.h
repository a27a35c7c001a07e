/* fused_choice.h - what names an op of two parts in a file of choices, and which way it is run: its product and what is
 * made of that one after the other, or one kernel of ours. Bits are the same either way; it is a choice of time alone.
 * Touches no device. */
#ifndef QE_CUDA_FUSED_CHOICE_H
#define QE_CUDA_FUSED_CHOICE_H

#include "backend/cuda/product.h"
#include "backend/cuda/products.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised when a kernel of ours changes so much that races which were run before say nothing any more. */
enum { QE_FUSED_REVISION = 1 };

/* What is made of a product: codes, or its heads are rotated. */
typedef enum qe_fused_result {
    QE_FUSED_E4M3 = QE_FORMAT_E4M3,
    QE_FUSED_E5M2 = QE_FORMAT_E5M2,
    QE_FUSED_ROPE,
    QE_FUSED_RESULTS
} qe_fused_result;

/* What a choice depends on. No holes, so shapes are compared byte by byte. */
typedef struct qe_fused_shape {
    qe_product product;
    uint8_t result; /* qe_fused_result */
    uint8_t reserved[3];
    uint32_t head_dim; /* of rope; 0: any, as files said before they told it; else 0 */
} qe_fused_shape;

typedef enum qe_fused_way { QE_FUSED_APART, QE_FUSED_WHOLE } qe_fused_way;

/* Requires: op has two parts, the first of which is this product. */
void qe_fused_shape_of(const qe_op *op, const qe_product *product, qe_fused_shape *shape_out);
/* Any op of that shape: its operands have no address that could be used, but lie apart, at whole sixteens, and no
 * memory holds what would overlap there. For asking a kernel about shapes alone.
 * Requires: shape is of a choice that was parsed, or of an op. */
void qe_fused_op_of(const qe_fused_shape *shape, qe_op *op_out);
/* "fused linear m2048 n28672 k4096 tn e4m3 e4m3 fast to e4m3", "... to rope 128", and the way's words. */
void qe_fused_choice_make(const qe_fused_shape *shape, qe_fused_way way, qe_cuda_choice *choice_out);
/* Does this key name an op of two parts, and not a product? */
int qe_fused_choice_is(const char *key);
/* The reverse. On failure: QE_ERROR_FORMAT: no such key; QE_ERROR_UNSUPPORTED: a way that this build does not have. */
qe_status qe_fused_choice_parse(const qe_cuda_choice *choice, qe_fused_shape *shape_out, qe_fused_way *way_out,
                                qe_error *error_out);

#ifdef __cplusplus
}
#endif
#endif
