/* rope.cu - rotary positions, half-split form. Forward rotates q and k in place. Backward rotates dq and dk back and
 * quantizes all of dqkv in one pass; the rotated values exist in registers only, the activation stays as it was. */
#include "backend/cuda/kernels.h"
#include "backend/cuda/sink.cuh"

static rope_source rope_source_of(const qe_args_rope *args, uint32_t heads, uint32_t back) {
    rope_source source = {};
    source.qkv = static_cast<const uint16_t *>(args->qkv);
    source.cosine = args->cosine, source.sine = args->sine;
    source.columns = (args->heads + 2 * args->kv_heads) * args->head_dim;
    source.half = args->head_dim / 2;
    source.units = heads * source.half;
    source.sequence = args->sequence;
    source.turned_heads = args->heads + args->kv_heads;
    source.back = back;
    return source;
}

extern "C" qe_status qe_cuda_rope(const qe_args_rope *args, cudaStream_t stream) {
    const rope_source source = rope_source_of(args, args->heads + args->kv_heads, 0);
    places to = {};
    to.at[0] = args->qkv, to.format[0] = QE_FORMAT_BF16;
    to.rows = args->rows, to.columns = source.columns;
    return values_store(source, to, tensor_words(), stream);
}

extern "C" qe_status qe_cuda_rope_backward_quantize(const qe_args_rope *args, cudaStream_t stream) {
    const rope_source source = rope_source_of(args, args->heads + 2 * args->kv_heads, 1);
    return target_fill(source, args->rows, source.columns, &args->target, false, tensor_words(), stream);
}
