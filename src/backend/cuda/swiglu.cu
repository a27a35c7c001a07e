/* swiglu.cu - silu(gate) * up and its backward, quantized in the same pass. What is rounded exists in registers only:
 * neither the scratch of the forward nor that of the backward is written. */
#include "backend/cuda/kernels.h"
#include "backend/cuda/sink.cuh"

extern "C" qe_status qe_cuda_swiglu_quantize(const qe_args_swiglu *args, cudaStream_t stream) {
    swiglu_source source = {};
    source.gate_up = static_cast<const uint16_t *>(args->gate_up), source.units = args->ffn;
    return target_fill(source, args->rows, args->ffn, &args->target, false, tensor_words(), stream);
}

extern "C" qe_status qe_cuda_swiglu_backward_quantize(const qe_args_swiglu_backward *args, cudaStream_t stream) {
    swiglu_backward_source source = {};
    source.gate_up = static_cast<const uint16_t *>(args->gate_up);
    source.dy = static_cast<const uint16_t *>(args->dy), source.units = args->ffn;
    return target_fill(source, args->rows, 2 * args->ffn, &args->target, false, tensor_words(), stream);
}
