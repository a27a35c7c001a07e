/* product_own.cu - see product_own.cuh; entries of the table of further.h. */
#include "backend/cuda/product_own.cuh"

#include "backend/cuda/further_tables.h"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/tensor_map.cuh"

namespace {

using namespace product_own;

/* Tiles of a cluster that are gone through from top to bottom before the next column: 2,048 rows. */
constexpr uint32_t BAND = 8;

/* [rows, columns] of elements of 1 or 2 bytes in boxes 128 bytes wide. */
bool map_make(void *encode, const void *at, uint32_t element_bytes, uint32_t rows, uint32_t columns, uint32_t box_rows,
              CUtensorMap *map_out) {
    const tensor_axes axes = {2,
                              {columns, rows},
                              {static_cast<cuuint64_t>(columns) * element_bytes},
                              {128 / element_bytes, box_rows}};
    return tensor_map_encode(encode, at,
                             element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8,
                             axes, CU_TENSOR_MAP_SWIZZLE_128B, map_out);
}

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
    constexpr uint64_t TILES_MAX = 1u << 30;         /* counted in 32 bits, with room for a stride */
    constexpr uint32_t COORDINATE_MAX = 0x7FFFFFFFu; /* the copy engine's have a sign */
    const uint64_t tiles = static_cast<uint64_t>(pieces_of(product->m, ROWS)) * pieces_of(product->n, COLUMNS);
    return product->m <= COORDINATE_MAX && product->n <= COORDINATE_MAX && product->k <= COORDINATE_MAX &&
           tiles <= TILES_MAX && !product->adds;
}

template <int FORMAT>
qe_status prepare(qe_further_device *device) {
    device->encode = tensor_map_encoder_find();
    if (device->encode != nullptr)
        device->clusters = static_cast<int>(clusters_at_work(kernel<FORMAT>, THREADS, CLUSTER, SHARED_BYTES));
    return device->clusters > 0 ? QE_OK : QE_ERROR_UNSUPPORTED;
}

template <int FORMAT>
qe_status run(const qe_further_device *device, const qe_product *product, const qe_product_data *data,
              cudaStream_t stream) {
    job j;
    if (!job_make(device->encode, product, data, &j)) return QE_ERROR_DEVICE;
    const uint32_t tiles = j.tiles.down * j.tiles.across, most = static_cast<uint32_t>(device->clusters);
    return launch(kernel<FORMAT>, dim3((tiles < most ? tiles : most) * CLUSTER), THREADS, CLUSTER, SHARED_BYTES, stream,
                  j);
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
