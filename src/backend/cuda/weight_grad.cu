/* weight_grad.cu - see weight_grad.cuh; entries of the table of further.h. */
#include "backend/cuda/weight_grad.cuh"

#include "backend/cuda/product_launch.cuh"

namespace {

using namespace weight_grad;

/* Tiles side by side that are gone through before what lies below: blocks at work have some 1,024 rows of 2,048 sums
 * before them, and codes of 2,048 columns are all that has to stay in the second cache. */
constexpr uint32_t BAND = 16;

/* The sums, in boxes of AHEAD_ROWS whole rows of a tile. */
bool ahead_make(void *encode, const void *at, uint32_t rows, uint32_t columns, CUtensorMap *map_out) {
    const tensor_axes axes = {2, {columns, rows}, {columns * sizeof(float)}, {COLUMNS, AHEAD_ROWS}};
    return tensor_map_encode(encode, at, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, axes, CU_TENSOR_MAP_SWIZZLE_NONE, map_out);
}

bool maps_make(void *encode, const qe_product *product, const qe_product_data *data, job *j) {
    const uint32_t m = product->m, n = product->n, k = product->k;
    return map_make(encode, data->first, 1, m, k, ROWS, &j->first) &&
           map_make(encode, data->second, 1, n, k, COLUMNS / CLUSTER, &j->second) &&
           map_make(encode, data->result, sizeof(float), m, n, GROUP_ROWS, &j->sums) &&
           ahead_make(encode, data->result, m, n, &j->ahead);
}

/* Formats, accumulation and how operands lie are compared elsewhere. */
int takes(const qe_product *product) {
    return product->kind == QE_OP_LINEAR_WEIGHT_GRAD && is_in_reach(product->m, product->n, product->k, COLUMNS);
}

template <int FORMAT>
qe_status prepare(qe_further_device *device) {
    return kernel_prepare(kernel<FORMAT>, THREADS, SHARED_BYTES, device);
}

/* What is added lies where the result goes. */
template <int FORMAT>
qe_status run(const qe_further_device *device, const qe_product *product, const qe_product_data *data,
              cudaStream_t stream) {
    job j = {};
    j.adds = data->beta != 0.0f;
    if (j.adds && (data->added != data->result || data->beta != 1.0f)) return QE_ERROR_ARGUMENT;
    if (!maps_make(device->encode, product, data, &j)) return QE_ERROR_DEVICE;
    j.first_scale = data->first_scale, j.second_scale = data->second_scale;
    j.steps = pieces_of(product->k, TERMS);
    j.rows = product->m, j.columns = product->n;
    j.tiles = {pieces_of(product->n, COLUMNS), pieces_of(product->m, CLUSTER * ROWS), BAND};
    return tiles_launch(kernel<FORMAT>, j, THREADS, SHARED_BYTES, static_cast<uint32_t>(device->clusters), stream);
}

template <int FORMAT>
constexpr qe_further_kernel entry_of() {
    return {FORMAT, QE_FORMAT_E4M3, QE_FORMAT_FP32, QE_FURTHER_OWN, QE_ACCUMULATE_SPLIT, QE_FURTHER_COOPERATIVE,
            CLUSTER, 1, ROWS, COLUMNS, TERMS, 0, takes, prepare<FORMAT>, run<FORMAT>};
}

} // namespace

extern "C" {
const qe_further_kernel qe_weight_grad_own[] = {entry_of<QE_FORMAT_E5M2>(), entry_of<QE_FORMAT_E4M3>()};
const uint32_t qe_weight_grad_own_count = sizeof qe_weight_grad_own / sizeof qe_weight_grad_own[0];
}
