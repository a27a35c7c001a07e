/* device.h - which backend a command runs on: the only place that names one. */
#ifndef QE_CLI_DEVICE_H
#define QE_CLI_DEVICE_H

#include "cli/cli.h"
#include "qeffect/backend.h"
#include "qeffect/comm.h"
#include "qeffect/settings.h"

typedef enum qe_device_kind {
    QE_DEVICE_HOST,
    QE_DEVICE_CHECK, /* the host, looked at */
    QE_DEVICE_CUDA,
    QE_DEVICE_TE /* cuda, with kernels of Transformer Engine */
} qe_device_kind;

enum { /* a bit per kind */
    QE_DEVICE_CAN_HOST = 1 << QE_DEVICE_HOST,
    QE_DEVICE_CAN_CHECK = 1 << QE_DEVICE_CHECK,
    QE_DEVICE_CAN_CUDA = 1 << QE_DEVICE_CUDA,
    QE_DEVICE_CAN_TE = 1 << QE_DEVICE_TE,
    QE_DEVICE_CAN_GPU = QE_DEVICE_CAN_CUDA | QE_DEVICE_CAN_TE
};

int qe_device_is_gpu(qe_device_kind kind);

/* --device, of those that the command can use (QE_DEVICE_CAN_...). Returns an exit status. */
int qe_device_option(qe_cli *cli, int can, qe_device_kind *kind_out);

/* Says which settings this device has no use for: they are no mistake where a file serves a GPU as well. */
void qe_device_unused_print(qe_device_kind kind, const qe_settings *settings);

const qe_backend *qe_device_backend(qe_device_kind kind);
const qe_comm_ops *qe_device_comm(qe_device_kind kind);
/* Ranks of one process on that device. Owns: the caller, until qe_device_world_destroy. */
qe_status qe_device_world_create(qe_device_kind kind, uint32_t ranks, qe_world **world_out, qe_error *error_out);
void qe_device_world_destroy(qe_device_kind kind, qe_world *world);
/* Joins an opened device to what it needs before its streams; says what it is, whatever wraps it. */
void qe_device_join(qe_device_kind kind, qe_device *device, char *identity_out, size_t identity_bytes);

/* algorithms: "" or a file, which `honour` says must be there and complete; timeline: "" or a file. On a
 * device without such choices it does nothing. */
qe_status qe_device_configure(qe_device_kind kind, qe_device *device, const char *algorithms, int honour,
                              const char *timeline, int nvtx, int watch, qe_error *error_out);
/* What the device runs at now. 0: nobody knows. */
typedef struct qe_device_clocks {
    double sm_mhz, memory_mhz, power_w, temperature_c;
} qe_device_clocks;
int qe_device_clocks_of(qe_device_kind kind, qe_device *device, qe_device_clocks *clocks_out);
/* Bytes of the device's memory that are in use, by anybody; of them code of kernels that this device's ops use, and
 * attention's workspace. 0 where the device is the host. */
typedef struct qe_device_use {
    uint64_t used_bytes, code_bytes, attention_bytes;
} qe_device_use;
qe_device_use qe_device_use_of(qe_device_kind kind, qe_device *device);
/* Every shape from now on is tuned by timing. */
void qe_device_tune(qe_device_kind kind, qe_device *device);

#endif
