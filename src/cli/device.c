/* device.c - backends and transports by the name of a device. */
#include "cli/device.h"

#include <stdio.h>
#include <string.h>

#include "qeffect/check.h"
#include "qeffect/host.h"
#include "qeffect/local.h"
#ifdef QE_CUDA
#include "qeffect/cuda.h"
#endif
#ifdef QE_TE
#include "qeffect/te.h"
#endif

#ifdef QE_TE
enum { QE_DEVICES_BUILT = QE_DEVICE_CAN_HOST | QE_DEVICE_CAN_CHECK | QE_DEVICE_CAN_GPU };
#elif defined QE_CUDA
enum { QE_DEVICES_BUILT = QE_DEVICE_CAN_HOST | QE_DEVICE_CAN_CHECK | QE_DEVICE_CAN_CUDA };
#else
enum { QE_DEVICES_BUILT = QE_DEVICE_CAN_HOST | QE_DEVICE_CAN_CHECK };
#endif

/* By kind; and how to come by a program that has it. */
static const char *const names[] = {"host", "check", "cuda", "te"};
static const char *const ways_out[] = {
    NULL, NULL,
    "README.md, \"On a GPU\", says how to build one with it, build-cuda/qeffect: -DQE_CUDA=ON",
    "docs/te_backend.md and README.md, \"On a GPU\", say how to build one with it, build-cuda/qeffect: -DQE_TE=FOLDER, "
    "where Transformer Engine lies",
};

int qe_device_is_gpu(qe_device_kind kind) {
    return kind == QE_DEVICE_CUDA || kind == QE_DEVICE_TE;
}

static int refuse_unbuilt(const qe_cli *cli, size_t kind, const char *known) {
    qe_error error = {0};
    (void)qe_error_set(&error, QE_ERROR_ARGUMENT, ways_out[kind],
                       "--device is '%s', and this program was built without it; it has %s", names[kind], known);
    return qe_cli_error(cli, &error);
}

static int refuse(const qe_cli *cli, int can, const char *device) {
    char known[64] = "", guess[QE_CLI_GUESS_BYTES];
    const char *taken[sizeof names / sizeof *names];
    size_t count = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (can & QE_DEVICES_BUILT & 1 << i)
            snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", known[0] == 0 ? "" : ", ", names[i]);
    for (size_t i = QE_DEVICE_CUDA; i <= QE_DEVICE_TE; i++)
        if (strcmp(device, names[i]) == 0 && (can & 1 << i))
            return refuse_unbuilt(cli, i, known);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (can & 1 << i) taken[count++] = names[i]; /* one that was not built says how it can be */
    return qe_cli_usage(cli, "--device is '%s'; here it is one of: %s%s", device, known,
                        qe_cli_guess(device, taken, count, guess));
}

int qe_device_option(qe_cli *cli, int can, qe_device_kind *kind_out) {
    const char *device = qe_cli_value(cli, "device");
    *kind_out = QE_DEVICE_HOST;
    if (device == NULL) return QE_EXIT_OK;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if ((can & QE_DEVICES_BUILT & 1 << i) && strcmp(device, names[i]) == 0) {
            *kind_out = (qe_device_kind)i;
            return QE_EXIT_OK;
        }
    return refuse(cli, can, device);
}

void qe_device_unused_print(qe_device_kind kind, const qe_settings *settings) {
    static const char *const of_gpus[] = {"train.algorithms", "train.deterministic", "train.timeline",
                                          "train.nvtx",       "recipe.forward",      "recipe.input_grad",
                                          "recipe.weight_grad", "contracts.order"};
    if (qe_device_is_gpu(kind)) return;
    for (size_t i = 0; i < sizeof of_gpus / sizeof *of_gpus; i++)
        if (!qe_settings_is_default(settings, of_gpus[i]))
            fprintf(stderr, "%s is for a GPU (--device cuda); on this device it does nothing\n", of_gpus[i]);
}

const qe_backend *qe_device_backend(qe_device_kind kind) {
#ifdef QE_TE
    if (kind == QE_DEVICE_TE) return qe_te_backend();
#endif
#ifdef QE_CUDA
    if (kind == QE_DEVICE_CUDA) return qe_cuda_backend();
#endif
    return kind == QE_DEVICE_CHECK ? qe_check_backend() : qe_host_backend();
}

const qe_comm_ops *qe_device_comm(qe_device_kind kind) {
#ifdef QE_CUDA
    if (qe_device_is_gpu(kind)) return qe_cuda_comm();
#endif
    (void)kind;
    return qe_local_comm();
}

qe_status qe_device_world_create(qe_device_kind kind, uint32_t ranks, qe_world **world_out, qe_error *error_out) {
#ifdef QE_CUDA
    if (qe_device_is_gpu(kind)) return qe_cuda_world_create(ranks, world_out, error_out);
#endif
    (void)kind;
    return qe_local_world_create(ranks, world_out, error_out);
}

void qe_device_world_destroy(qe_device_kind kind, qe_world *world) {
#ifdef QE_CUDA
    if (qe_device_is_gpu(kind)) {
        qe_cuda_world_destroy(world);
        return;
    }
#endif
    (void)kind;
    qe_local_world_destroy(world);
}

void qe_device_join(qe_device_kind kind, qe_device *device, char *identity_out, size_t identity_bytes) {
    const qe_backend *backend = qe_device_backend(kind);
    qe_device *host = device;
    if (qe_device_is_gpu(kind)) {
        snprintf(identity_out, identity_bytes, "%s", backend->identity(device));
        return;
    }
    /* Where it cannot be wrapped, the first allocation fails and says why. */
    if (kind == QE_DEVICE_CHECK && qe_check_wrap(device, qe_host_backend(), &host, NULL) != QE_OK) return;
    qe_host_set_comm(host, qe_local_comm());
    snprintf(identity_out, identity_bytes, "%s", qe_host_backend()->identity(host));
}

qe_status qe_device_configure(qe_device_kind kind, qe_device *device, const char *algorithms, int honour,
                              const char *timeline, int nvtx, int watch, qe_error *error_out) {
#ifdef QE_CUDA
    if (qe_device_is_gpu(kind)) {
        qe_cuda_options options = {.nvtx = nvtx,
                                   .watch = watch,
                                   .honour = honour,
                                   .choices_path = algorithms[0] != 0 ? algorithms : NULL,
                                   .timeline_path = timeline[0] != 0 ? timeline : NULL};
        return qe_cuda_configure(device, &options, error_out);
    }
#endif
    (void)kind, (void)device, (void)algorithms, (void)honour, (void)timeline, (void)nvtx, (void)watch, (void)error_out;
    return QE_OK;
}

void qe_device_tune(qe_device_kind kind, qe_device *device) {
#ifdef QE_CUDA
    qe_error ignored; /* without files nothing can fail */
    if (qe_device_is_gpu(kind)) (void)qe_cuda_configure(device, &(qe_cuda_options){.tune = 1}, &ignored);
#endif
    (void)kind, (void)device;
}

int qe_device_clocks_of(qe_device_kind kind, qe_device *device, qe_device_clocks *clocks_out) {
#ifdef QE_CUDA
    qe_cuda_clocks now;
    if (qe_device_is_gpu(kind) && qe_cuda_clocks_of(device, &now)) {
        *clocks_out = (qe_device_clocks){now.sm_mhz, now.memory_mhz, now.power_w, now.temperature_c};
        return 1;
    }
#endif
    (void)kind, (void)device, (void)clocks_out;
    return 0;
}

qe_device_use qe_device_use_of(qe_device_kind kind, qe_device *device) {
#ifdef QE_CUDA
    if (qe_device_is_gpu(kind)) {
        qe_cuda_memory memory = qe_cuda_memory_of(device);
        return (qe_device_use){memory.total_bytes - memory.free_bytes, memory.code_bytes, memory.attention_bytes};
    }
#endif
    (void)kind, (void)device;
    return (qe_device_use){0, 0, 0};
}
