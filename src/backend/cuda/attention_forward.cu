/* attention_forward.cu - see attention_own.h and README.md: the launch of the kernel in attention_forward.cuh. */
#include "backend/cuda/attention_forward.cuh"

#include "backend/cuda/attention_own.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/sink.cuh"
#include "backend/cuda/tensor_map.cuh"

namespace {

using namespace forward;

/* Two heads that share their keys share them in the blocks' memory too. */
uint32_t cluster_of(const qe_args_attention *a) {
    return a->heads / a->kv_heads % 2 == 0 ? 2 : 1;
}

uint64_t blocks_of(const qe_args_attention *a) {
    return (static_cast<uint64_t>(a->sequence) + QUERIES - 1) / QUERIES;
}

/* [sequences, sequence, columns] of elements of `bytes`: boxes of ROWS rows, of sixteen the even ones first, then the
 * odd ones. */
bool paired_map_make(const qe_attention_own *own, const qe_args_attention *a, const void *at, uint32_t columns,
                     uint32_t bytes, uint32_t across, CUtensorMap *map_out) {
    const cuuint64_t row = static_cast<cuuint64_t>(columns) * bytes;
    const tensor_axes axes = {5,
                              {columns, 8, 2, a->sequence / 16, a->sequences},
                              {2 * row, row, 16 * row, a->sequence * row},
                              {across, 8, 2, ROWS / 16, 1}};
    return tensor_map_encode(own->encode, at,
                             bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, axes,
                             across * bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, map_out);
}

/* Transposed codes [columns, sequences, sequence]: boxes of a head's columns by ROWS tokens. */
bool across_map_make(const qe_attention_own *own, const qe_args_attention *a, const code_planes &planes,
                     CUtensorMap *map_out) {
    const tensor_axes axes = {3,
                              {a->sequence, a->sequences, planes.columns},
                              {a->sequence, planes.rows},
                              {ROWS, 1, a->head_dim}};
    return tensor_map_encode(own->encode, planes.by_columns, CU_TENSOR_MAP_DATA_TYPE_UINT8, axes,
                             CU_TENSOR_MAP_SWIZZLE_64B, map_out);
}

uint32_t row_of(const qe_args_attention *a) {
    return (a->heads + 2 * a->kv_heads) * a->head_dim;
}

bool keys_map_make(const qe_attention_own *own, const qe_args_attention *a, CUtensorMap *map_out) {
    const uint32_t rows = KEYS / cluster_of(a);
    return tensor_map_make(own->encode, a->qkv, a->sequences, a->sequence, row_of(a), rows, map_out);
}

bool maps_make(const qe_attention_own *own, const qe_args_attention *a, forward_job *job) {
    const uint32_t out_row = a->heads * a->head_dim;
    return keys_map_make(own, a, &job->keys) &&
           tensor_map_make(own->encode, a->qkv, a->sequences, a->sequence, row_of(a), ROWS, &job->queries) &&
           tensor_map_make(own->encode, a->out, a->sequences, a->sequence, out_row, ROWS, &job->out);
}

bool codes_maps_make(const qe_attention_own *own, const qe_args_attention *a, const code_planes &planes,
                     forward_job *job) {
    const uint32_t out_row = planes.columns;
    job->has_rows = planes.by_rows != nullptr, job->has_columns = planes.by_columns != nullptr;
    return keys_map_make(own, a, &job->keys) && paired_map_make(own, a, a->qkv, row_of(a), 2, 64, &job->queries) &&
           paired_map_make(own, a, a->out, out_row, 2, 64, &job->out) &&
           (!job->has_rows || paired_map_make(own, a, planes.by_rows, out_row, 1, a->head_dim, &job->by_rows)) &&
           (!job->has_columns || across_map_make(own, a, planes, &job->by_columns));
}

forward_job job_of(const qe_args_attention *a) {
    forward_job job = {};
    job.lse = a->lse;
    job.sequences = a->sequences;
    job.sequence = a->sequence;
    job.heads = a->heads;
    job.kv_heads = a->kv_heads;
    job.blocks = static_cast<uint32_t>(blocks_of(a));
    job.pieces = job.blocks * (a->heads / cluster_of(a)) * a->sequences;
    job.scale = 1.0f / sqrtf(static_cast<float>(a->head_dim));
    job.scale_log2 = job.scale * 1.4426950408889634f;
    return job;
}

template <uint32_t DIM, int FORMAT, uint32_t CLUSTER>
qe_status cluster_launch(const qe_attention_own *own, const forward_job &job, cudaStream_t stream) {
    const uint32_t most = own->multiprocessors < CLUSTER ? 1 : own->multiprocessors / CLUSTER;
    const uint32_t hands = job.pieces < most ? job.pieces : most;
    return launch(attend<DIM, FORMAT, CLUSTER>, dim3(hands * CLUSTER), THREADS, CLUSTER > 1 ? CLUSTER : 0,
                  sizeof(room<DIM>), stream, job);
}

template <uint32_t DIM, int FORMAT>
qe_status dim_launch(const qe_attention_own *own, const qe_args_attention *a, const forward_job &job,
                     cudaStream_t stream) {
    return cluster_of(a) == 2 ? cluster_launch<DIM, FORMAT, 2>(own, job, stream)
                              : cluster_launch<DIM, FORMAT, 1>(own, job, stream);
}

template <int FORMAT>
qe_status attend_launch(const qe_attention_own *own, const qe_args_attention *a, const forward_job &job,
                        cudaStream_t stream) {
    return a->head_dim == 128 ? dim_launch<128, FORMAT>(own, a, job, stream)
                              : dim_launch<64, FORMAT>(own, a, job, stream);
}

/* Codes are written while queries and keys are still read, and log-sums written. */
bool lies_apart(const qe_args_attention *a, const void *codes) {
    const uint64_t tokens = static_cast<uint64_t>(a->sequences) * a->sequence;
    const uint64_t bytes = tokens * a->heads * a->head_dim;
    return is_apart(codes, bytes, a->qkv, tokens * row_of(a) * 2) &&
           is_apart(codes, bytes, a->lse, tokens * a->heads * sizeof(float));
}

/* Is the target one whose codes are made straight from results? */
bool makes_codes(const qe_args_attention *a, code_planes *planes_out) {
    const places to = places_of(&a->target, a->sequences * a->sequence, a->heads * a->head_dim);
    return a->target.recipe == QE_RECIPE_DELAYED && a->sequence % 16 == 0 && planes_of(to, planes_out) &&
           (planes_out->by_rows || planes_out->by_columns) && lies_apart(a, planes_out->by_rows) &&
           lies_apart(a, planes_out->by_columns);
}

qe_status codes_run(const qe_attention_own *own, const qe_args_attention *a, const code_planes &planes,
                    cudaStream_t stream) {
    forward_job job = job_of(a);
    job.codes = scaling_of(&a->target);
    job.words = words_of(&a->target, tensor_words());
    if (!codes_maps_make(own, a, planes, &job)) return QE_ERROR_DEVICE;
    return a->target.format == QE_FORMAT_E4M3 ? attend_launch<QE_FORMAT_E4M3>(own, a, job, stream)
                                              : attend_launch<QE_FORMAT_E5M2>(own, a, job, stream);
}

} // namespace

int qe_attention_forward_takes(const qe_args_attention *a) {
    constexpr uint64_t INDEX_MAX = 1ull << 31; /* of what is counted in 32 bits */
    if (a->head_dim != 64 && a->head_dim != 128) return 0;
    const uint64_t row = (a->heads + 2ull * a->kv_heads) * a->head_dim;
    const uint64_t tokens = static_cast<uint64_t>(a->sequences) * a->sequence;
    if (row >= INDEX_MAX || tokens >= INDEX_MAX) return 0; /* so that the products below do not overflow */
    return blocks_of(a) * QUERIES < INDEX_MAX && blocks_of(a) * a->heads * a->sequences < INDEX_MAX;
}

int qe_attention_forward_quantizes(const qe_args_attention *a) {
    code_planes planes;
    return makes_codes(a, &planes);
}

qe_status qe_attention_forward_run(const qe_attention_own *own, const qe_args_attention *a, cudaStream_t stream) {
    if (!is_aligned(a->qkv) || !is_aligned(a->out)) return QE_ERROR_ARGUMENT;
    code_planes planes;
    if (makes_codes(a, &planes)) return codes_run(own, a, planes, stream);
    forward_job job = job_of(a);
    if (!maps_make(own, a, &job)) return QE_ERROR_DEVICE;
    LAUNCH_TRY(attend_launch<FORMAT_NONE>(own, a, job, stream));
    qe_op whole = {}, parts[QE_OP_PARTS_MAX];
    whole.kind = QE_OP_ATTENTION;
    whole.args.attention = *a;
    return qe_op_parts(&whole, parts) == 1 ? QE_OK : qe_cuda_quantize(&parts[1].args.quantize, stream);
}
