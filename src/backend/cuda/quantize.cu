/* quantize.cu - rounds an activation or a master weight as its target says (sink.cuh). */
#include "backend/cuda/kernels.h"
#include "backend/cuda/sink.cuh"

extern "C" qe_status qe_cuda_quantize(const qe_args_quantize *args, cudaStream_t stream) {
    plain_source source = {};
    source.x = static_cast<const uint16_t *>(args->x), source.units = args->columns;
    return target_fill(source, args->rows, args->columns, &args->target, false, tensor_words(), stream);
}

extern "C" qe_status qe_cuda_quantize_weight(const qe_args_quantize_weight *args, cudaStream_t stream) {
    weight_source source = {};
    source.w = args->w, source.units = args->columns;
    tensor_words key = {};
    key.weight_witness = args->weight_witness, key.scale_epoch = args->scale_epoch, key.key = args->key;
    return target_fill(source, args->rows, args->columns, &args->target, true, key, stream);
}
