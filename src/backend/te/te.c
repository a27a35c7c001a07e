/* te.c - the table: the cuda backend's, but for the ops that Transformer Engine runs. */
#include "qeffect/te.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/cuda/lt.h"
#include "backend/cuda/substitute.h"
#include "backend/te/attention.h"
#include "base/assert.h"
#include "qeffect/cuda.h"

QE_STATIC_ASSERT(QE_TE_WORKSPACE_BYTES + QE_TE_WORKSPACE_ALIGN_BYTES <= QE_LT_WORKSPACE_BYTES, "one serves both");

static const char LIBRARY[] = "Transformer Engine " QE_TE_VERSION;

/* The package's own record of its version: another version may have other structs, and has other bits. */
static int has_version(const char *folder) {
    char path[QE_ERROR_TEXT_BYTES];
    const int length = snprintf(path, sizeof path, "%s/transformer_engine_cu13-%s.dist-info", folder, QE_TE_VERSION);
    return length > 0 && (size_t)length < sizeof path && access(path, F_OK) == 0;
}

static int find_library(const char *folder, char *path, size_t path_bytes) {
    static const char *const places[] = {"wheel_lib/", "", "lib/"};
    for (size_t i = 0; i < sizeof places / sizeof *places; ++i) {
        const int length =
            snprintf(path, path_bytes, "%s/transformer_engine/%slibtransformer_engine.so", folder, places[i]);
        if (length > 0 && (size_t)length < path_bytes && access(path, F_OK) == 0) return 1;
    }
    return 0;
}

static qe_status library_open(qe_te_library **library_out, qe_error *error_out) {
    char path[QE_ERROR_TEXT_BYTES];
    const char *folder = getenv("QE_TE");
    if (folder == NULL || folder[0] == 0) folder = QE_TE_FOLDER;
    if (!has_version(folder) || !find_library(folder, path, sizeof path))
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED,
                            "name the folder where it is installed or unpacked in the environment variable QE_TE, or "
                            "use --device cuda",
                            "%.300s holds no transformer_engine_cu13 %s, which this program was built with", folder,
                            QE_TE_VERSION);
    return qe_te_library_open(path, library_out, error_out);
}

static void context_destroy(void *context) {
    qe_te_context *te = context;
    if (te == NULL) return;
    qe_te_attention_free(te);
    if (te->workspace != NULL) qe_cuda_memories.release(te->device, te->workspace);
    if (te->scratch != NULL) qe_cuda_memories.release(te->device, te->scratch);
    qe_te_library_close(te->library);
    free(te);
}

static qe_status scratch_take(qe_te_context *te, qe_error *error_out) {
    void *scratch = NULL;
    QE_TRY(qe_cuda_memories.alloc(te->device, 2 * sizeof *te->scratch, &scratch, error_out));
    te->scratch = scratch;
    return QE_OK;
}

static qe_status context_create(qe_device *device, qe_te_context **context_out, qe_error *error_out) {
    qe_te_context *te = calloc(1, sizeof *te);
    if (te == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a device");
    te->device = device;
    qe_status status = library_open(&te->library, error_out);
    if (status == QE_OK) status = scratch_take(te, error_out);
    if (status != QE_OK) {
        context_destroy(te);
        return status;
    }
    *context_out = te;
    return QE_OK;
}

static qe_status te_open(qe_device **device_out, qe_error *error_out) {
    qe_device *device = NULL;
    qe_te_context *te = NULL;
    QE_TRY(qe_cuda_backend()->open(&device, error_out));
    const qe_status status = context_create(device, &te, error_out);
    if (status != QE_OK) {
        qe_cuda_backend()->close(device);
        return status;
    }
    const qe_cuda_substitute substitute = {.context = te, .backend = "te", .library = LIBRARY,
                                           .takes = qe_te_takes, .prepare = qe_te_prepare, .record = qe_te_record,
                                           .queue = qe_te_queue,
                                           .destroy = context_destroy};
    qe_cuda_substitute_set(device, &substitute);
    *device_out = device;
    return QE_OK;
}

static void te_close(qe_device *device) { qe_cuda_backend()->close(device); }

static const char *te_identity(const qe_device *device) { return qe_cuda_backend()->identity(device); }

static qe_status te_run(qe_device *device, const qe_op *op, qe_error *error_out) {
    return qe_cuda_backend()->run(device, op, error_out);
}

static qe_status te_prepare(qe_device *device, const qe_op *op, qe_error *error_out) {
    return qe_cuda_backend()->prepare(device, op, error_out);
}

static int te_breach(qe_device *device, qe_breach *breach_out) {
    return qe_cuda_backend()->breach(device, breach_out);
}

static qe_status te_declare(qe_device *device, const qe_op *op, const qe_range *ranges, size_t count,
                            qe_error *error_out) {
    return qe_cuda_backend()->declare(device, op, ranges, count, error_out);
}

const qe_backend *qe_te_backend(void) {
    static const qe_backend backend = {
        .size = sizeof(qe_backend),
        .name = "te",
        .numerics = {.activation = QE_FORMAT_BF16, .operands = QE_OPERANDS_CODES, .sums_apart = 1,
                     .workspace_bytes = QE_LT_WORKSPACE_BYTES}, /* cuda's, whose products take the more */
        .open = te_open,
        .close = te_close,
        .identity = te_identity,
        .memory = &qe_cuda_memories,
        .stream = &qe_cuda_streams,
        .graph = &qe_cuda_graphs,
        .run = te_run,
        .prepare = te_prepare,
        .breach = te_breach,
        .declare = te_declare,
    };
    return &backend;
}
