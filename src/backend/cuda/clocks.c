/* clocks.c - clocks, power and temperature, out of NVIDIA's management library, which the driver brings. It is opened
 * where it is first asked for; its header is no part of every toolkit, so what is used of it is declared here. */
#include <dlfcn.h>
#include <stdlib.h>

#include "backend/cuda/device.h"

typedef struct nvml_device nvml_device;
typedef int nvml_call(void);
typedef int nvml_find(const char *, nvml_device **);
typedef int nvml_kind(nvml_device *, int, unsigned *);
typedef int nvml_ask(nvml_device *, unsigned *);

/* nvml.h: nvmlClockType_t, nvmlTemperatureSensors_t */
enum { CLOCK_SM = 1, CLOCK_MEMORY = 2, SENSOR_GPU = 0, BUS_ID_BYTES = 32 };

struct cuda_clocks {
    void *library; /* NULL: there is none */
    nvml_device *device;
    nvml_kind *clock, *temperature;
    nvml_ask *power;
    nvml_call *close;
};

/* A function out of a library is an object pointer to dlsym alone. */
#define FIND(clocks, name, type) (type *)(uintptr_t)dlsym((clocks)->library, name)

static int clocks_bind(struct cuda_clocks *clocks, int ordinal) {
    char bus[BUS_ID_BYTES];
    nvml_call *open = FIND(clocks, "nvmlInit_v2", nvml_call);
    nvml_find *find = FIND(clocks, "nvmlDeviceGetHandleByPciBusId_v2", nvml_find);
    clocks->clock = FIND(clocks, "nvmlDeviceGetClockInfo", nvml_kind);
    clocks->temperature = FIND(clocks, "nvmlDeviceGetTemperature", nvml_kind);
    clocks->power = FIND(clocks, "nvmlDeviceGetPowerUsage", nvml_ask);
    nvml_call *close = FIND(clocks, "nvmlShutdown", nvml_call);
    if (!open || !find || !close || !clocks->clock || !clocks->temperature || !clocks->power) return 0;
    if (open() != 0) return 0;
    clocks->close = close;
    return cudaDeviceGetPCIBusId(bus, sizeof bus, ordinal) == cudaSuccess && find(bus, &clocks->device) == 0;
}

static void library_close(struct cuda_clocks *clocks) {
    if (clocks->close) (void)clocks->close();
    if (clocks->library) (void)dlclose(clocks->library);
    clocks->library = NULL;
    clocks->close = NULL;
}

static struct cuda_clocks *clocks_open(int ordinal) {
    struct cuda_clocks *clocks = calloc(1, sizeof *clocks);
    if (clocks == NULL) return NULL;
    clocks->library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (clocks->library != NULL && !clocks_bind(clocks, ordinal)) library_close(clocks);
    return clocks;
}

void qe_cuda_clocks_close(struct cuda_clocks *clocks) {
    if (clocks == NULL) return;
    library_close(clocks);
    free(clocks);
}

int qe_cuda_clocks_of(qe_device *device, qe_cuda_clocks *clocks_out) {
    unsigned sm, memory, milliwatts, celsius;
    if (device->clocks == NULL) device->clocks = clocks_open(device->ordinal);
    const struct cuda_clocks *clocks = device->clocks;
    if (clocks == NULL || clocks->library == NULL) return 0;
    if (clocks->clock(clocks->device, CLOCK_SM, &sm) != 0 || clocks->clock(clocks->device, CLOCK_MEMORY, &memory) != 0)
        return 0;
    if (clocks->power(clocks->device, &milliwatts) != 0) return 0;
    if (clocks->temperature(clocks->device, SENSOR_GPU, &celsius) != 0) return 0;
    *clocks_out = (qe_cuda_clocks){.sm_mhz = sm, .memory_mhz = memory, .power_w = milliwatts / 1e3,
                                   .temperature_c = celsius};
    return 1;
}
