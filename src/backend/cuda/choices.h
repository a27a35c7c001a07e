/* choices.h - the text of a file of choices, apart from devices. A first line that says what it is, then one choice a
 * line, fields apart by tabs:
 *
 *   qeffect choices 1
 *   cuBLASLt 13.1.0 <tab> NVIDIA H200 <tab> linear m2048 ... <tab> workspace bytes <tab> eight hexadecimal words
 *
 * The words mean something to that library on that device only; those of a kernel of CUTLASS or of ours say so and
 * which version it is of, and are refused by a build without it. */
#ifndef QE_CUDA_CHOICES_H
#define QE_CUDA_CHOICES_H

#include "backend/cuda/products.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { QE_CHOICE_LINE_BYTES = 768 }; /* names of devices are up to 255 long, of libraries 127, of shapes 95 */

/* What a choice was made with: a library for products, one for attention. None holds a tab or a line end. */
typedef struct qe_choice_maker {
    const char *library, *device, *attention;
} qe_choice_maker;

/* The line, its end included. */
void qe_choice_format(const qe_choice_maker *maker, const qe_cuda_choice *choice, char line[QE_CHOICE_LINE_BYTES]);
/* Requires:   line has no line end; it is cut into pieces.
 * On failure: QE_ERROR_CONFIG: malformed; QE_ERROR_UNSUPPORTED: made with another library or device. */
qe_status qe_choice_parse(const qe_choice_maker *maker, char *line, qe_cuda_choice *choice_out, qe_error *error_out);
/* All lines of an open file, in order. `take` gets each choice; its first failure ends it.
 * On failure: as qe_choice_parse and `take`, but QE_ERROR_CONFIG for an argument that `take` does not like, with the
 * line and a way out in error_out; QE_ERROR_IO. */
qe_status qe_choices_scan(const char *path, const qe_choice_maker *maker,
                          qe_status (*take)(void *context, const qe_cuda_choice *choice, qe_error *error_out),
                          void *context, qe_error *error_out);
/* gemm.c: forgets all choices but the first `count`. Requires: nothing runs that they chose for. */
void qe_cuda_gemm_keep(qe_cuda_gemm *gemm, uint32_t count);
/* attention.cpp: the same. */
void qe_cuda_attention_keep(qe_cuda_attention *attention, uint32_t count);

#ifdef __cplusplus
}
#endif
#endif
