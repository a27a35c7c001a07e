/* product_own.cu - see product_own.cuh; entries of the table of further.h. */
#include "backend/cuda/product_own.cuh"

#include "backend/cuda/product_launch.cuh"

namespace {

using namespace product_own;

/* Tiles of a cluster that are gone through from top to bottom before the next column: 2,048 rows. */
constexpr uint32_t BAND = 8;

bool job_make(void *encode, const qe_product *product, const qe_product_data *data, job *job_out) {
    const uint32_t m = product->m, n = product->n, k = product->k;
    job j = {};
    if (!map_make(encode, data->first, 1, m, k, ROWS, &j.first) ||
        !map_make(encode, data->second, 1, n, k, COLUMNS / CLUSTER, &j.second) ||
        !map_make(encode, data->result, 2, m, n, GROUP_ROWS, &j.result))
        return false;
    j.first_scale = data->first_scale, j.second_scale = data->second_scale;
    j.steps = pieces_of(k, TERMS);
    j.tiles = {pieces_of(m, CLUSTER * ROWS), pieces_of(n, COLUMNS), BAND};
    *job_out = j;
    return true;
}

/* Formats, accumulation and how operands lie are compared elsewhere. */
int takes(const qe_product *product) {
    return is_in_reach(product->m, product->n, product->k, COLUMNS) && !product->adds;
}

template <int FORMAT>
qe_status prepare(qe_further_device *device) {
    return kernel_prepare(kernel<FORMAT>, THREADS, SHARED_BYTES, device);
}

template <int FORMAT>
qe_status run(const qe_further_device *device, const qe_product *product, const qe_product_data *data,
              cudaStream_t stream) {
    job j;
    if (!job_make(device->encode, product, data, &j)) return QE_ERROR_DEVICE;
    return tiles_launch(kernel<FORMAT>, j, THREADS, SHARED_BYTES, static_cast<uint32_t>(device->clusters), stream);
}

template <int FORMAT>
constexpr qe_further_kernel entry_of() {
    return {FORMAT, QE_FORMAT_E4M3, QE_FORMAT_BF16, QE_FURTHER_OWN, QE_ACCUMULATE_SPLIT, QE_FURTHER_COOPERATIVE,
            CLUSTER, 1, ROWS, COLUMNS, TERMS, 0, takes, prepare<FORMAT>, run<FORMAT>};
}

} // namespace

extern "C" {
const qe_further_kernel qe_product_own[] = {
    entry_of<QE_FORMAT_E5M2>(),
    entry_of<QE_FORMAT_E4M3>(),
};
const uint32_t qe_product_own_count = sizeof qe_product_own / sizeof qe_product_own[0];
}
