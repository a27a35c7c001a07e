/* blas.c - loads OpenBLAS. The core name must stand in the environment before the library's constructor runs: OpenBLAS
 * 0.3.21 does not know processors newer than itself and takes SSE3 kernels for them (5 times slower). One thread per
 * call: another split gives other bits, and streams are threads already. */
#include "backend/host/blas.h"

#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/assert.h"

static const char library_name[] = "libopenblas.so.0";

typedef struct blas_load {
    host_blas blas;
    qe_status status;
    qe_error error;
} blas_load;

static pthread_once_t load_once = PTHREAD_ONCE_INIT;
static atomic_uint callers; /* devices that are open: as many products may run at once */
static blas_load loaded; /* a library is loaded once per process, whoever asks; written under load_once alone */

/* The core whose kernels this processor surely runs; NULL: OpenBLAS's own choice. */
static const char *core_choose(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd"))
        return "SkylakeX";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "Haswell";
#endif
    return NULL;
}

/* Opens the library with the chosen core, and leaves the environment as it was. Where there is no memory for a word of
 * the environment the library is not opened: with a core of its own choice it would compute other bits, silently. */
static qe_status library_open(void **library_out, qe_error *error_out) {
    const char *core = getenv("OPENBLAS_CORETYPE") ? NULL : core_choose();
    const int set_threads = !getenv("OPENBLAS_NUM_THREADS");
    const int is_core_set = core == NULL || setenv("OPENBLAS_CORETYPE", core, 1) == 0;
    /* One thread: no pool of them is started. */
    const int is_set = is_core_set && (!set_threads || setenv("OPENBLAS_NUM_THREADS", "1", 1) == 0);
    void *library = is_set ? dlopen(library_name, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (core) unsetenv("OPENBLAS_CORETYPE");
    if (set_threads) unsetenv("OPENBLAS_NUM_THREADS");
    if (!is_set)
        return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to tell OpenBLAS which core it runs on");
    if (library == NULL)
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, "install it: apt-get install libopenblas0",
                            "OpenBLAS cannot be loaded: %s", dlerror());
    *library_out = library;
    return QE_OK;
}

/* A function pointer from dlsym; C has no cast for it. */
static void symbol_find(void *library, const char *name, void *function_out) {
    void *symbol = dlsym(library, name);
    memcpy(function_out, &symbol, sizeof symbol);
}

/* "OpenBLAS 0.3.21 NO_LAPACKE ..." and "SkylakeX" -> "openblas 0.3.21 SkylakeX" */
static void name_compose(host_blas *blas, const char *config, const char *core) {
    char version[16] = "unknown";
    if (sscanf(config, "OpenBLAS %15s", version) != 1) snprintf(version, sizeof version, "unknown");
    snprintf(blas->name, sizeof blas->name, "openblas %s %.31s", version, core);
}

enum { CHECK_SIDE = 37 }; /* odd and above every register tile of 16, so that edges are checked too */

static float check_value(uint32_t index) {
    return (float)((index * 2654435761u >> 20) % 31u) - 15.0f; /* small integers: every product and sum is exact */
}

/* One product of m x n x k against a double loop. */
static int product_is_right(host_sgemm *sgemm, int transpose_a, int transpose_b, int m, int n, int k, float beta) {
    float a[CHECK_SIDE * CHECK_SIDE], b[CHECK_SIDE * CHECK_SIDE], c[CHECK_SIDE * CHECK_SIDE];
    for (uint32_t i = 0; i < CHECK_SIDE * CHECK_SIDE; ++i) {
        a[i] = check_value(i);
        b[i] = check_value(i + 5000);
        c[i] = 3.0f;
    }
    sgemm(HOST_ROW_MAJOR, transpose_a, transpose_b, m, n, k, 1.0f, a, CHECK_SIDE, b, CHECK_SIDE, beta, c, CHECK_SIDE);
    for (int row = 0; row < m; ++row)
        for (int column = 0; column < n; ++column) {
            double expected = 3.0 * (double)beta;
            for (int i = 0; i < k; ++i) {
                const int at_a = transpose_a == HOST_TRANSPOSE ? i * CHECK_SIDE + row : row * CHECK_SIDE + i;
                const int at_b = transpose_b == HOST_TRANSPOSE ? column * CHECK_SIDE + i : i * CHECK_SIDE + column;
                expected += (double)a[at_a] * (double)b[at_b];
            }
            if ((double)c[row * CHECK_SIDE + column] != expected) return 0;
        }
    return 1;
}

static int products_are_right(host_sgemm *sgemm) {
    static const int shapes[][3] = {{1, 1, 1}, {16, 16, 16}, {5, 33, 9}, {37, 37, 37}, {32, 4, 37}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; ++i)
        for (int mode = 0; mode < 6; ++mode) {
            const int transpose_a = mode / 2 == 1 ? HOST_TRANSPOSE : HOST_NO_TRANSPOSE;
            const int transpose_b = mode / 2 == 2 ? HOST_TRANSPOSE : HOST_NO_TRANSPOSE;
            if (!product_is_right(sgemm, transpose_a, transpose_b, shapes[i][0], shapes[i][1], shapes[i][2],
                                  (float)(mode % 2)))
                return 0;
        }
    return 1;
}

/* OpenBLAS takes a region of 128 MiB for every product that runs at the same time as others, and tries for ever where
 * the system refuses it (a limit on memory: ulimit -v). So the room is asked for here first. MAP_NORESERVE: what counts
 * is the limit; the pages themselves are hardly touched. */
static qe_status regions_probe(size_t count, qe_error *error_out) {
    const size_t bytes = count * (((size_t)128 << 20) + ((size_t)1 << 20)); /* the region and what surrounds it */
    if (count == 0) return QE_OK;
    void *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED)
        return qe_error_set(error_out, QE_ERROR_MEMORY, "raise the limit (ulimit -v) or use fewer ranks",
                            "OpenBLAS needs %zu MiB of address space for its work, and the system refuses them",
                            bytes >> 20);
    munmap(address, bytes);
    return QE_OK;
}

static qe_status library_load(blas_load *load) {
    QE_TRY(regions_probe(1, &load->error));
    void *library = NULL;
    QE_TRY(library_open(&library, &load->error));
    char *(*get_config)(void), *(*get_corename)(void);
    void (*set_threads)(int);
    symbol_find(library, "cblas_sgemm", &load->blas.sgemm);
    symbol_find(library, "openblas_get_config", &get_config);
    symbol_find(library, "openblas_get_corename", &get_corename);
    symbol_find(library, "openblas_set_num_threads", &set_threads);
    if (!load->blas.sgemm || !get_config || !get_corename || !set_threads)
        return qe_error_set(&load->error, QE_ERROR_UNSUPPORTED, "install Debian's: apt-get install libopenblas0",
                            "%s lacks one of cblas_sgemm, openblas_get_config, openblas_get_corename, "
                            "openblas_set_num_threads",
                            library_name);
    set_threads(1);
    name_compose(&load->blas, get_config(), get_corename());
    QE_TRY(regions_probe(1, &load->error)); /* again: the library itself took some of it */
    if (!products_are_right(load->blas.sgemm))
        return qe_error_set(&load->error, QE_ERROR_UNSUPPORTED,
                            "set OPENBLAS_CORETYPE to another core (Haswell, Nehalem, Prescott) and start again",
                            "%s computes wrong matrix products on this processor", load->blas.name);
    return QE_OK;
}

static void load_run(void) { loaded.status = library_load(&loaded); }

qe_status qe_host_blas_join(const host_blas **blas_out, qe_error *error_out) {
    pthread_once(&load_once, load_run);
    if (loaded.status != QE_OK) {
        if (error_out) *error_out = loaded.error;
        return loaded.status;
    }
    /* The check of products above made the library take the first region. */
    const qe_status status = regions_probe(atomic_fetch_add(&callers, 1), error_out);
    if (status == QE_OK) *blas_out = &loaded.blas;
    else qe_host_blas_leave();
    return status;
}

void qe_host_blas_leave(void) { atomic_fetch_sub(&callers, 1); }
