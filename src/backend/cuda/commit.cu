/* commit.cu - AdamW and what the next step's products take of the weight in one pass: codes both ways, their inverse
 * scale, the cache's key and seal, and the weight's version, all or nothing. The weight's new value is quantized while
 * it stands in registers; masters are not read a second time.
 *
 * Seven arrays stream past, so what counts is how many loads are under way: a thread has four values of one row at a
 * time, in few registers. Transposed codes meet in shared memory. */
#include "backend/cuda/adamw.cuh"
#include "backend/cuda/kernels.h"
#include "backend/cuda/sink.cuh"

namespace {

/* A block takes few rows: small blocks end evenly, and whole sectors of 32 bytes of the transposed plane are enough. */
enum {
    COMMIT_THREADS = 256,
    COMMIT_WARPS = COMMIT_THREADS / WARP, /* each takes a row at a time */
    COMMIT_COLUMNS = WARP * 4,
    COMMIT_ROWS = 32,
    COMMIT_AHEAD = 2,  /* rows of a warp whose loads are under way */
    COMMIT_BLOCKS = 4, /* of a multiprocessor: 64 registers a thread */
    PIECE_ROWS = 16,   /* of a column, stored at once */
    PIECES = COMMIT_ROWS / PIECE_ROWS
};

struct commit_job {
    float *weight, *moment1, *moment2; /* [rows, columns] */
    const float *grad;
    const qe_adamw *step;
    code_planes planes;
    scaling scale;
    tensor_words words; /* written by the last block out */
    uint64_t *witness;
    const qe_guard_fault *fault;
    int decay;
};

/* Codes of a block, a word for four columns of a row. The words of a row stand in an order that differs from piece to
 * piece, so that threads which read the same columns of several pieces do not meet in a bank. */
struct commit_stage {
    uint32_t words[COMMIT_ROWS][WARP];

    METHOD uint32_t &at(uint32_t row, uint32_t across) {
        return words[row][across ^ row / PIECE_ROWS * (WARP / PIECES)];
    }
};

DEVICE void four_load(const float *values, size_t at, float *four) {
    const float4 v = load_here(values + at);
    four[0] = v.x, four[1] = v.y, four[2] = v.z, four[3] = v.w;
}

DEVICE void four_store(float *values, size_t at, const float *four) {
    *reinterpret_cast<float4 *>(values + at) = make_float4(four[0], four[1], four[2], four[3]);
}

/* Four neighbours of a row. */
struct commit_piece {
    float grad[4], weight[4], moment1[4], moment2[4];

    METHOD void load(const commit_job &job, size_t at) {
        four_load(job.grad, at, grad), four_load(job.weight, at, weight);
        four_load(job.moment1, at, moment1), four_load(job.moment2, at, moment2);
    }
    /* Returns the codes; raises the amax. */
    METHOD uint32_t update(const commit_job &job, const adamw_factors &factors, size_t at, float scale, float &amax) {
#pragma unroll
        for (int i = 0; i < 4; ++i) adamw_one(factors, grad[i], weight[i], moment1[i], moment2[i]);
        four_store(job.weight, at, weight), four_store(job.moment1, at, moment1), four_store(job.moment2, at, moment2);
#pragma unroll
        for (int i = 0; i < 4; ++i) amax = larger(amax, magnitude(weight[i]));
        const uint32_t codes = encode4<QE_FORMAT_E4M3>(weight, scale);
        *reinterpret_cast<uint32_t *>(job.planes.by_rows + at) = codes;
        return codes;
    }
};

/* What a warp has under way. Rows come in sixteens, so all warps have the same; each piece is asked for even so, as
 * the compiler then finishes one before the next and does with 64 registers. */
struct commit_group {
    commit_piece piece[COMMIT_AHEAD];

    /* at: of the first piece; rows: from its row to the end of the matrix */
    METHOD void load(const commit_job &job, size_t at, uint32_t rows) {
        const size_t next = static_cast<size_t>(COMMIT_WARPS) * job.planes.columns;
#pragma unroll
        for (uint32_t k = 0; k < COMMIT_AHEAD; ++k)
            if (k * COMMIT_WARPS < rows) piece[k].load(job, at + k * next);
    }
};

/* Requires: the column is one of the matrix. Returns the amax. The first loads do not wait for what a guard says. */
DEVICE float commit_rows(const commit_job &job, commit_stage &stage, uint32_t first_row, uint32_t column, float scale,
                         bool is_vetoed) {
    const uint32_t lane = threadIdx.x % WARP, rows = job.planes.rows - first_row;
    const size_t next = static_cast<size_t>(COMMIT_WARPS) * job.planes.columns;
    uint32_t row = threadIdx.x / WARP;
    size_t at = static_cast<size_t>(first_row + row) * job.planes.columns + column;
    commit_group group;
    float amax = 0.0f;
    group.load(job, at, rows - row);
    const adamw_factors factors = factors_of(job.step, job.decay);
    if (is_vetoed) return amax;
    witness_enter(job.witness);
    for (;;) {
#pragma unroll
        for (uint32_t k = 0; k < COMMIT_AHEAD; ++k) {
            const uint32_t here = row + k * COMMIT_WARPS;
            if (here < rows) stage.at(here, lane) = group.piece[k].update(job, factors, at + k * next, scale, amax);
        }
        row += COMMIT_WARPS * COMMIT_AHEAD, at += COMMIT_AHEAD * next;
        if (row >= COMMIT_ROWS || row >= rows) return amax;
        group.load(job, at, rows - row);
    }
}

/* Sixteen rows of four columns a thread: four stores of 16 bytes. */
DEVICE void commit_columns(const code_planes &planes, commit_stage &stage, uint32_t first_row, uint32_t first_column) {
    if (threadIdx.x >= PIECES * WARP) return;
    const uint32_t piece = threadIdx.x % PIECES, across = threadIdx.x / PIECES;
    const uint32_t row = first_row + piece * PIECE_ROWS, column = first_column + across * 4;
    if (row >= planes.rows || column >= planes.columns) return;
    uint32_t words[4][4]; /* of a column, of four rows */
#pragma unroll
    for (uint32_t group = 0; group < 4; ++group) {
        const uint32_t from = piece * PIECE_ROWS + group * 4;
        transpose4(stage.at(from, across), stage.at(from + 1, across), stage.at(from + 2, across),
                   stage.at(from + 3, across), &words[0][group], 4);
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
        *reinterpret_cast<uint4 *>(planes.by_columns + static_cast<size_t>(column + i) * planes.rows + row) =
            make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
}

/* The amax is complete when the last block is out; the key remembers it for the fill of the next step. */
DEVICE void seal_key(uint64_t *key, uint64_t version, uint64_t epoch) {
    key[QE_KEY_VERSION] = version;
    key[QE_KEY_EPOCH] = epoch;
    key[QE_KEY_SEAL] = QE_KEY_SEALED | static_cast<uint32_t>(word_now(&key[QE_KEY_AMAX]));
    key[QE_KEY_AMAX] = 0;
}

KERNEL void __launch_bounds__(COMMIT_THREADS, COMMIT_BLOCKS)
    commit_kernel(const __grid_constant__ commit_job job) {
    commit_stage &stage = shared_object<commit_stage>();
    const uint32_t first_row = blockIdx.y * COMMIT_ROWS, first_column = blockIdx.x * COMMIT_COLUMNS;
    const uint32_t column = first_column + threadIdx.x % WARP * 4;
    const bool is_vetoed = job.fault != nullptr && word_now(&job.fault->fired) != 0;
    const float scale = scale_of(job.scale);
    const int32_t seen = load_shared_word(job.scale.amax);
    const bool inside = column < job.planes.columns; /* as the first thread's always is, which counts the block in */
    const float amax = inside ? commit_rows(job, stage, first_row, column, scale, is_vetoed) : 0.0f;
    if (is_vetoed) return;
    record_amax(job.scale.amax, amax, seen);
    block_barrier();
    commit_columns(job.planes, stage, first_row, first_column);
    witness_leave(job.witness, [&job, scale](uint64_t version) {
        const tensor_words &words = job.words;
        if (words.scale_inv[0]) *words.scale_inv[0] = inverse_of(scale);
        if (words.scale_inv[1]) *words.scale_inv[1] = inverse_of(scale);
        seal_key(words.key, version, *words.scale_epoch);
    });
}

dim3 commit_grid(const code_planes &planes) {
    return dim3(pieces_of(planes.columns, COMMIT_COLUMNS), pieces_of(planes.rows, COMMIT_ROWS));
}

/* Has a weight so few tiles that one launch commits them, and that they are counted? */
bool commit_fits(const code_planes &planes) {
    const dim3 grid = commit_grid(planes);
    return grid_is_possible(grid) && static_cast<uint64_t>(grid.x) * grid.y <= ADAMW_BLOCKS_MAX;
}

qe_status commit_whole(const commit_job &job, cudaStream_t stream) {
    return launch(commit_kernel, commit_grid(job.planes), COMMIT_THREADS, 0, 0, stream, job);
}

struct seal_job {
    uint64_t *key;
};

KERNEL void seal_kernel(const __grid_constant__ seal_job job) {
    seal_key(job.key, job.key[QE_KEY_VERSION], job.key[QE_KEY_EPOCH]);
}

/* Shapes that no tile fits, or of too many tiles, other formats: one after the other. After a veto the fill finds the
 * seal that was there. */
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
    job.weight = args->weight, job.moment1 = args->moment1, job.moment2 = args->moment2, job.grad = args->grad;
    job.step = args->step, job.decay = args->decay, job.witness = args->witness, job.fault = args->fault;
    tensor_words key = {};
    key.scale_epoch = args->scale_epoch, key.key = args->key;
    job.words = words_of(&target, key), job.scale = scaling_of(&target);
    const bool aligned = is_aligned(args->weight) && is_aligned(args->grad) && is_aligned(args->moment1) &&
                         is_aligned(args->moment2);
    const bool whole = planes_of(places_of(&target, args->rows, args->columns), &job.planes) &&
                       job.planes.by_rows != nullptr && job.planes.by_columns != nullptr && commit_fits(job.planes);
    if (aligned && whole && target.format == QE_FORMAT_E4M3 && target.recipe == QE_RECIPE_DELAYED)
        return commit_whole(job, stream);
    return commit_apart(args, &target, stream);
}
