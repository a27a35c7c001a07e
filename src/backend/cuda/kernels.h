/* kernels.h - the kernels of the cuda backend, one launcher per op. Activations are bf16, operands are codes
 * (QE_OPERANDS_CODES in op.h); master weights, gradients, moments and statistics are fp32.
 *
 * Every launcher queues its kernels on `stream` and returns; it allocates nothing and asks the device nothing, so it
 * may be captured. Host structures (args, tables of pointers) are read during the call only.
 * On failure: QE_ERROR_DEVICE, and nothing was queued; the caller asks cudaGetLastError for the cause. QE_ERROR_LIMIT:
 *             a launch would have more blocks than there can be (norms of 65,535 x 32 rows go); told by preparing, too.
 * Bits:       the same for the same input on the same device, whatever else runs. */
#ifndef QE_CUDA_KERNELS_H
#define QE_CUDA_KERNELS_H

#include <cuda_runtime_api.h>
#include "qeffect/op.h"

#ifdef __cplusplus
extern "C" {
#endif

qe_status qe_cuda_embed(const qe_args_embed *args, cudaStream_t stream);
qe_status qe_cuda_embed_backward(const qe_args_embed_backward *args, cudaStream_t stream);
qe_status qe_cuda_norm(const qe_args_norm *args, cudaStream_t stream);          /* QE_OP_NORM and NORM_QUANTIZE */
qe_status qe_cuda_norm_backward(const qe_args_norm_backward *args, cudaStream_t stream);
qe_status qe_cuda_quantize(const qe_args_quantize *args, cudaStream_t stream);
qe_status qe_cuda_quantize_weight(const qe_args_quantize_weight *args, cudaStream_t stream);
qe_status qe_cuda_rope(const qe_args_rope *args, cudaStream_t stream);
qe_status qe_cuda_rope_backward_quantize(const qe_args_rope *args, cudaStream_t stream);
qe_status qe_cuda_swiglu_quantize(const qe_args_swiglu *args, cudaStream_t stream);
qe_status qe_cuda_swiglu_backward_quantize(const qe_args_swiglu_backward *args, cudaStream_t stream);
qe_status qe_cuda_cross_entropy(const qe_args_cross_entropy *args, cudaStream_t stream);
qe_status qe_cuda_accumulate(const qe_args_accumulate *args, cudaStream_t stream);
qe_status qe_cuda_grad_norm(const qe_args_grad_norm *args, cudaStream_t stream);
qe_status qe_cuda_adamw(const qe_args_adamw *args, cudaStream_t stream);
qe_status qe_cuda_adamw_alone(const qe_args_adamw *args, cudaStream_t stream); /* nothing is quantized */
qe_status qe_cuda_fold(const qe_args_fold *args, cudaStream_t stream);
qe_status qe_cuda_stamp(const qe_args_stamp *args, cudaStream_t stream);
qe_status qe_cuda_tally(const qe_args_tally *args, cudaStream_t stream);
qe_status qe_cuda_guard(const qe_args_guard *args, cudaStream_t stream);

/* Decodes what was retained with 128x1 blocks into bf16 values [rows, columns] (exact: scales are powers of two). */
qe_status qe_cuda_decode(const qe_qtensor *tensor, void *values, cudaStream_t stream);

/* Both addresses are of this device. */
qe_status qe_cuda_copy(const void *from, void *to, uint64_t bytes, cudaStream_t stream);

/* A range that is copied within the device; both addresses are multiples of 16. */
typedef struct qe_keep_piece {
    const void *from;
    void *to;
    uint64_t bytes;
    uint64_t first; /* pieces of all ranges before this one */
} qe_keep_piece;
uint64_t qe_cuda_keep_pieces(uint64_t bytes);
/* pieces: [count], on the device, none of 0 bytes. */
qe_status qe_cuda_keep(const qe_keep_piece *pieces, uint32_t count, uint64_t pieces_all, cudaStream_t stream);

/* Turns memsets of a captured graph into kernels. Nothing was made executable of it yet. Capture: forbidden.
 * On failure: QE_ERROR_DEVICE, QE_ERROR_MEMORY; the graph may be half changed and must not run. */
qe_status qe_cuda_memsets_replace(cudaGraph_t graph);

/* Keeps the stream busy for about `nanoseconds`: tests delay work with it. Capture: recorded. */
qe_status qe_cuda_delay(uint64_t nanoseconds, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
