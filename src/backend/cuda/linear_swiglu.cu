/* linear_swiglu.cu - see linear_swiglu.h and README.md. */
#include "backend/cuda/linear_swiglu.h"

#include "backend/cuda/linear_swiglu.cuh"
#include "backend/cuda/product_launch.cuh"
#include "backend/cuda/sink.cuh"

namespace {

using namespace linear_swiglu;

/* Tiles of a cluster that are gone through from top to bottom before the next column. Of all multiprocessors' tiles,
 * x and the weights then take about the same room in the second cache. */
constexpr uint32_t BAND = 8;

/* What codes both ways need at least to lie as the copy engine wants them; sixteen columns are outside of a result
 * together. */
constexpr uint32_t ROW_MULTIPLE = 16, COLUMN_MULTIPLE = 16;

/* Rows of `columns` elements, in boxes. `halves`: 2 where a row is two halves side by side, which boxes keep apart. */
struct matrix {
    const void *at;
    uint32_t element_bytes, rows, columns, halves;
};

bool map_make(const qe_product_device *own, const matrix &of, uint32_t box_columns, uint32_t box_rows,
              CUtensorMapSwizzle swizzle, CUtensorMap *map_out) {
    const bool is_double = of.halves == 2;
    const cuuint64_t bytes = static_cast<cuuint64_t>(of.columns) * of.element_bytes;
    const tensor_axes axes = {is_double ? 3u : 2u,
                              {of.columns, is_double ? 2 : of.rows, of.rows},
                              {bytes, 2 * bytes},
                              {box_columns, is_double ? 1 : box_rows, box_rows}};
    return tensor_map_encode(
        own->encode, of.at, of.element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8,
        axes, swizzle, map_out);
}

bool operands_map(const qe_product_device *own, const qe_args_linear *a, job *j) {
    const matrix x = {a->x.codes, 1, a->rows, a->in, 1}, w = {a->w.codes, 1, a->out, a->in, 1};
    return map_make(own, x, TERMS, ROWS, CU_TENSOR_MAP_SWIZZLE_128B, &j->x) &&
           map_make(own, w, TERMS, COLUMNS, CU_TENSOR_MAP_SWIZZLE_128B, &j->w);
}

bool results_map(const qe_product_device *own, const qe_args_linear *a, const code_planes &planes, job *j) {
    const matrix y = {a->y, 2, a->rows, a->out / 2, 2};
    const matrix codes = {planes.by_rows, 1, a->rows, a->out / 2, 1};
    const matrix turned = {planes.by_columns, 1, a->out / 2, a->rows, 1};
    j->has_codes = planes.by_rows != nullptr, j->has_turned = planes.by_columns != nullptr;
    return map_make(own, y, WIDE, HALF_ROWS, CU_TENSOR_MAP_SWIZZLE_128B, &j->wide) &&
           map_make(own, y, NARROW, HALF_ROWS, CU_TENSOR_MAP_SWIZZLE_32B, &j->narrow) &&
           (!j->has_codes || map_make(own, codes, COLUMNS, HALF_ROWS, CU_TENSOR_MAP_SWIZZLE_NONE, &j->codes)) &&
           (!j->has_turned || map_make(own, turned, HALF_ROWS, COLUMNS, CU_TENSOR_MAP_SWIZZLE_64B, &j->turned));
}

bool job_make(const qe_product_device *own, const qe_args_linear *a, job *job_out) {
    code_planes planes = {};
    job j = {};
    if (!planes_of(places_of(&a->target, a->rows, a->out / 2), &planes)) return false;
    if (!operands_map(own, a, &j) || !results_map(own, a, planes, &j)) return false;
    j.x_scale = a->x.scale_inv, j.w_scale = a->w.scale_inv;
    j.scale = scaling_of(&a->target);
    j.words = words_of(&a->target, tensor_words());
    j.columns = a->out / 2;
    j.tiles = {pieces_of(a->rows, CLUSTER * ROWS), pieces_of(j.columns, COLUMNS), BAND}, j.steps = a->in / TERMS;
    *job_out = j;
    return true;
}

/* What is written while x and the weights are still read lies elsewhere. */
bool lies_apart(const qe_args_linear *a, const qe_qtensor &written) {
    const uint64_t rows = a->rows, in = a->in, out = a->out, bytes = rows * (out / 2);
    if (written.codes == nullptr) return true;
    return is_apart(written.codes, bytes, a->x.codes, rows * in) &&
           is_apart(written.codes, bytes, a->w.codes, out * in) &&
           is_apart(written.codes, bytes, a->y, rows * out * 2) &&
           written.scale_inv != a->x.scale_inv && written.scale_inv != a->w.scale_inv;
}

bool is_target(const qe_args_linear *a) {
    const qe_quantize_target &target = a->target;
    code_planes planes;
    return target.recipe == QE_RECIPE_DELAYED && target.format == QE_FORMAT_E4M3 && target.scale != nullptr &&
           planes_of(places_of(&target, a->rows, a->out / 2), &planes) && lies_apart(a, target.operand) &&
           lies_apart(a, target.retained);
}

} // namespace

qe_status qe_linear_swiglu_open(qe_product_device *own_out) {
    return kernel_open(kernel, THREADS, SHARED_BYTES, own_out);
}

int qe_linear_swiglu_fits(const qe_args_linear *a) {
    if (a->rows == 0 || a->in == 0 || a->out == 0) return 0;
    if (a->rows % ROW_MULTIPLE || a->in % TERMS || a->out % (2 * COLUMN_MULTIPLE)) return 0;
    if (a->out > COORDINATE_MAX || !is_in_reach(a->rows, a->out / 2, a->in, COLUMNS)) return 0;
    if (a->x.format != QE_FORMAT_E4M3 || a->w.format != QE_FORMAT_E4M3) return 0;
    if (a->accumulation != QE_ACCUMULATE_FAST || a->residual != nullptr) return 0;
    return is_code(a->x, false) && is_code(a->w, false) && is_aligned(a->y) && is_target(a);
}

qe_status qe_linear_swiglu_run(const qe_product_device *own, const qe_args_linear *a, cudaStream_t stream) {
    job j;
    if (!job_make(own, a, &j)) return QE_ERROR_DEVICE;
    return tiles_launch(kernel, j, THREADS, SHARED_BYTES, own->clusters, stream);
}
