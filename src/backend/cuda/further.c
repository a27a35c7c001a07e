/* further.c - see further.h. An algorithm's words: who made it, the versions of CUTLASS and of what is ours, tile and
 * cluster, schedule; the rest are zeros. Formats and accumulation are the product's. */
#include "backend/cuda/further.h"

#include <stdio.h>
#include <string.h>

#include "backend/cuda/further_tables.h"
#include "backend/cuda/products.h"
#include "base/assert.h"

/* "QCUTLASS", "QPRODOWN"; cuBLASLt's first word holds a small number in its lower half. */
static const uint64_t TAGS[] = {[QE_FURTHER_CUTLASS] = 0x514355544C415353u, [QE_FURTHER_OWN] = 0x5150524F444F574Eu};
/* Raised when our part of a kernel changes what it computes, so that files of choices made before are refused. */
static const uint32_t REVISIONS[] = {[QE_FURTHER_CUTLASS] = 1, [QE_FURTHER_OWN] = 1};

static const qe_further_kernel *const TABLES[] = {
#ifdef QE_CUTLASS
    qe_cutlass_split, qe_cutlass_fast,
#endif
    qe_product_own, qe_weight_grad_own,
};
static const uint32_t *const TABLE_COUNTS[] = {
#ifdef QE_CUTLASS
    &qe_cutlass_split_count, &qe_cutlass_fast_count,
#endif
    &qe_product_own_count, &qe_weight_grad_own_count,
};
enum { TABLE_COUNT = sizeof TABLES / sizeof TABLES[0] };

static const qe_further_kernel *kernel_at(uint32_t index) {
    for (int i = 0; i < TABLE_COUNT; ++i) {
        if (index < *TABLE_COUNTS[i]) return &TABLES[i][index];
        index -= *TABLE_COUNTS[i];
    }
    return NULL;
}

static qe_algorithm algorithm_of(const qe_further_kernel *kernel) {
    return (qe_algorithm){{TAGS[kernel->maker], (uint64_t)REVISIONS[kernel->maker] << 32 | kernel->version,
                           (uint64_t)kernel->tile_m << 48 | (uint64_t)kernel->tile_n << 32 |
                               (uint64_t)kernel->tile_k << 16 | (uint64_t)kernel->cluster_m << 8 | kernel->cluster_n,
                           kernel->schedule}};
}

static int takes(const qe_further_kernel *kernel, const qe_product *product) {
    return kernel->first == product->first && kernel->second == product->second && product->first_along &&
           product->second_along && kernel->accumulation == product->accumulation &&
           kernel->result == qe_product_result(product) && kernel->takes(product);
}

static int is_same(const qe_algorithm *one, const qe_algorithm *other) {
    return memcmp(one->words, other->words, sizeof one->words) == 0;
}

/* NULL: none. */
static const qe_further_kernel *kernel_find(const qe_product *product, const qe_algorithm *algorithm,
                                            uint32_t *index_out) {
    const qe_further_kernel *kernel;
    for (uint32_t i = 0; (kernel = kernel_at(i)) != NULL; ++i) {
        const qe_algorithm here = algorithm_of(kernel);
        if (!is_same(&here, algorithm) || !takes(kernel, product)) continue;
        QE_ASSERT(i < QE_FURTHER_KERNELS_MAX);
        *index_out = i;
        return kernel;
    }
    return NULL;
}

uint32_t qe_further_candidates(const qe_product *product, qe_algorithm candidates_out[QE_FURTHER_CANDIDATES_MAX]) {
    const qe_further_kernel *kernel;
    uint32_t count = 0;
    for (uint32_t i = 0; (kernel = kernel_at(i)) != NULL; ++i) {
        if (!takes(kernel, product)) continue;
        QE_ASSERT(count < QE_FURTHER_CANDIDATES_MAX);
        candidates_out[count++] = algorithm_of(kernel);
    }
    return count;
}

int qe_further_owns(const qe_algorithm *algorithm) {
    return algorithm->words[0] == TAGS[QE_FURTHER_CUTLASS] || algorithm->words[0] == TAGS[QE_FURTHER_OWN];
}

static qe_status kernel_prepare(const qe_further_kernel *kernel, qe_further_device *device) {
    int id, multiprocessors;
    if (cudaGetDevice(&id) != cudaSuccess ||
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, id) != cudaSuccess)
        return QE_ERROR_DEVICE;
    qe_further_device asked = {.device = id, .multiprocessors = multiprocessors};
    QE_TRY(kernel->prepare(&asked));
    *device = asked;
    return QE_OK;
}

qe_status qe_further_prepare(qe_further *further, const qe_product *product, const qe_algorithm *algorithm,
                             qe_error *error_out) {
    static const char *const remedy = "choose anew with this build on this machine: leave the file of choices out";
    char name[QE_FURTHER_NAME_BYTES];
    uint32_t index;
    const qe_further_kernel *kernel = kernel_find(product, algorithm, &index);
    qe_further_name(algorithm, name);
    if (!kernel)
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, remedy, "this build has no kernel %s for this product",
                            name);
    if (further->devices[index].clusters) return QE_OK;
    const qe_status status = kernel_prepare(kernel, &further->devices[index]);
    if (status == QE_OK) return QE_OK;
    return qe_error_set(error_out, status, status == QE_ERROR_UNSUPPORTED ? remedy : NULL,
                        "kernel %s on this device: %s", name, qe_cuda_why(cudaGetLastError()));
}

qe_status qe_further_launch(const qe_further *further, const qe_product *product, const qe_product_data *data,
                            const qe_algorithm *algorithm, cudaStream_t stream) {
    uint32_t index;
    const qe_further_kernel *kernel = kernel_find(product, algorithm, &index);
    QE_ASSERT(kernel != NULL && further->devices[index].clusters > 0);
    return kernel->launch(&further->devices[index], product, data, stream);
}

void qe_further_name(const qe_algorithm *algorithm, char name[QE_FURTHER_NAME_BYTES]) {
    const uint64_t *words = algorithm->words;
    const unsigned version = (unsigned)(words[1] & 0xFFFF), shape[] = {
        (unsigned)(words[2] >> 48), (unsigned)(words[2] >> 32 & 0xFFFF), (unsigned)(words[2] >> 16 & 0xFFFF),
        (unsigned)(words[2] >> 8 & 0xFF), (unsigned)(words[2] & 0xFF)};
    char maker[32] = "ours";
    if (words[0] == TAGS[QE_FURTHER_CUTLASS])
        (void)snprintf(maker, sizeof maker, "cutlass %u.%u.%u", version / 100, version / 10 % 10, version % 10);
    (void)snprintf(name, QE_FURTHER_NAME_BYTES, "%s %ux%ux%u %ux%u %s", maker, shape[0], shape[1], shape[2], shape[3],
                   shape[4], words[3] == QE_FURTHER_PINGPONG ? "pingpong" : "cooperative");
}
