/* input_grad_swiglu.cu - see input_grad_swiglu.h and README.md. */
#include "backend/cuda/input_grad_swiglu.h"

#include "backend/cuda/input_grad_swiglu.cuh"
#include "backend/cuda/product_launch.cuh"
#include "backend/cuda/sink.cuh"

namespace {

using namespace input_grad_swiglu;

/* Tiles of a cluster that are gone through from top to bottom before the next column: 2,048 rows of dy. */
constexpr uint32_t BAND = 8;
/* Fewer stages than this gain nothing by overlapping: tiles begin and end too often. */
constexpr uint32_t OVERLAPPED_STEPS_MIN = 32;

/* [rows, columns] of elements of 1 or 2 bytes in boxes of box_bytes by box_rows; swizzled where these are 128. */
bool map_make(const qe_product_device *own, const void *at, uint32_t element_bytes, uint32_t rows, uint32_t columns,
              uint32_t box_bytes, uint32_t box_rows, CUtensorMap *map_out) {
    const tensor_axes axes = {2,
                              {columns, rows},
                              {static_cast<cuuint64_t>(columns) * element_bytes},
                              {box_bytes / element_bytes, box_rows}};
    return tensor_map_encode(own->encode, at,
                             element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8,
                             axes, box_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE, map_out);
}

bool job_make(const qe_product_device *own, const qe_args_linear_input_grad *a, job *job_out) {
    job j = {};
    if (!planes_of(places_of(&a->target, a->rows, 2 * a->in), &j.planes) ||
        !map_make(own, a->dy.codes, 1, a->rows, a->out, TERMS, ROWS, &j.dy) ||
        !map_make(own, a->w.codes, 1, a->in, a->out, TERMS, COLUMNS / CLUSTER, &j.w) ||
        !map_make(own, a->gate_up, 2, a->rows, 2 * a->in, ROW_BYTES, SUB_ROWS, &j.gate_up) ||
        !map_make(own, j.planes.by_rows, 1, a->rows, 2 * a->in, STRIP, UNIT_ROWS, &j.codes))
        return false;
    j.dy_scale = a->dy.scale_inv, j.w_scale = a->w.scale_inv;
    j.scale = scaling_of(&a->target);
    j.words = words_of(&a->target, tensor_words());
    j.units = a->in;
    j.tiles = {pieces_of(a->rows, CLUSTER * ROWS), pieces_of(a->in, COLUMNS), BAND}, j.steps = a->out / TERMS;
    *job_out = j;
    return true;
}

/* *clusters_io: that all kernels asked about so far have at work at a time. */
template <way WAY, int FORMAT>
bool ready(uint32_t *clusters_io) {
    const uint32_t clusters = clusters_at_work(kernel<WAY, FORMAT>, THREADS, CLUSTER, SHARED_BYTES);
    if (*clusters_io == 0 || *clusters_io > clusters) *clusters_io = clusters;
    return clusters > 0;
}

template <way WAY, int FORMAT>
qe_status run(const qe_product_device *own, const qe_args_linear_input_grad *a, cudaStream_t stream) {
    job j;
    if (!job_make(own, a, &j)) return QE_ERROR_DEVICE;
    return tiles_launch(kernel<WAY, FORMAT>, j, THREADS, SHARED_BYTES, own->clusters, stream);
}

template <int FORMAT>
qe_status format_run(const qe_product_device *own, const qe_args_linear_input_grad *a, cudaStream_t stream) {
    const uint32_t steps = a->out / TERMS;
    return steps >= OVERLAPPED_STEPS_MIN && steps % BATCH == 0 ? run<OVERLAPPED, FORMAT>(own, a, stream)
                                                               : run<PLAIN, FORMAT>(own, a, stream);
}

/* --- what fits --------------------------------------------------------------------------------------------------- */

/* What is written while dy, the weights, gate and up are still read lies elsewhere. */
bool lies_apart(const qe_args_linear_input_grad *a, const qe_qtensor &written) {
    const uint64_t rows = a->rows, in = a->in, out = a->out, bytes = rows * in * 2;
    return is_apart(written.codes, bytes, a->dy.codes, rows * out) &&
           is_apart(written.codes, bytes, a->w.codes, out * in) &&
           is_apart(written.codes, bytes, a->gate_up, rows * in * 4) &&
           written.scale_inv != a->dy.scale_inv && written.scale_inv != a->w.scale_inv;
}

/* Both planes are wanted, as they are wherever weights are trained. */
bool is_target(const qe_args_linear_input_grad *a) {
    const qe_quantize_target &target = a->target;
    code_planes planes;
    return target.recipe == QE_RECIPE_DELAYED && target.format == a->dy.format && target.scale != nullptr &&
           planes_of(places_of(&target, a->rows, 2 * a->in), &planes) && planes.by_rows && planes.by_columns &&
           lies_apart(a, target.operand) && lies_apart(a, target.retained);
}

} // namespace

qe_status qe_input_grad_swiglu_open(qe_product_device *own_out) {
    void *encode = tensor_map_encoder_find();
    uint32_t clusters = 0;
    if (encode == nullptr || !ready<PLAIN, QE_FORMAT_E4M3>(&clusters) ||
        !ready<PLAIN, QE_FORMAT_E5M2>(&clusters) || !ready<OVERLAPPED, QE_FORMAT_E4M3>(&clusters) ||
        !ready<OVERLAPPED, QE_FORMAT_E5M2>(&clusters)) {
        (void)cudaGetLastError();
        return QE_ERROR_UNSUPPORTED;
    }
    own_out->encode = encode;
    own_out->clusters = clusters;
    return QE_OK;
}

int qe_input_grad_swiglu_fits(const qe_args_linear_input_grad *a) {
    if (a->rows == 0 || a->in == 0 || a->out == 0) return 0;
    if (a->in > COORDINATE_MAX / 2 || !is_in_reach(a->rows, a->in, a->out, STRIP)) return 0;
    if (a->rows % UNIT_ROWS || a->in % STRIP || a->out % TERMS) return 0;
    if (a->dy.format != QE_FORMAT_E4M3 && a->dy.format != QE_FORMAT_E5M2) return 0;
    if (a->w.format != QE_FORMAT_E4M3 || a->accumulation != QE_ACCUMULATE_SPLIT) return 0;
    return is_code(a->dy, false) && is_code(a->w, true) && a->gate_up != nullptr && is_aligned(a->gate_up) &&
           is_target(a);
}

qe_status qe_input_grad_swiglu_run(const qe_product_device *own, const qe_args_linear_input_grad *a,
                                   cudaStream_t stream) {
    return a->dy.format == QE_FORMAT_E5M2 ? format_run<QE_FORMAT_E5M2>(own, a, stream)
                                          : format_run<QE_FORMAT_E4M3>(own, a, stream);
}
