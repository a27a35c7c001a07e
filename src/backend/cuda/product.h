/* product.h - a linear op seen as one matrix product, apart from any library: what it multiplies, how that lies, and
 * the words that name it in a file of choices. Knows nothing of cuBLASLt; touches no device.
 *
 *   result [m, n] = first [m, k] second [k, n] (+ added)        all row-major
 *
 *   op           | first | second | m    | n   | k    | result
 *   linear       | x     | w'     | rows | out | in   | bf16
 *   input grad   | dy    | w      | rows | in  | out  | bf16
 *   weight grad  | dy'   | x      | out  | in  | rows | fp32, in place */
#ifndef QE_CUDA_PRODUCT_H
#define QE_CUDA_PRODUCT_H

#include "qeffect/op.h"
#include "qeffect/status.h"

enum { QE_PRODUCT_KEY_BYTES = 96 }; /* qe_cuda_choice.key */

/* The shape: all that a choice of algorithm depends on. No holes, so shapes are compared byte by byte. */
typedef struct qe_product {
    uint32_t m, n, k;
    uint8_t kind;         /* qe_op_kind */
    uint8_t first, second; /* qe_format of the operands */
    uint8_t first_along, second_along; /* 1: neighbours in memory are neighbours along k */
    uint8_t accumulation; /* qe_accumulation; QE_ACCUMULATE_SPLIT for wide operands, which have no other */
    uint8_t adds;         /* 1: something is added to the product (weight gradients: always, see product.c) */
    uint8_t reserved;
} qe_product;

/* What one run of it reads and writes. */
typedef struct qe_product_data {
    const void *first, *second;
    const float *first_scale, *second_scale; /* inverse scales on the device; NULL for wide operands */
    const void *added;                       /* may equal result */
    void *result;
    float beta;                              /* 0: `added` is not read */
} qe_product_data;

/* An algorithm for a product, as a file of choices keeps it: cublasLtMatmulAlgo_t, or further.h's. */
typedef struct qe_algorithm {
    uint64_t words[8];
} qe_algorithm;

/* Requires:   op is a linear, input or weight gradient op.
 * On failure: QE_ERROR_UNSUPPORTED, in words, for what no matrix unit takes (two E5M2 operands; 8-bit operands that
 *             do not lie along k, or whose sizes are no multiples of 16); QE_ERROR_ARGUMENT for another op. */
qe_status qe_product_of(const qe_op *op, qe_product *product_out, qe_error *error_out);
/* Requires: qe_product_of succeeded for op. Retained block codes are where the caller decodes them: the scratches. */
void qe_product_data_of(const qe_op *op, qe_product_data *data_out);
/* Must this op's retained tensors be decoded into its scratches first? */
int qe_product_decodes(const qe_args_linear_weight_grad *args);
/* qe_format of the result as the product makes it: fp32 for weight gradients and for fp32 operands, else bf16. */
qe_format qe_product_result(const qe_product *product);
/* "linear m2048 n6144 k4096 tn e4m3 e4m3 fast add" */
void qe_product_key(const qe_product *product, char key[QE_PRODUCT_KEY_BYTES]);
/* The reverse. On failure: QE_ERROR_FORMAT. */
qe_status qe_product_parse(const char *key, qe_product *product_out, qe_error *error_out);

#endif
