/* linear_rope.cu - see linear_rope.h and README.md. */
#include "backend/cuda/linear_rope.h"

#include "backend/cuda/linear_rope.cuh"
#include "backend/cuda/product_launch.cuh"
#include "backend/cuda/sink.cuh"

namespace {

using namespace linear_rope;

/* Tiles of a cluster that are gone through from top to bottom before the next column. */
constexpr uint32_t BAND = 8;

constexpr uint32_t HALF_MIN = BOX, HALF_MAX = 1u << 20; /* pairs of a head */

uint64_t columns_of(const qe_args_linear_rope *a) {
    return (static_cast<uint64_t>(a->heads) + 2ull * a->kv_heads) * a->head_dim;
}

bool operands_map(const qe_product_device *own, const qe_args_linear_rope *a, job *j) {
    const cuuint64_t in = a->in;
    const tensor_axes x = {2, {in, a->rows}, {in}, {TERMS, ROWS}};
    const tensor_axes w = {5,
                           {in, PAIR, QUAD, QUAD, j->columns / BOX},
                           {in, EIGHT * in, PAIR * in, BOX * in},
                           {TERMS, PAIR, QUAD, QUAD, 1}};
    return tensor_map_encode(own->encode, a->x.codes, CU_TENSOR_MAP_DATA_TYPE_UINT8, x, CU_TENSOR_MAP_SWIZZLE_128B,
                             &j->x) &&
           tensor_map_encode(own->encode, a->w.codes, CU_TENSOR_MAP_DATA_TYPE_UINT8, w, CU_TENSOR_MAP_SWIZZLE_128B,
                             &j->w);
}

bool job_make(const qe_product_device *own, const qe_args_linear_rope *a, job *job_out) {
    job j = {};
    j.x_scale = a->x.scale_inv, j.w_scale = a->w.scale_inv;
    j.cosine = a->cosine, j.sine = a->sine;
    j.y = static_cast<uint16_t *>(a->y);
    j.rows = a->rows, j.columns = static_cast<uint32_t>(columns_of(a)), j.sequence = a->sequence;
    j.half = a->head_dim / 2, j.turned = (a->heads + a->kv_heads) * j.half;
    j.steps = a->in / TERMS, j.apart = j.steps / PIECES;
    j.tiles = tiling{pieces_of(a->rows, CLUSTER * ROWS), pieces_of(j.columns / 2, PAIRS), BAND};
    if (!operands_map(own, a, &j)) return false;
    *job_out = j;
    return true;
}

bool is_half(uint32_t half) {
    return half >= HALF_MIN && half <= HALF_MAX && (half & (half - 1)) == 0;
}

/* What is written while x, the weights and angles are still read lies elsewhere. */
bool lies_apart(const qe_args_linear_rope *a) {
    const uint64_t rows = a->rows, in = a->in, columns = columns_of(a), bytes = rows * columns * 2;
    const uint64_t table = static_cast<uint64_t>(a->sequence) * (a->head_dim / 2) * sizeof(float);
    return is_apart(a->y, bytes, a->x.codes, rows * in) && is_apart(a->y, bytes, a->w.codes, columns * in) &&
           is_apart(a->y, bytes, a->x.scale_inv, sizeof(float)) &&
           is_apart(a->y, bytes, a->w.scale_inv, sizeof(float)) && is_apart(a->y, bytes, a->cosine, table) &&
           is_apart(a->y, bytes, a->sine, table);
}

} // namespace

qe_status qe_linear_rope_open(qe_product_device *own_out) {
    return kernel_open(kernel, THREADS, SHARED_BYTES, own_out);
}

int qe_linear_rope_fits(const qe_args_linear_rope *a) {
    if (a->rows == 0 || a->sequence == 0) return 0;
    if (a->in < IN_MIN || a->in % TERMS || a->head_dim % 2 || !is_half(a->head_dim / 2)) return 0;
    if (a->heads > COORDINATE_MAX || a->kv_heads > COORDINATE_MAX) return 0;
    const uint64_t columns = columns_of(a);
    if (columns == 0 || columns > COORDINATE_MAX || !is_in_reach(a->rows, columns / 2, a->in, PAIRS)) return 0;
    if (a->x.format != QE_FORMAT_E4M3 || a->w.format != QE_FORMAT_E4M3) return 0;
    if (a->accumulation != QE_ACCUMULATE_FAST) return 0;
    return is_code(a->x, false) && is_code(a->w, false) && is_aligned(a->y) && is_aligned(a->cosine) &&
           is_aligned(a->sine) && lies_apart(a);
}

qe_status qe_linear_rope_run(const qe_product_device *own, const qe_args_linear_rope *a, cudaStream_t stream) {
    job j;
    if (!job_make(own, a, &j)) return QE_ERROR_DEVICE;
    return tiles_launch(kernel, j, THREADS, SHARED_BYTES, own->clusters, stream);
}
