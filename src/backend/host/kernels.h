/* kernels.h - the table of kernels of one instruction level. Every entry gives the same bits at every level: kernels
 * fuse no multiply-add and reduce over 16 lanes in an order that depends on the shape alone (docs/numerics.md). */
#ifndef QE_HOST_KERNELS_H
#define QE_HOST_KERNELS_H

#include "qeffect/op.h"

/* cblas_sgemm, through which attention multiplies. */
typedef void host_sgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float *a,
                        int lda, const float *b, int ldb, float beta, float *c, int ldc);

enum { HOST_ROW_MAJOR = 101, HOST_NO_TRANSPOSE = 111, HOST_TRANSPOSE = 112 }; /* CBLAS's numbers */

typedef struct host_kernels {
    const char *name; /* "portable", "avx2", "avx512" */
    void (*embed)(const qe_args_embed *args);
    void (*embed_backward)(const qe_args_embed_backward *args);
    void (*norm)(const qe_args_norm *args);
    void (*norm_quantize)(const qe_args_norm *args);
    void (*norm_backward)(const qe_args_norm_backward *args);
    void (*quantize)(const qe_args_quantize *args);
    void (*quantize_weight)(const qe_args_quantize_weight *args);
    void (*decode)(const qe_qtensor *tensor, float *decoded); /* [rows, columns] value * scale_inv */
    void (*rope)(const qe_args_rope *args);
    void (*rope_backward_quantize)(const qe_args_rope *args);
    void (*attention)(const qe_args_attention *args, host_sgemm *sgemm);
    void (*attention_backward)(const qe_args_attention_backward *args, host_sgemm *sgemm);
    void (*swiglu_quantize)(const qe_args_swiglu *args);
    void (*swiglu_backward_quantize)(const qe_args_swiglu_backward *args);
    void (*cross_entropy)(const qe_args_cross_entropy *args);
    void (*grad_norm)(const qe_args_grad_norm *args);
    void (*adamw)(const qe_args_adamw *args);
} host_kernels;

typedef enum host_level { HOST_LEVEL_PORTABLE, HOST_LEVEL_AVX2, HOST_LEVEL_AVX512, HOST_LEVELS } host_level;

/* NULL: this build has no such level (another architecture). */
const host_kernels *qe_host_kernels_of(host_level level);
/* The highest level that the processor and this build have. */
host_level qe_host_level_best(void);

#endif
