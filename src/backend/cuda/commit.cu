/* commit.cu - AdamW and what the next step's products take of the weight in one pass: codes both ways, their inverse
 * scale, the cache's key and seal, and the weight's version, all or nothing. The weight's new value is quantized while
 * it stands in registers; masters are not read a second time. */
#include "backend/cuda/adamw.cuh"
#include "backend/cuda/kernels.h"
#include "backend/cuda/sink.cuh"

namespace {

struct words_32 {
    uint4 low, high;
};

DEVICE words_32 load_eight(const float *at) {
    return words_32{load_once(at), load_once(at + 4)};
}

DEVICE void unpack_eight(const words_32 &words, float *v) {
    v[0] = float_of(words.low.x), v[1] = float_of(words.low.y), v[2] = float_of(words.low.z);
    v[3] = float_of(words.low.w), v[4] = float_of(words.high.x), v[5] = float_of(words.high.y);
    v[6] = float_of(words.high.z), v[7] = float_of(words.high.w);
}

DEVICE void store_eight(float *at, const float *v) {
    reinterpret_cast<float4 *>(at)[0] = make_float4(v[0], v[1], v[2], v[3]);
    reinterpret_cast<float4 *>(at)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

/* Weights as this step makes them: values() writes weight and moments, and is called once for each. */
struct committed_source {
    enum { OUTPUTS = 1, ROWS = 16, ACROSS = 8, AHEAD = 1, WARPS_X = 2, WARPS_Y = 2 };
    struct raw {
        words_32 weight, grad, moment1, moment2;
    };
    typedef adamw_factors constant;
    float *weight, *moment1, *moment2; /* [rows, units] */
    const float *grad;
    const qe_adamw *step;
    uint32_t units;
    int decay;

    METHOD constant begin(uint32_t, uint32_t) const {
        return factors_of(step, decay);
    }
    METHOD raw load(uint32_t row, uint32_t unit) const {
        const size_t at = static_cast<size_t>(row) * units + unit;
        return raw{load_eight(weight + at), load_eight(grad + at), load_eight(moment1 + at), load_eight(moment2 + at)};
    }
    METHOD void values(const constant &factors, const raw &r, uint32_t row, uint32_t unit, float (*v)[8]) const {
        const size_t at = static_cast<size_t>(row) * units + unit;
        float g[8], m[8], s[8];
        unpack_eight(r.weight, v[0]), unpack_eight(r.grad, g), unpack_eight(r.moment1, m), unpack_eight(r.moment2, s);
#pragma unroll
        for (int i = 0; i < 8; ++i) adamw_one(factors, g[i], v[0][i], m[i], s[i]);
        store_eight(weight + at, v[0]), store_eight(moment1 + at, m), store_eight(moment2 + at, s);
    }
    METHOD uint32_t column(int, uint32_t unit) const {
        return unit;
    }
};

struct commit_job {
    tile_job<committed_source> tile; /* its words are written by the last block out */
    uint64_t *witness;
    const qe_guard_fault *fault;
};

/* The amax is complete when the last block is out; the key remembers it for the fill of the next step. */
DEVICE void seal_key(uint64_t *key, uint64_t version, uint64_t epoch) {
    key[QE_KEY_VERSION] = version;
    key[QE_KEY_EPOCH] = epoch;
    key[QE_KEY_SEAL] = QE_KEY_SEALED | static_cast<uint32_t>(word_now(&key[QE_KEY_AMAX]));
    key[QE_KEY_AMAX] = 0;
}

template <typename Tile>
KERNEL void __launch_bounds__(Tile::THREADS) commit_kernel(const __grid_constant__ commit_job job) {
    if (job.fault != nullptr && word_now(&job.fault->fired) != 0) return;
    witness_enter(job.witness);
    const float scale = scale_of(job.tile.scale);
    tile_block<committed_source, Tile>(job.tile, scale);
    witness_leave(job.witness, [&job, scale](uint64_t version) {
        const tensor_words &words = job.tile.words;
        if (words.scale_inv[0]) *words.scale_inv[0] = inverse_of(scale);
        if (words.scale_inv[1]) *words.scale_inv[1] = inverse_of(scale);
        seal_key(words.key, version, *words.scale_epoch);
    });
}

template <typename Tile>
qe_status commit_launch(const commit_job &job, cudaStream_t stream) {
    const dim3 grid(pieces_of(job.tile.source.units, Tile::UNITS), pieces_of(job.tile.planes.rows, Tile::TALL));
    if (static_cast<uint64_t>(grid.x) * grid.y > ADAMW_BLOCKS_MAX) return QE_ERROR_ARGUMENT;
    return launch(commit_kernel<Tile>, grid, Tile::THREADS, 1, 0, stream, job);
}

qe_status commit_whole(const commit_job &job, cudaStream_t stream) {
    typedef committed_source s;
    typedef tile_shape<QE_FORMAT_E4M3, s::ROWS, s::ACROSS, s::AHEAD, s::WARPS_X, s::WARPS_Y> large;
    typedef tile_shape<QE_FORMAT_E4M3, 4, 4, 1, 4, 1> small;
    const uint64_t values = static_cast<uint64_t>(job.tile.planes.rows) * job.tile.source.units;
    return values > TILE_SMALL_VALUES ? commit_launch<large>(job, stream) : commit_launch<small>(job, stream);
}

struct seal_job {
    uint64_t *key;
};

KERNEL void seal_kernel(const __grid_constant__ seal_job job) {
    seal_key(job.key, job.key[QE_KEY_VERSION], job.key[QE_KEY_EPOCH]);
}

/* Shapes that no tile fits, other formats: one after the other. After a veto the fill finds the seal that was there. */
qe_status commit_apart(const qe_args_adamw *args, const qe_quantize_target *target, cudaStream_t stream) {
    qe_args_quantize_weight fill = {};
    fill.w = args->weight, fill.rows = args->rows, fill.columns = args->columns, fill.target = *target;
    fill.weight_witness = args->witness, fill.scale_epoch = args->scale_epoch, fill.key = args->key;
    LAUNCH_TRY(qe_cuda_adamw_alone(args, stream));
    LAUNCH_TRY(qe_cuda_quantize_weight(&fill, stream));
    return launch(seal_kernel, dim3(1), 1, 1, 0, stream, seal_job{args->key});
}

} // namespace

extern "C" qe_status qe_cuda_adamw(const qe_args_adamw *args, cudaStream_t stream) {
    if (args->key == nullptr) return qe_cuda_adamw_alone(args, stream);
    qe_quantize_target target = args->target;
    target.amax = reinterpret_cast<float *>(&args->key[QE_KEY_AMAX]); /* magnitudes: their bits order as they do */
    commit_job job = {};
    committed_source &source = job.tile.source;
    source.weight = args->weight, source.moment1 = args->moment1, source.moment2 = args->moment2;
    source.grad = args->grad, source.step = args->step, source.units = args->columns, source.decay = args->decay;
    tensor_words key = {};
    key.scale_epoch = args->scale_epoch, key.key = args->key;
    job.tile.words = words_of(&target, key), job.tile.scale = scaling_of(&target);
    job.witness = args->witness, job.fault = args->fault;
    const bool aligned = is_aligned(args->weight) && is_aligned(args->grad) && is_aligned(args->moment1) &&
                         is_aligned(args->moment2);
    const bool whole = planes_of(places_of(&target, args->rows, args->columns), &job.tile.planes);
    if (aligned && whole && target.format == QE_FORMAT_E4M3 && target.recipe == QE_RECIPE_DELAYED)
        return commit_whole(job, stream);
    return commit_apart(args, &target, stream);
}
