/* rope.cu - rotary positions, half-split form. Forward rotates q and k in place. Backward rotates dq and dk back and
 * quantizes all of dqkv in one pass; the rotated values exist in registers only, the activation stays as it was. */
#include "backend/cuda/kernels.h"
#include "backend/cuda/rope_codes.cuh"
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

/* --- all heads of a row, which share its cosines and sines -------------------------------------------------------- */

struct rope_job {
    rope_source source;
    uint16_t *qkv; /* what the source reads */
};

enum { ROPE_HEADS = 10 /* of a thread, all under way from memory at once */ };

/* A block is a warp and has one row, ACROSS threads of it a head, each eight pairs. What is rotated is asked for before
 * the table. */
template <int ACROSS>
KERNEL void __launch_bounds__(WARP) rope_kernel(const __grid_constant__ rope_job job) {
    constexpr uint32_t APART = WARP / ACROSS, HALF = ACROSS * 8;
    const uint32_t lane = threadIdx.x, row = blockIdx.x;
    const uint32_t within = lane % ACROSS * 8, first = blockIdx.y * (APART * ROPE_HEADS) + lane / ACROSS;
    const uint32_t heads = job.source.turned_heads;
    uint16_t *const at = job.qkv + static_cast<size_t>(row) * job.source.columns + within;
    uint4 lower[ROPE_HEADS], upper[ROPE_HEADS];
#pragma unroll
    for (uint32_t i = 0; i < ROPE_HEADS; ++i) {
        if (first + i * APART >= heads) break;
        lower[i] = load_once(at + (first + i * APART) * 2 * HALF);
        upper[i] = load_once(at + (first + i * APART) * 2 * HALF + HALF);
    }
    const size_t table = static_cast<size_t>(row % job.source.sequence) * HALF + within;
    const rope_turn turn = rope_turn_of(job.source.cosine + table, job.source.sine + table);
#pragma unroll
    for (uint32_t i = 0; i < ROPE_HEADS; ++i) {
        if (first + i * APART >= heads) break;
        float v[2][8];
        unpack8(lower[i], v[0]);
        unpack8(upper[i], v[1]);
        rope_apply(turn, v[0], v[1]);
        uint16_t *const to = at + (first + i * APART) * 2 * HALF;
        store_late(to, pack8(v[0]));
        store_late(to + HALF, pack8(v[1]));
    }
}

template <int ACROSS>
static qe_status rope_launch(const rope_job &job, uint32_t rows, cudaStream_t stream) {
    const dim3 blocks(rows, pieces_of(job.source.turned_heads, WARP / ACROSS * ROPE_HEADS));
    return launch(rope_kernel<ACROSS>, blocks, WARP, 0, 0, stream, job);
}

extern "C" qe_status qe_cuda_rope(const qe_args_rope *args, cudaStream_t stream) {
    const rope_source source = rope_source_of(args, args->heads + args->kv_heads, 0);
    const rope_job job = {source, static_cast<uint16_t *>(args->qkv)};
    if (source.wide() && source.half == 64) return rope_launch<8>(job, args->rows, stream);
    if (source.wide() && source.half == 32) return rope_launch<4>(job, args->rows, stream);
    places to = {};
    to.at[0] = args->qkv, to.format[0] = QE_FORMAT_BF16;
    to.rows = args->rows, to.columns = source.columns;
    return values_store(source, to, tensor_words(), stream);
}

/* Is it one that rope_codes.cuh takes? */
static bool rope_codes_job(const rope_source &source, const qe_args_rope *args, tile_job<rope_source> *job_out) {
    const qe_quantize_target &target = args->target;
    tile_job<rope_source> job = {};
    if (target.recipe != QE_RECIPE_DELAYED || !source.wide() || source.half != ROPE_HALF) return false;
    if (!planes_of(places_of(&target, args->rows, source.columns), &job.planes)) return false;
    job.source = source, job.scale = scaling_of(&target), job.words = words_of(&target, tensor_words());
    *job_out = job;
    return true;
}

extern "C" qe_status qe_cuda_rope_backward_quantize(const qe_args_rope *args, cudaStream_t stream) {
    const rope_source source = rope_source_of(args, args->heads + 2 * args->kv_heads, 1);
    tile_job<rope_source> job;
    if (!rope_codes_job(source, args, &job))
        return target_fill(source, args->rows, source.columns, &args->target, false, tensor_words(), stream);
    return args->target.format == QE_FORMAT_E4M3 ? rope_codes<QE_FORMAT_E4M3>(job, stream)
                                                 : rope_codes<QE_FORMAT_E5M2>(job, stream);
}
